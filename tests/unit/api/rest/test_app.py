"""Every call that changes something is answered when the change is durable, and not before."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from delayserver.shards.peers import PeerAnswer, PeerCall
from tests.unit.shards.shards import JSON_TYPE, RealShards, document_answer

KEY = "/v1/subjects/orders/keys/k"
HOOK = {"subject": "hooked", "type": "pull"}
NIGHTLY = {"subject": "nightly", "cron": "0 3 * * *"}
BEAT = {"timeout": "1h", "subject": "lost"}
MESSAGE = {"subject": "orders", "delay": "1h"}
TOPIC = {"type": "kafka", "bootstrap": "127.0.0.1:9", "topic": "t", "subject": "orders"}
CALLS: list[tuple[str, str, Any]] = [
    ("POST", "/v1/messages", MESSAGE),
    ("POST", "/v1/messages/batch", [MESSAGE, MESSAGE]),
    ("POST", "/v1/messages/cancel", {"keys": [{"subject": "orders", "key": "k"}]}),
    ("PUT", KEY, {"delay": "2h"}),
    ("PUT", f"{KEY}2", {"delay": "2h"}),
    ("PATCH", KEY, {"delay": "2h"}),
    ("DELETE", KEY, None),
    ("POST", "/v1/events/paid", None),
    ("PUT", "/v1/heartbeats/b", BEAT | {"timeout": "2h"}),
    ("DELETE", "/v1/heartbeats/b", None),
    ("PUT", "/v1/schedules/s", NIGHTLY | {"cron": "0 4 * * *"}),
    ("POST", "/v1/schedules/s/pause", None),
    ("POST", "/v1/schedules/s/trigger", None),
    ("DELETE", "/v1/schedules/s", None),
    ("PUT", "/v1/subscriptions/h", HOOK | {"lease": "1m"}),
    ("POST", "/v1/subscriptions/h/pause", None),
    ("DELETE", "/v1/subscriptions/h", None),
    ("PUT", "/v1/sources/t", TOPIC | {"subject": "refunds"}),
    ("POST", "/v1/sources/t/pause", None),
    ("DELETE", "/v1/sources/t", None),
]


class SlowDisk:
    """Holds up what is to be written to the message log."""

    def __init__(self, shards: RealShards, patch: pytest.MonkeyPatch) -> None:
        (server,) = shards.servers
        self.is_asked, self.may_write = threading.Event(), threading.Event()
        append = server.message_log.append

        def append_later(*record: Any, **about: Any) -> None:
            self.is_asked.set()
            assert self.may_write.wait(60)
            append(*record, **about)

        patch.setattr(server.message_log, "append", append_later)
        patch.setattr(server, "is_quick", lambda: False)  # in a thread, not on the event loop


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealShards]:
    made = RealShards(tmp_path_factory.mktemp("server"), 1)
    yield made
    made.close()


@pytest.fixture
def shards(server: RealShards) -> RealShards:
    """One shard, which has something for each call."""
    for method, path, document in (
        ("PUT", KEY, {"delay": "1h", "body": 1}),
        ("POST", "/v1/messages", MESSAGE | {"watch": ["paid"]}),
        ("PUT", "/v1/heartbeats/b", BEAT),
        ("PUT", "/v1/schedules/s", NIGHTLY),
        ("PUT", "/v1/subscriptions/h", HOOK),
        ("PUT", "/v1/sources/t", TOPIC),
    ):
        assert server.ask(method, path, document, direct=True).status < 300
    return server


@pytest.mark.parametrize(("method", "path", "document"), CALLS)
def test_a_change_is_answered_when_it_is_durable(
    shards: RealShards, monkeypatch: pytest.MonkeyPatch, method: str, path: str, document: Any
) -> None:
    disk = SlowDisk(shards, monkeypatch)
    body = b"" if document is None else document_answer(document).body
    call = PeerCall(method, path, headers=JSON_TYPE if body else (), body=body)

    async def ask() -> PeerAnswer:
        asked = asyncio.ensure_future(shards.answer(0, call))
        assert await asyncio.to_thread(disk.is_asked.wait, 60)
        for _ in range(100):
            await asyncio.sleep(0)
        is_early = asked.done()
        disk.may_write.set()
        answer = await asked
        assert not is_early, answer
        return answer

    assert shards.run(ask()).status < 300
