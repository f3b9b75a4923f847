"""The catalog: an index of all that must be found without reading a log. Only it knows LMDB.

Tables of bytes to bytes, ordered by key; a commit is one synced transaction. It is an index, not a
log: everything in it follows from the message log up to the checkpoint that is stored in the same
transaction, so the two can never disagree; and it can be built again from the schedule log and the
definitions log. Only the keys may be ahead of it, which META says.

LMDB trusts its file, and this module does not (I8). A value carries a checksum over table, key and
value, and every reader verifies it. Before LMDB maps the file, `storage.catalog_file` checks that
it is sound. It reads all of a file that is not longer than VERIFY_BYTES, and of any file if asked
to. In a longer file it skips the leaves, so that a start does not take longer the more messages are
waiting (I10). `verify` reads those leaves.

Cost: `get` about 2 µs, of a view 1 µs, checksum included; writes 3 µs per pair, 0.7 µs in columns,
one commit about 1 ms; opening 10 ms per MiB, up to VERIFY_BYTES.
Threads: one writer (the replay thread); readers on any thread, each call a transaction of its own,
so that it sees the newest commit.
"""

import errno
import os
import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from itertools import takewhile
from operator import itemgetter
from typing import Any, Final, Protocol, Self

import lmdb

from storage import catalog_file
from storage.catalog_columns import Columns, ascending
from storage.catalog_file import seal, seal_columns, unseal, unseal_many
from storage.errors import EXHAUSTED, CatalogError, DamageError, DiskFullError, ExhaustedError
from storage.files import DIRECTORY_MODE, FILE_MODE, Files
from storage.frame import Damage
from storage.rows import PART_NUMBERS

MAX_BYTES: Final = 64 * 1024**3
"""The size to which it may grow by default, and the size that a reader maps."""

_PUT_SLICE = 500
_VERIFY_ATTEMPTS = 3
_KEY = itemgetter(0)


class Table(StrEnum):
    """The tables. Numbers in keys are big-endian, so that they sort."""

    META = "meta"
    """Name → value: format version, checkpoint."""
    HOURS = "hours"
    """Hour → committed length, counts, state."""
    KEYS = "keys"
    """Key hash → seq, due time, content digest, state."""
    CHANGES = "changes"
    """Message seq + subscription → where it is now, if not where its id says."""
    SUBJECTS = "subjects"
    """Subject id → name."""
    SUBSCRIPTIONS = "subscriptions"
    """Subscription id → definition."""
    DEAD_LETTERS = "dead_letters"
    """Subscription + schedule row seq → the dead letter."""
    WATCHES = "watches"
    """Watch key + message seq → published due time, the effect of an event."""
    HEARTBEATS = "heartbeats"
    """Key → definition."""
    IMPORTS = "imports"
    """Import id → the rows that were adopted."""
    ARCHIVES = "archives"
    """Hour → the range that an archive of it covers."""
    SCHEDULES = "schedules"
    """Name → definition."""
    SCHEDULE_STATES = "schedule_states"
    """Name → next run, last run, counts."""
    SOURCES = "sources"
    """Name → definition."""
    SOURCE_STATES = "source_states"
    """Name → next offset of each partition, counts."""
    DAMAGE = "damage"
    """Path + offset → the damage that was found there, and when."""

    @classmethod
    def _missing_(cls, value: object) -> "Self | None":
        """The table of a part: `Table("part_192")`. It is not among those that `Table` lists, and
        the file has it once an entry was put into it."""
        if not isinstance(value, str) or value not in _PART_NAMES:
            return None
        table = str.__new__(cls, value)
        table._name_, table._value_ = value.upper(), value
        cls._value2member_map_[value] = table
        return table

    def __reduce_ex__(self, protocol: object) -> tuple[type["Table"], tuple[str]]:
        # Python 3.11.2 pickles by name, and finds no name of a part.
        return Table, (str(self.value),)


_PART_NAMES: Final = {f"part_{number}": number for number in PART_NUMBERS}
PART_TABLES: Final = {Table(name): number for name, number in _PART_NAMES.items()}
"""The tables that parts may have, with their numbers in the definitions log."""
TABLES: Final = frozenset(table.value for table in (*Table, *PART_TABLES))

Writes = Mapping[Table, Sequence[tuple[bytes, bytes | None]]]
"""Per table the pairs to write; a value of None removes the key. Later pairs win."""
ManyWrites = Mapping[Table, Sequence[Columns]]
"""Per table the pairs to write, as columns of keys and values: for very many of them."""


class View(Protocol):
    """The catalog at one moment, for many look-ups of one thread in tables of the core.

    The system gets back no page that a view sees before `refresh`, so refresh it often."""

    def get(self, table: Table, key: bytes) -> bytes | None:
        """The value of a key, or None if there is none."""

    def get_many(self, table: Table, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """The values of those keys that are there."""

    def scan(self, table: Table, prefix: bytes) -> list[tuple[bytes, bytes]]:
        """The pairs whose key begins with `prefix`, in key order; for few."""

    def prefixes(self, table: Table, ascending: Sequence[bytes]) -> set[bytes]:
        """Those of the prefixes, all of one length, that some key begins with; values are not
        looked at."""

    def between(self, table: Table, first: bytes, until: bytes | None) -> list[tuple[bytes, bytes]]:
        """The pairs whose keys are from `first` on and before `until`, in key order; for few."""

    def refresh(self) -> None:
        """Let go of the moment: the next look-up sees the newest commit."""


def _opened(path: str, table: Table, key: bytes, sealed: bytes) -> bytes:
    """A value from the file at `path`. Raises DamageError."""
    value = unseal(table, key, sealed)
    if value is None:
        reason = f"{table}: entry {key.hex()} does not match its checksum"
        raise DamageError(catalog_file.name_of(path), 0, reason)
    return value


def _opened_many(
    path: str, table: Table, pairs: Sequence[tuple[bytes, bytes]]
) -> dict[bytes, bytes]:
    """Values by key, from pairs of key and sealed value. Raises DamageError for one that does not
    match its checksum."""
    values = unseal_many(table, pairs)
    if values is None:
        values = [_opened(path, table, key, sealed) for key, sealed in pairs]
    return dict(zip(map(_KEY, pairs), values, strict=True))


class Catalog(Protocol):
    """Ordered tables with atomic, durable commits.

    `get` and `scan` raise DamageError for a value that is not the one that was put there."""

    def get(self, table: Table, key: bytes) -> bytes | None:
        """The value of a key, or None if there is none."""

    def view(self) -> View:
        """Look-ups that see one moment, at a third of the cost of `get`."""

    def get_many(self, table: Table, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """The values of those keys that are there."""

    def scan(
        self, table: Table, start: bytes = b"", *, prefix: bytes = b""
    ) -> Iterator[tuple[bytes, bytes]]:
        """Pairs in key order from `start` on, as long as the key begins with `prefix`.

        The iterator sees one moment; it must not be kept open across a commit of its thread."""

    def scan_recent(self, table: Table) -> Iterator[tuple[bytes, bytes]]:
        """All pairs that were committed since `tidy` last moved pairs out of the table, and perhaps
        more; in key order. `tidy` moves no pair that is ahead of the checkpoint."""

    def size(self, table: Table) -> int:
        """How many pairs a table has, or a little more."""

    @property
    def run_keys_min(self) -> int:
        """So many keys take a commit no longer, and no more memory, than some."""

    def commit(self, writes: Writes, many: ManyWrites | None = None) -> None:
        """Apply all or nothing, `many` behind the rest; durable on return.

        Raises ShortageError, CatalogError."""

    def refill(self, table: Table, parts: Sequence[Columns], writes: Writes) -> None:
        """Let a table hold these pairs and no others, and apply `writes`, all or nothing; durable
        on return. Raises as `commit`."""

    def tidy(self, *, if_pressing: bool = False) -> bool:
        """Do a slice of the work that keeps commits and look-ups quick; True: there is more of it.
        `if_pressing`: only if it cannot wait until the server is less busy.

        Raises ShortageError: call it again. Raises CatalogError, DamageError, SyncError."""

    def freeze(self) -> "Frozen":
        """The catalog as it is now, to be copied while others write. Raises CatalogError."""

    def verify(self) -> list[Damage]:
        """Read every page and every value. Returns the damage, in the order it was found."""

    def close(self) -> None:
        """Release the file. Everything that was committed is durable already."""


class Frozen(Protocol):
    """One moment of a catalog, until it is closed."""

    def copy(self, files: Files, directory: str) -> None:
        """Write it into an empty directory that is there; not durable. Any thread may do it, and
        others go on meanwhile. Raises CatalogError, DiskFullError."""

    def close(self) -> None:
        """Let go of the moment."""


class LmdbCatalog:
    """The catalog in an LMDB environment at `path`, which may grow to `max_bytes`."""

    run_keys_min = sys.maxsize

    def __init__(
        self, path: str, *, max_bytes: int, readonly: bool = False, verify_all: bool = False
    ) -> None:
        """Verify the pages, as far as the top of this module says, and open it.

        Raises DamageError; CatalogError where LMDB does not open it."""
        self._path = path
        for damage in catalog_file.find_damage(path, TABLES, verify_all=verify_all):
            raise damage.error()
        if not readonly:
            # LMDB would give a directory the mode of its files.
            os.makedirs(path, DIRECTORY_MODE, exist_ok=True)
        try:
            self._environment = lmdb.open(
                path,
                map_size=max_bytes,
                max_dbs=len(TABLES),
                max_readers=256,
                readonly=readonly,
                mode=FILE_MODE,
                metasync=True,
                sync=True,
                # The backlog is larger than memory and access is random: read-ahead only evicts.
                readahead=False,
            )
            self._tables: dict[Table, Any] = {}
            for table in Table:
                # A reader leaves out a table that is newer than the directory: it is empty.
                with suppress(*([lmdb.NotFoundError] if readonly else [])):
                    name = table.value.encode()
                    self._tables[table] = self._environment.open_db(name, create=not readonly)
            for table in self._found_of_parts():
                self._open_of_part(table, create=False)
        except lmdb.Error as error:
            raise CatalogError("open", f"{error}") from error

    def _found_of_parts(self) -> list[Table]:
        with self._environment.begin() as transaction:
            names = [key.decode() for key, _ in transaction.cursor()]
        return [table for table in PART_TABLES if table.value in names]

    def _open_of_part(self, table: Table, *, create: bool = True) -> None:
        name = table.value.encode()
        self._tables[table] = self._environment.open_db(name, create=create)

    def verify(self) -> list[Damage]:
        """Read every page and every value. Returns the damage, in the order in which it was found.

        This works beside a running server, too: a transaction of its own keeps the pages as they
        are."""
        found: list[Damage] = []
        try:
            # Between a transaction and the look at its meta page there may be two commits: again.
            for _ in range(_VERIFY_ATTEMPTS):
                with self._environment.begin() as transaction:
                    found = catalog_file.find_damage(
                        self._path, TABLES, verify_all=True, transaction=transaction.id()
                    )
                if not found:
                    break
        except lmdb.Error as error:
            raise CatalogError("verify", f"{error}") from error
        return found

    # ── reading and writing ────────────────────────────────────────────────────────────────────

    def get(self, table: Table, key: bytes) -> bytes | None:
        if table not in self._tables:
            return None
        try:
            with self._environment.begin(db=self._tables[table]) as transaction:
                sealed: bytes | None = transaction.get(key)
        except lmdb.Error as error:
            raise CatalogError(f"read {table}", f"{error}") from error
        return sealed if sealed is None else _opened(self._path, table, key, sealed)

    def view(self) -> "LmdbView":
        return LmdbView(self._path, self._environment, self._tables)

    def get_many(self, table: Table, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        if table not in self._tables:
            return {}
        try:
            with self._environment.begin(db=self._tables[table]) as transaction:
                found = transaction.cursor().getmulti(keys)
        except lmdb.Error as error:
            raise CatalogError(f"read {table}", f"{error}") from error
        return _opened_many(self._path, table, found)

    def scan(
        self, table: Table, start: bytes = b"", *, prefix: bytes = b""
    ) -> Iterator[tuple[bytes, bytes]]:
        if table not in self._tables:
            return
        try:
            with self._environment.begin(db=self._tables[table]) as transaction:
                cursor = transaction.cursor()
                first = max(start, prefix)
                if not (cursor.set_range(first) if first else cursor.first()):
                    return
                for key, sealed in cursor:
                    if not key.startswith(prefix):
                        return
                    yield key, _opened(self._path, table, key, sealed)
        except lmdb.Error as error:
            raise CatalogError(f"scan {table}", f"{error}") from error

    def scan_recent(self, table: Table) -> Iterator[tuple[bytes, bytes]]:
        return self.scan(table)

    def size(self, table: Table) -> int:
        if table not in self._tables:
            return 0
        try:
            with self._environment.begin() as transaction:
                entries: int = transaction.stat(self._tables[table])["entries"]
        except lmdb.Error as error:
            raise CatalogError(f"read {table}", f"{error}") from error
        return entries

    def tidy(self, *, if_pressing: bool = False) -> bool:
        return False

    def commit(self, writes: Writes, many: ManyWrites | None = None) -> None:
        self._commit(writes, many or {}, ())

    def refill(self, table: Table, parts: Sequence[Columns], writes: Writes) -> None:
        self._commit(writes, {table: parts}, (table,))

    def _commit(self, writes: Writes, many: ManyWrites, emptied: Sequence[Table]) -> None:
        try:
            for table in writes:
                if table not in self._tables and writes[table]:
                    self._open_of_part(table)
            with self._environment.begin(write=True) as transaction:
                for table in emptied:
                    transaction.drop(self._tables[table], delete=False)
                for table, pairs in writes.items():
                    if not pairs:
                        continue
                    final = dict(pairs)
                    with transaction.cursor(db=self._tables[table]) as cursor:
                        puts = [(k, v) for k, v in final.items() if v is not None]
                        puts.sort(key=_KEY)
                        # In slices, since one call holds the GIL from its beginning to its end.
                        for start in range(0, len(puts), _PUT_SLICE):
                            piece = puts[start : start + _PUT_SLICE]
                            cursor.putmulti([(k, seal(table, k, v)) for k, v in piece])
                    for key in sorted(k for k, v in final.items() if v is None):
                        transaction.delete(key, db=self._tables[table])
                for table, parts in many.items():
                    if parts:
                        self._put_many(transaction, table, ascending(parts))
        except lmdb.MapFullError as error:
            raise DiskFullError("commit", "catalog", f"{error}") from error
        except lmdb.Error as error:
            # LMDB reports the system's error by its text alone. Either way nothing was committed.
            if os.strerror(errno.ENOSPC) in str(error):
                raise DiskFullError("commit", "catalog", f"{error}") from error
            if any(os.strerror(code) in str(error) for code in EXHAUSTED):
                raise ExhaustedError("commit", "catalog", f"{error}") from error
            raise CatalogError("commit", f"{error}") from error

    def _put_many(self, transaction: Any, table: Table, columns: Columns) -> None:
        keys, sealed = columns.keys, seal_columns(table, columns)
        with transaction.cursor(db=self._tables[table]) as cursor:
            for start in range(0, len(keys), _PUT_SLICE):
                end = start + _PUT_SLICE
                pairs = zip(keys[start:end].tolist(), sealed[start:end].tolist(), strict=True)
                cursor.putmulti(pairs)

    def freeze(self) -> "LmdbFrozen":
        try:
            return LmdbFrozen(self._environment, self._environment.begin())
        except lmdb.Error as error:
            raise CatalogError("freeze", f"{error}") from error

    def close(self) -> None:
        self._environment.close()


class LmdbFrozen:
    """A read transaction. Until its end no page that it sees is used again, so the file grows."""

    def __init__(self, environment: Any, transaction: Any) -> None:
        self._environment = environment
        self._transaction = transaction

    def copy(self, files: Files, directory: str) -> None:
        """The pages that are in use: 80 bytes a key, 0.1 µs each."""
        path = f"{files.root}/{directory}"
        try:
            self._environment.copy(path, compact=True, txn=self._transaction)
        except lmdb.Error as error:
            if os.strerror(errno.ENOSPC) in str(error):
                raise DiskFullError("copy", "catalog", f"{error}") from error
            raise CatalogError("copy", f"{error}") from error

    def close(self) -> None:
        self._transaction.abort()


class LmdbView:
    """A read transaction that is kept open. See `View`."""

    def __init__(self, path: str, environment: Any, tables: Mapping[Table, Any]) -> None:
        self._path = path
        self._environment = environment
        self._tables = tables
        self._transaction: Any = None

    def get(self, table: Table, key: bytes) -> bytes | None:
        try:
            sealed: bytes | None = self._moment().get(key, db=self._tables[table])
        except lmdb.Error as error:
            raise CatalogError(f"read {table}", f"{error}") from error
        return sealed if sealed is None else _opened(self._path, table, key, sealed)

    def get_many(self, table: Table, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        try:
            with self._moment().cursor(db=self._tables[table]) as cursor:
                found = cursor.getmulti(sorted(keys))  # neighbours share pages
        except lmdb.Error as error:
            raise CatalogError(f"read {table}", f"{error}") from error
        return _opened_many(self._path, table, found)

    def prefixes(self, table: Table, ascending: Sequence[bytes]) -> set[bytes]:
        found: set[bytes] = set()
        index = 0
        try:
            with self._moment().cursor(db=self._tables[table]) as cursor:
                while index < len(ascending) and cursor.set_range(ascending[index]):
                    here = cursor.key()
                    # One key that is far ahead answers for all prefixes before it.
                    index = bisect_right(ascending, here, index)
                    if here.startswith(ascending[index - 1]):
                        found.add(ascending[index - 1])
        except lmdb.Error as error:
            raise CatalogError(f"scan {table}", f"{error}") from error
        return found

    def scan(self, table: Table, prefix: bytes) -> list[tuple[bytes, bytes]]:
        pairs: list[tuple[bytes, bytes]] = []
        try:
            with self._moment().cursor(db=self._tables[table]) as cursor:
                found = cursor.set_range(prefix)
                while found and (key := cursor.key()).startswith(prefix):
                    pairs.append((key, _opened(self._path, table, key, cursor.value())))
                    found = cursor.next()
        except lmdb.Error as error:
            raise CatalogError(f"scan {table}", f"{error}") from error
        return pairs

    def between(self, table: Table, first: bytes, until: bytes | None) -> list[tuple[bytes, bytes]]:
        pairs: list[tuple[bytes, bytes]] = []
        try:
            with self._moment().cursor(db=self._tables[table]) as cursor:
                if cursor.set_range(first) if first else cursor.first():
                    pairs = list(takewhile(lambda pair: until is None or pair[0] < until, cursor))
        except lmdb.Error as error:
            raise CatalogError(f"scan {table}", f"{error}") from error
        return list(_opened_many(self._path, table, pairs).items())

    def _moment(self) -> Any:
        if self._transaction is None:
            self._transaction = self._environment.begin()
        return self._transaction

    def refresh(self) -> None:
        if self._transaction is not None:
            self._transaction.abort()
            self._transaction = None
