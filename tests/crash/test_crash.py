"""Short crash runs; `scripts/crash` makes long ones."""

import asyncio
from pathlib import Path

import pytest

from delayserver.cli.demo.ledger import LATE_MS, Order
from delayserver.cli.demo.process import ServerFailed
from delayserver.records.message import State
from tests.crash.backups import Facts
from tests.crash.run import crash
from tests.crash.servers import BLOWS, Blow, schedule
from tests.harness.ledger import shard_of_order
from tests.harness.run import Outcome, Run
from tests.harness.script import describe, report_of
from tests.harness.traffic import HOUR_MS

pytestmark = [pytest.mark.crash, pytest.mark.slow]

SEEDS = (10,)
"""In the first four rounds of 10 the hour changes, recoveries and checkpoints are killed, and the
files are checked. A seed that fails in a long run is added here."""
SHARDS_SEEDS = (4433,)
"""In the two rounds of 4433 each kind of kill falls, and the hour changes."""


def clean(run: Run) -> Outcome:
    """Make a run; it has to be clean, and something has to happen in it."""
    outcome = asyncio.run(run.run())
    assert outcome.is_clean, "\n".join(describe(outcome))
    counts = outcome.notes.counts
    assert counts["kills during start"] >= 1
    assert counts["hour changes"] >= 1
    assert counts["checks of the files"] >= 2
    assert outcome.verdict.delivered > 100
    assert outcome.verdict.cancelled > 10
    assert counts["acknowledged"] > 50
    return outcome


@pytest.mark.parametrize("seed", SEEDS)
def test_killed_again_and_again(seed: int, tmp_path: Path) -> None:
    outcome = clean(crash(tmp_path, seed, rounds=4))
    counts = outcome.notes.counts
    assert counts["kills"] > 4
    assert counts["kills in a checkpoint"] >= 1
    assert counts["backups"] + counts["backups cut off"] >= 1
    figures = {figure["case"]: figure["value"] for figure in report_of(outcome)["figures"]}
    assert (figures["kills"], figures["lost"]) == (counts["kills"], 0)


def test_what_nobody_could_wait_for_is_not_called_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail() -> None:
        # All has been due for longer than a delivery may take.
        long_ago_ms = run.ledger.now_ms() - 2 * LATE_MS
        run.ledger.clock.set(5 * HOUR_MS, long_ago_ms, long_ago_ms)
        raise ServerFailed("the server was not ready in 60 s")

    run = crash(tmp_path, 10, rounds=1)
    monkeypatch.setattr(run.topology, "all_due", fail)
    outcome = asyncio.run(run.run())
    assert run.notes.failures == ["the server was not ready in 60 s"] and not outcome.is_clean
    assert run.counts["not waited for"] > 0 and "lost" not in outcome.broken


@pytest.mark.timeout(300)  # 20 starts of Python
@pytest.mark.parametrize("seed", SHARDS_SEEDS)
def test_shards_are_killed_one_by_one_and_together(seed: int, tmp_path: Path) -> None:
    outcome = clean(crash(tmp_path, seed, rounds=2, shards=3))
    for blow, _ in BLOWS:
        assert outcome.notes.counts[f"strikes, {blow}"] >= 1
    # A message without a key stays where it came in.
    orders = outcome.notes.ledger.orders
    assert {shard_of_order(one) for one in orders if one.key is None} >= {0, 1, 2}
    assert {shard_of_order(one) for one in orders if one.key is not None} >= {0, 1, 2}


def test_kills_of_shards_are_drawn_as_they_are_said_to_be() -> None:
    plans = [schedule(3).round(seed, number) for seed in range(20) for number in range(100)]
    strikes = [strike for plan in plans for strike in plan.strikes]
    assert sum(count for _, count in BLOWS) == 20
    for blow, count in BLOWS:
        assert strikes.count(blow) / len(strikes) == pytest.approx(count / 20, abs=0.03)
    assert any(len(plan.strikes) > 2 for plan in plans)
    assert {*schedule(1).deck} == {Blow.ALL} and len(schedule(1, ["redis"]).deck) == 5


def test_a_batch_that_is_heard_late_is_due_when_the_ledger_says(tmp_path, monkeypatch):
    run = crash(tmp_path, 10, rounds=1)
    heard = []

    async def ask(_method, _where, documents, **_):
        # The clock is set forward before the server hears of it.
        run.ledger.clock.set(HOUR_MS, run.ledger.now_ms(), run.ledger.now_ms())
        heard.extend(documents)
        return 200, {"ids": [str(index) for index in range(len(documents))]}

    monkeypatch.setattr(run.traffic, "ask_once", ask)
    monkeypatch.setattr(run.traffic, "_follow", lambda order, delay_ms: None)
    asyncio.run(run.traffic._publish_batch())
    assert [order.due_ms for order in run.ledger.orders] == [
        document["deliver_at"] for document in heard
    ]
    assert "delay" not in heard[0]


def test_parts_of_a_batch_are_what_each_shard_said(tmp_path, monkeypatch):
    """A part that is durable counts, what was refused must not come, and the rest may."""
    run = crash(tmp_path, 1, rounds=1, shards=2)
    monkeypatch.setattr(run.traffic, "MIXED_SHARE", 1.0)
    monkeypatch.setattr(run.traffic, "_follow", lambda order, delay_ms: None)
    problem: dict[str, str] = {}

    async def call(_client, _method, _where, documents):
        ids = [f"{index:036x}" if index % 2 else None for index in range(len(documents))]
        return 503, {"ids": ids, **problem}

    monkeypatch.setattr("tests.harness.traffic.call", call)
    for outcome in ({}, {"outcome": "unknown"}):
        problem.clear()
        problem.update(outcome)
        begin = len(run.ledger.orders)
        asyncio.run(run.traffic._publish_batch())
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
