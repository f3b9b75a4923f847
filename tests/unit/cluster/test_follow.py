"""A process on standby: when it makes its replica anew, and when it goes on with what it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from delayserver.cluster.follow import REPLACE_MS, Follow, Lifetime
from storage.errors import (
    LogReplacedError,
    OffsetRangeError,
    OtherHistoryError,
    ReplicatedLogError,
)
from storage.frame import Damage

if TYPE_CHECKING:
    pass

DAMAGE = Damage("schedule/2030-01-01.schedule", 0, 100, "it does not match", torn=False)


class FakeStandby:
    """Does in each step what it was given."""

    def __init__(self, *steps: Callable[[FakeStandby], Any]) -> None:
        self.steps = list(steps)
        self.damage: list[Damage] = []
        self.lag_ms = self.stuck_ms = 0
        self.state = SimpleNamespace(epoch=1, owner=2)
        self.place = SimpleNamespace(next_seq=42)
        self.owner_address = "address"
        self.ended: list[str] = []

    def step(self, wait_s: float) -> Any:
        return self.steps.pop(0)(self)

    def abandon(self) -> None:
        self.ended.append("abandoned")

    def checkpoint(self) -> None:
        self.ended.append("checkpoint")

    def close(self) -> None:
        self.ended.append("closed")

    def finish(self) -> None:
        self.ended.append("finished")


def nothing(standby: FakeStandby) -> None:
    """Nothing has come."""


def is_damaged(standby: FakeStandby) -> None:
    standby.damage.append(DAMAGE)


def is_deleted(standby: FakeStandby) -> None:
    raise OffsetRangeError("ds.log/0", 5, 10, 20)


def is_lost(standby: FakeStandby) -> None:
    raise OffsetRangeError("ds.log/0", 30, 10, 20)


def raises(error: BaseException) -> Callable[[FakeStandby], None]:
    def step(standby: FakeStandby) -> None:
        raise error

    return step


def is_far_behind(standby: FakeStandby) -> None:
    standby.stuck_ms = REPLACE_MS


def is_behind(standby: FakeStandby) -> None:
    standby.stuck_ms = REPLACE_MS - 1


def claims(standby: FakeStandby) -> str:
    return "holder"


class FakeOnlooker:
    """Sees the owners of some epochs, the first one without knowing where it is."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.epoch = 0
        self.steps = 0
        self.is_closed = False

    @property
    def address(self) -> str | None:
        return f"owner {self.epoch}" if self.epoch > 1 else None

    def step(self, wait_s: float) -> bool:
        assert cast("object", self.run.follow.onlooker) is self
        assert self.run.follow.standby is None
        self.steps += 1
        self.epoch = (self.steps + 1) // 2
        return self.steps % 2 == 1

    def close(self) -> None:
        self.is_closed = True


class Run:
    """A thread that is run as a call, to its end."""

    def __init__(
        self,
        first: FakeStandby | None,
        *later: FakeStandby | None,
        needed: Sequence[bool] = (True,),
    ) -> None:
        self.later = list(later)
        self.needed = list(needed)
        self.onlooker: FakeOnlooker | None = None
        self.renewed: list[bool] = []
        self.asked: list[BaseException] = []
        self.aside: list[int] = []
        self.owners: list[Any] = []
        self.claimed: list[Any] = []
        self.ends = 0
        self.errors: list[BaseException] = []
        self.follow = Follow(
            first,  # type: ignore[arg-type]
            self,
            lambda epoch, address: self.owners.append((epoch, address)),
            self.claimed.append,
            self.end,
            self.errors.append,
        )
        self.follow.run()

    def is_needed(self) -> bool:
        return self.needed.pop(0) if len(self.needed) > 1 else self.needed[0]

    def look_on(self) -> Any:
        self.onlooker = FakeOnlooker(self)
        return self.onlooker

    def renew(self, ending: Lifetime, must: bool) -> Any:
        self.renewed.append(must)
        standby = self.later.pop(0)
        if standby is None:
            self.follow.end()
        return standby

    def ask_people(self, ending: Lifetime, standby: Any, error: ReplicatedLogError) -> Any:
        self.asked.append(error)
        standby.ended.append("asked")
        opened = self.later.pop(0)
        if opened is None:
            self.follow.end()
        return opened

    def set_aside(self, seq: int) -> None:
        self.aside.append(seq)

    def end(self) -> None:
        self.ends += 1


def test_it_follows_until_it_claims() -> None:
    standby = FakeStandby(nothing, nothing, claims)
    run = Run(standby)
    assert (run.claimed, standby.ended, run.ends, run.renewed) == (["holder"], ["finished"], 1, [])
    assert run.owners == [(1, "address")]


def test_where_the_log_does_not_reach_back_the_replica_must_be_made_anew() -> None:
    first, second = FakeStandby(nothing, is_deleted), FakeStandby(claims)
    run = Run(first, second)
    assert (first.ended, run.renewed, second.ended) == (["abandoned"], [True], ["finished"])
    assert run.owners == [(1, "address")] * 2, "what is known of the owner is told anew"


def test_where_the_log_has_lost_its_end_nothing_is_overwritten() -> None:
    """This replica may be the only one that knows what was lost."""
    for error in (OffsetRangeError("ds.log/0", 30, 10, 20), LogReplacedError("ds.log/0", 15)):
        standby = FakeStandby(nothing, raises(error))
        run = Run(standby, None)
        assert (run.renewed, run.aside, run.asked, run.ends) == ([], [], [error], 1)
        assert standby.ended == ["checkpoint", "asked"], "what was read is filed before"


def test_when_people_have_decided_the_same_replica_goes_on() -> None:
    first, second = FakeStandby(is_lost), FakeStandby(nothing, claims)
    run = Run(first, second)
    assert (run.renewed, run.claimed) == ([], ["holder"])
    assert run.owners == [(1, ""), (1, "address")], "nobody is known to own it meanwhile"


def test_where_the_log_goes_on_behind_another_replica_this_one_is_set_aside() -> None:
    first, second = FakeStandby(raises(OtherHistoryError("ds.log/0", 20))), FakeStandby(claims)
    run = Run(first, second)
    assert (first.ended, run.aside, run.renewed) == (["abandoned"], [41], [True])
    assert run.claimed == ["holder"]


def test_what_is_damaged_is_made_anew_if_somebody_gives_a_copy_and_once() -> None:
    first = FakeStandby(is_damaged)
    second = FakeStandby(nothing, is_damaged, nothing, claims)
    run = Run(first, second)
    assert (first.ended, run.renewed) == (["abandoned"], [False])
    assert second.ended == ["finished"], "not again so soon"


def test_a_replica_that_stays_behind_is_made_anew_if_somebody_gives_a_copy() -> None:
    first, second = FakeStandby(is_behind, is_far_behind), FakeStandby(nothing, claims)
    run = Run(first, second)
    assert (first.ended, first.steps, run.renewed) == (["abandoned"], [], [False])
    assert second.ended == ["finished"]


def test_there_may_be_nothing_to_begin_with() -> None:
    standby = FakeStandby(claims)
    run = Run(None, standby)
    assert (run.renewed, standby.ended) == ([False], ["finished"])


def test_it_may_be_told_to_end_while_it_is_made_anew() -> None:
    run = Run(None, None)
    assert (run.ends, run.errors) == (1, [])


def test_an_end_in_order_is_a_checkpoint() -> None:
    def stops(standby: FakeStandby) -> None:
        run_of[0].follow.end()

    run_of: list[Any] = []
    standby = FakeStandby(nothing, stops)

    class Stopping(Run):
        def __init__(self) -> None:
            run_of.append(self)
            super().__init__(standby)

    assert Stopping().ends == 1
    assert standby.ended == ["checkpoint", "closed"]


def test_without_a_replica_it_looks_on_until_one_is_needed() -> None:
    standby = FakeStandby(claims)
    run = Run(None, standby, needed=[False] * 5 + [True])
    onlooker = run.onlooker
    assert onlooker is not None
    assert onlooker.is_closed
    assert run.owners == [(2, "owner 2"), (1, "address")], "who cannot be found is not told of"
    assert (run.renewed, standby.ended, run.follow.onlooker) == ([False], ["finished"], None)


def test_a_replica_that_is_needed_no_more_is_let_go() -> None:
    first, second = FakeStandby(nothing, nothing), FakeStandby(claims)
    Run(first, second, needed=[True, True, False, False, True])
    assert first.ended == ["abandoned"]
    assert first.steps == []
    assert second.ended == ["finished"]


def test_it_may_be_told_to_end_while_it_looks_on() -> None:
    class Stopping(Run):
        def is_needed(self) -> bool:
            if self.onlooker is not None and self.onlooker.steps:
                self.follow.end()
            return False

    run = Stopping(None)
    assert run.onlooker is not None
    assert (run.ends, run.errors, run.onlooker.is_closed) == (1, [], True)


def test_what_fails_is_told() -> None:
    def fails(standby: FakeStandby) -> None:
        raise AssertionError("a mistake")

    run = Run(FakeStandby(fails))
    assert (run.ends, [str(error) for error in run.errors]) == (0, ["a mistake"])
