"""A backup and the log behind it are what the source is by then: a server that is opened on them
has every row and every definition, at any moment of any history."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple, cast

import numpy as np
import pytest

from delayserver.backup.log_shipping import LogShipper
from delayserver.backup.shelf import BackupManifest
from delayserver.backup.shipped_log import LATEST_MS, find_cut
from delayserver.config import Settings
from delayserver.recovery.snapshots import HeldSnapshot
from delayserver.recovery.store import Surroundings
from storage.catalog import Catalog, Table
from storage.directory import Identity, open_identity
from storage.errors import BackupError
from storage.files import Files
from storage.frame import scan
from storage.message_log import DIRECTORY as MESSAGES
from storage.message_log import MessageLog
from storage.rows import SCHEDULE_DTYPE, LogKind
from tests.depth import every, least
from tests.peers import content_of
from tests.simulation.test_snapshots import Taken, WorldOfSnapshots
from tests.world.server import Observer, SimulatedServer
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.faults import FaultyFiles
from tests.world.storage.files import SimulatedFiles

WORLDS = 10
LIVES = 4
DEFINED = (Table.SUBJECTS, Table.SUBSCRIPTIONS)
"""Tables that no delivery, no purge and no clock changes."""


class Base(NamedTuple):
    """A backup."""

    files: SimulatedFiles
    manifest: BackupManifest


class TakenForLog(Taken):
    """Of a backup, from which the log goes on."""

    timeline = 0

    def _take(self) -> HeldSnapshot:
        held = super()._take()
        world = cast("WorldOfTheLog", self._world)
        checkpoint_seq = held.manifest.checkpoint_seq
        world.compare(self._server, self.content, checkpoint_seq)
        self.timeline = world.shipper.begin(checkpoint_seq)
        return held


class WorldOfTheLog(WorldOfSnapshots):
    """Backups are made, and the log is shipped to a disk of its own, through crashes of both."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.shelf = SimulatedFiles(rng=self.rng)
        self.base: Base | None = None
        self.shipper: LogShipper
        self.looked: Counter[str] = Counter()

    def _open_server(self, files: FaultyFiles) -> SimulatedServer:
        def around(surroundings: Surroundings) -> Surroundings:
            made = surroundings.openers.message_log

            def held(
                files: Files, catalog: Catalog, identity: Identity, settings: Settings
            ) -> MessageLog:
                log = cast("MessageLog", made(files, catalog, identity, settings))
                log._held_max_bytes, log._held_from = 1 << 30, 0
                return log

            openers = replace(surroundings.openers, message_log=held)
            return replace(surroundings, openers=openers)

        return SimulatedServer(
            self.settings,
            files,
            self.catalog,
            self.clock,
            self.rng,
            self.ledger,
            quick=self._quick(),
            around=around,
        )

    def _start(self) -> None:
        super()._start()
        server = self._running
        self.shipper = LogShipper(
            self.disk,
            cast("MessageLog", server.store.message_log),
            self.shelf,
            open_identity(self.disk, random_bytes=None),
            take=lambda count: None,
            # As a server does it, before the first record of this life.
            next_seq=server.recovered.next_seq,
            life="a life",
        )
        self.shipper.resume([] if self.base is None else [self.base.manifest])

    def live(self, steps: int) -> None:
        super().live(steps)
        self.shelf = self.shelf.crash() if self.rng.random() < 0.5 else self.shelf.kill()

    def _step(self) -> None:
        super()._step()
        if self.rng.random() < 0.05 and self._running.engine.groups.is_idle:
            self.shipper.step(self.clock() - 1)
        if self.taken is None and self.rng.random() < 0.1:
            self.taken = self._take(self._running)
        elif self.taken is not None and self.taken.held is not None and self.base is not None:
            # It was compared.
            self.taken.snapshots.complete(self.taken.held)
            self.taken.snapshots.release_all()
            self.taken = None

    def _take(self, server: SimulatedServer) -> Taken:
        return TakenForLog(self, server, is_of_a_backup=True)

    def _look_at(self, files: SimulatedFiles, held: HeldSnapshot) -> None:
        taken = cast("TakenForLog", self.taken)
        if self.base is not None and self.rng.random() < 0.7:
            return  # It is brought forward further.
        manifest = held.manifest
        made = BackupManifest(
            name="one",
            server_version="",
            format_version=manifest.format_version,
            stamp=manifest.stamp,
            shard=0,
            shards=1,
            checkpoint_seq=manifest.checkpoint_seq,
            began_ms=0,
            taken_ms=0,
            completed_ms=0,
            is_verified=True,
            copied_bytes=0,
            files=[],
            timeline=taken.timeline,
        )
        self.base = Base(files, made)

    def compare(self, server: SimulatedServer, content: dict[str, object], seq: int) -> None:
        """The source is at a checkpoint at `seq`: so is what is restored of base and log."""
        base = self.base
        if base is None:
            return
        self.shipper.step(self.clock() - 1)
        assert not self.shipper.broken
        try:
            cut = find_cut(self.shelf, base.manifest, LATEST_MS)
        except BackupError as error:
            assert "bulk load" in str(error)
            self.looked["bulk loads"] += 1
            self.base = None
            return
        assert cut.last_seq >= seq
        restored = copy.deepcopy(base.files)
        restored.make_directory(MESSAGES)
        for name, length in cut.segments:
            file = self.shelf.open(f"{cut.place}/{name}")
            frames = scan(
                file, 0, length, kind=LogKind.MESSAGE, stamp=base.manifest.stamp, payload=False
            )
            # The log is ahead of what is filed.
            end = max((one.end for one in frames if one.last_seq <= seq), default=0)
            if end:
                restored.open(f"{MESSAGES}/{name}", create=True).pwrite([file.pread(end, 0)], 0)
        catalog = MemoryCatalog.copied(restored, "catalog")
        opened = SimulatedServer(
            self.settings, restored, catalog, copy.copy(self.clock), copy.copy(self.rng), Observer()
        )
        opened.replay.checkpoint()
        assert opened.replay.checkpoint_seq == seq
        found = content_of(restored, catalog)
        opened.event_loop.abandon()
        for table in DEFINED:
            assert found[table] == content[table], table
        # The source may have purged some.
        missing = rows_in(content) - rows_in(found)
        assert not missing, missing
        self.looked["compared"] += 1
        if self.rng.random() < 0.1:
            self.base = None  # The next one is of a later moment.
        self.looked["records behind it"] += seq - base.manifest.checkpoint_seq


def rows_in(content: dict[str, object]) -> set[tuple[bytes, bytes]]:
    """The rows of all hours and days, with their payloads, wherever these stand."""
    found = set()
    for path, rows in content.items():
        if path.startswith("schedule/"):
            for row, payload in cast("list[tuple[bytes, bytes]]", rows):
                one = np.frombuffer(row, SCHEDULE_DTYPE).copy()
                one["payload_offset"] = 0
                found.add((one.tobytes(), payload))
    return found


def looked_at(seeds: Iterable[int]) -> Counter[str]:
    looked: Counter[str] = Counter()
    for seed in seeds:
        with WorldOfTheLog(seed) as world:
            for _ in range(LIVES):
                world.live(300)
            looked += world.looked
    return looked


def test_it_is_what_the_source_is() -> None:
    looked = looked_at(every(4, range(WORLDS)))
    assert looked["compared"] >= least(WORLDS + 1)
    assert looked["records behind it"] > 5 * looked["compared"]


def test_the_log_has_to_be_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MessageLog, "_released", lambda self, seq: seq)
    with pytest.raises(AssertionError):
        looked_at(range(WORLDS))
