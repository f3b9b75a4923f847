"""The gauges: the same numbers as metrics and as `/v1/stats`."""

from __future__ import annotations

import random
import re
from pathlib import Path

from delayserver.config import Settings
from delayserver.decisions.new_messages import NewMessage
from delayserver.delivery.deadlines import LEFT_MAX
from delayserver.records.message import Payload
from delayserver.serve.app import make_app
from delayserver.server.gauges import Gauges
from delayserver.shards.place import ShardPlace
from delayserver.slices import TURN_ITEMS
from storage.rows import HOUR_MS
from tests.unit.fakes import counted
from tests.world.server import Observer, SimulatedClock, SimulatedServer
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.files import SimulatedFiles

TESTS = Path(__file__).parents[2]
OF_ONE = {
    "answer_kept_max_bytes",
    "answer_max_bytes",
    "backup_log_held_max_bytes",
    "batch_max_bytes",
    "body_max_bytes",
    "catalog_max_bytes",
    "fire_rows_max",
    "head_max_bytes",
    "headers_max",
    "metrics_subjects_max",
}
"""Settings that bound one request, answer, file or turn; others bound what is held together."""
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
    gauges.waiting = counted(server.engine.dispatcher)
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


AT_THE_LIMIT = {
    "connections": "unit/serve/test_acceptor.py::test_one_too_many_is_told_so",
    "bodies of requests that have come in part": (
        "unit/api/hot/test_protocol.py::test_bodies_that_come_in_part_have_one_bound_together"
    ),
    "bodies of batches and of long cancels that have come and wait for their answers": (
        "unit/api/hot/test_protocol.py::test_bodies_that_wait_in_slices_have_one_bound_together"
    ),
    "publishes that have come and wait to be decided together": (
        "unit/api/hot/test_publish.py::test_publishes_that_wait_to_be_decided_have_a_bound_together"
    ),
    "answers that clients have not read": (
        "unit/api/hot/test_protocol.py::test_answers_that_are_not_read_have_a_bound_together"
    ),
    "the open commit group": (
        "unit/api/hot/test_publish.py::test_publishes_that_come_together_are_no_longer_than_a_group"
    ),
    "accepted and not filed": (
        "unit/decisions/test_messages.py::test_what_is_refused_at_the_door_leaves_no_trace"
    ),
    "work in one turn of the event loop": (
        "unit/test_slices.py::test_no_turn_does_more_than_its_items"
    ),
    "deadlines of messages with a `ttl`": (
        "unit/delivery/test_deadlines.py::test_the_deadlines_of_what_was_settled_long_ago"
    ),
    "webhooks on their way": (
        "unit/delivery/test_connections.py::test_one_queue_leaves_places_for_others"
    ),
    "bodies on their way to brokers": (
        "unit/delivery/test_broker_bodies.py::test_a_queue_keeps_what_has_no_room"
    ),
    "subjects": "unit/decisions/test_messages.py::test_the_limit_of_subjects_leaves_no_trace",
    "subscriptions": (
        "integration/test_api_subscriptions.py::test_one_subscription_too_many_is_refused"
    ),
    "heartbeats": "unit/parts/heartbeats/test_heartbeats.py::test_there_is_a_limit",
    "schedules": "unit/parts/schedules/test_scheduling.py::test_there_are_no_more_than_the_limit",
    "sources": "unit/parts/sources/test_sourcing.py::test_there_are_no_more_than_the_limit",
}
"""By quantity, how the test is called that goes to its limit."""


def limits() -> list[list[str]]:
    """The rows of the table of what is held: quantity, limit, gauge, and what happens."""
    operations = (TESTS.parent / "docs/operations.md").read_text("utf-8")
    section = operations.split("## Limits of what is held\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|"]
    return rows[2:]


def test_each_quantity_that_is_held_has_a_limit_a_gauge_and_a_test_at_the_limit() -> None:
    settings = Settings()
    server = SimulatedServer(
        settings, SimulatedFiles(), MemoryCatalog(), SimulatedClock(), random.Random(0), Observer()
    )
    metrics = Gauges(server.engine, settings, server.clock).metrics
    server.calls.gauges.metrics = metrics
    metrics.gauge("waiting_webhooks", "Made by the server", lambda: 0)
    metrics.gauge("broker_bodies_bytes", "Made by the server", lambda: 0)
    make_app(server.calls, ShardPlace.alone(settings.data_dir))
    shown = {family.name for family in metrics.collect()} | {"process_open_fds"}
    assert [row[0] for row in limits()] == [*AT_THE_LIMIT]
    for quantity, limit, gauge, what in limits():
        names = re.findall(r"`--([a-z-]+)`", limit)
        assert names or limit[0].isdigit(), quantity
        for name in names:
            assert name.replace("-", "_") in Settings.model_fields, quantity
        assert gauge.strip("`") in shown, quantity
        assert what, quantity
        file, _, test = AT_THE_LIMIT[quantity].partition("::")
        assert f"def {test}" in (TESTS / file).read_text("utf-8"), quantity
    # The numbers without a setting are those of the code.
    rows = {row[0]: row[1] for row in limits()}
    assert f"{TURN_ITEMS:,} items" in rows["work in one turn of the event loop"]
    assert f"{LEFT_MAX:,} more" in rows["deadlines of messages with a `ttl`"]


def test_each_limit_of_the_settings_is_in_the_table_or_bounds_one_thing_alone() -> None:
    named = set(re.findall(r"`--([a-z-]+)`", "".join(row[1] for row in limits())))
    bounds = {
        name
        for name in Settings.model_fields
        if name.endswith(("_max_bytes", "s_max")) and name.replace("_", "-") not in named
    }
    assert bounds == OF_ONE
