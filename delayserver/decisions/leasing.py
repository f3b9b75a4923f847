"""Leasing: consumers pull messages, and report the result.

    pull ──▶ lease ──▶ ack ─────────────▶ settled
                  └──▶ nack, expired ──▶ first in its queue again, a RETRY later, or DEAD

A consumer that falls silent may have been ended by any message that it had: those are handed out
again apart from each other (`Backlog.suspect`).

Cost: columns for the messages that consumers take and acknowledge. Threads: belongs to the event
loop.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from delayserver.decisions.groups import Groups
from delayserver.decisions.retries import Retries
from delayserver.delivery.delayed_fetch import DelayedFetch, Pulled, PullRequest
from delayserver.delivery.deliveries import Deliveries
from delayserver.delivery.dispatcher import Dispatcher
from delayserver.delivery.leases import DeliverySelection, Leases
from delayserver.delivery.sink import (
    Tried,
)
from delayserver.records.message import (
    DueDelivery,
)
from delayserver.records.subscriptions import (
    Registry,
    Subscription,
)
from delayserver.timers.timeouts import Timeouts


def _nobody(expired: list[str], error: Exception | None) -> None:
    """No caller waits for the answer."""


class Leasing:
    """Lets consumers have deliveries for a while."""

    def __init__(
        self,
        registry: Registry,
        groups: Groups,
        dispatcher: Dispatcher,
        retries: Retries,
        timeouts: Timeouts,
        epoch: str,
    ) -> None:
        """`epoch`: the prefix of the tokens of this process's leases."""
        self._registry = registry
        self._groups = groups
        self._dispatcher = dispatcher
        self._retries = retries
        self.leases = Leases(epoch, timeouts, self._on_expired)

    def pull(self, subscription: Subscription, request: PullRequest) -> DelayedFetch:
        """A consumer asks for messages; `cancel` the returned fetch if it goes away before."""
        return self._dispatcher.pulls.request(self._dispatcher.queues.of(subscription), request)

    def hand_out(
        self, subscription: Subscription, request: PullRequest, deliveries: Deliveries
    ) -> None:
        """Lease deliveries to the consumer that asked for them, unless it is gone."""
        if request.is_gone:
            # It went while bodies were read: they were not sent, so it was no attempt.
            if len(deliveries):
                self._dispatcher.settling.return_leased(deliveries, np.arange(len(deliveries)), 0)
            self._dispatcher.pump.again(subscription.id)
            return
        request.finish(Pulled(deliveries, self.leases.grant(deliveries, request.lease_ms)))

    def give_back(self, prefix: str) -> None:
        """Messages that were leased under tokens with this prefix were not sent. Those that are
        still held are available again, and it was no attempt."""
        some = self.leases.end_pull(prefix)
        if some is not None:
            self._dispatcher.settling.return_leased(some.deliveries, some.which, 0)
            self._dispatcher.pump.again(some.deliveries.subscription_id)

    def ack(
        self,
        tokens: Sequence[str],
        now_ms: int,
        subscription_id: int | None = None,
        done: Callable[[list[str], Exception | None], None] = _nobody,
    ) -> list[str]:
        """A consumer is done with messages; returns the tokens of leases that are over, or not of
        the subscription (None: any).

        `done` gets the same once the settler has the others: before this returns, unless a message
        with the outcome has to be durable before; or the error that kept it from being so."""
        ended, over = self.leases.end(tokens, subscription_id)
        telling: list[DeliverySelection] = []
        began_ms: dict[int, int] = {}
        for deliveries, which in ended:
            told, others = deliveries.telling(which), which
            if len(told):
                telling.append(DeliverySelection(deliveries, told))
                seqs = deliveries.settled["seq"][told].tolist()
                began_ms |= dict.fromkeys(seqs, deliveries.leased_ms)
                others = np.setdiff1d(which, told, assume_unique=True)
            if len(others):
                self._dispatcher.settling.settle_leased(deliveries, others, now_ms)
                deliveries.drop_payloads(others)
        if telling:
            record = partial(self._deliver_leased, began_ms)
            self._retries.each(telling, record, None, now_ms, partial(done, over))
        else:
            done(over, None)
        return over

    def _deliver_leased(
        self, began_ms: Mapping[int, int], delivery: DueDelivery, now_ms: int
    ) -> None:
        """`began_ms`: when each was leased, by seq; 0: it is unknown."""
        leased_ms = began_ms[delivery.entry.seq]
        tried = Tried(leased_ms, max(0, now_ms - leased_ms)) if leased_ms else None
        self._retries.deliver(delivery, None, tried, now_ms)

    def nack(
        self,
        tokens: Sequence[str],
        delay_ms: int,
        now_ms: int,
        subscription_id: int | None = None,
        done: Callable[[list[str], Exception | None], None] = _nobody,
    ) -> None:
        """A consumer does not want messages now; `done` gets tokens as `ack` returns them.

        With a delay they are recorded again, and `done` is called when all of that is durable, or
        with the error that kept it from being so. Raises OverloadedError: nothing was done."""
        if delay_ms:
            self._groups.admit_retries()
        ended, over = self.leases.end(tokens, subscription_id)
        if delay_ms:
            retry = partial(self._retry_leased, delay_ms)
            self._retries.each(ended, retry, "given back (nack)", now_ms, partial(done, over))
            return
        for some in ended:
            self._return_leased(some, "given back (nack)", now_ms)
        done(over, None)

    def extend(
        self,
        tokens: Sequence[str],
        lease_ms: int,
        subscription_id: int | None = None,
    ) -> list[str]:
        """A consumer needs more time, counted from now; returns tokens as `ack`."""
        return self.leases.extend(tokens, lease_ms, subscription_id)

    def _on_expired(self, some: DeliverySelection) -> None:
        """Leases are over. A consumer that falls silent may have been ended by any message that it
        had, so an attempt counts against one only if it had no company."""
        now_ms = self._dispatcher.queues.now_ms
        if self._dispatcher.settling.may_be_the_cause(*some):
            self._return_leased(some, "the lease ran out", now_ms, are_suspects=True)
            return
        self._dispatcher.settling.return_leased(*some, are_suspects=True)
        self._dispatcher.pump.again(some.deliveries.subscription_id)

    def _retry_leased(self, delay_ms: int, delivery: DueDelivery, now_ms: int) -> None:
        subscription = self._registry.by_id(delivery.subscription_id)
        if subscription is not None and delivery.attempt >= subscription.max_attempts:
            self._return_one(delivery, now_ms)
        else:
            self._retries.retry(delivery, delay_ms, now_ms)

    def _return_leased(
        self, some: DeliverySelection, reason: str, now_ms: int, *, are_suspects: bool = False
    ) -> None:
        """Leased deliveries were not taken: they are available again, or dead after their last
        attempt."""
        deliveries, which = some
        subscription = self._registry.by_id(deliveries.subscription_id)
        if subscription is not None:
            is_last = deliveries.settled["attempt"][which] >= subscription.max_attempts
            if is_last.any():
                last = DeliverySelection(deliveries, which[is_last])
                self._retries.each([last], self._return_one, reason, now_ms)
                which = which[~is_last]
        if len(which):
            self._dispatcher.settling.return_leased(deliveries, which, are_suspects=are_suspects)
        if subscription is not None:
            self._dispatcher.pump.run(self._dispatcher.queues.of(subscription), now_ms)

    def _return_one(self, delivery: DueDelivery, now_ms: int) -> None:
        """A delivery was not taken: it is available again, or dead after its last attempt."""
        subscription = self._registry.by_id(delivery.subscription_id)
        if subscription is not None and delivery.attempt >= subscription.max_attempts:
            self._retries.bury(
                delivery, "not acknowledged in any attempt", now_ms, delivery.attempt
            )
            return
        self._dispatcher.settling.return_delivery(delivery, delivery.attempt + 1)
        if subscription is not None:
            self._dispatcher.pump.run(self._dispatcher.queues.of(subscription), now_ms)
