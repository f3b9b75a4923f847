"""Schedules: where one stands, also when zones change and when the clock is set back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayserver.parts.schedules.records import (
    ENDED,
    ENDED_MS,
    STATE_BYTES,
    Schedule,
    ScheduleState,
    as_zones_are,
    behind,
    next_times,
    pack_state,
    read_state,
    set_back,
    stepped,
    unpack_state,
    upcoming,
)
from delayserver.parts.schedules.recurrence import Planned
from delayserver.records.message import Payload, encode_payload
from delayserver.times import format_time, parse_time_ms

MINUTE_MS, DAY_MS = 60_000, 86_400_000
NOW_MS = parse_time_ms("2026-11-27T10:00:00Z")
NINE = Schedule("nine", 1, encode_payload(Payload(b"1")), "0 9 * * *", 0, "Europe/Berlin", 0)
EVERY = Schedule("every", 1, encode_payload(Payload(b"1")), "", MINUTE_MS, "UTC", 0)
numbers = st.integers(0, 2**40)


def state_of(schedule: Schedule, now_ms: int = NOW_MS, **fields: Any) -> ScheduleState:
    planned = schedule.following(now_ms)
    state = ScheduleState(1, 1, now_ms, ENDED_MS, since_ms=planned.time_ms).at(planned)
    return msgspec.structs.replace(state, **fields)


@given(st.lists(numbers, min_size=10, max_size=10), st.lists(numbers, max_size=5))
def test_a_state_is_read_as_it_was_written(first: list[int], more: list[int]) -> None:
    values: list[Any] = [*first, True, *more]
    state = ScheduleState(*values)
    written = state.pack()
    assert len(written) == STATE_BYTES[any(more)] and unpack_state(written) == state
    assert read_state(written) == (state, b"", "")
    assert next_times([written]).tolist() == [state.next_ms]


def test_states_of_all_versions_are_read_at_a_start() -> None:
    old = ScheduleState(1, 1, 1, 41).pack()
    new = ScheduleState(1, 1, 1, 42, since_ms=5).pack()
    assert (len(old), len(new)) == (81, 121) == STATE_BYTES
    assert next_times([old, new, new + b"newer", b"", b"short"]).tolist() == [41, 42, 42, 0, 0]


def test_a_state_of_a_newer_server_keeps_what_it_has_grown_by() -> None:
    for state in (ScheduleState(1, 2, 3, 4), ScheduleState(1, 2, 3, 4, since_ms=9)):
        newer = state.pack().ljust(STATE_BYTES[1], b"\0") + b"newer"
        found, tail, problem = read_state(newer)
        assert (found, tail) == (state, b"newer") and "not known here" in problem
        assert pack_state(found, tail or b"") == newer
    assert read_state(b"short")[1:] == (None, read_state(b"short")[2]) and read_state(b"short")[2]


def test_the_moment_follows_the_reading_when_the_rules_change() -> None:
    state = state_of(NINE)
    assert format_time(state.next_ms) == "2026-11-28T08:00:00.000Z"
    assert as_zones_are(NINE, state) == state
    # Berlin had New York's rules when that was planned.
    moved = msgspec.structs.replace(state, next_ms=state.next_ms + 6 * 3_600_000)
    moved = msgspec.structs.replace(moved, since_ms=moved.next_ms)
    assert as_zones_are(NINE, moved) == state
    # Runs that were made since then stay so.
    run = msgspec.structs.replace(moved, since_ms=state.next_ms - DAY_MS)
    assert as_zones_are(NINE, run).since_ms == state.next_ms - DAY_MS


@pytest.mark.parametrize(
    ("schedule", "fields"),
    [(EVERY, {}), (NINE, {"next_reading_ms": 0}), (NINE, {"next_ms": ENDED_MS})],
)
def test_a_state_without_a_reading_stays_as_it_is(schedule: Schedule, fields: Any) -> None:
    state = state_of(schedule, **fields)
    assert as_zones_are(schedule, state) == state


def test_a_clock_that_was_a_year_ahead_is_no_longer_waited_for() -> None:
    ahead = state_of(NINE, NOW_MS + 365 * DAY_MS)
    assert set_back(NINE, ahead, NOW_MS + 365 * DAY_MS) is None
    back = set_back(NINE, ahead, NOW_MS)
    assert back is not None and back.planned == state_of(NINE).planned
    assert set_back(NINE, back, NOW_MS) is None
    shown = list(upcoming(NINE, back, NOW_MS, 3))
    assert shown == [back.next_ms + day * DAY_MS for day in range(3)]


def test_what_was_run_is_not_planned_again() -> None:
    ran = state_of(EVERY, since_ms=NOW_MS - 30 * MINUTE_MS)
    assert set_back(EVERY, ran, NOW_MS - 30 * MINUTE_MS) is None
    # Ten minutes were left out before; an hour before them all was run.
    left = msgspec.structs.replace(ran, left_from_ms=NOW_MS - 40 * MINUTE_MS)
    for back_min in (35, 90):
        again = set_back(EVERY, left, NOW_MS - back_min * MINUTE_MS)
        assert again is not None
        first_ms = max(NOW_MS - back_min * MINUTE_MS + MINUTE_MS, left.left_from_ms)
        assert again.next_ms == again.since_ms == first_ms
        last = NOW_MS - 31 * MINUTE_MS
        assert behind(EVERY, again, last) == left.planned
        assert stepped(again, left.planned).passed_from_ms == 0
        assert stepped(again, Planned(last)).passed_from_ms == ran.since_ms


def test_a_schedule_that_ended_by_a_clock_that_was_ahead_goes_on() -> None:
    ending = msgspec.structs.replace(EVERY, end_ms=NOW_MS + 5 * MINUTE_MS)
    left = ScheduleState(1, 1, 1, ENDED_MS, since_ms=NOW_MS + 5 * MINUTE_MS + 1, left_from_ms=1)
    again = set_back(ending, left, NOW_MS)
    assert again is not None and again.next_ms == NOW_MS + MINUTE_MS
    assert behind(ending, again, NOW_MS + 5 * MINUTE_MS) == ENDED
    assert stepped(again, ENDED).passed_from_ms == 0
    over = msgspec.structs.replace(ending, runs_max=0)
    assert set_back(over, left, NOW_MS) is None
