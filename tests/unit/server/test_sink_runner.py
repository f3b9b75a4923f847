"""Attempts: an error in the client of a receiver ends one of them, and nothing else."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from delayserver.delivery.sink import Confirmed, Failed, MayBegin, ResultCallback
from delayserver.records.message import DueDelivery
from delayserver.records.subscriptions import Subscription
from delayserver.server.server import Server
from tests.unit.fakes import subscription
from tests.unit.server.ended import outcome


class BrokenSink:
    """The client of a receiver that does what its author never thought of."""

    def __init__(self, does: str) -> None:
        self.does = does

    async def deliver(
        self,
        subscription: Subscription,
        deliveries: list[DueDelivery],
        may_begin: MayBegin,
        told: ResultCallback,
    ) -> None:
        if self.does == "tells of one":
            told(deliveries[:1], Confirmed())
        if self.does != "says nothing":
            raise KeyError("\udcff" * 5000)

    def on_subscription(self, subscription: Subscription) -> None:
        raise AttributeError("no such thing")

    async def close(self) -> None: ...


@pytest.mark.parametrize(
    ("does", "failed"), [("raises", 2), ("tells of one", 1), ("says nothing", 2)]
)
def test_an_error_in_the_client_of_a_receiver_ends_one_attempt(
    does: str, failed: int, tmp_path: Path
) -> None:
    told: list[tuple[int, object]] = []

    def break_it(server: Server, patch: pytest.MonkeyPatch) -> None:
        server.sinks._sinks["webhook"] = BrokenSink(does)
        hook = msgspec.structs.replace(subscription(), type="webhook")
        server.sinks.on_defined(hook)
        patch.setattr(
            server.sinks, "_on_result", lambda _, at, some, result: told.append((len(some), result))
        )
        deliveries: Any = [object(), object()]

        async def attempt() -> None:
            await server.sinks._send(hook, deliveries)

        task = asyncio.get_running_loop().create_task(attempt())
        server.sinks._sending.add(task)
        task.add_done_callback(server.sinks._sent)
        task.add_done_callback(lambda _: server.begin_stop())

    assert outcome(tmp_path, break_it, wait_s=0.5) is None
    assert sum(count for count, _ in told) == 2
    count, result = told[-1]
    assert count == failed and isinstance(result, Failed)
    assert result.reason.encode() and len(result.reason) <= 1000
