"""A short soak, and one with a planted bug; `scripts/soak` makes long ones."""

import asyncio
import socket
import threading

import pytest

from tests.harness.notes import Notes
from tests.harness.script import describe, report_of
from tests.soak.abuse import KINDS
from tests.soak.child import Surroundings
from tests.soak.run import soak
from tests.soak.weather import FILES_MORE, Sample, Samples, Weather, WeatherServer
from tests.waiting import wait_until

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(600)]

SEED = 2


def test_everything_at_once(tmp_path):
    outcome = asyncio.run(soak(tmp_path, SEED, seconds=15).run())
    assert outcome.is_clean, "\n".join(describe(outcome))
    # A run in which nothing happened proves nothing.
    counts = outcome.notes.counts
    assert all(counts[f"strikes, {kind}"] for kind in Weather)
    assert sum(counts[f"bad: {kind.__name__.replace('_', ' ')}"] for kind in KINDS) > len(KINDS)
    for what in ("moved", "replaced", "dead letters", "acknowledged", "batches of MessagePack"):
        assert counts[what], what
    assert counts["still pending"]
    assert outcome.verdict.delivered > 100
    assert outcome.verdict.cancelled > 10
    figures = {figure["case"]: figure["value"] for figure in report_of(outcome)["figures"]}
    assert (figures["lost"], figures["failures"]) == (0, 0)


def test_webhooks_that_nobody_sends_are_missed(tmp_path):
    run = soak(tmp_path, SEED, seconds=4, weather=(Weather.STEP,), bug="--drop-one")
    run.grace_s = 6.0  # nobody waits long for a message that does not come
    outcome = asyncio.run(run.run())
    assert outcome.broken["lost"]
    assert not outcome.is_clean


def test_a_server_that_ends_is_noticed(tmp_path):
    run = soak(tmp_path, SEED, seconds=4, weather=(Weather.STEP,))
    server = run.topology
    assert isinstance(server, WeatherServer)
    run.report = lambda _: server._server.kill()
    asyncio.run(run.run())
    assert any("ended by itself" in failure for failure in run.notes.failures)


def test_an_order_that_is_given_up_keeps_no_other_waiting(tmp_path, monkeypatch):
    """The load ends while the weather waits for the child."""
    heard, may_go_on = threading.Event(), threading.Event()

    def obey(self, order):
        heard.set()
        may_go_on.wait()

    monkeypatch.setattr(Surroundings, "obey", obey)
    server = WeatherServer(Notes(tmp_path), SEED)
    child = threading.Thread(target=Surroundings().listen, args=(str(server.control),), daemon=True)
    child.start()

    def listens():
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(str(server.control)) == 0

    wait_until(listens)

    async def orders():
        given_up = asyncio.create_task(server.set_clock(1))
        await asyncio.to_thread(heard.wait)
        given_up.cancel()
        await asyncio.wait([given_up])
        may_go_on.set()
        await asyncio.wait_for(server.set_clock(2), timeout=30)
        assert given_up.cancelled()  # and held until here, with all that it has open

    asyncio.run(orders())


@pytest.mark.parametrize(
    ("grown_bytes", "sockets", "files", "said"),
    [
        (0, 3, 20, []),
        (60 << 20, 3, 20, ["memory"]),
        (0, 4, 20, ["sockets"]),
        (0, 3, 21 + FILES_MORE, ["files"]),
    ],
)
def test_a_figure_that_is_not_flat_is_told(grown_bytes, sockets, files, said):
    flat = Sample(100 << 20, 3, 20)
    grown = Sample(flat.memory_bytes + grown_bytes, sockets, files)
    complaints = list(Samples([flat] * 9 + [grown] * 3).complaints(flat, grown))
    assert len(complaints) == len(said)
    assert all(word in complaint for word, complaint in zip(said, complaints, strict=True))
