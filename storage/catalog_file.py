"""The file of the catalog, read without LMDB to find damage in it.

Every value carries a checksum over table, key and value (`seal`). Together with the walk over the
pages (`storage.catalog_pages`) nothing in the file has to be believed. They find a page that is not
the page it claims to be, a missing entry, and a value that was changed or stands under another key.

Cost: 10 ms per MiB; of a file above VERIFY_BYTES a start reads one page in fifty. Threads: none.
"""

import os
from collections.abc import Callable, Collection, Sequence

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from storage import catalog_pages as lmdb_pages
from storage.catalog_columns import Columns, as_columns, row_checksums
from storage.files import OsFile, open_to_read
from storage.frame import CRC_BYTES, Damage

DATA_FILE = "data.mdb"
VERIFY_BYTES = 8 * 1024 * 1024
"""The most that a start reads of the catalog, besides its branches: about 100,000 keys."""
_ATTEMPTS = 20


class _Prefixes(dict[str, bytes]):
    """The prefix that stands for a table in a checksum."""

    def __missing__(self, table: str) -> bytes:
        self[table] = prefix = table.encode() + b"\0"
        return prefix


_prefixes = _Prefixes()
_checksum: Callable[[bytes], int] = google_crc32c.value


def seal(table: str, key: bytes, value: bytes) -> bytes:
    """A value as it stands in the file: its checksum (u32), then the value."""
    return _checksum(_prefixes[table] + key + value).to_bytes(CRC_BYTES, "little") + value


def seal_columns(table: str, columns: Columns) -> NDArray[np.void]:
    """The values of `columns` as they stand in the file, checksum first (void, shape n)."""
    values = as_columns(columns.values)
    pairs = np.concatenate([as_columns(columns.keys), values], axis=1)
    checksums = row_checksums(_prefixes[table], pairs).astype("<u4")
    sealed = np.concatenate([as_columns(checksums), values], axis=1)
    return sealed.view(f"V{sealed.shape[1]}")[:, 0]


def unseal(table: str, key: bytes, sealed: bytes) -> bytes | None:
    """The value again, or None if it is not the value that was put under that key of that table."""
    value = sealed[CRC_BYTES:]
    crc = _checksum(_prefixes[table] + key + value)
    return value if crc.to_bytes(CRC_BYTES, "little") == sealed[:CRC_BYTES] else None


def unseal_many(table: str, pairs: Sequence[tuple[bytes, bytes]]) -> list[bytes] | None:
    """The values of pairs of key and sealed value, in their order.

    None unless every value matches its checksum: `unseal` tells which does not."""
    prefix = _prefixes[table]
    values = [sealed[CRC_BYTES:] for _, sealed in pairs]
    stored = b"".join([sealed[:CRC_BYTES] for _, sealed in pairs])
    whole = [prefix + key + value for (key, _), value in zip(pairs, values, strict=True)]
    counted = np.fromiter(map(_checksum, whole), "<u4", len(whole))
    return values if counted.tobytes() == stored else None


def _is_sound(entry: lmdb_pages.Entry) -> bool:
    return unseal(entry.table, entry.key, entry.value) is not None


def name_of(path: str) -> str:
    """The data file of the catalog at `path` as errors name it: `catalog/data.mdb`."""
    return f"{os.path.basename(path)}/{DATA_FILE}"


def _open_data(path: str) -> OsFile:
    return open_to_read(os.path.join(path, DATA_FILE), name_of(path))


def find_damage(
    path: str, tables: Collection[str], *, verify_all: bool, transaction: int | None = None
) -> list[Damage]:
    """The damage in the file of the catalog at `path`; nothing if there is no file.

    Without `verify_all` the leaves of a file above VERIFY_BYTES are left out. `transaction`: the
    snapshot to look at, which a read transaction holds; otherwise the newest."""
    try:
        file = _open_data(path)
    except FileNotFoundError:
        return []
    try:
        # A server that is running may write the pages while they are read: again, then.
        for _ in range(1 if transaction else _ATTEMPTS):
            size = file.size()
            meta = lmdb_pages.read_meta(file, size)
            found = lmdb_pages.verify(
                file,
                size,
                tables,
                transaction=transaction,
                leaves=verify_all or size <= VERIFY_BYTES,
                is_sound=_is_sound,
            )
            if not found or lmdb_pages.read_meta(file, file.size()) == meta:
                break
        return found
    finally:
        file.close()
