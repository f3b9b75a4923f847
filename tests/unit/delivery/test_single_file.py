"""Single file: whose turn it is in a group, compared with a model that sorts."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

from delayserver.delivery.deliveries import Deliveries
from delayserver.delivery.lane import Room
from delayserver.delivery.single_file import SingleFile
from delayserver.records.message import MessageOptions, ScheduleEntry
from delayserver.schedule.wheel_rows import ROUTE_GROUP, FiredRows, priority_of
from tests.unit.fakes import HOUR, START_MS, deliveries, delivery, seqs, wheel_rows

ROOM = 1 << 40
Ranked = tuple[int, str, int]
"""Seq, group, and how long after the first it is due."""


def note(single_file: SingleFile, *rows: Ranked) -> None:
    due = sorted(rows, key=lambda row: row[2])
    fired = wheel_rows(HOUR, *((seq, START_MS + at) for seq, _, at in due), route=1 | ROUTE_GROUP)
    single_file.note(FiredRows(HOUR, fired))


def read(single_file: SingleFile, *rows: Ranked, priority: int = 0) -> list[int]:
    """Notes rows and reads them; returns what may leave."""
    note(single_file, *rows)
    single_file.next_unread(Room(1000, ROOM))
    leaving, lost = single_file.on_read(read_rows(*rows, priority=priority))
    assert lost == []
    return seqs(leaving)


def read_rows(*rows: Ranked, priority: int = 0) -> Deliveries:
    ones = []
    for seq, group, at in sorted(rows, key=lambda row: row[2]):
        one = delivery(seq, START_MS + at)
        one.row["route"] = 1 | ROUTE_GROUP
        options = MessageOptions(priority=priority, group=group)
        payload = msgspec.structs.replace(one.payload, options=options)
        ones.append(msgspec.structs.replace(one, payload=payload))
    return deliveries(*ones)


@pytest.mark.parametrize("seed", range(5))
def test_the_earliest_of_each_group_is_next_as_in_a_model_that_sorts(seed: int) -> None:
    rng = random.Random(seed)
    single_file = SingleFile()
    heads: dict[str, int] = {}
    waiting: dict[str, list[tuple[int, int]]] = {}
    next_seq = 1
    for _ in range(60):
        if rng.random() < 0.4:
            count = rng.randrange(1, 12)
            new = [
                (next_seq + index, rng.choice("abcd"), rng.randrange(1000))
                for index in range(count)
            ]
            next_seq += count
            expected = []
            for seq, group, at in sorted(new, key=lambda row: (row[2], row[0])):
                if group in heads:
                    waiting.setdefault(group, []).append((at, seq))
                else:
                    heads[group] = seq
                    expected.append(seq)
            assert sorted(read(single_file, *new)) == sorted(expected)
        elif heads:
            group = rng.choice(sorted(heads))
            seq, behind = heads.pop(group), sorted(waiting.pop(group, []))
            if behind:
                heads[group] = behind[0][1]
                waiting[group] = behind[1:]
            assert seqs(single_file.release([seq])) == [one for _, one in behind[:1]]
        left = {seq for behind in waiting.values() for _, seq in behind}
        assert single_file.count == len(left)
        assert set(seqs(single_file.slices())) == left


def test_what_comes_back_as_another_row_is_the_head_still() -> None:
    single_file = SingleFile()
    assert read(single_file, (1, "a", 0), (2, "a", 1)) == [1]
    single_file.hold("a", 1, 1)
    assert single_file.release([7]) == [], "it was no head"
    assert read(single_file, (1, "a", 0)) == [1]
    assert seqs(single_file.release([1, 1])) == [2]


def test_a_retry_that_waits_holds_up_what_comes() -> None:
    single_file = SingleFile()
    single_file.hold("a", 9, 90)
    assert read(single_file, (10, "a", 0), (11, "b", 0)) == [11]
    assert seqs(single_file.release([9])) == [10]


def test_of_two_retries_the_second_goes_when_the_first_is_settled() -> None:
    single_file = SingleFile()
    single_file.hold("a", 9, 90)
    single_file.hold("a", 8, 80)
    single_file.hold("a", 7, 70)
    assert read(single_file, (1, "a", 0)) == []
    assert single_file.release([9]) == [], "the row of the second is still to come"
    assert read(single_file, (2, "a", 0)) == []
    assert single_file.release([7]) == [], "it was cancelled"
    assert seqs(single_file.release([8])) == [1]


def test_the_second_of_two_retries_may_have_come_already() -> None:
    single_file = SingleFile()
    single_file.hold("a", 9, 90)
    single_file.hold("a", 8, 8)
    assert read(single_file, (1, "a", 0), (8, "a", 5)) == []
    assert seqs(single_file.release([9])) == [8]
    assert seqs(single_file.release([8])) == [1]


def test_what_cannot_be_read_is_not_here_any_more_and_neither_is_what_was_taken_out() -> None:
    single_file = SingleFile()
    note(single_file, (1, "a", 0), (2, "b", 0), (3, "c", 0))
    single_file.next_unread(Room(1000, ROOM))
    assert single_file.count == 3
    assert seqs(single_file.take(np.array([2], np.uint64))) == [2]
    leaving, lost = single_file.on_read(read_rows((2, "b", 0), (3, "c", 0)))
    assert (seqs(leaving), lost) == ([3], [1])
    assert single_file.count == 0


def test_a_head_whose_row_is_lost_makes_way() -> None:
    single_file = SingleFile()
    assert read(single_file, (1, "a", 0), (2, "a", 1), (3, "a", 2), (4, "a", 3)) == [1]
    assert single_file.lose([2]) == [], "that is no head"
    single_file.follow(1, 20)
    assert single_file.lose([1]) == [], "it waits as another row"
    assert seqs(single_file.lose([20])) == [2]
    assert seqs(single_file.lose([2])) == [3]
    single_file.hold("a", 9, 90)
    assert single_file.lose([90]) == []
    assert seqs(single_file.release([3])) == [4]


def test_rows_that_came_subject_by_subject_are_read_in_due_order() -> None:
    single_file = SingleFile()
    for rows in ([(5, "a", 4), (6, "a", 6)], [(7, "a", 3), (8, "a", 6)]):
        note(single_file, *rows)
    found = [seqs(single_file.next_unread(Room(1, ROOM))) for _ in range(4)]
    assert found == [[7], [5], [6], [8]]


def test_what_waits_behind_a_head_counts_for_the_age_of_the_backlog() -> None:
    single_file = SingleFile()
    assert single_file.first_ms() is None
    assert read(single_file, (1, "a", 0)) == [1]
    assert single_file.first_ms() is None  # The head has left.
    assert read(single_file, (3, "a", 50), (2, "a", 20)) == []
    assert single_file.first_ms() == START_MS + 20
    note(single_file, (4, "b", 10))
    assert single_file.first_ms() == START_MS + 10


def test_what_waits_is_found_and_can_be_taken_out() -> None:
    single_file = SingleFile()
    assert read(single_file, (1, "a", 0), (2, "a", 1), (3, "a", 2)) == [1]
    assert single_file.holds(ScheduleEntry(2, START_MS + 1))
    assert not single_file.holds(ScheduleEntry(1, START_MS))
    assert seqs(single_file.take(np.array([2], np.uint64))) == [2]
    assert not single_file.holds(ScheduleEntry(2, START_MS + 1))
    assert seqs(single_file.release([1])) == [3]


def test_a_row_that_leaves_has_the_priority_of_its_message() -> None:
    single_file = SingleFile()
    note(single_file, (1, "a", 0), (2, "a", 0))
    single_file.next_unread(Room(1000, ROOM))
    [first], _ = single_file.on_read(read_rows((1, "a", 0), (2, "a", 0), priority=7))
    [second] = single_file.release([1])
    assert [priority_of(int(one.rows["route"][0])) for one in (first, second)] == [7, 7]
