"""Somebody who can make checksums alters a data directory, and the audit has a name for it.

`python -m tests.world.tampering --runs 10000 --jobs 2` runs more of the same."""

from pathlib import Path

import pytest

from delayserver.pipeline.audits.audit import audit_here
from storage.rows import HOUR_MS
from tests.depth import every
from tests.world.tampering import runs, victims
from tests.world.tampering.runs import ALTERATIONS, Noticed, TamperedWorld, shrink, tamper
from tests.world.tampering.victims import Victim, make_victim

WORLDS = 12
SEEDS_MAX = 60

NAMES = {
    "become-dropped": {"wrongly_dropped"},
    "become-unknown-outcome": {"unknown_outcome"},
    "become-unknown-subscription": {"unknown_subscription", "wrongly_dropped"},
    "become-another-subscription": {"missing"},
    "become-another-row": {"mismatched"},
    "become-unknown-row": {"unknown"},
    "become-another-message": {"mismatched"},
    "become-due-otherwise": {"mismatched"},
    "become-early": {"early"},
    "become-future": {"in_the_future"},
    "become-timeless": {"in_the_future"},
    "be-removed": {"missing"},
    "be-repeated": {"repeated"},
    "lose-file": {"missing"},
    "entry-due-otherwise": {"mismatched"},
    "tombstone-of-another": {"mismatched"},
    "lose-schedule": {"damaged"},
    "lose-messages": {"damaged"},
    "forget-hour": {"damaged"},
    "alter-body": {"damaged"},
}
"""What a kind is called, at least one of these: the rows of an outside test, and some more."""


def test_nothing_is_missed_and_nobody_is_accused() -> None:
    for seed in every(4, range(WORLDS)):
        for found in tamper(TamperedWorld(70_000 + seed)):
            assert not found.failure, f"{found.command}\n{found.failure}"


ONCE_FAILED = (
    (208, "entry-of-another-hour", 0),
    (253, "retire-hour", 4),
    (1317, "", 0),
    (200_135, "forget-hour", 3),
)
"""What once was missed, or accused somebody, or altered what an audit need not notice."""


@pytest.mark.parametrize(("seed", "kind", "turn"), ONCE_FAILED)
def test_what_once_failed(seed: int, kind: str, turn: int) -> None:
    (found,) = tamper(TamperedWorld(seed, kind, turns=(turn,)))
    assert not found.failure, f"{found.command}\n{found.failure}"


@pytest.mark.parametrize("kind", ALTERATIONS)
def test_each_kind_has_a_name(kind: str) -> None:
    for seed in range(SEEDS_MAX):
        (found,) = tamper(TamperedWorld(80_000 + seed, kind, turns=(0,)))
        assert not found.failure, f"{found.command}\n{found.failure}"
        if found.done:
            assert not NAMES.get(kind, set()) or NAMES[kind] & set(found.names), found
            return
    pytest.fail(f"no world has anything for {kind}")


def test_what_is_missed_is_told_with_the_smallest_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_noticed", lambda world, done, *_: Noticed(world, done, (), "!"))
    failed = tamper(TamperedWorld(1, "run-ahead", turns=(2,)))[0]
    smallest = shrink(failed)
    assert (smallest.world.lives, smallest.world.steps) == (0, 5)
    assert smallest.command == "--seed 1 --kind run-ahead --turn 2 --lives 0 --steps 5"


def test_who_accuses_an_untouched_directory_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_altered(seed: int, root: Path, **size: int) -> Victim:
        victim = make_victim(seed, root, **size)
        (root / "messages").rename(root / "elsewhere")
        return victim

    monkeypatch.setattr(runs, "make_victim", make_altered)
    (found,) = tamper(TamperedWorld(1))
    assert "nothing was altered, and the audit names {'damaged': 1}" in found.failure


@pytest.mark.parametrize("retention_ms", [0, 1000, 2 * HOUR_MS])
def test_what_was_purged_accuses_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, retention_ms: int
) -> None:
    monkeypatch.setattr(victims, "KEPT_MS", retention_ms)
    for seed in (5, 7, 33, 1317):
        root = tmp_path / str(seed)
        root.mkdir()
        found = audit_here(str(root), now_ms=make_victim(seed, root).now_ms)
        assert found.is_clean, (seed, found.examples, found.damage)


def test_a_seed_gives_the_same_directory_again(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one, two = (make_victim(3, tmp_path / name) for name in ("one", "two"))
    assert (one.now_ms, one.accepted) == (two.now_ms, two.accepted)
    logs = [
        {path.name: path.read_bytes() for path in (victim.root / "schedule").iterdir()}
        for victim in (one, two)
    ]
    assert logs[0] == logs[1]
    found = audit_here(str(one.root), now_ms=one.now_ms)
    assert found.messages["accepted"] == one.accepted > 0
