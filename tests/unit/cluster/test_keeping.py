"""The replica of a shard in its directory: what is done with it, and what others hear of that."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from delayserver.cluster.keeping import COPY_RECORDS, ReplicaKeeper
from delayserver.cluster.membership import Membership
from delayserver.cluster.placement import Placement
from delayserver.cluster.watch import (
    LEAVE_MS,
    News,
    ReplicaNote,
    ReplicaState,
)
from delayserver.config import Settings
from delayserver.recovery.dropping import is_dropped
from storage.directory import FORMAT_FILE
from storage.errors import CopySourceError, DamageError, EngineError, ReplicatedLogError
from storage.files import OsFiles
from storage.replicated.meta import AdoptRecord, MetaLog, make_identity
from storage.replicated.office import OfficeState
from tests.world.storage.engine import MemoryLog

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from delayserver.cluster.copying import HttpPeer
    from delayserver.cluster.membership import Lines
    from delayserver.cluster.reports import Reports
    from delayserver.recovery.replica import Replica
    from storage.replicated.kafka import KafkaEngine

SHARD = 1
PLACE = OfficeState(next_offset=900, epoch=4, next_seq=43, last_offset=899)
LOST = ReplicatedLogError("ds.log/1", 900, "it ends before what was filed", "let people decide")


class FakeStandby:
    """A replica that is open."""

    def __init__(self) -> None:
        self.place = self.state = PLACE
        self.kept, self.lag_ms, self.is_known = (7, 8), 5, True
        self.is_drained = False
        self.rank: int | None = None
        self.adopted: list[AdoptRecord] = []
        self.is_abandoned = False

    def set_rank(self, rank: int) -> None:
        self.rank = rank

    def adopt(self, decision: AdoptRecord, shard_log: MemoryLog, settled: MemoryLog) -> None:
        self.adopted.append(decision)
        shard_log.append([b"ADOPT"])

    def abandon(self) -> None:
        self.is_abandoned = True


class Brokers:
    """Logs in memory, which stay when one is closed."""

    def __init__(self) -> None:
        self.logs: dict[str, MemoryLog] = {}
        self.is_away = False

    def meta(self) -> MemoryLog:
        if self.is_away:
            raise EngineError("read", "meta", "nobody answers", "wait")
        return self._log("meta")

    def log(self, shard: int) -> MemoryLog:
        return self._log(f"log/{shard}")

    def settled(self, shard: int) -> MemoryLog:
        return self._log(f"settled/{shard}")

    def _log(self, name: str) -> MemoryLog:
        return self.logs.setdefault(name, MemoryLog(name))


class Waits:
    """A process that is told to end after so many waits."""

    def __init__(self, count: int, between: Callable[[int], None] = lambda number: None) -> None:
        self.left, self.number = count, 0
        self._between = between

    @property
    def is_ending(self) -> bool:
        return self.left <= 0

    def wait(self, seconds: float) -> None:
        self.left -= 1
        self.number += 1
        self._between(self.number)


class Parts:
    """A node n1 of a cluster of four, of which three have the shard."""

    def __init__(self, directory: Path) -> None:
        self.brokers = Brokers()
        self.directory = directory
        identity = make_identity("c", 2, "fsync", random.Random(7).randbytes, 3)
        MetaLog(cast("Any", self.brokers.meta())).create(identity)
        self.lines = SimpleNamespace(news=News())
        self.reports = FakeReports()
        self.opened: list[FakeStandby] = []
        self.damage: list[DamageError] = []
        self.peers: list[str] = []
        self.present_ms = 0
        self.keeper = ReplicaKeeper(
            Settings(data_dir=directory),
            SHARD,
            Membership("n1", 1, identity, placement("n1", "n2", "n3")),
            cast("KafkaEngine", self.brokers),
            cast("Lines", self.lines),
            cast("Reports", self.reports),
            self._peer,
            open_catalog=lambda: pytest.fail("the replica opens it"),
            stopwatch=lambda: self.present_ms,
        )
        self.keeper.begin(
            cast("Replica", SimpleNamespace(stand_by=self._open, reach=lambda files, place: 42)),
            "http://n1:1",
            lambda: "http://owner",
        )

    def _peer(self, url: str) -> HttpPeer:
        self.peers.append(url)

        def snapshot() -> None:
            raise CopySourceError(url, "it has none")

        return cast("HttpPeer", SimpleNamespace(name=url, snapshot=snapshot))

    def _open(self, files: Any, open_catalog: Any) -> FakeStandby:
        if self.damage:
            raise self.damage.pop()
        self.opened.append(FakeStandby())
        return self.opened[-1]

    def is_there(self) -> None:
        """A replica is in the directory."""
        (self.directory / FORMAT_FILE).write_text("")

    def ask(self, standby: FakeStandby, lifetime: Waits) -> Any:
        return self.keeper.ask_people(lifetime, cast("Any", standby), LOST)

    def decide(self, of: str, *, epoch: int = 5, end: int = 800) -> AdoptRecord:
        decision = AdoptRecord(SHARD, of, end, epoch)
        MetaLog(cast("Any", self.brokers.meta())).say(decision)
        return decision


class FakeReports:
    """Note what is said."""

    def __init__(self) -> None:
        self.how_far: Any = None
        self.process_url = "?"
        self.stopped = (0, 0)
        self.stage = "copying"

    def have_none(self, stage: str | None = None) -> None:
        self.process_url = ""
        self.stage = stage or self.stage

    def stop(self, epoch: int, seq: int) -> None:
        self.have_none()
        self.stopped = (epoch, seq)


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    return Parts(tmp_path)


def placement(*nodes: str, replicas: int = 3) -> Placement:
    return Placement(replicas, dict.fromkeys(nodes, ""))


def state(node: str, **note: Any) -> ReplicaState:
    fields = {"at_ms": 0, "url": "", "read_offset": 0, "settled_offset": 0, **note}
    return ReplicaState(node, 0, ReplicaNote(**fields), 0)


# ── what is opened ─────────────────────────────────────────────────────────────────────────────


def test_what_is_there_and_sound_is_opened_and_others_hear_of_it(parts: Parts) -> None:
    parts.is_there()
    parts.reports.stopped = (4, 42)
    assert parts.keeper.open_sound() is parts.opened[0]  # type: ignore[comparison-overlap]
    assert parts.reports.process_url == "http://n1:1"
    assert (parts.reports.stage, parts.reports.stopped) == ("replica", (0, 0))
    assert parts.reports.how_far() == ((7, 8), 900, 5)


def test_a_replica_that_has_not_found_its_place_counts_for_nothing(parts: Parts) -> None:
    parts.is_there()
    parts.keeper.open_sound()
    parts.opened[0].is_known = False
    assert parts.reports.how_far() == ((0, 0), 0, 0)


def test_what_is_damaged_is_not_opened(parts: Parts) -> None:
    parts.is_there()
    parts.damage = [DamageError("catalog", 0, "it does not match")]
    assert parts.keeper.open_sound() is None
    assert parts.keeper.open_sound() is not None


def test_what_was_found_damaged_in_office_is_not_opened_once(parts: Parts) -> None:
    parts.is_there()
    parts.keeper.is_damaged = True
    assert parts.keeper.open_sound() is None
    assert parts.keeper.open_sound() is not None


def test_a_new_replica_reads_a_short_log_and_is_copied_where_it_is_long(parts: Parts) -> None:
    log = parts.brokers.log(SHARD)
    log.append([b""] * COPY_RECORDS)
    assert parts.keeper.open_sound() is not None
    log.append([b""])
    assert parts.keeper.open_sound() is None


def test_a_new_replica_is_copied_where_the_log_has_lost_something(parts: Parts) -> None:
    parts.decide("n2")
    assert parts.keeper.open_sound() is None


def test_a_new_replica_needs_no_decision_that_cannot_be_read(parts: Parts) -> None:
    parts.brokers.is_away = True
    assert parts.keeper.open_sound() is not None


# ── what it means for who follows ──────────────────────────────────────────────────────────────


def test_a_drained_node_and_one_that_others_go_before_claim_nothing(parts: Parts) -> None:
    standby = FakeStandby()

    def instructed(**news: Any) -> tuple[bool, int | None]:
        nodes = ["n1", "n2", "n3"]
        parts.lines.news = News(at_ms=1, nodes=nodes, placement=placement(*nodes), **news)
        parts.keeper.instruct(cast("Any", standby))
        return standby.is_drained, standby.rank

    rank = placement("n1", "n2", "n3").rank(SHARD, "n1")
    assert instructed() == (False, rank)
    assert instructed(drained=["n1"]) == (True, rank)
    assert instructed(drained=["n2"]) == (False, rank)
    # Another one has more than the log.
    assert instructed(replicas={SHARD: [state("n2", stopped_epoch=4)]}) == (True, rank)
    assert instructed(replicas={SHARD: [state("n2", stopped_epoch=3)]}) == (False, rank)


# ── people decide ──────────────────────────────────────────────────────────────────────────────


def test_whose_replica_was_named_goes_on_with_it(parts: Parts) -> None:
    standby = FakeStandby()
    parts.brokers.log(SHARD).append([b"x"] * 800)

    def decide(number: int) -> None:
        if number == 2:
            parts.decide("n1")

    waits = Waits(5, decide)
    assert parts.ask(standby, waits) is parts.opened[0]
    assert [one.of for one in standby.adopted] == ["n1"]
    assert standby.is_abandoned
    assert waits.number == 2


def test_others_wait_until_the_log_goes_on(parts: Parts) -> None:
    standby = FakeStandby()
    parts.brokers.log(SHARD).append([b"x"] * 800)
    parts.decide("n2")

    def goes_on(number: int) -> None:
        if number == 3:
            parts.brokers.log(SHARD).append([b"ADOPT"])

    waits = Waits(5, goes_on)
    assert parts.ask(standby, waits) is parts.opened[0]
    assert (standby.adopted, waits.number) == ([], 3)


def test_a_decision_is_obeyed_once(parts: Parts) -> None:
    """Behind it the replica looks; what it does not find then it does not look for again."""
    parts.brokers.log(SHARD).append([b"x"] * 801)
    parts.decide("n2")
    assert parts.ask(FakeStandby(), Waits(1)) is parts.opened[0]
    assert parts.ask(FakeStandby(), Waits(3)) is None
    parts.decide("n2", epoch=6)
    assert parts.ask(FakeStandby(), Waits(1)) is parts.opened[1]


@pytest.mark.parametrize("old", [{"epoch": 4}, {"end": 900}])
def test_a_decision_of_before_is_none(parts: Parts, old: dict[str, int]) -> None:
    parts.brokers.log(SHARD).append([b"x"] * 2000)
    parts.decide("n1", **old)
    standby = FakeStandby()
    assert parts.ask(standby, Waits(3)) is None
    assert (standby.adopted, standby.is_abandoned) == ([], True)
    assert parts.reports.stopped == (4, 42)
    assert parts.reports.process_url == ""


def test_it_is_waited_while_the_brokers_are_away(parts: Parts) -> None:
    parts.brokers.log(SHARD).append([b"x"] * 801)
    parts.decide("n2")
    parts.brokers.is_away = True

    def comes_back(number: int) -> None:
        parts.brokers.is_away = number < 2

    assert parts.ask(FakeStandby(), Waits(5, comes_back)) is not None


# ── who has a copy ─────────────────────────────────────────────────────────────────────────────


def test_the_owner_is_asked_first_and_then_who_was_heard_of_last(parts: Parts) -> None:
    parts.lines.news = News(
        at_ms=9,
        replicas={
            SHARD: [
                state("n2", at_ms=3, process_url="http://n2"),
                state("n1", at_ms=9, process_url="http://n1"),
                state("n3", at_ms=5, process_url="http://n3"),
                state("n4", at_ms=8),
                state("n5", at_ms=4, process_url="http://owner"),
            ]
        },
        placement=placement("n1", "n2", "n3"),
    )
    assert parts.keeper.renew(Waits(1), must=True) is None
    assert parts.peers == ["http://owner", "http://n3", "http://n2"]
    assert parts.reports.stage == "copying"


# ── none is needed ─────────────────────────────────────────────────────────────────────────────


def test_a_replica_that_is_to_go_says_so_and_goes(parts: Parts) -> None:
    nodes = ["n1", *(f"m{number}" for number in range(30))]
    placed = placement(*nodes)
    assert not placed.has(SHARD, "n1")
    parts.is_there()
    parts.lines.news = News(at_ms=1, placement=placed, nodes=nodes)
    assert not parts.keeper.is_placed
    parts.keeper.open_sound()
    assert parts.reports.stage == "leaving"
    assert parts.keeper.is_needed()
    parts.present_ms = LEAVE_MS
    assert parts.keeper.is_needed(), "those that are to have it are not in step"
    others = [state(node, at_ms=LEAVE_MS, stage="replica") for node in placed.nodes(SHARD)]
    parts.lines.news = News(at_ms=LEAVE_MS, placement=placed, nodes=nodes, replicas={SHARD: others})
    assert not parts.keeper.is_needed()
    parts.brokers.log(SHARD).append([b"x"])
    parts.keeper.look_on().close()
    assert (parts.reports.stage, parts.reports.process_url) == ("passing", "")
    assert is_dropped(OsFiles(str(parts.directory)))
    assert parts.keeper.open_sound() is None
    # It is to have one again.
    parts.lines.news = News(at_ms=1, placement=placement("n1", "n2", "n3"))
    assert parts.keeper.open_sound() is not None
    assert parts.reports.stage == "replica"
