"""The ledger where several nodes may serve one after the other.

What one owner was promised to have answered, the next one has: so one ledger for all of them. Two
things are different. Files belong to nodes, and each deletes hours at its own time. And a process
that is not the owner any more, and does not know, goes on: it may say late what was delivered, and
nothing else. It answers nobody: an ack that it answers has to be known to the next owner.

Cost: that of the ledger. Threads: none.
"""

from delayserver.delivery.settler import DISPATCH_ROW
from delayserver.records.message import DueDelivery, State
from delayserver.records.subscriptions import Subscription
from delayserver.schedule.committed import Records
from delayserver.schedule.wheel_rows import FiredRows
from storage.errors import DamageError
from storage.rows import Outcome
from tests.world.ledger import Ledger
from tests.world.server import Observer, SimulatedServer
from tests.world.violation import Violation


class ReplicaLedger(Ledger):
    """What was promised by whoever was the owner."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[tuple[int, bytes, bytes]] = []
        """What was answered: first seq, rows, payload."""
        self.is_late = False
        """A zombie has its turn."""
        self.has_left = False
        """The log says that the owner before the one that begins to serve has left in order."""
        self._was_out = 0
        """When the last of the messages was due that were on their way at the end of a life."""

    def committed(self, rows: bytes, payload: bytes) -> None:
        before = self.durable_seq
        super().committed(rows, payload)
        self.frames.append((before + 1, rows, payload))

    def located(self, message_seq: int, state: State) -> None:
        # A zombie says what it knows, which was true.
        if not self.is_late:
            super().located(message_seq, state)

    def late(self, row: bytes) -> None:
        """A zombie has been told that a delivery has ended, and will say so."""
        self._settled.add(row)
        if DISPATCH_ROW.unpack(row)[6] == Outcome.DROPPED:
            self.dropped.add(DISPATCH_ROW.unpack(row)[1])

    def seen_late(self, delivery: DueDelivery) -> None:
        """A subscriber has had what a zombie sent before it became one."""
        self.received.setdefault(delivery.origin.message_seq, set()).add(delivery.subscription_id)

    def new_life(self) -> None:
        self._was_out = max(
            (self._entries[seq][0] for seq, _ in self._on_their_way), default=self._was_out
        )
        super().new_life()

    def _take_over(self, server: SimulatedServer) -> None:
        if self.has_left:
            self.counts["leases handed over"] += len(server.store.kept.leases)
            super()._take_over(server)
            return
        self._left = None
        if len(server.store.kept.leases):
            raise Violation("leases of an owner that was killed are good (I4)")
        starts_ms = server.reader.starts_ms.tolist()
        if self._was_out and self._was_out > max(starts_ms, default=0):
            raise Violation(
                f"a message of {self._was_out} was out at a kill, and starts are {starts_ms} (I4)"
            )

    def lost_power(self) -> None:
        """The engine may have lost what nobody was told about."""
        self._tentative.clear()

    def _check_files(self, server: SimulatedServer) -> None:
        # This node may have deleted what another one still has.
        everything = {hour: list(rows) for hour, rows in self._filed.items()}
        try:
            super()._check_files(server)
        finally:
            self._filed = everything


class ZombieObserver(Observer):
    """What a process may still do when another one has taken over."""

    def __init__(self, ledger: ReplicaLedger, node: int) -> None:
        self._ledger = ledger
        self._node = node

    def committed(self, rows: bytes, payload: bytes) -> None:
        raise Violation(f"node {self._node} answers, and another one has taken over (I17)")

    def sent(self, subscription: Subscription, delivery: DueDelivery) -> None:
        raise Violation(
            f"node {self._node} sends row {delivery.entry.seq}, and another has taken over (I14)"
        )

    def settled(self, row: bytes) -> None:
        self._ledger.late(row)


class StandbyObserver(Observer):
    """A standby files, and nothing else that concerns anybody."""

    def __init__(self, ledger: ReplicaLedger) -> None:
        self._ledger = ledger

    def filing(self, batch: list[Records]) -> None:
        self._ledger.filing(batch)


class Turncoat(Observer):
    """Tells whom it is told to tell: the server keeps its observer for good."""

    def __init__(self, target: Observer) -> None:
        self.target = target

    def committed(self, rows: bytes, payload: bytes) -> None:
        self.target.committed(rows, payload)

    def filing(self, batch: list[Records]) -> None:
        self.target.filing(batch)

    def fired(self, batches: list[FiredRows], now_ms: int) -> None:
        self.target.fired(batches, now_ms)

    def sent(self, subscription: Subscription, delivery: DueDelivery) -> None:
        self.target.sent(subscription, delivery)

    def left(self, subscription: Subscription, seqs: list[int], waiting: list[int]) -> None:
        self.target.left(subscription, seqs, waiting)

    def expired(self, deliveries: list[DueDelivery]) -> None:
        self.target.expired(deliveries)

    def settled(self, row: bytes) -> None:
        self.target.settled(row)

    def recorded(self, rows: list[bytes]) -> None:
        self.target.recorded(rows)

    def purging(self, hour: int, seqs: set[int], dispatch_bytes: int) -> None:
        self.target.purging(hour, seqs, dispatch_bytes)

    def damaged(self, error: DamageError) -> None:
        self.target.damaged(error)

    def leaving(self) -> None:
        self.target.leaving()

    def taking_over(self) -> None:
        self.target.taking_over()
