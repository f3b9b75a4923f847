"""Frames in columns: the same rows, the same damage and the same errors as frame by frame."""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from unittest.mock import patch

from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from storage import frame, frame_runs
from storage.errors import FormatVersionError
from storage.files import SECTOR_BYTES, File
from storage.frame import (
    HEADER,
    HEADER_BYTES,
    MAGIC,
    VERSION,
    Damage,
    Frame,
    crc32c,
    decode_header,
    encode,
    padded,
    scan,
)
from storage.frame_runs import FrameRun, scan_heads, scan_runs
from storage.rows import DTYPES, LogKind
from tests.world.storage.files import SimulatedFiles

STAMP = 0xC0FFEE
PATH = "file"

Found = tuple[object, ...]


def encoded(kind: LogKind, first_seq: int, count: int, payload: bytes, stamp: int = STAMP) -> bytes:
    rows = random.Random(first_seq).randbytes(count * DTYPES[kind].itemsize)
    seqs = {"first_seq": first_seq, "last_seq": first_seq + count - 1}
    return encode(kind, rows, payload, **seqs, created_ms=first_seq, stamp=stamp)


def with_version(data: bytes, version: int) -> bytes:
    fields = list(HEADER.unpack(data[:HEADER_BYTES]))
    fields[1] = version
    head = HEADER.pack(*fields)[:-4]
    return head + crc32c(head).to_bytes(4, "little") + data[HEADER_BYTES:]


@st.composite
def files(draw: st.DrawFn, kind: LogKind) -> tuple[bytes, list[tuple[int, int]]]:
    """The bytes of a file, and the stretches of it that cannot be read."""
    data, seq = bytes(8 * draw(st.sampled_from((0, 0, 0, 1)))), 1
    foreign = LogKind.DISPATCH if kind is LogKind.MESSAGE else LogKind.MESSAGE
    bodies = [MAGIC * 8, encoded(kind, 1 << 30, 1, b"", STAMP ^ 1), encoded(kind, 9, 1, b"deep")]
    payloads = st.binary(max_size=40) | st.sampled_from(bodies) | st.just(bytes(600))
    for _ in range(draw(st.integers(1, 6))):
        count, payload = draw(st.integers(1, 4)), draw(payloads)
        match draw(st.sampled_from(["swarm"] * 6 + ["stale", "newer", "foreign", "junk", "zeros"])):
            case "swarm":
                for _ in range(draw(st.integers(1, 12))):
                    data += encoded(kind, seq, count, payload)
                    seq += count
            case "stale":
                data += encoded(kind, draw(st.integers(1, seq)), count, payload)
            case "newer":
                data += with_version(encoded(kind, seq, count, payload), VERSION + 1)
            case "foreign":
                data += encoded(foreign, seq, count, payload)
            case "junk":
                data += payload.ljust(padded(len(payload) + 1), b"\1")
            case "zeros":
                data += bytes(8 * draw(st.integers(1, 40)))
    changed = bytearray(data)
    for _ in range(draw(st.sampled_from((0, 0, 1, 2)))):
        changed[draw(st.integers(0, len(data) - 1))] ^= draw(st.integers(1, 255))
    length = draw(st.sampled_from((len(data),)) | st.integers(1, len(data)))
    sectors = draw(st.sampled_from((0, 0, 0, 1, 2)))
    sector = st.integers(0, (length - 1) // SECTOR_BYTES)
    starts = [draw(sector) * SECTOR_BYTES for _ in range(sectors)]
    return bytes(changed[:length]), [(start, start + SECTOR_BYTES) for start in starts]


def opened(data: bytes, bad: list[tuple[int, int]]) -> File:
    disk = SimulatedFiles()
    file = disk.open(PATH, create=True)
    file.pwrite([data], 0)
    for start, end in bad:
        disk.fail_reads(PATH, start, end)
    return file


def outline(items: Iterator[Frame | Damage] | Iterator[FrameRun | Damage]) -> Iterator[Found]:
    """Every frame and every stretch of damage, in a form in which both scans can be compared."""
    try:
        for item in items:
            if isinstance(item, Damage):
                # Where a sector begins depends on how it was read.
                yield (replace(item, reason="") if item.is_unreadable else item,)
            elif isinstance(item, Frame):
                head = (item.offset, HEADER.pack(*item.header), item.payload_start)
                yield (*head, item.rows.tobytes())
            else:
                yield from _frames(item)
    except FormatVersionError as error:
        yield (str(error),)


def _frames(run: FrameRun) -> Iterator[Found]:
    event("frames of a run: " + ("1" if len(run.heads.offsets) == 1 else "more"))
    starts, row_starts = run.payload_starts(), run.row_starts()
    for index, offset in enumerate(run.heads.offsets.tolist()):
        header, first = run.heads.headers[index], int(row_starts[index])
        rows = run.rows[first : first + int(header["count"])]
        start = starts if isinstance(starts, int) else int(starts[first])
        yield offset, header.tobytes(), start, rows.tobytes()
        assert isinstance(starts, int) or set(starts[first : first + len(rows)]) == {start}
    assert len(run.rows) == run.heads.headers["count"].sum()


@settings(max_examples=400, deadline=None)
@given(
    kind=st.sampled_from(LogKind),
    drawn=st.data(),
    read_bytes=st.sampled_from((128, 1000, 4096)),
    more_bytes=st.sampled_from((1, 4, 64)),
    after_seq=st.sampled_from((0, 0, 5)),
)
def test_runs_are_what_a_scan_finds(
    kind: LogKind, drawn: st.DataObject, read_bytes: int, more_bytes: int, after_seq: int
) -> None:
    data, bad = drawn.draw(files(kind))
    one_by_one = partial(scan, kind=kind, stamp=STAMP, after_seq=after_seq, payload=False)
    in_runs = partial(scan_runs, kind=kind, stamp=STAMP, after_seq=after_seq)
    expected = list(outline(one_by_one(opened(data, bad), 0, len(data))))
    with (
        patch.object(frame, "_READ_BYTES", read_bytes),
        patch.object(frame_runs, "_READ_BYTES_OF_SHORT", read_bytes * more_bytes),
    ):
        found = list(outline(in_runs(opened(data, bad), 0, len(data))))
    assert found == expected


def headers_one_by_one(file: File, end: int, kind: LogKind) -> Iterator[tuple[int, bytes]]:
    """Offset and header of each frame, as they stand one behind the other."""
    offset = 0
    while offset < end:
        head = file.pread(HEADER_BYTES, offset)
        header = decode_header(head, PATH, stamp=STAMP)
        if header is None or header.kind != kind or offset + header.frame_bytes > end:
            return
        yield offset, head
        offset += header.frame_bytes


@settings(max_examples=200, deadline=None)
@given(kind=st.sampled_from(LogKind), drawn=st.data(), read_bytes=st.sampled_from((64, 600, 4096)))
@example(kind=LogKind.DISPATCH, drawn=None, read_bytes=600)
def test_heads_are_the_headers_one_by_one(
    kind: LogKind, drawn: st.DataObject | None, read_bytes: int
) -> None:
    short = b"".join(encoded(kind, seq, 1, b"") for seq in range(1, 40))
    data, _ = drawn.draw(files(kind)) if drawn is not None else (short, [])
    file, is_newer = opened(data, []), False
    expected: list[tuple[int, bytes]] = []
    found: list[tuple[int, bytes]] = []
    try:
        for one in headers_one_by_one(file, len(data), kind):
            expected.append(one)
    except FormatVersionError:
        is_newer = True
    try:
        with patch.object(frame_runs, "_READ_BYTES_OF_HEADERS", read_bytes):
            for heads in scan_heads(file, 0, len(data), kind=kind, stamp=STAMP):
                raw = [header.tobytes() for header in heads.headers]
                found += zip(heads.offsets.tolist(), raw, strict=True)
                assert heads.end == (found[-1][0] + padded_bytes(raw[-1]))
    except FormatVersionError:
        assert is_newer
        assert found == expected[: len(found)]
    else:
        assert not is_newer
        assert found == expected


def padded_bytes(head: bytes) -> int:
    header = decode_header(head, PATH, stamp=STAMP)
    assert header is not None
    return header.frame_bytes
