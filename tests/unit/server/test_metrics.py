"""Metrics: counters by subject never go back, and have a bounded number of labels."""

from collections.abc import Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily

from delayserver.server.metrics import Histogram, Metrics, TimedFiles


def make_metrics(names: Mapping[int, str], labels_max: int) -> Metrics:
    return Metrics(names.get, {7: "shop", 8: "mail", 9: "sms"}.get, labels_max)


def lines(metrics: Metrics) -> list[str]:
    registry = CollectorRegistry()
    registry.register(metrics)
    return generate_latest(registry).decode().splitlines()


def samples(metrics: Metrics, name: str) -> dict[str, float]:
    found = (
        line.rsplit(" ", 1) for line in lines(metrics) if line.startswith(f"delayserver_{name}")
    )
    return {sample.removeprefix(f"delayserver_{name}"): float(value) for sample, value in found}


def test_the_first_subjects_have_a_label_and_keep_it() -> None:
    counts = {3: 5, 1: 7}
    metrics = make_metrics({number: f"s{number}" for number in range(9)}, labels_max=2)
    metrics.counter_by_subject("accepted", "Messages", counts)
    assert samples(metrics, "accepted_total") == {'{subject="s3"}': 5, '{subject="s1"}': 7}
    counts |= {2: 1, 4: 2, 1: 8}
    assert samples(metrics, "accepted_total") == {
        '{subject="s3"}': 5,
        '{subject="s1"}': 8,
        '{subject="_other"}': 3,
    }


def test_all_counters_name_the_same_subjects() -> None:
    metrics = make_metrics({1: "a", 2: "b"}, labels_max=1)
    metrics.counter_by_subject("accepted", "Messages", {1: 1, 2: 1})
    metrics.counter_by_subject("dead", "Messages", {0: 9, 2: 4, 1: 3})
    assert samples(metrics, "dead_total") == {
        '{subject="_unknown"}': 9,
        '{subject="_other"}': 4,
        '{subject="a"}': 3,
    }


def test_a_histogram_counts_up_to_each_bound() -> None:
    metrics = make_metrics({}, labels_max=0)
    metrics.lateness_seconds = Histogram((0.1, 1))
    for value in (0.05, 0.1, 0.5, 100):
        metrics.lateness_seconds.observe(value)
    name = "delivery_lateness_seconds"
    assert samples(metrics, name) == {
        '_bucket{le="0.1"}': 2,
        '_bucket{le="1"}': 3,
        '_bucket{le="+Inf"}': 4,
        "_count": 4,
        "_sum": 100.65,
    }


def test_syncs_are_timed_by_log(tmp_path: Path) -> None:
    metrics = make_metrics({}, labels_max=0)
    files = TimedFiles(str(tmp_path))
    files.on_sync = metrics.on_sync
    files.make_directory("messages")
    file = files.open("messages/1", create=True)
    file.pwrite_durable([b"abc"], 0)
    file.pwrite([b"def"], 3)
    file.fdatasync()
    assert file.pread(6, 0) == b"abcdef"
    file.close()
    assert samples(metrics, "fsync_seconds_count") == {'{log="messages"}': 2}


def test_subscriptions_have_labels_of_their_own_up_to_the_limit() -> None:
    metrics = make_metrics({}, labels_max=2)
    queued = {9: 1, 7: 2, 8: 3}
    metrics.by_subscription(GaugeMetricFamily, "queued_deliveries", "Due", lambda: queued)
    assert samples(metrics, "subscription_queued_deliveries") == {
        '{subscription="sms"}': 1,
        '{subscription="shop"}': 2,
        '{subscription="_other"}': 3,
    }
    for number in (7, 8, 10):  # 10 was deleted before anybody looked
        metrics.lateness_by_subscription[number].observe(0.001)
    assert samples(metrics, "subscription_lateness_seconds_count") == {
        '{subscription="shop"}': 1,
        '{subscription="_other"}': 2,
    }


def test_the_oldest_of_the_others_is_as_old_as_one_of_them() -> None:
    metrics = make_metrics({}, labels_max=1)
    ages = {7: 1, 8: 5, 9: 3}
    metrics.by_subscription(GaugeMetricFamily, "age_seconds", "Age", lambda: ages, max)
    assert samples(metrics, "subscription_age_seconds") == {
        '{subscription="shop"}': 1,
        '{subscription="_other"}': 5,
    }


def test_what_is_alerted_about_begins_at_0() -> None:
    found = samples(make_metrics({}, labels_max=9), "requests_total")
    assert found == {f'{{status="{status}"}}': 0 for status in (500, 503, 507)}


def test_a_webhook_is_counted_by_the_class_of_its_answer() -> None:
    metrics = make_metrics({}, labels_max=9)
    for status in (200, 204, 404, 503, None):
        metrics.on_webhook(7, status, 0.2)
    assert samples(metrics, "webhook_answers_total") == {
        '{status="2xx",subscription="shop"}': 2,
        '{status="4xx",subscription="shop"}': 1,
        '{status="5xx",subscription="shop"}': 1,
        '{status="none",subscription="shop"}': 1,
    }
    assert samples(metrics, "webhook_seconds_count") == {'{subscription="shop"}': 5}
