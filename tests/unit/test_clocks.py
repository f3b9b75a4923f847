"""Lengths of time do not depend on what somebody does to the clock."""

from __future__ import annotations

import time

import pytest

from delayserver.clocks import stopwatch_ms, wall_clock_ms


def test_the_stopwatch_goes_on_when_the_clock_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    shown_ms, passed_ms = wall_clock_ms(), stopwatch_ms()
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() - 3_600_000_000_000)
    assert wall_clock_ms() < shown_ms - 3_000_000
    assert 0 <= stopwatch_ms() - passed_ms < 3_000_000
