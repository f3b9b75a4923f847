"""What a replica says of itself, and what an owner does about its logs."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest
from structlog.testing import capture_logs

from delayserver.cluster import reports
from delayserver.cluster.reports import KEPT_MS, UNSEEN_MAX, HowFar, Reports
from delayserver.cluster.watch import News, ReplicaNote, ReplicaState
from delayserver.recovery.standby import LAG_MAX_MS

if TYPE_CHECKING:
    from delayserver.cluster.membership import Lines
    from storage.replicated.kafka import KafkaEngine


class FakeBrokers:
    """Note what they are told."""

    def __init__(self) -> None:
        self.notes: list[ReplicaNote] = []
        self.deleted: list[tuple[str, int]] = []

    def commit_progress(self, node: str, shard: int, offset: int, note: str) -> None:
        assert len(note) < 4096
        self.notes.append(msgspec.json.decode(note, type=ReplicaNote))

    def log(self, shard: int) -> Any:
        return self._log("log")

    def settled(self, shard: int) -> Any:
        return self._log("settled")

    def _log(self, name: str) -> Any:
        return SimpleNamespace(
            delete_before=lambda offset: self.deleted.append((name, offset)), close=lambda: None
        )


class Parts:
    def __init__(self) -> None:
        self.brokers = FakeBrokers()
        self.lines = SimpleNamespace(news=News())
        self.now_ms = 0
        self.reports = Reports(
            cast("KafkaEngine", self.brokers),
            3,
            "n1",
            "http://n1",
            cast("Lines", self.lines),
            clock=lambda: 0,
            stopwatch=lambda: self.now_ms,
        )


def test_a_note_says_how_far_the_replica_is_and_whom_the_node_does_not_see() -> None:
    parts = Parts()
    parts.lines.news = News(unseen={"n1": ["n2"], "n2": ["n3"]})
    parts.reports.how_far = lambda: HowFar((10, 20), 30, 400)
    parts.reports.process_url = "http://n1:1"
    parts.reports._report()
    (note,) = parts.brokers.notes
    assert (note.read_offset, note.settled_offset, note.lag_ms) == (30, 20, 400)
    assert (note.url, note.process_url, note.unseen) == ("http://n1", "http://n1:1", ["n2"])


def test_a_note_is_short_however_many_are_not_seen() -> None:
    parts = Parts()
    parts.lines.news = News(
        unseen={"n1": [f"a-node-of-a-large-cluster-{n:040}" for n in range(99)]}
    )
    parts.reports._report()
    assert len(parts.brokers.notes[0].unseen) == UNSEEN_MAX


def test_a_replica_that_is_behind_is_told_of_once() -> None:
    parts = Parts()
    told = []
    for lag_ms in (0, LAG_MAX_MS, LAG_MAX_MS + 1, 2 * LAG_MAX_MS, 0, 0, LAG_MAX_MS + 1):
        parts.reports.how_far = lambda lag_ms=lag_ms: HowFar(lag_ms=lag_ms)  # type: ignore[misc]
        with capture_logs() as lines:
            parts.reports._report()
        told.append([line["log_level"] for line in lines])
    assert told == [[], [], ["warning"], [], ["info"], [], ["warning"]]


@pytest.mark.parametrize("is_owner", [True, False])
def test_an_owner_deletes_what_two_have_had_for_an_hour(is_owner: bool) -> None:
    parts = Parts()
    parts.reports.office = (3, "here") if is_owner else (0, "")

    def look(*kept: int) -> None:
        """The third one, which is far behind, holds nothing back."""
        replicas = [
            ReplicaState(f"n{number}", one, ReplicaNote(parts.now_ms, "", one, one // 10), 0)
            for number, one in enumerate([*kept, 10])
        ]
        parts.lines.news = News(at_ms=parts.now_ms, replicas={3: replicas})
        parts.reports._delete()

    look(900, 800)
    parts.now_ms = KEPT_MS - 1
    look(900, 800)
    assert parts.brokers.deleted == []
    parts.now_ms = KEPT_MS
    look(1900, 1800)
    assert parts.brokers.deleted == ([("log", 800), ("settled", 80)] if is_owner else [])
    parts.brokers.deleted.clear()
    # Two replicas are left. The part of the log that one of them lacks is kept.
    parts.now_ms = 3 * KEPT_MS
    look(2000)
    assert all(offset <= 10 for _, offset in parts.brokers.deleted)
    # No replica has been heard of for a while.
    parts.brokers.deleted.clear()
    parts.now_ms = 5 * KEPT_MS
    parts.reports._delete()
    assert parts.brokers.deleted == []


def test_constants_can_be_set_by_the_former_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "KEPT_MS", KEPT_MS)  # so that it is restored
    former: Any = importlib.import_module("delayserver.api.cluster.reports")
    former.KEPT_MS = 1
    assert vars(reports)["KEPT_MS"] == 1
