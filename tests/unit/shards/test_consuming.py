"""A consumer at any shard gets what is due in all of them, and no lease is stranded."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import random
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from delayserver.decisions.new_messages import NewMessage
from delayserver.errors import OverloadedError
from delayserver.records.message import Content, Payload
from delayserver.security.tokens import Caller, Token
from delayserver.shards.endings import LEASES_PATH
from delayserver.shards.gathering import Gathering
from delayserver.shards.link import failed
from delayserver.shards.peers import PeerAnswer, PeerCall
from delayserver.shards.supply import FETCH_PATH
from delayserver.wire.pulls import PulledListDocument
from tests.unit.fakes import subscription
from tests.unit.shards.linked import Consumer, World

COUNT = 3
OTHERS = [(0, 1), (0, 2), (1, 0), (2, 1)]
"""Where a consumer is, and where what it gets is due."""


def ids_of(messages: list[dict[str, Any]]) -> set[str]:
    return {one["id"] for one in messages}


def fetched(world: World, shard: int) -> list[int]:
    """Which shards one has asked for parts."""
    return [asked for asked, path in world.nodes[shard].asked if path == FETCH_PATH]


@pytest.fixture
def world() -> World:
    return World(COUNT)


# ---- pulls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("here", "there"), OTHERS)
def test_a_consumer_gets_what_falls_due_elsewhere(world: World, here: int, there: int) -> None:
    async def test() -> None:
        consumer = world.pull(here)
        await world.settle()
        due = world.publish(there, delay_ms=5000)
        await world.move(4900)
        assert not consumer.answers
        await world.move(100)
        assert ids_of(consumer.messages) == {due}
        [lease] = consumer.leases
        assert lease[8:].startswith("-" if there == 0 else f"{there}-")
        assert await world.ack(here, [lease]) == {"acked": 1, "expired": []}
        assert await world.ack(1, [lease]) == {"acked": 0, "expired": [lease]}
        assert await world.available(at=1) == []
        world.check_nothing_is_left()

    world.run(test())


def test_one_pull_takes_of_all_and_is_answered_as_by_one_server(world: World) -> None:
    async def test() -> None:
        bodies = {world.publish(n % COUNT, body=json.dumps({"é": n}).encode()): n for n in range(7)}
        for at in range(COUNT):
            consumer = world.pull(at, ack=["nobody's"])
            await world.settle()
            [answer] = consumer.answers
            document = msgspec.json.decode(answer.body, type=PulledListDocument)
            assert msgspec.json.encode(document) == answer.body
            assert {one["id"]: one["body"]["é"] for one in consumer.messages} == bodies
            assert (document.acked, document.expired) == (0, ["nobody's"])
            await world.give_back(consumer, at)
        # Each was handed out three times by now.
        assert {one["attempt"] for one in await world.available()} == {4}

    world.run(test())


def test_a_pull_that_does_not_wait_asks_shards_of_which_nothing_is_known(world: World) -> None:
    async def test() -> None:
        due = {world.publish(shard) for shard in range(COUNT)}
        consumer = world.pull(1, wait=0)
        assert not consumer.answers
        await world.settle()
        assert ids_of(consumer.messages) == due
        again = world.pull(1, wait=0)
        assert again.messages == []  # All is known: nobody is asked.

    world.run(test())


def test_a_pull_that_has_all_it_wants_here_asks_nobody(world: World) -> None:
    async def test() -> None:
        world.publish(0)
        await world.settle()
        assert len(world.pull(0, max=1).messages) == 1
        assert not world.nodes[0].asked

    world.run(test())


def test_a_shard_that_does_not_say_what_it_has_holds_nobody_up(world: World) -> None:
    async def test() -> None:
        due = world.publish(1)
        world.publish(2)
        consumer = world.pull(0, wait=0)
        await world.turn()
        for _ in range(100):  # Shard 2 hears nothing.
            world.deliver(0, 1, 0)
            world.deliver(0, 1, 1)
            await world.turn()
        assert not consumer.answers
        world.clock.move(1000)
        for _ in range(100):
            world.deliver(0, 1, 0)
            world.deliver(0, 1, 1)
            await world.turn()
        assert ids_of(consumer.messages) == {due}

    world.run(test())


@pytest.mark.parametrize(("has_enough", "waits_ms"), [(True, 100), (False, 1000)])
def test_a_part_that_comes_too_late_goes_back(
    world: World, has_enough: bool, waits_ms: int
) -> None:
    async def test() -> None:
        consumer = world.pull(0, min_messages=2)
        await world.settle()
        late = world.publish(2)
        await world.turn()
        assert world.deliver(0, 2, 0)  # It says that there is one.
        own = {world.publish(0) for _ in range(2 if has_enough else 1)}
        await world.turn()
        assert fetched(world, 0) == [2]
        world.clock.move(waits_ms - 1)
        await world.turn()
        assert not consumer.answers
        world.clock.move(1)
        await world.turn()
        assert bool(consumer.answers) == has_enough
        await world.settle()
        if has_enough:
            assert ids_of(consumer.messages) == own
            [message] = await world.available(at=1)
            assert (message["id"], message["attempt"]) == (late, 1)
            return
        # What came by then was given back, and both are asked for once more.
        await world.move(10, step_ms=1)
        assert ids_of(consumer.messages) == {late, *own}
        assert {one["attempt"] for one in consumer.messages} == {1}

    world.run(test())


def test_each_pull_begins_at_another_shard(world: World) -> None:
    async def test() -> None:
        for shard in range(COUNT):
            for _ in range(8):
                world.publish(shard)
        shards = []
        for _ in range(2 * COUNT):
            consumer = world.pull(1, max=3)
            await world.settle()
            shards.append({int(lease[8:].split("-")[0] or "0") for lease in consumer.leases})
        for start in (0, COUNT):
            assert set.union(*shards[start : start + COUNT]) == {0, 1, 2}

    world.run(test())


def test_no_more_than_max_comes_of_all(world: World) -> None:
    async def test() -> None:
        due = {world.publish(n % COUNT) for n in range(30)}
        found: set[str] = set()
        for most in (1, 2, 7, 20, 5):
            consumer = world.pull(0, max=most, wait=0)
            await world.settle()
            assert len(consumer.messages) == min(most, len(due) - len(found))
            assert not found & ids_of(consumer.messages)
            found |= ids_of(consumer.messages)
        assert found == due

    world.run(test())


def test_an_answer_has_no_more_bytes_than_that_of_one_server() -> None:
    world = World(COUNT, answer_max_bytes=64 * 1024)

    async def test() -> None:
        body = json.dumps("x" * 10_000).encode()
        due = {world.publish(n % COUNT, body=body) for n in range(18)}
        found: set[str] = set()
        while found < due:
            # Also those who want many are given what fits.
            consumer = world.pull(0, min_messages=18 - len(found))
            await world.settle()
            assert 2 * COUNT <= len(consumer.messages) <= 6
            found |= ids_of(consumer.messages)

    world.run(test())


def test_a_pull_waits_until_all_shards_together_have_enough(world: World) -> None:
    async def test() -> None:
        consumer = world.pull(0, min_messages=4)
        for shard in (0, 1, 2):
            world.publish(shard)
            await world.move(500)
        assert not consumer.answers
        # Nobody has taken anything from those who want less.
        assert len(await world.available(at=2)) == 3
        world.publish(1)
        await world.settle()
        assert len(consumer.messages) == 4
        few = world.pull(2, min_messages=4, wait="3s")
        await world.settle()
        world.publish(0)
        world.publish(1)
        await world.move(2900)
        assert not few.answers
        await world.move(100)
        assert len(few.messages) == 2

    world.run(test())


def test_of_two_who_want_more_than_half_one_gets_it(world: World) -> None:
    async def test() -> None:
        consumers = [world.pull(shard, min_messages=6, max=6) for shard in range(COUNT)]
        await world.settle()
        for _ in range(2):
            for shard in range(COUNT):
                world.publish(shard)
        await world.move(300, step_ms=2)
        [served] = [one for one in consumers if one.answers]
        assert len(served.messages) == 6
        assert {one["attempt"] for one in served.messages} == {1}
        # The others wait still, and get what comes.
        for _ in range(4):
            for shard in range(COUNT):
                world.publish(shard)
        await world.move(300, step_ms=2)
        assert [len(one.messages) for one in consumers] == [6, 6, 6]

    world.run(test())


def test_two_who_take_half_of_it_each_do_not_do_so_for_ever(world: World) -> None:
    async def test() -> None:
        consumers = [world.pull(shard, min_messages=4) for shard in (0, 1)]
        await world.settle()
        for _ in range(3):
            for shard in (0, 1):
                world.publish(shard, delay_ms=10)
        await world.move(100, step_ms=1)
        assert sorted(len(one.messages) for one in consumers if one.answers) == [6]

    world.run(test())


def test_what_was_said_to_be_there_and_is_gone_leaves_nothing_behind(world: World) -> None:
    """As many fall due again: the count is what it was when it was told last."""

    async def test() -> None:
        world.pull(0, wait=0)
        await world.settle()
        world.publish(1)
        await world.settle()
        taken = world.pull(1, max=1)
        assert len(taken.messages) == 1
        consumer = world.pull(0)
        await world.settle()
        assert fetched(world, 0) == [1] and not consumer.answers
        due = world.publish(1)
        await world.settle()
        assert ids_of(consumer.messages) == {due}

    world.run(test())


def test_who_came_first_is_served_first(world: World) -> None:
    async def test() -> None:
        consumers = []
        for _ in range(3):
            consumers.append(world.pull(0, max=1))
            await world.settle()
        for n, shard in enumerate((1, 2, 0)):
            world.publish(shard)
            await world.settle()
            assert [bool(one.answers) for one in consumers] == [m <= n for m in range(3)]

    world.run(test())


def test_one_message_for_consumers_at_all_shards_goes_to_one(world: World) -> None:
    async def test() -> None:
        for due_at in range(COUNT):
            consumers = [world.pull(n, wait="1s") for n in range(COUNT) if n != due_at]
            await world.settle()
            due = world.publish(due_at)
            await world.settle()
            [served] = [one for one in consumers if one.answers]
            assert ids_of(served.messages) == {due}
            await world.move(1000)
            assert sorted(len(one.messages) for one in consumers) == [0, 1]

    world.run(test())


@pytest.mark.parametrize("at", range(COUNT))
def test_paused_and_resumed(world: World, at: int) -> None:
    paused = subscription(1, subject="*", created_ms=world.clock(), paused=True)

    async def test() -> None:
        world.subscribe(paused)
        due = {world.publish(shard) for shard in range(COUNT)}
        consumer = world.pull(at)
        await world.move(1000)
        assert not consumer.answers
        empty = world.pull(at, wait=0)
        await world.settle()
        assert empty.messages == []
        # The others first, or it alone: what is paused here is for nobody here.
        resumed = subscription(1, subject="*", created_ms=paused.created_ms)
        world.subscribe(resumed, *(shard for shard in range(COUNT) if shard != at))
        await world.settle()
        assert not consumer.answers
        world.subscribe(resumed, at)
        await world.settle()
        assert ids_of(consumer.messages) == due

    world.run(test())


def test_a_shard_that_knows_nothing_of_a_subscription_has_nothing(world: World) -> None:
    other = subscription(2, name="s2", subject="*", created_ms=world.clock())

    async def test() -> None:
        world.subscribe(other, 0, 1)
        consumer = world.call(0, "pull", to="s2", max=10, wait="20s")
        await world.settle()
        world.publish(2)
        await world.move(100)
        assert not consumer.answers
        due = world.publish(1)
        await world.settle()
        assert ids_of(consumer.messages) == {due}
        acked = world.call(1, "ack", to="s2", leases=consumer.leases)
        await world.settle()
        assert acked.document["acked"] == 1
        forged = f"{'0' * 8}2-1-0"
        acked = world.call(1, "ack", to="s2", leases=[forged])
        await world.settle()
        assert acked.document == {"acked": 0, "expired": [forged]}

    world.run(test())


def test_a_subscription_that_is_deleted_ends_the_wait(world: World) -> None:
    deleted = subscription(1, subject="*", created_ms=world.clock(), deleted=True)

    async def test() -> None:
        consumer = world.pull(1, min_messages=2)
        await world.settle()
        world.publish(2)
        await world.settle()
        world.subscribe(deleted, 2)
        await world.settle()
        assert not consumer.answers
        world.subscribe(deleted, 1)
        await world.settle()
        assert consumer.messages == []
        [answer] = world.pull(1).answers
        assert answer.status == 404

    world.run(test())


def test_a_server_that_stops_answers_those_who_wait(world: World) -> None:
    async def test() -> None:
        consumers = [world.pull(shard) for shard in range(COUNT)]
        await world.settle()
        stopping = world.servers[1]
        stopping.engine.groups.stopping = True
        stopping.engine.dispatcher.drain()
        assert [bool(one.answers) for one in consumers] == [False, True, False]
        assert consumers[1].messages == []
        [answer] = world.pull(1).answers
        assert answer.status == 503
        # Nothing leaves it any more, and the others are as they were.
        world.servers[1].engine.groups.stopping = False
        world.publish(1)
        world.servers[1].engine.groups.stopping = True
        await world.move(200)
        due = world.publish(0)
        await world.settle()
        [served] = [one for one in consumers if one.answers and one.messages]
        assert ids_of(served.messages) == {due}

    world.run(test())


def test_what_is_asked_of_one_that_begins_to_stop_is_left_there(world: World) -> None:
    async def test() -> None:
        consumer = world.pull(0, wait="1s")
        await world.settle()
        world.publish(1)
        await world.turn()
        assert world.deliver(0, 1, 0)
        await world.turn()
        assert fetched(world, 0) == [1]
        world.servers[1].engine.groups.stopping = True
        world.servers[1].engine.dispatcher.drain()
        await world.move(900)
        assert not consumer.answers
        await world.move(100)
        assert consumer.messages == []

    world.run(test())


def test_a_token_that_is_revoked_ends_the_wait_and_takes_nothing(world: World) -> None:
    caller = Caller(Token("me", "00" * 32, ("consume:*",), 0), lambda: 0.0)

    async def test() -> None:
        consumer = world.call(0, "pull", caller, max=10, wait="20s")
        await world.settle()
        world.publish(2)
        await world.turn()
        assert world.deliver(0, 2, 0)
        await world.turn()
        assert fetched(world, 0) == [2]
        tokens = world.servers[0].calls.tokens
        [refuse] = tokens._waits.pop(caller)
        refuse()
        [answer] = consumer.answers
        assert answer.status == 401
        await world.settle()
        [message] = await world.available(at=1)
        assert message["attempt"] == 1
        done = world.call(0, "pull", caller, max=10, wait=0)
        await world.settle()
        assert done.answers and not tokens._waits

    world.run(test())


def test_what_nobody_pulls_any_more_is_not_told(world: World) -> None:
    async def test() -> None:
        wants = world.grants[1]._supply._askers[0].told
        consumer = world.pull(0, wait="60s")
        await world.move(45_000)
        assert wants == {1: 0}
        consumer.leave()
        await world.move(5_000)
        assert wants == {1: 0}
        again = world.pull(0, wait=0)
        assert again.messages == []  # It was known.
        await world.move(30_000)
        assert wants == {}
        assert world.servers[0].engine.timeouts.size() == 0
        due = world.publish(1)
        consumer = world.pull(0)
        await world.settle()
        assert ids_of(consumer.messages) == {due}

    world.run(test())


def test_a_pull_that_is_over_is_not_left_to_the_garbage_collector(world: World) -> None:
    async def pull(*, goes: bool) -> weakref.ref[Gathering]:
        shard = 0 if goes else 2
        world.publish(shard)
        consumer = world.pull(0, min_messages=2)
        await world.settle()
        [gathering] = [one for one in gc.get_objects() if isinstance(one, Gathering)]
        found = weakref.ref(gathering)
        if goes:
            consumer.leave()
        else:
            world.publish(0)
        await world.settle()
        assert len(consumer.answers) == (not goes)
        del consumer.leave
        world.servers[0].engine.dispatcher.pulls.fetches._purgatory.reap()
        return found

    async def test() -> None:
        gc.collect()
        gc.disable()
        try:
            for goes in (False, True):
                found = await pull(goes=goes)
                assert found() is None
        finally:
            gc.enable()

    world.run(test())


# ---- consumers that go, and links that end -------------------------------------------------------


Step = Callable[[World, Consumer, set[str]], Awaitable[None]]


def disturb(disturb: Callable[[World, Consumer], None], look: Step, *, own: bool) -> None:
    """Disturb a pull of three messages of two or three shards after each step of it, one after the
    other."""
    world = World(COUNT)

    async def test() -> None:
        for step in range(1000):
            due = {world.publish(n) for n in ((0, 1, 2) if own else (1, 2, 2))}
            consumer = world.pull(0, min_messages=3, max=3)
            was_moved = True
            for _ in range(step):
                await world.turn()
                was_moved = world.deliver_some()
            disturb(world, consumer)
            await world.settle()
            await look(world, consumer, due)
            # Nothing is leased or known any more, so that all steps come again.
            await world.move(100_000, step_ms=10_000)
            world.check_nothing_is_left()
            assert await world.available(at=1) == []
            await world.move(40_000, step_ms=10_000)
            if not was_moved:
                assert step > 8
                return
        raise AssertionError("it does not end")

    world.run(test())


@pytest.mark.parametrize("own", [True, False])
def test_whenever_a_consumer_goes_nothing_is_stranded(own: bool) -> None:
    answered = []

    async def look(world: World, consumer: Consumer, due: set[str]) -> None:
        answered.append(bool(consumer.answers))
        taker = consumer
        if not consumer.answers:
            taker = world.pull(1, wait=0)
            await world.settle()
        assert ids_of(taker.messages) == due
        assert {one["attempt"] for one in taker.messages} == {1}
        assert (await world.ack(1, taker.leases))["acked"] == 3

    disturb(lambda world, consumer: consumer.leave(), look, own=own)
    assert {*answered} == {False, True}


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("own", [True, False])
def test_whenever_a_link_ends_nothing_is_stranded(own: bool, again: bool) -> None:
    whole = []
    were_answered = []

    def cut(world: World, consumer: Consumer) -> None:
        were_answered.append(bool(consumer.answers))
        world.cut(0, 2)
        if again:
            world.connect(0, 2)

    async def look(world: World, consumer: Consumer, due: set[str]) -> None:
        acked: set[str] = set()
        if consumer.answers:
            acked |= await settle(world, consumer)
            whole.append(acked == due)
            # What it is answered from now on is leased to it.
            assert were_answered[-1] or acked == ids_of(consumer.messages)
            # What went back with the link is there for whoever is linked with its shard.
            rest = world.pull(1, wait=0)
            await world.settle()
            assert {one["attempt"] for one in rest.messages} <= {1}
            assert ids_of(rest.messages) == due - acked
            await settle(world, rest)
        if not again:
            world.connect(0, 2)
            await world.settle()
        await world.move(10, step_ms=1)
        if not acked:
            # It has waited on, and had all of it.
            acked |= await settle(world, consumer)
        assert acked <= due

    async def settle(world: World, consumer: Consumer) -> set[str]:
        leases = {one["lease"]: one["id"] for one in consumer.messages}
        over = (await world.ack(1, list(leases)))["expired"]
        assert all(lease[8] == "2" for lease in over)
        return {leases[lease] for lease in leases if lease not in over}

    disturb(cut, look, own=own)
    assert {*whole} == {False, True}


@pytest.mark.parametrize("reached", [True, False])
def test_a_fetch_that_is_refused_is_made_again(world: World, reached: bool) -> None:
    """By the shard, or here, where too much waits to be sent: then it has heard nothing of it."""
    error = OverloadedError("full")
    refused = 0

    async def refuse(shard: int, call: PeerCall) -> PeerAnswer:
        nonlocal refused
        refused += 1
        return failed(error)

    def refuse_pull(subscription: object, request: object) -> None:
        nonlocal refused
        refused += 1
        raise error

    async def test() -> None:
        consumer = world.pull(0)
        await world.settle()
        with pytest.MonkeyPatch.context() as patch:
            if reached:
                patch.setattr(world.servers[1].calls.consumers, "pull", refuse_pull)
            else:
                patch.setattr(world.nodes[0], "ask", refuse)
            due = world.publish(1)
            await world.move(500, step_ms=5)
            assert not consumer.answers
            # Not in a circle that keeps the shards busy.
            assert 5 <= refused <= 20
        await world.move(100)
        assert ids_of(consumer.messages) == {due}

    world.run(test())


def test_what_was_read_for_one_whose_link_has_ended_goes_back(world: World) -> None:
    async def test() -> None:
        server = world.servers[1]
        world.publish(1)
        await world.settle()
        fetch_now = server.reader_now.fetch_now
        server.reader_now.fetch_now = lambda *rest: None  # type: ignore[method-assign]
        bodies = server.bodies
        read = bodies._put
        held: list[Any] = []
        bodies._put = held.append
        consumer = world.pull(0)
        await world.settle()
        assert len(held) == 1 and not consumer.answers
        world.cut(0, 1)
        server.reader_now.fetch_now = fetch_now  # type: ignore[method-assign]
        bodies._put = read
        for request in held:
            server.reading.put(request)
        await world.settle()
        [message] = await world.available(at=2)
        assert message["attempt"] == 1
        world.connect(0, 1)
        await world.settle()
        assert len(consumer.messages) == 1

    world.run(test())


def test_what_was_asked_over_a_link_that_has_ended_is_not_lent(world: World) -> None:
    """It may be looked at when the next one is there already."""

    async def test() -> None:
        consumer = world.pull(0)
        await world.settle()
        world.publish(1)
        await world.turn()
        assert world.deliver(0, 1, 0)
        await world.turn()
        link = world.link(0, 1)
        assert link is not None
        late = [*link.items[1]]
        world.cut(0, 1)
        consumer.leave()
        world.connect(0, 1)
        await world.settle()
        for item in late:
            item()
        await world.settle()
        assert world.servers[1].engine.leasing.leases.count() == 0
        assert len(await world.available(at=2)) == 1

    world.run(test())


# ---- leases --------------------------------------------------------------------------------------


async def of_all(world: World, count: int = 6) -> list[str]:
    """Leases of all shards, mixed."""
    for n in range(count):
        world.publish(n % COUNT)
    consumer = world.pull(0, min_messages=count)
    await world.settle()
    leases = consumer.leases
    random.Random(5).shuffle(leases)
    return leases


@pytest.mark.parametrize("action", ["ack", "nack", "extend"])
def test_each_lease_ends_at_its_shard_and_what_was_over_is_told_in_order(
    world: World, action: str
) -> None:
    more: dict[str, Any] = {"extend": {"lease": "1m"}, "nack": {"delay": "1s"}}.get(action, {})
    counted = {"ack": "acked", "nack": "nacked", "extend": "extended"}[action]

    async def test() -> None:
        leases = await of_all(world)
        wrong = ["x", leases[0][:8] + "7-1-0", "", leases[3][:-1] + "9"]
        named = [wrong[0], *leases[:2], wrong[1], leases[2], wrong[2], *leases[3:], wrong[3]]
        done = world.call(1, action, leases=[*named, leases[0]], **more)
        await world.settle()
        twice = [] if action == "extend" else [leases[0]]
        assert done.document == {counted: 7 - len(twice), "expired": [*wrong, *twice]} or (
            action == "extend" and done.document == {counted: 6, "expired": [*wrong, leases[0]]}
        )
        if action == "extend":
            assert (await world.ack(2, leases))["acked"] == 6
        else:
            assert (await world.ack(2, leases))["expired"] == leases
        await world.move(1000)
        assert len(await world.available()) == (6 if action == "nack" else 0)

    world.run(test())


def test_leases_of_the_own_shard_and_of_nobody_ask_no_other(world: World) -> None:
    async def test() -> None:
        world.publish(0)
        await world.settle()
        consumer = world.pull(0, max=1)
        assert await world.ack(0, ["x", *consumer.leases]) == {"acked": 1, "expired": ["x"]}
        assert await world.ack(0, []) == {"acked": 0, "expired": []}
        assert not world.nodes[0].asked

    world.run(test())


@pytest.mark.parametrize("action", ["ack", "pull", "nack", "extend"])
def test_leases_of_a_shard_that_cannot_be_asked_are_not_over(world: World, action: str) -> None:
    """It may be well, and hold them: the way to it is cut."""
    more: dict[str, Any] = {"extend": {"lease": "1m"}, "nack": {"delay": "1s"}}.get(action, {})

    async def test() -> None:
        leases = await of_all(world)
        world.cut(1, 2)
        if action == "pull":
            asked = world.pull(1, ack=leases, wait=0)
        else:
            asked = world.call(1, action, leases=leases, **more)
        await world.settle()
        [answer] = asked.answers
        assert answer.status == 503
        assert json.loads(answer.body)["outcome"] == "unknown"
        world.connect(1, 2)
        await world.settle()
        theirs = [one for one in leases if one[8] == "2"]
        assert (await world.ack(1, theirs))["acked"] == len(theirs)

    world.run(test())


def test_leases_of_a_shard_that_moves_wait_for_it(world: World) -> None:
    async def test() -> None:
        leases = await of_all(world)
        world.cut(1, 2)
        ask = world.nodes[1].ask
        waiting: list[tuple[PeerCall, asyncio.Future[PeerAnswer]]] = []

        def wait(shard: int, call: PeerCall) -> asyncio.Future[PeerAnswer]:
            """As links do in a cluster."""
            if shard != 2:
                return ask(shard, call)
            waiting.append((call, asyncio.get_running_loop().create_future()))
            return waiting[-1][1]

        world.nodes[1].ask = wait  # type: ignore[method-assign]
        acked = world.call(1, "ack", leases=leases)
        await world.settle()
        assert not acked.answers
        world.connect(1, 2)
        [(call, told)] = waiting
        answer = ask(2, call)
        await world.settle()
        told.set_result(await answer)
        await world.settle()
        assert acked.document == {"acked": len(leases), "expired": []}

    world.run(test())


@pytest.mark.parametrize("action", ["ack", "pull", "nack", "extend"])
def test_whether_a_shard_that_ends_has_done_what_it_was_asked_is_not_known(
    world: World, action: str
) -> None:
    more: dict[str, Any] = {"extend": {"lease": "1m"}, "nack": {"delay": "1s"}}.get(action, {})

    async def test() -> None:
        leases = await of_all(world)
        if action == "pull":
            asked = world.pull(1, ack=leases, wait=0)
        else:
            asked = world.call(1, action, leases=leases, **more)
        await world.turn()
        assert world.deliver(1, 2, 2)
        await world.turn()  # It is done there, and the answer is on its way.
        world.cut(1, 2)
        await world.settle()
        [answer] = asked.answers
        assert answer.status == 503
        assert json.loads(answer.body)["outcome"] == "unknown"
        if action in ("nack", "extend"):
            return
        world.connect(1, 2)
        await world.settle()
        assert (await world.ack(1, leases))["expired"] == leases
        assert await world.available() == []

    world.run(test())


@pytest.mark.parametrize("action", ["ack", "pull", "nack", "extend"])
def test_leases_of_a_subscription_that_is_deleted_at_their_shard_are_not_over(
    world: World, action: str
) -> None:
    """And not yet where the call comes in."""
    more: dict[str, Any] = {"extend": {"lease": "1m"}}.get(action, {})
    deleted = subscription(1, subject="*", created_ms=world.clock(), deleted=True)
    heir = subscription(2, name="s2", subject="*", created_ms=world.clock())

    async def test() -> None:
        leases = await of_all(world)
        world.subscribe(deleted, 2)
        world.subscribe(heir, 2)
        if action == "pull":
            asked = world.pull(1, ack=leases, wait=0)
        else:
            asked = world.call(1, action, leases=leases, **more)
        await world.move(1000)
        assert asked.document["expired"] == []
        inherited = world.call(2, "pull", to="s2", max=10, wait=0)
        await world.move(1000)
        assert len(inherited.messages) == (2 if action == "nack" else 0)
        held = world.servers[2].engine.leasing.leases.count()
        assert held == (2 if action in ("nack", "extend") else 0)

    world.run(test())


@pytest.mark.parametrize("action", ["pull", "nack"])
def test_what_a_shard_refuses_is_the_answer(world: World, action: str) -> None:
    async def test() -> None:
        leases = await of_all(world)

        def refuse(*rest: object) -> None:
            raise OverloadedError("full", 3000)

        with pytest.MonkeyPatch.context() as patch:
            for name in ("ack_soon", "nack"):
                patch.setattr(world.servers[2].calls.consumers, name, refuse)
            if action == "pull":
                refused = world.pull(1, ack=leases)
            else:
                refused = world.call(1, "nack", leases=leases, delay="1s")
            await world.settle()
        [answer] = refused.answers
        assert answer.status == 503
        assert b"retry-after: 3\r\n" in answer.fields
        assert json.loads(answer.body)["type"] == "urn:delayserver:problem:overloaded"
        # The others have done it, and it may be said again.
        assert (await world.ack(1, leases))["acked"] == 2

    world.run(test())


def test_a_pull_acknowledges_at_once_and_is_answered_when_it_is_done(world: World) -> None:
    async def test() -> None:
        leases = await of_all(world)
        due = world.publish(0)
        await world.settle()
        consumer = world.pull(0, ack=[*leases, "x"], wait=0, max=1)
        # What is its own is done; the others are asked, and it has its message by now.
        assert [path for _, path in world.nodes[0].asked].count(LEASES_PATH) == 2
        assert not consumer.answers
        await world.settle()
        assert ids_of(consumer.messages) == {due}
        assert (consumer.document["acked"], consumer.document["expired"]) == (6, ["x"])
        await world.ack(0, consumer.leases)
        world.check_nothing_is_left()

    world.run(test())


@pytest.mark.parametrize("gone", [True, False])
def test_a_pull_that_is_refused_for_its_leases_gives_back_what_it_took(
    world: World, gone: bool
) -> None:
    async def test() -> None:
        leases = await of_all(world)
        world.publish(0)
        await world.settle()
        world.servers[2].engine.groups.stopping = True
        consumer = world.pull(0, ack=leases, max=1)
        if gone:
            consumer.leave()
        await world.settle()
        assert len(consumer.answers) == (not gone)
        world.servers[2].engine.groups.stopping = False
        [message] = await world.available(at=1)
        assert message["attempt"] == 1

    world.run(test())


# ---- everything at once --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_every_message_is_acknowledged_once_or_there_again(seed: int) -> None:
    chance = random.Random(seed)
    world = World(COUNT, seed=seed)
    published: set[str] = set()
    acked: list[str] = []
    perhaps: set[str] = set()
    """Of which nobody was told whether they are acknowledged: a link ended meanwhile."""
    waiting: list[Consumer] = []

    async def collect(consumer: Consumer) -> None:
        if not (consumer.answers and consumer.answers[0].status == 200):
            return
        named = {one["lease"]: one["id"] for one in consumer.messages}
        verb = chance.choice(["ack", "ack", "ack", "nack", "lose"])
        if not named or verb == "lose":
            return
        done = world.call(chance.randrange(COUNT), verb, leases=list(named))
        for _ in range(chance.randrange(6)):
            await world.turn()
            world.deliver_some()
        if chance.random() < 0.1:
            cut_some()
        await world.settle()
        if verb == "ack" and done.answers[0].status == 503:
            perhaps.update(named.values())
        elif verb == "ack":
            over = set(done.document["expired"])
            acked.extend(message_id for lease, message_id in named.items() if lease not in over)
            perhaps.update(message_id for lease, message_id in named.items() if lease in over)

    def cut_some() -> None:
        pair = chance.choice(list(world.pairs()))
        if world.link(*pair) is None:
            world.connect(*pair)
        else:
            world.cut(*pair)

    async def test() -> None:
        for _ in range(150):
            match chance.randrange(8):
                case 0 | 1:
                    for _ in range(chance.randrange(1, 6)):
                        delay_ms = chance.choice([0, 0, 50, 3000])
                        published.add(world.publish(chance.randrange(COUNT), delay_ms=delay_ms))
                case 2 | 3:
                    least = chance.choice([1, 1, 2, 5])
                    wait = chance.choice([0, 100, 5000])
                    body = {"min_messages": least, "max": least + chance.randrange(5), "wait": wait}
                    waiting.append(world.pull(chance.randrange(COUNT), **body))
                case 4 if waiting:
                    chance.choice(waiting).leave()
                case 5 if chance.random() < 0.3:
                    cut_some()
                case 6:
                    await world.move(chance.choice([1, 20, 500]), step_ms=500)
                case _:
                    for _ in range(chance.randrange(8)):
                        await world.turn()
                        world.deliver_some()
            for consumer in [one for one in waiting if one.answers]:
                waiting.remove(consumer)
                await collect(consumer)
        for pair in world.pairs():
            if world.link(*pair) is None:
                world.connect(*pair)
        for consumer in waiting:
            consumer.leave()
        # All leases are over, and nothing is on its way.
        await world.move(70_000, step_ms=5_000)
        world.check_nothing_is_left()
        left = await world.drained(at=chance.randrange(COUNT))
        assert len(acked) == len(set(acked))
        assert not set(acked) & ids_of(left)
        assert published - set(acked) - perhaps <= ids_of(left) <= published
        assert len(left) == len(ids_of(left))

    world.run(test())


def test_bytes_that_are_no_json_come_over_a_link_as_they_are(world: World) -> None:
    async def test() -> None:
        server = world.servers[2]
        consumer = world.pull(0)
        await world.settle()
        payload = Payload(b"\x00\xff]}", content=Content.BINARY)
        server.calls.publish_one(NewMessage("orders", world.clock(), payload), world.clock())
        await world.settle()
        [message] = consumer.messages
        assert base64.b64decode(message["body_base64"]) == b"\x00\xff]}"

    world.run(test())
