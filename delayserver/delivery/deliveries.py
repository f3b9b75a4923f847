"""Deliveries: those of one handout, as columns.

Rows that leave a queue together stay together: as it is read, leased, acknowledged and recorded, a
delivery is a row of a few arrays and one payload. Only a delivery that is handled alone becomes an
object (`deliveries[index]`): a webhook, a message that a consumer gives back, a dead letter.

Cost: 10 µs for a handout, and for each message its payload and its id (1 µs); an object, 2 µs.
Threads: filled once, then read; `drop_payloads` belongs to the event loop.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from delayserver.records.ids import IdCodec
from delayserver.records.message import DueDelivery, Origin, Payload, ScheduleEntry
from delayserver.records.message_id import ID_DIGITS
from delayserver.schedule.wheel_rows import NOWHERE, ROUTE_NUMBER, ROUTE_OPTIONS, FiredRows
from storage.frame import Rows
from storage.rows import DISPATCH_DTYPE, HOUR_MS, Outcome, select

NO_PAYLOAD = Payload(b"")
NEVER_MS = 1 << 62


NO_STARTS = np.zeros(0, np.int64)


def lost_attempts(starts_ms: NDArray[np.int64], first_due_ms: int) -> int:
    """How many attempts of a delivery may have been made that are not counted, since a process was
    killed: one for each start behind a kill, once its first attempt was due."""
    if not len(starts_ms):
        return 0
    return len(starts_ms) - int(np.searchsorted(starts_ms, first_due_ms))


class Deliveries(Sequence[DueDelivery]):
    """Deliveries to one subscription, in the order in which they left its queue."""

    __slots__ = (
        "_ids",
        "_published_due_ms",
        "_subject_names",
        "_with_options",
        "first_due_ms",
        "leased_ms",
        "payloads",
        "rows",
        "settled",
        "starts_ms",
        "subject_ids",
        "subscription_id",
    )

    def __init__(
        self,
        subscription_id: int,
        rows: Rows,
        due_ms: NDArray[np.int64],
        payloads: list[Payload],
        subject_names: Mapping[int, str],
        ids: IdCodec,
        starts_ms: NDArray[np.int64] = NO_STARTS,
    ) -> None:
        """`rows` are those of the wheel (WHEEL_DTYPE), due at `due_ms`. A payload with an origin
        names the message that a row delivers; else the row is its own message, of the subject that
        is its route. `starts_ms`: when a process began after a kill (ascending)."""
        assert len(rows) == len(due_ms) == len(payloads)
        self.subscription_id = subscription_id
        self.leased_ms = 0
        """When a consumer was given them; 0: none was."""
        self.rows = rows
        """The rows as they waited in the wheel. They wait again if no receiver takes them."""
        self.payloads = payloads
        self.settled = settled = np.zeros(len(rows), DISPATCH_DTYPE)
        """The rows for the dispatch log once the messages have arrived (DISPATCH_DTYPE, shape n).
        `settled_ms` is filled in then."""
        settled["seq"] = settled["message_seq"] = rows["seq"]
        settled["due_ms"] = due_ms
        settled["subscription_id"] = subscription_id
        settled["attempt"] = 1
        settled["outcome"] = Outcome.DELIVERED
        self.first_due_ms = due_ms.tolist()
        """When the first attempt of each was due."""
        self.subject_ids = rows["route"].tolist()
        self._with_options = NOWHERE
        """Those that have other options than a priority, by index."""
        if self.subject_ids and max(self.subject_ids) > ROUTE_NUMBER:
            self.subject_ids = (rows["route"] & ROUTE_NUMBER).tolist()
            self._with_options = np.flatnonzero(rows["route"] & ROUTE_OPTIONS)
        self._published_due_ms = due_ms
        self._subject_names = subject_names
        self._ids = ids
        self.starts_ms = starts_ms
        origins = [payload.origin for payload in payloads]
        if any(origins):
            self._published_due_ms = due_ms.copy()
            for index, origin in enumerate(origins):
                if origin is not None:
                    self._set_origin(index, origin)

    def _set_origin(self, index: int, origin: Origin) -> None:
        self.settled["message_seq"][index] = origin.message_seq
        self.settled["attempt"][index] = origin.attempt
        self.first_due_ms[index] = origin.due_ms
        self.subject_ids[index] = origin.subject_id
        self._published_due_ms[index] = origin.published_due_ms

    def __len__(self) -> int:
        return len(self.payloads)

    def __getitem__(self, index: int) -> DueDelivery:  # type: ignore[override]  # no slices
        if not 0 <= index < len(self.payloads):
            raise IndexError(index)
        seq, _, due_ms, _, _, attempt, _, _ = self.settled[index].item()
        payload, subject_id = self.payloads[index], self.subject_ids[index]
        origin = payload.origin or Origin(seq, due_ms, subject_id, due_ms)
        return DueDelivery(
            entry=ScheduleEntry(seq, due_ms),
            origin=origin,
            subject=self._subject_names[subject_id],
            message_id=self._ids.encode(origin.published_due_ms, origin.message_seq),
            subscription_id=self.subscription_id,
            attempt=attempt,
            payload=payload,
            row=self.rows[index : index + 1],
            extra_attempts=lost_attempts(self.starts_ms, self.first_due_ms[index]),
        )

    def __iter__(self) -> Iterator[DueDelivery]:
        return map(self.__getitem__, range(len(self.payloads)))

    def told_attempts(self) -> list[int]:
        """The attempts, as consumers are told of them: with those that a kill may have hidden."""
        attempts: NDArray[np.uint16] = self.settled["attempt"]
        if not len(self.starts_ms):
            return list(attempts.tolist())
        before = np.searchsorted(self.starts_ms, self.first_due_ms)
        return list((attempts + (len(self.starts_ms) - before)).tolist())

    def message_ids(self) -> list[bytes]:
        """The ids of the messages, as ASCII."""
        ids = self._ids.encode_many(self._published_due_ms, self.settled["message_seq"])
        digits = ids.hex().encode()
        return [digits[at : at + ID_DIGITS] for at in range(0, len(digits), ID_DIGITS)]

    def subjects(self) -> list[str]:
        """The subjects of the messages."""
        names = self._subject_names
        return [names[subject_id] for subject_id in self.subject_ids]

    def expired(self, now_ms: int) -> NDArray[np.intp]:
        """Those that are delivered in vain, since their time to live is over: their indexes
        (shape n, ascending)."""
        if not len(self._with_options):
            return self._with_options
        return self._with_options[self.expiries_ms(self._with_options) <= now_ms]

    def expiries_ms(self, which: NDArray[np.intp]) -> NDArray[np.int64]:
        """From when on it is too late for some of them; NEVER_MS: never. `which`: their indexes
        (shape n)."""
        expiries = [
            self.payloads[index].expires_ms(self.first_due_ms[index]) for index in which.tolist()
        ]
        return np.array([NEVER_MS if one is None else one for one in expiries], np.int64)

    def telling(self, which: NDArray[np.intp]) -> NDArray[np.intp]:
        """Those of some of them whose delivery is told by a message (`on_delivered`). `which`:
        indexes (shape n)."""
        if not len(self._with_options):
            return self._with_options
        found = [
            index
            for index in which[np.isin(which, self._with_options)].tolist()
            if self.payloads[index].outcomes.delivered is not None
        ]
        return np.array(found, np.intp)

    def select(self, which: NDArray[np.intp]) -> "Deliveries":
        """Some of them. `which`: their indexes (shape n)."""
        chosen, indexes = copy(self), which.tolist()
        chosen.rows, chosen.settled = select(self.rows, which), select(self.settled, which)
        chosen.payloads = [self.payloads[index] for index in indexes]
        chosen.first_due_ms = [self.first_due_ms[index] for index in indexes]
        chosen.subject_ids = [self.subject_ids[index] for index in indexes]
        chosen._published_due_ms = self._published_due_ms[which]
        chosen._with_options = np.flatnonzero(chosen.rows["route"] & ROUTE_OPTIONS)
        return chosen

    def slices(self, which: NDArray[np.intp]) -> list[FiredRows]:
        """The rows of some of them, as they wait again. `which`: their indexes (shape n, not 0).

        A slice is of one hour and in due order. Rows that came back before need not be."""
        dues_ms, rows = self.settled["due_ms"][which], select(self.rows, which)
        hours = dues_ms // HOUR_MS
        cuts = (np.flatnonzero((np.diff(hours) != 0) | (np.diff(dues_ms) < 0)) + 1).tolist()
        return [
            FiredRows(int(hours[start]), rows[start:end])
            for start, end in pairwise([0, *cuts, len(rows)])
        ]

    def drop_payloads(self, which: NDArray[np.intp]) -> None:
        """Give back the memory of payloads that are not needed any more. `which`: their indexes
        (shape n)."""
        if len(which) < len(self.payloads):
            for index in which.tolist():
                self.payloads[index] = NO_PAYLOAD
