"""Single file: of the rows of a group that are due for one subscription, one leaves at a time.

A row does not say of which group its message is: that stands in its payload. So rows that may have
a group are read before they may leave, some in a turn of the event loop, in due order: those that
fall due together come subject by subject, and a group may have several. The first of a group goes
on and is its head; the others wait, as columns, until the head is settled. A retry of the head
comes back as the head, however long it takes. A row that cannot be read takes no turn: it is here
no more, and if it was that of a head, the others go on.

    note ──▶ unread ──▶ (read) ──▶ first of its group ──▶ goes on ──▶ settled: release, lose
                              └──▶ others: sorted columns ◀── the next one goes on ──┘
    expect ─▶ (read) ──▶ a retry that an earlier process has recorded: the head of its group

The next one is the earliest: by when its first attempt was due, or by when it was redriven, then by
the seq of its message. Columns are in parts, each sorted by group, that are joined while they are
short, as the slices of a `Lane`. Two groups whose names have the same 64 bits of BLAKE2b count as
one: they are delivered all the same.

Cost: a read of the payload, and 3 µs for each row; 56 bytes for one that waits, nothing while it
does; two entries of a dict for each group that has a head, three where that is retried; for the
next one, a binary search in each part. Nothing for rows without a group. Threads: belongs to the
event loop.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from delayserver.delivery.deliveries import Deliveries
from delayserver.delivery.lane import Lane, Room
from delayserver.records.message import ScheduleEntry
from delayserver.schedule.wheel_rows import WHEEL_DTYPE, FiredRows, priority_bits
from storage.frame import Rows
from storage.rows import HOUR_MS, concatenate, is_among, select

_WAITING_DTYPE = np.dtype(
    [
        ("group", "<u8"),
        ("order_ms", "<i8"),
        ("message_seq", "<u8"),
        ("hour", "<i8"),
        ("row", WHEEL_DTYPE),
    ]
)


def group_number(group: str) -> int:
    """64 bits that stand for the name of a group."""
    return int.from_bytes(blake2b(group.encode(), digest_size=8).digest(), "little")


@dataclass(slots=True, eq=False)
class _Part:
    """Rows that wait, sorted by group, then by whose turn it is."""

    rows: Rows
    groups: NDArray[np.uint64]
    """As in `rows`, one behind the other, to be searched."""
    seqs: NDArray[np.uint64]
    """The seqs of the schedule rows, likewise."""
    is_here: NDArray[np.bool_]
    left: int

    def first_of(self, group: int) -> int | None:
        """The index of the first row of a group."""
        start, end = (
            int(np.searchsorted(self.groups, np.uint64(group), side="left")),
            int(np.searchsorted(self.groups, np.uint64(group), side="right")),
        )
        if start == end:
            return None
        first = start + int(np.argmax(self.is_here[start:end]))
        return first if self.is_here[first] else None

    def remove(self, which: NDArray[np.intp]) -> Rows:
        """Take out rows (_WAITING_DTYPE). `which`: their indexes (shape n)."""
        self.is_here[which] = False
        self.left -= len(which)
        return select(self.rows, which)

    def waiting(self) -> Rows:
        """All rows that are here."""
        return self.rows if self.left == len(self.rows) else select(self.rows, self.is_here)


def _part(rows: Rows) -> _Part:
    rows = select(rows, np.lexsort((rows["message_seq"], rows["order_ms"], rows["group"])))
    groups, seqs = rows["group"].copy(), rows["row"]["seq"].copy()
    return _Part(rows, groups, seqs, np.ones(len(rows), bool), len(rows))


class SingleFile:
    """The groups of one queue."""

    __slots__ = (
        "_expected",
        "_groups",
        "_heads",
        "_held",
        "_noted",
        "_parts",
        "_reading",
        "_rows",
        "_unread",
        "is_reading",
    )

    def __init__(self) -> None:
        self._noted = Lane()
        """Rows that came since the last read, in the order in which they did."""
        self._unread = Lane()
        """Those that came before, in due order."""
        self._expected = Lane()
        """Copies of rows that wait in the wheel."""
        self._reading = Lane()
        self._heads: dict[int, int] = {}
        """By group, the seq of the message whose turn it is."""
        self._groups: dict[int, int] = {}
        """The other way round."""
        self._rows: dict[int, int] = {}
        """By the seq of such a message, that of its row, where it is another one."""
        self._held: list[tuple[int, int, int]] = []
        """Other retries that an earlier process has recorded: group, message and row. The process
        had learned that the first one was delivered, and then lost its power."""
        self._parts: list[_Part] = []
        self.is_reading = False
        """Rows are being read, or are about to be."""

    @property
    def are_unread(self) -> bool:
        """Whether there are rows whose group is unknown."""
        return self._noted.count + self._unread.count > 0

    @property
    def count(self) -> int:
        """How many rows wait for their turn, or to be read."""
        behind = sum(part.left for part in self._parts)
        return behind + sum(lane.count for lane in self._lanes())

    def _lanes(self) -> tuple[Lane, ...]:
        """The rows whose group is unknown, those that came first in front."""
        return self._reading, self._unread, self._noted

    def note(self, fired: FiredRows) -> None:
        """Rows are due that may have a group."""
        self._noted.push(fired)

    def expect(self, fired: FiredRows) -> None:
        """Rows wait in the wheel that may be retries of heads: read before all others."""
        self._expected.push(fired)

    def next_expected(self, room: Room) -> list[FiredRows]:
        """Some of these, to be read next."""
        return self._expected.pop(room)

    def next_unread(self, room: Room) -> list[FiredRows]:
        """Rows that are due and to be read next. They are here still."""
        if self._noted.count:
            noted, self._noted = self._noted, Lane()
            for fired in _in_due_order(noted):
                self._unread.push(fired)
        slices = self._unread.pop(room)
        for fired in slices:
            self._reading.push(fired)
        return slices

    # ── whose turn it is ───────────────────────────────────────────────────────────────────────

    def on_read(self, deliveries: Deliveries) -> tuple[list[FiredRows], list[int]]:
        """The rows of `next_unread` were read. Returns rows that may leave now, in the order in
        which they shall leave, and the seqs of those that could not be read: they are here no
        more."""
        reading, self._reading = self._reading, Lane()
        taken = reading.take(deliveries.settled["seq"])
        here = {seq for fired in taken for seq in fired.rows["seq"].tolist()}
        lost = [seq for fired in reading.slices for seq in fired.rows["seq"].tolist()]
        order = np.lexsort((deliveries.settled["message_seq"], orders_ms(deliveries)))
        going: list[int] = []
        waiting: list[int] = []
        groups = [
            None if payload.options is None else payload.options.group
            for payload in deliveries.payloads
        ]
        numbers = [0 if group is None else group_number(group) for group in groups]
        message_seqs = deliveries.settled["message_seq"].tolist()
        seqs = deliveries.settled["seq"].tolist()
        for index in order.tolist():
            if seqs[index] not in here:
                continue  # It was taken out meanwhile.
            if groups[index] is None or self._is_turn(
                numbers[index], message_seqs[index], seqs[index]
            ):
                going.append(index)
            else:
                waiting.append(index)
        for index in going + waiting:
            options = deliveries.payloads[index].options
            if options is not None and options.priority:
                deliveries.rows["route"][index] |= priority_bits(options.priority)
        if waiting:
            self._wait(deliveries, np.array(waiting, np.intp), numbers)
        leaving = deliveries.slices(np.array(going, np.intp)) if going else []
        return leaving, lost

    def _is_turn(self, group: int, message_seq: int, seq: int) -> bool:
        head = self._heads.setdefault(group, message_seq)
        if head != message_seq:
            return False
        self._groups[message_seq] = group
        self.follow(message_seq, seq)
        return True

    def hold(self, group: str, message_seq: int, seq: int) -> None:
        """A retry of this message waits, as row `seq`: it is the head of its group, or behind
        another one."""
        number = group_number(group)
        if not self._is_turn(number, message_seq, seq):
            self._held.append((number, message_seq, seq))

    def follow(self, message_seq: int, seq: int) -> None:
        """A message waits as row `seq` from now on; of interest if it is a head."""
        if message_seq in self._groups and seq != message_seq:
            self._rows[message_seq] = seq

    def lose(self, seqs: Iterable[int]) -> list[FiredRows]:
        """Rows cannot be read; those that were of heads make way: as `release`."""
        lost = set(seqs)
        heads = [message_seq for message_seq, seq in self._rows.items() if seq in lost]
        heads += [seq for seq in lost if seq in self._groups and seq not in self._rows]
        return self.release([*heads, *(held[1] for held in self._held if held[2] in lost)])

    def release(self, message_seqs: Iterable[int]) -> list[FiredRows]:
        """Messages are settled; those that were heads make way: returns the rows that are next."""
        leaving: list[Rows] = []
        if self._held:
            message_seqs = list(message_seqs)
            self._held = [held for held in self._held if held[1] not in message_seqs]
        for message_seq in message_seqs:
            group = self._groups.pop(message_seq, None)
            if group is None:
                continue
            del self._heads[group]
            self._rows.pop(message_seq, None)
            found = self._next_held(group) if self._held else None
            if found is None and group not in self._heads:
                found = self._next(group)
            if found is not None:
                self._is_turn(group, int(found["message_seq"][0]), int(found["row"]["seq"][0]))
                leaving.append(found)
        if not leaving:
            return []
        return list(_slices(concatenate(leaving, _WAITING_DTYPE)))

    def _next_held(self, group: int) -> Rows | None:
        """Another retry is the head of a group, if there is one; take out its row, if that is here
        (_WAITING_DTYPE, shape 1)."""
        for held in self._held:
            if held[0] == group:
                self._held.remove(held)
                self._is_turn(*held)
                for part in self._parts:
                    which = np.flatnonzero(part.is_here & (part.seqs == held[2]))
                    if len(which):
                        found = part.remove(which)
                        self._drop_empty(part)
                        return found
                break
        return None

    def _next(self, group: int) -> Rows | None:
        """Take out the next row of a group (_WAITING_DTYPE, shape 1)."""
        best: tuple[int, int] | None = None
        at: tuple[_Part, int] | None = None
        for part in self._parts:
            index = part.first_of(group)
            if index is None:
                continue
            row = part.rows[index]
            turn = int(row["order_ms"]), int(row["message_seq"])
            if best is None or turn < best:
                best, at = turn, (part, index)
        if at is None:
            return None
        part, index = at
        found = part.remove(np.array([index], np.intp))
        self._drop_empty(part)
        return found

    def _wait(self, deliveries: Deliveries, which: NDArray[np.intp], numbers: list[int]) -> None:
        rows = np.zeros(len(which), _WAITING_DTYPE)
        rows["group"] = np.array(numbers, np.uint64)[which]
        rows["order_ms"] = orders_ms(deliveries)[which]
        rows["message_seq"] = deliveries.settled["message_seq"][which]
        at = 0
        # In the order of `which`, since the slices are.
        for fired in deliveries.slices(which):
            end = at + len(fired.rows)
            rows["hour"][at:end] = fired.hour
            rows["row"][at:end] = fired.rows
            at = end
        while self._parts and self._parts[-1].left < 2 * len(rows):
            rows = concatenate([self._parts.pop().waiting(), rows], _WAITING_DTYPE)
        self._parts.append(_part(rows))

    def _drop_empty(self, part: _Part) -> None:
        if not part.left:
            self._parts.remove(part)
        elif part.left < len(part.rows) // 2:
            self._parts[self._parts.index(part)] = _part(part.waiting())

    # ── all rows ───────────────────────────────────────────────────────────────────────────────

    def slices(self) -> Iterator[FiredRows]:
        """All rows that are here."""
        for part in self._parts:
            yield from _slices(part.waiting())
        for lane in self._lanes():
            yield from lane.slices

    def holds(self, entry: ScheduleEntry) -> bool:
        """Whether the row is here."""
        return any(lane.holds(entry) for lane in self._lanes()) or any(
            (part.is_here & (part.seqs == entry.seq)).any() for part in self._parts
        )

    def first_ms(self) -> int | None:
        """When the first row that is here fell due, also one behind the head of its group. O(n) for
        those, as columns."""
        firsts = [lane.first_ms() for lane in self._lanes()]
        for part in self._parts:
            waiting = part.waiting()
            if len(waiting):
                dues_ms = waiting["hour"] * HOUR_MS + waiting["row"]["due_offset_ms"]
                firsts.append(int(dues_ms.min()))
        return min((first for first in firsts if first is not None), default=None)

    def take(self, seqs: NDArray[np.uint64]) -> list[FiredRows]:
        """Take out the rows that have these seqs, wherever they stand; those that are here."""
        taken = [fired for lane in self._lanes() for fired in lane.take(seqs)]
        for part in list(self._parts):
            which = np.flatnonzero(is_among(part.seqs, seqs) & part.is_here)
            if len(which):
                taken += _slices(part.remove(which))
                self._drop_empty(part)
        return taken


def orders_ms(deliveries: Deliveries) -> NDArray[np.int64]:
    """The order in which deliveries of a group take their turns: when the first attempt was due, or
    a client asked for another (shape n)."""
    asked = [
        0 if payload.options is None else payload.options.since_ms
        for payload in deliveries.payloads
    ]
    firsts = zip(asked, deliveries.first_due_ms, strict=True)
    return np.array([since_ms or first_ms for since_ms, first_ms in firsts], np.int64)


def _slices(waiting: Rows) -> Iterator[FiredRows]:
    """Rows that wait (_WAITING_DTYPE) by hour, each in due order."""
    for hour in np.unique(waiting["hour"]).tolist():
        rows = waiting["row"][waiting["hour"] == hour]
        yield _by_due(hour, np.ascontiguousarray(rows))


def _in_due_order(lane: Lane) -> Iterator[FiredRows]:
    """All rows of a lane, by hour."""
    by_hour: dict[int, list[Rows]] = {}
    for fired in lane.slices:
        by_hour.setdefault(fired.hour, []).append(fired.rows)
    for hour in sorted(by_hour):
        yield _by_due(hour, concatenate(by_hour[hour], WHEEL_DTYPE))


def _by_due(hour: int, rows: Rows) -> FiredRows:
    return FiredRows(hour, select(rows, np.lexsort((rows["seq"], rows["due_offset_ms"]))))
