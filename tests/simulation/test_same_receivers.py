"""The receivers of a message: a server that restarts all the time delivers to the same
subscriptions as one that never does.

Subscriptions are made, change their subjects and go while messages fall due. All of them are paused
meanwhile, so what each of them has waiting is told in the end, when they go on."""

from __future__ import annotations

import random

import msgspec
import pytest

from delayserver.config import Settings
from delayserver.decisions.new_messages import NewMessage
from delayserver.delivery.webhook import WebhookResponse
from delayserver.records.message import Payload
from delayserver.records.subscriptions import Subscription
from tests.depth import every
from tests.world import Observer, SimulatedClock, SimulatedServer
from tests.world.publishes import publish_all
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.files import SimulatedFiles

SETTINGS = Settings(segment_bytes=4096, lead_ms=1000, checkpoint_ms=1, settle_sync_ms=0)
SUBJECTS = ("orders", "orders.late", "refunds")
PATTERNS = (*SUBJECTS, "orders.*", "*")
WORLDS, STEPS = 40, 16


class Machine:
    """A disk, and the servers that are started on it one after the other."""

    def __init__(self, restart: str) -> None:
        self.restart_as = restart
        self.rng = random.Random(0)
        self.disk, self.catalog = SimulatedFiles(rng=self.rng), MemoryCatalog()
        self.clock = SimulatedClock()
        self.count = 0
        self.start()

    def start(self) -> None:
        self.server = SimulatedServer(
            SETTINGS, self.disk, self.catalog, self.clock, self.rng, Observer()
        )
        self.look()

    def restart(self) -> None:
        if self.restart_as == "stop":
            self.server.stop()
            self.disk, self.catalog = self.disk.crash(), self.catalog.crash()
        elif self.restart_as == "kill":
            self.disk, self.catalog = self.disk.kill(), self.catalog.kill()
        else:
            return
        self.start()

    def look(self) -> None:
        self.server.tick()
        self.server.rest()

    def put(self, name: str, **more: object) -> None:
        """Make or change a subscription, or delete it."""
        registry = self.server.engine.registry
        found = registry.by_name(name)
        if found is None:
            if more.get("deleted"):
                return
            found = Subscription(
                id=registry.next_id(),
                name=name,
                subject="",
                type="webhook",
                created_ms=self.clock.now_ms,
                paused=True,
            )
        self.server.engine.subscribing.put_subscription(msgspec.structs.replace(found, **more))
        self.server.rest()

    def publish(self, subject: str, delay_ms: int) -> None:
        now_ms = self.clock.now_ms
        message = NewMessage(subject, now_ms + delay_ms, Payload(b"%d" % self.count))
        self.count += 1
        publish_all(self.server.engine.publishing, [message], now_ms)
        self.server.rest()

    def received(self) -> set[tuple[str, int]]:
        """All subscriptions go on: which of them gets which message."""
        found: list[tuple[str, int]] = []
        registry = self.server.engine.registry
        for one in list(registry):
            if not one.deleted:
                self.put(one.name, paused=False)
        self.look()
        while self.server.sending:
            sent = self.server.sending[0]
            for delivery in sent:
                receiver = registry.by_id(delivery.subscription_id)
                assert receiver is not None
                found.append((receiver.name, int(delivery.payload.body)))
            self.server.answer(sent, WebhookResponse(200))
            self.look()
        assert len(found) == len(set(found)), "twice"
        return set(found)


def course(seed: int, restart: str) -> set[tuple[str, int]]:
    """The same steps for each seed, whichever kind of restart lies between them."""
    rng, machine = random.Random(seed), Machine(restart)
    for _ in range(STEPS):
        what = rng.randrange(8)
        name, pattern = rng.choice("abc"), rng.choice(PATTERNS)
        subject, delay_ms = rng.choice(SUBJECTS), rng.choice((0, 3, 20))
        if what < 3:
            machine.put(name, subject=pattern)
        elif what < 4:
            machine.put(name, deleted=True)
        else:
            machine.publish(subject, delay_ms)
        machine.clock.move(rng.choice((0, 1, 5)))
        machine.look()
        if rng.random() < 0.4:
            machine.restart()
    machine.clock.move(50)
    machine.look()
    machine.restart()
    return machine.received()


@pytest.mark.parametrize("restart", ["stop", "kill"])
def test_the_same_subscriptions_get_a_message_before_and_after_a_restart(restart: str) -> None:
    received = 0
    for seed in every(4, range(WORLDS)):
        expected = course(seed, "never")
        assert course(seed, restart) == expected, seed
        received += len(expected)
    assert received > 3 * WORLDS // 4
