"""Leases, heartbeats, long polls and rates last as long as they were meant to, whatever somebody
does to the clock, and whoever calls before the server looks at it."""

from __future__ import annotations

import random

import pytest

from delayserver.config import Settings
from delayserver.decisions.new_messages import NewMessage
from delayserver.delivery.delayed_fetch import DelayedFetch, Pulled, PullRequest
from delayserver.delivery.webhook import WebhookResponse
from delayserver.errors import NotFoundError
from delayserver.parts.heartbeats.heartbeats import Heartbeats
from delayserver.records.message import Payload
from storage.rows import HOUR_MS
from tests.unit.fakes import counted, subscription
from tests.world import Observer, SimulatedClock, SimulatedServer
from tests.world.publishes import publish_all
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.files import SimulatedFiles

PULL = subscription(1, name="pull", subject="job", type="pull")
HOOK = subscription(2, name="hook", subject="push", type="webhook", rate_per_s=1.0, rate_burst=1)
TEN_MINUTES_MS = 600_000
STEPS = pytest.mark.parametrize("set_by_ms", [-HOUR_MS, -20, 20, HOUR_MS])


class Machine:
    """A server, and somebody who sets its clock and calls before it looks."""

    def __init__(self) -> None:
        self.clock = SimulatedClock()
        self.server = SimulatedServer(
            Settings(segment_bytes=4096),
            SimulatedFiles(),
            MemoryCatalog(),
            self.clock,
            random.Random(0),
            Observer(),
        )
        for one in (PULL, HOOK):
            self.server.engine.subscribing.put_subscription(one)
        self.server.rest()
        self.got: list[str] = []
        """The tokens of what was pulled."""

    def publish(self, subject: str, count: int) -> None:
        now_ms = self.clock.now_ms
        messages = [NewMessage(subject, now_ms, Payload(b"%d" % one)) for one in range(count)]
        publish_all(self.server.engine.publishing, messages, now_ms)
        self.server.rest()
        self.look()

    def look(self) -> None:
        self.server.tick()
        self.server.rest()

    def wait(self, by_ms: int) -> None:
        self.clock.move(by_ms)
        self.look()

    def set_clock(self, by_ms: int) -> None:
        """And somebody pulls before the server looks at it."""
        self.clock.set(by_ms)
        self.pull(0)
        self.look()

    def pull(self, wait_ms: int) -> DelayedFetch:
        def answer(pulled: Pulled) -> None:
            self.got += pulled.tokens

        fetch = self.server.calls.consumers.pull(
            PULL, PullRequest(10, TEN_MINUTES_MS, wait_ms, answer)
        )
        self.server.rest()
        return fetch

    def fires(self) -> bool:
        """Whether the heartbeat is over."""
        try:
            self.server.engine.part(Heartbeats).get("machine")
        except NotFoundError:
            return True
        return False


@STEPS
def test_a_lease_lasts_however_the_clock_is_set(set_by_ms: int) -> None:
    machine = Machine()
    machine.publish("job", 1)
    machine.pull(0)
    assert len(machine.got) == 1
    machine.set_clock(set_by_ms)
    machine.wait(TEN_MINUTES_MS - 1)
    machine.pull(0)
    assert len(machine.got) == 1
    machine.wait(1)
    machine.pull(0)
    assert len(machine.got) == 2


@STEPS
def test_a_lease_that_is_extended_after_the_step(set_by_ms: int) -> None:
    machine = Machine()
    machine.publish("job", 1)
    machine.pull(0)
    machine.clock.set(set_by_ms)
    assert machine.server.engine.leasing.extend(machine.got, 500) == []
    machine.wait(499)
    assert machine.server.engine.leasing.leases.count() == 1
    machine.wait(1)
    assert machine.server.engine.leasing.leases.count() == 0


@STEPS
def test_a_long_poll_lasts_however_the_clock_is_set(set_by_ms: int) -> None:
    machine = Machine()
    fetch = machine.pull(2_000)
    machine.set_clock(set_by_ms)
    late = machine.pull(2_000)
    machine.wait(1_999)
    assert not fetch.is_completed
    machine.wait(1)
    assert fetch.is_completed and late.is_completed
    assert machine.got == []


@STEPS
def test_a_heartbeat_lasts_however_the_clock_is_set(set_by_ms: int) -> None:
    machine = Machine()
    put = machine.server.engine.part(Heartbeats).put
    put("machine", TEN_MINUTES_MS, "alarm", Payload(b"1"), machine.clock.now_ms)
    machine.server.rest()
    machine.set_clock(set_by_ms)
    machine.wait(TEN_MINUTES_MS - 1)
    assert not machine.fires()
    # Renewed between a step and the next look.
    machine.clock.set(-set_by_ms)
    put("machine", TEN_MINUTES_MS, "alarm", Payload(b"1"), machine.clock.now_ms)
    machine.wait(TEN_MINUTES_MS - 1)
    assert not machine.fires()
    machine.wait(1)
    assert machine.fires()


@STEPS
def test_a_rate_holds_however_the_clock_is_set(set_by_ms: int) -> None:
    machine = Machine()
    machine.publish("push", 5)
    machine.clock.set(set_by_ms)
    for sent in range(1, 6):
        [deliveries] = machine.server.sending
        assert deliveries[0].payload.body == b"%d" % (sent - 1)
        machine.server.answer(deliveries, WebhookResponse(200))
        machine.look()
        assert machine.server.sending == []
        machine.wait(1_001)
    assert counted(machine.server.engine.dispatcher).queued == 0


@STEPS
def test_the_server_asks_to_be_woken_in_time(set_by_ms: int) -> None:
    machine = Machine()
    machine.pull(300)
    machine.clock.set(set_by_ms)
    began_ms = machine.clock.stopwatch_ms()
    while (
        wait_ms := machine.server.tick()
    ) and machine.server.engine.dispatcher.pulls.fetches.count():
        machine.clock.move(wait_ms)
    assert machine.clock.stopwatch_ms() - began_ms == 300
