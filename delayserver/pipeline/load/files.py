"""The files of a table: where they are, the columns from their folders, and how each is opened.

    orders.csv.gz                      a file, compressed or not
    orders/, file:///srv/orders        a folder, with all folders in it
    orders/day=*/part-*.parquet        a pattern of the shell (*, ?, [abc], {a,b})
    s3://bucket/orders, gs://, abfs:// a store that pyarrow reaches, with keys as for an export

A folder `kind=late` gives each row below it a column `kind` with the text `late`, as Hive, Spark
and DuckDB write tables. It stays text: `coupon=007` is not the number 7. Files and folders whose
names begin with a dot or an underscore are no part of the table, as for Spark.

Cost: a listing. Threads: values.
"""

import bz2
import contextlib
import fnmatch
import glob
import gzip
import io
import lzma
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import fs

from delayserver.errors import PipelineError
from delayserver.pipeline.exports.place import is_url, local_path, shown_url

NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
"""The name of a folder that stands for null."""
_PATTERN = re.compile(r"[*?\[{]")
_BRACES = re.compile(r"\{([^{}]*)\}")
_MAGIC_BYTES = 6


@dataclass(frozen=True, slots=True)
class TableFile:
    """One file of a table."""

    path: str
    """The path in its file system."""
    size_bytes: int
    folders: tuple[tuple[str, str | None], ...] = ()
    """Columns and values from the names of its folders."""
    url: str | None = None
    """The URL of its file system; None: the file system of this machine."""

    @property
    def name(self) -> str:
        """The name in errors."""
        return self.path if self.url is None else f"{shown_url(self.url)}: {self.path}"


def has_pattern(source: str) -> bool:
    """Whether it may name several files by a pattern."""
    return _PATTERN.search(source) is not None


def find_files(source: str) -> list[TableFile]:
    """The files of a table, in order of their names; none if it is an empty folder.

    Raises PipelineError if nothing is there."""
    with _as_pipeline_errors(source):
        return _find_remote(source) if is_url(source) else _find_local(local_path(source))


def _find_local(path: str) -> list[TableFile]:
    roots = [path]
    base = path
    if not os.path.exists(path) and has_pattern(path):
        base = _before_pattern(path)
        roots = sorted({one for some in _without_braces(path) for one in glob.glob(some)})
        roots = [one for one in roots if _is_data(Path(one).relative_to(base).parts)]
    found = []
    for root in roots:
        if os.path.isdir(root):
            files = [one for one in Path(root).rglob("*") if one.is_file()]
            found += [one for one in files if _is_data(one.relative_to(root).parts)]
        elif os.path.exists(root):
            found.append(Path(root))
    if not found and not os.path.isdir(path):
        raise PipelineError(f"there is no {path}")
    return [
        TableFile(str(one), one.stat().st_size, _folders(os.path.relpath(one, base)))
        for one in sorted(set(found))  # Two patterns may name the same one.
    ]


def _find_remote(url: str) -> list[TableFile]:
    filesystem, path = _filesystem(url)
    base = _before_pattern(path) if has_pattern(path) else path
    (info,) = filesystem.get_file_info([base])
    if info.type == fs.FileType.File:
        return [TableFile(base, info.size, (), url)]
    found = filesystem.get_file_info(fs.FileSelector(base, recursive=True, allow_not_found=True))
    files = []
    patterns = [some[len(base) :].strip("/") for some in _without_braces(path)]
    for one in found:
        below = one.path[len(base) :].strip("/")
        if (
            one.type == fs.FileType.File
            and _is_data(tuple(below.split("/")))
            and any(_matches(below, pattern) for pattern in patterns)
        ):
            files.append(TableFile(one.path, one.size, _folders(below), url))
    if not files:
        raise PipelineError(f"there is no {shown_url(url)}, or nothing is in it")
    return sorted(files, key=lambda file: file.path)


def _filesystem(url: str) -> tuple[Any, str]:
    try:
        # Hadoop's name for the same store.
        found: tuple[Any, str] = fs.FileSystem.from_uri(re.sub(r"^s3[an]://", "s3://", url))
    except pa.ArrowInvalid as error:
        raise PipelineError(
            f"{shown_url(url)} is no place that a table can be at; known are paths, s3://, gs://, "
            "abfs:// and hdfs://"
        ) from error
    return found


def _is_data(parts: tuple[str, ...]) -> bool:
    """Whether a file is part of a table; `parts`: of its path below the table's folder."""
    return not any(
        part.startswith(".") or (part.startswith("_") and "=" not in part) for part in parts
    )


def _folders(below: str) -> tuple[tuple[str, str | None], ...]:
    pairs = (part.partition("=") for part in below.split("/")[:-1])
    return tuple(
        (unquote(name), None if value == NO_VALUE else unquote(value))
        for name, equals, value in pairs
        if equals and name
    )


def _before_pattern(path: str) -> str:
    """The folder in which a pattern begins."""
    start = _PATTERN.search(path)
    assert start is not None
    return path[: start.start()].rpartition("/")[0] or "/"


def _without_braces(path: str) -> list[str]:
    """`a/{b,c}` as `a/b` and `a/c`."""
    found = _BRACES.search(path)
    if found is None:
        return [path]
    begin, end = path[: found.start()], path[found.end() :]
    return [one for word in found[1].split(",") for one in _without_braces(f"{begin}{word}{end}")]


def _matches(below: str, pattern: str) -> bool:
    """Whether a path, or a folder that it is in, matches a pattern part by part."""
    parts, wanted = below.split("/"), pattern.split("/") if pattern else []
    return len(parts) >= len(wanted) and all(
        fnmatch.fnmatchcase(part, one) for part, one in zip(parts, wanted, strict=False)
    )


# ── opening ────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def opened(file: TableFile) -> Iterator[BinaryIO]:
    """A file as its bytes stand, which can be sought in. Raises PipelineError."""
    with _as_pipeline_errors(file.name), contextlib.ExitStack() as cleanup:
        if file.url is None:
            stream: Any = cleanup.enter_context(Path(file.path).open("rb"))
        else:
            filesystem, _ = _filesystem(file.url)
            stream = cleanup.enter_context(filesystem.open_input_file(file.path))
            stream = cleanup.enter_context(io.BufferedReader(stream))
        yield stream


@contextlib.contextmanager
def decompressed(file: TableFile) -> Iterator[BinaryIO]:
    """A file, decompressed if its first bytes say that it is compressed. Raises PipelineError, also
    for a file that ends too early."""
    with opened(file) as stream, _as_pipeline_errors(file.name):
        yield _decompressed(stream)


def is_compressed(file: TableFile) -> bool:
    """Whether the first bytes belong to a compressed file. Raises PipelineError."""
    with opened(file) as stream:
        return _decompressed(stream) is not stream


def _decompressed(stream: BinaryIO) -> BinaryIO:
    magic = stream.read(_MAGIC_BYTES)
    stream.seek(0)
    if magic.startswith(b"\x1f\x8b"):
        return cast(BinaryIO, gzip.GzipFile(fileobj=stream))
    if magic.startswith(b"BZh"):
        return cast(BinaryIO, bz2.BZ2File(stream))
    if magic.startswith(b"\xfd7zXZ\x00"):
        return cast(BinaryIO, lzma.LZMAFile(stream))
    for codec, begin in (("zstd", b"\x28\xb5\x2f\xfd"), ("lz4", b"\x04\x22\x4d\x18")):
        if magic.startswith(begin):
            native: Any = pa.CompressedInputStream(pa.PythonFile(stream, mode="r"), codec)
            return io.BufferedReader(native)
    return stream


@contextlib.contextmanager
def _as_pipeline_errors(name: str) -> Iterator[None]:
    try:
        yield
    except PipelineError:
        raise
    except (OSError, EOFError, zlib.error, lzma.LZMAError, pa.ArrowException) as error:
        raise PipelineError(f"cannot read {shown_url(name)}: {error}") from error
