"""`delayserver repair` against a directory with a flipped bit anywhere, and killed at any call.

After a repair the directory checks as sound, a second repair finds nothing, and a server starts and
delivers: never something else than was published, everything that was not named as damaged, and
what was cancelled only if the cancel itself was in the damaged place."""

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from delayserver.parts.heartbeats.heartbeats import Heartbeats
from delayserver.parts.installed import PARTS
from delayserver.records.definitions import TABLE_NUMBERS, read_definitions
from delayserver.records.message import Payload
from delayserver.records.tables import CHECKPOINT_KEY
from delayserver.recovery.check import check_path
from delayserver.recovery.repair import RepairReport, repair, repair_path
from storage.catalog import LmdbCatalog, Table, Writes
from storage.directory import CATALOG_DIRECTORY, FORMAT_FILE, LOCK_FILE, open_identity
from storage.errors import (
    DamageError,
    DirectoryLockedError,
    FormatOutdatedError,
    RepairUnfinishedError,
)
from storage.files import OsFiles
from storage.rows import HOUR_MS
from tests.depth import SIMULATION, every, is_whole, least
from tests.simulation.on_disk import (
    BODIES,
    CANCELLED,
    CATALOG_BYTES,
    END_MS,
    FAR_MS,
    OTHER,
    Life,
    Receipt,
    Receiver,
    body,
    copy,
    deliver_all,
    files,
    flip,
    make_directory,
)
from tests.world.server import START_MS
from tests.world.storage.faults import Fault, FaultKind, Faults, FaultyFiles, Moment, SimulatedCrash

DATA_FILE = "catalog/data.mdb"
SLOW = pytest.mark.timeout(600)
"""Hundreds of stores: some seconds, and minutes of a machine that does ten other things."""
EVERY_LOG_BYTE = 13
EVERY_KEYS_BYTE = 47
EVERY_CATALOG_BYTE = 97
"""Strides; all are prime, so that each run of bytes is met at other places."""


@pytest.fixture(scope="module")
def directory(in_memory: Path) -> Path:
    path = in_memory / "data"
    make_directory(path)
    return path


@pytest.fixture
def damaged(directory: Path, in_memory: Path) -> Path:
    return copy(directory, in_memory / "damaged")


@pytest.fixture(scope="module")
def expected(directory: Path, in_memory: Path) -> set[Receipt]:
    return set(deliver_all(copy(directory, in_memory / "expected")).receipts)


def mend(damaged: Path) -> RepairReport:
    """Repair, and hold the result against what a repair promises."""
    report = repair_path(damaged, now_ms=END_MS, catalog_max_bytes=CATALOG_BYTES)
    must_be_mended(damaged, report)
    return report


def must_be_mended(damaged: Path, report: RepairReport) -> None:
    assert not report.remaining, report
    if not report.is_needed:  # else the second repair looks at what this one has left
        assert check_path(damaged, catalog_max_bytes=CATALOG_BYTES).findings == []
    again = repair_path(damaged, now_ms=END_MS, catalog_max_bytes=CATALOG_BYTES)
    assert not again.is_needed and not again.backups, again


def received(damaged: Path) -> set[Receipt]:
    receiver = deliver_all(damaged)
    assert not receiver.damage, receiver.damage
    receipts = set(receiver.receipts)
    assert {body for _, body in receipts} <= BODIES
    return receipts


def test_a_sound_directory_is_left_alone(damaged: Path) -> None:
    before = contents(damaged)
    assert not mend(damaged).is_needed
    assert contents(damaged) == before


def contents(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.name not in (LOCK_FILE, "lock.mdb")
    }


def test_the_directory_has_everything(directory: Path, expected: set[Receipt]) -> None:
    assert {path.split("/")[0] for path in files(directory)} == {
        "messages",
        "schedule",
        "dispatch",
        "definitions",
        "catalog",
        "keys",
    }
    report = check_path(directory, catalog_max_bytes=CATALOG_BYTES)
    assert report.findings == []
    others = {Table.DAMAGE, Table.IMPORTS, Table.ARCHIVES}
    assert [table for table in set(Table) - others if not report.tables[table]] == []
    assert report.logs.pop("definitions").frames > 1
    assert min(log.frames for log in report.logs.values()) > 2
    assert len(expected) == 19 and not {body for _, body in expected} & CANCELLED


def offsets(path: Path, log: str) -> list[int]:
    data = path.read_bytes()
    if log != "catalog":
        every = EVERY_KEYS_BYTE if log == "keys" else EVERY_LOG_BYTE
        return list(range(0, len(data.rstrip(b"\0")), every))
    used = [at for at in range(len(data)) if any(data[at // 64 * 64 : at // 64 * 64 + 64])]
    return used[::EVERY_CATALOG_BYTE]


@SLOW
@pytest.mark.parametrize(
    "log", ["messages", "schedule", "dispatch", "definitions", "catalog", "keys"]
)
def test_any_flipped_bit(
    log: str, directory: Path, expected: set[Receipt], in_memory: Path
) -> None:
    tried, known = 0, definitions(directory)
    looked_at: dict[tuple[bool, str], tuple[set[Receipt], dict[tuple[int, bytes], bytes]]] = {}
    """By what a repair has left. Many bits of one frame lead to the same bytes, and a server does
    the same with these each time."""
    for path in files(directory):
        if not path.startswith(log):
            continue
        for offset in every(7, offsets(directory / path, log)):
            damaged = copy(directory, in_memory / "x")
            flip(damaged, path, offset)
            report = repair_path(damaged, now_ms=END_MS, catalog_max_bytes=CATALOG_BYTES)
            where = f"{path}@{offset}: {report}"
            left = report.is_needed, digest(damaged)
            if left not in looked_at:
                must_be_mended(damaged, report)
                defined = definitions(damaged)
                looked_at[left] = received(damaged), defined
            assert not report.remaining, where
            receipts, defined = looked_at[left]
            if log in ("definitions", "catalog", "keys"):
                # The one is written again from the other.
                assert defined == known and not report.losses, where
            assert report.is_needed or receipts == expected, where
            if log != "messages":
                # A cancel that was not filed yet stands nowhere else.
                assert not {body for _, body in receipts} & CANCELLED, where
            if log == "dispatch":
                assert expected <= receipts, where
            if log in ("definitions", "catalog", "keys"):
                assert receipts == expected, where
            tried += 1
    assert tried >= least(10)


def digest(directory: Path) -> str:
    """Of all that a server reads, and a repair."""
    data = {path: (directory / path).read_bytes() for path in (FORMAT_FILE, *files(directory))}
    return hashlib.sha256(repr(sorted(data.items())).encode()).hexdigest()


def definitions(directory: Path) -> dict[tuple[int, bytes], bytes]:
    """What the definitions log keeps, as the catalog has it before a server changes it."""
    path = directory / CATALOG_DIRECTORY
    catalog = LmdbCatalog(str(path), max_bytes=CATALOG_BYTES, readonly=True)
    found = {(one.table, one.key): one.value or b"" for one in read_definitions(catalog)}
    catalog.close()
    return found


def every_kind_of_damage(damaged: Path) -> None:
    (segment, *_) = (path for path in files(damaged) if path.startswith("messages"))
    flip(damaged, segment, 100)
    _, schedule, _ = (path for path in files(damaged) if path.startswith("schedule"))
    flip(damaged, schedule, 70)
    (dispatch,) = (path for path in files(damaged) if path.startswith("dispatch"))
    flip(damaged, dispatch, 10)
    with (damaged / DATA_FILE).open("r+b") as file:
        file.seek(0)
        file.write(b"\xff" * 64)


@SLOW
def test_killed_at_every_call(directory: Path, in_memory: Path) -> None:
    """A repair that is killed is run again, and comes to the same end."""
    whole = copy(directory, in_memory / "whole")
    every_kind_of_damage(whole)
    mend(whole)
    wanted = received(whole)
    at = 1
    while True:
        damaged = copy(directory, in_memory / "x")
        every_kind_of_damage(damaged)
        moment = list(Moment)[at % len(Moment)]
        faults = Faults(Fault(at, FaultKind.CRASH, moment))
        try:
            repair(
                FaultyFiles(OsFiles(str(damaged)), faults),
                damaged,
                now_ms=END_MS,
                dry_run=False,
                catalog_max_bytes=CATALOG_BYTES,
                progress=lambda what, done, total: None,
                parts=PARTS,
            )
        except SimulatedCrash:
            pass
        else:
            break
        if (damaged / "REPAIR").exists():
            with pytest.raises(RepairUnfinishedError, match="run `delayserver repair"):
                open_identity(OsFiles(str(damaged)), random_bytes=bytes)
        repair_path(damaged, now_ms=END_MS, catalog_max_bytes=CATALOG_BYTES)
        mend(damaged)
        assert received(damaged) == wanted, at
        at += (7 if at > 60 else 3) * (1 if is_whole(SIMULATION) else 7)
    assert at > 200


def test_a_dry_run_changes_nothing(damaged: Path) -> None:
    every_kind_of_damage(damaged)
    before = contents(damaged)
    report = repair_path(damaged, now_ms=END_MS, dry_run=True, catalog_max_bytes=CATALOG_BYTES)
    assert contents(damaged) == before
    assert {remedy.file.split("/")[0] for remedy in report.remedies} == {
        "messages",
        "schedule",
        "dispatch",
        "catalog",
    }
    assert report.backups == []


def test_what_is_replaced_is_kept(damaged: Path) -> None:
    every_kind_of_damage(damaged)
    before = contents(damaged)
    report = mend(damaged)
    kept = contents(Path(report.backups[0]))
    for remedy in report.remedies:
        path = remedy.file if "/" in remedy.file else DATA_FILE
        if path in before:
            assert kept[path] == before[path]
    assert json.loads(kept["report.json"])["remedies"]


def test_no_repair_beside_a_server(damaged: Path) -> None:
    life = Life(damaged)
    with pytest.raises(DirectoryLockedError, match="in use"):
        repair_path(damaged, now_ms=END_MS)
    life.end()


def no_catalog(damaged: Path) -> None:
    (damaged / DATA_FILE).unlink()


def an_empty_catalog(damaged: Path) -> None:
    (damaged / DATA_FILE).write_bytes(b"")


def half_a_catalog(damaged: Path) -> None:
    data = (damaged / DATA_FILE).read_bytes()
    (damaged / DATA_FILE).write_bytes(data[: len(data) // 2])


def garbage_for_a_catalog(damaged: Path) -> None:
    (damaged / DATA_FILE).write_bytes(random.Random(0).randbytes(50_000))


def changed(writes: Writes) -> Callable[[Path], None]:
    def change(damaged: Path) -> None:
        catalog = LmdbCatalog(str(damaged / CATALOG_DIRECTORY), max_bytes=CATALOG_BYTES)
        catalog.commit(writes)
        catalog.close()

    return change


@pytest.mark.parametrize(
    "damage",
    [
        no_catalog,
        an_empty_catalog,
        half_a_catalog,
        garbage_for_a_catalog,
        changed({Table.META: [(CHECKPOINT_KEY, None)]}),
        changed({Table.META: [(CHECKPOINT_KEY, bytes(8))]}),
    ],
)
def test_a_catalog_that_is_gone(
    damage: Callable[[Path], None], damaged: Path, expected: set[Receipt]
) -> None:
    """Everything is still there: it is an index of the logs."""
    known = definitions(damaged)
    damage(damaged)
    with pytest.raises(DamageError):
        Life(damaged)
    report = mend(damaged)
    # The message log may have been filed to its end, and defines some more.
    assert known.items() <= definitions(damaged).items() and not report.losses
    assert received(damaged) == expected


def test_a_catalog_from_another_time(
    damaged: Path, expected: set[Receipt], in_memory: Path
) -> None:
    """What was defined since it was copied is not forgotten."""
    old = copy(damaged, in_memory / "old")
    life = Life(damaged)
    life.server.engine.part(Heartbeats).put(
        "h2", 10 * HOUR_MS, "d", Payload(b"2"), life.clock.now_ms
    )
    life.publish("new subject", END_MS + 1)
    for due_ms in range(END_MS + 2, END_MS + 30):
        life.publish("new subject", due_ms)  # until the segment that defined it is deleted
        life.checkpoint()
    life.end()
    known = definitions(damaged)
    (damaged / DATA_FILE).write_bytes((old / DATA_FILE).read_bytes())
    report = mend(damaged)
    assert definitions(damaged) == known and not report.losses


def test_the_definitions_log_and_the_catalog_are_damaged(
    damaged: Path, expected: set[Receipt]
) -> None:
    """What is intact of the definitions is used. The rest is named, and no number given again."""
    (log,) = (path for path in files(damaged) if path.startswith("definitions"))
    known = definitions(damaged)
    flip(damaged, log, 0)  # the first frame: both subscriptions
    no_catalog(damaged)
    report = mend(damaged)
    assert any(log in loss for loss in report.losses)
    assert any("subscription 2: make it again" in loss for loss in report.losses)
    kept = definitions(damaged)
    whole = {TABLE_NUMBERS[one] for one in (Table.HEARTBEATS, Table.SCHEDULES, Table.SOURCES)}
    assert {place for place in known if place[0] in whole} <= {*kept}
    assert received(damaged) == set()
    life = Life(damaged, END_MS)
    life.work()
    again = msgspec.structs.replace(OTHER, id=life.server.engine.registry.next_id())
    assert again.id > OTHER.id, "the number of a lost subscription was given again"
    life.server.engine.subscribing.put_subscription(again)
    life.work()
    life.clock.set(FAR_MS + 2 * HOUR_MS - END_MS)
    for _ in range(2):
        life.work()
    got = {body for _, body in life.receiver.receipts}
    assert {body for _, body in expected} <= got <= BODIES - CANCELLED
    life.end()


def test_a_directory_of_version_1_is_not_repaired(damaged: Path) -> None:
    """Its definitions stand in the catalog alone: the next start carries them over."""
    document = json.loads((damaged / FORMAT_FILE).read_text())
    (damaged / FORMAT_FILE).write_text(json.dumps({**document, "format": 1}))
    with pytest.raises(FormatOutdatedError, match="start a server on it once"):
        repair_path(damaged, now_ms=END_MS)
    Life(damaged).end()
    assert not mend(damaged).is_needed


def test_what_was_cancelled_stays_cancelled(damaged: Path) -> None:
    """Its tombstone is lost with its frame; the catalog still knows."""
    _, path, _ = (path for path in files(damaged) if path.startswith("schedule"))
    data = (damaged / path).read_bytes()
    headers = [at for at in range(0, len(data), 8) if data[at : at + 4] == b"DLY1"]
    for offset in headers[1:]:  # every frame but that of the messages themselves
        flip(damaged, path, offset)
    mend(damaged)
    assert not {body for _, body in received(damaged)} & CANCELLED


@pytest.mark.parametrize("is_split", [False, True])
def test_without_a_catalog_a_day_and_its_hours_count_once(
    is_split: bool, damaged: Path, in_memory: Path
) -> None:
    """A crash in the middle of a split leaves both; so may one behind it, before the day is gone.

    Behind it the hours have rows that the day does not have."""
    life = Life(damaged)
    fill(life, END_MS)
    life.end()
    schedule = damaged / "schedule"
    split = copy(damaged, in_memory / "split")
    days = {path.name for path in schedule.iterdir() if "T" not in path.name}
    assert len(days) == 1
    wanted = far(deliver_all(copy(damaged, in_memory / "wanted")))
    life = Life(split, FAR_MS - HOUR_MS)
    for _ in range(3):
        life.work()
        life.clock.move(60_000)
    if is_split:
        life.publish("a", FAR_MS + 4)
        fill(life, FAR_MS - 1)
    life.end()
    assert not days & {path.name for path in (split / "schedule").iterdir()}
    if is_split:
        for name in days:
            (split / "schedule" / name).write_bytes((schedule / name).read_bytes())
        both = split
    else:
        # The last of its hours was not written yet.
        (written, _) = sorted((split / "schedule").glob(f"{min(days)[:10]}T*"))
        (schedule / written.name).write_bytes(written.read_bytes())
        both = damaged
    no_catalog(both)
    mend(both)
    receiver = deliver_all(both)
    assert not receiver.damage
    more = [body("a", FAR_MS + 4)] * 2 if is_split else []
    assert far(receiver) == sorted([*wanted, *more])


def fill(life: Life, due_ms: int) -> None:
    """Until the message log does not hold any more what was published before."""
    for _ in range(40):
        life.publish("b", due_ms)
        life.checkpoint()


def far(receiver: Receiver) -> list[bytes]:
    """What was delivered of what was filed by day."""
    bodies = [one for _, one in receiver.receipts if one.startswith(b'"a')]
    return sorted(one for one in bodies if int(one[2:].split()[0]) >= FAR_MS - START_MS)
