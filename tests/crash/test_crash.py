"""A short crash run; `scripts/crash` makes long ones."""

import asyncio

import pytest

from tests.crash.harness import CrashRun
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
    assert outcome.verdict.delivered > 100
    assert outcome.verdict.cancelled > 10
    assert outcome.counts["acknowledged"] > 50
    figures = {figure["case"]: figure["value"] for figure in report_of(outcome)["figures"]}
    assert (figures["kills"], figures["lost"]) == (outcome.counts["kills"], 0)


def test_a_batch_that_is_heard_late_is_due_when_the_ledger_says(tmp_path, monkeypatch):
    run = CrashRun(tmp_path, seed=10, rounds=1)
    heard = []

    async def ask(_method, _where, documents):
        run.ledger.offset_ms += HOUR_MS  # the clock is set forward before the server hears of it
        heard.extend(documents)
        return 200, {"ids": [str(index) for index in range(len(documents))]}

    monkeypatch.setattr(run, "_ask", ask)
    monkeypatch.setattr(run, "_follow", lambda order, delay_ms: None)
    asyncio.run(run._publish_batch())
    assert [order.due_ms for order in run.ledger.orders] == [
        document["deliver_at"] for document in heard
    ]
    assert "delay" not in heard[0]
