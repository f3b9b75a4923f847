"""What every `EngineLog` does: the same tests for the one in memory and the one on real brokers.

A class of tests inherits `EngineContract` and gives it `open_log`: a function that opens the log of
the test, as another process each time.
"""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from storage.errors import EngineError, OffsetRangeError
from storage.replicated.engine import EngineLog

Opener = Callable[[], EngineLog]
"""Opens the test's log, as another process each time."""

PATIENCE_S = 20.0


def read_until(log: EngineLog, offset: int, end: int) -> list[tuple[int, bytes]]:
    """All records from `offset` to before `end`."""
    found: list[tuple[int, bytes]] = []
    give_up_s = time.monotonic() + PATIENCE_S
    while offset < end and time.monotonic() < give_up_s:
        records = log.read(offset, 0.5)
        found += records
        offset += len(records)
        assert log.place == offset, "in a log without transactions"
    return found


class EngineContract:
    """To be inherited."""

    @pytest.fixture
    def open_log(self) -> Iterator[Opener]:
        raise NotImplementedError

    def test_an_append_is_answered_with_its_offset(self, open_log: Opener) -> None:
        log = open_log()
        assert log.append([b"a"]) == [0]
        assert log.append([b"b", b"c", b"d"]) == [1, 2, 3]
        assert log.append([]) == []
        assert log.end() == 4

    def test_what_was_appended_is_read_in_order(self, open_log: Opener) -> None:
        records = [b"%d" % number * (1 + number % 7) for number in range(2000)]
        log = open_log()
        assert log.append(records) == list(range(2000))
        assert read_until(open_log(), 0, 2000) == list(enumerate(records))
        assert read_until(log, 1990, 2000) == list(enumerate(records))[1990:]

    def test_a_reader_goes_where_it_is_asked_to(self, open_log: Opener) -> None:
        log = open_log()
        log.append([b"%d" % number for number in range(20)])
        reader = open_log()
        for offset in (3, 17, 0, 19, 5, 6):
            assert read_until(reader, offset, offset + 1)[0] == (offset, b"%d" % offset)

    def test_bytes_are_kept_as_they_are(self, open_log: Opener) -> None:
        log = open_log()
        records = [b"", bytes(range(256)), b"\0", b"x" * (900 * 1024 + 32)]
        assert log.append(records) == [0, 1, 2, 3]
        assert [data for _, data in read_until(open_log(), 0, 4)] == records

    def test_at_the_end_nothing_is_read(self, open_log: Opener) -> None:
        log = open_log()
        assert log.end() == 0
        assert log.read(0, 0) == []
        log.append([b"a"])
        assert log.read(1, 0.05) == []

    def test_a_reader_is_woken(self, open_log: Opener) -> None:
        writer, reader = open_log(), open_log()
        writer.append([b"first"])
        read_until(reader, 0, 1)
        woken: list[list[tuple[int, bytes]]] = []
        thread = threading.Thread(target=lambda: woken.append(reader.read(1, PATIENCE_S)))
        thread.start()
        writer.append([b"second"])
        thread.join(PATIENCE_S)
        assert woken == [[(1, b"second")]]

    def test_several_append_to_one_log(self, open_log: Opener) -> None:
        """In one order, which is the same for all."""
        writers = [open_log() for _ in range(3)]
        answered: dict[int, bytes] = {}
        for turn in range(10):
            for number, writer in enumerate(writers):
                data = b"%d of %d" % (turn, number)
                (offset,) = writer.append([data])
                assert offset is not None
                answered[offset] = data
        assert dict(read_until(writers[0], 0, 30)) == answered
        assert read_until(open_log(), 0, 30) == sorted(answered.items())

    def test_one_who_reads_may_append_and_read_on(self, open_log: Opener) -> None:
        log, other = open_log(), open_log()
        other.append([b"a"])
        assert read_until(log, 0, 1) == [(0, b"a")]
        assert log.append([b"b"]) == [1]
        other.append([b"c"])
        assert read_until(log, 1, 3) == [(1, b"b"), (2, b"c")]

    def test_what_is_not_there_is_refused(self, open_log: Opener) -> None:
        log = open_log()
        log.append([b"a", b"b", b"c"])
        with pytest.raises(OffsetRangeError) as refused:
            read_until(open_log(), 7, 8)
        assert (refused.value.first, refused.value.end, refused.value.offset) == (0, 3, 7)
        assert log.name in str(refused.value)

    def test_what_was_deleted_is_refused(self, open_log: Opener) -> None:
        log = open_log()
        log.append([b"a", b"b", b"c"])
        reader = open_log()
        log.delete_before(2)
        with pytest.raises(OffsetRangeError) as refused:
            read_until(reader, 0, 3)
        assert (refused.value.first, refused.value.end) == (2, 3)
        assert read_until(reader, 2, 3) == [(2, b"c")]
        assert log.end() == 3
        log.delete_before(1)
        assert log.append([b"d"]) == [3]
        with pytest.raises(EngineError, match="delete records"):
            log.delete_before(9)

    def test_a_log_that_was_closed_is_opened_anew(self, open_log: Opener) -> None:
        log = open_log()
        log.append([b"a"])
        read_until(log, 0, 1)
        log.close()
        log = open_log()
        assert log.append([b"b"]) == [1]
        assert read_until(log, 0, 2) == [(0, b"a"), (1, b"b")]
