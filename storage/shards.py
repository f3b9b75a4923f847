"""The directory of a server that has several shards: how many, and where each of them is.

    DIR/SHARDS            JSON: how many there are; made once, never changed
    DIR/LOCK              owned by the process that started the others
    DIR/shard-0000/       a data directory like that of a server alone, for each shard
    DIR/TOKENS            of all shards together

A directory without SHARDS is that of a server alone, which is its only shard.

Cost: a few system calls at start. Threads: used before any thread starts.
"""

import json
import re
from pathlib import Path
from typing import Final

from storage import kinds
from storage.directory import FORMAT_FILE
from storage.errors import DamageError, FormatVersionError, ShardCountError
from storage.files import Files, OsFiles, replace_file

SHARDS_FILE: Final = kinds.SHARDS_FILE
SHARDS_VERSION: Final = 1
SHARDS_MAX: Final = 256
"""A shard is a process; a machine with more cores than this has other limits first."""
_FILE_MAX_BYTES: Final = 4096
_DIRECTORY: Final = re.compile(r"shard-([0-9]{4})")


def shard_directory(shard: int) -> str:
    """The name of a shard's directory below that of all."""
    return f"shard-{shard:04}"


def parse_shard_directory(name: str) -> int | None:
    """The shard whose directory has that name; None if no shard's directory is called so."""
    found = _DIRECTORY.fullmatch(name)
    return int(found[1]) if found else None


def refuse_another(path: str, made: int, shard: int) -> None:
    """Ids name their shard, so a directory under the name of another would make wrong ones.

    Raises DamageError where the directory `path` of `shard` was made for another."""
    if made != shard:
        reason = f"it was made for shard {made}, and stands where shard {shard} has to be"
        raise DamageError(f"{path}/{FORMAT_FILE}", 0, reason)


def find_directory_above(root: str) -> str | None:
    """The directory of several shards that `root` is one of; None where it is that of a server
    alone, or of several. Raises DamageError, FormatVersionError."""
    path = Path(root).resolve()
    if parse_shard_directory(path.name) is None:
        return None
    above = str(path.parent)
    return None if read_shard_count(OsFiles(above, readonly=True)) is None else above


def read_shard_count(files: Files) -> int | None:
    """How many shards the directory was made with; None where it is that of a server alone, or
    none yet. Raises DamageError, FormatVersionError.

    A shard that SHARDS does not count would be left out of everything: of a start, a check, an
    audit, a backup. So a directory that holds one is damaged."""
    try:
        file = files.open(SHARDS_FILE)
    except FileNotFoundError:
        return None
    try:
        text = file.pread(_FILE_MAX_BYTES, 0)
    finally:
        file.close()
    try:
        document = json.loads(text)
        version, count = int(document["format"]), int(document["shards"])
        if version > SHARDS_VERSION:
            raise FormatVersionError(f"{files.root}/{SHARDS_FILE}", version, SHARDS_VERSION)
        if not (version >= 1 and 2 <= count <= SHARDS_MAX):
            raise ValueError("a number is out of its range")
    except (ValueError, KeyError, TypeError) as error:
        raise DamageError(SHARDS_FILE, 0, f"not a file of shards ({error})") from error
    for shard in range(count, SHARDS_MAX):
        if files.exists(f"{shard_directory(shard)}/{FORMAT_FILE}"):
            raise DamageError(
                SHARDS_FILE,
                0,
                f"it says that there are {count} shards, and {shard_directory(shard)} stands "
                "beside it: put the right number there, or move that shard away",
            )
    return count


def encode_shard_count(count: int) -> bytes:
    """The content of DIR/SHARDS."""
    return json.dumps({"format": SHARDS_VERSION, "shards": count}).encode() + b"\n"


def fix_shard_count(files: Files, count: int) -> None:
    """Fix the directory as one of so many shards from now on; 1: that of a server alone.

    Raises ShardCountError where it was made with another number, DirectoryKindError where it is
    none of a server, DamageError, FormatVersionError."""
    kinds.require(files, {*kinds.OWNED, kinds.Kind.SHARDS})
    made = read_shard_count(files)
    if made is None and (count == 1 or not files.exists(FORMAT_FILE)):
        if count > 1:
            replace_file(files, SHARDS_FILE, encode_shard_count(count))
    elif made != count:
        raise ShardCountError(files.root, made or 1, count)
