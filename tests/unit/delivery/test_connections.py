"""Connections: shares of queues and hosts, and the order of those that wait."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayserver.delivery.connections import FEW, LOOKS_MAX, SHARE, Connections


class Room:
    """Places, and queues that want some."""

    def __init__(self, count: int) -> None:
        self.turns: list[Callable[[], None]] = []
        self.connections = Connections(count, self.turns.append, self.on_free)
        self.wants: dict[int, int] = {}
        self.hosts: dict[int, str] = {}
        self.served: list[int] = []
        self.looks = 0

    def want(self, owner: int, count: int, host: str = "") -> int:
        self.wants[owner] = self.wants.get(owner, 0) + count
        self.hosts[owner] = host or f"host-{owner}"
        return self.pump(owner)

    def on_free(self, owner: int) -> None:
        self.pump(owner)

    def pump(self, owner: int) -> int:
        self.looks += 1
        if not self.wants.get(owner):
            return 0
        count = self.connections.take(owner, self.hosts[owner], self.wants[owner])
        self.wants[owner] -= count
        self.served += [owner] * count
        return count

    def turn(self) -> None:
        turns, self.turns[:] = list(self.turns), []
        for function in turns:
            function()

    def settle(self) -> None:
        for _ in range(1000):
            if not self.turns:
                return
            self.turn()
        raise AssertionError("they are served for ever")


def test_one_queue_leaves_places_for_others() -> None:
    room = Room(1024)
    assert room.want(1, 10_000) == 911
    assert room.want(2, 1) == 1
    assert room.connections.free == 112


def test_sixteen_queues_leave_places_for_others() -> None:
    room = Room(1024)
    for owner in range(16):
        room.want(owner, 64)
    room.settle()
    assert room.connections.free == 7
    assert room.want(99, 1) == 1


def test_queues_of_one_host_share_as_one_queue_does() -> None:
    room = Room(1024)
    for owner in range(100):
        room.want(owner, 64, "slow.test")
    room.settle()
    assert room.connections.free == 113
    assert room.want(100, 50) == 50


@pytest.mark.parametrize("count", [1, 2, FEW])
def test_few_places_are_all_used(count: int) -> None:
    room = Room(count)
    assert room.want(1, 100) == count


def test_who_waits_longest_is_next_and_gets_its_part() -> None:
    room = Room(2)
    room.want(1, 10)
    room.want(2, 10)
    room.want(3, 10)
    assert room.served == [1, 1]
    for _ in range(6):
        room.connections.give_back(room.served[-2])
        room.settle()
    assert sorted(room.served[2:]) == [1, 1, 2, 2, 3, 3]


def test_who_comes_does_not_go_before_those_that_wait() -> None:
    room = Room(1)
    room.want(1, 1)
    room.want(2, 1)
    room.connections.give_back(1)
    assert room.want(3, 1) == 0
    room.settle()
    assert room.served == [1, 2]


def test_a_queue_that_wants_no_more_is_passed_over() -> None:
    room = Room(1)
    room.want(1, 1)
    room.want(2, 1)
    room.want(3, 1)
    room.wants[2] = 0
    room.connections.give_back(1)
    room.settle()
    assert room.served == [1, 3]


def test_a_queue_gets_more_once_others_have_given_back() -> None:
    room = Room(1024)
    room.want(1, 500)
    room.want(2, 600)
    room.settle()
    before = room.connections.taken(2)
    room.connections.give_back(1, 500)
    room.settle()
    assert room.connections.taken(2) == 600 > before


def test_requests_that_are_out_count_at_the_host_that_is_asked_now() -> None:
    room = Room(90)
    room.want(1, 50, "old.test")
    room.want(1, 1, "new.test")
    assert room.want(2, 90, "old.test") == 35
    room.connections.give_back(1, 51)
    room.connections.give_back(2, 35)
    room.settle()
    assert room.connections.free + room.connections.taken(1) + room.connections.taken(2) == 90


def test_few_queues_are_served_in_a_turn() -> None:
    room = Room(1)
    room.want(0, 1)
    for owner in range(1, 10 * LOOKS_MAX):
        room.want(owner, 1)
        room.wants[owner] = 0
    room.looks = 0
    room.connections.give_back(0)
    room.turn()
    assert room.looks == LOOKS_MAX


@given(
    count=st.sampled_from([1, 2, 20, 36, 40]),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["want", "give back", "turn"]),
            st.integers(0, 5),
            st.integers(1, 12),
            st.sampled_from(["a", "b", "c"]),
        ),
        max_size=60,
    ),
)
def test_places_are_neither_lost_nor_made(
    count: int, steps: list[tuple[str, int, int, str]]
) -> None:
    room = Room(count)
    for step, owner, number, host in steps:
        free = room.connections.free
        match step:
            case "want":
                got = room.want(owner, number, host)
                # The share held before the last of them was taken.
                assert not got or count <= FEW or got <= SHARE * (free - got + 1)
            case "give back":
                room.connections.give_back(owner, min(number, room.connections.taken(owner)))
            case _:
                room.turn()
        taken = sum(room.connections.taken(one) for one in range(6))
        assert room.connections.free + taken == count
    # All are served in the end.
    for _ in range(1000):
        room.settle()
        if not any(room.wants.values()):
            break
        for one in range(6):
            room.connections.give_back(one, room.connections.taken(one))
    assert not any(room.wants.values())
    for one in range(6):
        room.connections.give_back(one, room.connections.taken(one))
    assert room.connections.free == count


def test_a_free_connection_finds_the_owner_that_wants_it_behind_many_that_want_none() -> None:
    """Each has had its share at one host; then all but the last are paused."""
    room = Room(1024)
    room.want(1, 2000, "slow.test")
    room.settle()
    owners = range(2, 3 * LOOKS_MAX)
    for owner in owners:
        assert room.want(owner, 1, "slow.test") == 0
    room.settle()
    last = owners[-1]
    room.wants = {last: 1}
    room.connections.give_back(1, room.connections.taken(1))
    room.settle()
    assert room.connections.taken(last) == 1
