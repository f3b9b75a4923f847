"""The dashboards as files: Grafana takes them wherever Prometheus is, and each panel says what it
shows. That their queries return data is for test_prometheus.py."""

import re
from itertools import combinations
from typing import Any

import pytest

from tests.observe.dashboards import dashboards, panels
from tests.observe.rules import ROOT

NAMES = [*dashboards()]
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
NOT_SHOWN = {
    "watched_pulls": "of who looks for a leak",
    "timeouts": "the same",
    "imports_total": "a bulk load tells itself how far it is",
    "archive_waiting_bytes": "archive_waiting_hours is what grows",
    "backup_last_bytes": "that of the directory, nearly",
    "backup_log_breaks_total": "backup_log_reach_timestamp_seconds stands still from then on",
    "commits_total": "group_records counts them",
    "log_lines_lost_total": "the log itself says how many, as soon as it can be written again",
    "certificate_renewals_refused_total": "the log says why",
    "certificate_end_timestamp_seconds": "it changes once in months",
    "loop_turn_seconds": "its alert tells what is too long",
    "definitions_not_understood": "its alert names the kind, and the lists the definitions",
    "attempts_broken_total": "a mistake of ours or of a client library, which the log tells",
    "clock_set_ahead_total": "the log says by how much",
    "clock_set_back_total": "the same",
    **dict.fromkeys(
        (
            "deadlines",
            "gathered_bytes",
            "group_bytes",
            "held_bytes",
            "receiving_bytes",
            "subjects",
            "unread_bytes",
            "waiting_slices",
            "broker_bodies_bytes",
            "broker_bodies_max_bytes",
            "broker_client_bytes",
            "broker_connections",
            "broker_channels",
            "broker_waiting_messages",
        ),
        "of who meets a limit, and looks into the table of limits",
    ),
    **dict.fromkeys(
        (
            "broker_apart_total",
            "broker_duplicates_total",
            "broker_unknown_total",
            "brokers_away",
            "brokers_blocked",
        ),
        "of who asks why a broker is slow: failed deliveries are shown by subscription",
    ),
}
"""Metrics of the table without a panel, and why."""


@pytest.fixture(params=NAMES)
def dashboard(request: pytest.FixtureRequest) -> Any:
    return dashboards()[request.param]


def test_there_are_three() -> None:
    assert NAMES == ["cluster.json", "overview.json", "subscriptions.json"]
    uids = [one["uid"] for one in dashboards().values()]
    assert len({*uids}) == 3 and all(uid.startswith("delayserver-") for uid in uids)


def test_it_asks_whichever_prometheus_is_chosen(dashboard: Any) -> None:
    # That of Grafana 10.0: newer ones carry it over, an older one would not know it.
    assert dashboard["schemaVersion"] == 38
    assert dashboard["title"] and dashboard["description"] and dashboard["tags"] == ["delayserver"]
    variables = {one["name"]: one for one in dashboard["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert {one["query"] for one in variables.values() if one["type"] == "datasource"} == {
        "prometheus"
    }
    asked = [one for one in variables.values() if one["type"] == "query"]
    asked += dashboard["annotations"]["list"]
    for panel in panels(dashboard):
        asked += [panel, *panel["targets"]]
    assert all(one["datasource"] == SOURCE for one in asked)


def test_each_panel_says_what_it_shows(dashboard: Any) -> None:
    for panel in panels(dashboard):
        defaults = panel["fieldConfig"]["defaults"]
        assert panel["title"] and panel["description"].endswith("."), panel["title"]
        assert defaults["unit"] and defaults["thresholds"]["steps"], panel["title"]
        legends = [target["legendFormat"] for target in panel["targets"]]
        assert len(legends) == len({*legends}), panel["title"]
        for target in panel["targets"]:
            assert 'job=~"$job"' in target["expr"], panel["title"]
            assert "[$__rate_interval]" in target["expr"] or "rate(" not in target["expr"]
    titles = [panel["title"] for panel in panels(dashboard) if panel["type"] == "timeseries"]
    assert len(titles) == len({*titles})


def test_no_panel_stands_on_another(dashboard: Any) -> None:
    ids = [one["id"] for one in dashboard["panels"]]
    assert len(ids) == len({*ids})
    places = [one["gridPos"] for one in dashboard["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for a, b in combinations(places, 2):
        is_beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        is_below = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert is_beside or is_below, (a, b)


def test_each_metric_has_a_panel_or_a_reason() -> None:
    table = (ROOT / "docs/operations.md").read_text("utf-8")
    rows = re.findall(r"^\| (`delayserver_.+?) \|", table, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`delayserver_(\w+)`", row)}
    shown = {
        name
        for one in dashboards().values()
        for panel in panels(one)
        for target in panel["targets"]
        for name in re.findall(r"delayserver_(\w+?)(?:_bucket|_sum|_count)?\{", target["expr"])
    }
    assert len(named) > 50
    assert named - shown == {*NOT_SHOWN}
