"""The check of logs and catalog against each other."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from delayserver.parts.heartbeats.records import Heartbeat
from delayserver.parts.imports.records import Archived, pack_archived
from delayserver.parts.installed import PARTS
from delayserver.parts.schedules.records import Schedule, ScheduleState, pack_schedule
from delayserver.records.definitions import definitions_among
from delayserver.records.message import Origin, Payload, encode_payload
from delayserver.records.subscriptions import Subscription, encode_subscription
from delayserver.records.tables import (
    CHECKPOINT_KEY,
    DEFINITIONS_KEY,
    Change,
    ChangeState,
    DeadLetter,
    HourState,
    change_key,
    dead_letter_key,
    hour_key,
    pack_change,
    pack_definitions_place,
    pack_watch,
    read_definitions_place,
    read_hours,
    watch_key,
)
from delayserver.recovery.check import check, check_path
from delayserver.schedule.committed import Records
from delayserver.schedule.expansion import Staging
from delayserver.schedule.replay import Replay
from storage.catalog import Catalog, LmdbCatalog, Table, Writes
from storage.check import NotADataDirectoryError, Severity
from storage.definitions_log import DefinitionsLog, DefinitionsPlace, definitions_path
from storage.directory import CATALOG_DIRECTORY, open_identity
from storage.files import Files, OsFiles, replace_file
from storage.frame import Damage
from storage.message_log import MessageLog
from storage.rows import FLAG_REMOVAL, HOUR_MS
from tests.unit.storage.samples import (
    HOUR,
    STAMP,
    append_rows,
    dispatch_log,
    flip,
    message_group,
    message_log,
    overwrite,
    schedule_group,
    schedule_log,
)
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.files import SimulatedFiles

SCHEDULE = "schedule/2026-11-20T15.schedule"
CATALOG_BYTES = 1 << 20
NOW_MS = HOUR * HOUR_MS


def replay_of(files: Files, catalog: Catalog, log: MessageLog) -> Replay:
    staging, definitions = Staging(files, STAMP), DefinitionsLog(files, stamp=STAMP)
    schedule, dispatch = schedule_log(files), dispatch_log(files)
    replay = Replay(catalog, schedule, dispatch, log, staging, definitions, PARTS)
    replay.resume_definitions()
    return replay


def filled(files: Files, catalog: Catalog) -> Replay:
    """A directory with a checkpoint at 5; records 6 and 7 are behind it."""
    open_identity(files, random_bytes=lambda length: STAMP.to_bytes(length, "big"))
    log = message_log(files)
    list(log.read(1))
    replay = replay_of(files, catalog, log)
    for first_seq, count in ((1, 3), (4, 2), (6, 2)):
        rows, payload = message_group(first_seq, count)
        log.append(
            rows.tobytes(),
            payload,
            first_seq=first_seq,
            last_seq=first_seq + count - 1,
            created_ms=NOW_MS,
        )
        replay.file([Records(rows, payload)], NOW_MS)
        if first_seq == 4:
            replay.checkpoint()
    commit(files, catalog, {Table.SUBJECTS: [(number(1), b"orders")]})
    return replay


def commit(files: Files, catalog: Catalog, writes: Writes) -> None:
    """As a checkpoint does it: what the definitions log holds, too, stands there first."""
    log = DefinitionsLog(files, stamp=STAMP)
    log.resume(read_definitions_place(catalog) or DefinitionsPlace())
    place = pack_definitions_place(log.record(definitions_among(writes), 5))
    meta = [*writes.get(Table.META, ()), (DEFINITIONS_KEY, place)]
    catalog.commit({**writes, Table.META: meta})


@pytest.fixture
def files() -> SimulatedFiles:
    return SimulatedFiles()


@pytest.fixture
def catalog(files: SimulatedFiles) -> MemoryCatalog:
    catalog = MemoryCatalog()
    filled(files, catalog)
    return catalog


def findings(files: Files, catalog: Catalog) -> list[tuple[str, str]]:
    return [(found.file, found.reason) for found in check(files, catalog).findings]


def test_a_sound_directory(files: SimulatedFiles, catalog: MemoryCatalog) -> None:
    report = check(files, catalog)
    assert report.findings == []
    assert report.logs["schedule"].rows == 7
    assert report.tables["hours"] == 1
    report.assert_clean()


def test_what_is_not_filed_yet_may_be_broken(files: SimulatedFiles, catalog: MemoryCatalog) -> None:
    flip(files, SCHEDULE, read_hours(catalog)[HOUR].length)
    (found,) = check(files, catalog).findings
    assert found.severity is Severity.TORN_TAIL


@pytest.mark.damaged("a schedule file")
def test_what_is_filed_may_not(files: SimulatedFiles, catalog: MemoryCatalog) -> None:
    flip(files, SCHEDULE, 0)
    (found,) = check(files, catalog).findings
    assert (found.severity, found.file) == (Severity.DAMAGE, SCHEDULE)


def changed_hour(**fields: int) -> Callable[[Catalog], Writes]:
    def writes(catalog: Catalog) -> Writes:
        state = read_hours(catalog)[HOUR]
        for name, value in fields.items():
            setattr(state, name, getattr(state, name) + value)
        return {Table.HOURS: [(hour_key(HOUR), state.pack())]}

    return writes


def put(table: Table, key: bytes, value: bytes) -> Callable[[Catalog], Writes]:
    return lambda catalog: {table: [(key, value)]}


def number(value: int) -> bytes:
    return value.to_bytes(4, "big")


def heartbeat(subject_id: int) -> bytes:
    return msgspec.msgpack.encode(Heartbeat("k", 1000, subject_id, encode_payload(Payload(b"1"))))


def schedule(subject_id: int) -> bytes:
    payload = encode_payload(Payload(b"1"))
    return pack_schedule(Schedule("s", subject_id, payload, "@daily", 0, "UTC", 0))


ARCHIVED = pack_archived(Archived(1, 2, 3, 4, "", "", 5))
PAYLOAD = encode_payload(Payload(b"{}", origin=Origin(1, 2, 1, 2)))


@pytest.mark.damaged("an entry of the catalog")
@pytest.mark.parametrize(
    ("writes", "file", "reason"),
    [
        (changed_hour(length=8), SCHEDULE, "is not where a frame ends"),
        (changed_hour(length=-8), SCHEDULE, "is not where a frame ends"),
        (changed_hour(length=1 << 20), SCHEDULE, "bytes, the catalog says"),
        (changed_hour(entries=1), SCHEDULE, "the file has 5 entries, the catalog says 6"),
        (changed_hour(removals=1), SCHEDULE, "the file has 0 removals, the catalog says 1"),
        (changed_hour(last_entry_seq=1), SCHEDULE, "the file has 5 as the last entry"),
        (changed_hour(first_seq=2), SCHEDULE, "the file has 1 as the first record"),
        (
            put(Table.HOURS, hour_key(HOUR + 1), HourState(length=100).pack()),
            "schedule/2026-11-20T16.schedule",
            "the file has 0 bytes, the catalog says 100",
        ),
        (put(Table.HOURS, hour_key(HOUR), b"short"), "catalog", "hours or checkpoint"),
        (
            put(Table.META, CHECKPOINT_KEY, bytes(7) + b"\x08"),
            "messages",
            "the message log ends with seq 7, the checkpoint is 8",
        ),
        (put(Table.META, CHECKPOINT_KEY, b"short"), "catalog", "hours or checkpoint"),
        (put(Table.SUBJECTS, number(3), b"others"), "catalog", "without gaps"),
        (put(Table.WATCHES, b"short", b""), "catalog", "cannot be read"),
        (put(Table.WATCHES, watch_key("k", 1), b"\0" * 8), "catalog", "cannot be read"),
        (
            put(Table.WATCHES, watch_key("k", 1), pack_watch(HOUR_MS, 1)),
            "catalog",
            "message 1 watches 'k' and is not kept",
        ),
        (put(Table.HEARTBEATS, b"k", b"\x91\xa1k"), "catalog", "cannot be read"),
        (put(Table.HEARTBEATS, b"other", heartbeat(1)), "catalog", "a heartbeat of another key"),
        (put(Table.HEARTBEATS, b"k", heartbeat(7)), "catalog", "'k' has an unknown subject"),
        (
            lambda catalog: {
                Table.SCHEDULES: [(b"s", schedule(7))],
                Table.SCHEDULE_STATES: [(b"s", ScheduleState(1, 1, 1, 1).pack())],
            },
            "catalog",
            "'s' has an unknown subject",
        ),
        (put(Table.SCHEDULES, b"s", schedule(1)), "catalog", "'s' does not say when it runs"),
        (put(Table.SUBJECTS, number(2), b"orders"), "catalog", "two subjects have the same name"),
        (put(Table.SUBJECTS, number(2), b"\xff"), "catalog", "subjects: entry 00000002 cannot"),
        (put(Table.KEYS, bytes(16), b"short"), "catalog", "keys: entry 0000"),
        (put(Table.KEYS, bytes(3), b"\1" * 24), "catalog", "a key of another length"),
        (put(Table.CHANGES, change_key(1, 0), b"short"), "catalog", "changes: entry 0000"),
        (
            put(Table.CHANGES, change_key(1, 0), pack_change(Change(9, 1, 1, 0, 1))),
            "catalog",
            "9 is not a valid ChangeState",
        ),
        (put(Table.SUBSCRIPTIONS, number(1), b"\xff"), "catalog", "subscriptions: entry 00000001"),
        (
            put(
                Table.SUBSCRIPTIONS,
                number(2),
                encode_subscription(Subscription(1, "shop", "*", "pull", 1)),
            ),
            "catalog",
            "a key of another number",
        ),
        (put(Table.DEAD_LETTERS, dead_letter_key(1, 2), b"\x90"), "catalog", "dead_letters: entry"),
        (
            put(
                Table.DEAD_LETTERS,
                dead_letter_key(1, 2),
                msgspec.msgpack.encode(DeadLetter("why", 1, 2, PAYLOAD[:-1])),
            ),
            "catalog",
            "a payload does not match its checksum",
        ),
        (put(Table.ARCHIVES, hour_key(HOUR), b"\x90"), "catalog", "archives: entry"),
        (put(Table.ARCHIVES, b"key", ARCHIVED), "catalog", "a key of another length"),
        (put(Table.DAMAGE, b"key", b"no json"), "catalog", "damage: entry"),
    ],
)
def test_a_catalog_that_does_not_agree(
    files: SimulatedFiles,
    catalog: MemoryCatalog,
    writes: Callable[[Catalog], Writes],
    file: str,
    reason: str,
) -> None:
    commit(files, catalog, writes(catalog))
    report = check(files, catalog)
    assert [found.file for found in report.damage] == [file]
    assert reason in report.damage[0].reason


def test_entries_that_are_sound(files: SimulatedFiles, catalog: MemoryCatalog) -> None:
    letter = DeadLetter("why", 1, 2, PAYLOAD)
    change = Change(ChangeState.DEAD, 2, 3, 4, 1)
    commit(
        files,
        catalog,
        {
            Table.CHANGES: [(change_key(1, 1), pack_change(change))],
            Table.DEAD_LETTERS: [(dead_letter_key(1, 2), msgspec.msgpack.encode(letter))],
            Table.SUBSCRIPTIONS: [
                (number(1), encode_subscription(Subscription(1, "shop", "*", "pull", 1)))
            ],
            Table.KEYS: [(bytes(16), bytes(24))],
            Table.WATCHES: [(watch_key("k", 1), pack_watch(HOUR * HOUR_MS, 1))],
            Table.HEARTBEATS: [(b"k", heartbeat(1))],
            Table.ARCHIVES: [(hour_key(HOUR), ARCHIVED)],
        },
    )
    assert check(files, catalog).findings == []


@pytest.mark.damaged("the catalog knows no subject")
def test_a_subject_that_is_not_known(files: SimulatedFiles, catalog: MemoryCatalog) -> None:
    commit(files, catalog, {Table.SUBJECTS: [(number(1), None)]})
    assert findings(files, catalog) == [
        (SCHEDULE, "rows of subjects that the catalog does not know: {1}")
    ]


@pytest.mark.damaged("records are missing")
def test_a_message_log_that_begins_behind_the_checkpoint(
    files: SimulatedFiles, catalog: MemoryCatalog
) -> None:
    files.rename(MessageLog.path(1), MessageLog.path(7))
    assert (
        "messages",
        "the message log begins with seq 7, the checkpoint is 5",
    ) in findings(files, catalog)


def test_a_message_log_without_records(files: SimulatedFiles, catalog: MemoryCatalog) -> None:
    files.unlink(MessageLog.path(1))
    overwrite(files, MessageLog.path(6), 0, bytes(100))
    assert findings(files, catalog) == []


DEFINITIONS = definitions_path(1)


@pytest.mark.damaged("the definitions log and the catalog do not agree")
@pytest.mark.parametrize(
    ("writes", "reason"),
    [
        ({Table.SUBJECTS: [(number(2), b"new")]}, "subjects: entry 00000002 of the catalog is"),
        ({Table.HEARTBEATS: [(b"k", heartbeat(1))]}, "heartbeats: entry 6b of the catalog is"),
        ({Table.SUBJECTS: [(number(1), b"other")]}, "subjects: entry 00000001 is another one"),
    ],
)
def test_a_definitions_log_that_does_not_agree(
    files: SimulatedFiles, catalog: MemoryCatalog, writes: Writes, reason: str
) -> None:
    catalog.commit(writes)
    (found,) = check(files, catalog).damage
    assert found.file == DEFINITIONS and found.reason.startswith(reason)


@pytest.mark.damaged("the definitions log and the catalog do not agree")
def test_a_definition_that_the_catalog_does_not_have(
    files: SimulatedFiles, catalog: MemoryCatalog
) -> None:
    commit(files, catalog, {Table.HEARTBEATS: [(b"k", heartbeat(1))]})
    catalog.commit({Table.HEARTBEATS: [(b"k", None)]})
    assert findings(files, catalog) == [(DEFINITIONS, "heartbeats: entry 6b is not in the catalog")]


def test_a_damaged_definitions_log(files: SimulatedFiles, catalog: MemoryCatalog) -> None:
    for offset in (0, 70, 100):
        flip(files, DEFINITIONS, offset)
        assert {found.file for found in check(files, catalog).damage} == {DEFINITIONS}
        flip(files, DEFINITIONS, offset)
    assert check(files, catalog).findings == []


@pytest.mark.damaged("the definitions log and the catalog do not agree")
def test_a_definitions_log_that_is_cut_off_or_gone(
    files: SimulatedFiles, catalog: MemoryCatalog
) -> None:
    file = files.open(DEFINITIONS)
    length = file.size()
    file.truncate(0)
    said = f"the catalog says {length}"
    assert findings(files, catalog) == [(DEFINITIONS, f"the file has 0 bytes, {said}")]
    files.unlink(DEFINITIONS)
    assert findings(files, catalog) == [(DEFINITIONS, f"the file has 0 bytes, {said}")]
    catalog.commit({Table.META: [(DEFINITIONS_KEY, None)]})
    assert ("catalog", "it does not say how much of the definitions log counts") in findings(
        files, catalog
    )


def test_what_a_crash_leaves_of_the_definitions_log(
    files: SimulatedFiles, catalog: MemoryCatalog
) -> None:
    size = files.open(DEFINITIONS).size()
    overwrite(files, DEFINITIONS, size, bytes(8))
    overwrite(files, definitions_path(2), 0, b"x")
    overwrite(files, definitions_path(3) + ".new", 0, b"x")
    report = check(files, catalog)
    assert report.is_clean
    assert sorted((found.file, found.severity) for found in report.findings) == [
        (DEFINITIONS, Severity.TORN_TAIL),
        (definitions_path(2), Severity.NOTE),
        (definitions_path(3) + ".new", Severity.NOTE),
    ]


def test_a_log_that_a_server_changes_all_the_time_is_not_compared(files: SimulatedFiles) -> None:
    class Busy(MemoryCatalog):
        def scan(
            self, table: Table, start: bytes = b"", *, prefix: bytes = b""
        ) -> Iterator[tuple[bytes, bytes]]:
            if table is Table.HEARTBEATS and is_busy:
                commit(files, self, {Table.HEARTBEATS: [(b"k", heartbeat(1))]})
            return super().scan(table, start, prefix=prefix)

    is_busy, catalog = False, Busy()
    filled(files, catalog)
    assert check(files, catalog).findings == []
    is_busy = True
    report = check(files, catalog)
    assert report.is_clean
    assert any("not compared with the catalog" in found.reason for found in report.findings)


def test_a_directory_of_version_1(files: SimulatedFiles, catalog: MemoryCatalog) -> None:
    files.unlink(DEFINITIONS)
    catalog.commit({Table.META: [(DEFINITIONS_KEY, None)]})
    identity = open_identity(files, random_bytes=None)
    document = {"format": 1, "stamp": STAMP, "shard": 0, "id_secret": identity.id_secret.hex()}
    replace_file(files, "FORMAT", json.dumps(document).encode())
    report = check(files, catalog)
    assert report.format_version == 1
    (found,) = report.findings
    assert (found.file, found.severity) == ("definitions", Severity.NOTE)


def test_damage_that_was_noted_before(files: SimulatedFiles, catalog: MemoryCatalog) -> None:
    replay = replay_of(files, catalog, message_log(files))
    replay.effects.note_damage(Damage("messages/x", 8, 16, "why", torn=False, first_seq=3), NOW_MS)
    replay.checkpoint()
    report = check(files, catalog)
    (found,) = [found for found in report.findings if found.file == "messages/x"]
    assert found.severity is Severity.NOTE
    assert found.reason == "noted at a start before this check: why"
    assert (found.offset, found.end, found.first_seq) == (8, 16, 3)
    assert report.is_clean


def test_tombstones_are_counted(files: SimulatedFiles, catalog: MemoryCatalog) -> None:
    length = read_hours(catalog)[HOUR].length
    schedule = schedule_log(files)
    schedule.cut(HOUR, length)
    rows, payload = schedule_group([6], removed={7: 2})
    assert int((rows["flags"] & FLAG_REMOVAL).sum()) == 1
    end = append_rows(schedule, length, rows, payload)
    state = HourState(length=end, entries=6, removals=1, last_entry_seq=6)
    catalog.commit({Table.HOURS: [(hour_key(HOUR), state.pack())]})
    assert findings(files, catalog) == []


def test_an_hour_that_was_written_before_there_was_a_first_seq(
    files: SimulatedFiles, catalog: MemoryCatalog
) -> None:
    catalog.commit(changed_hour(first_seq=-1)(catalog))
    assert findings(files, catalog) == []


@pytest.mark.damaged("the test deletes a file")
def test_an_hour_that_is_deleted_meanwhile(files: SimulatedFiles, catalog: MemoryCatalog) -> None:
    class Purging(MemoryCatalog):
        """The hour is there at the beginning, and gone later."""

        def get(self, table: Table, key: bytes) -> bytes | None:
            return None if table is Table.HOURS else super().get(table, key)

    purging = Purging()
    purging.commit({table: list(catalog.scan(table)) for table in Table})
    schedule_log(files).delete(HOUR)
    assert check(files, purging).findings == []
    assert not check(files, catalog).is_clean


# ---- a directory of the system ---------------------------------------------------------------


def test_a_path(tmp_path: Path) -> None:
    with pytest.raises(NotADataDirectoryError):
        check_path(tmp_path / "nothing", catalog_max_bytes=CATALOG_BYTES)
    assert not (tmp_path / "nothing").exists()
    files = OsFiles(str(tmp_path))
    catalog_path = tmp_path / CATALOG_DIRECTORY
    catalog_path.mkdir()
    catalog = LmdbCatalog(str(catalog_path), max_bytes=CATALOG_BYTES)
    filled(files, catalog)
    catalog.close()
    report = check_path(tmp_path, catalog_max_bytes=CATALOG_BYTES)
    assert report.findings == []
    assert report.tables["hours"] == 1


@pytest.mark.damaged("there is no catalog")
def test_a_path_without_a_catalog(tmp_path: Path) -> None:
    filled(OsFiles(str(tmp_path)), MemoryCatalog())
    report = check_path(tmp_path, catalog_max_bytes=CATALOG_BYTES)
    (found,) = report.findings
    assert found.file == "catalog"
    assert "the catalog failed to open" in found.reason
    assert report.logs["messages"].rows == 7
