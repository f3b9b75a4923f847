"""Which objects make up the files of a shard at a moment: the one thing of an export that changes.

    moment.json                    which manifest counts: a reader finds the old or the new one, and
                                   all else is never changed
    moments/<taken_ms>             a manifest
    files/<path>.<start>-<end>.<taken_ms>   bytes of a file, as they stand in it
    catalog/<taken_ms>             LMDB's file, copied and compacted

The pieces of a file, one behind the other, are the file. No name is written a second time. The
objects of a manifest are deleted by the one after the next, so a reader that has begun may go on
while another export is made.

Cost: a request. Threads: values.
"""

from typing import TypeVar

import google_crc32c
import msgspec

from delayserver.errors import PipelineError
from storage.errors import DamageError

VERSION = 1
POINTER = "moment.json"
FILES, CATALOGS, MOMENTS = "files", "catalog", "moments"
SHARDS = "shards.json"
"""In an export of several shards, the file that says how many there are."""


class ExportedPiece(msgspec.Struct, array_like=True, frozen=True):
    """Bytes `[start, end)` of a file, stored as one object."""

    name: str
    start: int
    end: int


class ExportedPath(msgspec.Struct, array_like=True, frozen=True):
    """A file, and the marks by which the next export recognises it."""

    path: str
    pieces: list[ExportedPiece]
    head_crc: int
    tail_crc: int
    """A checksum of its first and its last bytes, which change if the file is written anew."""
    is_sound: bool = False
    """Every frame matched its checksums when it was copied. If not, or if the export did not look,
    as exports before this field did not, the next export copies the file as a whole."""

    @property
    def length(self) -> int:
        return self.pieces[-1].end if self.pieces else 0


class ExportManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a shard at one moment."""

    version: int = VERSION
    stamp: int
    shard: int
    taken_ms: int
    checkpoint_seq: int
    catalog: str
    catalog_crc: int
    files: list[ExportedPath]
    life: str = ""
    """The life of the directory (`storage.kinds`). Empty: an older version has made it."""

    @property
    def name(self) -> str:
        return f"{MOMENTS}/{self.taken_ms}"

    @property
    def names(self) -> set[str]:
        """The names of all objects, its own among them."""
        return {
            self.name,
            self.catalog,
            *(piece.name for one in self.files for piece in one.pieces),
        }


class Pointer(msgspec.Struct, frozen=True, kw_only=True):
    """Which manifest counts."""

    version: int = VERSION
    moment: str


class _Sealed(msgspec.Struct, frozen=True):
    crc32c: int
    content: msgspec.Raw


T = TypeVar("T", ExportManifest, Pointer)


def encode_sealed(content: ExportManifest | Pointer) -> bytes:
    """Encode one of these with its checksum."""
    body = msgspec.json.encode(content)
    return msgspec.json.encode(_Sealed(google_crc32c.value(body), msgspec.Raw(body))) + b"\n"


def decode_sealed(data: bytes, kind: type[T], path: str) -> T:
    """Decode it. Raises DamageError, and PipelineError for one of a newer version."""
    try:
        sealed = msgspec.json.decode(data, type=_Sealed)
        body = bytes(sealed.content)
        if google_crc32c.value(body) != sealed.crc32c:
            raise DamageError(path, 0, "it does not match its checksum")
        version = msgspec.json.decode(body, type=dict[str, msgspec.Raw])["version"]
        if int(bytes(version)) > VERSION:
            raise PipelineError(f"{path} was written by a newer version: use that to read it")
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError, KeyError, ValueError) as error:
        raise DamageError(path, 0, f"it is not of an export ({error})") from error
