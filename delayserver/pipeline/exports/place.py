"""Where an export is: objects below a URL, each written as a whole and read in pieces.

    /srv/export, file:///srv/export     a directory of this machine
    s3://bucket/path, s3a://…           Amazon S3 and compatible stores; the endpoint and the keys
                                        from the environment, or in the URL (?endpoint_override=…)
    gs://…, abfs://…, hdfs://host:port/ Google, Azure, HDFS (which needs libhdfs and libjvm)

They are reached through pyarrow, with no JVM, so a task of Spark reads them on any node. An object
appears as a whole. If a store does not promise that by itself, the object is renamed when it is
whole.

Cost: a request per call. Threads: any.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from delayserver.errors import InputError
from storage.errors import DiskError
from storage.files import OsFiles, replace_file

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)


class ObjectPlace(Protocol):
    """Objects below one URL. Every call raises DiskError for an error of the store."""

    url: str
    """The URL for display, without keys."""

    def read(self, name: str) -> bytes:
        """A whole object. Raises FileNotFoundError."""

    def read_piece(self, name: str, length: int, offset: int) -> bytes:
        """Up to `length` bytes at `offset`; fewer at the end. Raises FileNotFoundError."""

    def write(self, name: str, data: bytes) -> None:
        """Write an object, or replace one: all of it or nothing; it is durable."""

    def delete(self, name: str) -> None:
        """Delete an object, if it is there."""

    def names(self) -> list[str]:
        """All objects, in order."""


def is_url(path: str) -> bool:
    """Whether a path names a place that is no directory of this machine."""
    found = _SCHEME.match(path)
    return found is not None and found[1].lower() != "file"


def local_path(path: str) -> str:
    """A directory of this machine, as an absolute path; it may be given as a `file:` URL."""
    if not path.lower().startswith("file:/"):
        return os.path.abspath(path)
    url = urlsplit(path)
    if url.netloc not in ("", "localhost"):
        raise InputError(f"{path} is a directory of another machine: mount it, and give its path")
    return os.path.abspath(unquote(url.path))


def shown_url(url: str) -> str:
    """A URL for messages and reports: without the keys and the options that it may hold."""
    if not is_url(url):
        return url
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()


def absolute_root(path: str) -> str:
    """The absolute path of a data directory, which may be given as a `file:` URL; the URL of an
    export as it stands."""
    return path if is_url(path) else local_path(path)


def open_place(url: str) -> ObjectPlace:
    """Raises InputError for a URL of an unknown kind, DiskError for a place that cannot be used."""
    return _RemotePlace(url) if is_url(url) else _LocalPlace(local_path(url))


def below(url: str, name: str) -> str:
    """The URL of a name below another URL."""
    path, question, query = url.partition("?")
    return f"{path.rstrip('/')}/{name}{question}{query}"


class _LocalPlace:
    """A directory of this machine."""

    def __init__(self, root: str) -> None:
        self.url = root
        self._files = OsFiles(root)

    def read(self, name: str) -> bytes:
        with contextlib.closing(self._files.open(name)) as file:
            return file.pread(file.size(), 0)

    def read_piece(self, name: str, length: int, offset: int) -> bytes:
        with contextlib.closing(self._files.open(name)) as file:
            return file.pread(length, offset)

    def write(self, name: str, data: bytes) -> None:
        self._files.make_directory(name.rpartition("/")[0])
        replace_file(self._files, name, data)

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.unlink(name)

    def names(self) -> list[str]:
        root = Path(self.url)
        found = (path for path in root.rglob("*") if path.is_file())
        return sorted(str(path.relative_to(root)) for path in found)


class _RemotePlace:
    """Objects that pyarrow reaches."""

    def __init__(self, url: str) -> None:
        from pyarrow import ArrowInvalid
        from pyarrow.fs import FileSystem

        self.url = shown_url(url)
        try:
            # Hadoop's name for the same store.
            self._fs, self._root = FileSystem.from_uri(re.sub(r"^s3[an]://", "s3://", url))
        except ArrowInvalid as error:
            raise InputError(
                f"{self.url} is no place that an export can be at "
                f"({str(error).replace(url, self.url)}); known are directories, s3://, gs://, "
                "abfs:// and hdfs://"
            ) from error
        except OSError as error:
            raise DiskError("open", self.url, str(error)) from error

    @contextlib.contextmanager
    def _errors(self, call: str, name: str) -> Iterator[str]:
        """The path of an object, for a call."""
        try:
            yield f"{self._root}/{name}"
        except FileNotFoundError:
            raise
        except OSError as error:
            raise DiskError(call, below(self.url, name), str(error)) from error

    def read(self, name: str) -> bytes:
        with self._errors("read", name) as path, self._fs.open_input_stream(path) as stream:
            data: bytes = stream.read()
            return data

    def read_piece(self, name: str, length: int, offset: int) -> bytes:
        with self._errors("read", name) as path, self._fs.open_input_file(path) as file:
            data: bytes = file.read_at(length, offset)
            return data

    def write(self, name: str, data: bytes) -> None:
        with self._errors("write", name) as path:
            made = path
            if self._has_directories:
                self._fs.create_dir(path.rpartition("/")[0], recursive=True)
                made = f"{path}.new"
            with self._fs.open_output_stream(made) as stream:
                stream.write(data)
            if made != path:
                self._fs.move(made, path)

    def delete(self, name: str) -> None:
        with self._errors("delete", name) as path, contextlib.suppress(FileNotFoundError):
            self._fs.delete_file(path)

    def names(self) -> list[str]:
        from pyarrow.fs import FileSelector, FileType

        with self._errors("list", ""):
            selector = FileSelector(self._root, allow_not_found=True, recursive=True)
            found: list[Any] = self._fs.get_file_info(selector)
            above = len(self._root) + 1
            return sorted(one.path[above:] for one in found if one.type == FileType.File)

    @property
    def _has_directories(self) -> bool:
        """Whether a file is there while it is written; an object of a store is not."""
        return self._fs.type_name not in ("s3", "gcs", "abfs")
