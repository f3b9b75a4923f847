"""The wheel: never early, in due order, and a removed row never fires, wherever it stands."""

from __future__ import annotations

import weakref

import pytest

from delayserver.schedule import wheel as wheel_module
from delayserver.schedule.wheel import FRESH_ROWS, SLOTS_MAX, Wheel, build_run, merge_runs
from storage.rows import HOUR_MS
from tests.unit.fakes import seqs, wheel_rows

FOREVER_MS = 1 << 50
SLOTS = HOUR_MS // 500


def fire(
    wheel: Wheel, now_ms: int, *, loaded_until_ms: int = FOREVER_MS, rows_max: int = 1000
) -> list[int]:
    """Advance, and return the seqs that fired."""
    return seqs(wheel.advance(now_ms, loaded_until_ms=loaded_until_ms, rows_max=rows_max))


def test_the_worked_example() -> None:
    wheel = Wheel(0)
    wheel.load(0, [build_run(wheel_rows(0, (1, 700), (2, 1200), (3, 710)))])
    assert fire(wheel, 600) == []
    assert wheel.next_ms() == 700
    assert fire(wheel, 705) == [1]
    wheel.insert(0, wheel_rows(0, (4, 702)))
    assert fire(wheel, 705) == [4]
    assert wheel.next_ms() == 710
    assert fire(wheel, 1199) == [3]
    assert fire(wheel, 1200) == [2]


def test_nothing_fires_a_millisecond_early() -> None:
    wheel = Wheel(0)
    wheel.insert(0, wheel_rows(0, (1, 1000)))
    assert fire(wheel, 999) == []
    assert fire(wheel, 1000) == [1]


def test_rows_that_are_due_together_fire_in_the_order_of_their_seq() -> None:
    wheel = Wheel(0)
    wheel.insert(0, wheel_rows(0, (9, 700), (3, 700), (5, 600)))
    assert fire(wheel, 800) == [5, 3, 9]


def test_what_is_inserted_when_it_is_due_already_fires_at_the_next_advance() -> None:
    wheel = Wheel(0)
    assert fire(wheel, 10_000) == []
    wheel.insert(0, wheel_rows(0, (1, 20), (2, 20_000)))
    assert wheel.next_ms() == 20
    assert fire(wheel, 10_000) == [1]
    assert fire(wheel, 20_000) == [2]


def test_a_batch_holds_rows_of_one_hour() -> None:
    wheel = Wheel(0)
    wheel.insert(0, wheel_rows(0, (1, HOUR_MS - 1)))
    wheel.insert(1, wheel_rows(1, (2, HOUR_MS)))
    batches = wheel.advance(HOUR_MS, loaded_until_ms=FOREVER_MS, rows_max=1000)
    assert [(batch.hour, batch.rows["seq"].tolist()) for batch in batches] == [(0, [1]), (1, [2])]
    assert [batch.rows["due_offset_ms"].tolist() for batch in batches] == [[HOUR_MS - 1], [0]]


@pytest.mark.parametrize("where", ["loaded", "tail", "run", "merged", "open", "open and fresh"])
def test_a_removed_row_never_fires(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = Wheel(0)
    rows = wheel_rows(0, *[(seq, 700 + seq) for seq in range(1, 9)])
    if where in ("run", "merged"):
        monkeypatch.setattr(wheel_module, "RUN_ROWS", 4)
        monkeypatch.setattr(wheel_module, "MERGED_RUN_ROWS", 8 if where == "merged" else 100)
    if where == "loaded":
        wheel.load(0, [build_run(rows)])
    elif where == "open and fresh":
        assert fire(wheel, 600) == []
        wheel.insert(0, rows)
    else:
        wheel.insert(0, rows)
    if where == "open":
        assert fire(wheel, 600) == []

    assert wheel.contains(3, 703)
    removed = wheel.remove(3, 703)
    assert removed is not None
    assert removed["seq"].tolist() == [3]
    assert removed["due_offset_ms"].tolist() == [703]
    assert not wheel.contains(3, 703)
    assert wheel.remove(3, 703) is None
    assert fire(wheel, 2000) == [1, 2, 4, 5, 6, 7, 8]


def test_a_row_is_not_found_under_another_due_time_or_after_it_fired() -> None:
    wheel = Wheel(0)
    wheel.load(0, [build_run(wheel_rows(0, (1, 700), (2, 1700)))])
    assert wheel.remove(1, 1700) is None
    assert wheel.remove(1, HOUR_MS + 700) is None
    assert fire(wheel, 700) == [1]
    assert not wheel.contains(1, 700)
    assert wheel.contains(2, 1700)


def test_a_row_that_was_removed_can_be_put_back() -> None:
    wheel = Wheel(0)
    wheel.load(0, [build_run(wheel_rows(0, (1, 700)))])
    row = wheel.remove(1, 700)
    assert row is not None
    wheel.insert(0, row)
    assert wheel.contains(1, 700)
    assert fire(wheel, 700) == [1]


def test_a_clock_that_is_set_back_fires_nothing_twice_and_nothing_early() -> None:
    wheel = Wheel(0)
    wheel.insert(0, wheel_rows(0, (1, 700), (2, 9_000), (3, 9_400)))
    assert fire(wheel, 9_100) == [1, 2]
    assert fire(wheel, 500) == []
    # Its slot was opened before the clock was set back.
    wheel.insert(0, wheel_rows(0, (4, 800)))
    assert fire(wheel, 799) == []
    assert fire(wheel, 800) == [4]
    assert fire(wheel, 9_399) == []
    assert fire(wheel, 9_400) == [3]


def test_no_slot_that_is_not_loaded_is_opened() -> None:
    wheel = Wheel(0)
    assert fire(wheel, HOUR_MS + 5_000, loaded_until_ms=HOUR_MS) == []
    assert wheel.next_ms() == HOUR_MS
    wheel.load(1, [build_run(wheel_rows(1, (1, HOUR_MS + 10)))])
    assert fire(wheel, HOUR_MS + 5_000) == [1]


def test_empty_hours_are_passed_over_without_opening_their_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wheel = Wheel(0)
    wheel.insert(1000, wheel_rows(1000, (1, 1000 * HOUR_MS + 3)))
    opened: list[int] = []
    open_next = Wheel._open_next_slot

    def counting(self: Wheel, until_ms: int) -> bool:
        opened.append(until_ms)
        return open_next(self, until_ms)

    monkeypatch.setattr(Wheel, "_open_next_slot", counting)
    assert fire(wheel, 1000 * HOUR_MS + 2) == []
    assert fire(wheel, 1000 * HOUR_MS + 3) == [1]
    assert len(opened) < 1010


def test_after_a_long_sleep_some_slots_are_opened_at_a_time() -> None:
    wheel = Wheel(0)
    wheel.insert(0, wheel_rows(0, *[(seq, seq * 500) for seq in range(1, 2 * SLOTS_MAX + 1)]))
    now_ms = HOUR_MS - 1
    assert fire(wheel, now_ms) == list(range(1, SLOTS_MAX + 1))
    assert wheel.is_behind(now_ms, HOUR_MS)
    assert fire(wheel, now_ms) == list(range(SLOTS_MAX + 1, 2 * SLOTS_MAX + 1))
    assert fire(wheel, now_ms) == []  # the rest of the hour is passed over
    assert not wheel.is_behind(now_ms, HOUR_MS)


def test_no_more_routes_fire_together_than_are_asked_for() -> None:
    wheel = Wheel(0)
    routes = [1, 1, 2, 1, 3, 3, 2, 4]
    for seq, route in enumerate(routes, 1):
        wheel.insert(0, wheel_rows(0, (seq, 100), route=route))
    fired = []
    while wheel.is_behind(100, HOUR_MS):
        fired.append(seqs(wheel.advance(100, loaded_until_ms=HOUR_MS, rows_max=1000, routes_max=2)))
    assert fired == [[1, 2, 3, 4], [5, 6, 7], [8]]


def test_passing_over_an_empty_hour_stops_at_the_moment_asked_for() -> None:
    wheel = Wheel(0)
    assert fire(wheel, 90_200) == []
    assert wheel.next_ms() == 90_500
    wheel.insert(0, wheel_rows(0, (1, 90_700)))
    assert fire(wheel, 90_699) == []
    assert fire(wheel, 90_700) == [1]


def test_an_hour_may_be_loaded_long_after_it_began() -> None:
    wheel = Wheel(0)  # as a start does it: from the first hour that is loaded
    wheel.load(0, [build_run(wheel_rows(0, (1, 200), (2, 1300), (3, HOUR_MS - 1)))])
    wheel.load(1, [build_run(wheel_rows(1, (4, HOUR_MS + 7)))])
    assert fire(wheel, HOUR_MS + 5, rows_max=2) == [1, 2]
    assert wheel.contains(3, HOUR_MS - 1)
    assert wheel.next_ms() <= HOUR_MS
    assert fire(wheel, HOUR_MS + 5, rows_max=2) == [3]
    assert fire(wheel, HOUR_MS + 7) == [4]
    assert fire(wheel, 2 * HOUR_MS) == []


def test_a_run_is_given_back_once_its_last_slot_was_opened() -> None:
    wheel = Wheel(0)
    rows = wheel_rows(0, *[(seq, 1000 * seq) for seq in range(1, 7)])
    runs, _ = merge_runs([rows], run_rows=2)
    assert [run.rows["seq"].tolist() for run in runs] == [[1, 2], [3, 4], [5, 6]]
    room = [weakref.ref(run.rows) for run in runs]
    wheel.load(0, runs)
    del runs
    assert fire(wheel, 2_000) == [1, 2]
    gone = [ref() is None for ref in room]
    assert gone == [True, False, False]
    assert wheel.remove(4, 4_000) is not None
    assert fire(wheel, 4_000) == [3]
    assert fire(wheel, HOUR_MS) == [5, 6]
    assert all(ref() is None for ref in room)


def test_what_comes_after_a_run_was_given_back_fires() -> None:
    wheel = Wheel(0)
    wheel.load(0, merge_runs([wheel_rows(0, (1, 700), (2, 9_700))], run_rows=1)[0])
    assert fire(wheel, 5_000) == [1]
    wheel.insert(0, wheel_rows(0, (3, 800), (4, 9_600)))
    assert fire(wheel, 10_000) == [3, 4, 2]


def test_no_more_rows_fire_at_a_time_than_asked_for() -> None:
    wheel = Wheel(0)
    wheel.load(0, [build_run(wheel_rows(0, *[(seq, 100 * seq) for seq in range(1, 30)]))])
    assert fire(wheel, 5_000, rows_max=10) == list(range(1, 11))
    assert wheel.next_ms() <= 5_000
    assert fire(wheel, 5_000, rows_max=10) == list(range(11, 21))
    assert fire(wheel, 5_000, rows_max=10) == list(range(21, 30))


def test_many_inserts_into_open_slots_keep_their_order() -> None:
    wheel = Wheel(0)
    assert fire(wheel, 10_000) == []
    count = 2 * FRESH_ROWS + 10
    for seq in range(1, count + 1):
        wheel.insert(0, wheel_rows(0, (seq, 10_000 - seq)))
    assert fire(wheel, 10_000) == list(range(count, 0, -1))


def test_next_ms_is_the_next_row_or_the_next_slot() -> None:
    wheel = Wheel(0)
    assert wheel.next_ms() == 0
    assert fire(wheel, 0) == []
    assert wheel.next_ms() == 500
    wheel.insert(0, wheel_rows(0, (1, 499), (2, 700)))
    assert wheel.next_ms() == 499
    assert fire(wheel, 499) == [1]
    assert wheel.next_ms() == 500
    assert fire(wheel, 500) == []
    assert wheel.next_ms() == 700


def test_a_run_is_sorted_by_slot_and_keeps_the_order_within_one() -> None:
    run = build_run(wheel_rows(0, (1, 1400), (2, 300), (3, 1200), (4, HOUR_MS - 1)))
    assert run.rows["seq"].tolist() == [2, 1, 3, 4]
    assert len(run.pointers) == SLOTS + 1
    assert run.pointers[[0, 1, 2, 3]].tolist() == [0, 1, 1, 3]
    assert run.pointers[[SLOTS - 1, SLOTS]].tolist() == [3, 4]
    assert (run.first_seq, run.last_seq) == (1, 4)
