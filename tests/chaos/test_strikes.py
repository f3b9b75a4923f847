"""How rounds are drawn, and what is measured."""

import re
from pathlib import Path

import pytest

from tests.chaos.strikes import HOLD_S, LOAD_S, Strike, plan_round
from tests.chaos.times import ShardTimes, measure

KINDS = tuple(Strike)


def test_a_deck_has_each_kind_once():
    for deck in range(3):
        numbers = range(deck * len(KINDS), (deck + 1) * len(KINDS))
        drawn = [plan_round(7, number, 2, KINDS).strike for number in numbers]
        assert sorted(drawn) == sorted(KINDS)


def test_rounds_are_as_they_are_said_to_be():
    plans = [plan_round(seed, 3, 2, KINDS) for seed in range(300)]
    assert {plan.shard for plan in plans} == {0, 1}
    assert all(LOAD_S[0] <= plan.load_s <= LOAD_S[1] for plan in plans)
    assert all(HOLD_S[0] <= plan.hold_s <= HOLD_S[1] for plan in plans)
    assert {plan.strike for plan in plans} == set(KINDS)


def test_a_seed_does_the_same_again():
    one, again = plan_round(7, 5, 2, KINDS), plan_round(7, 5, 2, KINDS)
    assert one[:4] == again[:4]
    assert one.chance.random() == again.chance.random()


def test_the_table_of_what_may_fail_names_each_strike():
    text = (Path(__file__).parents[1] / "EVIDENCE.md").read_text("utf-8")
    section = text.partition("## What may fail in a cluster\n")[2].partition("\n## ")[0]
    rows = [row.split(" | ") for row in section.splitlines() if row.startswith("| ")]
    named = [strike for row in rows for strike in re.findall("`(.+?)`", row[-1])]
    assert sorted(named) == sorted(KINDS)


@pytest.fixture
def times():
    """Answers at 1 to 10 and 14 to 20, deliveries a bit later; 14 was asked for at 9."""
    times = ShardTimes()
    for at_s in (*range(1, 11), *range(14, 21)):
        times.answered(9 if at_s == 14 else at_s - 0.5, at_s)
        times.delivered(at_s + 0.1)
    return times


def test_what_was_under_way_is_no_answer_to_what_came_after(times):
    found = measure("a strike", 4, 1, 1, times, 10.2, 18)
    assert (found.strike, found.round, found.shard, found.handovers) == ("a strike", 4, 1, 1)
    assert found.next_answer_s == pytest.approx(4.8)
    assert found.answer_silence_s == pytest.approx(3.8)
    assert found.next_delivery_s == pytest.approx(3.9)
    assert found.delivery_silence_s == pytest.approx(3.9)


def test_nothing_may_have_come(times):
    found = measure("a strike", 4, 1, 1, times, 21, 25)
    assert found.next_answer_s is None
    assert found.next_delivery_s is None
    assert found.answer_silence_s == found.delivery_silence_s == 4


def test_figures_have_a_case(times):
    figure = measure("a strike", 4, 1, 0, times, 10.2, 18).to_json()
    assert figure["case"] == "strike, a strike"
    assert figure["next_answer_s"] == pytest.approx(4.8)
