"""Every sector of a small data directory cannot be read, one at a time (I8).

A bad sector is damage of what stands in it, and of nothing else: the server starts and goes on, it
names the place and the records, and delivers the rest. `delayserver check` names it, too, and a
repair gets past it. What stands in the catalog keeps the server from starting, and a repair makes
it again."""

import errno
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from delayserver.records.message import DueDelivery
from delayserver.records.subscriptions import Subscription
from delayserver.recovery.check import check_path
from delayserver.recovery.repair import repair_path
from delayserver.security.tokens import TokenFile
from storage.directory import open_identity
from storage.errors import DamageError, UnreadableError
from storage.files import OsFiles, replace_file
from storage.frame import Damage
from tests.depth import every, least
from tests.simulation.on_disk import (
    BODIES,
    CANCELLED,
    CATALOG_BYTES,
    END_MS,
    Receipt,
    copy,
    deliver_all,
    files,
    make_directory,
)
from tests.simulation.test_bit_rot import CONTENTS, DIRECTORY, Receiver, work
from tests.world.storage.files import SimulatedFiles

EVERY_CATALOG_PAGES = 3


class RowReceiver(Receiver):
    """Remembers which rows were delivered, too."""

    def __init__(self) -> None:
        super().__init__(set(), [])
        self.rows: set[tuple[int, str]] = set()

    def sent(self, subscription: Subscription, delivery: DueDelivery) -> None:
        super().sent(subscription, delivery)
        self.rows.add((delivery.entry.seq, subscription.name))


def run(
    disk: SimulatedFiles, fail_before: Callable[[], None], fail_later: Callable[[], None]
) -> tuple[RowReceiver, list[Damage | DamageError]]:
    """What is delivered, and what is named as damage; a torn tail is no damage."""
    reader = RowReceiver()
    fail_before()
    server = DIRECTORY.start(disk, reader)
    fail_later()
    server.tick()
    work(server)
    server.tick()
    work(server)
    return reader, [*server.recovered.damage, *reader.damage]


def nothing() -> None:
    pass


EXPECTED, _ = run(DIRECTORY.disk.crash(), nothing, nothing)


def sectors(path: str, sector_bytes: int) -> Iterable[int]:
    return range(0, len(CONTENTS[path].rstrip(b"\0")), sector_bytes)


@pytest.mark.unchecked("every store has a bad sector")
@pytest.mark.parametrize("sector_bytes", [32, 512])
@pytest.mark.parametrize("is_later", [False, True], ids=["before the start", "while it runs"])
@pytest.mark.parametrize("path", CONTENTS)
def test_any_sector(
    path: str, is_later: bool, sector_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Small ones, since the files are: each of them is a part of a header, of rows, of a payload.
    monkeypatch.setattr("storage.files.SECTOR_BYTES", sector_bytes)
    for start in every(7, sectors(path, sector_bytes)):
        disk = DIRECTORY.disk.crash()

        def fail(disk: SimulatedFiles = disk, start: int = start) -> None:
            if disk.exists(path):  # A start deletes the segments that it has filed.
                disk.fail_reads(path, start, start + sector_bytes)

        reader, named = run(disk, *((nothing, fail) if is_later else (fail, nothing)))
        lost = EXPECTED.rows - reader.rows
        where = f"{path} at {start}: {lost} of {named}"
        assert all(one.path == path for one in named), where
        for seq, _ in lost:
            assert any(one.first_seq <= seq <= (one.last_seq or seq) for one in named), where
        again = reader.rows - EXPECTED.rows
        # What was recorded as delivered in a place that is lost is delivered once more, and said.
        assert not again or (path.startswith("dispatch") and named), where


@pytest.mark.damaged("a bad sector")
def test_a_sector_of_the_newest_group_is_no_torn_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was answered: it is named, its segment stays, and nobody else gets its seqs."""
    monkeypatch.setattr("storage.files.SECTOR_BYTES", 8)
    path = max(path for path in CONTENTS if path.startswith("messages"))
    last = CONTENTS[path].rindex(b"DLY1")
    disk = DIRECTORY.disk.crash()
    disk.fail_reads(path, last, last + 8)
    server = DIRECTORY.start(disk, RowReceiver())
    (damage,) = server.recovered.damage
    assert (damage.path, damage.offset) == (path, last) and not server.recovered.torn
    assert "cannot be read (Input/output error)" in damage.reason
    whole = DIRECTORY.start(DIRECTORY.disk.crash(), RowReceiver())
    assert damage.first_seq < whole.recovered.next_seq <= server.recovered.next_seq
    assert damage.last_seq + 1 == server.recovered.next_seq
    assert len(CONTENTS[path]) == disk.open(path).size()


# ── on a real disk ───────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def directory(in_memory: Path) -> Path:
    path = in_memory / "data"
    make_directory(path)
    return path


@pytest.fixture(scope="module")
def expected(directory: Path, in_memory: Path) -> set[Receipt]:
    return set(deliver_all(copy(directory, in_memory / "expected")).receipts)


class FailingDevice:
    """Files of the system, some bytes of which the system does not give back."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._bad: dict[int, range] = {}
        """By inode: a file keeps its sectors under another name."""
        pread, preadv = os.pread, os.preadv

        def read(descriptor: int, length: int, offset: int) -> bytes:
            self._check(descriptor, length, offset)
            return pread(descriptor, length, offset)

        def read_now(descriptor: int, buffers: list[bytearray], offset: int, flags: int = 0) -> int:
            self._check(descriptor, sum(map(len, buffers)), offset)
            return preadv(descriptor, buffers, offset, flags)

        patch.setattr(os, "pread", read)
        patch.setattr(os, "preadv", read_now)

    def _check(self, descriptor: int, length: int, offset: int) -> None:
        bad = self._bad.get(os.fstat(descriptor).st_ino, range(0))
        if bad and bad.start < offset + length and offset < bad.stop:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def fail(self, path: Path, start: int, length: int) -> None:
        self._bad = {path.stat().st_ino: range(start, start + length)}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FailingDevice:
    return FailingDevice(monkeypatch)


@pytest.mark.parametrize("log", ["messages", "schedule", "dispatch", "definitions"])
def test_check_names_it_and_repair_gets_past_it(
    log: str,
    directory: Path,
    expected: set[Receipt],
    in_memory: Path,
    device: FailingDevice,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("storage.files.SECTOR_BYTES", 64)
    for path in files(directory):
        if not path.startswith(log):
            continue
        length = len((directory / path).read_bytes().rstrip(b"\0"))
        for start in every(7, range(0, length, 192)):
            damaged = copy(directory, in_memory / "x")
            device.fail(damaged / path, start, 64)
            receiver = deliver_all(damaged)
            assert {body for _, body in receiver.receipts} <= BODIES

            damaged = copy(directory, in_memory / "x")
            device.fail(damaged / path, start, 64)
            found = check_path(damaged, catalog_max_bytes=CATALOG_BYTES)
            assert any("cannot be read" in one.reason for one in found.damage), f"{path}@{start}"
            report = repair_path(damaged, now_ms=END_MS, catalog_max_bytes=CATALOG_BYTES)
            assert report.is_needed and not report.remaining, f"{path}@{start}: {report}"
            assert check_path(damaged, catalog_max_bytes=CATALOG_BYTES).is_clean
            receiver = deliver_all(damaged)
            bodies = {body for _, body in receiver.receipts}
            assert not receiver.damage and bodies <= BODIES
            if log == "dispatch":
                assert expected <= set(receiver.receipts)
            if log == "definitions":
                assert expected == set(receiver.receipts) and not report.losses
            if log != "messages":
                assert not bodies & CANCELLED


def test_the_catalog_is_refused_and_made_again(
    directory: Path, expected: set[Receipt], in_memory: Path, device: FailingDevice
) -> None:
    path = "catalog/data.mdb"
    refused = 0
    pages = (directory / path).stat().st_size // 4096
    for page in every(7, range(0, pages, EVERY_CATALOG_PAGES)):
        damaged = copy(directory, in_memory / "x")
        device.fail(damaged / path, page * 4096, 4096)
        try:
            assert set(deliver_all(damaged).receipts) == expected  # nobody uses that page
        except DamageError as error:
            assert error.path == path and "cannot be read" in error.reason
            found = check_path(damaged, catalog_max_bytes=CATALOG_BYTES)
            assert any("cannot be read" in one.reason for one in found.damage)
            report = repair_path(damaged, now_ms=END_MS, catalog_max_bytes=CATALOG_BYTES)
            assert report.is_needed and not report.remaining and not report.losses
            assert set(deliver_all(damaged).receipts) == expected
            refused += 1
    assert refused >= least(3)


def test_what_cannot_be_done_without_is_named(
    directory: Path, in_memory: Path, device: FailingDevice
) -> None:
    damaged = copy(directory, in_memory / "x")
    for name, read in (
        ("FORMAT", lambda disk: open_identity(disk, random_bytes=None)),
        ("TOKENS", lambda disk: TokenFile(disk).read()),
    ):
        disk = OsFiles(str(damaged))
        if name == "TOKENS":
            replace_file(disk, name, b"{}")
        device.fail(damaged / name, 0, 1)
        with pytest.raises(UnreadableError, match=f"{name} is damaged .* cannot be read"):
            read(disk)
