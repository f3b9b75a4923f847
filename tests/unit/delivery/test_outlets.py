"""Outlets: shared, replaced, closed when nobody needs them; and who is told what."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any

import msgspec

from delayserver.delivery import outlets
from delayserver.delivery.outlets import NoClient, OutletError, OutletSink, Report
from delayserver.delivery.sink import Confirmed, Failed, Result
from delayserver.errors import InputError
from delayserver.records.message import DueDelivery
from delayserver.records.subscriptions import RedisTarget, Subscription
from tests.unit.fakes import always, delivery, subscription
from tests.waiting import turns


class FakeOutlet:
    def __init__(self) -> None:
        self.is_broken = False
        self.is_closed = False
        self.answers_at_once = True
        self.open: list[tuple[DueDelivery, Report]] = []

    async def send(
        self, subscription: Subscription, deliveries: list[DueDelivery], report: Report
    ) -> None:
        self.open += [(one, report) for one in deliveries]
        if self.answers_at_once:
            self.answer()

    def answer(self, failure: str | None = None) -> None:
        sent, self.open = self.open, []
        for one, report in sent:
            report(one, failure)

    async def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True
        self.answer("closed")


class FakeOpener:
    def __init__(self) -> None:
        self.made: list[FakeOutlet] = []
        self.error: Exception | None = None
        self.answers_at_once = True
        self.gate = asyncio.Event()
        self.gate.set()

    def key(self, subscription: Subscription) -> Hashable:
        assert isinstance(subscription.target, RedisTarget)
        return subscription.target.url

    async def open(self, subscription: Subscription) -> FakeOutlet:
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        self.made.append(FakeOutlet())
        self.made[-1].answers_at_once = self.answers_at_once
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
        report(delivery(1), None)
        outlet.open = rest[1:]
        rest[0][1](rest[0][0], "no")
        outlet.answer()
        await second

    assert run(main).told == [([3], Confirmed()), ([2], Failed("no"))]


def test_an_idle_outlet_makes_room(monkeypatch: Any) -> None:
    monkeypatch.setattr(outlets, "OUTLETS_MAX", 2)

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
