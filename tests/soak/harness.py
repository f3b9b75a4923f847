"""The soak: one real server, hours of everything at once, and a ledger.

    load          `tests.load` over TLS with a token, and batches of MessagePack, replacements by
                  key, look-ups, lists, messages due long after the end, a receiver that always
                  refuses (dead letters)
    bad clients   `tests.soak.abuse`
    weather       the clock of the server is set forward and back; no room, no descriptors, reads
                  that fail, slow syncs (`tests.soak.child`)
    the end       the clock goes forward until all but the far messages are due; these have to
                  come, and nothing twice; the far ones have to be known; then SIGTERM, a check of
                  the files, and one more start, which delivers what could not be read before

The process must live all the time. Its memory and its descriptors must be flat. The median of
RssAnon in the last quarter of the run is at most MEMORY_SHARE and MEMORY_BYTES above that of the
second: the first is the warm-up, and the bytes are what a greedy client may hold at a sample. At
the end there is no socket more than before the first client came, and few files more: each hour
that is in use has two.

What counts as a broken promise is defined in `tests.soak.ledger`. The seed decides the load, the
bad clients and the weather, the machine how fast: a seed narrows a failure down.

Cost: some 150 messages a second, half a core for the clients and as much for the server. Threads:
the event loop.
"""

import asyncio
import contextlib
import json
import os
import random
import ssl
import statistics
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import msgpack
import trustme

from delayserver.cli.demo.ledger import Order, Outage, judge
from delayserver.cli.demo.process import ServerFailed, ServerProcess, damage_in, free_port
from delayserver.cli.demo.receiver import Receiver
from delayserver.cli.demo.shop import call, due_of
from delayserver.cli.session import path
from delayserver.client.errors import UnansweredError
from delayserver.client.transport import HttpTransport
from tests.integration.api_support import make_token
from tests.load import (
    CONSUMED,
    HOOK,
    HOUR_MS,
    SUBSCRIBERS,
    Load,
    RefusedError,
    before_retry,
    document_of,
    pause,
)
from tests.long_run import Begun, Outcome, run_script, script_parser
from tests.soak import abuse
from tests.soak.ledger import LATE_MS, SoakLedger
from tests.waiting import Looks

CHILD = Path(__file__).with_name("child.py")
TOKEN = "a token of the soak, with all rights"
DEAD = "load.dead"
PUBLISHERS = 6
CONSUMERS = 2
BAD_CLIENTS = 3
LONGEST_MS = 60_000
"""The longest delay but for those of far messages."""
FAR_SHARE = 0.03
FAR_MS = HOUR_MS
"""No far message is due within that of the end."""
OFFSET_MAX_MS = 300_000
"""The clock of the server is never set further away from the machine's."""
STEP_MAX_MS = 120_000
WEATHER = ("step", "step", "full", "exhausted", "unreadable", "slow")
WEATHER_S = 8.0
"""Between two changes of it, on average; less in a short run, so that each kind has its turn."""
SAMPLE_S = 1.0
GRACE_S = 15.0
QUIET_S = 2.0
CLOSED_S = 20.0
"""Idle connections of the server's own webhooks are closed within that."""
MEMORY_SHARE = 0.15
MEMORY_BYTES = 16 << 20
FILES_MORE = 24
OPTIONS = (
    *("--log-json", "--durability=fsync", "--segment-bytes=4194304"),
    *("--retention-ms=1m", "--dedupe-window-ms=15m", "--disk-reserve-bytes=1048576"),
    *("--head-timeout-ms=2s", "--body-timeout-ms=2s", "--write-timeout-ms=2s"),
    "--idle-timeout-ms=10s",
)


@dataclass
class Sample:
    """What the process holds."""

    memory_bytes: int
    sockets: int
    files: int


@dataclass
class Samples:
    """What it has held."""

    all: list[Sample] = field(default_factory=list)

    def memory(self, quarter: int) -> float:
        """The median of a quarter of the run."""
        count = len(self.all)
        some = self.all[count * quarter // 4 : max(1, count * (quarter + 1) // 4)]
        return statistics.median(sample.memory_bytes for sample in some)

    def complaints(self, begin: Sample, end: Sample) -> Iterator[str]:
        """What is not flat."""
        before, after = self.memory(1), self.memory(3)
        if after > before * (1 + MEMORY_SHARE) + MEMORY_BYTES:
            yield f"memory grew from {before / 2**20:.0f} to {after / 2**20:.0f} MiB"
        if end.sockets > begin.sockets:
            yield f"{end.sockets} sockets are open after the end, {begin.sockets} were before"
        if end.files > begin.files + FILES_MORE:
            yield f"{end.files} files are open after the end, {begin.files} were before"


def sample_of(pid: int) -> Sample:
    """What a process holds now."""
    status = Path(f"/proc/{pid}/status").read_text()
    memory_bytes = int(status.partition("RssAnon:")[2].split()[0]) * 1024
    targets = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            targets.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    sockets = sum(target.startswith("socket:") for target in targets)
    return Sample(memory_bytes, sockets, len(targets) - sockets)


class SoakRun(Load[SoakLedger]):
    """One soak on one data directory."""

    PAUSE_S = 0.08
    subscribers: Mapping[str, tuple[str, ...]] = {**SUBSCRIBERS, DEAD: ("dead",)}
    subjects = (*SUBSCRIBERS, *SUBSCRIBERS, *SUBSCRIBERS, DEAD)

    def __init__(
        self,
        directory: Path,
        *,
        seed: int,
        seconds: float,
        weather: Sequence[str] = WEATHER,
        bug: str | None = None,
        report: Callable[["SoakRun"], None] = lambda run: None,
    ) -> None:
        super().__init__(SoakLedger(), seed + 1)
        self.seconds = seconds
        self._kinds = weather
        self.passed_s = 0.0
        self.statuses: Counter[int] = Counter()
        """What bad clients were answered."""
        self._seed = seed
        self._fate = random.Random(seed)
        self._directory = directory
        self._report = report
        self._samples = Samples()
        self._log_offset = 0
        self._damaged: set[int] = set()
        """The seqs that the server has named."""
        self._read_faults = 0
        self._control = directory / "control"
        self._port = free_port()
        self._make_certificate()
        self._server = ServerProcess(
            directory / "data",
            port=self._port,
            log_path=directory / "server.log",
            tls=self._tls,
        )
        self._bug = [bug] if bug else []

    def _make_certificate(self) -> None:
        authority = trustme.CA()
        made = authority.issue_cert("127.0.0.1")
        made.cert_chain_pems[0].write_to_path(str(self._directory / "cert.pem"))
        made.private_key_pem.write_to_path(str(self._directory / "key.pem"))
        self._tls = ssl.create_default_context()
        authority.configure_trust(self._tls)

    async def run(self) -> Outcome:
        """All of it."""
        narrow = make_token(self._directory / "data", "elsewhere", "publish:elsewhere")
        async with Receiver(self._on_webhook) as receiver:
            with self._server:
                try:
                    await self._live(receiver.url, narrow)
                except* (ServerFailed, UnansweredError, OSError) as group:
                    self.failures += [repr(error) for error in group.exceptions]
        return Outcome(
            *("soak", self._seed, self._directory, self.ledger, judge(self.ledger)),
            self.failures,
            self.counts,
        )

    async def _live(self, url: str, narrow: str) -> None:
        await self._start()
        begin = sample_of(self._server.pid)
        await self._subscribe(url)
        await self._under_load(narrow)
        now_ms = self.ledger.server_ms()
        dues_ms = [order.due_ms for order in self.ledger.pending()]
        last_ms = max((due for due in dues_ms if due < now_ms + FAR_MS), default=now_ms)
        await self._set_clock(self.ledger.clock.offset_ms + last_ms - now_ms)
        await self._until_quiet()
        await self._look_at_damage()
        await self._look_at_what_is_left()
        await self._client.close()
        end = await self._closed(begin)
        self.failures += self._samples.complaints(begin, end)
        self._count_samples(begin, end)
        down_ms = self.ledger.now_ms()
        await self._stop()
        # What could not be read can be now; what was recorded must not come again.
        await self._start()
        self.ledger.outages.append(Outage(down_ms, self.ledger.now_ms()))
        await self._until_quiet()
        await self._client.close()
        await self._stop()

    async def _start(self) -> None:
        self._control.unlink(missing_ok=True)
        self._server.options = [
            *OPTIONS,
            f"--token={TOKEN}",
            f"--tls-cert={self._directory / 'cert.pem'}",
            f"--tls-key={self._directory / 'key.pem'}",
        ]
        clock = str(self.ledger.clock.offset_ms)
        self._server.program = (str(CHILD), str(self._control), clock, *self._bug)
        self._server.start()
        await asyncio.to_thread(self._server.wait_ready)
        self._client = HttpTransport(self._server.url, token=TOKEN, tls=self._tls)

    async def _stop(self) -> None:
        status = await asyncio.to_thread(self._server.stop)
        if status != 0:
            self.failures.append(f"the server ended with status {status} after SIGTERM")
        self.failures += await asyncio.to_thread(damage_in, self._server.data_dir)

    async def _under_load(self, narrow: str) -> None:
        chances = [random.Random(self._fate.random()) for _ in range(BAD_CLIENTS)]
        bad = [
            abuse.Target(
                *(self._port, self._tls, TOKEN, narrow, chance),
                *(self.counts, self.statuses, self.failures, self._unknown),
            )
            for chance in chances
        ]
        pause_s = min(WEATHER_S, self.seconds / 20)
        work = [
            *(self._publish() for _ in range(PUBLISHERS)),
            *self._consumers(),
            *(abuse.misbehave(target, pause_s) for target in bad),
            *(self._look_up(), self._replace(), self._publish_msgpack(), self._weather(pause_s)),
        ]
        async with _in_background(work) as tasks:
            began_s = time.monotonic()
            while self.passed_s < self.seconds:
                await asyncio.sleep(min(SAMPLE_S, self.seconds / 40))
                self.passed_s = time.monotonic() - began_s
                self._watch(tasks)
        if self._follow_ups:
            await asyncio.wait(self._follow_ups, timeout=GRACE_S)
        await self._order({"fault": "slow", "where": "", "s": 0, "wait_s": 0})
        self.counts.update({f"bad clients answered {s}": n for s, n in self.statuses.items()})
        if self.statuses[500] and not self._read_faults:
            self._fail(f"{self.statuses[500]} bad clients were answered 500")

    def _watch(self, tasks: list[asyncio.Task[None]]) -> None:
        if not self._server.is_running:
            raise ServerFailed("the server ended by itself; see server.log")
        for task in tasks:
            if task.done():
                task.result()
        self._samples.all.append(sample_of(self._server.pid))
        self._report(self)

    def _consumers(self) -> list[Coroutine[None, None, None]]:
        return [self._consume(name) for name in CONSUMED for _ in range(CONSUMERS)]

    # ── the end ────────────────────────────────────────────────────────────────────────────────

    async def _until_quiet(self) -> None:
        """All that is due comes, and nothing after it."""
        async with _in_background(self._consumers()):
            count, since_s = -1, time.monotonic()
            while count and time.monotonic() - since_s < GRACE_S:
                await asyncio.sleep(0.5)
                await self._read_dead_letters()
                if self.ledger.open_count != count:
                    count, since_s = self.ledger.open_count, time.monotonic()
                elif time.monotonic() - since_s > LATE_MS / 1000 and count <= self._read_log():
                    break  # what cannot be read does not come before the next start
            await asyncio.sleep(QUIET_S)

    async def _look_at_damage(self) -> None:
        missing, named = self.ledger.open_count, self._read_log()
        self.counts["reads that failed"] = named
        self.counts["delivered after the restart"] = missing
        if missing > named:
            self._fail(f"{missing} messages did not come, and the server has named {named} at most")

    def _read_log(self) -> int:
        """How many messages the server has said that it could not read. A mistake of its own, and
        a line that it did not mean to write, is a failure."""
        with self._server.log_path.open() as log:
            log.seek(self._log_offset)
            while (line := log.readline()).endswith("\n"):
                self._log_offset = log.tell()
                said: dict[str, Any] = {"event": line.strip()}
                if line.startswith("{"):
                    said = json.loads(line)
                if said["event"] == "damage found":
                    self._damaged.update(range(said["first_seq"], said["last_seq"] + 1))
                elif said.get("level", "critical") == "critical" or "exception" in said:
                    self._fail(f"the log says: {line.strip()[-300:]}")
        return len(self._damaged)

    async def _read_dead_letters(self) -> None:
        """What the receiver that always refuses has been spared further."""
        by_id = {
            message_id: order
            for order in self.ledger.orders
            if order.subject == DEAD and not order.is_settled("dead")
            for message_id in order.message_ids
        }
        cursor = None
        while by_id:
            query = "?limit=1000" + (f"&cursor={cursor}" if cursor else "")
            where = path("subscriptions", "dead", "dead-letters") + query
            _, answer = await self._ask("GET", where)
            for letter in answer["dead_letters"]:
                order = by_id.get(letter["id"])
                if order is not None and (receipts := order.receipts.get("dead")):
                    receipts[-1].settled_ms = self.ledger.now_ms()
                    self.counts["dead letters"] += 1
            cursor = answer["cursor"]
            if cursor is None:
                return

    async def _look_at_what_is_left(self) -> None:
        for order in self.ledger.pending():
            # A move without an answer may have made it due.
            where = path("messages", min(order.message_ids))
            status, answer = await call(self._client, "GET", where)
            if status != HTTPStatus.OK or answer["state"] not in ("scheduled", "delivering"):
                self._fail(f"not due yet, and not known: {order.to_json()}: {status} {answer}")
            self.counts["still pending"] += 1

    async def _closed(self, begin: Sample) -> Sample:
        """What the process holds when nobody is there any more."""
        async for _ in Looks(CLOSED_S, 0.5):
            end = sample_of(self._server.pid)
            if end.sockets <= begin.sockets:
                break
        return end

    def _count_samples(self, begin: Sample, end: Sample) -> None:
        figures = {
            "at the start": begin.memory_bytes,
            "in the second quarter": self._samples.memory(1),
            "in the last quarter": self._samples.memory(3),
            "at the end": end.memory_bytes,
        }
        self.counts.update({f"MiB {name}": round(n / 2**20) for name, n in figures.items()})
        self.counts["descriptors at the start"] = begin.sockets + begin.files
        self.counts["descriptors at most"] = max(s.sockets + s.files for s in self._samples.all)
        self.counts["descriptors at the end"] = end.sockets + end.files

    # ── the weather ────────────────────────────────────────────────────────────────────────────

    async def _order(self, order: dict[str, object]) -> None:
        """Have the child do something, and wait until it is so."""
        reader, writer = await asyncio.open_unix_connection(str(self._control))
        try:
            writer.write(json.dumps(order).encode() + b"\n")
            if not await reader.readline():
                raise ServerFailed("the server ended by itself; see server.log")
        finally:
            # The child hears one after the other: who is cancelled here keeps no other waiting.
            writer.close()

    async def _set_clock(self, offset_ms: int) -> None:
        ordered_ms = self.ledger.now_ms()
        # It may have been started with an offset already; it is set once after that at most.
        await self._order({"clock_ms": offset_ms})
        self.ledger.step(offset_ms, ordered_ms)

    async def _weather(self, pause_s: float) -> None:
        chance = self._fate
        while True:
            for kind in chance.sample(self._kinds, len(self._kinds)):
                await pause(chance, 0, 2 * pause_s)
                self.counts[f"weather: {kind}"] += 1
                if kind == "step":
                    step_ms = round(chance.choice((-1, 1)) * STEP_MAX_MS * chance.random() ** 3)
                    offset_ms = self.ledger.clock.offset_ms + step_ms
                    await self._set_clock(max(-OFFSET_MAX_MS, min(OFFSET_MAX_MS, offset_ms)))
                    continue
                where = chance.choice(("messages", "")) if kind != "unreadable" else "schedule"
                self._read_faults += kind == "unreadable"
                most_s = 0.3 if kind == "unreadable" else 2.0
                await self._order(
                    {
                        **{"fault": kind, "where": where},
                        **{"s": chance.uniform(0.05, most_s), "wait_s": chance.uniform(0.1, 2)},
                    }
                )

    # ── more clients ───────────────────────────────────────────────────────────────────────────

    async def _subscribe(self, url: str) -> None:
        await super()._subscribe(url)
        retry = {"max_attempts": 2, "backoff": ["100ms"]}
        document = {"subject": DEAD, "type": "webhook", "url": url + "dead", "retry": retry}
        await self._ask("PUT", path("subscriptions", "dead"), document)

    async def _on_webhook(self, headers: Mapping[str, str], body: bytes) -> int:
        if headers.get("delay-subject") != DEAD:
            return await super()._on_webhook(headers, body)
        message_id = headers.get("webhook-id", "")
        self.ledger.receive("dead", message_id, json.loads(body), settled=False)
        return HTTPStatus.INTERNAL_SERVER_ERROR

    def _delay_ms(self) -> int:
        chance = self._random
        kind = chance.random()
        if kind < FAR_SHARE:
            return 3 * HOUR_MS + chance.randint(0, HOUR_MS)
        if kind < 0.1:
            return 0
        longest_ms = 3000 if kind < 0.5 else LONGEST_MS
        return chance.randint(1, longest_ms)

    def _when(self, delay_ms: int) -> dict[str, int]:
        # A delay would count from whenever the server hears of it, by a clock that may be set.
        return {"deliver_at": self.ledger.server_ms() + delay_ms}

    def _is_refusal(self, status: int, answer: Any) -> bool:
        self.counts[f"answered {status}"] += 1
        if status == HTTPStatus.INTERNAL_SERVER_ERROR and self._read_faults:
            return bool(answer["type"].endswith("damaged"))
        is_full = status == HTTPStatus.INSUFFICIENT_STORAGE
        return is_full or super()._is_refusal(status, answer)

    def _unknown(self) -> bytes:
        """A message of a bad client."""
        order, delay_ms = self._new_order()
        self.ledger.publish_asked(order, delay_ms)
        self.counts["published by bad clients, outcome unknown"] += 1
        return json.dumps(document_of(order, delay=delay_ms)).encode()

    async def _publish_msgpack(self) -> None:
        """Batches of MessagePack now and then."""
        headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/msgpack"}
        async with httpx.AsyncClient(
            base_url=self._server.url, verify=self._tls, headers=headers, trust_env=False
        ) as client:
            while True:
                await pause(self._random, 0, 2)
                batch = [self._new_order(with_key=True) for _ in range(self._random.randint(1, 30))]
                for order, delay_ms in batch:
                    self.ledger.publish_asked(order, delay_ms)
                documents = [document_of(one, deliver_at=one.earliest_ms) for one, _ in batch]
                where = path("messages", "batch")
                answer = await client.post(where, content=msgpack.packb(documents), timeout=30)
                if self._is_refusal(answer.status_code, answer.json()):
                    for order, _ in batch:
                        order.refused = True
                    continue
                self.counts["batches of MessagePack"] += 1
                for (order, delay_ms), message_id in zip(batch, answer.json()["ids"], strict=True):
                    self.ledger.publish_answered(order, message_id, order.earliest_ms)
                    self._follow(order, delay_ms)

    async def _replace(self) -> None:
        """A timer that is pushed back, again and again, until it is left alone."""
        chance = self._random
        while True:
            order: Order | None = None
            for _ in range(chance.randint(2, 5)):
                order = await self._push_back(order)
                await pause(chance, 0, 0.5)

    async def _push_back(self, before: Order | None) -> Order:
        order = self.ledger.order(HOOK, SUBSCRIBERS[HOOK])
        if before is not None:
            order.key = before.key
            before.cancel_asked = True
        assert order.key is not None
        delay_ms = self._random.randint(100, 5000)
        self.ledger.publish_asked(order, delay_ms)
        document = {"body": order.body, "deliver_at": order.earliest_ms}
        while True:
            try:
                where = path("subjects", HOOK, "keys", order.key)
                status, answer = await self._ask_once("PUT", where, document)
                break
            except RefusedError:
                await before_retry()
            except UnansweredError:
                return order
        if before is not None:
            before.cancel_asked = False
            if status == HTTPStatus.OK:
                before.cancelled_ms = self.ledger.now_ms()
                self.counts["replaced"] += 1
        self.ledger.publish_answered(order, answer["id"], due_of(answer))
        return order

    async def _look_up(self) -> None:
        """Single messages, lists and statistics."""
        chance = self._random
        while True:
            await pause(chance, 0, 0.2)
            where = chance.choice(("/v1/stats", "/v1/forecast", "/metrics", "list", "one", "one"))
            order = chance.choice(self.ledger.orders)
            if where == "list":
                where = path("subjects", order.subject, "messages") + "?limit=20"
            elif where == "one":
                where = path("messages", min(order.message_ids, default="none"))
            answer = await self._client.request("GET", where)
            self.counts["looked up"] += 1
            is_strange = answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR
            if is_strange and not self._is_refusal(answer.status, json.loads(answer.body)):
                self._fail(f"GET {where}: {answer.status} {answer.body[:300]!r}")


@contextlib.asynccontextmanager
async def _in_background(work: list[Coroutine[None, None, None]]) -> Any:
    """Work for as long as the block lasts."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# ---- the script --------------------------------------------------------------------------------


def main() -> None:
    """`scripts/soak`."""
    parser = script_parser("soak", "One server for a long time, with everything at once.")
    parser.add_argument("--minutes", type=float, default=30, help="how long (default: 30)")

    def start(begun: Begun) -> Coroutine[None, None, Outcome]:
        seconds = 60 * begun.arguments.minutes

        def report(run: SoakRun) -> None:
            text = f"{len(run.ledger.orders):,} messages"
            if run.failures:
                text += f", {len(run.failures)} failures"
            begun.progress(run.passed_s, seconds, text)

        return SoakRun(begun.directory, seed=begun.seed, seconds=seconds, report=report).run()

    run_script(parser, "soak", start)


if __name__ == "__main__":
    main()
