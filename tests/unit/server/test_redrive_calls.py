"""Dead letters are delivered again, discarded, and found by the name of their subscription."""

from __future__ import annotations

import pytest

from delayserver.delivery.delayed_fetch import Pulled, PullRequest
from delayserver.delivery.webhook import WebhookResponse
from delayserver.errors import ConflictError, NotFoundError
from delayserver.queries.dead_letters import DeadLetters
from delayserver.records.message import DueDelivery, State
from tests.unit.server.machine import Machine


@pytest.fixture
def machine() -> Machine:
    return Machine()


def die(machine: Machine, count: int = 1) -> list[str]:
    """Messages that subscription 1 gives up; their ids."""
    calls, dead = machine.calls, machine.server.engine.retries.dead_by_subject
    ids = []
    for _ in range(count):
        found = machine.publish(due_in_ms=0)
        ids.append(calls.encode_id(found.due_ms, found.seq))
    before = sum(dead.values())
    while sum(dead.values()) < before + count:
        machine.wait(calls.checkpoint)
        for name in [one.name for one in calls.registry]:
            answers: list[Pulled] = []
            calls.consumers.pull(calls.subscription(name), PullRequest(1000, 1, 0, answers.append))
            machine.wait(calls.settled)
    machine.wait(calls.checkpoint)
    return ids


def redrive(machine: Machine, name: str = "s1", ids: list[str] | None = None) -> int:
    async def ask() -> int:
        owners = await machine.calls.redrives.owners(name)
        return await machine.calls.redrives.redrive(owners, machine.calls.subscription(name), ids)

    return machine.wait(ask)


def letters(machine: Machine, name: str = "s1") -> list[str]:
    async def ask() -> list[str]:
        owners = await machine.calls.redrives.owners(name)
        found, _ = await DeadLetters(machine.calls).page(owners, 0, 100, lambda subject: True)
        return [one.message_id for one in found]

    return machine.wait(ask)


def test_a_redrive_ends_though_what_it_redrives_dies_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.calls.redrives.redrive_max = 2
    machine.subscribe(type="webhook", max_attempts=1, url="http://127.0.0.1/")
    server = machine.server

    def refuse(_: object, deliveries: list[DueDelivery]) -> None:
        answers = [(deliveries, WebhookResponse(None, None, "refused").result(0, 0))]
        server.post(server.engine.outcomes.on_sent, answers, machine.clock())

    monkeypatch.setattr(server, "send", refuse)
    for _ in range(5):
        machine.publish(due_in_ms=0)
    dead = server.engine.retries.dead_by_subject
    while sum(dead.values()) < 5:
        machine.wait(machine.calls.checkpoint)
    assert redrive(machine) == 5
    machine.wait(machine.calls.checkpoint)
    assert sum(dead.values()) == 10
    assert len(letters(machine)) == 5


@pytest.mark.parametrize(
    ("count", "total_bytes", "turns"), [(200, 10_000, 1), (3, 10_000, 2), (200, 1, 4)]
)
def test_a_redrive_takes_no_more_in_a_turn_than_it_may(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, count: int, total_bytes: int, turns: int
) -> None:
    machine.calls.redrives.redrive_max = count
    monkeypatch.setattr("delayserver.server.redrive_calls.REDRIVE_BYTES_MAX", total_bytes)
    machine.subscribe(max_attempts=1)
    ids = die(machine, 4)
    assert letters(machine) == ids
    before = machine.server.engine.groups.committed_total
    assert redrive(machine) == 4
    assert machine.server.engine.groups.committed_total == before + turns
    assert letters(machine) == []


def test_dead_letters_of_a_deleted_subscription_are_found_by_its_name(machine: Machine) -> None:
    calls = machine.calls
    machine.subscribe(max_attempts=1)
    first, second, third = die(machine, 3)
    machine.wait(lambda: calls.subscriptions.change("s1", deleted=True))
    assert letters(machine) == [first, second, third]
    machine.subscribe(2, name="s1", max_attempts=1)
    assert letters(machine) == [first, second, third]
    assert redrive(machine, ids=[second, "no id"]) == 1
    assert redrive(machine, ids=[second]) == 0
    assert letters(machine) == [first, third]
    answers: list[Pulled] = []
    calls.consumers.pull(calls.subscription("s1"), PullRequest(10, 60_000, 0, answers.append))
    machine.wait(calls.settled)
    [[(delivery, token)]] = answers
    assert (delivery.message_id, delivery.attempt) == (second, 1)
    seq, due_ms = delivery.origin.message_seq, delivery.origin.published_due_ms
    assert calls.locate(seq, due_ms).state is State.DELIVERING
    calls.consumers.ack(calls.subscription("s1").id, [token], lambda over, error: None)
    machine.wait(calls.checkpoint)
    assert calls.locate(seq, due_ms).state is State.DELIVERED

    async def discard() -> None:
        await calls.redrives.discard(await calls.redrives.owners("s1"), third)

    machine.wait(discard)
    with pytest.raises(NotFoundError):
        machine.wait(discard)
    assert letters(machine) == [first]


def test_a_name_without_subscription_and_letters_is_not_known(machine: Machine) -> None:
    machine.subscribe()
    assert letters(machine) == []
    machine.wait(lambda: machine.calls.subscriptions.change("s1", deleted=True))
    for name in ("s1", "s2"):
        with pytest.raises(NotFoundError):
            letters(machine, name)


def test_a_redrive_stops_when_its_subscription_is_deleted(machine: Machine) -> None:
    machine.subscribe(max_attempts=1)
    [letter] = die(machine)
    heir = machine.calls.subscription("s1")
    machine.wait(lambda: machine.calls.subscriptions.change("s1", deleted=True))
    with pytest.raises(ConflictError):
        machine.wait(lambda: machine.calls.redrives.redrive([heir], heir, None))
    assert letters(machine) == [letter]
