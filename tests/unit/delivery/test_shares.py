"""Shares of an outlet: nobody waits for a subscription that hangs, and memory is bounded."""

import random
from collections import Counter, deque

import pytest

from delayserver.delivery.shares import OVERHEAD_BYTES, TURN_BYTES, Shares

MIB = 1 << 20


def fill(shares: Shares[int], number: int, count: int, body_bytes: int) -> int:
    """Messages of a subscription that take nothing back; how many leave."""
    for _ in range(count):
        shares.add(number, body_bytes, number)
    taken = 0
    while some := shares.take():
        taken += len(some)
    return taken


def test_one_that_hangs_leaves_half_and_so_does_the_next() -> None:
    shares: Shares[int] = Shares(8 * MIB)
    assert fill(shares, 1, 100, MIB - OVERHEAD_BYTES) == 4
    assert fill(shares, 2, 100, MIB - OVERHEAD_BYTES) == 2
    assert shares.used_bytes == 6 * MIB
    # Many that hang leave each other one message, and a short one leaves at once.
    for number in range(3, 50):
        assert fill(shares, number, 3, MIB) >= 1
    assert fill(shares, 50, 1, 10) == 1


def test_short_messages_are_bounded_too() -> None:
    shares: Shares[int] = Shares(8 * MIB)
    assert fill(shares, 1, 10_000, 0) == 4 * MIB // OVERHEAD_BYTES


def test_a_message_longer_than_the_window_leaves() -> None:
    shares: Shares[int] = Shares(10)
    assert fill(shares, 1, 2, MIB) == 1
    shares.give_back(1, MIB)
    assert shares.take() == [1] and not shares.take()


def test_turns() -> None:
    shares: Shares[str] = Shares(100 * MIB)
    for number, name in ((1, "a"), (2, "b")):
        for _ in range(3):
            shares.add(number, TURN_BYTES - OVERHEAD_BYTES, name)
    shares.add(3, 10, "c")
    shares.add(3, 10, "c")
    assert [shares.take() for _ in range(8)] == [
        *(["a"], ["b"], ["c", "c"], ["a"], ["b"], ["a"], ["b"], [])
    ]


def test_what_waits_can_be_removed() -> None:
    shares: Shares[int] = Shares(10)
    fill(shares, 1, 5, 100)
    assert shares.waiting == 4 and shares.remove(1) == [1] * 4 and not shares
    assert shares.remove(2) == []
    shares.give_back(1, 100)
    assert shares.used_bytes == 0


@pytest.mark.parametrize("seed", range(5))
def test_any_course_of_events(seed: int) -> None:
    """The window holds but for one message each, nothing is lost, and what can go on goes on."""
    dice = random.Random(seed)
    shares: Shares[tuple[int, int]] = Shares(64 * 1024)
    under_way: dict[int, deque[int]] = {number: deque() for number in range(8)}
    added: Counter[int] = Counter()
    left: Counter[int] = Counter()
    for _ in range(2000):
        number, size = dice.randrange(8), dice.choice((0, 100, 5000, 70_000))
        if dice.random() < 0.6:
            shares.add(number, size, (number, size))
            added[number] += 1
        elif under_way[number] and number != 7:  # 7 hangs
            shares.give_back(number, under_way[number].popleft())
        while taken := shares.take():
            assert len({one for one, _ in taken}) == 1
            for one, its_size in taken:
                under_way[one].append(its_size)
                left[one] += 1
        used = sum(size + OVERHEAD_BYTES for sizes in under_way.values() for size in sizes)
        assert used == shares.used_bytes
        assert used <= 64 * 1024 + sum(
            max(sizes, default=0) + OVERHEAD_BYTES for sizes in under_way.values()
        )
        # A subscription that waits has something under way.
        assert all(under_way[one] for one in range(8) if added[one] > left[one])
    assert shares.waiting == sum(added.values()) - sum(left.values())
