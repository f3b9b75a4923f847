"""The server as its event loop moves it: callbacks that fail, clock and stopwatch in a tick."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from delayserver.config import Settings
from delayserver.decisions.new_messages import NewMessage
from delayserver.delivery.delayed_fetch import Pulled, PullRequest
from delayserver.delivery.sink import Confirmed, Failed, MayBegin, Told
from delayserver.records.message import DueDelivery, Payload
from delayserver.records.subscriptions import Subscription
from delayserver.server.engine import LOOK_TURNS
from delayserver.server.server import Server
from storage.rows import HOUR_MS
from tests.unit.fakes import subscription
from tests.waiting import turns
from tests.world import SimulatedClock

LEASE_MS = 600_000


class Failing(Exception):
    """A mistake of ours."""


def fail(*arguments: object) -> None:
    raise Failing


def outcome(
    directory: Path, break_it: Callable[[Server, pytest.MonkeyPatch], object], wait_s: float = 5
) -> Any:
    """Returns the error that ends a running server after something of it was broken; None if it
    does not end within `wait_s`."""

    async def main() -> Any:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[BaseException] = loop.create_future()

        def fatal(error: BaseException) -> None:
            if not ended.done():
                ended.set_result(error)

        server = Server(Settings(data_dir=directory), fatal=fatal)
        await server.start()
        with pytest.MonkeyPatch.context() as patch:
            break_it(server, patch)
            await asyncio.wait([ended], timeout=wait_s)
        await server.stop()
        return ended.result() if ended.done() else None

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def tick(server: Server, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(server.engine, "advance", fail)
    server.tick_soon()


def alarm(server: Server, patch: pytest.MonkeyPatch) -> None:
    """The tick that comes by itself."""
    patch.setattr(server.engine, "advance", fail)


def posted_by_a_thread(server: Server, patch: pytest.MonkeyPatch) -> None:
    server.post(fail, 1)


def call_soon(server: Server, patch: pytest.MonkeyPatch) -> None:
    server.call_soon(fail)


def look_at_the_disk(server: Server, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(server.files, "free_bytes", fail)


def callback_of_somebody_else(server: Server, patch: pytest.MonkeyPatch) -> None:
    asyncio.get_running_loop().call_soon(fail)


@pytest.mark.parametrize(
    "break_it",
    [tick, alarm, posted_by_a_thread, call_soon, look_at_the_disk, callback_of_somebody_else],
)
def test_a_callback_of_the_loop_that_fails_ends_the_server(
    break_it: Callable[[Server, pytest.MonkeyPatch], object], tmp_path: Path
) -> None:
    assert isinstance(outcome(tmp_path, break_it), Failing)


def test_what_fails_for_one_connection_ends_no_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def break_it(server: Server, patch: pytest.MonkeyPatch) -> None:
        context = {"message": "Fatal error on transport", "exception": Failing()}
        loop = asyncio.get_running_loop()
        loop.call_exception_handler(context)
        loop.call_soon(server.begin_stop)
        patch.setattr(asyncio, "wait", _soon)

    assert outcome(tmp_path, break_it) is None
    assert "Fatal error on transport" in caplog.text


async def _soon(*arguments: object, **named: object) -> None:
    await turns()


def _never(error: BaseException) -> None:
    raise AssertionError from error


@pytest.mark.parametrize("set_by_ms", [-HOUR_MS, HOUR_MS])
def test_a_step_of_the_clock_is_told_and_ends_no_lease(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], set_by_ms: int
) -> None:
    clock, pull = SimulatedClock(), subscription(subject="job", type="pull", created_ms=0)
    settings = Settings(data_dir=tmp_path, segment_bytes=1 << 16, disk_reserve_bytes=0)

    async def run() -> None:
        server = Server(settings, clock=clock, stopwatch=clock.stopwatch_ms, fatal=_never)
        calls, leases = server.calls, server.engine.leasing.leases
        await server.start()
        await calls.put_subscription(pull.name, lambda known, decided: pull)
        calls.publish_one(NewMessage("job", clock.now_ms, Payload(b"1")), clock.now_ms)
        got: asyncio.Future[Pulled] = asyncio.get_running_loop().create_future()
        calls.pull(pull, PullRequest(1, LEASE_MS, 60_000, got.set_result))
        [token] = (await got).tokens
        clock.set(set_by_ms)
        calls.pull(pull, PullRequest(1, LEASE_MS, 0, lambda pulled: None))
        server._tick()
        clock.move(LEASE_MS - 1)
        server._tick()
        assert leases.get(token) is not None
        clock.move(1)
        # It looks as if the loop had been held up, so sockets are read before leases are over.
        for _ in range(LOOK_TURNS + 1):
            server._tick()
        assert leases.count() == 0
        await server.stop()

    asyncio.run(run())
    assert f"by_ms={set_by_ms}" in capsys.readouterr().out


class BrokenSink:
    """The client of a receiver that does what its author never thought of."""

    def __init__(self, does: str) -> None:
        self.does = does

    async def deliver(
        self,
        subscription: Subscription,
        deliveries: list[DueDelivery],
        may_begin: MayBegin,
        told: Told,
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
        server._sinks["webhook"] = BrokenSink(does)
        hook = msgspec.structs.replace(subscription(), type="webhook")
        server._on_defined(hook)
        patch.setattr(
            server, "_on_result", lambda _, at, some, result: told.append((len(some), result))
        )
        deliveries: Any = [object(), object()]

        async def attempt() -> None:
            await server._send(hook, deliveries)

        task = asyncio.get_running_loop().create_task(attempt())
        server._sending.add(task)
        task.add_done_callback(server._sent)
        task.add_done_callback(lambda _: server.begin_stop())

    assert outcome(tmp_path, break_it, wait_s=0.5) is None
    assert sum(count for count, _ in told) == 2
    count, result = told[-1]
    assert count == failed and isinstance(result, Failed)
    assert result.reason.encode() and len(result.reason) <= 1000
