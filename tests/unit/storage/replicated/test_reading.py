"""A log that is read to its end."""

import pytest

from storage.errors import EngineError, OffsetRangeError
from storage.replicated.reading import END_TRIES, TRIES, read_to_end
from tests.world.storage.engine import READ_RECORDS_MAX, MemoryLog


def test_all_records_in_several_reads() -> None:
    log = MemoryLog()
    records = [b"%d" % number for number in range(2 * READ_RECORDS_MAX + 3)]
    log.append(records)
    assert list(read_to_end(log, 0)) == list(enumerate(records))
    assert [offset for offset, _ in read_to_end(log, 1020)] == list(range(1020, len(records)))
    assert list(read_to_end(log, len(records))) == []


def test_an_end_that_is_given() -> None:
    log = MemoryLog()
    log.append([b"a", b"b"])
    assert list(read_to_end(log, 2, 2)) == []


def test_an_engine_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    log = MemoryLog()
    log.append([b"a"])
    log.is_reachable = False
    with pytest.raises(EngineError, match="does not say where the log ends"):
        list(read_to_end(log, 0))
    waits: list[float] = []

    def read_nothing(_offset: int, wait_s: float) -> list[tuple[int, bytes]]:
        waits.append(wait_s)
        return []

    monkeypatch.setattr(log, "read", read_nothing)
    with pytest.raises(EngineError, match="there is no record 0"):
        list(read_to_end(log, 0, 1))
    assert len(waits) == TRIES


def test_an_engine_that_does_not_answer_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    log = MemoryLog()
    log.append([b"a"])
    answers = iter([None] * (END_TRIES - 1) + [1])
    monkeypatch.setattr(log, "end", lambda: next(answers))
    assert list(read_to_end(log, 0)) == [(0, b"a")]


def test_what_was_deleted() -> None:
    log = MemoryLog()
    log.append([b"a", b"b"])
    log.delete_before(1)
    with pytest.raises(OffsetRangeError):
        list(read_to_end(log, 0))
