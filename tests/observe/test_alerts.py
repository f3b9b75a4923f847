"""The alerts as they are shipped: each fires when it is to and not before, by promtool's clock, and
names an entry of the runbook."""

import re
from pathlib import Path

import pytest

from tests.observe.rules import OUT_OF_REACH, ROOT, RULES, Case, alerts, judge, promtool
from tests.unit.test_docs import slug

OPERATIONS = ROOT / "docs/operations.md"
J = 'job="delayserver",instance="a"'
S = f'{J},subscription="shop"'
NOT_ALERTED = {
    "The server does not start": "nothing is there that could be scraped: DelayserverDown",
}
"""Entries of the runbook without an alert of their own, and why."""


def histogram(name: str, fast: str, slow: str) -> dict[str, str]:
    """A histogram of which everything is between two bounds."""
    series = {f'{name}_bucket{{{J},le="{fast}"}}': "0x60"}
    series |= {f'{name}_bucket{{{J},le="{bound}"}}': "0+10x60" for bound in (slow, "+Inf")}
    return series


def rates(name: str, label: str, good: str, bad: str, bad_of_100: int = 60) -> dict[str, str]:
    """Counters of which so many grow with a bad label."""
    labels = S if label != "status" or "requests" not in name else J
    return {
        f'{name}{{{labels},{label}="{good}"}}': f"0+{100 - bad_of_100}x60",
        f'{name}{{{labels},{label}="{bad}"}}': f"0+{bad_of_100}x60",
    }


AGE = f"delayserver_subscription_oldest_due_age_seconds{{{S}}}"
PAUSED = f"delayserver_subscription_paused{{{S},reason="
FREE, RESERVE = (f"delayserver_disk_{one}_bytes{{{J}}}" for one in ("free", "reserve"))
EPOCH = 'delayserver_office_epoch{job="delayserver",shard="1",instance='
ANSWERS = 'delayserver_shard_answers{job="delayserver",shard="1",instance='
REQUESTS, DEAD = "delayserver_requests_total", f"delayserver_subscription_dead_total{{{S}}}"
CASES = [
    Case("DelayserverUnwatched", {}, 4.5, 5.5),
    Case("DelayserverUnwatched", {'up{job="delayserver-orders"}': "1x60"}, 30, None),
    Case("DelayserverDown", {f"up{{{J}}}": "1x2 0x60"}, 2, 3),
    Case("DelayserverDown", {'up{job="other"}': "0x60"}, 30, None),
    # As two nodes see it, which have asked it one after the other.
    Case(
        "DelayserverShardAway", {f'{ANSWERS}"a"}}': "1 0x60", f'{ANSWERS}"b"}}': "1x9 0x60"}, 1, 2
    ),
    Case(
        "DelayserverRestarting",
        {f"process_start_time_seconds{{{J}}}": "100x4 200x4 300x60"},
        *(4.5, 5, 18),
    ),
    Case(
        "DelayserverDeliveriesLate",
        histogram("delayserver_delivery_lateness_seconds", "5", "30"),
        *(10, 11),
    ),
    Case(
        "DelayserverDeliveriesLate",
        histogram("delayserver_delivery_lateness_seconds", "0.1", "1"),
        *(25, None),
    ),
    Case("DelayserverCoreFull", {f"process_cpu_seconds_total{{{J}}}": "0+28x60"}, 15, 21),
    Case(
        "DelayserverLoopHeld",
        histogram("delayserver_loop_turn_seconds", "0.1", "0.25"),
        *(10, 11),
    ),
    Case(
        "DelayserverLoopHeld",
        histogram("delayserver_loop_turn_seconds", "0.005", "0.01"),
        *(25, None),
    ),
    Case("DelayserverSubscriptionBehind", {AGE: "0+30x60"}, 10, 11),
    Case("DelayserverSubscriptionBehind", {AGE: "0+30x60", PAUSED + '"asked"}': "1x60"}, 25, None),
    Case("DelayserverWebhooksWait", {f"delayserver_waiting_webhooks{{{J}}}": "0 5x60"}, 10, 11),
    Case("DelayserverSubscriptionPaused", {PAUSED + '"gone"}': "1x60"}, 0.5, 1),
    Case("DelayserverSubscriptionPaused", {PAUSED + '"failures"}': "1x60"}, 0.5, 1),
    Case("DelayserverSubscriptionPaused", {PAUSED + '"asked"}': "1x60"}, 25, None),
    Case("DelayserverUnmatched", {f"delayserver_unmatched_messages{{{J}}}": "0 3x60"}, 5, 6),
    Case("DelayserverDeadLetters", {DEAD: "0x4 1x60"}, 2, 3, 20),
    Case(
        "DelayserverReceiverFailing",
        rates("delayserver_webhook_answers_total", "status", "2xx", "none"),
        *(10, 11),
    ),
    Case(
        "DelayserverReceiverFailing",
        rates("delayserver_webhook_answers_total", "status", "2xx", "none", 40),
        *(25, None),
    ),
    Case(
        "DelayserverBrokerFailing",
        rates("delayserver_sink_results_total", "result", "confirmed", "failed"),
        *(10, 11),
    ),
    Case(
        "DelayserverNotUnderstood",
        {f'delayserver_definitions_not_understood{{kind="schedule",{J}}}': "0 1x60"},
        *(5, 6),
    ),
    Case("DelayserverSourcesFailing", {f"delayserver_sources_failing{{{J}}}": "0 1x60"}, 5, 6),
    Case(
        "DelayserverSourceRecordsSkipped",
        {f"delayserver_source_records_skipped_total{{{J}}}": "0x4 1x60"},
        *(2, 3, 20),
    ),
    Case(
        "DelayserverScheduleRunsSkipped",
        {f"delayserver_schedule_runs_skipped_total{{{J}}}": "0x4 1x160"},
        *(2, 3, 70),
    ),
    Case("DelayserverRefusing", rates(REQUESTS, "status", "201", "503", 6), 5, 6),
    Case("DelayserverRefusing", rates(REQUESTS, "status", "201", "503", 4), 25, None),
    Case("DelayserverErrors", {f'{REQUESTS}{{{J},status="500"}}': "0x4 1x60"}, 2, 3, 20),
    Case("DelayserverDamage", {f"delayserver_damage_total{{{J}}}": "0x4 1x60"}, 2, 3),
    Case("DelayserverCommitsSlow", histogram("delayserver_commit_seconds", "0.5", "1"), *(10, 11)),
    Case("DelayserverFilingBehind", {f"delayserver_replay_lag_seconds{{{J}}}": "0 31x60"}, 5, 6),
    Case(
        "DelayserverUnfiled",
        {
            f"delayserver_unfiled_bytes{{{J}}}": "0 51x60",
            f"delayserver_unfiled_max_bytes{{{J}}}": "100x60",
        },
        *(2, 3),
    ),
    Case("DelayserverDiskLow", {FREE: "199x90", RESERVE: "100x90"}, 29, 31),
    Case("DelayserverDiskLow", {FREE: "201x90", RESERVE: "100x90"}, 40, None),
    # At this pace it is full in 20 hours, and in 30.
    Case("DelayserverDiskLow", {FREE: "2400-1x99", RESERVE: "10x99"}, 29, 32),
    Case("DelayserverDiskLow", {FREE: "3600-1x99", RESERVE: "10x99"}, 45, None),
    Case("DelayserverDiskFull", {FREE: "101x4 99x60", RESERVE: "100x60"}, 2, 3),
    Case(
        "DelayserverArchiveWaiting",
        {f"delayserver_archive_waiting_hours{{{J}}}": "0 25x150"},
        *(60, 61),
    ),
    Case(
        "DelayserverBackupsFail",
        {f"delayserver_backups_failed_total{{{J}}}": "0x4 1x160"},
        *(2, 3, 70),
    ),
    Case(
        "DelayserverBackupLogBehind",
        {f"delayserver_backup_log_reach_timestamp_seconds{{{J}}}": "1x60"},
        *(10, 12),
    ),
    Case(
        "DelayserverBackupLogBehind",
        {f"delayserver_backup_log_reach_timestamp_seconds{{{J}}}": "0x60"},
        *(30, None),
    ),
    Case("DelayserverMemory", {f"process_resident_memory_bytes{{{J}}}": "3e9x60"}, 14, 15),
    Case(
        "DelayserverDescriptors",
        {f"process_open_fds{{{J}}}": "91x60", f"process_max_fds{{{J}}}": "100x60"},
        *(4, 5),
    ),
    Case("DelayserverNoLease", {f'delayserver_office_lease{{{J},shard="1"}}': "1 0x60"}, 0.5, 1),
    # Each node has been the owner for a while.
    Case(
        "DelayserverOwnersChange",
        {f'{EPOCH}"a"}}': "1x2 _x2 3x2 _x2 5x60", f'{EPOCH}"b"}}': "_x3 2x2 _x2 4x2"},
        *(1, 6, 40),
    ),
    Case(
        "DelayserverStandbyBehind",
        {f'delayserver_standby_lag_seconds{{{J},shard="1"}}': "0+30x60"},
        *(2, 3),
    ),
    Case(
        "DelayserverStandbyClockDiffers",
        {f'delayserver_standby_clock_differs{{{J},shard="1"}}': "0 1x60"},
        *(1, 2),
    ),
    Case("DelayserverNodesUnseen", {f'delayserver_unseen_nodes{{{J},shard="1"}}': "0 1x60"}, 1, 2),
]


def test_promtool_takes_the_rules() -> None:
    assert promtool("check", "rules", str(RULES)) == ""


def test_each_fires_when_it_is_to_and_not_before(tmp_path: Path) -> None:
    assert {case.alert for case in CASES if case.fires is not None} == {*alerts()}
    assert judge(tmp_path, CASES) == ""


@pytest.mark.parametrize("alert", ["DelayserverDown", "DelayserverMemory"])
def test_a_rule_that_does_not_fire_is_noticed(alert: str, tmp_path: Path) -> None:
    found = judge(tmp_path, [Case(alert, {f"up{{{J}}}": "1x60"}, 1, 20)])
    assert "FAILED" in found and alert in found


def test_each_says_how_bad_it_is_and_what_to_do() -> None:
    text = OPERATIONS.read_text("utf-8")
    runbook = text[text.index("\n## Runbook\n") :]
    entries = re.findall(r"^### (.+)$", runbook[: runbook.index("\n## ", 1)], re.MULTILINE)
    named = set()
    for name, rule in alerts().items():
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), name
        notes = rule["annotations"]
        assert {*notes} == {"summary", "description", "runbook_url"}, name
        document, _, anchor = notes["runbook_url"].partition("#")
        assert document == "docs/operations.md", name
        found = [entry for entry in entries if slug(entry) == anchor]
        assert len(found) == 1, (name, anchor)
        named.add(found[0])
    assert {*entries} - named == {*NOT_ALERTED}


def test_the_table_of_alerts_is_that_of_the_rules() -> None:
    text = OPERATIONS.read_text("utf-8")
    rows = re.findall(r"^\| `(Delayserver\w+)` \| (\w+) \|", text, re.MULTILINE)
    assert rows == [(name, rule["labels"]["severity"]) for name, rule in alerts().items()]
    assert {*OUT_OF_REACH} <= {*alerts()}
