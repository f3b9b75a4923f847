"""Calls about subscriptions: they are defined and changed, here and at the other shards.

    put, change ──▶ decided ──▶ durable and in force ──▶ spread ──▶ answered
    another shard has decided ──▶ take ──▶ durable and in force

Cost: a record for each change. Threads: belongs to the event loop.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from delayserver.delivery.own_threads import in_own_thread
from delayserver.errors import ConflictError, InputError
from delayserver.records.subscriptions import SPANS_MAX, Registry, Subscription
from delayserver.server.futures import durable
from delayserver.server.shard import Shard
from delayserver.server.waits import Waits


class Spreading(Protocol):
    """Other shards, which have each definition before a change of it is answered."""

    async def check(self) -> None:
        """Raises ShardAwayError where some of them are away."""

    async def spread(self, subscription: Subscription) -> None:
        """Done when they have it, durable. Raises ShardAwayError."""


class SubscriptionCalls:
    """The definitions of one shard."""

    def __init__(self, shard: Shard, waits: Waits) -> None:
        self._shard = shard
        self._engine = shard.engine
        self._waits = waits
        self._lock = asyncio.Lock()
        """Held while a subscription is changed: so no answer shows a change that is not durable."""
        self.spreading: Spreading | None = None
        """Where there are others that a changed subscription has to reach."""

    async def put(
        self, name: str, define: Callable[[Subscription | None, Registry], Subscription]
    ) -> Subscription:
        """Add or change a subscription; durable and in force on return.

        `define`: makes its definition of the one that has the name and of all that were decided.
        Raises its errors, OverloadedError, StoppingError, ShardAwayError."""
        if self.spreading is not None:
            await self.spreading.check()
        async with self._lock:
            decided = self._engine.subscribing.decided
            subscription = define(decided.by_name(name), decided)
            await durable(self._engine.subscribing.put_subscription(subscription))
        if self.spreading is not None:
            await self.spreading.spread(subscription)
        return subscription

    async def change(self, name: str, **changes: bool | str) -> Subscription:
        """Change a part of a subscription; durable and in force on return.

        Raises NotFoundError, OverloadedError, StoppingError, ShardAwayError."""
        if self.spreading is not None:
            await self.spreading.check()
        async with self._lock:
            changed, group = self._engine.subscribing.change(name, **changes)
            await durable(group)
        if self.spreading is not None:
            await self.spreading.spread(changed)
        return changed

    async def take(self, subscriptions: Iterable[Subscription], *, are_all: bool) -> None:
        """Take over definitions that another shard has decided; durable and in force on return.

        `are_all`: any other is deleted. Raises OverloadedError, StoppingError: some
        of them may be in force."""
        async with self._lock:
            for changed in self._engine.subscribing.differing(subscriptions, are_all=are_all):
                self._engine.subscribing.put_subscription(changed, is_told=True)
            await self._waits.all_durable()

    def when_paused(self, paused: Callable[[int], None]) -> None:
        """Have `paused` called with the id of a subscription that is recorded as paused, since its
        receiver said that it is gone, or has failed for long."""
        self._engine.subscribing.on_paused = paused

    def when_failing(self, failing: Callable[[int, int], None]) -> None:
        """There are other shards: have `failing` called with the id of a subscription and since
        when it fails (0: it does not), instead of recording that in this shard."""
        self._engine.subscribing.failing.is_alone = False
        self._engine.subscribing.on_failing = failing

    async def note_failing(self, subscription_id: int, since_ms: int) -> Subscription | None:
        """Record since when a subscription fails (0: it does not); as it is then, durable. None:
        nothing is recorded.

        Raises the error that keeps it from being durable."""
        group = self._engine.subscribing.note_failing(subscription_id, since_ms)
        if group is None:
            return None
        await durable(group)
        return self._engine.registry.by_id(subscription_id)

    def subjects_of(self, subscription: Subscription) -> list[str]:
        """The subjects that a subscription has and had, as far as messages of that time are
        kept."""
        return [span.subject for span in self._engine.subscribing.needed(subscription.spans)]

    def check_subjects_of(self, subscription: Subscription) -> None:
        """Raises ConflictError if a subscription can have no other subject now."""
        if len(self.subjects_of(subscription)) >= SPANS_MAX:
            raise ConflictError(
                f"the subject of {subscription.name!r} was changed {SPANS_MAX - 1} times while "
                "messages of the first one are still kept; try again when their retention is over, "
                "or make another subscription"
            )

    async def check_exactly_once(self, bootstrap: str) -> None:
        """Whether these brokers are those that have the logs of this cluster. Raises InputError."""
        transactions = self._shard.transactions
        if transactions is None:
            raise InputError(
                "exactly_once is for a node of a cluster (serve --cluster), and only into the "
                "brokers that have the cluster's own logs; elsewhere it is at_least_once",
                "/delivery",
            )
        if (
            problem := await in_own_thread("delayserver-brokers", transactions.differs, bootstrap)
        ) is not None:
            raise InputError(problem, "/delivery")
