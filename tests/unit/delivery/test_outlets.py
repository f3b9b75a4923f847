"""Outlets: shared, replaced, closed when nobody needs them; and who is told what."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from delayserver.delivery import outlets
from delayserver.delivery.answers import (
    STORED,
    UNSENT,
    BrokerAnswer,
    Certainty,
    not_stored,
    unknown,
)
from delayserver.delivery.outlets import NoClient, Outlet, OutletError, OutletSink, Report
from delayserver.delivery.sink import Confirmed, Failed, Result, Untried
from delayserver.errors import InputError
from delayserver.records.message import DueDelivery
from delayserver.records.subscriptions import RedisTarget, Subscription
from tests.unit.fakes import always, delivery, subscription
from tests.waiting import turns


class FakeOutlet:
    window_bytes = 1_000_000
    connections, channels = 1, 0

    def __init__(self) -> None:
        self.is_broken = False
        self.is_blocked = False
        self.is_closed = False
        self.answers_at_once = True
        self.open: list[tuple[DueDelivery, Report]] = []
        self.sent: list[list[int]] = []
        self.left: list[int] = []
        self.bad: set[int] = set()
        """With one of these in it, a group is refused as a whole."""

    def send(
        self, subscription: Subscription, deliveries: list[DueDelivery], report: Report
    ) -> None:
        self.sent.append([one.entry.seq for one in deliveries])
        self.open += [(one, report) for one in deliveries]
        if self.answers_at_once:
            self.answer()

    def answer(self, answer: BrokerAnswer = STORED) -> None:
        sent, self.open = self.open, []
        if self.bad & {one.entry.seq for one, _ in sent}:
            answer = BrokerAnswer(Certainty.NOT_STORED, "bad", is_shared=True)
        for one, report in sent:
            report(one, answer)

    def let_go(self, subscription_id: int) -> None:
        self.left.append(subscription_id)

    async def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True
        self.answer(unknown("closed"))


class FakeOpener:
    def __init__(self) -> None:
        self.made: list[FakeOutlet] = []
        self.error: Exception | None = None
        self.answers_at_once = True
        self.is_broken_at_once = False
        self.bad: set[int] = set()
        self.gate = asyncio.Event()
        self.gate.set()

    def key(self, subscription: Subscription) -> Hashable:
        assert isinstance(subscription.target, RedisTarget)
        return subscription.target.url

    async def open(self, subscription: Subscription) -> Outlet:
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        self.made.append(FakeOutlet())
        self.made[-1].answers_at_once = self.answers_at_once
        self.made[-1].bad = self.bad
        self.made[-1].is_broken = self.is_broken_at_once
        return self.made[-1]


class Machine:
    def __init__(self) -> None:
        self.opener = FakeOpener()
        self.sink = OutletSink(self.opener)
        self.told: list[tuple[list[int], Result]] = []

    async def deliver(self, subscription: Subscription, *seqs: int) -> None:
        await self.sink.deliver(subscription, [delivery(seq) for seq in seqs], always, self._tell)

    def _tell(self, some: list[DueDelivery], result: Result) -> None:
        self.told.append(([one.entry.seq for one in some], result))

    def start(self, subscription: Subscription, *seqs: int) -> "asyncio.Task[None]":
        return asyncio.create_task(self.deliver(subscription, *seqs))


def run(main: Callable[[Machine], Coroutine[Any, Any, None]]) -> Machine:
    async def whole() -> Machine:
        machine = Machine()
        await main(machine)
        await machine.sink.close()
        assert all(outlet.is_closed for outlet in machine.opener.made)
        return machine

    return asyncio.run(whole())


def to(url: str, number: int = 1, **more: Any) -> Subscription:
    return subscription(number, type="redis", target=RedisTarget(url, "s"), **more)


def test_what_comes_together_is_told_together() -> None:
    machine = run(lambda m: m.deliver(to("a"), 1, 2, 3))
    assert machine.told == [([1, 2, 3], Confirmed())]


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


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlets, "REOPEN_MIN_S", 0.0)
    monkeypatch.setattr(outlets, "BLOCKED_LOOK_S", 0.001)


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


def test_each_has_a_result_of_its_own_and_who_is_cancelled_is_told_nothing() -> None:
    async def main(m: Machine) -> None:
        m.opener.answers_at_once = False
        first, second = m.start(to("a"), 1), m.start(to("a"), 2, 3)
        await turns(10)
        first.cancel()
        await turns(10)
        (outlet,) = m.opener.made
        (_, report), *rest = outlet.open
        report(delivery(1), STORED)
        outlet.open = rest[1:]
        rest[0][1](rest[0][0], not_stored("no"))
        outlet.answer()
        await second

    assert run(main).told == [([3], Confirmed()), ([2], Failed("no"))]


def test_an_idle_outlet_makes_room(monkeypatch: Any) -> None:
    monkeypatch.setattr(outlets, "OUTLETS_MAX", 2)
    monkeypatch.setattr(outlets, "ROOM_S", 0.01)
    monkeypatch.setattr(outlets, "ROOM_LOOK_S", 0.001)

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


def test_a_client_that_is_not_installed_is_the_reason() -> None:
    told: list[Result] = []

    async def main() -> None:
        sink = OutletSink(NoClient("redis"))
        await sink.deliver(to("a"), [delivery(1)], always, lambda some, result: told.append(result))
        await sink.close()

    asyncio.run(main())
    (result,) = told
    assert isinstance(result, Failed) and "delayserver[redis]" in result.reason


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
        assert 0 < under_way < 600 and m.sink.waiting == 1000 - under_way
        assert m.sink.under_way_bytes <= outlet.window_bytes / 2 + 2000
        other = m.start(to("a", 2), 2001)
        await turns(10)
        assert outlet.sent[-1] == [2001]
        m.sink.on_subscription(to("a", 1, paused=True))
        await turns(3)
        assert m.sink.waiting == 0
        outlet.answer()
        await asyncio.gather(many, other)

    told = {seq: result for seqs, result in run(main).told for seq in seqs}
    assert len(told) == 1001 and told[2001] == Confirmed()
    assert {type(told[seq]) for seq in range(1, 1001)} == {Confirmed, Untried}
    assert told[1] == Confirmed() and told[1000] == Untried()


def test_a_broker_that_is_blocked_gets_nothing_until_it_goes_on() -> None:
    async def main(m: Machine) -> None:
        await m.deliver(to("a"), 1)
        (outlet,) = m.opener.made
        outlet.is_blocked = True
        task = m.start(to("a"), 2)
        await turns(20)
        assert outlet.sent == [[1]] and m.sink.blocked == 1
        outlet.is_blocked = False
        await task

    assert run(main).told == [([1], Confirmed()), ([2], Confirmed())]


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

    assert run(main).told == [([1, 2], Failed(outlets.ENDS_AT_ONCE))]


def lost_together(m: Machine) -> None:
    """The connection ends under messages that the broker may have, and cannot be made again."""
    m.opener.error = OutletError("away")
    m.opener.made[0].is_broken = True
    m.opener.made[0].answer(unknown("lost", is_shared=True))


def test_messages_that_may_be_stored_are_told_so_where_they_cannot_go_apart() -> None:
    async def main(m: Machine) -> None:
        m.opener.answers_at_once = False
        task = m.start(to("a"), 1, 2)
        await turns(10)
        lost_together(m)
        await task
        assert m.sink.counts.answers[Certainty.UNKNOWN] == 2

    assert run(main).told == [([1], Failed("lost")), ([2], Failed("lost"))]


def test_messages_that_may_be_stored_are_not_untried_when_their_subscription_is_paused() -> None:
    async def main(m: Machine) -> None:
        m.opener.answers_at_once = False
        task = m.start(to("a"), 1, 2)
        await turns(10)
        lost_together(m)
        m.sink.on_subscription(to("a", paused=True))
        await task

    assert run(main).told == [([1], Failed("lost")), ([2], Failed("lost"))]


def test_a_message_that_may_be_stored_stays_so_when_it_is_refused_later() -> None:
    async def main(m: Machine) -> None:
        m.opener.answers_at_once = False
        task = m.start(to("a"), 1, 2)
        await turns(10)
        m.opener.made[0].answer(unknown("lost", is_shared=True))
        m.opener.answers_at_once = True
        m.opener.bad = {1}
        await task
        counts = m.sink.counts.answers
        assert (counts[Certainty.UNKNOWN], counts[Certainty.STORED]) == (1, 1)

    told = {seq: result for seqs, result in run(main).told for seq in seqs}
    assert told == {1: Failed("bad"), 2: Confirmed()}


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
        assert m.sink.away == 1
        m.opener.gate.clear()
        tasks = [m.start(to("a"), 2)] if is_opening else []
        await turns(10)
        m.sink.on_subscription(msgspec.structs.replace(to("a"), deleted=True))
        assert m.sink.away == 0
        m.opener.gate.set()
        await asyncio.gather(*tasks)
        assert m.sink.away == 0

    run(main)


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
        assert m.sink.away == 1
        m.opener.error = None
        await m.deliver(to("a"), 51)
        assert m.sink.away == 0

    with capture_logs() as logs:
        run(main)
    assert [line["event"] for line in logs] == [
        "a broker takes nothing",
        "a broker takes messages again",
    ]


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


def test_an_unknown_answer_is_told_as_such() -> None:
    async def main(m: Machine) -> None:
        m.opener.answers_at_once = False
        task = m.start(to("a"), 1)
        await turns(10)
        m.opener.made[0].answer(unknown("no answer within 1 ms"))
        await task
        assert m.sink.counts.answers[Certainty.UNKNOWN] == 1

    assert run(main).told == [([1], Failed("no answer within 1 ms"))]
