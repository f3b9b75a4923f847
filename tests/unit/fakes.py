"""What the tests of the core share: ports that only take notes, and parts on a disk in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from delayserver.config import Settings
from delayserver.decisions.cancels import Cancels
from delayserver.decisions.group import Group
from delayserver.decisions.groups import Groups
from delayserver.decisions.messages import Messages
from delayserver.decisions.new_messages import NewMessage
from delayserver.decisions.publishing import Publishing
from delayserver.decisions.sequencer import Sequencer
from delayserver.decisions.watches import Watches
from delayserver.decisions.whereabouts import Whereabouts
from delayserver.delivery.delayed_fetch import PullRequest
from delayserver.delivery.deliveries import Deliveries
from delayserver.delivery.dispatcher import Dispatcher, Waiting
from delayserver.delivery.handout import Handout
from delayserver.delivery.reader import Reader
from delayserver.delivery.settler import DISPATCH_ROW, Settler
from delayserver.parts.installed import PARTS
from delayserver.records.attempts import History
from delayserver.records.definitions import definitions_among
from delayserver.records.ids import IdCodec, KeyHasher
from delayserver.records.message import (
    DueDelivery,
    Origin,
    Payload,
    ScheduleEntry,
    encode_payload,
    row_flags,
)
from delayserver.records.subscriptions import Registry, Subscription
from delayserver.records.tables import DEFINITIONS_KEY, number_key, pack_definitions_place
from delayserver.recovery.recover import Recovered, recover
from delayserver.schedule.committed import Records
from delayserver.schedule.expansion import Staging
from delayserver.schedule.hours import Hours
from delayserver.schedule.loader import LOAD_SIZES, LoadedHour, Loader, LoadSizes
from delayserver.schedule.replay import Filed, Replay, Snapshot
from delayserver.schedule.wheel import Wheel
from delayserver.schedule.wheel_rows import (
    LOCATOR_LENGTH_BITS,
    PAYLOAD_MAX_BYTES,
    WHEEL_DTYPE,
    FiredRows,
)
from delayserver.slices import Slices, Work
from delayserver.timers.timeouts import Timeouts
from storage.catalog import Table
from storage.definitions_log import DefinitionsLog
from storage.directory import open_identity
from storage.errors import DamageError
from storage.files import Files
from storage.frame import Rows
from storage.hour_log import HourLog
from storage.message_log import Durability, MessageLog
from storage.notes import Note, NoteBytes, pack_notes, unpack_notes
from storage.rows import (
    HOUR_MS,
    MESSAGE_DTYPE,
    NO_KEY,
    LogKind,
    Outcome,
    RecordKind,
    concatenate,
)
from tests.world.publishes import publish_all
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.faults import FaultyFiles
from tests.world.storage.files import SimulatedFiles

HOUR = 500_000
"""The hour that most tests play in."""
START_MS = HOUR * HOUR_MS
MINUTE_MS = 60_000
STAMP = 0x5EED
SECRET = bytes(range(16))
SUBJECT = "order.unpaid"
SEGMENT_BYTES = 64 * 1024
SLOT_MS = 500


def wheel_rows(hour: int, *rows: tuple[int, int], route: int = 1, locator: int = 0) -> Rows:
    """Rows of the wheel from pairs of seq and due time."""
    return np.array(
        [(seq, locator, due_ms - hour * HOUR_MS, route) for seq, due_ms in rows], WHEEL_DTYPE
    )


def seqs(batches: Iterable[FiredRows]) -> list[int]:
    """The seqs of all rows, in order."""
    return [seq for batch in batches for seq in batch.rows["seq"].tolist()]


def message(
    due_ms: int, *, key: str | None = None, body: bytes = b"{}", subject: str = SUBJECT
) -> NewMessage:
    return NewMessage(subject, due_ms, Payload(body, key=key))


def subscription(number: int = 1, **more: Any) -> Subscription:
    values: dict[str, Any] = {
        "id": number,
        "name": f"s{number}",
        "subject": SUBJECT,
        "type": "pull",
        "created_ms": 0,
    }
    return Subscription(**{**values, **more})


def delivery(
    seq: int, due_ms: int = START_MS, *, subscription_id: int = 1, attempt: int = 1, **origin: Any
) -> DueDelivery:
    values: dict[str, Any] = {
        "message_seq": seq,
        "published_due_ms": due_ms,
        "subject_id": 1,
        "due_ms": due_ms,
        "attempt": attempt,
    }
    return DueDelivery(
        entry=ScheduleEntry(seq, due_ms),
        origin=Origin(**{**values, **origin}),
        subject=SUBJECT,
        message_id=f"m{seq}",
        subscription_id=subscription_id,
        attempt=attempt,
        payload=Payload(b"{}"),
        row=wheel_rows(due_ms // HOUR_MS, (seq, due_ms)),
    )


def deliveries(*ones: DueDelivery) -> Deliveries:
    """The same as columns."""
    payloads = [msgspec.structs.replace(one.payload, origin=one.origin) for one in ones]
    rows = concatenate([one.row for one in ones], WHEEL_DTYPE)
    due_ms = np.array([one.entry.due_ms for one in ones], np.int64)
    names = {one.origin.subject_id: one.subject for one in ones}
    subscription_id = ones[0].subscription_id if ones else 1
    made = Deliveries(subscription_id, rows, due_ms, payloads, names, IdCodec(0, SECRET))
    made.settled["attempt"] = [one.attempt for one in ones]
    return made


def dispatch_row(
    seq: int, *, subscription_id: int = 1, due_ms: int = START_MS, settled_ms: int = START_MS
) -> bytes:
    """A delivery; without a subscription (0) what one that is gone left behind."""
    outcome = Outcome.DELIVERED if subscription_id else Outcome.DROPPED
    return DISPATCH_ROW.pack(seq, seq, due_ms, settled_ms, subscription_id, 1, outcome, 0)


def place_of(locator: int) -> tuple[int, int]:
    """Where in the hour's file a payload is, and how long."""
    return locator >> LOCATOR_LENGTH_BITS, locator & PAYLOAD_MAX_BYTES


T = TypeVar("T")


def steps_of(work: Work[T]) -> tuple[list[int], T]:
    """The items of each step of a work, and its result."""
    steps: list[int] = []
    try:
        while True:
            steps.append(next(work))
    except StopIteration as end:
        return steps, end.value


def counted(dispatcher: Dispatcher) -> Waiting:
    """How much its queues hold."""
    return steps_of(dispatcher.waiting())[1]


class NotingPorts:
    """Ports that do nothing but remember what they were asked for, in order."""

    def __init__(self) -> None:
        self.wakes = 0
        self.committing: list[Group] = []
        self.filing: list[Group] = []
        self.handouts: list[Handout] = []
        self.sent: list[tuple[str, DueDelivery]] = []
        self.posts: list[list[DueDelivery]] = []
        self.begin: Callable[[Subscription, list[DueDelivery], int], object] | None = None
        """Called with deliveries that are sent: their first byte leaves at once."""
        self.dropped: list[tuple[DueDelivery, str]] = []
        self.orphans: list[tuple[DueDelivery, int]] = []
        self.ticks = 0
        self.turns: list[Callable[[], None]] = []
        self.handed_out: list[tuple[PullRequest, Deliveries]] = []
        self.settled: list[tuple[int, bytes]] = []
        self.notes: list[Note] = []
        self.recorded: list[tuple[int, bytes, int]] = []

    def wake(self) -> None:
        self.wakes += 1

    def is_quick(self) -> bool:
        return False

    def commit(self, group: Group, *, at_once: bool) -> None:
        self.committing.append(group)

    def file(self, group: Group) -> None:
        self.filing.append(group)

    def read(self, handout: Handout) -> None:
        self.handouts.append(handout)

    def send(self, subscription: Subscription, deliveries: list[DueDelivery]) -> None:
        self.posts.append(deliveries)
        if self.begin is not None:
            self.begin(subscription, deliveries, START_MS)
        self.sent += [(subscription.name, delivery) for delivery in deliveries]

    def on_outdated(self, deliveries: Deliveries, reason: str, now_ms: int) -> None:
        self.dropped += [(delivery, reason) for delivery in deliveries]

    def on_expired(self, deliveries: Deliveries, which: NDArray[np.intp], now_ms: int) -> None:
        self.dropped += [(deliveries[index], "expired") for index in which.tolist()]

    def on_orphaned(self, delivery: DueDelivery, left_by: int, now_ms: int) -> None:
        self.orphans.append((delivery, left_by))

    def call_soon(self, function: Callable[[], None]) -> None:
        self.turns.append(function)

    def tick_soon(self) -> None:
        self.ticks += 1

    def hand_out(
        self, subscription: Subscription, request: PullRequest, deliveries: Deliveries
    ) -> None:
        self.handed_out.append((request, deliveries))

    def settle(self, hour: int, rows: bytes, note: NoteBytes | None) -> None:
        if note is not None:
            self.notes += unpack_notes(pack_notes([note]))
        size = DISPATCH_ROW.size
        self.settled += [(hour, rows[at : at + size]) for at in range(0, len(rows), size)]

    def settle_recorded(self, hour: int, rows: bytes, offset: int) -> None:
        self.recorded.append((hour, rows, offset))


class Stopwatch:
    """Shows what it is told."""

    def __init__(self, shows_ms: int = 0) -> None:
        self.shows_ms = shows_ms
        self.step_ms = 0
        """How far it goes on with each look."""

    def __call__(self) -> int:
        self.shows_ms += self.step_ms
        return self.shows_ms


class MessageParts:
    """`Messages` with its real neighbours, on ports that take notes. Nothing is filed."""

    def __init__(self, *subscriptions: Subscription, now_ms: int = START_MS, **settings: Any):
        self.settings = Settings(**settings)
        self.catalog = MemoryCatalog()
        self.ports = NotingPorts()
        self.sequencer = Sequencer(self.catalog, next_seq=1, subjects={})
        self.groups = Groups(self.settings, self.sequencer, self.ports)
        self.hours = Hours(live_through_hour=now_ms // HOUR_MS)
        self.wheel = Wheel(now_ms)
        self.registry = Registry(subscriptions)
        self.slices = Slices(self.ports.call_soon)
        self.outcomes: Any = None
        """Nothing is given up, unless a subclass has some."""
        self.dispatcher = Dispatcher(
            self.registry,
            self.sequencer.subject_names,
            self.hours,
            self.ports,
            Timeouts(Stopwatch(now_ms)),
            self.slices,
            lambda: self.outcomes,
        )
        self.ids = IdCodec(0, SECRET)
        hasher = KeyHasher(SECRET)
        self.forgotten: list[bytes] = []
        """Keys of the table WATCHES that a checkpoint is to remove."""
        self.watches = Watches(self.catalog, self.forgotten.extend)
        self.messages = Messages(
            self.settings,
            self.sequencer,
            self.groups,
            self.wheel,
            self.hours,
            Whereabouts(self.settings, self.catalog, self.groups, self.wheel, self.hours),
            self.dispatcher,
            self.registry,
            self.ids,
            hasher,
            now_ms=now_ms,
        )
        self.publishing = Publishing(
            self.settings,
            self.sequencer,
            self.groups,
            self.messages,
            self.watches,
            self.ids,
            hasher,
        )
        self.cancels = Cancels(
            self.sequencer, self.groups, self.wheel, self.hours, self.messages, self.ids, hasher
        )

    def publish(self, *messages: NewMessage, now_ms: int = START_MS) -> list[int]:
        """Publish; returns the seqs."""
        published = publish_all(self.publishing, messages, now_ms)
        return [self.ids.decode(one.message_id).seq for one in published]

    def commit(self) -> Group:
        """Let the open group become durable, with what the engine does then."""
        self.groups.flush(START_MS)
        group = self.groups.on_committed()
        for seq, due_ms, route in group.express:
            if self.sequencer.removed.get(seq) is None:
                self.insert(seq, due_ms, route=route)
        for effect in group.effects:
            effect()
        self.groups.flush(START_MS)
        group.tell_waiters(None)
        return group

    def file(self) -> None:
        """Let everything that is durable be filed, and what is not express go to the wheel."""
        for group in self.ports.filing:
            express = {row[0] for row in group.express}
            for row in Records.from_bytes(*group.encode(), frozenset()).rows:
                seq, due_ms = int(row["seq"]), int(row["due_ms"])
                schedules = row["kind"] in (RecordKind.PUBLISH, RecordKind.MOVE)
                hour = due_ms // HOUR_MS
                removed = self.sequencer.removed.get(seq) is not None
                if schedules and not removed and seq not in express and self.hours.is_live(hour):
                    self.insert(seq, due_ms)
        self.ports.filing.clear()
        self.groups.on_filed(self.groups.durable_seq)

    def insert(self, seq: int, due_ms: int, *, route: int = 1) -> None:
        hour = due_ms // HOUR_MS
        self.wheel.insert(hour, wheel_rows(hour, (seq, due_ms), route=route))
        self.hours.add(hour, 1)

    def trace(self) -> tuple[object, ...]:
        """Everything that a refused command must leave as it was."""
        group = self.sequencer.group
        return (
            self.sequencer.next_seq,
            dict(self.sequencer.subjects),
            list(group.rows),
            list(group.payloads),
            list(group.express),
            len(group.undo),
            len(self.sequencer.removed),
            self.publishing.accepted_total,
            self.hours.unsettled(),
        )


def rows_in(loaded: LoadedHour) -> Rows:
    """All rows of an hour, by slot."""
    return loaded.rows(np.arange(loaded.count))


class Disk:
    """The parts that read and write files, on one disk and one catalog."""

    def __init__(
        self,
        files: Files | None = None,
        catalog: MemoryCatalog | None = None,
        *,
        slot_ms: int = 500,
        load_sizes: LoadSizes = LOAD_SIZES,
        is_carried_over: bool = False,
        archive: bool = False,
    ) -> None:
        self.files: Files = SimulatedFiles() if files is None else files
        self.catalog = MemoryCatalog() if catalog is None else catalog
        self._become_a_directory()
        self.message_log = MessageLog(
            self.files, stamp=STAMP, segment_bytes=SEGMENT_BYTES, durability=Durability.FSYNC
        )
        self.schedule = HourLog(self.files, LogKind.SCHEDULE, stamp=STAMP)
        self.dispatch = HourLog(self.files, LogKind.DISPATCH, stamp=STAMP)
        self.replay = Replay(
            self.catalog,
            self.schedule,
            HourLog(self.files, LogKind.DISPATCH, stamp=STAMP),
            self.message_log,
            Staging(self.files, STAMP),
            DefinitionsLog(self.files, stamp=STAMP),
            PARTS,
            keepers=[partial(part.keep, Settings(archive=archive)) for part in PARTS if part.keep],
        )
        self.replay.resume_definitions(from_catalog=is_carried_over)
        self.settler = Settler(self.dispatch)
        self.loader = Loader(
            HourLog(self.files, LogKind.SCHEDULE, stamp=STAMP),
            HourLog(self.files, LogKind.DISPATCH, stamp=STAMP),
            slot_ms=slot_ms,
            sizes=load_sizes,
        )
        self.names: dict[int, str] = {1: SUBJECT}
        self.damage: list[DamageError] = []
        self.reader = Reader(
            HourLog(self.files, LogKind.SCHEDULE, stamp=STAMP),
            HourLog(self.files, LogKind.DISPATCH, stamp=STAMP),
            IdCodec(0, SECRET),
            self.names,
            {SUBJECT: 1},
            self.damage.append,
        )

    def _become_a_directory(self) -> None:
        """With a format and a subject of its rows, so that it can be checked after the test."""
        files, catalog = self.files, self.catalog
        while isinstance(files, FaultyFiles):
            files = files._inner  # whose calls a test counts
        open_identity(files, random_bytes=lambda length: STAMP.to_bytes(length, "big"))
        if any(True for _ in catalog.scan(Table.SUBJECTS)):
            return
        # Not the method of a subclass, which may be about to fail.
        writes = {Table.SUBJECTS: [(number_key(1), SUBJECT.encode())]}
        definitions = DefinitionsLog(files, stamp=STAMP)
        place = definitions.record(definitions_among(writes), 0)
        definitions.close()
        writes[Table.META] = [(DEFINITIONS_KEY, pack_definitions_place(place))]
        MemoryCatalog.commit(catalog, writes)

    def log(self, group: Group) -> None:
        """What the committer does with a group."""
        rows, payload = group.encode()
        self.message_log.append(
            rows,
            payload,
            first_seq=group.first_seq,
            last_seq=group.last_seq,
            created_ms=group.created_ms,
        )

    def file(self, *groups: Group, now_ms: int = START_MS) -> Filed:
        return self.replay.file([records(group) for group in groups], now_ms)

    def load(self, snapshot: Snapshot, *subscriptions: Subscription) -> LoadedHour:
        return self.loader.load(snapshot, Registry(subscriptions), self.names)

    def settle(self, hour: int, *rows: bytes) -> None:
        self.settler.write({hour: list(rows)}, START_MS)
        self.settler.sync()

    def recover(
        self,
        now_ms: int = START_MS,
        lead_ms: int = 10 * MINUTE_MS,
        *,
        is_carried_over: bool = False,
    ) -> Recovered:
        return recover(
            self.catalog,
            self.message_log,
            self.replay,
            self.settler,
            self.loader,
            now_ms=now_ms,
            lead_ms=lead_ms,
            is_carried_over=is_carried_over,
        )


class Log:
    """Makes groups of records, in seq order, as the server would."""

    def __init__(self, next_seq: int = 1, subjects: Sequence[str] = (SUBJECT,)) -> None:
        numbers = {name: number for number, name in enumerate(subjects, 1)}
        self.sequencer = Sequencer(MemoryCatalog(), next_seq=next_seq, subjects=numbers)

    def publish(
        self, due_ms: int, *, body: bytes = b"{}", express: bool = False, **more: Any
    ) -> int:
        sealed = encode_payload(Payload(body))
        seq = self.sequencer.append(
            RecordKind.PUBLISH, due_ms=due_ms, subject_id=1, payload=sealed, **more
        )
        if express:
            self.sequencer.group.express.append((seq, due_ms, 1))
        return seq

    def cancel(self, target_seq: int, target_due_ms: int, message_seq: int = 0) -> int:
        return self.sequencer.append(
            RecordKind.CANCEL,
            message_seq=message_seq or target_seq,
            target_seq=target_seq,
            target_due_ms=target_due_ms,
        )

    def move(
        self, target_seq: int, target_due_ms: int, due_ms: int, *, key_hash: bytes = NO_KEY
    ) -> int:
        origin = Origin(target_seq, target_due_ms, 1, due_ms)
        return self.sequencer.append(
            RecordKind.MOVE,
            due_ms=due_ms,
            message_seq=target_seq,
            target_seq=target_seq,
            target_due_ms=target_due_ms,
            key_hash=key_hash,
            subject_id=1,
            payload=encode_payload(Payload(b"{}", origin=origin)),
        )

    def retry(
        self, target_seq: int, target_due_ms: int, due_ms: int, *, subscription_id: int = 1
    ) -> int:
        origin = Origin(target_seq, target_due_ms, 1, target_due_ms, attempt=2)
        return self.sequencer.append(
            RecordKind.RETRY,
            due_ms=due_ms,
            message_seq=target_seq,
            target_seq=target_seq,
            target_due_ms=target_due_ms,
            subject_id=1,
            subscription_id=subscription_id,
            attempt=2,
            payload=encode_payload(Payload(b"{}", origin=origin)),
        )

    def replay(
        self, message_seq: int, settled_ms: int, due_ms: int, *, key_hash: bytes = NO_KEY
    ) -> int:
        origin = Origin(message_seq, settled_ms, 1, settled_ms)
        payload = Payload(b"{}", origin=origin, history=History(is_replay=True))
        return self.sequencer.append(
            RecordKind.REPLAY,
            due_ms=due_ms,
            message_seq=message_seq,
            target_seq=message_seq,
            target_due_ms=settled_ms,
            key_hash=key_hash,
            subject_id=1,
            subscription_id=1,
            attempt=1,
            payload=encode_payload(payload),
            flags=row_flags(payload),
        )

    def close(self) -> Group:
        return self.sequencer.close_group(START_MS)


def records(group: Group) -> Records:
    """A group as the replay thread files it."""
    return Records.from_bytes(*group.encode(), frozenset(row[0] for row in group.express))


def rows_of(group: Group) -> Rows:
    """The records of a group (MESSAGE_DTYPE)."""
    return np.frombuffer(group.encode()[0], MESSAGE_DTYPE)


def always(deliveries: Sequence[DueDelivery]) -> bool:
    """Deliveries may begin."""
    return True
