"""The pool of threads: leader and followers, and the scheduled executor made of it."""

from __future__ import annotations

import threading
import time
from functools import partial
from queue import Queue
from threading import Barrier, Event
from typing import Any

import pytest

from delayserver.timers import (
    HashedWheelTimer,
    HeapTimer,
    HierarchicalTimer,
    ScheduledExecutor,
    SimpleWheelTimer,
    ThreadDriver,
    TimerShutdownError,
)
from delayserver.timers.thread_driver import monotonic_ms

WAIT_S = 10

ALL = [
    lambda: SimpleWheelTimer(0, tick_ms=1),
    lambda: HashedWheelTimer(0, tick_ms=1),
    lambda: HierarchicalTimer(0),
    lambda: HeapTimer(0),
]


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("thread_count", [1, 3])
def test_fires_by_the_clock_of_the_machine_and_never_early(make: Any, thread_count: int) -> None:
    late: Queue[float] = Queue()

    def fire(due_ms: float) -> None:
        late.put(monotonic_ms() - due_ms)

    with ThreadDriver(make(), thread_count=thread_count) as driver:
        for delay_ms in (7, 0, 3, 3):
            driver.add(partial(fire, monotonic_ms() + delay_ms), delay_ms)
        assert all(late.get(timeout=WAIT_S) >= 0 for _ in range(4))
        assert driver.size() == 0


def test_takes_a_clock_and_sets_the_timer_by_it(clock: Any) -> None:
    timer = HierarchicalTimer(0)
    fired = Event()
    with ThreadDriver(timer, clock) as driver:
        assert timer.now_ms == clock.now_ms
        driver.add(fired.set, 5)
        clock.now_ms += 4.9
        driver.add(int, 60_000)
        assert not fired.wait(0.02)
        clock.now_ms += 0.1
        assert fired.wait(WAIT_S)
        assert driver.size() == 1


def test_a_timer_that_is_due_earlier_wakes_the_leader() -> None:
    fired: Queue[str] = Queue()
    with ThreadDriver(HierarchicalTimer(0), thread_count=2) as driver:
        driver.add(lambda: fired.put("late"), 3_600_000)
        driver.add(lambda: fired.put("soon"), 1)
        assert fired.get(timeout=WAIT_S) == "soon"
        assert driver.size() == 1


def test_the_leader_promotes_a_follower_before_it_runs_a_callback() -> None:
    together = Barrier(4)  # passes only if four threads are in callbacks at the same time
    done: Queue[int] = Queue()
    with ThreadDriver(HierarchicalTimer(0), thread_count=4) as driver:
        for _ in range(3):
            for _ in range(4):
                driver.add(lambda: done.put(together.wait(WAIT_S)), 1)
            assert sorted(done.get(timeout=WAIT_S) for _ in range(4)) == [0, 1, 2, 3]


def test_only_the_leader_waits_with_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: Queue[float | None] = Queue()
    wait = threading.Condition.wait

    def recording_wait(self: threading.Condition, timeout: float | None = None) -> bool:
        if threading.current_thread().name.startswith("timer-"):
            waits.put(timeout)
        return wait(self, timeout)

    monkeypatch.setattr(threading.Condition, "wait", recording_wait)
    timer = HierarchicalTimer(0)
    timer.add(int, 10**12)
    with ThreadDriver(timer, thread_count=4):
        timeouts = [waits.get(timeout=WAIT_S) for _ in range(4)]
    assert [timeout is None for timeout in timeouts].count(False) == 1


def test_cancel_is_definite() -> None:
    with ThreadDriver(HierarchicalTimer(0)) as driver:
        fired = Event()
        dropped = driver.add(lambda: pytest.fail("cancelled"), 50_000)
        assert [driver.cancel(dropped), driver.cancel(dropped)] == [True, False]
        kept = driver.add(fired.set, 0)
        assert fired.wait(WAIT_S)
        assert not driver.cancel(kept)


def test_errors_go_to_the_hook_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    hooked: Queue[Any] = Queue()
    monkeypatch.setattr(threading, "excepthook", hooked.put)
    fired = Event()
    with ThreadDriver(HierarchicalTimer(0)) as driver:
        driver.add(lambda: 1 // 0, 0)
        driver.add(fired.set, 0)
        assert hooked.get(timeout=WAIT_S).exc_type is ZeroDivisionError
        assert fired.wait(WAIT_S)


def test_errors_go_to_the_handler_of_the_timer_if_it_has_one() -> None:
    errors: Queue[Exception] = Queue()
    with ThreadDriver(HierarchicalTimer(0, on_error=errors.put)) as driver:
        driver.add(lambda: 1 // 0, 0)
        assert isinstance(errors.get(timeout=WAIT_S), ZeroDivisionError)


def test_shutdown_waits_for_the_running_callback_and_drops_the_rest() -> None:
    running, release, done = Event(), Event(), Event()

    def callback() -> None:
        running.set()
        release.wait(WAIT_S)
        done.set()

    driver = ThreadDriver(HierarchicalTimer(0), thread_count=2)
    driver.add(callback, 0)
    driver.add(lambda: pytest.fail("dropped"), 3_600_000)
    assert running.wait(WAIT_S)
    threading.Timer(0.01, release.set).start()
    driver.shutdown()
    assert done.is_set()
    assert not any(thread.is_alive() for thread in driver._threads)
    with pytest.raises(TimerShutdownError):
        driver.add(int, 1)


def test_a_callback_may_add_cancel_and_shut_down() -> None:
    ended: Queue[tuple[bool, int]] = Queue()
    driver = ThreadDriver(HierarchicalTimer(0))

    def first() -> None:
        handle = driver.add(lambda: pytest.fail("cancelled"), 0)
        ended.put((driver.cancel(handle), driver.size()))
        driver.add(last, 1)

    def last() -> None:
        driver.shutdown()
        ended.put((True, driver.size()))

    driver.add(first, 0)
    assert ended.get(timeout=WAIT_S) == (True, 0)
    assert ended.get(timeout=WAIT_S) == (True, 0)
    driver.shutdown()
    assert not driver._threads[0].is_alive()


def test_no_threads_is_refused() -> None:
    with pytest.raises(ValueError, match="thread_count=0"):
        ThreadDriver(HierarchicalTimer(0), thread_count=0)


def test_a_repeating_timer_never_overlaps_itself() -> None:
    inside = threading.Lock()
    runs: Queue[bool] = Queue()

    def callback() -> None:
        alone = inside.acquire(blocking=False)
        time.sleep(0)  # let the other threads come in if they can
        if alone:
            inside.release()
        runs.put(alone)

    with ScheduledExecutor(4) as executor:
        handle = executor.add_fixed_rate(callback, 0, 1)
        assert all(runs.get(timeout=WAIT_S) for _ in range(20))
        assert executor.cancel(handle)
        assert not executor.cancel(handle)


def test_the_executor_repeats_at_a_rate_or_with_a_pause(clock: Any) -> None:
    runs: Queue[tuple[str, float]] = Queue()

    def slow() -> None:
        begun_ms = clock.now_ms
        clock.now_ms += 7  # the callback takes 7 ms
        runs.put(("delay", begun_ms))

    with ScheduledExecutor(1, clock) as executor:
        delay = executor.add_fixed_delay(slow, 0, 10)
        assert runs.get(timeout=WAIT_S) == ("delay", 5_000)
        # The one thread runs this only when it is through with the other.
        executor.add(lambda: runs.put(("through", clock.now_ms)), 0)
        assert runs.get(timeout=WAIT_S) == ("through", 5_007)
        clock.now_ms = 5_017
        assert runs.get(timeout=WAIT_S) == ("delay", 5_017)
        assert executor.cancel(delay)
        clock.now_ms = 6_000
        executor.add_fixed_rate(lambda: runs.put(("rate", clock.now_ms)), 10, 10)
        clock.now_ms = 6_035
        assert [runs.get(timeout=WAIT_S) for _ in range(3)] == [("rate", 6_035)] * 3
        executor.add(lambda: runs.put(("once", clock.now_ms)), 0)
        assert runs.get(timeout=WAIT_S) == ("once", 6_035)


def test_the_executor_hands_errors_on() -> None:
    errors: Queue[Exception] = Queue()
    with ScheduledExecutor(1, on_error=errors.put) as executor:
        executor.add(lambda: 1 // 0, 0)
        assert isinstance(errors.get(timeout=WAIT_S), ZeroDivisionError)
