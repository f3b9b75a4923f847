"""The server against a dictionary: whatever clients, subscribers and crashes do, both agree.

The ledger checks every promise besides; here stands what the right answer to each call is."""

import random
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from delayserver.config import Settings
from delayserver.decisions.new_messages import NewMessage
from delayserver.delivery.delayed_fetch import PullRequest
from delayserver.delivery.webhook import WebhookResponse
from delayserver.errors import ConflictError
from delayserver.records.message import DueDelivery, Payload, ScheduleEntry, State
from delayserver.records.subscriptions import Subscription
from delayserver.server.filer import CheckpointRequest
from storage.rows import HOUR_MS
from tests.depth import every
from tests.world import Ledger, SimulatedClock, SimulatedServer
from tests.world.publishes import publish_all
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.files import SimulatedFiles

SETTINGS = Settings(
    segment_bytes=4096,
    checkpoint_ms=1000,
    lead_ms=50,
    # Longer than all steps together: what is past it is unknown to the server, not to the model.
    # `tests.world` has worlds with short ones.
    retention_ms=1000 * HOUR_MS,
    dedupe_window_ms=0,
    settle_sync_ms=0,
    group_max_bytes=1 << 20,
)
HOOK = Subscription(
    id=1,
    name="hook",
    subject="push",
    type="webhook",
    created_ms=0,
    max_in_flight=1000,
    max_attempts=2,
    backoff_ms=(700,),
)
QUEUE = Subscription(
    id=2, name="queue", subject="pull", type="pull", created_ms=0, max_attempts=1000
)
SUBJECTS = st.sampled_from(("push", "pull"))
DELAYS = st.sampled_from((0, 1, 7, 300, 499, 500, 501, 2000, HOUR_MS - 1, HOUR_MS, HOUR_MS + 1))
KEYS = st.sampled_from(("k1", "k2"))


@dataclass
class Known:
    """A message in the model."""

    subject: str
    published_due_ms: int
    due_ms: int
    body: bytes
    state: State = State.SCHEDULED
    is_retrying: bool = False
    has_failed: bool = False
    """There is a retry of it, which waits again after a restart if the clock was set back."""


class Model(RuleBasedStateMachine):
    """Rules are calls and events; `known` is what must be true."""

    seqs = Bundle("seqs")
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.clock = SimulatedClock()
        self.ledger = Ledger()
        self.rng = random.Random(0)
        self.disk, self.catalog = SimulatedFiles(rng=self.rng), MemoryCatalog()
        self.known: dict[int, Known] = {}
        self.by_key: dict[tuple[str, str], int] = {}
        self.latest_ms = self.looked_ms = 0
        self.leased: dict[str, tuple[DueDelivery, int]] = {}
        """Tokens whose lease has not ended: until when, on the stopwatch."""

    @initialize()
    def begin(self) -> None:
        self.start()
        for subscription in (HOOK, QUEUE):
            self.server.engine.registry.next_id()
            self.server.engine.subscribing.put_subscription(subscription)
        self.server.rest()

    def start(self, *, is_planned: bool = False) -> None:
        """`is_planned`: the server was stopped, so leases stay good, for 1 ms at least."""
        soonest_ms = self.clock.stopwatch_ms() + 1
        self.leased = {
            token: (delivery, max(until_ms, soonest_ms))
            for token, (delivery, until_ms) in self.leased.items()
            # One whose message is not due any more, since the clock was set back, is over.
            if is_planned and delivery.entry.due_ms <= self.clock.now_ms
        }
        self.ledger.new_life()
        self.ledger.present = self.clock.stopwatch_ms
        self.ledger.clock = self.clock
        self.server = SimulatedServer(
            SETTINGS,
            self.disk,
            self.catalog,
            self.clock,
            self.rng,
            self.ledger,
            quick=lambda: self.rng.random() < 0.5,
        )
        self.ledger.recovered(self.server)
        held = {delivery.origin.message_seq for delivery, _ in self.leased.values()}
        for seq, message in self.known.items():
            if message.state is State.DELIVERING and seq not in held:
                message.state, message.is_retrying = State.SCHEDULED, message.has_failed
        self.look()

    def look(self) -> None:
        """The engine looks at the clock: what is due leaves, and nothing else."""
        self.server.tick()
        self.server.rest()
        present_ms = self.clock.stopwatch_ms()
        for token, (_, until_ms) in list(self.leased.items()):
            if until_ms <= present_ms:
                del self.leased[token]
        ahead_ms = self.clock.now_ms - self.looked_ms
        self.looked_ms = self.clock.now_ms
        self.latest_ms = max(self.latest_ms, self.clock.now_ms)
        if self.looked_ms < self.latest_ms or not 0 <= ahead_ms < SETTINGS.express_ms:
            # A message is filed first that came before the server has seen the clock set ahead,
            # or that is of an hour which was settled before it was set back.
            self.checkpoint()
        self.server.tick()
        self.server.rest()
        due = {
            seq
            for seq, message in self.known.items()
            if message.state is State.SCHEDULED
            and not message.is_retrying
            and message.due_ms <= self.clock.now_ms
        }
        retrying = {seq for seq, message in self.known.items() if message.is_retrying}
        on_their_way = {delivery.origin.message_seq for [delivery] in self.server.sending}
        pushed = {seq for seq in due if self.known[seq].subject == "push"}
        before = {
            seq
            for seq, message in self.known.items()
            if message.state is State.DELIVERING and message.subject == "push"
        }
        assert pushed | (before - retrying) <= on_their_way <= pushed | before | retrying
        for seq in pushed | (on_their_way & retrying):
            self.known[seq].state = State.DELIVERING
            self.known[seq].is_retrying = False
        for seq in due - pushed:
            self.known[seq].state = State.DELIVERING

    # ── clients ────────────────────────────────────────────────────────────────────────────────

    def remember(self, seq: int, subject: str, due_ms: int, body: bytes) -> int:
        self.known[seq] = Known(subject, due_ms, due_ms, body)
        self.server.rest()
        self.ledger.published(seq)
        self.look()
        return seq

    @rule(target=seqs, subject=SUBJECTS, delay_ms=DELAYS)
    def publish(self, subject: str, delay_ms: int) -> int:
        due_ms = self.clock.now_ms + delay_ms
        body = b'"%d"' % len(self.known)
        message = NewMessage(subject, due_ms, Payload(body))
        (one,) = publish_all(self.server.engine.publishing, [message], self.clock.now_ms)
        assert not one.duplicate
        return self.remember(
            self.server.engine.ids.decode(one.message_id).seq, subject, due_ms, body
        )

    def holds_key(self, subject: str, key: str) -> int | None:
        seq = self.by_key.get((subject, key))
        if seq is None:
            return None
        message = self.known[seq]
        is_pending = message.is_retrying or message.state in (State.SCHEDULED, State.DELIVERING)
        in_window = message.due_ms > self.clock.now_ms
        return seq if is_pending or in_window else None

    @rule(target=seqs, subject=SUBJECTS, key=KEYS, delay_ms=DELAYS, body=st.sampled_from("ab"))
    def publish_key(self, subject: str, key: str, delay_ms: int, body: str) -> int:
        due_ms, text = self.clock.now_ms + delay_ms, f'"{body}"'.encode()
        message = NewMessage(subject, due_ms, Payload(text, key=key))
        holder = self.holds_key(subject, key)
        publishing, now_ms = self.server.engine.publishing, self.clock.now_ms
        if holder is not None and self.known[holder].body != text:
            with pytest.raises(ConflictError):
                publishing.publish_one(message, now_ms)
            return holder
        one = publishing.publish_one(message, now_ms)
        seq = self.server.engine.ids.decode(one.message_id).seq
        if holder is not None:
            assert one.duplicate and seq == holder
            return seq
        assert not one.duplicate
        self.by_key[subject, key] = seq
        return self.remember(seq, subject, due_ms, text)

    @rule(target=seqs, subject=SUBJECTS, key=KEYS, delay_ms=DELAYS, body=st.sampled_from("ab"))
    def replace(self, subject: str, key: str, delay_ms: int, body: str) -> int:
        due_ms, text = self.clock.now_ms + delay_ms, f'"{body}"'.encode()
        before = self.by_key.get((subject, key))
        message = NewMessage(subject, due_ms, Payload(text, key=key))
        one, replaced = self.server.engine.publishing.replace(message, self.clock.now_ms)
        can_be = before is not None and (
            self.known[before].state is State.SCHEDULED or self.known[before].is_retrying
        )
        assert replaced == can_be
        if before is not None and replaced:
            self.known[before].state = State.CANCELLED
            self.known[before].is_retrying = False
        seq = self.server.engine.ids.decode(one.message_id).seq
        self.by_key[subject, key] = seq
        return self.remember(seq, subject, due_ms, text)

    @rule(seq=seqs)
    def cancel(self, seq: int) -> None:
        message = self.known[seq]
        cancel = self.server.engine.messages.cancel
        if message.state is State.SCHEDULED or message.is_retrying:
            # Its key is taken until the window after that is over, also behind the cancel.
            message.due_ms = self._entry_of(seq).due_ms
            assert cancel(seq, message.published_due_ms) is not None
            message.state, message.is_retrying = State.CANCELLED, False
            self.server.rest()
            self.ledger.cancelled(seq)
        elif message.state is State.CANCELLED:
            assert cancel(seq, message.published_due_ms) is None
        else:
            with pytest.raises(ConflictError) as caught:
                cancel(seq, message.published_due_ms)
            assert caught.value.state == message.state

    def _entry_of(self, seq: int) -> ScheduleEntry:
        """Where it is, which for a retry is drawn by lot."""
        located = self.server.engine.messages.locate(seq, self.known[seq].published_due_ms)
        return located.entry

    @rule(seq=seqs, delay_ms=DELAYS)
    def move(self, seq: int, delay_ms: int) -> None:
        message, new_due_ms = self.known[seq], self.clock.now_ms + delay_ms
        payload, subject_id = (
            self.ledger.messages[seq].payload,
            self.ledger.messages[seq].subject_id,
        )
        move = self.server.engine.messages.move
        if message.state is State.SCHEDULED and not message.is_retrying:
            move(seq, message.published_due_ms, new_due_ms, payload, subject_id)
            message.due_ms = new_due_ms
            self.server.rest()
            self.look()
        else:
            with pytest.raises(ConflictError):
                move(seq, message.published_due_ms, new_due_ms, payload, subject_id)

    # ── time ───────────────────────────────────────────────────────────────────────────────────

    @rule(by_ms=st.sampled_from((1, 7, 500, 999, HOUR_MS, 3 * HOUR_MS)), looks=st.booleans())
    def advance(self, by_ms: int, looks: bool) -> None:
        self.clock.move(by_ms)
        if looks:  # else calls come before
            self.look()

    @rule(
        by_ms=st.sampled_from((-HOUR_MS, -500, -1, 1, 500, HOUR_MS, 3 * HOUR_MS)),
        looks=st.booleans(),
    )
    def set_clock(self, by_ms: int, looks: bool) -> None:
        self.clock.set(by_ms)
        if looks:
            self.look()

    # ── subscribers ────────────────────────────────────────────────────────────────────────────

    @precondition(lambda self: self.server.sending)
    @rule(data=st.data(), result=st.sampled_from(("ok", "fails", "lost reply")))
    def answer(self, data: st.DataObject, result: str) -> None:
        [delivery] = data.draw(st.sampled_from(self.server.sending), label="delivery")
        message = self.known[delivery.origin.message_seq]
        assert delivery.payload.body == message.body
        self.ledger.returned(delivery, seen=result != "fails")
        self.server.answer([delivery], WebhookResponse(200 if result == "ok" else 500))
        self.server.rest()
        if result == "ok":
            message.state = State.DELIVERED
        elif delivery.attempt < HOOK.max_attempts:
            message.state, message.is_retrying, message.has_failed = State.SCHEDULED, True, True
        else:
            message.state = State.DEAD
        self.look()

    @rule(target=leases, lease_ms=st.sampled_from((7, 999, 2 * HOUR_MS)))
    def pull(self, lease_ms: int) -> list[tuple[DueDelivery, str]]:
        got: list[tuple[DueDelivery, str]] = []
        subscription = self.server.engine.subscribing.subscription("queue")
        request = PullRequest(2, lease_ms, 0, got.extend)
        self.server.calls.consumers.pull(subscription, request)
        self.server.rest()
        for delivery, token in got:
            message = self.known[delivery.origin.message_seq]
            assert message.state is State.DELIVERING and message.subject == "pull"
            self.leased[token] = delivery, self.clock.stopwatch_ms() + lease_ms
            self.ledger.leased(delivery, lease_ms)
        self.look()
        return got

    @rule(lease_ms=st.sampled_from((7, 2 * HOUR_MS)))
    def extend(self, lease_ms: int) -> None:
        tokens = list(self.leased)
        assert self.server.engine.leasing.extend(tokens, lease_ms) == []
        for token, (delivery, _) in self.leased.items():
            self.leased[token] = delivery, self.clock.stopwatch_ms() + lease_ms
            self.ledger.leased(delivery, lease_ms)

    @rule(pulled=consumes(leases), acks=st.booleans())
    def settle(self, pulled: list[tuple[DueDelivery, str]], acks: bool) -> None:
        for delivery, token in pulled:
            if token not in self.leased:
                assert self.nack(token) == [token]
                continue
            del self.leased[token]
            self.ledger.returned(delivery, seen=acks)
            if acks:
                answers: list[list[str]] = []
                self.server.ack([token], answers.append)
                self.server.rest()
                assert answers == [[]]
                self.ledger.acked(delivery)
                self.known[delivery.origin.message_seq].state = State.DELIVERED
            else:
                assert self.nack(token) == []
                self.server.rest()

    def nack(self, token: str) -> list[str]:
        told: list[str] = []
        self.server.engine.leasing.nack(
            [token], 0, self.clock.now_ms, done=lambda expired, error: told.extend(expired)
        )
        return told

    @invariant()
    def leases_last(self) -> None:
        leases = self.server.engine.leasing.leases
        assert leases.count() == len(self.leased)
        assert all(leases.get(token) is not None for token in self.leased)

    # ── the machine ────────────────────────────────────────────────────────────────────────────

    @rule()
    def checkpoint(self) -> None:
        self.server.replayer.put(CheckpointRequest(lambda: None))
        self.server.rest()

    @rule(how=st.sampled_from(("power loss", "kill", "stop")))
    def crash(self, how: str) -> None:
        if how == "stop":
            self.server.stop()
        self.disk = self.disk.kill() if how == "kill" else self.disk.crash()
        self.catalog = self.catalog.crash()
        self.start(is_planned=how == "stop")

    @invariant()
    def states_agree(self) -> None:
        for seq, message in self.known.items():
            located = self.server.engine.messages.locate(seq, message.published_due_ms)
            assert located.state is message.state, (seq, message, located)

    def teardown(self) -> None:
        if not self.known:
            return
        self.clock.move(10 * HOUR_MS)
        self.look()
        for _ in range(3):
            while self.server.sending:
                [delivery] = self.server.sending[0]
                self.ledger.returned(delivery, seen=True)
                self.server.answer([delivery], WebhookResponse(200))
                self.server.rest()
            self.clock.move(HOUR_MS)
            self.server.tick()
            self.server.rest()
        self.ledger.check_all_delivered() if self._all_pushed() else None

    def _all_pushed(self) -> bool:
        return all(message.subject == "push" for message in self.known.values())


TestModel = Model.TestCase
TestModel.pytestmark = [pytest.mark.timeout(600)]  # type: ignore[attr-defined]  # to shrink
TestModel.settings = settings(
    max_examples=len(every(4, range(80))),
    stateful_step_count=40,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
