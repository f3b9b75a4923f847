"""Timeouts: lengths of time, on the stopwatch."""

from __future__ import annotations

import pytest

from delayserver.timers.timeouts import Timeouts
from tests.unit.fakes import Stopwatch

START_MS = 1_000_000


class Parts:
    def __init__(self) -> None:
        self.stopwatch = Stopwatch(START_MS)
        self.timeouts = Timeouts(self.stopwatch)
        self.fired: list[str] = []

    def add(self, delay_ms: int) -> None:
        self.timeouts.add(lambda: self.fired.append("a"), delay_ms)

    def advance(self, passed_ms: int) -> int:
        """So long after the start; returns how many expired."""
        self.stopwatch.shows_ms = START_MS + passed_ms
        return self.timeouts.advance()


@pytest.fixture
def parts() -> Parts:
    return Parts()


def test_a_timeout_counts_from_the_present_not_from_the_last_advance(parts: Parts) -> None:
    parts.stopwatch.shows_ms += 400
    parts.add(100)
    next_ms = parts.timeouts.next_ms()
    assert next_ms is not None and next_ms <= START_MS + 500
    assert parts.advance(499) == 0
    assert parts.advance(500) == 1
    assert parts.fired == ["a"]
    assert parts.timeouts.next_ms() is None


def test_nothing_expires_before_somebody_looks(parts: Parts) -> None:
    parts.add(100)
    parts.stopwatch.shows_ms += 5000
    assert parts.fired == [] and parts.timeouts.size() == 1
    parts.add(0)
    assert parts.fired == []
    assert parts.advance(5000) == 2


@pytest.mark.parametrize("at_ms", [0, 20, 50])
def test_what_is_over_when_it_is_added_expires_in_the_next_advance(
    parts: Parts, at_ms: int
) -> None:
    assert parts.advance(20) == 0
    parts.stopwatch.shows_ms += 30
    parts.timeouts.add_at(lambda: parts.fired.append("a"), START_MS + at_ms)
    assert parts.fired == []
    assert parts.advance(50) == 1


def test_what_is_cancelled_never_runs(parts: Parts) -> None:
    handle = parts.timeouts.add(lambda: parts.fired.append("a"), 100)
    assert parts.timeouts.cancel(handle) and not parts.timeouts.cancel(handle)
    assert parts.timeouts.size() == 0
    assert parts.advance(1000) == 0
    assert parts.fired == []
