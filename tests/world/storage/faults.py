"""Faults: the n-th call to the files or the catalog fails, is torn, or is where the machine stops.

`FaultyFiles` wraps any `Files`, `SimulatedFiles` or `OsFiles`. It numbers the calls, and its
`Faults` say which of them fails, fails half-way, or brings the machine down. One run with empty
`Faults` counts the calls, then N = 1, 2, … visits each of them:

    disk = SimulatedFiles(rng=random.Random(seed))
    try:
        run_the_store(FaultyFiles(disk, Faults(Fault(at=n, kind=FaultKind.CRASH))))
    except SimulatedCrash:
        disk = disk.crash()
    check_the_store(disk)

Cost: about 1 µs per call. Threads: one at a time; one plan may serve several files.

Rejected: faults with a probability. The n-th call is the same in every run, so that a failure
repeats itself, and a sweep over n leaves no call out.
"""

import contextlib
import enum
import errno
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from storage.errors import (
    DiskError,
    DiskFullError,
    ExhaustedError,
    StorageError,
    SyncError,
    UnreadableError,
)
from storage.files import FILE_MODE, Buffer, File, Files
from tests.world.storage.files import SimulatedFile

_Result = TypeVar("_Result")


class SimulatedCrash(BaseException):
    """The machine went down in the middle of a call. No code but a test's may catch it."""


class FaultKind(enum.Enum):
    """What goes wrong."""

    IO_ERROR = "I/O error"
    """EIO. SyncError from the calls that sync, UnreadableError from `pread`, DiskError from all
    others."""
    NO_SPACE = "no space"
    """ENOSPC: DiskFullError. Calls that take no space go through: all but the writes, rename, link,
    make_directory, scratch, lock, and open where it creates."""
    NO_DESCRIPTOR = "no descriptor"
    """EMFILE: ExhaustedError. Calls that need no descriptor go through: all but open, list,
    make_directory, sync_directory, map_to_read, scratch and lock."""
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
    "link",
    "unlink",
    "make_directory",
    "remove_directory",
    "sync_directory",
    "map_to_read",
    "scratch",
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
_DESCRIPTOR_CALLS: frozenset[Call] = frozenset(
    {"open", "list", "make_directory", "sync_directory", "map_to_read", "scratch", "lock"}
)
_SYNC_CALLS: frozenset[Call] = frozenset({"pwrite_durable", "fdatasync", "sync_directory"})
_READING_CALLS: frozenset[Call] = frozenset(
    {"exists", "list", "map_to_read", "scratch", "free_bytes", "pread", "size", "close"}
)


class NumberedCall(NamedTuple):
    """One entry of a trace."""

    number: int
    call: Call
    path: str
    takes_space: bool = False

    @property
    def changes(self) -> bool:
        """Whether the disk or the catalog may be another one afterwards. A crash at a call that
        changes nothing leaves what a crash before the next one that does would leave."""
        return self.takes_space if self.call == "open" else self.call not in _READING_CALLS

    def can_fail_by(self, kind: FaultKind) -> bool:
        """Whether a fault of this kind strikes the call; otherwise the call goes through."""
        if kind is FaultKind.NO_SPACE:
            return self.takes_space
        if kind is FaultKind.NO_DESCRIPTOR:
            return self.call in _DESCRIPTOR_CALLS
        return True


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
        if not (self._keep_trace or self.faults):
            return None
        numbered = NumberedCall(number, call, path, takes_space)
        if self._keep_trace:
            self.trace.append(numbered)
        for fault in self.faults:
            is_meant = fault.at == number or (fault.for_good and fault.at < number)
            if is_meant and numbered.can_fail_by(fault.kind):
                self.struck.append(numbered)
                return fault
        return None

    def error(self, fault: Fault, read_at: int = 0) -> StorageError | SimulatedCrash:
        """What the call that was struck last has to raise; `read_at`: where it was to read."""
        number, call, path, _ = self.struck[-1]
        if fault.kind is FaultKind.CRASH:
            self.crash = SimulatedCrash(
                f"simulated crash {fault.moment.value} call {number}: {call} of {path}"
            )
            return self.crash
        if fault.kind is FaultKind.NO_SPACE:
            reason = f"{os.strerror(errno.ENOSPC)} (fault at call {number})"
            return DiskFullError(call, path, reason)
        if fault.kind is FaultKind.NO_DESCRIPTOR:
            reason = f"{os.strerror(errno.EMFILE)} (fault at call {number})"
            return ExhaustedError(call, path, reason)
        reason = f"{os.strerror(errno.EIO)} (fault at call {number})"
        if call == "pread":
            return UnreadableError(path, read_at, reason)
        return (SyncError if call in _SYNC_CALLS else DiskError)(call, path, reason)

    def run(
        self,
        call: Call,
        path: str,
        effect: Callable[[], _Result],
        *,
        broken: Callable[[Fault], None] = lambda fault: None,
        takes_space: bool = False,
    ) -> _Result:
        """Make a call. `broken`: what it does where it fails before its end; else nothing."""
        fault = self.next_fault(call, path, takes_space=takes_space)
        if fault is None:
            return effect()
        if fault.moment is Moment.AFTER:
            effect()
        else:
            broken(fault)
        raise self.error(fault)


class FaultyFile:
    """A file whose calls fail as planned. See `storage.files.File`."""

    def __init__(self, inner: File, faults: Faults) -> None:
        self.path = inner.path
        self._inner = inner
        self._faults = faults

    def pread(self, length: int, offset: int) -> bytes:
        if (fault := self._faults.next_fault("pread", self.path)) is not None:
            raise self._faults.error(fault, offset)
        return self._inner.pread(length, offset)

    def pread_now(self, length: int, offset: int) -> bytes | None:
        """Not one of the calls that fail: it tells of no failure."""
        return self._inner.pread_now(length, offset)

    def pwrite(self, buffers: Sequence[Buffer], offset: int) -> None:
        def broken(fault: Fault) -> None:
            if fault.moment is Moment.MIDDLE:
                self._write_part(buffers, offset, fault)

        def effect() -> None:
            self._inner.pwrite(buffers, offset)

        self._faults.run("pwrite", self.path, effect, broken=broken, takes_space=True)

    def pwrite_durable(self, buffers: Sequence[Buffer], offset: int) -> None:
        def broken(fault: Fault) -> None:
            if fault.moment is Moment.MIDDLE and fault.kind is FaultKind.IO_ERROR:
                self._inner.pwrite(buffers, offset)
                self._drop_unsynced()
            elif fault.moment is Moment.MIDDLE:
                self._write_part(buffers, offset, fault)

        def effect() -> None:
            self._inner.pwrite_durable(buffers, offset)

        self._faults.run("pwrite_durable", self.path, effect, broken=broken, takes_space=True)

    def fdatasync(self) -> None:
        def broken(fault: Fault) -> None:
            if fault.kind is not FaultKind.CRASH:
                self._drop_unsynced()

        self._faults.run("fdatasync", self.path, self._inner.fdatasync, broken=broken)

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

    def link(self, source: str, target: str) -> None:
        self._faults.run("link", source, lambda: self._inner.link(source, target), takes_space=True)

    def unlink(self, path: str) -> None:
        self._faults.run("unlink", path, lambda: self._inner.unlink(path))

    def make_directory(self, path: str) -> None:
        self._faults.run(
            "make_directory", path, lambda: self._inner.make_directory(path), takes_space=True
        )

    def remove_directory(self, path: str) -> None:
        self._faults.run("remove_directory", path, lambda: self._inner.remove_directory(path))

    def sync_directory(self, path: str) -> None:
        self._faults.run("sync_directory", path, lambda: self._inner.sync_directory(path))

    def sync_all(self, files: Sequence[File]) -> None:
        """Sync one after the other: each is a call that can fail."""
        for file in files:
            file.fdatasync()

    def map_to_read(self, path: str) -> memoryview:
        return self._faults.run("map_to_read", path, lambda: self._inner.map_to_read(path))

    def scratch(self, length: int) -> memoryview:
        """Nobody else sees what is in it: it is there, or it is not."""
        return self._faults.run(
            "scratch", "", lambda: self._inner.scratch(length), takes_space=True
        )

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
