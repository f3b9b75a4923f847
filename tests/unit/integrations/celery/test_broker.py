"""One connection to the broker: what it puts there, and what it does while nobody is there."""

import logging

import kombu
import pytest
from celery.exceptions import QueueNotFound

from delayserver.integrations.celery.broker import (
    WAIT_S_MAX,
    Broker,
    StoppedError,
    connection_options,
)
from delayserver.integrations.celery.wire import WireTask
from tests.unit.integrations.celery.apps import NOW_MS, make_app, on_the_broker


class Waits:
    """Time that passes at once; `stop_at`: how many waits there are before the end."""

    def __init__(self, stop_at=None):
        self.waited_s = []
        self._stop_at = stop_at

    def __call__(self, seconds):
        self.waited_s.append(seconds)
        return len(self.waited_s) == self._stop_at


def make_task(app, **options):
    name = app.conf.task_default_queue
    queue = app.amqp.queues[name]
    given = {"exchange": "", "routing_key": name, "declare": [queue], "headers": {"id": "x"}}
    return WireTask.make([[1], {}, {}], now_ms=NOW_MS, **{**given, **options})


@pytest.fixture
def failing(monkeypatch):
    """Has the first publishes fail with these errors."""

    def fail(*errors):
        left, publish = list(errors), kombu.Producer.publish

        def failing(self, *arguments, **options):
            if left:
                raise left.pop(0)
            return publish(self, *arguments, **options)

        monkeypatch.setattr(kombu.Producer, "publish", failing)
        return left

    return fail


def test_a_task_is_put_onto_the_broker_as_it_was_made():
    app = make_app()
    broker = Broker(app, now_ms=lambda: NOW_MS + 400)
    broker.put(make_task(app, correlation_id="x", priority=4, expiration=1.0, compression="zlib"))
    broker.close()
    (message,) = on_the_broker(app)
    assert message.headers["id"] == "x"
    assert message.properties["priority"] == 4
    assert message.properties["correlation_id"] == "x"
    assert message.properties["expiration"] == "600"
    assert message.decode() == [[1], {}, {}]


def test_a_broker_that_is_away_is_waited_for(failing, caplog):
    app, waits = make_app(), Waits()
    failing(*[ConnectionError("refused")] * 9)
    broker = Broker(app, now_ms=lambda: NOW_MS, wait=waits)
    with caplog.at_level(logging.INFO, "delayserver.celery"):
        broker.put(make_task(app))
    broker.close()
    assert len(on_the_broker(app)) == 1
    assert waits.waited_s[:3] == [0.2, 0.4, 0.8]
    assert max(waits.waited_s) == WAIT_S_MAX
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "the broker of Celery is away: refused; trying again",
        "the broker of Celery is back",
    ]


def test_it_is_not_waited_for_when_the_forwarder_ends(failing):
    app = make_app()
    failing(*[ConnectionError("refused")] * 9)
    with pytest.raises(StoppedError):
        Broker(app, now_ms=lambda: NOW_MS, wait=Waits(stop_at=2)).put(make_task(app))
    stopped = Broker(app, now_ms=lambda: NOW_MS)
    stopped.stop()
    with pytest.raises(StoppedError):
        stopped.put(make_task(app))
    assert on_the_broker(app) == []


def test_what_the_broker_has_against_one_task_is_raised(failing):
    app = make_app()
    failing(ValueError("not this one"))
    broker = Broker(app, now_ms=lambda: NOW_MS, wait=Waits())
    with pytest.raises(ValueError, match="not this one"):
        broker.put(make_task(app))
    broker.put(make_task(app))
    broker.close()
    assert len(on_the_broker(app)) == 1


def test_a_queue_that_the_app_must_not_make_is_no_broker_that_is_away():
    app = make_app(task_create_missing_queues=False)
    broker = Broker(app, now_ms=lambda: NOW_MS, wait=Waits())
    with pytest.raises(QueueNotFound):
        broker.put(make_task(app, declare=[kombu.Queue("unknown")]))


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("amqp://127.0.0.1:1//", {"confirm_publish": True}),
        ("redis://127.0.0.1:1/0", {"socket_timeout": 30, "socket_keepalive": True}),
        ("memory://", {}),
    ],
)
def test_brokers_have_to_answer(monkeypatch, url, told):
    app = make_app(broker_transport_options={"x": 1})
    app.conf.broker_url = url
    connection = app.connection_for_write()
    monkeypatch.setattr(app, "connection_for_write", lambda: connection)
    try:
        Broker(app, now_ms=lambda: NOW_MS, wait=Waits(stop_at=1)).put(make_task(app))
    except StoppedError:
        assert told
    assert connection.transport_options == {"x": 1, **told}


def test_what_the_app_has_decided_about_redis_holds():
    app = make_app(broker_transport_options={"socket_timeout": 3})
    connection = app.connection_for_write("redis://127.0.0.1:1/0")
    assert connection_options(connection)["socket_timeout"] == 3
