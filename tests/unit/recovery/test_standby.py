"""A standby: it files what counts, and loses nothing to a full disk, an import or a crash."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import cast

import pytest

from delayserver.config import Settings
from delayserver.decisions.new_messages import NewMessage
from delayserver.delivery.webhook import WebhookResponse
from delayserver.parts.imports.imports import Imports
from delayserver.records.message import Payload
from delayserver.records.subscriptions import Subscription
from delayserver.recovery.check import check
from delayserver.recovery.replica import Replica, ReplicaPlace
from delayserver.recovery.standby import LAG_MAX_MS, Standby
from storage.directory import Identity
from storage.errors import OtherHistoryError, ShortageError, StagingError, StorageError
from storage.frame import Frame
from storage.replicated.envelope import Adopt
from storage.replicated.holder import Holder
from storage.replicated.office import OfficeState, RecordDecision
from storage.replicated.reader import RecordReading
from storage.rows import HOUR_MS, LogKind
from storage.staging import DIRECTORY as IMPORTS
from storage.staging import manifest_path
from tests.world.server import (
    Observer,
    SimulatedClock,
    SimulatedServer,
    simulated_surroundings,
    stage,
)
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.engine import MemoryLog
from tests.world.storage.faults import Fault, FaultKind, Faults, FaultyFiles, SimulatedCrash
from tests.world.storage.files import SimulatedFiles

IDENTITY = Identity(stamp=77, shard=0, id_secret=bytes(range(16)))
STEPS_MAX = 600


class Cluster:
    """A shard's logs, an owner on the first node, and a standby on the second."""

    def __init__(self, **settings: object) -> None:
        self.settings = Settings(disk_reserve_bytes=0, **settings)  # type: ignore[arg-type]
        self.clock = SimulatedClock()
        self.log, self.settled = MemoryLog("ds.log/0"), MemoryLog("ds.settled/0")
        self.owner_disk = SimulatedFiles()
        self.disk, self.catalog = SimulatedFiles(), MemoryCatalog()
        catalog = MemoryCatalog()
        standby = self._replica(1).stand_by(self.owner_disk, lambda: catalog)
        self.holder = _until_it_holds(self, standby)
        standby.finish()
        self.server = SimulatedServer(
            self.settings,
            self.owner_disk,
            catalog.crash(),
            self.clock,
            random.Random(1),
            Observer(),
            around=lambda around: self._replica(1).owned_by(self.holder),
        )

    def _replica(self, node: int) -> Replica:
        place = ReplicaPlace(
            node, node - 1, IDENTITY, False, "", self.log.another, self.settled.another
        )
        base = simulated_surroundings(Observer(), self.clock, random.Random(node))
        return Replica(place, base, self.settings)

    def follow(self, faults: Faults | None = None) -> Standby:
        """A process on the second node."""
        self.disk, self.catalog = self.disk.kill(), self.catalog.crash()
        self.catalog.faults = faults
        files = self.disk if faults is None else FaultyFiles(self.disk, faults)
        return self._replica(2).stand_by(files, lambda: self.catalog)

    def end(self, standby: Standby) -> None:
        """In order; the disk is as the next process finds it."""
        standby.close()
        self.disk, self.catalog = self.disk.kill(), self.catalog.crash()

    def publish(self, delay_ms: int, body: bytes = b"1") -> None:
        now_ms = self.clock()
        message = NewMessage("orders", now_ms + delay_ms, Payload(body))
        self.server.engine.publishing.publish_one(message, now_ms)
        self.server.rest()

    def subscribe(self) -> None:
        hook = Subscription(
            id=self.server.engine.registry.next_id(),
            name="hook",
            subject="orders",
            type="webhook",
            created_ms=0,
            url="http://h/",
        )
        self.server.engine.subscribing.put_subscription(hook)
        self.server.rest()

    def deliver(self) -> None:
        """All that is due, and have it settled."""
        self.holder.beat()
        self.server.tick()
        self.server.rest()
        while self.server.sending:
            self.server.answer(self.server.sending[0], WebhookResponse(200))
            self.server.rest()
        self.clock.move(self.settings.settle_sync_ms)
        self.server.settling.step(1)

    def import_some(self, files: SimulatedFiles, *, others: bool) -> None:
        """Have an import of two parts adopted; `others` have its files, too."""
        subject = self.server.engine.sequencer.subjects["orders"]
        now_ms = self.clock()
        rows = [(now_ms + HOUR_MS * number, subject, Payload(b"i")) for number in range(4)]
        key_hash = self.server.engine.messages.key_hash
        stage(files, "import-1", [rows[:2], rows[2:]], key_hash)
        # The owner deletes them when it has adopted the import.
        self.staged = _read(files)
        if others:
            _put(self.staged, self.disk)
        answers: list[object] = []
        self.server.engine.part(Imports).adopt(
            manifest_path("import-1"), lambda found, error: answers.append(error)
        )
        self.server.rest()
        assert answers == [None]

    def rows(self, disk: SimulatedFiles, standby: Standby) -> dict[int, list[int]]:
        del disk
        log = standby._store.hour_log(LogKind.SCHEDULE)
        found: dict[int, list[int]] = {}
        for hour, state in standby._replay.hours.items():
            frames = [one for one in log.scan(hour, end=state.length) if isinstance(one, Frame)]
            found[hour] = [seq for frame in frames for seq in frame.rows["seq"].tolist()]
        return found


def _read(source: SimulatedFiles) -> dict[str, bytes]:
    """The files of imports, by their names."""
    found = {}
    for name in source.list(IMPORTS):
        file = source.open(f"{IMPORTS}/{name}")
        found[name] = file.pread(file.size(), 0)
        file.close()
    return found


def _put(files: dict[str, bytes], target: SimulatedFiles) -> None:
    target.make_directory(IMPORTS)
    for name, data in files.items():
        copy = target.open(f"{IMPORTS}/{name}", create=True)
        copy.pwrite([data], 0)
        copy.close()


def _until_it_holds(cluster: Cluster, standby: Standby) -> Holder:
    for _ in range(STEPS_MAX):
        cluster.clock.move(100)
        holder = standby.step(0)
        if holder is not None:
            return holder
    raise AssertionError("nobody else is there, and yet it is not the owner")


def all_seqs(rows: dict[int, list[int]]) -> list[int]:
    return sorted(seq for seqs in rows.values() for seq in seqs)


def test_a_standby_whose_disk_is_full_anywhere_files_all_in_the_end() -> None:
    cluster = Cluster(file_ms=10, checkpoint_ms=20)
    cluster.subscribe()
    for number in range(6):
        cluster.publish(number * HOUR_MS // 2)
    cluster.deliver()
    expected: dict[int, list[int]] | None = None
    at = 0
    while True:
        cluster.disk, cluster.catalog = SimulatedFiles(), MemoryCatalog()
        faults = Faults(Fault(at, FaultKind.NO_SPACE, for_good=True)) if at else Faults()
        try:
            standby = cluster.follow(faults)
        except ShortageError:
            cluster.disk = cluster.disk.kill()
            at += 1
            continue
        for _ in range(8):
            cluster.clock.move(30)
            cluster.holder.beat()
            try:
                standby.step(0)
            except ShortageError:
                # The frames that were read are still there, and the place is not behind them.
                assert standby.kept[0] <= standby.state.next_offset
                faults.faults.clear()
        faults.faults.clear()
        standby.checkpoint()
        rows = cluster.rows(cluster.disk, standby)
        expected = rows if expected is None else expected
        assert rows == expected, at
        cluster.end(standby)
        if at and not faults.struck:
            break
        at += 1
    assert expected and all_seqs(expected)


def test_a_standby_that_crashes_anywhere_files_all_in_the_end() -> None:
    cluster = Cluster(file_ms=10, checkpoint_ms=20)
    cluster.subscribe()
    for number in range(4):
        cluster.publish(number * HOUR_MS // 2)
    cluster.deliver()
    expected: dict[int, list[int]] | None = None
    for at in range(0, 400, 3):
        cluster.disk, cluster.catalog = SimulatedFiles(), MemoryCatalog()
        faults = Faults(Fault(at, FaultKind.CRASH)) if at else Faults()
        try:
            standby = cluster.follow(faults)
            for _ in range(4):
                cluster.clock.move(30)
                cluster.holder.beat()
                standby.step(0)
            cluster.end(standby)
        except SimulatedCrash:
            pass
        cluster.disk = cluster.disk.crash()
        again = cluster.follow()
        again.step(0)
        again.checkpoint()
        rows = cluster.rows(cluster.disk, again)
        expected = rows if expected is None else expected
        assert rows == expected, at
        cluster.end(again)
        if at and faults.crash is None:
            return
    raise AssertionError("it crashes for ever")


@pytest.mark.parametrize("file_ms", [10, 60_000], ids=["one by one", "together"])
def test_an_import_between_other_records_is_filed(file_ms: int) -> None:
    cluster = Cluster(file_ms=file_ms)
    cluster.publish(HOUR_MS)
    cluster.import_some(cluster.owner_disk, others=True)
    cluster.publish(2 * HOUR_MS)
    standby = cluster.follow()
    for _ in range(3):
        cluster.clock.move(20)
        standby.step(0)
    standby.checkpoint()
    cluster.server.replayer.step(1000)
    cluster.clock.move(5000)
    cluster.server.replayer.step(1000)
    last_seq = standby.state.next_seq - 1
    assert standby._replay.checkpoint_seq == last_seq
    owner_seqs = all_seqs(
        {
            hour: [
                seq
                for one in cluster.server.reader._schedule.scan(hour)
                if isinstance(one, Frame)
                for seq in one.rows["seq"].tolist()
            ]
            for hour in cluster.server.replay.hours
        }
    )
    assert all_seqs(cluster.rows(cluster.disk, standby)) == owner_seqs
    assert len(owner_seqs) == 6
    cluster.end(standby)
    assert not check(cluster.disk, cluster.catalog).damage


def test_an_import_whose_files_are_not_here_stops_the_standby() -> None:
    cluster = Cluster(file_ms=10)
    cluster.publish(HOUR_MS)
    cluster.import_some(cluster.owner_disk, others=False)
    standby = cluster.follow()
    for _ in range(2):
        cluster.clock.move(20)
        with pytest.raises(StagingError, match="it is not there, and the import import-1 is"):
            standby.step(0)
    assert standby._replay.filed_seq < standby.state.next_seq - 1
    _put(cluster.staged, cluster.disk)
    cluster.clock.move(20)
    standby.step(0)
    assert standby._replay.filed_seq == standby.state.next_seq - 1


def test_what_is_settled_may_come_before_its_message() -> None:
    cluster = Cluster(file_ms=60_000, checkpoint_ms=60_000)
    cluster.subscribe()
    cluster.publish(0)
    cluster.deliver()
    standby = cluster.follow()
    standby._settler.take_in(0)  # before any record of the log
    assert not standby._replay.hours
    standby.step(0)
    standby.checkpoint()
    cluster.clock.move(3 * HOUR_MS)
    cluster.holder.beat()
    standby.step(0)
    standby._keep_house()
    assert all(state.retired_ms for state in standby._replay.hours.values())


def test_a_day_is_split_when_it_comes_near() -> None:
    cluster = Cluster(file_ms=10)
    cluster.publish(5 * 24 * HOUR_MS)
    standby = cluster.follow()
    cluster.clock.move(20)
    standby.step(0)
    standby.checkpoint()
    (day,) = standby._replay.hours
    cluster.clock.move(4 * 24 * HOUR_MS)
    cluster.holder.beat()
    standby.step(0)
    for _ in range(3):
        standby.checkpoint()
        standby._keep_house()
    (hour,) = standby._replay.hours
    assert hour < day
    assert all_seqs(cluster.rows(cluster.disk, standby)) == [2]


def test_what_is_to_be_archived_first_is_kept() -> None:
    for archive in (False, True):
        cluster = Cluster(archive=archive, retention_ms=0, dedupe_window_ms=0)
        cluster.subscribe()
        cluster.publish(0)
        cluster.deliver()
        standby = cluster.follow()
        standby.step(0)
        standby.checkpoint()
        cluster.clock.move(3 * HOUR_MS)
        cluster.holder.beat()
        standby.step(0)
        for _ in range(5):
            standby.checkpoint()
            standby._keep_house()
        assert bool(standby._replay.hours) == archive


def test_a_check_of_a_replica_does_not_look_for_its_message_log() -> None:
    cluster = Cluster(file_ms=10)
    cluster.publish(HOUR_MS)
    standby = cluster.follow()
    cluster.clock.move(20)
    standby.step(0)
    standby.checkpoint()
    cluster.end(standby)
    assert not check(cluster.disk, cluster.catalog).damage


def test_what_may_have_fired_is_known_before_it_fires() -> None:
    """Whatever the clock of the next owner shows: it must not take a settled row for one of a day
    that is far."""
    cluster = Cluster(file_ms=10)
    cluster.subscribe()
    cluster.publish(5 * 24 * HOUR_MS)
    cluster.clock.set(5 * 24 * HOUR_MS)
    cluster.deliver()
    cluster.clock.set(-5 * 24 * HOUR_MS)
    standby = cluster.follow()
    standby.step(0)
    standby.checkpoint()
    live = cluster.server.replay.live_once_through_hour
    assert standby._replay.live_once_through_hour == live
    assert standby._replay.must_split(live) or all(hour <= live for hour in standby._replay.hours)


def test_the_place_is_never_ahead_of_what_is_filed() -> None:
    cluster = Cluster(file_ms=60_000, checkpoint_ms=60_000)
    standby = cluster.follow()
    place = standby.kept[0]
    cluster.publish(HOUR_MS)
    standby.step(0)
    assert standby.kept[0] == place < standby.state.next_offset
    standby.checkpoint()
    assert standby.kept[0] == standby.state.next_offset
    assert standby.lag_records in (None, 0)


def test_an_error_of_the_disk_ends_it() -> None:
    cluster = Cluster(file_ms=10)
    cluster.publish(HOUR_MS)
    faults = Faults()
    standby = cluster.follow(faults)
    faults.faults.append(Fault(faults.call_count + 1, FaultKind.IO_ERROR, for_good=True))
    cluster.clock.move(20)
    with pytest.raises(StorageError):
        standby.step(0)
        standby.checkpoint()


# ── how far it is behind ───────────────────────────────────────────────────────────────────────


def full(faults: Faults) -> None:
    """The disk takes nothing from now on."""
    faults.faults.append(Fault(faults.call_count + 1, FaultKind.NO_SPACE, for_good=True))


def step(cluster: Cluster, standby: Standby, by_ms: int) -> Holder | None:
    """As the thread does it: where there is no room it is tried again."""
    cluster.clock.move(by_ms)
    try:
        return standby.step(0)
    except ShortageError:
        return None


@pytest.mark.parametrize(
    ("node", "is_other", "has_missed", "offset", "goes_on"),
    [
        (1, False, False, 9, True),
        (1, False, False, 8, False),
        (1, False, True, 9, False),
        (1, True, False, 9, False),
        # It has named itself: nobody knows more.
        (2, False, True, 9, True),
        (2, True, False, 9, False),
    ],
)
def test_behind_which_adopt_it_goes_on(
    node: int, is_other: bool, has_missed: bool, offset: int, goes_on: bool
) -> None:
    record = Adopt(node, 5, 1, 3, 4, 1, 7, settled_place=9, settled_end=2)
    found = RecordReading(record, RecordDecision.COUNTS, None, OfficeState(), is_other, has_missed)
    went_back: list[int] = []
    standby = SimpleNamespace(
        _node=2,
        _log=SimpleNamespace(name="ds.log/0"),
        _settler=SimpleNamespace(offset=offset, go_back=went_back.append),
        _followed=SimpleNamespace(owner_address="n1"),
    )
    try:
        Standby._pass(cast("Standby", standby), record, found)
    except OtherHistoryError:
        assert (went_back, goes_on) == ([], False)
    else:
        assert (went_back, goes_on) == ([2], True)


def test_a_standby_that_files_is_not_behind() -> None:
    cluster = Cluster(file_ms=1000)
    standby = cluster.follow()
    for _ in range(100):
        cluster.publish(HOUR_MS)
        step(cluster, standby, 100)
        assert standby.lag_ms <= 2500


def test_a_standby_whose_disk_is_full_is_behind_though_it_has_read_all() -> None:
    cluster = Cluster(file_ms=100)
    faults = Faults()
    standby = cluster.follow(faults)
    step(cluster, standby, 500)
    cluster.publish(HOUR_MS)
    full(faults)
    for _ in range(100):
        cluster.holder.beat()
        step(cluster, standby, 500)
    assert (cluster.log.end() or 0) - standby.state.next_offset <= 1
    assert standby.lag_ms >= 49_000
    faults.faults.clear()
    for _ in range(3):
        cluster.holder.beat()
        step(cluster, standby, 500)
    assert standby.lag_ms <= 1000


def test_a_standby_whose_disk_is_full_does_not_take_over() -> None:
    cluster = Cluster(file_ms=60_000)
    faults = Faults()
    standby = cluster.follow(faults)
    step(cluster, standby, 500)
    cluster.publish(HOUR_MS)
    step(cluster, standby, 100)
    full(faults)
    # The owner is silent, and the time to file by itself has not come.
    length = cluster.log.end()
    for _ in range(100):
        assert step(cluster, standby, 200) is None
    assert cluster.log.end() == length, "it has not claimed"
    faults.faults.clear()
    _until_it_holds(cluster, standby)


def test_a_standby_that_is_a_minute_behind_does_not_take_over() -> None:
    cluster = Cluster()
    standby = cluster.follow()
    step(cluster, standby, 500)
    length = cluster.log.end()
    # What it knows of the end is a minute old, as of one that has been busy with its disk.
    standby._asked_ms = cluster.clock.stopwatch_ms() + LAG_MAX_MS + 2000
    standby._end = None
    assert step(cluster, standby, LAG_MAX_MS + 1000) is None
    assert cluster.log.end() == length
    _until_it_holds(cluster, standby)  # It has asked, and has all.


def test_no_more_is_read_than_the_disk_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delayserver.recovery.standby.FILE_BYTES_MAX", 2000)
    cluster = Cluster(file_ms=100)
    faults = Faults()
    standby = cluster.follow(faults)
    full(faults)
    for _ in range(50):
        cluster.publish(HOUR_MS, bytes(1000))
        step(cluster, standby, 200)
    assert standby._waiting_bytes <= 5000
    assert standby.lag_records and standby.lag_records > 40
