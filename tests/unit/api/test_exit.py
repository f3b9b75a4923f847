"""The exit: no answer about a shard leaves a process that may have lost it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from delayserver.api import exit as exit_module
from delayserver.api.exit import Exit, speaks_of_shard
from delayserver.api.hot.answers import Answer, problem_answer, wire_of
from delayserver.api.scopes import RULES
from delayserver.config import Settings
from delayserver.errors import NotFoundError, OverloadedError
from delayserver.serve.app import make_app
from delayserver.shards.local import ask_app
from delayserver.shards.peers import PeerAnswer, PeerCall
from delayserver.shards.place import ShardPlace
from tests.world.server import Observer, SimulatedClock, SimulatedServer
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.files import SimulatedFiles

SAYS_NOTHING_OF_THE_SHARD = {
    ("GET", "/healthz"),
    ("GET", "/metrics"),
    ("GET", "/readyz"),
    ("GET", "/v1/cluster"),
}
"""How the process is, and who owns which shard in which epoch."""
ROUTES = sorted(RULES.keys() - SAYS_NOTHING_OF_THE_SHARD)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(exit_module, "PATIENCE_S", 0)
    yield


def test_the_exit_knows_every_call() -> None:
    quiet = {(method, path) for method, path in RULES if not speaks_of_shard(path)}
    assert quiet == SAYS_NOTHING_OF_THE_SHARD
    assert speaks_of_shard("/internal/pull")


def test_what_may_be_old_is_replaced_and_says_so() -> None:
    answer = wire_of(Answer(404, b"{}"))
    assert Exit(lambda: True, 3).wire(answer) == answer
    told = Exit(lambda: False, 3).wire(answer)
    head, _, body = told.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1" in head
    document = json.loads(body)
    assert (document["outcome"], document["status"]) == ("unknown", 503)
    assert "shard 3" in document["detail"]


def test_a_refusal_that_says_nothing_of_the_shard_leaves() -> None:
    refusal = wire_of(problem_answer(OverloadedError("too much")))
    assert Exit(lambda: False, 0).wire(refusal) == refusal


def test_it_waits_for_the_next_beat() -> None:
    looks = iter([False, False, True])

    async def run() -> bool:
        return await Exit(lambda: next(looks), 0).opens()

    assert asyncio.run(run())
    assert next(looks, None) is None


def test_it_does_not_wait_for_ever(impatient: None) -> None:
    assert not asyncio.run(Exit(lambda: False, 0).opens())


def make_server() -> SimulatedServer:
    rng = random.Random(1)
    settings = Settings(disk_reserve_bytes=0)
    parts = settings, SimulatedFiles("exit"), MemoryCatalog(), SimulatedClock(), rng, Observer()
    return SimulatedServer(*parts)


class NoBackups:
    """There is no directory of backups."""

    def __getattr__(self, name: str) -> Any:
        async def missing(*arguments: object, **named: object) -> None:
            raise NotFoundError("there is no backup")

        return missing


def call_of(method: str, path: str) -> PeerCall:
    for name, value in {
        "{message_id}": "0" * 32,
        "{hour}": "2026-11-27T10",
    }.items():
        path = path.replace(name, value)
    path = path.replace("{", "").replace("}", "")
    body = b"" if method in ("GET", "DELETE") else b"{}"
    fields = ((b"host", b"localhost"), (b"content-type", b"application/json"))
    return PeerCall(method, path, b"", fields, body)


def test_no_call_is_answered_by_a_process_without_a_lease(impatient: None) -> None:
    """Each call of the API, whichever way it goes in the process: a new one is among them."""
    server = make_server()
    holds = True
    server.may_answer = lambda: holds
    server.calls.may_answer = server.may_answer
    server.calls._backups = NoBackups()  # type: ignore[assignment]
    app = make_app(server.calls, ShardPlace.alone(server.settings.data_dir)).asgi

    async def ask(method: str, path: str) -> PeerAnswer:
        asked = asyncio.ensure_future(ask_app(app, call_of(method, path)))
        while not asked.done():
            server.rest()
            await asyncio.sleep(0.001)  # Some are answered by a thread, which no clock moves.
        return await asked

    async def run() -> dict[tuple[str, str], tuple[int, Any]]:
        nonlocal holds
        await ask("GET", "/v1/stats")  # FastAPI is made.
        answered = {}
        for route in ROUTES:
            holds = True
            status = (await ask(*route)).status
            assert status < 500, (route, status)
            holds = False
            answer = await ask(*route)
            answered[route] = answer.status, json.loads(answer.body).get("outcome")
        return answered

    answers = asyncio.run(run())
    assert {one: answer for one, answer in answers.items() if answer != (503, "unknown")} == {}
