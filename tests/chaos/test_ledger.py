"""What the ledger of a cluster excuses, and what it does not."""

import pytest

from delayserver.cli.demo.ledger import RECORD_MS, judge
from tests.chaos.ledger import THAW_MS, ChaosLedger, Span

DUE = 100_000
IDS = ("0000" + 32 * "1", "0001" + 32 * "1")
"""Of shard 0 and of shard 1."""


class Clocked(ChaosLedger):
    """Its clock stands still."""

    at_ms = 0

    def now_ms(self) -> int:
        return self.at_ms


@pytest.fixture
def ledger() -> Clocked:
    return Clocked(2)


def published(ledger, shard):
    ledger.at_ms = 0
    order = ledger.order("hook", ("hook",))
    ledger.publish_asked(order, DUE)
    ledger.publish_answered(order, IDS[shard], DUE)
    return order


def deliver(ledger, order, at_ms):
    ledger.at_ms = at_ms
    (message_id,) = order.message_ids
    return ledger.receive("hook", message_id, order.body, settled=True)


@pytest.mark.parametrize("shard", [0, 1])
def test_a_handover_excuses_a_repetition_of_its_shard_alone(ledger, shard):
    order = published(ledger, shard)
    deliver(ledger, order, DUE)
    ledger.handovers[1].append(Span(DUE + 10, DUE + 4000))
    deliver(ledger, order, DUE + 5000)
    assert bool(judge(ledger).repeated_recorded) == (shard == 0)


def test_a_delivery_long_before_a_handover_was_recorded(ledger):
    order = published(ledger, 0)
    deliver(ledger, order, DUE)
    ledger.handovers[0].append(Span(DUE + RECORD_MS + 1, DUE + 4000))
    deliver(ledger, order, DUE + 5000)
    assert judge(ledger).repeated_recorded == [order]


def test_a_delivery_of_the_next_owner_was_not_under_way_at_the_handover(ledger):
    order = published(ledger, 0)
    ledger.handovers[0].append(Span(DUE - 4000, DUE - 1000))
    deliver(ledger, order, DUE)
    deliver(ledger, order, DUE + 5000)
    assert judge(ledger).repeated_recorded == [order]


def test_an_acknowledgement_that_was_answered_is_never_excused(ledger):
    order = published(ledger, 0)
    deliver(ledger, order, DUE).acknowledged(DUE)
    ledger.handovers[0].append(Span(DUE + 10, DUE + 4000))
    deliver(ledger, order, DUE + 5000)
    assert judge(ledger).repeated_recorded == [order]


@pytest.mark.parametrize(("behind_ms", "is_excused"), [(0, True), (THAW_MS + 1, False)])
def test_who_thaws_may_deliver_late(ledger, behind_ms, is_excused):
    order = published(ledger, 0)
    deliver(ledger, order, DUE).acknowledged(DUE)
    ledger.thaws[0].append(Span(DUE + 9000, DUE + 9000 + THAW_MS))
    deliver(ledger, order, DUE + 9000 + behind_ms)
    assert bool(judge(ledger).repeated_recorded) != is_excused


def test_who_thaws_may_deliver_what_was_cancelled_meanwhile(ledger):
    order = published(ledger, 0)
    order.cancelled_ms = DUE + 5000
    deliver(ledger, order, DUE + 9000)
    assert judge(ledger).fired_cancelled == [order]
    ledger.thaws[0].append(Span(DUE + 9000, DUE + 9000 + THAW_MS))
    assert not judge(ledger).fired_cancelled


def test_an_owner_that_is_cut_off_cannot_hear_that_it_has_delivered(ledger):
    order = published(ledger, 0)
    deliver(ledger, order, DUE)
    ledger.cut_off[0].append(Span(DUE, DUE + 3000))
    deliver(ledger, order, DUE + 3100)
    assert not judge(ledger).repeated_recorded


def test_a_publish_that_was_held_up_is_never_excused(ledger):
    """Its key is that of the message that was answered and cancelled, and stays taken."""
    order = published(ledger, 0)
    order.cancelled_ms = DUE - 50
    ledger.at_ms = DUE
    ledger.receive("hook", IDS[0][:-1] + "2", order.body, settled=True)
    verdict = judge(ledger)
    assert verdict.other_id == verdict.fired_cancelled == [order]
    ledger.thaws[0].append(Span(DUE, DUE + THAW_MS))
    assert judge(ledger).other_id == [order]


@pytest.mark.parametrize(("early_ms", "is_early"), [(900, False), (901, True)])
def test_clocks_that_differ_may_be_early_by_as_much(ledger, early_ms, is_early):
    order = published(ledger, 0)
    ledger.skew_ms = 900
    deliver(ledger, order, DUE - early_ms)
    assert bool(judge(ledger).early) == is_early


def test_clocks_that_differed_before_excuse_nothing(ledger):
    ledger.skew_ms = 900
    ledger.skew_ms = 0
    order = published(ledger, 0)
    deliver(ledger, order, DUE - 1)
    assert judge(ledger).early == [order]


def test_it_knows_who_has_delivered_and_leased(ledger):
    ledger.at_ms = 7
    assert ledger.delivered_by("n2", IDS[1]) == 1
    assert ledger.delivered_by("n2", "none") is None
    ledger.pulled("bebe260c1-1f-0")
    ledger.pulled("none")
    assert [tuple(one) for one in ledger.deliveries] == [(7, 1, "n2", IDS[1])]
    assert [tuple(one) for one in ledger.pulls] == [(7, 1, "bebe260c1")]
