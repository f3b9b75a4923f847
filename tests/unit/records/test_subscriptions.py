"""Subscriptions: which subjects match, and a registry that never gives a number twice."""

from __future__ import annotations

import pytest

from delayserver.errors import InputError
from delayserver.records.horizon import Mark
from delayserver.records.subscriptions import (
    Registry,
    RetrySchedule,
    SubjectSpan,
    check_own_headers,
    decode_subscription,
    encode_subscription,
)
from delayserver.wire.fields import MASK
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


def test_a_definition_comes_back_as_it_was() -> None:
    definition = subscription(
        3,
        subject="b.*",
        type="webhook",
        url="http://127.0.0.1:9000/",
        secrets=("whsec_c2VjcmV0",),
        backoff_ms=(5_000, 60_000),
        max_attempts=2,
        paused=True,
        history=(SubjectSpan("a", 6, (Mark(7, 90), Mark(9, 50))), SubjectSpan("b.*", 8, ())),
    )
    assert decode_subscription(encode_subscription(definition)) == definition


def test_the_retry_schedule_is_the_default_unless_a_backoff_is_given() -> None:
    assert subscription(max_attempts=3).retry_schedule == RetrySchedule(3)
    assert subscription(max_attempts=3, backoff_ms=(7,)).retry_schedule == RetrySchedule(3, (7,))


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


def test_the_headers_of_a_subscription_have_names_in_lower_case() -> None:
    assert check_own_headers({"Authorization": "Bearer x", "x-a": ""}) == {
        "authorization": "Bearer x",
        "x-a": "",
    }


@pytest.mark.parametrize(
    ("headers", "pointer"),
    [
        ({"Host": "x"}, "/headers/Host"),
        ({"content-type": "x"}, "/headers/content-type"),
        ({"transfer-encoding": "x"}, "/headers/transfer-encoding"),
        ({"webhook-id": "x"}, "/headers/webhook-id"),
        ({"delay-attempt": "x"}, "/headers/delay-attempt"),
        ({"User-Agent": "x"}, "/headers/User-Agent"),
        ({"traceparent": "x"}, "/headers/traceparent"),
        ({"a~b": MASK}, "/headers/a~0b"),
        ({"a": "x\r\ny: z"}, "/headers/a"),
        ({"a": "x", "A": "y"}, "/headers/A"),
        ({"x": "y" * 8192}, "/headers"),
    ],
)
def test_headers_that_a_subscription_may_not_have(headers: dict[str, str], pointer: str) -> None:
    with pytest.raises(InputError) as caught:
        check_own_headers(headers)
    assert caught.value.pointer == pointer
