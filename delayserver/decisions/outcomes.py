"""Outcomes: the results that sinks report, and the end of deliveries that no sink may take.

    sink ──▶ confirmed ─────────────────▶ settled
        ├──▶ gone ──────────────────────▶ subscription paused, first in its queue again
        ├──▶ later ─────────────────────▶ its queue waits, first in its queue again
        ├──▶ untried ───────────────────▶ at its place in its queue again
        └──▶ failed ────────────────────▶ a RETRY later, or DEAD after the last attempt
                                          (subscription paused, if it says: after so long of that)
    too old, expired ──▶ DEAD

A delivery that arrived is settled in the dispatch log alone, by `Settling`: most deliveries end so,
and no record is written. A failed delivery becomes a record of the message log (`Retries`).

A publisher may ask for a message that tells the outcome (`OutcomeMessages`). It is in the group of
the DEAD record. For a delivery that arrived it comes before the row of the dispatch log.

Cost: about 10 µs for a webhook that arrived. Threads: belongs to the event loop.
"""

from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from delayserver.decisions.retries import RETRY_COMMIT_MS, Retries, failed_attempt
from delayserver.decisions.subscribing import Subscribing
from delayserver.delivery.deadlines import EXPIRED
from delayserver.delivery.deliveries import Deliveries
from delayserver.delivery.dispatcher import Dispatcher
from delayserver.delivery.leases import DeliverySelection
from delayserver.delivery.sink import (
    Answer,
    Confirmed,
    Delivered,
    Failed,
    GiveUp,
    Gone,
    Hold,
    Later,
    PauseSubscription,
    Result,
    RetryLater,
    ReturnToQueue,
    outcome,
)
from delayserver.errors import OverloadedError, StoppingError
from delayserver.records.direct import is_direct
from delayserver.records.message import (
    DueDelivery,
)
from delayserver.records.subscriptions import (
    FAILURES,
    GONE,
    Registry,
    RetrySchedule,
    Subscription,
    for_message,
)
from delayserver.timers.timeouts import Timeouts

_OF_NO_SUBSCRIPTION = RetrySchedule()
"""The schedule of a delivery whose subscription was deleted meanwhile."""


def _is_answered(result: Result) -> bool:
    """Whether a receiver has answered, or nothing was sent to it."""
    return not isinstance(result, Failed) or (result.tried is not None and result.tried.status > 0)


class Outcomes:
    """Ends deliveries, or lets them begin again."""

    def __init__(
        self,
        registry: Registry,
        dispatcher: Dispatcher,
        subscribing: Subscribing,
        retries: Retries,
        timeouts: Timeouts,
        random: Callable[[], float],
    ) -> None:
        """`random`: from 0 to 1."""
        self._registry = registry
        self._dispatcher = dispatcher
        self._subscribing = subscribing
        self._retries = retries
        self._timeouts = timeouts
        self._random = random

    def on_sent(self, answers: Sequence[Answer], now_ms: int) -> None:
        """Take in the results of sent deliveries; one counts for all that it stands with.

        Results that come together are one call, since the places that get free are filled in one
        step."""
        subscriptions: dict[int, Subscription] = {}
        for deliveries, result in answers:
            subscription = self._on_answer(deliveries, result, now_ms)
            if subscription is not None:
                subscriptions[subscription.id] = subscription
        for subscription in subscriptions.values():
            self._dispatcher.pump.run(self._dispatcher.queues.of(subscription), now_ms)

    def _on_answer(
        self, deliveries: list[DueDelivery], result: Result, now_ms: int
    ) -> Subscription | None:
        """Returns the subscription, if it exists still."""
        self._dispatcher.pushes.end_request(deliveries, is_answered=_is_answered(result))
        subscription = self._registry.by_id(deliveries[0].subscription_id)
        policy = _OF_NO_SUBSCRIPTION
        if subscription is not None:
            policy = for_message(subscription, deliveries[0].payload).retry_schedule
            if is_direct(subscription.id) and isinstance(result, Gone):
                # Such a subscription has no owner who could resume it.
                result = Failed(result.reason)
                policy = RetrySchedule.within_limits(deliveries[0].attempt, ())
        jitter = self._random()
        in_company = len(deliveries) > 1 and subscription is not None and subscription.batch_max > 0
        returned: list[DueDelivery] = []
        is_gone = False
        for delivery in deliveries:
            match outcome(result, delivery.attempt, policy, lambda: jitter, in_company=in_company):
                case Delivered(recorded, tried):
                    self._retries.deliver(delivery, recorded, tried, now_ms)
                case RetryLater(delay_ms=delay_ms):
                    self._retries.retry(failed_attempt(delivery, result, now_ms), delay_ms, now_ms)
                case GiveUp(reason=reason):
                    failed = failed_attempt(delivery, result, now_ms)
                    self._retries.bury(failed, reason, now_ms, delivery.attempt)
                case PauseSubscription():
                    returned.append(delivery)
                    is_gone = True
                case Hold(hold_ms=hold_ms):
                    if is_direct(delivery.subscription_id):
                        # Its queue has the messages of other hosts, too.
                        self._retries.schedule_again(delivery, delivery.attempt, hold_ms, now_ms)
                    else:
                        returned.append(delivery)
                        self._dispatcher.pushes.hold(delivery.subscription_id, hold_ms)
                case ReturnToQueue():
                    returned.append(delivery)
        for delivery in returned:
            self._dispatcher.settling.return_delivery(delivery, delivery.attempt)
        if subscription is not None:
            if is_gone:
                self._pause(subscription.id, GONE)
            elif not is_direct(subscription.id):
                self._on_result(subscription, result, now_ms)
        return subscription

    def _on_result(self, subscription: Subscription, result: Result, now_ms: int) -> None:
        """A subscription wants to be paused when it has had nothing but failures for long."""
        if isinstance(result, Confirmed):
            self._subscribing.on_arrived(subscription, now_ms)
        elif isinstance(result, Failed | Later) and self._subscribing.fails_for_long(
            subscription, now_ms
        ):
            self._pause(subscription.id, FAILURES)

    def on_outdated(self, deliveries: Deliveries, reason: str, now_ms: int) -> None:
        """Deliveries are too old to be attempted: they are dead letters."""
        some = DeliverySelection(deliveries, np.arange(len(deliveries)))
        self._retries.each([some], partial(self._bury_untried, reason), None, now_ms)

    def on_expired(self, deliveries: Deliveries, which: NDArray[np.intp], now_ms: int) -> None:
        """Deliveries have outlived their messages' time to live: they are dead letters."""
        bury = partial(self._bury_untried, EXPIRED)
        self._retries.each([DeliverySelection(deliveries, which)], bury, None, now_ms)

    def _bury_untried(self, reason: str, delivery: DueDelivery, now_ms: int) -> None:
        self._retries.bury(delivery, reason, now_ms, delivery.attempt - 1)

    def on_orphaned(self, delivery: DueDelivery, left_by: int, now_ms: int) -> None:
        """A delivery is all that is left of a message, and its subscription `left_by` is gone.

        The RETRY makes the delivery visible again after a crash. Without it the message would be
        lost then, because no row of the hour's file says that anybody still waits for it."""
        delivery = msgspec.structs.replace(delivery, subscription_id=left_by)
        self._retries.schedule_again(delivery, delivery.attempt, 0, now_ms)

    def _pause(self, subscription_id: int, reason: str) -> None:
        """The receiver is gone, or fails: send it nothing more, and record it; later if that is
        refused."""

        def unless_written(error: Exception | None) -> None:
            if error is not None:
                self._timeouts.add(partial(self._pause, subscription_id, reason), RETRY_COMMIT_MS)

        try:
            group = self._subscribing.pause(subscription_id, reason)
        except StoppingError:
            return  # The next process hears of it when it sends.
        except OverloadedError as error:
            unless_written(error)
            return
        if group is not None:
            group.when_durable(unless_written)
