"""Two of three brokers are lost: nobody is answered before what was said is kept."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import urllib.error
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from pathlib import Path

import pytest

from storage.replicated.kafka_settings import ClusterUrl
from tests.cluster.brokers import Brokers
from tests.cluster.nodes import NodeProcess, running, until
from tests.observe.rules import fires

LOST = (1, 2)
BUSY_MAX = 0.2
"""A process that only waits takes less of a core. It took 0.7 when an admin client asked for the
ends of logs whose leaders are away."""
LOOK_S = 3.0
MESSAGE = {"subject": "order.late", "body": 1, "delay": "1h"}


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def shares_of(node: NodeProcess) -> list[float]:
    """How much of a core each process of a node uses."""
    pids = [node.pid, *node.children()]
    before, began_s = [processor_s(pid) for pid in pids], time.monotonic()
    time.sleep(LOOK_S)  # A rate needs a time.
    passed_s = time.monotonic() - began_s
    return [(processor_s(pid) - was) / passed_s for pid, was in zip(pids, before, strict=True)]


def refusal(node: NodeProcess, method: str, path: str, body: object = None) -> str | None:
    """The Retry-After of a 503; None: it was answered."""
    try:
        node.call_once(method, path, body)
    except urllib.error.HTTPError as error:
        with error:
            assert error.code == HTTPStatus.SERVICE_UNAVAILABLE
            return error.headers["retry-after"]
    return None


@pytest.fixture(autouse=True)
def all_brokers(brokers: Brokers) -> Iterator[None]:
    """Behind a failure, too: other tests have the same ones."""
    yield
    _revive(brokers, LOST)


def _revive(brokers: Brokers, lost: Sequence[int]) -> None:
    """One that is down answers when the other does."""
    back = [threading.Thread(target=brokers.revive, args=(number,)) for number in lost]
    for one in back:
        one.start()
    for one in back:
        one.join()


def test_two_of_three_brokers_are_lost(brokers: Brokers, url: ClusterUrl, tmp_path: Path) -> None:
    node = NodeProcess("n1", url, tmp_path)
    with running(node):
        kept = [node.publish(f"{number}") for number in range(10)]
        waiting: list[object] = []

        def publish() -> None:
            while not waiting:
                with contextlib.suppress(TimeoutError):
                    waiting.append(node.call("POST", "/v1/messages", MESSAGE | {"key": "waits"}))

        for number in LOST:
            brokers.kill(number)
        # What is under way waits, and what comes two seconds behind it is refused.
        first = threading.Thread(target=publish, daemon=True)
        first.start()
        until(lambda: refusal(node, "GET", "/readyz"), "not ready")
        assert refusal(node, "POST", "/v1/messages", MESSAGE)
        assert not waiting, "nobody was answered"
        # A node that waits for brokers leaves the processor to them: they need it to come back.
        assert all(share < BUSY_MAX for share in shares_of(node)), shares_of(node)
        until(lambda: "delayserver_office_lease 0" in node.text("/metrics"), "the lease is over")
        assert fires(tmp_path, "DelayserverNoLease", node.text("/metrics")) == ""
        # It might be another's by then, who has cancelled it.
        assert refusal(node, "GET", f"/v1/messages/{kept[0]}")

        _revive(brokers, LOST)
        until(lambda: refusal(node, "GET", "/readyz") is None, "ready again")
        first.join()
        assert len(waiting) == 1
        assert [node.call("GET", f"/v1/messages/{one}")["id"] for one in kept] == kept
