"""A server's counters, read when asked for: as metrics for Prometheus, and as `/v1/stats`.

The parts count for themselves and know nothing of either form; here stands which number of which
part has which name.

Cost: nothing until somebody asks, then some µs. Threads: belongs to the event loop.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from delayserver.config import Settings
from delayserver.decisions.failing import FAILING_MAX
from delayserver.delivery.answers import Certainty
from delayserver.delivery.broker_bodies import BrokerBodies
from delayserver.delivery.dispatcher import Waiting
from delayserver.delivery.open_outlets import SharedOutlet
from delayserver.delivery.outlets import OutletSink
from delayserver.delivery.queue import Queue
from delayserver.records.subscriptions import StandIn
from delayserver.server.engine import Engine
from delayserver.server.metrics import LATENESS_SECONDS, Metrics, Values
from delayserver.times import format_time
from storage.rows import HOUR_MS

if TYPE_CHECKING:
    from delayserver.server.backups import BackupMaker


class Gauges:
    """The numbers of one server."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        clock: Callable[[], int],
        not_understood_tokens: Callable[[], int] = int,
    ) -> None:
        """`not_understood_tokens`: how many lines of the file of tokens are not."""
        self._engine = engine
        self._not_understood_tokens = not_understood_tokens
        self._clock = clock
        self._started_ms = clock()
        self.free_bytes = 0
        """On the device, when it was looked at last."""
        self.waiting = Waiting()
        """As it was counted last, which is before each time that it is shown (`Calls.look`)."""
        self.pending_later = 0
        """Messages of hours that are not loaded, when it was counted last (see Queries)."""
        self.dead_letters = 0
        """As of the last checkpoint, when they were counted last."""
        self.metrics = Metrics(
            engine.sequencer.subject_names.get,
            self._subscription_name,
            settings.metrics_subjects_max,
        )
        self._add_counters()
        self._add_subscriptions()
        self._add_deliveries()
        self._add_backlogs(settings)
        for decider in engine.deciders:
            decider.add_metrics(self.metrics)

    def _add_counters(self) -> None:
        engine = self._engine
        by_subject, counter = self.metrics.counter_by_subject, self.metrics.counter
        messages, dispatcher = engine.messages, engine.dispatcher
        events = engine.events
        by_subject("accepted", "Messages accepted", engine.publishing.accepted_by_subject)
        by_subject("cancelled", "Messages cancelled", messages.cancelled_by_subject)
        by_subject("delivered", "Deliveries that arrived", dispatcher.settling.delivered_by_subject)
        by_subject("retried", "Deliveries tried again", engine.retries.retried_by_subject)
        by_subject("dead", "Deliveries given up", engine.retries.dead_by_subject)
        by_subject("replayed", "Deliveries asked for again", engine.redriving.replayed_by_subject)
        counter("commits", "Groups committed", lambda: engine.groups.committed_total)
        watch = engine.clock_watch
        counter("clock_set_ahead", "Times that the clock was set ahead", lambda: watch.ahead_total)
        counter("clock_set_back", "Times that the clock was set back", lambda: watch.back_total)
        self.metrics.not_understood = self._not_understood
        counter("events", "Events that completed messages", lambda: events.events_total)

    def _not_understood(self) -> dict[str, int]:
        """How many definitions are not understood here, by the names of their kinds."""
        engine = self._engine
        return {
            "subscription": sum(isinstance(one, StandIn) for one in engine.registry),
            **{
                part.name: len(decider.not_understood)
                for part, decider in zip(engine.parts, engine.deciders, strict=True)
                if decider.not_understood is not None
            },
            "token": self._not_understood_tokens(),
        }

    def _subscription_name(self, subscription_id: int) -> str | None:
        found = self._engine.registry.by_id(subscription_id)
        return None if found is None else found.name

    def _add_subscriptions(self) -> None:
        """Which receiver is slow, or away."""
        engine, add = self._engine, self.metrics.by_subscription
        dispatcher, retries = engine.dispatcher, engine.retries
        counter, gauge = CounterMetricFamily, GaugeMetricFamily

        def of_queues(value: Callable[[Queue], float]) -> Values:
            return lambda: {queue.subscription.id: value(queue) for queue in dispatcher.queues}

        def of_all(counts: Mapping[int, int]) -> Values:
            return lambda: {one.id: 0 for one in engine.registry} | dict(counts)

        self.metrics.paused = lambda: Counter(
            (one.id, one.pause_reason or "asked") for one in engine.registry if one.paused
        )
        add(
            *(counter, "delivered", "Deliveries that arrived"),
            of_all(dispatcher.settling.delivered_by_subscription),
        )
        add(
            *(counter, "retried", "Deliveries tried again"),
            of_all(retries.retried_by_subscription),
        )
        add(*(counter, "dead", "Deliveries given up"), of_all(retries.dead_by_subscription))
        add(
            *(gauge, "queued_deliveries", "Due, waiting for the subscriber"),
            of_queues(lambda queue: queue.count),
        )
        add(
            *(gauge, "in_flight_deliveries", "Being sent, or leased"),
            of_queues(lambda queue: queue.in_flight),
        )
        add(
            *(gauge, "oldest_due_age_seconds", "How long the first of its queue waits"),
            of_queues(lambda queue: self._age_s(queue.first_ms())),
            max,
        )

    def _add_deliveries(self) -> None:
        """Messages that wait for their time or for a subscriber."""
        engine, gauge = self._engine, self.metrics.gauge
        hours, dispatcher = engine.hours, engine.dispatcher
        gauge("pending_deliveries", "Waiting in loaded hours, or on their way", hours.unsettled)
        gauge("pending_later_messages", "Waiting in later hours", lambda: self.pending_later)
        gauge("queued_deliveries", "Due, waiting for a subscriber", lambda: self.waiting.queued)
        gauge("in_flight_deliveries", "Being sent, or leased", lambda: self.waiting.in_flight)
        gauge("unmatched_messages", "Due, without any subscription", dispatcher.parked.count)
        gauge(
            "oldest_due_age_seconds",
            "How long the oldest message waits that is due and not on its way",
            lambda: self._age_s(self.waiting.oldest_due_ms),
        )
        gauge(
            "open_hour_age_seconds",
            "How long the oldest hour is over in which something is not settled; 0: there is none",
            lambda: self._oldest_open_hour()[0],
        )
        gauge(
            "open_hour_deliveries",
            "What is not settled in that hour",
            lambda: self._oldest_open_hour()[1],
        )
        gauge("leases", "Messages that consumers hold", engine.leasing.leases.count)
        fetches = dispatcher.pulls.fetches
        gauge("waiting_pulls", "Consumers that wait for messages", fetches.count)
        gauge(
            "watched_pulls",
            "Waiting pulls and those not purged yet",
            dispatcher.pulls.fetches.watched,
        )
        gauge("timeouts", "Leases, pulls and others that may expire", engine.timeouts.size)
        gauge("subscriptions", "Subscriptions", lambda: len(engine.registry))
        gauge("subjects", "Subjects", lambda: len(engine.sequencer.subjects))
        gauge(
            "deadlines",
            "Deadlines of messages with a time to live, as far as they are known",
            lambda: sum(_deadlines(queue) for queue in dispatcher.queues),
        )
        gauge("waiting_slices", "Long works that go on in turns to come", engine.slices.__len__)

    def _oldest_open_hour(self) -> tuple[float, int]:
        """How long it is over, and the number of rows that keep it open."""
        found = self._engine.hours.oldest_open(self._clock())
        if found is None:
            return 0.0, 0
        hour, count = found
        return self._age_s((hour + 1) * HOUR_MS), count

    def _add_backlogs(self, settings: Settings) -> None:
        """The server's own work ahead, and the space for it; the limits beside them, so that no
        alert has to repeat a setting."""
        engine, gauge = self._engine, self.metrics.gauge
        groups = engine.groups
        gauge("group_bytes", "In the open commit group", lambda: engine.sequencer.group.total_bytes)
        gauge("unfiled_bytes", "Accepted and not filed", lambda: groups.unfiled_bytes)
        gauge("unfiled_max_bytes", "… beyond which it waits", lambda: settings.unfiled_max_bytes)
        gauge(
            "replay_lag_seconds",
            "How long the oldest group waits that is not filed",
            lambda: self._age_s(groups.oldest_unfiled_ms),
        )
        gauge(
            "replay_lag_records",
            "Accepted and not behind a checkpoint",
            lambda: engine.sequencer.next_seq - 1 - groups.checkpoint_seq,
        )
        gauge("waiting_publishes", "Publishes that wait to be filed", engine.produces.count)
        gauge("disk_free_bytes", "Free on the device", lambda: self.free_bytes)
        gauge(
            "disk_reserve_bytes",
            "Publishing is refused with less",
            lambda: settings.disk_reserve_bytes,
        )

    def add_backups(self, backups: "BackupMaker") -> None:
        """The age of the newest state that a restore would bring back."""
        gauge = self.metrics.gauge
        gauge(
            "backup_last_timestamp_seconds",
            "As of when the newest backup is, since 1970; 0: there is none",
            lambda: 0 if backups.last is None else backups.last.taken_ms / 1000,
        )
        gauge(
            "backup_last_bytes",
            "The length of its files",
            lambda: 0 if backups.last is None else backups.last.total_bytes,
        )
        self.metrics.counter(
            "backups_failed", "Backups that came to nothing", lambda: backups.failed_total
        )
        shipper = backups.shipper

        def reach_ms() -> int:
            if shipper is None or backups.last is None:
                return 0
            # A backup whose log was never copied reaches to itself.
            return max(shipper.reach_ms, backups.last.taken_ms)

        gauge(
            "backup_log_reach_timestamp_seconds",
            "Until when backups and the log behind them reach, since 1970; 0: there is none",
            lambda: reach_ms() / 1000,
        )
        self.metrics.counter(
            "backup_log_breaks",
            "The message log was not copied behind the backups any more, until the next one",
            lambda: 0 if shipper is None else shipper.breaks_total,
        )

    def add_brokers(self, bodies: BrokerBodies, sinks: Callable[[], Sequence[OutletSink]]) -> None:
        """Metrics that all subscriptions to brokers share. `sinks`: of all kinds."""

        def of_sinks(value: Callable[[OutletSink], int]) -> Callable[[], int]:
            return lambda: sum(map(value, sinks()))

        def of_outlets(value: Callable[[SharedOutlet], int]) -> Callable[[], int]:
            return of_sinks(lambda sink: sum(map(value, sink.outlets.all_open())))

        gauge, counter = self.metrics.gauge, self.metrics.counter
        gauge(
            "broker_bodies_bytes",
            "Of messages that were read and are not answered by brokers",
            lambda: bodies.under_way_bytes,
        )
        gauge(
            "broker_bodies_max_bytes",
            "... beyond which they wait in their queues",
            lambda: bodies.max_bytes,
        )
        gauge("broker_connections", "Open", of_outlets(lambda one: one.outlet.connections))
        gauge(
            "broker_channels",
            "Open channels of RabbitMQ",
            of_outlets(lambda one: one.outlet.channels),
        )
        gauge("brokers_away", "Brokers that take nothing", of_sinks(lambda sink: sink.outlets.away))
        gauge(
            "brokers_blocked",
            "Brokers that have said that they take nothing now",
            of_outlets(lambda one: one.outlet.is_blocked),
        )
        gauge(
            "broker_waiting_messages",
            "Those that wait for the share of their subscription in a connection",
            of_outlets(lambda one: one.shares.waiting),
        )
        gauge(
            "broker_client_bytes",
            "Of messages that client libraries have",
            of_outlets(lambda one: one.shares.used_bytes),
        )
        counter(
            "broker_unknown",
            "Messages of which nobody knows whether the broker has stored them",
            of_sinks(lambda sink: sink.counts.answers[Certainty.UNKNOWN]),
        )
        counter(
            "broker_duplicates",
            "Messages that brokers had already, from an earlier attempt",
            of_sinks(lambda sink: sink.counts.duplicates),
        )
        counter(
            "broker_apart",
            "Messages sent again apart from those with which they had failed",
            of_sinks(lambda sink: sink.counts.apart),
        )

    def _age_s(self, since_ms: int | None) -> float:
        return 0.0 if since_ms is None else max(0, self._clock() - since_ms) / 1000

    def _failing(self) -> list[dict[str, str]]:
        """Subscriptions that only fail and are not paused, with the moment; the longest first."""
        registry, failing = self._engine.registry, self._engine.subscribing.failing
        found = (
            (since_ms, one.name)
            for subscription_id, since_ms in failing
            if (one := registry.by_id(subscription_id)) is not None and not one.paused
        )
        longest = heapq.nsmallest(FAILING_MAX, found)
        return [{"subscription": name, "since": format_time(ms)} for ms, name in longest]

    def failing_since_ms(self, subscription_id: int) -> int:
        """Since when a subscription has had nothing but failures here; 0: it has not."""
        return self._engine.subscribing.failing.since_ms(subscription_id)

    def subjects(
        self, behind: str, limit: int, may_see: Callable[[str], bool]
    ) -> tuple[list[dict[str, object]], str | None]:
        """Subjects behind a name, in the order of their names, with the counts of each since the
        start of this process; and the last of the page, if there are more."""
        engine = self._engine
        counts = {
            "accepted": engine.publishing.accepted_by_subject,
            "cancelled": engine.messages.cancelled_by_subject,
            "delivered": engine.dispatcher.settling.delivered_by_subject,
            "retried": engine.retries.retried_by_subject,
            "dead": engine.retries.dead_by_subject,
        }
        known = (one for one in engine.sequencer.subjects.items() if one[0] > behind)
        found = heapq.nsmallest(limit + 1, (one for one in known if may_see(one[0])))
        page = [
            {"name": name, **{field: of.get(number, 0) for field, of in counts.items()}}
            for name, number in found[:limit]
        ]
        return page, found[limit - 1][0] if len(found) > limit else None

    def stats(self) -> dict[str, object]:
        """Counters since the start of this process, and the rows that wait now."""
        engine = self._engine
        dispatcher = engine.dispatcher
        waiting = self.waiting
        oldest_due_ms = waiting.oldest_due_ms
        return {
            "started_at": format_time(self._started_ms),
            "accepted": engine.publishing.accepted_total,
            "cancelled": engine.messages.cancelled_total,
            "delivered": dispatcher.settling.delivered_total,
            "retried": sum(engine.retries.retried_by_subject.values()),
            "dead": sum(engine.retries.dead_by_subject.values()),
            "dead_letters": self.dead_letters,
            "lateness": {
                "bounds_ms": [bound_s * 1000 for bound_s in LATENESS_SECONDS],
                "counts": self.metrics.lateness_seconds.counts,
            },
            "last_seq": engine.sequencer.next_seq - 1,
            "checkpoint_seq": engine.groups.checkpoint_seq,
            "pending_loaded": engine.hours.unsettled(),
            "pending_later": self.pending_later,
            "queued": waiting.queued,
            "in_flight": waiting.in_flight,
            "oldest_due_at": None if oldest_due_ms is None else format_time(oldest_due_ms),
            "unmatched": dispatcher.parked.count(),
            "subjects": len(engine.sequencer.subjects),
            "subscriptions": len(engine.registry),
            "paused": sum(one.paused for one in engine.registry),
            "failing": self._failing(),
            "unfiled_bytes": engine.groups.unfiled_bytes,
            "replay_lag_ms": round(self._age_s(engine.groups.oldest_unfiled_ms) * 1000),
            **{
                name: value
                for part, decider in zip(engine.parts, engine.deciders, strict=True)
                for name, value in part.stats(decider).items()
            },
            "disk_free_bytes": self.free_bytes,
        }


def _deadlines(queue: Queue) -> int:
    return 0 if queue.rows.deadlines is None else queue.rows.deadlines.count
