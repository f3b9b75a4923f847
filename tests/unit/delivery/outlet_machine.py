"""A sink for brokers with outlets that only take notes."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any

import pytest

from delayserver.delivery import open_outlets, outlets
from delayserver.delivery.answers import (
    STORED,
    BrokerAnswer,
    Certainty,
    unknown,
)
from delayserver.delivery.outlet import Outlet, Report
from delayserver.delivery.outlets import OutletSink
from delayserver.delivery.sink import Result
from delayserver.records.message import DueDelivery
from delayserver.records.subscriptions import RedisTarget, Subscription
from tests.unit.fakes import always, delivery, subscription


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
    """Without pauses: a broker that is away, or blocked, is asked again at once."""

    async def whole() -> Machine:
        machine = Machine()
        await main(machine)
        await machine.sink.close()
        assert all(outlet.is_closed for outlet in machine.opener.made)
        return machine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(open_outlets, "REOPEN_MIN_S", 0.0)
        patch.setattr(open_outlets, "BLOCKED_LOOK_S", 0.001)
        patch.setattr(outlets, "BLOCKED_LOOK_S", 0.001)
        return asyncio.run(whole())


def to(url: str, number: int = 1, **more: Any) -> Subscription:
    return subscription(number, type="redis", target=RedisTarget(url, "s"), **more)
