"""Worlds of several shards, and bugs that are planted in what makes one server of them.

`python -m tests.world --shards 3 --cycles 10000 --jobs 2` runs more of the same."""

import logging
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from delayserver.server.subscription_calls import SubscriptionCalls
from delayserver.shards import endings
from delayserver.shards.allotment import Allotment
from delayserver.shards.definitions import Definitions
from delayserver.shards.demand import Demand
from delayserver.shards.gathering import Gathering
from delayserver.shards.limits import _Permit
from delayserver.shards.link import _Link
from delayserver.shards.supply import Supply
from tests.depth import every, least, missing_max
from tests.simulation.catching import first_catch
from tests.world import Violation
from tests.world.shards import run_shards_world

WORLDS = 10
WORLDS_MAX = 300
"""A canary has to be caught within so many."""
HAPPENS = (
    "acked",
    "acked soon",
    "as many out as may be",
    "cancelled",
    "crashes inside a call",
    "definitions answered",
    "expired",
    "extended",
    "kill",
    "left",
    "left by priority",
    "nacked",
    "outcomes told",
    "power loss",
    "published",
    "received",
    "run",
    "sent of a group again",
    "sent where they say",
    "settled",
    "taken from topics",
)

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]
CANARIES: dict[str, Plant] = {}


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    """Who comes and goes is logged some hundred times a second."""
    before = structlog.get_config()["wrapper_class"]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.configure(wrapper_class=before)


def canary(plant: Plant) -> Plant:
    CANARIES[plant.__name__] = plant
    return plant


# ── no bug ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("count", [2, 3])
def test_no_world_breaks_a_promise(count: int) -> None:
    for seed in every(4, range(WORLDS)):
        run_shards_world(30_000 + seed, count=count)


def test_a_seed_repeats_itself() -> None:
    """Whatever the hashes of a process are."""
    program = (
        "import structlog, logging; structlog.configure("
        "wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL));"
        "from tests.world.shards import run_shards_world as run;"
        "world = run(7);"
        "print(sorted(world.all_counts.items()), world.rng.random())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-P", "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1


def test_the_worlds_are_not_empty() -> None:
    """A harness that does nothing finds nothing."""
    total: Counter[str] = Counter()
    for seed in every(4, range(1, 8)):
        total += run_shards_world(seed).all_counts
    missing = [what for what in HAPPENS if total[what] < least(3)]
    assert len(missing) <= missing_max(HAPPENS), (missing, total)


# ── pulls ──────────────────────────────────────────────────────────────────────────────────────


@canary
def a_part_lowers_the_count_and_no_notice_follows(patch: Patch) -> None:
    """A notice that came later is overtaken: messages are left behind until the next is due."""
    patch.setattr(Supply, "_tell_anew", lambda self, asker, subscription_id: None)


@canary
def a_count_is_told_once(patch: Patch) -> None:
    original = Supply._tell

    def tell(self: Any) -> None:
        told = [
            (asker.told, key, known)
            for asker in self._askers.values()
            for key, known in asker.told.items()
            if known is not None
        ]
        for counts, key, _ in told:
            counts[key] = self._calls.consumers.ready(key) or 0
        original(self)

    patch.setattr(Supply, "_tell", tell)


@canary
def a_new_link_is_not_told_what_is_wanted(patch: Patch) -> None:
    original = Demand._on_change

    def on_change(self: Any, shard: int, is_there: bool) -> None:
        wanted, self._wanted = self._wanted, self._wanted if not is_there else {}
        original(self, shard, is_there)
        self._wanted = wanted

    patch.setattr(Demand, "_on_change", on_change)


@canary
def what_comes_too_late_is_not_given_back(patch: Patch) -> None:
    patch.setattr(Demand, "back", lambda self, taken: None)


@canary
def the_consumer_is_gone_and_its_own_part_is_not_given_back(patch: Patch) -> None:
    original = Gathering._give_back

    def give_back(self: Any, round_: Any) -> None:
        if self._tell is None:
            round_.own = None
        original(self, round_)

    patch.setattr(Gathering, "_give_back", give_back)


@canary
def what_was_lent_is_not_taken_back_when_the_link_ends(patch: Patch) -> None:
    original = Supply._on_change

    def on_change(self: Any, shard: int, is_there: bool) -> None:
        if not is_there:
            self._askers[shard].lent.clear()
        original(self, shard, is_there)

    patch.setattr(Supply, "_on_change", on_change)


@canary
def nobody_is_told_that_the_consumer_was_answered(patch: Patch) -> None:
    """Its leases are over when the link ends, though it holds them."""
    patch.setattr(Demand, "handed", lambda self, taken: None)


@canary
def leases_of_others_are_ended_here(patch: Patch) -> None:
    patch.setattr(endings, "_owner", lambda token, own, count: own)


@canary
def what_was_asked_is_not_answered_when_the_link_ends(patch: Patch) -> None:
    original = _Link.connection_lost

    def connection_lost(self: Any, exc: Exception | None) -> None:
        self._calls.clear()
        original(self, exc)

    patch.setattr(_Link, "connection_lost", connection_lost)


# ── definitions ────────────────────────────────────────────────────────────────────────────────


@canary
def a_change_is_answered_before_the_others_have_it(patch: Patch) -> None:
    async def spread(self: Any, subscription: Any) -> None:
        self._put(subscription)

    patch.setattr(Definitions, "spread", spread)


@canary
def a_new_link_is_not_told_the_definitions(patch: Patch) -> None:
    original = Definitions._on_change

    def on_change(self: Any, shard: int, is_there: bool) -> None:
        if shard in self._followers and is_there:
            self._followers[shard].take([])
            self._followers[shard].is_linked = True
            self._followers[shard].revision = self._revision
            self._unmet.discard(shard)
            self._look()
        else:
            original(self, shard, is_there)

    patch.setattr(Definitions, "_on_change", on_change)


@canary
def a_list_of_all_deletes_nothing(patch: Patch) -> None:
    original = SubscriptionCalls.take

    async def take(self: Any, subscriptions: Any, *, are_all: bool) -> None:
        await original(self, subscriptions, are_all=False)

    patch.setattr(SubscriptionCalls, "take", take)


@canary
def a_pause_by_a_receiver_stays_with_its_shard(patch: Patch) -> None:
    patch.setattr(Definitions, "_on_paused", lambda self, subscription_id: None)


# ── limits ─────────────────────────────────────────────────────────────────────────────────────


@canary
def the_home_does_not_count_what_is_out_when_a_shard_is_linked(patch: Patch) -> None:
    original = Allotment.hold
    patch.setattr(Allotment, "hold", lambda self, shard, places: original(self, shard, 0))


@canary
def places_that_are_not_used_are_kept(patch: Patch) -> None:
    patch.setattr(_Permit, "keep", lambda self, *, for_next: None)


@canary
def a_grant_is_not_counted(patch: Patch) -> None:
    original = Allotment.grant

    def grant(self: Any, now_ms: int) -> Any:
        before = list(self._out)
        granted = original(self, now_ms)
        self._out = before
        return granted

    patch.setattr(Allotment, "grant", grant)


# ── all of them ────────────────────────────────────────────────────────────────────────────────


def run_one(seed: int) -> None:
    run_shards_world(seed, count=2 + seed % 2)


@pytest.mark.timeout(300)
@pytest.mark.unchecked("a bug is planted")
@pytest.mark.parametrize("name", CANARIES)
def test_the_simulation_finds(name: str, monkeypatch: Patch) -> None:
    CANARIES[name](monkeypatch)
    caught = first_catch(name, range(WORLDS_MAX), run_one, (Violation,))
    assert caught is not None, f"nobody noticed that {name.replace('_', ' ')}"
    print(f"{name}: {caught}")


def test_the_evidence_lists_them() -> None:
    text = (Path(__file__).parents[1] / "EVIDENCE.md").read_text()
    table = text.partition("\n### Of several shards\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| ([a-z ]+) \|$", table, re.MULTILINE)
    assert listed == [name.replace("_", " ") for name in CANARIES]
