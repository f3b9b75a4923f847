"""Records of NAME.log folded into the frames that count, a piece of the log at a time.

    place ─▶ records of a shard, in order ─▶ Office: does it count? ─▶ frames ─▶ the next place

Not everything in the log counts. A record of an owner that had lost its office is void, and only
the records before it tell whether it is void. So a piece is folded from the place where the one
before ended, by the code of the replicas (`storage.replicated.office`), and ends with a place
itself. The records of a frame that is not whole yet are part of the place, so that they are read
only once.

A log whose beginning was deleted (once two replicas have it) is begun in its middle. An owner that
writes anything but a CLAIM has read that its own CLAIM counts. So the owner where the piece begins
is that of the highest epoch with records and without a CLAIM in front of them. Its first frame
counts, and the fold begins there. This holds if the piece is longer than the time for which a
former owner may write without having read of the next, some seconds.

Cost: a crc32c pass over envelope and frame each; some µs a record. Threads: a fold belongs to the
task that makes it; a place is a value.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from delayserver.errors import PipelineError
from storage.frame import Frame, decode_header
from storage.replicated import adoption, envelope
from storage.replicated.envelope import Adopt, Claim, FramePart
from storage.replicated.office import Office, OfficeState, RecordDecision
from storage.replicated.reader import frame_of
from storage.rows import LogKind

Record = tuple[int, bytes]
"""Its offset, and its bytes."""


class HistoryLeftError(PipelineError):
    """The log has lost its end, and goes on behind a replica that has other records."""

    def __init__(self, log: str, offset: int) -> None:
        super().__init__(
            f"{log} goes on behind another replica at offset {offset}, as people have decided: "
            "what was read before is not what counts now. Begin with another --state"
        )


@dataclass(frozen=True, slots=True)
class LogPlace:
    """Where a fold ended."""

    office: bytes
    """OfficeState, packed; it speaks of the place before `unfinished`."""
    unfinished: tuple[Record, ...] = ()
    """The records of a frame whose last part has not come yet."""


class LogFold:
    """Folds a piece of the log of one shard."""

    def __init__(self, log: str, stamp: int, place: LogPlace | None) -> None:
        """`log`: its name in errors; `place`: where to go on; None: the log was not begun yet."""
        self._log = log
        self._stamp = stamp
        self.first_seq = 0
        """The first known seq, if this fold has begun the log."""
        self._office: Office | None = None
        self._parts: list[FramePart] = []
        self._unfinished: list[Record] = list(place.unfinished) if place else []
        if place is not None:
            state = OfficeState.unpack(place.office)
            assert state is not None
            self._office = Office(log, stamp, state)

    @property
    def place(self) -> LogPlace | None:
        """The place that it has reached; None: nothing in the piece tells which records count."""
        if self._office is None:
            return None
        return LogPlace(self._office.frame_place().pack(), tuple(self._unfinished))

    def frames(self, records: Iterable[Record]) -> Iterator[Frame]:
        """The frames that the records complete, in order; each `offset` is that of its last record.

        Raises RecordDamageError, NewerRecordError, OffsetGapError, HistoryLeftError: the log cannot
        be read on from there."""
        before, self._unfinished = self._unfinished, []
        for record in before:
            yield from self._take(*record)
        if self._office is None:
            records = list(records)
            state = begin(records, self._log, self._stamp)
            if state is None:
                return
            self.first_seq = state.next_seq
            self._office = Office(self._log, self._stamp, state)
            records = records[state.next_offset - records[0][0] :]
        for record in records:
            yield from self._take(*record)

    def _take(self, offset: int, data: bytes) -> Iterator[Frame]:
        office = self._office
        assert office is not None
        record = envelope.decode(data, self._log, offset)
        before = office.state
        verdict = office.apply(offset, record)
        counts = verdict is not RecordDecision.VOID
        if counts and isinstance(record, Adopt) and not adoption.continues(record, before):
            raise HistoryLeftError(self._log, offset)
        if not counts or not isinstance(record, FramePart) or record.part == 0:
            self._parts.clear()
            self._unfinished.clear()
        if not counts or not isinstance(record, FramePart):
            return
        self._parts.append(record)
        self._unfinished.append((offset, data))
        if verdict is RecordDecision.COMPLETES:
            whole = envelope.join(self._parts)
            self._parts.clear()
            self._unfinished.clear()
            yield frame_of(whole, LogKind.MESSAGE, self._stamp, self._log, offset)


def begin(records: Sequence[Record], log: str, stamp: int) -> OfficeState | None:
    """The state of the office before the first of these records that is known to count; None: the
    records do not tell it."""
    if not records:
        return None
    if records[0][0] == 0:
        return OfficeState()
    read = [(offset, envelope.decode(data, log, offset)) for offset, data in records]
    claimed, current = set(), 0
    for _, record in read:
        if isinstance(record, Claim):
            claimed.add(record.epoch)
        elif not isinstance(record, Adopt) and record.epoch not in claimed:
            current = max(current, record.epoch)
    firsts = [
        (record.epoch, offset, record)
        for offset, record in read
        if isinstance(record, FramePart) and record.part == 0 and record.epoch >= current
    ]
    for epoch, offset, record in sorted(firsts, key=lambda one: one[:2]):
        header = decode_header(record.data, log, stamp=stamp)
        if header is not None:
            return OfficeState(
                next_offset=offset,
                epoch=epoch,
                owner=record.node,
                next_seq=header.first_seq,
                last_offset=offset - 1,
                clock_ms=record.clock_ms,
            )
    return None
