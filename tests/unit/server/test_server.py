"""The server as its event loop moves it: callbacks that fail, clock and stopwatch in a tick."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from delayserver.config import Settings
from delayserver.decisions.new_messages import NewMessage
from delayserver.delivery.delayed_fetch import Pulled, PullRequest
from delayserver.records.message import Payload
from delayserver.server.engine import LOOK_TURNS
from delayserver.server.server import Server, of_this_machine
from storage.rows import HOUR_MS
from tests.unit.fakes import subscription
from tests.unit.server.ended import Failing, fail, outcome
from tests.waiting import turns
from tests.world import SimulatedClock

LEASE_MS = 600_000


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
        server = Server(
            settings,
            replace(of_this_machine(settings), clock=clock, stopwatch=clock.stopwatch_ms),
            fatal=_never,
        )
        calls, leases = server.calls, server.engine.leasing.leases
        await server.start()
        await calls.subscriptions.put(pull.name, lambda known, decided: pull)
        calls.publish_one(NewMessage("job", clock.now_ms, Payload(b"1")), clock.now_ms)
        got: asyncio.Future[Pulled] = asyncio.get_running_loop().create_future()
        calls.consumers.pull(pull, PullRequest(1, LEASE_MS, 60_000, got.set_result))
        [token] = (await got).tokens
        clock.set(set_by_ms)
        calls.consumers.pull(pull, PullRequest(1, LEASE_MS, 0, lambda pulled: None))
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
