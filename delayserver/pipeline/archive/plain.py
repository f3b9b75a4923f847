"""The archive as plain Parquet: one file for each hour, with no table above it.

    PATH/date=2026-11-20/2026-11-20T15.STORE-0.3600.parquet


The name tells the hour, the data directory, the shard, and the first seq of the hour.

An hour is written as a whole. An hour that comes back replaces its own file. If the server has
deleted the hour before it came back, it begins with another seq, and so has another name. We
promise no more than this: a file is there as a whole or not at all.

Cost: a rename for each file; in a store of objects, a copy. Threads: the caller's.
"""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as F

from delayserver.pipeline.archive.place import ArchivePlace
from delayserver.pipeline.archive.rows import ROW_TYPES
from delayserver.pipeline.archive.writing import WrittenFile
from storage.buckets import hour_name

STAGING = "_staging"


@dataclass(frozen=True, slots=True)
class HourLayout:
    """A group is an hour, and a file."""

    owner: str
    first_seqs: dict[int, int]

    def group(self) -> Column:
        """See `writing.Layout`."""
        return F.col("hour")

    def name(self, group: int, task: str, number: int) -> str:
        """See `writing.Layout`."""
        name = hour_name(group)
        date, seq = name.partition("T")[0], self.first_seqs[group]
        run = task.partition("-")[0]
        return f"{STAGING}/{run}/{task}/date={date}/{name}.{self.owner}.{seq}.parquet"

    @property
    def may_cut(self) -> bool:
        """See `writing.Layout`."""
        return False


class PlainFiles:
    """Files at a place."""

    def __init__(self, place: ArchivePlace) -> None:
        self.place = place

    @property
    def file_schema(self) -> pa.Schema:
        """The schema of its files."""
        return pa.schema(list(ROW_TYPES.items()))

    @contextlib.contextmanager
    def running(self, run: str) -> Iterator[None]:
        """Wraps a run that writes: files that earlier runs have staged are deleted first."""
        for name in self.place.leftovers(STAGING):
            self.place.delete(name)
        yield
        self.place.delete_directory(f"{STAGING}/{run}")

    def layout(self, store: str, shard: int, first_seqs: Mapping[int, int]) -> HourLayout:
        """How to write hours of a shard, of which these are the first rows."""
        return HourLayout(f"{store}-{shard}", dict(first_seqs))

    def files_of(self, store: str, shard: int, hours: Collection[int]) -> list[str]:
        """No files stay: each hour is written as a whole."""
        return []

    def add(self, files: Sequence[WrittenFile], hours: Iterable[Mapping[str, object]]) -> None:
        """Give the files their names."""
        for file in files:
            self.place.rename(file.name, file.name.split("/", 3)[3])
