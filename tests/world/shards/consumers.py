"""Consumers of the shards: each call comes in at any process, as bytes, and is about leases of any.

They pull, wait, leave while they wait, acknowledge, give back, extend, or forget what they hold; in
the end they are patient, and take everything.

Cost: some 50 µs a call. Threads: none.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from delayserver.api.hot.answers import AnsweredError
from delayserver.api.hot.paths import ConsumerCall
from delayserver.errors import DelayServerError
from delayserver.records.subscriptions import Subscription
from storage.errors import StorageError
from tests.world.shards.machine import MachineShard, ShardsMachine
from tests.world.shards.promises import Held, Promises, PulledMessage
from tests.world.violation import Violation

DAY_MS = 24 * 3_600_000
LATE_MS = 6_000
"""Who waits longer than this beyond what he has asked for is forgotten."""


class PulledAnswer(msgspec.Struct):
    """The answer to a pull."""

    messages: list[PulledMessage]
    acked: int = 0
    expired: list[str] = []


class _EndedAnswer(msgspec.Struct):
    expired: list[str]


class ConsumerAsking:
    """A call that is under way."""

    def __init__(self, shard: MachineShard, action: str, until_ms: int) -> None:
        self.shard = shard
        self.is_pull = action == "pull"
        self.until_ms = until_ms
        """When it should have been answered, on the stopwatch."""
        self.leave: Callable[[], None] = lambda: None
        self.is_answered = False


class ShardConsumers:
    """All of them, and what they know."""

    def __init__(self, machine: ShardsMachine, promises: Promises) -> None:
        self._machine = machine
        self._rng: random.Random = machine.rng
        self._promises = promises
        self.asking: list[ConsumerAsking] = []
        self.is_patient = False
        """Whether they take all that comes."""

    def ended(self, shard: int) -> None:
        """The process of a shard is gone, and nobody who asked it is answered."""
        self.asking = [one for one in self.asking if one.shard.number != shard]

    # ── pull ───────────────────────────────────────────────────────────────────────────────────

    def pull_all(self, settle: Callable[[], None]) -> None:
        """Take and acknowledge all that is there, each subscription at any one process."""
        for subscription in list(self._machine.shards[0].running.engine.registry):
            if subscription.type != "pull":
                continue
            while any(there := self._there(subscription)):
                before = self._promises.counts["received"]
                self._pull(self._rng.choice(self._machine.shards), subscription)
                settle()
                # What has expired is found out when it is read, and is had by nobody.
                is_in_vain = self._promises.counts["received"] == before
                if is_in_vain and self._there(subscription) == there:
                    raise Violation(f"{there} of {subscription.name} are there, and not had (I3)")
            while self._of(subscription.id):
                self.end()
                settle()

    def _there(self, subscription: Subscription) -> list[int]:
        shards = self._machine.shards
        return [one.running.calls.consumers.ready(subscription.id) or 0 for one in shards]

    def _of(self, subscription_id: int) -> list[Held]:
        """What is held of a subscription. Who is patient asks again what was not answered."""
        return [
            one
            for one in self._promises.held.values()
            if (not one.times_asked or self.is_patient) and one.subscription_id == subscription_id
        ]

    def pull(self) -> None:
        """Pull at some process, whatever is there."""
        rng = self._rng
        shard = rng.choice(self._machine.up())
        pulls = [one for one in shard.running.engine.registry if one.type == "pull"]
        if not pulls:
            return
        self._pull(shard, rng.choice(pulls))

    def _pull(self, shard: MachineShard, subscription: Subscription) -> None:
        rng = self._rng
        most = 1000 if self.is_patient else rng.choice((1, 2, 5, 1000))
        least = 1 if self.is_patient else rng.choice((1, 1, 1, 2, most))
        wait_ms = 0 if self.is_patient else rng.choice((0, 0, 50, 5_000, 60_000))
        lease_ms = rng.choice((200, 10_000, DAY_MS, DAY_MS))
        body: dict[str, Any] = {"max": most, "min_messages": least, "wait": wait_ms}
        body["lease"] = DAY_MS if self.is_patient else lease_ms
        acks: list[Held] = []
        if rng.random() < 0.3:
            acks = self._some(subscription.id, rng.choice((1, 3)))
            body["ack"] = [held.token for held in acks]
        self._ask(
            shard,
            subscription.name,
            "pull",
            body,
            wait_ms,
            partial(self._pulled, subscription.id, acks, self._reached(shard, acks)),
        )

    def _pulled(
        self, subscription_id: int, acks: Sequence[Held], reached: Sequence[bool], answer: bytes
    ) -> None:
        pulled = msgspec.json.decode(answer, type=PulledAnswer)
        self._ended(acks, reached, pulled.expired, partial(self._promises.acked, is_recorded=False))
        self._promises.received(subscription_id, pulled.messages)

    def leave(self) -> None:
        """Somebody who waits for messages is gone; whatever else was asked for happens."""
        waiting = [one for one in self.asking if one.is_pull]
        if not waiting:
            return
        one = self._rng.choice(waiting)
        self.asking.remove(one)
        one.is_answered = True
        one.shard.guard(one.leave)
        self._promises.counts["left"] += 1

    # ── what is held ───────────────────────────────────────────────────────────────────────────

    def _some(self, subscription_id: int, most: int) -> list[Held]:
        """Some of what is held of a subscription, of any shards; from now on it is not sure."""
        held = self._of(subscription_id)
        some = self._rng.sample(held, min(most, len(held)))
        for one in some:
            one.times_asked += 1
        return some

    def end(self) -> None:
        """Acknowledge, give back or extend some of what is held, at any process."""
        rng = self._rng
        known = [
            one for one in self._promises.held.values() if not one.times_asked or self.is_patient
        ]
        if not known:
            return
        one = rng.choice(known)
        shard = rng.choice(self._machine.up())
        subscription = shard.running.engine.registry.by_id(one.subscription_id)
        if subscription is None:
            return
        some = self._some(one.subscription_id, 1000 if self.is_patient else rng.choice((1, 2, 6)))
        body: dict[str, Any] = {"leases": [held.token for held in some]}
        dice = 0.0 if self.is_patient else rng.random()
        reached = self._reached(shard, some)
        if dice < 0.6:
            done = partial(self._promises.acked, is_recorded=True)
            self._ask(
                shard, subscription.name, "ack", body, 0, partial(self._told, some, reached, done)
            )
        elif dice < 0.8:
            body["delay"] = rng.choice((0, 0, 30, 1000))
            self._ask(
                shard,
                subscription.name,
                "nack",
                body,
                0,
                partial(self._told, some, reached, self._nacked),
            )
        else:
            body["lease"] = lease_ms = rng.choice((50, 5_000, DAY_MS))
            until_ms = self._machine.clock.stopwatch_ms() + lease_ms
            for held in some:
                held.until_ms = min(held.until_ms, until_ms)
            extended = partial(self._extended, until_ms)
            self._ask(
                shard,
                subscription.name,
                "extend",
                body,
                0,
                partial(self._told, some, reached, extended),
            )

    def _told(
        self,
        some: Sequence[Held],
        reached: Sequence[bool],
        done: Callable[[Sequence[Held]], None],
        answer: bytes,
    ) -> None:
        expired = msgspec.json.decode(answer, type=_EndedAnswer).expired
        self._ended(some, reached, expired, done)

    def _ended(
        self,
        some: Sequence[Held],
        reached: Sequence[bool],
        expired: Sequence[str],
        done: Callable[[Sequence[Held]], None],
    ) -> None:
        for held, is_reached in zip(some, reached, strict=True):
            if held.token not in expired:
                done([held])
            elif is_reached and held.times_asked == 1 and self._lasts(held):
                raise Violation(f"{held} counts as over, and is not (I4)")
            else:
                self._told_over(held)

    def _lasts(self, held: Held) -> bool:
        """Whether it is certainly not over; it outlasts its subscription."""
        return (
            self._promises.held.get(held.token) is held
            and held.until_ms > self._machine.clock.stopwatch_ms()
        )

    def _told_over(self, held: Held) -> None:
        """Only its shard may say so, for only that one knows."""
        shard = self._machine.shards[held.shard]
        if held.token not in self._promises.held:
            return
        if shard.is_up and shard.running.engine.leasing.leases.get(held.token) is not None:
            raise Violation(f"{held} counts as over, and its shard holds it (I4)")
        self._promises.forget(held.token)

    def _nacked(self, some: Sequence[Held]) -> None:
        for held in some:
            self._promises.counts["nacked"] += 1
            self._promises.forget(held.token)

    def _extended(self, until_ms: int, some: Sequence[Held]) -> None:
        for held in some:
            self._promises.counts["extended"] += 1
            held.times_asked, held.until_ms = 0, until_ms

    def _reached(self, shard: MachineShard, some: Sequence[Held]) -> list[bool]:
        """Of each lease, whether the shard that has granted it gets a call that comes in here."""
        return [shard.reaches(held.shard) for held in some]

    # ── calls ──────────────────────────────────────────────────────────────────────────────────

    def _ask(
        self,
        shard: MachineShard,
        name: str,
        action: str,
        body: dict[str, Any],
        wait_ms: int,
        told: Callable[[bytes], None],
    ) -> None:
        until_ms = self._machine.clock.stopwatch_ms() + wait_ms
        asking = ConsumerAsking(shard, action, until_ms)
        self._machine.counts[action] += 1

        def tell(answer: bytes | Exception) -> None:
            try:
                answered(answer)
            except Exception as error:  # who asked would be told of it
                self._machine.failure = self._machine.failure or error

        def answered(answer: bytes | Exception) -> None:
            if asking.is_answered:
                raise Violation(f"a {action} was answered, and the consumer gone, or twice")
            asking.is_answered = True
            if asking in self.asking:
                self.asking.remove(asking)
            if isinstance(answer, bytes):
                told(answer)
            elif isinstance(answer, DelayServerError | StorageError | AnsweredError):
                self._machine.counts[f"{action} refused"] += 1
            else:
                raise answer

        def ask() -> None:
            call = ConsumerCall(name, action)
            data = msgspec.json.encode(body)
            asking.leave = shard.hot.consuming.serve(call, data, None, tell)

        if shard.guard(ask) and not asking.is_answered:
            self.asking.append(asking)

    def check_answered(self) -> None:
        """Much time has passed, and nothing was under way: nobody may wait any more."""
        for one in self.asking:
            if one.until_ms + LATE_MS < self._machine.clock.stopwatch_ms():
                raise Violation(f"a call at shard {one.shard.number} is not answered")
