"""Sharding: where keys of messages belong that the server made."""

import pytest

from delayserver.records.ids import IdCodec
from delayserver.records.sharding import outcome_key, shard_of, shard_of_schedule


def test_a_run_belongs_where_its_schedule_is() -> None:
    for name in ("a", "report.daily", "z9"):
        key = f"{name}@2026-11-20T16:30:00.000Z"
        assert shard_of("s", key, 7) == shard_of_schedule(name, 7)


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
