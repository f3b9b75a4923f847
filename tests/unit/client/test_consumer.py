"""The consumer against a fake server: handlers, acknowledgements, leases, failures and the end."""

import asyncio
import contextlib
import functools
import gc
import logging
import threading
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from delayserver.client import (
    AsyncClient,
    ConflictError,
    NotADelayServerError,
    NotAllowedError,
    Retry,
)
from delayserver.client.consumer import backoff_ms
from delayserver.client.transport import HttpAnswer
from tests.unit.client.fake_server import (
    LOST,
    Clock,
    FakeTransport,
    answer,
    asynchronous,
    problem,
)
from tests.waiting import turns, wait_until

PATH = "/v1/subscriptions/s"


@pytest.fixture(autouse=True)
def no_patience(monkeypatch):
    """A stop does not wait for pulls that nobody answers."""
    monkeypatch.setattr("delayserver.client.consumer.PATIENCE_S", 0.001)


def message(number, *, attempt=1, **fields):
    return {
        "id": f"id-{number}",
        "subject": "s",
        "key": None,
        "headers": {},
        "deliver_at": "2026-11-20T16:30:00.000Z",
        "attempt": attempt,
        "lease": f"L{number}",
        "body": number,
        **fields,
    }


class Queue:
    """A subscription that holds messages; a pull without any waits for `put`."""

    def __init__(self, *messages, subject="s", kind="pull", exists=True):
        self.view = {"name": "s", "subject": subject, "type": kind}
        self.exists = exists
        self.messages = list(messages)
        self.expired = set()
        self.failures = {}
        self.others = None
        self.transport = FakeTransport(default=self._reply)

    def _reply(self, method, path, document):
        if not path.startswith(PATH):
            return self.others
        call = path.removeprefix(PATH)
        if failures := self.failures.get(call):
            return failures.pop(0)
        match method, call:
            case "GET", "":
                return answer(200, self.view) if self.exists else problem(404)
            case "PUT", "":
                self.exists = True
                return answer(201, self.view)
            case _, "/pull":
                taken = [self.messages.pop(0) for _ in self.messages[: document["max"]]]
                expired = [lease for lease in document.get("ack", ()) if lease in self.expired]
                got = {"messages": taken, "acked": 0, "expired": expired}
                return answer(200, got) if taken else None
            case _:
                expired = [lease for lease in document["leases"] if lease in self.expired]
                return answer(200, {"done": len(document["leases"]), "expired": expired})

    def calls(self, call):
        """Documents of all calls of a kind."""
        return [
            document for _, path, document in self.transport.requests if path == f"{PATH}/{call}"
        ]

    @property
    def acked(self):
        """By calls of their own and by pulls, in this order."""
        alone = [lease for call in self.calls("ack") for lease in call["leases"]]
        return alone + [lease for call in self.calls("pull") for lease in call.get("ack", ())]

    @property
    def nacked(self):
        return {lease: call["delay"] for call in self.calls("nack") for lease in call["leases"]}


@contextlib.asynccontextmanager
async def running(consumer, **options):
    """Runs for the length of the block, and is stopped then."""
    task = asyncio.create_task(consumer.run(**options))
    try:
        await turns(50)
        yield task
    finally:
        consumer.stop()
        await task


def make(queue, handler, *, clock=None, name=None, lease=30_000, **options):
    time = (clock or Clock()).time
    consumer = AsyncClient(transport=queue.transport, time=time).consumer(**options)
    consumer.subscribe("s", name=name, lease=lease)(handler)
    return consumer


@asynchronous
async def test_messages_are_handled_and_acknowledged_together():
    queue, got = Queue(*map(message, range(5)), exists=False), []

    async def handler(one):
        got.append(one)

    consumer = make(queue, handler, concurrency=8, wait="10s", lease="1m")
    async with running(consumer):
        pass
    assert [one.body for one in got] == [0, 1, 2, 3, 4]
    assert got[0].deliver_at == datetime(2026, 11, 20, 16, 30, tzinfo=UTC)
    assert queue.calls("ack") == [{"leases": ["L0", "L1", "L2", "L3", "L4"]}]
    put = {"subject": "s", "type": "pull", "lease": 60_000}
    assert queue.transport.requests[1] == ("PUT", PATH, put)
    assert queue.calls("pull")[0] == {"max": 8, "wait": 10_000, "lease": 60_000}
    assert queue.transport.closed
    assert queue.transport.under_way == 0


@asynchronous
async def test_who_handles_one_after_the_other_makes_one_request_for_each():
    queue, got = Queue(*map(message, range(4))), []

    async def handler(one):
        got.append(one.body)

    async with running(make(queue, handler, concurrency=1)):
        await turns(100)
        assert [call.get("ack") for call in queue.calls("pull")] == [
            None, ["L0"], ["L1"], ["L2"], ["L3"],
        ]  # fmt: skip
        assert queue.calls("ack") == []
    assert got == [0, 1, 2, 3]
    # The last pull was never answered: perhaps the server has not heard of it.
    assert queue.calls("ack") == [{"leases": ["L3"]}]


@asynchronous
async def test_what_goes_along_with_a_pull_that_is_lost_is_acknowledged_once_more(caplog):
    queue, clock = Queue(message(0)), Clock()
    queue.failures = {"/ack": [LOST]}
    queue.expired = {"L0"}

    async def handler(one):
        queue.failures["/pull"] = [LOST]

    async with running(make(queue, handler, concurrency=1, clock=clock)):
        await clock.advance(25)
        assert [call.get("ack") for call in queue.calls("pull")] == [None, ["L0"], None]
        assert queue.calls("ack") == [{"leases": ["L0"]}] * 2
    assert "had ended" not in caplog.text


@asynchronous
async def test_leases_that_were_over_when_a_pull_acknowledged_them_are_named(caplog):
    queue = Queue(*map(message, range(3)))
    queue.expired = {"L0"}

    async def handler(one):
        pass

    async with running(make(queue, handler, concurrency=1)):
        await turns(100)
    assert "s: 1 leases had ended before their ack" in caplog.text


@asynchronous
async def test_while_a_pull_waits_nothing_waits_for_the_next():
    queue, gate = Queue(message(0)), asyncio.Event()

    async def handler(one):
        await gate.wait()

    async with running(make(queue, handler, concurrency=2)):
        await turns(20)
        assert len(queue.calls("pull")) == 2
        gate.set()
        await turns(20)
        assert queue.calls("ack") == [{"leases": ["L0"]}]


@asynchronous
async def test_a_subscription_that_is_there_is_not_changed():
    queue = Queue(message(1))

    async def handler(one):
        pass

    async with running(make(queue, handler)):
        pass
    assert [method for method, path, _ in queue.transport.requests if path == PATH] == ["GET"]


@pytest.mark.parametrize("other", [{"subject": "t"}, {"kind": "webhook"}])
@asynchronous
async def test_a_subscription_to_something_else_is_refused(other):
    async def handler(one):
        pass

    with pytest.raises(ConflictError, match="another name"):
        await make(Queue(**other), handler).run()


@asynchronous
async def test_no_more_than_so_many_handlers_run_at_once():
    queue, gate, most, now = Queue(*map(message, range(10))), asyncio.Event(), 0, 0

    async def handler(one):
        nonlocal now, most
        now += 1
        most = max(most, now)
        await gate.wait()
        now -= 1

    async with running(make(queue, handler, concurrency=3)):
        assert (now, len(queue.messages)) == (3, 7)
        gate.set()
        await turns(200)
        assert len(queue.acked) == 10
    assert most == 3
    assert max(pull["max"] for pull in queue.calls("pull")) == 3


@asynchronous
async def test_what_fails_comes_again_later(caplog):
    queue = Queue(message(1), message(2, attempt=4), message(3), message(4), message(5))

    async def handler(one):
        match one.body:
            case 3:
                raise Retry("5s")
            case 4:
                raise Retry(timedelta(minutes=1))
            case 1 | 2:
                raise RuntimeError("broken")

    async with running(make(queue, handler, clock=Clock(draw=0.5))):
        await turns(100)
    assert queue.nacked == {"L1": 1100, "L2": 8800, "L3": 5000, "L4": 60_000}
    assert queue.acked == ["L5"]
    failed = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.args[1] for record in failed] == ["id-1", "id-2"]
    assert "RuntimeError: broken" in caplog.text


def test_the_usual_backoff():
    assert [backoff_ms(n) for n in (1, 2, 3, 11, 100)] == [1000, 2000, 4000, 600_000, 600_000]


@asynchronous
async def test_a_plain_function_runs_in_a_thread():
    queue, threads = Queue(message(1), message(2)), set()

    def handler(one):
        threads.add(threading.current_thread())
        if one.body == 2:
            raise Retry(7)

    consumer = make(queue, handler)
    async with running(consumer):
        await asyncio.to_thread(wait_until, lambda: len(queue.acked) + len(queue.nacked) == 2)
    assert (queue.acked, queue.nacked) == (["L1"], {"L2": 7})
    assert threading.main_thread() not in threads


def decorated(handler):
    """A usual decorator: a plain function round a coroutine function."""

    def call(one):
        return handler(one)

    return call


class AsyncObject:
    """An object whose calls are coroutines."""

    def __init__(self, handler):
        self.handler = handler

    async def __call__(self, one):
        await self.handler(one)


@pytest.mark.parametrize("wrap", [decorated, AsyncObject, functools.partial])
@asynchronous
async def test_whatever_returns_a_coroutine_is_run_before_it_is_acknowledged(wrap):
    queue, got, gate = Queue(message(1), message(2)), [], asyncio.Event()

    async def handler(one):
        await gate.wait()
        got.append((one.body, threading.current_thread()))
        if one.body == 2:
            raise Retry(7)

    async with running(make(queue, wrap(handler))):
        gate.set()
        await asyncio.to_thread(wait_until, lambda: queue.acked and queue.nacked)
    assert sorted(got) == [(1, threading.current_thread()), (2, threading.current_thread())]
    assert (queue.acked, queue.nacked) == (["L1"], {"L2": 7})


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
@pytest.mark.parametrize("plain", [True, False])
@asynchronous
async def test_a_handler_that_ends_the_program_ends_it_in_order(error, plain, caplog):
    """What was done is acknowledged, what runs finishes, and its own message is given back."""
    queue, gate = Queue(*map(message, range(4))), asyncio.Event()

    async def asynchronous_handler(one):
        if one.body == 2:
            raise error
        if one.body == 3:
            await gate.wait()

    def plain_handler(one):
        if one.body == 2:
            raise error
        return gate.wait() if one.body == 3 else None

    consumer = make(queue, plain_handler if plain else asynchronous_handler)

    async def outcome():
        # A task that raises such an error takes the loop with it.
        try:
            await consumer.run()
        except BaseException as raised:
            return raised

    task = asyncio.create_task(outcome())
    await asyncio.to_thread(wait_until, consumer._stopping.is_set)
    await turns(20)
    assert not task.done()
    gate.set()
    assert await task is error
    # Twice where the pull that carried it was given up.
    assert sorted(set(queue.acked)) == ["L0", "L1", "L3"]
    assert queue.nacked == {"L2": 0}
    assert queue.transport.closed
    gc.collect()
    assert caplog.text == ""


@pytest.mark.parametrize("error", [StopIteration(), asyncio.CancelledError(), KeyError("x")])
@asynchronous
async def test_whatever_a_plain_handler_raises_its_message_comes_again(error, caplog):
    queue = Queue(message(1))

    def handler(one):
        raise error

    consumer = make(queue, handler, retry_delay_ms=lambda attempt: 5, concurrency=1)
    async with running(consumer):
        await asyncio.to_thread(wait_until, lambda: queue.nacked)
        await turns(20)
        (subscription,) = consumer._subscriptions.values()
        assert (subscription.leases, subscription.running) == ({}, set())
    assert queue.nacked == {"L1": 5}
    assert f"{type(error).__name__}" in caplog.text


@asynchronous
async def test_a_handler_that_raises_cancelled_by_itself_has_failed():
    queue = Queue(message(1))

    async def handler(one):
        raise asyncio.CancelledError

    async with running(make(queue, handler, retry_delay_ms=lambda attempt: 5)):
        pass
    assert queue.nacked == {"L1": 5}


@pytest.mark.parametrize("answer", [lambda attempt: {}[attempt], lambda attempt: None])
@asynchronous
async def test_a_wait_that_cannot_be_computed_is_the_usual_one(answer, caplog):
    queue = Queue(message(1, attempt=2), message(2))

    async def handler(one):
        raise ValueError

    consumer = make(queue, handler, retry_delay_ms=answer, concurrency=1)
    async with running(consumer):
        await turns(50)
    assert queue.nacked == {"L1": 2000, "L2": 1000}
    assert "retry_delay_ms failed for attempt 2" in caplog.text


@asynchronous
async def test_a_wait_is_never_negative():
    queue = Queue(message(1))

    async def handler(one):
        raise ValueError

    async with running(make(queue, handler, retry_delay_ms=lambda attempt: -5)):
        pass
    assert queue.nacked == {"L1": 0}


@pytest.mark.parametrize("plain", [True, False])
@asynchronous
async def test_a_handler_runs_inside_of_what_is_around_it(plain):
    queue, seen = Queue(message(1), message(2)), []

    @contextlib.contextmanager
    def around(one):
        thread = threading.current_thread()
        seen.append(("before", one.body, thread))
        try:
            yield
        except KeyError:
            seen.append(("raised", one.body, thread))
        seen.append(("after", one.body, thread))

    def handler(one):
        seen.append(("handler", one.body, threading.current_thread()))
        if one.body == 2:
            raise KeyError

    async def coroutine(one):
        handler(one)

    consumer = make(queue, handler if plain else coroutine, around=around, concurrency=1)
    async with running(consumer):
        await asyncio.to_thread(wait_until, lambda: len(queue.acked) == 2)
    steps = [(what, body) for what, body, _ in seen]
    assert steps == [
        *(("before", 1), ("handler", 1), ("after", 1)),
        *(("before", 2), ("handler", 2), ("raised", 2), ("after", 2)),
    ]
    assert len({thread for _, _, thread in seen}) == 1


# ── leases ─────────────────────────────────────────────────────────────────────────────────────


@asynchronous
async def test_leases_are_extended_while_handlers_run_in_one_call():
    queue, gate, clock = Queue(*map(message, range(3))), asyncio.Event(), Clock()

    async def handler(one):
        if one.body < 2:
            await gate.wait()

    async with running(make(queue, handler, clock=clock, lease="30s")):
        assert queue.acked == ["L2"]
        await clock.advance(9)
        assert queue.calls("extend") == []
        for _ in range(5):
            await clock.advance(10)
        assert queue.calls("extend") == [{"leases": ["L0", "L1"], "lease": 30_000}] * 5
        gate.set()
        await turns(50)
        await clock.advance(60)
        assert len(queue.calls("extend")) == 5
    assert sorted(queue.acked) == ["L0", "L1", "L2"]


@asynchronous
async def test_an_extension_that_fails_is_tried_again_at_the_next_turn(caplog):
    queue, gate, clock = Queue(message(1), message(2)), asyncio.Event(), Clock()
    queue.failures["/extend"] = [LOST]
    queue.expired = {"L2"}

    async def handler(one):
        await gate.wait()

    async with running(make(queue, handler, clock=clock)):
        await clock.advance(30)
        leases = [call["leases"] for call in queue.calls("extend")]
        assert leases == [["L1", "L2"], ["L1", "L2"], ["L1"]]
        gate.set()
    assert "extend failed" in caplog.text
    assert "1 leases had ended" in caplog.text


@asynchronous
async def test_an_acknowledgement_is_sent_until_it_is_answered_and_the_lease_kept():
    queue, clock = Queue(message(1)), Clock()
    queue.failures["/ack"] = [LOST, problem(503, retry_after="20")]

    async def handler(one):
        pass

    async with running(make(queue, handler, clock=clock)):
        await clock.advance(25)
        assert len(queue.calls("extend")) == 2
        assert len(queue.acked) == 3
        await clock.advance(60)
        assert len(queue.calls("extend")) == 2


# ── failures of the server ─────────────────────────────────────────────────────────────────────


@asynchronous
async def test_a_server_that_is_away_is_waited_for(caplog):
    caplog.set_level(logging.INFO, "delayserver.client")
    queue, clock, got = Queue(message(1)), Clock(), []
    queue.failures = {"": [LOST] * 2, "/pull": [LOST] * 50 + [problem(503, retry_after="9")]}

    async def handler(one):
        got.append(one.body)

    async with running(make(queue, handler, clock=clock)):
        await clock.advance(1000)
        assert got == [1]
    waits = [wait for wait in clock.slept if wait != 10]
    assert max(waits) == 9
    assert sorted(waits)[-2] <= 2
    assert caplog.text.count("trying again") == 2
    assert caplog.text.count("answers again") == 2


@asynchronous
async def test_a_subscription_that_was_deleted_is_made_again():
    queue, clock = Queue(message(1)), Clock()
    queue.failures["/pull"] = [problem(404)]
    queue.exists = False

    async def handler(one):
        pass

    async with running(make(queue, handler, clock=clock)):
        await clock.advance(10)
        assert queue.acked == ["L1"]
    assert [method for method, path, _ in queue.transport.requests if path == PATH] == [
        *("GET", "PUT", "GET")
    ]


@asynchronous
async def test_what_no_waiting_mends_ends_the_run_after_what_runs():
    queue, clock, gate, done = Queue(message(1)), Clock(), asyncio.Event(), []

    async def handler(one):
        await gate.wait()
        done.append(one.body)

    consumer = make(queue, handler, clock=clock)
    consumer.subscribe("t")(handler)
    queue.others = LOST
    task = asyncio.create_task(consumer.run())
    await turns(50)
    queue.others = problem(403)
    await clock.advance(5)
    assert not task.done()
    gate.set()
    with pytest.raises(NotAllowedError):
        await task
    assert done == [1]
    assert queue.acked == ["L1"]


@pytest.mark.parametrize("status", [429, 502, 503, 504])
@pytest.mark.parametrize("body", [b"<html>away</html>", b'{"title": "x", "status": 400}', b""])
@asynchronous
async def test_a_proxy_that_says_the_server_is_away_is_waited_out(status, body):
    queue, clock = Queue(message(1)), Clock()
    queue.failures = {"": [HttpAnswer(status, body)] * 3, "/pull": [HttpAnswer(status, body)] * 3}

    async def handler(one):
        pass

    async with running(make(queue, handler, clock=clock)):
        await clock.advance(60)
    assert queue.acked == ["L1"]


@pytest.mark.parametrize("depth", [900, 1000, 50_000])
@asynchronous
async def test_a_body_that_nests_too_deeply_costs_only_itself(depth, caplog):
    """The decoder of this process does not get through the answer."""
    deep = b"[" * depth + b"]" * depth
    messages = [message(1), message(2, body="DEEP", key='"}],[{'), message(3, body={"a": [1, "]"]})]
    data = msgspec.json.encode({"messages": messages}).replace(b'"DEEP"', deep)
    queue, got = Queue(), list[object]()
    queue.failures = {"/pull": [HttpAnswer(200, data)]}

    async def handler(one):
        got.append((one.id, one.key))
        assert one.raw == (deep if one.id == "id-2" else one.raw)
        if one.body == {"a": [1, "]"]}:
            got.append("whole")

    async with running(make(queue, handler, retry_delay_ms=lambda attempt: 5)) as task:
        await turns(50)
        assert not task.done()
    assert got == [("id-1", None), ("id-2", '"}],[{'), ("id-3", None), "whole"]
    assert sorted(queue.acked + list(queue.nacked)) == ["L1", "L2", "L3"]
    assert queue.nacked == {} if depth == 900 else {"L2": 5}


@pytest.mark.parametrize(
    "body", [b"<html>", b"[]", b'{"messages":[1]}', b'{"messages":[{"id":1}', b"[" * 5000]
)
@asynchronous
async def test_an_answer_that_cannot_be_read_does_not_end_the_run(body):
    queue, clock = Queue(message(1)), Clock()
    queue.failures = {"/pull": [HttpAnswer(200, body)] * 3}

    async def handler(one):
        pass

    async with running(make(queue, handler, clock=clock)):
        await clock.advance(60)
    assert queue.acked == ["L1"]


@asynchronous
async def test_a_wrong_address_ends_the_run():
    queue = Queue(message(1))
    queue.failures = {"": [HttpAnswer(200, b"<html>")]}
    with pytest.raises(NotADelayServerError):
        await make(queue, print).run()


# ── the end ────────────────────────────────────────────────────────────────────────────────────


@asynchronous
async def test_a_stop_lets_what_runs_finish():
    queue, gate = Queue(message(1)), asyncio.Event()

    async def handler(one):
        await gate.wait()

    consumer = make(queue, handler, concurrency=4)
    async with running(consumer) as task:
        assert queue.transport.under_way == 1  # a long poll
        consumer.stop()
        await turns(20)
        assert not task.done()
        gate.set()
    assert queue.acked == ["L1"]


@asynchronous
async def test_what_is_done_when_the_stop_comes_is_acknowledged():
    queue, go = Queue(message(0), message(1)), asyncio.Event()

    async def handler(one):
        await go.wait()
        if one.body == 1:
            consumer.stop()

    consumer = make(queue, handler, concurrency=2)
    async with running(consumer) as task:
        go.set()
        await task
    # The first one would have gone along with the next pull, and there is none.
    assert sorted(queue.acked) == ["L0", "L1"]
    assert queue.nacked == {}


@asynchronous
async def test_messages_of_a_pull_that_ends_after_the_stop_are_given_back(monkeypatch):
    monkeypatch.setattr("delayserver.client.consumer.PATIENCE_S", 5)
    queue = Queue(message(1))

    async def handler(one):
        raise AssertionError("it must not begin")

    consumer = make(queue, handler)
    queue.transport.gate.clear()
    task = asyncio.create_task(consumer.run())
    await turns(20)
    queue.transport.gate.set()
    while not queue.calls("pull"):
        await turns()
        queue.transport.gate.clear()
    consumer.stop()
    await turns(20)
    queue.transport.gate.set()
    await task
    assert queue.nacked == {"L1": 0}


@asynchronous
async def test_what_takes_too_long_at_a_stop_is_cancelled_and_given_back():
    queue, cancelled = Queue(message(1)), []

    async def handler(one):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(one.body)
            raise

    async with running(make(queue, handler), grace_s=0.01):
        pass
    assert cancelled == [1]
    assert queue.nacked == {"L1": 0}


@asynchronous
async def test_a_run_that_is_cancelled_gives_back_what_runs():
    queue = Queue(message(1))

    async def handler(one):
        await asyncio.Event().wait()

    task = asyncio.create_task(make(queue, handler).run())
    await turns(50)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert queue.nacked == {"L1": 0}
    assert queue.transport.under_way == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"subject": "order.*"}, "name="),
        ({"subject": "*"}, "name="),
        ({"subject": "s"}, "already"),
        ({"subject": "t", "concurrency": 0}, "concurrency"),
        ({"subject": "t", "lease": 99}, "100ms"),
        ({"subject": "t", "concurrency": 10_001}, "concurrency"),
    ],
)
@asynchronous
async def test_wrong_usage(arguments, complaint):
    async def handler(one):
        pass

    consumer = make(Queue(), handler)
    with pytest.raises(ValueError, match=complaint):
        consumer.subscribe(**arguments)
    with pytest.raises(ValueError, match="decorate"):
        await AsyncClient(transport=FakeTransport()).consumer().run()
