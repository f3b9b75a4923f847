"""From a fake delay server onto a broker of this process; and the step of a worker."""

import json
import logging
import threading
from types import SimpleNamespace

import pytest
from celery.exceptions import ImproperlyConfigured

from delayserver.client import NotAllowedError
from delayserver.integrations.celery import DelayedTasks, TaskForwarder
from delayserver.integrations.celery.forwarder import forwarding_step
from tests.unit.client.fake_server import FakeTransport, answer, message_id, problem
from tests.unit.integrations.celery.apps import NOW_MS, delayed, make_app, on_the_broker
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def no_patience(monkeypatch):
    """A stop does not wait for pulls that nobody answers."""
    monkeypatch.setattr("delayserver.client.consumer.PATIENCE_S", 0.001)


class Due:
    """A delay server that has messages which are due."""

    def __init__(self, *bodies):
        self.bodies = list(bodies)
        self.acked, self.nacked = [], []
        self.transport = FakeTransport(default=self._reply)

    def _reply(self, method, path, document):
        match path.rsplit("/", 1)[-1]:
            case "pull":
                self.acked += document.get("ack", ())
                taken, self.bodies = self.bodies, []
                messages = [message(number, body) for number, body in enumerate(taken, 1)]
                return answer(200, {"messages": messages}) if taken else None
            case "ack":
                self.acked += document["leases"]
                return answer(200, {"expired": []})
            case "nack":
                self.nacked += document["leases"]
                return answer(200, {"expired": []})
        return answer(200, {"subject": "celery.tasks", "type": "pull"})


def message(number, body):
    return {
        "id": message_id(number),
        "subject": "celery.tasks",
        "key": "x",
        "deliver_at": "2027-01-01T00:00:00.000Z",
        "attempt": 1,
        "lease": f"L{number}",
        "body": body,
    }


def bodies(app, count):
    """Of tasks that the app would store."""
    sender = make_app()
    sender.conf.task_default_queue = app.conf.task_default_queue
    transport = delayed(sender)
    for number in range(count):
        sender.tasks["run"].apply_async((number,), countdown=600)
    return [message["body"] for (message,) in transport.documents]


def forwarder_of(app, transport) -> TaskForwarder:
    return DelayedTasks(app, transport=transport, now_ms=lambda: NOW_MS).forwarder()


def running(forwarder):
    """In a thread of its own."""
    thread = threading.Thread(target=forwarder.run)
    thread.start()
    return thread


def test_what_is_due_comes_onto_the_broker_in_order_and_is_acknowledged():
    app = make_app()
    due = Due(*bodies(app, 20))
    forwarder = forwarder_of(app, due.transport)
    thread = running(forwarder)
    wait_until(lambda: len(due.acked) == 20)
    forwarder.stop()
    thread.join()
    assert [json.loads(one.body)[0] for one in on_the_broker(app)] == [[n] for n in range(20)]
    assert due.nacked == []


def test_what_is_no_task_is_given_back_and_the_others_go_on(caplog):
    app = make_app()
    due = Due({"order": 1}, *bodies(app, 2))
    forwarder = forwarder_of(app, due.transport)
    thread = running(forwarder)
    wait_until(lambda: len(due.acked) == 2 and due.nacked)
    forwarder.stop()
    thread.join()
    assert due.nacked == ["L1"]
    assert len(on_the_broker(app)) == 2
    assert "no task of Celery" in caplog.text


def test_while_the_broker_is_away_nothing_is_acknowledged_and_an_end_gives_it_back(monkeypatch):
    app = make_app()
    due = Due(*bodies(app, 3))
    monkeypatch.setattr("delayserver.integrations.celery.forwarder.GRACE_S", 0.01)

    def away(*_, **__):
        raise ConnectionError("refused")

    monkeypatch.setattr("kombu.Producer.publish", away)
    forwarder = forwarder_of(app, due.transport)
    thread = running(forwarder)
    wait_until(lambda: not due.bodies)
    forwarder.stop()
    thread.join()
    assert sorted(due.nacked) == ["L1", "L2", "L3"]
    assert due.acked == []


def test_a_stop_before_the_beginning_counts():
    app = make_app()
    forwarder = forwarder_of(app, Due().transport)
    forwarder.stop()
    running(forwarder).join(5)


def test_a_refusal_ends_it():
    app = make_app()
    with pytest.raises(NotAllowedError):
        forwarder_of(app, FakeTransport(problem(403))).run()


# ── the step of a worker ───────────────────────────────────────────────────────────────────────

SOLO = SimpleNamespace(pool_cls=SimpleNamespace(__module__="celery.concurrency.solo"))


def test_each_worker_forwards_unless_it_is_told_not_to():
    app, other = make_app(), make_app()
    delayed(app)
    delayed(other, forward=False)
    (step,) = app.steps["worker"]
    assert "Pool" in step.requires[0]
    assert not other.steps["worker"]


def test_a_worker_forwards_from_its_start_to_its_end():
    app = make_app()
    due = Due(*bodies(app, 3))
    tasks = DelayedTasks(app, transport=due.transport, now_ms=lambda: NOW_MS)
    step = forwarding_step(tasks.forwarder)(SOLO)
    step.start(SOLO)
    wait_until(lambda: len(due.acked) == 3)
    step.stop(SOLO)
    assert not [one for one in threading.enumerate() if one.name == "delayserver-forwarder"]


def test_a_worker_that_is_refused_says_so_and_tries_again(caplog, monkeypatch):
    monkeypatch.setattr("delayserver.integrations.celery.forwarder.REFUSED_S", 0.01)
    app = make_app()
    due = Due(*bodies(app, 1))
    due.transport.replies = [problem(403, "no scope")]
    tasks = DelayedTasks(app, transport=due.transport, now_ms=lambda: NOW_MS)
    step = forwarding_step(tasks.forwarder)(SOLO)
    with caplog.at_level(logging.ERROR, "delayserver.celery"):
        step.start(SOLO)
        wait_until(lambda: due.acked)
    step.terminate(SOLO)
    assert "delayed tasks are not forwarded" in caplog.text
    assert "no scope" in caplog.text


@pytest.mark.parametrize("pool", ["gevent", "eventlet"])
def test_a_worker_that_cannot_forward_says_what_to_do(pool):
    worker = SimpleNamespace(pool_cls=SimpleNamespace(__module__=f"celery.concurrency.{pool}"))
    step = forwarding_step(lambda: pytest.fail("it is made"))(worker)
    with pytest.raises(ImproperlyConfigured, match="forward=False"):
        step.start(worker)
    step.stop(worker)
