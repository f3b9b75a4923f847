"""The server as its event loop moves it: what a tick does with clock and stopwatch."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from delayserver.config import Settings
from delayserver.decisions.new_messages import NewMessage
from delayserver.delivery.delayed_fetch import Pulled, PullRequest
from delayserver.records.message import Payload
from delayserver.server.server import Server
from delayserver.testing import SimulatedClock
from storage.rows import HOUR_MS
from tests.unit.fakes import subscription

LEASE_MS = 600_000


def fatal(error: BaseException) -> None:
    raise AssertionError from error


@pytest.mark.parametrize("set_by_ms", [-HOUR_MS, HOUR_MS])
def test_a_step_of_the_clock_is_told_and_ends_no_lease(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], set_by_ms: int
) -> None:
    clock, pull = SimulatedClock(), subscription(subject="job", type="pull", created_ms=0)
    settings = Settings(data_dir=tmp_path, segment_bytes=1 << 16, disk_reserve_bytes=0)

    async def run() -> None:
        server = Server(settings, clock=clock, stopwatch=clock.stopwatch_ms, fatal=fatal)
        calls, leases = server.calls, server.engine.outcomes.leases
        await server.start()
        await calls.put_subscription(pull)
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
        server._tick()
        assert leases.count() == 0
        await server.stop()

    asyncio.run(run())
    assert f"by_ms={set_by_ms}" in capsys.readouterr().out
