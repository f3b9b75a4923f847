"""ClockWatch: what somebody has set, and what goes wrong by itself."""

from delayserver.server.clock_watch import SET_MS, ClockWatch

HOUR_MS = 3_600_000


def test_a_clock_that_is_set_is_noticed_once_and_by_how_much() -> None:
    watch = ClockWatch(1_000_000, 5_000)
    assert watch.look(1_010_000, 15_000) == 0
    assert watch.look(1_020_000 - HOUR_MS, 25_000) == -HOUR_MS
    assert watch.look(1_030_000 - HOUR_MS, 35_000) == 0
    assert (watch.back_total, watch.ahead_total, watch.last_ms) == (1, 0, -HOUR_MS)
    assert watch.look(1_040_000, 45_000) == HOUR_MS
    assert (watch.back_total, watch.ahead_total, watch.last_ms) == (1, 1, HOUR_MS)


def test_time_that_passes_in_sleep_is_no_change_of_the_clock() -> None:
    watch = ClockWatch(0, 0)
    assert watch.look(24 * HOUR_MS, 24 * HOUR_MS) == 0


def test_what_a_clock_drifts_adds_up() -> None:
    watch = ClockWatch(0, 0)
    said = [watch.look(number * 1_000_400, number * 1_000_000) for number in range(1, 7)]
    assert said == [0, 0, 1200, 0, 0, 1200] and SET_MS == 1000
