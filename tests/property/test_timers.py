"""Every design of timer against a sorted list, for any sequence of calls."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delayserver.timers import (
    HashedWheelTimer,
    HeapTimer,
    HierarchicalTimer,
    SimpleWheelTimer,
    Timer,
)

# Design, tick in ms; the number of slots makes revolutions end all the time.
DESIGNS: dict[str, tuple[int, Callable[[int], Timer[Any]]]] = {
    "simple": (1, lambda start_ms: SimpleWheelTimer(start_ms, 1, 3)),
    "simple-coarse": (7, lambda start_ms: SimpleWheelTimer(start_ms, 7, 5)),
    "hashed": (1, lambda start_ms: HashedWheelTimer(start_ms, 1, 3)),
    "hashed-coarse": (7, lambda start_ms: HashedWheelTimer(start_ms, 7, 5)),
    "hierarchical": (1, lambda start_ms: HierarchicalTimer(start_ms, 1, 3)),
    "hierarchical-coarse": (7, lambda start_ms: HierarchicalTimer(start_ms, 7, 2)),
    "hierarchical-default": (1, HierarchicalTimer),
    "heap": (1, HeapTimer),
}


@dataclass
class Plan:
    """What a timer does when it fires."""

    delay_ms: int
    adds: list[Plan] = field(default_factory=list)
    cancels: list[int] = field(default_factory=list)
    raises: bool = False


@dataclass
class Cancel:
    which: int


@dataclass
class Advance:
    by_ms: int


class Model:
    """A sorted list of (tick, number): what a timer is, with no thought of speed."""

    def __init__(self, start_ms: int, tick_ms: int) -> None:
        self.start_ms = start_ms
        self.tick_ms = tick_ms
        self.now_ms = start_ms
        self.waiting: list[tuple[int, int]] = []
        self.plans: list[Plan] = []

    def add(self, plan: Plan) -> None:
        due_ms = self.now_ms + max(0, plan.delay_ms)
        tick = -((self.start_ms - due_ms) // self.tick_ms)
        insort(self.waiting, (tick, len(self.plans)))
        self.plans.append(plan)

    def cancel(self, which: int) -> bool:
        found = [pair for pair in self.waiting if pair[1] == which]
        for pair in found:
            self.waiting.remove(pair)
        return bool(found)

    def advance(self, now_ms: int) -> list[tuple[int, list[bool]]]:
        """Which timers fire, in order, with the answers to their cancels."""
        self.now_ms = max(self.now_ms, now_ms)
        tick, known = (self.now_ms - self.start_ms) // self.tick_ms, len(self.plans)
        fired = []
        while due := [pair for pair in self.waiting if pair[0] <= tick and pair[1] < known]:
            self.waiting.remove(due[0])
            number = due[0][1]
            plan = self.plans[number]
            for child in plan.adds:
                self.add(child)
            fired.append((number, [self.cancel(which) for which in plan.cancels]))
        return fired


class Subject:
    """The same operations on a real timer, which does what the plans say in its callbacks."""

    def __init__(self, timer: Timer[Any]) -> None:
        self.timer = timer
        self.handles: list[Any] = []
        self.fired: list[tuple[int, list[bool]]] = []

    def add(self, plan: Plan) -> None:
        number = len(self.handles)
        self.handles.append(self.timer.add(lambda: self._fire(number, plan), plan.delay_ms))

    def cancel(self, which: int) -> bool:
        return which < len(self.handles) and self.timer.cancel(self.handles[which])

    def advance(self, now_ms: int) -> list[tuple[int, list[bool]]]:
        self.fired = []
        try:
            assert self.timer.advance_clock(now_ms) == len(self.fired)
        except ExceptionGroup as group:
            assert group.split(ZeroDivisionError)[1] is None
        return self.fired

    def _fire(self, number: int, plan: Plan) -> None:
        for child in plan.adds:
            self.add(child)
        self.fired.append((number, [self.cancel(which) for which in plan.cancels]))
        if plan.raises:
            raise ZeroDivisionError


delays_ms = st.one_of(
    st.integers(-2, 12), st.integers(0, 300), st.sampled_from([27, 81, 400, 8000])
)
numbers = st.integers(0, 40)
leaves = st.builds(Plan, delays_ms)
plans = st.recursive(
    leaves,
    lambda children: st.builds(
        Plan,
        delays_ms,
        st.lists(children, max_size=3),
        st.lists(numbers, max_size=3),
        st.booleans(),
    ),
    max_leaves=5,
)
steps_ms = st.one_of(
    st.integers(-3, 12), st.integers(0, 300), st.sampled_from([3, 9, 20, 27, 400, 5_000])
)
calls = st.lists(
    st.one_of(plans, st.builds(Cancel, numbers), st.builds(Advance, steps_ms)), max_size=40
)


@pytest.mark.parametrize("design", DESIGNS)
@settings(max_examples=100, deadline=None)
@given(start_ms=st.integers(0, 50), calls=calls)
def test_a_timer_is_a_sorted_list(design: str, start_ms: int, calls: list[Any]) -> None:
    tick_ms, make = DESIGNS[design]
    timer = make(start_ms)
    model, subject = Model(start_ms, tick_ms), Subject(timer)
    for call in [*calls, *[Advance(9_000)] * 4]:
        match call:
            case Plan():
                model.add(call)
                subject.add(call)
            case Cancel(which):
                assert subject.cancel(which) == model.cancel(which)
            case Advance(by_ms):
                now_ms = model.now_ms + by_ms
                assert subject.advance(now_ms) == model.advance(now_ms)
        assert timer.now_ms == model.now_ms
        assert timer.size() == len(model.waiting)
        check_next_advance(timer, model)


def check_next_advance(timer: Timer[Any], model: Model) -> None:
    """Who sleeps until ``next_advance_ms`` misses nothing, and wakes for something to do."""
    next_ms = timer.next_advance_ms()
    if not model.waiting:
        assert next_ms is None
        return
    due_ms = model.start_ms + model.waiting[0][0] * model.tick_ms
    assert next_ms is not None
    assert model.now_ms <= next_ms <= max(due_ms, model.now_ms)


@settings(max_examples=60, deadline=None)
@given(flood=st.lists(st.integers(1, 30), min_size=1, max_size=60), limit=st.integers(1, 5))
def test_a_flood_of_the_hashed_wheel_is_late_but_complete(flood: list[int], limit: int) -> None:
    timer = HashedWheelTimer(0, 1, 4, transfer_limit=limit)
    late_ms: list[int] = []

    def fire(delay_ms: int) -> None:
        late_ms.append(timer.now_ms - delay_ms)

    for delay_ms in flood:
        timer.add(partial(fire, delay_ms), delay_ms)
    for now_ms in range(1, 31 + len(flood)):
        timer.advance_clock(now_ms)
    assert len(late_ms) == len(flood)
    assert min(late_ms) >= 0
    assert max(late_ms) <= len(flood) // limit
