"""Limits that hold for all processes together: places and rates of webhooks, rates of tokens."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from delayserver.records.message_id import read_id
from tests.integration.api_support import Receiver, make_token
from tests.integration.supervised import COUNT, Supervised
from tests.waiting import wait_until

MESSAGES = 90
LATE_S = 0.2
"""How much later a delivery may be seen than it was sent, on a machine that is busy."""


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Supervised]:
    one = Supervised(tmp_path)
    one.data_dir.mkdir()
    yield one
    one.end()


def subscribe(supervised: Supervised, url: str, **more: Any) -> None:
    definition = {"subject": "a", "type": "webhook", "url": url, **more}
    path = "/v1/subscriptions/hook"
    wait_until(lambda: supervised.client.put(path, json=definition).status_code == 201)


def publish(supervised: Supervised, count: int = MESSAGES) -> None:
    """Due at once, in all shards."""
    batch = [{"subject": "a", "key": f"{n}", "delay": "300ms"} for n in range(count)]
    answer = supervised.client.post("/v1/messages/batch", json=batch)
    assert answer.status_code == 200, answer.text
    shards = Counter(read_id(one).shard for one in answer.json()["ids"])
    assert len(shards) == COUNT


def test_no_more_are_out_at_once_than_one_server_would_send(
    supervised: Supervised, receiver: Receiver
) -> None:
    supervised.start()
    url = receiver.hook(takes_s=0.01)
    subscribe(supervised, url, max_in_flight=2)
    publish(supervised)
    wait_until(lambda: receiver.count(url) == MESSAGES)
    assert receiver.most_busy(url) == 2


def test_a_shard_that_is_killed_does_not_loosen_a_limit(
    supervised: Supervised, receiver: Receiver
) -> None:
    """Whichever it is, the home of the subscription among them. What was at work for it when it
    was killed is sent again."""
    supervised.start()
    url = receiver.hook(takes_s=0.02)
    subscribe(supervised, url, max_in_flight=3)
    publish(supervised, 300)
    for pid in supervised.shards:
        wait_until(partial(_has_seen, receiver, url, receiver.count(url) + 20))
        os.kill(pid, signal.SIGKILL)
    keys: set[str] = set()
    while len(keys) < 300:
        keys.add(receiver.next(url).headers["delay-key"])
    assert receiver.most_busy(url) <= 3


def test_a_rate_is_that_of_all_processes(supervised: Supervised, receiver: Receiver) -> None:
    supervised.start()
    url = receiver.hook()
    rate_per_s, burst = 20, 5
    subscribe(supervised, url, rate={"per_second": rate_per_s, "burst": burst})
    publish(supervised)
    seen_ms = [receiver.next(url).at_ms for _ in range(MESSAGES)]
    for number, at_ms in enumerate(seen_ms, 1):
        for before, since_ms in enumerate(seen_ms[:number]):
            allowed = burst + rate_per_s * ((at_ms - since_ms) / 1000 + LATE_S)
            assert number - before <= allowed
    # It is used, too: by whoever has something to send.
    assert seen_ms[-1] - seen_ms[0] < 1.5 * 1000 * (MESSAGES - burst) / rate_per_s


def test_a_token_is_let_in_as_often_as_by_one_process(supervised: Supervised) -> None:
    rate_per_s, burst, seconds = 40.0, 10, 4.0
    options = {"rate_per_s": rate_per_s, "burst": burst}
    token = make_token(supervised.data_dir, "shop", "publish:a", **options)
    supervised.start()
    # Enough connections for each process to get some.
    clients = [
        httpx.Client(
            base_url=f"http://127.0.0.1:{supervised.port}",
            headers={"authorization": f"Bearer {token}"},
            timeout=30,
        )
        for _ in range(12)
    ]
    statuses: Counter[int] = Counter()
    began_s = time.monotonic()
    while (passed_s := time.monotonic() - began_s) < seconds:
        for client in clients:
            answer = client.post("/v1/messages", json={"subject": "a", "delay": "1h"})
            statuses[answer.status_code] += 1
    for client in clients:
        client.close()
    assert set(statuses) == {201, 429}, statuses
    # Each process has its burst before it hears of the others, which is paid back in time.
    allowed = burst + rate_per_s * (passed_s + LATE_S)
    offered = statuses.total()  # a busy machine may not ask for more than is allowed
    # Processes that are short of processor time tell each other late what they want: 0.56 was seen.
    assert 0.4 * min(allowed, offered) < statuses[201] < allowed + COUNT * 5, (statuses, passed_s)


def _has_seen(receiver: Receiver, url: str, count: int) -> bool:
    return receiver.count(url) > count
