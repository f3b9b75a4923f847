"""Leases over planned restarts: good under the old tokens, and for no longer than they had left."""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import Any

import pytest

from delayserver.config import Settings
from delayserver.decisions.new_messages import NewMessage
from delayserver.delivery.delayed_fetch import Pulled, PullRequest
from delayserver.errors import StoppingError
from delayserver.records.message import DueDelivery, MessageOptions, Payload
from delayserver.records.subscriptions import Subscription
from delayserver.server import carried_leases
from tests.unit.fakes import counted
from tests.world.server import Observer, SimulatedClock, SimulatedServer
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.files import SimulatedFiles

RESTARTS = int(os.environ.get("PLANNED_RESTARTS", "12"))
"""Any number is possible: `PLANNED_RESTARTS=200 pytest` this file."""


class Machine:
    """One server after the other on one disk."""

    def __init__(self, *subscriptions: dict[str, Any]) -> None:
        self.disk, self.catalog, self.clock = SimulatedFiles(), MemoryCatalog(), SimulatedClock()
        self.rng = random.Random(0)
        self.start()
        for number, more in enumerate(subscriptions or ({},)):
            self._put(number, more)

    def _put(self, number: int, more: dict[str, Any]) -> None:
        values = {"name": f"s{number}", "subject": "*", "type": "pull", "created_ms": self.clock()}
        registry = self.server.engine.registry
        self.server.engine.subscribing.put_subscription(
            Subscription(**{"id": registry.next_id(), **values, **more})
        )
        self.server.rest()

    def start(self) -> None:
        self.server = SimulatedServer(
            Settings(), self.disk, self.catalog, self.clock, self.rng, Observer()
        )
        self.server.tick()
        self.server.rest()

    def restart(self) -> None:
        """Stop as planned, and start again; some time passes."""
        self.server.stop()
        self.clock.move(40)
        self.disk, self.catalog = self.disk.crash(), self.catalog.crash()
        self.start()

    def kill(self) -> None:
        self.disk, self.catalog = self.disk.kill(), self.catalog.crash()
        self.start()

    def publish(self, *bodies: bytes, **options: Any) -> None:
        for body in bodies:
            chosen = MessageOptions(**options) if options else None
            payload = Payload(body, options=chosen)
            message = NewMessage("orders", self.clock() + 1, payload)
            self.server.engine.publishing.publish_one(message, self.clock())
        self.server.rest()
        self.pass_ms(1)

    def pass_ms(self, by_ms: int) -> None:
        self.clock.move(by_ms)
        self.server.tick()
        self.server.rest()

    def pull(self, most: int = 100, lease_ms: int = 1000, name: str = "s0") -> dict[str, Any]:
        """Returns the deliveries that a consumer gets at once, by their tokens."""
        got: list[Pulled] = []
        subscription = self.server.calls.subscription(name)
        self.server.calls.consumers.pull(subscription, PullRequest(most, lease_ms, 0, got.append))
        self.server.rest()
        return {token: delivery for pulled in got for delivery, token in pulled}

    def ack(self, *tokens: str) -> list[str]:
        over: list[list[str]] = []
        self.server.ack(list(tokens), over.append)
        self.server.rest()
        [found] = over
        return found


def bodies(pulled: dict[str, DueDelivery]) -> list[bytes]:
    return [delivery.payload.body for delivery in pulled.values()]


def test_a_lease_is_good_after_a_planned_restart_and_its_message_comes_to_nobody_else() -> None:
    machine = Machine()
    machine.publish(b"1", b"2", b"3")
    held = machine.pull(2)
    machine.restart()
    assert counted(machine.server.engine.dispatcher).in_flight == 2
    assert bodies(machine.pull()) == [b"3"]
    assert machine.ack(*held) == []
    machine.restart()
    machine.pass_ms(10_000)
    assert bodies(machine.pull()) == [b"3"]


def test_it_goes_over_several_restarts_with_others() -> None:
    machine = Machine()
    machine.publish(b"1", b"2", b"3", b"4")
    first = machine.pull(3, 5000)
    second: dict[str, DueDelivery] = {}
    tokens = list(first)
    for _ in range(3):
        machine.restart()
        second = second or machine.pull(1, 5000)
    assert len({*first, *second}) == 4
    assert machine.ack(tokens[1]) == []
    machine.restart()
    assert machine.ack(tokens[1]) == [tokens[1]]
    assert machine.ack(tokens[0], *second, tokens[2]) == []
    assert machine.server.engine.leasing.leases.count() == 0
    assert not machine.server.engine.leasing.leases._spans


def test_it_lasts_as_long_as_it_had_left() -> None:
    machine = Machine()
    machine.publish(b"1")
    [token] = machine.pull(lease_ms=1000)
    machine.pass_ms(400)
    machine.restart()
    machine.pass_ms(599)
    assert machine.pull() == {}
    machine.pass_ms(1)
    [again] = machine.pull().values()
    assert again.attempt == again.told_attempt == 2
    assert machine.ack(token) == [token]


@pytest.mark.parametrize("by_ms", [-3_600_000, 3_600_000])
def test_a_clock_that_is_set_does_not_end_it_early(by_ms: int) -> None:
    machine = Machine()
    machine.publish(b"1")
    machine.pass_ms(3_700_000)
    [token] = machine.pull(lease_ms=1000)
    machine.server.stop()
    machine.clock.set(by_ms)
    machine.start()
    assert machine.pull() == {}
    assert machine.ack(token) == []


def test_it_can_be_extended_and_given_back() -> None:
    machine = Machine()
    machine.publish(b"1", b"2")
    one, two = machine.pull(lease_ms=100)
    machine.restart()
    assert machine.server.engine.leasing.extend([one], 5000) == []
    machine.server.engine.leasing.nack([two], 0, machine.clock())
    machine.pass_ms(4000)
    [again] = machine.pull().values()
    assert (again.payload.body, again.attempt) == (b"2", 2)
    machine.restart()
    assert machine.ack(one) == []


def test_another_subscription_gets_its_own() -> None:
    machine = Machine({}, {})
    machine.publish(b"1", b"2")
    held = machine.pull(1)
    machine.restart()
    assert sorted(bodies(machine.pull(name="s1"))) == [b"1", b"2"]
    assert bodies(machine.pull()) == [b"2"]
    assert machine.ack(*held) == []


def test_the_rest_of_a_group_waits_behind_it() -> None:
    machine = Machine()
    machine.publish(b"1", b"2", group="g")
    held = machine.pull()
    assert bodies(held) == [b"1"]
    machine.restart()
    assert machine.pull() == {}
    machine.ack(*held)
    machine.pass_ms(1)
    assert bodies(machine.pull()) == [b"2"]


def test_the_attempts_of_what_came_back_are_known() -> None:
    machine = Machine()
    machine.publish(b"1")
    for attempt in (1, 2, 3):
        [(token, delivery)] = machine.pull().items()
        assert delivery.attempt == attempt
        machine.server.engine.leasing.nack([token], 0, machine.clock())
        machine.restart()


def test_what_came_back_and_is_not_due_again_leaves_nothing_to_remember() -> None:
    """The clock was set back: a row that waits again can be cancelled."""
    machine = Machine()
    machine.publish(b"1")
    [(token, delivery)] = machine.pull().items()
    machine.server.engine.leasing.nack([token], 0, machine.clock())
    machine.server.stop()
    machine.clock.set(-600_000)
    machine.start()
    machine.server.engine.messages.cancel(delivery.entry.seq, delivery.entry.due_ms)
    machine.server.rest()
    machine.pass_ms(700_000)
    assert machine.pull() == {}
    assert not any(queue.attempts for queue in machine.server.engine.dispatcher.queues)


def test_a_kill_ends_leases_and_counts_one_attempt_more_that_uses_up_none() -> None:
    machine = Machine({"max_attempts": 2})
    machine.publish(b"1")
    [token] = machine.pull()
    for kills in (1, 2, 3):
        machine.kill()
        assert machine.ack(token) == [token]
        [(token, delivery)] = machine.pull().items()
        assert (delivery.attempt, delivery.told_attempt) == (1, 1 + kills)
    machine.restart()  # Which adds nothing.
    machine.server.engine.leasing.nack([token], 0, machine.clock())
    [(token, delivery)] = machine.pull().items()
    assert (delivery.attempt, delivery.told_attempt) == (2, 5)
    machine.publish(b"2")
    [fresh] = machine.pull().values()
    assert fresh.told_attempt == 1


def test_an_attempt_in_company_is_not_the_last_one_whatever_restarts_lie_between() -> None:
    machine = Machine({"max_attempts": 1})
    machine.publish(b"1", b"2", b"3")
    for _ in range(2):
        assert len(machine.pull(lease_ms=1000)) == 3
        machine.restart()
        machine.pass_ms(1000)  # Their consumer has ended. Any of them may be the cause.
        machine.restart()
    machine.pull(lease_ms=1000)
    machine.pass_ms(1000)
    for body in (b"1", b"2", b"3"):
        [(token, delivery)] = machine.pull(lease_ms=1000).items()
        assert delivery.payload.body == body
        machine.ack(token)
    assert machine.pull() == {}


def test_a_retry_keeps_the_attempts_that_a_kill_has_hidden() -> None:
    machine = Machine()
    machine.publish(b"1")
    machine.pull()
    machine.kill()
    [(token, _)] = machine.pull().items()
    machine.server.engine.leasing.nack([token], 50, machine.clock())
    machine.server.rest()
    machine.pass_ms(50)
    [delivery] = machine.pull().values()
    assert (delivery.attempt, delivery.told_attempt) == (2, 3)


def test_a_stop_refuses_pulls_and_takes_acknowledgements() -> None:
    machine = Machine()
    machine.publish(b"1")
    [token] = machine.pull()
    machine.server.engine.dispatcher.drain()
    with pytest.raises(StoppingError):
        machine.pull()
    assert machine.server.engine.leasing.extend([token], 5000) == []
    assert machine.ack(token) == []


@pytest.mark.parametrize("together_max", [1, 3, 10_000])
def test_many_are_restored_some_at_a_time(
    monkeypatch: pytest.MonkeyPatch, together_max: int
) -> None:
    monkeypatch.setattr(carried_leases, "TOGETHER_MAX", together_max)
    machine = Machine()
    machine.publish(*(b"%d" % number for number in range(12)))
    held: dict[str, DueDelivery] = {}
    for most in (1, 5, 2, 4):
        held |= machine.pull(most)
    machine.restart()
    leases = machine.server.engine.leasing.leases
    for token, delivery in held.items():
        found = leases.get(token)
        assert found is not None and found.entry == delivery.entry
    assert machine.ack(*random.Random(1).sample(list(held), 12)) == []


def test_over_many_planned_restarts_no_message_is_in_two_hands() -> None:
    over_planned_restarts(RESTARTS, seed=1)


def over_planned_restarts(restarts: int, seed: int) -> None:
    """Consumers that pull, work, extend, give back and acknowledge, over so many planned restarts.

    Each message is in one hand at a time, and none that was acknowledged comes again."""
    rng, machine = random.Random(seed), Machine()
    held: dict[str, bytes] = {}
    times: Counter[bytes] = Counter()
    done: set[bytes] = set()
    count = 0

    def pull() -> None:
        for token, delivery in machine.pull(rng.choice((1, 3, 10)), 1_000_000).items():
            body = delivery.payload.body
            assert body not in {*held.values(), *done}, (seed, body)
            times[body] += 1
            assert delivery.told_attempt == times[body]
            held[token] = body

    for _ in range(restarts):
        for _ in range(rng.randrange(4)):
            machine.publish(b"%d" % count)
            count += 1
        for _ in range(3):
            pull()
            some = rng.sample(list(held), min(len(held), rng.randrange(4)))
            match rng.randrange(4):
                case 0:
                    assert machine.server.engine.leasing.extend(some, 1_000_000) == []
                case 1:
                    machine.server.engine.leasing.nack(some, 0, machine.clock())
                    machine.server.rest()
                    for token in some:
                        del held[token]
                case _:
                    assert not some or machine.ack(*some) == []
                    done |= {held.pop(token) for token in some}
        machine.restart()
    while len(done) < count:
        pull()
        assert machine.ack(*held) == []
        done |= set(held.values())
        held.clear()
    machine.restart()
    assert machine.pull() == {}
