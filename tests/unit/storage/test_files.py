"""The contract of the file seam, which the real files and the simulated ones both keep.

Then what only `OsFiles` has to do: finish short writes, and turn the system's errors into ours.
"""

import errno
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from storage.errors import (
    DirectoryLockedError,
    DiskError,
    DiskFullError,
    ExhaustedError,
    SyncError,
    UnreadableError,
)
from storage.files import SECTOR_BYTES, UNREADABLE_BYTE, Buffer, Files, OsFile, OsFiles, read_past
from tests.world.storage.faults import Faults, FaultyFiles
from tests.world.storage.files import SimulatedFiles


@pytest.fixture(params=["os", "simulated", "faulty os", "faulty simulated"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    name: str = request.param
    inner: Files = OsFiles(str(tmp_path / "root")) if name.endswith("os") else SimulatedFiles()
    return FaultyFiles(inner, Faults()) if name.startswith("faulty") else inner


@pytest.fixture
def os_files(tmp_path: Path) -> OsFiles:
    return OsFiles(str(tmp_path / "root"))


def put(files: Files, path: str, data: bytes) -> None:
    file = files.open(path, create=True)
    file.pwrite([data], 0)
    file.close()


def get(files: Files, path: str) -> bytes:
    file = files.open(path)
    try:
        return file.pread(file.size(), 0)
    finally:
        file.close()


# ---- reading and writing ---------------------------------------------------------------------


def test_a_new_file_is_empty(files: Files) -> None:
    file = files.open("a", create=True)
    assert (file.path, file.size(), file.pread(10, 0)) == ("a", 0, b"")
    file.close()


def test_open_with_create_keeps_what_is_there(files: Files) -> None:
    put(files, "a", b"old")
    files.open("a", create=True).close()
    assert get(files, "a") == b"old"


def test_open_without_create_needs_the_file(files: Files) -> None:
    with pytest.raises(FileNotFoundError):
        files.open("a")
    assert not files.exists("a")


def test_what_can_be_read_without_waiting_is_what_can_be_read(files: Files) -> None:
    put(files, "a", b"0123456789")
    file = files.open("a")
    # Whether it is in memory is the system's business.
    found = [file.pread_now(4, 2) for _ in range(100)]
    assert set(found) <= {None, b"2345"}
    assert b"2345" in found
    assert {file.pread_now(4, 8) for _ in range(100)} == {None}
    file.close()
    assert file.pread_now(4, 2) is None


def test_pread_is_short_only_at_the_end(files: Files) -> None:
    put(files, "a", b"0123456789")
    file = files.open("a")
    assert file.pread(4, 0) == b"0123"
    assert file.pread(4, 8) == b"89"
    assert file.pread(4, 10) == b""
    assert file.pread(4, 99) == b""
    assert file.pread(0, 3) == b""
    assert isinstance(file.pread(4, 0), bytes)
    file.close()


@pytest.mark.parametrize("durable", [False, True])
def test_writes_are_positioned(files: Files, durable: bool) -> None:
    file = files.open("a", create=True)
    write = file.pwrite_durable if durable else file.pwrite
    write([b"abc", bytearray(b"def"), memoryview(b"ghi")], 2)
    assert file.pread(99, 0) == b"\0\0abcdefghi"
    write([b"XY"], 3)
    assert file.pread(99, 0) == b"\0\0aXYdefghi"
    write([b"12345"], 9)
    assert file.pread(99, 0) == b"\0\0aXYdefg12345"
    file.close()


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("buffers", [[], [b""], [b"", b""]])
def test_writing_nothing_changes_nothing(
    files: Files, durable: bool, buffers: Sequence[bytes]
) -> None:
    file = files.open("a", create=True)
    (file.pwrite_durable if durable else file.pwrite)(buffers, 100)
    assert file.size() == 0
    file.close()


def test_more_buffers_than_the_system_takes_at_once(files: Files) -> None:
    parts = [bytes([index % 256]) * 3 for index in range(3000)]
    file = files.open("a", create=True)
    file.pwrite(parts, 7)
    file.pwrite_durable(parts, 7 + 9000)
    assert file.pread(99_999, 7) == b"".join(parts) * 2
    file.close()


def test_buffers_may_have_items_larger_than_a_byte(files: Files) -> None:
    wide = memoryview(bytes(range(32))).cast("Q")
    file = files.open("a", create=True)
    file.pwrite([wide, b"end"], 0)
    assert file.pread(99, 0) == bytes(range(32)) + b"end"
    file.close()


def test_a_buffer_may_be_reused_after_the_write(files: Files) -> None:
    buffer = bytearray(b"first")
    file = files.open("a", create=True)
    file.pwrite([buffer], 0)
    buffer[:] = b"other"
    buffer.clear()  # Fails if the file had kept a view of it.
    file.fdatasync()
    assert file.pread(9, 0) == b"first"
    file.close()


def test_truncate_cuts_and_grows(files: Files) -> None:
    put(files, "a", b"0123456789")
    file = files.open("a")
    file.truncate(4)
    assert (file.size(), file.pread(99, 0)) == (4, b"0123")
    file.truncate(6)
    assert (file.size(), file.pread(99, 0)) == (6, b"0123\0\0")
    file.truncate(0)
    assert (file.size(), file.pread(99, 0)) == (0, b"")
    file.close()


def test_two_handles_see_the_same_bytes(files: Files) -> None:
    writer = files.open("a", create=True)
    reader = files.open("a")
    writer.pwrite([b"now"], 0)
    assert reader.pread(9, 0) == b"now"
    reader.close()
    writer.fdatasync()
    writer.close()


def test_a_closed_file_cannot_be_used(files: Files) -> None:
    file = files.open("a", create=True)
    file.close()
    with pytest.raises(DiskError):
        file.pread(1, 0)
    with pytest.raises(DiskError):
        file.pwrite([b"x"], 0)
    with pytest.raises(SyncError):
        file.pwrite_durable([b"x"], 0)
    with pytest.raises(SyncError):
        file.fdatasync()
    with pytest.raises(DiskError):
        file.truncate(0)
    with pytest.raises(DiskError):
        file.size()
    with pytest.raises(DiskError):
        file.close()


@pytest.mark.parametrize("count", [0, 1, 3, 100])
def test_many_files_are_synced(files: Files, count: int) -> None:
    faults = files._faults if isinstance(files, FaultyFiles) else None
    opened = [files.open(f"a{number}", create=True) for number in range(count)]
    for file in opened:
        file.pwrite([b"data"], 0)
    before = faults.call_count if faults else 0
    files.sync_all(opened)
    assert faults is None or faults.call_count - before == count  # Each of them can fail.
    simulated = files._inner if isinstance(files, FaultyFiles) else files
    if isinstance(simulated, SimulatedFiles):
        files.sync_directory("")
        after = simulated.crash()
        assert all(get(after, file.path) == b"data" for file in opened)
    for file in opened:
        file.close()


# ---- names -----------------------------------------------------------------------------------


def test_exists_and_list(files: Files) -> None:
    files.make_directory("logs/deep")
    put(files, "b", b"")
    put(files, "a", b"")
    put(files, "logs/c", b"")
    assert files.list("") == ["a", "b", "logs"]
    assert files.list("logs") == ["c", "deep"]
    assert files.list("logs/deep") == []
    assert files.list("nowhere") == []
    assert files.list("nowhere/deep") == []
    assert all(files.exists(path) for path in ("", "a", "logs", "logs/c", "logs/deep"))
    assert not any(files.exists(path) for path in ("c", "logs/a", "nowhere/a", "a/b"))


def test_make_directory_makes_parents_and_may_be_repeated(files: Files) -> None:
    files.make_directory("")
    files.make_directory("x/y/z")
    put(files, "x/y/z/a", b"kept")
    files.make_directory("x/y/z")
    files.make_directory("x/y")
    assert get(files, "x/y/z/a") == b"kept"


def test_rename_moves_and_replaces(files: Files) -> None:
    files.make_directory("d")
    put(files, "a", b"new")
    put(files, "d/b", b"old")
    replaced = files.open("d/b")
    moved = files.open("a")
    files.rename("a", "d/b")
    assert not files.exists("a")
    assert get(files, "d/b") == b"new"
    assert replaced.pread(9, 0) == b"old"  # An open file outlives its name.
    moved.pwrite([b"NEW"], 0)
    assert get(files, "d/b") == b"NEW"
    replaced.close()
    moved.close()


def test_rename_to_itself_changes_nothing(files: Files) -> None:
    put(files, "a", b"same")
    files.rename("a", "a")
    assert get(files, "a") == b"same"


def test_link_gives_a_file_one_more_name(files: Files) -> None:
    files.make_directory("d")
    put(files, "a", b"bytes")
    files.link("a", "d/b")
    file = files.open("a")
    file.pwrite([b"B"], 0)
    file.close()
    assert get(files, "d/b") == b"Bytes"
    files.unlink("a")
    assert get(files, "d/b") == b"Bytes"
    put(files, "a", b"another")
    assert get(files, "d/b") == b"Bytes"
    with pytest.raises(DiskError):
        files.link("a", "d/b")


def test_unlink_removes_the_name_only(files: Files) -> None:
    put(files, "a", b"old")
    file = files.open("a")
    files.unlink("a")
    assert not files.exists("a")
    assert file.pread(9, 0) == b"old"
    put(files, "a", b"another")
    assert file.pread(9, 0) == b"old"
    file.close()


@pytest.mark.parametrize(
    "call",
    [
        lambda files: files.open("a"),
        lambda files: files.open("nowhere/a", create=True),
        lambda files: files.unlink("a"),
        lambda files: files.unlink("nowhere/a"),
        lambda files: files.rename("a", "b"),
        lambda files: files.rename("here", "nowhere/a"),
        lambda files: files.link("a", "b"),
        lambda files: files.link("here", "nowhere/a"),
    ],
)
def test_what_is_not_there_is_a_file_not_found_error(
    files: Files, call: Callable[[Files], object]
) -> None:
    put(files, "here", b"")
    with pytest.raises(FileNotFoundError):
        call(files)


@pytest.mark.parametrize(
    "call",
    [
        lambda files: files.open(""),
        lambda files: files.open("directory"),
        lambda files: files.open("directory", create=True),
        lambda files: files.unlink("directory"),
        lambda files: files.rename("file", "directory"),
        lambda files: files.link("directory", "a"),
        lambda files: files.link("file", "directory"),
        lambda files: files.open("file/a", create=True),
        lambda files: files.unlink("file/a"),
        lambda files: files.rename("file", "file/a"),
        lambda files: files.list("file"),
        lambda files: files.list("file/a"),
        lambda files: files.make_directory("file/a"),
        lambda files: files.make_directory("file/a/b"),
    ],
)
def test_a_directory_is_no_file_and_a_file_no_directory(
    files: Files, call: Callable[[Files], object]
) -> None:
    files.make_directory("directory")
    put(files, "file", b"")
    with pytest.raises(DiskError):
        call(files)


def test_remove_directory(files: Files) -> None:
    files.make_directory("a/b")
    put(files, "a/b/file", b"1")
    for full in ("a", "a/b"):
        with pytest.raises(DiskError, match="rmdir"):
            files.remove_directory(full)
    files.unlink("a/b/file")
    files.remove_directory("a/b")
    files.remove_directory("a")
    assert not files.exists("a")
    with pytest.raises(FileNotFoundError):
        files.remove_directory("a")


def test_what_was_in_a_directory_that_is_removed_does_not_come_back() -> None:
    disk = SimulatedFiles()
    disk.make_directory("a")
    put(disk, "a/file", b"1")
    disk.sync_directory("a")
    disk.unlink("a/file")
    disk.remove_directory("a")
    for _ in range(10):
        assert disk.crash().list("") == []


def test_sync_directory(files: Files) -> None:
    files.make_directory("d")
    put(files, "d/a", b"")
    files.sync_directory("d")
    files.sync_directory("")
    with pytest.raises(SyncError):
        files.sync_directory("nowhere")


def test_free_bytes(files: Files) -> None:
    assert files.free_bytes() > 0


# ---- the lock --------------------------------------------------------------------------------


def test_a_lock_is_owned_once(files: Files) -> None:
    with files.lock("lock"):
        assert files.exists("lock")
        with (
            pytest.raises(DirectoryLockedError, match=r"in use by process \d+"),
            files.lock("lock"),
        ):
            pass
        with files.lock("other"):
            pass
        with pytest.raises(DirectoryLockedError), files.lock("lock"):
            pass
    with files.lock("lock"):
        pass


def test_a_lock_ends_with_an_error_too(files: Files) -> None:
    with pytest.raises(ZeroDivisionError), files.lock("lock"):
        raise ZeroDivisionError
    with files.lock("lock"):
        pass


def test_a_lock_is_taken_when_it_is_entered(files: Files) -> None:
    lock = files.lock("lock")
    assert not files.exists("lock")
    with files.lock("lock"):
        pass
    with lock:
        pass


# ---- OsFiles alone ---------------------------------------------------------------------------


def test_long_writes_go_in_pieces(os_files: OsFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    system_pwritev, lengths = os.pwritev, []

    def noting_pwritev(descriptor: int, buffers: list[bytes], offset: int, flags: int = 0) -> int:
        lengths.append(sum(map(len, buffers)))
        return system_pwritev(descriptor, buffers, offset, flags)

    monkeypatch.setattr(os, "pwritev", noting_pwritev)
    file = os_files.open("file", create=True)
    middle = random.Random(0).randbytes(2_500_000)
    parts: list[Buffer] = [b"head", memoryview(middle), bytearray(b"tail")]
    file.pwrite(parts, 3)
    assert max(lengths) <= 1 << 20
    assert file.pread(1 << 22, 0) == bytes(3) + b"".join(parts)


def test_short_writes_are_finished(os_files: OsFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    system_pwritev = os.pwritev
    flags_seen: list[int] = []

    def stingy_pwritev(
        descriptor: int, buffers: Sequence[bytes], offset: int, flags: int = 0
    ) -> int:
        flags_seen.append(flags)
        return system_pwritev(descriptor, [b"".join(buffers)[:3]], offset, flags)

    file = os_files.open("a", create=True)
    monkeypatch.setattr(os, "pwritev", stingy_pwritev)
    file.pwrite([b"abcd", b"efgh"], 1)
    assert file.pread(99, 0) == b"\0abcdefgh"
    assert flags_seen == [0, 0, 0]
    flags_seen.clear()
    file.pwrite_durable([b"01234567"], 0)
    assert file.pread(99, 0) == b"01234567h"
    assert flags_seen == [os.RWF_DSYNC] * 3
    file.close()


def fail_with(number: int) -> Callable[..., int]:
    def refuse(*_arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize(
    ("number", "from_pwrite", "from_pwrite_durable"),
    [
        (errno.EIO, DiskError, SyncError),
        (errno.ENOSPC, DiskFullError, DiskFullError),
        (errno.EDQUOT, DiskFullError, DiskFullError),
        (errno.ENOMEM, ExhaustedError, ExhaustedError),
        (errno.ENOBUFS, ExhaustedError, ExhaustedError),
    ],
)
def test_write_errors_are_typed(
    os_files: OsFiles,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    from_pwrite: type[DiskError],
    from_pwrite_durable: type[DiskError],
) -> None:
    file = os_files.open("a", create=True)
    monkeypatch.setattr(os, "pwritev", fail_with(number))
    with pytest.raises(DiskError, match=os.strerror(number)) as plain:
        file.pwrite([b"x"], 0)
    with pytest.raises(DiskError, match=os.strerror(number)) as durable:
        file.pwrite_durable([b"x"], 0)
    assert (type(plain.value), type(durable.value)) == (from_pwrite, from_pwrite_durable)
    assert plain.value.path == durable.value.path == "a"
    file.close()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_what_needs_a_descriptor_may_be_tried_again(
    os_files: OsFiles, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail_with(number))
        patch.setattr(os, "listdir", fail_with(number))
        for call in (
            lambda: os_files.open("a", create=True).close(),
            lambda: os_files.list(""),
            lambda: os_files.sync_directory(""),
            lambda: os_files.make_directory("b"),
        ):
            with pytest.raises(ExhaustedError, match=os.strerror(number)):
                call()
    assert os_files.list("") == ["b"]
    os_files.sync_directory("")


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_every_error_of_a_sync_is_a_sync_error(
    os_files: OsFiles, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    file = os_files.open("a", create=True)
    monkeypatch.setattr(os, "fdatasync", fail_with(number))
    monkeypatch.setattr(os, "fsync", fail_with(number))
    with pytest.raises(SyncError, match=os.strerror(number)):
        file.fdatasync()
    with pytest.raises(SyncError, match=os.strerror(number)):
        os_files.sync_directory("")
    file.close()


@pytest.fixture
def hundred(os_files: OsFiles) -> Iterator[list[OsFile]]:
    files = [os_files.open(f"a{number}", create=True) for number in range(100)]
    yield files
    for file in files:
        file.close()


class Syncs:
    """Instead of the system's fdatasync: takes a moment, and fails for some descriptors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failing: set[int] = set()
        self.under_way = self.most = 0
        self.threads: set[int] = set()
        self.done: list[int] = []
        self._lock = threading.Lock()
        monkeypatch.setattr(os, "fdatasync", self)

    def __call__(self, descriptor: int) -> None:
        with self._lock:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            self.threads.add(threading.get_ident())
        time.sleep(0.001)
        with self._lock:
            self.under_way -= 1
            self.done.append(descriptor)
        if descriptor in self.failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_many_files_are_synced_at_once(
    os_files: OsFiles, hundred: list[OsFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs = Syncs(monkeypatch)
    threads = threading.active_count()
    os_files.sync_all(hundred)
    assert sorted(syncs.done) == sorted(file._descriptor for file in hundred)
    assert 4 < syncs.most <= 16
    assert threading.active_count() == threads
    syncs.threads.clear()
    os_files.sync_all(hundred[:3])
    assert syncs.threads == {threading.get_ident()}


@pytest.mark.parametrize("count", [1, 3, 100])
def test_an_error_of_any_one_of_many_syncs_is_told(
    os_files: OsFiles, hundred: list[OsFile], monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    syncs = Syncs(monkeypatch)
    for number in range(0, count, 7):
        syncs.failing = {hundred[number]._descriptor}
        with pytest.raises(SyncError, match=os.strerror(errno.EIO)) as caught:
            os_files.sync_all(hundred[:count])
        assert caught.value.path == f"a{number}"
        # None is under way any more: who gets the error may close the files.
        assert syncs.under_way == 0
    syncs.failing = {file._descriptor for file in hundred}
    with pytest.raises(SyncError):
        os_files.sync_all(hundred)
    assert syncs.under_way == 0


def test_files_are_synced_without_memory_for_threads(
    os_files: OsFiles, hundred: list[OsFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    syncs = Syncs(monkeypatch)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    os_files.sync_all(hundred)
    assert len(syncs.done) == 100
    assert syncs.most == 1


# ---- reading alone ---------------------------------------------------------------------------


def test_a_reader_makes_no_directory(tmp_path: Path) -> None:
    files = OsFiles(str(tmp_path / "none"), readonly=True)
    assert files.list("messages") == []
    assert not (tmp_path / "none").exists()


def test_a_reader_reads_and_the_system_refuses_the_rest(os_files: OsFiles) -> None:
    put(os_files, "a", b"data")
    reader = OsFiles(os_files.root, readonly=True)
    assert get(reader, "a") == b"data"
    file = reader.open("a")
    with pytest.raises(DiskError):
        file.pwrite([b"x"], 0)
    file.close()
    assert get(os_files, "a") == b"data"


# ---- bad sectors -----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN])
def test_a_bad_sector_is_damage(
    os_files: OsFiles, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    put(os_files, "a", b"data")
    file = os_files.open("a")
    monkeypatch.setattr(os, "pread", fail_with(number))
    monkeypatch.setattr(os, "preadv", fail_with(number))
    with pytest.raises(UnreadableError, match="cannot be read") as caught:
        file.pread(4, 7)
    assert (caught.value.path, caught.value.offset) == ("a", 7)
    assert caught.value.cause == os.strerror(number)
    assert file.pread_now(4, 0) is None
    file.close()


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EINVAL, errno.EACCES])
def test_any_other_refusal_of_a_read_is_none(
    os_files: OsFiles, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    put(os_files, "a", b"data")
    file = os_files.open("a")
    monkeypatch.setattr(os, "pread", fail_with(number))
    with pytest.raises(DiskError):
        file.pread(4, 0)
    file.close()


def past(files: Files, length: int, offset: int) -> list[tuple[int, bytes, bool]]:
    file = files.open("a")
    pieces = [
        (at, data, error is not None) for at, data, error in read_past(file.pread, length, offset)
    ]
    file.close()
    return pieces


def test_a_file_is_read_past_its_bad_sectors() -> None:
    files, size = SimulatedFiles(), SECTOR_BYTES
    data = random.Random(0).randbytes(4 * size + 10)
    put(files, "a", data)
    assert past(files, 5 * size, 100) == [(100, data[100:], False)]
    files.fail_reads("a", 2 * size + 5, 2 * size + 6)
    assert past(files, size, 0) == [(0, data[:size], False)]
    assert past(files, 5 * size, 100) == [
        (100, data[100:size], False),
        (size, data[size : 2 * size], False),
        (2 * size, UNREADABLE_BYTE * size, True),
        (3 * size, data[3 * size : 4 * size], False),
        (4 * size, data[4 * size :], False),
    ]
    assert past(files, 8, 2 * size) == [(2 * size, UNREADABLE_BYTE * 8, True)]


def test_a_user_who_may_not_is_told_where_and_as_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = OsFiles(str(tmp_path))

    def refused(path: str, *rest: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "open", refused)
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    with pytest.raises(DiskError, match=f"user 1234.*{tmp_path}/FORMAT"):
        files.open("FORMAT")
