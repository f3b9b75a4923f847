"""Who holds the office: all that an owner appends, and when it is over."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from storage.errors import FencedError
from storage.frame import encode
from storage.replicated import envelope
from storage.replicated.envelope import PART_MAX_BYTES, Beat, Claim, FramePart, LeasesPart, Release
from storage.replicated.holder import LEASES_PARTS, Holder
from storage.replicated.lease import BEAT_MS, LEASE_MS, Tenure
from storage.replicated.office import Office, OfficeState, RecordDecision
from storage.rows import DTYPES, LogKind
from tests.unit.fakes import Stopwatch
from tests.world.storage.engine import AppendOutcome, MemoryLog

STAMP = 7


def frame_of(seq: int, payload: bytes = b"") -> bytes:
    return encode(
        LogKind.MESSAGE,
        bytes(DTYPES[LogKind.MESSAGE].itemsize),
        payload,
        first_seq=seq,
        last_seq=seq,
        created_ms=1,
        stamp=STAMP,
    )


class InOffice:
    """Node 1, from its claim on."""

    def __init__(self) -> None:
        self.origin = MemoryLog()
        self.stopwatch = Stopwatch()
        self.log = self.origin.another()
        office = Office(self.log.name, STAMP, OfficeState())
        claim = Claim(1, 1, 5, -1, "")
        self.log.append([envelope.encode(claim)])
        office.apply(0, claim)
        tenure = Tenure.of(office, 0, 0)
        assert tenure is not None
        self.holder = Holder(1, self.log, office, tenure, clock=lambda: 5, stopwatch=self.stopwatch)

    def records(self) -> list[envelope.LogRecord]:
        return [envelope.decode(data, "", at) for at, data in self.origin.read(0, 0)]

    def fold(self) -> list[RecordDecision]:
        office = Office("", STAMP)
        return [office.apply(at, one) for at, one in enumerate(self.records())]


def test_frames_of_any_length_count() -> None:
    one = InOffice()
    one.holder.append_frame(frame_of(1))
    one.holder.append_frame(frame_of(2, b"x" * (2 * PART_MAX_BYTES)))
    numbers = [record.part for record in one.records() if isinstance(record, FramePart)]
    assert numbers == [0, 0, 1, 2]
    assert one.fold().count(RecordDecision.COMPLETES) == 2
    assert one.holder.state.next_seq == 3
    assert one.holder.claimed.next_seq == 1


def test_it_beats_when_it_has_said_nothing_for_a_time() -> None:
    one = InOffice()
    assert not one.holder.beat()
    one.stopwatch.shows_ms = BEAT_MS
    one.holder.filed_seq, one.holder.settled_offset = 8, 9
    assert one.holder.beat() and not one.holder.beat()
    assert one.records()[1:] == [Beat(1, 1, 5, 8, 9, 0)]


def test_a_live_hour_is_said_at_once_and_once() -> None:
    one = InOffice()
    one.holder.tell_live(77)
    one.holder.tell_live(77)
    one.holder.tell_live(76)
    assert one.records()[1:] == [Beat(1, 1, 5, 0, 0, 77)]


def test_what_was_said_elsewhere_is_confirmed_by_a_record_that_was_sent_behind_it() -> None:
    one = InOffice()
    one.stopwatch.shows_ms = 7
    one.holder.confirm()
    assert len(one.records()) == 2
    one.origin.another().append([envelope.encode(Claim(2, 2, 5, 1, ""))])
    with pytest.raises(FencedError, match="expected at offset 2, and it is at 3"):
        one.holder.confirm()
    with pytest.raises(FencedError, match="not in office any more"):
        one.holder.confirm()


def test_a_group_that_is_sent_meanwhile_confirms_as_well() -> None:
    one = InOffice()
    before = one.holder._begun_total

    class Lock:
        """Another thread has it first, and appends a frame."""

        def __enter__(self) -> None:
            if one.holder._begun_total == before:
                one.holder._append([Beat(1, 1, 5, 0, 0, 0)])

        def __exit__(self, *exception: object) -> None: ...

    one.holder._lock = Lock()  # type: ignore[assignment]
    one.holder.confirm()
    assert len(one.records()) == 2


def test_deliveries_leave_while_the_lease_holds() -> None:
    one = InOffice()
    assert one.holder.may_deliver()
    one.stopwatch.shows_ms = LEASE_MS
    assert not one.holder.may_deliver()
    one.holder.beat()
    assert one.holder.may_deliver()


@pytest.mark.parametrize("outcome", [AppendOutcome.LOST, AppendOutcome.UNANSWERED])
def test_without_an_answer_it_is_over(outcome: AppendOutcome) -> None:
    one = InOffice()
    one.log.outcome = outcome
    with pytest.raises(FencedError, match="no answer came"):
        one.holder.append_frame(frame_of(1))
    assert not one.holder.may_deliver()
    with pytest.raises(FencedError, match="not in office any more"):
        one.holder.append_frame(frame_of(1))


def test_a_record_of_another_in_the_middle_of_a_frame_ends_it() -> None:
    one = InOffice()

    append = one.log.append

    def interrupted(records: Sequence[bytes]) -> list[int | None]:
        """Somebody else's record stands between the first part and the second."""
        (first,) = append(records[:1])
        one.origin.another().append([envelope.encode(Claim(2, 9, 5, -1, ""))])
        return [first, *append(records[1:])]

    one.log.append = interrupted  # type: ignore[method-assign]
    with pytest.raises(FencedError, match="expected at offset 2, and it is at 3"):
        one.holder.append_frame(frame_of(1, b"x" * PART_MAX_BYTES))
    assert RecordDecision.COMPLETES not in one.fold()


def test_who_leaves_has_left() -> None:
    one = InOffice()
    one.holder.leave(2)
    one.holder.leave(3)
    assert one.records()[1:] == [LeasesPart(1, 1, 5, 0, 1, b""), Release(1, 1, 5, 2)]
    assert not one.holder.may_deliver()
    with pytest.raises(FencedError):
        one.holder.append_frame(frame_of(1))


def test_leases_of_any_length_are_left() -> None:
    one = InOffice()
    one.holder.leases = leases = bytes(LEASES_PARTS * PART_MAX_BYTES + 1)
    one.holder.leave()
    *parts, release = one.records()[1:]
    assert envelope.join(parts) == leases  # type: ignore[arg-type]
    assert release == Release(1, 1, 5, 0)
    assert RecordDecision.VOID not in one.fold()


def test_an_owner_that_knows_no_leases_leaves_none() -> None:
    one = InOffice()
    one.holder.leases = None
    one.holder.leave()
    assert one.records()[1:] == [Release(1, 1, 5, 0)]


@pytest.mark.parametrize("outcome", [AppendOutcome.LOST, AppendOutcome.UNANSWERED])
def test_an_owner_whose_leases_are_not_answered_does_not_say_that_it_leaves(
    outcome: AppendOutcome,
) -> None:
    one = InOffice()
    one.log.outcome = outcome
    one.holder.leave()
    assert not one.holder.may_deliver()
    assert not any(isinstance(record, Release) for record in one.records())
