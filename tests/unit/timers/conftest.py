"""The designs under test, and what the tests of the drivers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from delayserver.timers import (
    HashedWheelTimer,
    HeapTimer,
    HierarchicalTimer,
    LockedTimer,
    SimpleWheelTimer,
    Timer,
)

START_MS = 1_000
MakeTimer = Callable[..., Timer[Any]]

DESIGNS: dict[str, MakeTimer] = {
    "simple": lambda **more: SimpleWheelTimer(START_MS, **{"tick_ms": 1, **more}),
    "simple-tiny": lambda **more: SimpleWheelTimer(START_MS, 1, 3, **more),
    "simple-one-slot": lambda **more: SimpleWheelTimer(START_MS, 1, 1, **more),
    "hashed": lambda **more: HashedWheelTimer(START_MS, **{"tick_ms": 1, **more}),
    "hashed-tiny": lambda **more: HashedWheelTimer(START_MS, 1, 3, **more),
    "hierarchical": lambda **more: HierarchicalTimer(START_MS, **more),
    "hierarchical-tiny": lambda **more: HierarchicalTimer(START_MS, 1, 3, **more),
    "hierarchical-binary": lambda **more: HierarchicalTimer(START_MS, 1, 2, **more),
    "heap": lambda **more: HeapTimer(START_MS, **more),
    "locked": lambda **more: LockedTimer(HierarchicalTimer(START_MS, 1, 3, **more)),
}


@pytest.fixture(params=DESIGNS)
def make_timer(request: pytest.FixtureRequest) -> MakeTimer:
    """Each design, with a tick of 1 ms, its clock at START_MS."""
    return DESIGNS[request.param]


@pytest.fixture
def timer(make_timer: MakeTimer) -> Timer[Any]:
    return make_timer()


class ManualClock:
    """A clock in ms that stands until somebody moves it."""

    def __init__(self, now_ms: float = 0) -> None:
        self.now_ms = now_ms

    def __call__(self) -> float:
        return self.now_ms


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(5_000)
