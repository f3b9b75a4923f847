"""One world: its directory is audited, altered and audited again. And all that can be altered.

Cost: some 100 ms for a world, 20 for each alteration. Threads: none.
"""

import random
import shutil
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from delayserver.errors import DelayServerError
from delayserver.pipeline.audits.audit import Audit, audit_here
from delayserver.pipeline.audits.verdicts import Verdicts
from storage.errors import StorageError
from tests.world.tampering import deliveries, entries, surroundings
from tests.world.tampering.scene import Scene
from tests.world.tampering.victims import LIVES, STEPS, Victim, make_victim
from tests.world.violation import Violation

MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Alteration:
    """Something that an audit has to notice."""

    apply: Callable[[Scene], str | None]
    """Says what it has done; None: nothing was for it."""
    is_of_bodies: bool = False
    """Only who reads bodies can see it."""
    may_refuse: bool = False
    """There may be nothing left to audit; an error that says so is a name for it."""


_OF_DELIVERIES = (
    deliveries.become_dropped,
    deliveries.become_unknown_outcome,
    deliveries.become_unknown_subscription,
    deliveries.become_another_subscription,
    deliveries.become_another_row,
    deliveries.become_unknown_row,
    deliveries.become_another_message,
    deliveries.become_due_otherwise,
    deliveries.become_early,
    deliveries.become_future,
    deliveries.become_timeless,
    deliveries.be_removed,
    deliveries.be_repeated,
    deliveries.lose_file,
    deliveries.be_cut,
    deliveries.lose_frame,
    deliveries.be_of_another_hour,
    deliveries.be_flipped,
)
_OF_ENTRIES = (
    entries.entry_removed,
    entries.entry_repeated,
    entries.rows_swapped,
    entries.entry_of_another_hour,
    entries.entry_due_otherwise,
    entries.entry_of_unknown_subject,
    entries.entry_of_another_subject,
    entries.entry_of_another_message,
    entries.entry_of_another_kind,
    entries.entry_for_somebody_else,
    entries.tombstone_removed,
    entries.tombstone_of_another,
    entries.tombstone_of_nothing,
    entries.tombstone_due_otherwise,
    entries.tombstone_of_another_kind,
    entries.lose_schedule,
    entries.cut_schedule,
    entries.lose_schedule_frame,
    entries.swap_schedule_frames,
    entries.exchange_schedules,
    entries.flip_schedule,
)
_OF_SURROUNDINGS = (
    surroundings.lose_messages,
    surroundings.lose_record,
    surroundings.miscount_hour,
    surroundings.forget_subscription,
    surroundings.forget_subject,
    surroundings.forget_hour,
    surroundings.retire_hour,
    surroundings.run_ahead,
)
_REFUSED = (surroundings.lose_catalog, surroundings.change_stamp, surroundings.break_format)
_OF_BODIES = (
    surroundings.alter_body,
    surroundings.exchange_body,
    surroundings.misname_body,
    surroundings.hide_key,
)


def _name(apply: Callable[[Scene], str | None]) -> str:
    return apply.__name__.replace("_", "-")


ALTERATIONS = {
    **{_name(one): Alteration(one) for one in (*_OF_DELIVERIES, *_OF_ENTRIES, *_OF_SURROUNDINGS)},
    **{_name(one): Alteration(one, may_refuse=True) for one in _REFUSED},
    **{_name(one): Alteration(one, is_of_bodies=True) for one in _OF_BODIES},
}
"""By what they are called."""


TURNS = 5
"""How often the directory of a world is altered, each time as it was."""


@dataclass(frozen=True, slots=True)
class TamperedWorld:
    """What is tried: the same again gives the same."""

    seed: int
    kind: str = ""
    """The only alteration; empty: any."""
    lives: int = LIVES
    steps: int = STEPS
    turns: tuple[int, ...] = tuple(range(TURNS))


@dataclass(frozen=True, slots=True)
class Noticed:
    """What came of one alteration."""

    world: TamperedWorld
    """With that alteration alone."""
    done: str
    """What it has done; empty: nothing was for it."""
    names: tuple[str, ...] = ()
    """What the audit calls it."""
    failure: str = ""
    """Empty: the audit noticed it, and had accused nobody before."""

    @property
    def command(self) -> str:
        """How to try it again."""
        world = self.world
        kind = f" --kind {world.kind}" if world.kind else ""
        turn = f" --turn {world.turns[0]}" if len(world.turns) == 1 else ""
        return f"--seed {world.seed}{kind}{turn} --lives {world.lives} --steps {world.steps}"


def tamper(world: TamperedWorld) -> list[Noticed]:
    """One world, and one alteration after the other, each of a copy of its directory."""
    below = MEMORY if MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="tampering-", dir=below) as path:
        try:
            original = Path(path) / "original"
            original.mkdir()
            victim = make_victim(world.seed, original, lives=world.lives, steps=world.steps)
            verdicts = Verdicts(Path(path) / "verdicts")
            _check_untouched(victim, verdicts)
        except Exception:
            return [Noticed(world, "", failure=traceback.format_exc())]
        return [_turn(world, turn, victim, verdicts) for turn in world.turns]


def _turn(world: TamperedWorld, turn: int, original: Victim, verdicts: Verdicts) -> Noticed:
    rng = random.Random(f"tampering {world.seed} {turn}")
    kinds = [world.kind] if world.kind else rng.sample(sorted(ALTERATIONS), len(ALTERATIONS))
    copy = original.root.with_name("copy")
    shutil.copytree(original.root, copy)
    victim = replace(original, root=copy)
    done, this = "", replace(world, turns=(turn,))
    try:
        scene = Scene(victim, rng)
        for kind in kinds:
            this = replace(this, kind=kind)
            if (done := ALTERATIONS[kind].apply(scene) or "") != "":
                return _noticed(this, done, victim, verdicts if rng.random() < 0.5 else None)
    except Exception:
        return Noticed(this, done, failure=traceback.format_exc())
    finally:
        shutil.rmtree(copy)
    return Noticed(this, "")


def _noticed(world: TamperedWorld, done: str, victim: Victim, verdicts: Verdicts | None) -> Noticed:
    alteration = ALTERATIONS[world.kind]
    try:
        found = _audited(victim, verdicts, with_bodies=alteration.is_of_bodies)
    except (DelayServerError, StorageError) as error:
        if not alteration.may_refuse:
            raise
        return Noticed(world, done, (type(error).__name__,))
    names = tuple(name for name, count in found.violations.items() if count)
    missed = "" if names else f"clean, says the audit; but {done}"
    return Noticed(world, done, names, missed)


def _audited(victim: Victim, verdicts: Verdicts | None, *, with_bodies: bool) -> Audit:
    return audit_here(
        str(victim.root), now_ms=victim.now_ms, with_bodies=with_bodies, verdicts=verdicts
    )


def _check_untouched(victim: Victim, verdicts: Verdicts) -> None:
    """Nobody is accused before anything was altered, and nothing is left out; what is settled has a
    verdict from then on."""
    for some in (None, verdicts):
        found = _audited(victim, some, with_bodies=some is None)
        if not found.is_clean:
            counts = {name: count for name, count in found.violations.items() if count}
            raise Violation(
                f"nothing was altered, and the audit names {counts}: {found.examples[:3]} "
                f"{found.damage[:3]}"
            )
    accepted = found.messages["accepted"]
    if accepted != victim.accepted:
        raise Violation(f"{victim.accepted} were accepted, and the audit knows {accepted}")


def shrink(failed: Noticed) -> Noticed:
    """The same failure in a smaller world, if there is one: of fewer lives, or of shorter ones."""
    world = failed.world
    sizes = ((lives, steps) for lives in range(world.lives + 1) for steps in (5, 10, 20, 40, 80))
    for lives, steps in sizes:
        if (lives, steps) >= (world.lives, world.steps):
            break
        for found in tamper(replace(world, lives=lives, steps=steps)):
            if found.failure:
                return found
    return failed
