"""A replicated log engine in memory, and nodes that live on it, all driven by one seed.

`SimulatedLog` takes what its nodes append, each connection in its order, and gives each record the
next offset. What may happen to an append:

    lost          it never arrives; the answer neither
    late          it arrives up to some seconds later, or when its node is not cut off any more
    unanswered    it is there, and its writer is never told
    repeated      the answer is lost, and the producer sends it again: a second record, or, if the
                  log is idempotent, the same one with a late answer

Readers see a record when it is there, or as late as their own connection makes it.

A `ReplicatedWorld` has a few nodes with the real `Office`, `Tenure` and `Follower`. Each has a
stopwatch of its own rate, within 15 % of the others. They claim, write frames in one or several
parts, beat, leave, take checkpoints. They are stopped for seconds and go on as if nothing had been
(zombies), are cut off, alone or all at once, are killed, and start again from a checkpoint or from
nothing. Then the world is calm, and has to come to rest.

Looked at from outside, with true time, and with `verdicts` instead of `Office`:

    I14    no two nodes hold a lease at one time
    I15    every reader comes to the same verdict on every record, and to that of `verdicts`
    I17    a frame that was answered counts, and everybody has it with the same bytes
    R3     nobody claims a log that it has not read to its end
    rest   when nothing fails any more somebody is in office, and answers

Cost: the 36 s of a world take some 40 ms. Threads: none; nothing here reads a clock.

Rejected: looking at I14 through what nodes deliver. A lease that is held twice is wrong at once,
and not only when two messages happen to leave in the same moment.
"""

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

import numpy as np

from storage.frame import HEADER, Header, encode
from storage.replicated import envelope
from storage.replicated.envelope import Beat, Claim, FramePart, LeasesPart, LogRecord, Release
from storage.replicated.lease import Follower, Tenure
from storage.replicated.office import Office, OfficeState, RecordDecision
from storage.rows import DTYPES, LogKind

LOG: Final = "ds.log/0"
STAMP: Final = 0xC0FFEE
NODES: Final = 3
STORM_MS: Final = 20_000
"""How long all that can happen does."""
CALM_MS: Final = 16_000
"""How long nothing fails any more: what is still under way arrives, and two leases end."""
REST_MS: Final = 4_000
"""At the end of the calm, in which somebody has to answer."""
TIMEOUT_MS: Final = 4_000
"""After which a node does not wait for the answer to an append any more."""
RATE_MAX: Final = 1.15
PART_BYTES: Final = 100
TICK_MS: Final = (20, 100)


class ProtocolViolation(AssertionError):
    """Something that the protocol rules out has happened."""


class Agenda:
    """What is to happen, in the order of true time (ms, from 0)."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self._items: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def after(self, delay_ms: float, do: Callable[[], None]) -> None:
        """Do it `delay_ms` from now; what is due at one time is done in the order of the calls."""
        heapq.heappush(self._items, (self.now_ms + delay_ms, next(self._numbers), do))

    def run(self, until_ms: float, look: Callable[[], None]) -> None:
        """Do all that is due until then, and look after each."""
        while self._items and self._items[0][0] <= until_ms:
            self.now_ms, _, do = heapq.heappop(self._items)
            do()
            look()
        self.now_ms = until_ms


@dataclass(slots=True)
class Uplink:
    """The connection of one process to the log."""

    cut_until_ms: float = 0.0
    free_ms: float = 0.0
    """When the last append arrives: the next one comes behind it."""
    has_lost: bool = False


@dataclass(slots=True)
class Sent:
    """A record that was appended; `offset` None: there is no answer yet."""

    record: LogRecord
    sent_ms: int
    offset: int | None = None


class SimulatedLog:
    """One log, to which several append. See the top of this module."""

    def __init__(self, rng: random.Random, agenda: Agenda, *, is_idempotent: bool) -> None:
        self.is_idempotent = is_idempotent
        self.is_calm = False
        """Nothing fails, and nothing is slow."""
        self.counts: Counter[str] = Counter()
        self._rng = rng
        self._agenda = agenda
        self._records: list[tuple[float, bytes]] = []

    @property
    def end(self) -> int:
        """The offset behind the last record."""
        return len(self._records)

    def read(self, offset: int, until_ms: float) -> list[tuple[int, bytes]]:
        """The records from `offset` on that were there at `until_ms`, each with its offset."""
        found = []
        for at in range(offset, self.end):
            arrived_ms, data = self._records[at]
            if arrived_ms > until_ms:
                break
            found.append((at, data))
        return found

    def append(self, sent: Sent, uplink: Uplink) -> None:
        """Send a record. Its answer, if there is one, is put into `sent.offset`."""
        # A producer that is idempotent numbers its records: behind one that is missing none counts.
        if self._happens(0.01) or (uplink.has_lost and self.is_idempotent):
            self.counts["lost"] += 1
            uplink.has_lost = True
            return
        now_ms = self._agenda.now_ms
        start_ms = max(now_ms, uplink.free_ms, uplink.cut_until_ms)
        uplink.free_ms = start_ms + self._delay_ms()
        data = envelope.encode(sent.record)
        self._agenda.after(uplink.free_ms - now_ms, lambda: self._arrive(data, sent, uplink))

    def _arrive(self, data: bytes, sent: Sent, uplink: Uplink) -> None:
        offset = self._add(data)
        if not self._happens(0.02):
            self._answer(offset, sent, uplink)
            return
        self.counts["repeated"] += 1

        def repeat() -> None:
            self._answer(offset if self.is_idempotent else self._add(data), sent, uplink)

        self._agenda.after(self._rng.uniform(1, 2500), repeat)

    def _add(self, data: bytes) -> int:
        self._records.append((self._agenda.now_ms, data))
        return self.end - 1

    def _answer(self, offset: int, sent: Sent, uplink: Uplink) -> None:
        if self._agenda.now_ms < uplink.cut_until_ms or self._happens(0.01):
            self.counts["unanswered"] += 1
            return

        def come() -> None:
            sent.offset = offset

        self._agenda.after(self._rng.uniform(0.3, 5), come)

    def _delay_ms(self) -> float:
        if self._happens(0.03):
            self.counts["late"] += 1
            return self._rng.uniform(10, 5000)
        return self._rng.uniform(0.3, 10)

    def _happens(self, chance: float) -> bool:
        return not self.is_calm and self._rng.random() < chance


class SimulatedNode:
    """A node with a disk that keeps a checkpoint, a stopwatch, a clock, and one process or none."""

    def __init__(self, world: "ReplicatedWorld", number: int) -> None:
        rng = world.rng
        self.number = number
        self.disk = OfficeState().pack()
        self.stopped_until_ms = 0.0
        self.late_ms = 0.0
        """How much later than others it sees what was written."""
        self.tenure: Tenure | None = None
        self.is_leaving = False
        """Its owner is to give the office to somebody."""
        self.is_up = False
        self.uplink = Uplink()
        self._world = world
        self._rate = rng.uniform(1, RATE_MAX) if rng.random() < 0.7 else rng.choice((1, RATE_MAX))
        self._boot_ms = rng.randrange(1 << 20)
        self._skew_ms = rng.randrange(-300, 300)
        self.start()

    @property
    def now_ms(self) -> int:
        """What its stopwatch shows."""
        return self._boot_ms + int(self._world.agenda.now_ms * self._rate)

    @property
    def wall_ms(self) -> int:
        """What its clock shows."""
        return self._skew_ms + int(self._world.agenda.now_ms)

    @property
    def holds(self) -> bool:
        """Whether it may deliver now, be it stopped or not: it may have looked just before."""
        return self.is_up and self.tenure is not None and self.tenure.holds(self.now_ms)

    # ── lives ──────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """A new process, which knows what is on the disk."""
        state = OfficeState.unpack(self.disk)
        assert state is not None
        self.is_up = True
        self.uplink = Uplink(self.uplink.cut_until_ms)
        self.is_leaving = False
        self.tenure = None
        self._office = Office(LOG, STAMP, state)
        self._follower = Follower(self.number, self.number - 1, self.now_ms)
        self._claim: Sent | None = None
        self._under_way: deque[Sent] = deque()
        self._parts: list[FramePart] = []

    def kill(self, restart_ms: float) -> None:
        """End the process, and start another one after that time. What it has sent is on its
        way."""
        if self.is_up:
            self.is_up = False
            self._world.agenda.after(restart_ms, self.start)

    def checkpoint(self) -> None:
        """Write down how far it has come."""
        if self.is_up:
            self.disk = self._office.checkpoint().pack()
            self._world.checkpoints.append(self.disk)

    def step(self) -> None:
        """What its process does from time to time."""
        if self.is_up and self._world.agenda.now_ms >= self.stopped_until_ms:
            if self.tenure is None:
                self._follow()
            else:
                self._own(self.tenure)

    # ── a follower ─────────────────────────────────────────────────────────────────────────────

    def _follow(self) -> None:
        end = None if self._is_cut else self._world.log.end
        self._read()
        state, now_ms = self._office.state, self.now_ms
        if end == state.next_offset:
            self._follower.read_all(now_ms)
        if self._claim is not None:
            self._follow_claim(self._claim)
        elif self._follower.is_due(state, now_ms) and self._follower.may_claim(
            state, end, now_ms, self.wall_ms
        ):
            self._world.claims(self.number, state)
            address = f"node-{self.number}"
            after = state.last_offset
            self._claim = self._send(
                Claim(self.number, state.epoch + 1, self.wall_ms, after, address)
            )

    def _follow_claim(self, claim: Sent) -> None:
        if claim.offset is None:
            if self.now_ms - claim.sent_ms > TIMEOUT_MS:
                self._claim = None
        elif self._office.state.next_offset > claim.offset:
            self._claim = None
            self.tenure = Tenure.of(self._office, claim.offset, claim.sent_ms)
            self._world.counts["took over" if self.tenure else "came second"] += 1

    # ── an owner ───────────────────────────────────────────────────────────────────────────────

    def _own(self, tenure: Tenure) -> None:
        while self._under_way and self._under_way[0].offset is not None:
            sent = self._under_way.popleft()
            if not tenure.appended(sent.record, sent.offset, sent.sent_ms):
                self._step_down()
                return
            assert sent.offset is not None
            self._appended(sent.offset, sent.record)
        if self._under_way:
            if self.now_ms - self._under_way[0].sent_ms > TIMEOUT_MS:
                tenure.appended(self._under_way[0].record, None, self._under_way[0].sent_ms)
                self._step_down()
            return
        self._read()
        if tenure.is_over:
            self._stand_by()
        elif self.is_leaving:
            self._leave(tenure)
        elif self._world.rng.random() < 0.3:
            self._write_frame()
        elif self.now_ms >= tenure.beat_due_ms:
            state = self._office.state
            beat = Beat(self.number, state.epoch, self.wall_ms, state.next_seq - 1, 0, 0)
            self._under_way.append(self._send(beat))

    def _write_frame(self) -> None:
        world, state = self._world, self._office.state
        last_seq = state.next_seq + world.rng.randrange(5)
        frame = encode(
            LogKind.MESSAGE,
            np.zeros(1 + last_seq - state.next_seq, DTYPES[LogKind.MESSAGE]).tobytes(),
            world.rng.randbytes(8),
            first_seq=state.next_seq,
            last_seq=last_seq,
            created_ms=self.wall_ms,
            stamp=STAMP,
        )
        part_bytes = world.rng.choice((PART_BYTES, len(frame)))
        for part in envelope.split(
            frame,
            node=self.number,
            epoch=state.epoch,
            clock_ms=self.wall_ms,
            part_bytes=part_bytes,
        ):
            self._under_way.append(self._send(part))

    def _appended(self, offset: int, record: LogRecord) -> None:
        """R1 says that it counts."""
        completes = isinstance(record, FramePart) and record.is_last
        self._judged(
            offset, record, RecordDecision.COMPLETES if completes else RecordDecision.COUNTS
        )
        if completes:
            self._world.answered(offset)

    def _leave(self, tenure: Tenure) -> None:
        """Give the office to somebody."""
        self.is_leaving = False
        tenure.end()
        successor = self._world.rng.randrange(NODES + 1)
        leases = bytes(self._world.rng.choice((0, PART_BYTES, 3 * PART_BYTES)))
        said = {"node": self.number, "epoch": self._office.state.epoch, "clock_ms": self.wall_ms}
        for part in envelope.split_leases(leases, **said, part_bytes=PART_BYTES):
            self._send(part)
        self._send(Release(self.number, self._office.state.epoch, self.wall_ms, successor))

    def _stand_by(self) -> None:
        """Nothing is under way, and another is in office, or nobody: go on without it."""
        self.tenure = None
        self._follower = Follower(self.number, self.number - 1, self.now_ms)

    def _step_down(self) -> None:
        """Exit, and start again as a standby."""
        self._world.counts["stepped down"] += 1
        self.kill(self._world.rng.uniform(50, 500))

    # ── both ───────────────────────────────────────────────────────────────────────────────────

    @property
    def _is_cut(self) -> bool:
        return self._world.agenda.now_ms < self.uplink.cut_until_ms

    def _read(self) -> None:
        if self._is_cut:
            return
        until_ms = self._world.agenda.now_ms - self.late_ms
        for offset, data in self._world.log.read(self._office.state.next_offset, until_ms):
            record = envelope.decode(data, LOG, offset)
            verdict = self._office.apply(offset, record)
            self._follower.read(record, verdict, self.now_ms, self.wall_ms)
            self._judged(offset, record, verdict)

    def _judged(self, offset: int, record: LogRecord, verdict: RecordDecision) -> None:
        """File what was completed, and tell the world."""
        self._world.judged(self.number, offset, verdict)
        if isinstance(record, FramePart) and verdict is not RecordDecision.VOID:
            self._parts = [] if record.part == 0 else self._parts
            self._parts.append(record)
            if verdict is RecordDecision.COMPLETES:
                self._world.filed(self.number, offset, envelope.join(self._parts))

    def _send(self, record: LogRecord) -> Sent:
        sent = Sent(record, self.now_ms)
        self._world.log.append(sent, self.uplink)
        return sent


class ReplicatedWorld:
    """One seed: an engine, its nodes, what happens to them, and what was promised."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"replicated {seed}")
        self.agenda = Agenda()
        self.log = SimulatedLog(self.rng, self.agenda, is_idempotent=self.rng.random() < 0.5)
        self.counts: Counter[str] = Counter()
        self.checkpoints: list[bytes] = []
        self._verdicts: dict[int, RecordDecision] = {}
        self._frames: dict[int, bytes] = {}
        self._answered: dict[int, float] = {}
        self.nodes = [SimulatedNode(self, number) for number in range(1, NODES + 1)]
        for node in self.nodes:
            self._tick(node)
        self._strike()

    def run(self) -> None:
        """Live through the storm and the calm, then compare all there is. Raises
        ProtocolViolation."""
        self.agenda.run(STORM_MS, self._look)
        self.log.is_calm = True
        for node in self.nodes:
            node.stopped_until_ms = node.late_ms = node.uplink.cut_until_ms = 0
        self.agenda.run(STORM_MS + CALM_MS, self._look)
        self._compare()
        self.counts.update(self.log.counts)

    # ── what nodes tell ────────────────────────────────────────────────────────────────────────

    def judged(self, node: int, offset: int, verdict: RecordDecision) -> None:
        """A node has come to a verdict."""
        known = self._verdicts.setdefault(offset, verdict)
        if verdict is not known:
            raise ProtocolViolation(
                f"I15: {offset} is {verdict.name} for node {node}, and {known.name} for others"
            )

    def filed(self, node: int, offset: int, frame: bytes) -> None:
        """A node has a frame as a whole, whose last part is the record at `offset`."""
        if self._frames.setdefault(offset, frame) != frame:
            raise ProtocolViolation(f"I17: node {node} has another frame at {offset} than others")

    def answered(self, offset: int) -> None:
        """A node has answered for the frame whose last part it believes to be at `offset`."""
        self._answered[offset] = self.agenda.now_ms
        self.counts["answered"] += 1

    def claims(self, node: int, state: OfficeState) -> None:
        """A node sends a CLAIM, having read as much as `state` says."""
        self.counts["claims"] += 1
        if self.log.end != state.next_offset:
            raise ProtocolViolation(
                f"R3: node {node} claims at {state.next_offset}, the log ends at {self.log.end}"
            )

    # ── what happens ───────────────────────────────────────────────────────────────────────────

    def _tick(self, node: SimulatedNode) -> None:
        node.step()
        self.agenda.after(self.rng.uniform(*TICK_MS), lambda: self._tick(node))

    def _strike(self) -> None:
        if self.log.is_calm:
            return
        rng, now_ms = self.rng, self.agenda.now_ms
        node = rng.choice(self.nodes)
        owners = [one for one in self.nodes if one.tenure is not None]
        if owners and rng.random() < 0.5:
            node = rng.choice(owners)
        length_ms = rng.choice((500, 2500, 3500, 6000)) * rng.uniform(0.5, 1.2)
        strikes: dict[str, Callable[[], None]] = {
            "stopped": lambda: setattr(node, "stopped_until_ms", now_ms + length_ms),
            "cut off": lambda: self._cut([node], now_ms + length_ms),
            "log away": lambda: self._cut(self.nodes, now_ms + length_ms / 2),
            "killed": lambda: node.kill(length_ms / 2),
            "disk lost": lambda: self._lose_disk(node),
            "reads late": lambda: setattr(node, "late_ms", length_ms),
            "reads in time": lambda: setattr(node, "late_ms", 0.0),
            "checkpoint": node.checkpoint,
            "leaves": lambda: setattr(node, "is_leaving", node.tenure is not None),
        }
        (what,) = rng.choices(list(strikes), (4, 3, 1, 2, 1, 2, 4, 4, 1))
        self.counts[what] += 1
        strikes[what]()
        self.agenda.after(rng.expovariate(1 / 600), self._strike)

    def _cut(self, nodes: Sequence[SimulatedNode], until_ms: float) -> None:
        for node in nodes:
            node.uplink.cut_until_ms = until_ms

    def _lose_disk(self, node: SimulatedNode) -> None:
        node.disk = OfficeState().pack()
        node.kill(1000)

    # ── what must hold ─────────────────────────────────────────────────────────────────────────

    def _look(self) -> None:
        holders = [node.number for node in self.nodes if node.holds]
        if len(holders) > 1:
            raise ProtocolViolation(f"I14: nodes {holders} have a lease at {self.agenda.now_ms}")

    def _compare(self) -> None:
        now_ms = self.agenda.now_ms
        if max(self._answered.values(), default=0.0) < now_ms - REST_MS:
            raise ProtocolViolation("rest: nobody answers, though nothing fails any more")
        found = self.log.read(0, now_ms)
        records = [envelope.decode(data, LOG, offset) for offset, data in found]
        right = verdicts(records)
        self._count(records, right)
        for offset, verdict in self._verdicts.items():
            if verdict is not right[offset]:
                raise ProtocolViolation(f"I15: {offset} is {right[offset].name} for everybody")
        for packed in {OfficeState().pack(), *self.checkpoints}:
            state = OfficeState.unpack(packed)
            assert state is not None
            office = Office(LOG, STAMP, state)
            for offset in range(state.next_offset, len(records)):
                if office.apply(offset, records[offset]) is not right[offset]:
                    raise ProtocolViolation(f"I15: from {state} on {offset} is another")
        for offset in self._answered:
            if right[offset] is not RecordDecision.COMPLETES:
                raise ProtocolViolation(f"I17: {offset} was answered, and is {right[offset].name}")

    def _count(self, records: list[LogRecord], right: list[RecordDecision]) -> None:
        for record, verdict in zip(records, right, strict=True):
            self.counts[f"{type(record).__name__} {verdict.name}"] += 1


def verdicts(records: Sequence[LogRecord]) -> list[RecordDecision]:
    """The verdict on every record of a log from its beginning, by looking back.

    What `Office` says, in other words: it has no memory of a frame whose parts are under way, and
    looks for them among the records."""
    found: list[RecordDecision] = []
    epoch, owner, next_seq = 0, 0, 1
    for offset, record in enumerate(records):
        last = max((at for at, one in enumerate(found) if one), default=-1)
        is_owner = record.epoch == epoch and record.node == owner
        verdict = RecordDecision.VOID
        match record:
            case Claim():
                if record.epoch == epoch + 1 and record.after == last:
                    verdict, epoch, owner = RecordDecision.COUNTS, record.epoch, record.node
            case FramePart():
                parts = records[max(0, offset - record.part) : offset + 1]
                if is_owner and _stand_together(parts, record):
                    header = Header(*HEADER.unpack_from(parts[0].data))  # type: ignore[union-attr]
                    if header.first_seq == next_seq:
                        verdict = RecordDecision.COUNTS
                        if record.is_last:
                            verdict, next_seq = RecordDecision.COMPLETES, header.last_seq + 1
            case Beat() | LeasesPart():
                verdict = RecordDecision(is_owner)
            case Release():
                verdict = RecordDecision(is_owner)
                owner = 0 if is_owner else owner
        found.append(verdict)
    return found


def _stand_together(found: Sequence[LogRecord], last: FramePart) -> bool:
    """Whether these are the parts of one frame, from its first to `last`."""
    wanted = [(last.node, last.epoch, part, last.parts) for part in range(last.part + 1)]
    return wanted == [
        (one.node, one.epoch, one.part, one.parts) for one in found if isinstance(one, FramePart)
    ]
