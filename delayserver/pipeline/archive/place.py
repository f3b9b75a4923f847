"""Where the archive is: a directory, or objects of a store, reached through pyarrow without a JVM.

    /srv/archive, file:///srv/archive   a directory of this machine, or one that all nodes mount
    s3://bucket/path, s3a://…           as exports have them (`exports.place`), options in the URL
    gs://…, abfs://…, hdfs://host/…

Names are relative to it, with forward slashes. A commit rests on `create`: if two create the same
name, one fails. A directory and HDFS promise that. A store of objects is asked first whether the
name is there, so two within the same moment would not be noticed.

Only a directory has a lock, which the system gives up with its process.

Cost: a request per call; in a directory, a sync of the file and of the directories above it.
Threads: any. A place goes to tasks as its URL.
"""

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pyarrow import ArrowInvalid
from pyarrow.fs import FileSelector, FileSystem, FileType, LocalFileSystem

from delayserver.errors import InputError, PipelineError
from delayserver.pipeline.exports.place import is_url, local_path, shown_url
from storage.errors import DiskError

LEFTOVER_S = 24 * 3600.0
LOCK = "_archive.lock"
"""Readers skip names that begin like this."""


class ArchivePlace:
    """One directory, or the objects below one prefix of a store."""

    def __init__(self, url: str) -> None:
        """Raises InputError for a URL of an unknown kind, DiskError for a place that cannot be
        used."""
        self._is_local = not is_url(url)
        # The table stores this URL. It has no options, because these are this job's own.
        self.url: str = local_path(url) if self._is_local else _location(url)
        # Tasks work in directories of their own, where a relative path is another one.
        self.given = self.url if self._is_local else url
        """The same with the options that a URL may have."""
        assert self._opened

    def __reduce__(self) -> tuple[type["ArchivePlace"], tuple[str]]:
        return ArchivePlace, (self.given,)

    @cached_property
    def _opened(self) -> tuple[FileSystem, str]:
        if self._is_local:
            return LocalFileSystem(), self.url
        try:
            filesystem, root = FileSystem.from_uri(_as_s3(self.given))
        except ArrowInvalid as error:
            raise InputError(
                f"{self.url} is no place that an archive can be at "
                f"({str(error).replace(self.given, self.url)}); known are "
                "directories, s3://, gs://, abfs:// and hdfs://"
            ) from error
        except OSError as error:
            raise DiskError("open", self.url, str(error)) from error
        return filesystem, root.rstrip("/")

    @property
    def filesystem(self) -> FileSystem:
        """The file system of pyarrow that reads and writes it."""
        return self._opened[0]

    @property
    def is_local(self) -> bool:
        """Whether it is a directory, with a lock and with syncs."""
        return self._is_local

    def path(self, name: str) -> str:
        """A name, as the file system has it."""
        return f"{self._opened[1]}/{name}" if name else self._opened[1]

    def location(self, name: str) -> str:
        """A name for other programs: an absolute path, or a URL."""
        return f"{self.url}/{name}" if name else self.url

    def name_of(self, location: str) -> str:
        """The name of a location. Raises PipelineError if it is not below this place."""
        name = location.removeprefix("file://").removeprefix(f"{self.url}/")
        if name == location:
            raise PipelineError(f"{location} is not below {self.url}, where the archive is")
        return name

    @contextlib.contextmanager
    def errors(self, call: str, name: str) -> Iterator[str]:
        """The path of a name, for a call. Raises DiskError, FileNotFoundError."""
        try:
            yield self.path(name)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise DiskError(call, self.location(name), str(error)) from error

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        with self.errors("look for", name) as path:
            info: Any = self.filesystem.get_file_info(path)
            return bool(info.type == FileType.File)

    def read(self, name: str) -> bytes:
        """A whole file. Raises FileNotFoundError."""
        with self.errors("read", name) as path, self.filesystem.open_input_stream(path) as stream:
            data: bytes = stream.read()
            return data

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[Any]:
        """A stream to a file, which counts for nothing before a snapshot names it: a task that
        fails leaves a part of it. The file outlasts a power loss when the context ends."""
        with self.errors("write", name) as path:
            if self._has_directories:
                self.filesystem.create_dir(path.rpartition("/")[0], recursive=True)
            with self.filesystem.open_output_stream(path) as stream:
                yield stream
            self._sync(path)

    def replace(self, name: str, data: bytes) -> None:
        """Write a file, or replace one: all of it or nothing."""
        if not self._has_directories:
            with self.writing(name) as stream:
                stream.write(data)
            return
        unfinished = self._unfinished(name)
        with self.writing(unfinished) as stream:
            stream.write(data)
        self.rename(unfinished, name)

    def rename(self, name: str, new_name: str) -> None:
        """Give a file of a directory another name; it replaces a file that has that name."""
        with self.errors("rename", name) as path:
            if self._has_directories:
                self.filesystem.create_dir(self.path(new_name).rpartition("/")[0], recursive=True)
            self.filesystem.move(path, self.path(new_name))
            self._sync(self.path(new_name))

    def create(self, name: str, data: bytes) -> None:
        """Write a new file: all of it or nothing. Raises FileExistsError."""
        if self.exists(name):
            raise FileExistsError(self.location(name))
        if not self._has_directories:
            self.replace(name, data)
            return
        unfinished = self._unfinished(name)
        with self.writing(unfinished) as stream:
            stream.write(data)
        try:
            if self.is_local:
                # A rename would replace the file of another run.
                os.link(self.path(unfinished), self.path(name))
                self._sync(self.path(name))
            else:
                self.filesystem.move(self.path(unfinished), self.path(name))
        except FileExistsError:
            raise FileExistsError(self.location(name)) from None
        except OSError as error:
            raise DiskError("create", self.location(name), str(error)) from error
        finally:
            self.delete(unfinished)

    def sync(self, name: str) -> None:
        """Make a file that another program has written outlast a power loss."""
        with self.errors("sync", name) as path:
            self._sync(path)

    def delete(self, name: str) -> None:
        """Delete a file, if it is there."""
        with self.errors("delete", name) as path, contextlib.suppress(FileNotFoundError):
            self.filesystem.delete_file(path)

    def files_below(self, name: str) -> dict[str, float]:
        """All files below a directory, and when each was written (seconds since 1970)."""
        with self.errors("list", name) as path:
            selector = FileSelector(path, allow_not_found=True, recursive=True)
            found: list[Any] = self.filesystem.get_file_info(selector)
            above = len(self.path("")) + 1
            return {
                one.path[above:]: one.mtime_ns / 1e9
                for one in sorted(found, key=lambda one: str(one.path))
                if one.type == FileType.File
            }

    def leftovers(self, name: str) -> list[str]:
        """The files below a directory that no run is at work on, as far as can be known: in a
        directory all of them, since the caller has the lock; in a store those that are a day
        old."""
        found = self.files_below(name)
        if self.is_local:
            return list(found)
        newest_s = time.time() - LEFTOVER_S
        return [name for name, written_s in found.items() if written_s < newest_s]

    def delete_directory(self, name: str) -> None:
        """Delete a directory with all that is in it, if it is there."""
        with self.errors("delete", name) as path, contextlib.suppress(FileNotFoundError):
            self.filesystem.delete_dir(path)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lets one job in at a time, if there is a lock. Raises PipelineError."""
        if not self.is_local:
            yield
            return
        with self.errors("lock", LOCK) as path:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise PipelineError(
                    f"another job is at work in {self.url}; run this one when it has ended"
                ) from None
            yield
        finally:
            os.close(descriptor)

    @property
    def _has_directories(self) -> bool:
        """Whether a file is there while it is written; an object of a store is not."""
        return self.filesystem.type_name not in ("s3", "gcs", "abfs")

    def _unfinished(self, name: str) -> str:
        directory, _, last = name.rpartition("/")
        return f"{directory}/_{last}.{os.getpid()}" if directory else f"_{last}.{os.getpid()}"

    def _sync(self, path: str) -> None:
        """Sync a file, and the names of all directories down to it; a store promises that by
        itself."""
        if self.is_local:
            _sync(path)
            below = Path(path).relative_to(self.url)
            for directory in (*below.parents, Path("..")):
                _sync(os.path.normpath(f"{self.url}/{directory}"))


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _location(url: str) -> str:
    """A URL without options and keys. In Azure, the part before the host is the container."""
    url = _as_s3(url)
    parts = urlsplit(url)
    container, at, host = parts.netloc.rpartition("@")
    if at and parts.scheme.startswith("abfs"):
        netloc = f"{container.partition(':')[0]}@{host}".removeprefix("@")
        return parts._replace(netloc=netloc, query="").geturl().rstrip("/")
    return shown_url(url).rstrip("/")


def _as_s3(url: str) -> str:
    """Hadoop has other names for the same store."""
    return re.sub(r"^s3[an]://", "s3://", url)
