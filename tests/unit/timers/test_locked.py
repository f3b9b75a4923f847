"""A timer under a lock: many threads, one winner."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier, Lock, Thread

import pytest

from delayserver.timers import HierarchicalTimer, LockedTimer
from delayserver.timers.chain import ChainEntry

WAIT_S = 10


def test_cancel_or_fire_and_never_both_nor_neither() -> None:
    timer = LockedTimer(HierarchicalTimer(start_ms=0))
    barrier = Barrier(3)

    def cancel(handles: list[ChainEntry]) -> list[bool]:
        barrier.wait(WAIT_S)
        return [timer.cancel(handle) for handle in handles]

    def advance(now_ms: int) -> int:
        barrier.wait(WAIT_S)
        return timer.advance_clock(now_ms)

    with ThreadPoolExecutor(3) as pool:
        for start_ms in range(0, 2_000, 10):
            fired: list[int] = []
            handles = [timer.add(partial(fired.append, n), 5 + n % 3) for n in range(8)]
            one, two = pool.submit(cancel, handles), pool.submit(cancel, handles)
            assert pool.submit(advance, start_ms + 10).result(WAIT_S) == len(fired)
            won = [sum(pair) for pair in zip(one.result(WAIT_S), two.result(WAIT_S), strict=True)]
            assert all(won[n] + (n in fired) == 1 for n in range(8))
    assert timer.size() == 0


def test_no_add_is_lost() -> None:
    timer = LockedTimer(HierarchicalTimer(start_ms=0))
    barrier = Barrier(4)

    def add() -> None:
        barrier.wait(WAIT_S)
        for delay_ms in range(500):
            timer.add(int, delay_ms)

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(add) for _ in range(4)]:
            future.result()
    assert timer.size() == 2_000
    assert timer.advance_clock(500) == 2_000


def test_a_callback_may_wait_for_a_lock_whose_owner_calls_the_timer() -> None:
    timer = LockedTimer(HierarchicalTimer(start_ms=0))
    outer = Lock()
    inside = Barrier(2)
    other = timer.add(lambda: pytest.fail("cancelled"), 100)

    def callback() -> None:
        inside.wait(WAIT_S)
        assert outer.acquire(timeout=WAIT_S), "the timer's lock was held during the callback"
        outer.release()

    def owner() -> None:
        with outer:
            inside.wait(WAIT_S)
            timer.cancel(other)

    thread = Thread(target=owner)
    timer.add(callback, 1)
    thread.start()
    assert timer.advance_clock(1) == 1
    thread.join(WAIT_S)
    assert not thread.is_alive()
