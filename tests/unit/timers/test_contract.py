"""The contract of ``interface``, for every design."""

from __future__ import annotations

import doctest
import gc
import weakref
from functools import partial
from typing import Any

import pytest

import delayserver.timers
from delayserver.errors import DelayServerError
from delayserver.timers import (
    HashedWheelTimer,
    HierarchicalTimer,
    SimpleWheelTimer,
    Timer,
    TimerShutdownError,
)

START_MS = 1_000
HOUR_MS = 3_600_000


def test_fires_at_its_millisecond_and_never_before(timer: Timer[Any]) -> None:
    fired: list[str] = []
    timer.add(lambda: fired.append("a"), 5)
    assert timer.advance_clock(START_MS + 4) == 0
    assert fired == []
    assert timer.advance_clock(START_MS + 5) == 1
    assert timer.advance_clock(START_MS + 50) == 0
    assert fired == ["a"]


@pytest.mark.parametrize("delay_ms", [1, 2, 3, 8, 9, 10, 26, 27, 28, 100, 728, 729, 5_000])
def test_every_delay_fires_at_its_own_tick(timer: Timer[Any], delay_ms: int) -> None:
    timer.advance_clock(START_MS + 7)
    timer.add(lambda: None, delay_ms)
    for now_ms in range(START_MS + 7, START_MS + 7 + delay_ms):
        assert timer.advance_clock(now_ms) == 0
    assert timer.advance_clock(START_MS + 7 + delay_ms) == 1


def test_order_is_by_tick_and_then_by_add(timer: Timer[Any]) -> None:
    fired: list[tuple[int, int]] = []
    delays_ms = [30, 7, 30, 1, 7, 9, 300, 8, 1, 30]
    for number, delay_ms in enumerate(delays_ms):
        timer.add(partial(fired.append, (delay_ms, number)), delay_ms)
    # These reach the ticks of earlier ones by a shorter way.
    timer.advance_clock(START_MS + 6)
    timer.add(lambda: fired.append((7, 100)), 1)
    timer.add(lambda: fired.append((30, 101)), 24)
    timer.advance_clock(START_MS + 1_000)
    assert len(fired) == len(delays_ms) + 2
    assert fired == sorted(fired)


def test_delay_zero_or_less_fires_in_the_next_advance_of_the_same_time(timer: Timer[Any]) -> None:
    fired: list[str] = []
    timer.add(lambda: fired.append("now"), 0)
    timer.add(lambda: fired.append("past"), -10)
    assert fired == []
    assert timer.next_advance_ms() == START_MS
    assert timer.advance_clock(START_MS) == 2
    assert fired == ["now", "past"]


def test_what_was_due_at_once_fires_before_later_ticks(timer: Timer[Any]) -> None:
    fired: list[str] = []
    timer.add(lambda: fired.append("later"), 3)
    timer.add(lambda: fired.append("now"), 0)
    timer.advance_clock(START_MS + 10)
    assert fired == ["now", "later"]


def test_cancel_is_true_exactly_once(timer: Timer[Any]) -> None:
    kept = timer.add(lambda: None, 5)
    dropped = timer.add(lambda: pytest.fail("cancelled"), 5)
    at_once = timer.add(lambda: pytest.fail("cancelled"), 0)
    far = timer.add(lambda: pytest.fail("cancelled"), 20_000)
    assert [timer.cancel(dropped), timer.cancel(at_once), timer.cancel(far)] == [True] * 3
    assert [timer.cancel(dropped), timer.cancel(at_once), timer.cancel(far)] == [False] * 3
    assert timer.advance_clock(START_MS + 20_000) == 1
    assert not timer.cancel(kept)


def test_cancel_is_false_while_the_timer_fires(timer: Timer[Any]) -> None:
    answers: list[bool] = []
    handle = timer.add(lambda: answers.append(timer.cancel(handle)), 1)
    timer.advance_clock(START_MS + 1)
    assert answers == [False]


def test_size_counts_what_waits(timer: Timer[Any]) -> None:
    sizes: list[int] = []
    handles = [timer.add(lambda: sizes.append(timer.size()), delay) for delay in (0, 2, 2, 70)]
    assert timer.size() == 4
    timer.cancel(handles[1])
    timer.cancel(handles[1])
    assert timer.size() == 3
    timer.advance_clock(START_MS + 2)
    assert sizes == [2, 1]
    timer.advance_clock(START_MS + 70)
    assert timer.size() == 0


def test_a_callback_may_cancel_others_of_its_tick_and_of_later_ones(timer: Timer[Any]) -> None:
    answers: list[bool] = []

    def first() -> None:
        answers.extend(timer.cancel(handle) for handle in (same, later, ready))

    timer.add(first, 0)
    ready = timer.add(lambda: pytest.fail("cancelled"), 0)
    same = timer.add(lambda: pytest.fail("cancelled"), 1)
    later = timer.add(lambda: pytest.fail("cancelled"), 40)
    assert timer.advance_clock(START_MS + 100) == 1
    assert answers == [True, True, True]
    assert timer.size() == 0


def test_a_callback_that_adds_itself_at_once_runs_once_in_each_advance(timer: Timer[Any]) -> None:
    fired: list[int] = []

    def again() -> None:
        fired.append(timer.now_ms)
        timer.add(again, 0)

    timer.add(again, 2)
    for now_ms in (START_MS + 2, START_MS + 2, START_MS + 90):
        assert timer.advance_clock(now_ms) == 1
    assert fired == [START_MS + 2, START_MS + 2, START_MS + 90]


def test_a_delay_counts_from_the_time_of_the_advance_that_runs(timer: Timer[Any]) -> None:
    fired: list[int] = []
    timer.add(lambda: timer.add(lambda: fired.append(timer.now_ms), 5), 10)
    # The first was due long ago; the second may not come early for that.
    timer.advance_clock(START_MS + 1_000)
    assert fired == []
    timer.advance_clock(START_MS + 1_004)
    assert fired == []
    timer.advance_clock(START_MS + 1_005)
    assert fired == [START_MS + 1_005]


def test_errors_take_nothing_with_them_and_come_together(timer: Timer[Any]) -> None:
    fired: list[str] = []
    timer.add(lambda: 1 // 0, 1)
    timer.add(lambda: fired.append("b"), 1)
    timer.add(lambda: int("x"), 2)
    timer.add(lambda: fired.append("d"), 30)
    with pytest.raises(ExceptionGroup) as caught:
        timer.advance_clock(START_MS + 30)
    assert [type(error) for error in caught.value.exceptions] == [ZeroDivisionError, ValueError]
    assert fired == ["b", "d"]
    assert timer.size() == 0


def test_errors_go_to_the_handler_if_there_is_one(make_timer: Any) -> None:
    errors: list[Exception] = []
    timer = make_timer(on_error=errors.append)
    timer.add(lambda: 1 // 0, 1)
    timer.add(lambda: None, 1)
    assert timer.advance_clock(START_MS + 1) == 2
    assert [type(error) for error in errors] == [ZeroDivisionError]


def test_an_interrupt_leaves_the_others_for_the_next_advance(timer: Timer[Any]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    fired: list[str] = []
    timer.add(interrupt, 1)
    timer.add(lambda: fired.append("same tick"), 1)
    timer.add(lambda: fired.append("later tick"), 2)
    with pytest.raises(KeyboardInterrupt):
        timer.advance_clock(START_MS + 2)
    assert timer.size() == 2
    assert timer.next_advance_ms() is not None
    assert timer.advance_clock(START_MS + 2) == 2
    assert fired == ["same tick", "later tick"]


def test_a_clock_that_goes_back_is_ignored(timer: Timer[Any]) -> None:
    timer.advance_clock(START_MS + 100)
    assert timer.advance_clock(START_MS + 40) == 0
    assert timer.now_ms == START_MS + 100
    timer.add(lambda: None, 10)
    assert timer.advance_clock(START_MS + 50) == 0
    assert timer.advance_clock(START_MS + 109) == 0
    assert timer.advance_clock(START_MS + 110) == 1


def test_a_long_empty_time_changes_nothing(timer: Timer[Any]) -> None:
    timer.add(lambda: None, 1)
    assert timer.advance_clock(START_MS + 1) == 1
    assert timer.next_advance_ms() is None
    years_later_ms = START_MS + 50 * 365 * 24 * HOUR_MS
    assert timer.advance_clock(years_later_ms) == 0
    handles = [timer.add(lambda: None, delay_ms) for delay_ms in (1, 2, 4, 29)]
    assert timer.advance_clock(years_later_ms + 3) == 2
    assert timer.cancel(handles[3])
    assert timer.advance_clock(years_later_ms + 4) == 1


def test_advancing_by_next_advance_fires_everything_in_time(timer: Timer[Any]) -> None:
    late_ms: list[int] = []

    def fire(due_ms: int) -> None:
        late_ms.append(timer.now_ms - due_ms)

    for delay_ms in (3, 11, 90, 90, 1_234):
        timer.add(partial(fire, START_MS + delay_ms), delay_ms)
    while (next_ms := timer.next_advance_ms()) is not None:
        assert next_ms > timer.now_ms
        timer.advance_clock(next_ms)
    assert late_ms == [0] * 5


def test_advancing_inside_a_callback_fires_the_rest_there(timer: Timer[Any]) -> None:
    fired: list[str] = []

    def nested() -> None:
        fired.append(f"nested {timer.advance_clock(START_MS + 20)}")

    timer.add(nested, 1)
    timer.add(lambda: fired.append("b"), 1)
    timer.add(lambda: fired.append("c"), 15)
    assert timer.advance_clock(START_MS + 1) == 1
    assert fired == ["b", "c", "nested 2"]


def test_shutdown_drops_what_waits_and_refuses_what_comes(timer: Timer[Any]) -> None:
    handles = [timer.add(lambda: pytest.fail("dropped"), delay) for delay in (0, 1, 2, 5, HOUR_MS)]
    timer.shutdown()
    timer.shutdown()
    assert timer.size() == 0
    assert timer.next_advance_ms() is None
    assert not any(timer.cancel(handle) for handle in handles)
    assert timer.advance_clock(START_MS + 2 * HOUR_MS) == 0
    with pytest.raises(TimerShutdownError, match="shut down") as caught:
        timer.add(lambda: None, 1)
    assert isinstance(caught.value, DelayServerError)


def test_shutdown_in_a_callback_drops_the_rest_of_the_tick(timer: Timer[Any]) -> None:
    timer.add(timer.shutdown, 1)
    timer.add(lambda: pytest.fail("dropped"), 1)
    assert timer.advance_clock(START_MS + 1) == 1


def test_a_kept_handle_keeps_nothing_else_alive(timer: Timer[Any]) -> None:
    class Callback:
        def __call__(self) -> None:
            pass

    callbacks = [Callback() for _ in range(4)]
    alive = [weakref.ref(callback) for callback in callbacks]
    handles = [timer.add(callback, 1) for callback in callbacks]
    callbacks.clear()
    gc.disable()  # reference counts alone must do
    try:
        assert timer.cancel(handles[1])
        assert [callback() is None for callback in alive] == [False, True, False, False]
        timer.advance_clock(START_MS + 1)
        assert [callback() is None for callback in alive] == [True] * 4
    finally:
        gc.enable()


@pytest.mark.parametrize("design", [SimpleWheelTimer, HashedWheelTimer, HierarchicalTimer])
def test_a_timer_between_two_ticks_fires_at_the_later_one(design: Any) -> None:
    timer: Timer[Any] = design(start_ms=1_003, tick_ms=10, slot_count=3)
    timer.advance_clock(1_007)
    timer.add(lambda: None, 4)  # due at 1,011: the ticks are at 1,003 and 1,013
    timer.add(lambda: None, 6)  # due at the tick itself
    timer.add(lambda: None, 0)  # due at 1,007, which is no tick
    timer.add(lambda: None, 7)  # due at 1,014: the next tick is at 1,023
    assert timer.next_advance_ms() == 1_013
    assert timer.advance_clock(1_012) == 0
    assert timer.advance_clock(1_013) == 3
    assert timer.advance_clock(1_022) == 0
    assert timer.advance_clock(1_023) == 1


@pytest.mark.parametrize("design", [SimpleWheelTimer, HashedWheelTimer, HierarchicalTimer])
@pytest.mark.parametrize("wrong", [{"tick_ms": 0}, {"slot_count": 0}])
def test_a_wheel_without_ticks_or_slots_is_refused(design: Any, wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"tick_ms=|slot_count="):
        design(start_ms=0, **wrong)


def test_the_example_of_the_package() -> None:
    assert doctest.testmod(delayserver.timers).failed == 0
