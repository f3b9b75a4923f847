"""Metrics for Prometheus, in base units.

Counters are plain integers of the parts, read when somebody scrapes; histograms are counted here.
What is counted by subject has a label for the first subjects that were counted, up to a limit; all
others stand together under `_other`, which is no subject's name.

Cost: one bisection per observation; a scrape goes over all subjects. Threads: belongs to the event
loop, but for the histograms of syncs, each of which belongs to the thread that syncs.
"""

import time
from bisect import bisect_left
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
OTHER_SUBJECTS: Final = "_other"
UNKNOWN_SUBJECT: Final = "_unknown"


class Histogram:
    """Counts of values, by upper bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value, so often."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str] = ()) -> Metric:
        """Add the sum, and buckets that each count all values up to a bound; returns `family`."""
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric(labels, buckets, self._sum)
        return family


Value = Callable[[], float]
_Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]


class Metrics(Collector):
    """All metrics of one server. `subject_names` by id; at most `subjects_max` have a label."""

    def __init__(self, subject_names: Mapping[int, str], subjects_max: int) -> None:
        self.lateness_seconds = Histogram(LATENESS_SECONDS)
        self.commit_seconds = Histogram(SYNC_SECONDS)
        self.group_records = Histogram(GROUP_RECORDS)
        self.fsync_seconds: dict[str, Histogram] = {}
        """By the directory of the file."""
        self._subject_names = subject_names
        self._subjects_max = subjects_max
        self._labels: dict[int, str] = {0: UNKNOWN_SUBJECT}
        self._values: list[tuple[_Kind, str, str, Value]] = []
        self._by_subject: list[tuple[str, str, Mapping[int, int]]] = []

    def counter(self, name: str, text: str, value: Value) -> None:
        """A number that only grows."""
        self._values.append((CounterMetricFamily, name, text, value))

    def gauge(self, name: str, text: str, value: Value) -> None:
        """A number that goes up and down."""
        self._values.append((GaugeMetricFamily, name, text, value))

    def counter_by_subject(self, name: str, text: str, counts: Mapping[int, int]) -> None:
        """Numbers that only grow, by subject id (0: not known)."""
        self._by_subject.append((name, text, counts))

    def collect(self) -> Iterable[Metric]:
        """All families, as they are now."""
        for name, text, counts in self._by_subject:
            yield self._family_by_subject(name, text, counts)
        for kind, name, text, value in self._values:
            single = kind(f"delayserver_{name}", text)
            single.add_metric([], value())
            yield single
        yield self.lateness_seconds.add_to(
            HistogramMetricFamily(
                "delayserver_delivery_lateness_seconds", "From due to sent, or handed to a consumer"
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
        synced = HistogramMetricFamily(
            "delayserver_fsync_seconds", "Time in the system call that syncs a log", labels=["log"]
        )
        for log, histogram in self.fsync_seconds.items():
            histogram.add_to(synced, [log])
        yield synced

    def _family_by_subject(self, name: str, text: str, counts: Mapping[int, int]) -> Metric:
        family = CounterMetricFamily(f"delayserver_{name}", text, labels=["subject"])
        totals: dict[str, int] = {}
        for subject_id, count in counts.items():
            label = self._labels.get(subject_id)
            if label is None:
                # Who has a label keeps it: a counter must never go back.
                label = OTHER_SUBJECTS
                if len(self._labels) <= self._subjects_max:
                    label = self._labels[subject_id] = self._subject_names[subject_id]
            totals[label] = totals.get(label, 0) + count
        for label, total in totals.items():
            family.add_metric([label], total)
        return family

    def on_sync(self, path: str, seconds: float) -> None:
        """A file was synced."""
        log = path.partition("/")[0]
        histogram = self.fsync_seconds.get(log)
        if histogram is None:
            histogram = self.fsync_seconds[log] = Histogram(SYNC_SECONDS)
        histogram.observe(seconds)


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
