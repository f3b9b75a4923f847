"""What is stored, what is not, and what becomes of errors: apps against a fake server."""

import logging
from datetime import UTC, datetime, timedelta, timezone
from types import SimpleNamespace
from zoneinfo import ZoneInfo

import pytest
from celery import Celery, signals
from celery.app.control import Control
from celery.worker.request import Request
from kombu import Connection

from delayserver.client import (
    DiskFullError,
    InvalidError,
    OverloadedError,
    UnansweredError,
    UnreachableError,
)
from delayserver.errors import InputError
from delayserver.integrations.celery import DelayedTasks
from delayserver.times import parse_time_ms
from tests.unit.client.fake_server import (
    LOST,
    UNREACHABLE,
    answer,
    message_id,
    problem,
)
from tests.unit.integrations.celery.apps import NOW_MS, delayed, make_app, on_the_broker

NOW = datetime.fromtimestamp(NOW_MS / 1000, UTC)
FAR_S = 600
KEY_TAKEN = problem(409, state="delivered", type="urn:delayserver:problem:key-conflict")
REPLACED = answer(200, {"id": message_id(2)})


def only(transport):
    """The one message that was published."""
    ((message,),) = transport.documents
    return message


# ── what is stored ─────────────────────────────────────────────────────────────────────────────


def test_a_task_that_is_due_later_is_a_message_with_its_id_as_key():
    app = make_app()
    transport = delayed(app)
    result = app.tasks["run"].apply_async((1,), countdown=FAR_S)
    message = only(transport)
    assert message["subject"] == "celery.tasks"
    assert message["key"] == result.id
    assert parse_time_ms(message["deliver_at"]) == NOW_MS + FAR_S * 1000
    assert message["body"]["headers"]["eta"] == (NOW + timedelta(seconds=FAR_S)).isoformat()
    assert message["body"]["routing_key"] == app.conf.task_default_queue
    assert on_the_broker(app) == []


@pytest.mark.parametrize("options", [{}, {"countdown": 299}, {"countdown": -5}, {"countdown": 0}])
def test_a_task_that_is_due_sooner_goes_to_the_broker(options):
    app = make_app()
    transport = delayed(app)
    app.tasks["run"].apply_async((1,), **options)
    assert transport.requests == []
    (message,) = on_the_broker(app)
    assert ("eta" in message.headers and message.headers["eta"] is not None) == bool(
        options.get("countdown")
    )


@pytest.mark.parametrize("eta", [1_795_192_200, 1_795_192_200.5])
def test_a_time_that_is_a_number_is_refused_and_goes_nowhere(eta):
    app = make_app()
    transport = delayed(app)
    with pytest.raises(TypeError, match="Celery takes a datetime"):
        app.tasks["run"].apply_async((1,), eta=eta)
    assert transport.requests == [] and on_the_broker(app) == []


@pytest.mark.parametrize("threshold", ["10m", timedelta(minutes=10), 600_000])
def test_the_threshold_itself_is_later(threshold):
    app = make_app()
    transport = delayed(app, threshold=threshold)
    for seconds in (599.999, 600):
        app.tasks["run"].apply_async(countdown=seconds)
    assert len(transport.requests) == 1


def test_what_is_stored_is_what_celery_would_have_sent():
    plain, app = make_app(), make_app()
    app.conf.task_default_queue = plain.conf.task_default_queue
    transport = delayed(app)
    options = {
        "task_id": "one",
        "countdown": FAR_S,
        "expires": 3600,
        "headers": {"x-shop": "7"},
        "priority": 5,
        "link": plain.tasks["run"].s(2),
        "time_limit": 9,
        "reply_to": "me",
        "shadow": "shown",
    }
    plain.tasks["run"].apply_async((1,), {"a": 2}, **options)
    app.tasks["run"].apply_async((1,), {"a": 2}, **options)
    (sent,) = on_the_broker(plain)
    body = only(transport)["body"]
    varies = ("eta", "expires")
    assert {k: v for k, v in body["headers"].items() if k not in varies} == {
        k: v for k, v in sent.headers.items() if k not in varies
    }
    assert body["body"].encode() == sent.body
    assert (body["content_type"], body["content_encoding"]) == (
        sent.content_type,
        sent.content_encoding,
    )
    assert body["properties"]["priority"] == sent.properties["priority"] == 5
    assert body["properties"]["correlation_id"] == sent.properties["correlation_id"] == "one"
    assert body["properties"]["reply_to"] == sent.properties["reply_to"] == "me"
    assert body["expires_at_ms"] - NOW_MS in range(3_590_000, 3_600_001)


def eta_of_a_worker(app, header):
    """What a worker makes of the header of a task that Celery has sent."""
    headers = {"id": "x", "task": "run", "eta": header}
    message = SimpleNamespace(
        headers=headers,
        body=b"",
        payload=((), {}, {}),
        content_type="application/json",
        content_encoding="utf-8",
        delivery_info={},
        properties={},
    )
    return Request(message, app=app).eta


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "America/New_York"])
@pytest.mark.parametrize(
    "eta",
    [
        datetime(2027, 7, 1, 12),  # noqa: DTZ001
        datetime(2027, 1, 1, 12),  # noqa: DTZ001
        datetime(2027, 7, 1, 12, tzinfo=UTC),
        datetime(2027, 7, 1, 12, tzinfo=ZoneInfo("Asia/Tokyo")),
        datetime(2027, 7, 1, 12, tzinfo=timezone(timedelta(hours=-3))),
        "2027-07-01T12:00:00+05:00",
        "2027-07-01T12:00:00",
    ],
)
def test_an_eta_is_the_moment_that_a_worker_of_celery_takes_it_for(zone, eta):
    app = make_app(timezone=zone)
    transport = delayed(app)
    app.tasks["run"].apply_async(eta=eta)
    header = eta if isinstance(eta, str) else eta.isoformat()
    expected = eta_of_a_worker(app, header)
    message = only(transport)
    assert parse_time_ms(message["deliver_at"]) == expected.timestamp() * 1000
    assert eta_of_a_worker(app, message["body"]["headers"]["eta"]) == expected


def test_an_eta_is_never_early():
    app = make_app()
    transport = delayed(app)
    app.tasks["run"].apply_async(eta=NOW + timedelta(seconds=FAR_S, microseconds=1))
    assert parse_time_ms(only(transport)["deliver_at"]) == NOW_MS + FAR_S * 1000 + 1


def test_of_countdown_and_eta_the_countdown_counts_as_in_celery():
    app = make_app()
    transport = delayed(app)
    app.tasks["run"].apply_async(countdown=FAR_S, eta=NOW + timedelta(days=1))
    assert parse_time_ms(only(transport)["deliver_at"]) == NOW_MS + FAR_S * 1000


def test_rabbitmq_does_not_delay_it_a_second_time_where_it_has_quorum_queues():
    app = Celery("shop", broker="amqp://nobody.invalid//", set_as_current=False)
    app.conf.update(
        task_default_queue_type="quorum",
        task_default_exchange="shop",
        task_default_exchange_type="topic",
        worker_detect_quorum_queues=True,
    )
    transport = delayed(app)
    app.send_task("run", countdown=FAR_S)
    body = only(transport)["body"]
    assert (body["exchange"], body["routing_key"]) == ("shop", app.conf.task_default_routing_key)


def test_tasks_by_name_and_signatures_are_stored_too():
    app = make_app()
    transport = delayed(app)
    app.send_task("elsewhere", countdown=FAR_S)
    app.signature("elsewhere", countdown=FAR_S).apply_async()
    app.tasks["run"].si(1).apply_async(countdown=FAR_S)
    assert len(transport.requests) == 3


def test_signals_and_events_are_those_of_celery():
    app = make_app(task_send_sent_event=True)
    delayed(app)
    told = []
    app.amqp._event_dispatcher.publish = lambda kind, fields, producer, **_: told.append(
        (kind, fields["queue"], producer.channel is not None)
    )
    seen = []

    def before(headers, routing_key, **_):
        headers["x-trace"] = "7"
        seen.append(("before", headers["eta"] is not None))

    def after(headers, **_):
        seen.append(("after", headers["x-trace"]))

    signals.before_task_publish.connect(before)
    signals.after_task_publish.connect(after)
    try:
        app.tasks["run"].apply_async(countdown=FAR_S)
    finally:
        signals.before_task_publish.disconnect(before)
        signals.after_task_publish.disconnect(after)
    assert seen == [("before", True), ("after", "7")]
    assert told == [("task-sent", app.conf.task_default_queue, True)]


def test_what_is_meant_for_another_broker_goes_there():
    app, other = make_app(), make_app()
    transport = delayed(app)
    with Connection("memory://elsewhere/") as elsewhere:
        app.tasks["run"].apply_async(countdown=FAR_S, connection=elsewhere)
        assert transport.requests == []
    with app.producer_pool.acquire() as producer:
        app.tasks["run"].apply_async(countdown=FAR_S, producer=producer)
    with app.connection_for_write() as connection:
        app.tasks["run"].apply_async(countdown=FAR_S, connection=connection)
    assert len(transport.requests) == 2
    assert other.conf.task_default_queue != app.conf.task_default_queue


def test_a_task_that_is_stored_takes_no_connection_to_the_broker():
    app = make_app(broker_pool_limit=1)
    transport = delayed(app)
    with app.producer_pool.acquire():
        app.tasks["run"].apply_async(countdown=FAR_S)
    assert len(transport.requests) == 1


def test_an_eager_app_stores_nothing():
    app = make_app(task_always_eager=True)
    transport = delayed(app)
    assert app.tasks["run"].apply_async(countdown=FAR_S).state == "SUCCESS"
    assert transport.requests == []


def test_one_for_each_app():
    app = make_app()
    delayed(app)
    with pytest.raises(ValueError, match="DelayedTasks already"):
        DelayedTasks(app)
    with pytest.raises(InputError):
        DelayedTasks(make_app(), threshold="soon")


# ── the same id again ──────────────────────────────────────────────────────────────────────────


def test_another_task_with_the_same_id_takes_the_place_of_the_first():
    app = make_app()
    transport = delayed(app, KEY_TAKEN, REPLACED)
    app.tasks["run"].apply_async(countdown=FAR_S, task_id="one")
    (_, path, (first,)), (method, replaced, document) = transport.requests
    assert (path, method) == ("/v1/messages/batch", "PUT")
    assert replaced == "/v1/subjects/celery.tasks/keys/one"
    assert document["body"] == first["body"]
    assert document["deliver_at"] == first["deliver_at"]


def test_where_nobody_knows_whether_it_was_replaced_it_is_replaced_once_more():
    app = make_app()
    transport = delayed(app, KEY_TAKEN, LOST, REPLACED)
    app.tasks["run"].apply_async(countdown=FAR_S, task_id="one")
    assert [method for method, _, _ in transport.requests] == ["POST", "PUT", "PUT"]


@pytest.mark.parametrize(
    ("replies", "error"), [([LOST, LOST], UnansweredError), ([UNREACHABLE], UnreachableError)]
)
def test_and_then_it_is_an_error(replies, error):
    app = make_app()
    transport = delayed(app, KEY_TAKEN, *replies)
    with pytest.raises(error):
        app.tasks["run"].apply_async(countdown=FAR_S, task_id="one")
    assert transport.replies == []


# ── errors ─────────────────────────────────────────────────────────────────────────────────────

FAILURES = [
    (UNREACHABLE, UnreachableError),
    (LOST, UnansweredError),
    (problem(503), OverloadedError),
    (problem(507), DiskFullError),
]


@pytest.mark.parametrize(("reply", "error"), [*FAILURES, (problem(422), InvalidError)])
def test_who_sends_a_task_gets_the_error_of_the_client_library(reply, error):
    app = make_app()
    delayed(app, reply)
    with pytest.raises(error):
        app.tasks["run"].apply_async(countdown=FAR_S)
    assert on_the_broker(app) == []


@pytest.mark.parametrize(("reply", "error"), FAILURES)
def test_with_a_fallback_a_worker_keeps_it(caplog, reply, error):
    app = make_app()
    delayed(app, reply, fallback=True)
    with caplog.at_level(logging.WARNING, "delayserver.celery"):
        result = app.tasks["run"].apply_async(countdown=FAR_S)
    (message,) = on_the_broker(app)
    assert message.headers["id"] == result.id
    assert message.headers["eta"] == (NOW + timedelta(seconds=FAR_S)).isoformat()
    assert "a worker keeps it instead" in caplog.text


def test_what_is_wrong_with_the_task_is_no_case_for_the_fallback():
    app = make_app()
    delayed(app, problem(413), fallback=True)
    with pytest.raises(InvalidError):
        app.tasks["run"].apply_async(countdown=FAR_S)
    assert on_the_broker(app) == []


# ── revoke ─────────────────────────────────────────────────────────────────────────────────────


def waiting(app, task_id="one", state="scheduled", **options):
    """The answer to a look-up of a task that waits, or did."""
    sender = make_app()
    sender.conf.task_default_queue = app.conf.task_default_queue
    message_of = delayed(sender)
    sender.tasks["run"].apply_async((1,), countdown=FAR_S, task_id=task_id, **options)
    return answer(
        200,
        {
            "id": message_id(1),
            "subject": "celery.tasks",
            "key": task_id,
            "deliver_at": "2027-01-01T00:00:00.000Z",
            "state": state,
            "attempts": 0,
            "body": only(message_of)["body"],
        },
        etag='"1"',
    )


CANCELLED = answer(200, {"results": [{"state": "cancelled"}]})


def test_a_revoked_task_is_cancelled_and_says_so():
    app = make_app()
    transport = delayed(app, waiting(app), CANCELLED)
    result = app.AsyncResult("one")
    result.revoke()
    look_up, cancel = transport.requests
    assert look_up[:2] == ("GET", "/v1/subjects/celery.tasks/keys/one")
    assert cancel[2]["keys"] == [{"subject": "celery.tasks", "key": "one"}]
    assert result.state == "REVOKED"


def test_results_that_nobody_wants_are_not_stored():
    app = make_app()
    delayed(app, waiting(app, ignore_result=True), CANCELLED)
    app.control.revoke("one")
    assert app.AsyncResult("one").state == "PENDING"


def test_its_chord_is_told_as_a_worker_would_tell_it(monkeypatch):
    app = make_app()
    tail = {"task": "run", "args": [], "kwargs": {}, "options": {}}
    delayed(app, waiting(app, chord=tail, group_id="g", group_index=1), CANCELLED)
    told = []
    monkeypatch.setattr(
        app.backend,
        "on_chord_part_return",
        lambda request, state, _: told.append((request.id, request.group, state, request.chord)),
    )
    app.control.revoke("one")
    assert told == [("one", "g", "REVOKED", tail)]


def test_a_task_that_cannot_be_read_here_is_cancelled_all_the_same(caplog):
    app = make_app()
    transport = delayed(app, waiting(app, serializer="pickle"), CANCELLED)
    app.control.revoke("one")
    assert transport.replies == []
    assert app.AsyncResult("one").state == "REVOKED"
    assert "its chord is not told" in caplog.text


def test_without_a_result_backend_it_is_cancelled():
    app = make_app(result_backend="disabled://")
    transport = delayed(app, waiting(app), CANCELLED)
    app.control.revoke("one")
    assert transport.replies == []


def test_several_are_revoked():
    app = make_app()
    transport = delayed(
        app, waiting(app, "a"), CANCELLED, problem(404), waiting(app, "c"), CANCELLED
    )
    app.control.revoke(["a", "b", "c"])
    assert transport.replies == []
    assert [app.AsyncResult(one).state for one in "abc"] == ["REVOKED", "PENDING", "REVOKED"]


@pytest.mark.parametrize("state", ["delivering", "delivered", "cancelled", "dead"])
def test_what_does_not_wait_is_revoked_as_ever(state):
    app = make_app()
    transport = delayed(app, waiting(app, state=state))
    app.control.revoke("one")
    assert transport.replies == []
    assert app.AsyncResult("one").state == "PENDING"


def test_what_is_on_its_way_when_it_is_cancelled_is_revoked_as_ever():
    app = make_app()
    on_its_way = answer(200, {"results": [{"error": "it is", "state": "delivering"}]})
    transport = delayed(app, waiting(app), on_its_way)
    app.control.revoke("one")
    assert transport.replies == []
    assert app.AsyncResult("one").state == "PENDING"


def test_workers_are_told_also_where_the_server_is_away():
    app = make_app()
    delayed(app, UNREACHABLE)
    told = []
    app.control.mailbox._broadcast = lambda command, *_, **__: told.append(command)
    with pytest.raises(UnreachableError):
        app.control.revoke("one")
    assert told == ["revoke"]


def test_the_control_is_what_it_was_besides():
    class OwnControl(Control):
        pass

    app = make_app()
    app.control_cls = OwnControl
    delayed(app)
    assert isinstance(app.control, OwnControl)
