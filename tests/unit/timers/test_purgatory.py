"""The purgatory: complete on an event or at the timeout, exactly once, whoever tries."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event
from typing import Any

import pytest

from delayserver.timers import HierarchicalTimer, LockedTimer, ThreadDriver, TimerShutdownError
from delayserver.timers.purgatory import DelayedOperation, Flag, Purgatory

WAIT_S = 10
TIMEOUT_MS = 1_000


class LongPoll(DelayedOperation):
    """Completes when ``needed`` messages are there."""

    def __init__(self, needed: int = 1, timeout_ms: int = TIMEOUT_MS) -> None:
        super().__init__(timeout_ms)
        self.needed = needed
        self.messages = 0
        self.looks = 0
        self.events: list[str] = []

    def try_complete(self) -> bool:
        self.looks += 1
        return self.messages >= self.needed and self.force_complete()

    def on_complete(self) -> None:
        self.events.append("completed")

    def on_expiration(self) -> None:
        self.events.append("expired")


@pytest.fixture
def timer() -> LockedTimer[Any]:
    return LockedTimer(HierarchicalTimer(start_ms=0))


@pytest.fixture
def purgatory(timer: LockedTimer[Any]) -> Purgatory[str]:
    return Purgatory(timer)


def gauges(purgatory: Purgatory[str]) -> tuple[int, int]:
    return purgatory.watched(), purgatory.delayed()


def test_what_can_complete_at_once_never_waits(
    purgatory: Purgatory[str], timer: LockedTimer[Any]
) -> None:
    poll = LongPoll(needed=0)
    assert purgatory.try_complete_else_watch(poll, ["a"])
    assert poll.events == ["completed"]
    assert gauges(purgatory) == (0, 0)
    assert timer.size() == 0


def test_an_event_completes_it_and_takes_its_timeout_away(
    purgatory: Purgatory[str], timer: LockedTimer[Any]
) -> None:
    poll = LongPoll(needed=2)
    assert not purgatory.try_complete_else_watch(poll, ["a", "b"])
    assert gauges(purgatory) == (2, 1)
    poll.messages = 1
    assert purgatory.check_and_complete("a") == 0
    poll.messages = 2
    assert purgatory.check_and_complete("other") == 0
    assert not poll.is_completed
    assert purgatory.check_and_complete("b") == 1
    assert poll.is_completed
    assert gauges(purgatory) == (1, 0)  # the list of a is cleaned by its next event
    assert purgatory.check_and_complete("a") == 0
    assert gauges(purgatory) == (0, 0)
    assert timer.size() == 0
    assert timer.advance_clock(10 * TIMEOUT_MS) == 0
    assert poll.events == ["completed"]


def test_the_timeout_completes_it(purgatory: Purgatory[str], timer: LockedTimer[Any]) -> None:
    poll = LongPoll()
    purgatory.try_complete_else_watch(poll, ["a"])
    timer.advance_clock(TIMEOUT_MS - 1)
    assert not poll.is_completed
    timer.advance_clock(TIMEOUT_MS)
    assert poll.events == ["completed", "expired"]
    assert purgatory.delayed() == 0
    assert purgatory.check_and_complete("a") == 0
    assert gauges(purgatory) == (0, 0)
    assert poll.events == ["completed", "expired"]


def test_one_event_completes_all_that_watch_the_key_in_their_order(
    purgatory: Purgatory[str],
) -> None:
    order: list[int] = []

    class Numbered(LongPoll):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def on_complete(self) -> None:
            order.append(self.number)

    polls = [Numbered(number) for number in range(5)]
    for poll in polls:
        purgatory.try_complete_else_watch(poll, ["a"])
    for poll in (polls[3], polls[0], polls[4]):
        poll.messages = 1
    assert purgatory.check_and_complete("a") == 3
    assert order == [0, 3, 4]
    assert gauges(purgatory) == (2, 2)


def test_the_oldest_that_waits_comes_first_and_the_completed_are_purged_on_the_way(
    purgatory: Purgatory[str],
) -> None:
    polls = [LongPoll() for _ in range(5)]
    for poll in polls:
        purgatory.try_complete_else_watch(poll, ["a"])
    assert purgatory.oldest("b") is None
    assert purgatory.oldest("a") is polls[0]
    for poll in polls[:3]:
        poll.force_complete()
    assert purgatory.oldest("a") is polls[3]
    assert gauges(purgatory) == (2, 2)
    for poll in polls[3:]:
        poll.force_complete()
    assert purgatory.oldest("a") is None
    assert gauges(purgatory) == (0, 0)
    assert purgatory._watchers == {}


def test_forced_completion_counts_once(purgatory: Purgatory[str], timer: LockedTimer[Any]) -> None:
    poll = LongPoll()
    purgatory.try_complete_else_watch(poll, ["a"])
    assert poll.force_complete()
    assert not poll.force_complete()
    assert not poll.maybe_try_complete()
    assert poll.events == ["completed"]
    assert (purgatory.delayed(), timer.size()) == (0, 0)


def test_no_key_is_refused(purgatory: Purgatory[str]) -> None:
    with pytest.raises(ValueError, match="no key"):
        purgatory.try_complete_else_watch(LongPoll(), [])


def test_a_timer_that_is_shut_down_leaves_no_trace(
    purgatory: Purgatory[str], timer: LockedTimer[Any]
) -> None:
    timer.shutdown()
    with pytest.raises(TimerShutdownError):
        purgatory.try_complete_else_watch(LongPoll(), ["a"])
    assert gauges(purgatory) == (0, 0)


def test_errors_of_one_operation_do_not_keep_the_others_waiting(
    purgatory: Purgatory[str], timer: LockedTimer[Any]
) -> None:
    class Broken(LongPoll):
        def try_complete(self) -> bool:
            self.looks += 1
            if self.looks > 2:
                raise RuntimeError("broken")
            return False

    broken, poll = Broken(), LongPoll()
    purgatory.try_complete_else_watch(broken, ["a"])
    purgatory.try_complete_else_watch(poll, ["a"])
    poll.messages = 1
    with pytest.raises(ExceptionGroup) as caught:
        purgatory.check_and_complete("a")
    assert [str(error) for error in caught.value.exceptions] == ["broken"]
    assert poll.is_completed
    assert gauges(purgatory) == (1, 1)
    timer.advance_clock(TIMEOUT_MS)
    assert broken.events == ["completed", "expired"]


def test_an_event_between_looking_and_watching_is_not_lost(purgatory: Purgatory[str]) -> None:
    class Unlucky(LongPoll):
        def try_complete(self) -> bool:
            done = super().try_complete()
            if self.looks == 1:
                # The message comes when the first look is over; nothing is in the list yet.
                self.messages = 1
                assert purgatory.check_and_complete("a") == 0
            return done

    poll = Unlucky()
    assert purgatory.try_complete_else_watch(poll, ["a"])
    assert poll.looks == 2
    assert poll.events == ["completed"]
    assert purgatory.delayed() == 0


def test_an_expiry_between_looking_and_watching_is_no_harm(
    purgatory: Purgatory[str], timer: LockedTimer[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = purgatory._watch

    def expire_and_watch(*arguments: Any) -> None:
        timer.advance_clock(TIMEOUT_MS)
        watch(*arguments)

    monkeypatch.setattr(purgatory, "_watch", expire_and_watch)
    poll = LongPoll()
    assert not purgatory.try_complete_else_watch(poll, ["a"])
    assert poll.events == ["completed", "expired"]
    assert gauges(purgatory) == (1, 0)
    assert purgatory.reap() == 1


def test_a_completion_while_the_timeout_is_being_set_cancels_it() -> None:
    inner = HierarchicalTimer(start_ms=0)
    poll = LongPoll()

    class Slow:
        """A scheduler that returns the handle when the operation is already completed."""

        def add(self, callback: Any, delay_ms: int) -> Any:
            handle = inner.add(callback, delay_ms)
            assert poll.force_complete()
            return handle

        def cancel(self, handle: Any) -> bool:
            return inner.cancel(handle)

    purgatory: Purgatory[str] = Purgatory(Slow())
    assert not purgatory.try_complete_else_watch(poll, ["a"])
    assert (inner.size(), purgatory.delayed()) == (0, 0)
    assert poll.events == ["completed"]


# ---- the reaper ------------------------------------------------------------------------------


def test_the_reaper_runs_when_completed_operations_pile_up(timer: LockedTimer[Any]) -> None:
    purgatory: Purgatory[str] = Purgatory(timer, purge_interval=10)
    waiting = LongPoll()
    purgatory.try_complete_else_watch(waiting, ["quiet"])
    sizes: list[int] = []
    for number in range(100):
        poll = LongPoll()
        purgatory.try_complete_else_watch(poll, [f"busy-{number}", "quiet"])
        poll.messages = 1
        assert purgatory.check_and_complete(f"busy-{number}") == 1
        sizes.append(purgatory.watched())
    assert max(sizes) <= 1 + 10 + 2
    assert purgatory.delayed() == 1
    purgatory.reap()
    assert gauges(purgatory) == (1, 1)
    waiting.messages = 1
    assert purgatory.check_and_complete("quiet") == 1
    assert gauges(purgatory) == (0, 0)
    assert purgatory._watchers == {}


def test_the_reaper_waits_until_half_of_the_lists_is_worth_it(
    timer: LockedTimer[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    purgatory: Purgatory[str] = Purgatory(timer, purge_interval=1)
    reaps: list[int] = []
    reap = purgatory.reap
    monkeypatch.setattr(purgatory, "reap", lambda: reaps.append(reap()))
    polls = [LongPoll() for _ in range(100)]
    for poll in polls:
        purgatory.try_complete_else_watch(poll, ["a"])
    for poll in polls[:50]:
        poll.force_complete()
    purgatory.try_complete_else_watch(LongPoll(), ["a"])
    assert reaps == []
    polls[50].force_complete()
    polls[51].force_complete()
    purgatory.try_complete_else_watch(LongPoll(), ["a"])
    assert reaps == [52]


def test_the_reaper_with_nothing_to_do() -> None:
    purgatory: Purgatory[str] = Purgatory(HierarchicalTimer(start_ms=0))
    assert purgatory.reap() == 0
    purgatory.try_complete_else_watch(LongPoll(), ["a"])
    assert purgatory.reap() == 0


# ---- threads ---------------------------------------------------------------------------------


def test_the_retry_flag_keeps_the_event_that_came_during_a_look(
    purgatory: Purgatory[str],
) -> None:
    looked, go_on = Event(), Event()

    class Slow(LongPoll):
        def try_complete(self) -> bool:
            seen = self.messages  # an old value, by the time it is used
            self.looks += 1
            if self.looks == 3:
                looked.set()
                assert go_on.wait(WAIT_S)
            return seen >= self.needed and self.force_complete()

    poll = Slow()
    purgatory.try_complete_else_watch(poll, ["a", "b"])
    with ThreadPoolExecutor(1) as pool:
        inside = pool.submit(purgatory.check_and_complete, "a")
        assert looked.wait(WAIT_S)
        poll.messages = 1
        # Returns while the other is still inside: it left a note instead of waiting.
        assert purgatory.check_and_complete("b") == 0
        assert purgatory.check_and_complete("b") == 0
        assert not poll.is_completed
        go_on.set()
        assert inside.result(WAIT_S) == 1
    assert poll.looks == 4
    assert poll.events == ["completed"]


def test_the_retry_flag_survives_an_error_of_the_look(purgatory: Purgatory[str]) -> None:
    class Failing(LongPoll):
        def try_complete(self) -> bool:
            self.looks += 1
            if self.looks == 3:
                self.messages = 1
                assert not self.maybe_try_complete()  # as another thread would
                raise RuntimeError("in the middle of a look")
            return self.messages >= self.needed and self.force_complete()

    poll = Failing()
    purgatory.try_complete_else_watch(poll, ["a"])
    assert purgatory.check_and_complete("a") == 1
    assert poll.events == ["completed"]


def test_who_raises_the_flag_too_late_looks_itself() -> None:
    taken, left = Event(), Event()

    class LateFlag(Flag):
        """Raised only when the thread that was inside has gone."""

        def test_and_raise(self) -> bool:
            taken.set()
            assert left.wait(WAIT_S)
            return super().test_and_raise()

    class Slow(LongPoll):
        def try_complete(self) -> bool:
            seen = self.messages
            self.looks += 1
            if self.looks == 1:
                inside.set()
                assert taken.wait(WAIT_S)
            return seen >= self.needed and self.force_complete()

    inside = Event()
    poll = Slow()
    poll._retry = LateFlag()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(poll.maybe_try_complete)
        assert inside.wait(WAIT_S)
        poll.messages = 1
        second = pool.submit(poll.maybe_try_complete)
        assert first.result(WAIT_S) is False
        left.set()
        assert second.result(WAIT_S) is True
    assert poll.events == ["completed"]


def test_many_events_at_once_complete_it_once(
    purgatory: Purgatory[str], timer: LockedTimer[Any]
) -> None:
    keys = ["a", "b", "c", "d"]
    barrier = Barrier(len(keys))

    def event(key: str) -> int:
        barrier.wait(WAIT_S)
        return purgatory.check_and_complete(key)

    with ThreadPoolExecutor(len(keys)) as pool:
        for _ in range(300):
            poll = LongPoll()
            purgatory.try_complete_else_watch(poll, keys)
            poll.messages = 1
            counts = list(pool.map(event, keys))
            assert poll.events == ["completed"]
            assert sum(counts) == 1
    purgatory.reap()
    assert gauges(purgatory) == (0, 0)
    assert timer.size() == 0


def test_event_and_timeout_at_once_complete_it_once(
    purgatory: Purgatory[str], timer: LockedTimer[Any]
) -> None:
    barrier = Barrier(2)

    def event() -> int:
        barrier.wait(WAIT_S)
        return purgatory.check_and_complete("a")

    def expire(now_ms: int) -> None:
        barrier.wait(WAIT_S)
        timer.advance_clock(now_ms)

    with ThreadPoolExecutor(2) as pool:
        for now_ms in range(1, 300):
            poll = LongPoll(timeout_ms=1)
            purgatory.try_complete_else_watch(poll, ["a"])
            poll.messages = 1
            by_event, by_time = pool.submit(event), pool.submit(expire, now_ms)
            by_time.result(WAIT_S)
            expected = ["completed"] if by_event.result(WAIT_S) else ["completed", "expired"]
            assert poll.events == expected
            assert purgatory.delayed() == 0
    purgatory.reap()
    assert purgatory.watched() == 0


def test_the_last_message_is_never_missed(purgatory: Purgatory[str]) -> None:
    """Each thread adds a message and checks: whoever adds the last one, it must complete."""
    threads = 4
    barrier = Barrier(threads)
    lock = threading.Lock()

    def produce(poll: LongPoll) -> int:
        barrier.wait(WAIT_S)
        with lock:
            poll.messages += 1
        return purgatory.check_and_complete("a")

    with ThreadPoolExecutor(threads) as pool:
        for _ in range(300):
            poll = LongPoll(needed=threads)
            purgatory.try_complete_else_watch(poll, ["a"])
            counts = [
                future.result(WAIT_S)
                for future in [pool.submit(produce, poll) for _ in range(threads)]
            ]
            assert poll.events == ["completed"]
            assert sum(counts) == 1


def test_watching_and_events_at_once_lose_nothing(purgatory: Purgatory[str]) -> None:
    barrier = Barrier(2)

    def watch(poll: LongPoll) -> bool:
        barrier.wait(WAIT_S)
        return purgatory.try_complete_else_watch(poll, ["a"])

    def event(poll: LongPoll) -> int:
        barrier.wait(WAIT_S)
        poll.messages = 1
        return purgatory.check_and_complete("a")

    with ThreadPoolExecutor(2) as pool:
        for _ in range(300):
            poll = LongPoll()
            watched, happened = pool.submit(watch, poll), pool.submit(event, poll)
            assert watched.result(WAIT_S) + happened.result(WAIT_S) == 1
            assert poll.events == ["completed"]
            assert purgatory.delayed() == 0


def test_the_timeout_comes_from_a_thread_driver() -> None:
    expired = Event()

    class Poll(LongPoll):
        def on_expiration(self) -> None:
            expired.set()

    with ThreadDriver(HierarchicalTimer(start_ms=0)) as driver:
        purgatory: Purgatory[str] = Purgatory(driver)
        poll = Poll(timeout_ms=1)
        assert not purgatory.try_complete_else_watch(poll, ["a"])
        assert expired.wait(WAIT_S)
        assert purgatory.delayed() == 0
