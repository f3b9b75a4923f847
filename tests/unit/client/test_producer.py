"""The producer: batches, keys, refusals, retries, bounds and the end, against a fake server."""

import asyncio
import dataclasses
from datetime import UTC, datetime, timedelta, timezone
from functools import partial

import msgspec
import pydantic
import pytest

from delayserver.client import (
    ChangedError,
    ClosedError,
    ConflictError,
    Debounce,
    DiskFullError,
    Draft,
    InvalidError,
    NotADelayServerError,
    NotAllowedError,
    NotFoundError,
    OtherLoopError,
    OverloadedError,
    RetryPolicy,
    ServerError,
    Stored,
    To,
    UnansweredError,
    UnreachableError,
)
from delayserver.client.cutting import decoded_page
from delayserver.client.groups import AsyncClientEvents, AsyncClientHeartbeats
from delayserver.client.transport import HttpAnswer
from tests.scaling import GROWTH_MAX, growth
from tests.unit.client.fake_server import (
    DUE_MS,
    LOST,
    UNREACHABLE,
    Clock,
    FakeTransport,
    Producer,
    answer,
    asynchronous,
    invalid,
    message_id,
    problem,
    publishing,
    settled,
    stored,
)
from tests.waiting import turns


def make(*replies, default=None, clock=None, **options):
    transport = FakeTransport(*replies, default=default or publishing())
    time = (clock or Clock(auto=True)).time
    return Producer(transport=transport, time=time, **options), transport


# ── what is sent, what is returned ─────────────────────────────────────────────────────────────


@asynchronous
async def test_what_is_published_goes_out_as_it_was_given():
    producer, transport = make(generate_keys=False)
    published = await producer.publish(
        "order.unpaid", {"order": 1001}, delay="30m", key="1001", headers={"x-shop": "7"}
    )
    assert transport.requests == [
        (
            "POST",
            "/v1/messages/batch",
            [
                {
                    "subject": "order.unpaid",
                    "body": {"order": 1001},
                    "delay": "30m",
                    "key": "1001",
                    "headers": {"x-shop": "7"},
                }
            ],
        )
    ]
    assert (published.id, published.duplicate) == (message_id(1), False)
    assert published.deliver_at == datetime.fromtimestamp(DUE_MS / 1000, UTC)


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"delay": timedelta(minutes=1, microseconds=1)}, {"delay": 60_001}),
        ({"delay": 5}, {"delay": 5}),
        ({"deliver_at": DUE_MS}, {"deliver_at": DUE_MS}),
        (
            {"deliver_at": datetime(2026, 11, 20, 17, 30, tzinfo=timezone(timedelta(hours=1)))},
            {"deliver_at": "2026-11-20T16:30:00.000Z"},
        ),
        (
            {"deliver_at": datetime(2026, 11, 20, 16, 30, 0, 1, tzinfo=UTC)},
            {"deliver_at": "2026-11-20T16:30:00.001Z"},
        ),
        ({"body": b"\0\xff"}, {"body_base64": "AP8="}),
        ({"body": [None, 1.5, "ü"]}, {"body": [None, 1.5, "ü"]}),
        ({"body": None}, {}),
    ],
)
@asynchronous
async def test_times_durations_and_bodies(given, sent):
    producer, transport = make(generate_keys=False)
    await producer.publish("s", **given)
    assert transport.documents == [[{"subject": "s", **sent}]]


@asynchronous
async def test_what_cannot_be_written_fails_before_anything_is_sent():
    producer, transport = make()
    with pytest.raises(TypeError):
        await producer.publish("s", object())
    with pytest.raises(ValueError, match="time zone"):
        await producer.publish("s", deliver_at=datetime(2026, 11, 20))  # noqa: DTZ001
    for wrong in ({}, {"message_id": "a", "key": "k"}, {"subject": "s"}):
        for call in (producer.cancel, producer.get, producer.move):
            with pytest.raises(TypeError, match="either"):
                await call(**wrong)
    assert transport.requests == []


@dataclasses.dataclass(slots=True)
class Amount:
    value: object


class Order(msgspec.Struct):
    value: object


class Model(pydantic.BaseModel):
    value: object
    at: datetime = datetime(2026, 11, 20, tzinfo=UTC)


@pytest.mark.parametrize("around", [lambda one: one, lambda one: [1, {"a": (one,)}], Amount, Order])
@pytest.mark.parametrize("wrong", [float("nan"), float("-inf"), {1, 2}, frozenset(), object()])
@asynchronous
async def test_what_json_cannot_say_is_refused_and_never_changed(around, wrong):
    """JSON has neither NaN nor sets: they would become null, and an array in any order."""
    producer, transport = make()
    for body in (around(wrong), Model(value=wrong)):
        with pytest.raises((TypeError, ValueError), match=r"JSON|serialize"):
            await producer.publish("s", body)
        with pytest.raises((TypeError, ValueError), match=r"JSON|serialize"):
            await producer.replace("s", "k", body)
    assert transport.requests == []


@pytest.mark.parametrize(
    ("body", "sent"),
    [
        (Model(value=[1.5, None]), {"value": [1.5, None], "at": "2026-11-20T00:00:00Z"}),
        ([Amount(None), Order((1, "[null]"))], [{"value": None}, {"value": [1, "[null]"]}]),
    ],
)
@asynchronous
async def test_objects_are_written_with_their_fields(body, sent):
    producer, transport = make(generate_keys=False)
    await producer.publish("s", body)
    assert transport.documents == [[{"subject": "s", "body": sent}]]


# ── natural batching ───────────────────────────────────────────────────────────────────────────


@asynchronous
async def test_what_gathers_while_requests_are_under_way_goes_out_together():
    producer, transport = make(in_flight_max=1)
    transport.gate.clear()
    first = asyncio.create_task(producer.publish("s", 0))
    await turns(20)
    others = [asyncio.create_task(producer.publish("s", n)) for n in range(1, 6)]
    await turns(20)
    assert [len(batch) for batch in transport.documents] == [1]
    transport.gate.set()
    published = await asyncio.gather(first, *others)
    assert [len(batch) for batch in transport.documents] == [1, 5]
    assert [one.id for one in published] == [message_id(n) for n in range(1, 7)]
    assert [message["body"] for message in transport.documents[1]] == [1, 2, 3, 4, 5]


@asynchronous
async def test_what_is_there_at_once_is_shared_out_among_the_requests():
    producer, transport = make(in_flight_max=2)
    await asyncio.gather(*(producer.publish("s", n) for n in range(100)))
    assert [len(batch) for batch in transport.documents] == [50, 50]
    transport.requests.clear()
    await asyncio.gather(*(producer.publish("s", n) for n in range(10)))
    assert [len(batch) for batch in transport.documents] == [10]


@asynchronous
async def test_a_batch_has_a_largest_number_and_size(monkeypatch):
    monkeypatch.setattr("delayserver.client.producer.BATCH_MAX", 20)
    monkeypatch.setattr("delayserver.client.producer.BATCH_MAX_BYTES", 5_000)
    producer, transport = make(in_flight_max=1)
    await asyncio.gather(*(producer.publish("s", n) for n in range(45)))
    assert [len(batch) for batch in transport.documents] == [20, 20, 5]
    transport.requests.clear()
    await asyncio.gather(*(producer.publish("s", "x" * 2000) for _ in range(4)))
    assert [len(batch) for batch in transport.documents] == [2, 2]
    transport.requests.clear()
    await producer.publish("s", "x" * 10_000)
    assert len(transport.documents) == 1


@asynchronous
async def test_a_caller_that_goes_away_disturbs_nobody():
    producer, transport = make(in_flight_max=1)
    transport.gate.clear()
    sent = asyncio.create_task(producer.publish("s", "sent"))
    await turns(20)
    gathered = asyncio.create_task(producer.publish("s", "gathered"))
    stays = asyncio.create_task(producer.publish("s", "stays"))
    await turns(20)
    sent.cancel()
    gathered.cancel()
    await turns(20)
    transport.gate.set()
    assert (await stays).id == message_id(2)
    bodies = [[message["body"] for message in batch] for batch in transport.documents]
    assert bodies == [["sent"], ["stays"]]
    await producer.close()


# ── keys ───────────────────────────────────────────────────────────────────────────────────────


@asynchronous
async def test_a_retry_reuses_the_key_that_was_given_or_generated():
    producer, transport = make(LOST, stored(7, 8))
    await asyncio.gather(producer.publish("s", 1), producer.publish("s", 2, key="own"))
    first, second = transport.documents
    assert first == second
    generated, own = (message["key"] for message in first)
    assert generated.startswith("auto-")
    assert len(generated) < 40
    assert own == "own"


@asynchronous
async def test_generated_keys_differ_between_messages_and_producers():
    keys = set()
    for _ in range(2):
        producer, transport = make()
        await asyncio.gather(*(producer.publish("s") for _ in range(3)))
        keys |= {message["key"] for batch in transport.documents for message in batch}
    assert len(keys) == 6


@pytest.mark.parametrize("options", [{"generate_keys": False}, {"retry": RetryPolicy(timeout_s=0)}])
@asynchronous
async def test_keys_are_generated_only_for_retries(options):
    producer, transport = make(**options)
    await producer.publish("s")
    assert transport.documents == [[{"subject": "s"}]]


@asynchronous
async def test_without_a_key_a_lost_answer_is_not_asked_for_again():
    producer, transport = make(LOST, stored(5), generate_keys=False)
    lost, kept = await settled(producer.publish("s", 1), producer.publish("s", 2, key="k"))
    assert lost is LOST
    assert kept.id == message_id(5)
    assert [len(batch) for batch in transport.documents] == [2, 1]


@asynchronous
async def test_without_a_key_what_was_not_taken_is_sent_again():
    replies = UNREACHABLE, problem(503), problem(429), stored(5)
    producer, transport = make(*replies, generate_keys=False)
    assert (await producer.publish("s", 1)).id == message_id(5)
    assert len(transport.requests) == 4


@asynchronous
async def test_which_ones_of_a_batch_are_duplicates():
    # 90 and 3 were there before, 91 and 92 are new, the second 91 is a repetition within the batch.
    producer, _ = make(stored(90, 91, 3, 91, 92, duplicates=3), generate_keys=False)
    published = await asyncio.gather(*(producer.publish("s", n, key=str(n)) for n in range(5)))
    assert [one.duplicate for one in published] == [True, False, True, True, False]


@pytest.mark.parametrize(("seqs", "duplicates"), [((5,), 1), ((5, 4, 5), 3)])
@asynchronous
async def test_a_batch_of_duplicates_only(seqs, duplicates):
    producer, _ = make(stored(*seqs, duplicates=duplicates), generate_keys=False)
    published = await asyncio.gather(*(producer.publish("s", key=str(n)) for n in range(len(seqs))))
    assert all(one.duplicate for one in published)


@asynchronous
async def test_what_bears_a_generated_key_is_no_duplicate():
    producer, _ = make(LOST, stored(5, 6, duplicates=2))
    generated, own = await asyncio.gather(producer.publish("s"), producer.publish("s", key="k"))
    assert (generated.duplicate, own.duplicate) == (False, True)


# ── refusals ───────────────────────────────────────────────────────────────────────────────────


@asynchronous
async def test_a_bad_item_fails_only_its_own_caller():
    producer, transport = make(
        invalid("/1/delay", "/3/key"),
        stored(1, 2, 3),
        invalid("/0/delay", detail="too far"),
        problem(409, "other content", state="scheduled"),
        generate_keys=False,
    )
    results = await settled(*(producer.publish("s", n, key=str(n)) for n in range(5)))
    assert [results[n].id for n in (0, 2, 4)] == [message_id(n) for n in (1, 2, 3)]
    bodies = [[message["body"] for message in batch] for batch in transport.documents]
    assert bodies == [[0, 1, 2, 3, 4], [0, 2, 4], [1], [3]]
    bad, conflict = results[1], results[3]
    assert isinstance(bad, InvalidError)
    assert [(one.pointer, one.detail) for one in bad.errors] == [("/delay", "too far")]
    assert isinstance(conflict, ConflictError)
    assert conflict.state == "scheduled"


@asynchronous
async def test_a_batch_that_is_too_large_is_cut_in_halves():
    def refuse_large(method, path, document):
        return problem(413) if len(document) > 2 else stored(*(one["body"] for one in document))

    producer, transport = make(default=refuse_large, in_flight_max=1)
    published = await asyncio.gather(*(producer.publish("s", n) for n in range(1, 8)))
    assert [one.id for one in published] == [message_id(n) for n in range(1, 8)]
    assert [len(batch) for batch in transport.documents] == [7, 3, 1, 2, 4, 2, 2]


@asynchronous
async def test_one_message_that_is_too_large_is_invalid():
    producer, _ = make(problem(413, "too large"))
    with pytest.raises(InvalidError, match="too large"):
        await producer.publish("s", "x" * 100)


@asynchronous
async def test_a_subject_that_is_not_allowed_fails_alone():
    def allow(method, path, document):
        subjects = {one["subject"] for one in document}
        return problem(403) if "secret" in subjects else stored(*range(1, len(document) + 1))

    producer, transport = make(default=allow)
    names = "a", "secret", "a", "secret"
    results = await settled(*(producer.publish(name) for name in names))
    assert [isinstance(one, NotAllowedError) for one in results] == [False, True, False, True]
    assert len(transport.requests) == 3


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (problem(401), NotAllowedError),
        (problem(403), NotAllowedError),
        (problem(500), ServerError),
        (problem(507), DiskFullError),
        (problem(404), NotFoundError),
        (HttpAnswer(200, b"hello"), NotADelayServerError),
        (HttpAnswer(200, b'{"ids": []}'), NotADelayServerError),
        (HttpAnswer(404, b"<html>", {"content-type": "text/html"}), NotADelayServerError),
        (invalid("/7/x"), InvalidError),
    ],
)
@asynchronous
async def test_what_no_retry_mends_is_told_to_everybody(reply, error):
    producer, _ = make(default=lambda *request: reply)
    results = await settled(*(producer.publish("s") for _ in range(2)))
    assert [type(one) for one in results] == [error, error]


@asynchronous
async def test_an_answer_with_fewer_ids_than_messages_tells_nobody_a_wrong_one():
    producer, _ = make(stored(1))
    results = await settled(producer.publish("s", 1), producer.publish("s", 2))
    assert [type(one) for one in results] == [NotADelayServerError] * 2


@asynchronous
async def test_an_error_carries_the_problem_document():
    producer, _ = make(invalid("/0/key", detail="a key has 1 to 256 bytes"))
    with pytest.raises(InvalidError, match="a key has 1 to 256 bytes") as caught:
        await producer.publish("s", key="")
    error = caught.value
    assert (error.status, error.type, error.title) == (422, "urn:x", "Refused")
    assert error.errors[0].pointer == "/key"


# ── retries ────────────────────────────────────────────────────────────────────────────────────


@asynchronous
async def test_the_waits_grow_and_the_servers_wish_is_the_least():
    clock = Clock(auto=True, draw=0.999999)
    replies = [UNREACHABLE] * 4 + [problem(503, retry_after="3"), problem(429), stored(1)]
    producer, _ = make(*replies, clock=clock, retry=RetryPolicy(first_s=0.1, most_s=0.5))
    await producer.publish("s")
    assert [round(wait, 3) for wait in clock.slept] == [0.1, 0.2, 0.4, 0.5, 3, 0.5]


@pytest.mark.parametrize(
    ("reply", "error"),
    [(LOST, UnansweredError), (UNREACHABLE, UnreachableError), (problem(503), OverloadedError)],
)
@asynchronous
async def test_when_the_time_is_up_the_last_failure_is_told(reply, error):
    clock = Clock(auto=True)
    producer, transport = make(default=lambda *request: reply, clock=clock)
    began = clock.now
    with pytest.raises(error):
        await producer.publish("s")
    assert 50 < clock.now - began <= 60
    assert len(transport.requests) > 10


@asynchronous
async def test_without_retries_the_first_failure_is_told():
    for reply in (LOST, problem(503, retry_after="1")):
        producer, transport = make(reply, retry=RetryPolicy(timeout_s=0))
        with pytest.raises((UnansweredError, OverloadedError)):
            await producer.publish("s")
        assert len(transport.requests) == 1


@pytest.mark.parametrize(
    ("policy", "timeouts_s"),
    [
        (RetryPolicy(timeout_s=2), [2]),
        (RetryPolicy(timeout_s=0), [30]),
        (RetryPolicy(timeout_s=65, first_s=2), [30, 30, 1]),
    ],
)
@asynchronous
async def test_a_server_that_keeps_silent_is_waited_for_no_longer_than_was_asked(
    policy, timeouts_s
):
    clock = Clock(auto=True, draw=0.999999)

    def silent(*request):
        clock.now += transport.timeouts_s[-1]
        return LOST

    transport = FakeTransport(default=silent)
    producer = Producer(transport=transport, time=clock.time, retry=policy)
    with pytest.raises(UnansweredError):
        await producer.publish("s")
    assert [round(one) for one in transport.timeouts_s] == timeouts_s
    transport.timeouts_s.clear()
    producer = Producer(transport=transport, time=clock.time, retry=policy, timeout_s=1)
    with pytest.raises(UnansweredError):
        await producer.get("a")
    assert max(transport.timeouts_s) == 1


@asynchronous
async def test_each_call_may_have_a_time_of_its_own():
    producer, transport = make(default=lambda *request: None)
    calls = (
        partial(producer.publish, "s"),
        partial(producer.cancel, "a"),
        partial(producer.cancel, "a", if_match="1"),
        partial(producer.get, "a"),
        partial(producer.move, "a", delay="1s"),
        partial(producer.replace, "s", "k"),
    )
    for call in calls:
        with pytest.raises(UnansweredError, match=r"within 0\.01 s"):
            await call(timeout_s=0.01)
    assert len(transport.requests) == len(calls)
    await producer.close()


# ── event loops, one after the other ───────────────────────────────────────────────────────────


def test_a_producer_serves_one_event_loop_after_the_other():
    producer, transport = make(in_flight_max=1)
    transport.gate = asyncio.Event()

    async def leave_one_behind():
        transport.gate.clear()
        task = asyncio.create_task(producer.publish("s", "left"))
        await turns(20)
        return task

    async def publish():
        transport.gate = asyncio.Event()  # the other one knows that loop
        transport.gate.set()
        return await asyncio.gather(*(producer.publish("s", n) for n in range(2)))

    loop = asyncio.new_event_loop()
    left = loop.run_until_complete(leave_one_behind())
    loop.close()  # and nothing that was under way there is ever ended
    for _ in range(2):
        assert len(asyncio.run(publish())) == 2
    keys = [message["key"] for batch in transport.documents for message in batch]
    assert len(set(keys)) == len(keys) == 5
    assert not left.done()
    asyncio.run(producer.close())
    for call in (producer.publish, producer.get, producer.cancel):
        with pytest.raises(ClosedError):
            asyncio.run(call("s"))


@asynchronous
async def test_in_two_event_loops_at_once_it_is_refused_before_anything_is_sent():
    producer, transport = make()
    await producer.publish("s", "here")
    for call in (producer.publish, producer.cancel, producer.get):
        with pytest.raises(OtherLoopError, match="one for each loop"):
            await asyncio.to_thread(asyncio.run, call("s"))
    assert len(transport.requests) == 1
    await producer.publish("s", "here")


# ── bounds and the end ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("bound", [{"pending_max": 3}, {"pending_max_bytes": 350}])
@asynchronous
async def test_publish_waits_while_there_is_no_room(bound):
    producer, transport = make(in_flight_max=1, generate_keys=False, **bound)
    transport.gate.clear()
    tasks = [asyncio.create_task(producer.publish("s", "x" * 80, key=str(n))) for n in range(8)]
    await turns(20)
    assert producer._publishes.pending == 3
    tasks[4].cancel()  # one that waits
    transport.gate.set()
    done = await settled(*tasks)
    assert [isinstance(one, asyncio.CancelledError) for one in done].count(True) == 1
    keys = [message["key"] for batch in transport.documents for message in batch]
    assert keys == [str(n) for n in range(8) if n != 4]
    assert [len(batch) for batch in transport.documents] == [3, 3, 1]
    assert (
        producer._publishes.pending,
        producer._publishes.pending_bytes,
    ) == (0, 0)


@asynchronous
async def test_a_message_beyond_the_bound_goes_alone():
    producer, _ = make(pending_max_bytes=100)
    await asyncio.gather(*(producer.publish("s", "x" * 1000) for _ in range(3)))


@asynchronous
async def test_close_waits_for_what_is_under_way():
    producer, transport = make(in_flight_max=1, pending_max=2)
    transport.gate.clear()
    tasks = [asyncio.create_task(producer.publish("s", n)) for n in range(4)]
    await turns(20)
    closing = asyncio.create_task(producer.close())
    await turns(20)
    with pytest.raises(ClosedError):
        await producer.publish("s", "late")
    assert not closing.done()
    transport.gate.set()
    done = await settled(*tasks)
    await closing
    # Two were taken; the others waited for room, and were never sent.
    assert [getattr(one, "id", type(one)) for one in done] == [
        *(message_id(1), message_id(2)),
        *(ClosedError, ClosedError),
    ]
    assert transport.closed
    await producer.close()


@asynchronous
async def test_close_gives_up_when_its_time_is_over():
    producer, transport = make(None, in_flight_max=1)
    tasks = [asyncio.create_task(producer.publish("s", n)) for n in range(2)]
    await turns(20)
    late = asyncio.create_task(producer.publish("s", "gathered"))
    await turns(20)
    await producer.close(timeout_s=0.01)
    done = await settled(*tasks, late)
    assert [type(one) for one in done] == [ClosedError] * 3
    assert "may have been done" in str(done[0])
    assert "before it was sent" in str(done[2])
    assert transport.under_way == 0
    await producer.close()


@asynchronous
async def test_a_block_that_an_exception_ends_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr("delayserver.client.calling.EXIT_S", 0.01)
    producer, _ = make(None)
    with pytest.raises(KeyError):
        async with producer:
            task = asyncio.create_task(producer.publish("s"))
            await turns(20)
            raise KeyError
    with pytest.raises(ClosedError):
        await task


@asynchronous
async def test_the_end_does_not_wait_for_what_nobody_waits_for():
    producer, transport = make(None, stored(1), in_flight_max=1)
    with pytest.raises(KeyError):
        async with producer:
            given_up = asyncio.create_task(producer.publish("s", "given up"))
            await turns(20)
            gathered = asyncio.create_task(producer.publish("s", "waited for"))
            await turns(20)
            given_up.cancel()
            await turns(20)
            raise KeyError
    assert (await gathered).id == message_id(1)
    assert transport.under_way == 0


@asynchronous
async def test_a_batch_that_was_never_begun_is_given_up_too():
    producer, _ = make(None)
    task = asyncio.create_task(producer.publish("s"))
    await turns(2)
    task.cancel()
    await producer.close()
    assert producer._publishes.pending == 0


# ── cancel, and single calls ───────────────────────────────────────────────────────────────────


@asynchronous
async def test_cancels_go_out_together_and_each_has_its_own_answer():
    reply = answer(
        200,
        {
            "results": [
                {"id": "a", "state": "cancelled", "error": None},
                {"id": "b", "state": "delivered", "error": "the message is delivered"},
                {"subject": "s", "key": "k", "state": "cancelled", "error": None},
                {"subject": "s", "key": "x", "state": None, "error": "there is no message"},
            ]
        },
    )
    producer, transport = make(reply, problem(404))
    results = await settled(
        producer.cancel(subject="s", key="k"),
        producer.cancel("a"),
        producer.cancel(subject="s", key="x"),
        producer.cancel("b"),
    )
    keys = [{"subject": "s", "key": "k"}, {"subject": "s", "key": "x"}]
    assert transport.requests == [
        ("POST", "/v1/messages/cancel", {"ids": ["a", "b"], "keys": keys}),
        # Why that one could not be cancelled, its own answer says.
        ("DELETE", "/v1/subjects/s/keys/x", None),
    ]
    assert results[:2] == [None, None]
    assert isinstance(results[2], NotFoundError)
    assert isinstance(results[3], ConflictError)
    assert results[3].state == "delivered"


@asynchronous
async def test_a_cancel_that_cannot_be_read_fails_alone():
    def judge(method, path, document):
        if "bad" in document["ids"]:
            return problem(422)
        return answer(200, {"results": [{"state": "cancelled"} for _ in document["ids"]]})

    producer, _ = make(default=judge)
    results = await settled(*(producer.cancel(one) for one in ("a", "bad", "c", "d")))
    assert [isinstance(one, InvalidError) for one in results] == [False, True, False, False]


@asynchronous
async def test_get_move_and_replace():
    stored_message = {
        "id": "a",
        "subject": "s",
        "key": None,
        "deliver_at": "2026-11-20T16:30:00.000Z",
        "state": "delivered",
        "attempts": 1,
        "headers": {"x": "y"},
        "deliveries": [
            {
                "subscription": "shop",
                "state": "delivered",
                "attempt": 1,
                "at": "2026-11-20T16:30:00.002Z",
            }
        ],
        "body": {"order": 1},
    }
    moved = {"id": "a", "deliver_at": "2026-11-20T16:30:00.000Z", "state": "scheduled"}
    replaced = {"id": message_id(9), "duplicate": False, "subject": "s"}
    producer, transport = make(
        answer(200, stored_message), LOST, answer(200, moved), answer(200, replaced), problem(404)
    )
    found = await producer.get("a b")
    assert (found.state, found.body, found.headers) == ("delivered", {"order": 1}, {"x": "y"})
    assert found.deliveries[0].subscription == "shop"
    due = datetime(2026, 11, 20, 16, 30, tzinfo=UTC)
    assert (
        await producer.move(subject="s", key="a/ü", delay=timedelta(minutes=1))
    ).deliver_at == due
    assert (await producer.replace("s", "k", {"n": 1}, delay="10s")).id == message_id(9)
    with pytest.raises(NotFoundError):
        await producer.get("b")
    move = ("PATCH", "/v1/subjects/s/keys/a%2F%C3%BC", {"delay": 60_000})
    assert transport.requests[:4] == [
        ("GET", "/v1/messages/a%20b", None),
        *(move, move),
        ("PUT", "/v1/subjects/s/keys/k", {"body": {"n": 1}, "delay": "10s"}),
    ]


@asynchronous
async def test_a_debounce_goes_along_and_is_shown():
    replaced = {"id": message_id(9), "duplicate": False, "subject": "s"}
    shown = {"quiet": "5s", "keep": "first", "since": "2026-11-20T16:30:00Z"}
    stored = {
        "id": message_id(9),
        "subject": "s",
        "key": "k",
        "deliver_at": "2026-11-20T16:30:05Z",
        "state": "scheduled",
        "attempts": 0,
        "headers": {},
        "deliveries": [],
        "body": 1,
        "debounce": shown,
    }
    producer, transport = make(answer(201, replaced), answer(200, stored))
    debounce = Debounce(quiet=timedelta(seconds=5), at_most="1m", keep="first")
    assert (await producer.replace("s", "k", 1, debounce=debounce)).id == message_id(9)
    wanted = {"quiet": 5_000, "at_most": "1m", "keep": "first"}
    document = {"body": 1, "debounce": wanted}
    assert transport.requests == [("PUT", "/v1/subjects/s/keys/k", document)]
    assert (await producer.get(message_id(9))).debounce == shown


@asynchronous
async def test_a_change_of_a_version_is_not_asked_for_twice():
    """Its own first success would look like somebody else's change."""
    document = {"id": "a", "deliver_at": "2026-11-20T16:30:00Z", "state": "scheduled"}
    moved = answer(200, document, etag='"18"')
    producer, transport = make(problem(503), moved, LOST, problem(412))
    assert (await producer.move("a", delay=1, if_match="17")).version == "18"
    with pytest.raises(UnansweredError):
        await producer.cancel("a", if_match="18")
    with pytest.raises(ChangedError):
        await producer.replace("s", "k", if_match="18")
    assert transport.headers == [{"if-match": f'"{n}"'} for n in (17, 17, 18, 18)]
    assert [method for method, *_ in transport.requests] == ["PATCH", "PATCH", "DELETE", "PUT"]


def key_of(state, version="5"):
    """What waits under the key, or does not."""
    document = {"id": "a", "state": state}
    return answer(200, document, etag=f'"{version}"')


def made(seq):
    return answer(201, {"id": message_id(seq)}, etag='"9"')


@pytest.mark.parametrize("lost", [LOST, problem(502), problem(504)])
@asynchronous
async def test_after_a_lost_answer_only_what_still_waits_is_replaced(lost):
    """The one that waits may be this very one: then its copy takes its place."""
    replies = UNREACHABLE, lost, problem(503), key_of("scheduled", "5"), problem(412)
    producer, transport = make(*replies, key_of("scheduled", "6"), made(2))
    assert (await producer.replace("s", "k", 1)).id == message_id(2)
    methods = [method for method, *_ in transport.requests]
    assert methods == ["PUT", "PUT", "GET", "GET", "PUT", "GET", "PUT"]
    versions = [headers.get("if-match") for headers in transport.headers]
    assert versions == [None, None, None, None, '"5"', None, '"6"']


@pytest.mark.parametrize(
    "found", [key_of("delivered"), key_of("delivering"), key_of("cancelled"), problem(404)]
)
@asynchronous
async def test_after_a_lost_answer_what_may_have_fired_is_not_sent_again(found):
    producer, transport = make(LOST, found)
    with pytest.raises(UnansweredError, match="may have been this one"):
        await producer.replace("s", "k", 1)
    assert [method for method, *_ in transport.requests] == ["PUT", "GET"]


@asynchronous
async def test_a_put_is_repeated_where_nothing_was_done():
    producer, transport = make(UNREACHABLE, problem(503), problem(429), made(1))
    assert (await producer.replace("s", "k", 1)).id == message_id(1)
    assert {method for method, *_ in transport.requests} == {"PUT"}


@asynchronous
async def test_pages_of_pending_messages():
    def page(*numbers, cursor):
        common = {"subject": "s", "key": None, "state": "scheduled", "attempts": 0}
        due = {"deliver_at": "2026-11-20T16:30:00.000Z"}
        messages = [{"id": str(n), "body": n, "headers": {}, **common, **due} for n in numbers]
        return answer(200, {"messages": messages, "cursor": cursor})

    producer, transport = make(page(1, 2, cursor="5-1"), page(cursor="6-2"), page(3, cursor=None))
    found = [one.body async for one in producer.pending("s", since=5, until="2027-01-01T00:00:00Z")]
    assert found == [1, 2, 3]
    path = "/v1/subjects/s/messages?limit=1000&from=5&to=2027-01-01T00%3A00%3A00Z"
    assert [path for _, path, _ in transport.requests] == [
        *(path, f"{path}&cursor=5-1", f"{path}&cursor=6-2")
    ]


class Page(msgspec.Struct):
    messages: list[Stored]


def test_no_answer_costs_more_than_its_length():
    def read(body):
        with pytest.raises(NotADelayServerError):
            decoded_page(body, Page, "messages", Stored)

    for begin in (b'{"messages":[', b'{"messages":["'):
        for again in (b'\\"', b'"', b"\\\\", b"["):

            def text(n, begin=begin, again=again):
                return begin + again * n

            assert growth(read, text, 1_000) < GROWTH_MAX, (begin, again)


@asynchronous
async def test_a_deep_body_in_a_list_costs_only_itself():
    deep = b"[" * 5000 + b"]" * 5000
    one = b'{"id":"a","subject":"s","key":null,"state":"scheduled","attempts":0,"headers":{},'
    one += b'"deliver_at":"2026-11-20T16:30:00Z","body":%b}'
    page = b'{"messages":[%b,{"id":5},%b],"cursor":null}' % (one % deep, one % b'"whole"')
    producer, _ = make(HttpAnswer(200, page), HttpAnswer(200, one % deep))
    first, second = [found async for found in producer.pending("s")]
    assert (first.raw, second.body) == (deep, "whole")
    assert (await producer.get("a")).raw == deep


# ── batches of the caller's, events and heartbeats ─────────────────────────────────────────────


@asynchronous
async def test_a_batch_of_the_callers_goes_out_as_one():
    producer, transport = make(LOST, stored(1, 2, 9, 10, 11, 12, 13, duplicates=1), in_flight_max=1)
    to = To(url="http://a", secret="s", timeout=timedelta(seconds=1), max_attempts=2, backoff=[5])
    drafts = [
        Draft(subject="s", body={"n": 1}, delay=timedelta(seconds=1)),
        Draft(subject="s", body=b"\0", key="own", headers={"x": "y"}),
        Draft(subject="t", watch=["order:1"], on_event="fire"),
        Draft(subject="t", ttl=timedelta(minutes=1), jitter="5s", priority=9),
        Draft(subject="t", to="http://127.0.0.1/"),
        Draft(subject="t", to=to),
        Draft(subject="t", on_delivered="paid", on_dead="lost"),
    ]
    published = await producer.publish_all(drafts)
    assert [one.id for one in published] == list(map(message_id, (1, 2, 9, 10, 11, 12, 13)))
    assert [one.duplicate for one in published] == [False, True, *[False] * 5]
    (method, path, first), (_, _, second) = transport.requests
    assert (method, path, first) == ("POST", "/v1/messages/batch", second)
    keys = [message.pop("key") for message in first]
    assert keys[0].startswith("auto-")
    assert keys[1] == "own"
    assert first == [
        {"subject": "s", "body": {"n": 1}, "delay": 1000},
        {"subject": "s", "body_base64": "AA==", "headers": {"x": "y"}},
        {"subject": "t", "watch": ["order:1"], "on_event": "fire"},
        {"subject": "t", "ttl": 60_000, "jitter": "5s", "priority": 9},
        {"subject": "t", "to": {"url": "http://127.0.0.1/"}},
        {
            "subject": "t",
            "to": {
                "url": "http://a",
                "secret": "s",
                "timeout": 1000,
                "retry": {"max_attempts": 2, "backoff": [5]},
            },
        },
        {"subject": "t", "on_delivered": {"subject": "paid"}, "on_dead": {"subject": "lost"}},
    ]


@asynchronous
async def test_a_batch_of_the_callers_is_refused_as_a_whole():
    producer, transport = make(invalid("/1/delay"), LOST, generate_keys=False)
    drafts = [Draft(subject="s"), Draft(subject="s", delay="soon")]
    with pytest.raises(InvalidError) as caught:
        await producer.publish_all(drafts)
    assert caught.value.errors[0].pointer == "/1/delay"
    with pytest.raises(UnansweredError):
        await producer.publish_all(drafts)
    assert len(transport.requests) == 2


@asynchronous
async def test_filed_publishes_go_out_by_themselves():
    def judge(method, path, document):
        reply = stored(*range(1, len(document) + 1))
        return HttpAnswer(202, reply.body) if document[0].get("key") == "slow" else reply

    producer, transport = make(default=judge, generate_keys=False)
    published = await asyncio.gather(
        producer.publish("s"),
        producer.publish("s", ack="filed"),
        producer.publish("s", ack="filed", timeout_s=5),
    )
    assert [one.filed for one in published] == [False, True, True]
    assert sorted(path for _, path, _ in transport.requests) == [
        *("/v1/messages/batch", "/v1/messages/batch?ack=filed")
    ]
    # Durable, but not filed within the time that the server takes for it.
    assert not (await producer.publish("s", key="slow", ack="filed")).filed
    await producer.close()


@asynchronous
async def test_events_and_heartbeats():
    beat = {
        "key": "a/b",
        "timeout": "10s",
        "subject": "s",
        "expires_at": "2026-11-20T16:30:00.000Z",
        "body": {"n": 1},
    }
    producer, transport = make(
        answer(200, {"cancelled": 2, "fired": 1}),
        *(answer(201, beat), LOST, answer(200, beat)),
        *(answer(200, beat), LOST, problem(404), problem(404)),
    )
    heartbeats = AsyncClientHeartbeats(producer)
    result = await AsyncClientEvents(producer).send("order:1/ü")
    assert (result.cancelled, result.fired) == (2, 1)
    found = await heartbeats.put("a/b", timeout="10s", subject="s", body={"n": 1})
    assert (found.body, found.timeout, found.expires_at.hour) == ({"n": 1}, "10s", 16)
    await heartbeats.put("a/b", timeout=timedelta(seconds=10), subject="s")
    assert (await heartbeats.get("a/b")).subject == "s"
    await heartbeats.delete("a/b")  # whose first answer was lost
    with pytest.raises(NotFoundError):
        await heartbeats.delete("a/b")
    path = "/v1/heartbeats/a%2Fb"
    again = ("PUT", path, {"subject": "s", "timeout": 10_000})
    assert transport.requests == [
        ("POST", "/v1/events/order%3A1%2F%C3%BC", None),
        ("PUT", path, {"subject": "s", "timeout": "10s", "body": {"n": 1}}),
        *(again, again, ("GET", path, None)),
        *[("DELETE", path, None)] * 3,
    ]


@asynchronous
async def test_attempts_of_a_message():
    one = {
        "subscription": "shop",
        "attempt": 1,
        "at": "2026-11-20T16:30:00.000Z",
        "duration": "120ms",
        "outcome": "failed",
        "status": 500,
        "answer": "no",
        "error": "HTTP 500",
    }
    producer, transport = make(answer(200, {"attempts": [one], "dropped": 3}))
    found = await producer.attempts("00ff")
    assert transport.requests[0][:2] == ("GET", "/v1/messages/00ff/attempts")
    assert (found.dropped, found.attempts[0].status, found.attempts[0].at.year) == (3, 500, 2026)


@asynchronous
async def test_a_replay_is_not_asked_for_twice():
    reply = answer(200, {"id": "00ff", "state": "delivering", "subscriptions": ["shop"]})
    producer, transport = make(reply, LOST)
    found = await producer.replay("00ff", subscription="shop")
    assert transport.requests[0][:2] == ("POST", "/v1/messages/00ff/replay?subscription=shop")
    assert found.subscriptions == ("shop",)
    with pytest.raises(UnansweredError):
        await producer.replay("00ff")
    assert len(transport.requests) == 2
