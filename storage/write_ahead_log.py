"""What a write-ahead log of a shard can do: `storage.message_log.MessageLog` on files of its own,
`storage.replicated.log.ReplicatedLog` on the log of a replicated engine.

Threads: `append` and `has_room` belong to the committer; `places`, `note_live`, `prepare_spare` and
`delete_through` to the replay thread; `read` and `first_seq` come before either starts.
"""

from collections.abc import Iterator
from typing import Protocol

from storage.frame import Damage, Frame


class WriteAheadLog(Protocol):
    """Appends groups, and reads back what a checkpoint does not cover."""

    torn: Damage | None
    """What `read` cut off at the end, since it was torn."""

    def read(self, from_seq: int) -> Iterator[Frame | Damage]:
        """Every frame that holds a record at or after `from_seq`, and every damaged stretch."""
        ...

    def first_seq(self) -> int | None:
        """The first seq that can be read; None where there is none."""
        ...

    def keep_segment(self, path: str) -> None:
        """What is at `path` has damage, and is kept for people."""
        ...

    def append(
        self, rows: bytes, payload: bytes, *, first_seq: int, last_seq: int, created_ms: int
    ) -> None:
        """Append one group; it is durable on return. Raises StorageError."""
        ...

    def has_room(self, total_bytes: int) -> bool:
        """Whether a group of so many bytes may be appended without waiting for long."""
        ...

    def places(self, seq: int) -> list[tuple[bytes, bytes]]:
        """What the catalog's META has to keep with a checkpoint at `seq`, so that the records
        behind it can be found again."""
        ...

    def wants_checkpoint(self, seq: int) -> bool:
        """Whether a checkpoint at `seq`, where the last one stands, would spare a reader much."""
        ...

    def note_live(self, hour: int) -> None:
        """`hour` is the newest one in the wheel, and with it all before."""
        ...

    def prepare_spare(self) -> None:
        """Do beforehand what the next appends would have to wait for."""
        ...

    def delete_through(self, seq: int) -> None:
        """A checkpoint covers everything up to `seq` (I6)."""
        ...

    def close(self) -> None:
        """Close what is open."""
        ...
