"""A directory at any path that Hadoop knows: local, HDFS, an object store.

Names are relative to the directory, with forward slashes. Renaming a file is atomic where the file
system says so; of an object store each object appears as a whole.

Cost: one call into the JVM per call, and what the file system takes. Threads: the caller's.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JJavaError

from delayserver.errors import PipelineError
from delayserver.pipeline.progress import Job


class Place:
    """One directory. Every call raises PipelineError for what the file system says."""

    def __init__(self, job: Job, root: str) -> None:
        if job.is_connect:
            raise PipelineError(
                "Spark Connect cannot move files; give a master such as local[*] or spark://host"
            )
        context: Any = job.spark.sparkContext
        self._jvm = context._jvm
        try:
            path = self._jvm.org.apache.hadoop.fs.Path(root)
            self._fs = path.getFileSystem(context._jsc.hadoopConfiguration())
            qualified = self._fs.makeQualified(path)
            self.root: str = qualified.toString().rstrip("/")
            self._local = Path(qualified.toUri().getPath()) if _is_local(qualified) else None
        except Py4JJavaError as error:
            raise _failed("use", root, error) from error

    def url(self, name: str) -> str:
        """The full path of a name."""
        return f"{self.root}/{name}" if name else self.root

    def _path(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self.url(name))

    def names(self, directory: str) -> list[str]:
        """The names in a directory, in order; none if it is not there."""
        try:
            path = self._path(directory)
            if not self._fs.exists(path):
                return []
            return sorted(status.getPath().getName() for status in self._fs.listStatus(path))
        except Py4JJavaError as error:
            raise _failed("list", self.url(directory), error) from error

    def files_below(self, directory: str) -> list[str]:
        """All files below a directory, relative to it, in order; none if it is not there."""
        try:
            path = self._path(directory)
            if not self._fs.exists(path):
                return []
            above = len(self.url(directory)) + 1
            found, files = [], self._fs.listFiles(path, True)
            while files.hasNext():
                found.append(files.next().getPath().toString()[above:])
            return sorted(found)
        except Py4JJavaError as error:
            raise _failed("list", self.url(directory), error) from error

    def read(self, name: str) -> str:
        """The text of a file."""
        try:
            stream = self._fs.open(self._path(name))
            try:
                text: str = self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8")
                return text
            finally:
                stream.close()
        except Py4JJavaError as error:
            raise _failed("read", self.url(name), error) from error

    def write(self, name: str, text: str) -> None:
        """Write a file that is not there: all of it, or nothing."""
        directory, _, last = name.rpartition("/")
        unfinished = f"{directory}/.{last}.new" if directory else f".{last}.new"
        try:
            stream = self._fs.create(self._path(unfinished), True)
            try:
                stream.write(bytearray(text.encode()))
            finally:
                stream.close()
        except Py4JJavaError as error:
            raise _failed("write", self.url(name), error) from error
        self.sync([unfinished])
        self.rename(unfinished, name)

    def rename(self, name: str, new_name: str) -> None:
        """Give a file another name, below a directory that may not be there yet."""
        try:
            target = self._path(new_name)
            self._fs.mkdirs(target.getParent())
            if not self._fs.rename(self._path(name), target):
                raise PipelineError(
                    f"{self.url(name)} cannot become {self.url(new_name)}: is there such a file?"
                )
        except Py4JJavaError as error:
            raise _failed("rename", self.url(name), error) from error

    def delete(self, name: str) -> None:
        """Delete a file, or a directory with all that is in it, if it is there."""
        try:
            self._fs.delete(self._path(name), True)
        except Py4JJavaError as error:
            raise _failed("delete", self.url(name), error) from error

    def sync(self, names: Iterable[str]) -> None:
        """Make files and their names outlast a power loss. On this machine's own disks that has to
        be asked for; elsewhere it is the file system's promise."""
        if self._local is None:
            return
        directories = {self._local.parent}
        for name in names:
            _sync(self._local / name)
            directories |= {self._local / parent for parent in Path(name).parents}
        for directory in directories:
            _sync(directory)


def _is_local(path: Any) -> bool:
    return bool(path.toUri().getScheme() == "file")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _failed(call: str, path: str, error: Py4JJavaError) -> PipelineError:
    cause = error.java_exception
    return PipelineError(f"cannot {call} {path}: {cause.getMessage() or cause.toString()}")
