"""Files of every version that was released are read as they were meant, and written the same."""

import numpy as np
import pytest

from delayserver.records.message import Origin, Payload, decode_payload
from storage.buckets import bucket_path
from storage.check import check_directory
from storage.definitions_log import (
    State,
    apply,
    definitions_in,
    definitions_path,
    scan_definitions,
)
from storage.directory import Identity, open_identity
from storage.files import OsFiles
from storage.frame import Frame, unseal
from storage.hour_log import HourLog
from storage.message_log import Durability, MessageLog
from storage.rows import LogKind
from tests.golden.make import (
    BODY,
    DAY,
    DEFINITIONS,
    DELIVERIES,
    DIRECTORIES,
    ENTRIES,
    GROUPS,
    HOUR,
    KEY_HASH,
    PAYLOADS,
    START_MS,
    build,
    dispatch_rows,
    far_rows,
    message_rows,
    schedule_rows,
)
from tests.world.storage.files import SimulatedFiles

STAMP = 0x01020304


@pytest.fixture(params=DIRECTORIES)
def version(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def files(version: int) -> SimulatedFiles:
    """The golden directory of a version."""
    files = SimulatedFiles()
    directory = DIRECTORIES[version]
    for path in (path for path in directory.rglob("*") if path.is_file()):
        name = path.relative_to(directory).as_posix()
        if "/" in name:
            files.make_directory(name.rpartition("/")[0])
        file = files.open(name, create=True)
        file.pwrite([path.read_bytes()], 0)
        file.close()
    return files


def test_the_writer_gives_the_same_bytes(version: int) -> None:
    directory = DIRECTORIES[version]
    golden = {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }
    made = build()
    if version < 3:
        del made[bucket_path(LogKind.SCHEDULE, DAY)]
    if version < 2:
        del made[definitions_path(1)]
    made["FORMAT"] = made["FORMAT"].replace(b'"format": 3', b'"format": %d' % version)
    assert made == golden


def test_the_identity(files: SimulatedFiles, version: int) -> None:
    assert open_identity(files, random_bytes=None) == Identity(
        stamp=STAMP, shard=0, id_secret=bytes(range(1, 17)), version=version
    )


def test_the_definitions_log() -> None:
    path = DIRECTORIES[2] / definitions_path(1)
    frames = list(
        scan_definitions(
            OsFiles(str(DIRECTORIES[2]), readonly=True).open(definitions_path(1)),
            path.stat().st_size,
            stamp=STAMP,
        )
    )
    assert {
        frame.first_seq: list(definitions_in(frame)) for frame in frames if isinstance(frame, Frame)
    } == DEFINITIONS
    state = State()
    for frame in frames:
        assert isinstance(frame, Frame)
        apply(definitions_in(frame), state)
    assert state == {
        (1, b"\0\0\0\1"): b"order.unpaid",
        (2, b"\0\0\0\1"): unseal(PAYLOADS[2]),
    }


def test_the_message_log(files: SimulatedFiles) -> None:
    log = MessageLog(files, stamp=STAMP, segment_bytes=4096, durability=Durability.FSYNC)
    found = list(log.read(1))
    assert len(found) == len(GROUPS)
    for number, (frame, group) in enumerate(zip(found, GROUPS, strict=True)):
        assert isinstance(frame, Frame)
        rows, payload = message_rows(group)
        np.testing.assert_array_equal(frame.rows, rows)
        assert frame.payload == payload
        assert frame.header.created_ms == START_MS - 1000 + number


def test_a_row_field_by_field(files: SimulatedFiles) -> None:
    log = MessageLog(files, stamp=STAMP, segment_bytes=4096, durability=Durability.FSYNC)
    frame = next(iter(log.read(1)))
    assert isinstance(frame, Frame)
    row = frame.rows[2]
    first_two = len(PAYLOADS[1]) + len(PAYLOADS[2])
    assert {name: row[name].item() for name in frame.rows.dtype.names or ()} == {
        "seq": 3,
        "due_ms": START_MS + 1,
        "message_seq": 3,
        "target_seq": 0,
        "target_due_ms": 0,
        "key_hash": KEY_HASH,
        "subject_id": 1,
        "subscription_id": 0,
        "payload_offset": first_two,
        "payload_length": len(PAYLOADS[3]),
        "payload_crc": int.from_bytes(PAYLOADS[3][:4], "little"),
        "attempt": 0,
        "kind": 1,
        "flags": 0,
    }


def test_the_schedule_log(files: SimulatedFiles) -> None:
    log = HourLog(files, LogKind.SCHEDULE, stamp=STAMP)
    (frame,) = log.scan(HOUR, payload=True)
    assert isinstance(frame, Frame)
    rows, payload = schedule_rows()
    np.testing.assert_array_equal(frame.rows, rows)
    assert frame.payload == payload
    assert [int(seq) for seq in frame.rows["seq"]] == [entry[0] for entry in ENTRIES]
    for seq in (3, 4, 6, 7, 9):
        found = log.find(HOUR, seq)
        assert found is not None
        row, offset = found
        assert log.read(HOUR, offset, int(row["payload_length"])) == PAYLOADS[seq]


def test_a_day_of_the_schedule_log(files: SimulatedFiles, version: int) -> None:
    log = HourLog(files, LogKind.SCHEDULE, stamp=STAMP)
    found = list(log.scan(DAY, payload=True))
    if version < 3:
        assert found == []
        return
    (frame,) = found
    assert isinstance(frame, Frame)
    rows, payload = far_rows()
    np.testing.assert_array_equal(frame.rows, rows)
    assert frame.payload == payload


def test_the_dispatch_log(files: SimulatedFiles) -> None:
    (frame,) = HourLog(files, LogKind.DISPATCH, stamp=STAMP).scan(HOUR)
    assert isinstance(frame, Frame)
    np.testing.assert_array_equal(frame.rows, dispatch_rows())
    assert [tuple(row) for row in frame.rows.tolist()] == DELIVERIES


def test_the_payloads(files: SimulatedFiles) -> None:
    log = HourLog(files, LogKind.SCHEDULE, stamp=STAMP)

    def payload(seq: int) -> Payload:
        found = log.find(HOUR, seq)
        assert found is not None
        sealed = log.read(HOUR, found[1], int(found[0]["payload_length"]))
        return decode_payload(sealed, log.path(HOUR), found[1], seq)

    assert payload(3) == Payload(BODY, key="order-7", headers={"trace": "a1"})
    assert payload(4) == Payload(b"\x00\xff", content=1)
    assert payload(7).origin == Origin(4, START_MS + 2, 1, due_ms=6, attempt=2)
    assert unseal(PAYLOADS[1]) == b"order.unpaid"


def test_the_directory_is_clean(files: SimulatedFiles, version: int) -> None:
    report = check_directory(files, None)
    assert report.findings == [] and report.format_version == version
    scheduled = 9 if version < 3 else 18
    defined = sum(map(len, DEFINITIONS.values())) if version > 1 else 0
    assert [counts.rows for counts in report.logs.values()] == [10, scheduled, 2, defined]
