"""Many files replaced as one step: after a crash all of them are old, or all of them can be new.

    write the new files into BACKUP/new/…  →  REPAIR holds the plan  →  rename each old file
    to BACKUP/… and each new one into its place  →  change the catalog  →  REPAIR is removed

Until REPAIR has its name nothing has happened. From then on `finish` carries out the plan, now or
in another process, and skips the steps that are done already. No server starts meanwhile
(`storage.directory`). So the backup costs no copy: it is the old files themselves.

Cost: the new files are written once; two renames per file, and some syncs per directory. Threads:
none.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence

from storage.catalog import Catalog, Table
from storage.directory import REPAIR_FILE
from storage.errors import DamageError
from storage.files import File, Files, read_past, replace_file

_COPY_BYTES = 1 << 20


class Swap:
    """The files to replace, and where the old files go: `backup`, a directory."""

    def __init__(self, files: Files, backup: str) -> None:
        self._files = files
        self.backup = backup
        self._replace: dict[str, bool] = {}
        """Paths, and whether there is a new file for each; otherwise it is removed."""
        self.writes: dict[Table, dict[bytes, bytes | None]] = {}
        """Changes of the catalog that belong to it, as in `Catalog.commit`."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self._replace and not self.writes

    def put(self, table: Table, key: bytes, value: bytes | None) -> None:
        """Change the catalog."""
        self.writes.setdefault(table, {})[key] = value

    def remove(self, path: str) -> None:
        """A file goes into the backup, and nothing comes in its place."""
        self._replace[path] = False

    @contextlib.contextmanager
    def new_file(self, path: str) -> Iterator[File]:
        """The file that will be at `path`."""
        with self._written(self.new_path(path)) as file:
            yield file

    def new_path(self, path: str) -> str:
        """Where the file is made that will be at `path`, for who makes it by himself."""
        self._replace[path] = True
        new = f"{self.backup}/new/{path}"
        self._files.make_directory(_parent(new))
        return new

    def replace(self, path: str) -> None:
        """The file that will be at `path` stands below `BACKUP/new` already, durably."""
        self._replace[path] = True

    def copy(self, path: str) -> None:
        """Put a copy of a file into the backup; it is going to be changed by other means.

        Zeros stand where the file cannot be read."""
        file = self._files.open(path)
        try:
            with self._written(f"{self.backup}/{path}") as target:
                target.truncate(size := file.size())
                for start in range(0, size, _COPY_BYTES):
                    count = min(_COPY_BYTES, size - start)
                    for offset, data, error in read_past(file.pread, count, start):
                        if error is None:
                            target.pwrite([data], offset)
        finally:
            file.close()

    def write(self, name: str, text: str) -> None:
        """A file of the backup itself."""
        with self._written(f"{self.backup}/{name}") as file:
            file.pwrite([text.encode()], 0)

    def commit(self) -> None:
        """Decide it. Everything that is new is durable by then."""
        for parent in sorted({_parent(path) for path in self._replace}):
            self._files.make_directory(_below(self.backup, parent))
            self._files.make_directory(_below(f"{self.backup}/new", parent))
            self._files.sync_directory(_below(f"{self.backup}/new", parent))
            self._files.make_directory(parent)
        plan = {
            "backup": self.backup,
            "replace": self._replace,
            "writes": {
                table: {key.hex(): value and value.hex() for key, value in pairs.items()}
                for table, pairs in self.writes.items()
            },
        }
        replace_file(self._files, REPAIR_FILE, json.dumps(plan, indent=1).encode())

    @contextlib.contextmanager
    def _written(self, path: str) -> Iterator[File]:
        self._files.make_directory(_parent(path))
        file = self._files.open(path, create=True)
        try:
            file.truncate(0)
            yield file
            file.fdatasync()
        finally:
            file.close()
        self._files.sync_directory(_parent(path))


def is_unfinished(files: Files) -> bool:
    """Whether a swap was decided and not carried out."""
    return files.exists(REPAIR_FILE)


def unfinished_backup(files: Files) -> str:
    """The backup of a swap that was decided. Raises DamageError for a broken plan."""
    return _read_plan(files)[0]


def finish(files: Files, open_catalog: Callable[[], Catalog]) -> str:
    """Carry out the plan; returns the backup. Raises DamageError for a broken plan."""
    backup, replace, writes = _read_plan(files)
    for path, is_new in replace.items():
        old, new = f"{backup}/{path}", f"{backup}/new/{path}"
        if is_new and not files.exists(new):
            continue
        if files.exists(path) and not files.exists(old):
            files.rename(path, old)
        if is_new:
            files.rename(new, path)
    # There may be thousands of files, and no more than a few directories.
    for parent in sorted({_parent(path) for path in replace}):
        files.sync_directory(_below(backup, parent))
        files.sync_directory(parent)
    if writes:
        with contextlib.closing(open_catalog()) as catalog:
            catalog.commit(writes)
    files.unlink(REPAIR_FILE)
    files.sync_directory("")
    return backup


_Writes = dict[Table, Sequence[tuple[bytes, bytes | None]]]


def _read_plan(files: Files) -> tuple[str, dict[str, bool], _Writes]:
    file = files.open(REPAIR_FILE)
    try:
        plan = json.loads(file.pread(file.size(), 0))
        writes: _Writes = {
            Table(table): [
                (bytes.fromhex(key), None if value is None else bytes.fromhex(value))
                for key, value in pairs.items()
            ]
            for table, pairs in plan["writes"].items()
        }
        return plan["backup"], plan["replace"], writes
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"not the plan of a repair ({error})"
        raise DamageError(REPAIR_FILE, 0, reason) from error
    finally:
        file.close()


def _below(directory: str, path: str) -> str:
    return f"{directory}/{path}" if path else directory


def _parent(path: str) -> str:
    return path.rpartition("/")[0]
