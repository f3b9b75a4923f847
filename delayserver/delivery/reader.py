"""The reader: bodies of rows that go out, and the rows of messages that a client looks up.

Rows of one hour are read in the order of their place in the file, and neighbours in one call. A
body is checked against its own checksum; one that does not match is named and left out, and the
rest is delivered (I8).

There are two readers of bodies. The event loop's takes bodies that the system has in memory. These
are nearly all bodies that are due on time: they were written or loaded a while ago. The reader
thread's reads the bodies that it has to wait for. Either way it is the event loop that checks and
decodes, all rows of a handout at once: two threads that compute only wait for each other's GIL.

Cost: 0.5 µs per message from the page cache, and some 30 µs per handout.
Threads: each belongs to one, with log instances of its own; `open` and `decode` to any.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from delayserver.delivery.deliveries import NO_STARTS, Deliveries
from delayserver.delivery.handout import Handout
from delayserver.records.ids import IdCodec
from delayserver.records.message import Payload, ScheduleEntry, decode_payload, decode_payloads
from delayserver.records.subscriptions import Registry
from delayserver.schedule.pending import Page, Wanted, pending_rows
from delayserver.schedule.replay import Snapshot
from delayserver.schedule.wheel_rows import (
    LOCATOR_LENGTH_BITS,
    PAYLOAD_MAX_BYTES,
    ROUTE_SUBSCRIPTION,
    WHEEL_DTYPE,
    FiredRows,
)
from storage.buckets import is_day, places_of
from storage.errors import DamageError, UnreadableError
from storage.frame import HEADER_BYTES, Rows, crc32c
from storage.frame_runs import FrameRun
from storage.hour_log import HourLog
from storage.notes import Note, note_of, unpack_notes
from storage.rows import DISPATCH_DTYPE, concatenate, select

_SPAN_BYTES_MAX = 1 << 20
_GAP_BYTES_MAX = 4096
_NOW_BYTES_MAX = 1 << 20
"""More than that is copied by the reader thread, so that the event loop is not held up."""


class FoundRow(NamedTuple):
    """A schedule row with its payload."""

    payload: Payload
    subject_id: int
    subscription_id: int


class EndedRow(NamedTuple):
    """A row of the dispatch log, and its note."""

    row: np.void
    note: Note | None


class FetchedBodies(NamedTuple):
    """The sealed payloads of a handout, in the order of its rows; None: it could not be read."""

    sealed: list[bytes | None]
    subject_ids: dict[int, int]
    """By index, where neither payload nor route gives the subject."""


_Read = Callable[[int, int, int], bytes | None]
"""Hour, offset, length → bytes of an hour's file."""


class Reader:
    """Reads from the hours' files."""

    def __init__(
        self,
        schedule: HourLog,
        dispatch: HourLog,
        ids: IdCodec,
        subject_names: dict[int, str],
        subject_ids: Mapping[str, int],
        on_damage: Callable[[DamageError], None],
    ) -> None:
        self._schedule = schedule
        self._dispatch = dispatch
        self._ids = ids
        self._subject_names = subject_names
        self._subject_ids = subject_ids
        self._on_damage = on_damage
        self.starts_ms = NO_STARTS
        """When a process began after a kill (ascending)."""

    def deliveries(self, handout: Handout, unfiled: Mapping[int, bytes]) -> Deliveries:
        """The rows as deliveries, in order; waits for the disk. `unfiled` as for `fetch`."""
        return self.open(handout, self.fetch(handout, unfiled))

    def fetch(self, handout: Handout, unfiled: Mapping[int, bytes]) -> FetchedBodies:
        """Read the payloads of a handout; waits for the disk. Missing ones are named.

        `unfiled`: payloads that are in memory, by seq."""
        found: list[bytes | None] = []
        subject_ids: dict[int, int] = {}
        for fired in handout.slices:
            first = len(found)
            found += self._payloads(fired, unfiled)
            # A delivery that is one of several left open by a restart does not say its subject; for
            # a direct one, the route of the message does.
            of_one = fired.rows["route"] & ROUTE_SUBSCRIPTION
            for index in np.flatnonzero(of_one).tolist():
                sealed, seq = found[first + index], int(fired.rows["seq"][index])
                try:
                    if sealed is None:
                        continue
                    payload = self._decode(fired, index, sealed)
                    if payload.origin is None:
                        known = payload.to and self._subject_ids.get(payload.to.subject)
                        subject_ids[first + index] = known or self._subject_id(fired.hour, seq)
                except DamageError as error:
                    self._on_damage(error)
                    found[first + index] = None
        return FetchedBodies(found, subject_ids)

    def fetch_now(self, handout: Handout, unfiled: Mapping[int, bytes]) -> FetchedBodies | None:
        """Read the payloads of a handout from memory; None if that has not all of them, or if they
        are much. Never waits."""
        found: list[bytes | None] = []
        total_bytes = 0
        for fired in handout.slices:
            if int(fired.rows["route"].max()) & ROUTE_SUBSCRIPTION:
                return None
            locators, seqs = fired.rows["locator"].tolist(), fired.rows["seq"].tolist()
            payloads = _of_unfiled(locators, seqs, unfiled)
            total_bytes += sum([at & PAYLOAD_MAX_BYTES for at in locators if _is_filed(at)])
            if total_bytes > _NOW_BYTES_MAX:
                return None
            if not self._read_spans(fired.hour, locators, payloads, self._schedule.read_now):
                return None
            if None in payloads:
                return None
            found += payloads
        return FetchedBodies(found, {})

    def open(self, handout: Handout, fetched: FetchedBodies) -> Deliveries:
        """The rows as deliveries, in order; a payload that does not match its checksum is named
        and left out. Does not look at the disk."""
        rows, due_ms = _joined(handout.slices)
        subject_ids = fetched.subject_ids
        payloads = None
        if None not in fetched.sealed:
            payloads = decode_payloads(fetched.sealed)  # type: ignore[arg-type]
        if payloads is None:
            intact, payloads = self._decode_each(handout, fetched.sealed)
            places = {index: place for place, index in enumerate(intact)}
            subject_ids = {places[i]: s for i, s in subject_ids.items() if i in places}
            rows, due_ms = select(rows, np.array(intact, np.intp)), due_ms[intact]
        names, subscription_id = self._subject_names, handout.subscription_id
        deliveries = Deliveries(
            subscription_id, rows, due_ms, payloads, names, self._ids, self.starts_ms
        )
        for index, subject_id in subject_ids.items():
            deliveries.subject_ids[index] = subject_id
        if handout.attempts:
            for index, seq in enumerate(rows["seq"].tolist()):
                if seq in handout.attempts:
                    deliveries.settled["attempt"][index] = handout.attempts[seq]
        return deliveries

    def _decode_each(
        self, handout: Handout, sealed: Sequence[bytes | None]
    ) -> tuple[list[int], list[Payload]]:
        """The payloads that can be read, and which they are; the others are named."""
        intact: list[int] = []
        payloads: list[Payload] = []
        index = -1
        for fired in handout.slices:
            for at in range(len(fired.rows)):
                index += 1
                data = sealed[index]
                if data is None:
                    continue
                try:
                    payloads.append(self._decode(fired, at, data))
                    intact.append(index)
                except DamageError as error:
                    self._on_damage(error)
        return intact, payloads

    def _decode(self, fired: FiredRows, index: int, sealed: bytes) -> Payload:
        seq, locator, _, _ = fired.rows[index].item()
        return decode_payload(
            sealed, self._schedule.path(fired.hour), locator >> LOCATOR_LENGTH_BITS, seq
        )

    def _subject_id(self, hour: int, seq: int) -> int:
        found = self._schedule.find(hour, seq)
        if found is None:
            raise DamageError(self._schedule.path(hour), 0, "a row is missing", seq, seq)
        return int(found[0]["subject_id"])

    def release(self, hour: int) -> None:
        """The hour was deleted: do not keep its files open, nor mistake new ones for them."""
        self._schedule.release(hour)
        self._dispatch.release(hour)

    def _payloads(self, fired: FiredRows, unfiled: Mapping[int, bytes]) -> list[bytes | None]:
        """The sealed payload of each row; None where it is not, which is named."""
        locators, seqs = fired.rows["locator"].tolist(), fired.rows["seq"].tolist()
        payloads = _of_unfiled(locators, seqs, unfiled)
        missing = [i for i, at in enumerate(locators) if payloads[i] is None and not _is_filed(at)]
        if missing:
            # Filed since they went to the wheel by the express way.
            offsets, lengths, damage = self._schedule.find_payloads(
                fired.hour, fired.rows["seq"][missing]
            )
            found = (offsets << np.uint64(LOCATOR_LENGTH_BITS) | lengths).tolist()
            for index, locator in zip(missing, found, strict=True):
                locators[index] = locator
            for error in damage:
                self._on_damage(error)
        try:
            self._read_spans(fired.hour, locators, payloads, self._schedule.read)
            unreadable: dict[int, str] = {}
        except UnreadableError:
            unreadable = self._read_each(fired.hour, locators, payloads)
        path = self._schedule.path(fired.hour)
        for index, data in enumerate(payloads):
            if data is None:
                seq, offset = seqs[index], locators[index] >> LOCATOR_LENGTH_BITS
                reason = unreadable.get(index, "a row is missing")
                self._on_damage(DamageError(path, offset, reason, seq, seq))
        return payloads

    def _read_each(
        self, hour: int, locators: list[int], payloads: list[bytes | None]
    ) -> dict[int, str]:
        """Read the payloads that have a place in the file and were not read yet, each by itself:
        its neighbours do not stand in a bad sector. Returns why, for those that do, by index."""
        unreadable: dict[int, str] = {}
        for index, locator in enumerate(locators):
            if locator and payloads[index] is None:
                offset, length = locator >> LOCATOR_LENGTH_BITS, locator & PAYLOAD_MAX_BYTES
                try:
                    payloads[index] = self._schedule.read(hour, offset, length)
                except UnreadableError as error:
                    unreadable[index] = error.reason
        return unreadable

    @staticmethod
    def _read_spans(
        hour: int, locators: list[int], payloads: list[bytes | None], read: _Read
    ) -> bool:
        """Read payloads with a place in the file, neighbours in one call. False: `read` gave up."""
        for indexes, start, end in _spans(locators):
            span = read(hour, start, end - start)
            if span is None:
                return False
            for index in indexes:
                locator = locators[index]
                offset = (locator >> LOCATOR_LENGTH_BITS) - start
                payloads[index] = span[offset : offset + (locator & PAYLOAD_MAX_BYTES)]
        return True

    def find(self, entry: ScheduleEntry) -> FoundRow | None:
        """A schedule row and its payload; None when its hour is not kept any more.

        Raises DamageError."""
        for bucket in places_of(entry.hour):
            found = self._schedule.find(bucket, entry.seq)
            if found is None:
                continue
            row, offset = found
            sealed = self._schedule.read(bucket, offset, int(row["payload_length"]))
            if not sealed and is_day(bucket):
                continue  # It was split and deleted just now.
            payload = self.decode(entry, sealed, self._schedule.path(bucket), offset)
            return FoundRow(payload, int(row["subject_id"]), int(row["subscription_id"]))
        return None

    @staticmethod
    def decode(entry: ScheduleEntry, sealed: bytes, path: str, offset: int = 0) -> Payload:
        """The payload of a schedule row, from where it stands. Raises DamageError."""
        return decode_payload(sealed, path, offset, entry.seq)

    def pending(
        self, snapshot: Snapshot, wanted: Wanted, registry: Registry
    ) -> Generator[None, None, Page]:
        """The first rows of an hour that wait, found in steps; damage is named and left out."""
        page = yield from pending_rows(self._schedule, self._dispatch, snapshot, wanted, registry)
        for damage in page.damage:
            self._on_damage(damage.error())
        return page

    def ended(self, hour: int, entry_seq: int) -> list[EndedRow]:
        """Rows of the dispatch log for one schedule row, with the note of each. A row counts
        whether or not its note can be read; an unreadable note is named."""
        found: list[EndedRow] = []
        for run in self._dispatch.scan_runs(hour):
            if not isinstance(run, FrameRun):
                continue
            starts = run.row_starts()
            for at in np.flatnonzero(run.rows["seq"] == entry_seq).tolist():
                frame = int(np.searchsorted(starts, at, "right")) - 1
                start = int(starts[frame])
                end = start + int(run.heads.headers["count"][frame])
                notes = self._notes(hour, run, frame, entry_seq)
                note = note_of(notes, hour, run.rows[start:end], at - start)
                found.append(EndedRow(run.rows[at], note))
        return found

    def _notes(self, hour: int, run: FrameRun, frame: int, seq: int) -> list[Note]:
        header, offset = run.heads.headers[frame], int(run.heads.offsets[frame])
        length = int(header["payload_bytes"])
        offset += HEADER_BYTES + int(header["rows_bytes"])
        try:
            payload = self._dispatch.read(hour, offset, length) if length else b""
            if crc32c(payload) == header["payload_crc"]:
                return unpack_notes(payload)
            reason = "what is told of its rows does not match its checksum"
        except UnreadableError as error:
            reason = error.reason
        except msgspec.DecodeError as error:
            reason = f"what is told of its rows cannot be read ({error})"
        self._on_damage(DamageError(self._dispatch.path(hour), offset, reason, seq, seq))
        return []

    def settled(self, hour: int, entry_seq: int) -> Rows:
        """Rows of the dispatch log for one schedule row (DISPATCH_DTYPE)."""
        parts = [
            found.rows[found.rows["seq"] == entry_seq]
            for found in self._dispatch.scan_runs(hour)
            if isinstance(found, FrameRun)
        ]
        return concatenate(parts, DISPATCH_DTYPE)


def _is_filed(locator: int) -> bool:
    return locator > PAYLOAD_MAX_BYTES


def _of_unfiled(
    locators: list[int], seqs: list[int], unfiled: Mapping[int, bytes]
) -> list[bytes | None]:
    """The payload of each row that is not filed, if it is in memory; None for the others."""
    if not unfiled:
        return [None] * len(locators)
    return [
        None if _is_filed(at) else unfiled.get(seq) for at, seq in zip(locators, seqs, strict=True)
    ]


def _joined(slices: list[FiredRows]) -> tuple[Rows, NDArray[np.int64]]:
    """All rows, and when they are due."""
    dues_ms = [fired.due_ms() for fired in slices]
    if len(slices) == 1:
        return slices[0].rows, dues_ms[0]
    return concatenate([fired.rows for fired in slices], WHEEL_DTYPE), np.concatenate(dues_ms)


def _spans(locators: list[int]) -> Iterator[tuple[list[int], int, int]]:
    """Rows that are read in one call: their indexes, and from where to where."""
    indexes: list[int] = []
    start = end = 0
    for index in sorted(range(len(locators)), key=locators.__getitem__):
        locator = locators[index]
        if not _is_filed(locator):
            continue
        offset = locator >> LOCATOR_LENGTH_BITS
        until = offset + (locator & PAYLOAD_MAX_BYTES)
        if indexes and (offset - end > _GAP_BYTES_MAX or until - start > _SPAN_BYTES_MAX):
            yield indexes, start, end
            indexes = []
        if not indexes:
            start = offset
        indexes.append(index)
        end = until
    if indexes:
        yield indexes, start, end
