"""A change of a subscription holds at the moment of its answer, for webhooks that wait for a
connection as well: the connection is there in the same step in which the answer leaves."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from delayserver.config import Settings
from delayserver.decisions.new_messages import NewMessage
from delayserver.records.message import Payload
from delayserver.records.subscriptions import Subscription
from tests.unit.fakes import subscription
from tests.world import Observer, SimulatedClock, SimulatedServer
from tests.world.publishes import publish_all
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.files import SimulatedFiles

COUNT = 4
URL, OTHER_URL = "http://127.0.0.1:9000/", "http://127.0.0.1:9001/"
HOOK = subscription(1, name="hook", subject="orders", type="webhook", url=URL)


class Machine:
    """A server with webhooks that have left their queue, and wait for a connection."""

    def __init__(self, hook: Subscription = HOOK) -> None:
        self.clock = SimulatedClock()
        self.server = SimulatedServer(
            Settings(), SimulatedFiles(), MemoryCatalog(), self.clock, random.Random(0), Observer()
        )
        self.server.connects = lambda: False
        self.server.engine.subscribing.put_subscription(hook)
        self.server.rest()
        now_ms = self.clock.now_ms
        messages = [NewMessage("orders", now_ms, Payload(b"%d" % one)) for one in range(COUNT)]
        publish_all(self.server.engine.publishing, messages, now_ms)
        self.server.rest()
        self.server.tick()
        self.server.rest()
        assert len(self.server.connecting) == COUNT

    def change(self, **values: Any) -> None:
        """Change the subscription. When it is answered, there is a connection for each webhook."""
        known = self.server.engine.registry.by_id(HOOK.id)
        assert known is not None
        changed = msgspec.structs.replace(known, **values)
        group = self.server.engine.subscribing.put_subscription(changed)
        answered: list[Exception | None] = []

        def answer(error: Exception | None) -> None:
            answered.append(error)
            while self.server.connecting:
                self.server.connect(0)

        group.when_durable(answer)
        self.server.rest()
        assert answered == [None]

    def sent(self) -> list[str]:
        """The URLs of the requests that have begun."""
        registry = self.server.engine.registry
        found = []
        for first, *_ in self.server.sending:
            receiver = registry.by_id(first.subscription_id)
            assert receiver is not None
            found.append(receiver.url)
        return found


def test_without_a_change_they_begin() -> None:
    machine = Machine()
    while machine.server.connecting:
        machine.server.connect(0)
    assert machine.sent() == [URL] * COUNT


def test_a_pause_holds_from_its_answer_on() -> None:
    machine = Machine()
    machine.change(paused=True)
    assert machine.sent() == [] == machine.server.connecting


def test_a_deletion_holds_from_its_answer_on() -> None:
    machine = Machine()
    machine.change(deleted=True)
    assert machine.sent() == [] == machine.server.connecting


def test_a_new_url_holds_from_its_answer_on() -> None:
    machine = Machine()
    machine.change(url=OTHER_URL)
    assert machine.sent() == []
    machine.server.tick()
    machine.server.rest()
    waits = [hook.url for hook, _ in machine.server.connecting]
    assert waits == [OTHER_URL] * COUNT, "they leave anew, to where it says now"


@pytest.mark.parametrize("rate_per_s", [0.0, 10.0])
def test_a_new_rate_holds_from_its_answer_on(rate_per_s: float) -> None:
    machine = Machine(msgspec.structs.replace(HOOK, rate_per_s=rate_per_s, rate_burst=COUNT))
    machine.change(rate_per_s=1.0, rate_burst=1)
    begun = 0
    for seconds in range(3):
        machine.server.tick()
        machine.server.rest()
        while machine.server.connecting:
            machine.server.connect(0)
        begun = len(machine.server.sending)
        assert begun <= 1 + seconds
        machine.clock.move(1000)
    assert begun == 3
