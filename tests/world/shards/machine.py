"""A machine with several shards: disks, clock and sockets, and the lives of each shard on them.

Beside the simulated server of a shard stands its `Member`, the real one, on the simulated event
loop and sockets. A shard is started, killed, or loses power by itself or with all others; a crash
in the middle of a file call ends it, too.

Cost: some ms to start a shard. Threads: none.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from delayserver.api.hot.asgi import Receive, Scope, Send
from delayserver.api.hot.publish import Hot
from delayserver.api.intake import Intake
from delayserver.config import Settings
from delayserver.delivery.deliveries import Deliveries
from delayserver.delivery.leases import DeliverySelection
from delayserver.records.message import DueDelivery
from delayserver.records.subscriptions import Subscription
from delayserver.server.threads import Worker
from delayserver.shards.member import Member
from delayserver.shards.peers import PeerAnswer, PeerCall
from delayserver.shards.place import ShardPlace
from storage.errors import ShortageError, StorageError
from storage.rows import HOUR_MS
from tests.world.definitions import check_definitions
from tests.world.ledger import Ledger
from tests.world.server import SimulatedClock, SimulatedServer
from tests.world.shards.sockets import SimulatedEnd, SimulatedSockets
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.faults import Fault, FaultKind, Faults, FaultyFiles, Moment, SimulatedCrash
from tests.world.storage.files import SimulatedFiles
from tests.world.subscribers import LOST
from tests.world.violation import Violation

ROUNDS_MAX = 5000
LONG_MS = 1000
SHORT_MS = 40


class ShardLedger(Ledger):
    """What was promised by one shard, and by the server about it."""

    def _define(self, seq: int, definition: Subscription) -> None:
        """A shard learns of several changes at once if it was away; none is undone."""
        known = self.subscriptions.get(definition.id)
        if known is not None:
            if known.deleted:
                raise Violation(f"{definition.name} was deleted, and is back (I3)")
            if definition.timeout_ms < known.timeout_ms:
                raise Violation(f"a change of {definition.name} was undone")
        self._note_definition(seq, definition)


class Outside:
    """Somebody outside, who is told what shards let go. Each method of this one ignores that."""

    def granted(self, shard: int, prefix: str, until_ms: int) -> None:
        """A part is leased, until the stopwatch shows that."""

    def given_back(self, shard: int, prefix: str) -> None:
        """What was leased under these tokens counts as sent to nobody."""

    def over(self, shard: int) -> None:
        """All leases of a shard are, with its process."""

    def sent(self, subscription: Subscription) -> None:
        """A webhook is on its way."""


class ShardServer(SimulatedServer):
    """The server of one shard, which tells when a lease ends, whatever ends it."""

    _outside: Outside
    _deadlines: list[tuple[int, list[DueDelivery]]]
    """Webhooks that were sent, and when they are given up, on the stopwatch."""

    def send(self, subscription: Subscription, deliveries: list[DueDelivery]) -> None:
        self._deadlines.append((self.stopwatch() + subscription.timeout_ms, deliveries))
        super().send(subscription, deliveries)

    def on_begun(self, subscription: Subscription, deliveries: list[DueDelivery]) -> None:
        self._outside.sent(subscription)

    def time_out(self, ledger: ShardLedger) -> None:
        """Give up webhooks that were not answered in time; the receiver may have had them."""
        present_ms = self.stopwatch()
        for _, deliveries in [one for one in self._deadlines if one[0] <= present_ms]:
            if any(one is deliveries for one in self.sending):
                for delivery in deliveries:
                    ledger.returned(delivery, seen=True)
                self.answer(deliveries, LOST)
        self._deadlines = [one for one in self._deadlines if one[0] > present_ms]

    def observe(self, shard: int, ledger: ShardLedger, outside: Outside) -> None:
        """Before anything is sent or leased."""
        self._outside, self._deadlines = outside, []
        leasing = self.engine.leasing
        leases = leasing.leases
        end, grant, give_back = leases._end, leases.grant, leasing.give_back

        def ended(pull: Any, which: NDArray[np.intp]) -> None:
            for delivery in DeliverySelection(pull.deliveries, which).each():
                ledger.returned(delivery, seen=False)
            end(pull, which)

        def granted(deliveries: Deliveries, lease_ms: int) -> str:
            prefix = grant(deliveries, lease_ms)
            if prefix:
                outside.granted(shard, prefix, self.stopwatch() + lease_ms)
            return prefix

        def given_back(prefix: str) -> None:
            outside.given_back(shard, prefix)
            give_back(prefix)

        leases._end = ended  # type: ignore[method-assign]
        leases.grant = granted  # type: ignore[method-assign]
        self.calls.consumers.give_back = given_back


class MachineShard:
    """One shard: its disk, and its life, if it has one."""

    def __init__(self, machine: "ShardsMachine", number: int, settings: Settings) -> None:
        self._machine = machine
        self.number = number
        self.settings = settings
        self.disk = SimulatedFiles(rng=machine.rng)
        self.catalog = MemoryCatalog()
        self.faults = Faults()
        self.ledger = ShardLedger()
        self.ledger.present = machine.clock.stopwatch_ms
        self.ledger.clock = machine.clock
        self.lives = 0
        self.server: ShardServer | None = None
        self._member: Member

    @property
    def is_up(self) -> bool:
        """Whether it lives."""
        return self.server is not None

    @property
    def is_failing(self) -> bool:
        """Whether its disk refuses something."""
        return bool(self.faults.struck and self.faults.faults)

    @property
    def running(self) -> ShardServer:
        """Its server, while it lives."""
        assert self.server is not None
        return self.server

    @property
    def hot(self) -> Hot:
        """What clients ask, while it lives."""
        assert self.server is not None
        return self._member.hot

    @property
    def member(self) -> Member:
        """Its place among the others, while it lives."""
        assert self.server is not None
        return self._member

    def start(self, faults: Faults) -> None:
        """Begin a life. Raises SimulatedCrash, StorageError."""
        machine = self._machine
        self.lives += 1
        self.ledger.new_life()
        self.faults = self.catalog.faults = faults
        server = ShardServer(
            self.settings,
            FaultyFiles(self.disk, faults),
            self.catalog,
            machine.clock,
            machine.rng,
            self.ledger,
            quick=machine.quick(),
            shard=self.number,
        )
        server.observe(self.number, self.ledger, machine.outside)
        self.ledger.recovered(server)
        check_definitions(server, self.disk)
        server.event_loop.sockets = machine.sockets
        calls = server.calls
        place = ShardPlace(self.number, machine.count, Path("simulated"), Path("simulated/sockets"))
        intake = Intake(self.settings, calls.subjects, calls.random)
        with server.event_loop.running():
            member = self._member = Member(place, calls, intake, _not_asked)
            self._watch_answers(member)
            self.server = server
            server.event_loop.start(member.begin(1 + self.number), lambda begun: begun.result())
            machine.started(self)
            self.tick()

    def _watch_answers(self, member: Member) -> None:
        """To whoever asked, a mistake of ours is an answer like any."""
        original = member._local.call

        async def watched(call: PeerCall) -> PeerAnswer:
            answer = await original(call)
            if answer.status == HTTPStatus.INTERNAL_SERVER_ERROR and not self.faults.struck:
                failure = Violation(f"{call} was answered {answer}")
                self._machine.failure = self._machine.failure or failure
            return answer

        member._local.call = watched  # type: ignore[method-assign]

    def tick(self) -> None:
        """Let it see the clock."""
        self.running.event_loop.look_at_clock()
        self.running.tick()

    def guard(self, do: Callable[[], object]) -> bool:
        """Have something done on its event loop; False: that was its end."""
        with self.running.event_loop.running():
            return self._machine.guard(self, do)

    def end(self, *, power_loss: bool) -> None:
        """Its process is gone; or the machine below it, too."""
        server, self.server = self.server, None
        if server is not None:
            self._machine.sockets.kill(server.event_loop)
            server.event_loop.abandon()
        self._machine.outside.over(self.number)
        self.disk = self.disk.crash() if power_loss else self.disk.kill()
        self.catalog = self.catalog.crash()
        self.faults = self.catalog.faults = Faults()

    def is_linked(self, other: int) -> bool:
        """Whether it can ask another one."""
        return self.member.links.is_there(other)

    def reaches(self, other: int) -> bool:
        """Whether the present life of another one gets what it is asked now."""
        link = self.member.links._links.get(other)
        if other == self.number or link is None:
            return other == self.number
        return cast(SimulatedEnd, link._transport).other is not None


class ShardsMachine:
    """All shards of a server."""

    def __init__(
        self, rng: random.Random, count: int, counts: Counter[str], outside: Outside
    ) -> None:
        self.rng = rng
        self.count = count
        self.counts = counts
        self.outside = outside
        self.failure: Exception | None = None
        """A promise that was seen to be broken where nobody would hear of it."""
        self.started: Callable[[MachineShard], None] = lambda shard: None
        """Told of each shard that begins a life."""
        self.clock = SimulatedClock()
        self.sockets = SimulatedSockets()
        # Without looking at the environment, which takes longer than many a life.
        settings = Settings.model_construct(
            segment_bytes=4096,
            file_ms=rng.choice((20, 1000)),
            checkpoint_ms=rng.choice((50, 200, 1000)),
            checkpoint_bytes=rng.choice((2000, 64 << 20)),
            lead_ms=rng.choice((50, 1000, HOUR_MS // 2)),
            retention_ms=rng.choice((0, 1000, 2 * HOUR_MS)),
            dedupe_window_ms=rng.choice((0, 100, 6 * HOUR_MS)),
            settle_sync_ms=rng.choice((0, 20, 100)),
            group_max_bytes=1 << 20,
            fire_rows_max=rng.choice((2, 10_000)),
        )
        self.shards = [MachineShard(self, number, settings) for number in range(count)]

    def quick(self) -> Callable[[], bool]:
        """Whether a disk syncs quickly: never in a life, now and then, or always."""
        share = self.rng.choice((0.0, 0.0, 0.5, 1.0))
        return lambda: self.rng.random() < share

    def up(self) -> list[MachineShard]:
        """Those that live."""
        return [shard for shard in self.shards if shard.is_up]

    def plan(self) -> Faults:
        """What a disk does in a life."""
        rng = self.rng
        dice, at = rng.random(), rng.randrange(1, rng.choice((100, 300, 600)))
        if dice < 0.4:
            return Faults(Fault(at, FaultKind.CRASH, rng.choice(tuple(Moment))))
        if dice < 0.5:
            fault = Fault(at // 4 + 1, FaultKind.IO_ERROR, rng.choice(tuple(Moment)))
            return Faults(fault, only=("pwrite_durable", "fdatasync", "pwrite", "commit"))
        if dice < 0.6:
            return Faults(Fault(at, FaultKind.NO_SPACE, rng.choice(tuple(Moment)), for_good=True))
        return Faults()

    def start(self, shard: MachineShard, faults: Faults) -> bool:
        """Begin a life; False: it ended in the recovery."""
        self.counts["lives"] += 1
        return self.guard(shard, partial(shard.start, faults))

    def guard(self, shard: MachineShard, do: Callable[[], object]) -> bool:
        """Let a shard do something; False: that was its end."""
        try:
            do()
            if shard.faults.crash is not None:  # of which a task has told nobody
                raise shard.faults.crash
        except SimulatedCrash:
            self.counts["crashes inside a call"] += 1
        except ShortageError:
            if shard.is_up:
                raise
            self.counts["started on a full disk"] += 1
        except StorageError:
            if not shard.faults.struck:
                raise
            self.counts["ended by a failed disk"] += 1
        except ExceptionGroup as errors:  # of timers
            _, others = errors.split(StorageError)
            if others is not None or not shard.faults.struck:
                raise
            self.counts["ended by a failed disk"] += 1
        else:
            if self.failure is not None:
                raise self.failure
            return True
        shard.end(power_loss=self.rng.random() < 0.5)
        return False

    def let_pass(self, by_ms: int) -> None:
        """Time passes, and webhooks that were not answered meanwhile are given up. It does not pass
        quickly while shards look for each other, or read: that takes them less than a second."""
        if by_ms >= LONG_MS and not (self.settle() and self._are_linked):
            by_ms = SHORT_MS
        self.clock.move(by_ms)
        for shard in self.up():
            shard.guard(partial(shard.running.time_out, shard.ledger))

    def arrive(self) -> bool:
        """Something that is under way comes in; False: nothing is."""
        arrivals = self.sockets.arrivals()
        if arrivals:
            loop, arrive = self.rng.choice(arrivals)
            (shard,) = (one for one in self.up() if one.running.event_loop is loop)
            shard.guard(partial(arrive, self.rng))
        return bool(arrivals)

    # ── until nothing happens ──────────────────────────────────────────────────────────────────

    def settle(self) -> bool:
        """Until nothing happens before the clock moves; False: a shard ended, or its disk was
        full."""
        for shard in self.up():
            # What they do by their own clocks.
            for worker in (shard.running.settling, shard.running.replayer):
                if not self.run(shard, worker, 1000):
                    return False
        for _ in range(ROUNDS_MAX):
            is_busy = self.arrive()
            for shard in self.up():
                if not shard.guard(shard.tick):
                    return False
                for worked in self._work(shard):
                    if worked is None:
                        return False
                    is_busy |= worked
            if not is_busy:
                return True
        raise Violation("the shards keep each other busy")

    def _work(self, shard: MachineShard) -> Iterator[bool | None]:
        """All that it can do by itself; None: that was its end, or its disk is full."""
        server = shard.running
        while server.has_callbacks:
            yield shard.guard(server.turn) or None
        if server.event_loop.has_threads:
            yield shard.guard(server.event_loop.run_thread) or None
        for worker in server.workers:
            if worker.backlog:
                yield self.run(shard, worker, 1000) or None

    def run(self, shard: MachineShard, worker: Worker[Any], items_max: int) -> bool:
        """One turn of a thread; False: that was the end of its shard, or its disk is full."""
        done = True

        def run() -> None:
            nonlocal done
            done = shard.running.run(worker, items_max)

        return self.guard(shard, run) and done

    @property
    def _are_linked(self) -> bool:
        """Whether those that live have met."""
        up = self.up()
        return all(one.reaches(other.number) for one in up for other in up)

    @property
    def is_whole(self) -> bool:
        """Whether all live, and are linked, and know all definitions."""
        return all(
            shard.is_up
            and shard.member.definitions.whole.is_set()
            and all(shard.is_linked(other) for other in range(self.count))
            for shard in self.shards
        ) and all(
            follower.revision >= 0 and not follower.needs_all and not follower.pending
            for follower in self.shards[0].member.definitions._followers.values()
        )


async def _not_asked(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError(f"no shard asks another for {scope['path']} here")
