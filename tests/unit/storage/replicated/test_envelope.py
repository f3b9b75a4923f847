"""Records of the replicated log: what goes in comes out, and nothing else is taken for one."""

import struct

import google_crc32c
import pytest

from storage.errors import NewerRecordError, RecordDamageError
from storage.frame import HEADER_BYTES
from storage.replicated.envelope import (
    ENVELOPE_BYTES,
    PART_MAX_BYTES,
    Adopt,
    Beat,
    Claim,
    FramePart,
    LeasesPart,
    LogRecord,
    Release,
    decode,
    encode,
    join,
    split,
    split_leases,
)

LOG = "ds.log/3"
RECORDS: list[LogRecord] = [
    Claim(1, 2, 3, -1, "https://n1.example:8443"),
    Claim(65535, 0xFFFFFFFF, -1, (1 << 63) - 1, ""),
    FramePart(1, 2, 3, 0, 1, b"frame"),
    FramePart(1, 2, 3, 65534, 65535, b""),
    Beat(1, 2, 3, (1 << 64) - 1, 7, 490_000),
    Release(1, 2, 3, 0),
    Release(1, 2, 3, 9),
    Adopt(1, 2, 3, 900, 70, 4, 0xFFFFFFFF, 500, 400),
    LeasesPart(1, 2, 3, 0, 1, b""),
    LeasesPart(1, 2, 3, 2, 4, b"leases"),
]


def sealed(data: bytes) -> bytes:
    """A record with the right checksum, whatever is in it."""
    crc = google_crc32c.value(data[:24] + bytes(4) + data[28:])
    return data[:24] + struct.pack("<I", crc) + data[28:]


def changed(data: bytes, at: int, by: bytes) -> bytes:
    return sealed(data[:at] + by + data[at + len(by) :])


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_comes_back(record: LogRecord) -> None:
    data = encode(record)
    assert data == sealed(data)
    assert decode(data, LOG, 7) == record


@pytest.mark.parametrize("record", RECORDS)
def test_no_bit_changes_unnoticed(record: LogRecord) -> None:
    data = encode(record)
    for at in range(len(data)):
        broken = bytearray(data)
        broken[at] ^= 1 << at % 8
        with pytest.raises(RecordDamageError, match=r"ds\.log/3 at offset 7"):
            decode(bytes(broken), LOG, 7)


@pytest.mark.parametrize("record", RECORDS)
def test_a_prefix_is_damage(record: LogRecord) -> None:
    data = encode(record)
    for length in range(len(data)):
        with pytest.raises(RecordDamageError):
            decode(data[:length], LOG, 7)


def test_what_a_newer_version_wrote_is_named() -> None:
    data = encode(RECORDS[0])
    for at, what in ((4, "type 9"), (5, "flags 9, 0"), (28, "flags 0, 9")):
        with pytest.raises(NewerRecordError, match=f"the record has {what}"):
            decode(changed(data, at, b"\x09"), LOG, 7)


@pytest.mark.parametrize(
    ("record", "at", "by"),
    [
        (RECORDS[0], 10, b"\x00\x00"),  # node 0
        (RECORDS[0], 12, bytes(4)),  # epoch 0
        (RECORDS[0], 6, b"\x01\x00"),  # a part of a claim
        (RECORDS[0], 8, b"\x02\x00"),  # a claim in two parts
        (RECORDS[0], ENVELOPE_BYTES + 8, b"\xff"),  # an address that is no text
        (RECORDS[2], 6, b"\x01\x00"),  # part 1 of 1
        (RECORDS[2], 8, b"\x00\x00"),  # of none
        (RECORDS[2], 4, b"\x01"),  # a claim, shorter than one
        (RECORDS[4], 4, b"\x04"),  # a release, longer than one
        (RECORDS[5], 4, b"\x03"),  # a beat, shorter than one
        (RECORDS[5], 4, b"\x05"),  # an adopt, shorter than one
    ],
)
def test_what_verifies_and_is_no_record_is_damage(record: LogRecord, at: int, by: bytes) -> None:
    with pytest.raises(RecordDamageError, match="it verifies, and yet is no"):
        decode(changed(encode(record), at, by), LOG, 7)


def test_a_frame_is_split_and_joined() -> None:
    frame = bytes(range(256)) * 2
    for part_bytes in (HEADER_BYTES, 100, 256, 511, 512, 513):
        parts = list(split(frame, node=1, epoch=2, clock_ms=3, part_bytes=part_bytes))
        assert join(parts) == frame
        assert max(len(part.data) for part in parts) <= part_bytes
        assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True]


def test_a_part_stays_below_what_an_engine_takes() -> None:
    frame = bytes(2 * PART_MAX_BYTES + 1)
    parts = list(split(frame, node=1, epoch=2, clock_ms=3))
    assert [len(part.data) for part in parts] == [PART_MAX_BYTES, PART_MAX_BYTES, 1]
    assert len(encode(parts[0])) < 1_000_000
    assert join(parts) == frame


@pytest.mark.parametrize(("length", "parts"), [(0, 1), (1, 1), (10, 1), (11, 2), (30, 3)])
def test_leases_are_split_and_joined(length: int, parts: int) -> None:
    leases = bytes(range(length))
    found = list(split_leases(leases, node=1, epoch=2, clock_ms=3, part_bytes=10))
    assert [(one.part, one.parts) for one in found] == [(part, parts) for part in range(parts)]
    assert [one.is_last for one in found] == [False] * (parts - 1) + [True]
    assert join(found) == leases
