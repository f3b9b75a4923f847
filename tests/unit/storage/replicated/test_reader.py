"""The reader of a shard's log: frames from records, and the places from which to go on."""

from __future__ import annotations

import pytest

from storage.errors import LogReplacedError, OffsetRangeError, RecordDamageError
from storage.replicated import envelope
from storage.replicated.envelope import Beat, Claim, LeasesPart, LogRecord, Release, split
from storage.replicated.lease import LEASE_MS
from storage.replicated.office import OfficeState, RecordDecision
from storage.replicated.reader import RecordReader, RecordReading, frame_of
from storage.rows import LogKind
from tests.unit.storage.replicated.test_holder import STAMP
from tests.unit.storage.replicated.test_holder import frame_of as a_frame
from tests.world.storage.engine import MemoryLog


def parts(seq: int, count: int, *, node: int = 1, epoch: int = 1) -> list[LogRecord]:
    frame = a_frame(seq, b"x" * 1000)
    part_bytes = -(-len(frame) // count)
    return list(split(frame, node=node, epoch=epoch, clock_ms=5, part_bytes=part_bytes))


CLAIM = Claim(1, 1, 5, -1, "")
BEAT = Beat(1, 1, 5, 0, 0, 0)
FOREIGN = Beat(2, 9, 5, 0, 0, 0)


def log_of(*records: LogRecord) -> MemoryLog:
    log = MemoryLog()
    log.append([envelope.encode(record) for record in records])
    return log


def read_all(log: MemoryLog, state: OfficeState = OfficeState()) -> list[RecordReading]:  # noqa: B008
    return RecordReader(log.another(), STAMP, state).read(0)


def seqs(found: list[RecordReading]) -> list[int]:
    return [one.frame.first_seq for one in found if one.frame is not None]


def test_frames_of_several_parts() -> None:
    log = log_of(CLAIM, *parts(1, 3), BEAT, *parts(2, 1), *parts(3, 2))
    assert seqs(read_all(log)) == [1, 2, 3]


@pytest.mark.parametrize("between", [BEAT, FOREIGN], ids=["a beat", "what does not count"])
def test_parts_that_do_not_stand_together_make_no_frame(between: LogRecord) -> None:
    first, second = parts(1, 2)
    log = log_of(CLAIM, first, between, second, *parts(1, 2))
    found = read_all(log)
    assert [one.verdict for one in found][3] is RecordDecision.VOID
    assert [one.record for one in found if one.frame is not None] == [parts(1, 2)[1]]


def test_a_frame_that_begins_anew_forgets_the_parts_before() -> None:
    first, second = parts(1, 2)
    assert seqs(read_all(log_of(CLAIM, first, first, second))) == [1]


def test_from_every_place_the_rest_is_the_same() -> None:
    log = log_of(
        CLAIM, *parts(1, 3), BEAT, FOREIGN, *parts(2, 2), Claim(2, 2, 5, 7, ""),
        *parts(3, 1), *parts(3, 2, node=2, epoch=2),
    )  # fmt: skip
    found = read_all(log)
    assert seqs(found) == [1, 2, 3]
    for number, one in enumerate(found, 1):
        again = read_all(log, one.place)
        behind = [two for two in found[number:] if two.frame is not None]
        assert seqs(again) == seqs(behind), number
        assert [two.verdict for two in again[-(len(found) - number) :]] == [
            two.verdict for two in found[number:]
        ] or number == len(found)


def test_a_record_that_is_damaged_stops_everybody() -> None:
    log = log_of(CLAIM)
    data = bytearray(envelope.encode(BEAT))
    data[-1] ^= 1
    log.append([bytes(data)])
    with pytest.raises(RecordDamageError, match="checksum"):
        read_all(log)


def test_a_frame_that_is_damaged_within_intact_records_stops_everybody() -> None:
    frame = bytearray(a_frame(1, b"x" * 1000))
    frame[-3] ^= 1
    (part,) = split(bytes(frame), node=1, epoch=1, clock_ms=5)
    with pytest.raises(RecordDamageError, match="its frame does not match"):
        read_all(log_of(CLAIM, part))


def test_bytes_that_are_no_frame() -> None:
    with pytest.raises(RecordDamageError):
        frame_of(b"", LogKind.MESSAGE, STAMP, "log", 3)
    with pytest.raises(RecordDamageError):
        frame_of(a_frame(1) + b"\0" * 8, LogKind.MESSAGE, STAMP, "log", 3)


def test_a_log_that_ends_before_the_place() -> None:
    with pytest.raises(OffsetRangeError):
        read_all(log_of(CLAIM), OfficeState(next_offset=5))


def test_a_log_that_has_lost_its_end_and_grown_again() -> None:
    log = log_of(CLAIM, *parts(1, 1), BEAT)
    place = read_all(log)[-1].place
    assert read_all(log, place) == []
    del log._records.kept[1:]
    others = (BEAT, Beat(1, 1, 6, 0, 0, 0), BEAT, BEAT)
    log.another().append([envelope.encode(one) for one in others])
    with pytest.raises(LogReplacedError, match="at offset 2: this replica has read another"):
        read_all(log, place)


@pytest.mark.parametrize("end", [0, 1, 2])
def test_a_log_that_has_lost_its_end(end: int) -> None:
    log = log_of(CLAIM, *parts(1, 1), BEAT)
    place = read_all(log)[-1].place
    del log._records.kept[end:]
    with pytest.raises(OffsetRangeError):
        read_all(log, place)


def test_a_place_whose_record_was_deleted_long_ago() -> None:
    log = log_of(CLAIM, *parts(1, 1), BEAT)
    place = read_all(log)[-1].place
    log.another().append([envelope.encode(BEAT)])
    log.delete_before(3)
    assert len(read_all(log, place)) == 1


def test_a_place_whose_record_does_not_come_yet() -> None:
    log = log_of(CLAIM, BEAT)
    place = read_all(log)[0].place
    away = log.another()
    away.is_reachable = False
    reader = RecordReader(away, STAMP, place)
    assert reader.read(0) == []
    away.is_reachable = True
    assert len(reader.read(0)) == 1


RELEASE = Release(1, 1, 5, 0)
LEFT = (LeasesPart(1, 1, 5, 0, 2, b"le"), LeasesPart(1, 1, 5, 1, 2, b"ases"))


def left_by(*records: LogRecord) -> bytes | None:
    reader = RecordReader(log_of(*records), STAMP, OfficeState())
    reader.read(0)
    return reader.leases


def test_leases_are_those_of_the_owner_that_has_left() -> None:
    assert left_by(CLAIM, *LEFT, RELEASE) == b"leases"
    assert left_by(CLAIM, FOREIGN, LEFT[0], FOREIGN, LEFT[1], RELEASE, FOREIGN) == b"leases"
    assert left_by(CLAIM, LEFT[0], *LEFT, RELEASE) == b"leases"


@pytest.mark.parametrize(
    "records",
    [
        (),
        (RELEASE,),
        LEFT,
        (LEFT[0], RELEASE),
        (LEFT[1], RELEASE),
        (LEFT[0], LEFT[1], LEFT[1], RELEASE),
        (*LEFT, BEAT, RELEASE),
        (*LEFT, *parts(1, 1), RELEASE),
        (*LEFT, RELEASE, Claim(2, 2, 5, 3, "")),
    ],
)
def test_what_is_not_whole_or_not_left_is_nothing(records: tuple[LogRecord, ...]) -> None:
    assert left_by(CLAIM, *records) is None


def test_an_office_is_seized_from_an_owner_that_has_not_left_with_its_leases() -> None:
    def seized(*records: LogRecord) -> int | None:
        after = len(records)
        claim = Claim(2, 2, 10, after, "")
        *_, last = read_all(log_of(CLAIM, *records, claim))
        assert last.verdict is RecordDecision.COUNTS
        return last.seized_ms

    assert read_all(log_of(CLAIM))[0].seized_ms is None
    assert seized(*LEFT, RELEASE) is None
    assert seized(BEAT) == seized(RELEASE) == seized(*LEFT) == 5 + LEASE_MS
    assert seized(LEFT[0], RELEASE) == 5 + LEASE_MS
    late = Claim(2, 2, 90_000, 1, "")
    assert read_all(log_of(CLAIM, BEAT, late))[-1].seized_ms == 90_000
