"""Shards whose limits are counted together: real dispatchers, and links that a test moves by steps.

What is told waits in a queue for each direction of a link until it is delivered. A link that is cut
loses some of what is on its way, and each side learns of its end in its own time.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from delayserver.delivery.queue import Queue
from delayserver.records.message import DueDelivery
from delayserver.records.subscriptions import Subscription
from delayserver.shards.limits import Limits
from tests.unit.delivery.parts import NOW_MS, Parts
from tests.unit.fakes import START_MS

UP: Final = "up"
DOWN: Final = "down"
Item = tuple[str, bytes]
"""A topic and a notice; or UP or DOWN."""


@dataclass
class Request:
    """A webhook that is out."""

    carried: list[DueDelivery]
    since_ms: int


@dataclass
class Wire:
    """What is on its way in one direction of a link."""

    items: deque[Item] = field(default_factory=deque)
    is_open: bool = False
    """Whether the sender has a link over which it may be told; what it tells else is lost."""


class Process:
    """One shard, from its start to its end. `Peers`, `Loop` and `LimitCalls` of its limits."""

    def __init__(self, cluster: Cluster, own: int, definitions: list[Subscription]) -> None:
        self.cluster = cluster
        self.own = own
        self.count = cluster.count
        self.parts = Parts(*definitions)
        self.parts.stopwatch.shows_ms = cluster.now_ms
        self.soon: deque[Callable[[], None]] = deque()
        self.heard: dict[str, Callable[[int, bytes], None]] = {}
        self.told: list[tuple[int, str, bytes]] = []
        self.requests: list[Request] = []
        self.recording: list[DueDelivery] = []
        """Their requests have failed, and that is not recorded yet."""
        self.changed: Callable[[int, bool], None]
        self.limits = Limits(self, self, self)
        self.parts.dispatcher.queues.permits = self.limits

    # ── Peers ──────────────────────────────────────────────────────────────────────────────────

    def ask(self, shard: int, call: object) -> Any:
        raise AssertionError

    def tell(self, shard: int, topic: str, notice: bytes) -> None:
        self.told.append((shard, topic, notice))
        wire = self.cluster.wires[self.own, shard]
        if wire.is_open:
            wire.items.append((topic, notice))

    def on_told(self, topic: str, heard: Callable[[int, bytes], None]) -> None:
        self.heard[topic] = heard

    def on_change(self, changed: Callable[[int, bool], None]) -> None:
        self.changed = changed

    # ── Loop and LimitCalls ────────────────────────────────────────────────────────────────────

    def call_soon(self, function: Callable[[], None]) -> None:
        self.soon.append(function)

    def call_later(self, delay: float, function: Callable[[], None]) -> None:
        self.cluster.call_at(self.cluster.now_ms + delay * 1000, self, function)

    def definition(self, subscription_id: int) -> Subscription | None:
        return self.parts.registry.by_id(subscription_id)

    def pump(self, subscription_id: int) -> None:
        subscription = self.definition(subscription_id)
        if subscription is not None:
            self.parts.dispatcher.pump.run(self.queue(subscription_id), NOW_MS)

    def stopwatch(self) -> int:
        self.cluster.now_ms += self.cluster.step_ms
        return self.cluster.now_ms

    # ── what happens in it ─────────────────────────────────────────────────────────────────────

    def queue(self, subscription_id: int = 1) -> Queue:
        subscription = self.definition(subscription_id)
        assert subscription is not None
        return self.parts.dispatcher.queues.of(subscription)

    def turn(self) -> None:
        for _ in range(len(self.soon)):
            self.soon.popleft()()

    def fire(self, count: int) -> None:
        seqs = [next(self.cluster.seqs) for _ in range(count)]
        self.parts.fire(*((seq, START_MS) for seq in seqs))

    def read(self) -> None:
        """Answer the oldest read."""
        self.parts.read()
        posts, self.parts.ports.posts = self.parts.ports.posts, []
        for post in posts:
            self.requests.append(Request(post, self.cluster.now_ms))
            self.cluster.sent_rows += len(post)

    def read_all(self) -> None:
        while self.parts.ports.handouts:
            self.read()

    def end(self, request: Request, *, fails: bool = False) -> None:
        self.requests.remove(request)
        dispatcher = self.parts.dispatcher
        dispatcher.pushes.end_request(request.carried, is_answered=not fails)
        for one in request.carried:
            if fails:
                self.recording.append(one)
            else:
                dispatcher.settling.settle_delivered(one, NOW_MS)
                self.cluster.done_rows += 1
        self.pump(request.carried[0].subscription_id)

    def record(self) -> None:
        """Failures are recorded: they are somebody else's business now."""
        recording, self.recording = self.recording, []
        for one in recording:
            self.parts.dispatcher.settling.release_delivery(one)
            self.cluster.done_rows += 1
            self.pump(one.subscription_id)

    def change(self, subscription: Subscription) -> None:
        self.parts.change(subscription)


class Cluster:
    """All shards, their links and their time."""

    def __init__(self, count: int, *definitions: Subscription, linked: bool = True) -> None:
        self.count = count
        self.now_ms = 0
        self.step_ms = 0
        """How far the stopwatch goes on with each look of the limits."""
        self.seqs = itertools.count(1)
        self.sent_rows = 0
        self.done_rows = 0
        self.definitions = list(definitions)
        self.processes: dict[int, Process] = {}
        pairs = itertools.permutations(range(count), 2)
        self.wires = {pair: Wire() for pair in pairs}
        self._timers: list[tuple[float, int, Process, Callable[[], None]]] = []
        self._numbers = itertools.count()
        for shard in range(count):
            self.begin(shard)
        if linked:
            self.connect_all()
            self.settle()

    def call_at(self, at_ms: float, process: Process, function: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (at_ms, next(self._numbers), process, function))

    @property
    def living(self) -> list[Process]:
        return list(self.processes.values())

    def places(self, subscription_id: int = 1) -> int:
        """How many are out, in all."""
        return sum(one.queue(subscription_id).used_places() for one in self.living)

    def waiting(self) -> int:
        return sum(queue.count for one in self.living for queue in one.parts.dispatcher.queues)

    # ── processes and links come and go ────────────────────────────────────────────────────────

    def begin(self, shard: int) -> Process:
        process = self.processes[shard] = Process(self, shard, self.definitions)
        return process

    def kill(self, shard: int) -> int:
        """Returns how many rows it had, which are nobody's now."""
        process = self.processes.pop(shard)
        rows = sum(queue.count for queue in process.parts.dispatcher.queues)
        rows += sum(len(queue.reserved) for queue in process.parts.dispatcher.queues)
        for other in range(self.count):
            if other != shard:
                self.wires[shard, other].is_open = False
                if other in self.processes and self._is_known(other, shard):
                    self.wires[shard, other].items.append((DOWN, b""))
                self.wires[other, shard] = Wire()
        return rows

    def _is_known(self, one: int, other: int) -> bool:
        """Whether the last thing that one has heard, or will hear, of a link is that it is up."""
        ends = [topic for topic, _ in self.wires[other, one].items if topic in (UP, DOWN)]
        is_up = other not in self.processes[one].limits._away_ms
        return ends[-1] == UP if ends else is_up

    def may_connect(self, one: int, other: int) -> bool:
        are_there = one in self.processes and other in self.processes
        return are_there and not (self._is_known(one, other) or self._is_known(other, one))

    def are_linked(self, one: int, other: int) -> bool:
        """Whether each of them has heard, or will hear, that they are."""
        are_there = one in self.processes and other in self.processes
        return are_there and self._is_known(one, other) and self._is_known(other, one)

    def connect(self, one: int, other: int) -> None:
        assert self.may_connect(one, other)
        for pair in ((one, other), (other, one)):
            self.wires[pair].items.append((UP, b""))

    def connect_all(self) -> None:
        for one, other in itertools.combinations(range(self.count), 2):
            if self.may_connect(one, other):
                self.connect(one, other)

    def cut(self, one: int, other: int, rng: random.Random) -> None:
        """Some of what is on its way still arrives."""
        for pair in ((one, other), (other, one)):
            wire = self.wires[pair]
            told = [n for n, (topic, _) in enumerate(wire.items) if topic not in (UP, DOWN)]
            first = len(wire.items) - 1
            while first >= 0 and wire.items[first][0] not in (UP, DOWN):
                first -= 1
            keeps = rng.randint(first + 1, len(wire.items)) if told else len(wire.items)
            wire.items = deque(itertools.islice(wire.items, keeps))
            wire.items.append((DOWN, b""))
            wire.is_open = False

    def deliver(self, sender: int, receiver: int) -> None:
        """The next thing on its way."""
        topic, notice = self.wires[sender, receiver].items.popleft()
        process = self.processes[receiver]
        if topic in (UP, DOWN):
            is_cut = any(topic == DOWN for topic, _ in self.wires[sender, receiver].items)
            self.wires[receiver, sender].is_open = topic == UP and not is_cut
            process.changed(sender, topic == UP)
        else:
            process.heard[topic](sender, notice)

    # ── time ───────────────────────────────────────────────────────────────────────────────────

    def settle(self) -> None:
        """Until nothing more happens without time, an answer or a read."""
        while True:
            for process in self.living:
                process.turn()
            pairs = [pair for pair, wire in self.wires.items() if wire.items]
            for pair in pairs:
                if pair[1] in self.processes:
                    self.deliver(*pair)
                else:
                    self.wires[pair].items.clear()
            if not pairs and not any(process.soon for process in self.living):
                return

    def run(self) -> None:
        """Likewise, and everything is read."""
        while True:
            self.settle()
            if not any(process.parts.ports.handouts for process in self.living):
                return
            for process in self.living:
                process.read_all()

    def advance(self, by_ms: int) -> None:
        """Let time pass, a timer at a time."""
        until_ms = self.now_ms + by_ms
        while self._timers and self._timers[0][0] <= until_ms:
            at_ms, _, process, function = heapq.heappop(self._timers)
            self._set(max(self.now_ms, -(-at_ms // 1)))
            if self.processes.get(process.own) is process:
                function()
        self._set(until_ms)

    def _set(self, now_ms: float) -> None:
        self.now_ms = max(self.now_ms, int(now_ms))
        for process in self.living:
            process.parts.stopwatch.shows_ms = self.now_ms
            process.parts.dispatcher.pump.wake(NOW_MS)

    def finish(self, step_ms: int = 10) -> None:
        """All links are there again, everything is delivered, and nothing new comes."""
        moved_ms, done_rows = self.now_ms, self.done_rows
        while self.now_ms - moved_ms < 20_000:
            if self.done_rows != done_rows:
                moved_ms, done_rows = self.now_ms, self.done_rows
            self.settle()
            self.connect_all()
            self.run()
            for process in self.living:
                for request in list(process.requests):
                    process.end(request)
                process.record()
            self.run()
            if not self.waiting() and not any(one.requests for one in self.living):
                return
            self.advance(step_ms)
        raise AssertionError(f"{self.waiting()} rows wait for ever")

    def leaks(self) -> list[object]:
        """What somebody has kept though nothing is out and nothing waits."""
        found: list[object] = []
        for process in self.living:
            limits = process.limits
            found += [
                (process.own, one.places, one.rows, one.asked_places, one.asked_rows)
                for one in limits._permits.values()
                if one.is_linked and (one.places or one.rows or one.asked_places or one.asked_rows)
            ]
            found += [
                (process.own, subscription_id, list(allotment.out))
                for subscription_id, allotment in limits._allotments.items()
                if not allotment.is_idle or allotment.subscription is None
            ]
        return found
