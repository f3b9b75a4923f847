"""A shard's message log on a replicated engine, as its owner writes it.

    group ──▶ frame ──▶ records ──▶ the engine ──▶ offsets, as expected? ──▶ answered
                           └──────▶ the owner's own message log, meanwhile

It has the methods of `storage.message_log.MessageLog`, so whoever writes groups, files them and
recovers does not know where they stand. What differs:

- `append` is answered by a quorum, and by the owner's own disk where there is an own log (R8). It
  raises FencedError as soon as anything but the next offset comes back (R1): the process has to
  end then, and starts again as a standby.
- The owner has to be heard of: `beat` says so when nothing else was said (R2).
- A checkpoint keeps where it stands in the log (`places`), since a seq does not tell that.

The own log holds what the engine may lose when all of its servers lose power at once. It is read
when this node, and nobody else, claims the office again (`storage.replicated.own`).

Cost: as the engine; an owner's own log is written while the engine is waited for.
Threads: `append`, `beat` and `leave` take a lock, and may be called by any thread; `read` comes
before them. `places` belongs to the replay thread, `may_deliver` to any.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from storage.errors import FencedError, ShortageError
from storage.frame import Damage, Frame, encode
from storage.message_log import MessageLog
from storage.replicated import envelope
from storage.replicated.engine import EngineLog
from storage.replicated.envelope import NOBODY, Beat, LogRecord, Release
from storage.replicated.lease import Tenure
from storage.replicated.office import Office, OfficeState
from storage.replicated.own import OwnLog
from storage.replicated.reader import LogReader
from storage.rows import LogKind

OFFICE_KEY = b"office"
"""Of the catalog's META: where its checkpoint stands in the log (OfficeState)."""


@dataclass(frozen=True, slots=True)
class Ownership:
    """A node's office in one shard, from the claim that counts."""

    node: int
    log: EngineLog
    office: Office
    """Which has read up to the claim."""
    tenure: Tenure


class ReplicatedLog:
    """Appends groups, reads back what a checkpoint does not cover, and keeps the lease."""

    torn: Damage | None = None
    """A replicated log has no torn tail: what a quorum has is whole."""

    def __init__(
        self,
        ownership: Ownership,
        *,
        stamp: int,
        place: OfficeState,
        clock: Callable[[], int],
        stopwatch: Callable[[], int],
        own: OwnLog | None,
        settled_offset: Callable[[], int] = lambda: 0,
    ) -> None:
        """`place`: where the catalog's checkpoint stands; `clock`: milliseconds since the epoch;
        `stopwatch`: milliseconds that nobody sets, as for the tenure; `own`: the owner's own log,
        if groups are to be on its disk, too; `settled_offset`: for the beats."""
        self._node = ownership.node
        self._log = ownership.log
        self._office = ownership.office
        self._tenure = ownership.tenure
        self._stamp = stamp
        self._clock = clock
        self._stopwatch = stopwatch
        self._own_log = own
        self._own: MessageLog | None = None
        self._settled_offset = settled_offset
        self._lock = threading.Lock()
        self._start = place
        self._places: deque[tuple[int, OfficeState]] = deque([(place.next_seq - 1, place)])
        """Seqs up to which frames are whole, and where the log stands behind them."""
        self._checkpoint_seq = place.next_seq - 1
        self._live_through_hour = 0

    # ── reading, before the first append ──────────────────────────────────────────────────────

    def read(self, from_seq: int) -> Iterator[Frame | Damage]:
        """Every frame that holds a record at or after `from_seq`, up to the owner's claim, and what
        the own log has besides. Then the log is ready for `append`.

        Raises ReplicatedLogError, FencedError."""
        self._resume_own()
        reader = LogReader(self._log, self._stamp, self._start)
        while reader.office.state.next_offset < self._office.state.next_offset:
            for found in reader.read(_WAIT_S):
                if found.frame is None or found.frame.last_seq < from_seq:
                    continue
                self._places.append((found.frame.last_seq, found.place))
                yield found.frame

    def _resume_own(self) -> None:
        """Append what the own log has and the log lacks, and begin the own log anew."""
        if self._own_log is None:
            return
        state = self._office.state
        frames = list(self._own_log.lacking(state.epoch, state.next_seq))
        self._own_log.take_over(state.epoch)
        for frame in frames:
            assert frame.payload is not None
            again = encode(
                LogKind.MESSAGE,
                frame.rows.tobytes(),
                frame.payload,
                first_seq=frame.first_seq,
                last_seq=frame.last_seq,
                created_ms=frame.header.created_ms,
                stamp=self._stamp,
            )
            with self._lock:
                self._append(again)
        self._own = self._own_log.begin()

    def first_seq(self) -> int | None:
        """The first seq behind the checkpoint: what stands before it is not needed here."""
        return self._start.next_seq

    def keep_segment(self, path: str) -> None:
        """There are no segments, and nothing of the log can be damaged for one replica alone."""

    # ── appending: the committer ───────────────────────────────────────────────────────────────

    def append(
        self, rows: bytes, payload: bytes, *, first_seq: int, last_seq: int, created_ms: int
    ) -> None:
        """Append one group; a quorum has it on return, and the own disk where there is one.

        Raises FencedError: nobody may be answered any more, and the process has to end."""
        frame = encode(
            LogKind.MESSAGE,
            rows,
            payload,
            first_seq=first_seq,
            last_seq=last_seq,
            created_ms=created_ms,
            stamp=self._stamp,
        )

        def write_own() -> None:
            if self._own is None:
                return
            try:
                self._own.append(
                    rows, payload, first_seq=first_seq, last_seq=last_seq, created_ms=created_ms
                )
            except ShortageError as error:
                # The others may have it already, so it cannot be refused.
                raise FencedError(
                    self._log.name, f"the own log is out of room ({error})"
                ) from error

        with self._lock:
            self._append(frame, write_own)
            self._places.append((last_seq, self._office.state))

    def has_room(self, total_bytes: int) -> bool:
        """Never: an append waits for others, so it is not done on the event loop."""
        return False

    def beat(self) -> None:
        """Be heard of, if nothing else was said for a while. Raises FencedError."""
        if self._stopwatch() < self._tenure.beat_due_ms:
            return
        with self._lock:
            if self._stopwatch() >= self._tenure.beat_due_ms:
                state = self._office.state
                self._send(
                    [
                        Beat(
                            self._node,
                            state.epoch,
                            self._clock(),
                            self._checkpoint_seq,
                            self._settled_offset(),
                            self._live_through_hour,
                        )
                    ]
                )

    def leave(self, successor: int = NOBODY) -> None:
        """Give the office away, in order: nothing is delivered, appended or settled any more.

        Whoever follows claims at once, `successor` before all others. If it does not get there,
        others claim when the lease has run out."""
        with self._lock:
            if not self._tenure.is_over:
                self._tenure.end()
                epoch = self._office.state.epoch
                release = Release(self._node, epoch, self._clock(), successor)
                self._log.append([envelope.encode(release)])

    def _append(self, frame: bytes, meanwhile: Callable[[], None] = lambda: None) -> None:
        epoch = self._office.state.epoch
        parts = envelope.split(frame, node=self._node, epoch=epoch, clock_ms=self._clock())
        self._send(list(parts), meanwhile)

    def _send(
        self, records: Sequence[LogRecord], meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        if self._tenure.is_over:
            raise FencedError(self._log.name, "this process is not in office any more")
        expected = self._office.state.next_offset
        sent_ms = self._stopwatch()
        offsets = self._log.append([envelope.encode(record) for record in records], meanwhile)
        for record, offset in zip(records, offsets, strict=True):
            if not self._tenure.appended(record, offset, sent_ms):
                got = "no answer came" if offset is None else f"it is at {offset}"
                raise FencedError(
                    self._log.name, f"a record was expected at offset {expected}, and {got}"
                )
            expected += 1

    def may_deliver(self) -> bool:
        """Whether deliveries may leave now (R2)."""
        return self._tenure.holds(self._stopwatch())

    # ── housekeeping: the replay thread ────────────────────────────────────────────────────────

    def places(self, seq: int) -> list[tuple[bytes, bytes]]:
        """What the catalog's META has to keep with a checkpoint at `seq`."""
        places = self._places
        while len(places) > 1 and places[1][0] <= seq:
            places.popleft()
        at, state = places[0]
        return [(OFFICE_KEY, state.pack())] if at <= seq else []

    def note_live(self, hour: int) -> None:
        """`hour` is the newest one in the wheel."""
        self._live_through_hour = hour

    def prepare_spare(self) -> None:
        """Fill the next segment of the own log."""
        if self._own is not None:
            self._own.prepare_spare()

    def delete_through(self, seq: int) -> None:
        """A checkpoint covers everything up to `seq`: the own log is not needed so far."""
        self._checkpoint_seq = seq
        if self._own is not None:
            self._own.delete_through(seq)

    def close(self) -> None:
        """Close the own log. The office is kept: `leave` gives it away."""
        if self._own is not None:
            self._own.close()


_WAIT_S = 1.0
