"""Who may not have claimed, delivered or leased."""

import pytest

from storage.replicated.lease import LEASE_MS, MARGIN_MS
from tests.chaos.ledger import ChaosLedger, Delivery, Pulled, Span
from tests.chaos.offices import CLOCK_MS, TRANSIT_MS, Tenure, broken_offices

SOON_MS = LEASE_MS - MARGIN_MS
NAMES = {1: "n1", 2: "n2"}
ID = "0000" + 32 * "1"


@pytest.fixture
def ledger():
    return ChaosLedger(1)


def tenures(claim_ms, *, is_released=False):
    """n1 was in office until 10000, and n2 claims."""
    first = Tenure(0, 1, 1, 0, 0, 10_000, is_released)
    return [first, Tenure(0, 2, 2, 99, claim_ms, claim_ms + 5000)]


def broken(some, ledger):
    return list(broken_offices(some, ledger, NAMES.__getitem__))


def test_who_claims_behind_the_lease_is_right(ledger):
    assert not broken(tenures(10_000 + SOON_MS), ledger)


def test_who_claims_within_the_lease_is_not(ledger):
    (what,) = broken(tenures(10_000 + SOON_MS - CLOCK_MS - 1), ledger)
    assert what.startswith("shard 0: n2 claimed epoch 2 24")


def test_who_has_left_may_be_followed_at_once(ledger):
    assert not broken(tenures(10_001, is_released=True), ledger)


@pytest.mark.parametrize(
    ("node", "at_ms", "is_right"),
    [
        ("n1", 10_000 + SOON_MS + TRANSIT_MS, True),
        ("n1", 10_000 + SOON_MS + TRANSIT_MS + 1, False),
        ("n2", 14_000, True),
        ("n2", 14_000 - CLOCK_MS - 1, False),
        ("n2", 10**9, True),  # It is the last one, so it may be there still.
        ("n3", 14_000, False),
    ],
)
def test_only_who_is_in_office_delivers(ledger, node, at_ms, is_right):
    ledger.deliveries.append(Delivery(at_ms, 0, node, ID))
    assert bool(broken(tenures(14_000), ledger)) != is_right


def test_who_thaws_may_deliver_late(ledger):
    ledger.deliveries.append(Delivery(20_000, 0, "n1", ID))
    ledger.thaws[0].append(Span(19_900, 22_900))
    assert not broken(tenures(14_000), ledger)


@pytest.mark.parametrize(("late_ms", "is_right"), [(TRANSIT_MS, True), (TRANSIT_MS + 1, False)])
def test_two_processes_do_not_lease_at_one_time(ledger, late_ms, is_right):
    ledger.pulls += [
        Pulled(100, 0, "a"),
        Pulled(200, 0, "b"),
        Pulled(200 + late_ms, 0, "a"),
        Pulled(300 + late_ms, 0, "b"),
    ]
    assert bool(broken(tenures(14_000), ledger)) != is_right
