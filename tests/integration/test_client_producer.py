"""The producers of the client library against a real server: batches, restarts, refusals."""

import asyncio
import contextlib
import functools
import json
import os
import signal
import threading
import time

import pytest
from typer.testing import CliRunner

from delayserver.cli import make_app
from delayserver.cli.demo.process import free_port
from delayserver.client import (
    NO_RETRIES,
    AsyncClient,
    Client,
    ClosedError,
    ConflictError,
    DiskFullError,
    InvalidError,
    NotADelayServerError,
    NotAllowedError,
    NotFoundError,
    OverloadedError,
    Published,
    UnansweredError,
    UnreachableError,
)
from tests.integration.api_support import Receiver, time_ms, unique
from tests.unit.client.fake_server import Producer
from tests.waiting import DEADLINE_S, Looks, until

TOKEN = "a token of more than 16"


def asynchronous(test):
    """A test that is a coroutine."""

    @functools.wraps(test)
    def run(*arguments, **fixtures):
        asyncio.run(asyncio.wait_for(test(*arguments, **fixtures), 100))

    return run


@pytest.fixture
def subject():
    return unique("client")


def producer_for(api, **options):
    return Producer(url=api.process.url, **options)


@asynchronous
async def test_the_life_of_a_message(shared_api, subject):
    api = shared_api
    async with producer_for(api) as producer:
        published = await producer.publish(
            subject, {"order": 1}, delay="1h", key="a/ü", headers={"x-shop": "7"}
        )
        assert not published.duplicate
        again = await producer.publish(
            subject, {"order": 1}, delay="2h", key="a/ü", headers={"x-shop": "7"}
        )
        assert (again.id, again.duplicate) == (published.id, True)
        with pytest.raises(ConflictError) as caught:
            await producer.publish(subject, {"order": 2}, delay="1h", key="a/ü")
        assert caught.value.state == "scheduled"
        found = await producer.get(published.id)
        assert (found.body, found.key, found.state) == ({"order": 1}, "a/ü", "scheduled")
        assert found.deliver_at == published.deliver_at
        assert found.headers == {"x-shop": "7"}
        moved = await producer.move(subject=subject, key="a/ü", delay=7_200_000)
        assert moved.id == published.id
        found = await producer.get(subject=subject, key="a/ü")
        assert found.deliver_at == moved.deliver_at > published.deliver_at
        replaced = await producer.replace(subject, "a/ü", b"\0\xff", delay="1h")
        assert replaced.id != published.id
        assert (await producer.get(replaced.id)).body == b"\0\xff"
        await producer.cancel(replaced.id)
        await producer.cancel(subject=subject, key="a/ü")
        assert (await producer.get(published.id)).state == "cancelled"
        with pytest.raises(NotFoundError):
            await producer.cancel(subject=subject, key="no such key")
        with pytest.raises(NotFoundError):
            await producer.get("no such id")


@asynchronous
async def test_what_was_answered_is_what_the_server_says(shared_api, subject):
    async with producer_for(shared_api) as producer:
        published = await producer.publish(subject, delay="90m")
        stored = shared_api.look_up(published.id)
        assert time_ms(stored["deliver_at"]) == round(published.deliver_at.timestamp() * 1000)


@asynchronous
async def test_duplicates_are_told_apart_in_a_batch(shared_api, subject):
    async with producer_for(shared_api, in_flight_max=1) as producer:
        first = await producer.publish(subject, 0, key="old", delay="1h")
        names = ["new-1", "old", "new-2", "new-1", "new-3"]
        bodies = {"old": 0}
        published = await asyncio.gather(
            *(producer.publish(subject, bodies.get(n, n), key=n, delay="1h") for n in names),
            producer.publish(subject, "without a key", delay="1h"),
        )
        assert [one.duplicate for one in published] == [False, True, False, True, False, False]
        assert published[1].id == first.id
        assert published[3].id == published[0].id


@asynchronous
async def test_bad_items_fail_alone(shared_api, subject):
    """Of 600 messages that are published at once, every tenth is wrong, each in its own way."""
    async with producer_for(shared_api) as producer:
        await producer.publish(subject, "other", key="taken", delay="1h")

        def publish(number):
            match number % 40:
                case 0:
                    return producer.publish(subject, number, delay="soon")
                case 10:
                    return producer.publish("no subject!", number)
                case 20:
                    return producer.publish(subject, number, key="taken", delay="1h")
                case 30:
                    return producer.publish(subject, "x" * 100_001, delay="1h")
                case _:
                    return producer.publish(subject, number, key=str(number), delay="1h")

        results = await asyncio.gather(*map(publish, range(600)), return_exceptions=True)
        pointers = {0: "/delay", 10: "/subject", 20: None, 30: "/body"}
        ids = set()
        for number, result in enumerate(results):
            if isinstance(result, Published):
                assert number % 10
                ids.add(result.id)
                if number < 50:
                    assert shared_api.look_up(result.id)["body"] == number
                continue
            pointer = pointers[number % 40]
            assert isinstance(result, InvalidError if pointer else ConflictError), result
            assert [one.pointer for one in result.errors] == ([pointer] if pointer else [])
        assert len(ids) == 540


@asynchronous
async def test_a_batch_beyond_the_servers_limit_is_cut(shared_api, subject):
    """The server takes 1,000 messages at once; the producer gathers more than that."""
    async with producer_for(shared_api, in_flight_max=1) as producer:
        sent = (producer.publish(subject, number, delay="1h") for number in range(3000))
        published = await asyncio.gather(*sent)
    assert len({one.id for one in published}) == 3000


@asynchronous
async def test_cancels_in_bulk(shared_api, subject):
    async with producer_for(shared_api) as producer:
        published = await asyncio.gather(
            *(producer.publish(subject, n, key=str(n), delay="1h") for n in range(500))
        )
        await asyncio.gather(
            *(producer.cancel(one.id) for one in published[:250]),
            *(producer.cancel(subject=subject, key=str(n)) for n in range(250, 500)),
        )
        for one in published[::50]:
            assert shared_api.look_up(one.id)["state"] == "cancelled"


@pytest.mark.parametrize("generate_keys", [True, False])
@asynchronous
async def test_sigkill_in_the_middle_loses_nothing_and_doubles_nothing(make_api, generate_keys):
    """Tasks publish while the server is killed three times; what was answered is there, once."""
    api = make_api()
    api.start()
    subject, path = "restart", api.subscribe("restart", "restart")
    due_ms = time.time_ns() // 1_000_000 + 8_000
    published: dict[str, list[int]] = {}
    unknown: set[int] = set()
    over = False

    async def publish(producer, first):
        number = first
        while not over:
            try:
                one = await producer.publish(subject, number, deliver_at=due_ms)
                published.setdefault(one.id, []).append(number)
            except UnansweredError:
                assert not generate_keys
                unknown.add(number)
            number += 64

    async def until_more(count):
        enough = len(published) + count
        await until(lambda: len(published) >= enough)

    async with producer_for(api, generate_keys=generate_keys) as producer:
        tasks = [asyncio.create_task(publish(producer, first)) for first in range(64)]
        for _ in range(3):
            await until_more(500)
            await asyncio.to_thread(api.restart, kill=True)
            await until_more(1)
        over = True
        await asyncio.gather(*tasks)
    assert all(len(numbers) == 1 for numbers in published.values())

    received: dict[str, int] = {}
    while len(received.keys() & published.keys()) < len(published):
        messages = await asyncio.to_thread(api.pull, path, max=10_000)
        assert messages, f"{len(received)} of {len(published)} came"
        for message in messages:
            assert message["id"] not in received
            received[message["id"]] = message["body"]
        await asyncio.to_thread(api.ack, path, *messages)
    for message_id, (number,) in published.items():
        assert received[message_id] == number
    # Whatever else came is what nobody got an answer to, and each number came once.
    rest = [number for message_id, number in received.items() if message_id not in published]
    assert set(rest) <= unknown
    numbers = list(received.values())
    assert len(set(numbers)) == len(numbers)


@asynchronous
async def test_a_server_that_stops_and_comes_back_is_waited_for(lasting_api, subject):
    async with producer_for(lasting_api) as producer:
        await producer.publish(subject, 1, delay="1h")
        assert lasting_api.process.stop() == 0
        waiting = asyncio.create_task(producer.publish(subject, 2, delay="1h"))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await asyncio.to_thread(lasting_api.start)
        assert lasting_api.look_up((await waiting).id)["body"] == 2


@asynchronous
async def test_overload_is_waited_out(make_api):
    """A server that takes next to nothing before it has filed: 503 and Retry-After, and all of it
    arrives nevertheless."""
    api = make_api(
        group_max_bytes=200_000,
        checkpoint_bytes=200_000,
        unfiled_max_bytes=200_000,
        body_max_bytes=100_000,
        batch_max_bytes=400_000,
    )
    api.start()
    body = "x" * 2_000
    async with producer_for(api, retry=NO_RETRIES) as producer:
        results = await asyncio.gather(
            *(producer.publish("s", body, delay="1h") for _ in range(3000)), return_exceptions=True
        )
    assert {type(one) for one in results} <= {OverloadedError, Published}
    refused = [one for one in results if isinstance(one, OverloadedError)]
    assert refused, "the server was not overloaded"
    assert all((one.retry_after_s or 0) >= 1 for one in refused)
    taken = len(results) - len(refused)
    async with producer_for(api) as producer:
        published = await asyncio.gather(
            *(producer.publish("s", body, delay="1h") for _ in range(500))
        )
    assert len({one.id for one in published}) == 500
    assert api.ask("GET", "/v1/stats")["accepted"] == taken + 500


@asynchronous
async def test_a_full_disk_is_told(make_api):
    api = make_api(disk_reserve_bytes=2**62)
    api.start()
    async with producer_for(api) as producer:
        with pytest.raises(DiskFullError):
            await producer.publish("s")


@asynchronous
async def test_tokens(make_api):
    api = make_api(token=TOKEN)
    api.start()
    for token in (None, "wrong"):
        async with producer_for(api, token=token) as producer:
            with pytest.raises(NotAllowedError) as caught:
                await producer.publish("s")
            assert caught.value.status == 401
    async with producer_for(api, token=TOKEN) as producer:
        assert (await producer.publish("s", delay="1h")).id


@asynchronous
async def test_scopes(make_api):
    """Of what goes out together, each caller gets what its own subject deserves."""
    api = make_api(token=TOKEN)
    api.start()
    create = ("token", "create", "shop", "--scope", "publish:order.*", "--json")
    made = CliRunner().invoke(make_app(), [*create, "--data-dir", str(api.data_dir)])
    token = json.loads(made.stdout)["token"]
    async with producer_for(api, token=TOKEN) as admin:
        other = await admin.publish("other", key="k", delay="1h")
    async with producer_for(api, token=token) as producer:
        await until_valid(producer)
        subjects = ["order.a", "other", "order.b", "other.c"] * 20
        results = await asyncio.gather(
            *(producer.publish(subject, n, delay="1h") for n, subject in enumerate(subjects)),
            return_exceptions=True,
        )
        for subject, result in zip(subjects, results, strict=True):
            kind = Published if subject.startswith("order.") else NotAllowedError
            assert isinstance(result, kind), (subject, result)
        mine = [one.id for one in results if isinstance(one, Published)]
        cancelled = await asyncio.gather(
            *map(producer.cancel, [other.id, *mine, "no such id"]),
            producer.cancel(subject="other", key="k"),
            return_exceptions=True,
        )
        assert isinstance(cancelled[0], NotAllowedError)
        assert cancelled[1:-2] == [None] * len(mine)
        assert isinstance(cancelled[-2], NotFoundError)
        assert isinstance(cancelled[-1], NotAllowedError)


async def until_valid(producer):
    """The server looks at its tokens once a second."""
    async for _ in Looks(DEADLINE_S, 0.1):
        with contextlib.suppress(NotAllowedError):
            await producer.publish("order.first", delay="1h")
            return
    pytest.fail("the token was never accepted")


@asynchronous
async def test_nobody_there_and_somebody_else():
    nobody = Producer(url=f"http://127.0.0.1:{free_port()}", retry=NO_RETRIES)
    with pytest.raises(UnreachableError):
        await nobody.publish("s")
    receiver = Receiver()
    try:
        other = Producer(url=receiver.hook(200).rpartition("/")[0], retry=NO_RETRIES)
        with pytest.raises((NotADelayServerError, UnansweredError)):
            await other.publish("s")
        await other.close()
    finally:
        receiver.close()


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (b"hello\r\n\r\n", UnansweredError),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf", UnansweredError),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", NotADelayServerError),
        (b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 4\r\n\r\nnope", OverloadedError),
        (b"", UnansweredError),
    ],
)
@asynchronous
async def test_answers_that_are_none(reply, error):
    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, AsyncClient(f"http://127.0.0.1:{port}", retry=NO_RETRIES) as client:
        producer = client.messages
        with pytest.raises(error):
            await producer.publish("s")


@asynchronous
async def test_a_server_below_a_path_of_a_gateway():
    asked = []

    async def serve(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        asked.append(head.partition(b" HTTP/")[0])
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        for path in ("/delay/", "/a%20b", "/", ""):
            async with Producer(url=f"http://127.0.0.1:{port}{path}", retry=NO_RETRIES) as producer:
                with pytest.raises(NotADelayServerError):
                    await producer.get("x")
    found = b"GET %b/v1/messages/x"
    calls = [head for head in asked if b"cluster" not in head]
    assert calls == [found % path for path in (b"/delay", b"/a%20b", b"", b"")]


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8080", "ftp://host", "http://", "http://h/?q", "http://h/ü", "x"]
)
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ValueError, match="http"):
        AsyncClient(url)


# ── without asyncio ────────────────────────────────────────────────────────────────────────────


def test_a_producer_for_threads(shared_api, subject):
    found = []
    with Client(shared_api.process.url) as client:
        producer = client.messages

        def publish(first):
            for number in range(first, first + 25):
                found.append(producer.publish(subject, number, key=str(number), delay="1h"))

        threads = [threading.Thread(target=publish, args=(first,)) for first in range(0, 200, 25)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({one.id for one in found}) == 200
        one = found[0]
        moved = producer.move(one.id, delay="2h")
        assert producer.get(one.id).deliver_at == moved.deliver_at
        producer.cancel(one.id)
        assert producer.get(one.id).state == "cancelled"
        assert producer.replace(subject, "new", 1, delay="1h").id
        with pytest.raises(InvalidError):
            producer.publish(subject, delay="soon")
    client.close()
    with pytest.raises(ClosedError):
        producer.publish(subject)


def test_whoever_publishes_while_it_is_closed_is_told(shared_api, subject):
    """Nobody hangs: each publish is answered, or refused because it came too late."""
    for _ in range(20):
        client = Client(shared_api.process.url)
        outcomes: list[Published | ClosedError] = []

        def publish(client=client, outcomes=outcomes):
            try:
                while True:
                    outcomes.append(client.messages.publish(subject, delay="1h"))
            except ClosedError as error:
                outcomes.append(error)

        threads = [threading.Thread(target=publish) for _ in range(4)]
        for thread in threads:
            thread.start()
        client.close()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()


def test_ctrl_c_ends_a_wait(shared_api):
    # A process that was started in the background ignores it otherwise.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Client(f"http://127.0.0.1:{free_port()}") as client:
            producer = client.messages
            timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                producer.publish("s")
            client.close(timeout_s=0.1)
    finally:
        signal.signal(signal.SIGINT, before)
