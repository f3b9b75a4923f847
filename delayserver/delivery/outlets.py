"""Deliveries to brokers: the one sink that all kinds of brokers share.

    deliver ──▶ shares of the outlet (a line for each subscription) ──▶ Outlet.send ──▶ broker
                 │ the outlet is opened at first use               │
      told ◀───── HandedDeliveries.report ◀─── stored, not stored, unknown
                              └─ failed with others: sent again, apart

**Apart.** Where an answer may be for the sake of a neighbour (`BrokerAnswer.is_shared`), it is no
attempt. The messages go again over an outlet of their own: halves, then singly, so that after
log2(n) rounds the one that is bad stands alone, and only that one has failed. APART_MAX of these
outlets are there at once, in turn between subscriptions.

Cost: 2 µs for a message. Threads: belongs to the event loop, whatever an outlet has besides.
"""

import asyncio
from functools import partial
from typing import Final

from delayserver.delivery.answers import UNSENT, BrokerAnswer, Certainty, unknown
from delayserver.delivery.open_outlets import (
    BLOCKED_LOOK_S,
    OpenOutlets,
    close_quietly,
)
from delayserver.delivery.outlet import Outlet, OutletError, OutletOpener
from delayserver.delivery.sending import HandedDeliveries, OutletCounts, Sending
from delayserver.delivery.sink import Failed, MayBegin, ResultCallback, Untried
from delayserver.delivery.turns import Turns
from delayserver.errors import InputError
from delayserver.records.message import DueDelivery
from delayserver.records.subscriptions import Subscription

APART_MAX: Final = 4


class OutletSink:
    """A `Sink` for one kind of broker."""

    def __init__(self, opener: OutletOpener) -> None:
        self._opener = opener
        self.outlets = OpenOutlets(opener)
        self._sending: dict[int, set[Sending]] = {}
        """By subscription id, none empty."""
        self._changed: dict[int, Subscription] = {}
        """By id those that were changed or deleted in this turn of the event loop."""
        self._apart = Turns(APART_MAX)
        self.counts = OutletCounts()

    # ---- delivering --------------------------------------------------------------------------

    async def deliver(
        self,
        subscription: Subscription,
        deliveries: list[DueDelivery],
        may_begin: MayBegin,
        told: ResultCallback,
    ) -> None:
        """See `Sink`."""
        changed = self._changed.get(subscription.id)
        if changed is not None and changed != subscription:
            # They were handed over before that, and this task begins behind it.
            told(deliveries, Untried())
            return
        handed = HandedDeliveries(len(deliveries), told)
        sending = Sending(subscription, deliveries, may_begin, handed, self.counts)
        self._sending.setdefault(subscription.id, set()).add(sending)
        try:
            try:
                while sending.unsent:
                    await self.outlets.send(sending)
                sending.divide()
                if sending.groups:
                    await self._send_apart(sending)
            except (InputError, OutletError) as error:
                if sending.unsent:
                    result = Untried() if sending.is_withdrawn else Failed(str(error))
                    handed.tell(sending.unsent, result)
                sending.give_up()
            await handed.done
        finally:
            handed.done.cancel()
            of_subscription = self._sending[subscription.id]
            of_subscription.discard(sending)
            if not of_subscription:
                del self._sending[subscription.id]

    async def _send_apart(self, sending: Sending) -> None:
        """Send messages that failed together in halves, then singly, over an outlet that nothing
        else uses. Raises InputError, OutletError: `sending.groups` are not told of."""
        subscription_id = sending.subscription.id
        await self._apart.take(subscription_id)
        outlet: Outlet | None = None
        try:
            while sending.groups:
                if sending.is_withdrawn:
                    sending.give_up()
                    break
                if outlet is not None and outlet.is_broken:
                    await close_quietly(outlet)
                    outlet = None
                if outlet is None:
                    outlet = await self._opener.open(sending.subscription)
                if outlet.is_blocked:
                    await asyncio.sleep(BLOCKED_LOOK_S)
                    continue
                group = sending.those_that_may_begin(sending.groups.popleft())
                if not group:
                    continue
                self.counts.apart += len(group)
                sending.is_alone = len(group) == 1
                before = {id(delivery): answer for delivery, answer in group}
                report = partial(_on_answer_apart, sending, before)
                deliveries = [delivery for delivery, _ in group]
                send = partial(outlet.send, sending.subscription, deliveries, report)
                await sending.round(len(group), send)
                sending.divide()
        finally:
            self._apart.give_back(subscription_id)
            if outlet is not None:
                self.outlets.in_background(close_quietly(outlet))

    # ---- subscriptions come and go -----------------------------------------------------------

    def on_subscription(self, subscription: Subscription) -> None:
        """See `Sink`."""
        self._changed[subscription.id] = subscription
        asyncio.get_running_loop().call_soon(self._forget_change, subscription)
        for sending in self._sending.get(subscription.id, ()):
            sending.is_withdrawn = True
        self.outlets.on_subscription(subscription)

    def _forget_change(self, subscription: Subscription) -> None:
        """The tasks that were ready when it was changed have begun."""
        if self._changed.get(subscription.id) is subscription:
            del self._changed[subscription.id]

    async def close(self) -> None:
        """See `Sink`."""
        await self.outlets.close()


def _on_answer_apart(
    sending: Sending, before: dict[int, BrokerAnswer], delivery: DueDelivery, answer: BrokerAnswer
) -> None:
    former = before[id(delivery)]
    if answer is UNSENT:
        answer = former  # It has not left this time.
    elif former.kept is Certainty.UNKNOWN and answer.kept is Certainty.NOT_STORED:
        # This time; the broker may have it from the time before.
        answer = unknown(answer.reason, is_shared=answer.is_shared)
    sending.on_answer(delivery, answer)
