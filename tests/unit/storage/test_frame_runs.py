"""Frames in columns: how many are taken at once, what is read for it, and what ends a run."""

import numpy as np
import pytest

from storage import frame_runs
from storage.errors import FormatVersionError
from storage.frame import HEADER, HEADER_BYTES, HEADER_DTYPE, Damage, Header, crc32c, encode
from storage.frame_runs import FRAMES_MIN, FrameRun, scan_heads, scan_runs
from storage.rows import LogKind
from tests.unit.storage.samples import STAMP, dispatch_group, schedule_group
from tests.unit.storage.test_frame import flipped, with_version

PATH = "file"


class Bytes:
    """A file in memory that counts what is read of it."""

    def __init__(self, data: bytes) -> None:
        self.path = PATH
        self.reads: list[tuple[int, int]] = []
        self._data = data

    def pread(self, length: int, offset: int) -> bytes:
        self.reads.append((length, offset))
        return self._data[offset : offset + length]

    def runs(self, kind: LogKind = LogKind.SCHEDULE) -> list[FrameRun | Damage]:
        return list(scan_runs(self, 0, len(self._data), kind=kind, stamp=STAMP))


def scheduled(first_seq: int, count: int = 1, payload: bytes | None = None) -> bytes:
    seqs = list(range(first_seq, first_seq + count))
    rows, blob = schedule_group(seqs)
    return encode(
        LogKind.SCHEDULE,
        rows.tobytes(),
        blob if payload is None else payload,
        first_seq=first_seq,
        last_seq=seqs[-1],
        created_ms=1,
        stamp=STAMP,
    )


def outline(found: list[FrameRun | Damage]) -> list[int | str]:
    """For each item the number of its frames, or what damage it is."""
    return [
        len(item.heads.offsets)
        if isinstance(item, FrameRun)
        else "torn"
        if item.torn
        else f"{item.first_seq}-{item.last_seq}"
        for item in found
    ]


def test_columns_of_headers_are_the_header() -> None:
    assert HEADER_DTYPE.names == Header._fields
    assert HEADER_DTYPE.itemsize == HEADER_BYTES
    head = scheduled(7, 3)[:HEADER_BYTES]
    (columns,) = np.frombuffer(head, HEADER_DTYPE).tolist()
    assert columns == HEADER.unpack(head)


def test_small_frames_are_one_run_behind_the_first() -> None:
    parts = [scheduled(1 + 2 * n, 2) for n in range(500)]
    first, rest = Bytes(b"".join(parts)).runs()
    assert outline([first, rest]) == [1, 499]
    assert isinstance(rest, FrameRun)
    starts = np.cumsum([0, *map(len, parts)])
    assert rest.heads.offsets.tolist() == starts[1:-1].tolist()
    assert rest.heads.end == starts[-1]
    assert rest.heads.last_seq == 1000
    assert rest.rows["seq"].tolist() == list(range(3, 1001))
    assert rest.row_starts().tolist() == list(range(0, 998, 2))
    of_rows = np.repeat(starts[1:-1] + HEADER_BYTES + 128, 2)
    assert rest.payload_starts().tolist() == of_rows.tolist()  # type: ignore[union-attr]
    last = rest.rows["seq"] > 990
    assert rest.payload_starts(last).tolist() == of_rows[last].tolist()  # type: ignore[union-attr]
    assert isinstance(first, FrameRun)
    assert first.payload_starts() == HEADER_BYTES + 128


@pytest.mark.parametrize("offset", [0, 40, HEADER_BYTES, HEADER_BYTES + 63])
def test_damage_ends_a_run_and_is_named(offset: int) -> None:
    parts = [scheduled(seq) for seq in range(1, 41)]
    parts[20] = flipped(parts[20], offset)
    assert outline(Bytes(b"".join(parts)).runs()) == [1, 19, "21-21", 19]


def test_payloads_are_not_verified() -> None:
    parts = [flipped(scheduled(seq), HEADER_BYTES + 64) for seq in range(1, 41)]
    assert outline(Bytes(b"".join(parts)).runs()) == [1, 39]


def test_a_newer_version_is_named_behind_what_stands_before_it() -> None:
    parts = [scheduled(seq) for seq in range(1, 41)]
    parts[20] = with_version(parts[20], 2)
    data = b"".join(parts)
    runs = scan_runs(Bytes(data), 0, len(data), kind=LogKind.SCHEDULE, stamp=STAMP)
    assert outline([next(runs), next(runs)]) == [1, 19]
    with pytest.raises(FormatVersionError):
        next(runs)


def test_a_length_that_lies_leads_nowhere() -> None:
    # Whoever could write a header with a checksum and no stamp, into which the chain runs.
    parts = [scheduled(seq) for seq in range(1, 41)]
    fields = list(HEADER.unpack(parts[20][:HEADER_BYTES]))
    fields[5], fields[-2] = len(parts[20]) * 5, STAMP ^ 1
    head = HEADER.pack(*fields)[:-4]
    parts[20] = head + crc32c(head).to_bytes(4, "little") + parts[20][HEADER_BYTES:]
    assert outline(Bytes(b"".join(parts)).runs()) == [1, 19, "21-21", 19]


def test_a_torn_tail_is_one() -> None:
    data = b"".join(scheduled(seq) for seq in range(1, 41))
    found = Bytes(data[:-9]).runs()
    assert outline(found) == [1, 38, "torn"]


def test_few_frames_come_one_by_one() -> None:
    data = b"".join(scheduled(seq) for seq in range(1, FRAMES_MIN + 1))
    assert outline(Bytes(data).runs()) == [1] * FRAMES_MIN


def test_long_payloads_are_not_read() -> None:
    payload = bytes(10 << 20)
    file = Bytes(b"".join(scheduled(seq, 2, payload) for seq in (1, 3, 5)))
    assert outline(file.runs()) == [1, 1, 1]
    assert len(file.reads) == 3
    assert sum(length for length, _ in file.reads) < 1 << 20


def test_short_frames_are_read_in_long_pieces() -> None:
    parts = [scheduled(seq, 1, bytes(2000)) for seq in range(1, 2001)]
    file = Bytes(b"".join(parts))
    outlined = outline(file.runs())
    assert sum(map(int, outlined)) == 2000
    assert len(file.reads) < 8


def test_rows_of_the_dispatch_log_in_any_order() -> None:
    parts = [
        encode(
            LogKind.DISPATCH,
            dispatch_group([seq]).tobytes(),
            b"",
            first_seq=seq,
            last_seq=seq,
            created_ms=1,
            stamp=STAMP,
        )
        for seq in range(100, 0, -1)
    ]
    first, rest = Bytes(b"".join(parts)).runs(LogKind.DISPATCH)
    assert isinstance(first, FrameRun)
    assert isinstance(rest, FrameRun)
    assert [*first.rows["seq"], *rest.rows["seq"]] == list(range(100, 0, -1))


# ---- headers alone ---------------------------------------------------------------------------


def test_headers_are_found_up_to_the_first_place_where_none_is() -> None:
    parts = [scheduled(seq) for seq in range(1, 41)]
    parts[20] = flipped(parts[20], 30)
    parts[10] = flipped(parts[10], HEADER_BYTES)  # Rows are nobody's business here.
    data = b"".join(parts)
    one, rest = scan_heads(Bytes(data), 0, len(data), kind=LogKind.SCHEDULE, stamp=STAMP)
    assert (len(one.offsets), len(rest.offsets)) == (1, 19)
    assert rest.headers["first_seq"].tolist() == list(range(2, 21))
    assert rest.end == sum(map(len, parts[:20]))


def test_headers_of_long_frames_are_all_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_runs, "_READ_BYTES_OF_HEADERS", HEADER_BYTES)
    file = Bytes(b"".join(scheduled(seq, 1, bytes(1000)) for seq in range(1, 11)))
    (heads,) = scan_heads(file, 0, 11_440, kind=LogKind.SCHEDULE, stamp=STAMP)
    assert len(heads.offsets) == 10
    assert {length for length, _ in file.reads} == {HEADER_BYTES}
