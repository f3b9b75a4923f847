"""Fakes of the file seam: a machine that can lose power, and files that fail on request.

`SimulatedFiles` is the contract of `storage.files` in memory. It keeps two states apart: what a
reader sees (the page cache), and what a power loss cannot take away. Between them stand the
changes that nobody has synced yet, and `crash()` returns a machine that came up with any legal
part of them: lost, reordered, torn. `kill()` returns one where only the process died.

`MemoryCatalog` is the contract of `storage.catalog`: what was committed survives, nothing else.

`FaultyFiles` wraps any `Files`, this one or `OsFiles`. It numbers the calls and lets the Nth one
fail, fail half-way, or bring the machine down, as its `Faults` say. One run with empty `Faults`
counts the calls, then N = 1, 2, … visits each of them:

    disk = SimulatedFiles(rng=random.Random(seed))
    try:
        run_the_store(FaultyFiles(disk, Faults(Fault(at=n, kind=FaultKind.CRASH))))
    except SimulatedCrash:
        disk = disk.crash()
    check_the_store(disk)

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
import enum
import errno
import os
import random
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from storage.catalog import ManyWrites, Table, Writes
from storage.errors import CatalogError, DirectoryLockedError, DiskError, DiskFullError, SyncError
from storage.files import FILE_MODE, Buffer, File, Files

SECTOR_BYTES = 512
CATALOG_KEY_BYTES_MAX = 511
"""The longest key that LMDB takes."""

_Result = TypeVar("_Result")


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

    __slots__ = ("_private", "content", "durable", "locked", "unsynced")

    def __init__(self, content: bytearray, durable: bytearray, unsynced: list[_Change]) -> None:
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
            return _Inode(self.durable, self.durable, [])
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
        return _Inode(content, content, [])

    def after_kill(self) -> "_Inode":
        return _Inode(self.content, self.durable, self.unsynced.copy())


class _Slot(NamedTuple):
    """The place of a name: an entry of a directory."""

    directory: str
    name: str


_Names = dict[str, dict[str, _Inode]]  # by directory, by name


class _NameChange(NamedTuple):
    """A create (no source), an unlink (no target) or a rename, and what it found at the target."""

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


def _not_found(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


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
        return bytes(memoryview(self._inode.content)[offset : offset + length])

    def pread_now(self, length: int, offset: int) -> bytes | None:
        if self._closed or self._machine.is_off or not self._machine.is_in_memory():
            return None
        data = self.pread(length, offset)
        return data if len(data) == length else None

    def pwrite(self, buffers: Sequence[Buffer], offset: int) -> None:
        self._check_usable("pwrite", DiskError)
        self._write(buffers, offset, durable=False)

    def pwrite_durable(self, buffers: Sequence[Buffer], offset: int) -> None:
        self._check_usable("pwritev(RWF_DSYNC)", SyncError)
        self._write(buffers, offset, durable=True)

    def fdatasync(self) -> None:
        self._check_usable("fdatasync", SyncError)
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
    Directories are durable at once, and cannot be renamed or removed.
    """

    def __init__(self, root: str = "simulated", rng: random.Random | None = None) -> None:
        self.root = root
        self.free_space_bytes = 1 << 40
        self.is_off = False
        self._rng = random.Random(0) if rng is None else rng
        # Of its own, so that what a power loss leaves does not depend on what was read.
        self._page_cache = random.Random(0)
        self._names: _Names = {"": {}}
        self._durable_names: _Names = {"": {}}
        self._unsynced_names: list[_NameChange] = []

    def is_in_memory(self) -> bool:
        """Whether what is read next can be read without waiting: the system keeps what it likes."""
        return self._page_cache.random() < 0.5

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
        machine = self._next_machine()
        machine._names = {
            directory: {name: inode.after_crash(self._rng) for name, inode in entries.items()}
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
                raise _not_found(path)
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

    def rename(self, source: str, target: str) -> None:
        assert source not in self._names, f"{source} is a directory: not simulated"
        source_slot = self._slot("rename", source)
        inode = self._find(source)
        if inode is None:
            raise _not_found(source)
        target_slot = self._slot("rename", target)
        if source_slot != target_slot:
            replaced = self._find(target)
            self._change_name(_NameChange(inode, source_slot, target_slot, replaced))

    def unlink(self, path: str) -> None:
        slot = self._slot("unlink", path)
        inode = self._find(path)
        if inode is None:
            raise _not_found(path)
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

    def sync_directory(self, path: str) -> None:
        if self.is_off or path not in self._names:
            reason = "the simulated machine is off" if self.is_off else os.strerror(errno.ENOENT)
            raise SyncError("fsync of directory", path or ".", reason)
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
            raise _not_found(path)
        return _Slot(directory, name)

    def _change_name(self, change: _NameChange) -> None:
        change.apply(self._names)
        self._unsynced_names.append(change)


class SimulatedCrash(BaseException):
    """The machine went down in the middle of a call. No code but a test's may catch it."""


class FaultKind(enum.Enum):
    """What goes wrong."""

    IO_ERROR = "I/O error"
    """EIO. SyncError from the calls that sync, DiskError from all others."""
    NO_SPACE = "no space"
    """ENOSPC: DiskFullError. Calls that take no space go through: all but the writes, rename,
    make_directory, lock, and open where it creates."""
    CRASH = "crash"
    """SimulatedCrash, from this call and all later ones."""


class Moment(enum.Enum):
    """When it goes wrong."""

    BEFORE = "before"
    """The call has no effect. (But an fdatasync that fails drops the file's unsynced writes.)"""
    MIDDLE = "in the middle of"
    """A write leaves a part of itself, not synced. If it is `pwrite_durable` with IO_ERROR: it
    wrote all and failed to sync, so its bytes can be seen and are not durable. Any other call: as
    BEFORE."""
    AFTER = "after"
    """The call has its whole effect, only its caller does not get to know."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong."""

    at: int
    """The number of the call, from 1."""
    kind: FaultKind
    moment: Moment = Moment.BEFORE
    for_good: bool = False
    """Every call from `at` on fails, not this one only."""
    partial_bytes: int | None = None
    """How much a write that fails in the middle has written; None: half of it."""

    def __post_init__(self) -> None:
        assert self.at >= 1, self.at
        assert self.partial_bytes is None or self.partial_bytes >= 0, self.partial_bytes


Call = Literal[
    "open",
    "exists",
    "list",
    "rename",
    "unlink",
    "make_directory",
    "sync_directory",
    "free_bytes",
    "lock",
    "pread",
    "pwrite",
    "pwrite_durable",
    "fdatasync",
    "truncate",
    "size",
    "close",
    "commit",
]
"""The calls that can fail: all of `Files` and `File`, and the commit of a catalog."""

_SYNC_CALLS: frozenset[Call] = frozenset({"pwrite_durable", "fdatasync", "sync_directory"})


class NumberedCall(NamedTuple):
    """One entry of a trace."""

    number: int
    call: Call
    path: str


class Faults:
    """A plan of what goes wrong, and the count of the calls that it has seen.

    `only` restricts it to some calls: the others are not counted, so `Fault(at=2, …)` with
    `only={"fdatasync"}` means the second fdatasync. Where several faults meet, the first counts.
    One plan may serve several `FaultyFiles`; their calls are counted together.
    """

    def __init__(
        self, *faults: Fault, only: Collection[Call] | None = None, keep_trace: bool = False
    ) -> None:
        self.faults = list(faults)
        """May be changed at any time, e.g. cleared when the disk has room again."""
        self.call_count = 0
        self.struck: list[NumberedCall] = []
        """The calls that were made to fail."""
        self.trace: list[NumberedCall] = []
        """All counted calls, if `keep_trace`."""
        self.crash: SimulatedCrash | None = None
        self._only = None if only is None else frozenset(only)
        self._keep_trace = keep_trace

    def next_fault(self, call: Call, path: str, *, takes_space: bool = False) -> Fault | None:
        """Count a call, and return what goes wrong with it. Raises SimulatedCrash after a crash."""
        if self.crash is not None:
            raise SimulatedCrash(f"{call} of {path} came after a {self.crash}")
        if self._only is not None and call not in self._only:
            return None
        self.call_count += 1
        number = self.call_count
        if self._keep_trace:
            self.trace.append(NumberedCall(number, call, path))
        for fault in self.faults:
            if fault.at == number or (fault.for_good and fault.at < number):
                if fault.kind is FaultKind.NO_SPACE and not takes_space:
                    continue
                self.struck.append(NumberedCall(number, call, path))
                return fault
        return None

    def error(self, fault: Fault) -> DiskError | SimulatedCrash:
        """What the call that was struck last has to raise."""
        number, call, path = self.struck[-1]
        if fault.kind is FaultKind.CRASH:
            self.crash = SimulatedCrash(
                f"simulated crash {fault.moment.value} call {number}: {call} of {path}"
            )
            return self.crash
        if fault.kind is FaultKind.NO_SPACE:
            reason = f"{os.strerror(errno.ENOSPC)} (fault at call {number})"
            return DiskFullError(call, path, reason)
        reason = f"{os.strerror(errno.EIO)} (fault at call {number})"
        return (SyncError if call in _SYNC_CALLS else DiskError)(call, path, reason)

    def run(
        self,
        call: Call,
        path: str,
        effect: Callable[[], _Result],
        *,
        takes_space: bool = False,
    ) -> _Result:
        """Make a call that has its effect either as a whole or not at all."""
        fault = self.next_fault(call, path, takes_space=takes_space)
        if fault is None:
            return effect()
        if fault.moment is Moment.AFTER:
            effect()
        raise self.error(fault)


class FaultyFile:
    """A file whose calls fail as planned. See `storage.files.File`."""

    def __init__(self, inner: File, faults: Faults) -> None:
        self.path = inner.path
        self._inner = inner
        self._faults = faults

    def pread(self, length: int, offset: int) -> bytes:
        return self._faults.run("pread", self.path, lambda: self._inner.pread(length, offset))

    def pread_now(self, length: int, offset: int) -> bytes | None:
        """Not one of the calls that fail: it tells of no failure."""
        return self._inner.pread_now(length, offset)

    def pwrite(self, buffers: Sequence[Buffer], offset: int) -> None:
        fault = self._faults.next_fault("pwrite", self.path, takes_space=True)
        if fault is None:
            self._inner.pwrite(buffers, offset)
            return
        if fault.moment is Moment.AFTER:
            self._inner.pwrite(buffers, offset)
        elif fault.moment is Moment.MIDDLE:
            self._write_part(buffers, offset, fault)
        raise self._faults.error(fault)

    def pwrite_durable(self, buffers: Sequence[Buffer], offset: int) -> None:
        fault = self._faults.next_fault("pwrite_durable", self.path, takes_space=True)
        if fault is None:
            self._inner.pwrite_durable(buffers, offset)
            return
        if fault.moment is Moment.AFTER:
            self._inner.pwrite_durable(buffers, offset)
        elif fault.moment is Moment.MIDDLE:
            if fault.kind is FaultKind.IO_ERROR:
                self._inner.pwrite(buffers, offset)
                self._drop_unsynced()
            else:
                self._write_part(buffers, offset, fault)
        raise self._faults.error(fault)

    def fdatasync(self) -> None:
        fault = self._faults.next_fault("fdatasync", self.path)
        if fault is None:
            self._inner.fdatasync()
            return
        if fault.moment is Moment.AFTER:
            self._inner.fdatasync()
        elif fault.kind is not FaultKind.CRASH:
            self._drop_unsynced()
        raise self._faults.error(fault)

    def truncate(self, length: int) -> None:
        self._faults.run("truncate", self.path, lambda: self._inner.truncate(length))

    def size(self) -> int:
        return self._faults.run("size", self.path, self._inner.size)

    def close(self) -> None:
        """Close. The file below is closed even if this fails, as the system does it."""
        try:
            fault = self._faults.next_fault("close", self.path)
        finally:
            self._inner.close()
        if fault is not None:
            raise self._faults.error(fault)

    def _write_part(self, buffers: Sequence[Buffer], offset: int, fault: Fault) -> None:
        data = b"".join(buffers)
        length = len(data) // 2 if fault.partial_bytes is None else fault.partial_bytes
        self._inner.pwrite([data[:length]], offset)

    def _drop_unsynced(self) -> None:
        if isinstance(self._inner, SimulatedFile):
            self._inner.drop_unsynced()


class FaultyFiles:
    """Files whose calls fail as planned. See `storage.files.Files`.

    After a `sync_directory` that failed, the names stay as they were: not durable yet. Over
    `SimulatedFiles`, a failed sync of a file drops its unsynced writes; over `OsFiles` it does not
    reach the disk.
    """

    def __init__(self, inner: Files, faults: Faults) -> None:
        self.root = inner.root
        self._inner = inner
        self._faults = faults

    def open(self, path: str, *, create: bool = False, mode: int = FILE_MODE) -> FaultyFile:
        takes_space = create and self._faults.crash is None and not self._inner.exists(path)
        fault = self._faults.next_fault("open", path, takes_space=takes_space)
        if fault is None:
            return FaultyFile(self._inner.open(path, create=create, mode=mode), self._faults)
        if fault.moment is Moment.AFTER:
            self._inner.open(path, create=create, mode=mode).close()
        raise self._faults.error(fault)

    def exists(self, path: str) -> bool:
        return self._faults.run("exists", path, lambda: self._inner.exists(path))

    def list(self, directory: str) -> list[str]:
        return self._faults.run("list", directory, lambda: self._inner.list(directory))

    def rename(self, source: str, target: str) -> None:
        self._faults.run(
            "rename", source, lambda: self._inner.rename(source, target), takes_space=True
        )

    def unlink(self, path: str) -> None:
        self._faults.run("unlink", path, lambda: self._inner.unlink(path))

    def make_directory(self, path: str) -> None:
        self._faults.run(
            "make_directory", path, lambda: self._inner.make_directory(path), takes_space=True
        )

    def sync_directory(self, path: str) -> None:
        self._faults.run("sync_directory", path, lambda: self._inner.sync_directory(path))

    def free_bytes(self) -> int:
        return self._faults.run("free_bytes", "", self._inner.free_bytes)

    @contextlib.contextmanager
    def lock(self, path: str) -> Iterator[None]:
        """Own `path`. Taking it is a call that can fail; giving it back is not."""
        fault = self._faults.next_fault("lock", path, takes_space=True)
        if fault is not None:
            if fault.moment is Moment.AFTER:
                with self._inner.lock(path):
                    pass
            raise self._faults.error(fault)
        with self._inner.lock(path):
            yield


class MemoryCatalog:
    """A catalog in memory. See `storage.catalog.Catalog`.

    A commit is one step: `crash` and `kill` return a catalog with all that was committed. With
    `faults`, every commit is one call of the plan, on the path "catalog": CatalogError for an I/O
    error, DiskFullError where there is no space, and in a crash all of it or nothing.
    """

    def __init__(self, faults: Faults | None = None) -> None:
        self.faults = faults
        self._values: dict[Table, dict[bytes, bytes]] = {table: {} for table in Table}
        self._keys: dict[Table, list[bytes]] = {table: [] for table in Table}
        self._closed = False

    def get(self, table: Table, key: bytes) -> bytes | None:
        self._check(f"read {table}", key)
        return self._values[table].get(key)

    def view(self) -> "MemoryView":
        return MemoryView(self)

    def get_many(self, table: Table, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        self._check(f"read {table}", *keys)
        values = self._values[table]
        return {key: values[key] for key in keys if key in values}

    def scan(
        self, table: Table, start: bytes = b"", *, prefix: bytes = b""
    ) -> Iterator[tuple[bytes, bytes]]:
        self._check(f"scan {table}")
        keys, values = self._keys[table], self._values[table]
        first = last = bisect_left(keys, max(start, prefix))
        while last < len(keys) and keys[last].startswith(prefix):
            last += 1
        # Taken at once: the iterator sees one moment.
        yield from [(key, values[key]) for key in keys[first:last]]

    def commit(self, writes: Writes, many: ManyWrites | None = None) -> None:
        whole = {table: list(pairs) for table, pairs in writes.items()}
        for table, parts in (many or {}).items():
            for part in parts:
                pairs = zip(part.keys.tolist(), part.values.tolist(), strict=True)
                whole.setdefault(table, []).extend(pairs)
        self._commit(whole)

    def _commit(self, writes: Writes) -> None:
        self._check("commit", *(key for pairs in writes.values() for key, _ in pairs))
        if self.faults is None:
            self._apply(writes)
            return
        fault = self.faults.next_fault("commit", "catalog", takes_space=True)
        if fault is None:
            self._apply(writes)
            return
        if fault.moment is Moment.AFTER:
            self._apply(writes)
        error = self.faults.error(fault)
        if isinstance(error, DiskError) and not isinstance(error, DiskFullError):
            raise CatalogError("commit", error.reason)
        raise error

    def close(self) -> None:
        self._closed = True

    def crash(self) -> "MemoryCatalog":
        """The catalog as the next process finds it. This one is closed from now on."""
        self._closed = True
        heir = MemoryCatalog()
        heir._values = {table: dict(values) for table, values in self._values.items()}
        heir._keys = {table: list(keys) for table, keys in self._keys.items()}
        return heir

    kill = crash

    def _apply(self, writes: Writes) -> None:
        for table, pairs in writes.items():
            # A copy, since a view may look at the values as they are.
            keys, values = self._keys[table], dict(self._values[table])
            self._values = {**self._values, table: values}
            for key, value in pairs:
                if value is not None:
                    if key not in values:
                        insort(keys, key)
                    values[key] = bytes(value)
                elif values.pop(key, None) is not None:
                    del keys[bisect_left(keys, key)]

    def _check(self, what: str, *keys: bytes) -> None:
        if self._closed:
            raise CatalogError(what, "it is closed")
        for key in keys:
            if not 0 < len(key) <= CATALOG_KEY_BYTES_MAX:
                raise CatalogError(what, f"a key of {len(key)} bytes")


class MemoryView:
    """A look at a catalog in memory. See `storage.catalog.View`."""

    def __init__(self, catalog: MemoryCatalog) -> None:
        self._catalog = catalog
        self._values: dict[Table, dict[bytes, bytes]] | None = None

    def get(self, table: Table, key: bytes) -> bytes | None:
        self._catalog._check(f"read {table}", key)
        return self._look()[table].get(key)

    def get_many(self, table: Table, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        self._catalog._check(f"read {table}", *keys)
        values = self._look()[table]
        return {key: values[key] for key in keys if key in values}

    def prefixes(self, table: Table, ascending: Sequence[bytes]) -> set[bytes]:
        self._catalog._check(f"scan {table}")
        keys = sorted(self._look()[table])
        return {
            prefix
            for prefix in ascending
            if any(key.startswith(prefix) for key in keys[bisect_left(keys, prefix) :][:1])
        }

    def scan(self, table: Table, prefix: bytes) -> list[tuple[bytes, bytes]]:
        self._catalog._check(f"scan {table}")
        values = self._look()[table]
        return sorted(pair for pair in values.items() if pair[0].startswith(prefix))

    def _look(self) -> dict[Table, dict[bytes, bytes]]:
        if self._values is None:
            self._values = self._catalog._values
        return self._values

    def refresh(self) -> None:
        self._values = None
