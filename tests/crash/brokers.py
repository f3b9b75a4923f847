"""The crash harness for sinks and sources: the server and its brokers are killed, one by one.

    load      `tests.load`: publishes, batches, cancels and moves, for a subscription into each of a
              real Redis, NATS, RabbitMQ and Kafka, or into all of them at once
    source    a topic of that Kafka, to which somebody writes all the time; what it publishes goes
              into the Redis
    rounds    SIGKILL of the server or of a broker, by turns, in some rounds of both
    the end   all streams, queues and topics are read whole, and judged

What was promised is what `delayserver.cli.demo.ledger` says, with one delivery being one entry of a
broker. Each offset of the topic is an order like any: lost, or published twice (under two ids), it
is a broken promise. An entry may be there twice, with the same id, if the server or its own broker
was killed while it was under way. A cancel that was answered may be overtaken by such an entry.

Redis, NATS and Kafka say when they had an entry. RabbitMQ does not: marks that are written into its
queue some times a second say between which moments that was.
"""

import asyncio
import contextlib
import json
import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Unpack

import aiormq
from aiormq.exceptions import AMQPError, ChannelInvalidStateError
from confluent_kafka import KafkaError, Message, Producer

from delayserver.cli.demo.ledger import (
    RECEIVE_MS,
    RECORD_MS,
    DemoLedger,
    Order,
    OrderFields,
    Receipt,
)
from delayserver.cli.demo.process import ServerFailed
from delayserver.cli.session import path
from delayserver.client.errors import UnansweredError
from tests.crash.harness import CHECK_SHARE, GRACE_S, LOAD_S, CrashRun, RunOptions
from tests.load import pause
from tests.long_run import Outcome
from tests.sinks.kafka_server import KafkaBroker
from tests.sinks.nats_server import NatsServer
from tests.sinks.programs import ESCAPED, USER, Broker, Entry, find
from tests.sinks.rabbitmq_server import RabbitMq
from tests.sinks.redis_server import RedisServer
from tests.waiting import Looks

PLACE: Final = "due-load"
"""The stream, queue or topic of each broker."""
WHERE: Final = {
    "redis": {"stream": PLACE},
    "nats": {"nats_subject": PLACE},
    "amqp": {"routing_key": PLACE},
    "kafka": {"topic": PLACE},
}
KINDS: Final = tuple(WHERE)
ALL: Final = "load.all.x"
FED, FED_PLACE, FEED = "load.fed", "due-fed", "feed"
SERVER: Final = "server"
RETRY: Final = {"max_attempts": 100, "backoff": ["200ms", "500ms"] + ["1s"] * 97}
BOTH_SHARE: Final = 0.25
"""Of the rounds in which a broker is killed: the server is, too."""
AWAY_S: Final = (0.0, 1.5)
MARK: Final = "mark"
MARK_S: Final = 0.05
FEED_S: Final = (0.05, 0.4)
READ_S: Final = 1.0
PROGRAMS: Final = {
    "redis-server": "ensure_redis",
    "nats-server": "ensure_nats",
    "rabbitmq-server": "ensure_rabbitmq",
    "java": "ensure_kafka",
}


def missing_programs() -> list[str]:
    """What this run needs and is not installed, and what in scripts/environment.sh does that."""
    return [f"{name} ({ensure})" for name, ensure in PROGRAMS.items() if find(name) is None]


# ---- the ledger --------------------------------------------------------------------------------


@dataclass(slots=True)
class StoredReceipt(Receipt):
    """An entry of a broker. `at_ms`: it was there by then."""

    kind: str = ""
    from_ms: int = 0
    """It was not there before."""


@dataclass(slots=True)
class DatedOrder(Order):
    """An order that knows when it learned what: entries are judged when all is over."""

    clock: Callable[[], int] = int
    earliest: list[tuple[int, int]] = field(default_factory=list)
    """When it learned that nothing may come before when."""

    def publish_asked(self, delay_ms: int, now_ms: int) -> None:
        Order.publish_asked(self, delay_ms, now_ms)
        self._note()

    def publish_answered(self, message_id: str, due_ms: int, now_ms: int) -> None:
        Order.publish_answered(self, message_id, due_ms, now_ms)
        self._note()

    def move_asked(self, due_ms: int) -> None:
        Order.move_asked(self, due_ms)
        self._note()

    def move_refused(self, earliest_ms: int) -> None:
        Order.move_refused(self, earliest_ms)
        self._note()

    def move_answered(self, due_ms: int, now_ms: int) -> None:
        Order.move_answered(self, due_ms, now_ms)
        self._note()

    def _note(self) -> None:
        self.earliest.append((self.clock(), self.earliest_ms))

    def is_too_early(self, at_ms: int) -> bool:
        known = bisect_right(self.earliest, at_ms, key=lambda step: step[0])
        return known == 0 or at_ms < self.earliest[known - 1][1]


class BrokersLedger(DemoLedger):
    """What was asked, and what stands in the brokers."""

    def __init__(self) -> None:
        self._offsets: list[tuple[int, int]] = []
        self.broker_kills_ms: dict[str, list[int]] = {kind: [] for kind in KINDS}
        super().__init__()

    @property
    def offset_ms(self) -> int:
        """How far the clock of the server is ahead of that of the machine."""
        return self._offsets[-1][1]

    @offset_ms.setter
    def offset_ms(self, by_ms: int) -> None:
        self._offsets.append((time.time_ns() // 1_000_000, by_ms))

    def server_clock_ms(self, machine_ms: int) -> int:
        """What the server's clock showed when the machine's did that."""
        known = bisect_right(self._offsets, machine_ms, key=lambda step: step[0])
        return machine_ms + self._offsets[max(0, known - 1)][1]

    def _open(self, **fields: Unpack[OrderFields]) -> Order:
        return DatedOrder(**fields, clock=self.now_ms)

    def lateness_ms(self, order: Order, first_ms: int) -> int | None:
        """Brokers that are away make what they are to have late; nobody counts that here."""
        return None

    def was_in_flight(self, order: Order, receipt: Receipt, before_ms: int) -> bool:
        assert isinstance(receipt, StoredReceipt)
        first_ms, last_ms = receipt.from_ms - RECEIVE_MS, min(receipt.at_ms + RECORD_MS, before_ms)
        kills_ms = (*self.kills_ms, *self.broker_kills_ms[receipt.kind])
        return any(first_ms <= kill_ms <= last_ms for kill_ms in kills_ms)

    def read(self, kind: str, entries: Iterable["TimedEntry"]) -> None:
        """All that stands in a broker, in its order, instead of what was read there before."""
        for order in self.orders:
            for name in order.subscriptions:
                if kind_of(name) == kind:
                    order.receipts.pop(name, None)
        self.strangers = [one for one in self.strangers if not one.startswith(f"{kind}: ")]
        for entry in entries:
            self._stored(kind, entry)

    def _stored(self, kind: str, entry: "TimedEntry") -> None:
        body = json.loads(entry.body)
        number = body.get("order") if isinstance(body, dict) else None
        if not isinstance(number, int) or not 0 <= number < len(self.orders):
            self.strangers.append(f"{kind}: {entry.headers}: {str(body)[:200]}")
            return
        order = self.orders[number]
        (name,) = [one for one in order.subscriptions if kind_of(one) == kind] or [kind]
        order.is_garbled |= body != order.body or name not in order.subscriptions
        from_ms = self.server_clock_ms(entry.from_ms)
        to_ms = self.server_clock_ms(entry.to_ms)
        message_id = entry.headers["delay-id"]
        order.is_early |= order.is_too_early(to_ms)
        order.message_ids.add(message_id)
        order.receipts[name].append(
            StoredReceipt(to_ms, message_id, to_ms, kind=kind, from_ms=from_ms)
        )

    def times(self) -> dict[str, object]:
        return {**super().times(), "broker_kills_ms": self.broker_kills_ms}


def kind_of(subscription: str) -> str:
    """The broker that a subscription writes to."""
    return "redis" if subscription == FED else subscription.removeprefix("all-")


class TimedEntry(NamedTuple):
    """An entry, and between which moments of the machine's clock the broker got it."""

    headers: dict[str, str]
    body: bytes
    from_ms: int
    to_ms: int


def timed(entries: Iterable[Entry], now_ms: int) -> Iterator[TimedEntry]:
    """The entries of a broker, in its order, without the marks among them.

    A mark says when it was made, and is made when the one before it was confirmed. So what stands
    before it in the queue was there by the moment that the next mark behind it names."""
    after_ms, marked, waiting = 0, list[TimedEntry](), list[Entry]()
    for entry in entries:
        mark_ms = int(entry.headers.get(MARK, 0))
        if mark_ms:
            yield from (one._replace(to_ms=mark_ms) for one in marked)
            marked = [TimedEntry(one.headers, one.body, after_ms, now_ms) for one in waiting]
            after_ms, waiting = mark_ms, []
        elif entry.stored_ms:
            yield TimedEntry(entry.headers, entry.body, entry.stored_ms, entry.stored_ms)
        else:
            waiting.append(entry)
    yield from marked
    yield from (TimedEntry(one.headers, one.body, after_ms, now_ms) for one in waiting)


# ---- the run -----------------------------------------------------------------------------------


class BrokersCrashRun(CrashRun):
    """One run on one data directory, with four brokers beside it."""

    PUBLISHERS = 4
    PAUSE_S = 0.1
    subscribers: Mapping[str, tuple[str, ...]] = {
        **{f"load.{kind}": (kind,) for kind in KINDS},
        ALL: tuple(f"all-{kind}" for kind in KINDS),
    }
    subjects = tuple(subscribers)
    ledger: BrokersLedger

    def __init__(self, directory: Path, **options: Unpack[RunOptions]) -> None:
        super().__init__(directory, ledger=BrokersLedger(), **options)
        self._rabbitmq = RabbitMq(directory / "amqp")
        self._kafka = KafkaBroker(directory / "kafka")
        self._redis = RedisServer(directory / "redis")
        self._brokers: dict[str, Broker] = {
            "redis": self._redis,
            "nats": NatsServer(directory / "nats"),
            "amqp": self._rabbitmq,
            "kafka": self._kafka,
        }
        self._victims: list[str] = []
        self._is_fed = True
        self._has_fed = asyncio.Event()

    async def run(self) -> Outcome:
        """Start the brokers, then all rounds, and the end."""
        logging.getLogger("aiormq").setLevel(logging.CRITICAL)  # it is away now and then
        with contextlib.ExitStack() as started:
            for broker in self._brokers.values():
                await asyncio.to_thread(started.enter_context, broker)
                await asyncio.to_thread(broker.prepare, PLACE)
            await asyncio.to_thread(self._kafka.prepare, FEED)
            return await super().run()

    async def _subscribe(self, url: str) -> None:
        for kind, broker in self._brokers.items():
            target = {**broker.definition(PLACE), **WHERE[kind], "retry": RETRY}
            for name, subject in ((kind, f"load.{kind}"), (f"all-{kind}", "load.all.*")):
                document = {"subject": subject, **target}
                await self._define(path("subscriptions", name), document)
        target = {**self._redis.definition(PLACE), "stream": FED_PLACE, "retry": RETRY}
        await self._define(path("subscriptions", FED), {"subject": FED, **target})
        source = {**self._kafka.definition(FEED), "subject": FED}
        await self._define(path("sources", FED), source)

    async def _define(self, where: str, document: object) -> None:
        try:
            await self._ask_once("PUT", where, document)
        except UnansweredError as error:
            # Nobody is killed yet: to ask again would not help.
            raise ServerFailed(f"PUT {where} is not accepted: {error}") from error

    def _consumers(self) -> list[Coroutine[Any, Any, None]]:
        return [self._feed(), self._mark()]

    # ── what goes on beside the publishers ─────────────────────────────────────────────────────

    async def _feed(self) -> None:
        """Somebody writes to the topic of the source, without knowing of the server."""
        producer = Producer(
            {
                **self._kafka.settings,
                "enable.idempotence": True,  # each record is there once
                "message.timeout.ms": 300_000,
                "log_level": 2,
            }
        )
        while self._is_fed:
            for _ in range(self._random.randint(1, 20)):
                order = self.ledger.order(FED, (FED,), with_key=False)
                delay_ms = self._random.choice((0, 100, 1000, 3000))
                self.ledger.publish_asked(order, delay_ms)
                producer.produce(
                    FEED,
                    json.dumps(order.body),
                    headers={"delay-until": f"{delay_ms}ms".encode()},
                    on_delivery=partial(self._fed, order),
                )
            await asyncio.to_thread(producer.poll, 0)
            await pause(self._random, *FEED_S)
        left = await asyncio.to_thread(producer.flush, GRACE_S)
        if left:
            self.failures.append(f"{left} records could not be written to the topic")
        self._has_fed.set()

    def _fed(self, order: Order, error: KafkaError | None, _: Message) -> None:
        """In a thread. What stands in the topic is to be published."""
        if error is not None:
            self.failures.append(f"a record could not be written to the topic: {error}")
            return
        order.due_ms = order.earliest_ms
        order.answered = True

    async def _mark(self) -> None:
        """Write marks into the queue of RabbitMQ, as long as it is there."""
        url = f"amqp://{USER}:{ESCAPED}@127.0.0.1:{self._rabbitmq.port}"
        while True:
            with contextlib.suppress(AMQPError, ChannelInvalidStateError, OSError):
                connection = await aiormq.connect(url)
                try:
                    channel = await connection.channel()
                    while True:
                        await channel.basic_publish(b"0", routing_key=PLACE, properties=mark())
                        self.counts["marks"] += 1
                        await asyncio.sleep(MARK_S)
                finally:
                    await connection.close()
            await asyncio.sleep(MARK_S)

    # ── rounds ─────────────────────────────────────────────────────────────────────────────────

    async def _round(self) -> None:
        """Load until the kill of one of the five, and its next start."""
        await pause(self._fate, *LOAD_S)
        if not self._victims:
            # Each as often as the others.
            self._victims = self._fate.sample((SERVER, *KINDS), 1 + len(KINDS))
        victim = self._victims.pop()
        is_server = victim == SERVER or self._fate.random() < BOTH_SHARE
        if victim != SERVER:
            await self._kill_broker(victim)
        if is_server:
            await self._kill()
            if self._fate.random() < CHECK_SHARE:
                await self._check()
            if self._fate.random() < 0.3:
                await self._come_near_the_hour()
        await pause(self._fate, *AWAY_S)
        starts = [self._start()] if is_server else []
        if victim != SERVER:
            starts.append(asyncio.to_thread(self._brokers[victim].start))
        await asyncio.gather(*starts)
        if not self._server.is_running:
            raise ServerFailed("the server ended by itself; see server.log")

    async def _kill_broker(self, kind: str) -> None:
        kills_ms = self.ledger.broker_kills_ms[kind]
        kills_ms.append(self.ledger.now_ms())
        await asyncio.to_thread(self._brokers[kind].kill)
        kills_ms.append(self.ledger.now_ms())
        self.counts[f"kills of {kind}"] += 1

    # ── the end ────────────────────────────────────────────────────────────────────────────────

    async def _end(self, publishers: list[asyncio.Task[None]]) -> None:
        """Everything falls due and is delivered; then nothing comes any more."""
        self._is_fed = False
        await self._publish_no_more(publishers)
        await self._has_fed.wait()
        await self._kill()
        await self._receive_by_this_clock()
        self._let_all_fall_due()
        await self._start()
        async for _ in Looks(2 * GRACE_S, READ_S):
            await asyncio.to_thread(self._read_all)
            self._report(self)
            if not self.ledger.open_count:
                break
        await self._check_source()
        await self._stop()
        await self._start()
        await self._stop_when_quiet()
        await self._check()
        await asyncio.to_thread(self._read_all)
        for order in self.ledger.orders:
            for name, receipts in order.receipts.items():
                self.counts[f"entries of {kind_of(name)}"] += len(receipts)
                self.counts[f"twice in {kind_of(name)}"] += len(receipts) > 1

    def _read_all(self) -> None:
        for kind, broker in self._brokers.items():
            entries = broker.read(PLACE, 1)
            if broker is self._redis:
                entries += broker.read(FED_PLACE, 1)
            self.ledger.read(kind, timed(entries, time.time_ns() // 1_000_000))

    async def _check_source(self) -> None:
        """Whether it says itself what it did."""
        _, view = await self._ask("GET", path("sources", FED))
        fed = [order for order in self.ledger.orders if order.subject == FED and order.answered]
        self.counts["offsets"] = len(fed)
        expected = {"0": len(fed)}, len(fed), 0
        found = view["positions"], view["published"], view["skipped"]
        if found != expected:
            self.failures.append(f"the source says {found}, not {expected}")


def mark() -> aiormq.spec.Basic.Properties:
    """What says of the entries around it when they came."""
    headers: dict[str, Any] = {MARK: str(time.time_ns() // 1_000_000), "delay-id": MARK}
    return aiormq.spec.Basic.Properties(
        headers=headers, message_id=MARK, delivery_mode=2, content_type="application/json"
    )
