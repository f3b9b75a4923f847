"""The asyncio driver, in a loop whose time jumps to the next thing to do."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from delayserver.timers import AsyncioDriver, HashedWheelTimer, HeapTimer, HierarchicalTimer

START_S = 7_000.0


class JumpingSelector(selectors.DefaultSelector):
    """Instead of waiting, moves ``now_s`` by as much as it was to wait."""

    now_s = START_S

    def select(self, timeout: float | None = None) -> Any:
        self.now_s += timeout or 0
        return super().select(0)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> list[dict[str, Any]]:
    """Run ``test`` in a loop without waiting; returns what reached the exception handler."""
    reports: list[dict[str, Any]] = []
    selector = JumpingSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now_s  # type: ignore[method-assign]
    loop.set_exception_handler(lambda _, context: reports.append(context))
    try:
        loop.run_until_complete(test())
    finally:
        loop.close()
    return reports


async def advance(seconds: float) -> None:
    """Move the loop's time on, and have it call what becomes due; takes no time."""
    await asyncio.sleep(seconds)


@pytest.mark.parametrize("design", [HierarchicalTimer, HeapTimer, HashedWheelTimer])
def test_fires_in_time_by_the_clock_of_the_loop(design: Any) -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        driver = AsyncioDriver(design(start_ms=0))
        fired: list[tuple[str, float]] = []

        def fire(name: str) -> None:
            fired.append((name, loop.time()))

        for name, delay_ms in (("c", 120_000), ("a", 500), ("b", 30_000), ("b2", 30_000)):
            driver.add(partial(fire, name), delay_ms)
        dropped = driver.add(lambda: pytest.fail("cancelled"), 100)
        assert driver.cancel(dropped)
        assert driver.size() == 4
        await advance(150)
        assert [name for name, _ in fired] == ["a", "b", "b2", "c"]
        for (_, at_s), delay_s in zip(fired, (0.5, 30, 30, 120), strict=True):
            assert at_s - START_S == pytest.approx(delay_s, abs=0.1001)
            assert at_s - START_S >= delay_s

    assert run(test) == []


def test_never_early_by_a_clock_with_fractions() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        driver = AsyncioDriver(HierarchicalTimer(start_ms=0))
        early: list[float] = []

        def fire(due_s: float) -> None:
            early.append(due_s - loop.time())

        for step in range(50):
            await advance(0.000_317)
            driver.add(partial(fire, loop.time() + step / 1000), step)
        await advance(1)
        assert len(early) == 50
        assert max(early) <= 0
        assert min(early) > -0.002

    assert run(test) == []


def test_one_wake_up_in_the_loop_for_all_timers() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        driver = AsyncioDriver(HierarchicalTimer(start_ms=0))
        for delay_ms in range(10_000, 11_000):
            driver.add(lambda: None, delay_ms)
        assert len([h for h in loop._scheduled if not h.cancelled()]) == 1  # type: ignore[attr-defined]

    assert run(test) == []


def test_a_callback_adds_the_next_and_a_long_pause_is_no_start() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        driver = AsyncioDriver(HierarchicalTimer(start_ms=0))
        fired_s: list[float] = []

        def again() -> None:
            fired_s.append(loop.time() - START_S)
            if len(fired_s) < 3:
                driver.add(again, 10)

        await advance(50)
        driver.add(again, 10)
        await advance(50)
        assert fired_s == pytest.approx([50.010, 50.020, 50.030], abs=0.0011)

    assert run(test) == []


def test_errors_reach_the_handler_of_the_loop() -> None:
    async def test() -> None:
        driver = AsyncioDriver(HierarchicalTimer(start_ms=0))
        driver.add(lambda: 1 // 0, 1)
        driver.add(lambda: fired.append("b"), 1)
        await advance(1)

    fired: list[str] = []
    (report,) = run(test)
    assert isinstance(report["exception"], ZeroDivisionError)
    assert fired == ["b"]


def test_errors_reach_the_handler_of_the_timer_if_it_has_one() -> None:
    async def test() -> None:
        driver = AsyncioDriver(HierarchicalTimer(start_ms=0, on_error=errors.append))
        driver.add(lambda: 1 // 0, 1)
        await advance(1)

    errors: list[Exception] = []
    assert run(test) == []
    assert len(errors) == 1


def test_shutdown_leaves_nothing_in_the_loop() -> None:
    async def test() -> None:
        driver = AsyncioDriver(HierarchicalTimer(start_ms=0))
        driver.add(lambda: pytest.fail("dropped"), 1)
        driver.shutdown()
        driver.shutdown()
        assert driver.size() == 0
        await advance(1)

    assert run(test) == []


def test_takes_a_clock(clock: Any) -> None:
    async def test() -> None:
        timer = HierarchicalTimer(start_ms=0)
        driver = AsyncioDriver(timer, clock)
        assert timer.now_ms == clock.now_ms
        fired: list[str] = []
        driver.add(lambda: fired.append("a"), 20)
        await advance(0.019)  # the loop's time has nothing to say
        assert fired == []
        clock.now_ms += 20
        await advance(0.1)
        assert fired == ["a"]

    assert run(test) == []
