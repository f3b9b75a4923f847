"""Open outlets: shared, replaced, and closed when no subscription needs them."""

import asyncio
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from delayserver.delivery import open_outlets
from delayserver.delivery.answers import (
    UNSENT,
)
from delayserver.delivery.open_outlets import ENDS_AT_ONCE
from delayserver.delivery.outlet import OutletError
from delayserver.delivery.sink import Confirmed, Failed, Untried
from delayserver.errors import InputError
from tests.unit.delivery.outlet_machine import Machine, run, to
from tests.waiting import turns


def test_one_outlet_is_opened_for_all_who_wait() -> None:
    async def main(m: Machine) -> None:
        m.opener.gate.clear()
        tasks = [m.start(to("a", number), number) for number in (1, 2, 3)]
        other = m.start(to("b", 4), 4)
        await turns(10)
        tasks[0].cancel()
        m.opener.gate.set()
        await asyncio.gather(*tasks[1:], other)

    machine = run(main)
    assert len(machine.opener.made) == 2
    assert sorted(seqs for seqs, _ in machine.told) == [[2], [3], [4]]


def test_why_it_cannot_be_opened_is_the_reason_and_the_next_one_tries_again() -> None:
    async def main(m: Machine) -> None:
        m.opener.error = OutletError("away")
        await m.deliver(to("a"), 1)
        m.opener.error = InputError("not allowed", "/url")
        await m.deliver(to("a"), 2)
        m.opener.error = None
        await m.deliver(to("a"), 3)

    told = run(main).told
    assert told == [([1], Failed("away")), ([2], Failed("not allowed")), ([3], Confirmed())]


def test_a_broken_outlet_is_replaced() -> None:
    async def main(m: Machine) -> None:
        await m.deliver(to("a"), 1)
        m.opener.made[0].is_broken = True
        await m.deliver(to("a"), 2)
        await turns(10)
        assert m.opener.made[0].is_closed and not m.opener.made[1].is_closed

    run(main)


def test_an_outlet_goes_with_the_last_subscription_that_used_it() -> None:
    async def main(m: Machine) -> None:
        await m.deliver(to("a", 1), 1)
        await m.deliver(to("a", 2), 2)
        (outlet,) = m.opener.made
        m.sink.on_subscription(msgspec.structs.replace(to("a", 1), deleted=True))
        m.sink.on_subscription(to("a", 2, paused=True))
        await turns(10)
        assert not outlet.is_closed
        m.sink.on_subscription(to("b", 2))  # goes elsewhere
        await turns(10)
        assert outlet.is_closed

    run(main)


def test_what_is_under_way_is_answered_before_the_outlet_goes() -> None:
    async def main(m: Machine) -> None:
        m.opener.answers_at_once = False
        task = m.start(to("a"), 1)
        await turns(10)
        (outlet,) = m.opener.made
        m.sink.on_subscription(msgspec.structs.replace(to("a"), deleted=True))
        await turns(10)
        assert not outlet.is_closed
        outlet.answer()
        await task
        await turns(10)
        assert outlet.is_closed

    assert run(main).told == [([1], Confirmed())]


def test_an_idle_outlet_makes_room(monkeypatch: Any) -> None:
    monkeypatch.setattr(open_outlets, "OUTLETS_MAX", 2)
    monkeypatch.setattr(open_outlets, "ROOM_S", 0.01)
    monkeypatch.setattr(open_outlets, "ROOM_LOOK_S", 0.001)

    async def main(m: Machine) -> None:
        await m.deliver(to("a", 1), 1)
        m.opener.answers_at_once = False
        tasks = [m.start(to("b", 2), 2), m.start(to("c", 3), 3)]
        await turns(10)
        assert [one.is_closed for one in m.opener.made] == [True, False, False]
        await m.deliver(to("d", 4), 4)
        for one in m.opener.made:
            one.answer()
        await asyncio.gather(*tasks)

    (seqs, result) = run(main).told[1]
    assert seqs == [4] and isinstance(result, Failed) and "2 brokers are in use" in result.reason


def test_what_had_not_left_when_an_outlet_broke_leaves_by_the_next_one() -> None:
    async def main(m: Machine) -> None:
        await m.deliver(to("a"), 0)
        first = m.opener.made[0]
        first.answers_at_once = m.opener.answers_at_once = False
        task = m.start(to("a"), 1, 2)
        await turns(10)
        first.is_broken = True
        first.answer(UNSENT)
        await turns(20)
        _, second = m.opener.made
        assert second.sent == [[1, 2]]
        second.answer()
        await task

    assert run(main).told == [([0], Confirmed()), ([1, 2], Confirmed())]


@pytest.mark.parametrize("takes_them", [False, True])
def test_a_broker_that_ends_connections_at_once_is_one_that_cannot_be_reached(
    takes_them: bool,
) -> None:
    """Its messages would go from one connection to the next for good."""

    async def main(m: Machine) -> None:
        m.opener.answers_at_once = False
        m.opener.is_broken_at_once = not takes_them
        task = m.start(to("a"), 1, 2)
        await turns(10)
        if takes_them:
            m.opener.made[0].is_broken = True
            m.opener.made[0].answer(UNSENT)
        await task
        assert len(m.opener.made) == 1

    assert run(main).told == [([1, 2], Failed(ENDS_AT_ONCE))]


def test_one_that_was_given_back_is_not_charged_with_an_opening_that_fails() -> None:
    async def main(m: Machine) -> None:
        m.opener.gate.clear()
        task = m.start(to("a"), 1)
        await turns(10)
        m.sink.on_subscription(to("a", paused=True))
        m.opener.error = OutletError("away")
        m.opener.gate.set()
        await task

    assert run(main).told == [([1], Untried())]


@pytest.mark.parametrize("is_opening", [False, True])
def test_a_broker_that_no_subscription_uses_is_not_away(is_opening: bool) -> None:
    async def main(m: Machine) -> None:
        m.opener.error = OutletError("away")
        await m.deliver(to("a"), 1)
        assert m.sink.outlets.away == 1
        m.opener.gate.clear()
        tasks = [m.start(to("a"), 2)] if is_opening else []
        await turns(10)
        m.sink.on_subscription(msgspec.structs.replace(to("a"), deleted=True))
        assert m.sink.outlets.away == 0
        m.opener.gate.set()
        await asyncio.gather(*tasks)
        assert m.sink.outlets.away == 0

    run(main)


def test_a_subscription_that_goes_is_let_go_of_while_others_stay() -> None:
    async def main(m: Machine) -> None:
        await m.deliver(to("a", 1), 1)
        await m.deliver(to("a", 2), 2)
        m.sink.on_subscription(msgspec.structs.replace(to("a", 1), deleted=True))
        assert m.opener.made[0].left == [1]

    run(main)


def test_a_broker_that_is_away_is_said_once_and_so_is_its_return() -> None:
    async def main(m: Machine) -> None:
        m.opener.error = OutletError("away")
        for seq in range(50):
            await m.deliver(to("a"), seq)
        assert m.sink.outlets.away == 1
        m.opener.error = None
        await m.deliver(to("a"), 51)
        assert m.sink.outlets.away == 0

    with capture_logs() as logs:
        run(main)
    assert [line["event"] for line in logs] == [
        "a broker takes nothing",
        "a broker takes messages again",
    ]
