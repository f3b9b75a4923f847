"""The reader: bodies of rows that go out, and the rows of messages that somebody looks up.

Rows of one hour are read in the order of their place in the file, and neighbours in one call. A
body is checked against its own checksum; one that does not match is named and left out, and the
rest is delivered (I8).

Cost: about 3 µs per message from the page cache. Threads: the reader thread, with log instances of
its own.
"""

from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple

import numpy as np

from delayserver.dispatcher import Take
from delayserver.ids import IdCodec
from delayserver.message import Delivery, Entry, Origin, Payload, decode_payload
from delayserver.pending import Page, Wanted, pending_rows
from delayserver.replay import Snapshot
from delayserver.subscriptions import Registry
from delayserver.wheel import PAYLOAD_MAX_BYTES, ROUTE_SUBSCRIPTION, Batch
from storage.errors import DamageError
from storage.frame import Frame, Rows
from storage.hour_log import HourLog
from storage.rows import DISPATCH_DTYPE, HOUR_MS, concatenate

_SPAN_BYTES_MAX = 1 << 20
_GAP_BYTES_MAX = 4096


class Found(NamedTuple):
    """A schedule row with its payload."""

    payload: Payload
    subject_id: int
    subscription_id: int


class Reader:
    """Reads from the hours' files."""

    def __init__(
        self,
        schedule: HourLog,
        dispatch: HourLog,
        ids: IdCodec,
        subject_names: dict[int, str],
        on_damage: Callable[[DamageError], None],
    ) -> None:
        self._schedule = schedule
        self._dispatch = dispatch
        self._ids = ids
        self._subject_names = subject_names
        self._on_damage = on_damage

    def deliveries(self, take: Take, unfiled: dict[int, bytes]) -> list[Delivery]:
        """The rows as deliveries, in order. `unfiled`: payloads that are in memory, by seq."""
        deliveries: list[Delivery] = []
        for batch in take.batches:
            sealed = self._payloads(batch, unfiled)
            where = self._schedule.path(batch.hour)
            for index, row in enumerate(batch.rows.tolist()):
                seq, locator, due_offset_ms, route = row
                try:
                    data = sealed.get(index)
                    if data is None:
                        raise DamageError(where, locator >> 24, "a row is missing", seq, seq)
                    payload = decode_payload(data, where, locator >> 24, seq)
                    due_ms = batch.hour * HOUR_MS + due_offset_ms
                    origin = payload.origin
                    if origin is None:
                        if route & ROUTE_SUBSCRIPTION:
                            # One of several deliveries that a restart left open.
                            route = self._subject_id(batch.hour, seq)
                        origin = Origin(seq, due_ms, route, due_ms)
                except DamageError as error:
                    self._on_damage(error)
                    continue
                deliveries.append(
                    Delivery(
                        entry=Entry(seq, due_ms),
                        origin=origin,
                        subject=self._subject_names[origin.subject_id],
                        message_id=self._ids.encode(origin.published_due_ms, origin.message_seq),
                        subscription_id=take.subscription.id,
                        attempt=take.attempts.get(seq, origin.attempt),
                        payload=payload,
                        row=batch.rows[index : index + 1],
                    )
                )
        return deliveries

    def _subject_id(self, hour: int, seq: int) -> int:
        found = self._schedule.find(hour, seq)
        if found is None:
            raise DamageError(self._schedule.path(hour), 0, "a row is missing", seq, seq)
        return int(found[0]["subject_id"])

    def release(self, hour: int) -> None:
        """The hour was deleted: do not keep its files open, nor mistake new ones for them."""
        self._schedule.release(hour)
        self._dispatch.release(hour)

    def _payloads(self, batch: Batch, unfiled: dict[int, bytes]) -> dict[int, bytes]:
        """The sealed payload of each row, by its index in the batch."""
        found: dict[int, bytes] = {}
        locators = batch.rows["locator"].copy()
        seqs = batch.rows["seq"]
        missing = []
        for index in np.flatnonzero(locators == 0).tolist():
            data = unfiled.get(int(seqs[index]))
            if data is None:
                missing.append(index)
            else:
                found[index] = data
        if missing:
            # Filed since they went to the wheel by the express way.
            offsets, lengths, damage = self._schedule.find_payloads(batch.hour, seqs[missing])
            locators[missing] = offsets << np.uint64(24) | lengths
            for error in damage:
                self._on_damage(error)
        order = np.argsort(locators, kind="stable")
        order = order[int((locators == 0).sum()) :]
        for indexes, start, end in _spans(locators, order):
            span = self._schedule.read(batch.hour, start, end - start)
            for index in indexes:
                locator = int(locators[index])
                offset = (locator >> 24) - start
                found[index] = span[offset : offset + (locator & PAYLOAD_MAX_BYTES)]
        return found

    def find(self, entry: Entry) -> Found | None:
        """A schedule row and its payload; None when its hour is not kept any more.

        Raises DamageError."""
        found = self._schedule.find(entry.hour, entry.seq)
        if found is None:
            return None
        row, offset = found
        sealed = self._schedule.read(entry.hour, offset, int(row["payload_length"]))
        payload = self.decode(entry, sealed, offset)
        return Found(payload, int(row["subject_id"]), int(row["subscription_id"]))

    def decode(self, entry: Entry, sealed: bytes, offset: int = 0) -> Payload:
        """The payload of a schedule row. Raises DamageError."""
        return decode_payload(sealed, self._schedule.path(entry.hour), offset, entry.seq)

    def pending(
        self, snapshot: Snapshot, wanted: Wanted, registry: Registry
    ) -> Generator[None, None, Page]:
        """The first rows of an hour that wait, found in steps; damage is named and left out."""
        page = yield from pending_rows(self._schedule, self._dispatch, snapshot, wanted, registry)
        for damage in page.damage:
            self._on_damage(damage.error())
        return page

    def settled(self, hour: int, entry_seq: int) -> Rows:
        """Rows of the dispatch log for one schedule row (DISPATCH_DTYPE)."""
        parts = [
            found.rows[found.rows["seq"] == entry_seq]
            for found in self._dispatch.scan(hour)
            if isinstance(found, Frame)
            and found.header.first_seq <= entry_seq <= found.header.last_seq
        ]
        return concatenate(parts, DISPATCH_DTYPE)


def _spans(locators: np.ndarray, order: np.ndarray) -> Iterator[tuple[list[int], int, int]]:
    """Rows that are read in one call: their indexes, and from where to where."""
    indexes: list[int] = []
    start = end = 0
    for index, locator in zip(order.tolist(), locators[order].tolist(), strict=True):
        offset = locator >> 24
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
