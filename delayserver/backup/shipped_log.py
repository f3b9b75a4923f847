"""The shipped log: the message log behind the backups, copied to their directory while it grows.

    BACKUP_DIR/_log/<stamp>-<shard>/KIND                               the life that it belongs to
                                   /<timeline>/<first seq>.messages    segments, as in messages/
                                              /REACH                   how far they reach

A timeline is one stretch of the log without a gap. It begins at the checkpoint of a backup, and the
manifest of each backup that it goes on from names it. Where the copy cannot go on (a server was
restored, segments are gone) the timeline has ended, and the next backup begins another one. So the
records of a restored server never mix with those of the lost one.

REACH says until when nothing is missing: with no new record the log reaches on all the same.

    find_cut ── every frame from the checkpoint on: checksums, no gap ──▶ the first one that was
                                                                         accepted later: here

A record counts as accepted when its group was written (`created_ms` of the frame). Records behind
the cut in the log are not restored, even if a clock that was set back dates them earlier.

Cost: `find_cut` reads each byte once. Memory: a frame. Threads: functions without state.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import google_crc32c
import msgspec

from delayserver.backup.shelf import BackupManifest, read_whole
from delayserver.recovery.recover import is_import_row
from delayserver.times import format_time
from storage.errors import BackupError, DamageError
from storage.files import Files, replace_file
from storage.frame import Damage, Frame, scan, with_torn_payload
from storage.kinds import LOG_DIRECTORY, read_mark
from storage.message_log import SUFFIX, parse_segment_name
from storage.rows import LogKind

DIRECTORY: Final = LOG_DIRECTORY
"""No backup can be called so."""
REACH_FILE: Final = "REACH"
LATEST_MS: Final = (1 << 63) - 1
"""A time to restore to: as far as the log reaches."""
_TIMELINE: Final = re.compile("[0-9]{8}")


class LogReach(msgspec.Struct, frozen=True):
    """How far a timeline is known to be complete."""

    through_ms: int
    """Everything that was accepted by then …"""
    last_seq: int
    """… is in the segments, which reached so far at least."""


class _Sealed(msgspec.Struct, frozen=True):
    crc32c: int
    reach: msgspec.Raw


class LogSegment(NamedTuple):
    """A segment of a timeline, and how much of it counts."""

    name: str
    length: int


class LogCut(NamedTuple):
    """The part of a timeline that is filed behind a backup."""

    place: str
    """The directory of the segments."""
    segments: list[LogSegment]
    last_seq: int
    """The last record before the cut; the backup's own, where there is none."""
    last_ms: int | None
    """When that was accepted; None: no record came behind the backup."""

    @property
    def total_bytes(self) -> int:
        """The size of all segments."""
        return sum(one.length for one in self.segments)


_decode_sealed = msgspec.json.Decoder(_Sealed).decode
_decode_reach = msgspec.json.Decoder(LogReach).decode


def log_place(stamp: int, shard: int) -> str:
    """The directory of a shard's timelines, below that of all backups."""
    return f"{DIRECTORY}/{stamp:08x}-{shard:04d}"


def timeline_place(stamp: int, shard: int, timeline: int) -> str:
    """The directory of one of them."""
    return f"{log_place(stamp, shard)}/{timeline:08d}"


def timelines_in(files: Files, stamp: int, shard: int) -> list[int]:
    """The numbers of those that there are, oldest first. Raises DiskError."""
    names = files.list(log_place(stamp, shard))
    return sorted(int(name) for name in names if _TIMELINE.fullmatch(name))


def segments_in(files: Files, place: str) -> list[int]:
    """The first seqs of the segments of a timeline, in order. Raises DiskError."""
    found = (parse_segment_name(name) for name in files.list(place))
    return sorted(first_seq for first_seq in found if first_seq is not None)


def segment_path(place: str, first_seq: int) -> str:
    """The path of a segment of the timeline in the directory `place`."""
    return f"{place}/{first_seq:020d}{SUFFIX}"


def write_reach(files: Files, place: str, reach: LogReach) -> None:
    """Say how far the segments reach, which are durable by now. Raises DiskError."""
    body = msgspec.json.encode(reach)
    sealed = _Sealed(google_crc32c.value(body), msgspec.Raw(body))
    replace_file(files, f"{place}/{REACH_FILE}", msgspec.json.encode(sealed) + b"\n")


def read_reach(files: Files, place: str) -> LogReach | None:
    """Read REACH; None: there is none that can be believed. Raises DiskError, UnreadableError."""
    data = read_whole(files, f"{place}/{REACH_FILE}")
    if data is None:
        return None
    try:
        sealed = _decode_sealed(data)
        if google_crc32c.value(bytes(sealed.reach)) != sealed.crc32c:
            return None
        return _decode_reach(sealed.reach)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None


def scan_segment(files: Files, place: str, first_seq: int, stamp: int) -> Iterator[Frame | Damage]:
    """The frames and the damage in a segment. A frame that was cut within its payloads at the end
    is a torn tail. Raises DiskError."""
    with contextlib.closing(files.open(segment_path(place, first_seq))) as file:
        items = scan(
            file,
            0,
            file.size(),
            kind=LogKind.MESSAGE,
            stamp=stamp,
            payload=True,
            after_seq=first_seq - 1,
        )
        yield from with_torn_payload(items)


def find_cut(
    files: Files,
    manifest: BackupManifest,
    until_ms: int,
    told: Callable[[int], None] = lambda count: None,
) -> LogCut:
    """The part of the log behind a backup that was accepted by `until_ms`, all its frames verified.

    `files`: those of the directory of all backups; `told` hears how many bytes more were read.
    Raises BackupError (there is no log, it does not reach so far, or there is something on the way
    that it does not have), DiskError."""
    assert until_ms >= manifest.taken_ms
    refuse_other_life(files, manifest)
    place = timeline_place(manifest.stamp, manifest.shard, manifest.timeline)
    seqs = segments_in(files, place) if manifest.timeline else []
    reach = read_reach(files, place) if manifest.timeline else None
    if not seqs and reach is None:
        raise BackupError(
            f"there is no message log behind the backup {manifest.name} (shard {manifest.shard}) "
            f"in {files.root}/{DIRECTORY}: it can be restored as it is, without --until. The log "
            "is copied by a server with backup_dir, unless its backup_log_ms is 0; a backup that "
            "is moved needs that directory beside it"
        )
    cutting = _Cutting(manifest, until_ms)
    segments: list[LogSegment] = []
    for first_seq, behind in zip(seqs, [*seqs[1:], None], strict=False):
        if behind is not None and behind <= cutting.next_seq:
            continue  # All of it is in the backup.
        length = 0
        for found in scan_segment(files, place, first_seq, manifest.stamp):
            if not cutting.takes(found, is_newest=behind is None):
                break
            told(found.end - length)
            length = found.end
        if length:
            segments.append(LogSegment(f"{first_seq:020d}{SUFFIX}", length))
        if cutting.is_cut:
            break
        if behind is not None and behind > cutting.next_seq:
            cutting.end(f"records {cutting.next_seq}–{behind - 1} are missing behind that")
            break
    cutting.check_reach(reach)
    if cutting.last_ms is None:
        segments = []
    return LogCut(place, segments, cutting.next_seq - 1, cutting.last_ms)


def refuse_other_life(files: Files, manifest: BackupManifest) -> None:
    """Raises BackupError where the log belongs to another life of the server than a backup: its
    seqs behind the backup belong to other records."""
    place = log_place(manifest.stamp, manifest.shard)
    mark = read_mark(files, place)
    if mark is not None and manifest.life and mark.life != manifest.life:
        raise BackupError(
            f"{files.root}/{place} is the log of what the server was before or after it was "
            f"restored, and not that behind the backup {manifest.name}: put the log beside the "
            "backup that was copied with it, or restore the backup without --until"
        )


class _Cutting:
    """Follows the log, frame by frame, to where it is cut."""

    def __init__(self, manifest: BackupManifest, until_ms: int) -> None:
        self._manifest = manifest
        self._until_ms = until_ms
        self.next_seq = manifest.checkpoint_seq + 1
        self.last_ms: int | None = None
        self.is_cut = False
        """No record behind it may be read."""
        self._reaches_ms = manifest.taken_ms
        self._is_later = False
        """There is a record that came after the time: nothing before it is missing."""
        self._ended = ""

    def takes(self, found: Frame | Damage, *, is_newest: bool) -> bool:
        """Whether a find in a segment belongs to it; else the log is cut here, or ends. In the
        newest one a torn tail is left by a crash."""
        if isinstance(found, Damage):
            if not (found.torn and is_newest):
                self.end(f"it is damaged at {found.path}, offset {found.offset}: {found.reason}")
            return False
        if found.last_seq < self.next_seq:
            return True
        if found.first_seq != self.next_seq:
            self.end(f"records {self.next_seq}–{found.first_seq - 1} are missing behind that")
            return False
        accepted_ms = found.header.created_ms
        if accepted_ms > self._until_ms:
            self.is_cut = self._is_later = True
            return False
        if not found.payload_intact:
            self.end(f"it is damaged at {found.path}, offset {found.offset}: a payload")
            return False
        if is_import_row(found.rows):
            self.end(
                f"record {found.rows['seq'][-1]} of {format_time(accepted_ms)} takes over a bulk "
                "load, whose files are in no log: name a backup that was made behind it"
            )
            return False
        self.next_seq = found.last_seq + 1
        self.last_ms = accepted_ms
        self._reaches_ms = max(self._reaches_ms, accepted_ms)
        return True

    def end(self, why: str) -> None:
        """It goes no further."""
        self.is_cut = True
        self._ended = why

    def check_reach(self, reach: LogReach | None) -> None:
        """Raises BackupError where the log ends before the time that is wanted."""
        if self._is_later:
            return
        if reach is not None and not self._ended:
            if reach.last_seq < self.next_seq:
                self._reaches_ms = max(self._reaches_ms, reach.through_ms)
            else:
                self.end(f"records {self.next_seq}–{reach.last_seq} were there, and are missing")
        if self._until_ms == LATEST_MS and not self._ended:
            return
        if self._until_ms > self._reaches_ms:
            latest = "" if self._ended else ", or --until latest"
            raise BackupError(
                f"the message log behind the backup {self._manifest.name} (shard "
                f"{self._manifest.shard}) reaches to {format_time(self._reaches_ms)}"
                f"{f', and {self._ended}' if self._ended else ''}: name that time or an earlier "
                f"one{latest}"
            )


def read_reaches(files: Files, manifests: Sequence[BackupManifest]) -> dict[int, int]:
    """Until when each timeline of these backups of a shard reaches, by its number. Raises
    DiskError."""
    found = {}
    for manifest in manifests:
        if manifest.timeline and manifest.timeline not in found:
            place = timeline_place(manifest.stamp, manifest.shard, manifest.timeline)
            with contextlib.suppress(DamageError):
                if (reach := read_reach(files, place)) is not None:
                    found[manifest.timeline] = reach.through_ms
    return found
