"""The hierarchical wheel: its example, its levels, and its queue of buckets."""

from __future__ import annotations

import time

import pytest

from delayserver.timers import HierarchicalTimer


def queued(timer: HierarchicalTimer) -> dict[int, list[int]]:
    """The due ticks in each queued bucket, by expiration; checks what must hold of buckets."""
    buckets = [bucket for level in timer._levels for bucket in level.buckets]
    expirations = [expiration for expiration, _ in timer._queue]
    assert len(set(expirations)) == len(expirations), "two buckets with one expiration"
    in_queue = {id(bucket) for _, bucket in timer._queue}
    assert len(in_queue) == len(timer._queue), "a bucket was queued twice"
    for bucket in buckets:
        assert not bucket or id(bucket) in in_queue, "a bucket in use was not queued"
    for expiration, bucket in timer._queue:
        assert bucket.expiration_tick == expiration
        for entry in bucket:
            assert expiration <= entry.due_tick < expiration + bucket.span_ticks
    return {
        expiration: [entry.due_tick for entry in bucket]
        for expiration, bucket in sorted(timer._queue, key=lambda pair: pair[0])
    }


def test_the_example_of_the_module() -> None:
    timer = HierarchicalTimer(start_ms=0, tick_ms=1, slot_count=3)
    fired: list[tuple[int, str]] = []

    def add(name: str, delay_ms: int) -> None:
        timer.add(lambda: fired.append((timer.now_ms, name)), delay_ms)

    add("a", 2)
    assert queued(timer) == {2: [2]}
    add("b", 4)
    add("c", 5)
    assert queued(timer) == {2: [2], 3: [4, 5]}
    assert len(timer._levels) == 2
    add("d", 13)
    assert queued(timer) == {2: [2], 3: [4, 5], 9: [13]}
    assert [level.span_ticks for level in timer._levels] == [1, 3, 9]
    timer.advance_clock(2)
    assert queued(timer) == {3: [4, 5], 9: [13]}
    timer.advance_clock(3)
    assert queued(timer) == {4: [4], 5: [5], 9: [13]}
    add("e", 2)
    assert queued(timer) == {4: [4], 5: [5, 5], 9: [13]}
    timer.advance_clock(8)
    assert queued(timer) == {9: [13]}
    timer.advance_clock(9)
    assert queued(timer) == {12: [13]}
    timer.advance_clock(12)
    assert queued(timer) == {13: [13]}
    timer.advance_clock(13)
    assert queued(timer) == {}
    assert fired == [(2, "a"), (8, "b"), (8, "c"), (8, "e"), (13, "d")]


def test_levels_are_made_on_demand_and_only_once() -> None:
    timer = HierarchicalTimer(start_ms=0)
    timer.add(lambda: None, 19)
    assert len(timer._levels) == 1
    timer.add(lambda: None, 20)
    assert len(timer._levels) == 2
    timer.add(lambda: None, 20**5)
    timer.add(lambda: None, 20**5)
    assert [level.span_ticks for level in timer._levels] == [20**k for k in range(6)]


def test_a_bucket_is_reused_in_the_next_revolution() -> None:
    timer = HierarchicalTimer(start_ms=0, tick_ms=1, slot_count=3)
    for round_start_ms in range(0, 30, 3):
        timer.advance_clock(round_start_ms)
        timer.add(lambda: None, 1)
        (pair,) = timer._queue
        assert pair == (round_start_ms + 1, timer._levels[0].buckets[1])
        assert timer.advance_clock(round_start_ms + 2) == 1
    assert len(timer._levels) == 1


def test_a_bucket_that_lost_its_timers_is_not_queued_again() -> None:
    timer = HierarchicalTimer(start_ms=0)
    for _ in range(1_000):
        timer.cancel(timer.add(lambda: None, 5))
    assert queued(timer) == {5: []}
    assert timer.next_advance_ms() is None
    timer.add(lambda: None, 5)
    assert queued(timer) == {5: [5]}
    assert timer.advance_clock(5) == 1


def test_the_queue_is_as_long_as_the_buckets_in_use() -> None:
    timer = HierarchicalTimer(start_ms=0)
    for delay_ms in range(1, 10_000):
        timer.add(lambda: None, delay_ms)
    assert len(timer._queue) <= timer._slot_count * len(timer._levels)
    queued(timer)


def test_an_empty_year_costs_nothing() -> None:
    timer = HierarchicalTimer(start_ms=0)
    year_ms = 365 * 24 * 3_600_000
    timer.add(lambda: None, 2 * year_ms)
    begun_s = time.perf_counter()
    timer.advance_clock(year_ms)
    assert time.perf_counter() - begun_s < 10  # walking 31 thousand million ticks takes an hour
    assert timer.next_advance_ms() is not None
    assert timer.advance_clock(2 * year_ms - 1) == 0
    assert timer.advance_clock(2 * year_ms) == 1


def test_one_slot_for_each_level_is_refused() -> None:
    with pytest.raises(ValueError, match="slot_count=1"):
        HierarchicalTimer(start_ms=0, slot_count=1)
