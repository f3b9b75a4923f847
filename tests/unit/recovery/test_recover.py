"""Recovery: from whatever a crash left to the state as if it had not happened."""

from __future__ import annotations

import random

import pytest

from delayserver.decisions.group import Group
from delayserver.records.message import Payload, encode_payload
from delayserver.records.subscriptions import encode_subscription
from delayserver.records.tables import (
    DEFINITIONS_KEY,
    read_checkpoint,
    read_definitions_place,
    read_keys_ahead,
    unpack_key_entry,
)
from delayserver.recovery import recover as recovery_module
from delayserver.recovery.definitions import differences, read_generation
from delayserver.recovery.recover import Recovered
from storage.catalog import ManyWrites, Table, Writes
from storage.definitions_log import DefinitionsPlace, definitions_path
from storage.errors import DamageError, DiskFullError
from storage.frame import HEADER_BYTES, Frame, seal
from storage.rows import HOUR_MS, MESSAGE_DTYPE, RecordKind
from tests.unit.fakes import (
    HOUR,
    MINUTE_MS,
    SEGMENT_BYTES,
    STAMP,
    START_MS,
    SUBJECT,
    Disk,
    Log,
    dispatch_row,
    rows_in,
    subscription,
)
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.faults import Fault, FaultKind, Faults, SimulatedCrash
from tests.world.storage.files import SimulatedFiles

NEXT_MS = START_MS + HOUR_MS
KEY = bytes(range(16))


class Machine:
    """A machine that runs one server process after the other."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self.files = SimulatedFiles(rng=rng)
        self.catalog = MemoryCatalog()
        self.disk = Disk(self.files, self.catalog)
        self.log = Log()

    def name_subject(self) -> None:
        self.log.sequencer.append(RecordKind.SUBJECT, subject_id=2, payload=seal(b"order.paid"))

    def commit(self) -> Group:
        group = self.log.close()
        self.disk.log(group)
        return group

    def commit_and_file(self) -> None:
        self.disk.file(self.commit())

    def restart(self, *, power_loss: bool = False, is_carried_over: bool = False) -> Disk:
        self.files = self.files.crash() if power_loss else self.files.kill()
        self.catalog = self.catalog.crash()
        self.disk = Disk(self.files, self.catalog, is_carried_over=is_carried_over)
        return self.disk


@pytest.fixture
def machine() -> Machine:
    return Machine()


def waiting(recovered: Recovered) -> dict[int, list[int]]:
    """Seqs that wait, by hour."""
    return {loaded.hour: sorted(rows_in(loaded)["seq"].tolist()) for loaded in recovered.loaded}


def schedule_bytes(disk: Disk) -> dict[int, bytes]:
    return {
        hour: disk.schedule.read(hour, 0, disk.schedule.size(hour))
        for hour in disk.schedule.buckets()
    }


def test_an_empty_directory_recovers_to_an_empty_server(machine: Machine) -> None:
    recovered = machine.restart().recover()
    assert recovered.next_seq == 1
    assert (recovered.subjects, len(recovered.registry)) == ({SUBJECT: 1}, 0)
    assert not recovered.loaded
    assert not recovered.damage
    assert recovered.through_hour == HOUR


@pytest.mark.parametrize("power_loss", [False, True])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_what_was_committed_is_there_again(
    machine: Machine, power_loss: bool, checkpoint: bool
) -> None:
    machine.log.publish(START_MS, key_hash=KEY)
    machine.log.publish(NEXT_MS)
    machine.commit_and_file()
    if checkpoint:
        machine.disk.replay.checkpoint()
    machine.log.publish(START_MS + 5)
    machine.log.cancel(1, START_MS)
    machine.commit()
    disk = machine.restart(power_loss=power_loss)
    recovered = disk.recover()
    assert recovered.next_seq == 5
    assert recovered.replayed == (2 if checkpoint else 4)
    assert waiting(recovered) == {HOUR: [3]}
    assert recovered.damage == []
    assert disk.replay.checkpoint_seq == 4
    assert disk.catalog.get(Table.KEYS, KEY) is not None


def test_what_was_never_committed_is_not_there(machine: Machine) -> None:
    machine.log.publish(START_MS)
    machine.commit()
    machine.log.publish(START_MS)
    machine.log.close()
    recovered = machine.restart(power_loss=True).recover()
    assert recovered.next_seq == 2
    assert waiting(recovered) == {HOUR: [1]}


@pytest.mark.parametrize("seed", range(20))
def test_replaying_again_gives_the_same_bytes(seed: int) -> None:
    machine = Machine(random.Random(seed))
    rng = random.Random(seed)
    for step in range(6):
        due_ms = START_MS + rng.randrange(3) * HOUR_MS
        first = machine.log.publish(due_ms, body=bytes(step))
        machine.log.publish(START_MS + rng.randrange(3) * HOUR_MS)
        if rng.random() < 0.5:
            machine.log.cancel(first, due_ms)
        machine.commit_and_file()
        if step == 2:
            machine.disk.replay.checkpoint()
    entries = {hour: state.entries for hour, state in machine.disk.replay.hours.items()}
    disk = machine.restart(power_loss=True)
    recovered = disk.recover()
    assert {hour: state.entries for hour, state in disk.replay.hours.items()} == entries
    assert recovered.next_seq == machine.log.sequencer.next_seq
    # A second crash at once changes nothing any more.
    before = schedule_bytes(disk)
    assert waiting(machine.restart(power_loss=True).recover()) == waiting(recovered)
    assert schedule_bytes(machine.disk) == before


def test_schedule_files_are_cut_back_to_their_checkpoint(machine: Machine) -> None:
    machine.log.publish(START_MS)
    machine.commit_and_file()
    machine.disk.replay.checkpoint()
    machine.log.publish(START_MS)
    machine.log.publish(NEXT_MS)
    machine.commit_and_file()
    file = machine.files.open(machine.disk.schedule.path(HOUR))
    file.pwrite([b"half a frame"], file.size())
    recovered = machine.restart().recover()
    assert waiting(recovered) == {HOUR: [1, 2]}
    frames = list(machine.disk.schedule.scan(HOUR, payload=True))
    assert all(isinstance(frame, Frame) and frame.payload_intact for frame in frames)
    assert len(frames) == 2


def test_a_delivery_that_was_recorded_is_not_repeated(machine: Machine) -> None:
    for _ in range(3):
        machine.log.publish(START_MS)
    definition = subscription(1, type="pull")
    machine.log.sequencer.append(
        RecordKind.SUBSCRIPTION, subscription_id=1, payload=seal(encode_subscription(definition))
    )
    machine.name_subject()
    machine.commit_and_file()
    machine.disk.settle(HOUR, dispatch_row(1))
    machine.disk.settler.write({HOUR: [dispatch_row(2)]}, START_MS)
    size = machine.disk.dispatch.size(HOUR)
    machine.files.open(machine.disk.dispatch.path(HOUR)).truncate(size - 1)
    disk = machine.restart()
    recovered = disk.recover()
    assert waiting(recovered) == {HOUR: [2, 3]}
    assert [s.name for s in recovered.registry] == ["s1"]
    assert recovered.subjects == {SUBJECT: 1, "order.paid": 2}
    disk.settle(HOUR, dispatch_row(2))
    assert waiting(machine.restart().recover()) == {HOUR: [3]}


def test_what_a_killed_process_recorded_is_recorded_for_good(machine: Machine) -> None:
    machine.log.publish(START_MS)
    machine.name_subject()
    machine.commit_and_file()
    machine.disk.settler.write({HOUR: [dispatch_row(1)]}, START_MS)
    assert waiting(machine.restart().recover()) == {HOUR: []}
    for _ in range(10):
        assert waiting(machine.restart(power_loss=True).recover()) == {HOUR: []}


def test_every_unsettled_hour_counts_however_old(machine: Machine) -> None:
    for hours in (-2000, -1, 0, 1, 2):
        machine.log.publish(START_MS + hours * HOUR_MS)
    machine.commit_and_file()
    recovered = machine.restart().recover()
    assert waiting(recovered) == {HOUR - 2000: [1], HOUR - 1: [2], HOUR: [3]}


def test_settled_hours_are_not_read(machine: Machine) -> None:
    for hours in (-1, 0):
        machine.log.publish(START_MS + hours * HOUR_MS)
    machine.commit_and_file()
    machine.disk.replay.retire(HOUR - 1, 2, START_MS)
    machine.disk.replay.checkpoint()
    assert waiting(machine.restart().recover()) == {HOUR: [2]}


@pytest.mark.parametrize(("lead_ms", "loaded"), [(9 * MINUTE_MS, False), (10 * MINUTE_MS, True)])
def test_the_next_hour_is_loaded_when_it_is_near(
    machine: Machine, lead_ms: int, loaded: bool
) -> None:
    machine.log.publish(NEXT_MS)
    machine.commit()
    recovered = machine.restart().recover(now_ms=NEXT_MS - 10 * MINUTE_MS, lead_ms=lead_ms)
    assert recovered.through_hour == HOUR + loaded
    assert waiting(recovered) == ({HOUR + 1: [1]} if loaded else {})


def test_what_may_have_fired_is_loaded_though_the_clock_was_set_back(machine: Machine) -> None:
    machine.log.publish(NEXT_MS)
    machine.commit_and_file()
    machine.disk.replay.snapshot(HOUR + 1)
    recovered = machine.restart(power_loss=True).recover(now_ms=START_MS, lead_ms=0)
    assert recovered.through_hour == HOUR + 1
    assert waiting(recovered) == {HOUR + 1: [1]}


def test_the_newest_settled_hour_is_known(machine: Machine) -> None:
    assert machine.restart().recover().retired_through_hour == -1
    for hours in (-3, -2, 0):
        machine.log.publish(START_MS + hours * HOUR_MS)
    machine.commit_and_file()
    for hours in (-3, -2):
        machine.disk.replay.retire(HOUR + hours, 3, START_MS)
    machine.disk.replay.checkpoint()
    assert machine.restart().recover().retired_through_hour == HOUR - 2


def test_files_of_hours_that_the_catalog_does_not_know_are_removed(machine: Machine) -> None:
    machine.log.publish(START_MS)
    machine.commit_and_file()
    machine.disk.replay.checkpoint()
    for log in (machine.disk.schedule, machine.disk.dispatch):
        machine.files.open(log.path(HOUR - 30), create=True).close()
        machine.files.sync_directory(log.directory)
    disk = machine.restart()
    disk.recover()
    assert disk.schedule.buckets() == [HOUR]
    assert disk.dispatch.buckets() == []


def test_a_long_tail_is_filed_in_pieces(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery_module, "BATCH_BYTES", 300)
    for _ in range(7):
        machine.log.publish(START_MS)
        machine.commit()
    recovered = machine.restart().recover()
    assert recovered.replayed == 7
    assert waiting(recovered) == {HOUR: [1, 2, 3, 4, 5, 6, 7]}
    assert 1 < len(list(machine.disk.schedule.scan(HOUR))) < 7


# ---- damage ----------------------------------------------------------------------------------


def message_frames(machine: Machine) -> list[tuple[str, int]]:
    """Where the frames of the message log begin."""
    return [
        (found.path, found.offset)
        for found in Disk(machine.files, machine.catalog).message_log.read(1)
        if isinstance(found, Frame)
    ]


def test_a_torn_group_at_the_end_was_never_answered(machine: Machine) -> None:
    machine.log.publish(START_MS)
    machine.commit()
    machine.log.publish(START_MS, body=bytes(100))
    machine.commit()
    path, offset = message_frames(machine)[1]
    file = machine.files.open(path)
    file.pwrite([bytes(500)], offset + HEADER_BYTES + 10)
    recovered = machine.restart().recover()
    assert recovered.damage == []
    assert recovered.next_seq == 2
    assert waiting(recovered) == {HOUR: [1]}
    # The seqs of what was torn are given again.
    machine.log = Log(next_seq=2)
    machine.log.publish(START_MS)
    machine.commit_and_file()
    assert waiting(machine.restart().recover()) == {HOUR: [1, 2]}


@pytest.mark.damaged("a group of the message log")
def test_damage_is_named_and_the_rest_is_delivered(
    machine: Machine,
) -> None:
    for _ in range(3):
        machine.log.publish(START_MS)
        machine.commit()
    path, offset = message_frames(machine)[1]
    machine.files.open(path).pwrite([b"\xff"], offset + HEADER_BYTES + 3)
    recovered = machine.restart().recover()
    assert waiting(recovered) == {HOUR: [1, 3]}
    assert recovered.next_seq == 4
    [damage] = recovered.damage
    assert (damage.path, damage.offset, damage.first_seq, damage.last_seq) == (path, offset, 2, 2)
    assert len(list(machine.catalog.scan(Table.DAMAGE))) == 1


@pytest.mark.damaged("a body in the message log")
def test_a_damaged_payload_costs_its_own_message_only(machine: Machine) -> None:
    for number in range(3):
        machine.log.publish(START_MS, body=b"body %d" % number)
    machine.commit()
    machine.log.publish(NEXT_MS)
    machine.commit()
    path, offset = message_frames(machine)[0]
    sealed = len(encode_payload(Payload(b"body 0")))
    blob = offset + HEADER_BYTES + 3 * MESSAGE_DTYPE.itemsize
    machine.files.open(path).pwrite([b"\xff"], blob + sealed + 2)
    disk = machine.restart()
    recovered = disk.recover()
    assert waiting(recovered) == {HOUR: [1, 3]}
    [damage] = recovered.damage
    assert (damage.first_seq, damage.last_seq, damage.offset) == (2, 2, blob + sealed)
    frames = list(disk.schedule.scan(HOUR, payload=True))
    assert [isinstance(frame, Frame) and frame.payload_intact for frame in frames] == [True]


def interrupted_checkpoint(machine: Machine) -> None:
    """A checkpoint at 1, and three keyed records behind it, of whose keys two are recorded."""

    class Interrupted(MemoryCatalog):
        count = 0

        def commit(self, writes: Writes, many: ManyWrites | None = None) -> None:
            self.count += 1
            if self.count > 3:
                raise DiskFullError("commit", "catalog", "full")
            super().commit(writes, many)

    machine.catalog = Interrupted()
    machine.disk = Disk(machine.files, machine.catalog)
    machine.disk.replay.effects.keys_slice = 1
    machine.name_subject()
    machine.commit_and_file()
    machine.disk.replay.checkpoint()
    for number in range(3):
        machine.log.publish(START_MS, key_hash=bytes([number]) + KEY[1:])
        machine.commit_and_file()
    with pytest.raises(DiskFullError):
        machine.disk.replay.checkpoint()
    assert (read_checkpoint(machine.catalog), read_keys_ahead(machine.catalog)) == (1, 4)
    assert keyed_seqs(machine.catalog) == [2, 3]


def keyed_seqs(catalog: MemoryCatalog) -> list[int]:
    return [unpack_key_entry(value).seq for _, value in catalog.scan(Table.KEYS)]


@pytest.mark.parametrize("power_loss", [False, True])
def test_an_interrupted_checkpoint_is_made_again(machine: Machine, power_loss: bool) -> None:
    interrupted_checkpoint(machine)
    recovered = machine.restart(power_loss=power_loss).recover()
    assert recovered.damage == []
    assert waiting(recovered) == {HOUR: [2, 3, 4]}
    assert keyed_seqs(machine.catalog) == [2, 3, 4]
    assert read_keys_ahead(machine.catalog) == 0


@pytest.mark.damaged("a group of the message log")
def test_keys_of_records_that_are_damaged_are_forgotten(machine: Machine) -> None:
    interrupted_checkpoint(machine)
    path, offset = message_frames(machine)[1]
    machine.files.open(path).pwrite([b"\xff"], offset + HEADER_BYTES + 3)
    recovered = machine.restart().recover()
    assert [(one.first_seq, one.last_seq) for one in recovered.damage] == [(2, 2)]
    assert keyed_seqs(machine.catalog) == [3, 4]
    assert read_keys_ahead(machine.catalog) == 0


def test_keys_of_records_that_are_gone_are_forgotten(machine: Machine) -> None:
    """As after power loss, where the log is not synced."""
    interrupted_checkpoint(machine)
    path, offset = message_frames(machine)[2]
    machine.files.open(path).truncate(offset)
    recovered = machine.restart().recover()
    assert recovered.next_seq == 3
    assert keyed_seqs(machine.catalog) == [2]
    assert read_keys_ahead(machine.catalog) == 0


def test_they_are_so_too_after_a_checkpoint_on_the_way(machine: Machine) -> None:
    """As within a long import."""
    interrupted_checkpoint(machine)
    disk = machine.restart()
    disk.replay.effects.keys_slice = 1
    log = Log(2)
    for number in (0, 7):
        log.publish(START_MS, key_hash=bytes([number]) + KEY[1:])
    disk.file(log.close())
    disk.replay.checkpoint()
    assert read_keys_ahead(machine.catalog) == 0
    disk.replay.effects.remove_lost_keys([(3, 3)], 4)
    disk.replay.checkpoint()
    assert keyed_seqs(machine.catalog) == [2]


def test_a_damaged_segment_is_kept_aside(machine: Machine) -> None:
    for _ in range(4):
        machine.log.publish(START_MS, body=bytes(SEGMENT_BYTES // 3))
        machine.commit()
    first, offset = message_frames(machine)[0]
    machine.files.open(first).pwrite([b"\xff"], offset + 70)
    disk = machine.restart()
    recovered = disk.recover()
    assert [damage.path for damage in recovered.damage] == [first]
    assert not disk.files.exists(first)
    assert disk.files.exists(first + ".damaged")


@pytest.mark.damaged("the catalog is not that of the logs")
def test_a_catalog_from_another_time_is_refused(machine: Machine) -> None:
    for _ in range(4):
        machine.log.publish(START_MS, body=bytes(SEGMENT_BYTES // 2))
        machine.commit_and_file()
        machine.disk.replay.checkpoint()
    machine.restart()
    disk = Disk(machine.files, MemoryCatalog())
    before = schedule_bytes(disk)
    with pytest.raises(DamageError, match="catalog"):
        disk.recover()
    assert schedule_bytes(disk) == before


def test_a_catalog_that_is_missing_is_refused(machine: Machine) -> None:
    """Without a message log that tells: the hours must not be cut to nothing."""
    machine.log.publish(START_MS)
    machine.commit_and_file()
    machine.disk.replay.checkpoint()
    disk = machine.restart()
    for path in disk.message_log.segments():
        machine.files.unlink(path)
    disk = Disk(machine.files, MemoryCatalog())
    before = schedule_bytes(disk)
    with pytest.raises(DamageError, match="there are hours: it is missing"):
        disk.recover()
    assert schedule_bytes(disk) == before


def test_progress_is_told(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery_module, "BATCH_BYTES", 1)
    for _ in range(2):
        machine.log.publish(START_MS)
        machine.commit()
    disk = machine.restart()
    told: list[tuple[str, int]] = []
    recovery_module.recover(
        disk.catalog,
        disk.message_log,
        disk.replay,
        disk.settler,
        disk.loader,
        now_ms=START_MS,
        lead_ms=0,
        progress=lambda what, done, total: told.append((what, done)),
    )
    assert told == [
        ("replaying the message log", 1),
        ("replaying the message log", 2),
        ("loading hours", 0),
    ]


# ---- the definitions log ----------------------------------------------------------------------

DEFINITIONS = definitions_path(1)


def defined(machine: Machine) -> DefinitionsPlace:
    """The place that the catalog names; the log holds what the catalog holds, and no more."""
    place = read_definitions_place(machine.catalog)
    assert place is not None
    path = definitions_path(place.generation)
    assert [f"definitions/{name}" for name in machine.files.list("definitions")] == [path]
    assert machine.files.open(path).size() == place.length
    found = read_generation(machine.files, place.generation, stamp=STAMP, end=place.length)
    assert not found.damage and found.state
    assert list(differences(found.state, machine.catalog)) == []
    return place


@pytest.mark.parametrize("power_loss", [False, True])
def test_definitions_that_no_checkpoint_covers_are_cut_off(
    machine: Machine, power_loss: bool
) -> None:
    machine.name_subject()
    machine.commit_and_file()
    machine.disk.replay.checkpoint()
    before = defined(machine)
    machine.log.sequencer.append(RecordKind.SUBJECT, subject_id=2, payload=seal(b"second"))
    machine.commit_and_file()
    machine.catalog.faults = Faults(Fault(1, FaultKind.CRASH))
    with pytest.raises(SimulatedCrash):
        machine.disk.replay.checkpoint()
    assert machine.files.open(DEFINITIONS).size() > before.length
    recovered = machine.restart(power_loss=power_loss).recover()
    assert recovered.damage == [] and recovered.subjects == {SUBJECT: 1, "second": 2}
    assert defined(machine).length > before.length


@pytest.mark.parametrize("length", [0, 64, None])
def test_a_definitions_log_that_is_too_short_is_named_and_written_again(
    machine: Machine, length: int | None
) -> None:
    machine.name_subject()
    machine.commit_and_file()
    machine.disk.replay.checkpoint()
    if length is None:
        machine.files.unlink(DEFINITIONS)
    else:
        machine.files.open(DEFINITIONS).truncate(length)
    recovered = machine.restart().recover()
    assert [(found.path, found.offset) for found in recovered.damage] == [
        (DEFINITIONS, length or 0)
    ]
    assert recovered.subjects == {SUBJECT: 1, "order.paid": 2}
    assert defined(machine).generation == 2
    assert machine.restart().recover().damage == []


def test_definitions_are_carried_over_from_a_catalog_of_version_1(machine: Machine) -> None:
    machine.name_subject()
    machine.commit_and_file()
    machine.disk.replay.checkpoint()
    machine.catalog.commit({Table.META: [(DEFINITIONS_KEY, None)]})
    with pytest.raises(DamageError, match="how much of the definitions log counts"):
        machine.restart()
    machine.files.unlink(DEFINITIONS)
    machine.restart(is_carried_over=True).recover(is_carried_over=True)
    assert defined(machine).generation == 1
