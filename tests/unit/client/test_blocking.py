"""The clients without asyncio: their thread, and what stands in their help."""

import gc
import inspect
import threading
import weakref

import pytest

from delayserver.client import (
    AsyncBackups,
    AsyncProducer,
    AsyncSchedules,
    AsyncSources,
    AsyncSubscriptions,
    Backups,
    ClosedError,
    Consumer,
    Producer,
    Schedules,
    Sources,
    Subscriptions,
)
from tests.unit.client.fake_server import FakeTransport, publishing
from tests.waiting import wait_until


def threads():
    """Of producers."""
    return [one for one in threading.enumerate() if one.name == "delayserver-client"]


def test_a_producer_has_a_thread_from_the_first_call_to_its_end():
    before = len(threads())
    producer = Producer(transport=FakeTransport(default=publishing()))
    assert len(threads()) == before
    producer.publish("s")
    producer.publish("s")
    assert len(threads()) == before + 1
    producer.close()
    assert len(threads()) == before
    with pytest.raises(ClosedError):
        producer.publish("s")


def test_producers_that_are_dropped_leave_neither_threads_nor_connections():
    before, transports = len(threads()), []
    for _ in range(5):
        transport = FakeTransport(default=publishing())
        producer = Producer(transport=transport)
        producer.publish("s")
        transports.append(transport)
    dropped = weakref.ref(producer)
    del producer
    gc.collect()
    assert dropped() is None
    wait_until(lambda: len(threads()) == before)
    assert all(transport.closed for transport in transports)


@pytest.mark.parametrize("kind", [Producer, Consumer, Schedules, Sources, Subscriptions, Backups])
def test_the_blocking_classes_explain_each_option_themselves(kind):
    options = [name for name in inspect.signature(kind).parameters if name != "url"]
    assert len(options) > 5
    assert [name for name in options if f"`{name}`" not in kind.__init__.__doc__] == []
    assert "Async" not in kind.__doc__ + kind.__init__.__doc__


@pytest.mark.parametrize(
    ("blocking", "asynchronous"),
    [
        (Producer, AsyncProducer),
        (Schedules, AsyncSchedules),
        (Sources, AsyncSources),
        (Backups, AsyncBackups),
        (Subscriptions, AsyncSubscriptions),
    ],
)
def test_a_blocking_class_has_all_calls_of_the_other(blocking, asynchronous):
    def calls(kind):
        return {name for name in dir(kind) if not name.startswith("_")}

    assert calls(asynchronous) - {"after_fork"} == calls(blocking)
    for name in ("__init__", *calls(blocking)):
        parameters = inspect.signature(getattr(blocking, name)).parameters
        assert parameters == inspect.signature(getattr(asynchronous, name)).parameters
