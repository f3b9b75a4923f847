"""The engine: what it decides when several things come together."""

from __future__ import annotations

import random

import pytest

from delayserver.config import Settings
from delayserver.decisions.publishing import NewMessage
from delayserver.delivery.queue import Handout
from delayserver.delivery.webhook import WebhookResponse
from delayserver.records.message import Payload
from delayserver.testing.server import SimulatedClock, SimulatedServer, Watcher
from storage.testing.catalog import MemoryCatalog
from storage.testing.files import SimulatedFiles
from tests.unit.fakes import subscription


@pytest.fixture
def server() -> SimulatedServer:
    """Four messages are due for a webhook that takes two at once; two are on their way."""
    clock = SimulatedClock()
    server = SimulatedServer(
        Settings(), SimulatedFiles(), MemoryCatalog(), clock, random.Random(0), Watcher()
    )
    receiver = subscription(
        1, subject="*", type="webhook", max_in_flight=2, created_ms=clock.now_ms
    )
    server.engine.put_subscription(receiver)
    server.rest()
    clock.move(1)
    messages = [NewMessage("orders", clock.now_ms, Payload(b"%d" % number)) for number in range(4)]
    server.engine.publishing.publish(messages, clock.now_ms)
    for _ in range(2):
        server.rest()
        server.tick()
    server.rest()
    return server


def bodies(server: SimulatedServer) -> list[bytes]:
    return [delivery.payload.body for [delivery] in server.sending]


@pytest.mark.parametrize("statuses", [(200, 200), (200, 500), (500, None)])
def test_answers_that_come_together_make_place_in_one_step(
    server: SimulatedServer, monkeypatch: pytest.MonkeyPatch, statuses: tuple[int | None, ...]
) -> None:
    assert bodies(server) == [b"0", b"1"]
    answers = [
        (deliveries, WebhookResponse(status))
        for deliveries, status in zip(server.sending, statuses, strict=True)
    ]
    server.sending.clear()
    taken: list[int] = []
    read = server.read

    def noted(handout: Handout) -> None:
        taken.append(handout.count)
        read(handout)

    monkeypatch.setattr(server, "read", noted)
    server.engine.on_sent(answers, server.clock())
    if statuses == (200, 200):
        assert taken == [2]
    server.rest()  # A failure makes place once it is recorded.
    assert bodies(server) == [b"2", b"3"]
    assert server.engine.dispatcher.delivered_total == statuses.count(200)


def test_no_answers_are_nothing(server: SimulatedServer) -> None:
    server.engine.on_sent([], server.clock())
    assert bodies(server) == [b"0", b"1"]
