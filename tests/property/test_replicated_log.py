"""The office and its other description agree on any log, from anywhere; no changed byte gets by."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import RecordDamageError
from storage.frame import HEADER_BYTES, encode
from storage.replicated import envelope
from storage.replicated.envelope import Beat, Claim, FramePart, LeasesPart, LogRecord, Release
from storage.replicated.office import Office, OfficeState, RecordDecision
from storage.rows import DTYPES, LogKind
from tests.world.storage.replicated import LOG, STAMP, verdicts

U16, U32, U64 = (st.integers(0, (1 << bits) - 1) for bits in (16, 32, 64))
I64 = st.integers(-(1 << 63), (1 << 63) - 1)
SAID = (st.integers(1, (1 << 16) - 1), st.integers(1, (1 << 32) - 1), I64)


def part_of(said: tuple[int, int, int], parts: int, part: int, data: bytes) -> FramePart:
    node, epoch, clock_ms = said
    return FramePart(node, epoch, clock_ms, part % parts, parts, data)


RECORDS = st.one_of(
    st.builds(Claim, *SAID, I64, st.text(max_size=40)),
    st.builds(Beat, *SAID, U64, I64, U32),
    st.builds(Release, *SAID, U16),
    st.builds(LeasesPart, *SAID, st.just(1), st.integers(2, 9), st.binary(max_size=200)),
    st.builds(
        part_of, st.tuples(*SAID), st.integers(1, (1 << 16) - 1), U16, st.binary(max_size=200)
    ),
)


@given(RECORDS)
def test_a_record_comes_back(record: LogRecord) -> None:
    assert envelope.decode(envelope.encode(record), LOG, 0) == record


@given(record=RECORDS, at=st.integers(0, 1 << 20), change=st.integers(1, 255))
def test_no_changed_byte_gets_by(record: LogRecord, at: int, change: int) -> None:
    data = bytearray(envelope.encode(record))
    data[at % len(data)] ^= change
    with pytest.raises(RecordDamageError):
        envelope.decode(bytes(data), LOG, 0)


@given(frame=st.binary(min_size=HEADER_BYTES, max_size=500), part_bytes=st.integers(64, 600))
def test_a_frame_is_split_and_joined(frame: bytes, part_bytes: int) -> None:
    parts = envelope.split(frame, node=1, epoch=1, clock_ms=0, part_bytes=part_bytes)
    assert envelope.join(list(parts)) == frame


def parts_of(node: int, epoch: int, first_seq: int, part_bytes: int) -> list[FramePart]:
    frame = encode(
        LogKind.MESSAGE,
        bytes(2 * DTYPES[LogKind.MESSAGE].itemsize),
        b"",
        first_seq=first_seq,
        last_seq=first_seq + 1,
        created_ms=0,
        stamp=STAMP,
    )
    parts = envelope.split(frame, node=node, epoch=epoch, clock_ms=0, part_bytes=part_bytes)
    return list(parts)


@st.composite
def logs(draw: st.DrawFn) -> list[LogRecord]:
    """Mostly what an owner would write; at times what was late, repeated, cut or of another."""
    office = Office(LOG, STAMP)
    records: list[LogRecord] = []
    for _ in range(draw(st.integers(1, 25))):
        state = office.state
        what = draw(st.sampled_from(("claim", "frame", "frame", "frame", "beat", "release", "old")))
        is_off = draw(st.integers(0, 3)) == 0
        node, epoch = max(1, state.owner), max(1, state.epoch)
        off = draw(st.sampled_from((-1, 1))) if is_off else 0
        added: list[LogRecord]
        if what == "claim":
            after = state.last_offset + draw(st.sampled_from((0, off)))
            added = [Claim(draw(st.integers(1, 3)), max(1, state.epoch + 1 + off), 0, after, "")]
        elif what == "frame":
            first_seq = max(1, state.next_seq + 2 * off)
            parts = parts_of(node, epoch, first_seq, draw(st.sampled_from((64, 100, 400))))
            added = list(parts[: draw(st.integers(1, len(parts)))] if is_off else parts)
            if is_off:
                # A part is there twice, or something stands between.
                position = draw(st.integers(0, len(added)))
                other = Beat(draw(st.integers(1, 2)), epoch, 0, 0, 0, 0)
                added.insert(position, draw(st.sampled_from([other, *added, *parts])))
        elif what == "beat":
            added = [Beat(max(1, node + off), epoch, 0, 0, 0, 0)]
        elif what == "release":
            added = [Release(node, max(1, epoch + off), 0, draw(st.integers(0, 3)))]
            parts_left = draw(st.integers(0, 3))
            for part in reversed(range(parts_left)):
                added.insert(0, LeasesPart(node, epoch, 0, part, parts_left, b""))
        else:
            added = [draw(st.sampled_from(records))] if records else []
        for record in added:
            office.apply(len(records), record)
            records.append(record)
    return records


@given(records=logs(), data=st.data())
def test_any_reader_comes_to_the_same_verdict(
    records: list[LogRecord], data: st.DataObject
) -> None:
    right = verdicts(records)
    office = Office(LOG, STAMP)
    states = [office.checkpoint()]
    for offset, record in enumerate(records):
        assert office.apply(offset, record) is right[offset]
        states.append(office.checkpoint())
    start = OfficeState.unpack(data.draw(st.sampled_from(states)).pack())
    assert start is not None
    reader = Office(LOG, STAMP, start)
    for offset in range(start.next_offset, len(records)):
        assert reader.apply(offset, records[offset]) is right[offset]
    assert reader.state == office.state


@given(logs())
def test_complete_frames_take_each_seq_once(records: list[LogRecord]) -> None:
    next_seq, parts = 1, list[FramePart]()
    for record, verdict in zip(records, verdicts(records), strict=True):
        if isinstance(record, FramePart) and verdict is not RecordDecision.VOID:
            parts = [record] if record.part == 0 else [*parts, record]
            if verdict is RecordDecision.COMPLETES:
                assert envelope.join(parts) == envelope.join(parts_of(1, 1, next_seq, 400))
                next_seq += 2


@given(before=logs(), node=st.integers(1, 3), behind=st.integers(1, 30))
def test_a_claim_counts_only_behind_what_it_has_read(
    before: list[LogRecord], node: int, behind: int
) -> None:
    office = Office(LOG, STAMP)
    for offset, record in enumerate(before):
        office.apply(offset, record)
    state = office.state
    stale = Claim(node, state.epoch + 1, 0, state.last_offset - behind, "")
    assert office.apply(state.next_offset, stale) is RecordDecision.VOID
    fresh = Claim(node, state.epoch + 1, 0, state.last_offset, "")
    assert office.apply(state.next_offset + 1, fresh) is RecordDecision.COUNTS
