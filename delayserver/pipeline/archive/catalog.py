"""A catalog of one table that needs no service: the versions of the table's metadata, numbered.

    metadata/v1.metadata.json, v2.metadata.json, …    each never changed
    metadata/version-hint.text                        about which is the newest

Such a catalog is known as a Hadoop catalog: DuckDB, Spark and pyiceberg open such a directory as a
table. A commit creates the next version. If two commit at the same time, one fails. The hint may be
behind, so we do not rely on it.

A commit is not tried again on top of another's: its rows were compared with the table as it was.

Cost: a few small files to read and write for each commit. Threads: the caller's.
"""

import contextlib
import re

from pyarrow.fs import FileSystem
from pyiceberg.catalog.noop import NoopCatalog
from pyiceberg.exceptions import ValidationError
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.table import CommitTableResponse, Table
from pyiceberg.table.metadata import TableMetadata, TableMetadataUtil
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.table.update import (
    AddSnapshotUpdate,
    TableRequirement,
    TableUpdate,
    update_table_metadata,
)

from delayserver.errors import PipelineError
from delayserver.pipeline.archive.place import ArchivePlace

METADATA = "metadata"
HINT = f"{METADATA}/version-hint.text"
TABLE = ("archive",)
"""The name of the one table, for pyiceberg."""
_VERSION = re.compile(r"v(\d+)\.metadata\.json")


class ArchiveConflictError(PipelineError):
    """Another program has changed the table since it was read."""

    def __init__(self, url: str) -> None:
        super().__init__(
            f"another job has changed the archive at {url} meanwhile; nothing of this one's last "
            "step counts: run it again"
        )


class ArchiveIO(PyArrowFileIO):
    """The files of a table, read by the file system of its place, which has keys and endpoints."""

    def __init__(self, place: ArchivePlace) -> None:
        super().__init__()
        self._place = place
        self.fs_by_scheme = self._filesystem

    def __reduce__(self) -> tuple[type["ArchiveIO"], tuple[ArchivePlace]]:
        return ArchiveIO, (self._place,)

    def _filesystem(self, scheme: str, netloc: str | None) -> FileSystem:
        return self._place.filesystem


class DirectoryCatalog(NoopCatalog):
    """The table at a place."""

    def __init__(self, place: ArchivePlace) -> None:
        super().__init__("directory")
        self._place = place
        self.io = ArchiveIO(place)

    def find(self) -> Table | None:
        """The table as it is now; None if there is none. Raises PipelineError, DiskError."""
        version = self._newest()
        return self._table(version, self._read(version)) if version else None

    def create(self, metadata: TableMetadata) -> Table:
        """Begin a table. Raises ArchiveConflictError if there is one already."""
        return self._table(1, self._write(1, metadata))

    def commit_table(
        self,
        table: Table,
        requirements: tuple[TableRequirement, ...],
        updates: tuple[TableUpdate, ...],
    ) -> CommitTableResponse:
        """Make the next version, if `table` is the newest. Raises ArchiveConflictError."""
        version = _version_of(table.metadata_location)
        for requirement in requirements:
            requirement.validate(table.metadata)
        metadata = update_table_metadata(
            table.metadata, updates, metadata_location=table.metadata_location
        )
        for update in updates:
            if isinstance(update, AddSnapshotUpdate):
                self._sync(update.snapshot)
        self._write(version + 1, metadata)
        self._delete_old_metadata(self.io, table.metadata, metadata)
        return CommitTableResponse(
            metadata=metadata, metadata_location=self._place.location(_name(version + 1))
        )

    def _table(self, version: int, metadata: TableMetadata) -> Table:
        return Table(TABLE, metadata, self._place.location(_name(version)), self.io, self)

    def _newest(self) -> int:
        """The number of the newest version; 0: there is none."""
        version = 0
        with contextlib.suppress(FileNotFoundError, ValueError):
            version = int(self._place.read(HINT))
        if not self._place.exists(_name(version)):
            names = (name.rpartition("/")[2] for name in self._place.files_below(METADATA))
            found = (_VERSION.fullmatch(name) for name in names)
            version = max((int(one[1]) for one in found if one), default=0)
        while self._place.exists(_name(version + 1)):
            version += 1
        return version

    def _read(self, version: int) -> TableMetadata:
        name = _name(version)
        try:
            return TableMetadataUtil.parse_raw(self._place.read(name).decode())
        except (ValidationError, UnicodeDecodeError) as error:
            raise PipelineError(
                f"{self._place.location(name)} cannot be read ({error}); restore it, or delete it: "
                "then the version before counts, and hours that the server has are archived again"
            ) from error

    def _write(self, version: int, metadata: TableMetadata) -> TableMetadata:
        try:
            data = metadata.model_dump_json(exclude_none=True).encode()
            self._place.create(_name(version), data)
        except FileExistsError:
            raise ArchiveConflictError(self._place.url) from None
        self._place.replace(HINT, str(version).encode())
        return metadata

    def _sync(self, snapshot: Snapshot) -> None:
        """Sync the files that pyiceberg has written of a snapshot, before the snapshot counts."""
        self._place.sync(self._place.name_of(snapshot.manifest_list))
        for manifest in snapshot.manifests(self.io):
            if manifest.added_snapshot_id == snapshot.snapshot_id:
                self._place.sync(self._place.name_of(manifest.manifest_path))


def _name(version: int) -> str:
    return f"{METADATA}/v{version}.metadata.json"


def _version_of(location: str) -> int:
    found = _VERSION.fullmatch(location.rpartition("/")[2])
    assert found is not None, location
    return int(found[1])
