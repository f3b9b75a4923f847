"""Messages that say themselves where they go: worlds in which some do, and bugs to be found there.

The other worlds have none, so that each of their seeds stays what it is."""

from collections.abc import Callable

import pytest

from delayserver.decisions import outcomes, publishing
from tests.depth import every, least
from tests.simulation.catching import first_catch
from tests.world import Violation, run_world
from tests.world.clients import Clients

Patch = pytest.MonkeyPatch
WORLDS_MAX = 40


@pytest.fixture(autouse=True)
def _some_say_it(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Clients, "says_where", True)


def test_no_world_breaks_a_promise() -> None:
    counts = [run_world(seed).ledger.counts for seed in every(4, range(100, 106))]
    assert sum(one["sent where they say"] for one in counts) >= least(21)


def what_says_where_it_goes_goes_to_those_that_match(patch: Patch) -> None:
    patch.setattr(publishing, "route_of", lambda subject_id, subscription_id: subject_id)


def a_host_that_is_gone_is_paused(patch: Patch) -> None:
    """I3: nobody can resume it."""
    patch.setattr(outcomes, "is_direct", lambda subscription_id: False)


@pytest.mark.timeout(600)
@pytest.mark.unchecked("a bug is planted")
@pytest.mark.parametrize(
    "plant", [what_says_where_it_goes_goes_to_those_that_match, a_host_that_is_gone_is_paused]
)
def test_the_simulation_finds(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    caught = first_catch(plant.__name__, range(WORLDS_MAX), run_world, (Violation,))
    assert caught is not None
    assert any(why in caught for why in ("where it", "that it goes", "is sent something")), caught
