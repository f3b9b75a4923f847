"""The one seam to the operating system's files: nothing else in the project opens a file.

All paths are relative to the root that a `Files` was made for, with forward slashes. Writes are
positioned (`pwrite`), so that a write that failed half-way can simply be repeated, and no file has
a position that two callers could disagree on. There are two implementations with one contract:
`OsFiles` here, and `SimulatedFiles` in `tests.world.storage.files`, which can fail, tear and drop
any call.

Cost: one system call per call; `sync_all` has up to 15 threads of its own, which end with it.
Threads: every method may be called from any thread; the callers see to it that a file has one
writer.

Durability, as POSIX has it: bytes are durable after `fdatasync` of their file; a name is durable
(created, renamed or removed) after `sync_directory` of its directory.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from storage.errors import (
    EXHAUSTED,
    DirectoryLockedError,
    DiskError,
    DiskFullError,
    ExhaustedError,
    MissingFileError,
    ShortageError,
    SyncError,
    UnreadableError,
)

Buffer = bytes | bytearray | memoryview

FILE_MODE = 0o640
PRIVATE_MODE = 0o600
DIRECTORY_MODE = 0o750
SECTOR_BYTES = 4096
"""The bytes that one bad sector loses: the system reads, and refuses to, by pages of this size."""
UNREADABLE_BYTE = b"\xbd"
"""Stands for a byte that cannot be read. Not zero: zeros mean that nothing was written."""

_BUFFERS_MAX = 64
_WRITE_BYTES = 1024 * 1024
"""At once, where it is not to be durable yet. For a call with more Linux looks for memory in larger
stretches: 16 MiB were measured to take up to ten times as long."""
_SYNC_THREADS_MAX = 16
"""Threads that sync at once: the system writes their files side by side, and commits its journal
once for many. See docs/decisions/0029-many-files-are-synced-at-once.md."""
_FILES_PER_SYNC_THREAD = 2
"""With fewer for each, to start a thread takes as long as it saves."""
_CLOSED = 2**31 - 1
"""No process has this descriptor: the system answers EBADF."""


class File(Protocol):
    """One open file. `path` is relative to the root."""

    path: str

    def pread(self, length: int, offset: int) -> bytes:
        """Read up to `length` bytes at `offset`; fewer only at the end of the file.

        Raises UnreadableError if the device does not give back some of them."""

    def pread_now(self, length: int, offset: int) -> bytes | None:
        """Read `length` bytes at `offset` if all of them are in memory; never waits for the disk.

        None where they are not, where the system cannot tell, and where `pread` would fail or
        return less. `pread` then gives the reason."""

    def pwrite(self, buffers: Sequence[Buffer], offset: int) -> None:
        """Write all buffers, one behind the other, at `offset`. Not durable yet."""

    def pwrite_durable(self, buffers: Sequence[Buffer], offset: int) -> None:
        """Write all buffers at `offset`, durable on return; one system call where there is one.

        A file that is written this way must have no plain `pwrite` that is not synced: an error of
        that write could be reported here, for the wrong bytes.
        Raises ShortageError when there was no space: nothing of it counts as durable.
        Raises SyncError for any other failure, because the write and the sync cannot be told
        apart."""

    def fdatasync(self) -> None:
        """Make all that was written durable. Raises SyncError; never to be retried."""

    def truncate(self, length: int) -> None:
        """Cut the file, or fill it up with zeros, to `length` bytes. Not durable yet."""

    def size(self) -> int:
        """The length in bytes."""

    def close(self) -> None:
        """Give the descriptor back. Nothing is synced."""


class Files(Protocol):
    """The files below one root directory."""

    root: str

    def open(self, path: str, *, create: bool = False, mode: int = FILE_MODE) -> File:
        """Open for reading and writing. Raises MissingFileError unless it exists or `create`, and
        where its directory does not exist (as `rename`, `link` and `unlink` do).

        `mode`: who may open a file that is made by this call."""

    def exists(self, path: str) -> bool:
        """Whether there is a file or a directory at `path`."""

    def list(self, directory: str) -> list[str]:
        """Names in a directory, sorted; an empty list where there is no such directory."""

    def rename(self, source: str, target: str) -> None:
        """Give a file another name, and replace any file there. Durable after `sync_directory`."""

    def link(self, source: str, target: str) -> None:
        """Give a file one more name, which stays with these bytes whatever becomes of the other.

        Raises DiskError where the name is taken. Durable after `sync_directory`."""

    def unlink(self, path: str) -> None:
        """Delete a name, and the file with its last one. Durable after `sync_directory`."""

    def make_directory(self, path: str) -> None:
        """Make a directory and its parents, durably; nothing where it exists."""

    def remove_directory(self, path: str) -> None:
        """Delete an empty directory. Raises MissingFileError; DiskError where it is not empty."""

    def sync_directory(self, path: str) -> None:
        """Make the names in a directory durable. Raises SyncError, which must never be retried.

        Raises ExhaustedError where it was not begun: that may be retried."""

    def sync_all(self, files: Sequence[File]) -> None:
        """Make all that was written to these open files durable, in any order or all at once.

        Raises SyncError, the first one, when no sync is under way any more; never to be retried."""

    def map_to_read(self, path: str) -> memoryview:
        """The content of a file as it is now, mapped. Raises MissingFileError."""

    def scratch(self, length: int) -> memoryview:
        """`length` bytes (above 0) of a new file without a name, mapped, to be written and read.

        It has its space on the disk, and ends with the last view of it, or with the process. Raises
        ShortageError where there is no space or no descriptor, DiskError where it cannot be had."""

    def free_bytes(self) -> int:
        """Bytes that are free on the device for this process."""

    def lock(self, path: str) -> contextlib.AbstractContextManager[None]:
        """Own `path` exclusively until the context ends, or the process does (I12)."""


def replace_file(files: Files, path: str, data: bytes, *, mode: int = FILE_MODE) -> None:
    """Give a file this content, all or nothing: a reader at any moment, also after a power loss,
    finds the old content or the new. Durable on return."""
    made = path + ".new"
    if files.exists(made):
        files.unlink(made)  # left by a process that was killed, and perhaps of another mode
    file = files.open(made, create=True, mode=mode)
    try:
        file.pwrite([data], 0)
        file.fdatasync()
    finally:
        file.close()
    files.rename(made, path)
    files.sync_directory(path.rpartition("/")[0])


def size_of(files: Files, path: str) -> int:
    """Length of a file; 0 where there is none."""
    try:
        file = files.open(path)
    except FileNotFoundError:
        return 0
    try:
        return file.size()
    finally:
        file.close()


def read_past(
    read: Callable[[int, int], bytes], length: int, offset: int
) -> Iterator[tuple[int, bytes, UnreadableError | None]]:
    """The bytes of a stretch that `read`, a `File.pread`, gives: in one piece, or by sectors.

    Yields offset and bytes of each piece; where there is an error, UNREADABLE_BYTE in their place.
    So a reader that holds a checksum of these bytes loses no more than the bad sectors."""
    try:
        whole = read(length, offset)
    except UnreadableError:
        pass
    else:
        yield offset, whole, None
        return
    end = offset + length
    while offset < end:
        count = min(end - offset, SECTOR_BYTES - offset % SECTOR_BYTES)
        try:
            data = read(count, offset)
        except UnreadableError as error:
            yield offset, UNREADABLE_BYTE * count, error
        else:
            yield offset, data, None
            if len(data) < count:
                return
        offset += count


def _wrap(call: str, path: str, error: OSError) -> DiskError:
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFullError(call, path, reason)
    if error.errno in EXHAUSTED:
        return ExhaustedError(call, path, reason)
    if error.errno == errno.ENOENT:
        return MissingFileError(call, path)
    if error.errno in (errno.EACCES, errno.EPERM):
        where = error.filename or path
        advice = f"let user {os.geteuid()}, as which this runs, read and write {where} (chown -R)"
        return DiskError(call, path or str(where), reason, advice)
    return DiskError(call, path, reason)


_UNREADABLE = {
    getattr(errno, name)
    for name in ("EIO", "ENODATA", "EBADMSG", "EUCLEAN", "EILSEQ", "EREMOTEIO", "ETIMEDOUT")
    if hasattr(errno, name)
}
"""The errors of a read for a bad sector, for a checksum of the file system or of the device that
does not match, and for a device that gave up. Not every system knows all of them."""


@contextlib.contextmanager
def _disk_errors(call: str, path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _wrap(call, path, error) from error


class OsFile:
    """A file of the operating system. See `File`."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._knows_dsync = hasattr(os, "RWF_DSYNC")
        self._knows_nowait = hasattr(os, "RWF_NOWAIT")

    def pread(self, length: int, offset: int) -> bytes:
        try:
            data = os.pread(self._descriptor, length, offset)
            if len(data) == length or not data:
                return data
            # The kernel caps one read at 2 GiB, and a signal may shorten it: ask until the end.
            parts = [data]
            have = len(data)
            while have < length and (
                data := os.pread(self._descriptor, length - have, offset + have)
            ):
                parts.append(data)
                have += len(data)
            return b"".join(parts)
        except OSError as error:
            if error.errno in _UNREADABLE:
                reason = error.strerror or str(error)
                raise UnreadableError(self.path, offset, reason) from error
            raise _wrap("pread", self.path, error) from error

    def pread_now(self, length: int, offset: int) -> bytes | None:
        if not self._knows_nowait:
            return None
        data = bytearray(length)
        try:
            count = os.preadv(self._descriptor, [data], offset, os.RWF_NOWAIT)
        except OSError as error:
            # Some file systems cannot tell which bytes are in memory.
            self._knows_nowait = error.errno not in (errno.EOPNOTSUPP, errno.EINVAL)
            return None
        return bytes(data) if count == length else None

    def pwrite(self, buffers: Sequence[Buffer], offset: int) -> None:
        with _disk_errors("pwrite", self.path):
            if sum(memoryview(buffer).nbytes for buffer in buffers) <= _WRITE_BYTES:
                self._write_all(buffers, offset, 0)
                return
            for buffer in buffers:
                view = memoryview(buffer).cast("B")
                for start in range(0, len(view), _WRITE_BYTES):
                    self._write_all([view[start : start + _WRITE_BYTES]], offset + start, 0)
                offset += len(view)

    def pwrite_durable(self, buffers: Sequence[Buffer], offset: int) -> None:
        # RWF_DSYNC needs one GIL hand-over where write + fdatasync need two.
        try:
            if self._knows_dsync:
                try:
                    self._write_all(buffers, offset, os.RWF_DSYNC)
                    return
                except OSError as error:
                    if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                        raise
                    self._knows_dsync = False
            self._write_all(buffers, offset, 0)
            os.fdatasync(self._descriptor)
        except OSError as error:
            wrapped = _wrap("pwritev", self.path, error)
            if isinstance(wrapped, ShortageError):
                raise wrapped from error
            raise SyncError("pwritev(RWF_DSYNC)", self.path, wrapped.reason) from error

    def _write_all(self, buffers: Sequence[Buffer], offset: int, flags: int) -> None:
        if len(buffers) > _BUFFERS_MAX:
            buffers = [b"".join(buffers)]
        total = sum(memoryview(buffer).nbytes for buffer in buffers)
        written = os.pwritev(self._descriptor, buffers, offset, flags)
        if written == total:
            return
        rest = memoryview(b"".join(buffers))[written:]
        while rest:
            # A short write: the rest again, from where it stopped.
            more = os.pwritev(self._descriptor, [rest], offset + total - len(rest), flags)
            if more == 0:
                raise OSError(errno.EIO, "the system wrote nothing")
            rest = rest[more:]

    def fdatasync(self) -> None:
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise SyncError("fdatasync", self.path, error.strerror or str(error)) from error

    def truncate(self, length: int) -> None:
        with _disk_errors("ftruncate", self.path):
            os.ftruncate(self._descriptor, length)

    def size(self) -> int:
        with _disk_errors("fstat", self.path):
            return os.fstat(self._descriptor).st_size

    def close(self) -> None:
        # Later use of this object must fail, not reach another file of the same number.
        descriptor, self._descriptor = self._descriptor, _CLOSED
        with _disk_errors("close", self.path):
            os.close(descriptor)


def open_to_read(full_path: str, path: str) -> OsFile:
    """A file that others write, opened for reading alone; `path` is its name in errors.

    For the file of a library that does its own input and output. Raises MissingFileError."""
    with _disk_errors("open", path):
        return OsFile(path, os.open(full_path, os.O_RDONLY | os.O_CLOEXEC))


class OsFiles:
    """The operating system's files below `root`, which is made if it does not exist.

    `readonly`: nothing is made, and files are opened for reading alone; the system refuses the
    rest. For a reader of the files of a running server."""

    _file: type[OsFile] = OsFile

    def __init__(self, root: str, *, readonly: bool = False) -> None:
        self.root = root
        self._access = os.O_RDONLY if readonly else os.O_RDWR
        if readonly:
            return
        with _disk_errors("mkdir", root):
            os.makedirs(root, DIRECTORY_MODE, exist_ok=True)
        self._sync_directory(os.path.dirname(os.path.abspath(root)))

    def _full(self, path: str) -> str:
        assert not path.startswith("/") and ".." not in path.split("/"), path
        return os.path.join(self.root, path) if path else self.root

    def open(self, path: str, *, create: bool = False, mode: int = FILE_MODE) -> OsFile:
        flags = self._access | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        with _disk_errors("open", path):
            return self._file(path, os.open(self._full(path), flags, mode))

    def exists(self, path: str) -> bool:
        with _disk_errors("stat", path):
            try:
                os.stat(self._full(path))
            except (FileNotFoundError, NotADirectoryError):
                return False
            return True

    def list(self, directory: str) -> list[str]:
        with _disk_errors("listdir", directory):
            try:
                return sorted(os.listdir(self._full(directory)))
            except FileNotFoundError:
                return []

    def rename(self, source: str, target: str) -> None:
        with _disk_errors("rename", source):
            os.rename(self._full(source), self._full(target))

    def link(self, source: str, target: str) -> None:
        with _disk_errors("link", source):
            os.link(self._full(source), self._full(target))

    def unlink(self, path: str) -> None:
        with _disk_errors("unlink", path):
            os.unlink(self._full(path))

    def make_directory(self, path: str) -> None:
        # Synced even where it exists: a process that was killed may have made it a moment ago.
        with _disk_errors("mkdir", path):
            parts = path.split("/")
            # One by one: `makedirs` gives the mode to the last of them alone.
            for count in range(1, len(parts) + 1):
                os.makedirs(self._full("/".join(parts[:count])), DIRECTORY_MODE, exist_ok=True)
        parent = path
        while parent:
            parent = parent.rpartition("/")[0]
            self.sync_directory(parent)

    def remove_directory(self, path: str) -> None:
        with _disk_errors("rmdir", path):
            os.rmdir(self._full(path))

    def sync_directory(self, path: str) -> None:
        self._sync_directory(self._full(path))

    @staticmethod
    def _sync_directory(path: str) -> None:
        # Once it was begun, whatever fails, the names are not known to be durable: a SyncError.
        descriptor = -1
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            os.fsync(descriptor)
        except OSError as error:
            if descriptor < 0 and error.errno in EXHAUSTED:
                raise _wrap("open", path, error) from error
            raise SyncError("fsync of directory", path, error.strerror or "") from error
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def sync_all(self, files: Sequence[File]) -> None:
        left = deque(files)
        errors: list[BaseException] = []

        def sync_next() -> None:
            while not errors:
                try:
                    file = left.popleft()
                except IndexError:
                    return
                try:
                    file.fdatasync()
                except BaseException as error:  # raised below, by the caller
                    errors.append(error)

        threads: list[threading.Thread] = []
        # Without memory for one more thread those that are there do it, at the least the caller.
        with contextlib.suppress(RuntimeError):
            for _ in range(1, min(_SYNC_THREADS_MAX, len(files) // _FILES_PER_SYNC_THREAD)):
                thread = threading.Thread(target=sync_next, name="sync", daemon=True)
                thread.start()
                threads.append(thread)
        sync_next()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def map_to_read(self, path: str) -> memoryview:
        with _disk_errors("map", path):
            descriptor = os.open(self._full(path), os.O_RDONLY | os.O_CLOEXEC)
            try:
                if not os.fstat(descriptor).st_size:
                    return memoryview(b"")
                return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
            finally:
                os.close(descriptor)

    def scratch(self, length: int) -> memoryview:
        with (
            _disk_errors("map", "a file without a name"),
            tempfile.TemporaryFile(dir=self.root, buffering=0) as file,
        ):
            os.posix_fallocate(file.fileno(), 0, length)
            return memoryview(mmap.mmap(file.fileno(), length))

    def free_bytes(self) -> int:
        with _disk_errors("statvfs", self.root):
            status = os.statvfs(self.root)
            return status.f_bavail * status.f_frsize

    @contextlib.contextmanager
    def lock(self, path: str) -> Iterator[None]:
        descriptor = self._open_lock(path, os.O_RDONLY)
        try:
            with _disk_errors("lock", path):
                try:
                    try:
                        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except OSError as error:
                        if error.errno != errno.EBADF:
                            raise
                        os.close(descriptor)  # NFS locks only files that may be written.
                        descriptor = _CLOSED
                        descriptor = self._open_lock(path, os.O_RDWR)
                        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    owner = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
                    raise DirectoryLockedError(
                        self.root, f"process {owner}" if owner else "another process"
                    ) from error
            # The number is for people; a full disk must not keep the server from starting.
            with contextlib.suppress(OSError, DiskError):
                told = self._open_lock(path, os.O_WRONLY | os.O_TRUNC)
                try:
                    os.pwrite(told, f"{os.getpid()}\n".encode(), 0)
                finally:
                    os.close(told)
            yield
        finally:
            if descriptor != _CLOSED:
                os.close(descriptor)

    def _open_lock(self, path: str, access: int) -> int:
        # Open only for reading where that is enough. While a file is open for writing, a file
        # system cannot be made read-only, which an administrator does when a disk fails.
        with _disk_errors("open", path):
            return os.open(self._full(path), access | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
