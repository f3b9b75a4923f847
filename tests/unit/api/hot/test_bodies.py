"""Bodies that wait for their answers have a bound together, and few are decoded at a time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayserver.api.hot import bodies as bodies_module
from delayserver.api.hot.bodies import Bodies
from delayserver.api.json_pieces import PIECE_BYTES
from delayserver.errors import OverloadedError
from delayserver.slices import Slices, Work
from tests.unit.test_slices import Loop

LONG = PIECE_BYTES + 1
MANY = 1 << 40


class Server:
    """Calls that come in, each with a body and a work of some steps."""

    def __init__(self, max_bytes: int = MANY, turn_items: int = 100) -> None:
        self.loop = Loop()
        self.bodies = Bodies(Slices(self.loop.call_soon, turn_items=turn_items), max_bytes)
        self.decoded: dict[int, int] = {}
        """The length of each body whose work has begun, and is not done, by number."""
        self.most_bytes = 0
        self.begun: list[int] = []
        self.told: list[int] = []

    def work(self, number: int, length: int, steps: int) -> Work[int]:
        self.begun.append(number)
        self.decoded[number] = length
        self.most_bytes = max(self.most_bytes, sum(self.decoded.values()))
        for _ in range(steps):
            self.loop.stopwatch += 10
            yield 10
        del self.decoded[number]
        return number

    def come(self, number: int, length: int, steps: int = 3) -> None:
        def told(found: int | None, error: Exception | None) -> None:
            assert (found, error) == (number, None)
            self.told.append(number)

        self.bodies.begin(length, self.work(number, length, steps), told)


def test_bodies_that_wait_for_their_answers_have_one_bound_together() -> None:
    server = Server(max_bytes=1000)
    server.come(0, 400, steps=100)
    server.come(1, 600, steps=100)
    with pytest.raises(OverloadedError, match="receiving_max_bytes"):
        server.come(2, 1)
    with pytest.raises(OverloadedError), server.bodies.holding(1):
        raise AssertionError
    assert server.bodies.held_bytes == 1000
    server.loop.turn_until_idle()
    assert sorted(server.told) == [0, 1]
    assert server.bodies.held_bytes == 0
    with server.bodies.holding(1000), pytest.raises(OverloadedError):
        server.come(3, 1)
    server.come(4, 1000)
    server.loop.turn_until_idle()
    assert server.told[-1] == 4


def test_a_body_is_counted_until_its_answer_is_an_error() -> None:
    server = Server(max_bytes=10)
    told: list[Exception | None] = []

    def work() -> Work[None]:
        yield 1000
        raise ValueError

    server.bodies.begin(10, work(), lambda nothing, error: told.append(error))
    assert server.bodies.held_bytes == 10
    server.loop.turn_until_idle()
    assert isinstance(told[0], ValueError)
    assert server.bodies.held_bytes == 0


@given(
    st.lists(
        st.tuples(st.sampled_from([1, PIECE_BYTES, LONG, 4 * LONG, 9 * LONG]), st.integers(0, 30)),
        max_size=30,
    ),
    st.integers(1, 60),
)
def test_few_are_decoded_at_a_time_and_all_are_answered(
    calls: list[tuple[int, int]], turn_items: int
) -> None:
    server = Server(turn_items=turn_items)
    at_once = bodies_module.LONG_AT_ONCE_BYTES, bodies_module.SHORT_AT_ONCE_BYTES
    bodies_module.LONG_AT_ONCE_BYTES, bodies_module.SHORT_AT_ONCE_BYTES = 5 * LONG, 3 * PIECE_BYTES  # type: ignore[misc]
    try:
        server.bodies = Bodies(Slices(server.loop.call_soon, turn_items=turn_items), MANY)
    finally:
        bodies_module.LONG_AT_ONCE_BYTES, bodies_module.SHORT_AT_ONCE_BYTES = at_once  # type: ignore[misc]
    for number, (length, steps) in enumerate(calls):
        server.come(number, length, steps)
        if number % 7 == 0:
            server.loop.turn()
    server.loop.turn_until_idle()
    assert sorted(server.told) == [*range(len(calls))]
    assert server.bodies.held_bytes == 0
    assert server.most_bytes <= 9 * LONG + 3 * PIECE_BYTES
    for is_long in (False, True):  # Each lane keeps the order in which bodies came.
        begun = [one for one in server.begun if (calls[one][0] > PIECE_BYTES) is is_long]
        assert begun == sorted(begun)


def test_a_short_body_does_not_wait_for_long_ones() -> None:
    server = Server(turn_items=1000)
    for number in range(50):
        server.come(number, bodies_module.LONG_AT_ONCE_BYTES, steps=1000)
    server.come(50, 100)
    for _ in range(3):
        server.loop.turn()
    assert server.told == [50]
    assert server.begun == [0, 50]


def test_no_turn_begins_more_than_its_items() -> None:
    """Also where each is done as soon as it begins."""
    server = Server(turn_items=1000)
    server.come(0, LONG, steps=200)
    for number in range(1, 2000):
        server.come(number, bodies_module.LONG_AT_ONCE_BYTES, steps=0)
    most, turns = 0, 0
    while server.loop.soon:
        before = len(server.told)
        server.loop.turn()
        most, turns = max(most, len(server.told) - before), turns + 1
    assert len(server.told) == 2000
    assert most <= 10
    assert turns >= 200


def test_a_call_that_nobody_waits_for_any_more_makes_room_for_the_next() -> None:
    server = Server(turn_items=10)

    async def main() -> None:
        tasks: list[asyncio.Task[Any]] = []
        for number in range(3):
            work = server.work(number, bodies_module.LONG_AT_ONCE_BYTES, 100)
            tasks.append(
                asyncio.create_task(server.bodies.run(bodies_module.LONG_AT_ONCE_BYTES, work))
            )
        await asyncio.sleep(0)
        tasks[0].cancel()
        tasks[1].cancel()
        await asyncio.sleep(0)
        server.loop.turn_until_idle()
        assert await tasks[2] == 2

    asyncio.run(main())
