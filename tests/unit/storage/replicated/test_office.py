"""The verdict on each record of a replicated log, and the state that a checkpoint keeps of it."""

import numpy as np
import pytest

from storage.errors import FormatVersionError, OffsetGapError, RecordDamageError
from storage.frame import HEADER_BYTES, crc32c, encode
from storage.replicated.envelope import (
    Adopt,
    Beat,
    Claim,
    FramePart,
    LeasesPart,
    LogRecord,
    Release,
    split,
)
from storage.replicated.office import Office, OfficeState, RecordDecision
from storage.rows import DTYPES, LogKind

LOG, STAMP = "ds.log/3", 7
VOID, COUNTS, COMPLETES = RecordDecision


def claim(node: int, epoch: int, after: int) -> Claim:
    return Claim(node, epoch, 100 * epoch, after, "")


def beat(node: int, epoch: int, clock_ms: int = 5) -> Beat:
    return Beat(node, epoch, clock_ms, 0, 0, 0)


def release(node: int, epoch: int, successor: int = 0) -> Release:
    return Release(node, epoch, 5, successor)


def leases(part: int, parts: int, *, node: int = 1, epoch: int = 1) -> LeasesPart:
    return LeasesPart(node, epoch, 5, part, parts, b"leases")


def frame_of(
    first_seq: int,
    last_seq: int,
    *,
    kind: LogKind = LogKind.MESSAGE,
    stamp: int = STAMP,
) -> bytes:
    rows = np.zeros(last_seq - first_seq + 1, DTYPES[kind]).tobytes()
    return encode(
        kind, rows, b"", first_seq=first_seq, last_seq=last_seq, created_ms=1, stamp=stamp
    )


def parts_of(node: int, epoch: int, frame: bytes, count: int = 1) -> list[FramePart]:
    part_bytes = max(HEADER_BYTES, -(-len(frame) // count))
    parts = list(split(frame, node=node, epoch=epoch, clock_ms=5, part_bytes=part_bytes))
    assert len(parts) == count
    return parts


def whole(node: int, epoch: int, first_seq: int, last_seq: int = 0) -> FramePart:
    (part,) = parts_of(node, epoch, frame_of(first_seq, last_seq or first_seq))
    return part


def judged(*records: LogRecord) -> tuple[Office, list[RecordDecision]]:
    office = Office(LOG, STAMP)
    return office, [office.apply(offset, record) for offset, record in enumerate(records)]


def test_an_owner_writes_and_leaves() -> None:
    office, verdicts = judged(
        claim(1, 1, -1), whole(1, 1, 1, 3), beat(1, 1), whole(1, 1, 4), release(1, 1, 2)
    )
    assert verdicts == [COUNTS, COMPLETES, COUNTS, COMPLETES, COUNTS]
    assert office.state == OfficeState(
        next_offset=5, epoch=1, owner=0, successor=2, next_seq=5, last_offset=4, clock_ms=5,
        claim_offset=0, frame_epoch=1, chain=office.state.chain,
    )  # fmt: skip
    assert office.state.chain


def test_nobody_writes_before_a_claim_or_in_a_vacant_office() -> None:
    _, verdicts = judged(
        beat(1, 1), whole(1, 1, 1), release(1, 1),
        claim(1, 1, -1), release(1, 1), beat(1, 1), whole(1, 1, 1), release(1, 1),
    )  # fmt: skip
    assert verdicts == [VOID, VOID, VOID, COUNTS, COUNTS, VOID, VOID, VOID]


def test_of_two_claims_the_first_one_wins() -> None:
    office, verdicts = judged(claim(1, 1, -1), claim(2, 2, 0), claim(3, 2, 0), beat(3, 2))
    assert verdicts == [COUNTS, COUNTS, VOID, VOID]
    assert (office.state.owner, office.state.epoch, office.state.claim_offset) == (2, 2, 1)


@pytest.mark.parametrize("epoch", [1, 3])
def test_a_claim_of_another_epoch_is_void(epoch: int) -> None:
    assert judged(claim(1, 1, -1), claim(2, epoch, 0))[1] == [COUNTS, VOID]


@pytest.mark.parametrize("after", [-1, 0, 2, 1 << 40])
def test_a_claim_names_the_last_record_that_counts(after: int) -> None:
    _, verdicts = judged(claim(1, 1, -1), beat(1, 1), beat(9, 1), claim(2, 2, after))
    assert verdicts == [COUNTS, COUNTS, VOID, VOID]


def test_a_void_record_behind_the_last_one_hinders_no_claim() -> None:
    _, verdicts = judged(claim(1, 1, -1), beat(1, 1), beat(9, 1), claim(2, 2, 1))
    assert verdicts == [COUNTS, COUNTS, VOID, COUNTS]


def test_anybody_claims_a_vacant_office_but_has_to_know_it() -> None:
    left = (claim(1, 1, -1), release(1, 1, 2))
    office, verdicts = judged(*left, claim(3, 2, 0), claim(3, 2, 1))
    assert verdicts == [COUNTS, COUNTS, VOID, COUNTS]
    assert (office.state.owner, office.state.successor) == (3, 0)


def test_what_a_former_owner_writes_is_void() -> None:
    _, verdicts = judged(
        claim(1, 1, -1), claim(2, 2, 0), whole(1, 1, 1), beat(1, 1), release(1, 1),
        whole(1, 2, 1), whole(2, 2, 1),
    )  # fmt: skip
    assert verdicts == [COUNTS, COUNTS, VOID, VOID, VOID, VOID, COMPLETES]


@pytest.mark.parametrize("first_seq", [1, 2, 4])
def test_a_frame_begins_at_the_next_seq(first_seq: int) -> None:
    office, verdicts = judged(claim(1, 1, -1), whole(1, 1, 1, 2), whole(1, 1, first_seq, 5))
    assert verdicts == [COUNTS, COMPLETES, VOID]
    assert office.state.next_seq == 3


def test_the_last_part_completes_a_frame() -> None:
    parts = parts_of(1, 1, frame_of(1, 4), 3)
    office, verdicts = judged(claim(1, 1, -1), *parts, whole(1, 1, 5))
    assert verdicts == [COUNTS, COUNTS, COUNTS, COMPLETES, COMPLETES]
    assert office.state.next_seq == 6


def test_a_claim_between_two_parts_ends_the_frame() -> None:
    first, second, third = parts_of(1, 1, frame_of(1, 4), 3)
    office, verdicts = judged(
        claim(1, 1, -1), first, second, claim(2, 2, 1), claim(2, 2, 2), third, whole(2, 2, 1)
    )
    assert verdicts == [COUNTS, COUNTS, COUNTS, VOID, COUNTS, VOID, COMPLETES]
    assert office.state.next_seq == 2


@pytest.mark.parametrize(
    "between", [claim(2, 2, 0), beat(1, 1), beat(2, 1), parts_of(1, 1, frame_of(1, 4), 3)[1]]
)
def test_anything_between_two_parts_ends_the_frame(between: LogRecord) -> None:
    first, second, third = parts_of(1, 1, frame_of(1, 4), 3)
    office, verdicts = judged(claim(1, 1, -1), first, second, between, third)
    assert verdicts[-1] is VOID
    assert office.state.next_seq == 1
    assert office.checkpoint() == office.state


def test_a_frame_that_was_ended_can_be_written_again() -> None:
    parts = parts_of(1, 1, frame_of(1, 4), 3)
    office, verdicts = judged(claim(1, 1, -1), *parts[:2], *parts, parts[2])
    assert verdicts == [COUNTS, COUNTS, COUNTS, COUNTS, COUNTS, COMPLETES, VOID]
    assert office.state.next_seq == 5


def test_a_part_of_another_count_belongs_to_none() -> None:
    first, _, _ = parts_of(1, 1, frame_of(1, 4), 3)
    _, second = parts_of(1, 1, frame_of(1, 4), 2)
    assert judged(claim(1, 1, -1), first, second)[1] == [COUNTS, COUNTS, VOID]


def test_the_clock_is_that_of_the_last_record_that_counts() -> None:
    office, _ = judged(claim(1, 1, -1), beat(1, 1, 800), beat(2, 1, 900))
    assert office.state.clock_ms == 800


@pytest.mark.parametrize("offset", [0, 2])
def test_a_gap_is_named_and_nothing_is_applied(offset: int) -> None:
    office, _ = judged(claim(1, 1, -1))
    before = office.state
    with pytest.raises(
        OffsetGapError, match=rf"ds.log/3 at offset {offset}: offset 1 was expected"
    ):
        office.apply(offset, beat(1, 1))
    assert office.state == before


@pytest.mark.parametrize(
    "frame",
    [
        bytes(80),
        frame_of(1, 1)[:63],
        frame_of(1, 1, stamp=8),
        frame_of(1, 1, kind=LogKind.SCHEDULE),
        frame_of(1, 1)[:-8],
        frame_of(1, 1) + bytes(8),
        encode(LogKind.MESSAGE, bytes(80), b"", first_seq=1, last_seq=0, created_ms=1, stamp=STAMP),
    ],
)
def test_what_counts_and_is_no_frame_is_damage(frame: bytes) -> None:
    office, _ = judged(claim(1, 1, -1))
    before = office.state
    with pytest.raises(RecordDamageError, match=r"ds\.log/3 at offset 1"):
        office.apply(1, FramePart(1, 1, 5, 0, 1, frame))
    assert office.state == before
    assert office.apply(1, FramePart(2, 1, 5, 0, 1, frame)) is VOID


def test_a_frame_of_a_newer_server_is_named() -> None:
    office, _ = judged(claim(1, 1, -1))
    head = bytearray(frame_of(1, 1))
    head[4] = 9
    head[60:64] = crc32c(bytes(head[:60])).to_bytes(4, "little")
    with pytest.raises(FormatVersionError, match=r"ds\.log/3 at offset 1"):
        office.apply(1, FramePart(1, 1, 5, 0, 1, bytes(head)))


def test_a_checkpoint_within_a_frame_stands_before_it() -> None:
    parts = parts_of(1, 1, frame_of(1, 4), 3)
    office, _ = judged(claim(1, 1, -1), *parts[:2])
    state = office.checkpoint()
    assert (state.next_offset, state.last_offset, state.next_seq) == (1, 0, 1)
    again = Office(LOG, STAMP, state)
    found = [again.apply(offset, part) for offset, part in enumerate(parts, 1)]
    assert found == [COUNTS, COUNTS, COMPLETES]
    assert office.apply(3, parts[2]) is COMPLETES
    assert again.state == office.state == office.checkpoint()


def test_a_state_comes_back() -> None:
    state = OfficeState(1 << 40, 0xFFFFFFFF, 65535, 65534, 1 << 63, -1, 5, -6, 7, 8)
    assert OfficeState.unpack(state.pack()) == state
    assert OfficeState.unpack(state.pack()[:-1]) is None
    assert OfficeState.unpack(b"") is None
    # As clusters have it that were made before there was a chain.
    assert OfficeState.unpack(state.pack()[:-4]) == state._replace(chain=0)


# ── a log that has lost its end ────────────────────────────────────────────────────────────────


def adopt(node: int, epoch: int, end: int, next_seq: int = 9) -> Adopt:
    return Adopt(node, epoch, 70, end, next_seq, 4, 77, 0, 0)


def test_the_log_goes_on_behind_a_replica_that_people_have_named() -> None:
    office, verdicts = judged(
        claim(1, 1, -1), whole(1, 1, 1), adopt(2, 7, 2), beat(1, 1), claim(2, 8, 2),
        whole(2, 8, 2), whole(2, 8, 9),
    )  # fmt: skip
    assert verdicts == [COUNTS, COMPLETES, COUNTS, VOID, COUNTS, VOID, COMPLETES]
    assert (office.state.next_seq, office.state.epoch, office.state.owner) == (10, 8, 2)


def test_whatever_was_read_before_it_the_state_behind_it_is_the_same() -> None:
    short, _ = judged(claim(1, 1, -1), whole(1, 1, 1), adopt(2, 7, 2))
    other, _ = judged(claim(3, 1, -1), claim(4, 2, 0), adopt(2, 7, 2))
    assert short.state == other.state
    assert short.state == OfficeState(
        next_offset=3, epoch=7, owner=2, next_seq=9, last_offset=2, claim_offset=2, clock_ms=70,
        frame_epoch=4, chain=77,
    )  # fmt: skip


@pytest.mark.parametrize("end", [0, 1, 3])
def test_it_counts_at_the_end_that_people_have_seen_and_nowhere_else(end: int) -> None:
    office, verdicts = judged(claim(1, 1, -1), whole(1, 1, 1), adopt(2, 7, end), beat(1, 1))
    assert verdicts == [COUNTS, COMPLETES, VOID, COUNTS]
    assert (office.state.owner, office.state.next_seq) == (1, 2)


def test_it_ends_a_frame_that_was_not_complete() -> None:
    first, second = parts_of(1, 1, frame_of(1, 40), 2)
    office, verdicts = judged(claim(1, 1, -1), first, adopt(1, 7, 2), second)
    assert verdicts == [COUNTS, COUNTS, COUNTS, VOID]
    assert office.checkpoint() == office.state


def test_the_same_frames_have_the_same_chain_and_others_another() -> None:
    one, _ = judged(claim(1, 1, -1), whole(1, 1, 1), whole(1, 1, 2))
    two, _ = judged(claim(1, 1, -1), whole(1, 1, 1), claim(2, 2, 1), beat(1, 1), whole(2, 2, 2))
    longer, _ = judged(claim(1, 1, -1), whole(1, 1, 1, 2))
    assert one.state.next_seq == longer.state.next_seq
    assert one.state.chain == two.state.chain != longer.state.chain


def test_leases_count_if_their_writer_is_in_office() -> None:
    _, verdicts = judged(
        leases(0, 1), claim(1, 1, -1), leases(0, 2), leases(1, 2), leases(0, 1, node=2),
        leases(0, 1, epoch=2), release(1, 1), leases(0, 1),
    )  # fmt: skip
    assert verdicts == [VOID, COUNTS, COUNTS, COUNTS, VOID, VOID, COUNTS, VOID]


def test_a_checkpoint_stands_before_the_leases_until_the_next_claim() -> None:
    office, _ = judged(claim(1, 1, -1), beat(1, 1))
    before = office.state
    left: list[LogRecord] = [leases(0, 2), leases(1, 2), release(1, 1), beat(9, 9)]
    for offset, record in enumerate(left, 2):
        office.apply(offset, record)
        assert office.checkpoint() == before
        assert office.frame_place() == office.state
    assert office.apply(6, claim(2, 2, 4)) is COUNTS
    assert office.checkpoint() == office.state


def test_leases_of_an_owner_that_goes_on_hold_up_no_checkpoint() -> None:
    office, _ = judged(claim(1, 1, -1), leases(0, 1), beat(1, 1))
    assert office.checkpoint() == office.state
