"""Leases: held until they are acknowledged, given back or over; once each."""

from __future__ import annotations

import pytest

from delayserver.delivery.leases import Leases
from delayserver.message import Delivery
from tests.unit.fakes import delivery


@pytest.fixture
def leases() -> Leases:
    return Leases("e1")


def of(*seqs: int) -> list[Delivery]:
    return [delivery(seq) for seq in seqs]


def seqs(deliveries: list[Delivery]) -> list[int]:
    return [delivery.entry.seq for delivery in deliveries]


def test_every_delivery_has_a_token_of_its_own(leases: Leases) -> None:
    deliveries = of(1, 2, 3)
    tokens = leases.grant(deliveries, 100) + leases.grant(of(4), 100)
    assert len(set(tokens)) == 4
    assert leases.get(tokens[1]) is deliveries[1]
    assert leases.count() == 4


def test_a_lease_ends_once(leases: Leases) -> None:
    first, second = of(1, 2)
    tokens = leases.grant([first, second], 100)
    assert leases.end(tokens[0]) is first
    assert leases.end(tokens[0]) is leases.get(tokens[0]) is None
    assert leases.end(tokens[1]) is second
    assert leases.end(tokens[1]) is None
    assert leases.count() == 0


def test_leases_expire_at_their_deadline_and_once(leases: Leases) -> None:
    tokens = leases.grant(of(1, 2), 100)
    leases.grant(of(3), 200)
    leases.end(tokens[0])
    assert leases.next_ms() == 100
    assert leases.expire(99) == []
    assert seqs(leases.expire(100)) == [2]
    assert leases.end(tokens[1]) is None
    assert leases.expire(150) == []
    assert leases.next_ms() == 200
    assert seqs(leases.expire(1000)) == [3]
    assert leases.next_ms() is None
    assert leases.count() == 0


def test_an_extended_lease_expires_at_its_new_deadline(leases: Leases) -> None:
    first, second = leases.grant(of(1, 2), 100)
    assert leases.extend(first, 300)
    assert seqs(leases.expire(100)) == [2]
    assert not leases.extend(second, 400)
    assert leases.expire(299) == []
    assert leases.get(first) is not None
    assert leases.next_ms() == 300
    assert seqs(leases.expire(300)) == [1]


def test_a_lease_may_be_shortened(leases: Leases) -> None:
    [token] = leases.grant(of(1), 300)
    assert leases.extend(token, 100)
    assert leases.next_ms() == 100
    assert seqs(leases.expire(100)) == [1]
    assert leases.expire(300) == []


def test_an_ended_lease_cannot_be_extended(leases: Leases) -> None:
    [token] = leases.grant(of(1), 100)
    leases.end(token)
    assert not leases.extend(token, 300)
    assert leases.expire(300) == []


def test_a_lease_of_an_earlier_process_is_over(leases: Leases) -> None:
    [token] = leases.grant(of(1), 100)
    later = Leases("e2")
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
