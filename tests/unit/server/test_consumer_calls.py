"""What consumers ask: also of a server that stops, and by those that go away meanwhile."""

from __future__ import annotations

import pytest

from delayserver.delivery.delayed_fetch import Pulled, PullRequest
from delayserver.errors import StoppingError
from tests.unit.server.machine import Machine


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_what_a_consumer_that_is_gone_would_get_is_for_the_next(machine: Machine) -> None:
    calls = machine.calls
    machine.subscribe()
    consumer = calls.registry.by_id(1)
    assert consumer is not None
    answers: list[Pulled] = []
    fetch = calls.consumers.pull(consumer, PullRequest(10, 60_000, 60_000, answers.append))
    machine.publish(due_in_ms=0)
    fetch.cancel()
    machine.wait(calls.settled)
    assert not answers
    calls.consumers.pull(consumer, PullRequest(10, 60_000, 60_000, answers.append))
    machine.wait(calls.settled)
    [pulled] = answers
    assert calls.consumers.waiting(consumer) == (0, 1)
    done: list[list[str]] = []
    calls.consumers.ack(consumer.id, ["nobody's"], lambda over, error: done.append(over))
    assert done == [["nobody's"]]
    calls.consumers.ack(consumer.id, pulled.tokens, lambda over, error: done.append(over))
    assert len(done) == 1  # not before it is recorded
    machine.wait(calls.settled)
    assert done[1:] == [[]]
    assert calls.consumers.waiting(consumer) == (0, 0)


def test_a_server_that_stops_hands_out_nothing(machine: Machine) -> None:
    machine.subscribe()
    consumer = machine.calls.subscription(machine.calls.registry.by_id(1).name)  # type: ignore[union-attr]
    machine.server.engine.groups.stopping = True
    with pytest.raises(StoppingError):
        machine.calls.consumers.pull(consumer, PullRequest(10, 60_000, 0, lambda pulled: None))


def test_a_consumer_that_goes_while_bodies_are_read_uses_up_no_attempt(machine: Machine) -> None:
    calls = machine.calls
    machine.subscribe(max_attempts=1)
    consumer = calls.subscription("s1")
    machine.publish(due_in_ms=0)
    machine.wait(calls.checkpoint)
    answers: list[Pulled] = []
    machine.server.reader_now.fetch_now = lambda *rest: None  # type: ignore[method-assign]
    for _ in range(3):
        fetch = calls.consumers.pull(consumer, PullRequest(10, 60_000, 0, answers.append))
        assert calls.consumers.waiting(consumer) == (0, 1)
        fetch.cancel()
        machine.wait(calls.settled)
        assert calls.consumers.waiting(consumer) == (1, 0)
    calls.consumers.pull(consumer, PullRequest(10, 60_000, 0, answers.append))
    machine.wait(calls.settled)
    [[(delivery, _)]] = answers
    assert delivery.attempt == 1
