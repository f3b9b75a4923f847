"""The check of staged imports: the files that the message log still needs are there, and whole.

Cost: reads the staged files of the imports behind the checkpoint. Threads: one, any.
"""

import msgspec

from delayserver.records.tables import read_checkpoint
from delayserver.schedule.expansion import ImportRecord, import_key
from delayserver.schedule.wheel_rows import PAYLOAD_MAX_BYTES
from storage import kinds
from storage.catalog import Catalog, Table
from storage.check import Report, Severity
from storage.directory import open_identity
from storage.errors import StagingError, StorageError
from storage.files import Files
from storage.frame import Frame, unseal
from storage.rows import RecordKind
from storage.staging import DIRECTORY, Manifest, Part, import_of, verify


class StagedImports:
    """The imports of one directory, while it is checked."""

    def __init__(self, files: Files, catalog: Catalog) -> None:
        self._files = files
        self._catalog = catalog
        self._checkpoint_seq = read_checkpoint(catalog)
        self._needed: list[tuple[int, ImportRecord]] = []
        """Imports that no checkpoint covers: last seq, and the record of the staged rows."""

    def visit(self, frame: Frame) -> None:
        """Note an import that no checkpoint covers."""
        row = frame.rows[-1]
        if row["kind"] != RecordKind.IMPORT or frame.last_seq <= self._checkpoint_seq:
            return
        start, length = int(row["payload_offset"]), int(row["payload_length"])
        data = unseal((frame.payload or b"")[start : start + length])
        if data is not None:  # else `check_directory` says so
            record = msgspec.msgpack.decode(data, type=ImportRecord)
            self._needed.append((frame.last_seq, record))

    def compare(self, report: Report) -> None:
        """Check what is staged for those, and name what else is staged."""
        needed = set()
        stamp = open_identity(self._files, random_bytes=None, of=kinds.ANY).stamp
        for last_seq, record in self._needed:
            needed.add(record.id)
            parts = tuple(Part(*part) for part in record.parts)
            manifest = Manifest(record.id, stamp, 0, parts)
            try:
                verify(
                    self._files,
                    manifest,
                    stamp=stamp,
                    payload_max_bytes=PAYLOAD_MAX_BYTES,
                    sync=False,
                )
            except StorageError as error:
                # A server deletes them after the next checkpoint.
                if read_checkpoint(self._catalog) < last_seq:
                    first_seq = last_seq - record.count + 1
                    path = error.path if isinstance(error, StagingError) else DIRECTORY
                    report.add(path, f"{error}", first_seq=first_seq, last_seq=last_seq)
        found = map(import_of, self._files.list(DIRECTORY))
        for import_id in sorted({name for name in found if name} - needed):
            if self._catalog.get(Table.IMPORTS, import_key(import_id)) is not None:
                reason = "what was staged for it is not needed any more; the next start deletes it"
            else:
                reason = (
                    "staged, and not adopted: run the load again with "
                    f"--id {import_id}, or delete its files"
                )
            path = f"{DIRECTORY}/{import_id}"
            report.add(path, reason, severity=Severity.NOTE)
