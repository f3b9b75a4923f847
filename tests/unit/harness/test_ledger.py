"""What the ledger writes down of clocks, shards, nodes and brokers. test_rules.py has the rules."""

import json
from pathlib import Path

import pytest

from delayserver.cli.demo.ledger import Outage, judge
from tests.harness.ledger import Ledger, ServerClock
from tests.unit.harness.book import DUE, IDS, Book


def test_within_a_step_both_clocks_count() -> None:
    clock = ServerClock()
    clock.set(-1000, 100, 110)
    assert clock.has_shown(109, 0, 109)
    assert not clock.has_shown(111, 0, 500)
    assert (clock.set_back_ms(0, 50), clock.set_back_ms(0, 105), clock.offset_ms) == (
        0,
        1000,
        -1000,
    )


@pytest.mark.parametrize("shard", [0, 1])
def test_lateness_counts_while_the_shard_was_there(shard: int) -> None:
    book = Book()
    order = book.publish(shard=shard)
    book.at_ms = DUE - 10
    book.went_down([1])
    book.at_ms += 5
    book.went_down([1])  # an outage begins with the first strike
    book.at_ms = DUE + 5
    book.came_back()
    book.deliver(order, DUE + 7)
    assert judge(book).lateness_ms == ([7] if shard == 0 else [])
    assert book.away[1] == [Outage(DUE - 10, DUE + 5)]


def test_a_message_has_no_shard_before_it_has_an_id() -> None:
    book = Book()
    order = book.publish(answer=False)
    book.struck([0], DUE, DUE + 1)
    assert not book.outages_of(order) and not book.may_come_late(order, DUE)
    assert not book.was_in_flight(order, order.received("hook", "none", DUE, settled=True), DUE + 1)


def test_it_knows_who_has_delivered_and_leased() -> None:
    book = Book()
    book.at_ms = 7
    for message_id in (IDS[1], "none"):
        book.delivered_by("n2", message_id)
    for lease in ("bebe260c1-1f-0", "none"):
        book.pulled(lease)
    assert [tuple(one) for one in book.deliveries] == [(7, 1, "n2", IDS[1])]
    assert [tuple(one) for one in book.pulls] == [(7, 1, "bebe260c1")]


def test_strikes_are_written_for_people(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.struck([0, "redis"], 5, 6)
    ledger.write(tmp_path / "ledger.jsonl")
    told = json.loads((tmp_path / "ledger.jsonl").read_text())
    assert told["excused_ms"] == {"0": [[5, 6]], "redis": [[5, 6]]}
