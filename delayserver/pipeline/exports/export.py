"""Export: the files that the jobs read are copied to a place that needs no mount.

    message log   up to its last whole frame          ─┐
    catalog       one moment of it, as LMDB copies it  ├▶ objects ─▶ manifest ─▶ it counts
    hours' files  as long as that catalog says         │
    FORMAT        which names the directory           ─┘

In this order all copies are of one moment, as `states.snapshot` needs it. The copy of the message
log has every record that the copied catalog does not yet count as filed, and the hours' files only
grow. Bytes are copied as they stand, with their checksums, in objects of at most PIECE_BYTES; the
next export adds the new bytes. The export recognises a file that was written anew meanwhile by its
first and last bytes, and copies it as a whole. If the server deletes an hour between the copy of
the catalog and the copy of the file, the shard is done again.

Every frame is verified when it is copied. A damaged file is copied nevertheless, since its other
frames are sound, and the export names it. The manifest says so too, and the next export copies that
file as a whole: it may have been repaired.

It runs beside the server that has the directory, takes no lock there and writes nothing into it. It
may be killed at any point, and run again. Without a manifest nothing counts, and the next run
deletes objects that no manifest names. Only one export may write to a place at a time.

Cost: the bytes that were added since the last export are verified and sent; a list of the objects.
No Spark. Threads: the caller's.
"""

import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import google_crc32c

from delayserver.errors import PipelineError
from delayserver.pipeline.exports.exported import read_manifest, read_pointer, read_shards
from delayserver.pipeline.exports.manifest import (
    CATALOGS,
    FILES,
    MOMENTS,
    POINTER,
    SHARDS,
    ExportedPath,
    ExportedPiece,
    ExportManifest,
    Pointer,
    encode_sealed,
)
from delayserver.pipeline.exports.place import (
    ObjectPlace,
    below,
    is_url,
    local_path,
    open_place,
    shown_url,
)
from delayserver.pipeline.logs import logs
from delayserver.pipeline.states.snapshot import Directory, open_directories
from delayserver.records.tables import HourState, read_checkpoint, read_hours
from storage.catalog import MAX_BYTES, LmdbCatalog
from storage.catalog_file import DATA_FILE
from storage.directory import FORMAT_FILE, life_of, open_identity
from storage.errors import DamageError
from storage.files import File, Files, OsFiles, size_of
from storage.frame import Damage, Frame
from storage.kinds import READABLE
from storage.shards import shard_directory

PIECE_BYTES: Final = 64 * 1024 * 1024
KNOWN_BYTES: Final = 64 * 1024
"""A file is recognised by so many of its first and its last bytes."""
ATTEMPTS: Final = 5

CopyProgress = Callable[[str, int, int], None]
"""Called with the current file, the bytes that are copied, and the bytes of all."""


@dataclass(slots=True)
class ShardExport:
    """The counts of an export for one shard."""

    shard: int
    files: int
    total_bytes: int
    """The size of its files and of the catalog."""
    copied_bytes: int
    """Bytes that were copied since the last export."""
    damage: list[str] = field(default_factory=list)
    """The damage in the files that were copied now."""


@dataclass(slots=True)
class Exported:
    """The counts of an export."""

    to: str
    taken_ms: int
    shards: list[ShardExport] = field(default_factory=list)
    took_s: float = 0.0

    def document(self) -> dict[str, Any]:
        """The document that `--json` prints."""
        return asdict(self)

    @property
    def damage(self) -> list[str]:
        """The damage in all shards."""
        return [text for one in self.shards for text in one.damage]


def export(
    data_dir: str, to: str, *, now_ms: int, progress: CopyProgress = lambda what, done, total: None
) -> Exported:
    """Export a data directory, or all shards of one that has several.

    Raises NotADataDirectoryError, CatalogError, DamageError, DiskError; PipelineError for a place
    that has the export of another directory."""
    began = time.monotonic()
    directories = open_directories(data_dir)
    if not is_url(to) and Path(local_path(to)).is_relative_to(local_path(data_dir)):
        raise PipelineError(f"{to} is in the data directory, which is the server's: give another")
    exported = Exported(shown_url(to), now_ms)
    above, several = open_place(to), len(directories) > 1
    _refuse_other_count(above, len(directories) if several else None)
    for directory in directories:
        url = below(to, shard_directory(directory.shard)) if several else to
        one = _ShardExporter(directory, open_place(url), now_ms, progress).run()
        exported.shards.append(one)
    if several and read_shards(above) is None:
        # The export of all shards counts from here on.
        above.write(SHARDS, json.dumps({"shards": len(directories)}).encode() + b"\n")
    exported.took_s = time.monotonic() - began
    return exported


def _refuse_other_count(place: ObjectPlace, count: int | None) -> None:
    known = read_shards(place)
    is_alone = known is None and read_pointer(place) is not None
    if (known is not None and known != count) or (is_alone and count is not None):
        raise PipelineError(
            f"{place.url} has the export of {known or 1} shards, and this directory has "
            f"{count or 1}: give each its own --to"
        )


class _ShardExporter:
    """One shard, from its files to a manifest."""

    def __init__(
        self, directory: Directory, place: ObjectPlace, now_ms: int, progress: CopyProgress
    ) -> None:
        self._directory = directory
        self._files: Files = directory.files
        self._place = place
        self._progress = progress
        self._copied_bytes = self._catalog_bytes = 0
        self._damage: list[str] = []
        pointer = read_pointer(place)
        self._previous = None if pointer is None else read_manifest(place, pointer.moment)
        if self._previous is not None and self._previous.stamp != directory.stamp:
            raise PipelineError(
                f"{place.url} has the export of another data directory; give each its own --to"
            )
        identity = open_identity(self._files, random_bytes=None, of=READABLE)
        self._life = life_of(self._files, identity)
        if self._previous is not None and self._previous.life not in ("", self._life):
            raise PipelineError(
                f"{place.url} has the export of what this data directory was before or after it "
                "was restored; give each its own --to"
            )
        # Two runs never write under the same name, whatever the clock does.
        self._taken_ms = max(now_ms, self._previous.taken_ms + 1 if self._previous else 0)
        self._known = {one.path: one for one in self._previous.files} if self._previous else {}

    def run(self) -> ShardExport:
        """Copy the new bytes, and let them count."""
        for attempt in range(ATTEMPTS):
            try:
                manifest = self._copy()
                break
            except _GoneError as error:
                if attempt == ATTEMPTS - 1:
                    raise PipelineError(
                        f"{error} is deleted whenever it is copied: is the retention too short?"
                    ) from error
        before = self._previous.names if self._previous else set()
        self._place.write(manifest.name, encode_sealed(manifest))
        self._place.write(POINTER, encode_sealed(Pointer(moment=manifest.name)))
        kept = manifest.names | before
        for name in self._place.names():
            # Objects of the manifest before the last one, and objects that a killed run left.
            if name not in kept and _is_ours(name):
                self._place.delete(name)
        total = self._catalog_bytes + sum(one.length for one in manifest.files)
        return ShardExport(
            manifest.shard, len(manifest.files), total, self._copied_bytes, self._damage
        )

    def _copy(self) -> ExportManifest:
        """Raises _GoneError if the server deletes a file meanwhile."""
        stamp = self._directory.stamp
        self._damage = []
        messages = [
            _Wanted(piece.path, logs.whole_end(self._files, piece, stamp=stamp), piece)
            for piece in logs.message_pieces(self._files)
        ]
        # A segment that is gone was filed, and the catalog will show it.
        copied = [one for one in self._copied(messages) if one is not None]
        catalog_data, hours, checkpoint_seq = self._catalog()
        wanted = [_Wanted(FORMAT_FILE, size_of(self._files, FORMAT_FILE))]
        wanted += [
            _Wanted(piece.path, piece.end, piece, must_be_there=True)
            for piece in logs.schedule_pieces(hours)
        ]
        wanted += [
            _Wanted(piece.path, logs.whole_end(self._files, piece, stamp=stamp), piece)
            for piece in logs.dispatch_pieces(self._files)
        ]
        copied += [one for one in self._copied(wanted) if one is not None]
        name = f"{CATALOGS}/{self._taken_ms}"
        self._place.write(name, catalog_data)
        self._catalog_bytes = len(catalog_data)
        self._copied_bytes += self._catalog_bytes
        return ExportManifest(
            stamp=stamp,
            shard=self._directory.shard,
            taken_ms=self._taken_ms,
            checkpoint_seq=checkpoint_seq,
            catalog=name,
            catalog_crc=google_crc32c.value(catalog_data),
            files=copied,
            life=self._life,
        )

    def _catalog(self) -> tuple[bytes, dict[int, HourState], int]:
        """A moment of the catalog: LMDB's file, and its table of hours and its checkpoint."""
        with tempfile.TemporaryDirectory(prefix="delayserver-export-") as made:
            with (
                self._directory.catalog() as catalog,
                contextlib.closing(catalog.freeze()) as frozen,
            ):
                frozen.copy(OsFiles(made), "")
            copy = LmdbCatalog(made, max_bytes=MAX_BYTES, readonly=True)
            with contextlib.closing(copy):
                hours, checkpoint_seq = read_hours(copy), read_checkpoint(copy)
            with contextlib.closing(OsFiles(made, readonly=True).open(DATA_FILE)) as file:
                return file.pread(file.size(), 0), hours, checkpoint_seq

    def _copied(self, wanted: Sequence["_Wanted"]) -> Iterator[ExportedPath | None]:
        """Each file, copied as far as it is wanted; None: the file was deleted, as it may be."""
        total = sum(one.end for one in wanted)
        done = 0
        for one in wanted:
            try:
                file = self._files.open(one.path)
            except FileNotFoundError:
                if one.must_be_there:
                    raise _GoneError(one.path) from None
                yield None
                continue
            with contextlib.closing(file):
                yield self._extended(file, one)
            done += one.end
            self._progress(f"shard {self._directory.shard}", done, total)

    def _extended(self, file: File, wanted: "_Wanted") -> ExportedPath:
        """A file with the bytes that it has more than in the last export."""
        known, end = self._known.get(wanted.path), wanted.end
        pieces: list[ExportedPiece] = []
        if known is not None and known.is_sound and known.length <= end and _is_same(file, known):
            pieces = list(known.pieces)
        start = pieces[-1].end if pieces else 0
        is_sound = self._is_sound(file, wanted, start)
        while start < end:
            until = min(end, start + PIECE_BYTES)
            data = file.pread(until - start, start)
            if len(data) < until - start:
                raise DamageError(wanted.path, start + len(data), "the file is shorter than it was")
            name = f"{FILES}/{wanted.path}.{start}-{until}.{self._taken_ms}"
            self._place.write(name, data)
            self._copied_bytes += len(data)
            pieces.append(ExportedPiece(name, start, until))
            start = until
        return ExportedPath(wanted.path, pieces, *_ends(file, end), is_sound)

    def _is_sound(self, file: File, wanted: "_Wanted", start: int) -> bool:
        """Whether every frame from `start` on matches its checksums; damage is noted."""
        if wanted.piece is None:
            return True
        piece = replace(wanted.piece, start=start, end=wanted.end)
        found = [
            damage
            for one in logs.read_file(file, piece, stamp=self._directory.stamp, payload=True)
            for damage in _damage_of(one)
        ]
        self._damage += [f"{self._directory.prefix}{damage.error()}" for damage in found]
        return not found


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A file of the directory, and how much of it."""

    path: str
    end: int
    piece: logs.LogPiece | None = None
    """Its frames; None: it has none."""
    must_be_there: bool = False


class _GoneError(Exception):
    """A file was deleted between the catalog and its copy."""


def _damage_of(found: Frame | Damage) -> Iterator[Damage]:
    if isinstance(found, Damage):
        yield found
    elif not found.payload_intact:
        reason = found.unreadable or "a payload does not match its checksum"
        seqs = found.first_seq, found.last_seq
        yield Damage(found.path, found.payload_start, found.end, reason, False, *seqs)


def _is_same(file: File, known: ExportedPath) -> bool:
    """Whether the file still begins with the bytes that were exported."""
    return _ends(file, known.length) == (known.head_crc, known.tail_crc)


def _ends(file: File, length: int) -> tuple[int, int]:
    """Checksums of the first and the last bytes of a file of that length."""
    some = min(length, KNOWN_BYTES)
    head, tail = file.pread(some, 0), file.pread(some, length - some)
    return google_crc32c.value(head), google_crc32c.value(tail)


def _is_ours(name: str) -> bool:
    return name.startswith((f"{FILES}/", f"{CATALOGS}/", f"{MOMENTS}/"))
