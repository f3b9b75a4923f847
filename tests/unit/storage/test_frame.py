"""The frame: what a reader trusts, and how it finds its way through what it does not."""

import random
from collections.abc import Iterable

import numpy as np
import pytest

from storage import frame as frames
from storage.errors import FormatVersionError
from storage.files import Files
from storage.frame import (
    HEADER,
    HEADER_BYTES,
    MAGIC,
    VERSION,
    Damage,
    Frame,
    crc32c,
    decode_header,
    decode_rows,
    encode,
    encode_parts,
    padded,
    scan,
    seal,
    unseal,
)
from storage.rows import DTYPES, LogKind, buffer_of
from tests.unit.storage.samples import STAMP, dispatch_group, message_group, overwrite
from tests.world.storage.files import SimulatedFiles

PATH = "file"


def encoded(
    first_seq: int, count: int = 1, *, stamp: int = STAMP, payload: bytes | None = None
) -> bytes:
    rows, blob = message_group(first_seq, count)
    return encode(
        LogKind.MESSAGE,
        rows.tobytes(),
        blob if payload is None else payload,
        first_seq=first_seq,
        last_seq=first_seq + count - 1,
        created_ms=1_700_000_000_000,
        stamp=stamp,
    )


def dispatched(seqs: list[int]) -> bytes:
    return encode(
        LogKind.DISPATCH,
        dispatch_group(seqs).tobytes(),
        b"",
        first_seq=min(seqs),
        last_seq=max(seqs),
        created_ms=1,
        stamp=STAMP,
    )


def with_version(frame: bytes, version: int) -> bytes:
    fields = list(HEADER.unpack(frame[:HEADER_BYTES]))
    fields[1] = version
    head = HEADER.pack(*fields)[:-4]
    return head + crc32c(head).to_bytes(4, "little") + frame[HEADER_BYTES:]


def flipped(data: bytes, offset: int) -> bytes:
    return data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :]


def scanned(
    data: bytes,
    *,
    kind: LogKind = LogKind.MESSAGE,
    payload: bool = True,
    after_seq: int = 0,
    start: int = 0,
) -> list[Frame | Damage]:
    files: Files = SimulatedFiles()
    overwrite(files, PATH, 0, data)
    file = files.open(PATH)
    return list(
        scan(
            file,
            start,
            len(data),
            kind=kind,
            stamp=STAMP,
            payload=payload,
            after_seq=after_seq,
        )
    )


def outline(found: Iterable[Frame | Damage]) -> list[tuple[str, int, int, int, int]]:
    """For each item: what it is, from where to where, and its seqs."""
    return [
        (
            "frame" if isinstance(item, Frame) else "torn" if item.torn else "damage",
            item.offset,
            item.end,
            item.first_seq,
            item.last_seq,
        )
        for item in found
    ]


# ---- one frame -------------------------------------------------------------------------------


def test_header_says_what_was_encoded() -> None:
    rows, blob = message_group(7, 3)
    data = encoded(7, 3)
    header = decode_header(data, PATH, stamp=STAMP)
    assert header is not None
    assert header._asdict() == {
        "magic": MAGIC,
        "version": VERSION,
        "kind": LogKind.MESSAGE,
        "count": 3,
        "rows_bytes": 240,
        "payload_bytes": len(blob),
        "first_seq": 7,
        "last_seq": 9,
        "created_ms": 1_700_000_000_000,
        "rows_crc": crc32c(rows.tobytes()),
        "payload_crc": crc32c(blob),
        "stamp": STAMP,
        "header_crc": crc32c(data[:60]),
    }
    assert header.frame_bytes == len(data) == padded(64 + 240 + len(blob))


def test_crc32c_is_castagnoli() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # RFC 3720, B.4: the check value of CRC-32C
    assert crc32c(memoryview(b"123456789")) == 0xE3069283


def test_the_checksum_of_a_long_view_is_that_of_its_bytes() -> None:
    data = random.Random(0).randbytes(1_000_001)
    assert crc32c(memoryview(data)) == crc32c(bytearray(data)) == crc32c(data)


def test_a_frame_in_pieces_is_the_frame() -> None:
    rows, blob = message_group(7, 3)
    raw, numbers = rows.tobytes(), {"first_seq": 7, "last_seq": 9, "created_ms": 5, "stamp": STAMP}
    parts = encode_parts(LogKind.MESSAGE, buffer_of(rows), memoryview(blob), **numbers)
    assert b"".join(parts) == encode(LogKind.MESSAGE, raw, blob, **numbers)


def test_a_frame_ends_at_a_multiple_of_eight_filled_with_zeros() -> None:
    for length in range(9):
        data = encoded(1, payload=bytes([255]) * length)
        assert len(data) % 8 == 0
        assert data[64 + 80 + length :] == bytes(-length % 8)


@pytest.mark.parametrize("kind", LogKind)
def test_rows_of_every_log_come_back(kind: LogKind) -> None:
    dtype = DTYPES[kind]
    raw = bytes(range(1, 1 + 3 * dtype.itemsize % 255)) * 3
    raw = (raw * 3)[: 3 * dtype.itemsize]
    data = encode(kind, raw, b"blob", first_seq=1, last_seq=3, created_ms=0, stamp=STAMP)
    header = decode_header(data, PATH, stamp=STAMP)
    assert header is not None
    rows = decode_rows(header, data[64 : 64 + len(raw)])
    assert rows is not None
    assert rows.dtype == dtype
    assert rows.tobytes() == raw


@pytest.mark.parametrize("offset", range(HEADER_BYTES))
def test_no_byte_of_a_header_can_change_unnoticed(offset: int) -> None:
    assert decode_header(flipped(encoded(1), offset), PATH, stamp=None) is None


def test_a_short_header_is_none() -> None:
    assert decode_header(encoded(1)[:63], PATH, stamp=STAMP) is None


def test_a_header_of_another_directory_is_none() -> None:
    data = encoded(1, stamp=STAMP + 1)
    assert decode_header(data, PATH, stamp=STAMP) is None
    assert decode_header(data, PATH, stamp=None) is not None


def test_a_newer_version_is_named() -> None:
    with pytest.raises(FormatVersionError, match="file has format version 2"):
        decode_header(with_version(encoded(1), 2), PATH, stamp=STAMP)


def test_a_count_that_does_not_fit_the_rows_is_none() -> None:
    fields = list(HEADER.unpack(encoded(1, 2)[:HEADER_BYTES]))
    fields[3] = 3
    head = HEADER.pack(*fields)[:-4]
    assert decode_header(head + crc32c(head).to_bytes(4, "little"), PATH, stamp=STAMP) is None


def test_rows_of_another_length_are_none() -> None:
    data = encoded(1, 2)
    header = decode_header(data, PATH, stamp=STAMP)
    assert header is not None
    assert decode_rows(header, data[64 : 64 + 80]) is None


def test_a_sealed_payload_opens_only_unchanged() -> None:
    sealed = seal(b"content")
    assert unseal(sealed) == b"content"
    assert unseal(seal(b"")) == b""
    assert all(unseal(flipped(sealed, offset)) is None for offset in range(len(sealed)))
    assert unseal(b"") is None
    assert unseal(b"abc") is None


# ---- a file of frames ------------------------------------------------------------------------


def test_frames_are_found_one_behind_the_other() -> None:
    first, second = encoded(1, 2), encoded(3)
    found = scanned(first + second)
    assert outline(found) == [
        ("frame", 0, len(first), 1, 2),
        ("frame", len(first), len(first) + len(second), 3, 3),
    ]
    assert isinstance(found[0], Frame)
    assert found[0].payload == message_group(1, 2)[1]
    assert found[0].payload_start == 64 + 160
    np.testing.assert_array_equal(found[0].rows, message_group(1, 2)[0])


def test_payloads_are_left_out_unless_asked_for() -> None:
    data = encoded(1)
    (found,) = scanned(flipped(data, 64 + 80), payload=False)
    assert isinstance(found, Frame)
    assert found.payload is None
    (found,) = scanned(flipped(data, 64 + 80))
    assert isinstance(found, Frame)
    assert not found.payload_intact


def test_an_empty_file_has_nothing() -> None:
    assert scanned(b"") == []


@pytest.mark.parametrize("length", [1, 8, 63, 64, 200, 5000])
def test_zeros_behind_frames_are_a_preallocated_tail_in_the_message_log(length: int) -> None:
    data = encoded(1)
    assert outline(scanned(data + bytes(length))) == [("frame", 0, len(data), 1, 1)]


@pytest.mark.parametrize("length", [1, 8, 63, 64, 200, 5000])
def test_zeros_behind_frames_are_a_torn_tail_in_the_other_logs(length: int) -> None:
    data = dispatched([5, 9])
    assert outline(scanned(data + bytes(length), kind=LogKind.DISPATCH)) == [
        ("frame", 0, len(data), 5, 9),
        ("torn", len(data), len(data) + length, 0, 0),
    ]


def test_every_cut_leaves_a_torn_tail() -> None:
    first, second = encoded(1), encoded(2)
    for length in range(len(first) + 1, len(first) + len(second)):
        assert outline(scanned((first + second)[:length])) == [
            ("frame", 0, len(first), 1, 1),
            ("torn", len(first), length, 2, 0),
        ]


@pytest.mark.parametrize("broken", [0, 1])
def test_damage_in_the_middle_names_what_is_missing(broken: int) -> None:
    data = [encoded(1, 2), encoded(3, 4), encoded(7)]
    ends = np.cumsum([len(part) for part in data]).tolist()
    whole = [
        ("frame", 0, ends[0], 1, 2),
        ("frame", ends[0], ends[1], 3, 6),
        ("frame", ends[1], ends[2], 7, 7),
    ]
    for offset in (0, 40, HEADER_BYTES, HEADER_BYTES + 79):
        parts = data.copy()
        parts[broken] = flipped(parts[broken], offset)
        expected = whole.copy()
        expected[broken] = ("damage", *whole[broken][1:])
        assert outline(scanned(b"".join(parts))) == expected


def test_neighbours_that_are_damaged_are_one_stretch() -> None:
    parts = [encoded(1), flipped(encoded(2), 10), flipped(encoded(3), 70), encoded(4)]
    ends = np.cumsum([len(part) for part in parts]).tolist()
    assert outline(scanned(b"".join(parts))) == [
        ("frame", 0, ends[0], 1, 1),
        ("damage", ends[0], ends[2], 2, 3),
        ("frame", ends[2], ends[3], 4, 4),
    ]


def test_damage_with_nothing_valid_behind_it_is_torn() -> None:
    # The header behind the hole is sound, its rows are not: nothing of it was ever synced.
    first, second, third = dispatched([1]), dispatched([2]), dispatched([3])
    data = first + bytes(len(second)) + flipped(third, HEADER_BYTES)
    assert outline(scanned(data, kind=LogKind.DISPATCH)) == [
        ("frame", 0, len(first), 1, 1),
        ("torn", len(first), len(data), 0, 0),
    ]


def test_damage_at_the_beginning_starts_behind_the_last_seq_that_is_known() -> None:
    data = flipped(encoded(501), 0) + encoded(502)
    assert outline(scanned(data, after_seq=500))[0][3:] == (501, 501)
    assert outline(scanned(data))[0][3:] == (1, 501)


def test_deliveries_end_in_any_order() -> None:
    parts = [dispatched([90, 95]), flipped(dispatched([50]), 0), dispatched([7, 20])]
    ends = np.cumsum([len(part) for part in parts]).tolist()
    assert outline(scanned(b"".join(parts), kind=LogKind.DISPATCH)) == [
        ("frame", 0, ends[0], 90, 95),
        ("damage", ends[0], ends[1], 0, 0),
        ("frame", ends[1], ends[2], 7, 20),
    ]


def test_what_is_older_is_left_over_and_not_found() -> None:
    refused = encoded(1, 5)
    data = encoded(2) + flipped(encoded(3), 0) + refused
    assert outline(scanned(data))[1:] == [("torn", len(encoded(2)), len(data), 3, 0)]


def test_a_hole_longer_than_one_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "_SEARCH_BYTES", 64)
    first, last = encoded(1), encoded(2)
    for length in range(56, 160, 8):
        data = first + b"\xff" * length + last
        assert outline(scanned(data))[1:] == [
            ("damage", len(first), len(first) + length, 2, 1),
            ("frame", len(first) + length, len(data), 2, 2),
        ]


def test_a_frame_larger_than_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "_READ_BYTES", 100)
    data = encoded(1, 20) + encoded(21) + encoded(22, 30)
    assert [item[3:] for item in outline(scanned(data))] == [(1, 20), (21, 21), (22, 51)]


def test_frames_of_another_log_do_not_count() -> None:
    data = dispatched([1])
    (found,) = scanned(data)
    assert isinstance(found, Damage)
    assert found.torn
    assert found.reason == "the frame belongs to the dispatch log"


# ---- a publisher who knows the format --------------------------------------------------------


@pytest.mark.parametrize("version", [VERSION, VERSION + 1])
@pytest.mark.parametrize("lead", range(8))
def test_a_frame_in_a_body_is_not_taken_for_one(lead: int, version: int) -> None:
    fake = with_version(encoded(2, stamp=STAMP + 1), version)
    carrier = encoded(1, payload=bytes(lead) + fake + fake)
    data = flipped(carrier, 0) + encoded(3)
    assert outline(scanned(data)) == [
        ("damage", 0, len(carrier), 1, 2),
        ("frame", len(carrier), len(data), 3, 3),
    ]


@pytest.mark.parametrize("version", [VERSION, VERSION + 1])
def test_what_is_left_of_a_body_behind_the_last_frame_is_not_taken_for_one(version: int) -> None:
    # A group that was refused half-way, and a shorter one written over it.
    fake = with_version(encoded(2, stamp=STAMP + 1), version)
    last = encoded(1)
    assert outline(scanned(last + fake + bytes(800))) == [
        ("frame", 0, len(last), 1, 1),
        ("torn", len(last), len(last) + len(fake) + 800, 2, 0),
    ]


def test_damage_as_an_error() -> None:
    error = Damage(PATH, 8, 16, "why", torn=False, first_seq=3, last_seq=4).error()
    assert str(error).startswith("file is damaged at offset 8, seq 3–4: why; ")
