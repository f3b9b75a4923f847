"""Deliveries that leave: each attempt is a task, and the verdict of its sink goes to the outcomes.

    send ──▶ Sink.deliver ──▶ told ──▶ all answers of a turn of the loop ──▶ Outcomes.on_sent
                 └── begins: how late it is, is counted

Whatever goes wrong in the client of one receiver ends one attempt, and nothing else. The clients of
brokers are extras: they are imported once there is a subscription.

Cost: a task for each attempt. Threads: belongs to the event loop.
"""

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import structlog

from delayserver.delivery.open_outlets import body_bytes
from delayserver.delivery.outlet import NoClient
from delayserver.delivery.outlets import OutletSink
from delayserver.delivery.sender import HttpWebhookSender
from delayserver.delivery.sink import Answer, Failed, Gone, Later, Result, Sink
from delayserver.delivery.webhook import WebhookSender
from delayserver.records.message import DueDelivery
from delayserver.records.subscriptions import Registry, StandIn, Subscription
from delayserver.records.understanding import reason_of
from delayserver.security.targets import TargetPolicy
from delayserver.server.metrics import Metrics
from delayserver.server.shard import Shard
from delayserver.server.webhook_sink import WebhookSink
from storage.errors import StorageError

if TYPE_CHECKING:
    from delayserver.server.telemetry import Telemetry

REASON_CHARACTERS_MAX = 1000
"""The longest reason that a client may give for an attempt that failed; the rest is cut."""
ANSWERS_MAX = 32
"""Answers whose consequences are drawn in one turn of the event loop: 0.1 ms each."""

log = structlog.get_logger()


class SinkRunner:
    """The attempts that are on their way."""

    def __init__(
        self,
        shard: Shard,
        metrics: Metrics,
        sender: WebhookSender | None,
        telemetry: "Telemetry | None",
    ) -> None:
        """`sender`: of webhooks, if not over HTTP."""
        self._shard = shard
        self._engine = shard.engine
        self._metrics = metrics
        self._sender = sender
        self._telemetry = telemetry
        self.targets = TargetPolicy(shard.settings.webhook_targets)
        self._sinks: dict[str, Sink] = {}
        """By type of subscription; made at first use."""
        self._sending: set[asyncio.Task[None]] = set()
        self._answers: list[Answer] = []
        self.broken_total = 0
        """Attempts that ended by an error that nobody had foreseen."""

    def send(self, subscription: Subscription, deliveries: list[DueDelivery]) -> None:
        """Begin an attempt; its outcome goes to `Outcomes.on_sent`."""
        if subscription.takes_many:
            self._shard.broker_bodies.take(subscription.id, sum(map(body_bytes, deliveries)))
        task = asyncio.get_running_loop().create_task(self._send(subscription, deliveries))
        self._sending.add(task)
        task.add_done_callback(self._sent)

    async def stop(self, drain_s: float) -> None:
        """Let attempts under way finish, for so long. Behind this nothing leaves any more, whoever
        owns the shard then."""
        if self._sending:
            await asyncio.wait(self._sending, timeout=drain_s)
            while self._answers:
                self._on_answers()
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)
        for sink in self._sinks.values():
            await sink.close()

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            # The office or the disk is lost, and the deliveries would stay on their way for good.
            self._shard.on_fatal(error)

    async def _send(self, subscription: Subscription, deliveries: list[DueDelivery]) -> None:
        """One attempt. Whatever goes wrong in the client of one receiver ends this attempt, and
        nothing else."""
        began_at = time.perf_counter()
        left = {id(delivery): delivery for delivery in deliveries}
        may_begin = partial(self._may_begin, subscription)

        def told(some: list[DueDelivery], result: Result) -> None:
            known = [one for one in some if left.pop(id(one), None) is not None]
            if known:
                self._on_result(subscription, began_at, known, _writable(result))

        try:
            await self._sink(subscription.type).deliver(subscription, deliveries, may_begin, told)
            reason = "the client has not said what came of it"
        except StorageError:
            raise  # of the settled logs of a cluster: another node may own the shard
        except Exception as error:
            self.broken_total += 1
            # Without its locals, which may hold secrets.
            reason = f"an error that was not foreseen: {type(error).__name__}: {error}"
            log.error("an attempt is broken", subscription=subscription.name, error=reason[:300])
        if left:
            told(list(left.values()), Failed(reason))

    def _may_begin(self, subscription: Subscription, deliveries: Sequence[DueDelivery]) -> bool:
        """See `MayBegin`. How late a message is, is counted when it begins."""
        now_ms = self._shard.clock()
        if not self._engine.dispatcher.pushes.may_begin(subscription, deliveries, now_ms):
            return False
        late_ms = [now_ms - one.entry.due_ms for one in deliveries]
        self._metrics.on_begun(subscription.id, late_ms)
        return True

    def _sink(self, kind: str) -> Sink:
        sink = self._sinks.get(kind)
        if sink is None:
            sink = self._sinks[kind] = self._make_sink(kind)
        return sink

    def of_brokers(self) -> list[OutletSink]:
        """Those that hand messages to brokers."""
        return [sink for sink in self._sinks.values() if isinstance(sink, OutletSink)]

    def on_defined(self, subscription: Subscription) -> None:
        """A subscription is in force: its client is made before anything is due."""
        try:
            sink = self._sinks.get(subscription.type)
            if sink is not None:
                sink.on_subscription(subscription)
            elif subscription.target is not None and not _stands_still(subscription):
                self._sink(subscription.type)
        except StorageError:
            raise
        except Exception as error:
            # Its first attempt fails with the same, and says so.
            self.broken_total += 1
            log.error(
                "a client cannot be made", subscription=subscription.name, error=reason_of(error)
            )

    def _make_sink(self, kind: str) -> Sink:
        if kind == "webhook":
            sender = self._sender or HttpWebhookSender(
                self.targets,
                connections_max=self._shard.settings.webhook_connections_max,
                answer_kept_max_bytes=self._shard.settings.answer_kept_max_bytes,
            )
            return WebhookSink(sender, self._shard.clock, self._metrics, self._telemetry)
        try:
            return self._make_broker_sink(kind)
        except ModuleNotFoundError as error:
            # The subscription was made when it was installed. Its messages are tried again.
            log.error("a client is missing", type=kind, error=str(error))
            return OutletSink(NoClient(kind))

    def _make_broker_sink(self, kind: str) -> Sink:
        """Their clients are extras, and take up to 0.3 s to import: only where there is a
        subscription, and before anything is due for it. Raises ModuleNotFoundError."""
        match kind:
            case "kafka":
                from delayserver.delivery.kafka_sink import make_kafka_sink

                return make_kafka_sink(self.targets, self._shard.transactions, self._shard.clock)
            case "redis":
                from delayserver.delivery.redis_sink import RedisOpener

                return OutletSink(RedisOpener(self.targets))
            case "nats":
                from delayserver.delivery.nats_sink import NatsOpener

                return OutletSink(NatsOpener(self.targets))
            case _:
                assert kind == "amqp", kind
                from delayserver.delivery.amqp_sink import AmqpOpener

                return OutletSink(AmqpOpener(self.targets))

    def _on_result(
        self,
        subscription: Subscription,
        began_at: float,
        deliveries: list[DueDelivery],
        result: Result,
    ) -> None:
        if subscription.takes_many:
            self._shard.broker_bodies.give_back(subscription.id, sum(map(body_bytes, deliveries)))
            kind, seconds = type(result).__name__.lower(), time.perf_counter() - began_at
            self._metrics.on_sink(subscription.id, kind, len(deliveries), seconds)
        if isinstance(result, Failed | Later | Gone):
            for delivery in deliveries:
                log.debug(
                    "a delivery failed",
                    error=result.reason,
                    **about(delivery, self._engine.registry),
                )
        if not self._answers:
            self._shard.call_soon(self._on_answers)
        self._answers.append((deliveries, result))

    def _on_answers(self) -> None:
        """Those that came in this turn of the loop, or some of them if there are many."""
        answers, self._answers = self._answers[:ANSWERS_MAX], self._answers[ANSWERS_MAX:]
        if self._answers:
            self._shard.call_soon(self._on_answers)
        self._engine.outcomes.on_sent(answers, self._shard.clock())


def about(delivery: DueDelivery, registry: Registry) -> dict[str, object]:
    """The fields of a log line about a delivery."""
    subscription = registry.by_id(delivery.subscription_id)
    return {
        "message_id": delivery.message_id,
        "subject": delivery.subject,
        "key": delivery.payload.key,
        "subscription": subscription.name if subscription else None,
        "attempt": delivery.attempt,
    }


def _writable(result: Result) -> Result:
    """A result whose reason can be recorded: a client may say anything, at any length."""
    if not isinstance(result, Failed | Later | Gone):
        return result
    reason = result.reason[:REASON_CHARACTERS_MAX].encode("utf-8", "replace").decode()
    return result if reason == result.reason else dataclasses.replace(result, reason=reason)


def _stands_still(subscription: Subscription) -> bool:
    """Whether nothing is ever sent for a subscription as it is now."""
    return subscription.deleted or isinstance(subscription, StandIn)
