"""The importer: examines a staged import before anything is decided.

It decides nothing and appends nothing: it checks every staged byte, makes it durable, and looks up
which of its keys the catalog has. The event loop decides from that (`Imports`). Changes in between
are in the overlays.

Cost: reads all staged bytes once; the keys in slices, in the catalog's order.
Threads: the importer thread.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from delayserver.decisions.imported_keys import ImportedKeys, Repeats, sort_keys
from delayserver.errors import NotFoundError
from delayserver.records.tables import KeyEntry, unpack_key_entry
from delayserver.schedule.wheel_rows import PAYLOAD_MAX_BYTES
from storage.catalog import Catalog, Table
from storage.files import Files
from storage.staging import Manifest, manifest_path, read_manifest, verify

LOOK_UP_KEYS = 5_000


@dataclass(slots=True)
class Verified:
    """The findings of the importer thread."""

    manifest: Manifest
    keys: ImportedKeys
    repeats: Repeats
    known: dict[int, KeyEntry]
    """Keys that the catalog has, by their index in `keys`."""
    subject_counts: Counter[int]
    """How many rows each subject has, by its number."""
    last_due_ms: int


@dataclass(slots=True)
class VerifyRequest:
    """Verify the staged import; answer with `on_verified`."""

    import_id: str
    progress: Callable[[int, int], None]
    """Told rows done, of how many; any thread. May raise."""


class Importer:
    """The work of the importer thread."""

    def __init__(self, files: Files, catalog: Catalog, stamp: int) -> None:
        self._files = files
        self._catalog = catalog
        self._stamp = stamp

    def verify(self, request: VerifyRequest) -> Verified:
        """Check everything that was staged, make it durable, and look up its keys.

        Raises StagingError, NotFoundError."""
        try:
            manifest = read_manifest(self._files, request.import_id)
        except FileNotFoundError:
            path = manifest_path(request.import_id)
            raise NotFoundError(f"there is no {path} in the data directory") from None
        count = manifest.count
        staged = verify(
            self._files,
            manifest,
            stamp=self._stamp,
            payload_max_bytes=PAYLOAD_MAX_BYTES,
            progress=lambda rows: request.progress(rows, count),
        )
        keys, repeats = sort_keys(staged.keys)
        known: dict[int, KeyEntry] = {}
        for start in range(0, len(keys), LOOK_UP_KEYS):
            # In slices, since one call holds the GIL from its beginning to its end.
            request.progress(count, count)
            hashes = keys.hashes(start, start + LOOK_UP_KEYS)
            found = self._catalog.get_many(Table.KEYS, hashes)
            if found:
                for index, key_hash in enumerate(hashes, start):
                    if key_hash in found:
                        known[index] = unpack_key_entry(found[key_hash])
        return Verified(manifest, keys, repeats, known, staged.subject_counts, staged.last_due_ms)
