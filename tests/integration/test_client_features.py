"""Events, heartbeats, batches, subscriptions and dead letters of the client library, for real."""

import asyncio
from datetime import timedelta

import pytest

from delayserver.client import (
    AsyncClient,
    ChangedError,
    Client,
    ConflictError,
    Draft,
    InvalidError,
    NotFoundError,
)
from tests.integration.api_support import Receiver, unique
from tests.integration.test_client_producer import asynchronous
from tests.waiting import wait_until


@pytest.fixture
def subject():
    return unique("features")


@pytest.fixture
def receiver():
    found = Receiver()
    yield found
    found.close()


@asynchronous
async def test_an_event_completes_what_watches_its_key(shared_api, subject):
    key = f"{subject}:1/ü"
    async with AsyncClient(shared_api.process.url) as client:
        producer = client.messages
        cancelled = await producer.publish(subject, 1, delay="1h", watch=["other", key])
        fired = await producer.publish(subject, 2, delay="1h", watch=[key], on_event="fire")
        replaced = await producer.replace(subject, "k", 3, delay="1h", watch=[key])
        stored = await producer.get(fired.id)
        assert (stored.watch, stored.on_event) == ((key,), "fire")
        result = await client.events.send(key)
        assert (result.cancelled, result.fired) == (2, 1)
        states = [(await producer.get(one.id)).state for one in (cancelled, fired, replaced)]
        assert states == ["cancelled", "scheduled", "cancelled"]
        result = await client.events.send(key)
        assert (result.cancelled, result.fired) == (0, 0)


@asynchronous
async def test_a_heartbeat_is_renewed_looked_up_and_ended(shared_api, subject):
    async with AsyncClient(shared_api.process.url) as client:
        heartbeats = client.heartbeats
        options = {"subject": subject, "body": {"worker": 7}, "headers": {"x": "y"}}
        made = await heartbeats.put(subject, timeout=timedelta(minutes=1), **options)
        renewed = await heartbeats.put(subject, timeout="1m", **options)
        found = await heartbeats.get(subject)
        # What is left is counted on the stopwatch, which ticks beside the clock: a GET may say a
        # millisecond less than the PUT before it.
        assert made.expires_at <= renewed.expires_at <= found.expires_at + timedelta(milliseconds=1)
        assert (found.body, found.headers, found.timeout) == ({"worker": 7}, {"x": "y"}, "1m")
        await heartbeats.delete(subject)
        for call in (heartbeats.get, heartbeats.delete):
            with pytest.raises(NotFoundError):
                await call(subject)


@asynchronous
async def test_a_batch_is_taken_whole_or_refused_whole(shared_api, subject):
    async with AsyncClient(shared_api.process.url) as client:
        producer = client.messages
        drafts = [Draft(subject=subject, body=n, delay="1h") for n in range(50)]
        published = await producer.publish_all(drafts, ack="filed")
        assert len({one.id for one in published}) == 50
        assert sorted([found.body async for found in producer.pending(subject)]) == [*range(50)]
        with pytest.raises(InvalidError) as caught:
            await producer.publish_all([*drafts, Draft(subject=subject, delay="soon")])
        assert [one.pointer for one in caught.value.errors] == ["/50/delay"]
        await producer.publish(subject, 1, key="k", delay="1h")
        with pytest.raises(InvalidError) as caught:
            await producer.publish_all([*drafts, Draft(subject=subject, body=2, key="k")])
        assert [one.pointer for one in caught.value.errors] == ["/50/key"]
        assert len([found async for found in producer.pending(subject)]) == 51


@asynchronous
async def test_what_is_filed_is_listed_at_once(shared_api, subject):
    async with AsyncClient(shared_api.process.url) as client:
        producer = client.messages
        published = await asyncio.gather(
            *(producer.publish(subject, n, delay="1h", ack="filed") for n in range(20))
        )
        assert all(one.filed for one in published)
        assert len([found async for found in producer.pending(subject)]) == 20


@asynchronous
async def test_subscriptions_of_both_types(shared_api, subject, receiver):
    url = receiver.hook(200)
    async with AsyncClient(shared_api.process.url) as client:
        subscriptions = client.subscriptions
        hook = await subscriptions.put_webhook(
            *(f"{subject}-hook", subject, url),
            timeout="5s",
            max_in_flight=3,
            max_attempts=2,
            backoff=["1s"],
            per_second=50,
            burst=60,
            batch_max=10,
            batch_linger="20ms",
            spread="1m",
        )
        assert (hook.type, hook.url, hook.timeout, hook.max_in_flight) == ("webhook", url, "5s", 3)
        assert (hook.catch_up, hook.signed) == ({"spread": "1m"}, False)
        pull = await subscriptions.put_pull(f"{subject}-pull", subject, lease=timedelta(minutes=1))
        assert (pull.type, pull.lease, pull.paused) == ("pull", "1m", False)
        assert (await subscriptions.pause(pull.name)).paused
        assert (await subscriptions.get(pull.name)).paused
        assert not (await subscriptions.resume(pull.name)).paused
        names = [one.name for one in await subscriptions.list()]
        assert names[-2:] == [hook.name, pull.name]
        with pytest.raises(ConflictError):
            await subscriptions.put_pull(hook.name, subject)
        for name in (hook.name, pull.name):
            await subscriptions.delete(name)
            with pytest.raises(NotFoundError):
                await subscriptions.get(name)


def test_dead_letters_without_asyncio(shared_api, subject, receiver):
    with Client(shared_api.process.url) as client:
        producer, subscriptions = client.messages, client.subscriptions
        subscriptions.put_webhook(subject, subject, receiver.hook(400), max_attempts=1)
        published = [producer.publish(subject, n).id for n in range(3)]

        def letters():
            return list(client.dead_letters.list(subject, page=2))

        wait_until(lambda: len(letters()) == 3)
        assert sorted(one.body for one in letters()) == [0, 1, 2]
        assert {one.id for one in letters()} == set(published)
        assert letters()[0].attempts == 1
        client.dead_letters.discard(subject, published[0])
        with pytest.raises(NotFoundError):
            client.dead_letters.discard(subject, published[0])
        subscriptions.put_webhook(subject, subject, receiver.hook(200))
        assert client.dead_letters.redrive(subject, [published[1]]) == 1
        assert client.dead_letters.redrive(subject) == 1
        wait_until(lambda: producer.get(published[2]).state == "delivered")
        assert letters() == []
        subscriptions.delete(subject)


@asynchronous
async def test_a_schedule_is_made_looked_up_run_and_ended(shared_api, subject):
    async with AsyncClient(shared_api.process.url) as client:
        schedules = client.schedules
        made = await schedules.put(subject, subject, {"n": 1}, cron="@daily", timezone="Asia/Tokyo")
        assert len(made.next_at) == 5 and made.version
        assert await schedules.get(subject) == made
        assert made.next_at == await schedules.preview(cron="@daily", timezone="Asia/Tokyo")
        paused = await schedules.pause(subject, if_match=made.version)
        with pytest.raises(ChangedError):
            await schedules.resume(subject, if_match=made.version)
        assert paused.paused and not (await schedules.resume(subject)).paused
        run = await schedules.trigger(subject)
        assert (await client.messages.get(run.id)).headers["delay-schedule"] == subject
        assert (await schedules.get(subject)).last_id == run.id
        assert subject in [one.name async for one in schedules.list(page=2)]
        await schedules.delete(subject)
        with pytest.raises(NotFoundError):
            await schedules.delete(subject)


def test_a_schedule_without_asyncio(shared_api, subject):
    with Client(shared_api.process.url) as client:
        schedules = client.schedules
        schedules.put(subject, subject, every="1h", max_runs=2)
        assert [one.name for one in schedules.list() if one.name == subject] == [subject]
        schedules.delete(subject)


@asynchronous
async def test_a_source_is_made_looked_up_paused_and_ended(shared_api, subject):
    async with AsyncClient(shared_api.process.url) as client:
        sources = client.sources
        made = await sources.put(subject, subject, "127.0.0.1:9", "t", on_error="stop")
        assert (made.published, made.positions, made.due_header) == (0, {}, "delay-until")
        assert await sources.get(subject) == made
        paused = await sources.pause(subject, if_match=made.version)
        assert (paused.paused, paused.pause_reason) == (True, "asked")
        with pytest.raises(ChangedError):
            await sources.resume(subject, if_match=made.version)
        assert not (await sources.resume(subject)).paused
        assert subject in [one.name async for one in sources.list(page=2)]
        await sources.delete(subject)
        with pytest.raises(NotFoundError):
            await sources.get(subject)


def test_a_source_without_asyncio(shared_api, subject):
    with Client(shared_api.process.url) as client:
        sources = client.sources
        sources.put(subject, subject, "127.0.0.1:9", "t", group="g")
        assert [one.group for one in sources.list() if one.name == subject] == ["g"]
        sources.delete(subject)
