"""Groups whose messages cannot be read: worlds in which devices lose much, and a bug to be found.

In others that have groups it would be rare; what is found there stands in `test_canaries.py`."""

from collections import Counter

import pytest

from delayserver.delivery.single_file import SingleFile
from tests.depth import every, least
from tests.simulation.catching import first_catch
from tests.world import Violation, World, run_world, world

Patch = pytest.MonkeyPatch
WORLDS_MAX = 300


@pytest.fixture(autouse=True)
def _devices_lose_much(monkeypatch: Patch) -> None:
    monkeypatch.setattr(World, "bad_sectors_share", 0.5)
    monkeypatch.setattr(world, "has_groups", lambda seed: True)
    monkeypatch.setattr(world, "REST_SHARE", 1.0)


def test_no_world_breaks_a_promise() -> None:
    counts = Counter[str]()
    for seed in every(4, range(100, 108)):
        one = run_world(seed)
        counts += one.counts + one.ledger.counts
    for what in ("bad sectors", "sent of a group", "sent of a group again"):
        assert counts[what] >= least(3), (what, counts)


def a_head_that_cannot_be_read_blocks_its_group(patch: Patch) -> None:
    """I8: what can be read is delivered."""
    patch.setattr(SingleFile, "lose", lambda self, seqs: [])


@pytest.mark.timeout(600)
@pytest.mark.unchecked("a bug is planted")
def test_the_simulation_finds(monkeypatch: Patch) -> None:
    plant = a_head_that_cannot_be_read_blocks_its_group
    plant(monkeypatch)
    caught = first_catch(plant.__name__, range(WORLDS_MAX), run_world, (Violation,))
    assert caught is not None
    assert "groups wait for nobody" in caught, caught
