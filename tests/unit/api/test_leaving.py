"""An answer through ASGI asks the exit, piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from delayserver.api import exit as exit_module
from delayserver.api.exit import Exit
from delayserver.api.leaving import CutOffError, Leaving

START = {"type": "http.response.start", "status": 200, "headers": []}


def piece(body: bytes, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


class Asked:
    """One call whose answer comes in pieces; the lease is over before those in `over_at`."""

    def __init__(self, path: str, *over_at: int) -> None:
        self.sent: list[MutableMapping[str, Any]] = []
        self.number = -1
        self.over_at = over_at
        leaving = Leaving(Exit(lambda: self.number not in self.over_at, 0), self.app)
        scope = {"type": "http", "path": path}
        self.error: Exception | None = None
        try:
            asyncio.run(leaving(scope, self.receive, self.send))
        except CutOffError as error:
            self.error = error

    async def receive(self) -> MutableMapping[str, Any]:
        raise AssertionError("no body is read")

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.sent.append(message)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        for message in (START, piece(b"a", True), piece(b"b", True), piece(b"c", False)):
            self.number += 1
            await send(message)

    @property
    def statuses(self) -> list[int]:
        return [one["status"] for one in self.sent if "status" in one]

    @property
    def body(self) -> bytes:
        return b"".join(one.get("body", b"") for one in self.sent)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exit_module, "PATIENCE_S", 0)


def test_an_answer_leaves_whole() -> None:
    asked = Asked("/v1/stats")
    assert (asked.statuses, asked.body, asked.error) == ([200], b"abc", None)


def test_an_answer_that_may_be_old_is_refused_and_nothing_of_it_leaves() -> None:
    asked = Asked("/v1/stats", 0)
    assert asked.statuses == [503]
    assert b"unknown" in asked.body and not asked.body.endswith(b"c")
    assert asked.error is None


def test_a_long_answer_ends_in_the_middle() -> None:
    asked = Asked("/v1/stats", 2)
    assert (asked.statuses, asked.body) == ([200], b"a")
    assert asked.error is not None


def test_how_the_process_is_may_always_be_said() -> None:
    assert Asked("/metrics", 0, 1, 2, 3).statuses == [200]
