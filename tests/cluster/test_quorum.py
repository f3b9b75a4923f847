"""Two of three brokers are lost: nobody is answered before what was said is kept."""

from __future__ import annotations

import contextlib
import threading
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
MESSAGE = {"subject": "order.late", "body": 1, "delay": "1h"}


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
        until(lambda: "delayserver_office_lease 0" in node.text("/metrics"), "the lease is over")
        assert fires(tmp_path, "DelayserverNoLease", node.text("/metrics")) == ""
        # It might be another's by then, who has cancelled it.
        assert refusal(node, "GET", f"/v1/messages/{kept[0]}")

        _revive(brokers, LOST)
        until(lambda: refusal(node, "GET", "/readyz") is None, "ready again")
        first.join()
        assert len(waiting) == 1
        assert [node.call("GET", f"/v1/messages/{one}")["id"] for one in kept] == kept
