"""A real Prometheus looks at a real server that is made to misbehave, and at what a node of a
cluster shows: each alert fires in it, with its texts filled in, and each query of a dashboard
returns data.

One server and one Prometheus, in the order of one bad day; each part says which alerts it is for,
and at the end none may be left. The rules are shortened as `rules.shortened` says; that they fire
at their time is for test_alerts.py."""

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.api_support import ApiServer, Receiver, now_ms
from tests.observe.dashboards import queries
from tests.observe.prometheus import Node, Prometheus
from tests.observe.rules import OUT_OF_REACH, alerts
from tests.soak.weather import CHILD
from tests.waiting import Looks, wait_until

HOUR_MS = 3_600_000
SMALL = 1_000_000
"""Bytes that may wait to be filed, and are a checkpoint."""
AT_ONCE_S = 2.0
IN_CLUSTER = {
    *("DelayserverShardAway", "DelayserverNoLease", "DelayserverOwnersChange"),
    *("DelayserverStandbyBehind", "DelayserverStandbyClockDiffers", "DelayserverNodesUnseen"),
    *("DelayserverSourceRecordsSkipped", "DelayserverNotUnderstood"),
}


class Day:
    """A server, what is done to it, and what Prometheus makes of it."""

    def __init__(self, directory: Path, prometheus: Prometheus, receiver: Receiver) -> None:
        self.prometheus = prometheus
        self.receiver = receiver
        self.api = ApiServer(directory)
        self.backups = directory / "backups"
        self._control = directory / "control"
        self._offset_ms = 0
        self.seen: dict[str, dict[str, Any]] = {}
        """Alerts that have fired, by name, as the first of them did."""
        self.empty = [*queries()]
        """Queries of panels that have returned nothing so far."""

    def start(self, **settings: object) -> None:
        """Start the server, again if it was there; its clock goes on."""
        self._control.unlink(missing_ok=True)
        self.api.process.program = (str(CHILD), str(self._control), str(self._offset_ms))
        self.api.start(**settings)

    def order(self, **order: object) -> None:
        """Have the surroundings of the server change (tests.soak.child)."""
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(self._control))
            client.sendall(json.dumps(order).encode() + b"\n")
            assert client.recv(100)

    def later(self, hours: int) -> None:
        """Set the clock forward."""
        self._offset_ms += hours * HOUR_MS
        self.order(clock_ms=self._offset_ms)

    def look(self) -> set[str]:
        """What fires now."""
        found = self.prometheus.firing()
        for name, fired in found.items():
            self.seen.setdefault(name, fired[0])
        return {*found}

    def look_at_panels(self) -> None:
        """Ask what all panels ask that have shown nothing so far."""
        self.empty = [one for one in self.empty if not self.prometheus.values(one.expression)]

    def until_fires(self, *names: str, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Wait for alerts, each of which may fire at any time from now on."""
        missing = {*names}

        def all_have() -> bool:
            meanwhile()
            missing.difference_update(self.look())
            return not missing

        try:
            wait_until(all_have)
        except AssertionError:
            pytest.fail(f"{sorted(missing)} did not fire\n{self.api.log[-3000:]}", pytrace=False)


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Day]:
    receiver = Receiver()
    with Prometheus(tmp_path_factory.mktemp("prometheus")) as prometheus:
        one = Day(tmp_path_factory.mktemp("server"), prometheus, receiver)
        yield one
        one.api.shut_down()
    receiver.close()


def test_nothing_is_scraped(day: Day) -> None:
    day.until_fires("DelayserverUnwatched")


def test_a_server_that_is_well_fires_nothing(day: Day) -> None:
    day.start(
        **{"archive": True, "checkpoint_ms": 200, "webhook_connections_max": 3},
        **{
            "backup_dir": day.backups,
            "backup_log_ms": 200,
            "unfiled_max_bytes": SMALL,
            "checkpoint_bytes": SMALL,
            "group_max_bytes": SMALL,
        },
    )
    day.prometheus.scrape({"delayserver": day.api.process.port})
    # What has a level that a test can reach fires, which shows that the server is looked at.
    day.until_fires(
        *("DelayserverMemory", "DelayserverCoreFull", "DelayserverLoopHeld"),
        "DelayserverDescriptors",
    )
    wait_until(lambda: day.look() <= {*OUT_OF_REACH})
    for _ in Looks(AT_ONCE_S, 0.1):
        assert day.look() <= {*OUT_OF_REACH} - {"DelayserverRestarting"}


def test_no_room_for_the_log_behind_a_backup(day: Day) -> None:
    """Before the clock is set forward: until when the log reaches is told by that."""
    day.order(fault="full", where="_log", s=60, wait_s=0)
    day.api.ask("POST", "/v1/backups", 202, json={"name": "first"})
    wait_until(lambda: day.api.get("/v1/backups/first").json()["state"] == "complete")
    day.api.publish("misspelt")
    day.until_fires("DelayserverBackupLogBehind")
    day.order(fault="full", where="_log", s=0, wait_s=0)


def test_what_does_not_arrive(day: Day) -> None:
    api, receiver = day.api, day.receiver
    api.publish("misspelt")
    api.subscribe("dies", "dies", url=receiver.hook(500), retry={"max_attempts": 1})
    api.subscribe("gone", "gone", url=receiver.hook(410))
    api.publish("gone")
    redis = {"type": "redis", "url": "redis://127.0.0.1:1", "stream": "due"}
    backoff = {"max_attempts": 100, "backoff": ["100ms"]}
    api.ask("PUT", "/v1/subscriptions/redis", 201, json={"subject": "r", **redis, "retry": backoff})
    source = {"type": "kafka", "bootstrap": "127.0.0.1:9", "topic": "t", "subject": "order"}
    api.ask("PUT", "/v1/sources/orders", 201, json=source)
    schedule = {"subject": "report", "body": 1, "every": "1s", "overlap": "skip"}
    api.ask("PUT", "/v1/schedules/report", 201, json=schedule)
    day.until_fires(
        *("DelayserverUnmatched", "DelayserverSubscriptionPaused", "DelayserverDeadLetters"),
        *("DelayserverReceiverFailing", "DelayserverBrokerFailing", "DelayserverSourcesFailing"),
        "DelayserverScheduleRunsSkipped",
        meanwhile=lambda: [api.publish(subject) for subject in ("dies", "r")],
    )
    day.look_at_panels()
    api.ask("DELETE", "/v1/sources/orders", 204)
    api.ask("DELETE", "/v1/schedules/report", 204)
    api.ask("DELETE", "/v1/subscriptions/redis", 204)


def test_receivers_that_hold_all_connections(day: Day) -> None:
    """And one that is delivered once more, and one that is cancelled."""
    hook = day.receiver.hook(gate=True)
    path = day.api.subscribe("slow", "slow", url=hook)
    ids = [day.api.publish("slow")["id"] for _ in range(4)]
    day.until_fires("DelayserverWebhooksWait")
    day.receiver.open(hook)
    wait_until(lambda: day.api.ask("GET", path)["in_flight"] == 0)
    day.api.recorded(ids[0])
    day.api.ask("POST", f"/v1/messages/{ids[0]}/replay")
    day.api.ask("DELETE", f"/v1/messages/{day.api.publish('slow', delay='1h')['id']}")


def test_what_is_late(day: Day) -> None:
    """And what is settled is not archived."""
    path = day.api.subscribe("late", "late")
    begin_ms = now_ms()
    batch = [{"subject": "late", "deliver_at": begin_ms + n * HOUR_MS} for n in range(1, 28)]
    day.api.ask("POST", "/v1/messages/batch", json=batch)
    day.later(30)
    day.until_fires("DelayserverSubscriptionBehind")
    day.api.pull_all(path, len(batch))
    day.until_fires("DelayserverDeliveriesLate", "DelayserverArchiveWaiting")
    day.look_at_panels()


def test_a_disk_that_is_slow(day: Day) -> None:
    """What is accepted waits to be filed, and then no more is accepted."""
    api = day.api
    day.order(fault="slow", where="messages", s=60, wait_s=0.6)
    day.until_fires("DelayserverCommitsSlow", meanwhile=lambda: api.publish("late", delay="1h"))
    day.order(fault="slow", where="schedule", s=60, wait_s=8)
    long = {"subject": "late", "delay": "1h", "body": "x" * (SMALL // 12)}

    def publish() -> int:
        return api.post("/v1/messages", json=long).status_code

    wait_until(lambda: publish() == 503)
    day.later(1)
    day.until_fires(
        *("DelayserverFilingBehind", "DelayserverUnfiled", "DelayserverRefusing"),
        meanwhile=publish,
    )
    day.order(fault="slow", where="schedule", s=0, wait_s=0)
    wait_until(lambda: publish() == 201)


def test_what_cannot_be_read(day: Day) -> None:
    """Neither by who looks it up nor by who delivers it."""
    day.api.subscribe("read", "read", url=day.receiver.hook())
    message = {"subject": "read", "delay": "1h", "body": "x" * 5000}
    kept = day.api.ask("POST", "/v1/messages?ack=filed", 201, json=message)["id"]
    day.order(fault="unreadable", where="schedule", s=60, wait_s=0)
    assert day.api.get(f"/v1/messages/{kept}").status_code == 500
    day.until_fires("DelayserverErrors")
    day.later(1)
    day.until_fires("DelayserverDamage")


def test_no_room_for_a_backup(day: Day) -> None:
    day.order(fault="full", where="nightly", s=60, wait_s=0)
    day.api.ask("POST", "/v1/backups", 202, json={"name": "nightly"})
    day.until_fires("DelayserverBackupsFail")


def test_it_is_started_again_with_little_room(day: Day) -> None:
    assert day.api.process.stop() == 0
    day.until_fires("DelayserverDown")
    day.start(disk_reserve_bytes=10**15)
    day.until_fires("DelayserverRestarting", "DelayserverDiskLow", "DelayserverDiskFull")
    assert day.api.post("/v1/messages", json={"subject": "late"}).status_code == 507


def test_a_cluster_in_which_little_is_well(day: Day) -> None:
    with Node() as node:
        day.prometheus.scrape({"delayserver-orders": node.port})
        day.until_fires(*IN_CLUSTER)
        day.look_at_panels()
        assert {day.seen[name]["labels"]["job"] for name in IN_CLUSTER} == {"delayserver-orders"}


def test_all_have_fired_and_say_what_they_mean(day: Day) -> None:
    assert {*day.seen} == {*alerts()}
    for name, fired in day.seen.items():
        for text in fired["annotations"].values():
            assert "error" not in text and "<no value>" not in text and "{{" not in text, name


def test_all_panels_have_shown_something(day: Day) -> None:
    assert len([*queries()]) > 70
    assert day.empty == []
