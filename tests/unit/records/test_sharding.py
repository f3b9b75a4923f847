"""Sharding: where new messages belong, and keys of messages that the server made."""

import pytest

from delayserver.api.hot.belonging import decode_named
from delayserver.records.ids import IdCodec
from delayserver.records.sharding import (
    outcome_key,
    shard_of,
    shard_of_group,
    shard_of_message,
    shard_of_name,
)

COUNT = 5


def test_a_run_belongs_where_its_schedule_is() -> None:
    for name in ("a", "report.daily", "z9"):
        key = f"{name}@2026-11-20T16:30:00.000Z"
        assert shard_of("s", key, 7) == shard_of_name(name, 7)


@pytest.mark.parametrize("outcome", ["delivered", "dead"])
@pytest.mark.parametrize("subscription", ["reports", "a.b-c_d", "#17"])
def test_a_message_with_an_outcome_belongs_where_the_message_is(
    outcome: str, subscription: str
) -> None:
    for shard in range(5):
        message_id = IdCodec(shard, b"secret" * 6).encode(1_800_000_000_000, 12)
        key = outcome_key(message_id, subscription, outcome)
        assert shard_of("any", key, 5) == shard_of("other", key, 5) == shard


def test_what_looks_similar_belongs_where_any_key_does() -> None:
    message_id = IdCodec(3, b"secret" * 6).encode(1_800_000_000_000, 12)
    keys = [
        f"{message_id[:-1]}:s:dead",
        f"{message_id}::dead",
        f"{message_id}:s:dead:dead",
        f"x{message_id}:s:dead",
        f"{message_id}:s:died",
        f"{message_id.upper()}:s:dead",
        "s:delivered",
    ]
    for key in keys:
        assert len({shard_of(f"s{number}", key, 64) for number in range(40)}) > 1, key


def test_a_key_counts_before_a_group_and_that_before_nothing() -> None:
    keyed, grouped = shard_of("orders", "k", COUNT), shard_of_group("customer:7", COUNT)
    assert shard_of_message("orders", "k", None, COUNT) == keyed
    assert shard_of_message("orders", "k", "customer:7", COUNT) == keyed
    assert shard_of_message("orders", None, "customer:7", COUNT) == grouped
    assert shard_of_message("refund", None, "customer:7", COUNT) == grouped
    assert shard_of_message("orders", None, None, COUNT) is None
    groups = {shard_of_group(str(number), COUNT) for number in range(100)}
    assert groups == set(range(COUNT))


def test_the_shard_of_a_group_is_that_of_a_key_without_a_subject() -> None:
    assert shard_of_group("customer:7", COUNT) == shard_of("", "customer:7", COUNT)


def test_a_single_message_is_routed_by_its_group() -> None:
    named = decode_named(b'{"subject": "orders", "group": "customer:7", "body": {"a": [1]}}')
    assert named.shard(COUNT) == shard_of_group("customer:7", COUNT)
