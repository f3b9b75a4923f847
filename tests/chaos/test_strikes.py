"""How rounds are drawn, and what is measured."""

import re
from pathlib import Path

import pytest

from delayserver.cli.demo.ledger import Outage
from tests.chaos.strikes import CUTS, HOLD_S, LOAD_S, Strike, schedule
from tests.chaos.times import measure
from tests.unit.harness.book import Book


def test_a_deck_has_each_kind_once():
    for deck in range(3):
        numbers = range(deck * len(Strike), (deck + 1) * len(Strike))
        drawn = [schedule().round(7, number).strikes for number in numbers]
        assert sorted(drawn) == sorted((strike,) for strike in Strike)


def test_rounds_are_as_they_are_said_to_be():
    plans = [schedule().round(seed, 3) for seed in range(300)]
    assert all(LOAD_S[0] <= plan.load_s <= LOAD_S[1] for plan in plans)
    assert all(HOLD_S[0] <= plan.hold_s <= HOLD_S[1] for plan in plans)
    assert {plan.strikes for plan in plans} == {(strike,) for strike in Strike}


def test_a_seed_does_the_same_again():
    one, again = schedule().round(7, 5), schedule().round(7, 5)
    assert (one.strikes, one.load_s, one.hold_s) == (again.strikes, again.load_s, again.hold_s)
    assert one.chance.random() == again.chance.random()


def test_only_some_kinds():
    assert {*schedule("cut").deck} == CUTS
    assert not {*schedule(can_cut=False).deck} & CUTS
    with pytest.raises(ValueError, match="needs namespaces"):
        schedule("cut", can_cut=False)


def test_the_table_of_what_may_fail_names_each_strike():
    text = (Path(__file__).parents[1] / "EVIDENCE.md").read_text("utf-8")
    section = text.partition("## What may fail in a cluster\n")[2].partition("\n## ")[0]
    rows = [row.split(" | ") for row in section.splitlines() if row.startswith("| ")]
    named = [strike for row in rows for strike in re.findall("`(.+?)`", row[-1])]
    assert sorted(named) == sorted(Strike)


@pytest.fixture
def book():
    """Answers at 1 to 10 and 14 to 20 s, deliveries a bit later; 14 was asked for at 9."""
    book = Book()
    for at_s in (*range(1, 11), *range(14, 21)):
        book.at_ms = 9000 if at_s == 14 else 1000 * at_s - 500
        order = book.publish(due_ms=0, answer=False)
        book.at_ms = 1000 * at_s
        book.publish_answered(order, f"0001{at_s:032}", 0)
        book.deliver(order, 1000 * at_s + 100)
    return book


def test_a_call_that_was_under_way_is_no_answer_to_a_later_one(book):
    found = measure("a strike", 4, 1, 1, book.orders, Outage(10_200, 18_000))
    assert (found.strike, found.round, found.shard, found.handovers) == ("a strike", 4, 1, 1)
    assert found.next_answer_s == pytest.approx(4.8)
    assert found.answer_silence_s == pytest.approx(3.8)
    assert found.next_delivery_s == pytest.approx(3.9)
    assert found.delivery_silence_s == pytest.approx(3.9)


def test_nothing_may_have_come(book):
    found = measure("a strike", 4, 1, 1, book.orders, Outage(21_000, 25_000))
    assert found.next_answer_s is None
    assert found.next_delivery_s is None
    assert found.answer_silence_s == found.delivery_silence_s == 4


def test_figures_have_a_case(book):
    figure = measure("a strike", 4, 1, 0, book.orders, Outage(10_200, 18_000)).to_json()
    assert figure["case"] == "strike, a strike"
    assert figure["next_answer_s"] == pytest.approx(4.8)
