"""Deliveries: those of one take, as columns.

What leaves a queue together stays together: as it is read, leased, acknowledged and recorded, a
delivery is a row of a few arrays and one payload. Only what is dealt with on its own is made an
object (`deliveries[index]`): a webhook, a message that a consumer gives back, a dead letter.

Cost: some 20 µs for a take, and per message what its payload and its id cost (1 µs); an object,
2 µs. Threads: filled once, then read; `forget` belongs to the event loop.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from delayserver.ids import IdCodec
from delayserver.message import Delivery, Entry, Origin, Payload
from storage.frame import Rows

COLUMNS_DTYPE = np.dtype(
    [
        ("seq", "<u8"),
        ("due_ms", "<i8"),
        ("message_seq", "<u8"),
        ("published_due_ms", "<i8"),
        ("first_due_ms", "<i8"),
        ("subject_id", "<u4"),
        ("attempt", "<u2"),
    ]
)
"""`seq` and `due_ms` are those of the schedule row; the others say whose delivery it is, as Origin
does (`first_due_ms` is its `due_ms`), and which attempt."""

NO_PAYLOAD = Payload(b"")


def make_columns(
    rows: Rows, due_ms: NDArray[np.int64], payloads: Sequence[Payload]
) -> NDArray[np.void]:
    """The columns of rows of the wheel: their origins where the payload has one, else their own.

    Each has the attempt that its origin says, and the subject of its route."""
    columns = np.empty(len(rows), COLUMNS_DTYPE)
    columns["seq"] = columns["message_seq"] = rows["seq"]
    columns["due_ms"] = columns["published_due_ms"] = columns["first_due_ms"] = due_ms
    columns["subject_id"] = rows["route"]
    columns["attempt"] = 1
    for index, payload in enumerate(payloads):
        if (origin := payload.origin) is not None:
            row = columns[index]
            row["message_seq"], row["published_due_ms"] = (
                origin.message_seq,
                origin.published_due_ms,
            )
            row["subject_id"], row["first_due_ms"] = origin.subject_id, origin.due_ms
            row["attempt"] = origin.attempt
    return columns


class Deliveries(Sequence[Delivery]):
    """Deliveries to one subscription, in the order in which they left its queue."""

    __slots__ = ("_ids", "_subject_names", "columns", "payloads", "rows", "subscription_id")

    def __init__(
        self,
        subscription_id: int,
        rows: Rows,
        columns: Rows,
        payloads: list[Payload],
        subject_names: Mapping[int, str],
        ids: IdCodec,
    ) -> None:
        """`rows` are those of the wheel (WHEEL_DTYPE), for when they have to wait again, `columns`
        what they stand for (COLUMNS_DTYPE)."""
        assert len(rows) == len(columns) == len(payloads)
        self.subscription_id = subscription_id
        self.rows = rows
        self.columns = columns
        self.payloads = payloads
        self._subject_names = subject_names
        self._ids = ids

    def __len__(self) -> int:
        return len(self.payloads)

    def __getitem__(self, index: int) -> Delivery:  # type: ignore[override]  # no slices
        if not 0 <= index < len(self.payloads):
            raise IndexError(index)
        seq, due_ms, _, _, _, subject_id, attempt = self.columns[index].item()
        payload = self.payloads[index]
        origin = payload.origin or Origin(seq, due_ms, subject_id, due_ms)
        return Delivery(
            entry=Entry(seq, due_ms),
            origin=origin,
            subject=self._subject_names[subject_id],
            message_id=self._ids.encode(origin.published_due_ms, origin.message_seq),
            subscription_id=self.subscription_id,
            attempt=attempt,
            payload=payload,
            row=self.rows[index : index + 1],
        )

    def __iter__(self) -> Iterator[Delivery]:
        return map(self.__getitem__, range(len(self.payloads)))

    def seqs(self) -> list[int]:
        """Of their schedule rows."""
        seqs: list[int] = self.columns["seq"].tolist()
        return seqs

    def message_ids(self) -> list[bytes]:
        """Of their messages, ASCII."""
        return self._ids.encode_rows(self.columns["published_due_ms"], self.columns["message_seq"])

    def subjects(self) -> list[str]:
        """Of their messages."""
        names = self._subject_names
        return [names[subject_id] for subject_id in self.columns["subject_id"].tolist()]

    def forget(self, which: NDArray[np.intp]) -> None:
        """Nobody asks for these payloads any more."""
        if len(which) < len(self.payloads):
            for index in which.tolist():
                self.payloads[index] = NO_PAYLOAD
