"""Leasing: consumers pull, and say what became of it."""

from __future__ import annotations

import random

import msgspec
import pytest

from delayserver.config import Settings
from delayserver.decisions.new_messages import NewMessage
from delayserver.decisions.retries import RETRY_COMMIT_MS
from delayserver.delivery.backlog import Instant
from delayserver.delivery.delayed_fetch import Pulled, PullRequest
from delayserver.errors import OverloadedError
from delayserver.records.message import (
    MessageOptions,
    Payload,
)
from storage.rows import HOUR_MS, RecordKind
from tests.unit.decisions.outcome_parts import (
    BOTH,
    FULL,
    Holding,
    Parts,
    recorded_payload,
)
from tests.unit.fakes import (
    START_MS,
    deliveries,
    delivery,
    message,
    seqs,
    subscription,
)
from tests.world.publishes import publish_all
from tests.world.server import Observer, SimulatedClock, SimulatedServer
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.files import SimulatedFiles


def test_a_consumer_that_gives_back_waits_or_gets_it_again_and_the_last_attempt_is_dead() -> None:
    receiver = subscription(1, max_attempts=2, backoff_ms=(5_000,))
    parts = Parts(receiver)
    leases = parts.leasing.leases

    def lease(attempt: int = 1) -> str:
        parts.dispatcher.queues.of(receiver).rows.pop(1, 1, Instant(START_MS, 0))
        return leases.grant(deliveries(parts.sent(attempt)), 1000) + "0"

    assert parts.nack([lease(), "e-9-0"], 0) == ["e-9-0"]
    assert parts.dispatcher.queues.of(receiver).count == 1
    parts.leasing.nack([lease()], 50, START_MS)
    assert parts.kinds() == [RecordKind.RETRY]
    parts.wait(0)
    assert parts.leasing.extend([lease(attempt=2)], 10) == []
    parts.wait(10)
    assert parts.kinds() == [RecordKind.RETRY, RecordKind.DEAD]
    assert parts.retries.dead_by_subject == {1: 1}


@pytest.mark.parametrize("attempt", [1, 2])
def test_many_long_bodies_are_recorded_again_in_several_groups(attempt: int) -> None:
    receiver = subscription(1, max_attempts=2)
    parts = Parts(receiver, group_max_bytes=3000)
    body = Payload(bytes(900))
    ones = [
        msgspec.structs.replace(delivery(seq, attempt=attempt), payload=body) for seq in range(2, 8)
    ]
    parts.hours.add(START_MS // HOUR_MS, len(ones))
    token = parts.leasing.leases.grant(deliveries(*ones), 1000)
    began = len(parts.ports.committing)
    parts.leasing.nack([f"{token}{index}" for index in range(6)], 50, START_MS)
    while not parts.groups.is_idle:
        parts.commit()
    groups = parts.ports.committing[began:]
    assert [group.count for group in groups] == [2, 2, 2]
    assert all(group.total_bytes <= 3000 for group in groups)


def test_a_delay_is_refused_while_too_much_is_not_filed_and_the_leases_go_on() -> None:
    sizes = {"group_max_bytes": 600, "checkpoint_bytes": 600, "unfiled_max_bytes": 600}
    parts = Parts(subscription(1), **sizes)
    parts.publish(message(START_MS, body=bytes(700)))
    parts.commit()
    token = parts.leasing.leases.grant(deliveries(parts.sent()), 1000) + "0"
    with pytest.raises(OverloadedError):
        parts.leasing.nack([token], 50, START_MS)
    assert parts.leasing.leases.get(token) is not None
    assert parts.nack([token], 0) == []


def test_a_consumer_that_gives_back_many_does_not_hold_up_the_others() -> None:
    parts = Holding()
    parts.begin()
    assert parts.kinds() == [RecordKind.RETRY] * 2
    parts.commit()
    # All of them are on their way back: they cannot be given back again, nor expire.
    assert parts.nack(parts.tokens, 0) == parts.tokens
    parts.turn()
    assert parts.kinds() == [RecordKind.RETRY] * 2
    for _ in range(2):  # once the queue of the first two is looked at
        parts.turn()
    assert parts.kinds() == [RecordKind.RETRY] * 3, "the first two are in the group before"
    assert (parts.told, parts.ports.turns) == ([], [])
    parts.commit()
    assert parts.told == [(["e-9-0"], None)]
    assert parts.retries.retried_by_subject == {1: 5}


def test_a_nack_of_which_a_part_could_not_be_written_fails() -> None:
    parts = Holding()
    parts.begin()
    parts.fail()
    for _ in range(2):
        parts.turn()
        parts.commit()
    assert parts.told == [(["e-9-0"], FULL)]
    assert parts.retries.retried_by_subject == {1: 5}
    # What could not be recorded is recorded later, and the others are.
    parts.wait(RETRY_COMMIT_MS)
    assert parts.kinds() == [RecordKind.RETRY] * 2


def test_many_last_attempts_that_end_together_are_buried_some_in_a_turn() -> None:
    parts = Holding(attempt=2)
    assert parts.nack(parts.tokens, 0) == []
    counts = [len(parts.kinds())]
    while parts.ports.turns:
        parts.turn()
        counts.append(len(parts.kinds()))
    assert counts == [2, 4, 5]
    assert parts.kinds() == [RecordKind.DEAD] * 5


def test_no_message_dies_of_a_lease_that_ran_out_with_others() -> None:
    parts = Holding(attempt=2)
    parts.wait(1000)
    assert parts.kinds() == []
    queue = parts.dispatcher.queues.of(parts.receiver)
    assert len(queue.rows.suspects.next_seqs(20)) == 5
    # Each has its last attempt alone; and then it is the cause.
    handed_out = seqs(queue.pop(20, 1 << 20, Instant(START_MS, 1000)))
    assert len(handed_out) == 1
    assert not queue.rows.suspects.are_ready


def test_what_is_given_back_for_later_tells_since_when_it_was_leased() -> None:
    parts = Parts()
    leased = deliveries(parts.sent())
    leased.leased_ms = START_MS - 70
    prefix = parts.leasing.leases.grant(leased, 1000)
    parts.nack([f"{prefix}0"], 500)
    history = recorded_payload(parts).history
    assert history is not None
    [attempt] = history.attempts
    assert (attempt.began_ms, attempt.duration_ms) == (START_MS - 70, 70)
    assert attempt.error == "given back (nack)"


def test_one_note_is_enough_for_what_is_acknowledged_together() -> None:
    parts = Parts()
    leased = deliveries(parts.sent(), delivery(parts.seq + 1))
    leased.leased_ms = START_MS - 70
    prefix = parts.leasing.leases.grant(leased, 1000)
    parts.hours.add(START_MS // HOUR_MS, 1)
    parts.leasing.ack([f"{prefix}0", f"{prefix}1"], START_MS)
    [note] = parts.ports.notes
    assert (note.seq, note.count, note.began_ms, note.duration_ms) == (
        *(parts.seq, 2),
        *(START_MS - 70, 70),
    )


def test_acknowledged_messages_are_settled_when_those_are_durable_that_tell_so() -> None:
    clock = SimulatedClock()
    server = SimulatedServer(
        Settings(), SimulatedFiles(), MemoryCatalog(), clock, random.Random(0), Observer()
    )
    put = server.engine.subscribing.put_subscription
    put(subscription(1, subject="orders", created_ms=clock.now_ms))
    put(subscription(2, subject="done", created_ms=clock.now_ms))
    server.rest()
    clock.move(1)
    options = [MessageOptions(outcomes=BOTH), None, MessageOptions(ttl_ms=HOUR_MS)]
    messages = [
        NewMessage("orders", clock.now_ms, Payload(b"%d" % number, options=one))
        for number, one in enumerate(options)
    ]
    publish_all(server.engine.publishing, messages, clock.now_ms)
    for _ in range(2):
        server.rest()
        server.tick()
    server.rest()
    consumer, listener = map(server.engine.registry.by_id, (1, 2))
    assert consumer is not None and listener is not None
    got: list[Pulled] = []
    server.engine.leasing.pull(consumer, PullRequest(9, 60_000, 0, got.append))
    server.rest()
    [pulled] = got
    over: list[list[str]] = []
    server.ack(pulled.tokens, over.append)
    assert over == [] and server.engine.dispatcher.settling.delivered_total == 2
    server.rest()
    assert over == [[]] and server.engine.dispatcher.settling.delivered_total == 3
    server.tick()
    server.rest()
    server.engine.leasing.pull(listener, PullRequest(9, 60_000, 0, got.append))
    server.rest()
    [delivery] = [delivery for delivery, _ in got[1]]
    assert msgspec.json.decode(delivery.payload.body)["outcome"] == "delivered"
