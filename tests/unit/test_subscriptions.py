"""Subscriptions: which subjects match, and a registry that never gives a number twice."""

from __future__ import annotations

import pytest

from delayserver.delivery.webhook import RetryPolicy
from delayserver.subscriptions import Registry, decode_subscription, encode_subscription
from tests.unit.fakes import subscription


@pytest.mark.parametrize(
    ("pattern", "subject", "matches"),
    [
        ("order.unpaid", "order.unpaid", True),
        ("order.unpaid", "order.unpaid.eu", False),
        ("order.unpaid", "order", False),
        ("order.*", "order.unpaid", True),
        ("order.*", "order.unpaid.eu", True),
        ("order.*", "order", False),
        ("order.*", "orders.unpaid", False),
        ("*", "anything.at.all", True),
    ],
)
def test_a_subject_is_exact_or_a_prefix_or_everything(
    pattern: str, subject: str, matches: bool
) -> None:
    assert subscription(subject=pattern).matches(subject) is matches


@pytest.mark.parametrize(
    ("one", "other", "overlaps"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.c", False),
        ("a.*", "a.b", True),
        ("a.*", "a.b.*", True),
        ("a.*", "b.*", False),
        ("*", "b.*", True),
        ("a.*", "a", False),
    ],
)
def test_two_overlap_when_some_subject_matches_both(one: str, other: str, overlaps: bool) -> None:
    first, second = subscription(1, subject=one), subscription(2, subject=other)
    assert first.overlaps(second) is overlaps
    assert second.overlaps(first) is overlaps


def test_a_definition_comes_back_as_it_was() -> None:
    definition = subscription(
        3,
        type="webhook",
        url="http://127.0.0.1:9000/",
        secrets=("whsec_c2VjcmV0",),
        backoff_ms=(5_000, 60_000),
        max_attempts=2,
        paused=True,
    )
    assert decode_subscription(encode_subscription(definition)) == definition


def test_the_retry_policy_is_the_default_unless_a_backoff_is_given() -> None:
    assert subscription(max_attempts=3).retry_policy == RetryPolicy(3)
    assert subscription(max_attempts=3, backoff_ms=(7,)).retry_policy == RetryPolicy(3, (7,))


def test_the_oldest_subscription_comes_first() -> None:
    second, first = subscription(2, subject="*"), subscription(1)
    registry = Registry([second, first])
    assert [s.id for s in registry] == [1, 2]
    assert [s.id for s in registry.matching("order.unpaid")] == [1, 2]
    assert [s.id for s in registry.matching("refund")] == [2]
    assert registry.by_id(2) is second
    assert registry.by_name("s1") is first
    assert registry.by_name("s3") is registry.by_id(3) is None


def test_what_matches_is_asked_again_after_a_change() -> None:
    registry = Registry([subscription(1)])
    assert len(registry.matching("order.unpaid")) == 1
    registry.put(subscription(2, subject="order.*"))
    assert [s.id for s in registry.matching("order.unpaid")] == [1, 2]
    registry.put(subscription(1, paused=True))
    assert [s.paused for s in registry.matching("order.unpaid")] == [True, False]
    registry.put(subscription(1, deleted=True))
    assert [s.id for s in registry.matching("order.unpaid")] == [2]
    assert registry.by_name("s1") is registry.by_id(1) is None
    assert len(registry) == 1


def test_a_number_is_never_given_twice_even_after_a_restart() -> None:
    registry = Registry([subscription(4), subscription(7, deleted=True)])
    assert len(registry) == 1
    assert registry.next_id() == 8
    registry.put(subscription(8))
    registry.put(subscription(8, deleted=True))
    assert registry.next_id() == 9
    assert registry.snapshot().next_id() == 10


def test_a_snapshot_does_not_change() -> None:
    registry = Registry([subscription(1)])
    snapshot = registry.snapshot()
    registry.put(subscription(2))
    registry.put(subscription(1, deleted=True))
    assert [s.id for s in snapshot.matching("order.unpaid")] == [1]
