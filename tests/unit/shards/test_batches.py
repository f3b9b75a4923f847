"""Batches over several shards are answered as one, and all or none in each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delayserver.api.hot.paths import BATCH_PATH
from delayserver.decisions.delayed_produce import Level
from delayserver.decisions.new_messages import PublishBatch
from delayserver.errors import (
    AckTimeoutError,
    KeyConflictError,
    MisdirectedError,
    NotFoundError,
    OverloadedError,
    ShardAwayError,
)
from delayserver.records.message import MessageOptions
from delayserver.records.sharding import shard_of, shard_of_group
from delayserver.shards.batches import (
    OPTIONS_PART_PATH,
    PART_PATH,
    Batches,
)
from delayserver.shards.link import failed
from delayserver.shards.peers import PeerAnswer, PeerCall
from delayserver.slices import Slices
from tests.unit.api.hot.test_publish import Machine

COUNT = 3
JSON = ((b"content-type", b"application/json"),)


class World:
    """Shards with parts that are moved by hand, and no network between them."""

    def __init__(self) -> None:
        self.machines = [Machine() for _ in range(COUNT)]
        self.refusals: dict[int, Exception] = {}
        self.parts: list[tuple[int, PublishBatch]] = []
        self.refuses = False
        """To forward: the client does not want it."""
        self.batches = [self._of(number) for number in range(COUNT)]

    def _of(self, number: int) -> Batches:
        machine, world = self.machines[number], self

        class Calls:
            clock = staticmethod(machine.calls.clock)
            slices = Slices(lambda function: asyncio.get_running_loop().call_soon(function))

            async def durable(self, group: Any) -> None:
                machine.commit()

            async def acknowledged(
                self, group: object, seq: int, level: Level, timeout_ms: int
            ) -> Level:
                machine.commit()
                return level

        class Others:
            own, count = number, COUNT

            def ask(self, shard: int, call: PeerCall) -> Awaitable[PeerAnswer]:
                return world.ask(shard, call)

            def misdirected(self, shard: int, call: PeerCall) -> PeerAnswer | None:
                return failed(MisdirectedError(shard, "http://x")) if world.refuses else None

        return Batches(cast(Any, Calls()), machine.hot, cast(Any, Others()))

    async def ask(self, shard: int, call: PeerCall) -> PeerAnswer:
        batch = msgspec.msgpack.decode(call.body, type=PublishBatch)
        path = OPTIONS_PART_PATH if batch.options else PART_PATH
        assert (call.path, call.caller) == (path, None)
        self.parts.append((shard, batch))
        if (refusal := self.refusals.get(shard)) is not None:
            return failed(refusal)
        answer = await self.batches[shard].answer_part(call)
        assert answer is not None
        return answer

    def publish(self, items: list[Any], query: bytes = b"", shard: int = 0) -> PeerAnswer:
        call = PeerCall("POST", BATCH_PATH, query, JSON, json.dumps(items).encode())
        answer = asyncio.run(cast(Any, self.batches[shard].answer(call)))
        assert answer is not None
        return cast(PeerAnswer, answer)


def item(key: str | None, **more: object) -> dict[str, object]:
    return {"subject": "orders", "key": key, "delay": "1h", **more}


def keys_of(shard: int, count: int) -> list[str]:
    found = (str(number) for number in range(10_000))
    return [key for key in found if shard_of("orders", key, COUNT) == shard][:count]


@settings(max_examples=30, deadline=None)
@given(keys=st.lists(st.none() | st.text("abcdefgh", min_size=1, max_size=2), max_size=30))
def test_ids_come_in_the_order_of_the_batch(keys: list[str | None]) -> None:
    answer = World().publish([item(key) for key in keys])
    document = json.loads(answer.body)
    assert (answer.status, document["count"], len(document["ids"])) == (200, len(keys), len(keys))
    by_key: dict[str, str] = {}
    for key, message_id in zip(keys, document["ids"], strict=True):
        if key is not None:
            assert by_key.setdefault(key, message_id) == message_id
    keyed = [key for key in keys if key is not None]
    assert document["duplicates"] == len(keyed) - len(set(keyed))


def test_a_batch_of_one_shard_goes_there_whole() -> None:
    world = World()
    keys = keys_of(2, 5)
    assert world.publish([item(key) for key in keys]).status == 200
    ((shard, batch),) = world.parts
    assert (shard, batch.keys) == (2, keys)
    # … and what has no key goes along; alone it stays.
    world.publish([item(keys[0]), item(None), item(None)])
    assert [(shard, len(batch)) for shard, batch in world.parts[1:]] == [(2, 3)]
    world.publish([item(None)] * 3)
    assert len(world.parts) == 2


def test_who_wants_no_forwarding_is_told_whose_a_batch_is_that_belongs_elsewhere_as_a_whole() -> (
    None
):
    world = World()
    world.refuses = True
    elsewhere = [item(key) for key in keys_of(2, 2)]
    answer = world.publish(elsewhere)
    assert (answer.status, dict(answer.headers)[b"delay-owner"]) == (421, b"http://x")
    assert not world.parts
    # What stays, and what is for several, is served as ever.
    for items in ([item(keys_of(0, 1)[0])], [item(None)], [*elsewhere, item(keys_of(1, 1)[0])]):
        assert world.publish(items).status == 200
    assert [shard for shard, _ in world.parts] == [2, 1]


@pytest.mark.parametrize("full", [0, 1])
def test_a_batch_and_its_parts_are_counted_where_they_are(full: int) -> None:
    world = World()
    keys = keys_of(1, 2)
    held = [one.hot.bodies for one in world.machines]
    with held[full].holding(world.machines[full].settings.receiving_max_bytes - 1):
        answer = world.publish([item(key) for key in keys])
    assert answer.status == 503
    assert b"receiving_max_bytes" in answer.body
    assert world.publish([item(key) for key in keys]).status == 200
    assert [one.held_bytes for one in held] == [0] * COUNT


def test_duplicates_are_counted_by_shard() -> None:
    world = World()
    old, new = keys_of(1, 1)[0], keys_of(2, 1)[0]
    assert "duplicates_by_shard" not in json.loads(world.publish([item(old)]).body)
    document = json.loads(world.publish([item(old), item(new)]).body)
    assert (document["duplicates"], document["duplicates_by_shard"]) == (1, {"1": 1, "2": 0})


def test_what_is_wrong_with_one_refuses_all() -> None:
    world = World()
    answer = world.publish([item(keys_of(1, 1)[0]), item("x" * 1000), item("ok")])
    assert answer.status == 422
    assert [one["pointer"] for one in json.loads(answer.body)["errors"]] == ["/1/key"]
    assert not world.parts


def test_all_or_nothing_over_all_shards_is_refused_before_anything_is_done() -> None:
    world = World()
    items = [item(keys_of(shard, 1)[0]) for shard in range(COUNT)]
    answer = world.publish(items, b"atomic=true")
    assert answer.status == 422
    assert "belong to 3 shards" in json.loads(answer.body)["detail"]
    assert not world.parts
    assert world.publish(items[:1], b"atomic=true").status == 200
    assert world.publish(items[1:2], b"atomic=true").status == 200
    assert world.publish(items, b"atomic=perhaps").status == 422


def test_what_was_done_elsewhere_is_said_with_what_was_not() -> None:
    world = World()
    keys = [keys_of(shard, 1)[0] for shard in (0, 1, 2)]
    world.refusals[1] = ShardAwayError(1, is_unknown=True)
    answer = world.publish([item(key) for key in keys])
    problem = json.loads(answer.body)
    assert (answer.status, problem["outcome"]) == (503, "unknown")
    assert [message_id is None for message_id in problem["ids"]] == [False, True, False]
    assert "2 of 3 messages are durable" in problem["detail"]
    assert (b"retry-after", b"1") in answer.headers
    # Repeated as a whole, it is whole.
    world.refusals.clear()
    document = json.loads(world.publish([item(key) for key in keys]).body)
    assert document["duplicates"] == 2
    assert document["ids"][0] == problem["ids"][0]


def test_what_no_repetition_mends_is_said_first() -> None:
    world = World()
    keys = [keys_of(shard, 1)[0] for shard in (0, 1, 2)]
    world.refusals[1] = OverloadedError("full")
    world.refusals[2] = KeyConflictError("other content", "scheduled")
    answer = world.publish([item(key) for key in keys])
    assert answer.status == 409
    assert json.loads(answer.body)["ids"][1:] == [None, None]


def test_what_was_not_durable_in_time_may_become_so() -> None:
    """A part that was refused for good hides it, else."""
    world = World()
    keys = [keys_of(shard, 1)[0] for shard in (1, 2)]
    late = world.refusals[1] = AckTimeoutError("not durable in time", ["the id"])
    world.refusals[2] = late
    problem = json.loads(world.publish([item(keys[1]), item(keys[0])]).body)
    assert (problem["status"], problem["outcome"]) == (504, "unknown")
    assert problem["ids"] == ["the id", "the id"]
    world.refusals[2] = KeyConflictError("other content", "scheduled")
    problem = json.loads(world.publish([item(keys[1]), item(keys[0])]).body)
    assert (problem["status"], problem["outcome"]) == (409, "unknown")
    assert "ids" not in problem or problem["ids"] is None
    # The ids are those of the whole batch, and of what is durable alone.
    del world.refusals[2]
    problem = json.loads(world.publish([item(keys[1]), item(keys[0])]).body)
    assert (problem["status"], problem["outcome"]) == (504, "unknown")
    assert [one is None for one in problem["ids"]] == [False, True]


def test_errors_name_messages_as_the_caller_counts_them() -> None:
    world = World()
    first, second, third = keys_of(1, 3)
    items = [item(first), item(second)]
    assert world.publish(items).status == 200
    changed = [item("elsewhere"), item(first, body=1), item(third), item(second, body=2)]
    problem = json.loads(world.publish(changed).body)
    pointers = [one["pointer"].split("/")[1] for one in problem["errors"]]
    assert pointers == ["1", "3"]


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_nothing_else_is_for_it(method: str) -> None:
    world = World()
    assert asyncio.run(cast(Any, world.batches[0].answer(PeerCall(method, BATCH_PATH)))) is None
    assert asyncio.run(cast(Any, world.batches[0].answer(PeerCall("POST", "/v1/events/x")))) is None


def test_options_go_along_with_the_part_of_another_shard() -> None:
    world = World()
    (key,) = keys_of(1, 1)
    answer = world.publish([item(key, ttl="1h", priority=9), item(None)])
    assert answer.status == 200
    [(shard, batch)] = world.parts
    assert (shard, batch.options) == (1, [MessageOptions(3_600_000, priority=9), None])


def test_what_has_a_group_and_no_key_goes_where_its_group_belongs() -> None:
    world = World()
    group = next(one for one in map(str, range(100)) if shard_of_group(one, COUNT) == 2)
    (key,) = keys_of(1, 1)
    items = [item(None, group=group), item(key, group=group), item(None)]
    assert world.publish(items).status == 200
    assert [(shard, batch.keys) for shard, batch in world.parts] == [(2, [None, None]), (1, [key])]


def test_a_process_of_an_older_version_is_not_given_options_that_it_would_not_see() -> None:
    """It does not know the path, and nothing is published without them."""
    world = World()
    (key,) = keys_of(1, 1)

    async def ask(shard: int, call: PeerCall) -> PeerAnswer:
        assert call.path == OPTIONS_PART_PATH
        return failed(NotFoundError("there is no such path"))

    world.ask = ask  # type: ignore[method-assign]
    answer = world.publish([item(key, priority=9)])
    assert answer.status == 503
    assert b"older version" in answer.body
