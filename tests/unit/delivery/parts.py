"""A dispatcher with its neighbours, on ports that take notes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from delayserver.delivery.delayed_fetch import DelayedFetch, Pulled, PullRequest
from delayserver.delivery.deliveries import Deliveries
from delayserver.delivery.dispatcher import Dispatcher
from delayserver.records.message import DueDelivery, MessageOptions, Payload, ScheduleEntry
from delayserver.records.subscriptions import KafkaTarget, Registry, Subscription
from delayserver.records.tables import Change
from delayserver.schedule.hours import Hours
from delayserver.schedule.wheel_rows import FiredRows
from delayserver.slices import Slices
from delayserver.timers.timeouts import Timeouts
from storage.rows import DISPATCH_DTYPE
from tests.unit.fakes import (
    HOUR,
    START_MS,
    NotingPorts,
    Stopwatch,
    deliveries,
    delivery,
    seqs,
    subscription,
    wheel_rows,
)

NAMES = {1: "order.unpaid", 2: "refund"}
NOW_MS = START_MS + 1_000


class Parts:
    def __init__(self, *subscriptions: Subscription, **more: Any) -> None:
        """`more`: for the dispatcher."""
        self.ports = NotingPorts()
        self.hours = Hours(live_through_hour=HOUR)
        self.registry = Registry(subscriptions)
        self.stopwatch = Stopwatch()
        self.timeouts = Timeouts(self.stopwatch)
        self.changes: dict[int, Change] = {}
        """Of every message."""
        self.ahead: list[ScheduleEntry] = []
        """Rows that have not fired."""
        self.dispatcher = Dispatcher(
            self.registry,
            NAMES,
            self.hours,
            self.ports,
            self.timeouts,
            Slices(self.ports.call_soon),
            lambda: self.ports,
            changes=lambda seq: self.changes,
            has_not_fired=lambda entry: entry in self.ahead,
            **more,
        )
        self.dispatcher.queues.now_ms = NOW_MS
        self.ports.begin = self.dispatcher.pushes.may_begin
        self.answers: list[list[tuple[DueDelivery, str]]] = []
        """What consumers were told without a read: nothing."""

    def fire(self, *rows: tuple[int, int], route: int = 1, payload_bytes: int = 0) -> None:
        self.hours.add(HOUR, len(rows))
        batch = FiredRows(HOUR, wheel_rows(HOUR, *rows, route=route, locator=payload_bytes))
        self.dispatcher.fire([batch], NOW_MS)

    def wait(self, passed_ms: int) -> None:
        """Until the stopwatch shows `passed_ms`; nobody looks at the clock."""
        self.stopwatch.shows_ms = passed_ms
        self.timeouts.advance()

    def pull(
        self, subscription: Subscription, count: int, wait_ms: int = 1000, least: int = 1
    ) -> DelayedFetch:
        def answer(pulled: Pulled) -> None:
            self.answers.append(list(pulled))

        request = PullRequest(count, 30_000, wait_ms, answer, least)
        return self.dispatcher.pulls.request(self.dispatcher.queues.of(subscription), request)

    def handouts(self) -> list[list[int]]:
        return [seqs(handout.slices) for handout in self.ports.handouts]

    def change(self, subscription: Subscription) -> None:
        self.registry.put(subscription)
        self.dispatcher.on_subscription(subscription, NOW_MS)

    def read(self, *unreadable: int, attempt: int = 1, **origin: Any) -> list[DueDelivery]:
        """Answer the oldest read; returns its deliveries."""
        return list(self.read_columns(*unreadable, attempt=attempt, **origin))

    def read_columns(
        self,
        *unreadable: int,
        attempt: int = 1,
        payload: Payload | None = None,
        options: Mapping[int, MessageOptions] | None = None,
        **origin: Any,
    ) -> Deliveries:
        """Likewise, as columns; `options`: of messages, by seq."""
        self.turn()
        handout = self.ports.handouts.pop(0)
        ones = [
            delivery(
                seq,
                START_MS,
                subscription_id=handout.subscription_id,
                attempt=handout.attempts.get(seq, attempt),
                **origin,
            )
            for seq in seqs(handout.slices)
            if seq not in unreadable
        ]
        for one in ones:
            [row] = [
                batch.rows[batch.rows["seq"] == one.entry.seq]
                for batch in handout.slices
                if one.entry.seq in batch.rows["seq"]
            ]
            one.row["route"] = row["route"]
            chosen = (options or {}).get(one.entry.seq)
            one.payload = msgspec.structs.replace(payload or one.payload, options=chosen)
        read = deliveries(*ones)
        handout.answer(read, NOW_MS)
        return read

    def turn(self) -> None:
        """The next turn of the event loop."""
        turns, self.ports.turns = self.ports.turns, []
        for function in turns:
            function()

    def waiting(self, subscription: Subscription) -> list[int]:
        return seqs(self.dispatcher.queues.of(subscription).rows.slices())

    def settled(self) -> list[tuple[int, int, int]]:
        """Seq, subscription and outcome of all rows for the dispatch log."""
        rows = np.frombuffer(b"".join(row for _, row in self.ports.settled), DISPATCH_DTYPE)
        return list(
            zip(
                rows["seq"].tolist(),
                rows["subscription_id"].tolist(),
                rows["outcome"].tolist(),
                strict=True,
            )
        )


def webhook(number: int = 1, **more: Any) -> Subscription:
    return subscription(number, type="webhook", url="http://127.0.0.1/", **more)


class Lease:
    """Whether deliveries may leave."""

    def __init__(self, parts: Parts) -> None:
        self.holds = True
        parts.dispatcher.queues.may_deliver = lambda: self.holds


def posts(parts: Parts) -> list[list[int]]:
    return [[delivery.entry.seq for delivery in post] for post in parts.ports.posts]


def to_topic(**more: Any) -> Subscription:
    target = KafkaTarget(bootstrap="b:1", topic="t")
    return subscription(type="kafka", target=target, **{"max_in_flight": 3, **more})
