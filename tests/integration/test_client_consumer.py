"""The consumers of the client library against a real server: work, restarts, failures."""

import asyncio
import contextlib
import logging
import threading
import time

import pytest

from delayserver.client import (
    AsyncClient,
    Client,
    ConflictError,
    NotAllowedError,
    Retry,
)
from delayserver.client.transport import HttpTransport
from tests.integration.api_support import now_ms, unique
from tests.integration.test_client_producer import asynchronous
from tests.waiting import wait_until


@pytest.fixture
def subject():
    return unique("consumed")


@contextlib.asynccontextmanager
async def running(consumer):
    """Runs for the length of the block, and is stopped then."""
    task = asyncio.create_task(consumer.run())
    try:
        yield task
    finally:
        consumer.stop()
        await task


async def until(probe):
    """Wait without blocking the loop."""
    return await asyncio.to_thread(wait_until, probe)


@asynchronous
async def test_everything_is_handled_once_and_on_time(shared_api, subject):
    consumer = AsyncClient(shared_api.process.url).consumer()
    got, early = [], []

    @consumer.subscribe(subject)
    async def handle(message):
        got.append(message.body)
        if now_ms() < message.deliver_at.timestamp() * 1000:
            early.append(message)

    async with AsyncClient(shared_api.process.url) as client, running(consumer):
        producer = client.messages
        await asyncio.gather(
            *(producer.publish(subject, n, delay=200 + n % 50) for n in range(2000))
        )
        await until(lambda: len(got) >= 2000)
    assert sorted(got) == list(range(2000))
    assert not early
    view = shared_api.ask("GET", f"/v1/subscriptions/{subject}")
    assert (view["queued"], view["in_flight"], view["lease"]) == (0, 0, "30s")


@asynchronous
async def test_consumers_with_one_name_share_and_with_two_names_both_get_all(shared_api, subject):
    got: dict[str, list[int]] = {"a1": [], "a2": [], "b": []}

    def make(who):
        consumer = AsyncClient(shared_api.process.url).consumer(concurrency=4)

        @consumer.subscribe(f"{subject}.*", name=f"{subject}-{who[0]}")
        async def handle(message):
            got[who].append(message.body)
            await asyncio.sleep(0.001)

        return consumer

    for name in "ab":
        shared_api.subscribe(f"{subject}-{name}", f"{subject}.*")
    async with contextlib.AsyncExitStack() as stack:
        for who in got:
            await stack.enter_async_context(running(make(who)))
        async with AsyncClient(shared_api.process.url) as client:
            producer = client.messages
            await asyncio.gather(*(producer.publish(f"{subject}.x", n) for n in range(300)))
        await until(lambda: len(got["a1"]) + len(got["a2"]) == 300 and len(got["b"]) == 300)
    assert sorted(got["a1"] + got["a2"]) == sorted(got["b"]) == list(range(300))
    assert got["a1"]
    assert got["a2"]


@asynchronous
async def test_a_handler_that_fails_gets_it_again_and_a_last_failure_makes_a_dead_letter(
    shared_api, subject
):
    path = shared_api.subscribe(subject, subject, retry={"max_attempts": 3})
    consumer = AsyncClient(shared_api.process.url).consumer(retry_delay_ms=lambda attempt: 50)
    attempts = []

    @consumer.subscribe(subject)
    async def handle(message):
        attempts.append((message.body, message.attempt, now_ms()))
        if message.body == "later" and message.attempt == 1:
            raise Retry("300ms")
        if message.body == "never":
            raise RuntimeError("broken")

    async with AsyncClient(shared_api.process.url) as client, running(consumer):
        producer = client.messages
        await asyncio.gather(producer.publish(subject, "later"), producer.publish(subject, "never"))
        await until(lambda: len(attempts) == 5)
        letters = await until(lambda: shared_api.ask("GET", f"{path}/dead-letters")["dead_letters"])
    assert [letter["body"] for letter in letters] == ["never"]
    first, second = (one for one in attempts if one[0] == "later")
    assert (first[1], second[1]) == (1, 2)
    assert second[2] - first[2] >= 300


class CountingTransport(HttpTransport):
    """Counts how often leases were extended."""

    extended = 0

    async def request(self, method, path, *arguments, **options):
        answer = await super().request(method, path, *arguments, **options)
        self.extended += path.endswith("/extend") and answer.is_success
        return answer


@asynchronous
async def test_a_long_handler_keeps_its_message(shared_api, subject):
    """It takes more than two leases: each third of one, the lease is extended."""
    transport = CountingTransport(shared_api.process.url)
    consumer = AsyncClient(shared_api.process.url, transport=transport).consumer()
    attempts = []

    @consumer.subscribe(subject, lease="1500ms")
    async def handle(message):
        attempts.append(message.attempt)
        await until(lambda: transport.extended > 6)

    async with AsyncClient(shared_api.process.url) as client, running(consumer):
        producer = client.messages
        published = await producer.publish(subject)
        await until(lambda: shared_api.look_up(published.id)["state"] == "delivered")
    assert attempts == [1]


def all_settled(api, published):
    """Whether the server has recorded that each message was delivered."""
    view = api.ask("GET", "/v1/subscriptions/s")
    if view["queued"] or view["in_flight"]:
        return False
    return all(api.look_up(one.id)["state"] == "delivered" for one in published[-50:])


@asynchronous
async def test_sigkill_of_the_server_loses_nothing(make_api, caplog):
    """What was acknowledged never comes again; what was not, comes; nobody has to do anything."""
    caplog.set_level(logging.INFO, "delayserver.client")
    api = make_api()
    api.start()
    consumer = AsyncClient(api.process.url).consumer(concurrency=16)
    finished, again = {}, []

    @consumer.subscribe("s")
    async def handle(message):
        await asyncio.sleep(0.01)
        if message.id in finished:
            again.append((message.attempt, message.id))
        finished[message.id] = message.body

    async with AsyncClient(api.process.url) as client, running(consumer):
        producer = client.messages
        published = []
        for round_ in range(3):
            published += await asyncio.gather(
                *(producer.publish("s", [round_, n], delay=n) for n in range(600))
            )
            so_far = len(finished)
            await until(lambda more=so_far: len(finished) > more + 50)
            await asyncio.to_thread(api.restart, kill=True)
        await until(lambda: len(finished) == len(published))
        # What was handled, but not acknowledged, before a kill comes again.
        await until(lambda: all_settled(api, published))
    assert finished.keys() == {one.id for one in published}
    # What was in a handler, or acknowledged without an answer, at one of the three kills.
    assert len(again) <= 3 * 3 * 16
    path = "/v1/subscriptions/s"
    assert api.pull(path, wait="300ms") == []
    assert "answers again" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@asynchronous
async def test_a_stop_leaves_nothing_half_done(shared_api, subject):
    """A consumer is stopped in the middle; another one gets the rest at once, and each message is
    handled once."""
    got = []

    def make():
        consumer = AsyncClient(shared_api.process.url).consumer(concurrency=10)

        @consumer.subscribe(subject)
        async def handle(message):
            await asyncio.sleep(0.005)
            got.append(message.body)

        return consumer

    async with AsyncClient(shared_api.process.url) as client:
        producer = client.messages
        shared_api.subscribe(subject, subject)
        await asyncio.gather(*(producer.publish(subject, n) for n in range(300)))
    async with running(make()):
        await until(lambda: len(got) > 50)
    stopped_at = len(got)
    assert stopped_at < 300
    began = time.monotonic()
    async with running(make()):
        await until(lambda: len(got) == 300)
    assert time.monotonic() - began < 20  # well within the lease
    assert sorted(got) == list(range(300))


@asynchronous
async def test_a_subscription_that_is_deleted_is_made_again(shared_api, subject):
    consumer = AsyncClient(shared_api.process.url).consumer(wait="300ms")
    got = []

    @consumer.subscribe(subject)
    async def handle(message):
        got.append(message.body)

    async with AsyncClient(shared_api.process.url) as client, running(consumer):
        producer = client.messages
        await producer.publish(subject, 1)
        await until(lambda: got == [1])
        shared_api.delete(f"/v1/subscriptions/{subject}")
        await producer.publish(subject, 2)
        await until(lambda: got == [1, 2])


@asynchronous
async def test_what_is_refused_ends_the_run(make_api, shared_api, subject):
    shared_api.subscribe(subject, subject, url="http://127.0.0.1:9/")

    async def handle(message):
        pass

    consumer = AsyncClient(shared_api.process.url).consumer()
    consumer.subscribe(subject)(handle)
    with pytest.raises(ConflictError, match="webhook"):
        await consumer.run()
    api = make_api(token="a token of more than 16")
    api.start()
    consumer = AsyncClient(api.process.url).consumer()
    consumer.subscribe(subject)(handle)
    with pytest.raises(NotAllowedError):
        await consumer.run()


def test_a_consumer_for_threads(shared_api, subject):
    consumer = Client(shared_api.process.url).consumer(concurrency=4)
    got, threads, meeting = [], set(), threading.Barrier(4)

    @consumer.subscribe(subject)
    def handle(message):
        if message.body < 4:
            meeting.wait(30)  # four handlers run at the same time
        threads.add(threading.current_thread().name)
        if message.body == 7 and message.attempt == 1:
            raise Retry(10)
        got.append(message.body)

    running = threading.Thread(target=consumer.run)
    running.start()
    with Client(shared_api.process.url) as client:
        producer = client.messages
        for number in range(40):
            producer.publish(subject, number)
        wait_until(lambda: len(got) == 40)
    consumer.stop()
    running.join()
    assert sorted(got) == list(range(40))
    assert len(threads) == 4


def test_a_consumer_that_was_stopped_before_it_began(shared_api, subject):
    consumer = Client(shared_api.process.url).consumer()
    consumer.subscribe(subject)(lambda message: None)
    consumer.stop()
    consumer.run()
