"""The wheel with rounds: its example, its pending queue, and the limit of transfers."""

from __future__ import annotations

from functools import partial

import pytest

from delayserver.timers import HashedWheelTimer


def rounds(timer: HashedWheelTimer, slot: int) -> list[int]:
    return [timeout.rounds for timeout in timer._buckets[slot]]


def test_the_example_of_the_module() -> None:
    timer = HashedWheelTimer(start_ms=0, tick_ms=1, slot_count=4)
    timer.add(lambda: None, 2)
    timer.add(lambda: None, 6)
    assert len(list(timer._pending)) == 2
    timer.advance_clock(1)
    assert not timer._pending
    assert rounds(timer, 2) == [0, 1]
    assert timer.advance_clock(2) == 1
    assert rounds(timer, 2) == [0]
    timer.add(lambda: None, 1)
    assert timer.advance_clock(5) == 1
    assert timer.advance_clock(6) == 1


def test_a_flood_is_spread_over_ticks_and_is_late_but_never_early() -> None:
    timer = HashedWheelTimer(start_ms=0, tick_ms=1, slot_count=4, transfer_limit=2)
    fired: list[tuple[int, int]] = []

    def fire(number: int) -> None:
        fired.append((timer.now_ms, number))

    for number, delay_ms in enumerate([1, 1, 1, 1, 9, 1, 1]):
        timer.add(partial(fire, number), delay_ms)
    for now_ms in range(1, 10):
        timer.advance_clock(now_ms)
    assert fired == [(1, 0), (1, 1), (2, 2), (2, 3), (3, 5), (4, 6), (9, 4)]


def test_a_cancel_unlinks_from_the_queue_and_from_the_bucket() -> None:
    timer = HashedWheelTimer(start_ms=0, tick_ms=1, slot_count=4)
    placed = timer.add(lambda: None, 20)
    timer.advance_clock(1)
    queued = timer.add(lambda: None, 20)
    assert timer.cancel(queued)
    assert not timer._pending
    assert timer.cancel(placed)
    assert rounds(timer, 0) == []


def test_a_hundred_thousand_are_transferred_in_a_tick() -> None:
    timer = HashedWheelTimer(start_ms=0, tick_ms=1, slot_count=4)
    for _ in range(100_001):
        timer.add(int, 1)
    assert timer.advance_clock(1) == 100_000
    assert timer.advance_clock(2) == 1


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="transfer_limit=0"):
        HashedWheelTimer(start_ms=0, transfer_limit=0)
