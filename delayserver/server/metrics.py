"""Metrics for Prometheus, in base units.

Counters are plain integers of the parts, read when somebody scrapes; histograms are counted here.
The first subjects and subscriptions, up to a limit, have a label of their own; all others stand
together under `_other`, a name that none of them can have. A counter that an alert watches begins
at 0, since Prometheus cannot see the growth of a series that was not there before.

Cost: one bisection per observation; a scrape goes over all subjects and subscriptions. Threads:
belongs to the event loop, but for the histograms of syncs, each of which belongs to the thread that
syncs.
"""

import operator
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from storage.files import Buffer, OsFile, OsFiles

LATENESS_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 5, 30, 300, 3600)
SYNC_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1)
GROUP_RECORDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 10_000)
TURN_SECONDS = (0.0001, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 5)
WEBHOOK_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
ALERTED_STATUSES: Final = (b"500", b"503", b"507")
OTHERS: Final = "_other"
UNKNOWN: Final = "_unknown"


class Histogram:
    """Counts of values, by upper bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Up to each bound, from the one before it on; the last: above all."""
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value, so often."""
        self.counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str] = ()) -> Metric:
        """Add the sum, and buckets that each count all values up to a bound; returns `family`."""
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self.counts, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric(labels, buckets, self._sum)
        return family


class Labels:
    """Label values by id: the first `labels_max` have their name, which they keep, for a counter
    must never go back; all others are one."""

    def __init__(self, name_of: Callable[[int], str | None], labels_max: int) -> None:
        self._name_of = name_of
        self._labels_max = labels_max
        self._labels: dict[int, str] = {0: UNKNOWN}

    def __getitem__(self, number: int) -> str:
        label = self._labels.get(number)
        if label is None and len(self._labels) <= self._labels_max:
            name = self._name_of(number)
            if name is not None:
                label = self._labels[number] = name
        return OTHERS if label is None else label


class Histograms:
    """Histograms by id, as many as have a label; the others are one."""

    def __init__(self, labels: Labels, bounds: Sequence[float]) -> None:
        self._labels = labels
        self._bounds = bounds
        self._by_label: dict[str, Histogram] = {}

    def __getitem__(self, number: int) -> Histogram:
        label = self._labels[number]
        histogram = self._by_label.get(label)
        if histogram is None:
            histogram = self._by_label[label] = Histogram(self._bounds)
        return histogram

    def add_to(self, family: HistogramMetricFamily) -> Metric:
        """Add all of them; returns `family`."""
        for label, histogram in self._by_label.items():
            histogram.add_to(family, [label])
        return family


Value = Callable[[], float]
Values = Callable[[], Mapping[int, float]]
"""By id."""
Together = Callable[[float, float], float]
"""Joins two values that have one label."""
_Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]


class Metrics(Collector):
    """All metrics of one server. Names of subjects and subscriptions by id; at most `labels_max` of
    either have a label."""

    def __init__(
        self,
        subject_name: Callable[[int], str | None],
        subscription_name: Callable[[int], str | None],
        labels_max: int,
    ) -> None:
        self._subjects = Labels(subject_name, labels_max)
        self._subscriptions = Labels(subscription_name, labels_max)
        self.lateness_seconds = Histogram(LATENESS_SECONDS)
        self.commit_seconds = Histogram(SYNC_SECONDS)
        self.group_records = Histogram(GROUP_RECORDS)
        self.loop_turn_seconds = Histogram(TURN_SECONDS)
        self.fsync_seconds: dict[str, Histogram] = {}
        """By the directory of the file."""
        self._syncing = threading.Lock()
        self.lateness_by_subscription = Histograms(self._subscriptions, LATENESS_SECONDS)
        self.webhook_seconds = Histograms(self._subscriptions, WEBHOOK_SECONDS)
        self.webhook_answers: Counter[tuple[int, str]] = Counter()
        """By subscription id and class of the status (`2xx`; `none`: there was no answer)."""
        self.sink_seconds = Histograms(self._subscriptions, WEBHOOK_SECONDS)
        self.sink_results: Counter[tuple[int, str]] = Counter()
        """Messages to brokers, by subscription id and result (`confirmed`, `failed`, …)."""
        self.paused: Callable[[], Counter[tuple[int, str]]] = Counter
        """Subscriptions that are paused: 1 by id and reason (`asked`, `gone`, `failures`,
        `not_understood`)."""
        self.not_understood: Callable[[], Mapping[str, int]] = dict
        """How many definitions are not understood here, by the names of their kinds."""
        self.answers: Counter[bytes] = Counter(dict.fromkeys(ALERTED_STATUSES, 0))
        """Requests that were answered, by status as it stands on the wire."""
        self._values: list[tuple[_Kind, str, str, Value]] = []
        self._by_subject: list[tuple[str, str, Mapping[int, int]]] = []
        self._by_subscription: list[tuple[_Kind, str, str, Values, Together]] = []

    def counter(self, name: str, text: str, value: Value) -> None:
        """A number that only grows."""
        self._values.append((CounterMetricFamily, name, text, value))

    def gauge(self, name: str, text: str, value: Value) -> None:
        """A number that goes up and down."""
        self._values.append((GaugeMetricFamily, name, text, value))

    def counter_by_subject(self, name: str, text: str, counts: Mapping[int, int]) -> None:
        """Numbers that only grow, by subject id (0: not known)."""
        self._by_subject.append((name, text, counts))

    def by_subscription(
        self, kind: _Kind, name: str, text: str, values: Values, together: Together = operator.add
    ) -> None:
        """Numbers by subscription id. `together` joins those that have no label of their own."""
        self._by_subscription.append((kind, name, text, values, together))

    def collect(self) -> Iterable[Metric]:
        """All families, as they are now."""
        for name, text, counts in self._by_subject:
            family = CounterMetricFamily(f"delayserver_{name}", text, labels=["subject"])
            yield _labelled(family, self._subjects, counts)
        for kind, name, text, values, together in self._by_subscription:
            one = kind(f"delayserver_subscription_{name}", text, labels=["subscription"])
            yield _labelled(one, self._subscriptions, values(), together)
        yield self._by_kind(
            self.paused(),
            GaugeMetricFamily(
                "delayserver_subscription_paused",
                "1 for each that is paused, by the reason",
                labels=["subscription", "reason"],
            ),
        )
        yield self._by_kind(
            self.webhook_answers,
            CounterMetricFamily(
                "delayserver_webhook_answers",
                "Requests to webhooks, by what was answered (none: nothing)",
                labels=["subscription", "status"],
            ),
        )
        yield self._by_kind(
            self.sink_results,
            CounterMetricFamily(
                "delayserver_sink_results",
                "Messages that were sent to brokers, by what came of it",
                labels=["subscription", "result"],
            ),
        )
        standing = GaugeMetricFamily(
            "delayserver_definitions_not_understood",
            "Definitions that stand still, since this server does not understand them",
            labels=["kind"],
        )
        for word, number in self.not_understood().items():
            standing.add_metric([word], number)
        yield standing
        answers = CounterMetricFamily(
            "delayserver_requests", "Requests that were answered", labels=["status"]
        )
        for status, count in self.answers.items():
            answers.add_metric([status.decode()], count)
        yield answers
        for kind, name, text, value in self._values:
            single = kind(f"delayserver_{name}", text)
            single.add_metric([], value())
            yield single
        yield from self._histograms()

    def _by_kind(
        self, counts: Counter[tuple[int, str]], family: CounterMetricFamily | GaugeMetricFamily
    ) -> Metric:
        """Counts by subscription id and something else."""
        totals: Counter[tuple[str, str]] = Counter()
        for (subscription_id, kind), count in counts.items():
            totals[self._subscriptions[subscription_id], kind] += count
        for labels, total in totals.items():
            family.add_metric(labels, total)
        return family

    def _histograms(self) -> Iterable[Metric]:
        yield self.lateness_seconds.add_to(
            HistogramMetricFamily(
                "delayserver_delivery_lateness_seconds", "From due to sent, or handed to a consumer"
            )
        )
        yield self.lateness_by_subscription.add_to(
            HistogramMetricFamily(
                "delayserver_subscription_lateness_seconds",
                "From due to sent, or handed to a consumer",
                labels=["subscription"],
            )
        )
        yield self.webhook_seconds.add_to(
            HistogramMetricFamily(
                "delayserver_webhook_seconds",
                "From a request to its answer, or to giving it up",
                labels=["subscription"],
            )
        )
        yield self.sink_seconds.add_to(
            HistogramMetricFamily(
                "delayserver_sink_seconds",
                "From handing a message to a broker's client to what came of it",
                labels=["subscription"],
            )
        )
        yield self.commit_seconds.add_to(
            HistogramMetricFamily(
                "delayserver_commit_seconds",
                "From a group's end to its being durable, with the hand-over between threads",
            )
        )
        yield self.group_records.add_to(
            HistogramMetricFamily("delayserver_group_records", "Records in a commit group")
        )
        yield self.loop_turn_seconds.add_to(
            HistogramMetricFamily(
                "delayserver_loop_turn_seconds",
                "Turns of the event loop: so long nothing else is done",
            )
        )
        synced = HistogramMetricFamily(
            "delayserver_fsync_seconds", "Time in the system call that syncs a log", labels=["log"]
        )
        for log, histogram in self.fsync_seconds.items():
            histogram.add_to(synced, [log])
        yield synced

    def on_webhook(self, subscription_id: int, status: int | None, seconds: float) -> None:
        """A request to a webhook was answered (None: it was not)."""
        kind = "none" if status is None else f"{status // 100}xx"
        self.webhook_answers[subscription_id, kind] += 1
        self.webhook_seconds[subscription_id].observe(seconds)

    def on_begun(self, subscription_id: int, late_ms: list[int]) -> None:
        """Messages leave, so late each."""
        of_subscription = self.lateness_by_subscription[subscription_id]
        counts = {late_ms[0]: 1} if len(late_ms) == 1 else Counter(late_ms)
        for one_ms, count in counts.items():
            self.lateness_seconds.observe(one_ms / 1000, count)
            of_subscription.observe(one_ms / 1000, count)

    def on_sink(self, subscription_id: int, kind: str, count: int, seconds: float) -> None:
        """So many messages that went to brokers together have come to that."""
        self.sink_results[subscription_id, kind] += count
        self.sink_seconds[subscription_id].observe(seconds, count)

    def on_sync(self, path: str, seconds: float) -> None:
        """A file was synced. From any thread: many files of a log are synced at once."""
        log = path.partition("/")[0]
        with self._syncing:
            histogram = self.fsync_seconds.get(log)
            if histogram is None:
                histogram = self.fsync_seconds[log] = Histogram(SYNC_SECONDS)
            histogram.observe(seconds)


def _labelled(
    family: CounterMetricFamily | GaugeMetricFamily,
    labels: Labels,
    values: Mapping[int, float],
    together: Together = operator.add,
) -> Metric:
    """A family with its values, those without a label of their own as one."""
    totals: dict[str, float] = {}
    for number, value in values.items():
        label = labels[number]
        totals[label] = together(totals[label], value) if label in totals else value
    for label, total in totals.items():
        family.add_metric([label], total)
    return family


class TimedFiles(OsFiles):
    """The operating system's files, which tell how long their syncs take."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.on_sync: Callable[[str, float], None] = lambda path, seconds: None
        files = self

        class TimedFile(OsFile):
            def pwrite_durable(self, buffers: Sequence[Buffer], offset: int) -> None:
                began = time.perf_counter()
                super().pwrite_durable(buffers, offset)
                files.on_sync(self.path, time.perf_counter() - began)

            def fdatasync(self) -> None:
                began = time.perf_counter()
                super().fdatasync()
                files.on_sync(self.path, time.perf_counter() - began)

        self._file = TimedFile
