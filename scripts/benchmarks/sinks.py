"""Brokers as subscribers: what reaches them, beside what their own client reaches without us.

    scripts/bench sinks [--quick] [--messages N] [--only BROKERS] [--json FILE]

For each broker (redis, nats, amqp, kafka) that is installed: the broker and a server, each a
process of its own on loopback and on the disk of --dir, with answers that mean what they mean in
production (Redis syncs before each, RabbitMQ has a durable queue, Kafka is one broker).

bare        the client library alone, in this process, on uvloop as the server: the same bodies and
            headers, one connection that has sent some already, 1,000 messages in flight (Redis:
            pipelines of 500; Kafka: as many as its client takes, with the settings of the sink)
sink        as many messages wait for a subscription that is paused. From the resume until all are
            confirmed: what the server takes for a message is all in it, the look into its queue,
            the body from the file, the record that it is settled
lateness    1,000 messages are due each second, for 10 s. From due until they left for the broker,
            and how long the broker and its client took (upper bounds of the metrics' buckets)

The ratio is that of sink to bare, of this run. The levels are that ratio and, on a quiet machine,
an absolute rate. Counts are checked: the broker has all of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec
import uvloop
from levels.bench import Bench, Size
from levels.opening import open_bench
from load import LoadConnection, LoadError, http_request
from peers.base import PeerError, Program
from peers.rabbitmq import RabbitMQ
from peers.redis import RedisSortedSet
from report import Figure, make_console, make_parser, parse, report
from rich.markup import escape
from servers import ROOT, BenchmarkError, Served, add_directory, delay_server

from delayserver.cli.demo.process import free_ports

SUBJECT = "bench.sink"
BODY = {"order": 1001, "text": "x" * 170}
MESSAGES = 20_000
MESSAGES_QUICK = 1_000
BATCH = 500
IN_FLIGHT = 1_000
WARM = 100
RATIO_MIN = 0.5
PER_S_MIN = {"redis": 30_000, "nats": 20_000, "amqp": 10_000, "kafka": 50_000}
LATENESS_MAX_S = 0.01
PER_S = 1_000
LATE_S, LATE_S_QUICK = 10, 1
LEAD_MS = 1_500
POLL_S = 0.02
POLL_SHARE = 0.05
"""Of the time that it has taken so far: metrics cost the server some milliseconds, too."""
WAIT_MAX_S = 120.0
HEADERS = {
    "delay-id": "0" * 36,
    "delay-subject": SUBJECT,
    "delay-due": "2026-11-20T16:30:00.000Z",
    "delay-attempt": "1",
}
BODY_BYTES = msgspec.json.encode(BODY)

T = TypeVar("T")
Publish = Callable[[int], Awaitable["asyncio.Future[Any]"]]


class Sunk(ABC):
    """A kind of broker, and its client."""

    name: ClassVar[str]
    program: ClassVar[str]
    """What has to be installed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_ports(2)

    @classmethod
    def is_installed(cls) -> bool:
        return shutil.which(cls.program, path=f"{os.environ['PATH']}:/usr/sbin") is not None

    @abstractmethod
    @contextmanager
    def running(self) -> Iterator[None]:
        """It answers inside of the block."""

    @abstractmethod
    def definition(self) -> dict[str, object]:
        """The fields of a subscription that sends to it."""

    @abstractmethod
    async def prepare(self) -> None:
        """Make where messages go, empty."""

    @abstractmethod
    async def bare(self, count: int) -> float:
        """So many messages with nothing but its client, each confirmed, behind WARM of them; how
        long that took, in seconds."""

    @abstractmethod
    async def count(self) -> int:
        """How many it has."""


@contextmanager
def _started(program: Program) -> Iterator[None]:
    program.start()
    try:
        asyncio.run(program.wait_until_ready())
        yield
    finally:
        program.kill()


async def _window(count: int, publish: Publish) -> float:
    """Publish, with IN_FLIGHT under way; how long it took behind the first WARM of them."""
    waiting: deque[asyncio.Future[Any]] = deque()
    for number in range(WARM):
        await (await publish(number))
    begun_at = time.perf_counter()
    for number in range(WARM, WARM + count):
        waiting.append(await publish(number))
        if len(waiting) >= IN_FLIGHT:
            await waiting.popleft()
    await asyncio.gather(*waiting)
    return time.perf_counter() - begun_at


class SunkRedis(Sunk):
    """Answers mean: synced."""

    name, program = "redis", "redis-server"

    @contextmanager
    def running(self) -> Iterator[None]:
        with _started(RedisSortedSet(self.directory, self.port)):
            yield

    def definition(self) -> dict[str, object]:
        return {"url": f"redis://127.0.0.1:{self.port}", "stream": "bench"}

    @contextmanager
    def _client(self) -> Iterator[Any]:
        from redis.asyncio import Redis

        yield Redis(port=self.port, single_connection_client=True)

    async def prepare(self) -> None:
        with self._client() as client:
            await client.delete("bench")
            await client.aclose()

    async def bare(self, count: int) -> float:
        with self._client() as client:

            async def add(some: int) -> None:
                pipeline = client.pipeline(transaction=False)
                for _ in range(some):
                    pipeline.xadd("bench", {**HEADERS, "body": BODY_BYTES})
                await pipeline.execute()

            await add(WARM)
            begun_at = time.perf_counter()
            for start in range(0, count, BATCH):
                await add(min(BATCH, count - start))
            seconds = time.perf_counter() - begun_at
            await client.aclose()
        return seconds

    async def count(self) -> int:
        with self._client() as client:
            found = int(await client.xlen("bench"))
            await client.aclose()
        return found


class _Nats(Program):
    name = "NATS"

    def start(self) -> None:
        config = self.directory / "nats.conf"
        config.write_text(
            f'listen: 127.0.0.1:{self.port}\njetstream {{ store_dir: "{self.directory}" }}\n'
        )
        self.spawn("nats-server", "--config", str(config))

    async def is_ready(self) -> bool:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        greeting = await reader.readline()
        writer.close()
        return greeting.startswith(b"INFO")


class SunkNats(Sunk):
    """One stream in files."""

    name, program = "nats", "nats-server"

    @contextmanager
    def running(self) -> Iterator[None]:
        with _started(_Nats(self.directory, self.port)):
            yield

    def definition(self) -> dict[str, object]:
        return {"url": f"nats://127.0.0.1:{self.port}"}

    async def _with_stream(self, use: Callable[[Any], Awaitable[T]]) -> T:
        import nats

        client = await nats.connect(f"nats://127.0.0.1:{self.port}")
        result = await use(client.jetstream())
        await client.close()
        return result

    async def prepare(self) -> None:
        async def make(stream: Any) -> None:
            from nats.js.errors import NotFoundError

            try:
                await stream.purge_stream("bench")
            except NotFoundError:
                await stream.add_stream(name="bench", subjects=[SUBJECT])

        await self._with_stream(make)

    async def bare(self, count: int) -> float:
        async def use(stream: Any) -> float:
            async def publish(number: int) -> asyncio.Future[Any]:
                headers = {"Nats-Msg-Id": f"bare-{count}-{number}", **HEADERS}
                sent: asyncio.Future[Any] = await stream.publish_async(
                    SUBJECT, BODY_BYTES, headers=headers
                )
                return sent

            return await _window(count, publish)

        return await self._with_stream(use)

    async def count(self) -> int:
        async def look(stream: Any) -> int:
            return int((await stream.stream_info("bench")).state.messages)

        return await self._with_stream(look)


class SunkAmqp(Sunk):
    """A durable queue."""

    name, program = "amqp", "rabbitmq-server"

    @contextmanager
    def running(self) -> Iterator[None]:
        with _started(RabbitMQ(self.directory, self.port)):
            yield

    def definition(self) -> dict[str, object]:
        return {"url": f"amqp://127.0.0.1:{self.port}", "exchange": ""}

    async def _with_channel(self, use: Callable[[Any], Awaitable[T]]) -> T:
        import aiormq

        connection = await aiormq.connect(f"amqp://guest:guest@127.0.0.1:{self.port}")
        result = await use(await connection.channel())
        await connection.close()
        return result

    async def prepare(self) -> None:
        async def make(channel: Any) -> None:
            await channel.queue_declare(SUBJECT, durable=True)
            await channel.queue_purge(SUBJECT)

        await self._with_channel(make)

    async def bare(self, count: int) -> float:
        from pamqp.commands import Basic

        async def use(channel: Any) -> float:
            async def publish(number: int) -> asyncio.Future[Any]:
                properties = Basic.Properties(
                    content_type="application/json",
                    delivery_mode=2,
                    message_id=f"bare-{number}",
                    headers=dict(HEADERS),
                )
                confirmed: asyncio.Future[Any] = asyncio.ensure_future(
                    channel.basic_publish(
                        BODY_BYTES,
                        routing_key=SUBJECT,
                        properties=properties,
                        mandatory=True,
                        wait=False,
                    )
                )
                return confirmed

            return await _window(count, publish)

        return await self._with_channel(use)

    async def count(self) -> int:
        async def look(channel: Any) -> int:
            return int((await channel.queue_declare(SUBJECT, passive=True)).message_count)

        return await self._with_channel(look)


class SunkKafka(Sunk):
    """One broker, one partition."""

    name, program = "kafka", "java"

    @classmethod
    def is_installed(cls) -> bool:
        # Without its jars the script would fetch them, which is more than a benchmark may.
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        return super().is_installed() and any(cache.glob("delayserver/kafka-*/.complete"))

    def _run(self, *words: str) -> str:
        done = subprocess.run(
            [ROOT / "scripts" / "kafka", *words],
            env=os.environ
            | {
                "KAFKA_HERE": str(self.directory),
                "KAFKA_PORT": str(self.port),
                "KAFKA_BROKERS": "1",
            },
            text=True,
            capture_output=True,
            timeout=WAIT_MAX_S,
            check=False,
        )
        if done.returncode:
            raise BenchmarkError(f"scripts/kafka {words[0]}: {done.stderr[-2000:]}")
        return done.stdout.strip()

    @contextmanager
    def running(self) -> Iterator[None]:
        try:
            self._bootstrap = self._run("start")
            yield
        finally:
            self._run("wipe")

    def definition(self) -> dict[str, object]:
        return {"bootstrap": self._bootstrap, "topic": self._topic}

    async def prepare(self) -> None:
        from confluent_kafka.admin import AdminClient, NewTopic

        self._topic = f"bench-{time.monotonic_ns()}"
        admin = AdminClient({"bootstrap.servers": self._bootstrap})
        admin.create_topics([NewTopic(self._topic, 1, 1)])[self._topic].result()

    async def bare(self, count: int) -> float:
        from confluent_kafka import Producer

        from storage.replicated.kafka_settings import sink_settings

        headers: list[tuple[str, str | bytes | None]] = [*HEADERS.items()]

        def send(producer: Producer, some: int) -> None:
            sent = 0
            while sent < some:
                try:
                    producer.produce(self._topic, BODY_BYTES, headers=headers)
                    sent += 1
                except BufferError:  # full
                    producer.poll(0.1)
                producer.poll(0)
            producer.flush()

        def use() -> float:
            producer = Producer(dict(sink_settings(self._bootstrap, 15_000)))
            # A broker that has just started takes a second for the first number of a producer.
            send(producer, WARM)
            begun_at = time.perf_counter()
            send(producer, count)
            return time.perf_counter() - begun_at

        return await asyncio.to_thread(use)

    async def count(self) -> int:
        from confluent_kafka import Consumer, TopicPartition

        consumer = Consumer({"bootstrap.servers": self._bootstrap, "group.id": "bench"})
        _, end = consumer.get_watermark_offsets(TopicPartition(self._topic, 0), timeout=10)
        consumer.close()
        return int(end)


BROKERS: dict[str, type[Sunk]] = {
    one.name: one for one in (SunkRedis, SunkNats, SunkAmqp, SunkKafka)
}


# ---- what is measured --------------------------------------------------------------------------


class Measured:
    """A server, its subscription, and what the metrics say of it."""

    def __init__(self, served: Served, broker: Sunk) -> None:
        self._served = served
        definition = {"subject": SUBJECT, "type": broker.name, **broker.definition()}
        self.call("PUT", "/v1/subscriptions/sink", definition)

    def call(self, method: str, path: str, document: object = None) -> Any:
        body = b"" if document is None else json.dumps(document).encode()
        with LoadConnection(self._served.port) as connection:
            status, answer = connection.request(http_request(method, path, body))
        if status >= 300:
            raise BenchmarkError(f"{method} {path}: {status} {answer[:500]!r}")
        return json.loads(answer)

    def metrics(self) -> str:
        with LoadConnection(self._served.port) as connection:
            return connection.request(http_request("GET", "/metrics"))[1].decode()

    def confirmed(self) -> int:
        found = re.search(r'sink_results_total\{result="confirmed".*\} (\S+)', self.metrics())
        return int(float(found[1])) if found else 0

    def wait_confirmed(self, count: int) -> float:
        """The moment at which so many were."""
        begun_s = time.monotonic()
        while self.confirmed() < count:
            waited_s = time.monotonic() - begun_s
            if waited_s > WAIT_MAX_S:
                raise BenchmarkError(f"{self.confirmed()} of {count} messages were confirmed")
            time.sleep(max(POLL_S, POLL_SHARE * waited_s))
        return time.perf_counter()

    def publish(self, dues_ms: list[int]) -> None:
        for start in range(0, len(dues_ms), BATCH):
            documents = [
                {"subject": SUBJECT, "body": BODY, "deliver_at": due_ms}
                for due_ms in dues_ms[start : start + BATCH]
            ]
            self.call("POST", "/v1/messages/batch", documents)

    def p99_s(self, family: str, before: str) -> float:
        """The upper bound of the bucket that the slowest hundredth of what came since begins in."""

        def buckets(text: str) -> list[tuple[float, float]]:
            pattern = rf'^delayserver_{family}_bucket\{{le="(\S+?)".*\}} (\S+)$'
            return [(float(le), float(n)) for le, n in re.findall(pattern, text, re.MULTILINE)]

        earlier = dict(buckets(before))
        counts = [(le, n - earlier.get(le, 0)) for le, n in buckets(self.metrics())]
        return next(le for le, n in counts if n >= 0.99 * counts[-1][1])


def measure(bench: Bench, broker: Sunk, messages: int) -> None:
    """All figures of one broker."""
    bench.step(f"{broker.name}: bare")
    with broker.running(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(broker.prepare())
        seconds = runner.run(broker.bare(messages))
        bare = bench.add(Figure(f"{broker.name}: bare client", messages / seconds, "messages/s"))
        bare.group = broker.name
        bare.expect("messages", runner.run(broker.count()), WARM + messages)

        bench.step(f"{broker.name}: sink")
        runner.run(broker.prepare())
        with delay_server(bench.directory / f"{broker.name}.data") as served:
            measured = Measured(served, broker)
            measured.publish([0])  # connects
            measured.wait_confirmed(1)
            measured.call("POST", "/v1/subscriptions/sink/pause")
            measured.publish([0] * messages)
            served.wait_until_filed()
            cpu_s, begun_at = served.cpu_s(), time.perf_counter()
            measured.call("POST", "/v1/subscriptions/sink/resume")
            seconds = measured.wait_confirmed(1 + messages) - begun_at
            sink = bench.add(Figure(f"{broker.name}: sink", messages / seconds, "messages/s"))
            sink.group = broker.name
            sink.cpu_us = (served.cpu_s() - cpu_s) / messages * 1e6
            sink.ratios["bare client"] = sink.value / bare.value
            sink.demand(f"≥ {RATIO_MIN} of the bare client", sink.value >= RATIO_MIN * bare.value)
            least = PER_S_MIN[broker.name]
            sink.demand(f"≥ {least:,}/s", sink.value >= least)
            sink.expect("messages", runner.run(broker.count()), 1 + messages)

            bench.step(f"{broker.name}: lateness")
            seconds_long = bench.size.of(quick=LATE_S_QUICK, usual=LATE_S)
            before, first_ms = measured.metrics(), time.time_ns() // 1_000_000 + LEAD_MS
            dues_ms = [first_ms + n * 1000 // PER_S for n in range(PER_S * seconds_long)]
            measured.publish(dues_ms)
            measured.wait_confirmed(1 + messages + len(dues_ms))
            for case, family in {
                "lateness p99, 1,000 due/s": "subscription_lateness_seconds",
                "confirmed within p99, 1,000 due/s": "sink_seconds",
            }.items():
                p99_s = measured.p99_s(family, before)
                figure = bench.add(Figure(f"{broker.name}: {case}", p99_s * 1000, "ms"))
                figure.group = broker.name
                figure.note = "at most"
                if family != "sink_seconds":
                    figure.demand(f"≤ {LATENESS_MAX_S * 1000:.0f} ms", p99_s <= LATENESS_MAX_S)


def main() -> int:
    """Exit status 1: counts were wrong, or a broker could not be measured."""
    parser = make_parser("sinks", __doc__)
    parser.add_argument(
        "--messages",
        type=int,
        metavar="N",
        default=MESSAGES,
        help=f"for each rate (default: {MESSAGES:,})",
    )
    parser.add_argument("--only", metavar="BROKERS", help=f"of {','.join(BROKERS)}; by commas")
    add_directory(parser)
    options = parse(parser, messages=MESSAGES_QUICK)
    chosen = options.only.split(",") if options.only else [*BROKERS]
    if unknown := set(chosen) - set(BROKERS):
        parser.error(f"no such broker: {', '.join(sorted(unknown))}; there are {','.join(BROKERS)}")
    if options.messages < 1:
        parser.error("--messages: at least 1")
    console = make_console()
    complete = True
    with open_bench(options.dir, Size.QUICK if options.quick else Size.USUAL, console) as bench:
        for name in chosen:
            if not BROKERS[name].is_installed():
                console.print(f"{name} is not installed: {BROKERS[name].program}")
                continue
            directory = bench.directory / name
            directory.mkdir()
            try:
                measure(bench, BROKERS[name](directory), options.messages)
            except (BenchmarkError, LoadError, PeerError, OSError) as error:
                console.print(f"[bold red]{name} failed:[/]", escape(str(error)))
                complete = False
    return report(
        options, "sinks", "messages into brokers", bench.figures, console, complete=complete
    )


if __name__ == "__main__":
    sys.exit(main())
