"""Pages of what waits in an hour, compared with what the loader puts into the wheel."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayserver.records.subscriptions import Registry
from delayserver.schedule import pending
from delayserver.schedule.pending import Position, Wanted, pending_rows, position_of
from delayserver.schedule.replay import Snapshot
from storage import frame_runs
from storage.rows import HOUR_MS
from tests.unit.fakes import HOUR, START_MS, SUBJECT, Disk, Log, dispatch_row, rows_in, subscription

REGISTRY = Registry(
    [subscription(1), subscription(2, created_ms=START_MS + 50), subscription(3, subject="other")]
)

offsets = st.integers(0, 99)
steps = st.one_of(
    st.tuples(st.just("publish"), offsets),
    st.tuples(st.just("cancel"), st.integers(0, 40)),
    st.tuples(st.just("move"), st.integers(0, 40), offsets),
    st.tuples(st.just("retry"), st.integers(0, 40), offsets, st.integers(1, 2)),
    st.tuples(st.just("deliver"), st.integers(0, 40), st.integers(0, 2)),
    st.tuples(st.just("file")),
)


class Hour:
    """An hour on the disk, with a history."""

    def __init__(self, history: list[tuple[object, ...]]) -> None:
        self.disk, self.log = Disk(), Log(subjects=(SUBJECT, "other"))
        self.disk.names[2] = "other"
        self.entries: list[tuple[int, int]] = []
        for name, *values in history:
            getattr(self, str(name))(*values)
        self.file()

    def publish(self, offset_ms: int) -> None:
        due_ms = START_MS + offset_ms
        self.entries.append((self.log.publish(due_ms), due_ms))

    def _target(self, number: int) -> tuple[int, int] | None:
        return self.entries[number % len(self.entries)] if self.entries else None

    def cancel(self, number: int) -> None:
        if target := self._target(number):
            self.log.cancel(*target)

    def move(self, number: int, offset_ms: int) -> None:
        if target := self._target(number):
            self.entries.append(
                (self.log.move(*target, START_MS + offset_ms), START_MS + offset_ms)
            )

    def retry(self, number: int, offset_ms: int, subscription_id: int) -> None:
        if target := self._target(number):
            due_ms = START_MS + offset_ms
            self.log.retry(*target, due_ms, subscription_id=subscription_id)

    def deliver(self, number: int, subscription_id: int) -> None:
        if target := self._target(number):
            self.disk.settle(HOUR, dispatch_row(target[0], subscription_id=subscription_id))

    def file(self) -> None:
        group = self.log.close()
        if group.rows:
            self.disk.file(group)

    @property
    def snapshot(self) -> Snapshot:
        state = self.disk.replay.hours.get(HOUR)
        return Snapshot(HOUR, state.length if state else 0)

    def expected(self) -> list[Position]:
        """From the loader: a row that several subscriptions are still to get stands there once."""
        loaded = self.disk.loader.load(self.snapshot, REGISTRY, self.disk.names)
        return sorted({position_of(HOUR, row) for row in rows_in(loaded)})

    def page(self, start: Position, until_ms: int, limit: int) -> list[Position]:
        wanted = Wanted(1, SUBJECT, start, until_ms, limit)
        steps = pending_rows(
            self.disk.schedule, self.disk.dispatch, self.snapshot, wanted, REGISTRY
        )
        with patch.object(pending, "STEP_ROWS", 2):
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    assert end.value.damage == []
                    return [position_of(HOUR, row) for row in end.value.rows]


@given(
    history=st.lists(steps, max_size=40),
    limit=st.integers(1, 7),
    from_offset_ms=st.integers(0, 110),
    until_offset_ms=st.integers(0, 110),
)
def test_pages_hold_what_the_loader_would_load(
    history: list[tuple[object, ...]], limit: int, from_offset_ms: int, until_offset_ms: int
) -> None:
    hour = Hour(history)
    start, until_ms = Position(START_MS + from_offset_ms, 0), START_MS + until_offset_ms
    expected = [one for one in hour.expected() if start <= one and one.due_ms < until_ms]
    found: list[Position] = []
    while page := hour.page(start, until_ms, limit + 1):
        found += page[:limit]
        if len(page) <= limit:
            break
        start = page[-1]
    assert found == expected


def test_other_subjects_and_other_hours_are_left_out() -> None:
    hour = Hour([])
    mine = hour.log.publish(START_MS + 5)
    hour.log.publish(START_MS + HOUR_MS)
    hour.file()
    everything = hour.page(Position(0, 0), 2**60, 10)
    assert everything == [Position(START_MS + 5, mine)]
    other = Wanted(2, "other", Position(0, 0), 2**60, 10)
    steps = pending_rows(hour.disk.schedule, hour.disk.dispatch, hour.snapshot, other, REGISTRY)
    with pytest.raises(StopIteration) as end:
        while True:
            next(steps)
    assert not len(end.value.value.rows)


def test_work_comes_in_steps() -> None:
    """… so that whoever drives them can do other things in between."""
    hour = Hour([("publish", n % 100) if n % 2 else ("file",) for n in range(80)])
    wanted = Wanted(1, SUBJECT, Position(0, 0), 2**60, 5)
    one_by_one = patch.object(frame_runs, "FRAMES_MIN", 1000)
    with patch.object(pending, "STEP_ROWS", 10), one_by_one:
        steps = pending_rows(
            hour.disk.schedule, hour.disk.dispatch, hour.snapshot, wanted, REGISTRY
        )
        count = sum(1 for _ in steps)
    assert count == 2 * 40 // 10
    assert len(hour.page(Position(0, 0), 2**60, 5)) == 5
