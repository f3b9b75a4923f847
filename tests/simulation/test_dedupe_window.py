"""A key stays taken for the dedupe window, however soon its hour may be deleted otherwise."""

import random

import pytest

from delayserver.config import Settings
from delayserver.decisions.new_messages import NewMessage
from delayserver.delivery.webhook import WebhookResponse
from delayserver.records.message import Payload
from delayserver.testing import Observer, SimulatedClock, SimulatedServer
from storage.rows import HOUR_MS
from storage.testing.catalog import MemoryCatalog
from storage.testing.files import SimulatedFiles
from tests.unit.fakes import subscription

WINDOW_MS = 2 * HOUR_MS
DUE_IN_MS = 5
SETTINGS = Settings(
    checkpoint_ms=1, retention_ms=0, dedupe_window_ms=WINDOW_MS, lead_ms=1000, settle_sync_ms=0
)


class Machine:
    """A disk, and servers that are started on it."""

    def __init__(self) -> None:
        self.disk, self.catalog, self.clock = SimulatedFiles(), MemoryCatalog(), SimulatedClock()
        self.start()
        self.server.engine.subscribing.put_subscription(
            subscription(1, subject="order", type="webhook")
        )
        self.server.rest()

    def start(self) -> None:
        self.server = SimulatedServer(
            SETTINGS, self.disk, self.catalog, self.clock, random.Random(0), Observer()
        )
        self.server.rest()

    def crash(self) -> None:
        self.disk, self.catalog = self.disk.crash(), self.catalog.crash()
        self.start()

    def publish(self) -> bool:
        """Whether it is a message that there was."""
        now_ms = self.clock.now_ms
        message = NewMessage("order", now_ms + DUE_IN_MS, Payload(b"1", key="1001"))
        accepted = self.server.engine.publishing.publish_one(message, now_ms)
        self.server.rest()
        return accepted.duplicate

    def wait(self, by_ms: int) -> None:
        """Everything is delivered at once."""
        self.clock.move(by_ms)
        for _ in range(4):
            self.server.tick()
            self.server.rest()
            while self.server.sending:
                self.server.answer(self.server.sending[0], WebhookResponse(200))
                self.server.rest()


@pytest.mark.parametrize("crashes", [False, True])
def test_a_key_stays_taken_until_its_window_has_passed(crashes: bool) -> None:
    machine = Machine()
    assert not machine.publish()
    machine.wait(DUE_IN_MS)
    for _ in range(2):
        machine.wait(WINDOW_MS // 2 - 1)
        if crashes:
            machine.crash()
        assert machine.publish()
    machine.wait(2)
    assert not machine.publish()
    # What is kept for the key is kept no longer.
    machine.wait(DUE_IN_MS)
    machine.wait(WINDOW_MS + HOUR_MS)
    machine.wait(1)
    assert not machine.server.replay.hours
