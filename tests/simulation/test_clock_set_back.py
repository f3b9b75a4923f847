"""A clock that is set back, while the server runs or is down: nothing is told wrong, and a message
goes to every subscription that existed when it fell due, and to no other."""

import random

import msgspec
import pytest

from delayserver.config import Settings
from delayserver.decisions.new_messages import NewMessage
from delayserver.delivery.webhook import WebhookResponse
from delayserver.errors import ConflictError, NotFoundError
from delayserver.records.message import Payload
from delayserver.records.subscriptions import Subscription
from storage.rows import HOUR_MS
from tests.world import Observer, SimulatedClock, SimulatedServer
from tests.world.publishes import publish_all
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.files import SimulatedFiles

SETTINGS = Settings(
    segment_bytes=1 << 20, lead_ms=1000, checkpoint_ms=1, retention_ms=HOUR_MS, settle_sync_ms=0
)
BACK_MS = HOUR_MS // 2


class Machine:
    """A disk, and servers that are started on it."""

    def __init__(self) -> None:
        self.rng = random.Random(0)
        self.disk, self.catalog = SimulatedFiles(rng=self.rng), MemoryCatalog()
        self.clock = SimulatedClock()
        self.clock.move(HOUR_MS)
        self.received: list[tuple[int, str]] = []
        """Bodies, and the subscriptions they came to."""
        self.status = 200
        """The status with which receivers answer."""
        self.start()

    def start(self) -> None:
        self.server = SimulatedServer(
            SETTINGS, self.disk, self.catalog, self.clock, self.rng, Observer()
        )
        self.look()

    def restart(self) -> None:
        self.disk, self.catalog = self.disk.kill(), self.catalog.kill()
        self.start()

    def look(self) -> None:
        """Let happen what is due, and take whatever comes."""
        for _ in range(3):
            self.server.tick()
            self.server.rest()
            while self.server.sending:
                [delivery] = self.server.sending[0]
                name = self.server.engine.registry.by_id(delivery.subscription_id)
                assert name is not None
                self.received.append((int(delivery.payload.body), name.name))
                self.server.answer([delivery], WebhookResponse(self.status))
                self.server.rest()

    def publish(self, body: int, delay_ms: int) -> tuple[int, int]:
        """Returns seq and due time."""
        now_ms = self.clock.now_ms
        message = NewMessage("orders", now_ms + delay_ms, Payload(str(body).encode()))
        [published] = publish_all(self.server.engine.publishing, [message], now_ms)
        self.server.rest()
        return published.seq, published.due_ms

    def subscribe(self, name: str) -> None:
        made = Subscription(
            id=self.server.engine.registry.next_id(),
            name=name,
            subject="orders",
            type="webhook",
            created_ms=self.clock.now_ms,
        )
        self.server.engine.subscribing.put_subscription(made)
        self.server.rest()

    def change(self, name: str, **changes: bool) -> None:
        known = self.server.engine.registry.by_name(name)
        assert known is not None
        changed = known.with_changes(**changes)
        self.server.engine.subscribing.put_subscription(changed)
        self.look()

    def wait(self, by_ms: int) -> None:
        self.clock.move(by_ms)
        self.look()


@pytest.mark.parametrize("restarts", ["never", "before", "after", "both"])
def test_a_subscription_that_is_made_when_the_clock_was_set_back(restarts: str) -> None:
    machine = Machine()
    machine.subscribe("first")
    machine.publish(1, delay_ms=5)
    machine.wait(10)
    machine.clock.set(-BACK_MS)
    machine.look()
    if restarts in ("before", "both"):
        machine.restart()
    # Number 2 is due before the moment at which number 1 was, which is still to come.
    machine.publish(2, delay_ms=BACK_MS // 2)
    machine.subscribe("second")
    machine.publish(3, delay_ms=BACK_MS // 2)
    if restarts in ("after", "both"):
        machine.restart()
    machine.wait(2 * BACK_MS)
    assert sorted(machine.received) == [
        (1, "first"),
        (2, "first"),
        (2, "second"),
        (3, "first"),
        (3, "second"),
    ]


def test_a_retry_that_a_deleted_one_left_is_for_who_comes_when_the_clock_was_set_back() -> None:
    machine = Machine()
    machine.subscribe("first")
    machine.publish(1, delay_ms=5)
    machine.status = 503
    machine.wait(10)
    machine.change("first", paused=True)
    machine.wait(10_000)  # The retry has fallen due.
    machine.change("first", deleted=True)
    machine.clock.set(-BACK_MS)
    machine.status = 200
    machine.restart()
    machine.subscribe("second")
    machine.wait(2 * BACK_MS)
    assert machine.received == [(1, "first"), (1, "second")]


def test_what_is_published_when_the_clock_was_set_back_is_for_everybody() -> None:
    machine = Machine()
    machine.subscribe("first")
    machine.wait(100)
    machine.subscribe("second")
    machine.clock.set(-BACK_MS)
    machine.look()
    machine.publish(1, delay_ms=0)
    machine.look()
    machine.restart()
    assert sorted(machine.received) == [(1, "first"), (1, "second")]


def test_an_hour_that_was_settled_is_not_for_who_comes_when_the_clock_was_set_back() -> None:
    """It is opened again by a new message, and read at the next start."""
    machine = Machine()
    machine.subscribe("first")
    machine.publish(1, delay_ms=5)
    machine.wait(HOUR_MS)
    machine.wait(100)
    assert all(state.retired_ms for state in machine.server.replay.hours.values())
    machine.clock.set(-HOUR_MS - 100)
    machine.restart()
    machine.subscribe("second")
    machine.publish(2, delay_ms=6)
    machine.restart()
    machine.wait(HOUR_MS)
    assert sorted(machine.received) == [(1, "first"), (2, "first"), (2, "second")]


def test_a_change_of_a_subscription_does_not_change_what_it_is_for() -> None:
    machine = Machine()
    machine.subscribe("first")
    registry = machine.server.engine.registry
    [before] = registry
    assert before.history
    # As the API does: a definition of its own, which knows nothing of marks.
    machine.server.engine.subscribing.put_subscription(
        msgspec.structs.replace(before, history=(), paused=True)
    )
    machine.server.rest()
    [after] = registry
    assert after == msgspec.structs.replace(before, paused=True)


def test_an_hour_that_was_deleted_and_comes_back_knows_nothing_of_before() -> None:
    machine = Machine()
    machine.subscribe("first")
    messages = machine.server.engine.messages
    old = machine.publish(1, delay_ms=5)
    machine.wait(10)
    with pytest.raises(ConflictError):
        messages.cancel(*old)
    machine.wait(2 * HOUR_MS)
    for _ in range(5):
        machine.wait(2)
    assert machine.disk.list("schedule") == []
    with pytest.raises(NotFoundError):
        messages.cancel(*old)
    machine.clock.set(-2 * HOUR_MS - 20)
    young = machine.publish(2, delay_ms=3)
    machine.wait(5)
    for _ in range(2):
        assert machine.received == [(1, "first"), (2, "first")]
        with pytest.raises(NotFoundError):
            messages.cancel(*old)
        with pytest.raises(ConflictError):
            messages.cancel(*young)
        machine.restart()
        messages = machine.server.engine.messages
