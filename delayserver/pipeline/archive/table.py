"""The archive as a table of Apache Iceberg: days and buckets of subjects, sorted by due time.

The rows of an hour in the table are the only truth: a snapshot adds all files of a step or none, so
no list beside the table says which hours count. Its summary names the hours for people
(`delayserver.hours`).

The data files are ours (`writing`); manifests and metadata are pyiceberg's. A run that did not come
to its end, or a task that was tried again, leaves files that no snapshot names. A run leaves a note
while it is at work (`_runs/`). If the next run finds a note, it compares all files with all
snapshots, and deletes those that no snapshot names. A task may outlive its run, so the note stays
for an hour. A store of objects has no lock, so there all of that waits for a day, since the run may
still be at work.

Cost: a commit reads the footer of each new file, and writes a manifest. Threads: the caller's.
"""

import contextlib
import json
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io.pyarrow import (
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
    schema_to_pyarrow,
)
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema, index_by_id
from pyiceberg.table import FileScanTask, Table
from pyiceberg.table.metadata import TableMetadata, new_table_metadata
from pyiceberg.table.sorting import SortField, SortOrder
from pyiceberg.transforms import BucketTransform, DayTransform, IdentityTransform
from pyiceberg.typedef import Record
from pyiceberg.types import (
    BinaryType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestamptzType,
)
from pyspark.sql import Column
from pyspark.sql import functions as F

from delayserver.errors import PipelineError
from delayserver.pipeline.archive.catalog import HINT, METADATA, DirectoryCatalog
from delayserver.pipeline.archive.place import ArchivePlace
from delayserver.pipeline.archive.writing import WrittenFile, bucket_column

DATA = "data"
RUNS = "_runs"
HOURS_PROPERTY = "delayserver.hours"
BUCKETS = 8
"""Buckets of subjects in a new table."""
TASK_S = 3600.0
"""A task whose run was killed may go on for so long."""
SNAPSHOTS_S = 5 * 24 * 3600.0
"""A reader may go on for so long with a snapshot that is not the newest."""
DAY_MS = 24 * 3600 * 1000

_TEXT, _INT, _LONG, _TIME = StringType(), IntegerType(), LongType(), TimestamptzType()
_DELIVERY = StructType(
    NestedField(22, "subscription", _TEXT),
    NestedField(23, "state", _TEXT),
    NestedField(24, "attempt", _INT),
    NestedField(25, "settled", _TIME),
    NestedField(26, "lateness_ms", _LONG),
)
SCHEMA = Schema(
    NestedField(1, "store", _TEXT, doc="the data directory that it comes from"),
    NestedField(2, "id", _TEXT, doc="of the message"),
    NestedField(3, "subject", _TEXT),
    NestedField(4, "key", _TEXT),
    NestedField(5, "headers", MapType(18, _TEXT, 19, _TEXT, value_required=False)),
    NestedField(6, "body", _TEXT, doc="JSON text; null if it is anything else"),
    NestedField(7, "body_bytes", BinaryType(), doc="a body that is no JSON text"),
    NestedField(8, "due", _TIME),
    NestedField(9, "filed", _TIME, doc="when it was put into its hour"),
    NestedField(10, "made_by", _TEXT, doc="publish, run, move, retry, redrive or fire"),
    NestedField(11, "attempt", _INT, doc="from 1"),
    NestedField(12, "state", _TEXT, doc="delivered, cancelled, moved, retried, dead or dropped"),
    NestedField(13, "deliveries", ListType(20, _DELIVERY, element_required=False)),
    NestedField(14, "seq", _LONG, doc="of the entry, one of a kind in its shard"),
    NestedField(15, "message_seq", _LONG, doc="of the message, as it was first published"),
    NestedField(16, "hour", _INT, doc="since 1970, in UTC"),
    NestedField(17, "shard", _INT),
)
_DUE, _SUBJECT, _SEQ = (SCHEMA.find_field(name).field_id for name in ("due", "subject", "seq"))
_PROPERTIES = {
    "write.format.default": "parquet",
    "write.parquet.compression-codec": "zstd",
    # Old versions of the metadata stay, because programs may be reading them just now.
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "100",
    "commit.retry.num-retries": "0",
    # Otherwise each run adds one manifest, and each plan reads all of them.
    "commit.manifest-merge.enabled": "true",
}


@dataclass(frozen=True, slots=True)
class TableLayout:
    """Days and buckets: a group is a partition of the table."""

    buckets: int

    def group(self) -> Column:
        """See `writing.Layout`."""
        day = F.expr(f"unix_millis(due) div {DAY_MS}")
        return day * self.buckets + bucket_column(self.buckets, "subject")

    def partition(self, group: int) -> tuple[int, int]:
        """Day since 1970, and bucket."""
        return divmod(group, self.buckets)

    def name(self, group: int, task: str, number: int) -> str:
        """See `writing.Layout`."""
        day, bucket = self.partition(group)
        date = time.strftime("%Y-%m-%d", time.gmtime(day * DAY_MS / 1000))
        return f"{DATA}/due_day={date}/subject_bucket={bucket}/{task}-{number}.parquet"

    @property
    def may_cut(self) -> bool:
        """See `writing.Layout`."""
        return True


class ArchiveTable:
    """The table at a place, as this job has left it."""

    def __init__(self, place: ArchivePlace, buckets: int = BUCKETS) -> None:
        """`buckets`: for a new table, which is made with the first commit."""
        self.place = place
        self._catalog = DirectoryCatalog(place)
        self._found = self._catalog.find()
        self._metadata = self._found.metadata if self._found else _new_metadata(place, buckets)

    def layout(self, store: str, shard: int, first_seqs: Mapping[int, int]) -> TableLayout:
        """How its files are laid out, whatever the hours are."""
        return self._layout

    @property
    def _layout(self) -> TableLayout:
        bucket = self._metadata.spec().fields[1].transform
        assert isinstance(bucket, BucketTransform), bucket
        return TableLayout(bucket.num_buckets)

    @property
    def file_schema(self) -> pa.Schema:
        """The schema of the data files that this job writes, with the numbers of the fields.

        It is the schema that the table was made with. Other programs may have added, renamed or
        dropped columns since: Iceberg finds a column of a file by its number, and one that the file
        does not have is null."""
        return schema_to_pyarrow(self._own_schema)

    @property
    def _own_schema(self) -> Schema:
        return min(self._metadata.schemas, key=lambda schema: schema.schema_id)

    @property
    def current(self) -> Table | None:
        """The table; None if there is none yet."""
        return self._found

    def files_of(self, store: str, shard: int, hours: Collection[int]) -> list[str]:
        """The data files that may hold rows of these hours."""
        if self._found is None or not hours:
            return []
        numbers = ", ".join(map(str, sorted(hours)))
        wanted = f"store = '{store}' and shard = {shard} and hour in ({numbers})"
        tasks = self._found.scan(row_filter=wanted).plan_files()
        return sorted(self.place.name_of(task.file.file_path) for task in tasks)

    def add(self, files: Sequence[WrittenFile], hours: Iterable[Mapping[str, object]]) -> None:
        """Add files, all at once; `hours`: the hours of their rows. Raises ArchiveConflictError."""
        if self._found is None:
            self._found = self._catalog.create(self._metadata)
        added = [self._data_file(one) for one in files]
        with self._found.transaction() as transaction:
            update = transaction.update_snapshot(snapshot_properties=_told(hours))
            with update.merge_append() as append:
                for one in added:
                    append.append_data_file(one)
        self._metadata = self._found.metadata

    def small_files(self, bytes_max: int) -> list[dict[str, int]]:
        """The files of each partition that are smaller than that, with their sizes. Files with
        columns of other programs are left out, because rewriting them would lose these columns."""
        groups: dict[tuple[object, ...], dict[str, int]] = {}
        for task in self._planned():
            file = task.file
            if (
                file.file_size_in_bytes < bytes_max
                and not task.delete_files
                and not self._others_in(file)
            ):
                partition = tuple(file.partition[field] for field in range(len(file.partition)))
                found = groups.setdefault((file.spec_id, *partition), {})
                found[self.place.name_of(file.file_path)] = file.file_size_in_bytes
        return list(groups.values())

    def refuse_others(self, names: Collection[str]) -> None:
        """Raises PipelineError if one of these files holds columns that this job does not know,
        since rewriting it would lose them."""
        for task in self._planned():
            name = self.place.name_of(task.file.file_path)
            if name in names and (others := self._others_in(task.file)):
                fields = self._metadata.schema()
                known = [fields.find_column_name(one) or f"number {one}" for one in others]
                raise PipelineError(
                    f"{self.place.location(name)} holds columns of other programs "
                    f"({', '.join(known)}), which writing it anew would lose: it stays as it is"
                )

    def _others_in(self, file: DataFile) -> list[int]:
        """The numbers of columns in a file that are not ours."""
        return sorted(set(file.value_counts or ()) - set(index_by_id(self._own_schema)))

    def replace(
        self,
        names: Collection[str],
        files: Sequence[WrittenFile],
        hours: Iterable[Mapping[str, object]] = (),
    ) -> None:
        """Replace files by others, all at once: the newest snapshot has the old ones or the new
        ones. `hours`: the hours of the rows that were written anew.

        Raises ArchiveConflictError."""
        assert self._found is not None
        old = [
            one.file for one in self._planned() if self.place.name_of(one.file.file_path) in names
        ]
        new = [self._data_file(one) for one in files]
        with (
            self._found.transaction() as transaction,
            transaction.update_snapshot(snapshot_properties=_told(hours)).overwrite() as overwrite,
        ):
            for one in old:
                overwrite.delete_data_file(one)
            for one in new:
                overwrite.append_data_file(one)
        self._metadata = self._found.metadata

    def _planned(self) -> list[FileScanTask]:
        return list(self._found.scan().plan_files()) if self._found else []

    def expire(self, age_s: float = SNAPSHOTS_S) -> int:
        """Give up all older snapshots except the newest one, and the files that only they name;
        returns how many files."""
        if self._found is None:
            return 0
        older = datetime.fromtimestamp(time.time() - age_s, UTC)
        self._found.maintenance.expire_snapshots().older_than(older).commit()
        self._metadata = self._found.metadata
        return len(self.sweep())

    def _data_file(self, written: WrittenFile) -> DataFile:
        """The entry of a manifest for a file. It is read from the footer, so the file is there.

        Raises PipelineError if it is not: the driver and the executors see other directories."""
        schema = self._own_schema
        try:
            with (
                self.place.errors("read", written.name) as path,
                self.place.filesystem.open_input_file(path) as file,
            ):
                size = file.size()
                footer = pq.read_metadata(file)
        except FileNotFoundError:
            raise PipelineError(
                f"{self.place.location(written.name)} was written by an executor, and is not there "
                "for the driver; mount the same directory on all of them, or archive to a store"
            ) from None
        statistics = data_file_statistics_from_parquet_metadata(
            footer,
            compute_statistics_plan(schema, self._metadata.properties),
            parquet_path_to_id_mapping(schema),
        )
        return DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=self.place.location(written.name),
            file_format=FileFormat.PARQUET,
            partition=Record(*self._layout.partition(written.group)),
            file_size_in_bytes=size,
            sort_order_id=self._metadata.default_sort_order_id,
            spec_id=self._metadata.default_spec_id,
            equality_ids=None,
            key_metadata=None,
            **statistics.to_serialized_dict(),
        )

    # ── files that an unfinished run leaves ────────────────────────────────────────────────────

    @contextlib.contextmanager
    def running(self, run: str) -> Iterator[None]:
        """Wraps a run that writes: files that earlier runs have left are deleted first, and this
        run leaves nothing if it ends by itself."""
        left = self.place.leftovers(RUNS)
        if left:
            self.sweep()
            written_s = self.place.files_below(RUNS)
            for name in left:
                if written_s[name] < time.time() - TASK_S:
                    self.place.delete(name)
        note = f"{RUNS}/{run}"
        self.place.replace(note, b"")
        yield
        # An error leaves the note, as a kill does: the table may not name the files that were
        # written.
        self.place.delete(note)

    def sweep(self) -> list[str]:
        """Delete the files that no snapshot names; returns their names."""
        # Existing files are listed first, so that files added later are not among them.
        found = [*self.place.leftovers(DATA), *self.place.leftovers(METADATA)]
        named = self._named()
        swept = [
            name
            for name in found
            if name not in named and not name.endswith((".metadata.json", HINT))
        ]
        for name in swept:
            self.place.delete(name)
        return swept

    def _named(self) -> set[str]:
        """All files of all snapshots."""
        if self._found is None:
            return set()
        locations: set[str] = set()
        io = self._found.io
        for snapshot in self._found.metadata.snapshots:
            locations.add(snapshot.manifest_list)
            for manifest in snapshot.manifests(io):
                if manifest.manifest_path in locations:
                    continue
                locations.add(manifest.manifest_path)
                entries = manifest.fetch_manifest_entry(io, discard_deleted=True)
                locations |= {entry.data_file.file_path for entry in entries}
        return {self.place.name_of(location) for location in locations}


def _told(hours: Iterable[Mapping[str, object]]) -> dict[str, str]:
    """The hours as a snapshot names them, for people."""
    named = list(hours)
    return {HOURS_PROPERTY: json.dumps(named, separators=(",", ":"))} if named else {}


def _new_metadata(place: ArchivePlace, buckets: int) -> TableMetadata:
    spec = PartitionSpec(
        PartitionField(_DUE, 1000, DayTransform(), "due_day"),
        PartitionField(_SUBJECT, 1001, BucketTransform(buckets), "subject_bucket"),
    )
    order = SortOrder(
        SortField(source_id=_DUE, transform=IdentityTransform()),
        SortField(source_id=_SEQ, transform=IdentityTransform()),
    )
    return new_table_metadata(SCHEMA, spec, order, place.url, dict(_PROPERTIES))
