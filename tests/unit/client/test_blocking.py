"""The clients without asyncio: their thread, and what stands in their help."""

import gc
import threading
import weakref

import pytest

from delayserver.client import AsyncClient, Client, ClosedError
from delayserver.client.consumer import ConsumerOptions
from delayserver.client.options import ClientOptions
from tests.unit.client.fake_server import FakeTransport, publishing
from tests.waiting import wait_until


def threads():
    """The threads of clients."""
    return [one for one in threading.enumerate() if one.name == "delayserver-client"]


def test_a_client_has_a_thread_from_the_first_call_to_its_end():
    before = len(threads())
    client = Client(transport=FakeTransport(default=publishing()))
    assert len(threads()) == before
    client.messages.publish("s")
    client.messages.publish("s")
    assert len(threads()) == before + 1
    client.close()
    assert len(threads()) == before
    with pytest.raises(ClosedError):
        client.messages.publish("s")


def test_clients_that_are_dropped_leave_neither_threads_nor_connections():
    before, transports = len(threads()), []
    for _ in range(5):
        transport = FakeTransport(default=publishing())
        client = Client(transport=transport)
        client.messages.publish("s")
        transports.append(transport)
    dropped = weakref.ref(client)
    del client
    gc.collect()
    assert dropped() is None
    wait_until(lambda: len(threads()) == before)
    assert all(transport.closed for transport in transports)


def test_the_blocking_client_explains_each_option_itself():
    for kind, options, explained in (
        (Client, ClientOptions, Client.__init__.__doc__),
        (AsyncClient, ConsumerOptions, AsyncClient.consumer.__doc__),
    ):
        names = options.__annotations__
        assert len(names) > 4
        assert [name for name in names if f"`{name}`" not in (explained or "")] == [], kind
    assert "Async" not in f"{Client.__doc__}{Client.__init__.__doc__}"
