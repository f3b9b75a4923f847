"""A shard's message log on a replicated engine, as its owner writes it.

    group ──▶ the owner's own message log ──▶ frame ──▶ Holder ──▶ the engine
                                                          ──▶ offsets, as expected? ──▶ answered

It is a `WriteAheadLog`, so the code that writes groups, files them and recovers does not know where
they stand. It differs from a message log on files:

- `append` is answered by a quorum, and by the owner's own disk where there is an own log (R8). It
  raises FencedError as soon as it is not known whether a record counts (R1): the process has to end
  then, and starts again as a standby.
- The own log has a group first, in the same frame. If it stalls the group waits, and no thread
  holds the office's lock meanwhile. If it has no room, the group is refused, since no other log has
  it. A group that only the own log has was not answered; at the next claim of the node it counts,
  as one whose answer was lost.
- A checkpoint keeps where it stands in the log (`places`), since a seq does not tell that.

`FollowedLog` is the same log for a standby, which files the records that it reads itself and
appends nothing: it only has places for checkpoints.

Cost: as the engine, and a durable write before that where there is an own log: 0.2 ms on a quick
disk. Both at once took as long together, on two cores, and needed the lock of the office.
Threads: as `WriteAheadLog` says.
"""

import struct
from collections import deque
from collections.abc import Iterator
from typing import Final

from storage.frame import Damage, Frame, encode
from storage.message_log import MessageLog
from storage.replicated.engine import EngineLog
from storage.replicated.holder import Holder
from storage.replicated.office import OfficeState
from storage.replicated.own import OwnLog
from storage.replicated.reader import RecordReader
from storage.rows import LogKind
from storage.write_ahead_log import CheckpointedLog, WriteAheadLog

OFFICE_KEY: Final = b"office"
"""Key in the catalog's META: where the checkpoint stands in the shard's log (OfficeState)."""
SETTLED_KEY: Final = b"settled"
"""Key in the catalog's META: the offset in the log of settled deliveries up to which the dispatch
logs have them (SETTLED_VALUE)."""
OWNER_KEY: Final = b"owner"
"""Key in the catalog's META: where the owner is reached, as its claim says it (UTF-8)."""
SEIZED_KEY: Final = b"seized"
"""In the catalog's META: when the office was taken from an owner that had not left in order (i64
each, ascending, in ms since 1970)."""
SEIZED_MAX: Final = 64
"""So many of these are remembered; the oldest is forgotten first."""
SETTLED_VALUE: Final = struct.Struct(">Q")
BEATS_MAX: Final = 1000
"""Records since the last checkpoint that are nothing but beats: some ten minutes of them."""
_WAIT_S: Final = 1.0


class FollowedLog(CheckpointedLog):
    """The log of a standby: it only says where a checkpoint stands."""

    def __init__(self, place: OfficeState) -> None:
        """`place`: where the catalog's checkpoint stands."""
        self.place = place
        """Behind the last record of which everything is filed."""
        self.settled_place = 0
        """The offset up to which the dispatch logs on the disk have the settled deliveries."""
        self.owner_address = ""
        """The address in the owner's claim; empty: no node is in office, or it is not known."""
        self.seized_ms: tuple[int, ...] = ()
        """When the office was taken from an owner that had not left in order (ascending)."""
        self.kept = (0, 0)
        """The place of the last checkpoint, in the shard's log and that of settled deliveries."""
        self._placed = (0, 0)

    def places(self, seq: int) -> list[tuple[bytes, bytes]]:
        """The entries that the catalog's META has to keep with a checkpoint at `seq`. Within an
        import they still name the place before it: rows that are filed already are not filed
        again."""
        assert seq >= self.place.next_seq - 1, (seq, self.place)
        return self._packed(self.place)

    def _packed(self, place: OfficeState) -> list[tuple[bytes, bytes]]:
        self._placed = (place.next_offset, self.settled_place)
        return [
            (OFFICE_KEY, place.pack()),
            (SETTLED_KEY, SETTLED_VALUE.pack(self.settled_place)),
            (OWNER_KEY, self.owner_address.encode()),
            (SEIZED_KEY, struct.pack(f">{len(self.seized_ms)}q", *self.seized_ms)),
        ]

    def note_seized(self, at_ms: int) -> None:
        """The office was taken then from an owner that had not left in order. It may be said again
        by a reader that starts anew."""
        self.seized_ms = tuple(sorted({*self.seized_ms, at_ms}))[-SEIZED_MAX:]

    def delete_through(self, seq: int) -> None:
        """A checkpoint covers everything up to `seq`. The owner deletes from the log, when enough
        replicas have come so far."""
        self.kept = self._placed


class ReplicatedLog(FollowedLog, WriteAheadLog):
    """The log of the owner: appends groups, and reads back the records that a checkpoint does not
    cover. A quorum has it whole, so it has neither a torn tail nor segments that are kept."""

    def __init__(
        self,
        holder: Holder,
        log: EngineLog,
        *,
        stamp: int,
        place: OfficeState,
        own: OwnLog | None,
    ) -> None:
        """`log`: the shard's log, opened for `read`, which closes it; `own`: where groups are to be
        on the owner's disk, too."""
        super().__init__(place)
        self._holder = holder
        self._log = log
        self._stamp = stamp
        self._own_log = own
        self._own: MessageLog | None = None
        self._own_behind = 0
        """The first seq that the own log does not have, as far as that was read."""
        self._places: deque[tuple[int, OfficeState]] = deque([(place.next_seq - 1, place)])
        """Seqs up to which frames are whole, and where the log stands behind them."""

    def read(self, from_seq: int) -> Iterator[Frame | Damage]:
        """Every frame that holds a record at or after `from_seq`, up to the owner's claim, and the
        frames that only the own log has. Then the log is ready for `append`.

        Raises ReplicatedLogError, FencedError."""
        self._resume_own()
        reader = RecordReader(self._log, self._stamp, self.place)
        while reader.office.state.next_offset < self._holder.state.next_offset:
            for found in reader.read(_WAIT_S):
                assert not found.is_other_history  # The standby has passed that before it claimed.
                if found.frame is None or found.frame.last_seq < from_seq:
                    continue
                self._have_own(found.frame)
                self._places.append((found.frame.last_seq, found.place))
                yield found.frame
        self._log.close()

    def first_seq(self) -> int | None:
        """The first seq behind the checkpoint: records before it are not needed here."""
        return self.place.next_seq

    def _resume_own(self) -> None:
        """Append the frames that the own log has and the log lacks, and let the own log go on."""
        own = self._own_log
        if own is None:
            return
        claimed = self._holder.claimed
        frames: list[Frame] = []
        if own.continues(claimed):
            if (resumed := own.resume(claimed.next_seq)) is not None:
                self._own, frames, self._own_behind = resumed
            else:
                frames = list(own.lacking(claimed.next_seq))
        own.take_over(claimed.epoch)
        for frame in frames:
            assert frame.payload is not None
            self._holder.append_frame(
                encode(
                    LogKind.MESSAGE,
                    frame.rows.tobytes(),
                    frame.payload,
                    first_seq=frame.first_seq,
                    last_seq=frame.last_seq,
                    created_ms=frame.header.created_ms,
                    stamp=self._stamp,
                )
            )
        if self._own is None:
            self._own = own.begin()
        assert self._own.stamp == self._stamp, "frames stand in both logs"

    def _have_own(self, frame: Frame) -> None:
        """Have a frame of the log in the own log, too, which lacks it: it was appended when the
        process ended, or by another owner. Raises StorageError."""
        if self._own is None or frame.first_seq < self._own_behind:
            return
        assert frame.payload is not None
        self._own.append(
            frame.rows.tobytes(),
            frame.payload,
            first_seq=frame.first_seq,
            last_seq=frame.last_seq,
            created_ms=frame.header.created_ms,
        )
        self._own_behind = frame.last_seq + 1

    def append(
        self, rows: bytes, payload: bytes, *, first_seq: int, last_seq: int, created_ms: int
    ) -> None:
        """Append one group; a quorum has it on return, and the own disk where there is one.

        Raises FencedError: the process must answer no more requests, and has to end; ShortageError:
        the own log is out of room, and nothing was appended."""
        frame = encode(
            LogKind.MESSAGE,
            rows,
            payload,
            first_seq=first_seq,
            last_seq=last_seq,
            created_ms=created_ms,
            stamp=self._stamp,
        )

        if self._own is not None:
            self._own.append_frame(frame, first_seq)
        self._places.append((last_seq, self._holder.append_frame(frame)))

    def has_room(self, total_bytes: int) -> bool:
        """Never: an append waits for others, so it is not done on the event loop."""
        return False

    def places(self, seq: int) -> list[tuple[bytes, bytes]]:
        """The entries that the catalog's META has to keep with a checkpoint at `seq`."""
        places = self._places
        while len(places) > 1 and places[1][0] <= seq:
            places.popleft()
        at, state = places[0]
        assert at <= seq, (at, seq)
        return self._packed(state)

    def wants_checkpoint(self, seq: int) -> bool:
        """Whether so many beats have come, and nothing else, that a reader had better not begin
        before them."""
        state = self._holder.resting_state()
        if state is None or state.next_seq - 1 != seq:
            return False
        if state.next_offset - self.kept[0] < BEATS_MAX:
            return False
        self._places.append((seq, state))
        return True

    def note_live(self, hour: int) -> None:
        """`hour` is about to be the newest one in the wheel: every replica knows it on return.
        Raises FencedError."""
        self._holder.tell_live(hour)

    def prepare_spare(self) -> None:
        """Fill the next segment of the own log."""
        if self._own is not None:
            self._own.prepare_spare()

    def delete_through(self, seq: int) -> None:
        """A checkpoint covers everything up to `seq`: the own log is not needed so far."""
        super().delete_through(seq)
        self._holder.filed_seq = seq
        if self._own is not None:
            self._own.delete_through(seq)

    def close(self) -> None:
        """Close the own log. The office is kept: `Holder.leave` gives it away."""
        if self._own is not None:
            self._own.close()


def settled_place_of(value: bytes | None) -> int:
    """The offset in a value of SETTLED_KEY; 0 where there is none. Raises struct.error."""
    return SETTLED_VALUE.unpack(value)[0] if value else 0


def owner_of(value: bytes | None) -> str:
    """The address in a value of OWNER_KEY; empty where there is none. Raises ValueError."""
    return value.decode() if value else ""


def seized_of(value: bytes | None) -> tuple[int, ...]:
    """The moments in a value of SEIZED_KEY; none where there is no value. Raises struct.error."""
    data = value or b""
    return struct.unpack(f">{len(data) // 8}q", data)


def office_of(value: bytes | None) -> OfficeState:
    """The state in a value of OFFICE_KEY; that of an empty log where there is none.

    Raises ValueError where it is none."""
    state = OfficeState.unpack(value) if value else OfficeState()
    if state is None:
        raise ValueError("not the state of an office")
    return state
