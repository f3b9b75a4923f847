"""Worlds of a shard with replicas, and bugs that are planted in what makes one shard of them.

`python -m tests.world --replicas --cycles 10000 --jobs 2` runs more of the same."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import structlog

from delayserver.api.exit import Exit
from delayserver.delivery.queues import Queues
from delayserver.delivery.replicated_settler import ReplicatedSettler
from delayserver.delivery.settler import Settler
from delayserver.recovery.standby import Standby
from storage.errors import DamageError, FencedError
from storage.replicated import adoption
from storage.replicated.envelope import Adopt, FramePart, LeasesPart, join
from storage.replicated.holder import Holder
from storage.replicated.lease import Follower, Tenure
from storage.replicated.log import FollowedLog
from storage.replicated.office import Office, RecordDecision
from storage.replicated.own import OwnLog
from storage.replicated.reader import RecordReader, frame_of
from storage.rows import LogKind
from tests.depth import every, missing_max
from tests.simulation.catching import first_catch
from tests.world import Violation
from tests.world.replicas import ReplicaWorld, run_replica_world

WORLDS = 30
WORLDS_MAX = 150
"""Within which a canary must be caught."""
HAPPENS = (
    "answered late",
    "appends without an answer",
    "crashes inside a call",
    "disks lost",
    "ends of the log that were lost",
    "hung",
    "kill",
    "late reads",
    "left",
    "leases handed over",
    "left by priority",
    "looks without a lease",
    "lost the office",
    "out of room at a standby",
    "outcomes told",
    "power loss",
    "replicas compared",
    "replicas that were set aside",
    "sent of a group again",
    "sent where they say",
    "slow appends",
    "standbys that ended",
    "taken from topics",
    "taken over",
    "turns of zombies",
    "went on with what they had",
    "zombies that ended",
)

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]


class Canary(NamedTuple):
    """A deliberate bug, and how it may be noticed."""

    plant: Plant
    caught_by: tuple[type[Exception], ...]


CANARIES: dict[str, Canary] = {}


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    """Who comes and goes is logged some hundred times a second."""
    before = structlog.get_config()["wrapper_class"]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.configure(wrapper_class=before)


def canary(*caught_by: type[Exception]) -> Callable[[Plant], Plant]:
    def add(plant: Plant) -> Plant:
        CANARIES[plant.__name__] = Canary(plant, caught_by)
        return plant

    return add


# ── no bug ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.timeout(600)
def test_no_world_breaks_a_promise() -> None:
    total: Counter[str] = Counter()
    for seed in every(4, range(WORLDS)):
        try:
            world = run_replica_world(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        total += world.counts + world.ledger.counts
    missing = [what for what in HAPPENS if not total[what]]
    assert len(missing) <= missing_max(HAPPENS), (missing, total)


def test_a_seed_repeats_itself() -> None:
    assert run_replica_world(7).counts == run_replica_world(7).counts


@pytest.mark.parametrize("back_ms", [0, 1500])
def test_replicas_whose_clocks_are_set_are_compared(back_ms: int) -> None:
    """A node whose clock is behind the log claims nothing: it ends, and starts again."""
    with ReplicaWorld(0) as world:
        world._chance.is_calm = True
        world._start()
        world._running.rest()
        world._end_tenure("kill")
        world.clock.set(-back_ms)
        world._agree()
        assert world.counts["replicas compared"] == 1


# ── bugs ───────────────────────────────────────────────────────────────────────────────────────


@canary(Violation)
def deliveries_leave_without_a_lease(patch: Patch) -> None:
    """I14"""
    original = Queues.__init__

    def init(self: Any, *rest: Any) -> None:
        original(self, *rest)
        self.may_deliver = lambda: True

    patch.setattr(Queues, "__init__", init)


@canary(Violation)
def the_lease_outlasts_the_silence_that_others_wait_for(patch: Patch) -> None:
    """I14"""
    patch.setattr(Tenure, "holds", lambda self, now_ms: not self.is_over)


@canary(Violation, AssertionError)
def a_claim_does_not_ask_where_the_log_ends(patch: Patch) -> None:
    """R3: what the owner has said since was not read."""
    original = Follower.may_claim

    def may_claim(self: Any, state: Any, end: Any, now_ms: int, wall_ms: int) -> bool:
        return original(self, state, state.next_offset, now_ms, wall_ms)

    patch.setattr(Follower, "may_claim", may_claim)


@canary(Violation)
def the_offset_of_an_answer_is_not_compared(patch: Patch) -> None:
    """I17"""
    original = Tenure.appended

    def appended(self: Any, record: Any, offset: Any, sent_ms: int) -> bool:
        return original(self, record, offset, sent_ms) or offset is not None

    patch.setattr(Tenure, "appended", appended)
    # Else the process would notice when it holds the lease again.
    patch.setattr(Holder, "_renew", lambda self: None)


@canary(Violation, AssertionError)
def a_standby_files_what_does_not_count(patch: Patch) -> None:
    """I16"""
    original = RecordReader._take

    def take(self: Any, offset: int, record: Any) -> Any:
        found = original(self, offset, record)
        if isinstance(record, FramePart) and found.verdict is RecordDecision.VOID:
            frame = frame_of(record.data, LogKind.MESSAGE, self._stamp, self._log.name, offset)
            return found._replace(frame=frame)
        return found

    patch.setattr(RecordReader, "_take", take)


@canary(Violation)
def who_takes_over_does_not_read_what_is_settled_to_its_end(patch: Patch) -> None:
    """I4"""
    original = Standby.finish

    def finish(self: Any) -> None:
        self._settler.end = lambda: 0
        self._settler.take_in = lambda wait_s: False
        original(self)

    patch.setattr(Standby, "finish", finish)


@canary(Violation, DamageError)
def a_place_is_ahead_of_what_is_filed(patch: Patch) -> None:
    """I16; a replica that starts again may see it by itself, if the catalog lacks what the log has
    left behind."""

    def checkpoint(self: Any) -> None:
        self._checkpoint_ms = self._stopwatch()
        self._followed.place = self._reader.office.checkpoint()
        self._settler.sync_files()
        self._replay.checkpoint()

    patch.setattr(Standby, "checkpoint", checkpoint)
    patch.setattr(FollowedLog, "places", lambda self, seq: self._packed(self.place))


@canary(Violation)
def a_standby_takes_over_with_what_it_has_not_filed(patch: Patch) -> None:
    """Its disk may be full: then it would end as soon as it is the owner."""
    original = Standby._claim

    def claim(self: Any) -> Any:
        waiting, self._waiting = self._waiting, []
        try:
            return original(self)
        finally:
            self._waiting = waiting + self._waiting

    patch.setattr(Standby, "_claim", claim)


class Silent:
    """In office, and nobody hears of it."""

    def beat(self) -> bool:
        return False


@canary(Violation, FencedError)
def an_owner_does_not_beat_while_it_recovers(patch: Patch) -> None:
    """Others take over from it, again and again."""
    original = ReplicaWorld._meanwhile

    def meanwhile(self: Any, node: Any, holder: Any) -> Callable[[], None]:
        return original(self, node, Silent())  # type: ignore[arg-type]

    patch.setattr(ReplicaWorld, "_meanwhile", meanwhile)


@canary(Violation)
def rows_are_in_the_files_before_the_log_of_what_is_settled_has_them(patch: Patch) -> None:
    """I4, I16: one replica says that a message is delivered, and the next delivers it."""
    original = ReplicatedSettler.write

    def write(self: Any, rows_by_hour: Any, now_ms: int) -> None:
        Settler.write(self, dict(rows_by_hour), now_ms)
        original(self, rows_by_hour, now_ms)

    patch.setattr(ReplicatedSettler, "write", write)


@canary(Violation)
def who_may_have_lost_its_office_answers(patch: Patch) -> None:
    """An answer does not ask the lease."""
    original = Exit.__init__
    patch.setattr(
        Exit, "__init__", lambda self, is_open, shard: original(self, lambda: True, shard)
    )


@canary(Violation)
def an_ack_counts_behind_the_claim_of_another(patch: Patch) -> None:
    """I4, I17: it is recorded when the next owner has read what is."""
    patch.setattr(Holder, "confirm", lambda self: None)


@canary(Violation)
def what_is_settled_is_told_to_nobody(patch: Patch) -> None:
    """I4"""
    patch.setattr(ReplicatedSettler, "write", Settler.write)
    patch.setattr(ReplicatedSettler, "sync", Settler.sync)


@canary(Violation)
def the_own_log_is_not_resumed(patch: Patch) -> None:
    """R8"""
    patch.setattr(OwnLog, "continues", lambda self, claimed: False)


@canary(Violation)
def a_second_claim_lets_the_own_log_go(patch: Patch) -> None:
    """R8: the process ended between its claim and the first frame."""

    def continues(self: Any, claimed: Any) -> bool:
        return bool(self._read_epoch() == claimed.epoch - 1)

    patch.setattr(OwnLog, "continues", continues)


@canary(Violation, AssertionError, KeyError)
def a_follower_keeps_its_own_longer_history(patch: Patch) -> None:
    """I16: the log goes on behind another replica, and this one has more, or less: rows of subjects
    that it does not know (KeyError), too."""
    patch.setattr(adoption, "continues", lambda record, before: True)


@canary(Violation, AssertionError)
def a_node_goes_on_behind_what_is_left_of_the_log(patch: Patch) -> None:
    """I17: what its files have, and the log has lost, has no seq there any more."""
    original = Office._judge

    def judge(self: Any, offset: int, record: Any) -> Any:
        verdict, unfinished, changed = original(self, offset, record)
        if isinstance(record, Adopt):
            changed.pop("next_seq", None)
        return verdict, unfinished, changed

    patch.setattr(Office, "_judge", judge)


@canary(Violation)
def an_owner_that_leaves_takes_its_leases_along(patch: Patch) -> None:
    """I4: a planned hand-over counts as a kill."""
    patch.setattr(Holder, "_append_leases", lambda self: True)


@canary(Violation)
def the_next_owner_forgets_the_leases_that_it_was_left(patch: Patch) -> None:
    """I4"""
    original = Holder.__init__

    def init(self: Any, *arguments: Any, leases: bytes = b"", **named: Any) -> None:
        original(self, *arguments, **named)

    patch.setattr(Holder, "__init__", init)


@canary(Violation)
def leases_are_good_behind_a_kill(patch: Patch) -> None:
    """I4: they are those of the last owner that has left in order, whoever has claimed since."""
    original = RecordReader._take_leases

    def take(self: Any, record: Any) -> None:
        if isinstance(record, LeasesPart):
            original(self, record)

    patch.setattr(RecordReader, "_take_leases", take)
    patch.setattr(
        RecordReader, "leases", property(lambda self: join(self._leases) if self._leases else None)
    )


@canary(Violation)
def a_kill_of_an_owner_is_not_noted(patch: Patch) -> None:
    """I4: it may have handed out what the next owner hands out with attempt 1."""
    patch.setattr(FollowedLog, "note_seized", lambda self, at_ms: None)


@pytest.mark.unchecked
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CANARIES)
def test_the_simulation_finds(name: str, monkeypatch: Patch) -> None:
    plant, caught_by = CANARIES[name]
    plant(monkeypatch)
    caught = first_catch(name, range(WORLDS_MAX), run_replica_world, caught_by)
    assert caught is not None, f"nobody noticed that {name.replace('_', ' ')}"
    print(f"{name}: {caught}")
