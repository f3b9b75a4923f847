"""Leases: held until they are acknowledged, given back or over; once each."""

from __future__ import annotations

import pytest

from delayserver.delivery.leases import Leases
from delayserver.message import Delivery
from delayserver.timeouts import Timeouts
from tests.unit.fakes import delivery


class Parts:
    """Leases, and what of them is over."""

    def __init__(self, epoch: str = "e1") -> None:
        self.timeouts = Timeouts(0)
        self.over: list[Delivery] = []
        self.leases = Leases(epoch, self.timeouts, self.over.extend)

    def expire(self, now_ms: int) -> list[int]:
        """Let time pass; the seqs of what expired."""
        self.timeouts.advance(now_ms)
        over = [delivery.entry.seq for delivery in self.over]
        self.over.clear()
        return over


@pytest.fixture
def parts() -> Parts:
    return Parts()


@pytest.fixture
def leases(parts: Parts) -> Leases:
    return parts.leases


def of(*seqs: int) -> list[Delivery]:
    return [delivery(seq) for seq in seqs]


def test_every_delivery_has_a_token_of_its_own(leases: Leases) -> None:
    deliveries = of(1, 2, 3)
    tokens = leases.grant(deliveries, 100) + leases.grant(of(4), 100)
    assert len(set(tokens)) == 4
    assert leases.get(tokens[1]) is deliveries[1]
    assert leases.count() == 4


def test_a_lease_is_good_for_its_own_subscription_only(leases: Leases) -> None:
    [one] = of(1)
    [token] = leases.grant([one], 100)
    assert leases.end(token, one.subscription_id + 1) is None
    assert not leases.extend(token, 200, one.subscription_id + 1)
    assert leases.extend(token, 200, one.subscription_id)
    assert leases.end(token, one.subscription_id) is one


def test_a_lease_ends_once(leases: Leases) -> None:
    first, second = of(1, 2)
    tokens = leases.grant([first, second], 100)
    assert leases.end(tokens[0]) is first
    assert leases.end(tokens[0]) is leases.get(tokens[0]) is None
    assert leases.end(tokens[1]) is second
    assert leases.end(tokens[1]) is None
    assert leases.count() == 0


def test_leases_expire_at_their_deadline_and_once(parts: Parts) -> None:
    leases = parts.leases
    tokens = leases.grant(of(1, 2), 100)
    leases.grant(of(3), 200)
    leases.end(tokens[0])
    assert parts.expire(99) == []
    assert parts.expire(100) == [2]
    assert leases.end(tokens[1]) is None
    assert parts.expire(150) == []
    assert parts.expire(1000) == [3]
    assert parts.timeouts.size() == 0
    assert leases.count() == 0


def test_a_pull_that_is_done_leaves_no_timeout(parts: Parts) -> None:
    tokens = parts.leases.grant(of(1, 2), 100)
    assert parts.timeouts.size() == 1
    for token in tokens:
        parts.leases.end(token)
    assert parts.timeouts.size() == 0


def test_an_extended_lease_expires_at_its_new_deadline(parts: Parts) -> None:
    leases = parts.leases
    first, second = leases.grant(of(1, 2), 100)
    parts.timeouts.look(50)
    assert leases.extend(first, 250)
    assert parts.expire(100) == [2]
    assert not leases.extend(second, 400)
    assert parts.expire(299) == []
    assert leases.get(first) is not None
    assert parts.expire(300) == [1]


def test_a_lease_may_be_shortened(parts: Parts) -> None:
    [token, other] = parts.leases.grant(of(1, 2), 300)
    assert parts.leases.extend(token, 100)
    assert parts.expire(100) == [1]
    assert parts.leases.get(other) is not None
    assert parts.expire(299) == []
    assert parts.expire(300) == [2]


def test_an_ended_lease_cannot_be_extended(parts: Parts) -> None:
    [token] = parts.leases.grant(of(1), 100)
    parts.leases.end(token)
    assert not parts.leases.extend(token, 300)
    assert parts.expire(300) == []


def test_a_lease_keeps_its_length_when_the_clock_is_set(parts: Parts) -> None:
    parts.leases.grant(of(1), 100)
    parts.timeouts.shift(1_000_000)
    assert parts.expire(1_000_099) == []
    assert parts.expire(1_000_100) == [1]


def test_a_lease_of_an_earlier_process_is_over(leases: Leases) -> None:
    [token] = leases.grant(of(1), 100)
    later = Parts("e2").leases
    later.grant(of(1), 100)
    assert later.end(token) is None
    assert not later.extend(token, 300)
    assert later.count() == 1


@pytest.mark.parametrize(
    "token", ["", "e1", "e1-", "e1-1", "e1-1-", "e1-1-1", "e1-1--1", "e1-2-0", "e1-x-0", "e1-1-x"]
)
def test_what_is_not_a_token_is_no_lease(leases: Leases, token: str) -> None:
    leases.grant(of(1), 100)
    assert leases.end(token) is None
    assert leases.count() == 1
