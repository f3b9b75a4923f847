"""A feature that the core has never heard of, with a record kind and a table of its own.

It is published, recovered, checked, repaired, shown in metrics and asked as time passes by its part
alone."""

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.registry import CollectorRegistry

from delayserver.api.exit import Exit
from delayserver.api.hot.answers import JSON, Answer
from delayserver.api.hot.consume import OwnGrants
from delayserver.api.hot.paths import HEARTBEATS_PATH
from delayserver.api.hot.publish import Hot
from delayserver.api.intake import Intake
from delayserver.config import Settings
from delayserver.parts.part import Core, Feature, HotPut
from delayserver.recovery.check import check, check_path
from delayserver.recovery.repair import repair_path
from delayserver.security.tokens import Caller
from delayserver.server.calls import Calls
from delayserver.server.engine import LOOK_TURNS, STAND_STILL_MS
from delayserver.server.filer import CheckpointRequest
from delayserver.server.metrics import Metrics
from storage.catalog import Catalog, LmdbCatalog, Table
from storage.directory import CATALOG_DIRECTORY
from storage.errors import UnknownKindError
from storage.files import Files, OsFiles
from storage.frame import seal
from storage.rows import RecordKind
from tests.unit.api.hot.clients import OnlyShard
from tests.world.server import Observer, SimulatedClock, SimulatedServer
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.files import SimulatedFiles

NOTE, WORDS = RecordKind(192), Table("part_192")
CATALOG_BYTES = 1 << 24


class Notes:
    """Words that a client keeps."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.kept_total = 0
        self.not_understood: Mapping[str, str] = {}
        self.later: dict[str, int] = {}
        """Words that are to be kept at a time, in ms."""
        self.looks = self.stood_ms = 0

    def prune(self, through_seq: int) -> None:
        """Nothing is held in memory."""

    def add_metrics(self, metrics: Metrics) -> None:
        metrics.counter("notes_kept", "Notes", lambda: self.kept_total)

    def keep(self, word: str) -> None:
        self._core.sequencer.append(NOTE, payload=seal(word.encode()))
        self._core.groups.wake()
        self.kept_total += 1

    def run_due(self, now_ms: int) -> bool:
        """One word in each turn, and none while requests are read first."""
        if self._core.is_reading:
            return True
        due = [word for word, at_ms in self.later.items() if at_ms <= now_ms]
        for word in due[:1]:
            del self.later[word]
            self.keep(word)
        return len(due) > 1

    def wait_ms(self, now_ms: int) -> int:
        return min(self.later.values(), default=now_ms + 10**9) - now_ms

    def look_again(self) -> None:
        self.looks += 1

    def on_stand_still(self, stood_ms: int) -> None:
        self.stood_ms = stood_ms


def _check(key: bytes, value: bytes) -> None:
    if key != value:
        raise ValueError("a word under another one")


def _hot(calls: Calls, intake: Intake) -> HotPut:
    notes = calls.part(Notes)

    def put(key: str, data: bytes, caller: Caller | None) -> Answer:
        notes.keep(key)
        return Answer(201, data, group=calls.not_durable())

    return put


NOTES = Feature(
    name="note",
    decide=Notes,
    effects={NOTE: lambda payload: [(WORDS, payload, payload)]},
    checks={WORDS: _check},
    hot={HEARTBEATS_PATH: _hot},
)
"""It has the hot path that heartbeats have elsewhere: this server has none."""


def _server(
    files: Files, catalog: Catalog, *parts: Feature, clock: SimulatedClock | None = None
) -> Any:
    return SimulatedServer(
        *(Settings(), files, catalog, clock or SimulatedClock(), random.Random(0), Observer()),
        around=lambda surroundings: replace(surroundings, parts=parts),
    )


def _keep(server: Any, word: str) -> None:
    """Durable on return, and not filed."""
    server.engine.part(Notes).keep(word)
    while server.turn():
        pass
    server.run(server.committer, 1)


def _checkpoint(server: Any) -> None:
    server.rest()
    server.replayer.put(CheckpointRequest(lambda: None))
    server.rest()


@pytest.mark.damaged("only a check with the part knows the kind of its record")
def test_a_part_of_a_test_is_recovered_after_a_kill_checked_and_shown() -> None:
    files, catalog = SimulatedFiles(), MemoryCatalog()
    server = _server(files, catalog, NOTES)
    _keep(server, "wood")
    assert not list(catalog.scan(WORDS))
    registry = CollectorRegistry()
    registry.register(server.calls.gauges.metrics)
    shown = generate_latest(registry).decode()
    assert "notes_kept_total 1.0" in shown and 'kind="note"' in shown
    files, catalog = files.crash(), catalog.crash()
    (unknown,) = check(files, catalog, parts=()).damage
    assert "unknown kinds of records" in str(unknown)
    with pytest.raises(UnknownKindError, match="of kind 192, which this server does not know"):
        _server(files, catalog)
    files, catalog = files.crash(), catalog.crash()
    server = _server(files, catalog, NOTES)
    assert [*catalog.scan(WORDS)] == [(b"wood", b"wood")]
    assert check(files, catalog, parts=(NOTES,)).is_clean
    catalog.commit({WORDS: [(b"wood", b"iron")]})
    (found,) = check(files, catalog, parts=(NOTES,)).damage[:1]
    assert "part_192" in str(found) and "another one" in str(found)
    server.close()


@pytest.mark.damaged("only a check with the part knows the kind of its records")
@pytest.mark.parametrize("lost", ["catalog/data.mdb", "definitions/*"])
def test_a_part_of_a_test_is_repaired(tmp_path: Path, lost: str) -> None:
    words = [b"iron", b"wood"]
    server, catalog = _on_disk(tmp_path)
    for word in words:
        _keep(server, word.decode())
    _checkpoint(server)
    _keep(server, "clay")  # behind the checkpoint
    server.close()
    catalog.close()
    (path,) = tmp_path.glob(lost)
    content = path.read_bytes()
    at = content.rindex(b"iron")
    path.write_bytes(content[:at] + b"lead" + content[at + 4 :])
    assert not check_path(tmp_path, catalog_max_bytes=CATALOG_BYTES, parts=(NOTES,)).is_clean
    report = repair_path(tmp_path, now_ms=0, catalog_max_bytes=CATALOG_BYTES, parts=(NOTES,))
    assert report.is_needed and not report.remaining and not report.losses
    assert check_path(tmp_path, catalog_max_bytes=CATALOG_BYTES, parts=(NOTES,)).is_clean
    server, catalog = _on_disk(tmp_path)
    assert [key for key, _ in catalog.scan(WORDS)] == [b"clay", *words]
    server.close()
    catalog.close()


def _on_disk(directory: Path) -> tuple[Any, LmdbCatalog]:
    files = OsFiles(str(directory))
    files.make_directory(CATALOG_DIRECTORY)
    catalog = LmdbCatalog(str(directory / CATALOG_DIRECTORY), max_bytes=CATALOG_BYTES)
    return _server(files, catalog, NOTES), catalog


@pytest.mark.damaged("only a check with the part knows the kind of its record")
def test_the_words_of_a_part_that_is_missing_are_kept() -> None:
    files, catalog = SimulatedFiles(), MemoryCatalog()
    server = _server(files, catalog, NOTES)
    _keep(server, "wood")
    _checkpoint(server)
    server.close()
    reasons = [finding.reason for finding in check(files, catalog, parts=()).findings]
    assert reasons[1:] == [
        "part_192: 'wood' is not understood here (this server does not have the part that it "
        "belongs to)"
    ]
    server = _server(files, catalog)
    assert [*catalog.scan(WORDS)] == [(b"wood", b"wood")]
    server.close()


def test_a_part_of_a_test_is_asked_as_time_passes_and_told_that_the_clock_was_set() -> None:
    clock = SimulatedClock()
    server = _server(SimulatedFiles(), MemoryCatalog(), NOTES, clock=clock)
    engine, notes = server.engine, server.engine.part(Notes)
    began_ms = clock.now_ms
    notes.later = {"oak": began_ms + 20, "elm": began_ms + 20}
    assert engine.advance(began_ms) == 20 and notes.kept_total == 0
    clock.move(20)
    assert engine.advance(clock.now_ms) == 0 and notes.kept_total == 1
    assert engine.advance(clock.now_ms) > 0 and notes.kept_total == 2
    assert (notes.looks, notes.stood_ms) == (0, 0)
    notes.later = {"ash": clock.now_ms}
    for turn in range(LOOK_TURNS):
        engine.advance(clock.now_ms, STAND_STILL_MS if not turn else 0)
        assert (notes.stood_ms, notes.kept_total) == (STAND_STILL_MS, 2)
    engine.advance(clock.now_ms)
    assert notes.kept_total == 3
    clock.set(-3_600_000)
    engine.advance(clock.now_ms)
    assert notes.looks == 1
    server.close()


def test_a_part_of_a_test_answers_on_the_hot_path() -> None:
    server = _server(SimulatedFiles(), MemoryCatalog(), NOTES)
    calls, intake = server.calls, Intake(Settings(), set(), lambda: 0.5)
    exit_, grants = Exit(lambda: True, 0), OwnGrants(calls)
    hot = Hot(calls, intake, exit_, OnlyShard(), grants, lambda: None)
    found = hot.answer(f"{HEARTBEATS_PATH}yew", b"1", JSON, None, None)
    assert (found.status, found.body) == (201, b"1") and found.group is not None
    assert server.engine.part(Notes).kept_total == 1
    calls.parts = ()
    without = Hot(calls, intake, exit_, OnlyShard(), grants, lambda: None)
    assert without.answer(f"{HEARTBEATS_PATH}yew", b"1", JSON, None, None).status == 404
    while server.turn():
        pass
    server.close()
