"""A catalog in memory, with the contract of the one on LMDB: what was committed survives, nothing
else.

A commit is one step, and one call of the plan of `Faults`, as a commit of LMDB is one sync.

Cost: a commit copies the tables that it changes, a crash all of them; a view copies nothing. A scan
of a view sorts its table: the tables of a test are small. Threads: one at a time.

Rejected: the real catalog on a directory in memory. No power loss and no fault can be played on it.
"""

import contextlib
import sys
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence

import google_crc32c
import msgspec

from storage.catalog import PART_TABLES, ManyWrites, Table, Writes
from storage.catalog_columns import Columns
from storage.catalog_file import DATA_FILE
from storage.errors import CatalogError, DamageError, DiskError, DiskFullError
from storage.files import Files
from storage.frame import CRC_BYTES, Damage
from tests.world.storage.faults import Faults, Moment

_TABLES = (*Table, *PART_TABLES)
CATALOG_KEY_BYTES_MAX = 511
"""The longest key that LMDB takes."""


class MemoryCatalog:
    """A catalog in memory. See `storage.catalog.Catalog`.

    A commit is one step: `crash` and `kill` return a catalog with all that was committed. With
    `faults`, every commit is one call of the plan, on the path "catalog": CatalogError for an I/O
    error, DiskFullError where there is no space, and in a crash all of it or nothing.
    """

    run_keys_min = sys.maxsize

    def __init__(self, faults: Faults | None = None) -> None:
        self.faults = faults
        self._values: dict[Table, dict[bytes, bytes]] = {table: {} for table in _TABLES}
        self._keys: dict[Table, list[bytes]] = {table: [] for table in _TABLES}
        self._closed = False

    def get(self, table: Table, key: bytes) -> bytes | None:
        self._check(f"read {table}", key)
        return self._values[table].get(key)

    def view(self) -> "MemoryView":
        return MemoryView(self)

    def get_many(self, table: Table, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        self._check(f"read {table}", *keys)
        values = self._values[table]
        return {key: values[key] for key in keys if key in values}

    def scan(
        self, table: Table, start: bytes = b"", *, prefix: bytes = b""
    ) -> Iterator[tuple[bytes, bytes]]:
        self._check(f"scan {table}")
        keys, values = self._keys[table], self._values[table]
        first = last = bisect_left(keys, max(start, prefix))
        while last < len(keys) and keys[last].startswith(prefix):
            last += 1
        # Taken at once: the iterator sees one moment.
        yield from [(key, values[key]) for key in keys[first:last]]

    def scan_recent(self, table: Table) -> Iterator[tuple[bytes, bytes]]:
        return self.scan(table)

    def size(self, table: Table) -> int:
        return len(self._values[table])

    def tidy(self, *, if_pressing: bool = False) -> bool:
        return False

    def refill(self, table: Table, parts: Sequence[Columns], writes: Writes) -> None:
        gone = [(key, None) for key in self._keys[table]]
        assert table not in writes, table
        self.commit({**writes, table: gone}, {table: parts})

    def commit(self, writes: Writes, many: ManyWrites | None = None) -> None:
        whole = {table: list(pairs) for table, pairs in writes.items()}
        for table, parts in (many or {}).items():
            for part in parts:
                pairs = zip(part.keys.tolist(), part.values.tolist(), strict=True)
                whole.setdefault(table, []).extend(pairs)
        self._commit(whole)

    def _commit(self, writes: Writes) -> None:
        self._check("commit", *(key for pairs in writes.values() for key, _ in pairs))
        if self.faults is None:
            self._apply(writes)
            return
        fault = self.faults.next_fault("commit", "catalog", takes_space=True)
        if fault is None:
            self._apply(writes)
            return
        if fault.moment is Moment.AFTER:
            self._apply(writes)
        error = self.faults.error(fault)
        if isinstance(error, DiskError) and not isinstance(error, DiskFullError):
            raise CatalogError("commit", error.reason)
        raise error

    def freeze(self) -> "MemoryFrozen":
        self._check("freeze")
        return MemoryFrozen(self._values)

    @classmethod
    def copied(cls, files: Files, directory: str) -> "MemoryCatalog":
        """The catalog that `MemoryFrozen.copy` wrote. Raises DamageError."""
        path = f"{directory}/{DATA_FILE}"
        with contextlib.closing(files.open(path)) as file:
            data = file.pread(file.size(), 0)
        checksum, text = data[:CRC_BYTES], data[CRC_BYTES:]
        if google_crc32c.value(text).to_bytes(CRC_BYTES, "little") != checksum:
            raise DamageError(path, 0, "it does not match its checksum")
        made = cls()
        for name, pairs in msgspec.msgpack.decode(text, type=dict[str, dict[bytes, bytes]]).items():
            made._values[Table(name)], made._keys[Table(name)] = pairs, sorted(pairs)
        return made

    def verify(self) -> list[Damage]:
        return []

    def close(self) -> None:
        self._closed = True

    def crash(self) -> "MemoryCatalog":
        """The catalog as the next process finds it. This one is closed from now on."""
        self._closed = True
        return self.duplicate()

    def duplicate(self) -> "MemoryCatalog":
        """Another one with the same in it."""
        heir = MemoryCatalog()
        heir._values = {table: dict(values) for table, values in self._values.items()}
        heir._keys = {table: list(keys) for table, keys in self._keys.items()}
        return heir

    kill = crash

    def _apply(self, writes: Writes) -> None:
        for table, pairs in writes.items():
            # A copy, since a view may look at the values as they are.
            keys, values = self._keys[table], dict(self._values[table])
            self._values = {**self._values, table: values}
            for key, value in pairs:
                if value is not None:
                    if key not in values:
                        insort(keys, key)
                    values[key] = bytes(value)
                elif values.pop(key, None) is not None:
                    del keys[bisect_left(keys, key)]

    def _check(self, what: str, *keys: bytes) -> None:
        if self._closed:
            raise CatalogError(what, "it is closed")
        for key in keys:
            if not 0 < len(key) <= CATALOG_KEY_BYTES_MAX:
                raise CatalogError(what, f"a key of {len(key)} bytes")


class MemoryFrozen:
    """A moment of a catalog in memory. See `storage.catalog.Frozen`."""

    def __init__(self, values: Mapping[Table, Mapping[bytes, bytes]]) -> None:
        self._values = values

    def copy(self, files: Files, directory: str) -> None:
        text = msgspec.msgpack.encode({str(table): self._values[table] for table in _TABLES})
        data = google_crc32c.value(text).to_bytes(CRC_BYTES, "little") + text
        with contextlib.closing(files.open(f"{directory}/{DATA_FILE}", create=True)) as file:
            file.pwrite([data], 0)

    def close(self) -> None:
        """Nothing is held."""


class MemoryView:
    """A look at a catalog in memory. See `storage.catalog.View`."""

    def __init__(self, catalog: MemoryCatalog) -> None:
        self._catalog = catalog
        self._values: dict[Table, dict[bytes, bytes]] | None = None

    def get(self, table: Table, key: bytes) -> bytes | None:
        self._catalog._check(f"read {table}", key)
        return self._look()[table].get(key)

    def get_many(self, table: Table, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        self._catalog._check(f"read {table}", *keys)
        values = self._look()[table]
        return {key: values[key] for key in keys if key in values}

    def prefixes(self, table: Table, ascending: Sequence[bytes]) -> set[bytes]:
        self._catalog._check(f"scan {table}")
        keys = sorted(self._look()[table])
        return {
            prefix
            for prefix in ascending
            if any(key.startswith(prefix) for key in keys[bisect_left(keys, prefix) :][:1])
        }

    def scan(self, table: Table, prefix: bytes) -> list[tuple[bytes, bytes]]:
        self._catalog._check(f"scan {table}")
        values = self._look()[table]
        return sorted(pair for pair in values.items() if pair[0].startswith(prefix))

    def between(self, table: Table, first: bytes, until: bytes | None) -> list[tuple[bytes, bytes]]:
        pairs = self.scan(table, b"")
        return [pair for pair in pairs if pair[0] >= first and (until is None or pair[0] < until)]

    def _look(self) -> dict[Table, dict[bytes, bytes]]:
        if self._values is None:
            self._values = self._catalog._values
        return self._values

    def refresh(self) -> None:
        self._values = None
