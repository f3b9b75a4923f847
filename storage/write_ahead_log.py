"""A write-ahead log of a shard, as each of its three users sees it.

    GroupLog           the committer appends groups
    TailLog            a start reads what no checkpoint covers
    CheckpointedLog    checkpoints say up to where it is not needed any more

`storage.message_log.MessageLog` on files of its own, and `storage.replicated.log.ReplicatedLog` on
the log of a replicated engine, are all three. A standby neither appends groups nor reads at its
start, so its log is a `CheckpointedLog` alone.

Threads: a `GroupLog` belongs to the committer, a `CheckpointedLog` to the replay thread; a
`TailLog` is read before either starts.
"""

from collections.abc import Iterator
from typing import Protocol

from storage.frame import Damage, Frame


class GroupLog(Protocol):
    """Appends groups."""

    def append(
        self, rows: bytes, payload: bytes, *, first_seq: int, last_seq: int, created_ms: int
    ) -> None:
        """Append one group; it is durable on return. Raises StorageError."""

    def has_room(self, total_bytes: int) -> bool:
        """Whether a group of so many bytes may be appended without waiting for long."""

    def close(self) -> None:
        """Close all open files."""


class TailLog(Protocol):
    """Reads back the records that a checkpoint does not cover."""

    torn: Damage | None = None
    """The stretch that `read` cut off at the end, since it was torn."""

    def read(self, from_seq: int) -> Iterator[Frame | Damage]:
        """Every frame that holds a record at or after `from_seq`, and every damaged stretch."""

    def first_seq(self) -> int | None:
        """The first seq that can be read; None where there is none."""

    def keep_segment(self, path: str) -> None:
        """The segment at `path` has damage, and is kept for people. A log without segments has
        none to keep."""
        return


class CheckpointedLog(Protocol):
    """Hears of checkpoints. A log that is found by its seqs, and that no other process follows,
    needs no more than `delete_through`."""

    def delete_through(self, seq: int) -> None:
        """A checkpoint covers everything up to `seq` (I6)."""

    def places(self, seq: int) -> list[tuple[bytes, bytes]]:
        """The entries that the catalog's META has to keep with a checkpoint at `seq`, so that the
        records behind it can be found again."""
        return []

    def wants_checkpoint(self, seq: int) -> bool:
        """Whether a checkpoint at `seq`, where the last one stands, would spare a reader much."""
        return False

    def note_live(self, hour: int) -> None:
        """`hour` is the newest one in the wheel, and with it all before. Raises StorageError."""
        return

    def prepare_spare(self) -> None:
        """Prepare beforehand, so that the next appends need not wait. Raises StorageError."""
        return


class WriteAheadLog(GroupLog, TailLog, CheckpointedLog):
    """The log of a shard that this process serves."""
