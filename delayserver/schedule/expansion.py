"""Expansion: from the one record of an import to the rows that it stands for.

    IMPORT record (first seq, parts, rows left out)  +  staged files  =  rows of the schedule log

Row n of the import has the seq of the record plus n. So the schedule log stays a pure function of
the message log and the staged files, which are kept until a checkpoint covers the record. Filing
after a crash writes the same rows as before it (I7).

The core files imports, and the part `imports` decides about them before: so the record of an import
and the table of those that were adopted stand here.

Cost: one pass over the staged files, a few megabytes at a time. Threads: belongs to the replay
thread.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from delayserver.records.tables import must
from storage import staging
from storage.errors import ShortageError, StagingError
from storage.files import Files, size_of
from storage.frame import Damage, Frame, Rows, damaged_payloads
from storage.rows import select
from storage.staging import Part, StagedRows

DUPLICATE_DTYPE = np.dtype([("row", "<u4"), ("seq", "<u8"), ("due_ms", "<i8")])
"""A row that was left out since its key is taken, and by which message; due as in its id."""


class ImportRecord(msgspec.Struct, array_like=True, frozen=True):
    """The payload of an IMPORT record (MessagePack)."""

    id: str
    count: int
    """Rows, and seqs, of the import."""
    parts: list[tuple[str, int, int, int]]
    """File name, bytes, rows, checksum (storage.staging.Part)."""
    duplicates: bytes = b""
    """DUPLICATE_DTYPE, in row order: the rows that are left out."""
    conflicts: int = 0
    """How many of them have other content than the message that holds the key."""

    def left_out(self) -> NDArray[np.void]:
        """The duplicates as an array."""
        return np.frombuffer(self.duplicates, DUPLICATE_DTYPE)

    @property
    def accepted(self) -> int:
        """How many messages it makes."""
        return self.count - len(self.duplicates) // DUPLICATE_DTYPE.itemsize


class ImportState(msgspec.Struct, array_like=True, frozen=True):
    """A value of the table IMPORTS (MessagePack)."""

    first_seq: int
    adopted_ms: int
    record: ImportRecord

    @property
    def last_seq(self) -> int:
        """The last of the seqs that it took."""
        return self.first_seq + self.record.count - 1


def import_key(import_id: str) -> bytes:
    """A key of the table IMPORTS."""
    return import_id.encode()


def pack_import(state: ImportState) -> bytes:
    """A value of the table IMPORTS."""
    return msgspec.msgpack.encode(state)


def unpack_import(value: bytes) -> ImportState:
    """The state in a value of the table IMPORTS. Raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(value, type=ImportState)


def check_import(key: bytes, value: bytes) -> None:
    """Check an entry of the table IMPORTS. Raises one of `records.tables.UNREADABLE`."""
    record = unpack_import(value).record
    must(import_key(record.id) == key, "a key of another import")
    must(len(record.duplicates) % DUPLICATE_DTYPE.itemsize == 0, "duplicates of another length")


SLICE_BYTES = 4 * 1024 * 1024
"""Bytes that are filed in one step, so that neither event loop nor other records wait long."""


class Piece(NamedTuple):
    """Rows of one hour with their final seqs; payload offsets count from the blob."""

    rows: Rows
    payload: bytes


class Staging:
    """The staged files of one data directory, for the code that files their rows."""

    def __init__(self, files: Files, stamp: int, slice_bytes: int = SLICE_BYTES) -> None:
        self._files = files
        self._stamp = stamp
        self._slice_bytes = slice_bytes

    def expansion(self, record: ImportRecord, first_seq: int) -> "Expansion":
        """The import that a record adopted, to be filed slice by slice."""
        return Expansion(self._files, record, first_seq, self._stamp, self._slice_bytes)

    def check(self, record: ImportRecord) -> None:
        """Raises StagingError where a file of the import is not there as a whole."""
        for part in (Part(*part) for part in record.parts):
            path = f"{staging.DIRECTORY}/{part.file}"
            if size_of(self._files, path) < part.bytes:
                raise StagingError(path, f"it is not there, and the import {record.id} is adopted")

    def ids(self) -> set[str]:
        """The imports of which there are any files."""
        found = (staging.import_of(name) for name in self._files.list(staging.DIRECTORY))
        return {import_id for import_id in found if import_id is not None}

    def delete(self, import_id: str) -> None:
        """Delete the staged files of an import."""
        staging.delete(self._files, import_id)


class Expansion:
    """An import that is being filed."""

    def __init__(
        self, files: Files, record: ImportRecord, first_seq: int, stamp: int, slice_bytes: int
    ) -> None:
        self._slice_bytes = slice_bytes
        self.record = record
        self.first_seq = first_seq
        self.last_seq = first_seq + record.count - 1
        self._files = files
        self._stamp = stamp
        self._duplicates = record.left_out()["row"]
        self._frames: Iterator[tuple[int, Frame | Damage]] | None = None
        self._slice: list[tuple[int, Frame | Damage]] | None = None
        self._is_read = False
        """All frames have been read: the slice is the last one."""

    def next_slice(self, filed_seq: int) -> tuple[list[Piece], list[Damage], int]:
        """The rows after `filed_seq`: pieces, damaged stretches (by seq), and the last seq that
        they cover. Returns the same again until the caller has filed it. Raises ShortageError."""
        if self._frames is None:
            skip = max(0, filed_seq - self.first_seq + 1)
            parts = [Part(*part) for part in self.record.parts]
            self._frames = iter(StagedRows(self._files, parts, self._stamp, skip))
        if self._slice is None:
            try:
                self._slice = self._read_slice(self._frames)
            except ShortageError:
                self._frames = None  # It has ended with that: the next call begins where this did.
                raise
        pieces: list[Piece] = []
        damage: list[Damage] = []
        last_seq = self.last_seq
        for before, found in self._slice:
            if isinstance(found, Damage):
                damage.append(self._with_seqs(before, found))
                continue
            last_seq = self.first_seq + before + found.last_seq - 1
            pieces += self._piece(before, found, filed_seq, damage)
        return pieces, damage, self.last_seq if self._is_read else last_seq

    def _read_slice(
        self, frames: Iterator[tuple[int, Frame | Damage]]
    ) -> list[tuple[int, Frame | Damage]]:
        here: list[tuple[int, Frame | Damage]] = []
        total_bytes = 0
        for before, found in frames:
            here.append((before, found))
            if isinstance(found, Frame):
                total_bytes += found.header.frame_bytes
            if total_bytes >= self._slice_bytes:
                return here
        self._is_read = True
        return here

    def advance(self) -> None:
        """Go on to the next slice: the one of `next_slice` has been filed."""
        self._slice = None

    def _with_seqs(self, before: int, found: Damage) -> Damage:
        base = self.first_seq + before - 1
        first, last = base + found.first_seq, base + found.last_seq
        return Damage(found.path, found.offset, found.end, found.reason, False, first, last)

    def _piece(
        self, before: int, frame: Frame, filed_seq: int, damage: list[Damage]
    ) -> Iterator[Piece]:
        assert frame.payload is not None
        rows = frame.rows.copy()
        # Staged rows are numbered from 1 in their part.
        rows["seq"] += np.uint64(self.first_seq + before - 1)
        rows["message_seq"] = rows["seq"]
        keep = rows["seq"] > filed_seq
        if len(self._duplicates):
            keep &= ~np.isin(rows["seq"] - np.uint64(self.first_seq), self._duplicates)
        for index, found in damaged_payloads(frame):
            if keep[index]:
                keep[index] = False
                seq = int(rows["seq"][index])
                damage.append(replace(found, first_seq=seq, last_seq=seq))
        if keep.all():
            yield Piece(rows, frame.payload)
        elif keep.any():
            yield Piece(select(rows, keep), frame.payload)
