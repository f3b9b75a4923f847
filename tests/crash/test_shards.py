"""What the ledger of several shards excuses, and how rounds are drawn."""

import random

import pytest

from delayserver.cli.demo.ledger import RECORD_MS, judge
from tests.crash.shards import BLOWS, Blow, ShardsLedger, plan_round, shard_of_order

DUE = 1000
IDS = ("0000" + 32 * "1", "0001" + 32 * "1")
"""Of shard 0 and of shard 1."""


class Clocked(ShardsLedger):
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
    ledger.receive("hook", message_id, order.body, settled=True)


@pytest.mark.parametrize("shard", [0, 1])
def test_a_kill_excuses_a_repetition_of_its_shard_alone(ledger, shard):
    order = published(ledger, shard)
    deliver(ledger, order, DUE)
    ledger.at_ms = DUE + 10
    ledger.went_down([1], killed=True)
    ledger.came_back()
    deliver(ledger, order, DUE + 2 * RECORD_MS)
    assert bool(judge(ledger).repeated_recorded) == (shard == 0)


def test_a_shard_that_ended_in_order_excuses_nothing(ledger):
    order = published(ledger, 1)
    deliver(ledger, order, DUE)
    ledger.at_ms = DUE + 10
    ledger.went_down([0, 1], killed=False)
    ledger.came_back()
    deliver(ledger, order, DUE + 2 * RECORD_MS)
    assert judge(ledger).repeated_recorded == [order]


@pytest.mark.parametrize("shard", [0, 1])
def test_lateness_counts_while_the_shard_was_there(ledger, shard):
    order = published(ledger, shard)
    ledger.at_ms = DUE - 10
    ledger.went_down([1], killed=True)
    ledger.at_ms = DUE + 5
    ledger.came_back()
    deliver(ledger, order, DUE + 7)
    assert judge(ledger).lateness_ms == ([7] if shard == 0 else [])


def test_an_outage_begins_with_the_first_kill(ledger):
    order = published(ledger, 1)
    for at_ms in (100, 200):
        ledger.at_ms = at_ms
        ledger.went_down([1], killed=True)
    ledger.at_ms = 300
    ledger.came_back()
    ((outage,), kills_ms) = ledger.outages_of(order), ledger.kills_of(order)
    assert (outage.down_ms, outage.up_ms, kills_ms) == (100, 300, [100, 200])
    assert ledger.times() == {
        "shards": [
            {"outages_ms": [], "kills_ms": []},
            {"outages_ms": [[100, 300]], "kills_ms": [100, 200]},
        ]
    }


def test_nobody_has_what_nobody_has_named(ledger):
    order = ledger.order("hook", ("hook",))
    assert shard_of_order(order) is None
    assert not ledger.kills_of(order)
    assert not ledger.outages_of(order)


def test_rounds_are_as_they_are_said_to_be():
    chance = random.Random(1)
    plans = [plan_round(chance) for _ in range(2000)]
    blows = [blow for plan in plans for blow in plan.blows]
    assert sum(BLOWS.values()) == 100
    for blow in Blow:
        assert blows.count(blow) / len(blows) == pytest.approx(BLOWS[blow] / 100, abs=0.03)
    assert all(plan.blows for plan in plans)
    assert any(len(plan.blows) > 2 for plan in plans)
