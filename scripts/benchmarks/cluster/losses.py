"""How long a cluster answers nothing when a part of it is lost, and what a drain costs.

Some tasks publish one message after the other through the client library, each as soon as the last
one is answered; what counts is the longest wait for an answer, as an application sees it.
"""

import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from confluent_kafka.admin import AdminClient
from levels.bench import BODY, DAY_MS, Bench
from report import Figure
from servers import BenchmarkError, memory_of

from cluster.here import NODES, Here
from delayserver.client import AsyncClient, ClientError, Draft
from delayserver.client.transport import TIMEOUT_S

BATCH = 2_000
PROBES = 4
DRAIN_TASKS = 64
STRIKES = 3
BEFORE_S = 1.0
AFTER_S = 1.0
TAKEOVER_LEVEL_S = 10.0
SUBJECT = "bench.losses"
GIVE_UP_S = 60.0


class Asking:
    """Tasks that publish through a strike."""

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self.latency_ms: list[float] = []
        self.failed: list[str] = []
        self.answered_s = time.monotonic()

    def through(self, strike: Callable[[], object], tasks: int) -> None:
        """Publish before it, while it is done, and until all is answered again behind it."""
        asyncio.run(self._through(strike, tasks))

    async def _through(self, strike: Callable[[], object], tasks: int) -> None:
        async with AsyncClient(self._url, timeout_s=self._timeout_s) as client:
            self._is_over = False
            running = [asyncio.create_task(self._publish(client)) for _ in range(tasks)]
            await asyncio.sleep(BEFORE_S)
            await asyncio.to_thread(strike)
            struck_s = time.monotonic()
            await asyncio.sleep(AFTER_S)
            while self.answered_s < struck_s + AFTER_S:
                if time.monotonic() > struck_s + GIVE_UP_S:
                    raise BenchmarkError(f"nothing was answered for {GIVE_UP_S:.0f} s")
                await asyncio.sleep(0.05)
            await asyncio.sleep(AFTER_S)
            self._is_over = True
            await asyncio.gather(*running)

    async def _publish(self, client: AsyncClient) -> None:
        while not self._is_over:
            begun_s = time.monotonic()
            try:
                await client.messages.publish(SUBJECT, BODY, delay=DAY_MS)
            except ClientError as error:
                self.failed.append(str(error))
                continue
            self.answered_s = time.monotonic()
            self.latency_ms.append((self.answered_s - begun_s) * 1000)


def fill(bench: Bench, here: Here) -> None:
    """Have as many messages wait as are to."""
    missing = here.pending - here.waiting
    if missing <= 0:
        return
    bench.step(f"{missing:,} messages to wait")
    node, _ = here.owner()

    async def publish() -> None:
        drafts = [Draft(subject=SUBJECT, body=BODY, delay=DAY_MS)] * BATCH
        async with AsyncClient(f"http://127.0.0.1:{here.port_of(node)}") as client:
            for begin in range(0, missing, BATCH):
                await client.messages.publish_all(drafts[: missing - begin])
                bench.share(begin / missing)

    asyncio.run(publish())
    here.waiting += missing


@dataclass(frozen=True, slots=True)
class Loss:
    """Something is lost, and comes back later."""

    case: str
    begin: str
    """The command of a script, …"""
    end: str
    """… and that which mends it."""
    script: str = "cluster"
    timeout_s: float = TIMEOUT_S
    """Of one request of the client."""

    @property
    def name(self) -> str:
        """Of the figure."""
        return f"{self.case}, time-out {self.timeout_s:.0f} s" if self.is_hang else self.case

    @property
    def is_hang(self) -> bool:
        """A client waits as long as it is told to: who hangs still takes what is sent."""
        return self.begin == "pause"

    @property
    def is_of_owner(self) -> bool:
        """Another node has to take over."""
        return self.script == "cluster"


LOSSES = (
    Loss("the owner is killed (SIGKILL)", "kill", "revive"),
    Loss("the owner hangs (SIGSTOP)", "pause", "resume", timeout_s=2.0),
    Loss("the owner hangs (SIGSTOP)", "pause", "resume"),
    Loss("the broker that leads is killed", "kill", "revive", "kafka"),
)


def takeover(bench: Bench, here: Here) -> None:
    """The owner is killed, hangs; a broker is killed."""
    fill(bench, here)
    for loss in LOSSES:
        quick = loss.is_of_owner and not loss.is_hang
        if bench.size.of(quick=quick, usual=True):
            # What takes half a minute is not done more often than needed.
            often = 1 if loss.is_hang and loss.timeout_s == TIMEOUT_S else STRIKES
            _lose(bench, here, loss, bench.size.of(quick=1, usual=often))


def _lose(bench: Bench, here: Here, loss: Loss, strikes: int) -> None:
    longest_s: list[float] = []
    figure = bench.add(Figure(f"longest wait: {loss.name}", 0.0, "s"))
    for number in range(strikes):
        bench.step(f"{loss.name}, {number + 1} of {strikes}")
        node, epoch = here.settled()
        target = node if loss.is_of_owner else str(_leader(here))
        asking = Asking(f"http://127.0.0.1:{here.port_of(node)}", loss.timeout_s)
        try:
            asking.through(partial(here.run, loss.begin, target, script=loss.script), PROBES)
        finally:
            here.run(loss.end, target, script=loss.script)
        here.waiting += len(asking.latency_ms)
        longest_s.append(max(asking.latency_ms) / 1000)
        new, new_epoch = here.owner()
        if loss.is_of_owner:
            figure.expect("another epoch", new_epoch > epoch, True)
        figure.expect("calls that failed", len(asking.failed), 0)
        here.wait_until_all_wait(new)
    figure.value = statistics.median(longest_s)
    each = ", ".join(f"{one:.2f}" for one in longest_s)
    figure.note = f"{here.waiting:,} pending; {PROBES} tasks through the client library; {each} s"
    if loss.timeout_s < TAKEOVER_LEVEL_S or not loss.is_hang:
        figure.demand(f"< {TAKEOVER_LEVEL_S:.0f} s", max(longest_s) < TAKEOVER_LEVEL_S)


def _leader(here: Here) -> int:
    """The number of the broker that leads the shard's log."""
    addresses, name = here.url().removeprefix("kafka://").split("/")
    topic = f"{name}.log"
    topics = AdminClient({"bootstrap.servers": addresses}).list_topics(topic, timeout=10).topics
    leader: int = topics[topic].partitions[0].leader
    return leader


def drain(bench: Bench, here: Here) -> None:
    """The owner gives its shard away in order, while it is asked."""
    node, epoch = here.settled()
    asking = Asking(f"http://127.0.0.1:{here.port_of(node)}")
    bench.step("drain")
    tasks = bench.size.of(quick=8, usual=DRAIN_TASKS)
    asking.through(partial(here.run, "drain", node), tasks)
    here.waiting += len(asking.latency_ms)
    new, new_epoch = here.owner()
    p50_ms, p99_ms = (float(one) for one in np.percentile(asking.latency_ms, [50, 99]))
    figure = bench.add(Figure("drain: calls that failed", len(asking.failed), ""))
    figure.p50_ms, figure.p99_ms, figure.max_ms = p50_ms, p99_ms, max(asking.latency_ms)
    figure.note = f"of {len(asking.latency_ms) + len(asking.failed):,}, by {tasks} tasks"
    figure.demand("none", not asking.failed)
    figure.expect("another owner", (new != node, new_epoch > epoch), (True, True))
    # Started again it claims as before.
    here.run("kill", node)
    here.run("revive", node)


def memory(bench: Bench, here: Here) -> None:
    """Of each process, with what waits."""
    fill(bench, here)
    owner, _ = here.settled()
    (other,) = {*NODES} - {owner}
    for name, pid in (
        ("supervisor", here.pids(owner)[0]),
        ("owner of a shard", here.pids(owner)[1]),
        ("standby of a shard", here.pids(other)[1]),
    ):
        found = memory_of(pid)
        figure = bench.add(Figure(f"memory: {name}", found.anonymous / 1e6, "MB"))
        figure.note = f"{here.waiting:,} due tomorrow; all its own, without files that are mapped"
