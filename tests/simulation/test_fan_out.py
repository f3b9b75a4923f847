"""Fan-out against a simple model: who gets what, while subscriptions come and go and servers crash.

A message is for every subscription whose subject matched when it fell due, each of which settles it
on its own, whatever its subject is then; if there was none, or they were deleted before they had
it, for the first that matches. As long as none does, it waits."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from delayserver.config import Settings
from delayserver.decisions.new_messages import NewMessage
from delayserver.delivery.webhook import WebhookResponse
from delayserver.records.message import Payload
from delayserver.records.subjects import matches
from delayserver.records.subscriptions import Subscription
from storage.rows import HOUR_MS
from tests.depth import every
from tests.world import Ledger, SimulatedClock, SimulatedServer, Violation
from tests.world.publishes import publish_all
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.files import SimulatedFiles

SETTINGS = Settings(
    segment_bytes=4096,
    checkpoint_ms=1000,
    lead_ms=50,
    retention_ms=10 * HOUR_MS,
    dedupe_window_ms=0,
    settle_sync_ms=0,
    group_max_bytes=1 << 20,
)
SUBJECTS = ("a.x", "a.y", "b")
PATTERNS = ("a.x", "a.*", "b", "*")


@dataclass
class Known:
    """A message in the model."""

    subject: str
    due_ms: int
    had_by: set[int] = field(default_factory=set)
    """Subscriptions that took it."""
    is_given_up: bool = False
    """It was on its way to a subscription that was deleted, and the server ended before that was
    answered: nobody remembers that it has to go to another."""


class FanOut(RuleBasedStateMachine):
    """Rules are what clients do and what befalls the server."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = SimulatedClock()
        self.ledger = Ledger()
        self.ledger.clock = self.clock
        self.rng = random.Random(0)
        self.disk, self.catalog = SimulatedFiles(rng=self.rng), MemoryCatalog()
        self.known: dict[int, Known] = {}
        self.ever: dict[int, Subscription] = {}
        self.patterns: dict[int, list[tuple[int, str]]] = {}
        """By subscription: since when it has had which subject."""

    @initialize()
    def start(self) -> None:
        self.ledger.new_life()
        self.server = SimulatedServer(
            SETTINGS, self.disk, self.catalog, self.clock, self.rng, self.ledger
        )
        self.ledger.recovered(self.server)
        self.look()

    def look(self) -> None:
        for _ in range(2):
            self.server.tick()
            self.server.rest()

    def exists(self) -> dict[int, Subscription]:
        return {one.id: one for one in self.server.engine.registry}

    # ── what happens ───────────────────────────────────────────────────────────────────────────

    @rule(subject=st.sampled_from(SUBJECTS), delay_ms=st.sampled_from((0, 5, 400, HOUR_MS)))
    def publish(self, subject: str, delay_ms: int) -> None:
        due_ms = self.clock.now_ms + delay_ms
        message = NewMessage(subject, due_ms, Payload(b"1"))
        [published] = publish_all(self.server.engine.publishing, [message], self.clock.now_ms)
        self.known[self.server.engine.ids.decode(published.message_id).seq] = Known(subject, due_ms)
        self.look()

    @rule(by_ms=st.sampled_from((1, 10, 500, HOUR_MS)))
    def wait(self, by_ms: int) -> None:
        self.clock.move(by_ms)
        self.look()

    @precondition(lambda self: len(self.exists()) < 4)
    @rule(pattern=st.sampled_from(PATTERNS))
    def subscribe(self, pattern: str) -> None:
        self.clock.move(1)  # after a restart nothing tells the order within a millisecond
        number = self.server.engine.registry.next_id()
        made = Subscription(
            id=number,
            name=f"s{number}",
            subject=pattern,
            type="webhook",
            created_ms=self.clock.now_ms,
            max_in_flight=2,
        )
        self.server.engine.subscribing.put_subscription(made)
        self.server.rest()
        self.ever[number] = self.exists()[number]
        self.patterns[number] = [(self.clock.now_ms, pattern)]
        self.look()

    @precondition(lambda self: self.exists())
    @rule(data=st.data(), pattern=st.sampled_from(PATTERNS))
    def change(self, data: st.DataObject, pattern: str) -> None:
        self.redefine(data.draw(st.sampled_from(sorted(self.exists())), label="which"), pattern)

    def redefine(self, number: int, pattern: str) -> None:
        """A subscription gets another subject."""
        self.clock.move(1)
        changed = msgspec.structs.replace(self.exists()[number], subject=pattern)
        self.server.engine.subscribing.put_subscription(changed)
        self.server.rest()
        self.patterns[number].append((self.clock.now_ms, pattern))
        self.look()

    def is_for(self, number: int, message: Known) -> bool:
        """Whether the subject matched when the message fell due."""
        had = [pattern for since_ms, pattern in self.patterns[number] if since_ms <= message.due_ms]
        return bool(had) and matches(had[-1], message.subject)

    def may_have(self, number: int, message: Known) -> bool:
        """Whether the subject matched then, or did later."""
        since = [
            pattern for since_ms, pattern in self.patterns[number] if since_ms > message.due_ms
        ]
        return self.is_for(number, message) or any(matches(one, message.subject) for one in since)

    @precondition(lambda self: self.exists())
    @rule(data=st.data())
    def unsubscribe(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.exists())), label="subscription")
        gone = msgspec.structs.replace(self.exists()[number], deleted=True)
        self.server.engine.subscribing.put_subscription(gone)
        self.look()

    @precondition(lambda self: self.server.sending)
    @rule(data=st.data(), ok=st.booleans())
    def answer(self, data: st.DataObject, ok: bool) -> None:
        [delivery] = data.draw(st.sampled_from(self.server.sending), label="delivery")
        self.take(delivery.origin.message_seq, delivery.subscription_id, ok)
        self.ledger.returned(delivery, seen=ok)
        self.server.answer([delivery], WebhookResponse(200 if ok else 500))
        self.look()

    def take(self, seq: int, subscription_id: int, ok: bool) -> None:
        """A subscription has a message in its hands: may that be?"""
        message = self.known[seq]
        assert self.may_have(subscription_id, message)
        assert subscription_id not in message.had_by, "it was recorded, and came again"
        if not self.is_for(subscription_id, message):
            entitled = [one for one in self.exists() if self.is_for(one, message)]
            on_its_way = subscription_id not in self.exists()
            assert on_its_way or not entitled, "there is one that it was for"
        if ok:
            message.had_by.add(subscription_id)

    @rule(ending=st.sampled_from(("stop", "kill", "power loss")))
    def end(self, ending: str) -> None:
        self.server.rest()
        for [delivery] in self.server.sending:
            if delivery.subscription_id not in self.exists():
                self.known[delivery.origin.message_seq].is_given_up = True
        if ending == "stop":
            self.server.stop()
        self.disk = self.disk.crash() if ending == "power loss" else self.disk.kill()
        self.catalog = self.catalog.crash()
        self.start()

    # ── what must be true ──────────────────────────────────────────────────────────────────────

    @invariant()
    def what_nobody_matches_waits(self) -> None:
        if not hasattr(self, "server"):
            return
        for seq, message in self.known.items():
            is_open = not message.had_by and not message.is_given_up
            if is_open and not any(self.may_have(one, message) for one in self.exists()):
                state = self.server.engine.messages.locate(seq, message.due_ms).state
                assert state in ("scheduled", "delivering"), (seq, state)

    def teardown(self) -> None:
        """In the end everybody answers, and everything arrived where it had to."""
        if not hasattr(self, "server"):
            return
        if not self.exists():
            self.subscribe("*")
        for _ in range(40):
            self.clock.move(2 * HOUR_MS)
            self.look()
            while self.server.sending:
                [delivery] = self.server.sending[0]
                self.take(delivery.origin.message_seq, delivery.subscription_id, True)
                self.ledger.returned(delivery, seen=True)
                self.server.answer([delivery], WebhookResponse(200))
                self.look()
        for seq, message in self.known.items():
            for number in self.exists():
                if self.is_for(number, message):
                    assert number in message.had_by, (seq, number)
            matching = [one for one in self.exists().values() if one.matches(message.subject)]
            is_done = message.had_by or message.is_given_up
            assert is_done or not matching, f"nobody got {seq}"
        self.ledger.check_all_delivered() if all(
            any(one.matches(subject) for one in self.exists().values()) for subject in SUBJECTS
        ) else None


def unsubscribe(machine: FanOut, *numbers: int) -> None:
    for number in numbers:
        gone = msgspec.structs.replace(machine.exists()[number], deleted=True)
        machine.server.engine.subscribing.put_subscription(gone)
        machine.look()


def answer(machine: FanOut, seq: int, subscription_id: int, ok: bool) -> None:
    [sent] = [
        [one]
        for [one] in machine.server.sending
        if (one.origin.message_seq, one.subscription_id) == (seq, subscription_id)
    ]
    machine.take(seq, subscription_id, ok)
    machine.ledger.returned(sent[0], seen=ok)
    machine.server.answer(sent, WebhookResponse(200 if ok else 500))
    machine.look()


def test_an_heir_gets_one_of_the_retries_of_those_who_are_gone() -> None:
    machine = FanOut()
    machine.start()
    machine.publish("a.x", 5)
    for pattern in ("a.x", "a.x", "a.x", "b"):
        machine.subscribe(pattern)
    unsubscribe(machine, 1)
    machine.subscribe("a.x")
    unsubscribe(machine, 5)
    [seq] = machine.known
    answer(machine, seq, 2, False)
    answer(machine, seq, 3, False)
    machine.subscribe("a.x")
    unsubscribe(machine, 2, 3)
    machine.teardown()


def test_an_heir_gets_nothing_more_when_a_request_to_one_who_is_gone_fails() -> None:
    machine = FanOut()
    machine.start()
    machine.subscribe("a.x")
    machine.subscribe("a.x")
    machine.publish("a.x", 0)
    [seq] = machine.known
    answer(machine, seq, 1, False)
    machine.subscribe("a.x")
    unsubscribe(machine, 1, 2)
    machine.wait(HOUR_MS)
    # It is on its way to the second still; the retry of the first has fired.
    answer(machine, seq, 2, False)
    machine.wait(HOUR_MS)
    answer(machine, seq, 3, True)
    machine.teardown()


@pytest.mark.parametrize("ending", ["stop", "kill", "power loss"])
def test_what_waited_behind_a_dropped_retry_is_not_lost(ending: str) -> None:
    machine = FanOut()
    machine.start()
    for _ in range(3):
        machine.subscribe("a.x")
    for _ in range(3):
        machine.publish("a.x", 0)
    *others, seq = machine.known
    for number in (1, 2):
        for other in others:
            answer(machine, other, number, True)
        answer(machine, seq, number, False)
    # It waits in the queue of the third, which has its hands full.
    unsubscribe(machine, 1, 2)
    machine.wait(HOUR_MS)  # Their retries fire, and are dropped: the third had it on its own.
    unsubscribe(machine, 3)
    machine.end(ending)
    machine.what_nobody_matches_waits()
    machine.teardown()


@pytest.mark.parametrize("ending", ["stop", "kill", "power loss"])
def test_what_was_dropped_for_one_who_is_gone_is_not_lost_for_all(ending: str) -> None:
    machine = FanOut()
    machine.start()
    machine.subscribe("a.x")
    machine.subscribe("a.x")
    for _ in range(3):  # The third waits in the queues.
        machine.publish("a.x", 0)
    unsubscribe(machine, 1)
    machine.end(ending)
    unsubscribe(machine, 2)
    machine.end(ending)
    machine.what_nobody_matches_waits()
    machine.teardown()


def test_the_ledger_knows_what_falls_due_since_a_subscription_was_made() -> None:
    machine = FanOut()
    machine.start()
    machine.publish("a.x", 5)
    machine.publish("a.x", HOUR_MS)
    machine.clock.move(10)  # The server has not looked at it yet.
    machine.subscribe("a.x")
    machine.subscribe("a.x")
    machine.teardown()
    delivered = machine.ledger.delivered
    early, late = machine.known
    assert (delivered[early], delivered[late]) == ({1}, {1, 2})
    delivered[late].remove(2)
    with pytest.raises(Violation, match=f"message {late} never came to s2"):
        machine.ledger.check_all_delivered()


TestFanOut = FanOut.TestCase
TestFanOut.pytestmark = [pytest.mark.timeout(600)]  # type: ignore[attr-defined]  # to shrink
TestFanOut.settings = settings(
    max_examples=len(every(4, range(100))),
    stateful_step_count=30,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
