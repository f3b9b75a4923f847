"""Frames: what goes in comes out, no changed byte gets by, nothing else is taken for a frame."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.frame import (
    HEADER,
    HEADER_BYTES,
    VERSION,
    Damage,
    Frame,
    crc32c,
    crcs_of,
    encode,
    scan,
    seal,
    seal_many,
    unseal,
)
from storage.rows import DTYPES, LogKind
from tests.world.storage.files import SimulatedFiles

STAMP = 0xC0FFEE
PATH = "file"


@st.composite
def group_sizes(draw: st.DrawFn) -> list[tuple[int, bytes]]:
    """For each frame the number of its rows and its payloads."""
    group = st.tuples(st.integers(1, 4), st.binary(max_size=100))
    return draw(st.lists(group, min_size=1, max_size=6))


def encoded(
    kind: LogKind, first_seq: int, count: int, payload: bytes, *, stamp: int = STAMP
) -> bytes:
    rows = np.zeros(count, DTYPES[kind])
    rows["seq"] = np.arange(first_seq, first_seq + count)
    return encode(
        kind,
        rows.tobytes(),
        payload,
        first_seq=first_seq,
        last_seq=first_seq + count - 1,
        created_ms=first_seq,
        stamp=stamp,
    )


def file_of(kind: LogKind, groups: list[tuple[int, bytes]]) -> tuple[bytes, list[int]]:
    """A file of these frames, and where each begins, with the end of the last."""
    data, starts, seq = b"", [0], 1
    for count, payload in groups:
        data += encoded(kind, seq, count, payload)
        starts.append(len(data))
        seq += count
    return data, starts


def scanned(data: bytes, kind: LogKind) -> list[Frame | Damage]:
    files = SimulatedFiles()
    file = files.open(PATH, create=True)
    file.pwrite([data], 0)
    return list(scan(file, 0, len(data), kind=kind, stamp=STAMP, payload=True))


def forged(data: bytes, version: int) -> bytes:
    """A frame as somebody makes it who knows all of the format but the stamp."""
    fields = list(HEADER.unpack(data[:HEADER_BYTES]))
    fields[1], fields[-2] = version, STAMP ^ 1
    head = HEADER.pack(*fields)[:-4]
    return head + crc32c(head).to_bytes(4, "little") + data[HEADER_BYTES:]


@settings(deadline=None)
@given(kind=st.sampled_from(LogKind), groups=group_sizes())
def test_round_trip(kind: LogKind, groups: list[tuple[int, bytes]]) -> None:
    data, starts = file_of(kind, groups)
    found = scanned(data, kind)
    seq = 1
    for frame, (count, payload), (start, end) in zip(found, groups, pairwise(starts), strict=True):
        assert isinstance(frame, Frame)
        assert (frame.offset, frame.end) == (start, end)
        assert (frame.first_seq, frame.last_seq) == (seq, seq + count - 1)
        assert frame.rows["seq"].tolist() == list(range(seq, seq + count))
        assert frame.payload == payload
        assert frame.payload_intact
        seq += count


@given(
    kind=st.sampled_from(LogKind),
    groups=group_sizes(),
    where=st.floats(0, 1, exclude_max=True),
    change=st.integers(1, 255),
)
@settings(max_examples=300, deadline=None)
def test_no_changed_byte_gets_by_and_all_other_frames_are_found(
    kind: LogKind, groups: list[tuple[int, bytes]], where: float, change: int
) -> None:
    data, starts = file_of(kind, groups)
    whole = scanned(data, kind)
    at = int(where * len(data))
    hit = next(i for i, (start, end) in enumerate(pairwise(starts)) if start <= at < end)
    found = scanned(data[:at] + bytes([data[at] ^ change]) + data[at + 1 :], kind)
    assert len(found) == len(whole)
    for index, (frame, before) in enumerate(zip(found, whole, strict=True)):
        assert isinstance(before, Frame)
        if index != hit:
            assert isinstance(frame, Frame)
            assert frame.payload_intact
            assert frame.header == before.header
            assert frame.rows.tobytes() == before.rows.tobytes()
            continue
        assert (frame.offset, frame.end) == (before.offset, before.end)
        if isinstance(frame, Damage):
            assert frame.torn == (hit == len(whole) - 1)
            if kind in (LogKind.MESSAGE, LogKind.SCHEDULE) and not frame.torn:
                assert (frame.first_seq, frame.last_seq) == (before.first_seq, before.last_seq)
        elif at < before.payload_start + before.header.payload_bytes:
            assert not frame.payload_intact
            assert frame.rows.tobytes() == before.rows.tobytes()
        else:
            # Nobody reads the padding, and the check of a directory looks at it.
            assert frame.payload == before.payload


@settings(deadline=None)
@given(groups=group_sizes(), length=st.floats(0, 1))
def test_any_prefix_gives_the_frames_that_are_whole(
    groups: list[tuple[int, bytes]], length: float
) -> None:
    data, starts = file_of(LogKind.SCHEDULE, groups)
    end = int(length * len(data))
    found = scanned(data[:end], LogKind.SCHEDULE)
    whole = sum(1 for start in starts[1:] if start <= end)
    assert all(isinstance(frame, Frame) for frame in found[:whole])
    if end in starts:
        assert len(found) == whole
    else:
        (torn,) = found[whole:]
        assert isinstance(torn, Damage)
        assert torn.torn
        assert (torn.offset, torn.end) == (starts[whole], end)


@settings(deadline=None)
@given(
    kind=st.sampled_from(LogKind),
    lead=st.integers(0, 16),
    version=st.integers(1, VERSION + 1),
    broken=st.integers(0, HEADER_BYTES - 1),
    fakes=st.integers(1, 3),
)
def test_a_fake_frame_in_a_payload_is_not_taken_for_a_frame(
    kind: LogKind, lead: int, version: int, broken: int, fakes: int
) -> None:
    fake = forged(encoded(kind, 2, 1, b"fake"), version)
    carrier = bytearray(encoded(kind, 1, 1, bytes(lead) + fake * fakes))
    last = encoded(kind, 2, 2, b"true")
    whole = scanned(bytes(carrier) + last, kind)
    assert all(isinstance(frame, Frame) for frame in whole)
    carrier[broken] ^= 0xFF
    damage, frame = scanned(bytes(carrier) + last, kind)
    assert isinstance(damage, Damage)
    assert (damage.offset, damage.end) == (0, len(carrier))
    assert isinstance(frame, Frame)
    assert frame.payload == b"true"


@settings(deadline=None)
@given(kind=st.sampled_from(LogKind), garbage=st.binary(max_size=400))
def test_garbage_behind_the_last_frame_is_torn(kind: LogKind, garbage: bytes) -> None:
    data, starts = file_of(kind, [(2, b"payload")])
    first, *rest = scanned(data + garbage, kind)
    assert isinstance(first, Frame)
    assert first.end == starts[1]
    for found in rest:
        assert isinstance(found, Damage)
        assert found.torn
        assert (found.offset, found.end) == (starts[1], len(data) + len(garbage))
    is_zero = not any(garbage[:HEADER_BYTES])
    assert bool(rest) == bool(garbage and not (kind is LogKind.MESSAGE and is_zero))


@settings(deadline=None)
@given(data=st.binary(max_size=200), at=st.integers(0, 1 << 20), change=st.integers(1, 255))
def test_a_sealed_payload_opens_only_unchanged(data: bytes, at: int, change: int) -> None:
    sealed = seal(data)
    assert unseal(sealed) == data
    broken = bytearray(sealed)
    broken[at % len(sealed)] ^= change
    assert unseal(bytes(broken)) is None


@given(st.lists(st.binary(max_size=300)))
def test_many_are_sealed_as_one_by_one(items: list[bytes]) -> None:
    pieces = seal_many(items, crcs_of(items))
    assert b"".join(pieces) == b"".join(map(seal, items))
