"""Nodes on a replicated log, in some hundred worlds; and bugs that they must notice.

Each canary is a patch of the real code that breaks one rule. It is caught by what the world looks
at from outside (`tests.world.storage.replicated`); anything else is a mistake of the canary."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from storage.replicated import lease
from storage.replicated.envelope import Claim, FramePart
from storage.replicated.lease import Follower, Tenure
from storage.replicated.office import Office, RecordDecision
from tests.depth import every, missing_max
from tests.simulation.catching import first_catch
from tests.world.storage.replicated import ProtocolViolation, ReplicatedWorld

WORLDS = 200
WORLDS_MAX = 100
"""Within which a canary must be caught. Each is, within 30 (2026-11-24)."""
HAPPENS = (
    "answered",
    "came second",
    "cut off",
    "disk lost",
    "late",
    "log away",
    "lost",
    "reads late",
    "repeated",
    "stepped down",
    "stopped",
    "took over",
    "unanswered",
    *("Claim COUNTS", "Claim VOID", "Beat COUNTS", "Beat VOID", "Release COUNTS", "Release VOID"),
    *("LeasesPart COUNTS", "LeasesPart VOID"),
    *("FramePart COUNTS", "FramePart COMPLETES", "FramePart VOID"),
)

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]
CANARIES: dict[str, tuple[str, Plant]] = {}


def canary(rule: str) -> Callable[[Plant], Plant]:
    """`rule`: what the violation has to name."""

    def add(plant: Plant) -> Plant:
        CANARIES[plant.__name__] = (rule, plant)
        return plant

    return add


def test_every_promise_holds() -> None:
    counts: Counter[str] = Counter()
    for seed in every(4, range(WORLDS)):
        world = ReplicatedWorld(seed)
        try:
            world.run()
        except ProtocolViolation as violation:
            raise AssertionError(f"seed {seed}: {violation}") from violation
        counts.update(world.counts)
    missing = [what for what in HAPPENS if not counts[what]]
    assert len(missing) <= missing_max(HAPPENS), (missing, counts)


def test_a_seed_decides_everything() -> None:
    def told(seed: int) -> Counter[str]:
        world = ReplicatedWorld(seed)
        world.run()
        return world.counts

    assert told(7) == told(7) != told(8)


@canary("I14")
def deliveries_leave_without_a_lease(patch: Patch) -> None:
    patch.setattr(Tenure, "holds", lambda self, now_ms: not self.is_over)


@canary("I14")
def the_lease_has_no_margin(patch: Patch) -> None:
    patch.setattr(lease, "MARGIN_MS", 0)


@canary("I14")
def the_lease_counts_from_the_answer(patch: Patch) -> None:
    appended = Tenure.appended

    def at_the_answer(self: Any, record: Any, offset: Any, sent_ms: int) -> bool:
        self.is_answered = True
        return appended(self, record, offset, sent_ms)

    def holds(self: Any, now_ms: int) -> bool:
        if getattr(self, "is_answered", False):
            self.is_answered, self.answered_ms = False, now_ms
        from_ms = getattr(self, "answered_ms", self._sent_ms)
        return now_ms < from_ms + lease.LEASE_MS - lease.MARGIN_MS and not self.is_over

    patch.setattr(Tenure, "appended", at_the_answer)
    patch.setattr(Tenure, "holds", holds)


@canary("I14")
def others_claim_as_soon_as_the_lease_is_over_by_their_own_stopwatch(patch: Patch) -> None:
    is_due = Follower.is_due
    patch.setattr(Follower, "is_due", lambda self, state, now_ms: is_due(self, state, now_ms + 600))


@canary("R3")
def a_claim_does_not_look_where_the_log_ends(patch: Patch) -> None:
    may_claim = Follower.may_claim

    def unseen(self: Any, state: Any, end: Any, now_ms: int, wall_ms: int) -> bool:
        return may_claim(self, state, state.next_offset, now_ms, wall_ms)

    patch.setattr(Follower, "may_claim", unseen)


@canary("I17|I15")
def the_offset_of_an_answer_is_not_compared(patch: Patch) -> None:
    appended = Tenure.appended

    def believed(self: Any, record: Any, offset: Any, sent_ms: int) -> bool:
        return appended(self, record, offset, sent_ms) or offset is not None

    patch.setattr(Tenure, "appended", believed)


@canary("I15|I17")
def records_of_old_epochs_count(patch: Patch) -> None:
    """As if whoever was in office once were so for ever."""
    apply = Office.apply

    def lenient(self: Any, offset: int, record: Any) -> RecordDecision:
        verdict = apply(self, offset, record)
        return max(verdict, RecordDecision(not isinstance(record, Claim)))

    patch.setattr(Office, "apply", lenient)


@canary("I15")
def a_part_needs_no_part_before_it(patch: Patch) -> None:
    """A frame that was interrupted is completed by what comes behind."""
    judge = Office._judge

    def forgetful(self: Any, offset: int, record: Any) -> Any:
        kept = self._unfinished
        verdict, unfinished, changed = judge(self, offset, record)
        return verdict, unfinished if isinstance(record, FramePart) else kept, changed

    patch.setattr(Office, "_judge", forgetful)


@canary("I15")
def a_checkpoint_stands_within_a_frame(patch: Patch) -> None:
    patch.setattr(Office, "checkpoint", lambda self: self.state)


@canary("I14|I15")
def what_a_claimant_has_read_is_ignored(patch: Patch) -> None:
    judge = Office._judge

    def ignored(self: Any, offset: int, record: Any) -> Any:
        if isinstance(record, Claim):
            said = (record.node, record.epoch, record.clock_ms)
            record = Claim(*said, self.state.last_offset, record.address)
        return judge(self, offset, record)

    patch.setattr(Office, "_judge", ignored)


@canary("I14")
def who_leaves_delivers_until_the_log_says_so(patch: Patch) -> None:
    patch.setattr(Tenure, "end", lambda self: None)


def run_one(seed: int) -> None:
    ReplicatedWorld(seed).run()


@pytest.mark.parametrize("name", CANARIES)
def test_the_simulation_finds(name: str, monkeypatch: Patch) -> None:
    rule, plant = CANARIES[name]
    plant(monkeypatch)
    caught = first_catch(name, range(WORLDS_MAX), run_one, (ProtocolViolation,))
    assert caught is not None, f"nobody noticed that {name.replace('_', ' ')}"
    assert caught.split(": ", 2)[2].startswith(tuple(rule.split("|"))), caught
    print(f"{name}: {caught}")
