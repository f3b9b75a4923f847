"""The log of what is settled: frames of rows, by anybody."""

from __future__ import annotations

import numpy as np
import pytest

from storage.errors import FencedError, RecordDamageError
from storage.notes import Note, encode_note, unpack_notes
from storage.replicated.envelope import PART_MAX_BYTES
from storage.replicated.settled import ROWS_MAX, SettledLog
from storage.rows import DISPATCH_DTYPE
from tests.world.storage.engine import AppendOutcome, MemoryLog

STAMP = 7


def rows(*seqs: int) -> bytes:
    found = np.zeros(len(seqs), DISPATCH_DTYPE)
    found["seq"] = seqs
    return found.tobytes()


def read(log: SettledLog, offset: int = 0) -> list[tuple[int, list[int]]]:
    return [(one.offset, one.rows["seq"].tolist()) for one in log.read(offset, 0)]


def test_what_one_process_appends_another_reads() -> None:
    origin = MemoryLog()
    one, other = SettledLog(origin.another(), STAMP), SettledLog(origin.another(), STAMP)
    assert [found.offset for found in one.append([rows(5, 3)], 1)] == [0]
    assert [found.offset for found in other.append([rows(4)], 1)] == [1]
    assert read(one) == read(other) == [(0, [5, 3]), (1, [4])]
    assert read(one, 1) == [(1, [4])]
    assert one.end() == 2


def test_many_rows_are_several_records() -> None:
    log = SettledLog(MemoryLog(), STAMP)
    found = log.append([rows(*range(1, 2 * ROWS_MAX + 2))], 1)
    assert [len(one.rows) for one in found] == [ROWS_MAX, ROWS_MAX, 1]
    assert [len(seqs) for _, seqs in read(log)] == [ROWS_MAX, ROWS_MAX, 1]


def test_notes_stay_with_their_rows() -> None:
    log = SettledLog(MemoryLog(), STAMP)
    note = encode_note(Note(1, 5, 2, 1, 100, 3, 200, "y" * (PART_MAX_BYTES - 120)))
    found = log.append([rows(4), rows(5), note, rows(6)], 1)
    assert [one.rows["seq"].tolist() for one in found] == [[4, 5], [6]]
    [first, second] = log.read(0, 0)
    assert [one.answer[:2] for one in unpack_notes(first.notes)] == ["yy"] and not second.notes


@pytest.mark.parametrize("outcome", [AppendOutcome.LOST, AppendOutcome.UNANSWERED])
def test_without_an_answer_nobody_knows(outcome: AppendOutcome) -> None:
    origin = MemoryLog()
    way = origin.another()
    way.outcome = outcome
    with pytest.raises(FencedError, match="not known"):
        SettledLog(way, STAMP).append([rows(1)], 1)


def test_what_is_none_of_it_stops_the_reader() -> None:
    origin = MemoryLog()
    origin.append([b"\0" * 64])
    with pytest.raises(RecordDamageError):
        read(SettledLog(origin, STAMP))
    of_another = MemoryLog()
    SettledLog(of_another.another(), STAMP + 1).append([rows(1)], 1)
    with pytest.raises(RecordDamageError):
        read(SettledLog(of_another, STAMP))
