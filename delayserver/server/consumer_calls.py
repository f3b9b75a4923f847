"""Calls of consumers: messages with leases, and the ends of the leases.

    pull ──▶ leases ──▶ ack: done │ nack: again │ extend: later
    wait ──▶ for messages of other shards, too

An answer is given through a callback: no future waits for it. Cost: that of `Leasing`. Threads:
belongs to the event loop.
"""

from collections.abc import Callable
from functools import partial

from delayserver.delivery.delayed_fetch import DelayedFetch, PullRequest
from delayserver.errors import StoppingError
from delayserver.records.subscriptions import Subscription
from delayserver.server.shard import Shard


class ConsumerCalls:
    """The calls, and the news for other shards."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        engine = self._engine = shard.engine
        self.ready = engine.dispatcher.pulls.ready
        self.give_back = engine.leasing.give_back
        self.oldest_wait = engine.dispatcher.pulls.fetches.oldest

    def pull(self, subscription: Subscription, request: PullRequest) -> DelayedFetch:
        """Have `request` answered with messages and their leases, at once or later. The caller
        cancels the returned fetch if the consumer is gone before. Raises StoppingError."""
        self.check_handing_out()
        fetch = self._engine.leasing.pull(subscription, request)
        if not fetch.is_completed:
            self._shard.tick_for_timeouts()
        return fetch

    def wait(
        self,
        subscription: Subscription,
        request: PullRequest,
        ready: Callable[[], bool],
        complete: Callable[[DelayedFetch], None],
    ) -> DelayedFetch:
        """Let a consumer wait for messages of other shards, too. `complete` is called when
        `ready` says so, the time is up, or the wait is in vain: see `ready` of the calls.

        If you change what `ready` returns, complete `oldest_wait` for the same number."""
        dispatcher = self._engine.dispatcher
        queue = dispatcher.queues.of(subscription)  # whose end ends the wait
        fetch = dispatcher.pulls.fetches.add(queue.subscription.id, request, ready, complete)
        if not fetch.is_completed:
            self._shard.tick_for_timeouts()
        return fetch

    def when_ready(self, told: Callable[[int], None]) -> None:
        """Have `told` called with the id of a pull subscription of which other rows may leave than
        before, perhaps."""
        self._engine.dispatcher.pulls.on_ready = told

    def ack(
        self,
        subscription_id: int,
        tokens: list[str],
        done: Callable[[list[str], Exception | None], None],
    ) -> None:
        """Acknowledge leases; `done` gets those that were over, once the others are recorded, or
        with the error that kept a message with the outcome from being so."""

        def settled(expired: list[str], error: Exception | None) -> None:
            if error is None and len(expired) < len(tokens):
                self._shard.when_settled(partial(done, expired, None))
            else:
                done(expired, error)

        self._engine.leasing.ack(tokens, self._shard.clock(), subscription_id, settled)

    def ack_soon(self, subscription_id: int, tokens: list[str]) -> list[str]:
        """Acknowledge leases for somebody who does not wait for the record, which is made within
        `settle_sync_ms`. Returns those that were over. Raises StoppingError: nothing was done."""
        self.check_running()
        return self._engine.leasing.ack(tokens, self._shard.clock(), subscription_id)

    def check_running(self) -> None:
        """Raises StoppingError."""
        if self._engine.groups.stopping:
            raise StoppingError("the server is stopping")

    def check_handing_out(self) -> None:
        """Raises StoppingError, also where everything but a pull is still answered."""
        self.check_running()
        if self._engine.dispatcher.queues.draining:
            raise StoppingError("the server is stopping, and hands out nothing more")

    def nack(
        self,
        subscription_id: int,
        tokens: list[str],
        delay_ms: int,
        done: Callable[[list[str], Exception | None], None],
    ) -> None:
        """Give leased messages back; `done` gets the tokens that were over, once the others are
        recorded, or the error that kept them from being so. Raises OverloadedError."""
        self._engine.leasing.nack(tokens, delay_ms, self._shard.clock(), subscription_id, done)
        self._shard.tick_soon()

    def extend(self, subscription_id: int, tokens: list[str], lease_ms: int) -> list[str]:
        """Give leases a new deadline. Returns those that were over."""
        expired = self._engine.leasing.extend(tokens, lease_ms, subscription_id)
        self._shard.tick_soon()  # A lease may have been made shorter.
        return expired

    def waiting(self, subscription: Subscription) -> tuple[int, int]:
        """How many messages are due and wait for a subscriber, and how many it holds."""
        queue = self._engine.dispatcher.queues.of(subscription)
        return queue.count, queue.in_flight
