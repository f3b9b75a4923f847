"""Lines of a log are written by a thread: no caller waits for it, and none sees what goes wrong."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import re
import select
import sys
import threading
import traceback
from collections.abc import Iterator

import pytest

from delayserver.log_writer import LINE_MAX_BYTES, QUEUE_MAX_BYTES, LogWriter
from tests.waiting import wait_until

DRAIN_S = 20.0


class Disk:
    """A descriptor that fails when it is told to, and keeps what was written."""

    def __init__(self, error: int | None = None) -> None:
        self.error = error
        self.room_bytes = sys.maxsize
        self.data = b""
        self.longest = 0

    def write(self, descriptor: int, data: bytes) -> int:
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        taken = data[: self.room_bytes]
        if not taken:
            raise OSError(errno.ENOSPC, "full")
        self.room_bytes -= len(taken)
        self.data += taken
        self.longest = max(self.longest, len(data))
        return len(taken)


def writer_of(disk: Disk, retry_s: float = 60.0) -> LogWriter:
    return LogWriter(-1, write=disk.write, retry_s=retry_s)


@contextlib.contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    try:
        yield reader, writer
    finally:
        for one in (reader, writer):
            with contextlib.suppress(OSError):
                os.close(one)


def test_lines_are_written_whole_and_in_order() -> None:
    disk = Disk()
    log = writer_of(disk)
    print("one", 1, file=log)
    log.write("two\n  with a second line\nthr")
    log.writelines(["ee\n", "\udcff é"])
    assert log.drain(DRAIN_S)
    assert disk.data.decode() == "one 1\ntwo\n  with a second line\nthree\n\\udcff é\n"
    assert log.lost == 0


def test_threads_do_not_mix_parts_of_their_lines() -> None:
    disk = Disk()
    log = writer_of(disk)

    def say(name: str) -> None:
        for _ in range(200):
            for part in (name, name, name, "\n"):
                log.write(part)

    threads = [threading.Thread(target=say, args=(name * 5,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.drain(DRAIN_S)
    lines = disk.data.decode().split()
    assert sorted(lines) == sorted(name * 15 for name in "abc" for _ in range(200))


def test_a_batch_is_no_longer_than_a_pipe_takes_at_once() -> None:
    disk = Disk(errno.ENOSPC)
    log = writer_of(disk)
    gate = threading.Event()

    def write(descriptor: int, data: bytes) -> int:
        gate.wait(DRAIN_S)
        return disk.write(descriptor, data)

    disk.error, log._system_write = None, write
    for number in range(500):
        log.write(f"{number} {'x' * (number % 97)}\n")
    gate.set()
    assert log.drain(DRAIN_S)
    assert [int(line.split()[0]) for line in disk.data.splitlines()] == list(range(500))
    assert disk.longest <= select.PIPE_BUF


@pytest.mark.parametrize("error", [errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EBADF])
def test_lines_that_the_system_does_not_take_are_counted_and_told_of(error: int) -> None:
    disk = Disk(error)
    log = writer_of(disk)
    for number in range(7):
        log.write(f"{number}\n")
    assert log.drain(DRAIN_S)
    assert (log.lost, disk.data) == (7, b"")
    disk.error = None
    log.write("again\n")
    assert log.drain(DRAIN_S)
    assert disk.data == b"7 lines of the log were lost\nagain\n"
    log.write("and on\n")
    assert log.drain(DRAIN_S)
    assert disk.data.endswith(b"again\nand on\n")
    assert log.lost == 7


def test_it_tells_of_lost_lines_although_no_other_follows() -> None:
    disk = Disk(errno.ENOSPC)
    log = writer_of(disk, retry_s=0.01)
    log.write("lost\n")
    assert log.drain(DRAIN_S)
    disk.error = None
    wait_until(lambda: disk.data == b"1 lines of the log were lost\n")


def test_a_disk_that_fills_up_in_the_middle_of_a_line() -> None:
    disk = Disk()
    log = writer_of(disk)
    disk.room_bytes = len(b"whole\ntor")
    log.write("whole\n")
    log.write("torn\n")
    log.write("gone\n")
    assert log.drain(DRAIN_S)
    assert (disk.data, log.lost) == (b"whole\ntor", 2)
    disk.room_bytes = sys.maxsize
    log.write("again\n")
    assert log.drain(DRAIN_S)
    assert disk.data == b"whole\ntor\n2 lines of the log were lost\nagain\n"


def test_a_log_that_is_not_read_holds_up_no_caller() -> None:
    with pipe() as (reader, descriptor):
        log = LogWriter(descriptor)
        line = "x" * 999 + "\n"
        count = 3 * QUEUE_MAX_BYTES // len(line)
        for _ in range(count):
            log.write(line)
        assert log.lost > QUEUE_MAX_BYTES // len(line)
        assert not log.drain(0.01)
        lost, data = log.lost, b""
        while sum(map(int, re.findall(rb"(\d+) lines of the log were lost\n", data))) < lost:
            assert select.select([reader], [], [], DRAIN_S)[0]
            data += os.read(reader, 1 << 16)
        assert log.lost == lost
        # All that was written and all that was lost is all that was logged, however it began.
        while data.count(line.encode()) < count - lost:
            data += os.read(reader, 1 << 16)
        assert log.drain(DRAIN_S)


def test_a_descriptor_that_does_not_block_loses_nothing() -> None:
    with pipe() as (reader, descriptor):
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_NONBLOCK)
        log = LogWriter(descriptor)
        text = "".join(f"{number:99}\n" for number in range(2000))
        for line in text.splitlines(keepends=True):
            log.write(line)
        data = b""
        while len(data) < len(text):
            data += os.read(reader, 1 << 16)
        assert data.decode() == text
        assert log.lost == 0


def test_a_line_of_any_length_is_cut() -> None:
    disk = Disk()
    log = writer_of(disk)
    log.write("é" * LINE_MAX_BYTES + "\n")
    log.write("x" * (LINE_MAX_BYTES + 1))
    assert log.drain(DRAIN_S)
    first, second = disk.data.splitlines()
    assert first.endswith(" … (cut)".encode()) and second.endswith(" … (cut)".encode())
    assert max(len(first), len(second)) < LINE_MAX_BYTES


def test_a_finalizer_may_log_while_a_line_is_logged() -> None:
    disk = Disk()
    log = writer_of(disk)

    class Cycle:
        finalized = 0

        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            Cycle.finalized += 1
            log.write("finalized\n")

    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(200):
            Cycle()
            log.write("logged\n")
    finally:
        gc.set_threshold(*threshold)
    while Cycle.finalized < 200:
        gc.collect()  # It does nothing while the writer's thread collects.
    assert log.drain(DRAIN_S)
    lines = disk.data.split()
    assert (lines.count(b"logged"), lines.count(b"finalized")) == (200, 200)


def test_it_stands_in_the_place_of_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import typer

    with pipe() as (reader, descriptor):
        log = LogWriter(descriptor)
        monkeypatch.setattr(sys, "stderr", log)
        typer.echo("echoed", err=True)
        try:
            raise KeyError("traced")
        except KeyError:
            traceback.print_exc()
        assert log.drain(DRAIN_S)
        text = os.read(reader, 1 << 16).decode()
        assert text.startswith("echoed\nTraceback") and text.endswith("KeyError: 'traced'\n")
        assert (sys.stderr.fileno(), sys.stderr.isatty()) == (descriptor, False)
        sys.stderr.flush()
        with pytest.raises(TypeError, match="not bytes"):
            sys.stderr.write(b"")  # type: ignore[arg-type]
