"""Each shard is asked at its own address, as long as it is there and says so itself."""

import asyncio
import gc
from typing import Any

import pytest

from delayserver.client import (
    ClosedError,
    ConflictError,
    Draft,
    InvalidError,
    OverloadedError,
    PartlyPublishedError,
    UnansweredError,
    UnreachableError,
)
from delayserver.client.cluster_map import is_allowed
from delayserver.client.groups import AsyncClientEvents, AsyncClientHeartbeats
from delayserver.client.owners import AGAIN
from delayserver.client.retries import NO_RETRIES
from delayserver.client.transport import HttpAnswer
from delayserver.records.sharding import shard_of
from tests.unit.client.fake_server import (
    LOST,
    UNREACHABLE,
    Clock,
    Producer,
    answer,
    asynchronous,
    message_id,
    problem,
    settled,
)
from tests.unit.client.fake_shards import HOME, FakeShards
from tests.waiting import turns

OWNERS = [f"http://here:{4000 + shard}" for shard in range(3)]


def misdirected(owner):
    """What is said of a call that belongs elsewhere."""
    told = {"type": "urn:delayserver:problem:misdirected", "title": "not here", "status": 421}
    return answer(421, told, delay_owner=owner)


# ── whom to ask ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "told",
    [
        problem(404),
        problem(401),
        HttpAnswer(200, b"<html>", {}),
        answer(200, {"version": 1, "shards": []}),
        answer(200, {"version": 1, "shards": [{"shard": 0, "state": "serving", "url": HOME}]}),
        answer(
            200,
            {
                "version": 1,
                "shards": [
                    {"shard": 7, "state": "serving", "url": OWNERS[0]},
                    {"shard": 9, "state": "serving", "url": OWNERS[1]},
                ],
            },
        ),
    ],
)
@asynchronous
async def test_without_several_shards_everything_goes_where_it_always_went(told):
    shards = FakeShards()
    shards.map_replies[HOME].append(told)
    async with await shards.producer() as producer:
        for shard in range(3):
            await producer.publish("s", key=shards.key_of(shard))
        await producer.publish_all([Draft(subject="s"), Draft(subject="s")], atomic=True)
        await producer.get(message_id(1, shard=1))
        await turns(20)
    assert shards.who() == [HOME] * 5
    assert not any("delay-forward" in headers for headers in shards.headers)
    assert [url for url, _ in shards.maps] == [HOME] * len(shards.maps)
    assert shards.connected == [HOME]


@asynchronous
async def test_a_server_alone_is_asked_once_and_one_that_is_never_called_not_at_all():
    shards = FakeShards(1)
    async with await shards.producer() as producer:
        await producer.publish("s")
        await turns(20)
        await producer.publish("s")
        assert not producer._owners._tasks
    assert shards.maps == [(HOME, "/v1/cluster")]


@asynchronous
async def test_every_call_for_one_message_goes_to_the_owner():
    shards = FakeShards()
    async with await shards.producer() as producer:
        heartbeats = AsyncClientHeartbeats(producer)
        for shard, url in enumerate(OWNERS):
            key, one = shards.key_of(shard), message_id(5, shard=shard)
            beat = shards.key_of(shard, "")
            shards.asked.clear()
            shards.headers.clear()
            await producer.publish("s", key=key)
            await producer.publish("s", key=key, ack="filed")
            by_id: dict[str, Any] = {"message_id": one}
            for named in (by_id, {"subject": "s", "key": key}):
                await producer.get(**named)
                await producer.move(**named, delay=1)
                await producer.cancel(**named)
                await producer.cancel(**named, if_match="1")
            await producer.replace("s", key)
            await producer.replace("s", key, if_match="1")
            await heartbeats.put(beat, timeout=1, subject="s")
            await heartbeats.get(beat)
            await heartbeats.delete(beat)
            assert shards.who() == [url] * 15
            assert all(headers["delay-forward"] == "no" for headers in shards.headers)
        # What is for all, or for none of them, is asked where it always was.
        shards.asked.clear()
        event = AsyncClientEvents(producer).send("k")
        await settled(event, producer.get("no id"), producer.get(message_id(1, 1, 9)))
        assert shards.who() == [HOME] * 3


@asynchronous
async def test_messages_are_batched_by_shard_and_each_caller_gets_its_own_answer():
    shards = FakeShards()
    async with await shards.producer() as producer:
        keys = [str(n) for n in range(60)]
        published = await asyncio.gather(*(producer.publish("s", key=key) for key in keys))
        assert set(shards.who()) == set(OWNERS)
        for url, _, _, documents in shards.asked:
            for one in documents:
                place = keys.index(one["key"])
                shard = OWNERS.index(url)
                assert published[place].id.startswith(f"{shard:04x}")
        again = await asyncio.gather(*(producer.publish("s", key=key) for key in keys))
        assert [one.id for one in again] == [one.id for one in published]
        assert all(one.duplicate for one in again)


@asynchronous
async def test_messages_without_a_key_are_spread_over_all_shards():
    for options in ({"generate_keys": False}, {}):
        shards = FakeShards()
        async with await shards.producer(**options) as producer:
            await asyncio.gather(*(producer.publish("s", n) for n in range(300)))
        counts = dict.fromkeys(OWNERS, 0)
        for url, _, _, documents in shards.asked:
            counts[url] += len(documents)
        assert all(60 < count < 140 for count in counts.values()), counts


# ── owners that are not there, or not who they were ────────────────────────────────────────────


@pytest.mark.parametrize(
    "listener",
    [
        UNREACHABLE,
        LOST,
        problem(404),
        HttpAnswer(200, b"{}", {}),
        answer(200, {"version": 1, "shards": [{"shard": 0, "state": "serving", "url": OWNERS[1]}]}),
    ],
)
@asynchronous
async def test_nobody_is_asked_who_has_not_said_that_it_is_the_shard(listener):
    shards, clock = FakeShards(), Clock()
    shards.map_replies[OWNERS[1]] += [listener, listener]
    async with await shards.producer(time=clock.time) as producer:
        for _ in range(2):
            await producer.publish("s", key=shards.key_of(1))
            await producer.publish("s", key=shards.key_of(2))
            await clock.advance(AGAIN.first_s)
        assert shards.who() == [HOME, OWNERS[2]] * 2
        await clock.advance(AGAIN.most_s)
        await producer.publish("s", key=shards.key_of(1))
        assert shards.who()[-1] == OWNERS[1]


@asynchronous
async def test_an_owner_that_is_not_reached_costs_a_hop_and_is_asked_again_when_it_is_back():
    shards, clock = FakeShards(), Clock()
    async with await shards.producer(time=clock.time, retry=NO_RETRIES) as producer:
        key = shards.key_of(1)
        shards.unreachable.add(OWNERS[1])
        await producer.publish("s", key=key)
        await producer.publish("s", key=key)
        assert shards.who() == [HOME, HOME]
        assert not any("delay-forward" in headers for headers in shards.headers)
        shards.unreachable.clear()
        await clock.advance(AGAIN.most_s)
        await producer.publish("s", key=key)
        assert shards.who()[-1] == OWNERS[1]


@asynchronous
async def test_after_a_lost_answer_the_same_is_asked_again_at_the_configured_address():
    shards = FakeShards()
    async with await shards.producer() as producer:
        key = shards.key_of(1)
        shards.map_replies[OWNERS[1]] += [LOST] * 100
        shards.replies[OWNERS[1]].append(LOST)
        await producer.publish("s", key=key)
        (first, _, _, sent), (second, _, _, again) = shards.asked
        assert (first, second, again) == (OWNERS[1], HOME, sent)
        # … and what must not be asked again is not.
        await turns(20)
        shards.map_replies.clear()
    shards = FakeShards()
    async with await shards.producer() as producer:
        shards.replies[OWNERS[1]].append(LOST)
        with pytest.raises(UnansweredError):
            await producer.move(subject="s", key=shards.key_of(1), delay=1, if_match="1")
        assert shards.who() == [OWNERS[1]]


@asynchronous
async def test_a_call_follows_where_an_owner_says_that_it_belongs_and_the_map_is_asked_anew():
    shards = FakeShards()
    async with await shards.producer() as producer:
        key = shards.key_of(1)
        shards.replies[OWNERS[1]].append(misdirected(OWNERS[2]))
        await producer.publish("s", key=key)
        assert shards.who() == [OWNERS[1], OWNERS[2]]
        assert shards.headers[1]["delay-forward"] == "no"
        await turns(20)
        assert [path for url, path in shards.maps if url == HOME] == [
            "/v1/cluster",
            "/v1/cluster?after=1&wait=20s",
            "/v1/cluster",
            "/v1/cluster?after=1&wait=20s",
        ]


@pytest.mark.parametrize("owner", ["http://elsewhere:4000", "nonsense", "", "https://here:1"])
@asynchronous
async def test_a_call_does_not_follow_to_where_its_token_must_not_go(owner):
    shards = FakeShards()
    async with await shards.producer() as producer:
        shards.replies[OWNERS[1]].append(misdirected(owner))
        await producer.publish("s", key=shards.key_of(1))
        assert shards.who() == [OWNERS[1], HOME]
        assert owner not in shards.connected


@asynchronous
async def test_owners_that_send_a_call_round_in_circles_end_at_the_configured_address():
    shards = FakeShards()
    async with await shards.producer() as producer:
        for here, there in ((1, 2), (2, 1)):
            told = misdirected(OWNERS[there])
            shards.replies[OWNERS[here]] += [told] * 10
        await producer.publish("s", key=shards.key_of(1))
        assert shards.who() == [OWNERS[1], OWNERS[2], HOME]


@asynchronous
async def test_a_shard_that_goes_away_is_asked_for_at_home_and_at_its_new_address_when_it_is_back():
    shards = FakeShards()
    async with await shards.producer() as producer:
        key = shards.key_of(1)
        await shards.change(s1=None)
        await producer.publish("s", key=key)
        assert shards.closed == [OWNERS[1]]
        await shards.change(s1="http://here:5001")
        await producer.publish("s", key=key)
        await producer.publish("s", key=shards.key_of(2))
        assert shards.who() == [HOME, "http://here:5001", OWNERS[2]]


@asynchronous
async def test_the_map_is_asked_for_again_while_nobody_gives_it():
    shards, clock = FakeShards(), Clock()
    shards.map_replies[HOME] += [UNREACHABLE, problem(503), LOST, problem(429)]
    async with await shards.producer(time=clock.time) as producer:
        key = shards.key_of(1)
        for failures in range(1, 5):
            await producer.publish("s", key=key)
            assert shards.who()[-1] == HOME
            await clock.advance(AGAIN.wait_s(failures, 0))
        await producer.publish("s", key=key)
        assert shards.who()[-1] == OWNERS[1]


# ── nodes of a cluster, between which owners move ──────────────────────────────────────────────

NODES = [HOME, "http://here:8081", "http://here:8082"]


@asynchronous
async def test_who_knows_other_nodes_goes_on_when_the_configured_address_is_dead():
    shards, clock = FakeShards(), Clock()
    shards.nodes = NODES
    async with await shards.producer(time=clock.time, retry=NO_RETRIES) as producer:
        shards.unreachable.update((HOME, *OWNERS))
        for _ in range(2):
            await producer.publish("s", key=shards.key_of(1))  # of an owner that is away
            await producer.get("no id")  # for all of them
        assert shards.who() == [NODES[1]] * 4
        # The map comes from there, too, and names where the shards are now.
        moved = [f"http://here:{5000 + shard}" for shard in range(3)]
        shards.epochs.update(dict.fromkeys(range(3), 1))
        await shards.change(s0=moved[0], s1=moved[1], s2=moved[2])
        await clock.advance(AGAIN.first_s)
        await producer.publish("s", key=shards.key_of(1))
        assert shards.who()[-1] == moved[1]
        assert [url for url, path in shards.maps if "after=2&" in path] == [NODES[1]]
        # And another node when that one is dead.
        shards.unreachable.add(NODES[1])
        await producer.get("no id")
        assert shards.who()[-1] == NODES[2]
        # When nobody is there, that is said.
        shards.unreachable.add(NODES[2])
        with pytest.raises(UnreachableError):
            await producer.get("no id")
    assert set(NODES) <= set(shards.closed)


@asynchronous
async def test_a_node_that_stops_is_asked_no_more_where_there_are_others():
    shards = FakeShards()
    shards.nodes = NODES
    async with await shards.producer() as producer:
        shards.replies[HOME] += [problem(503), LOST]
        await producer.get("no id")
        await producer.get("no id")
        assert shards.who() == [HOME, NODES[1], NODES[1]]


@pytest.mark.parametrize(
    ("told", "is_asked_anew"),
    [
        (problem(503, type="urn:delayserver:problem:stopping"), True),
        (problem(503, type="urn:delayserver:problem:shard-away"), True),
        (problem(503, outcome="unknown"), True),
        (problem(503, type="urn:delayserver:problem:overloaded"), False),
    ],
)
@asynchronous
async def test_an_owner_that_ends_has_the_map_asked_anew(told, is_asked_anew):
    shards = FakeShards()
    async with await shards.producer() as producer:
        before = len(shards.maps)
        shards.replies[OWNERS[1]].append(told)
        await producer.publish("s", key=shards.key_of(1))
        await turns(20)
        assert (len(shards.maps) > before) == is_asked_anew


@asynchronous
async def test_a_node_that_has_not_heard_of_an_owner_does_not_bring_back_the_one_before():
    shards = FakeShards()
    shards.nodes = NODES
    async with await shards.producer() as producer:
        key = shards.key_of(1)
        shards.epochs[1] = 2
        await shards.change(s1="http://here:5001")
        shards.epochs[1] = 1
        await shards.change(s1=OWNERS[1])
        await producer.publish("s", key=key)
        shards.epochs[1] = 3
        await shards.change(s1=OWNERS[1])
        await producer.publish("s", key=key)
        assert shards.who() == ["http://here:5001", OWNERS[1]]


@asynchronous
async def test_nodes_are_asked_only_where_a_token_may_go_and_one_that_left_no_more():
    shards = FakeShards()
    shards.nodes = [*NODES[:2], "http://there:8080"]
    async with await shards.producer(retry=NO_RETRIES) as producer:
        assert "http://there:8080" not in shards.connected
        shards.nodes = [HOME, NODES[2]]
        await shards.change()
        assert NODES[1] in shards.closed
        shards.unreachable.add(HOME)
        await producer.get("no id")
        assert shards.who() == [NODES[2]]


@asynchronous
async def test_a_single_shard_on_several_nodes_is_followed_as_well():
    shards = FakeShards(1)
    shards.nodes = NODES
    async with await shards.producer() as producer:
        shards.unreachable.add(HOME)
        await producer.publish("s", key="k")
        assert shards.who() == [NODES[1]]


@asynchronous
async def test_the_owner_of_a_single_shard_is_asked_where_there_are_owners():
    shards = FakeShards(1)
    shards.epochs[0] = 3
    async with await shards.producer() as producer:
        await producer.publish("s", key="k")
        assert shards.who() == [OWNERS[0]]


# ── where a token goes ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("url", "hosts", "allowed"),
    [
        ("https://here:4000", "same", True),
        ("https://HERE:4000", "same", True),
        ("https://here", "same", True),
        ("https://there:4000", "same", False),
        ("https://here.there:4000", "same", False),
        ("https://there:4000", "any", True),
        ("http://here:4000", "any", False),
        ("http://here:4000", "same", False),
        ("https://here:4000", "none", False),
        ("https://me@here:4000", "any", False),
        ("https://here:4000/path", "any", False),
        ("https://here:4000?query", "any", False),
        ("https://here:99999", "any", False),
        ("https://[here", "any", False),
        ("https://hére:1", "any", False),
        ("here:4000", "any", False),
        ("", "any", False),
    ],
)
def test_which_addresses_are_used(url, hosts, allowed):
    assert is_allowed("https://here:8080", url, hosts) is allowed


@pytest.mark.parametrize("hosts", ["same", "any", "none"])
@asynchronous
async def test_a_map_that_names_other_hosts_is_believed_only_if_that_was_asked_for(hosts):
    shards = FakeShards()
    shards.urls[1] = "http://there:4001"
    async with await shards.producer(owner_hosts=hosts) as producer:
        await producer.publish("s", key=shards.key_of(1))
        await producer.publish("s", key=shards.key_of(2))
    first = {"any": "http://there:4001"}.get(hosts, HOME)
    assert shards.who() == [first, HOME if hosts == "none" else OWNERS[2]]
    assert ("http://there:4001" in shards.connected) == (hosts == "any")
    if hosts == "none":
        assert shards.maps == [(HOME, "/v1/cluster")]


@asynchronous
async def test_another_word_for_the_hosts_is_refused():
    with pytest.raises(ValueError, match="owner_hosts"):
        await FakeShards().producer(owner_hosts="all")


# ── the end ────────────────────────────────────────────────────────────────────────────────────


@asynchronous
async def test_nothing_is_left_of_a_producer_that_is_closed():
    before = asyncio.all_tasks()
    shards = FakeShards()
    producer = await shards.producer()
    await producer.publish("s")
    shards.map_replies[OWNERS[1]] += [LOST] * 1000
    shards.replies[OWNERS[1]].append(LOST)
    await producer.publish("s", key=shards.key_of(1))  # it is greeted again and again
    await producer.close()
    assert asyncio.all_tasks() == before
    assert sorted(shards.closed) == sorted([HOME, *OWNERS])
    with pytest.raises(ClosedError):
        await producer.publish("s")


@asynchronous
async def test_nothing_asks_for_a_producer_that_nobody_has_any_more():
    before = asyncio.all_tasks()
    shards = FakeShards()
    producer = await shards.producer()
    await producer.publish("s")
    await turns(20)
    assert asyncio.all_tasks() > before
    del producer
    gc.collect()
    await turns(20)
    assert asyncio.all_tasks() == before


def test_in_another_loop_the_map_is_asked_for_anew():
    shards = FakeShards()
    producer = None

    async def publish():
        nonlocal producer
        if producer is None:
            producer = await shards.producer()
        producer._settle()
        await turns(20)
        await producer.publish("s", key=shards.key_of(1))

    asyncio.run(publish())
    asyncio.run(publish())
    assert shards.who() == [OWNERS[1]] * 2
    assert [path for url, path in shards.maps if url == HOME and "after" not in path] == [
        "/v1/cluster"
    ] * 2


# ── all or none in each shard ──────────────────────────────────────────────────────────────────


def drafts(shards, *places, **more):
    """A message for each of these shards."""
    return [
        Draft(subject="s", body=n, key=shards.key_of(shard, nth=n), **more)
        for n, shard in enumerate(places)
    ]


@asynchronous
async def test_a_batch_is_cut_by_shards_and_its_answers_are_in_order():
    shards = FakeShards()
    async with await shards.producer() as producer:
        places = [0, 1, 2, 1, 0, 0]
        published = await producer.publish_all(drafts(shards, *places))
        assert [int(one.id[:4], 16) for one in published] == places
        assert sorted(shards.who()) == OWNERS
        assert [[one["body"] for one in sent] for _, _, _, sent in sorted(shards.asked)] == [
            [0, 4, 5],
            [1, 3],
            [2],
        ]
        again = await producer.publish_all(drafts(shards, *places), ack="filed")
        assert [(one.id, one.duplicate) for one in again] == [(one.id, True) for one in published]
        assert all(path.endswith("?ack=filed") for _, _, path, _ in shards.asked[3:])


@pytest.mark.parametrize("generated", [True, False])
@asynchronous
async def test_without_keys_of_its_own_a_batch_stays_together(generated):
    shards = FakeShards()
    async with await shards.producer(generate_keys=generated) as producer:
        for _ in range(3):
            await producer.publish_all([Draft(subject="s", body=n) for n in range(20)])
        assert sorted(shards.who()) == OWNERS
        shards.asked.clear()
        mixed = [*drafts(shards, 2, 2, 1), *(Draft(subject="s") for _ in range(5))]
        await producer.publish_all(mixed)
        assert {url: len(sent) for url, _, _, sent in shards.asked} == {OWNERS[2]: 7, OWNERS[1]: 1}


@pytest.mark.parametrize("hosts", ["same", "none"])
@asynchronous
async def test_what_must_not_be_cut_gets_keys_that_belong_together(hosts):
    shards = FakeShards()
    producer = Producer(
        url=HOME, transport=shards.connect(HOME), connect=shards.connect, owner_hosts=hosts
    )
    async with producer:
        # How many shards there are has to be known for that, also in the first call.
        await producer.publish_all([Draft(subject="s") for _ in range(20)], atomic=True)
        ((_, _, path, sent),) = shards.asked
        assert path.endswith("?atomic=true")
        assert len({shard_of("s", one["key"], 3) for one in sent}) == 1


@pytest.mark.parametrize("told", [UNREACHABLE, problem(404), problem(503), answer(200, [])])
@asynchronous
async def test_what_must_not_be_cut_does_not_wait_for_a_map_that_cannot_be_had(told):
    shards, clock = FakeShards(), Clock()
    shards.map_replies[HOME].append(told)
    producer = Producer(
        url=HOME, transport=shards.connect(HOME), connect=shards.connect, time=clock.time
    )
    async with producer:
        await producer.publish_all([Draft(subject="s")], atomic=True)
        assert shards.who() == [HOME]


@asynchronous
async def test_what_must_not_be_cut_goes_to_one_which_refuses_it():
    shards = FakeShards()
    async with await shards.producer() as producer:
        await producer.publish_all(drafts(shards, 1, 1), atomic=True)
        assert [(url, path) for url, _, path, _ in shards.asked] == [
            (OWNERS[1], "/v1/messages/batch?atomic=true")
        ]
        shards.asked.clear()
        shards.replies[OWNERS[0]].append(problem(422, "belong to 2 shards"))
        with pytest.raises(InvalidError, match="belong to 2 shards"):
            await producer.publish_all(drafts(shards, 0, 1), ack="filed", atomic=True)
        ((url, _, path, sent),) = shards.asked
        assert (url, path, len(sent)) == (OWNERS[0], "/v1/messages/batch?ack=filed&atomic=true", 2)


@asynchronous
async def test_what_was_published_is_said_with_what_was_not():
    shards = FakeShards()
    async with await shards.producer(retry=NO_RETRIES) as producer:
        shards.replies[OWNERS[1]].append(
            problem(409, "taken", state="scheduled", errors=[{"pointer": "/1/key", "detail": "no"}])
        )
        shards.replies[OWNERS[2]].append(LOST)
        with pytest.raises(PartlyPublishedError) as caught:
            await producer.publish_all(drafts(shards, 0, 1, 2, 1, 0))
        error = caught.value
        assert {index: one.id[:4] for index, one in error.published.items()} == {
            0: "0000",
            4: "0000",
        }
        assert {index: type(one) for index, one in error.errors.items()} == {
            1: ConflictError,
            2: UnansweredError,
            3: ConflictError,
        }
        assert isinstance(error.errors[1], ConflictError)
        assert [one.pointer for one in error.errors[1].errors] == ["/3/key"]
        assert "2 of 5 messages are published; message 1 is not" in str(error)


@pytest.mark.parametrize(
    ("first", "second", "raised", "pointers"),
    [
        (
            problem(422, errors=[{"pointer": "/1/key", "detail": "long"}]),
            problem(422, errors=[{"pointer": "/0", "detail": "wrong"}]),
            InvalidError,
            ["/2/key", "/1"],
        ),
        (problem(503), problem(422), InvalidError, []),
        (UNREACHABLE, problem(503), OverloadedError, []),
        (problem(422), LOST, UnansweredError, None),
        (problem(422), problem(503, outcome="unknown"), OverloadedError, []),
    ],
)
@asynchronous
async def test_where_nothing_was_published_the_gravest_error_is_raised(
    first, second, raised, pointers
):
    shards = FakeShards()
    async with await shards.producer(retry=NO_RETRIES) as producer:
        shards.replies[OWNERS[0]].append(first)
        shards.replies[HOME].append(problem(503))  # where the first is not reached
        shards.replies[OWNERS[1]].append(second)
        with pytest.raises(raised) as caught:
            await producer.publish_all(drafts(shards, 0, 1, 0))
        assert not isinstance(caught.value, PartlyPublishedError)
        if pointers is not None:
            assert [one.pointer for one in caught.value.errors] == pointers


@asynchronous
async def test_what_cannot_be_written_is_refused_before_any_part_is_sent():
    shards = FakeShards()
    async with await shards.producer() as producer:
        wrong = [*drafts(shards, 0, 1), Draft(subject="s", key=shards.key_of(2), body=object())]
        with pytest.raises(TypeError):
            await producer.publish_all(wrong)
        assert not shards.asked


@asynchronous
async def test_a_server_that_cuts_a_batch_itself_says_what_was_published():
    """The owners are not known yet, or are behind a proxy."""
    shards = FakeShards()
    shards.map_replies[HOME].append(problem(404))
    ids = [message_id(1), None, message_id(2)]
    async with await shards.producer(retry=NO_RETRIES) as producer:
        shards.replies[HOME].append(problem(503, ids=ids, outcome="unknown"))
        with pytest.raises(PartlyPublishedError) as caught:
            await producer.publish_all(drafts(shards, 0, 1, 0))
        assert [caught.value.published[index].id for index in (0, 2)] == [ids[0], ids[2]]
        assert list(caught.value.errors) == [1]
        # Of a batch that is not durable in time nobody knows it.
        shards.replies[HOME].append(problem(504, ids=ids))
        with pytest.raises(OverloadedError):
            await producer.publish_all(drafts(shards, 0, 1, 0))


# ── single publishes over several shards, behind one address ───────────────────────────────────


async def _behind_one_address(shards, **options):
    shards.map_replies[HOME].append(problem(404))
    return await shards.producer(**options)


@asynchronous
async def test_duplicates_are_told_apart_by_shard():
    shards = FakeShards()
    async with await _behind_one_address(shards) as producer:
        old = [shards.key_of(shard, nth=9) for shard in (0, 1)]
        for key in old:
            await producer.publish("s", key=key)
        for n in range(3):
            await producer.publish("s", key=shards.key_of(2, nth=20 + n))  # its numbers are ahead
        new = [shards.key_of(shard, nth=nth) for nth in (1, 2) for shard in (0, 1, 2)]
        keys = [old[0], *new[:3], old[1], *new[3:]]
        published = await asyncio.gather(*(producer.publish("s", key=key) for key in keys))
        assert len(shards.asked[-1][3]) == len(keys)
        assert [one.duplicate for one in published] == [key in old for key in keys]


@asynchronous
async def test_what_a_shard_has_published_without_a_key_is_not_sent_again():
    shards = FakeShards()
    options = {"generate_keys": False, "in_flight_max": 1}
    async with await _behind_one_address(shards, **options) as producer:
        ids = [message_id(1), message_id(2), None, None]
        shards.replies[HOME].append(problem(503, "shard 1 is away", ids=ids))
        key = shards.key_of(0)
        calls = [producer.publish("s", 0), producer.publish("s", 1, key=key)]
        calls += [producer.publish("s", 2, key=shards.key_of(1)), producer.publish("s", 3)]
        published = await asyncio.gather(*calls)
        # Not sent again: what has no key and is there. With a key, it is the same again.
        assert [one["body"] for one in shards.asked[1][3]] == [1, 2, 3]
        assert published[0].id == message_id(1)
        assert not any(one.duplicate for one in published)


@asynchronous
async def test_what_may_have_been_published_without_a_key_is_an_error():
    shards = FakeShards()
    options = {"generate_keys": False, "in_flight_max": 1}
    async with await _behind_one_address(shards, **options) as producer:
        ids = [message_id(1), None, None]
        shards.replies[HOME].append(problem(503, ids=ids, outcome="unknown"))
        calls = [producer.publish("s", 0), producer.publish("s", 1)]
        found = await settled(*calls, producer.publish("s", 2, key=shards.key_of(1)))
        assert found[0].id == message_id(1)
        assert isinstance(found[1], OverloadedError)
        assert [one["body"] for one in shards.asked[1][3]] == [2]
        assert found[2].id.startswith("0001")


@asynchronous
async def test_under_generated_keys_all_is_asked_again_and_in_the_end_what_is_there_is_told():
    shards = FakeShards()
    async with await _behind_one_address(shards, in_flight_max=1) as producer:
        refused = problem(503, ids=[message_id(1), None])
        shards.replies[HOME] += [refused]
        first = await asyncio.gather(producer.publish("s", 0), producer.publish("s", 1))
        assert [len(sent) for _, _, _, sent in shards.asked] == [2, 2]
        assert not any(one.duplicate for one in first)
        shards.replies[HOME] += [refused] * 1000
        found = await settled(producer.publish("s", 0), producer.publish("s", 1))
        assert found[0].id == message_id(1)
        assert isinstance(found[1], OverloadedError)


@asynchronous
async def test_a_shard_that_ended_before_it_answered_may_have_done_what_must_not_be_done_twice():
    shards = FakeShards()
    unknown = problem(503, "shard 1 ended", outcome="unknown")
    async with await _behind_one_address(shards) as producer:
        shards.replies[HOME].append(unknown)
        with pytest.raises(OverloadedError, match="ended"):
            await producer.move(message_id(1), delay=1, if_match="1")
        assert len(shards.asked) == 1
        # What was deleted is gone when it is asked for again; what is replaced is looked at first.
        shards.replies[HOME] += [unknown, problem(404)]
        await AsyncClientHeartbeats(producer).delete("k")
        shards.replies[HOME].append(unknown)
        await producer.replace("s", "k")
        assert [method for _, method, _, _ in shards.asked[3:]] == ["PUT", "GET", "PUT"]
