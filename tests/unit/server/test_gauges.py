"""The gauges: the same numbers as metrics and as `/v1/stats`."""

from __future__ import annotations

import random

from delayserver.config import Settings
from delayserver.decisions.new_messages import NewMessage
from delayserver.records.message import Payload
from delayserver.server.gauges import Gauges
from delayserver.testing.server import Observer, SimulatedClock, SimulatedServer
from storage.rows import HOUR_MS
from storage.testing.catalog import MemoryCatalog
from storage.testing.files import SimulatedFiles

NAMES = {
    "accepted": "accepted_total",
    "cancelled": "cancelled_total",
    "pending_loaded": "pending_deliveries",
    "pending_later": "pending_later_messages",
    "queued": "queued_deliveries",
    "in_flight": "in_flight_deliveries",
    "unmatched": "unmatched_messages",
    "subscriptions": "subscriptions",
    "unfiled_bytes": "unfiled_bytes",
    "archive_waiting_hours": "archive_waiting_hours",
    "archive_waiting_bytes": "archive_waiting_bytes",
    "disk_free_bytes": "disk_free_bytes",
}


def test_the_numbers_are_the_same_in_both_forms() -> None:
    clock = SimulatedClock()
    server = SimulatedServer(
        Settings(), SimulatedFiles(), MemoryCatalog(), clock, random.Random(0), Observer()
    )
    gauges = Gauges(server.engine, server.settings, clock)
    for due_ms in (clock.now_ms, clock.now_ms + 60_000):
        message = NewMessage("orders", due_ms, Payload(b"1"))
        server.engine.publishing.publish_one(message, clock.now_ms)
    for _ in range(2):
        server.rest()
        server.tick()
    gauges.free_bytes, gauges.pending_later = 7, 3
    stats = gauges.stats()
    samples = [sample for family in gauges.metrics.collect() for sample in family.samples]
    metrics = {sample.name: sample.value for sample in samples}
    shown = {one: metrics.get(f"delayserver_{name}", 0) for one, name in NAMES.items()}
    assert {one: stats[one] for one in NAMES} == shown
    assert (stats["accepted"], stats["unmatched"], stats["disk_free_bytes"]) == (2, 1, 7)
    assert metrics["delayserver_open_hour_deliveries"] == 0
    clock.move(2 * HOUR_MS)
    server.tick()
    samples = [sample for family in gauges.metrics.collect() for sample in family.samples]
    metrics = {sample.name: sample.value for sample in samples}
    # The one that no subscription matches keeps its hour open; it began 300 ms before it was over.
    assert metrics["delayserver_open_hour_deliveries"] == 1
    assert metrics["delayserver_open_hour_age_seconds"] == 2 * 3600 - 0.3
    assert stats["last_seq"] == server.engine.sequencer.next_seq - 1
