"""A log that has lost its end: which replica goes on, from where, and which does not."""

from __future__ import annotations

import pytest

from storage.errors import EngineError, LogReplacedError, OffsetRangeError, OtherHistoryError
from storage.replicated.adoption import (
    append_adopt,
    concerns,
    find_adopt,
    is_reached,
    knows_settled,
)
from storage.replicated.envelope import Adopt, Beat, Claim, encode
from storage.replicated.meta import AdoptRecord
from storage.replicated.office import OfficeState, RecordDecision
from storage.replicated.reader import RecordReader, RecordReading
from tests.unit.storage.replicated.test_holder import STAMP
from tests.unit.storage.replicated.test_reader import BEAT, CLAIM, log_of, parts, seqs
from tests.world.storage.engine import MemoryLog

EMPTY = OfficeState()
DECISION = AdoptRecord(0, "n1", 3, 5)


def lost(end: int = 3) -> tuple[MemoryLog, OfficeState]:
    """A log of five records whose end is lost, and the place of a replica that has read them."""
    log = log_of(CLAIM, *parts(1, 1), *parts(2, 1), *parts(3, 1), BEAT)
    place = reader_of(log).read(0)[-1].place
    del log._records.kept[end:]
    return log, place


def reader_of(
    log: MemoryLog,
    place: OfficeState = EMPTY,
    *decisions: AdoptRecord,
) -> RecordReader:
    return RecordReader(log.another(), STAMP, place, lambda: decisions)


def read_all(reader: RecordReader) -> list[RecordReading]:
    return [*reader.read(0), *reader.read(0)]


def adopted(log: MemoryLog, place: OfficeState, settled: MemoryLog | None = None) -> bool:
    return append_adopt(log.another(), settled or MemoryLog(), DECISION, place, 7, node=1, now_ms=3)


def test_the_replica_that_people_have_named_goes_on() -> None:
    log, place = lost()
    with pytest.raises(OffsetRangeError):
        reader_of(log, place).read(0)
    with pytest.raises(OffsetRangeError):
        reader_of(log, place, DECISION).read(0)
    assert adopted(log, place)
    log.another().append([encode(Claim(1, 6, 9, 3, "")), *map(encode, parts(4, 1, epoch=6))])
    reader = reader_of(log, place, DECISION)
    adopt, claim, frame = read_all(reader)
    assert isinstance(adopt.record, Adopt)
    assert adopt.record.clock_ms == place.clock_ms, "no clock goes back"
    assert not adopt.is_other_history
    assert claim.verdict is RecordDecision.COUNTS
    assert seqs([frame]) == [4]
    assert reader.is_known
    # From its place behind that on nobody needs the decision.
    (again,) = reader_of(log, claim.place).read(0)
    assert seqs([again]) == [4]


def test_before_the_record_was_read_nothing_is_known() -> None:
    log, place = lost()
    adopted(log, place)
    reader = reader_of(log, place, DECISION)
    assert not reader.is_known
    assert reader.read(0) == []
    assert not reader.is_known
    reader.read(0)
    assert reader.is_known


def test_a_replica_with_the_same_frames_goes_on_whatever_else_it_has_read() -> None:
    log, place = lost()
    short = place._replace(next_offset=4, last_offset=3)
    adopted(log, place)
    (found,) = read_all(reader_of(log, short, DECISION))
    assert not found.is_other_history


@pytest.mark.parametrize(("missed_end", "has_missed"), [(4, True), (2, True), (None, False)])
def test_who_has_missed_an_earlier_one_is_told(missed_end: int | None, has_missed: bool) -> None:
    log, place = lost()
    missed = [] if missed_end is None else [AdoptRecord(0, "n2", missed_end, 4)]
    adopted(log, place)
    for behind in (place, place._replace(next_offset=3, last_offset=2)):
        (found,) = read_all(reader_of(log, behind, *missed, DECISION))
        assert found.has_missed_one is has_missed
    # Whoever has read of that one has not.
    (found,) = read_all(reader_of(log, place._replace(epoch=4), *missed, DECISION))
    assert not found.has_missed_one


@pytest.mark.parametrize(
    "other", [{"chain": 1}, {"next_seq": 3}, {"next_seq": 5}], ids=["others", "less", "more"]
)
def test_a_replica_with_other_frames_does_not(other: dict[str, int]) -> None:
    log, place = lost()
    adopted(log, place)
    (found,) = read_all(reader_of(log, place._replace(**other), DECISION))
    assert found.is_other_history


def test_one_that_has_read_no_further_than_the_log_finds_it_by_reading() -> None:
    log, place = lost()
    short = reader_of(log).read(0)[-1].place
    adopted(log, place)
    (found,) = reader_of(log, short, DECISION).read(0)
    assert found.is_other_history


def test_nothing_is_said_where_the_log_does_not_end_where_people_have_seen_it() -> None:
    for end in (2, 4):
        log, place = lost(end)
        assert not adopted(log, place)
        assert log.end() == end
    log, place = lost()
    away = MemoryLog()
    away.is_reachable = False
    assert not adopted(log, place, away)


def test_where_somebody_was_quicker_the_decision_came_to_nothing() -> None:
    log, place = lost()
    log.another().append([encode(Claim(2, 2, 9, 2, ""))] * 3)
    assert is_reached(log, DECISION)
    with pytest.raises(LogReplacedError):
        reader_of(log, place, DECISION).read(0)


def test_of_several_decisions_the_one_counts_that_was_carried_out() -> None:
    log, place = lost()
    before = AdoptRecord(0, "n2", 2, 4)
    adopted(log, place)
    assert find_adopt(log, place, [before, DECISION]) == 3
    assert find_adopt(log, place, [before]) is None


def test_a_decision_is_about_what_was_read_before_it() -> None:
    place = OfficeState(next_offset=9, epoch=4, last_offset=8)
    assert concerns(DECISION, place)
    assert not concerns(DECISION, place._replace(epoch=5)), "it stands behind that one"
    assert not concerns(DECISION, place._replace(next_offset=3, last_offset=2))
    assert concerns(DECISION, place._replace(next_offset=3)), "a reader that has gone back"


def test_what_was_decided_long_ago_cannot_be_compared_any_more() -> None:
    log, place = lost()
    adopted(log, place)
    log.another().append([encode(Beat(1, 5, 9, 0, 0, 0))] * 9)
    log.delete_before(6)
    with pytest.raises(OtherHistoryError):
        reader_of(log, place, DECISION).read(0)


def test_an_engine_that_is_away_is_asked_again() -> None:
    log, place = lost()
    adopted(log, place)
    away = log.another()
    away.is_reachable = False
    with pytest.raises(EngineError):
        find_adopt(away, place, [DECISION])
    reader = RecordReader(away, STAMP, place, lambda: [DECISION])
    assert reader.read(0) == []
    away.is_reachable = True
    assert len(read_all(reader)) == 1


@pytest.mark.parametrize(("place", "knows"), [(7, True), (6, False), (9, True)])
def test_what_is_settled_may_be_nowhere_but_in_files(place: int, knows: bool) -> None:
    record = Adopt(1, 5, 0, 3, 4, 1, 0, settled_place=7, settled_end=5)
    assert knows_settled(record, place) is knows
    assert knows_settled(Adopt(1, 5, 0, 3, 4, 1, 0, 7, 7), 0)
