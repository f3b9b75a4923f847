"""Who asks the shards: publishers, definers, and receivers of webhooks.

Each message goes to the shard that its key or its group belongs to, as the router has it; all else
to any. Half of the messages have options. Subscriptions are changed at shard 0. What was answered
is told to the ledger of the shard, or to the promises of all.

Cost: some 20 µs a call. Threads: none.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from delayserver.decisions.group import Group
from delayserver.decisions.new_messages import NewMessage
from delayserver.delivery.webhook import WebhookResponse
from delayserver.errors import DelayServerError
from delayserver.records.direct import Destination
from delayserver.records.message import MessageOptions, OutcomeSubjects, Payload
from delayserver.records.sharding import shard_of, shard_of_message
from delayserver.records.subscriptions import Registry, Subscription
from delayserver.shards.definitions import HOME
from storage.errors import StorageError
from tests.world.publishes import publish_all
from tests.world.shards.machine import MachineShard, ShardsMachine
from tests.world.shards.promises import Promises
from tests.world.subscribers import LOST, OK

SUBJECTS = ("orders.paid", "orders.late", "misc")
KEYS = ("k1", "k2", "k3", "k4", "k5")
GROUPS = ("g1", "g2", "g3")
TTLS_MS = (0, 0, 0, 300, 20_000)
PRIORITIES = (0, 0, 5, 9)
HOSTS = ("http://host-0/", "http://host-1/")
ALWAYS = "queue", "hook"
"""Subscriptions that are never deleted; the others come and go."""
NAMES = (*ALWAYS, "p1", "p2")


class Publishers:
    """Whoever publishes and cancels."""

    def __init__(self, machine: ShardsMachine, promises: Promises) -> None:
        self._machine = machine
        self._rng = machine.rng
        self._promises = promises
        self._body_count = 0

    def publish(self) -> None:
        """Publish one message or several, at the shard where they belong."""
        rng = self._rng
        shards, now_ms = self._machine.up(), self._machine.clock.now_ms
        if not shards:
            return
        key = rng.choice(KEYS) if rng.random() < 0.3 else None
        group = rng.choice(GROUPS) if rng.random() < 0.3 else None
        subject = rng.choice(SUBJECTS)
        owner = shard_of_message(subject, key, group, self._machine.count)
        shard = rng.choice(shards) if owner is None else self._machine.shards[owner]
        if not shard.is_up:
            return
        messages = []
        for _ in range(1 if key is not None else rng.choice((1, 1, 2, 5))):
            self._body_count += 1
            due_ms = now_ms + rng.choice((0, rng.randrange(20), rng.randrange(400), 3000))
            body = f'"{self._body_count}"'.encode()
            payload = Payload(body, key=key, options=self._options(subject, group))
            messages.append(NewMessage(subject, due_ms, payload))
        shard.guard(partial(self._publish, shard, messages))

    def _options(self, subject: str, group: str | None) -> MessageOptions | None:
        rng = self._rng
        if rng.random() < 0.6:
            return None if group is None else MessageOptions(group=group)
        to = Destination(rng.choice(HOSTS), subject, max_attempts=3, backoff_ms=(50,))
        return MessageOptions(
            rng.choice(TTLS_MS),
            priority=rng.choice(PRIORITIES),
            group=group,
            to=to if rng.random() < 0.3 else None,
            outcomes=OutcomeSubjects("misc", "misc") if rng.random() < 0.3 else None,
        )

    def _publish(self, shard: MachineShard, messages: list[NewMessage]) -> None:
        server = shard.running
        try:
            published = publish_all(server.engine.publishing, messages, server.clock())
        except DelayServerError:
            return
        for one in published:
            seq = server.engine.ids.decode(one.message_id).seq
            _once_durable(one.group, partial(shard.ledger.published, seq))

    def cancel(self) -> None:
        """Cancel a message by its key, at its owner."""
        subject, key = self._rng.choice(SUBJECTS), self._rng.choice(KEYS)
        shard = self._machine.shards[shard_of(subject, key, self._machine.count)]
        if shard.is_up:
            shard.guard(partial(self._cancel, shard, subject, key))

    def _cancel(self, shard: MachineShard, subject: str, key: str) -> None:
        messages = shard.running.engine.messages
        try:
            found = messages.by_key(subject, key)
            group = messages.cancel(found.seq, found.due_ms)
        except DelayServerError:
            return
        _once_durable(group, partial(shard.ledger.cancelled, found.seq))


class Receivers:
    """Whoever receives webhooks."""

    def __init__(self, machine: ShardsMachine) -> None:
        self._machine = machine
        self._rng = machine.rng
        self.is_patient = False
        """Whether they take all that comes."""

    def answer(self) -> None:
        """Answer a webhook, or refuse it, or want no more."""
        sending = [shard for shard in self._machine.up() if shard.running.sending]
        if not sending:
            return
        rng = self._rng
        shard = rng.choice(sending)
        dice = 0.0 if self.is_patient else rng.random()
        if dice < 0.6:
            response, seen = OK, True
        elif dice < 0.75:
            response, seen = LOST, rng.random() < 0.5
        elif dice < 0.94:
            response, seen = WebhookResponse(500), False
        else:
            response, seen = WebhookResponse(410), False
        deliveries = rng.choice(shard.running.sending)

        def answer() -> None:
            for delivery in deliveries:
                shard.ledger.returned(delivery, seen=seen)
            shard.running.answer(deliveries, response)

        shard.guard(answer)


class Definers:
    """Whoever changes subscriptions: one at a time for each name."""

    def __init__(self, machine: ShardsMachine, promises: Promises) -> None:
        self._machine = machine
        self._rng = machine.rng
        self._promises = promises
        self._busy: set[str] = set()
        """Names that somebody changes."""

    def ended(self, shard: int) -> None:
        """A shard ended; whoever waited for it does no more."""
        if shard == HOME:
            self._busy.clear()

    def change(self) -> None:
        """Make, change, pause, resume or delete a subscription, whatever is under way."""
        rng, home = self._rng, self._machine.shards[HOME]
        name, dice = rng.choice(NAMES), rng.random()
        if not home.is_up or name in self._busy:
            return
        calls = home.running.calls
        known = calls.registry.by_name(name)
        if known is None or dice < 0.4:
            self._ask(name, partial(calls.subscriptions.put, name, partial(self._define, name)))
        elif dice < 0.6 and name not in ALWAYS:
            self._ask(name, partial(calls.subscriptions.change, name, deleted=True))
        else:
            paused = not known.paused
            self._ask(name, partial(calls.subscriptions.change, name, paused=paused))

    def put_always(self) -> None:
        """Make what is always there, or have it go on."""
        calls = self._machine.shards[HOME].running.calls
        for name in NAMES:
            known = calls.registry.by_name(name)
            if name in self._busy:
                continue
            if known is None and name in ALWAYS:
                self._ask(name, partial(calls.subscriptions.put, name, partial(self._define, name)))
            elif known is not None and known.paused:
                self._ask(name, partial(calls.subscriptions.change, name, paused=False))

    def _ask(self, name: str, change: Callable[[], Awaitable[Subscription]]) -> None:
        home = self._machine.shards[HOME]
        self._busy.add(name)

        async def ask() -> None:
            self._promises.defined(await change())

        def answered(task: "asyncio.Task[None]") -> None:
            self._busy.discard(name)
            error = task.exception()
            if error is not None and not isinstance(error, DelayServerError | StorageError):
                raise error
            self._machine.counts["definitions refused"] += error is not None

        home.guard(lambda: home.running.event_loop.start(ask(), answered))

    def _define(self, name: str, existing: Subscription | None, decided: Registry) -> Subscription:
        if existing is not None:
            return msgspec.structs.replace(existing, timeout_ms=existing.timeout_ms + 1)
        rng = self._rng
        kind = {"queue": "pull", "hook": "webhook"}.get(name) or rng.choice(("webhook", "pull"))
        limits: dict[str, Any] = {}
        if kind == "webhook" and rng.random() < 0.3:
            limits.update(rate_per_s=rng.choice((5.0, 1000.0)), rate_burst=rng.choice((1, 20)))
        if kind == "webhook" and rng.random() < 0.3:
            limits.update(batch_max=rng.choice((2, 5)), linger_ms=rng.choice((0, 3, 200)))
        return Subscription(
            id=decided.next_id(),
            name=name,
            subject="*" if name == "queue" else rng.choice((*SUBJECTS, "orders.*", "*")),
            type="pull" if kind == "pull" else "webhook",
            created_ms=self._machine.clock.now_ms,
            max_in_flight=rng.choice((1, 2, 5)),
            # A consumer gives up what it gave back, too, and would have it as a dead letter.
            max_attempts=1000 if kind == "pull" else rng.choice((1000, 1000, 3)),
            backoff_ms=(rng.choice((1, 50, 1000)),),
            **limits,
        )


def _once_durable(group: Group | None, answered: Callable[[], None]) -> None:
    """Answer when the group is durable, and never if it fails; at once where there is none."""
    if group is None:
        answered()
    else:
        group.when_durable(lambda error: None if error else answered())
