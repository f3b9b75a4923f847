"""Turns: places that are taken and given back, and who is next."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from delayserver.delivery.turns import CANDIDATES, Turns
from tests.waiting import turns


class Room:
    """Turns, and in which order they came."""

    def __init__(self, places: int) -> None:
        self.turns = Turns(places)
        self.order: list[int] = []

    def ask(self, subscription_id: int) -> asyncio.Task[None]:
        async def take() -> None:
            await self.turns.take(subscription_id)
            self.order.append(subscription_id)

        return asyncio.get_running_loop().create_task(take())


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def waits() -> None:
        async with asyncio.timeout(10):
            await main()

    asyncio.run(waits())


def test_a_place_that_is_free_is_taken_at_once() -> None:
    async def main() -> None:
        room = Room(2)
        for _ in range(3):
            room.ask(1)
        await turns(3)
        assert room.order == [1, 1]
        assert room.turns.waiting == 1
        room.turns.give_back(1)
        await turns(3)
        assert room.order == [1, 1, 1]
        assert room.turns.waiting == 0

    run(main)


def test_the_subscription_with_the_fewest_places_is_next() -> None:
    async def main() -> None:
        room = Room(3)
        for _ in range(5):
            room.ask(1)  # a slow receiver with a backlog
        for _ in range(3):
            room.ask(2)
        await turns(3)
        assert room.order == [1, 1, 1]
        room.turns.give_back(1)
        room.turns.give_back(2)
        await turns(3)
        # The other one has none, then none again.
        assert room.order == [1, 1, 1, 2, 2]

    run(main)


def test_nobody_waits_for_good_behind_many_others() -> None:
    async def main() -> None:
        room = Room(1)
        room.ask(0)
        for subscription_id in range(1, 3 * CANDIDATES):
            room.ask(subscription_id)
            room.ask(subscription_id)
        await turns(3)
        for _ in range(2 * 3 * CANDIDATES - 2):
            room.turns.give_back(room.order[-1])
            await turns(3)
        assert room.turns.waiting == 0
        assert sorted(room.order) == sorted([0, *range(1, 3 * CANDIDATES), *range(1, 24)])

    run(main)


@pytest.mark.parametrize("has_its_turn", [False, True])
def test_who_does_not_wait_any_longer_takes_no_place(has_its_turn: bool) -> None:
    async def main() -> None:
        room = Room(1)
        room.ask(1)
        gone, patient = room.ask(2), room.ask(3)
        await turns(3)
        if has_its_turn:
            room.turns.give_back(1)
            gone.cancel()
        else:
            gone.cancel()
            await turns(3)
            room.turns.give_back(1)
        await patient
        assert room.order == [1, 3]
        room.turns.give_back(3)
        room.ask(4)
        await turns(3)
        assert room.order == [1, 3, 4]

    run(main)
