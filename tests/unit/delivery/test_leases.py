"""Leases: held until they are acknowledged, given back or over; once each."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from delayserver.delivery.delayed_fetch import Pulled
from delayserver.delivery.leases import Leases, epoch_of, shard_of_lease
from delayserver.records.message import DueDelivery
from delayserver.timers.timeouts import Timeouts
from tests.unit.fakes import Stopwatch, deliveries, delivery


class Parts:
    """Leases, and what of them is over."""

    def __init__(self, epoch: str = "e1") -> None:
        self.stopwatch = Stopwatch()
        self.timeouts = Timeouts(self.stopwatch)
        self.over: list[DueDelivery] = []
        self.leases = Leases(epoch, self.timeouts, lambda some: self.over.extend(some.each()))

    def grant(self, seqs: Iterable[int], lease_ms: int, subscription_id: int = 1) -> list[str]:
        """Lease deliveries; returns their tokens."""
        ones = [delivery(seq, subscription_id=subscription_id) for seq in seqs]
        pulled = deliveries(*ones)
        return Pulled(pulled, self.leases.grant(pulled, lease_ms)).tokens

    def end(self, *tokens: str, subscription_id: int | None = None) -> tuple[list[int], list[str]]:
        """The seqs of what ended, and the tokens of what did not."""
        ended, over = self.leases.end(tokens, subscription_id)
        return [one.entry.seq for some in ended for one in some.each()], over

    def expire(self, passed_ms: int) -> list[int]:
        """Let time pass; the seqs of what expired."""
        self.stopwatch.shows_ms = passed_ms
        self.timeouts.advance()
        over = [delivery.entry.seq for delivery in self.over]
        self.over.clear()
        return over


@pytest.fixture
def parts() -> Parts:
    return Parts()


def test_every_delivery_has_a_token_of_its_own(parts: Parts) -> None:
    tokens = parts.grant((1, 2, 3), 100) + parts.grant((4,), 100)
    assert len(set(tokens)) == 4
    held = parts.leases.get(tokens[1])
    assert held is not None
    assert held.entry.seq == 2
    assert parts.leases.count() == 4


def test_a_lease_is_good_for_its_own_subscription_only(parts: Parts) -> None:
    [token] = parts.grant((1,), 100, subscription_id=7)
    assert parts.end(token, subscription_id=8) == ([], [token])
    assert parts.leases.extend([token], 200, 8) == [token]
    assert parts.leases.extend([token], 200, 7) == []
    assert parts.end(token, subscription_id=7) == ([1], [])


def test_a_lease_ends_once(parts: Parts) -> None:
    first, second = parts.grant((1, 2), 100)
    assert parts.end(first) == ([1], [])
    assert parts.end(first) == ([], [first])
    assert parts.leases.get(first) is None
    assert parts.end(second) == ([2], [])
    assert parts.end(second) == ([], [second])
    assert parts.leases.count() == 0


def test_a_lease_that_is_named_twice_ends_once(parts: Parts) -> None:
    first, second = parts.grant((1, 2), 100)
    assert parts.end(first, first, second, second) == ([1, 2], [first, second])


@pytest.mark.parametrize("other", ["01", "0x1", "+1", " 1"])
def test_a_lease_under_two_spellings_ends_once(parts: Parts, other: str) -> None:
    first, second = parts.grant((1, 2), 100)
    epoch, number, index = first.split("-")
    assert number == "1"
    alias = f"{epoch}-{other}-{index}"
    assert parts.end(first, alias) == ([1], [alias])
    assert parts.leases.count() == 1
    assert parts.expire(100) == [2]
    assert parts.end(second) == ([], [second])


def test_leases_of_several_pulls_and_what_is_none_end_in_one_call(parts: Parts) -> None:
    tokens = parts.grant((1, 2, 3), 100)
    others = parts.grant((4, 5), 100)
    assert parts.end(tokens[1]) == ([2], [])
    wrong = ["", "e1-1-9", "e2-1-0"]
    named = [others[1], wrong[0], tokens[2], wrong[1], tokens[1], tokens[0], wrong[2], others[0]]
    ended, over = parts.end(*named)
    assert sorted(ended) == [1, 3, 4, 5]
    assert over == [wrong[0], wrong[1], tokens[1], wrong[2]]
    assert parts.leases.count() == parts.timeouts.size() == 0


def test_many_leases_end_in_the_order_in_which_they_are_named(parts: Parts) -> None:
    tokens = parts.grant(range(1, 2001), 100)
    assert parts.end(*reversed(tokens)) == (list(range(2000, 0, -1)), [])


def test_leases_expire_at_their_deadline_and_once(parts: Parts) -> None:
    tokens = parts.grant((1, 2), 100)
    parts.grant((3,), 200)
    parts.end(tokens[0])
    assert parts.expire(99) == []
    assert parts.expire(100) == [2]
    assert parts.end(tokens[1]) == ([], [tokens[1]])
    assert parts.expire(150) == []
    assert parts.expire(1000) == [3]
    assert parts.timeouts.size() == 0
    assert parts.leases.count() == 0


def test_a_pull_that_is_done_leaves_no_timeout(parts: Parts) -> None:
    tokens = parts.grant((1, 2), 100)
    assert parts.timeouts.size() == 1
    for token in tokens:
        parts.end(token)
    assert parts.timeouts.size() == 0


def test_an_extended_lease_expires_at_its_new_deadline(parts: Parts) -> None:
    first, second = parts.grant((1, 2), 100)
    parts.stopwatch.shows_ms = 50
    assert parts.leases.extend([first], 250) == []
    assert parts.expire(100) == [2]
    assert parts.leases.extend([second], 400) == [second]
    assert parts.expire(299) == []
    assert parts.leases.get(first) is not None
    assert parts.expire(300) == [1]


def test_a_lease_may_be_shortened(parts: Parts) -> None:
    [token, other] = parts.grant((1, 2), 300)
    assert parts.leases.extend([token], 100) == []
    assert parts.expire(100) == [1]
    assert parts.leases.get(other) is not None
    assert parts.expire(299) == []
    assert parts.expire(300) == [2]


def test_an_ended_lease_cannot_be_extended(parts: Parts) -> None:
    [token] = parts.grant((1,), 100)
    parts.end(token)
    assert parts.leases.extend([token], 300) == [token]
    assert parts.expire(300) == []


def test_a_lease_of_an_earlier_process_is_over(parts: Parts) -> None:
    [token] = parts.grant((1,), 100)
    later = Parts("e2")
    later.grant((1,), 100)
    assert later.end(token) == ([], [token])
    assert later.leases.extend([token], 300) == [token]
    assert later.leases.count() == 1


@pytest.mark.parametrize(
    "token", ["", "e1", "e1-", "e1-1", "e1-1-", "e1-1-1", "e1-1--1", "e1-2-0", "e1-x-0", "e1-1-x"]
)
def test_what_is_not_a_token_is_no_lease(parts: Parts, token: str) -> None:
    [good] = parts.grant((1,), 100)
    assert parts.end(token) == ([], [token])
    assert parts.leases.count() == 1
    assert parts.end(token, good) == ([1], [token])


def test_what_is_held_of_a_pull_ends_at_once(parts: Parts) -> None:
    tokens = parts.grant((1, 2, 3), 100)
    parts.end(tokens[1])
    prefix = tokens[0][:-1]
    some = parts.leases.end_pull(prefix)
    assert some is not None
    assert [one.entry.seq for one in some.each()] == [1, 3]
    assert parts.leases.end_pull(prefix) is None
    assert parts.leases.end_pull("e1-7-") is None
    assert parts.leases.count() == parts.timeouts.size() == 0


@pytest.mark.parametrize("shard", [0, 1, 15, 16, 65_535])
def test_a_token_names_its_shard(shard: int) -> None:
    epoch = epoch_of(b"\xbe\xbe&\x0c", shard)
    assert epoch == ("bebe260c" if shard == 0 else f"bebe260c{shard:x}")
    [token] = Parts(epoch).grant((1,), 100)
    assert shard_of_lease(token) == shard


@pytest.mark.parametrize(
    "token",
    ["", "bebe260c", "bebe260-1-0", "bebe260c01-1-0", "BEBE260C-1-0", "bebe260c-1-0"[::-1], "--"],
)
def test_what_is_no_token_names_none(token: str) -> None:
    assert shard_of_lease(token) is None
