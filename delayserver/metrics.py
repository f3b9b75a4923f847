"""Metrics for Prometheus, in base units.

Counters are plain integers of the parts, read when somebody scrapes; histograms are counted here.

Cost: one bisection per observation. Threads: belongs to the event loop.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

LATENESS_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 5, 30, 300, 3600)
COMMIT_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1)
GROUP_RECORDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 10_000)


class Histogram:
    """Counts of values, by upper bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, text: str) -> Metric:
        """As Prometheus wants it."""
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        return HistogramMetricFamily(name, text, buckets=buckets, sum_value=self._sum)


Value = Callable[[], float]
_Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]


class Metrics(Collector):
    """All metrics of one server."""

    def __init__(self) -> None:
        self.lateness_seconds = Histogram(LATENESS_SECONDS)
        self.commit_seconds = Histogram(COMMIT_SECONDS)
        self.group_records = Histogram(GROUP_RECORDS)
        self._values: list[tuple[_Kind, str, str, Value]] = []

    def counter(self, name: str, text: str, value: Value) -> None:
        """A number that only grows."""
        self._values.append((CounterMetricFamily, name, text, value))

    def gauge(self, name: str, text: str, value: Value) -> None:
        """A number that goes up and down."""
        self._values.append((GaugeMetricFamily, name, text, value))

    def collect(self) -> Iterable[Metric]:
        """All families, as they are now."""
        for kind, name, text, value in self._values:
            family = kind(f"delayserver_{name}", text)
            family.add_metric([], value())
            yield family
        yield self.lateness_seconds.family(
            "delayserver_delivery_lateness_seconds", "From due to sent, or handed to a consumer"
        )
        yield self.commit_seconds.family(
            "delayserver_commit_seconds", "Time to write and sync a group of the message log"
        )
        yield self.group_records.family("delayserver_group_records", "Records in a commit group")
