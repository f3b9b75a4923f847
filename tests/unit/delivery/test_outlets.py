"""The sink of all brokers: messages that fail with others go apart, within their shares."""

import asyncio
from typing import Any

import msgspec
import pytest

from delayserver.delivery.answers import (
    Certainty,
    not_stored,
)
from delayserver.delivery.sink import Confirmed, Failed, Untried
from delayserver.records.subscriptions import RedisTarget
from tests.unit.delivery.outlet_machine import Machine, run, to
from tests.unit.fakes import delivery
from tests.waiting import turns


def waiting(m: Machine) -> int:
    """Messages that wait for their share of an outlet."""
    return sum(one.shares.waiting for one in m.sink.outlets.all_open())


def test_one_bad_message_fails_alone_and_its_neighbours_are_delivered() -> None:
    async def main(m: Machine) -> None:
        m.opener.bad = {5, 9}
        await m.deliver(to("a"), *range(1, 17))

    machine = run(main)
    told = {seq: result for seqs, result in machine.told for seq in seqs}
    assert sorted(told) == list(range(1, 17))
    assert {seq for seq, result in told.items() if result != Confirmed()} == {5, 9}
    assert told[5] == Failed("bad")
    # The groups that went apart: halves, then singly.
    _, apart = machine.opener.made
    assert apart.sent[0] == [1, 2, 3, 4, 5, 6, 7, 8] and [5] in apart.sent and [9] in apart.sent
    counts = machine.sink.counts.answers
    assert counts == {Certainty.STORED: 14, Certainty.NOT_STORED: 2, Certainty.UNKNOWN: 0}
    assert machine.sink.counts.apart == sum(map(len, apart.sent)) < 16 * 5


def test_neighbours_that_go_apart_are_given_back_when_their_subscription_is_paused() -> None:
    async def main(m: Machine) -> None:
        m.opener.bad, m.opener.answers_at_once = {1}, False
        task = m.start(to("a"), 1, 2, 3, 4)
        await turns(10)
        m.opener.made[0].answer()
        await turns(10)
        m.sink.on_subscription(to("a", paused=True))
        m.opener.made[1].bad = set()
        m.opener.made[1].answer()
        await task

    told = {seq: result for seqs, result in run(main).told for seq in seqs}
    assert told == {1: Confirmed(), 2: Confirmed(), 3: Untried(), 4: Untried()}


def test_one_subscription_that_hangs_leaves_room_for_others_and_its_rest_is_given_back() -> None:
    async def main(m: Machine) -> None:
        m.opener.answers_at_once = False
        many = m.start(to("a", 1), *range(1, 1001))
        await turns(10)
        (outlet,) = m.opener.made
        under_way = len(outlet.open)
        assert 0 < under_way < 600 and waiting(m) == 1000 - under_way
        assert m.sink.outlets.all_open()[0].shares.used_bytes <= outlet.window_bytes / 2 + 2000
        other = m.start(to("a", 2), 2001)
        await turns(10)
        assert outlet.sent[-1] == [2001]
        m.sink.on_subscription(to("a", 1, paused=True))
        await turns(3)
        assert waiting(m) == 0
        outlet.answer()
        await asyncio.gather(many, other)

    told = {seq: result for seqs, result in run(main).told for seq in seqs}
    assert len(told) == 1001 and told[2001] == Confirmed()
    assert {type(told[seq]) for seq in range(1, 1001)} == {Confirmed, Untried}
    assert told[1] == Confirmed() and told[1000] == Untried()


@pytest.mark.parametrize("now", [{"deleted": True}, {"target": RedisTarget("b", "s")}])
def test_one_that_begins_behind_a_change_of_its_subscription_opens_nothing(
    now: dict[str, Any],
) -> None:
    """It was handed over in the turn of the event loop in which the subscription was changed."""

    async def main(m: Machine) -> None:
        before, after = to("a"), msgspec.structs.replace(to("a"), **now)
        late = m.start(before, 1)
        m.sink.on_subscription(after)
        same = m.start(after, 2)
        await late
        assert not m.opener.made and m.told == [([1], Untried())]
        await same
        await m.deliver(before, 3)  # It was put again.

    assert run(main).told[1:] == [([2], Confirmed()), ([3], Confirmed())]


def test_may_begin_is_asked_when_a_message_leaves() -> None:
    async def main(m: Machine) -> None:
        ones = [delivery(seq) for seq in (1, 2, 3)]
        await m.sink.deliver(to("a"), ones, lambda some: some[0].entry.seq != 2, m._tell)

    assert sorted(run(main).told, key=str) == sorted(
        [([2], Untried()), ([1, 3], Confirmed())], key=str
    )


def test_a_broker_that_is_blocked_gets_nothing_until_it_goes_on() -> None:
    async def main(m: Machine) -> None:
        await m.deliver(to("a"), 1)
        (outlet,) = m.opener.made
        outlet.is_blocked = True
        task = m.start(to("a"), 2)
        await turns(20)
        assert outlet.sent == [[1]] and m.sink.outlets.all_open()[0].outlet.is_blocked
        outlet.is_blocked = False
        await task

    assert run(main).told == [([1], Confirmed()), ([2], Confirmed())]


def test_a_message_counts_as_delivered_once_its_broker_has_confirmed_it() -> None:
    async def main(m: Machine) -> None:
        m.opener.answers_at_once = False
        task = m.start(to("a"), 1, 2)
        await turns(10)
        (outlet,) = m.opener.made
        assert outlet.sent == [[1, 2]] and m.told == []
        outlet.answer()
        await task
        refused = m.start(to("a"), 3)
        await turns(10)
        outlet.answer(not_stored("no room"))
        await refused

    assert run(main).told == [([1, 2], Confirmed()), ([3], Failed("no room"))]
