"""R1, R2, R3 and R7: who may answer, deliver and claim."""

import pytest

from storage.replicated.envelope import Adopt, Beat, Claim, Release
from storage.replicated.lease import (
    BEAT_MS,
    CLOCKS_MS,
    LEASE_MS,
    MARGIN_MS,
    OWNER_MS,
    RANK_MS,
    Follower,
    Tenure,
)
from storage.replicated.office import Office, OfficeState, RecordDecision

VOID, COUNTS, _ = RecordDecision
WALL_MS = 1_800_000_000_000
OCCUPIED = OfficeState(next_offset=5, epoch=1, owner=1)
BEAT = Beat(1, 1, 0, 0, 0, 0)
LEASE_OF_OWNER_MS = LEASE_MS - MARGIN_MS


def in_office(sent_ms: int = 1000) -> tuple[Office, Tenure]:
    """Node 1 is in office, since offset 0."""
    office = Office("ds.log/3", 7)
    assert office.apply(0, Claim(1, 1, 0, -1, "")) is COUNTS
    tenure = Tenure.of(office, 0, sent_ms)
    assert tenure is not None
    return office, tenure


@pytest.mark.parametrize("owner_ms_per_s", [850, 1000, 1150])
@pytest.mark.parametrize("late_ms", [0, 700])
def test_one_owner_at_a_time_delivers(owner_ms_per_s: int, late_ms: int) -> None:
    """The stopwatch of the owner runs slower or faster than that of the node that waits."""
    _, tenure = in_office(0)
    assert tenure.appended(BEAT, 1, sent_ms=0)
    follower = Follower(2, 0, 0)
    follower.read(BEAT, COUNTS, late_ms, 0)
    holders = set()
    for now_ms in range(late_ms, 2 * LEASE_MS, 10):
        is_owner = tenure.holds(now_ms * owner_ms_per_s // 1000)
        holders.add((is_owner, follower.may_claim(OCCUPIED, 5, now_ms, WALL_MS)))
    assert holders == {(True, False), (False, False), (False, True)}


def test_a_lease_counts_from_the_sending() -> None:
    _, tenure = in_office(1000)
    assert tenure.holds(1000 + LEASE_OF_OWNER_MS - 1)
    assert not tenure.holds(1000 + LEASE_OF_OWNER_MS)
    assert tenure.beat_due_ms == 1000 + BEAT_MS
    assert tenure.appended(BEAT, 1, sent_ms=1400)
    assert tenure.holds(1400 + LEASE_OF_OWNER_MS - 1)
    assert not tenure.holds(1400 + LEASE_OF_OWNER_MS)
    assert tenure.beat_due_ms == 1400 + BEAT_MS


def test_a_lease_that_ran_out_comes_back_with_the_next_record() -> None:
    _, tenure = in_office(0)
    assert not tenure.holds(9000)
    assert tenure.appended(BEAT, 1, sent_ms=9000)
    assert tenure.holds(9001)


@pytest.mark.parametrize("offset", [None, 0, 2])
def test_another_offset_than_the_next_one_is_unknown(offset: int | None) -> None:
    office, tenure = in_office()
    before = office.state
    assert not tenure.appended(BEAT, offset, 1100)
    assert office.state == before
    assert tenure.is_over and not tenure.holds(1100)
    assert not tenure.appended(BEAT, 1, 1200)


def test_what_was_read_meanwhile_is_expected() -> None:
    office, tenure = in_office()
    assert office.apply(1, Beat(9, 1, 0, 0, 0, 0)) is VOID
    assert tenure.appended(BEAT, 2, 1100)


def test_a_later_claim_ends_the_tenure() -> None:
    office, tenure = in_office()
    assert office.apply(1, Claim(1, 2, 0, 0, "")) is COUNTS
    assert tenure.is_over and not tenure.holds(1001)
    assert not tenure.appended(BEAT, 2, 1100)


def test_who_leaves_has_no_lease_before_it_says_so() -> None:
    office, tenure = in_office()
    tenure.end()
    assert tenure.is_over and not tenure.holds(1001)
    assert office.apply(1, Release(1, 1, 0, 0)) is COUNTS


def test_a_claim_is_known_by_its_offset() -> None:
    """An earlier process of the same node has sent the one that counts."""
    office = Office("ds.log/3", 7)
    office.apply(0, Claim(1, 1, 0, -1, ""))
    assert office.apply(1, Claim(1, 1, 0, -1, "")) is VOID
    assert Tenure.of(office, 1, 0) is None
    assert Tenure.of(office, 0, 0) is not None


def test_a_claim_of_an_office_that_is_vacant_again_is_no_tenure() -> None:
    office, _ = in_office()
    office.apply(1, Release(1, 1, 0, 0))
    assert Tenure.of(office, 0, 0) is None


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_follower_waits_for_silence_and_its_rank(rank: int) -> None:
    follower = Follower(2, rank, 0)
    follower.read(BEAT, COUNTS, 400, 0)
    follower.read(BEAT, VOID, 900, 0)
    due_ms = 400 + LEASE_MS + rank * RANK_MS
    assert not follower.is_due(OCCUPIED, due_ms - 1)
    assert not follower.may_claim(OCCUPIED, 5, due_ms - 1, WALL_MS)
    assert follower.is_due(OCCUPIED, due_ms)
    assert follower.may_claim(OCCUPIED, 5, due_ms, WALL_MS)
    follower.rank += 1
    assert not follower.is_due(OCCUPIED, due_ms), "another goes before it now"


def test_who_is_to_go_behind_others_waits_for_them_too() -> None:
    follower = Follower(2, 1, 0)
    follower.rank = 4
    assert not follower.may_claim(OCCUPIED, 5, LEASE_MS + 4 * RANK_MS - 1, WALL_MS)
    assert follower.may_claim(OCCUPIED, 5, LEASE_MS + 4 * RANK_MS, WALL_MS)
    vacant = OfficeState(next_offset=5, epoch=1)
    assert not follower.may_claim(vacant, 5, 4 * RANK_MS - 1, WALL_MS)
    wanted = OfficeState(next_offset=5, epoch=1, successor=2)
    assert follower.may_claim(wanted, 5, 0, WALL_MS), "who is wanted comes first all the same"
    follower.rank = 1
    assert follower.may_claim(OCCUPIED, 5, LEASE_MS + RANK_MS, WALL_MS)


def test_who_has_just_started_waits_as_well() -> None:
    follower = Follower(2, 0, 7000)
    assert not follower.may_claim(OCCUPIED, 5, 7000 + LEASE_MS - 1, WALL_MS)
    assert follower.may_claim(OCCUPIED, 5, 7000 + LEASE_MS, WALL_MS)


def test_who_is_behind_does_not_claim() -> None:
    follower = Follower(2, 0, 0)
    assert not follower.may_claim(OCCUPIED, 6, LEASE_MS, WALL_MS)
    assert follower.may_claim(OCCUPIED, 5, LEASE_MS, WALL_MS)


def test_who_does_not_know_where_the_log_ends_waits_anew() -> None:
    follower = Follower(2, 0, 0)
    assert not follower.may_claim(OCCUPIED, None, LEASE_MS, WALL_MS)
    assert not follower.may_claim(OCCUPIED, 5, 2 * LEASE_MS - 1, WALL_MS)
    assert follower.may_claim(OCCUPIED, 5, 2 * LEASE_MS, WALL_MS)


@pytest.mark.parametrize(("successor", "waits_ms"), [(0, 2 * RANK_MS), (7, 0), (8, 3 * RANK_MS)])
def test_in_a_vacant_office_the_one_who_is_wanted_comes_first(
    successor: int, waits_ms: int
) -> None:
    vacant = OfficeState(next_offset=5, epoch=1, successor=successor)
    follower = Follower(7, 2, 0)
    assert follower.may_claim(vacant, 5, waits_ms, WALL_MS)
    assert not follower.may_claim(vacant, 5, waits_ms - 1, WALL_MS)


# ── R7 ─────────────────────────────────────────────────────────────────────────────────────────


def after_reading(lags_ms: list[int], *, is_fresh: bool = True, step_ms: int = BEAT_MS) -> Follower:
    """One that has read records whose clocks were behind its own by so much."""
    follower = Follower(2, 0, 0)
    for index, lag_ms in enumerate(lags_ms):
        now_ms = 1000 + index * step_ms
        if is_fresh:
            follower.read_all(now_ms - 1)
        follower.read(BEAT, COUNTS, now_ms, lag_ms)
    return follower


def claims_later(follower: Follower) -> bool:
    return follower.may_claim(OCCUPIED, 5, 100_000, WALL_MS)


@pytest.mark.parametrize("lag_ms", [CLOCKS_MS + 1, -CLOCKS_MS - 1])
def test_a_node_with_another_clock_does_not_claim(lag_ms: int) -> None:
    follower = after_reading([lag_ms] * 4)
    assert follower.clock_differs(OCCUPIED, WALL_MS)
    assert not claims_later(follower)


@pytest.mark.parametrize("lag_ms", [CLOCKS_MS, -CLOCKS_MS])
def test_a_clock_may_differ_a_little(lag_ms: int) -> None:
    follower = after_reading([lag_ms] * 4)
    assert not follower.clock_differs(OCCUPIED, WALL_MS)
    assert claims_later(follower)


@pytest.mark.parametrize("behind_ms", [0, CLOCKS_MS, CLOCKS_MS + 1, 3_600_000])
def test_a_clock_that_is_behind_the_last_record_is_another_one(behind_ms: int) -> None:
    """A node that has just started was not there to compare."""
    ahead = OCCUPIED._replace(clock_ms=WALL_MS + behind_ms)
    follower = Follower(2, 0, 0)
    assert follower.clock_differs(ahead, WALL_MS) == (behind_ms > CLOCKS_MS)
    assert follower.may_claim(ahead, 5, LEASE_MS, WALL_MS) == (behind_ms <= CLOCKS_MS)
    assert follower.may_claim(ahead, 5, LEASE_MS, WALL_MS + behind_ms), "time has passed"


def test_records_that_were_held_up_say_nothing_of_a_clock() -> None:
    assert claims_later(after_reading([5000, 5, 5000, 5000, 5000]))
    assert claims_later(after_reading([5000] * 9, step_ms=BEAT_MS // 4))
    assert not claims_later(after_reading([5000] * 13, step_ms=BEAT_MS // 4))


def test_what_was_there_before_says_nothing_of_a_clock() -> None:
    assert claims_later(after_reading([5000] * 9, is_fresh=False))


def test_a_clock_that_was_set_right_is_seen() -> None:
    follower = after_reading([-5000] * 4 + [5] * 15)
    assert follower.clock_differs(OCCUPIED, WALL_MS)
    assert not after_reading([-5000] * 4 + [5] * 16).clock_differs(OCCUPIED, WALL_MS)


def test_who_adopts_a_log_is_waited_for_since_its_disk_has_more() -> None:
    adopted = OCCUPIED._replace(epoch=5)
    for node, waits_ms in ((1, LEASE_MS), (2, OWNER_MS)):
        follower = Follower(node, 0, 0, waits_for_owner=True)
        follower.read_all(0)
        follower.read(BEAT, COUNTS, 1, 0)
        follower.read(Adopt(1, 5, 0, 4, 9, 1, 0, 0, 0), COUNTS, 100, 0)
        assert not follower.is_due(adopted, 100 + waits_ms - 1)
        assert follower.is_due(adopted, 100 + waits_ms)
