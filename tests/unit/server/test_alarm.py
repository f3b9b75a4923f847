"""The alarm rings at its moment, once, and never before."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop

from delayserver.server.alarm import Alarm

MS_NS = 1_000_000
PATIENCE_S = 30.0
LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [
    asyncio.new_event_loop,
    uvloop.new_event_loop,
]


class Bell:
    """An alarm on the running loop, and when it rang."""

    def __init__(self) -> None:
        self.rang_ns: list[int] = []
        self.rings = asyncio.Event()
        self.alarm = Alarm(asyncio.get_running_loop(), self._ring)

    def _ring(self) -> None:
        self.rang_ns.append(time.monotonic_ns())
        self.rings.set()

    async def wait(self) -> None:
        """Until it rings."""
        await asyncio.wait_for(self.rings.wait(), PATIENCE_S)
        self.rings.clear()


@pytest.fixture(params=LOOPS, ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Awaitable[None]], None]:
    def run_on(main: Any) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(main)

    return run_on


@pytest.fixture(params=[True, False], ids=["timerfd", "loop timer"], autouse=True)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        # As on a system that has no such timers.
        monkeypatch.setattr("delayserver.server.alarm.ctypes.CDLL", lambda *rest, **more: object())


def test_it_rings_once_and_not_before(run) -> None:
    async def main() -> None:
        bell = Bell()
        began_ns = time.monotonic_ns()
        bell.alarm.set(20 * MS_NS)
        await bell.wait()
        assert bell.rang_ns[0] - began_ns >= 19 * MS_NS  # a loop's own timer counts whole ms
        bell.alarm.set(1)
        await bell.wait()
        bell.alarm.close()
        assert len(bell.rang_ns) == 2

    run(main())


@pytest.mark.parametrize("delay_ns", [0, -5 * MS_NS])
def test_what_is_over_rings_at_once(run, delay_ns) -> None:
    async def main() -> None:
        bell = Bell()
        bell.alarm.set(delay_ns)
        await bell.wait()
        bell.alarm.close()

    run(main())


def test_when_it_is_set_again_only_the_later_call_counts(run) -> None:
    async def main() -> None:
        bell = Bell()
        bell.alarm.set(3_600_000 * MS_NS)
        bell.alarm.set(MS_NS)
        await bell.wait()
        began_ns = time.monotonic_ns()
        bell.alarm.set(MS_NS)
        bell.alarm.set(50 * MS_NS)
        await bell.wait()
        bell.alarm.close()
        assert bell.rang_ns[1] - began_ns >= 49 * MS_NS
        assert len(bell.rang_ns) == 2

    run(main())


def test_after_it_was_closed_it_does_not_ring(run) -> None:
    async def main() -> None:
        bell = Bell()
        bell.alarm.set(MS_NS)
        bell.alarm.close()
        bell.alarm.set(0)
        other = Bell()  # rings later than the first one would have
        other.alarm.set(20 * MS_NS)
        await other.wait()
        other.alarm.close()
        assert bell.rang_ns == []

    run(main())
