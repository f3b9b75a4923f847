"""Short crash runs; `scripts/crash` makes long ones."""

import asyncio

import pytest

from delayserver.cli.demo.ledger import Order
from delayserver.cli.demo.process import ServerFailed
from delayserver.records.message import State
from tests.crash.backups import Facts
from tests.crash.harness import CrashRun
from tests.crash.shards import Blow, ShardsCrashRun, shard_of_order
from tests.load import HOUR_MS
from tests.long_run import describe, report_of

pytestmark = [pytest.mark.crash, pytest.mark.slow]

SEEDS = (10,)
"""In the first four rounds of 10 the hour changes, recoveries and checkpoints are killed, and the
files are checked. A seed that fails in a long run is added here."""


@pytest.mark.parametrize("seed", SEEDS)
def test_killed_again_and_again(seed, tmp_path):
    outcome = asyncio.run(CrashRun(tmp_path, seed=seed, rounds=4).run())
    assert outcome.is_clean, "\n".join(describe(outcome))
    # A run in which nothing happened proves nothing.
    assert outcome.counts["kills"] > 4
    assert outcome.counts["kills during start"] >= 1
    assert outcome.counts["kills in a checkpoint"] >= 1
    assert outcome.counts["hour changes"] >= 1
    assert outcome.counts["checks of the files"] >= 2
    assert outcome.counts["backups"] + outcome.counts["backups cut off"] >= 1
    assert outcome.verdict.delivered > 100
    assert outcome.verdict.cancelled > 10
    assert outcome.counts["acknowledged"] > 50
    figures = {figure["case"]: figure["value"] for figure in report_of(outcome)["figures"]}
    assert (figures["kills"], figures["lost"]) == (outcome.counts["kills"], 0)


def test_what_nobody_could_wait_for_is_not_called_lost(tmp_path):
    class Fails(CrashRun):
        async def _end(self, publishers):
            await self._publish_no_more(publishers)
            await self._kill()
            raise ServerFailed("the server was not ready in 60 s")

    outcome = asyncio.run(Fails(tmp_path, seed=10, rounds=1).run())
    assert outcome.failures == ["the server was not ready in 60 s"] and not outcome.is_clean
    assert outcome.counts["not waited for"] > 0 and outcome.verdict.lost == []


SHARDS_SEEDS = (10834,)
"""In the two rounds of 10834 one shard is killed, and all while it starts; near an hour two are,
and the supervisor while they start."""


@pytest.mark.timeout(300)  # 20 starts of Python
@pytest.mark.parametrize("seed", SHARDS_SEEDS)
def test_shards_are_killed_one_by_one_and_together(seed, tmp_path):
    outcome = asyncio.run(ShardsCrashRun(tmp_path, shards=3, seed=seed, rounds=2).run())
    assert outcome.is_clean, "\n".join(describe(outcome))
    for blow in Blow:
        assert outcome.counts[f"kills of {blow}"] >= 1
    assert outcome.counts["kills during start"] >= 2
    assert outcome.counts["hour changes"] >= 1
    assert outcome.counts["checks of the files"] >= 2
    assert outcome.verdict.delivered > 100
    assert outcome.verdict.cancelled > 10
    assert outcome.counts["acknowledged"] > 50
    # What has no key stays where it came in.
    orders = outcome.ledger.orders
    assert {shard_of_order(one) for one in orders if one.key is None} >= {0, 1, 2}
    assert {shard_of_order(one) for one in orders if one.key is not None} >= {0, 1, 2}


def test_a_batch_that_is_heard_late_is_due_when_the_ledger_says(tmp_path, monkeypatch):
    run = CrashRun(tmp_path, seed=10, rounds=1)
    heard = []

    async def ask(_method, _where, documents):
        run.ledger.offset_ms += HOUR_MS  # the clock is set forward before the server hears of it
        heard.extend(documents)
        return 200, {"ids": [str(index) for index in range(len(documents))]}

    monkeypatch.setattr(run, "_ask_once", ask)
    monkeypatch.setattr(run, "_follow", lambda order, delay_ms: None)
    asyncio.run(run._publish_batch())
    assert [order.due_ms for order in run.ledger.orders] == [
        document["deliver_at"] for document in heard
    ]
    assert "delay" not in heard[0]


def test_parts_of_a_batch_are_what_each_shard_said(tmp_path, monkeypatch):
    """A part that is durable counts, what was refused must not come, and the rest may."""
    run = ShardsCrashRun(tmp_path, shards=2, seed=1, rounds=1)
    monkeypatch.setattr(run, "MIXED_SHARE", 1.0)
    monkeypatch.setattr(run, "_follow", lambda order, delay_ms: None)
    problem: dict[str, str] = {}

    async def answer(_method, _where, _headers, documents=None):
        ids = [f"{index:036x}" if index % 2 else None for index in range(len(documents))]
        return 503, {"ids": ids, **problem}

    async def call(_client, method, where, documents):
        return await answer(method, where, {}, documents)

    monkeypatch.setattr("tests.load.call", call)
    monkeypatch.setattr(run, "_client", None, raising=False)
    for outcome in ({}, {"outcome": "unknown"}):
        problem.clear()
        problem.update(outcome)
        begin = len(run.ledger.orders)
        asyncio.run(run._publish_batch())
        orders = run.ledger.orders[begin:]
        assert [one.answered for one in orders] == [bool(i % 2) for i in range(len(orders))]
        assert [one.refused for one in orders] == [
            not outcome and not one.answered for one in orders
        ]


def test_what_a_backup_has_not_as_it_was_is_named():
    def order(number, **facts):
        made = Order(number, "load.pull", None, ("pull",), {}, message_ids={str(number)}, **facts)
        made.answered = True
        return made

    settled = order(3)
    settled.received("pull", "3", 5, settled=False).acknowledged(6)
    before = [order(1), order(2, cancelled_ms=5), settled, order(4, cancel_asked=True)]
    facts = Facts("one", before, 0)
    facts.completed()
    before.append(order(5))

    def broken(*states):
        named = dict(zip("12345", states, strict=True))
        return [text.split("'")[1] for text in facts._broken(named, {"5"} & {*named})]

    scheduled, cancelled, delivered = State.SCHEDULED, State.CANCELLED, State.DELIVERED
    assert broken(scheduled, cancelled, delivered, None, None) == []
    assert broken(delivered, None, None, scheduled, None) == []
    assert broken(None, scheduled, scheduled, None, None) == ["1", "2", "3"]
    assert list(facts._broken(dict.fromkeys("12345", scheduled), {"5"}))[-1].startswith("5 came")
