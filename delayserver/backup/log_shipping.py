"""The message log is shipped: new and durable records are copied behind the backups.

    a backup's checkpoint ── begin ──▶ a timeline, and the log is held back from there on
    now and then          ── step  ──▶ new frames: verified, appended to the copy, synced; REACH
    a start               ── resume ─▶ on where the copy ends, if it is a copy of this very log
    a backup has gone     ── prune ──▶ segments that no backup needs, timelines that none names

All that the server answered is durable in its own log, and only that is shipped: a group that was
refused, or torn, never is. A power loss may still take from the server records that the copy has
(`durability=os`; damage at the very end of the log), and other records get the same seqs then. So
`resume` compares the two, and cuts the copy back to the part that they have in common.

A copy that cannot go on ends: the log was given up because the directory of backups did not take it
for long, or a server was restored into the middle of it. Then nothing is held back any more,
`broken` says why, and the next backup begins a new timeline. An error of the disk ends nothing: the
same bytes are written again in the next step. (They, and not only the sync: that is never retried.)

Cost: new bytes are read twice, out of the system's memory, and written once; 10 µs a frame. A sync
of the segment, and a small file, for each step. Threads: `begin` belongs to the replay thread, all
else to one other at a time.
"""

import contextlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import structlog

from delayserver.backup.backing_up import PIECE_BYTES
from delayserver.backup.shelf import BackupManifest
from delayserver.backup.shipped_log import (
    DIRECTORY,
    REACH_FILE,
    LogReach,
    log_place,
    read_reach,
    scan_segment,
    segment_path,
    segments_in,
    timeline_place,
    timelines_in,
    write_reach,
)
from storage.directory import Identity
from storage.errors import DamageError, DiskError, OtherLifeError
from storage.files import File, Files, size_of
from storage.frame import HEADER_BYTES, Damage, Frame, scan
from storage.kinds import KIND_FILE, DirectoryMark, Kind, read_mark, write_mark
from storage.message_log import MessageLog
from storage.rows import LogKind

NOT_BROKEN: Final = ""

log = structlog.get_logger()


class _CopyPosition(NamedTuple):
    """How far the copy is."""

    timeline: int
    first_seq: int | None
    """The first seq of the segment that is being copied; None: there is none yet."""
    offset: int
    """Up to here its copy is durable."""
    last_seq: int
    """The last record before that."""


class _BrokenError(Exception):
    """The copy cannot go on from where it is."""


class LogShipper:
    """Ships the message log of one shard."""

    def __init__(
        self,
        source: Files,
        message_log: MessageLog,
        files: Files,
        identity: Identity,
        *,
        take: Callable[[int], None],
        next_seq: int,
        life: str,
    ) -> None:
        """`source`: the data directory; `files`: that of all backups; `take` waits until so many
        bytes may be read, and raises BackupError if all must end; `next_seq`: that of the first
        record that is made since this start; `life`: the life that the server is in. Everything is
        held back until `resume`."""
        self._source = source
        self._log = message_log
        self._files = files
        self._identity = identity
        self._take = take
        self._next_seq = next_seq
        self._life = life
        self._is_marked = False
        self._place: _CopyPosition | None = None
        self._newest = 0
        """The number of the newest timeline that there is, or ever was since the start."""
        self.broken = NOT_BROKEN
        """Why nothing is shipped, though there are backups."""
        self.breaks_total = 0
        self.reach_ms = 0
        """Everything that was accepted by then can be restored; 0: there is no log."""

    @property
    def timeline(self) -> int:
        """The number of the one that goes on; 0: none does."""
        place = self._place
        return 0 if place is None else place.timeline

    # ── the replay thread ──────────────────────────────────────────────────────────────────────

    def begin(self, checkpoint_seq: int) -> int:
        """A backup is taken at this checkpoint, which was made just now: its timeline, which is
        held back from there on. Not before `resume` has returned."""
        place = self._place
        if place is None:
            self._newest += 1
            self.broken = NOT_BROKEN
            place = self._place = _CopyPosition(self._newest, None, 0, checkpoint_seq)
            self._log.hold_from(checkpoint_seq + 1)
        return place.timeline

    # ── another thread ─────────────────────────────────────────────────────────────────────────

    def resume(self, manifests: Sequence[BackupManifest]) -> None:
        """Go on where an earlier process has stopped. `manifests`: those of this shard, oldest
        first. Raises DiskError: nothing was decided, and it may be called again."""
        if self._place is not None:
            return  # A backup was quicker.
        stamp, shard = self._identity.stamp, self._identity.shard
        self._refuse_other_life()
        known = timelines_in(self._files, stamp, shard)
        named = [one.timeline for one in manifests if one.timeline]
        self._newest = max([self._newest, *known, *named])
        timeline = manifests[-1].timeline if manifests else 0
        if not timeline:
            self._log.hold_from(None)
            return
        directory = timeline_place(stamp, shard, timeline)
        reach = read_reach(self._files, directory)
        self.reach_ms = 0 if reach is None else reach.through_ms
        from_seq = min(one.checkpoint_seq for one in manifests if one.timeline == timeline)
        try:
            place = self._resumed(timeline, from_seq)
            if reach is not None and place.last_seq < reach.last_seq:
                # The server has lost the records that are cut off here; the next step says how far
                # it reaches.
                self._files.unlink(f"{directory}/{REACH_FILE}")
                self.reach_ms = 0
            self._place = place
            self._log.hold_from(place.last_seq + 1)
        except (_BrokenError, DamageError) as error:
            self._break(str(error))

    def _refuse_other_life(self) -> None:
        """Raises OtherLifeError, DamageError, DiskError."""
        place = log_place(self._identity.stamp, self._identity.shard)
        mark = read_mark(self._files, place)
        if mark is not None and mark.life != self._life:
            raise OtherLifeError(
                f"{self._files.root}/{place}",
                "the message log",
                "move it away, together with the backups that it belongs to",
            )
        self._is_marked = mark is not None

    def _mark(self) -> None:
        """Say whose log it is: before the first record is copied."""
        if not self._is_marked:
            place = log_place(self._identity.stamp, self._identity.shard)
            self._files.make_directory(place)
            write_mark(self._files, DirectoryMark(Kind.LOG, self._life), place)
            self._is_marked = True

    def _resumed(self, timeline: int, from_seq: int) -> _CopyPosition:
        stamp = self._identity.stamp
        place = timeline_place(stamp, self._identity.shard, timeline)
        copied = segments_in(self._files, place)
        seqs = self._log.written().first_seqs
        if not copied:
            first = seqs[0] if seqs else self._next_seq
            if first > from_seq + 1:
                raise _BrokenError(f"records {from_seq + 1}–{first - 1} were never copied")
            return _CopyPosition(timeline, None, 0, from_seq)
        first_seq = copied[-1]
        end, last_seq, size = 0, first_seq - 1, 0
        with contextlib.ExitStack() as stack:
            own: File | None = None
            if first_seq in seqs:
                own = self._source.open(MessageLog.path(first_seq))
                stack.callback(own.close)
            copy = self._files.open(segment_path(place, first_seq))
            stack.callback(copy.close)
            size = copy.size()
            for found in scan_segment(self._files, place, first_seq, stamp):
                if isinstance(found, Damage):
                    if not found.torn:
                        raise found.error()
                    break
                if own is not None:
                    header = copy.pread(HEADER_BYTES, found.offset)
                    if own.pread(HEADER_BYTES, found.offset) != header:
                        if not end:
                            raise _BrokenError(
                                "what was copied is of another server with the same directory"
                            )
                        break
                end, last_seq = found.end, found.last_seq
            if end < size:
                copy.truncate(end)
                copy.fdatasync()
        if own is None:
            first = seqs[0] if seqs else self._next_seq
            if first != last_seq + 1:
                raise _BrokenError(
                    f"the copy ends with record {last_seq}, and the message log goes on with "
                    f"{first}: this directory was restored, or its log was not copied meanwhile"
                )
        return _CopyPosition(timeline, first_seq, end, last_seq)

    def step(self, through_ms: int) -> None:
        """Copy the records that have come. All that was accepted by `through_ms` is durable.

        Raises DiskError, BackupError: the next step goes on."""
        if self._place is None:
            return
        try:
            for place in self._copied(self._place):
                self._place = place
                self._log.hold_from(place.last_seq + 1)
        except (_BrokenError, DamageError) as error:
            self._break(str(error))
            return
        place = self._place
        write_reach(
            self._files,
            timeline_place(self._identity.stamp, self._identity.shard, place.timeline),
            LogReach(through_ms, place.last_seq),
        )
        self.reach_ms = through_ms

    def _copied(self, place: _CopyPosition) -> Iterator[_CopyPosition]:
        """How far it is, whenever more is durable."""
        written = self._log.written()
        seqs = written.first_seqs
        directory = timeline_place(self._identity.stamp, self._identity.shard, place.timeline)
        self._mark()
        self._files.make_directory(directory)
        while True:
            first_seq = place.first_seq
            if first_seq is None or first_seq not in seqs:
                if not seqs:
                    return
                first_seq = self._next(place, seqs)
                place = _CopyPosition(place.timeline, first_seq, 0, first_seq - 1)
            length = written.tail_length if first_seq == written.tail_seq else None
            place = self._copy(place, directory, length)
            yield place
            at = bisect_left(seqs, first_seq) + 1
            if at == len(seqs):
                return
            if seqs[at] != place.last_seq + 1:
                raise _BrokenError(
                    f"the message log has no records {place.last_seq + 1}–{seqs[at] - 1}"
                )
            place = _CopyPosition(place.timeline, seqs[at], 0, place.last_seq)

    def _next(self, place: _CopyPosition, seqs: list[int]) -> int:
        """The segment to go on with, where there is none that was begun."""
        next_seq = place.last_seq + 1
        at = bisect_right(seqs, next_seq) - 1
        is_right = at >= 0 and (place.first_seq is None or seqs[at] == next_seq)
        if not is_right:
            raise _BrokenError(
                f"the message log does not go on with record {next_seq}: that was deleted before "
                "it was copied, since the directory of backups did not take it for too long"
            )
        return seqs[at]

    def _copy(self, place: _CopyPosition, directory: str, length: int | None) -> _CopyPosition:
        """Append the missing part to the copy of a segment. `length`: that of the segment."""
        assert place.first_seq is not None
        path = segment_path(directory, place.first_seq)
        with contextlib.ExitStack() as stack:
            try:
                own = self._source.open(MessageLog.path(place.first_seq))
            except FileNotFoundError:
                raise _BrokenError(
                    f"{MessageLog.path(place.first_seq)} was deleted before it was copied: the "
                    "directory of backups did not take it for too long"
                ) from None
            stack.callback(own.close)
            length = own.size() if length is None else length
            if size_of(self._files, path) < place.offset:
                raise _BrokenError(f"what was copied to {path} is not there any more")
            if length <= place.offset and place.offset:
                return place
            is_new = not place.offset
            copy = self._files.open(path, create=True)
            stack.callback(copy.close)
            for start, end, last_seq in self._pieces(own, place, length):
                copy.pwrite([own.pread(end - start, start)], start)
                place = _CopyPosition(place.timeline, place.first_seq, end, last_seq)
            copy.fdatasync()
            if is_new:
                self._files.sync_directory(directory)
        return place

    def _pieces(
        self, own: File, place: _CopyPosition, length: int
    ) -> Iterator[tuple[int, int, int]]:
        """Stretches of whole frames that verify, with the last seq of each. Raises DamageError."""
        start, end, last_seq = place.offset, place.offset, place.last_seq
        for found in scan(
            own,
            start,
            length,
            kind=LogKind.MESSAGE,
            stamp=self._identity.stamp,
            payload=True,
            after_seq=last_seq,
        ):
            if isinstance(found, Damage):
                raise found.error()
            self._check(found, last_seq)
            self._take(found.end - found.offset)
            end, last_seq = found.end, found.last_seq
            if end - start >= PIECE_BYTES:
                yield start, end, last_seq
                start = end
        if end > start:
            yield start, end, last_seq

    def _check(self, frame: Frame, last_seq: int) -> None:
        if not frame.payload_intact:
            raise DamageError(frame.path, frame.offset, "the payloads do not match their checksum")
        if frame.first_seq != last_seq + 1:
            raise _BrokenError(
                f"the message log has no records {last_seq + 1}–{frame.first_seq - 1}"
            )

    def refuse(self, why: str) -> None:
        """Hold nothing back: the directory of backups is not this server's."""
        if why != self.broken:
            self._end(why)
            log.error("this server makes no backups", reason=why)

    def _end(self, why: str) -> None:
        self._place = None
        self._log.hold_from(None)
        self.broken = why
        self.breaks_total += 1

    def _break(self, why: str) -> None:
        self._end(why)
        log.error(
            "the message log is not copied behind the backups any more: make a backup, from which "
            "it goes on",
            reason=why,
        )

    def prune(self, manifests: Sequence[BackupManifest], *, is_making: bool) -> None:
        """Delete all that no backup needs. `manifests`: all of this shard; `is_making`: one more is
        being made. Raises DiskError: the rest goes the next time."""
        needed: dict[int, int] = {}
        for one in manifests:
            needed[one.timeline] = min(
                one.checkpoint_seq, needed.get(one.timeline, one.checkpoint_seq)
            )
        if self.timeline and self.timeline not in needed and not is_making:
            self._place = None
            self._log.hold_from(None)
        if not needed and not is_making:
            self.broken, self.reach_ms = NOT_BROKEN, 0
        stamp, shard = self._identity.stamp, self._identity.shard
        for timeline in timelines_in(self._files, stamp, shard):
            place = timeline_place(stamp, shard, timeline)
            if timeline in needed:
                seqs = segments_in(self._files, place)
                count = bisect_right(seqs, needed[timeline] + 1) - 1
                for first_seq in seqs[: max(0, count)]:
                    self._files.unlink(segment_path(place, first_seq))
            elif timeline != self.timeline:
                for name in self._files.list(place):
                    self._files.unlink(f"{place}/{name}")
                self._files.remove_directory(place)
        if not self.timeline and not timelines_in(self._files, stamp, shard):
            # The last one goes; other shards may have theirs.
            with contextlib.suppress(DiskError):
                self._is_marked = False
                if self._files.exists(f"{log_place(stamp, shard)}/{KIND_FILE}"):
                    self._files.unlink(f"{log_place(stamp, shard)}/{KIND_FILE}")
                self._files.remove_directory(log_place(stamp, shard))
                self._files.remove_directory(DIRECTORY)
