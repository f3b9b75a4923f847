"""The rows of hours, kept in a directory of the driver until the hours are judged.

    rows of an hour ── appended ──▶ SHARD-HOUR.schedule, SHARD-HOUR.dispatch
    how much of it counts ── replaced as a whole, once a micro-batch ──▶ index

So a micro-batch counts as a whole or not at all, and only once, however often Spark repeats it.
Bytes behind the lengths in the index are cut off when the directory is opened. The index also has a
checksum of each file, which is compared before rows are judged.

Nothing is synced but the index: a machine that loses power may lose rows that the index names,
which the checksum finds. Then the stream is begun anew.

Cost: a file is opened for each hour that a micro-batch has rows of; the index is 100 bytes an hour.
Threads: one, the driver's.
"""

import os
from pathlib import Path
from typing import Final, Literal

import google_crc32c
import msgspec
import numpy as np

from delayserver.errors import PipelineError
from storage.frame import Rows
from storage.rows import DISPATCH_DTYPE, SCHEDULE_DTYPE

INDEX: Final = "index"
FORMAT: Final = 1
Kind = Literal["schedule", "dispatch"]
_DTYPES: Final = {"schedule": SCHEDULE_DTYPE, "dispatch": DISPATCH_DTYPE}


class WatchStateError(PipelineError):
    """The files that a stream has kept cannot be used."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}; begin with another --state")


class KeptRows(msgspec.Struct, array_like=True):
    """A file of rows, as far as it counts."""

    length_bytes: int = 0
    checksum: int = 0
    """crc32c."""


class KeptHour(msgspec.Struct, array_like=True):
    """An hour of a shard."""

    schedule: KeptRows = msgspec.field(default_factory=KeptRows)
    dispatch: KeptRows = msgspec.field(default_factory=KeptRows)

    @property
    def length_bytes(self) -> int:
        """The length of both files."""
        return self.schedule.length_bytes + self.dispatch.length_bytes


class KeptShard(msgspec.Struct, array_like=True):
    """The state of a shard, besides its hours."""

    place: bytes = b""
    """`pieces.pack_place`; empty: its log was not begun."""
    first_seq: int = 0
    """The first known seq; records before it are not known."""
    subjects: dict[int, str] = {}
    subscriptions: dict[int, bytes] = {}
    """Definitions as they stand in the log, by number, deleted ones too."""
    hours: dict[int, KeptHour] = {}


class ToldHour(msgspec.Struct, array_like=True):
    """An hour of all shards when it was judged last."""

    size_bytes: int = 0
    """The size of its rows."""
    is_old: bool = False
    said: str = ""
    """The verdict that was reported last; empty: none was."""
    is_closed: bool = False
    """Whether none of its messages waited."""
    is_forgotten: bool = False
    """Whether its rows were deleted."""


class KeptIndex(msgspec.Struct):
    """The kept state, up to a micro-batch."""

    format: Literal[1]
    stamps: tuple[int, ...]
    """The stamps of the cluster's shards: they tell it from other clusters."""
    batch: int = -1
    """The last micro-batch that counts."""
    shards: dict[int, KeptShard] = {}
    told: dict[int, ToldHour] = {}
    """Hours that were judged."""
    late: int = 0
    """Rows that came for hours that were reported and forgotten."""


class HourStore:
    """The rows of hours, and the state that a stream needs to go on."""

    def __init__(self, directory: Path, stamps: tuple[int, ...]) -> None:
        """Open a directory, or make it. Raises WatchStateError, OSError."""
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.index = self._read_index(stamps)
        for shard in range(len(stamps)):
            self.index.shards.setdefault(shard, KeptShard())
        self._cut_back()

    def _read_index(self, stamps: tuple[int, ...]) -> KeptIndex:
        path = self._directory / INDEX
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return KeptIndex(FORMAT, stamps)
        try:
            index = msgspec.msgpack.decode(data, type=KeptIndex)
        except msgspec.DecodeError as error:
            raise WatchStateError(path, f"it cannot be read ({error})") from error
        if index.stamps != stamps:
            raise WatchStateError(path, "it is of another cluster")
        return index

    def _cut_back(self) -> None:
        """Cut the files to the lengths in the index, and delete the others."""
        wanted = {
            self._path(shard, hour, kind): getattr(kept, kind).length_bytes
            for shard, one in self.index.shards.items()
            for hour, kept in one.hours.items()
            for kind in _DTYPES
        }
        for path in self._directory.iterdir():
            length_bytes = wanted.get(path, 0)
            if path.suffix.removeprefix(".") not in _DTYPES:
                continue
            if not length_bytes:
                path.unlink()
            elif path.stat().st_size > length_bytes:
                os.truncate(path, length_bytes)

    def append(self, shard: int, hour: int, kind: Kind, rows: Rows) -> None:
        """Add rows to those of an hour; they count from the next `commit` on."""
        kept: KeptRows = getattr(self.index.shards[shard].hours.setdefault(hour, KeptHour()), kind)
        data = rows.tobytes()
        with self._path(shard, hour, kind).open("ab") as file:
            file.write(data)
        kept.length_bytes += len(data)
        kept.checksum = google_crc32c.extend(kept.checksum, data)

    def rows(self, shard: int, hour: int, kind: Kind) -> Rows:
        """The rows of an hour, in the order in which they came. Raises WatchStateError."""
        kept = self.index.shards[shard].hours.get(hour, KeptHour())
        wanted: KeptRows = getattr(kept, kind)
        path = self._path(shard, hour, kind)
        data = path.read_bytes() if wanted.length_bytes else b""
        if (len(data), google_crc32c.value(data)) != (wanted.length_bytes, wanted.checksum):
            raise WatchStateError(path, "it is not what was written")
        return np.frombuffer(data, _DTYPES[kind])

    def commit(self, batch: int) -> None:
        """Let all rows that were appended up to this micro-batch count."""
        self.index.batch = batch
        path = self._directory / INDEX
        new = path.with_suffix(".new")
        with new.open("wb") as file:
            file.write(msgspec.msgpack.encode(self.index))
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)

    def forget(self, hour: int) -> None:
        """Drop the rows of an hour; the next `commit` makes it count."""
        for shard in self.index.shards.values():
            shard.hours.pop(hour, None)

    def tidy(self) -> None:
        """Delete the files of hours that were forgotten."""
        self._cut_back()

    def _path(self, shard: int, hour: int, kind: str) -> Path:
        return self._directory / f"{shard:04d}-{hour}.{kind}"
