"""Outcomes: answers that come together."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

from delayserver.config import Settings
from delayserver.decisions.new_messages import NewMessage
from delayserver.decisions.retries import RECORD_ITEMS
from delayserver.delivery.handout import Handout
from delayserver.delivery.sink import Confirmed, Recorded
from delayserver.delivery.webhook import WebhookResponse
from delayserver.records.message import (
    OutcomeSubjects,
    Payload,
)
from delayserver.records.tables import ChangeState
from storage.notes import Note
from storage.rows import FLAG_OPTIONS, HOUR_MS, RecordKind
from tests.unit.decisions.outcome_parts import (
    BOTH,
    WEBHOOK,
    Parts,
    bodies,
    record,
    told,
    with_options,
)
from tests.unit.fakes import (
    START_MS,
    counted,
    deliveries,
    delivery,
    message,
    subscription,
)
from tests.world.publishes import publish_all
from tests.world.server import Observer, SimulatedClock, SimulatedServer
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.files import SimulatedFiles


@pytest.fixture
def server() -> SimulatedServer:
    """Four messages are due for a webhook that takes two at once; two are on their way."""
    clock = SimulatedClock()
    server = SimulatedServer(
        Settings(), SimulatedFiles(), MemoryCatalog(), clock, random.Random(0), Observer()
    )
    receiver = subscription(
        1, subject="*", type="webhook", max_in_flight=2, created_ms=clock.now_ms
    )
    server.engine.subscribing.put_subscription(receiver)
    server.rest()
    clock.move(1)
    messages = [NewMessage("orders", clock.now_ms, Payload(b"%d" % number)) for number in range(4)]
    publish_all(server.engine.publishing, messages, clock.now_ms)
    for _ in range(2):
        server.rest()
        server.tick()
    server.rest()
    return server


@pytest.mark.parametrize("statuses", [(200, 200), (200, 500), (500, None)])
def test_answers_that_come_together_make_place_in_one_step(
    server: SimulatedServer, monkeypatch: pytest.MonkeyPatch, statuses: tuple[int | None, ...]
) -> None:
    assert bodies(server) == [b"0", b"1"]
    answers = [
        (deliveries, WebhookResponse(status).result(0, 0))
        for deliveries, status in zip(server.sending, statuses, strict=True)
    ]
    server.sending.clear()
    taken: list[int] = []
    read = server.read

    def noted(take: Handout) -> None:
        taken.append(take.count)
        read(take)

    monkeypatch.setattr(server, "read", noted)
    server.engine.outcomes.on_sent(answers, server.clock())
    if statuses == (200, 200):
        assert taken == [2]
    server.rest()  # A failure makes place once it is recorded.
    assert bodies(server) == [b"2", b"3"]
    assert server.engine.dispatcher.settling.delivered_total == statuses.count(200)


def test_no_answers_are_nothing(server: SimulatedServer) -> None:
    server.engine.outcomes.on_sent([], server.clock())
    assert bodies(server) == [b"0", b"1"]


def test_a_receiver_that_is_gone_does_not_undo_a_change_that_is_being_synced() -> None:
    parts = Parts()
    changed = msgspec.structs.replace(WEBHOOK, url="http://elsewhere")
    parts.subscribing.put_subscription(changed)
    parts.answered(410)
    parts.commit()
    [known] = parts.registry
    assert (known.url, known.paused) == ("http://elsewhere", True)


def test_a_receiver_that_is_gone_does_not_bring_back_what_is_being_deleted() -> None:
    parts = Parts()
    parts.subscribing.change(WEBHOOK.name, deleted=True)
    parts.answered(410)
    assert parts.kinds() == [RecordKind.SUBSCRIPTION]
    parts.commit()
    assert not len(parts.registry)


def test_what_a_deleted_subscription_left_gets_a_record_of_its_own() -> None:
    parts = Parts()
    parts.outcomes.on_orphaned(parts.sent(), 7, START_MS)
    assert parts.kinds() == [RecordKind.RETRY]
    change = parts.sequencer.changes(parts.seq)[7]
    assert (change.state, change.attempt) == (ChangeState.RETRYING, 1)
    # Nobody has tried again.
    assert not parts.retries.retried_by_subject


def test_what_arrives_is_told_with_the_row_that_settles_it() -> None:
    parts = Parts()
    response = WebhookResponse(200, body=b"thanks")
    parts.outcomes.on_sent([([parts.sent()], response.result(START_MS - 9, 9))], START_MS)
    [note] = parts.ports.notes
    assert note == Note(START_MS // HOUR_MS, parts.seq, 1, 1, START_MS - 9, 9, 200, "thanks")


@pytest.mark.parametrize(("ttl_ms", "wait_ms"), [(0, 5_000), (60_000, 5_000), (2_000, 2_000)])
def test_a_retry_is_due_no_later_than_its_message_expires(ttl_ms: int, wait_ms: int) -> None:
    parts = Parts()
    sent = with_options(parts, ttl_ms=ttl_ms, priority=7)
    parts.outcomes.on_sent([([sent], WebhookResponse(500).result(START_MS, 5))], START_MS)
    row, payload = record(parts)
    assert (row["kind"], row["due_ms"]) == (RecordKind.RETRY, START_MS + wait_ms)
    assert payload.options == sent.payload.options
    assert row["flags"] == (FLAG_OPTIONS if ttl_ms else 0) | 7 << 4


def test_a_retry_of_what_has_expired_meanwhile_is_due_now() -> None:
    parts = Parts()
    sent = with_options(parts, ttl_ms=1_000)
    later_ms = START_MS + 9_000
    parts.outcomes.on_sent([([sent], WebhookResponse(500).result(START_MS, 5))], later_ms)
    assert record(parts)[0]["due_ms"] == later_ms


def test_very_many_that_expired_are_recorded_some_in_a_turn() -> None:
    parts = Parts()
    parts.slices.turn_items = 2 * RECORD_ITEMS
    ones = [msgspec.structs.replace(delivery(seq), payload=Payload(b"")) for seq in range(10, 15)]
    parts.outcomes.on_expired(deliveries(*ones), np.arange(5), START_MS)
    counts = [parts.sequencer.group.count]
    while parts.ports.turns:
        parts.ports.turns.pop(0)()
        counts.append(parts.sequencer.group.count)
    assert counts == [2, 4, 5]


def test_a_dead_letter_and_the_message_that_tells_so_are_in_one_group() -> None:
    parts = Parts(group_max_bytes=100_000)
    sent = with_options(parts, 2, outcomes=BOTH)
    # As much as the record alone leaves room for.
    parts.publish(message(START_MS + HOUR_MS, body=bytes(99_300)))
    parts.outcomes.on_sent([([sent], WebhookResponse(500).result(START_MS, 5))], START_MS)
    [(subject, body)] = told(parts)
    assert (subject, body["outcome"], body["attempts"]) == ("failed", "dead", 2)
    assert body["reason"]
    assert RecordKind.DEAD in parts.kinds()


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("outcomes", [None, OutcomeSubjects()])
def test_nothing_is_told_that_nobody_has_asked_for(
    status: int, outcomes: OutcomeSubjects | None
) -> None:
    parts = Parts()
    sent = with_options(parts, 2, ttl_ms=HOUR_MS, outcomes=outcomes)
    parts.outcomes.on_sent([([sent], WebhookResponse(status).result(START_MS, 5))], START_MS)
    assert told(parts) == []
    assert len(parts.ports.settled) == (status == 200)


def test_what_all_replicas_know_is_settled_at_once_and_told() -> None:
    parts = Parts()
    sent = with_options(parts, outcomes=BOTH)
    parts.outcomes.on_sent([([sent], Confirmed(Recorded(START_MS, 7)))], START_MS)
    assert counted(parts.dispatcher).in_flight == 0
    assert [subject for subject, _ in told(parts)] == ["done"]
