"""A machine in memory that can lose power, behind the seam of `storage.files`.

`SimulatedFiles` keeps two states apart: what a reader sees (the page cache), and what a power loss
cannot take away. Between them stand the changes that nobody has synced yet, and `crash()` returns a
machine that came up with any legal part of them: lost, reordered, torn. `kill()` returns one where
only the process died.

What a crash may leave behind, file data:

    fdatasync, pwrite_durable   returned: theirs is there, whole
    pwrite                      lost, kept, or torn: a prefix ending at any byte, or any subset of
                                its 512-byte sectors, with or without the growth of the file
    truncate                    lost or kept

Each of these is decided for itself, so a later write may survive an earlier one; where two overlap,
the later one wins if it survived. `pwrite_durable` promises its own bytes only, as RWF_DSYNC does:
earlier writes to the same file stay at risk. Names (created, renamed, removed) are lost or kept
until `sync_directory`, one by one, even if the file's data was synced. Two rules bind them: a name
change survives only together with those it was built on (a name cannot be taken before it was
freed), and a rename is atomic, so a file that was synced in is never at both names, nor at none.

`fail_reads` makes a sector bad: what touches it cannot be read any more, in this process and after
any crash, whatever name the file gets; writes go on as if nothing was the matter. `on_sync` is
called in every sync, before it has its effect: a disk on which a sync takes its time.

All of it is decided by the `rng` that was passed in: the same seed and the same calls give the
same outcome, in every process. Nothing here reads a clock or touches the disk.

Cost: a write copies its bytes two or three times. `crash()` is linear in the number of files and in
what was not synced; a file that had nothing unsynced is copied only when the next machine first
writes to it. Some 100 µs for a cycle of 60 calls, a 64 KiB file and a crash. Threads: none of this
is thread-safe; one thread at a time.

Rejected: a simulation of pages and of a journal. Writes and name changes are what the contract
speaks of, and taken one by one they allow every state that pages allow, at a tenth of the code.
"""

import contextlib
import errno
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from storage.errors import (
    DirectoryLockedError,
    DiskError,
    MissingFileError,
    SyncError,
    UnreadableError,
)
from storage.files import FILE_MODE, Buffer, File

SECTOR_BYTES = 512


class _Change(NamedTuple):
    """One change to a file's content. `data` None: a truncate to `offset`."""

    offset: int
    data: bytes | None
    durable: bool


def _apply(content: bytearray, offset: int, data: bytes | None) -> None:
    if data is None:
        if offset < len(content):
            del content[offset:]
        else:
            content.extend(bytes(offset - len(content)))
    elif data:
        if offset > len(content):
            content.extend(bytes(offset - len(content)))
        content[offset : offset + len(data)] = data


def _survivors(rng: random.Random, count: int) -> list[bool]:
    """Which of `count` unsynced changes outlive a crash: none, all, the first few, any subset."""
    mood = rng.randrange(4)
    if mood == 0:
        return [False] * count
    if mood == 1:
        return [True] * count
    if mood == 2:
        first_lost = rng.randrange(count + 1)
        return [index < first_lost for index in range(count)]
    bits = rng.getrandbits(count)
    return [bool(bits >> index & 1) for index in range(count)]


def _apply_torn(content: bytearray, offset: int, data: bytes, rng: random.Random) -> None:
    """Apply a part of a write: a prefix of it, or some of its sectors."""
    end = offset + len(data)
    if rng.random() < 0.5:
        _apply(content, offset, data[: rng.randrange(len(data))])
    else:
        first_sector = offset // SECTOR_BYTES
        sector_count = (end - 1) // SECTOR_BYTES - first_sector + 1
        kept = rng.getrandbits(sector_count)
        for index in range(sector_count):
            if kept >> index & 1:
                start = max(offset, (first_sector + index) * SECTOR_BYTES)
                stop = min(end, (first_sector + index + 1) * SECTOR_BYTES)
                _apply(content, start, data[start - offset : stop - offset])
    if len(content) < end and rng.random() < 0.5:
        _apply(content, end, None)  # The new size reached the disk, the data did not.


class _Inode:
    """A file without its name.

    `content` is what a reader sees and `durable` what no crash takes away; `unsynced` leads from
    the one to the other. After a failed sync it does not: what was dropped is in `content` alone.
    """

    __slots__ = ("_private", "bad", "content", "durable", "locked", "unsynced")

    def __init__(
        self,
        content: bytearray,
        durable: bytearray,
        unsynced: list[_Change],
        bad: Sequence[range] = (),
    ) -> None:
        self.bad = list(bad)
        self.content = content
        self.durable = durable
        self.unsynced = unsynced
        self.locked = False
        self._private = False  # The buffers may belong to a machine that is off: copy, then write.

    def change(self, offset: int, data: bytes | None, *, durable: bool = False) -> None:
        if not self._private:
            self.content = bytearray(self.content)
            self.durable = bytearray(self.durable)
            self._private = True
        _apply(self.content, offset, data)
        if durable and not self.unsynced:
            _apply(self.durable, offset, data)
        else:
            # A durable write behind unsynced ones keeps its place: they must not overwrite it.
            self.unsynced.append(_Change(offset, data, durable))

    def sync(self) -> None:
        for change in self.unsynced:
            _apply(self.durable, change.offset, change.data)
        self.unsynced.clear()

    def drop_unsynced(self) -> None:
        for change in self.unsynced:
            if change.durable:
                _apply(self.durable, change.offset, change.data)
        self.unsynced.clear()

    def after_crash(self, rng: random.Random) -> "_Inode":
        if not self.unsynced:
            return _Inode(self.durable, self.durable, [], self.bad)
        content = bytearray(self.durable)
        tear_chance = rng.choice((0.0, 0.5))
        survivors = _survivors(rng, len(self.unsynced))
        for change, survives in zip(self.unsynced, survivors, strict=True):
            if change.durable:
                _apply(content, change.offset, change.data)
            elif survives:
                if change.data and rng.random() < tear_chance:
                    _apply_torn(content, change.offset, change.data, rng)
                else:
                    _apply(content, change.offset, change.data)
        return _Inode(content, content, [], self.bad)

    def after_kill(self) -> "_Inode":
        return _Inode(self.content, self.durable, self.unsynced.copy(), self.bad)


class _Slot(NamedTuple):
    """The place of a name: an entry of a directory."""

    directory: str
    name: str


_Names = dict[str, dict[str, _Inode]]  # by directory, by name


class _NameChange(NamedTuple):
    """A create or a link (no source), an unlink (no target) or a rename, and what it found at the
    target."""

    inode: _Inode
    source: _Slot | None
    target: _Slot | None
    replaced: _Inode | None = None

    def apply(self, names: _Names) -> None:
        """Change the names; nothing where they are not as this change found them."""
        source, target = self.source, self.target
        if source is not None and names[source.directory].get(source.name) is not self.inode:
            return
        if target is not None:
            if names[target.directory].get(target.name) is not self.replaced:
                return
            names[target.directory][target.name] = self.inode
        if source is not None:
            del names[source.directory][source.name]


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


class SimulatedFile:
    """An open file of a `SimulatedFiles`. See `storage.files.File`."""

    def __init__(self, path: str, inode: _Inode, machine: "SimulatedFiles") -> None:
        self.path = path
        self._inode = inode
        self._machine = machine
        self._closed = False

    def pread(self, length: int, offset: int) -> bytes:
        assert length >= 0 and offset >= 0, (length, offset)
        self._check_usable("pread", DiskError)
        if any(bad.start < offset + length and offset < bad.stop for bad in self._inode.bad):
            raise UnreadableError(self.path, offset, os.strerror(errno.EIO))
        return bytes(memoryview(self._inode.content)[offset : offset + length])

    def pread_now(self, length: int, offset: int) -> bytes | None:
        if self._closed or self._machine.is_off or not self._machine.is_in_memory():
            return None
        try:
            data = self.pread(length, offset)
        except UnreadableError:
            return None
        return data if len(data) == length else None

    def pwrite(self, buffers: Sequence[Buffer], offset: int) -> None:
        self._check_usable("pwrite", DiskError)
        self._write(buffers, offset, durable=False)

    def pwrite_durable(self, buffers: Sequence[Buffer], offset: int) -> None:
        self._check_usable("pwritev(RWF_DSYNC)", SyncError)
        self._machine.on_sync()
        self._write(buffers, offset, durable=True)

    def fdatasync(self) -> None:
        self._check_usable("fdatasync", SyncError)
        self._machine.on_sync()
        self._inode.sync()

    def truncate(self, length: int) -> None:
        assert length >= 0, length
        self._check_usable("ftruncate", DiskError)
        self._inode.change(length, None)

    def size(self) -> int:
        self._check_usable("fstat", DiskError)
        return len(self._inode.content)

    def close(self) -> None:
        """Close. A file of a machine that is off may be closed, so that a `finally` can do it."""
        if self._closed:
            raise DiskError("close", self.path, os.strerror(errno.EBADF))
        self._closed = True

    def drop_unsynced(self) -> None:
        """What a failed sync does on Linux: mark all dirty pages clean though none was written.

        A reader still sees the bytes, even in the next process; no later sync makes them durable.
        """
        self._inode.drop_unsynced()

    def _check_usable(self, call: str, error: type[DiskError] | type[SyncError]) -> None:
        if self._closed:
            raise error(call, self.path, os.strerror(errno.EBADF))
        if self._machine.is_off:
            raise error(call, self.path, "the simulated machine is off")

    def _write(self, buffers: Sequence[Buffer], offset: int, *, durable: bool) -> None:
        assert offset >= 0, offset
        if data := b"".join(buffers):
            self._inode.change(offset, data, durable=durable)


class SimulatedFiles:
    """The files of one simulated machine. See `storage.files.Files`, and the top of this module.

    `free_space_bytes` is what `free_bytes()` answers; set it as you like, writes do not change it.
    Directories are made and removed durably at once, and cannot be renamed.
    """

    def __init__(self, root: str = "simulated", rng: random.Random | None = None) -> None:
        self.root = root
        self.free_space_bytes = 1 << 40
        self.is_off = False
        self.on_sync: Callable[[], None] = lambda: None
        self._rng = random.Random(0) if rng is None else rng
        # Of its own, so that what a power loss leaves does not depend on what was read.
        self._page_cache = random.Random(0)
        self._names: _Names = {"": {}}
        self._durable_names: _Names = {"": {}}
        self._unsynced_names: list[_NameChange] = []

    def is_in_memory(self) -> bool:
        """Whether what is read next can be read without waiting: the system keeps what it likes."""
        return self._page_cache.random() < 0.5

    def fail_reads(self, path: str, start: int, end: int) -> None:
        """Let every read of `[start, end)` of a file fail from now on."""
        inode = self._find(path)
        if inode is None:
            raise MissingFileError("fail_reads", path)
        inode.bad.append(range(start, end))

    def mend_reads(self) -> None:
        """Let all be read again, as from a copy that somebody has kept."""
        for entries in (*self._names.values(), *self._durable_names.values()):
            for inode in entries.values():
                inode.bad.clear()

    def crash(self) -> "SimulatedFiles":
        """Cut the power, and return the machine that comes up again.

        This one is off from now on: its files raise DiskError, its locks are gone. To see another
        outcome of the same power loss, call `crash` again.
        """
        self.is_off = True
        names = {directory: dict(entries) for directory, entries in self._durable_names.items()}
        survivors = _survivors(self._rng, len(self._unsynced_names))
        for change, survives in zip(self._unsynced_names, survivors, strict=True):
            if survives:
                change.apply(names)
        survivors_of: dict[_Inode, _Inode] = {}

        def survivor(inode: _Inode) -> _Inode:
            # A file with two names is one file afterwards, too.
            if inode not in survivors_of:
                survivors_of[inode] = inode.after_crash(self._rng)
            return survivors_of[inode]

        machine = self._next_machine()
        machine._names = {
            directory: {name: survivor(inode) for name, inode in entries.items()}
            for directory, entries in names.items()
        }
        machine._durable_names = {key: dict(entries) for key, entries in machine._names.items()}
        return machine

    def kill(self) -> "SimulatedFiles":
        """Kill the process (SIGKILL), and return the same machine for the next one.

        All that was written is still there, and what was not synced is still not durable. The old
        process's files raise DiskError, its locks are gone.
        """
        self.is_off = True
        heirs: dict[_Inode, _Inode] = {}

        def heir(inode: _Inode) -> _Inode:
            if inode not in heirs:
                heirs[inode] = inode.after_kill()
            return heirs[inode]

        def inherit(names: Mapping[str, Mapping[str, _Inode]]) -> _Names:
            return {
                directory: {name: heir(inode) for name, inode in entries.items()}
                for directory, entries in names.items()
            }

        machine = self._next_machine()
        machine._names = inherit(self._names)
        machine._durable_names = inherit(self._durable_names)
        machine._unsynced_names = [
            change._replace(
                inode=heir(change.inode),
                replaced=None if change.replaced is None else heir(change.replaced),
            )
            for change in self._unsynced_names
        ]
        return machine

    def open(self, path: str, *, create: bool = False, mode: int = FILE_MODE) -> SimulatedFile:
        slot = self._slot("open", path)
        inode = self._names[slot.directory].get(slot.name)
        if inode is None:
            if not create:
                raise MissingFileError("open", path)
            inode = _Inode(bytearray(), bytearray(), [])
            self._change_name(_NameChange(inode, None, slot))
        return SimulatedFile(path, inode, self)

    def exists(self, path: str) -> bool:
        self._check_on("stat", path)
        return path in self._names or self._find(path) is not None

    def list(self, directory: str) -> list[str]:
        self._check_on("listdir", directory)
        if directory in self._names:
            below = (key for key in self._names if key and _parent(key) == directory)
            names = [*self._names[directory], *(key.rpartition("/")[2] for key in below)]
            return sorted(names)
        if self._file_above(directory) is not None or self._find(directory) is not None:
            raise DiskError("listdir", directory, os.strerror(errno.ENOTDIR))
        return []

    def contents(self) -> dict[str, bytes]:
        """What each file holds, by its path, as a reader sees it; bad sectors, too."""
        return {
            f"{directory}/{name}" if directory else name: bytes(inode.content)
            for directory, entries in self._names.items()
            for name, inode in entries.items()
        }

    def rename(self, source: str, target: str) -> None:
        assert source not in self._names, f"{source} is a directory: not simulated"
        source_slot = self._slot("rename", source)
        inode = self._find(source)
        if inode is None:
            raise MissingFileError("rename", source)
        target_slot = self._slot("rename", target)
        replaced = self._find(target)
        if replaced is not inode:  # Of two names of one file POSIX leaves both.
            self._change_name(_NameChange(inode, source_slot, target_slot, replaced))

    def link(self, source: str, target: str) -> None:
        self._slot("link", source)
        inode = self._find(source)
        if inode is None:
            raise MissingFileError("link", source)
        slot = self._slot("link", target)
        if self._find(target) is not None:
            raise DiskError("link", source, os.strerror(errno.EEXIST))
        self._change_name(_NameChange(inode, None, slot))

    def unlink(self, path: str) -> None:
        slot = self._slot("unlink", path)
        inode = self._find(path)
        if inode is None:
            raise MissingFileError("unlink", path)
        self._change_name(_NameChange(inode, slot, None))

    def make_directory(self, path: str) -> None:
        self._check_on("mkdir", path)
        if self._find(path) is not None:
            raise DiskError("mkdir", path, os.strerror(errno.EEXIST))
        if self._file_above(path) is not None:
            raise DiskError("mkdir", path, os.strerror(errno.ENOTDIR))
        parts = path.split("/")
        for count in range(1, len(parts) + 1):
            directory = "/".join(parts[:count])
            self._names.setdefault(directory, {})
            self._durable_names.setdefault(directory, {})

    def remove_directory(self, path: str) -> None:
        self._check_on("rmdir", path)
        if path not in self._names:
            raise MissingFileError("rmdir", path)
        if self.list(path):
            raise DiskError("rmdir", path, os.strerror(errno.ENOTEMPTY))
        # What it held is gone with it, durably: nothing of it can come back.
        self.sync_directory(path)
        del self._names[path], self._durable_names[path]

    def sync_directory(self, path: str) -> None:
        if self.is_off or path not in self._names:
            reason = "the simulated machine is off" if self.is_off else os.strerror(errno.ENOENT)
            raise SyncError("fsync of directory", path or ".", reason)
        self.on_sync()
        # With the changes of this directory become durable those they were built on: what happened
        # before to the same names, be it in another directory.
        slots: set[_Slot] = set()
        synced: list[_NameChange] = []
        unsynced: list[_NameChange] = []
        for change in reversed(self._unsynced_names):
            touched = {slot for slot in (change.source, change.target) if slot is not None}
            if any(slot.directory == path or slot in slots for slot in touched):
                slots |= touched
                synced.append(change)
            else:
                unsynced.append(change)
        for change in reversed(synced):
            change.apply(self._durable_names)
        self._unsynced_names = unsynced[::-1]

    def sync_all(self, files: Sequence[File]) -> None:
        """One after the other. A crash between two may leave what any order of them would: the
        writes of a file that was not synced may survive as a whole, too."""
        for file in files:
            file.fdatasync()

    def map_to_read(self, path: str) -> memoryview:
        self._check_on("map", path)
        inode = self._find(path)
        if inode is None:
            raise MissingFileError("map", path)
        return memoryview(bytes(inode.content))

    def scratch(self, length: int) -> memoryview:
        self._check_on("map", "a file without a name")
        return memoryview(bytearray(length))

    def free_bytes(self) -> int:
        self._check_on("statvfs", self.root)
        return self.free_space_bytes

    @contextlib.contextmanager
    def lock(self, path: str) -> Iterator[None]:
        file = self.open(path, create=True)
        inode = file._inode
        if inode.locked:
            raise DirectoryLockedError(self.root, "process 1")
        inode.locked = True
        try:
            file.truncate(0)
            file.pwrite([b"1\n"], 0)
            yield
        finally:
            inode.locked = False

    def _next_machine(self) -> "SimulatedFiles":
        machine = SimulatedFiles(self.root, self._rng)
        machine.free_space_bytes = self.free_space_bytes
        machine.on_sync = self.on_sync
        machine._page_cache = self._page_cache
        return machine

    def _check_on(self, call: str, path: str) -> None:
        assert not path or not {"", ".", ".."}.intersection(path.split("/")), path
        if self.is_off:
            raise DiskError(call, path, "the simulated machine is off")

    def _find(self, path: str) -> _Inode | None:
        directory, _, name = path.rpartition("/")
        return self._names.get(directory, {}).get(name)

    def _file_above(self, path: str) -> _Inode | None:
        """The file that stands where `path` needs a directory, if there is one."""
        above = _parent(path)
        while above not in self._names:
            if (inode := self._find(above)) is not None:
                return inode
            above = _parent(above)
        return None

    def _slot(self, call: str, path: str) -> _Slot:
        """The place of the file `path`, checked as the system checks a path."""
        self._check_on(call, path)
        if path in self._names:
            raise DiskError(call, path, os.strerror(errno.EISDIR))
        directory, _, name = path.rpartition("/")
        if directory not in self._names:
            if self._file_above(path) is not None:
                raise DiskError(call, path, os.strerror(errno.ENOTDIR))
            raise MissingFileError(call, path)
        return _Slot(directory, name)

    def _change_name(self, change: _NameChange) -> None:
        change.apply(self._names)
        self._unsynced_names.append(change)
