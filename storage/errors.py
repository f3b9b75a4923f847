"""The errors of everything that touches a disk, in one tree.

StorageError
├── DiskError               the operating system refused a call (EIO, EACCES, …)
│   ├── MissingFileError    no file or directory of that name; a FileNotFoundError, too
│   ├── ShortageError       a resource is used up for now; the same call may succeed later
│   │   ├── DiskFullError       no space is left
│   │   └── ExhaustedError      the system has no descriptor, or no memory, for the call
│   └── SyncError           fsync failed: the durable state is unknown, the process must end (I9)
├── DamageError             bytes that were read do not match their checksum (I8)
│   └── UnreadableError     bytes that the device does not give back (a bad sector): damage, too
├── ShardCountError         made with another number of shards
├── ShardNumberError        the directory of another shard
├── ForeignDirectoryError   the directory of something else than the cluster's shard
├── DirectoryKindError      a directory is something else than its opener needs, or is half made
├── OtherLifeError          a directory belongs to another server, or to one before a restore
├── FormatVersionError      written by a version of this software that is newer than this one
├── UnknownKindError        a record of a part that this server does not have, or of a newer server
├── FormatOutdatedError     written by an older version, and not carried over yet
├── RepairUnfinishedError   a repair was interrupted, and some files are old, some new
├── StagingError            a staged import does not match its manifest; nothing of it counts
├── DirectoryLockedError    another process owns the data directory (I12)
├── ReplicatedLogError      a shard's replicated log cannot be read on from here
│   ├── RecordDamageError   a record does not match its checksum, or claims to be another record
│   ├── NewerRecordError    a record of a type, or with a flag, that this version does not know
│   ├── OffsetGapError      a record does not stand at the offset that follows the one before it
│   ├── OffsetRangeError    the log does not hold an offset any more, or ends before it
│   ├── LogReplacedError    a record at an offset differs from the one that this replica read there
│   └── OtherHistoryError   the log goes on behind a replica that has something else
├── BackupError             a backup cannot be made, or restored from
├── CopySourceError         a replica cannot be copied from this node now
├── NoPeerError             … nor from any other
├── EngineError             the engine of the replicated logs refused a call, or cannot be reached
├── EngineSettingsError     a setting that says where the logs are, or how to reach them, is wrong
├── ClusterMissingError     no cluster was made of that name
├── ClusterDiffersError     the cluster was made otherwise than it is asked for
├── FencedError             another process may be in office, or the outcome of an append is unknown
└── CatalogError            the catalog (LMDB) failed

Every error says what happened, where, and what to do. A mistake of our own is an `assert`,
never one of these.
"""

import errno
import os
from typing import Final

EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
"""The errors of the system when it has no descriptor, or no memory, for a call."""


class StorageError(Exception):
    """Base of all errors that come from the disk."""


class DiskError(StorageError):
    """The operating system refused a file call."""

    def __init__(self, call: str, path: str, reason: str, advice: str = "check the disk") -> None:
        super().__init__(f"{call} failed on {path}: {reason}; {advice}")
        self.call = call
        self.path = path
        self.reason = reason


class MissingFileError(DiskError, FileNotFoundError):
    """There is no file, or no directory, of that name.

    A caller that expects this catches FileNotFoundError. For every other caller it is an error of
    the disk like any other, so that a file which disappears under the server does not pass for a
    mistake of ours, which would end the process."""

    def __init__(self, call: str, path: str) -> None:
        advice = "it was deleted, or its disk is not mounted"
        super().__init__(call, path, os.strerror(errno.ENOENT), advice)
        self.errno = errno.ENOENT


class ShortageError(DiskError):
    """A resource is used up for now. Nothing durable was lost, and the call may be tried again."""


class ExhaustedError(ShortageError):
    """The process or the system has no descriptor, or no memory, for the call (EXHAUSTED)."""

    def __init__(self, call: str, path: str, reason: str) -> None:
        advice = "have fewer files and connections open, or raise the limit (ulimit -n)"
        super().__init__(call, path, reason, advice)


class DiskFullError(ShortageError):
    """No space is left on the device (ENOSPC, EDQUOT)."""

    def __init__(self, call: str, path: str, reason: str) -> None:
        super().__init__(call, path, reason, "free some space on the device of the data directory")


class SyncError(DiskError):
    """fsync or fdatasync failed.

    The kernel may have dropped the dirty pages, so a second fsync that succeeds would prove
    nothing. It is never retried: the process ends and recovers from the disk (I9).
    """

    def __init__(self, call: str, path: str, reason: str) -> None:
        super().__init__(call, path, reason, "check the device; the server recovers at its start")


class DamageError(StorageError):
    """Bytes on disk do not match their checksum, or are not the record that they claim to be.

    `first_seq` and `last_seq` bound the missing seqs, as far as the neighbours tell (0: unknown).
    """

    def __init__(
        self, path: str, offset: int, reason: str, first_seq: int = 0, last_seq: int = 0
    ) -> None:
        seqs = f", seq {first_seq}–{last_seq}" if last_seq else ""
        super().__init__(
            f"{path} is damaged at offset {offset}{seqs}: {reason}; "
            "see `delayserver check --data-dir DIR`, then restore the file from a copy, or run "
            "`delayserver repair --data-dir DIR`"
        )
        self.path = path
        self.offset = offset
        self.reason = reason
        self.first_seq = first_seq
        self.last_seq = last_seq


class UnreadableError(DamageError):
    """The device does not give these bytes back: a sector is bad.

    It is damage of this place and of nothing else, so it is no reason to end (I8)."""

    def __init__(self, path: str, offset: int, reason: str) -> None:
        super().__init__(path, offset, f"it cannot be read ({reason})")
        self.cause = reason


class ShardCountError(StorageError):
    """A directory was made with another number of shards than it is opened with."""

    def __init__(self, path: str, made: int, asked: int) -> None:
        self.made = made
        self.asked = asked
        super().__init__(
            f"{path} was made with {made} shard{'s' * (made != 1)}, which cannot be changed: start "
            f"it with --shards {made}, or give another directory to {asked}"
        )


class ShardNumberError(StorageError):
    """A directory is that of another shard than its place says."""

    def __init__(self, path: str, found: int, expected: int) -> None:
        super().__init__(
            f"{path} is the directory of shard {found}, not of shard {expected}; put the "
            "directories of the shards where they were"
        )


class ForeignDirectoryError(StorageError):
    """The directory is not that of the shard of this cluster."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path} is the directory of another server, shard or cluster; start this node with "
            "another --data-dir, which may be empty: it copies what it needs from the log"
        )


class DirectoryKindError(StorageError):
    """A directory is not of the kind that its opener needs, or not all of it is there."""

    def __init__(self, path: str, found: str, advice: str) -> None:
        super().__init__(f"{path} is {found}; {advice}")
        self.path = path
        self.found = found


class OtherLifeError(StorageError):
    """A directory belongs to another server, or to this server as it was before it was restored."""

    def __init__(self, path: str, what: str, advice: str) -> None:
        super().__init__(
            f"{path} is {what} of another server, or of this one before it was restored; {advice}"
        )
        self.path = path


class FormatVersionError(StorageError):
    """The data was written by a newer version, and this version does not know the format."""

    def __init__(self, where: str, found: int, known: int) -> None:
        super().__init__(
            f"{where} has format version {found}, this server knows up to {known}; "
            "start a server at least as new as the one that wrote it"
        )
        self.found = found
        self.known = known


class UnknownKindError(StorageError):
    """A record of the message log whose kind this server cannot file."""

    def __init__(self, kind: int, seq: int) -> None:
        super().__init__(
            f"messages: the record {seq} is of kind {kind}, which this server does not know; start "
            "a server that has the part it belongs to, and is at least as new as the one that "
            "wrote it"
        )
        self.kind = kind
        self.seq = seq


class FormatOutdatedError(StorageError):
    """The directory was written by an older version; a start carries it over, nothing else does."""

    def __init__(self, where: str, found: int) -> None:
        super().__init__(
            f"{where} has format version {found}: start a server on it once, which carries it "
            "over, then repair it; if no server starts, repair it with the version that wrote it"
        )
        self.found = found


class StagingError(StorageError):
    """A staged import is missing, damaged, or was made for another data directory."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}; nothing was adopted, stage the import again")
        self.path = path
        self.reason = reason


class DirectoryLockedError(StorageError):
    """Another process has the data directory open."""

    def __init__(self, path: str, owner: str) -> None:
        super().__init__(
            f"the data directory {path} is in use by {owner}; "
            "stop that server first, or choose another --data-dir"
        )


class RepairUnfinishedError(StorageError):
    """A repair was interrupted: some files are those from before it, some those from after it."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"a repair of {path} was interrupted; "
            "run `delayserver repair --data-dir DIR` again, it goes on where it was"
        )


class ReplicatedLogError(StorageError):
    """A shard's replicated log cannot be read on from here.

    No server may skip such a record. A server that can read it may come to another verdict on all
    records that follow (I15)."""

    def __init__(self, log: str, offset: int, reason: str, advice: str) -> None:
        super().__init__(f"{log} at offset {offset}: {reason}; {advice}")
        self.log = log
        self.offset = offset
        self.reason = reason


class RecordDamageError(ReplicatedLogError):
    """A record does not match its checksum, or is not the record that it claims to be (I8)."""

    def __init__(self, log: str, offset: int, reason: str) -> None:
        advice = "every replica of the shard stops here; compare the copies on the log's servers"
        super().__init__(log, offset, reason, advice)


class NewerRecordError(ReplicatedLogError):
    """A newer version wrote this record; this one cannot tell whether it counts."""

    def __init__(self, log: str, offset: int, what: str) -> None:
        advice = "start a server at least as new as the one that wrote it"
        super().__init__(log, offset, f"the record has {what}, which this version lacks", advice)


class OffsetGapError(ReplicatedLogError):
    """The offsets of the log do not follow one another.

    Records were deleted before this replica had read them, the log was made anew, or a transaction
    has written its markers into it."""

    def __init__(self, log: str, offset: int, expected: int) -> None:
        advice = (
            "copy the shard from a replica that has read on, and use no transactions on the log"
        )
        super().__init__(log, offset, f"offset {expected} was expected", advice)
        self.expected = expected


class OffsetRangeError(ReplicatedLogError):
    """The log does not hold an offset: the record there was deleted, or the log ends before it."""

    def __init__(self, log: str, offset: int, first: int, end: int) -> None:
        reason = f"the log begins at {first} and ends at {end}"
        advice = (
            "copy the shard from a replica that has read on; if the log has lost its end, the "
            "replica that has read furthest knows what is missing"
        )
        super().__init__(log, offset, reason, advice)
        self.first = first
        self.end = end


class LogReplacedError(ReplicatedLogError):
    """The log has lost its end, or was made anew, and has grown again since."""

    def __init__(self, log: str, offset: int) -> None:
        advice = "copy the shard from a replica that has read this log"
        super().__init__(log, offset, "this replica has read another record there", advice)


class OtherHistoryError(ReplicatedLogError):
    """The log had lost its end, and goes on behind the replica of a node that people have named:
    this one has something else, or it is not known whether it has the same."""

    def __init__(self, log: str, offset: int) -> None:
        advice = "what this replica has is set aside, and the shard is copied from another one"
        reason = "the log goes on there behind another replica than this one"
        super().__init__(log, offset, reason, advice)


class BackupError(StorageError):
    """A backup cannot be made, or nothing can be restored from it; the text says why, and what to
    do."""


class CopySourceError(StorageError):
    """A replica cannot be copied from another node now: it does not answer, it refuses, its data is
    damaged, or it holds something else."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"{peer}: {reason}")
        self.peer = peer
        self.reason = reason


class NoPeerError(StorageError):
    """No other node has given a copy of the shard."""

    def __init__(self, shard: int, refusals: list[CopySourceError]) -> None:
        tried = "; ".join(map(str, refusals)) or "none is known"
        super().__init__(
            f"no other node gives a copy of shard {shard} ({tried}); start a node that has a sound "
            "replica of it, or repair one that has"
        )
        self.refusals = refusals


class EngineError(StorageError):
    """The engine that keeps the replicated logs refused a call, or cannot be reached."""

    def __init__(self, call: str, where: str, reason: str, advice: str) -> None:
        super().__init__(f"{call} failed at {where}: {reason}; {advice}")
        self.call = call
        self.where = where
        self.reason = reason


class EngineSettingsError(StorageError):
    """A setting cannot be used that says where the replicated logs are, or how they are reached."""

    def __init__(self, where: str, reason: str, advice: str) -> None:
        super().__init__(f"{where}: {reason}; {advice}")
        self.where = where
        self.reason = reason


class ClusterMissingError(StorageError):
    """The log that describes the cluster is empty."""

    def __init__(self, log: str) -> None:
        super().__init__(
            f"{log} holds no cluster; make one with `delayserver cluster create --cluster URL`, or "
            "give the URL that it was made with"
        )
        self.log = log


class ClusterDiffersError(StorageError):
    """A caller asks for a cluster that differs from the one that was made."""

    def __init__(self, cluster: str, what: str, made: object, asked: object) -> None:
        super().__init__(
            f"the cluster {cluster} was made with {what} {made}, which cannot be changed, and not "
            f"{asked}; ask for {made}, or make another cluster under another name"
        )
        self.made = made
        self.asked = asked


class FencedError(StorageError):
    """The outcome of an append is unknown, or another process may be in office (R1).

    The process answers no more requests: it ends, and starts again as a standby."""

    def __init__(self, log: str, reason: str) -> None:
        super().__init__(
            f"{log}: {reason}; this process ends and follows the log again, whoever owns it then"
        )
        self.log = log
        self.reason = reason


class CatalogError(StorageError):
    """The catalog refused a transaction."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(f"the catalog failed to {what}: {reason}; check disk space and the device")
