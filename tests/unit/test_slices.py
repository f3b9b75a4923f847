"""Slices: a turn of the loop does a bounded number of items, and no work holds up another."""

import asyncio
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayserver.slices import (
    FREED_ITEMS,
    FREED_VALUES,
    QUANTUM_ITEMS,
    TURN_ITEMS,
    TURN_MS,
    Slices,
    Work,
    at_once,
    freeing,
    told_nothing,
)


class Loop:
    """An event loop that is turned by hand, with a stopwatch that each item advances."""

    def __init__(self) -> None:
        self.soon: list[Callable[[], None]] = []
        self.stopwatch = 0
        self.turns: list[int] = []
        """How long each turn took, in items."""

    def call_soon(self, function: Callable[[], None]) -> None:
        self.soon.append(function)

    def turn(self) -> None:
        began, soon, self.soon = self.stopwatch, self.soon, []
        for function in soon:
            function()
        self.turns.append(self.stopwatch - began)

    def turn_until_idle(self) -> None:
        while self.soon:
            self.turn()

    def work(self, steps: list[int]) -> Work[int]:
        for items in steps:
            self.stopwatch += items
            yield items
        return sum(steps)


STEPS = st.lists(st.integers(1, 40), max_size=30)


@given(st.lists(st.lists(STEPS, max_size=5), max_size=8), st.integers(1, 60))
def test_no_turn_does_more_than_its_items(began: list[list[list[int]]], items: int) -> None:
    """Whatever begins when: a turn exceeds its items by the last step of a work at most."""
    loop = Loop()
    slices = Slices(loop.call_soon, turn_items=items)
    told: list[tuple[int | None, Exception | None]] = []
    count = 0
    for works in began:
        before = loop.stopwatch
        for steps in works:
            count += 1
            slices.begin(loop.work(steps), lambda *end: told.append(end))
        assert loop.stopwatch - before < items + 40
        loop.turn()
    loop.turn_until_idle()
    assert all(took < items + 40 for took in loop.turns)
    expected = [sum(steps) for works in began for steps in works]
    assert sorted(value for value, _ in told if value is not None) == sorted(expected)
    assert len(told) == count and not len(slices)


def test_a_turn_ends_when_its_time_is_over() -> None:
    """On a slow machine an item takes as long as ten."""
    loop = Loop()
    slices = Slices(loop.call_soon, lambda: loop.stopwatch)
    slices.begin(loop.work([4] * 100), lambda *end: None)
    loop.turn_until_idle()
    assert set(loop.turns[:-1]) == {2 * 4} and TURN_MS < 2 * 4 and loop.stopwatch == 400


def test_many_values_are_freed_some_at_a_time() -> None:
    loop = Loop()
    slices = Slices(loop.call_soon, turn_items=FREED_ITEMS)
    values = {number: number for number in range(3 * FREED_VALUES)}
    slices.begin(freeing([{}, values]), told_nothing)
    assert len(values) == 2 * FREED_VALUES
    loop.turn_until_idle()
    assert not values and len(loop.turns) >= 2


def test_a_long_call_does_not_hold_up_a_short_one() -> None:
    loop = Loop()
    slices = Slices(loop.call_soon)
    ended: list[tuple[str, int]] = []
    for name, count in ("long", 50 * TURN_ITEMS), ("short", 3 * QUANTUM_ITEMS):

        def done(value: int | None, error: Exception | None, name: str = name) -> None:
            ended.append((name, len(loop.turns)))

        slices.begin(loop.work([1] * count), done)
    assert ended == []
    loop.turn_until_idle()
    assert ended == [("short", 0), ("long", 49)]


def test_a_short_work_is_done_at_once_and_its_error_is_told() -> None:
    loop = Loop()
    slices = Slices(loop.call_soon)
    told: list[object] = []

    def fails() -> Work[None]:
        yield 1
        raise ValueError("no")

    slices.begin(loop.work([1, 2]), lambda value, error: told.append(value))
    slices.begin(fails(), lambda value, error: told.append(str(error)))
    assert told == [3, "no"]


def test_what_is_called_soon_counts_as_well() -> None:
    loop = Loop()
    slices = Slices(loop.call_soon)
    called: list[int] = []
    for number in range(5):
        slices.soon(partial(called.append, number), TURN_ITEMS // 2)
    assert called == []
    loop.turn()
    assert called == [0, 1]
    loop.turn_until_idle()
    assert called == [0, 1, 2, 3, 4]


def test_an_error_of_what_is_called_soon_is_not_lost() -> None:
    loop = Loop()
    slices = Slices(loop.call_soon)

    def fails() -> None:
        raise ValueError("no")

    slices.soon(fails)
    with pytest.raises(ValueError, match="no"):
        loop.turn()


def test_a_coroutine_waits_for_a_work() -> None:
    async def wait() -> int:
        loop = asyncio.get_running_loop()
        slices = Slices(loop.call_soon, turn_items=2)
        return await slices.run(Loop().work([1] * 9))

    assert asyncio.run(wait()) == 9
    assert at_once(Loop().work([1, 2, 3])) == 6
