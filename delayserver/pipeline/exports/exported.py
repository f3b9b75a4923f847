"""An export as the files and the catalog of a data directory: the same code reads both.

Bytes come in blocks, since the readers ask for headers and columns, a few kilobytes at a time, and
every request to a store takes its own tens of milliseconds. Each reader checks its bytes, as in the
directory: frames, payloads and pages have their own checksums.

Cost: the wanted parts of a file are fetched in whole blocks, with the payloads in them; two blocks
of each open file are in memory. Threads: an open file belongs to one thread.
"""

import contextlib
import functools
import json
import tempfile
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import google_crc32c

from delayserver.errors import PipelineError
from delayserver.pipeline.exports.manifest import (
    POINTER,
    SHARDS,
    ExportedPath,
    ExportManifest,
    Pointer,
    decode_sealed,
)
from delayserver.pipeline.exports.place import ObjectPlace, below, is_url, open_place
from storage.catalog import Catalog, LmdbCatalog
from storage.catalog_file import DATA_FILE
from storage.errors import DamageError, DiskError
from storage.files import Buffer, File, OsFiles, replace_file
from storage.shards import shard_directory

BLOCK_BYTES: Final = 4 * 1024 * 1024
GONE: Final = "it is gone: two exports were made since; read the newest"


class NotAnExportError(PipelineError):
    """There is no export at a place."""

    def __init__(self, url: str) -> None:
        super().__init__(
            f"{url} is no export; make one with `delayserver pipeline export --to {url}`"
        )


def read_pointer(place: ObjectPlace) -> Pointer | None:
    """The pointer to the manifest that counts; None: there is no export. Raises DamageError,
    DiskError, PipelineError."""
    try:
        data = place.read(POINTER)
    except FileNotFoundError:
        return None
    return decode_sealed(data, Pointer, below(place.url, POINTER))


def read_manifest(place: ObjectPlace, name: str) -> ExportManifest:
    """The manifest of that name. Raises DamageError, DiskError, PipelineError."""
    path = below(place.url, name)
    try:
        data = place.read(name)
    except FileNotFoundError as error:
        raise DiskError("read", path, GONE) from error
    return decode_sealed(data, ExportManifest, path)


def read_shards(place: ObjectPlace) -> int | None:
    """How many shards an export has; None: it is that of a server alone, or no export."""
    try:
        return int(json.loads(place.read(SHARDS))["shards"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        reason = f"it does not tell a number of shards ({error})"
        raise DamageError(below(place.url, SHARDS), 0, reason) from error


def is_export(root: str) -> bool:
    """Whether a path is that of an export, and not of a data directory."""
    if is_url(root):
        return True
    files = OsFiles(root, readonly=True)
    return files.exists(POINTER) or files.exists(SHARDS)


def shard_places(url: str) -> list[str]:
    """The URL of each shard of an export, in their order; for a server alone its own URL.

    Raises DamageError if there are more shards than the export says."""
    place = open_place(url)
    count = read_shards(place)
    if count is None:
        return [url]
    if read_pointer(open_place(below(url, shard_directory(count)))) is not None:
        raise DamageError(
            below(place.url, SHARDS),
            0,
            f"it says that there are {count} shards, and {shard_directory(count)} stands beside it",
        )
    return [below(url, shard_directory(one)) for one in range(count)]


def newest_moment(url: str) -> str:
    """The name of the manifest that counts. Raises NotAnExportError."""
    found = read_pointer(open_place(url))
    if found is None:
        raise NotAnExportError(url)
    return found.moment


@functools.lru_cache(maxsize=8)
def open_export(url: str, moment: str) -> "ExportedFiles":
    """The files of one shard at a moment, which never change."""
    place = open_place(url)
    return ExportedFiles(place, read_manifest(place, moment))


class ExportedFiles:
    """The files of an export. See `storage.files.Files`; every call that would write is refused."""

    def __init__(self, place: ObjectPlace, manifest: ExportManifest) -> None:
        self.root = place.url
        self.manifest = manifest
        self._place = place
        self._paths = {one.path: one for one in manifest.files}

    def open(self, path: str, *, create: bool = False, mode: int = 0) -> "ExportedFile":
        assert not create
        found = self._paths.get(path)
        if found is None:
            raise FileNotFoundError(f"{self.root} has no {path}")
        return ExportedFile(path, found, self._place)

    def exists(self, path: str) -> bool:
        return path in self._paths or bool(self.list(path))

    def list(self, directory: str) -> list[str]:
        start = f"{directory}/" if directory else ""
        names = (path.removeprefix(start) for path in self._paths if path.startswith(start))
        return sorted({name.partition("/")[0] for name in names})

    @contextlib.contextmanager
    def catalog(self, max_bytes: int) -> Iterator[Catalog]:
        """The catalog, fetched to this machine. Raises CatalogError, DamageError, DiskError."""
        data = self._place.read(self.manifest.catalog)
        if google_crc32c.value(data) != self.manifest.catalog_crc:
            path = below(self.root, self.manifest.catalog)
            raise DamageError(path, 0, "it does not match its checksum")
        with tempfile.TemporaryDirectory(prefix="delayserver-export-") as directory:
            replace_file(OsFiles(directory), DATA_FILE, data)
            del data
            catalog = LmdbCatalog(directory, max_bytes=max_bytes, readonly=True)
            try:
                yield catalog
            finally:
                catalog.close()

    def _refuse(self, *arguments: Any, **named: Any) -> Any:
        raise DiskError("write", self.root, "an export is only read")

    rename = link = unlink = make_directory = remove_directory = _refuse
    sync_directory = sync_all = map_to_read = scratch = free_bytes = lock = _refuse


@dataclass(slots=True)
class ExportedFile:
    """One file, as the pieces that it was exported in. See `storage.files.File`."""

    path: str
    _exported: ExportedPath
    _place: ObjectPlace
    _blocks: dict[tuple[str, int], bytes] = field(default_factory=dict)

    def size(self) -> int:
        return self._exported.length

    def pread(self, length: int, offset: int) -> bytes:
        end = min(offset + length, self.size())
        parts: list[bytes] = []
        pieces = self._exported.pieces
        at = bisect_right(pieces, offset, key=lambda piece: piece.start) - 1
        while offset < end:
            piece = pieces[at]
            until = min(end, piece.end)
            parts += self._read(piece.name, offset - piece.start, until - piece.start)
            offset, at = until, at + 1
        return b"".join(parts)

    def pread_now(self, length: int, offset: int) -> bytes | None:
        return None

    def _read(self, name: str, start: int, end: int) -> Iterator[bytes]:
        while start < end:
            number = start // BLOCK_BYTES
            block = self._block(name, number)
            first = start - number * BLOCK_BYTES
            data = block[first : first + end - start]
            if not data:
                raise DiskError("read", below(self._place.url, name), "the object is too short")
            yield data
            start += len(data)

    def _block(self, name: str, number: int) -> bytes:
        block = self._blocks.get((name, number))
        if block is None:
            try:
                block = self._place.read_piece(name, BLOCK_BYTES, number * BLOCK_BYTES)
            except FileNotFoundError as error:
                raise DiskError("read", below(self._place.url, name), GONE) from error
            if len(self._blocks) > 1:
                # A frame may begin in one block and end in the next.
                del self._blocks[next(iter(self._blocks))]
            self._blocks[name, number] = block
        return block

    def close(self) -> None:
        self._blocks.clear()

    def _refuse(self, buffers: Sequence[Buffer] = (), offset: int = 0) -> None:
        raise DiskError("write", self.path, "an export is only read")

    pwrite = pwrite_durable = _refuse

    def fdatasync(self) -> None:
        self._refuse()

    def truncate(self, length: int) -> None:
        self._refuse()


def _is_file(file: ExportedFile) -> File:
    """Lets a type checker check that the class has the contract."""
    return file
