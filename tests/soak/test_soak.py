"""A short soak, and one with a planted bug; `scripts/soak` makes long ones."""

import asyncio
import socket
import threading

import pytest

from tests.long_run import describe, report_of
from tests.soak import harness
from tests.soak.abuse import KINDS
from tests.soak.child import Surroundings
from tests.soak.harness import WEATHER, SoakRun
from tests.waiting import wait_until

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(600)]

SEED = 2


def test_everything_at_once(tmp_path):
    outcome = asyncio.run(SoakRun(tmp_path, seed=SEED, seconds=15).run())
    assert outcome.is_clean, "\n".join(describe(outcome))
    # A run in which nothing happened proves nothing.
    counts = outcome.counts
    assert all(counts[f"weather: {kind}"] for kind in WEATHER)
    assert sum(counts[f"bad: {kind.__name__.replace('_', ' ')}"] for kind in KINDS) > len(KINDS)
    for what in ("moved", "replaced", "dead letters", "acknowledged", "batches of MessagePack"):
        assert counts[what], what
    assert counts["still pending"]
    assert outcome.verdict.delivered > 100
    assert outcome.verdict.cancelled > 10
    figures = {figure["case"]: figure["value"] for figure in report_of(outcome)["figures"]}
    assert (figures["lost"], figures["failures"]) == (0, 0)


def test_webhooks_that_nobody_sends_are_missed(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "GRACE_S", 6.0)  # nobody waits long for what does not come
    run = SoakRun(tmp_path, seed=SEED, seconds=4, weather=("step",), bug="--drop-one")
    outcome = asyncio.run(run.run())
    assert outcome.verdict.lost
    assert not outcome.is_clean


def test_a_server_that_ends_is_noticed(tmp_path):
    run = SoakRun(
        tmp_path, seed=SEED, seconds=4, weather=("step",), report=lambda run: run._server.kill()
    )
    outcome = asyncio.run(run.run())
    assert any("ended by itself" in failure for failure in outcome.failures)


def test_an_order_that_is_given_up_keeps_no_other_waiting(tmp_path, monkeypatch):
    """The load ends while the weather waits for the child."""
    heard, may_go_on = threading.Event(), threading.Event()

    def obey(self, order):
        heard.set()
        may_go_on.wait()

    monkeypatch.setattr(Surroundings, "obey", obey)
    run = SoakRun(tmp_path, seed=SEED, seconds=4)
    child = threading.Thread(target=Surroundings().listen, args=(str(run._control),), daemon=True)
    child.start()

    def listens():
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(str(run._control)) == 0

    wait_until(listens)

    async def orders():
        given_up = asyncio.create_task(run._set_clock(1))
        await asyncio.to_thread(heard.wait)
        given_up.cancel()
        await asyncio.wait([given_up])
        may_go_on.set()
        await asyncio.wait_for(run._set_clock(2), timeout=30)
        assert given_up.cancelled()  # and held until here, with all that it has open

    asyncio.run(orders())
