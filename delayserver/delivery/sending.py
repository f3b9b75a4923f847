"""One call of `deliver`: its messages, and the result of each, told once.

Each message has a result of its own: those that come in one turn of the event loop are told
together. Cost: 1 µs for a message. Belongs to the event loop.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from delayserver.delivery.answers import CONFIRMED, DUPLICATE, BrokerAnswer, Certainty
from delayserver.delivery.sink import Confirmed, Failed, MayBegin, Result, ResultCallback, Untried
from delayserver.records.message import DueDelivery
from delayserver.records.subscriptions import Subscription

Item = TypeVar("Item")
Suspect = tuple[DueDelivery, BrokerAnswer]
"""A message, and the answer that it shares with others."""


@dataclass(slots=True)
class OutletCounts:
    """The counts of a sink, for metrics."""

    answers: dict[Certainty, int] = field(default_factory=lambda: dict.fromkeys(Certainty, 0))
    duplicates: int = 0
    """Messages that brokers had already, from an earlier attempt."""
    apart: int = 0
    """Messages that were sent again apart from those with which they had failed."""


class HandedDeliveries:
    """Deliveries that a sink was given together, and the callback for their results."""

    def __init__(self, count: int, told: ResultCallback) -> None:
        self._left = count
        self._told = told
        self._waiting: list[tuple[DueDelivery, Confirmed | Failed]] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """All were told of; cancelled with the task that waits for it."""

    def tell(self, deliveries: list[DueDelivery], result: Result) -> None:
        """Report the result of some of them, unless the task was cancelled."""
        if self.done.done():
            return
        self._told(deliveries, result)
        self._left -= len(deliveries)
        if not self._left:
            self.done.set_result(None)

    def report(self, delivery: DueDelivery, result: Confirmed | Failed) -> None:
        """The result of one. Those that come in one turn of the event loop are told together."""
        if not self._waiting:
            self.done.get_loop().call_soon(self._tell_waiting)
        self._waiting.append((delivery, result))

    def _tell_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        taken = [delivery for delivery, result in waiting if result is CONFIRMED]
        if taken:
            self.tell(taken, CONFIRMED)
        for delivery, result in waiting:
            if result is not CONFIRMED:
                self.tell([delivery], result)


class Sending:
    """The messages of one call, as long as it goes on."""

    def __init__(
        self,
        subscription: Subscription,
        deliveries: list[DueDelivery],
        may_begin: MayBegin,
        handed: HandedDeliveries,
        counts: OutletCounts,
    ) -> None:
        self.subscription = subscription
        self.may_begin = may_begin
        self.handed = handed
        self._counts = counts
        self.is_withdrawn = False
        """Nothing of it may begin any more."""
        self.is_alone = False
        """One message goes by an outlet that nothing else uses: no other is the cause."""
        self._open = 0
        self._answered: asyncio.Future[None] | None = None
        self.unsent = deliveries
        """They have not left yet."""
        self._suspects: list[Suspect] = []
        """They failed with others, any of which may be the cause."""
        self.groups: deque[list[Suspect]] = deque()
        """Suspects that go again, each group apart from the others."""

    async def round(self, count: int, send: Callable[[], None]) -> None:
        """Call `send`, and wait until there is an answer for each of so many messages."""
        self._open = count
        self._answered = asyncio.get_running_loop().create_future()
        send()
        if self._open:
            await self._answered

    def divide(self) -> None:
        """The suspects are the next groups, cut in halves."""
        self.groups.extendleft(reversed(halves(self._suspects)))
        self._suspects = []

    def on_unsent(self, delivery: DueDelivery) -> None:
        """One of them has not left."""
        if self.is_withdrawn:
            self.on_untried(delivery)
        else:
            self.unsent.append(delivery)
            self._count()

    def on_untried(self, delivery: DueDelivery) -> None:
        """One of them may not leave."""
        self.handed.tell([delivery], Untried())
        self._count()

    def on_answer(self, delivery: DueDelivery, answer: BrokerAnswer) -> None:
        """The broker has said this of one of them, or has not answered in time."""
        if answer.is_shared and not self.is_alone:
            self._suspects.append((delivery, answer))
        else:
            self._conclude(delivery, answer)
        self._count()

    def _count(self) -> None:
        """There is an answer for one of them."""
        self._open -= 1
        if not self._open and self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def _conclude(self, delivery: DueDelivery, answer: BrokerAnswer) -> None:
        self.handed.report(delivery, answer.result())
        self._counts.answers[answer.kept] += 1
        self._counts.duplicates += answer is DUPLICATE

    def those_that_may_begin(self, group: list[Suspect]) -> list[Suspect]:
        """Those of the group that may leave again; the others are told of."""
        may: list[Suspect] = []
        for delivery, answer in group:
            if self.may_begin([delivery]):
                may.append((delivery, answer))
            else:
                self._give_back(delivery, answer)
        return may

    def give_up(self) -> None:
        """Those that have failed with others go apart no more."""
        self.divide()
        while self.groups:
            for delivery, answer in self.groups.popleft():
                if self.is_withdrawn:
                    self._give_back(delivery, answer)
                else:
                    self._conclude(delivery, answer)

    def _give_back(self, delivery: DueDelivery, answer: BrokerAnswer) -> None:
        """A message that may not leave again. It is untried, unless the broker may have it."""
        if answer.kept is Certainty.UNKNOWN:
            self._conclude(delivery, answer)
        else:
            self.handed.tell([delivery], Untried())


def halves(group: list[Item]) -> list[list[Item]]:
    """The two halves of a group, without those that are empty."""
    middle = (len(group) + 1) // 2
    return [part for part in (group[:middle], group[middle:]) if part]
