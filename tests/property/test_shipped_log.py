"""The shipped log against a list of what was answered: whatever fails and crashes, on both disks, a
cut at any moment is all that was answered by then, or is refused."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from delayserver.backup.log_shipping import LogShipper
from delayserver.backup.shelf import BackupManifest
from delayserver.backup.shipped_log import LATEST_MS, find_cut
from storage.directory import Identity
from storage.errors import BackupError, ShortageError, StorageError
from storage.files import Files
from storage.frame import Frame, scan
from storage.message_log import Durability, MessageLog
from storage.rows import LogKind
from tests.unit.storage.samples import STAMP, message_group
from tests.world.storage.faults import Fault, FaultKind, Faults, FaultyFiles, Moment, SimulatedCrash
from tests.world.storage.files import SimulatedFiles

IDENTITY = Identity(stamp=STAMP, shard=0, id_secret=bytes(16))
HELD_MAX_BYTES = 5 * 4096
WORLDS = 40
STEPS = 100


class World:
    """A message log and its copy, on two disks that fail."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.disk = SimulatedFiles(rng=self.rng)
        self.shelf = SimulatedFiles(rng=self.rng)
        self.answered: list[tuple[int, int, int]] = []
        """First seq, last seq and moment of each group."""
        self.now_ms = 1_000
        self.checkpoint_seq = 0
        self.manifests: list[BackupManifest] = []
        self.counts: Counter[str] = Counter()
        self._backups = self._lost_seq = self.breaks = 0
        self.durability = self.rng.choice(tuple(Durability))
        self.sets_back = self.rng.random() < 0.3
        """The clock, now and then: a moment may come twice, and the log may reach the first one."""
        self.lost: set[tuple[int, int, int]] = set()
        """What was answered: with `os`, and a loss of power. The copy may still have it."""
        self._start()

    @property
    def last_seq(self) -> int:
        last_seq = self.answered[-1][1] if self.answered else 0
        return max(last_seq, self.checkpoint_seq, self._lost_seq)

    def _start(self) -> None:
        self.faults = Faults(only={"pwrite_durable", "pwrite"})
        self.log = MessageLog(
            FaultyFiles(self.disk, self.faults),
            stamp=STAMP,
            segment_bytes=4096,
            durability=self.durability,
            held_max_bytes=HELD_MAX_BYTES,
        )
        before = self.answered
        # What was written and never answered stands, if it was not lost.
        self.answered = [one for one in self.answered if one[1] <= self.checkpoint_seq]
        for found in self.log.read(self.checkpoint_seq + 1):
            if isinstance(found, Frame):
                self._note(found.first_seq, found.last_seq, found.header.created_ms)
            else:
                assert self.durability is Durability.OS
                self._lost_seq = found.last_seq
        self.lost |= {*before} - {*self.answered}
        self.shelf_faults = Faults()
        self.shipper = self._make_shipper(FaultyFiles(self.shelf, self.shelf_faults))
        self.is_resumed = False

    def _make_shipper(self, shelf: Files) -> LogShipper:
        return LogShipper(
            self.disk,
            self.log,
            shelf,
            IDENTITY,
            take=lambda count: None,
            next_seq=self.last_seq + 1,
            life="a life",
        )

    def _note(self, first_seq: int, last_seq: int, created_ms: int) -> None:
        self.answered.append((first_seq, last_seq, created_ms))

    def step(self) -> None:
        rng = self.rng
        choices = (
            *[self.append] * 8,
            *[self.checkpoint] * 3,
            *[self.ship] * 4,
            *[self.look] * 3,
            *(self.back_up, self.delete, self.refuse, self.fail_to_ship, self.crash),
        )
        is_back = self.sets_back and rng.random() < 0.05
        self.now_ms += -20 if is_back else rng.choice((0, 1, 10))
        rng.choice(choices)()

    def append(self) -> None:
        count = self.rng.choice((1, 2, 30))
        first_seq = self.last_seq + 1
        rows, payload = message_group(first_seq, count)
        self.log.append(
            rows.tobytes(),
            payload,
            first_seq=first_seq,
            last_seq=first_seq + count - 1,
            created_ms=self.now_ms,
        )
        self._note(first_seq, first_seq + count - 1, self.now_ms)

    def refuse(self) -> None:
        """The disk is full in the middle of a group."""
        self._fail(self.faults, FaultKind.NO_SPACE, 1)
        before = len(self.answered)
        try:
            self.append()
        except ShortageError:
            assert len(self.answered) == before
            self.counts["refused"] += 1
        self.faults.faults.clear()

    def _fail(self, faults: Faults, kind: FaultKind, at: int) -> None:
        faults.faults[:] = [Fault(faults.call_count + at, kind, self.rng.choice(tuple(Moment)))]

    def checkpoint(self) -> None:
        self.checkpoint_seq = self.rng.choice((self.checkpoint_seq, self.last_seq))
        self.log.delete_through(self.checkpoint_seq)

    def back_up(self) -> None:
        self._resume()
        self.checkpoint_seq = self.last_seq
        timeline = self.shipper.begin(self.checkpoint_seq)
        self._backups += 1
        self.manifests.append(
            BackupManifest(
                name=f"b{self._backups}",
                server_version="",
                format_version=1,
                stamp=STAMP,
                shard=0,
                shards=1,
                checkpoint_seq=self.checkpoint_seq,
                began_ms=self.now_ms,
                taken_ms=self.now_ms,
                completed_ms=self.now_ms,
                is_verified=True,
                copied_bytes=0,
                files=[],
                timeline=timeline,
            )
        )
        self.now_ms += 1

    def _resume(self) -> None:
        if not self.is_resumed:
            self.shipper.resume(self.manifests)
            self.is_resumed = True

    def ship(self) -> None:
        self._resume()
        self.now_ms += 1
        self.shipper.step(self.now_ms - 1)

    def fail_to_ship(self) -> None:
        """The disk of the backups fails, or its machine does."""
        kind = self.rng.choice((FaultKind.IO_ERROR, FaultKind.NO_SPACE, FaultKind.CRASH))
        self._fail(self.shelf_faults, kind, self.rng.randrange(1, 12))
        try:
            self.ship()
        except SimulatedCrash:
            self.crash()
        except StorageError:
            self.counts["not shipped"] += 1
        self.shelf_faults.faults.clear()

    def delete(self) -> None:
        if self.manifests and self.rng.random() < 0.7:
            del self.manifests[self.rng.randrange(len(self.manifests))]
        self._resume()
        self.shipper.prune(self.manifests, is_making=False)

    def crash(self) -> None:
        if self.rng.random() < 0.5:
            self.disk, self.shelf = self.disk.kill(), self.shelf.kill()
        else:
            self.disk, self.shelf = self.disk.crash(), self.shelf.crash()
        self.counts["crashes"] += 1
        self.breaks += self.shipper.breaks_total
        self._start()

    def look(self) -> None:
        """Cut the log behind a backup at any moment, and compare."""
        if not self.manifests:
            return
        self._resume()
        manifest = self.rng.choice(self.manifests)
        shipper = self.shipper
        is_current = manifest.timeline == shipper.timeline
        if self.lost and not is_current:
            return  # It has what the server has lost, and not what came instead.
        # The clock may have been set back since.
        last_ms = max(manifest.taken_ms, self.now_ms + 5)
        until_ms = self.rng.choice((self.rng.randint(manifest.taken_ms, last_ms), LATEST_MS))
        behind = [one for one in self.answered if one[0] > manifest.checkpoint_seq]
        later = next((n for n, one in enumerate(behind) if one[2] > until_ms), len(behind))
        wanted = behind[:later]
        try:
            cut = find_cut(self.shelf, manifest, until_ms)
        except BackupError:
            assert not (is_current and until_ms <= shipper.reach_ms), (until_ms, shipper.reach_ms)
            self.counts["refused to cut"] += 1
            return
        found = []
        for name, length in cut.segments:
            file = self.shelf.open(f"{cut.place}/{name}")
            for one in scan(
                file, 0, length, kind=LogKind.MESSAGE, stamp=STAMP, payload=True, after_seq=0
            ):
                assert isinstance(one, Frame) and one.payload_intact
                group = one.first_seq, one.last_seq, one.header.created_ms
                if one.first_seq > manifest.checkpoint_seq and group not in self.lost:
                    found.append(group)
        if until_ms == LATEST_MS or self.sets_back:
            assert found == wanted[: len(found)]
        else:
            assert found == wanted, (until_ms, found, wanted)
        if not self.lost:
            assert cut.last_seq == (found[-1][1] if found else manifest.checkpoint_seq)
        self.counts["cut"] += 1


def run(worlds: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in range(worlds):
        world = World(seed)
        for _ in range(STEPS):
            world.step()
        counts += world.counts
        counts["breaks"] += world.breaks + world.shipper.breaks_total
    return counts


def test_a_cut_is_what_was_answered_by_then() -> None:
    counts = run(WORLDS)
    assert counts["cut"] > 3 * WORLDS and counts["refused to cut"] > WORLDS // 2
    assert min(counts[what] for what in ("refused", "not shipped", "crashes", "breaks")) > 10


def test_it_notices_when_more_is_shipped_than_was_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    written = MessageLog.written
    monkeypatch.setattr(
        MessageLog, "written", lambda self: written(self)._replace(tail_seq=None, tail_length=0)
    )
    # What was refused stands in the segment until it is cut; so the groups do not follow.
    refuse, ship = World.refuse, World.ship

    def refuse_and_ship(world: World) -> None:
        end_tail = world.log._end_tail
        monkeypatch.setattr(world.log, "_end_tail", lambda: (ship(world), end_tail()))
        refuse(world)

    monkeypatch.setattr(World, "refuse", refuse_and_ship)
    with pytest.raises(AssertionError):
        run(WORLDS)


def test_it_notices_when_the_log_says_that_it_reaches_further(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = LogShipper.step
    monkeypatch.setattr(LogShipper, "step", lambda self, through_ms: step(self, through_ms + 10))
    with pytest.raises(AssertionError):
        run(WORLDS)


def test_it_notices_when_nothing_is_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    breaks = run(20)["breaks"]
    monkeypatch.setattr(MessageLog, "_released", lambda self, seq: seq)
    assert run(20)["breaks"] > 2 * breaks
