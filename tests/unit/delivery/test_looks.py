"""Looks: rows that wait are read to learn when they expire."""

from __future__ import annotations

import numpy as np
import pytest

from delayserver.delivery.deadlines import STEP_MS
from delayserver.records.message import MessageOptions, ScheduleEntry
from delayserver.schedule.wheel_rows import (
    route_bits,
)
from storage.rows import FLAG_OPTIONS, HOUR_MS
from tests.unit.delivery.parts import NOW_MS, Parts, webhook
from tests.unit.fakes import (
    START_MS,
    counted,
    deliveries,
    delivery,
    subscription,
)

WITH_OPTIONS = 1 | route_bits(FLAG_OPTIONS)
OVER = MessageOptions(ttl_ms=NOW_MS - START_MS)
"""What is due at START_MS, and is read at NOW_MS, has just expired."""
FINE = MessageOptions(ttl_ms=NOW_MS - START_MS + 1)
SINGLE_AND_BATCH = pytest.mark.parametrize("batch_max", [0, 2])


def test_what_waits_in_vain_is_given_up_when_its_time_is_over_though_nobody_asks() -> None:
    consumer = subscription()
    parts = Parts(consumer)
    parts.fire((1, START_MS), (2, START_MS), (3, START_MS), route=WITH_OPTIONS)
    parts.fire((4, START_MS))
    long = MessageOptions(ttl_ms=HOUR_MS)
    parts.read_columns(options={1: FINE, 2: long, 3: FINE})
    assert (parts.waiting(consumer), parts.ports.handouts) == ([1, 2, 3, 4], [])
    over_ms = -(-(NOW_MS + 1) // STEP_MS) * STEP_MS
    assert parts.dispatcher.pump.wake(NOW_MS) == over_ms - NOW_MS
    parts.dispatcher.pump.wake(over_ms - 1)
    assert parts.ports.handouts == []
    parts.dispatcher.pump.wake(over_ms)
    assert parts.waiting(consumer) == [2, 4]
    assert all(parts.dispatcher.holds(ScheduleEntry(seq, START_MS)) for seq in (1, 2, 3, 4))
    parts.read_columns(options={1: FINE, 3: FINE})
    assert [(one.entry.seq, why) for one, why in parts.ports.dropped] == [
        (1, "expired"),
        (3, "expired"),
    ]


def test_what_waits_for_a_paused_subscription_expires_all_the_same() -> None:
    parts = Parts(webhook(paused=True))
    parts.fire((1, START_MS), route=WITH_OPTIONS)
    parts.read_columns(options={1: OVER})
    parts.read_columns(options={1: OVER})
    assert [one.entry.seq for one, _ in parts.ports.dropped] == [1]
    assert counted(parts.dispatcher).in_flight == 0
    assert parts.ports.sent == []


def test_what_leaves_at_once_is_not_read_to_find_out_when_it_expires() -> None:
    parts = Parts(webhook())
    parts.fire((1, START_MS), route=WITH_OPTIONS)
    parts.read(options={1: FINE})
    parts.turn()
    assert parts.ports.handouts == []


def test_what_comes_back_is_known_to_expire_or_found_out() -> None:
    consumer = subscription()
    parts = Parts(consumer)
    parts.pull(consumer, 1)
    parts.fire((1, START_MS), route=WITH_OPTIONS)
    leased = parts.read_columns(options={1: FINE})
    parts.dispatcher.settling.return_leased(leased, np.array([0]))
    parts.dispatcher.pump.run(parts.dispatcher.queues.of(consumer), NOW_MS)
    parts.read_columns(options={1: FINE})
    parts.dispatcher.pump.wake(NOW_MS + STEP_MS)
    assert parts.handouts() == [[1]]
    assert parts.waiting(consumer) == []


def test_a_subscription_that_is_deleted_while_rows_are_looked_at_is_no_concern() -> None:
    consumer = subscription()
    parts = Parts(consumer)
    parts.fire((1, START_MS), route=WITH_OPTIONS)
    parts.turn()
    [look] = parts.ports.handouts
    assert not look.is_to_leave
    parts.change(subscription(deleted=True))
    parts.ports.handouts.clear()
    look.answer(deliveries(delivery(1)), NOW_MS)
    assert parts.ports.dropped == []
