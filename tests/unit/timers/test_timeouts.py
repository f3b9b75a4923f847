"""Timeouts: lengths of time, whatever somebody does to the clock."""

from __future__ import annotations

from delayserver.timers.timeouts import Timeouts

START_MS = 1_000_000


def started() -> tuple[Timeouts, list[str]]:
    return Timeouts(START_MS), []


def test_a_timeout_counts_from_the_present_not_from_the_last_advance() -> None:
    timeouts, fired = started()
    timeouts.note_time(START_MS + 400)
    timeouts.add(lambda: fired.append("a"), 100)
    assert timeouts.next_ms() is not None
    assert timeouts.advance(START_MS + 499) == 0
    assert timeouts.advance(START_MS + 500) == 1
    assert fired == ["a"]
    assert timeouts.next_ms() is None


def test_looking_lets_nothing_expire() -> None:
    timeouts, fired = started()
    timeouts.add(lambda: fired.append("a"), 100)
    assert timeouts.note_time(START_MS + 5000) == START_MS + 5000
    assert fired == [] and timeouts.size() == 1
    timeouts.advance(START_MS + 5000)
    assert fired == ["a"]


def test_a_clock_that_is_set_ahead_ends_nothing_early() -> None:
    timeouts, fired = started()
    timeouts.add(lambda: fired.append("a"), 100)
    timeouts.shift(3_600_000)
    assert timeouts.advance(START_MS + 3_600_000 + 99) == 0
    assert timeouts.next_ms() == START_MS + 3_600_000 + 100
    assert timeouts.advance(START_MS + 3_600_000 + 100) == 1


def test_a_clock_that_is_set_back_ends_nothing_late() -> None:
    timeouts, fired = started()
    timeouts.add(lambda: fired.append("a"), 100)
    timeouts.shift(-3_600_000)
    assert timeouts.advance(START_MS - 3_600_000 + 99) == 0
    assert timeouts.advance(START_MS - 3_600_000 + 100) == 1


def test_a_step_back_that_nobody_noticed_stops_the_clock_until_it_is_made_up_for() -> None:
    timeouts, fired = started()
    timeouts.note_time(START_MS + 50)
    timeouts.note_time(START_MS + 10)
    timeouts.add(lambda: fired.append("a"), 100)
    assert timeouts.advance(START_MS + 149) == 0
    assert timeouts.advance(START_MS + 150) == 1


def test_what_is_cancelled_never_runs() -> None:
    timeouts, fired = started()
    handle = timeouts.add(lambda: fired.append("a"), 100)
    assert timeouts.cancel(handle) and not timeouts.cancel(handle)
    assert timeouts.size() == 0
    timeouts.advance(START_MS + 1000)
    assert fired == []
