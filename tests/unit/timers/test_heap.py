"""The heap: its example, repeating timers, and removal by index."""

from __future__ import annotations

import random

import pytest

from delayserver.timers import HeapTimer, TimerShutdownError
from delayserver.timers.indexed_heap import NOT_IN_HEAP, IndexedHeap


class Item:
    def __init__(self, key: tuple[int, int]) -> None:
        self.key = key
        self.index = NOT_IN_HEAP


def test_the_example_of_the_module() -> None:
    timer = HeapTimer(start_ms=0)
    fired: list[str] = []
    a = timer.add(lambda: fired.append("a"), 7)
    timer.add(lambda: fired.append("b"), 3)
    timer.add_fixed_rate(lambda: fired.append("r"), 2, 4)
    assert timer.advance_clock(5) == 2
    assert timer.next_advance_ms() == 6
    assert timer.cancel(a)
    assert timer.advance_clock(11) == 2
    assert timer.next_advance_ms() == 14
    assert fired == ["r", "b", "r", "r"]


def test_a_fixed_rate_makes_up_in_order_with_the_others() -> None:
    timer = HeapTimer(start_ms=0)
    fired: list[str] = []
    timer.add(lambda: fired.append("at 25"), 25)
    timer.add_fixed_rate(lambda: fired.append("rate"), 10, 10)
    timer.add(lambda: fired.append("at 30"), 30)
    assert timer.advance_clock(30) == 5
    assert fired == ["rate", "rate", "at 25", "rate", "at 30"]


def test_a_fixed_delay_counts_from_the_end_and_makes_nothing_up() -> None:
    timer = HeapTimer(start_ms=0)
    timer.add_fixed_delay(lambda: None, 10, 10)
    assert timer.advance_clock(35) == 1
    assert timer.next_advance_ms() == 45
    timer.expire(45)
    handle = timer.take()
    assert handle is not None
    assert timer.size() == 0
    timer.finished(handle, 52, failed=False)
    assert timer.next_advance_ms() == 62


def test_a_repeating_timer_is_cancelled_while_it_waits_or_runs() -> None:
    timer = HeapTimer(start_ms=0)
    waiting = timer.add_fixed_rate(lambda: None, 1, 1)
    assert timer.advance_clock(3) == 3
    assert [timer.cancel(waiting), timer.cancel(waiting)] == [True, False]
    answers: list[bool] = []
    running = timer.add_fixed_rate(
        lambda: answers.extend([timer.cancel(running), timer.cancel(running)]), 1, 1
    )
    assert timer.advance_clock(10) == 1
    assert answers == [True, False]
    assert timer.size() == 0


def test_a_repeating_timer_ends_with_its_first_error() -> None:
    timer = HeapTimer(start_ms=0)
    handle = timer.add_fixed_rate(lambda: 1 // 0, 1, 1)
    with pytest.raises(ExceptionGroup):
        timer.advance_clock(5)
    assert timer.size() == 0
    assert not timer.cancel(handle)


def test_a_repeating_timer_ends_with_shutdown() -> None:
    timer = HeapTimer(start_ms=0)
    answers: list[bool] = []

    def stop() -> None:
        timer.shutdown()
        answers.append(timer.cancel(handle))

    handle = timer.add_fixed_delay(stop, 1, 1)
    assert timer.advance_clock(5) == 1
    assert (answers, timer.size()) == ([False], 0)
    with pytest.raises(TimerShutdownError):
        timer.add_fixed_rate(stop, 1, 1)


@pytest.mark.parametrize("period_ms", [0, -1])
def test_a_period_below_one_is_refused(period_ms: int) -> None:
    timer = HeapTimer(start_ms=0)
    with pytest.raises(ValueError, match="cannot repeat"):
        timer.add_fixed_rate(lambda: None, 1, period_ms)
    with pytest.raises(ValueError, match="cannot repeat"):
        timer.add_fixed_delay(lambda: None, 1, period_ms)


def test_any_element_can_be_removed_and_the_heap_stays_one() -> None:
    chance = random.Random(7)
    heap: IndexedHeap[Item] = IndexedHeap()
    items = [Item((chance.randrange(50), number)) for number in range(300)]
    for item in items:
        heap.push(item)
    gone = chance.sample(items, 150)
    for item in gone:
        heap.remove(item)
        assert item.index == NOT_IN_HEAP
        for index, other in enumerate(heap._items):
            assert other.index == index
            assert heap._items[(index - 1) // 2].key <= other.key or index == 0
    left = []
    while (first := heap.first) is not None:
        heap.remove(first)
        left.append(first.key)
    assert left == sorted(item.key for item in items if item not in gone)
    assert len(heap) == 0


def test_an_element_of_another_heap_is_our_own_mistake() -> None:
    heap: IndexedHeap[Item] = IndexedHeap()
    other: IndexedHeap[Item] = IndexedHeap()
    mine, foreign = Item((1, 1)), Item((2, 2))
    heap.push(mine)
    other.push(foreign)
    with pytest.raises(AssertionError, match="another heap"):
        heap.remove(foreign)
