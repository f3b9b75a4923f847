"""Sharding: where new messages belong."""

from __future__ import annotations

from delayserver.api.cluster.routed import decode_named
from delayserver.records.sharding import shard_of, shard_of_group, shard_of_message

COUNT = 5


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
