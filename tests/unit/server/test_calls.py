"""The calls: what comes back from threads and groups, as awaitables; and who asks and goes away."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import pytest

from delayserver.config import Settings
from delayserver.decisions.delayed_produce import Level
from delayserver.decisions.new_messages import NewMessage
from delayserver.delivery.delayed_fetch import Pulled, PullRequest
from delayserver.delivery.webhook import WebhookResponse
from delayserver.errors import ConflictError, NotFoundError, StoppingError
from delayserver.queries.dead_letters import DeadLetters
from delayserver.records.horizon import Mark
from delayserver.records.message import DueDelivery, Payload, State
from delayserver.records.message_id import MessageId
from delayserver.records.subscriptions import SPANS_MAX, SubjectSpan
from delayserver.security.tokens import TokenFile, TokenTable
from delayserver.server.calls import Calls
from delayserver.server.gauges import Gauges
from storage.errors import DamageError, DiskFullError
from tests.unit.fakes import subscription
from tests.waiting import turns
from tests.world.server import Observer, SimulatedClock, SimulatedServer
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.faults import Fault, FaultKind, Faults, FaultyFiles, Moment
from tests.world.storage.files import SimulatedFiles

DAY_MS = 86_400_000
T = TypeVar("T")


class Machine:
    """The calls of a server whose threads and loop are moved by hand."""

    def __init__(self) -> None:
        self.clock, self.faults = SimulatedClock(), Faults()
        files = FaultyFiles(SimulatedFiles(), self.faults)
        catalog, chance = MemoryCatalog(), random.Random(0)
        self.server = SimulatedServer(
            Settings(), files, catalog, self.clock, chance, Observer(), quick=lambda: False
        )
        gauges = Gauges(self.server.engine, self.server.settings, self.clock)
        tokens = TokenTable(TokenFile(files), None, self.clock.monotonic_s)
        self.calls = Calls(self.server, gauges, tokens)

    def wait(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The answer, with everything else moving meanwhile."""

        async def answer() -> T:
            asked = asyncio.ensure_future(ask())
            while not asked.done():
                await turns()
                self.server.rest()
                self.server.tick()
                self.clock.move(100)
            return await asked

        return asyncio.run(answer())

    def publish(self, *, due_in_ms: int = DAY_MS, key: str | None = None) -> MessageId:
        message = NewMessage("orders", self.clock() + due_in_ms, Payload(b"1", key=key))
        published = self.calls.publish_one(message, self.clock())
        return self.calls.message_id(published.message_id)

    def subscribe(self, number: int = 1, **more: Any) -> None:
        one = subscription(number, subject="*", created_ms=self.clock(), **more)
        self.wait(lambda: self.calls.put_subscription(one.name, lambda existing, known: one))


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_what_is_durable_is_told_and_so_is_why_it_is_not(machine: Machine) -> None:
    calls = machine.calls
    machine.publish()
    group = calls.not_durable()
    assert group is not None
    machine.wait(lambda: calls.durable(group))
    assert calls.not_durable() is None
    machine.wait(lambda: calls.durable(None))
    machine.publish()
    count = machine.faults.call_count
    machine.faults.faults.append(Fault(count + 1, FaultKind.NO_SPACE, Moment.BEFORE))
    with pytest.raises(DiskFullError):
        machine.wait(lambda: calls.durable(calls.not_durable()))


@pytest.mark.parametrize("level", [Level.DURABLE, Level.FILED])
def test_a_publish_is_acknowledged_at_the_level_that_it_asks_for(
    machine: Machine, level: Level
) -> None:
    seq = machine.publish().seq
    group = machine.calls.not_durable()
    assert machine.wait(lambda: machine.calls.acknowledged(group, seq, level, 1000)) is level


def test_a_message_is_found_before_and_after_it_is_filed_and_is_moved(machine: Machine) -> None:
    calls = machine.calls
    found = machine.publish()
    assert machine.wait(lambda: calls.subject_of(found.seq, found.due_ms)) == "orders"
    machine.wait(calls.checkpoint)
    assert (
        machine.wait(lambda: calls.find(calls.locate(found.seq, found.due_ms).entry)).subject_id
        == 1
    )
    later_ms = found.due_ms + 1
    before = calls.version(found.seq)
    version = machine.wait(lambda: calls.move(found.seq, found.due_ms, later_ms))
    assert version != before
    assert version == calls.version(found.seq)
    assert calls.locate(found.seq, found.due_ms).entry.due_ms == later_ms


def test_an_error_of_the_reader_is_that_of_the_call(machine: Machine) -> None:
    def fail(reader: object) -> None:
        raise DamageError("a file", 0, "rotten")

    with pytest.raises(DamageError):
        machine.wait(lambda: machine.calls.read(fail))


def test_what_a_consumer_that_is_gone_would_get_is_for_the_next(machine: Machine) -> None:
    calls = machine.calls
    machine.subscribe()
    consumer = calls.registry.by_id(1)
    assert consumer is not None
    answers: list[Pulled] = []
    fetch = calls.pull(consumer, PullRequest(10, 60_000, 60_000, answers.append))
    machine.publish(due_in_ms=0)
    fetch.cancel()
    machine.wait(calls.settled)
    assert not answers
    calls.pull(consumer, PullRequest(10, 60_000, 60_000, answers.append))
    machine.wait(calls.settled)
    [pulled] = answers
    assert calls.waiting(consumer) == (0, 1)
    done: list[list[str]] = []
    calls.ack(consumer.id, ["nobody's"], lambda over, error: done.append(over))
    assert done == [["nobody's"]]
    calls.ack(consumer.id, pulled.tokens, lambda over, error: done.append(over))
    assert len(done) == 1  # not before it is recorded
    machine.wait(calls.settled)
    assert done[1:] == [[]]
    assert calls.waiting(consumer) == (0, 0)


def test_a_server_that_stops_hands_out_nothing(machine: Machine) -> None:
    machine.subscribe()
    consumer = machine.calls.subscription(machine.calls.registry.by_id(1).name)  # type: ignore[union-attr]
    machine.server.engine.groups.stopping = True
    with pytest.raises(StoppingError):
        machine.calls.pull(consumer, PullRequest(10, 60_000, 0, lambda pulled: None))


def test_many_ids_are_those_of_one_at_a_time(machine: Machine) -> None:
    found = [machine.publish(due_in_ms=number) for number in range(3)]
    columns = machine.calls.find_by_ids([machine.calls.encode_id(o.due_ms, o.seq) for o in found])
    texts = machine.calls.encode_ids(columns.dues_ms, columns.seqs)
    assert list(texts) == [machine.calls.encode_id(one.due_ms, one.seq) for one in found]
    with pytest.raises(NotFoundError):
        machine.calls.message_id("x")


def test_a_consumer_that_goes_while_bodies_are_read_uses_up_no_attempt(machine: Machine) -> None:
    calls = machine.calls
    machine.subscribe(max_attempts=1)
    consumer = calls.subscription("s1")
    machine.publish(due_in_ms=0)
    machine.wait(calls.checkpoint)
    answers: list[Pulled] = []
    machine.server.reader_now.fetch_now = lambda *rest: None  # type: ignore[method-assign]
    for _ in range(3):
        fetch = calls.pull(consumer, PullRequest(10, 60_000, 0, answers.append))
        assert calls.waiting(consumer) == (0, 1)
        fetch.cancel()
        machine.wait(calls.settled)
        assert calls.waiting(consumer) == (1, 0)
    calls.pull(consumer, PullRequest(10, 60_000, 0, answers.append))
    machine.wait(calls.settled)
    [[(delivery, _)]] = answers
    assert delivery.attempt == 1


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
            calls.pull(calls.subscription(name), PullRequest(1000, 1, 0, answers.append))
            machine.wait(calls.settled)
    machine.wait(calls.checkpoint)
    return ids


def redrive(machine: Machine, name: str = "s1", ids: list[str] | None = None) -> int:
    async def ask() -> int:
        owners = await machine.calls.dead_letter_owners(name)
        return await machine.calls.redrive(owners, machine.calls.subscription(name), ids)

    return machine.wait(ask)


def letters(machine: Machine, name: str = "s1") -> list[str]:
    async def ask() -> list[str]:
        owners = await machine.calls.dead_letter_owners(name)
        found, _ = await DeadLetters(machine.calls).page(owners, 0, 100, lambda subject: True)
        return [one.message_id for one in found]

    return machine.wait(ask)


def test_a_subject_is_not_changed_more_often_than_a_history_is_long(machine: Machine) -> None:
    spans = tuple(
        SubjectSpan(f"s{number}", number, (Mark(1 << 40, number),)) for number in range(SPANS_MAX)
    )
    many = subscription(1, subject=spans[-1].subject, history=spans)
    with pytest.raises(ConflictError, match="99 times"):
        machine.calls.check_subjects_of(many)
    machine.calls.check_subjects_of(msgspec.structs.replace(many, history=spans[1:]))


def test_a_redrive_ends_though_what_it_redrives_dies_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.calls.redrive_max = 2
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
    machine.calls.redrive_max = count
    monkeypatch.setattr("delayserver.server.calls.REDRIVE_BYTES_MAX", total_bytes)
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
    machine.wait(lambda: calls.change_subscription("s1", deleted=True))
    assert letters(machine) == [first, second, third]
    machine.subscribe(2, name="s1", max_attempts=1)
    assert letters(machine) == [first, second, third]
    assert redrive(machine, ids=[second, "no id"]) == 1
    assert redrive(machine, ids=[second]) == 0
    assert letters(machine) == [first, third]
    answers: list[Pulled] = []
    calls.pull(calls.subscription("s1"), PullRequest(10, 60_000, 0, answers.append))
    machine.wait(calls.settled)
    [[(delivery, token)]] = answers
    assert (delivery.message_id, delivery.attempt) == (second, 1)
    seq, due_ms = delivery.origin.message_seq, delivery.origin.published_due_ms
    assert calls.locate(seq, due_ms).state is State.DELIVERING
    calls.ack(calls.subscription("s1").id, [token], lambda over, error: None)
    machine.wait(calls.checkpoint)
    assert calls.locate(seq, due_ms).state is State.DELIVERED

    async def discard() -> None:
        await calls.discard(await calls.dead_letter_owners("s1"), third)

    machine.wait(discard)
    with pytest.raises(NotFoundError):
        machine.wait(discard)
    assert letters(machine) == [first]


def test_a_name_without_subscription_and_letters_is_not_known(machine: Machine) -> None:
    machine.subscribe()
    assert letters(machine) == []
    machine.wait(lambda: machine.calls.change_subscription("s1", deleted=True))
    for name in ("s1", "s2"):
        with pytest.raises(NotFoundError):
            letters(machine, name)


def test_a_redrive_stops_when_its_subscription_is_deleted(machine: Machine) -> None:
    machine.subscribe(max_attempts=1)
    [letter] = die(machine)
    heir = machine.calls.subscription("s1")
    machine.wait(lambda: machine.calls.change_subscription("s1", deleted=True))
    with pytest.raises(ConflictError):
        machine.wait(lambda: machine.calls.redrive([heir], heir, None))
    assert letters(machine) == [letter]
