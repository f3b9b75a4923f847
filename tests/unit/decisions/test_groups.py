"""Groups: one is written at a time, the next one fills, and what is not filed is bounded."""

from __future__ import annotations

from typing import Any

import pytest

from delayserver.config import Settings
from delayserver.decisions.groups import SLOW_MS, Groups
from delayserver.decisions.sequencer import Sequencer
from delayserver.errors import OverloadedError, StoppingError
from storage.errors import DiskFullError
from storage.frame import seal
from storage.rows import MESSAGE_DTYPE, RecordKind
from tests.unit.fakes import NotingPorts
from tests.world.storage.catalog import MemoryCatalog

ROW_BYTES = MESSAGE_DTYPE.itemsize
FULL = DiskFullError("pwrite", "messages", "no space")


class Parts:
    def __init__(self, **settings: Any) -> None:
        self.sequencer = Sequencer(MemoryCatalog(), next_seq=1, subjects={})
        self.ports = NotingPorts()
        self.groups = Groups(Settings(**settings), self.sequencer, self.ports)

    def append(self, payload: bytes = b"") -> int:
        sealed = seal(payload) if payload else b""
        seq = self.sequencer.append(RecordKind.PUBLISH, subject_id=1, payload=sealed)
        self.groups.wake()
        return seq

    def append_import(self) -> None:
        """A stand-in for what an import does when it is decided."""
        self.append()


@pytest.fixture
def parts() -> Parts:
    return Parts()


def test_one_wake_up_for_all_records_of_a_turn(parts: Parts) -> None:
    parts.append()
    parts.append()
    assert parts.ports.wakes == 1
    parts.groups.flush(0)
    assert [group.count for group in parts.ports.committing] == [2]
    assert not parts.groups.is_idle


def test_while_one_group_is_synced_the_next_one_fills(parts: Parts) -> None:
    parts.append()
    parts.groups.flush(100)
    parts.append()
    parts.append()
    parts.groups.flush(101)
    assert parts.ports.wakes == 1
    assert len(parts.ports.committing) == 1
    first = parts.groups.on_committed()
    parts.groups.flush(102)
    assert (first.first_seq, first.last_seq, first.created_ms) == (1, 1, 100)
    assert [group.count for group in parts.ports.committing] == [1, 2]
    assert parts.ports.filing == [first]
    assert parts.groups.durable_seq == 1
    parts.groups.on_committed()
    assert parts.groups.durable_seq == 3
    assert parts.groups.is_idle
    assert parts.groups.committed_total == 2


def test_what_was_gathered_has_one_turn_more_where_the_disk_is_quick(parts: Parts) -> None:
    decided: list[str] = []
    parts.groups.decide_when_free(lambda: decided.append("first"))
    parts.groups.flush(0, at_once=True)
    assert decided == []
    assert parts.ports.wakes == 2
    parts.groups.decide_when_free(lambda: decided.append("second"))
    parts.groups.decide_when_free(parts.append)
    assert parts.ports.wakes == 2
    parts.groups.flush(1, at_once=True)
    assert decided == ["first", "second"]
    assert len(parts.ports.committing) == 1
    parts.groups.on_committed()
    # The next ones have theirs, too; what nobody gathers needs none.
    parts.groups.decide_when_free(lambda: decided.append("third"))
    parts.groups.flush(2, at_once=True)
    assert decided == ["first", "second"]
    parts.groups.flush(3, at_once=True)
    assert decided == ["first", "second", "third"]
    parts.append()
    parts.groups.flush(4, at_once=True)
    assert len(parts.ports.committing) == 2


def test_an_empty_group_is_not_written(parts: Parts) -> None:
    parts.groups.flush(0)
    assert parts.ports.committing == []
    assert parts.groups.is_idle
    assert parts.groups.not_durable() is None


def test_after_a_flush_there_is_a_wake_up_again(parts: Parts) -> None:
    parts.append()
    parts.groups.flush(0)
    parts.groups.on_committed()
    parts.append()
    assert parts.ports.wakes == 2


def test_a_full_disk_rolls_back_the_group_and_the_one_decided_on_top_of_it(parts: Parts) -> None:
    heard: list[tuple[str, Exception | None]] = []
    parts.append()
    parts.sequencer.group.when_durable(lambda error: heard.append(("first", error)))
    parts.groups.flush(0)
    parts.append()
    parts.sequencer.group.when_durable(lambda error: heard.append(("second", error)))
    parts.groups.on_commit_failed(FULL)
    assert heard == [("first", FULL), ("second", FULL)]
    assert parts.groups.is_idle
    assert parts.sequencer.next_seq == 1
    assert parts.groups.durable_seq == 0
    assert parts.groups.committed_total == 0
    # The next one is written as if nothing had been.
    assert parts.append() == 1
    parts.groups.flush(0)
    assert parts.groups.on_committed().first_seq == 1
    assert parts.groups.unfiled_bytes == ROW_BYTES


def test_an_import_is_decided_when_the_group_before_it_has_been_applied(parts: Parts) -> None:
    parts.append()
    parts.groups.flush(0)
    parts.groups.decide_before_closing(parts.append_import)
    parts.groups.flush(0)
    parts.groups.on_committed()
    # The caller is about to apply the group.
    assert len(parts.ports.committing) == 1
    parts.groups.flush(0)
    assert [group.first_seq for group in parts.ports.committing] == [1, 2]


def test_a_full_disk_does_not_leave_an_import_waiting_for_the_next_request(parts: Parts) -> None:
    parts.append()
    parts.groups.flush(0)
    parts.groups.decide_before_closing(parts.append_import)
    parts.groups.on_commit_failed(FULL)
    assert parts.ports.wakes == 2
    parts.groups.flush(0)
    assert len(parts.ports.committing) == 2


def test_an_import_that_decides_nothing_does_not_hold_up_the_next(parts: Parts) -> None:
    parts.groups.decide_before_closing(lambda: None)
    parts.groups.decide_before_closing(parts.append_import)
    parts.groups.flush(0)
    assert parts.ports.wakes == 2
    parts.groups.flush(0)
    assert len(parts.ports.committing) == 1


def test_what_comes_while_a_group_is_synced_is_decided_when_the_committer_is_free(
    parts: Parts,
) -> None:
    decided: list[int] = []

    def decide() -> None:
        decided.append(parts.append())

    parts.groups.decide_when_free(decide)
    assert (parts.ports.wakes, decided) == (1, [])
    parts.groups.flush(0)
    parts.groups.decide_when_free(decide)
    parts.groups.decide_before_closing(parts.append_import)
    parts.groups.flush(0)
    assert decided == [1]
    parts.groups.on_committed()
    assert decided == [1]
    assert not parts.groups.is_idle
    parts.groups.flush(0)
    assert decided == [1, 2]
    # The import is behind it, the last record of its group.
    assert [group.count for group in parts.ports.committing] == [1, 2]
    assert parts.ports.wakes == 1


def test_what_is_decided_in_its_turn_does_not_wait_for_the_committer(parts: Parts) -> None:
    decided: list[int] = []

    def decide() -> None:
        decided.append(parts.append())

    parts.groups.decide_this_turn(decide)
    parts.groups.decide_this_turn(decide)
    assert (parts.ports.wakes, decided) == (1, [])
    assert not parts.groups.is_idle
    parts.groups.flush(0)
    assert [group.count for group in parts.ports.committing] == [2]
    parts.groups.decide_this_turn(decide)
    parts.groups.flush(0)
    assert decided == [1, 2, 3]
    assert (parts.ports.wakes, len(parts.ports.committing)) == (2, 1)
    parts.groups.on_committed()
    parts.groups.flush(0)
    assert [group.count for group in parts.ports.committing] == [2, 1]
    parts.groups.on_committed()
    assert parts.groups.is_idle


def test_a_full_disk_does_not_leave_what_is_gathered_waiting(parts: Parts) -> None:
    parts.append()
    parts.groups.flush(0)
    parts.groups.decide_when_free(parts.append)
    parts.groups.on_commit_failed(FULL)
    assert parts.ports.wakes == 2
    parts.groups.flush(0)
    assert len(parts.ports.committing) == 2


def test_decisions_that_leave_no_record_do_not_leave_the_next_waiting(parts: Parts) -> None:
    decided: list[str] = []

    def decide() -> None:
        decided.append("first")
        parts.groups.decide_when_free(lambda: decided.append("second"))

    parts.groups.decide_when_free(decide)
    parts.groups.flush(0)
    assert (decided, parts.ports.wakes) == (["first"], 2)
    parts.groups.flush(0)
    assert decided == ["first", "second"]
    assert parts.groups.is_idle
    assert parts.ports.wakes == 2


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_decision_of_a_turn_that_asks_for_another_gets_it(parts: Parts, is_busy: bool) -> None:
    """An answer may bring the next request of its client at once."""
    decided: list[str] = []
    if is_busy:
        parts.append()
        parts.groups.flush(0)
    wakes = parts.ports.wakes

    def decide() -> None:
        decided.append("first")
        parts.groups.decide_this_turn(lambda: decided.append("second"))

    parts.groups.decide_this_turn(decide)
    parts.groups.flush(0)
    assert (decided, parts.ports.wakes) == (["first"], wakes + 2)
    parts.groups.flush(0)
    assert decided == ["first", "second"]
    assert parts.ports.wakes == wakes + 2
    parts.groups.decide_when_free(lambda: parts.groups.decide_this_turn(decide))
    if is_busy:
        parts.groups.on_committed()
    parts.groups.flush(0)
    asked = parts.ports.wakes
    parts.groups.flush(0)
    assert decided == ["first", "second", "first"]
    assert asked == wakes + 4 - is_busy


def test_which_group_to_wait_for(parts: Parts) -> None:
    first = parts.append()
    assert parts.groups.not_durable() is parts.sequencer.group
    parts.groups.flush(0)
    committing = parts.ports.committing[0]
    assert parts.groups.not_durable() is committing
    second = parts.append()
    assert parts.groups.group_of(first) is committing
    assert parts.groups.group_of(second) is parts.sequencer.group
    assert parts.groups.not_durable() is parts.sequencer.group
    parts.groups.on_committed()
    assert parts.groups.group_of(first) is None
    parts.groups.flush(0)
    assert parts.groups.group_of(second) is parts.ports.committing[1]


def test_payloads_are_found_until_they_are_filed(parts: Parts) -> None:
    first = parts.append(b"first")
    parts.groups.flush(0)
    second = parts.append(b"second")
    parts.groups.on_committed()
    third = parts.append(b"third")
    for seq, text in ((first, b"first"), (second, b"second"), (third, b"third")):
        assert parts.groups.payload(seq) == (seal(text), 1)
    parts.groups.on_filed(first)
    assert parts.groups.payload(first) is None
    assert parts.groups.payload(second) == (seal(b"second"), 1)
    assert parts.groups.payload(third) == (seal(b"third"), 1)


def test_what_is_filed_or_went_by_the_express_way_is_not_in_memory(parts: Parts) -> None:
    first, second = parts.append(), parts.append()
    parts.sequencer.group.express.append((second, 0, 1))
    assert parts.groups.is_in_memory(first)
    assert parts.groups.is_in_memory(second)
    parts.groups.flush(0)
    assert parts.groups.is_in_memory(second)
    parts.groups.on_committed()
    assert parts.groups.is_in_memory(first)
    assert not parts.groups.is_in_memory(second)
    parts.groups.on_filed(second)
    assert not parts.groups.is_in_memory(first)
    assert not parts.groups.is_in_memory(second)


def test_bytes_count_until_they_are_filed(parts: Parts) -> None:
    parts.append(b"1234")
    length = ROW_BYTES + len(seal(b"1234"))
    assert parts.groups.unfiled_bytes == length
    parts.groups.flush(0)
    parts.groups.on_committed()
    parts.append()
    assert parts.groups.unfiled_bytes == length + ROW_BYTES
    parts.groups.flush(0)
    parts.groups.on_committed()
    parts.groups.on_filed(1)
    assert parts.groups.unfiled_bytes == ROW_BYTES
    parts.groups.on_filed(2)
    assert parts.groups.unfiled_bytes == 0


def test_a_group_takes_no_more_than_its_bound_but_one_request_always_fits() -> None:
    parts = Parts(group_max_bytes=1000)
    parts.groups.admit(5000)
    parts.append()
    parts.groups.admit(1000 - ROW_BYTES)
    with pytest.raises(OverloadedError) as caught:
        parts.groups.admit(1001 - ROW_BYTES)
    assert caught.value.retry_after_ms > 0
    parts.groups.flush(0)
    parts.groups.admit(1000)


def test_a_disk_is_slow_where_much_has_waited_for_long() -> None:
    parts = Parts(group_max_bytes=1000, unfiled_max_bytes=2000, checkpoint_bytes=1)
    assert not parts.groups.files_slowly(10**12)
    for number in range(3):
        parts.append(bytes(300))
        parts.groups.flush(number)
        parts.groups.on_committed()
    assert not parts.groups.files_slowly(SLOW_MS - 1), "much, and not for long"
    assert parts.groups.files_slowly(SLOW_MS)
    parts.groups.on_filed(1)
    assert not parts.groups.files_slowly(10**12), "for long, and not much"
    parts.groups.on_filed(3)
    assert not parts.groups.files_slowly(10**12)


def test_what_is_too_much_for_one_group_goes_on_in_the_next() -> None:
    parts = Parts(group_max_bytes=1000, unfiled_max_bytes=2000, checkpoint_bytes=1)
    heard: list[tuple[int, Exception | None]] = []
    for number in range(1, 7):
        parts.groups.make_room(ROW_BYTES + 304)
        parts.append(bytes(300))
        parts.sequencer.group.when_durable(lambda error, n=number: heard.append((n, error)))  # type: ignore[misc]
    open_group = parts.groups.not_durable()
    assert parts.groups.unfiled_bytes == 6 * (ROW_BYTES + 304)
    assert [parts.groups.group_of(seq) is open_group for seq in (2, 4, 5)] == [False, False, True]
    assert parts.groups.payload(3) == (seal(bytes(300)), 1)
    with pytest.raises(OverloadedError, match="not filed"):
        parts.groups.admit_retries()
    for durable_seq in (2, 4, 6):
        assert not parts.groups.is_idle
        parts.groups.flush(durable_seq)
        group = parts.ports.committing[-1]
        assert group.total_bytes <= 1000
        assert group.created_ms == group.last_seq == durable_seq
        parts.groups.on_committed().tell_waiters(None)
        parts.groups.resume()
    assert parts.groups.is_idle
    assert heard == [(number, None) for number in range(1, 7)]


def test_a_record_that_is_longer_than_a_group_is_alone_in_it() -> None:
    parts = Parts(group_max_bytes=200)
    for length in (10, 500, 10):
        parts.groups.make_room(ROW_BYTES + length + 4)
        parts.append(bytes(length))
    for _ in range(3):
        parts.groups.flush(0)
        parts.groups.on_committed()
    assert [group.count for group in parts.ports.committing] == [1, 1, 1]


def test_a_full_disk_rolls_back_all_that_was_decided_on_top() -> None:
    parts = Parts(group_max_bytes=200)
    heard: list[Exception | None] = []
    for _ in range(3):
        parts.groups.make_room(ROW_BYTES + 54)
        parts.append(bytes(50))
        parts.sequencer.group.when_durable(heard.append)
    last = parts.groups.not_durable()
    parts.groups.flush(0)
    assert parts.groups.not_durable() is last
    parts.groups.on_commit_failed(FULL)
    assert heard == [FULL, FULL, FULL]
    assert parts.groups.is_idle
    assert parts.append() == 1


def test_an_import_comes_behind_what_was_closed_before_it() -> None:
    parts = Parts(group_max_bytes=200)
    parts.append(bytes(50))

    def decide() -> None:
        parts.groups.make_room(ROW_BYTES + 154)
        parts.append(bytes(150))

    parts.groups.decide_before_closing(decide)
    for _ in range(2):
        parts.groups.flush(0)
        parts.groups.on_committed()
    assert [group.first_seq for group in parts.ports.committing] == [1, 2]
    assert parts.groups.is_idle


def test_publishing_waits_when_filing_does_not_keep_up() -> None:
    parts = Parts(group_max_bytes=600, unfiled_max_bytes=600, checkpoint_bytes=600)
    for _ in range(2):
        parts.append(bytes(240))
        parts.groups.flush(0)
        parts.groups.on_committed()
    with pytest.raises(OverloadedError, match="not filed"):
        parts.groups.admit(1)
    parts.groups.on_filed(1)
    parts.groups.admit(1)


def test_nothing_is_admitted_while_stopping(parts: Parts) -> None:
    parts.groups.stopping = True
    with pytest.raises(StoppingError):
        parts.groups.admit(0)


def test_a_checkpoint_is_remembered(parts: Parts) -> None:
    assert parts.groups.checkpoint_seq == 0
    parts.groups.on_checkpoint(7)
    assert parts.groups.checkpoint_seq == 7
