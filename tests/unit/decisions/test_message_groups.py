"""Groups of messages: one under way for each subscription, over all that may become of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from delayserver.config import Settings
from delayserver.decisions.new_messages import NewMessage
from delayserver.delivery.delayed_fetch import Pulled, PullRequest
from delayserver.delivery.handout import READ_ROWS_MAX
from delayserver.delivery.webhook import WebhookResponse
from delayserver.records.message import DueDelivery, MessageOptions, Payload
from delayserver.records.subscriptions import Subscription
from storage.errors import DamageError
from storage.files import size_of
from storage.rows import HOUR_MS
from tests.unit.fakes import counted, subscription
from tests.world.publishes import publish_all
from tests.world.server import Observer, SimulatedClock, SimulatedServer
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.files import SimulatedFiles

LEAD_MS = 10 * 60_000


class Damages(Observer):
    """Notes which rows were named."""

    def __init__(self) -> None:
        self.seqs: list[int | None] = []

    def damaged(self, error: DamageError) -> None:
        self.seqs.append(error.first_seq)


class Machine:
    look_rows_max = READ_ROWS_MAX

    def __init__(self, *receivers: Subscription) -> None:
        self.clock, self.observer = SimulatedClock(), Damages()
        self.files, self.catalog = SimulatedFiles(), MemoryCatalog()
        self.start()
        for receiver in receivers:
            self.server.engine.subscribing.put_subscription(receiver)
        self.work()
        self.clock.move(1)

    def start(self) -> None:
        rng = random.Random(0)
        self.server = SimulatedServer(
            Settings(lead_ms=LEAD_MS), self.files, self.catalog, self.clock, rng, self.observer
        )
        self.server.engine.dispatcher.pump.looks.rows_max = self.look_rows_max

    def restart(self) -> None:
        self.files, self.catalog = self.files.kill(), self.catalog.crash()
        self.start()
        self.work()

    def work(self, passed_ms: int = 0) -> None:
        self.clock.move(passed_ms)
        for _ in range(4):
            self.server.rest()
            self.server.tick()
        self.server.rest()

    def lose_files(self) -> None:
        """All that is filed cannot be read any more."""
        self.work(2_000)
        for name in self.files.list("schedule"):
            path = f"schedule/{name}"
            self.files.fail_reads(path, 0, size_of(self.files, path))

    def publish(self, *messages: tuple[str, int], subject: str = "orders", **options: Any) -> None:
        """Of pairs of a group and how soon it is due; the body is both."""
        now_ms = self.clock.now_ms
        chosen = [MessageOptions(group=group, **options) for group, _ in messages]
        new = [
            NewMessage(subject, now_ms + due_ms, Payload(f"{group}{due_ms}".encode(), options=one))
            for (group, due_ms), one in zip(messages, chosen, strict=True)
        ]
        publish_all(self.server.engine.publishing, new, now_ms)
        self.work()

    def sending(self) -> list[str]:
        return [one.payload.body.decode() for sent in self.server.sending for one in sent]

    def answer(self, body: str, status: int = 200) -> DueDelivery:
        [sent] = [one for one in self.server.sending if one[0].payload.body.decode() == body]
        self.server.answer(sent, WebhookResponse(status))
        self.work()
        return sent[0]

    def pull(self, receiver: Subscription) -> dict[str, str]:
        """The token of each body that a consumer gets."""
        found: dict[str, str] = {}

        def answer(pulled: Pulled) -> None:
            found.update((one.payload.body.decode(), token) for one, token in pulled)

        self.server.engine.leasing.pull(receiver, PullRequest(10, 30_000, 1_000, answer, 1))
        self.work()
        self.work(1_000)
        return found


def webhook(number: int = 1, **more: object) -> Subscription:
    values = {"subject": "*", "type": "webhook", "created_ms": SimulatedClock().now_ms}
    return subscription(number, **{**values, **more})


def drained(machine: Machine) -> list[str]:
    """Bodies, in the order in which they are sent and delivered one by one."""
    bodies: list[str] = []
    while machine.sending():
        bodies.append(machine.sending()[0])
        machine.answer(bodies[-1])
    return bodies


def test_one_of_a_group_is_under_way_and_the_next_follows_in_due_order() -> None:
    machine = Machine(webhook())
    machine.publish(("a", 3), ("b", 2), ("a", 1), ("a", 2))
    machine.work(5)
    assert sorted(machine.sending()) == ["a1", "b2"]
    machine.answer("a1")
    assert sorted(machine.sending()) == ["a2", "b2"]
    assert sorted(drained(machine)) == ["a2", "a3", "b2"]
    assert counted(machine.server.engine.dispatcher).queued == 0
    assert machine.server.engine.hours.unsettled() == 0


def test_each_subscription_has_an_order_of_its_own() -> None:
    machine = Machine(webhook(1), webhook(2))
    machine.publish(("a", 1), ("a", 2))
    machine.work(5)
    assert machine.sending() == ["a1", "a1"]
    machine.server.answer(machine.server.sending[0], WebhookResponse(200))
    machine.work()
    assert sorted(machine.sending()) == ["a1", "a2"]


@pytest.mark.parametrize("restarts", [(), (0,), (0, 1), (1,)])
def test_a_retry_keeps_its_place_over_restarts_and_a_dead_letter_makes_way(
    restarts: Sequence[int],
) -> None:
    machine = Machine(webhook(max_attempts=2, backoff_ms=(86_400_000,)))
    machine.publish(("a", 1), ("a", 2), ("b", 3))
    machine.work(5)
    machine.answer("b3")
    machine.answer("a1", 500)
    assert machine.sending() == []
    if 0 in restarts:
        machine.restart()
    machine.publish(("a", 0), ("c", 0))
    assert machine.sending() == ["c0"], "others of the group wait, and no other group"
    machine.answer("c0")
    if 1 in restarts:
        machine.restart()
    assert machine.sending() == []
    machine.work(LEAD_MS)
    assert machine.sending() == ["a1"], "no retry waits longer than hours are loaded ahead"
    machine.answer("a1", 500)
    assert drained(machine) == ["a2", "a0"]


def test_a_restart_while_one_is_under_way_sends_that_again_and_no_other() -> None:
    machine = Machine(webhook())
    machine.publish(("a", 1), ("a", 2), ("a", 3))
    machine.work(5)
    machine.answer("a1")
    machine.restart()
    assert machine.sending() == ["a2"]
    assert drained(machine) == ["a2", "a3"]


def test_who_cancels_a_retry_lets_the_next_one_go() -> None:
    machine = Machine(webhook())
    machine.publish(("a", 1), ("a", 2))
    machine.work(5)
    sent = machine.answer("a1", 500)
    assert machine.sending() == []
    origin = sent.origin
    machine.server.engine.messages.cancel(origin.message_seq, origin.published_due_ms)
    machine.work()
    assert machine.sending() == ["a2"]


def test_a_priority_counts_between_groups_and_not_within_one() -> None:
    machine = Machine(webhook(max_in_flight=1))
    machine.publish(("x", 1))
    machine.publish(("a", 1), priority=0)
    machine.publish(("a", 2), ("b", 2), priority=9)
    machine.work(5)
    assert drained(machine) == ["b2", "x1", "a1", "a2"]


def test_what_expires_while_it_waits_for_its_turn_is_a_dead_letter() -> None:
    machine = Machine(webhook())
    machine.publish(("a", 1), ("a", 2), ttl_ms=1_000)
    machine.work(5)
    assert machine.sending() == ["a1"]
    machine.work(2_000)
    assert machine.server.engine.retries.dead_by_subscription == {1: 1}
    machine.answer("a1")
    assert machine.sending() == []
    assert machine.server.engine.hours.unsettled() == 0


def test_a_batch_has_one_of_each_group() -> None:
    machine = Machine(webhook(batch_max=10, linger_ms=0))
    machine.publish(("a", 1), ("a", 1), ("b", 1), ("c", 1))
    machine.work(5)
    [batch] = machine.server.sending
    assert sorted(one.payload.body for one in batch) == [b"a1", b"b1", b"c1"]
    machine.server.answer(batch, WebhookResponse(200))
    machine.work()
    assert machine.sending() == ["a1"]


def test_a_subscription_that_is_deleted_leaves_what_waits_to_others() -> None:
    machine = Machine(webhook())
    machine.publish(("a", 1), ("a", 2))
    machine.work(5)
    engine = machine.server.engine
    engine.subscribing.put_subscription(webhook(deleted=True))
    machine.work()
    heir = webhook(2, created_ms=machine.clock.now_ms)
    engine.subscribing.put_subscription(heir)
    machine.work()
    assert machine.sending() == ["a1", "a2"], "the first is on its way for the one that is gone"


def test_a_consumer_has_one_of_a_group_and_again_what_it_gave_back() -> None:
    consumer = subscription(subject="*", created_ms=SimulatedClock().now_ms)
    machine = Machine(consumer)
    machine.publish(("a", 1), ("a", 2), ("b", 1))
    machine.work(5)
    taken = machine.pull(consumer)
    assert sorted(taken) == ["a1", "b1"]
    leasing, now_ms = machine.server.engine.leasing, machine.clock.now_ms
    leasing.ack([taken["b1"]], now_ms)
    leasing.nack([taken["a1"]], 0, now_ms)
    taken = machine.pull(consumer)
    assert sorted(taken) == ["a1"], "its place is the first still"
    leasing.nack([taken["a1"]], 60_000, machine.clock.now_ms)
    assert machine.pull(consumer) == {}
    machine.work(60_000)
    taken = machine.pull(consumer)
    assert sorted(taken) == ["a1"]
    leasing.ack([taken["a1"]], machine.clock.now_ms)
    machine.work()
    assert sorted(machine.pull(consumer)) == ["a2"]


def test_a_retry_that_cannot_be_read_is_named_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("storage.files.SECTOR_BYTES", 1)  # and nothing beside it
    machine = Machine(webhook(backoff_ms=(10_000,)))
    machine.publish(("a", 1), ("a", 2))
    machine.work(5)
    first = machine.answer("a1", 500)
    machine.lose_files()
    machine.publish(("a", 0))
    assert machine.sending() == [], "the retry keeps its place"
    machine.work(20_000)
    assert machine.sending() == ["a0"], "nobody can read what is before it"
    assert len(set(machine.observer.seqs)) == 2
    assert drained(machine) == ["a0"]
    # They are there still, for a repair, or a start at which they can be read.
    engine = machine.server.engine
    assert engine.hours.unsettled() == 2
    machine.files.mend_reads()
    machine.restart()
    assert drained(machine) == ["a1", "a2"]
    assert first.attempt == 1


@pytest.mark.damaged("what is filed cannot be read")
def test_what_was_given_back_and_cannot_be_read_makes_way() -> None:
    consumer = subscription(subject="*", created_ms=SimulatedClock().now_ms)
    machine = Machine(consumer)
    machine.publish(("a", 1))
    machine.work(5)
    taken = machine.pull(consumer)
    machine.server.engine.leasing.nack([taken["a1"]], 100, machine.clock.now_ms)
    machine.work(100)
    taken = machine.pull(consumer)
    machine.lose_files()
    machine.publish(("a", 0))
    assert machine.pull(consumer) == {}
    machine.server.engine.leasing.nack([taken["a1"]], 0, machine.clock.now_ms)
    assert [*machine.pull(consumer), *machine.pull(consumer)] == ["a0"]
    assert len(set(machine.observer.seqs)) == 1


def test_what_has_ended_since_a_start_is_not_read_as_a_retry() -> None:
    machine = Machine(webhook(backoff_ms=(60_000,)))
    machine.publish(("a", 1))
    machine.work(5)
    origin = machine.answer("a1", 500).origin
    machine.restart()
    machine.server.engine.messages.cancel(origin.message_seq, origin.published_due_ms)
    machine.lose_files()
    machine.publish(("a", 0))
    assert drained(machine) == ["a0"]
    assert machine.observer.seqs == []
    machine.files.mend_reads()


def test_those_that_fall_due_together_go_in_due_order_though_they_have_several_subjects() -> None:
    machine = Machine(webhook())
    machine.server.engine.dispatcher.pump.looks.rows_max = 1
    machine.publish(("a", 2), ("a", 4), subject="one")
    machine.publish(("a", 1), ("a", 3), subject="two")
    machine.work(5)
    assert drained(machine) == ["a1", "a2", "a3", "a4"]


def test_a_retry_waits_no_longer_than_the_hours_that_a_start_surely_loads() -> None:
    machine = Machine(webhook(backoff_ms=(60_000,)))
    machine.publish(("a", 1), ("a", 2))
    machine.work(5)
    # Hours have passed, and the server has not looked at the clock.
    machine.clock.set(3 * HOUR_MS)
    [sent] = machine.server.sending
    machine.server.answer(sent, WebhookResponse(500))
    machine.server.rest()
    machine.clock.set(-3 * HOUR_MS)
    machine.restart()
    assert machine.sending() == [], "the retry is known, and waits"
    machine.work(3 * HOUR_MS)
    assert drained(machine) == ["a1", "a2"]


def test_of_two_retries_of_a_group_after_a_power_loss_none_is_overtaken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first was delivered, the second failed, and only that was recorded."""
    machine = Machine(webhook(backoff_ms=(60_000,)))
    machine.publish(("a", 1), ("a", 2), ("a", 3))
    machine.work(5)
    machine.answer("a1", 500)
    machine.work(90_000)
    monkeypatch.setattr(machine.server.settles, "_put", lambda request: None)
    machine.answer("a1")
    machine.answer("a2", 500)
    machine.restart()
    assert machine.sending() == ["a1"], "that it was delivered is not known any more"
    machine.answer("a1")
    assert machine.sending() == []
    machine.work(90_000)
    assert drained(machine) == ["a2", "a3"]
