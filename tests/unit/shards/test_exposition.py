"""Metrics of several shards as one text."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from delayserver.shards.exposition import merge_metrics, standby_metrics

ANSWERS = "delayserver_shard_answers"
NAMES = ["plain", 'with "quotes"', 'brace } shard="7"', "line\nbreak", "back\\slash"]


def text_of(shard: int) -> str:
    registry = CollectorRegistry()
    seen = Counter("seen", 'Help with "quotes" { and\nlines', ["name"], registry=registry)
    for name in NAMES[shard:]:
        seen.labels(name).inc(shard + 1)
    Gauge("level", "A level", registry=registry).set(-1.5e300 if shard else float("nan"))
    Histogram("took_seconds", "Time", registry=registry).observe(shard)
    if shard == 1:
        Gauge("only_here", "Of one shard", registry=registry).set(3)
    return generate_latest(registry).decode()


def samples_of(text: str) -> dict[str, list[tuple[str, dict[str, str], str]]]:
    return {
        family.name: [(one.name, one.labels, repr(one.value)) for one in family.samples]
        for family in text_string_to_metric_families(text)
    }


def test_each_sample_of_each_shard_is_there_with_its_label() -> None:
    texts = {shard: text_of(shard) for shard in (0, 1, 3)}
    merged = samples_of(merge_metrics(texts))
    expected: dict[str, list[tuple[str, dict[str, str], str]]] = {}
    for shard, text in texts.items():
        for family, samples in samples_of(text).items():
            labelled = [(name, {**labels, "shard": str(shard)}, v) for name, labels, v in samples]
            expected.setdefault(family, []).extend(labelled)
    assert [labels["shard"] for _, labels, _ in merged.pop(ANSWERS)] == ["0", "1", "3"]
    assert merged == expected


def test_families_stand_together_with_one_head() -> None:
    text = merge_metrics({0: text_of(0), 1: text_of(1), 2: text_of(2)})
    heads = [line for line in text.splitlines() if line.startswith("#")]
    assert len(heads) == len(set(heads))
    names = [line.split()[2] for line in heads]
    assert all(names.count(name) == 2 for name in names)
    assert names[::2] == names[1::2]


def test_who_does_not_answer_is_named_and_the_rest_is_given() -> None:
    texts = {0: text_of(0), 2: text_of(2)}
    merged = samples_of(merge_metrics({0: texts[0], 1: None, 2: texts[2]}))
    assert merged.pop(ANSWERS) == [
        (ANSWERS, {"shard": shard}, answers)
        for shard, answers in (("0", "1"), ("1", "0"), ("2", "1"))
    ]
    without = samples_of(merge_metrics(texts))
    del without[ANSWERS]
    assert merged == without


def test_there_may_be_nothing() -> None:
    assert samples_of(merge_metrics({0: "", 1: ""})).keys() == {ANSWERS}


def on_standby(lag_records: int | None, lag_s: float | None) -> str:
    return standby_metrics(
        3,
        lag_records=lag_records,
        lag_s=lag_s,
        unseen_nodes=1,
        clock_differs=False,
        has_replica=True,
    )


def test_a_standby_shows_how_far_it_is() -> None:
    shown = samples_of(on_standby(7, 0.5))
    values = {name: samples[0][2] for name, samples in shown.items()}
    assert values == {
        "delayserver_standby_lag_records": "7",
        "delayserver_standby_lag_seconds": "0.5",
        "delayserver_unseen_nodes": "1",
        "delayserver_standby_clock_differs": "0",
        "delayserver_standby_has_replica": "1",
    }
    assert {samples[0][1]["shard"] for samples in shown.values()} == {"3"}
    without = samples_of(on_standby(None, None))
    lags = [without[f"delayserver_standby_lag_{one}"][0][2] for one in ("records", "seconds")]
    assert lags == ["nan", "nan"]
