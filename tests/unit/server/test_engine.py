"""The engine: how time passes for its parts."""

from __future__ import annotations

import itertools
import random

import pytest

from delayserver.config import Settings
from delayserver.decisions.new_messages import NewMessage
from delayserver.delivery.delayed_fetch import Pulled, PullRequest
from delayserver.parts.heartbeats.heartbeats import Heartbeats
from delayserver.records.message import Payload
from delayserver.server.engine import LOOK_TURNS, STAND_STILL_MS
from delayserver.slices import TURN_ITEMS
from tests.unit.fakes import counted, subscription
from tests.world.publishes import publish_all
from tests.world.server import Observer, SimulatedClock, SimulatedServer
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.files import SimulatedFiles


class Machine:
    """A server that is moved by hand, and its stopwatch."""

    def __init__(self) -> None:
        self.clock = SimulatedClock()
        self.server = SimulatedServer(
            Settings(),
            SimulatedFiles(),
            MemoryCatalog(),
            self.clock,
            random.Random(0),
            Observer(),
        )
        self.engine = self.server.engine

    def advance(self, stood_ms: int = 0) -> int:
        return self.engine.advance(self.clock.now_ms, stood_ms)


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_a_renewal_that_has_arrived_counts_after_a_stand_still(
    machine: Machine,
) -> None:
    """A renewal, an acknowledgement or an extension may have come in time."""
    ended: list[str] = []
    machine.engine.timeouts.add(lambda: ended.append("lease"), 100)
    beat = ("w", 100, "lost", Payload(b"1"))
    machine.engine.part(Heartbeats).put(*beat, machine.clock.now_ms)
    machine.clock.move(130)
    for turn in range(LOOK_TURNS):
        assert machine.advance(STAND_STILL_MS if not turn else 0) == 0
        assert (ended, machine.engine.part(Heartbeats).fired_total) == ([], 0)
    machine.engine.part(Heartbeats).put(*beat, machine.clock.now_ms)  # it was read meanwhile
    # However late the loop is: what is over ends now.
    machine.advance(STAND_STILL_MS)
    assert (ended, machine.engine.part(Heartbeats).fired_total) == (["lease"], 0)


def test_a_turn_that_came_in_time_looks_at_nothing_first(machine: Machine) -> None:
    ended: list[str] = []
    machine.engine.timeouts.add(lambda: ended.append("lease"), 100)
    machine.clock.move(100)
    machine.advance(STAND_STILL_MS - 1)
    assert ended == ["lease"]


def test_no_turn_fires_more_than_its_items_and_none_of_them_twice(machine: Machine) -> None:
    """As many subjects as messages, and several subscriptions of each: every route and every queue
    is counted."""
    server, clock = machine.server, machine.clock
    for number in range(1, 41):
        one = subscription(number, subject="*", created_ms=clock.now_ms)
        machine.engine.subscribing.put_subscription(one)
    server.rest()
    clock.move(1)
    count = 200
    due_ms = clock.now_ms + 50
    messages = [NewMessage(f"s{number}", due_ms, Payload(b"1")) for number in range(count)]
    publish_all(machine.engine.publishing, messages, clock.now_ms)
    server.rest()
    clock.move(100)
    fire = type(machine.engine.dispatcher).fire
    machine.engine.dispatcher.fire = fire.__get__(machine.engine.dispatcher)  # type: ignore[method-assign]
    machine.engine.slices.turn_items = TURN_ITEMS
    queued: list[int] = [counted(machine.engine.dispatcher).queued]
    while machine.advance() == 0:
        queued.append(counted(machine.engine.dispatcher).queued)
    queued.append(counted(machine.engine.dispatcher).queued)
    steps = [after - before for before, after in itertools.pairwise(queued)]
    assert queued[-1] == count * 40
    assert max(steps) <= TURN_ITEMS + 40
    assert len([step for step in steps if step]) >= count * 40 // TURN_ITEMS


def test_a_consumer_that_waits_is_answered_in_the_turn_in_which_its_message_fires(
    machine: Machine,
) -> None:
    server, clock = machine.server, machine.clock
    one = subscription(1, subject="a", created_ms=clock.now_ms)
    machine.engine.subscribing.put_subscription(one)
    server.rest()
    clock.move(1)
    answers: list[Pulled] = []
    machine.engine.leasing.pull(one, PullRequest(1, 1000, 5000, answers.append))
    publish_all(
        machine.engine.publishing, [NewMessage("a", clock.now_ms + 5, Payload(b"1"))], clock.now_ms
    )
    server.rest()
    clock.move(5)
    machine.advance()
    server.rest()
    assert [len(answer.tokens) for answer in answers] == [1]
