"""The lag: the time since the latest moment of which all that the log had is known to be filed."""

from storage.replicated.lag import ASKED_MAX, SAMPLE_MS, Lag


def test_it_counts_from_the_beginning() -> None:
    lag = Lag(5000)
    assert lag.ms(7500) == 2500


def test_who_has_all_is_as_late_as_the_question() -> None:
    lag = Lag(0)
    for now_ms in range(1000, 9000, 200):
        lag.asked(now_ms, now_ms)
        lag.filed(now_ms)
        assert lag.ms(now_ms + 150) == 150


def test_what_is_read_and_not_filed_is_behind() -> None:
    lag = Lag(0)
    lag.asked(1000, 10)
    lag.filed(9)
    assert lag.ms(4000) == 4000
    lag.filed(10)
    assert lag.ms(4000) == 3000


def test_who_is_always_the_same_time_behind_stays_so() -> None:
    """Though the end is never reached: it is where it was some time ago."""
    lag = Lag(0)
    behind_ms = 20_000
    for now_ms in range(0, 200_000, 200):
        lag.asked(now_ms, now_ms)
        lag.filed(now_ms - behind_ms)
        if now_ms > 2 * behind_ms:
            assert behind_ms <= lag.ms(now_ms) <= behind_ms + SAMPLE_MS + 200


def test_it_grows_while_nobody_says_where_the_log_ends() -> None:
    lag = Lag(0)
    lag.asked(1000, 10)
    lag.filed(10)
    lag.filed(50)
    assert lag.ms(61_000) == 60_000
    lag.asked(61_000, 50)
    lag.filed(50)
    assert lag.ms(61_000) == 0


def test_what_is_kept_is_bounded_and_never_says_too_little() -> None:
    lag = Lag(0)
    for number in range(2 * ASKED_MAX):
        lag.asked(number * SAMPLE_MS, number)
    end_ms = 2 * ASKED_MAX * SAMPLE_MS
    lag.filed(ASKED_MAX - 1)
    assert lag.ms(end_ms) == end_ms, "those were forgotten"
    lag.filed(ASKED_MAX)
    assert lag.ms(end_ms) == end_ms - ASKED_MAX * SAMPLE_MS


def test_who_does_not_keep_up_is_stuck_while_the_log_answers() -> None:
    lag = Lag(0)
    assert lag.stuck_ms(9000) == 0
    for now_ms in range(1000, 61_000, 200):
        lag.asked(now_ms, 10)
        lag.filed(9)
    assert lag.stuck_ms(61_000) == 60_000
    lag.filed(10)
    assert lag.stuck_ms(61_000) == 0


def test_a_log_that_was_away_for_long_makes_nobody_stuck() -> None:
    lag = Lag(0)
    lag.asked(1000, 10)
    lag.could_not_ask()
    assert (lag.stuck_ms(4_000_000), lag.ms(4_000_000)) == (0, 4_000_000)
    lag.asked(4_000_000, 20)
    assert lag.stuck_ms(4_001_000) == 1000
    lag.filed(20)
    assert (lag.stuck_ms(4_001_000), lag.ms(4_001_000)) == (0, 1000)
