"""The producer against real shards: each is asked itself, and what happens when one is away."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from delayserver.client import (
    AsyncClient,
    Client,
    Draft,
    InvalidError,
    NotFoundError,
    PartlyPublishedError,
)
from delayserver.client.groups import AsyncClientHeartbeats
from delayserver.client.transport import HttpAnswer, HttpTransport
from delayserver.records.message_id import read_id
from delayserver.records.sharding import shard_of
from tests.integration.api_support import ApiServer, make_token, unique
from tests.integration.supervised import COUNT, Supervised
from tests.integration.test_client_producer import asynchronous
from tests.unit.client.fake_server import Producer
from tests.waiting import until, wait_until


@pytest.fixture(scope="module")
def supervised(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervised]:
    one = Supervised(tmp_path_factory.mktemp("shards"))
    one.start()
    yield one
    one.end()


class Recording(HttpTransport):
    """Knows what went where."""

    def __init__(self, url: str, *, token: str | None = None) -> None:
        super().__init__(url, token=token)
        self.done: list[tuple[str, int, bool]] = []
        """Path, status, and whether it was not to be forwarded."""

    async def request(self, method: str, path: str, *arguments: Any, **named: Any) -> HttpAnswer:
        answer = await super().request(method, path, *arguments, **named)
        if not path.startswith("/v1/cluster"):
            direct = named.get("headers", {}).get("delay-forward") == "no"
            self.done.append((path, answer.status, direct))
        return answer


class Way:
    """A producer whose requests are recorded."""

    def __init__(self, url: str, token: str | None = None) -> None:
        self.home = Recording(url, token=token)
        self.owners: list[Recording] = []
        self._token = token
        self.producer = Producer(url=url, transport=self.home, connect=self._connect)

    def _connect(self, url: str) -> Recording:
        self.owners.append(Recording(url, token=self._token))
        return self.owners[-1]

    async def until_known(self, count: int = COUNT) -> None:
        """Until so many owners are asked themselves."""
        await until(lambda: len(self.producer._owners._ready) == count)


@asynccontextmanager
async def way_to(supervised: Supervised, token: str | None = None) -> Any:
    way = Way(f"http://127.0.0.1:{supervised.port}", token)
    async with way.producer as producer:
        producer._settle()
        await way.until_known()
        yield way


@pytest.fixture
def subject() -> str:
    return unique("shards")


@asynchronous
async def test_nothing_is_forwarded_for_who_asks_the_owners(supervised, subject) -> None:
    async with way_to(supervised) as way:
        producer = way.producer
        keys = [f"k-{n}" for n in range(200)]
        published = await asyncio.gather(
            *(producer.publish(subject, key, delay="1h", key=key) for key in keys)
        )
        assert [read_id(one.id).shard for one in published] == [
            shard_of(subject, key, COUNT) for key in keys
        ]
        for key, one in list(zip(keys, published, strict=True))[:9]:
            assert (await producer.get(one.id)).body == key
            assert (await producer.move(subject=subject, key=key, delay="2h")).id == one.id
            assert (await producer.replace(subject, key, 1, delay="1h")).id != one.id
            heartbeats = AsyncClientHeartbeats(producer)
            await heartbeats.put(key, timeout="1h", subject=subject)
            assert (await heartbeats.get(key)).subject == subject
            await heartbeats.delete(key)
        await asyncio.gather(*(producer.cancel(one.id) for one in published[9:100]))
        await asyncio.gather(*(producer.cancel(subject=subject, key=key) for key in keys[100:]))
        with pytest.raises(NotFoundError):
            await producer.cancel(subject=subject, key="no such key")
        await asyncio.gather(*(producer.publish(subject, n, delay="1h") for n in range(100)))
        assert way.home.done == []
        assert len(way.owners) == COUNT
        for owner in way.owners:
            assert all(direct for _, _, direct in owner.done)
            assert {status for _, status, _ in owner.done} <= {200, 201, 204, 404}
            assert len(owner.done) > 9


@asynchronous
async def test_a_batch_over_shards_is_answered_in_its_order(supervised, subject) -> None:
    async with way_to(supervised) as way:
        producer = way.producer
        drafts = [Draft(subject=subject, body=n, key=f"{n}", delay="1h") for n in range(60)]
        published = await producer.publish_all(drafts)
        for n in range(0, 60, 7):
            stored = await producer.get(published[n].id)
            assert (stored.body, stored.key) == (n, f"{n}")
        more = [Draft(subject=subject, body=n, key=f"{n}", delay="1h") for n in range(40, 80)]
        again = await producer.publish_all(more, ack="filed")
        assert [one.duplicate for one in again] == [True] * 20 + [False] * 20
        assert [one.id for one in again[:20]] == [one.id for one in published[40:]]
        assert way.home.done == []
        # The same through one address, which cuts it itself.
        async with AsyncClient(way.home.url, owner_hosts="none") as other_client:
            other = other_client.messages
            found = await other.publish_all(more)
            assert [(one.id, one.duplicate) for one in found] == [(one.id, True) for one in again]
            mixed = [f"{n}" for n in (70, 90, 91, 71, 92, 93, 94)]
            found = await asyncio.gather(
                *(other.publish(subject, int(key), key=key, delay="1h") for key in mixed)
            )
            assert [one.duplicate for one in found] == [int(key) < 80 for key in mixed]


@asynchronous
async def test_what_some_shards_have_refused_is_said_with_what_others_took(
    supervised, subject
) -> None:
    async with way_to(supervised) as way:
        producer = way.producer
        keys = [f"{n}" for n in range(30)]
        taken = keys[3]
        first = await producer.publish(subject, "other content", key=taken, delay="1h")
        drafts = [Draft(subject=subject, body=key, key=key, delay="1h") for key in keys]
        refuses = read_id(first.id).shard
        for ways in (producer, Producer(url=way.home.url, owner_hosts="none")):
            with pytest.raises(PartlyPublishedError) as caught:
                await ways.publish_all(drafts)
            error = caught.value
            assert {*error.published, *error.errors} == set(range(30))
            for index, key in enumerate(keys):
                shard = shard_of(subject, key, COUNT)
                assert (index in error.errors) == (shard == refuses)
                if shard != refuses:
                    assert (await producer.get(error.published[index].id)).body == key
            assert isinstance(error.errors[3], InvalidError)
            assert [one.pointer for one in error.errors[3].errors] == ["/3/key"]
        await ways.close()
        # All or nothing, over all shards, is what there is not.
        for drafted in (drafts, [Draft(subject=subject, key=f"x{n}") for n in range(30)]):
            with pytest.raises(InvalidError, match="belong to 3 shards"):
                await producer.publish_all(drafted, atomic=True)
        with pytest.raises(NotFoundError):
            await producer.get(subject=subject, key="x1")
        alone = [key for key in (f"y{n}" for n in range(90)) if shard_of(subject, key, COUNT) == 1]
        done = await producer.publish_all(
            [Draft(subject=subject, key=k) for k in alone], atomic=True
        )
        assert {read_id(one.id).shard for one in done} == {1}
        # What has no key stays together, whichever way it goes and however soon.
        for hosts in ("same", "none"):
            async with AsyncClient(way.home.url, owner_hosts=hosts) as other_client:
                other = other_client.messages
                without = [Draft(subject=subject, delay="1h") for _ in range(30)]
                done = await other.publish_all(without, atomic=True)
                assert len({read_id(one.id).shard for one in done}) == 1


@asynchronous
async def test_a_shard_that_is_killed_costs_no_publish(supervised, subject) -> None:
    async with way_to(supervised) as way:
        producer = way.producer
        pid = supervised.shards[0]
        ids: dict[str, str] = {}
        is_back = asyncio.Event()

        async def publish(task: int) -> None:
            number = 0
            while not is_back.is_set():
                key = f"{task}-{number}"
                published = await producer.publish(subject, key, key=key, delay="1h")
                ids[key] = published.id
                number += 1

        tasks = [asyncio.create_task(publish(task)) for task in range(16)]
        await until(lambda: len(ids) >= 100)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: len(producer._owners._ready) < COUNT)
        await way.until_known()
        before = Counter(map(_shard, ids.values()))
        await until(
            lambda: all(
                count >= before[shard] + 20
                for shard, count in Counter(map(_shard, ids.values())).items()
            )
        )
        is_back.set()
        await asyncio.gather(*tasks)
        assert len(way.owners) == COUNT + 1
        # The one that came again is asked itself, too.
        assert any(status == 200 for _, status, _ in way.owners[-1].done)
        for key in list(ids)[:: max(1, len(ids) // 50)]:
            assert (await producer.get(subject=subject, key=key)).id == ids[key]


def _shard(message_id: str) -> int:
    return read_id(message_id).shard


@asynchronous
async def test_a_server_alone_is_asked_for_its_shards_once(shared_api: ApiServer, subject) -> None:
    way = Way(shared_api.process.url)
    async with way.producer as producer:
        await producer.publish(subject, key="1", delay="1h")
        await until(lambda: not producer._owners._tasks)
        await producer.publish_all([Draft(subject=subject, key=f"{n}") for n in range(9)])
        assert (await producer.get(subject=subject, key="1")).key == "1"
    assert not way.owners
    assert [direct for _, _, direct in way.home.done] == [False] * 3


def test_threads_ask_the_owners_too(supervised: Supervised, subject: str) -> None:
    with Client(f"http://127.0.0.1:{supervised.port}") as client:
        producer = client.messages
        producer.publish(subject, key="1", delay="1h")
        wait_until(lambda: len(producer._client._owners._ready) == COUNT)
        ids = [producer.publish(subject, n, key=f"{n}", delay="1h").id for n in range(2, 30)]
        assert {read_id(one).shard for one in ids} == set(range(COUNT))
        assert producer.get(ids[5]).body == 7


def test_a_token_for_publishing_is_enough(tmp_path) -> None:
    supervised = Supervised(tmp_path)
    supervised.data_dir.mkdir()
    token = make_token(supervised.data_dir, "shop", "publish:shop.*")
    try:
        supervised.start()

        async def publish() -> None:
            async with way_to(supervised, token) as way:
                await way.producer.publish("shop.order", key="1", delay="1h")
                assert way.home.done == []

        asyncio.run(asyncio.wait_for(publish(), 60))
    finally:
        supervised.end()
