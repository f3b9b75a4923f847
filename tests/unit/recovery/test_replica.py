"""Replicas of a shard: what one owner has answered, the next one has; what is settled stays so."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from delayserver.config import Settings
from delayserver.decisions.new_messages import NewMessage
from delayserver.delivery.delayed_fetch import PullRequest
from delayserver.delivery.webhook import WebhookResponse
from delayserver.errors import OverloadedError
from delayserver.parts.installed import PARTS
from delayserver.records.message import Payload
from delayserver.records.subscriptions import Subscription
from delayserver.recovery.check import check
from delayserver.recovery.replica import Replica, ReplicaPlace
from delayserver.recovery.standby import Standby
from delayserver.recovery.store import Surroundings
from storage.catalog import Table
from storage.directory import Identity
from storage.errors import FencedError, ForeignDirectoryError
from storage.replicated.envelope import Claim, encode
from storage.replicated.holder import Holder
from storage.replicated.lease import LEASE_MS, MARGIN_MS
from storage.replicated.log import BEATS_MAX
from storage.rows import HOUR_MS, LogKind
from tests.world.server import Observer, SimulatedClock, SimulatedServer
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.engine import AppendOutcome, MemoryLog
from tests.world.storage.files import SimulatedFiles

IDENTITY = Identity(stamp=77, shard=0, id_secret=bytes(range(16)))
OK = WebhookResponse(200)


class Cluster:
    """One shard's logs, and a clock."""

    def __init__(self, *, has_own_log: bool = False) -> None:
        self.clock = SimulatedClock()
        self.log = MemoryLog("ds.log/0")
        self.settled = MemoryLog("ds.settled/0")
        self.has_own_log = has_own_log
        self.nodes = [Node(self, number) for number in (1, 2)]


class Node:
    """A machine that has a replica."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.cluster = cluster
        self.disk, self.catalog = SimulatedFiles(), MemoryCatalog()
        self.number = number
        self.settings = Settings(disk_reserve_bytes=0)
        self.standby: Standby
        self.server: SimulatedServer
        self.holder: Holder
        self.writer: MemoryLog

    def _open(self) -> Replica:
        cluster = self.cluster

        def open_log() -> MemoryLog:
            self.writer = cluster.log.another()
            return self.writer

        place = ReplicaPlace(
            self.number,
            self.number - 1,
            IDENTITY,
            cluster.has_own_log,
            f"node-{self.number}",
            open_log,
            cluster.settled.another,
        )
        clock = cluster.clock
        rng = random.Random(self.number)
        surroundings = Surroundings(
            clock, clock.stopwatch_ms, rng.randbytes, rng.random, clock.monotonic_s, PARTS
        )
        return Replica(place, surroundings, self.settings)

    def follow(self) -> None:
        self.replica = self._open()
        self.standby = self.replica.stand_by(self.disk, lambda: self.catalog)

    def step(self, passed_ms: int = 100) -> Holder | None:
        self.cluster.clock.move(passed_ms)
        return self.standby.step(0)

    def take_over(self) -> None:
        writer = self.writer
        for _ in range(100):
            holder = self.step()
            if holder is not None:
                self.holder = holder
                self.standby.finish()
                self.catalog = self.catalog.crash()
                self.serve()
                self.writer = writer
                return
        raise AssertionError("nobody else is there, and yet it is not the owner")

    def serve(self) -> None:
        self.server = SimulatedServer(
            self.settings,
            self.disk,
            self.catalog,
            self.cluster.clock,
            random.Random(self.number),
            Observer(),
            around=lambda around: self.replica.owned_by(self.holder),
        )

    def crash(self, *, power_loss: bool = True) -> None:
        self.disk = self.disk.crash() if power_loss else self.disk.kill()
        self.catalog = self.catalog.crash()

    def leave(self, successor: Node) -> None:
        """Stop as planned, and give the office away."""
        self.server.stop()
        self.holder.leave(successor.number)
        self.crash()

    def publish(self, body: bytes, delay_ms: int) -> bool:
        """Whether it was answered."""
        server = self.server
        told: list[Exception | None] = []
        now_ms = self.cluster.clock()
        message = NewMessage("orders", now_ms + delay_ms, Payload(body))
        group = server.engine.publishing.publish_one(message, now_ms).group
        assert group is not None
        group.when_durable(told.append)
        server.rest()
        return told == [None]

    def subscribe(self) -> None:
        registry = self.server.engine.registry
        hook = Subscription(
            id=registry.next_id(),
            name="hook",
            subject="orders",
            type="webhook",
            created_ms=0,
            url="http://h/",
        )
        self.server.engine.subscribing.put_subscription(hook)
        self.server.rest()

    def deliver(self, passed_ms: int) -> list[bytes]:
        """Let so much time pass, with beats, and take what is sent."""
        bodies = []
        for _ in range(passed_ms // 100):
            self.cluster.clock.move(100)
            self.holder.beat()
            self.server.tick()
            self.server.rest()
            while self.server.sending:
                (deliveries,) = self.server.sending[:1]
                bodies += [delivery.payload.body for delivery in deliveries]
                self.server.answer(deliveries, OK)
                self.server.rest()
        return bodies

    def rows(self) -> dict[int, list[tuple[int, int]]]:
        """Seq and due time of all rows of the schedule log, by hour."""
        store = self.standby._store
        found = {}
        for hour, state in store.replay.hours.items():
            log = store.hour_log(LogKind.SCHEDULE)
            frames = log.scan(hour, end=state.length)
            rows = [row for frame in frames for row in frame.rows]  # type: ignore[union-attr]
            found[hour] = [(int(row["seq"]), int(row["due_ms"])) for row in rows]
        return found


@pytest.fixture(params=[False, True], ids=["quorum", "own disk"])
def cluster(request: pytest.FixtureRequest) -> Cluster:
    return Cluster(has_own_log=request.param)


def test_the_next_owner_delivers_what_the_last_one_has_answered(cluster: Cluster) -> None:
    first, second = cluster.nodes
    first.follow()
    first.take_over()
    second.follow()
    first.subscribe()
    assert first.publish(b"1", 60_000)
    assert first.publish(b"2", 500)
    assert first.deliver(1_000) == [b"2"]
    first.server.settling.step(1)
    for _ in range(30):
        first.holder.beat()
        assert second.step() is None
    first.crash()
    second.take_over()
    assert second.holder.state.epoch == 2
    assert second.deliver(120_000) == [b"1"]


def test_a_replica_that_was_away_reads_all_that_it_missed(cluster: Cluster) -> None:
    first, second = cluster.nodes
    first.follow()
    first.take_over()
    first.subscribe()
    for number in range(20):
        assert first.publish(str(number).encode(), 60_000 + HOUR_MS * number)
    first.server.replayer.step(1000)
    first.crash()
    second.follow()
    if cluster.has_own_log:
        for _ in range(590):
            assert second.step() is None, "the last owner has a minute to come back"
    second.take_over()
    assert sorted(second.deliver(61_000)) == [b"0"]


def test_replicas_have_the_same_rows(cluster: Cluster) -> None:
    first, second = cluster.nodes
    first.follow()
    first.take_over()
    for number in range(50):
        assert first.publish(b"x" * number, 1000 * number * number)
    first.crash()
    for node in cluster.nodes:
        node.follow()
        for _ in range(20):
            node.step()
        node.standby.checkpoint()
    assert first.rows() == second.rows()
    assert first.rows()


def test_an_own_log_of_another_epoch_says_nothing_of_the_replica(cluster: Cluster) -> None:
    first, second = cluster.nodes
    first.follow()
    first.take_over()
    second.follow()
    assert first.publish(b"1", 60_000)
    for _ in range(30):
        first.holder.beat()
        second.step()
    first.crash()
    second.take_over()
    assert second.publish(b"2", 60_000)
    first.follow()
    for _ in range(20):
        second.holder.beat()
        assert first.step() is None
    first.standby.checkpoint()
    check(first.disk, first.catalog).assert_clean()


def test_an_owner_that_only_beats_has_its_checkpoint_come_along(cluster: Cluster) -> None:
    first, _ = cluster.nodes
    first.follow()
    first.take_over()
    assert first.publish(b"1", HOUR_MS)
    server = first.server
    cluster.clock.move(6_000)
    server.replayer.step(1)
    before, _ = server.message_log.kept  # type: ignore[attr-defined]
    for _ in range(BEATS_MAX):
        cluster.clock.move(500)
        first.holder.beat()
    server.replayer.step(1)
    after, _ = server.message_log.kept  # type: ignore[attr-defined]
    assert after - before >= BEATS_MAX
    first.crash()
    first.follow()
    assert first.standby.state.next_offset == after


def test_an_owner_whose_record_did_not_get_its_place_answers_nobody(cluster: Cluster) -> None:
    first, second = cluster.nodes
    first.follow()
    first.take_over()
    state = first.holder.state
    claim = Claim(second.number, state.epoch + 1, 0, state.last_offset, "node-2")
    cluster.log.append([encode(claim)])
    with pytest.raises(FencedError, match="a record was expected at offset"):
        first.publish(b"1", 0)
    assert not first.holder.may_deliver()


@pytest.mark.parametrize("outcome", [AppendOutcome.LOST, AppendOutcome.UNANSWERED])
def test_an_owner_that_gets_no_answer_answers_nobody(
    cluster: Cluster, outcome: AppendOutcome
) -> None:
    first, _ = cluster.nodes
    first.follow()
    first.take_over()
    first.holder.log.outcome = outcome  # type: ignore[attr-defined]
    with pytest.raises(FencedError, match="no answer came"):
        first.publish(b"1", 0)


@pytest.mark.parametrize("is_claimed", [False, True])
def test_an_ack_is_answered_if_the_next_owner_knows_it(cluster: Cluster, is_claimed: bool) -> None:
    """The owner hangs with an ack under way. The log of what is settled takes it from anybody."""
    first, second = cluster.nodes
    first.follow()
    first.take_over()
    pulls = Subscription(id=1, name="p", subject="orders", type="pull", created_ms=0)
    first.server.engine.subscribing.put_subscription(pulls)
    assert first.publish(b"1", 0)
    assert not first.deliver(200)
    pulled: list[str] = []
    request = PullRequest(1, 60_000, 0, lambda got: pulled.extend(token for _, token in got))
    first.server.calls.consumers.pull(pulls, request)
    first.server.rest()
    assert pulled
    if is_claimed:
        state = first.holder.state
        claim = Claim(second.number, state.epoch + 1, 0, state.last_offset, "node-2")
        cluster.log.append([encode(claim)])
    answers: list[list[str]] = []
    first.server.ack(pulled, answers.append)
    if is_claimed:
        with pytest.raises(FencedError, match="a record was expected at offset"):
            first.server.rest()
    else:
        first.server.rest()
    assert answers == ([] if is_claimed else [[]])


def test_a_group_that_the_log_took_long_for_leaves_the_owner_with_a_lease(cluster: Cluster) -> None:
    first, _ = cluster.nodes
    first.follow()
    first.take_over()
    append = first.holder.log.append

    def late(records: Sequence[bytes]) -> list[int | None]:
        first.holder.log.append = append  # type: ignore[method-assign]
        cluster.clock.move(LEASE_MS)
        return append(records)

    first.holder.log.append = late  # type: ignore[method-assign]
    assert first.publish(b"1", HOUR_MS)
    assert first.server.calls.may_answer()


def test_nothing_leaves_behind_the_end_of_the_lease(cluster: Cluster) -> None:
    first, _ = cluster.nodes
    first.follow()
    first.take_over()
    first.subscribe()
    assert first.publish(b"1", 500)
    cluster.clock.move(LEASE_MS)
    first.server.tick()
    first.server.rest()
    assert not first.server.sending
    assert first.deliver(200) == [b"1"]


def test_a_directory_of_something_else_is_refused(cluster: Cluster) -> None:
    first, _ = cluster.nodes
    SimulatedServer(
        first.settings, first.disk, first.catalog, cluster.clock, random.Random(1), Observer()
    ).close()
    first.crash(power_loss=False)
    with pytest.raises(ForeignDirectoryError):
        first.follow()


def test_records_that_the_brokers_lose_are_on_the_disk_of_the_owner() -> None:
    cluster = Cluster(has_own_log=True)
    first, second = cluster.nodes
    first.follow()
    first.take_over()
    assert first.publish(b"kept by all", 60_000)
    end = cluster.log.end()
    first.subscribe()
    assert first.publish(b"kept by one", 60_000)
    first.crash()
    # All brokers lose power, and what they had not written yet.
    assert end is not None
    del cluster.log._records.kept[end:]
    first.follow()
    second.follow()
    for _ in range(25):
        assert second.step() is None
    first.take_over()
    assert sorted(first.deliver(61_000)) == [b"kept by all", b"kept by one"]
    assert list(first.catalog.scan(Table.SUBSCRIPTIONS))


def test_an_hour_is_retired_by_each_replica_for_itself(cluster: Cluster) -> None:
    first, second = cluster.nodes
    first.follow()
    first.take_over()
    first.subscribe()
    assert first.publish(b"1", 500)
    assert first.deliver(1_000) == [b"1"]
    first.server.settling.step(1)
    second.follow()
    (hour,) = {cluster.clock() // HOUR_MS}
    for _ in range(60):
        first.holder.beat()
        second.step()
    assert not any(second.standby._replay.is_retired(hour - back) for back in (0, 1))
    cluster.clock.move(HOUR_MS)
    second.standby.step(0)
    cluster.clock.move(2 * HOUR_MS)
    for _ in range(5):
        second.standby.checkpoint()
        second.standby._keep_house()
    assert all(state.retired_ms for state in second.standby._replay.hours.values())


def test_nobody_is_answered_when_the_log_is_away(cluster: Cluster) -> None:
    """Another one may own the shard by then, and have accepted what this one does not know."""
    first, _ = cluster.nodes
    first.follow()
    first.take_over()
    engine, groups = first.server.engine, first.server.engine.groups
    now_ms = cluster.clock()
    message = NewMessage("orders", now_ms + HOUR_MS, Payload(b"1"))
    engine.publishing.publish_one(message, now_ms)
    while first.server.turn():
        pass
    assert first.server.committer.backlog == 1, "its group waits for the brokers"
    cluster.clock.move(LEASE_MS - MARGIN_MS - 1)
    groups.admit(0)
    cluster.clock.move(1)
    assert not first.server.calls.may_answer(), "nothing leaves through the exit"
    with pytest.raises(OverloadedError, match="does not answer"):
        groups.admit(0)
    first.server.rest()
    groups.admit(0)
    assert first.server.calls.may_answer()
    assert first.publish(b"2", HOUR_MS)


def test_an_owner_that_could_not_be_heard_has_its_time_once_more(cluster: Cluster) -> None:
    first, second = cluster.nodes
    first.follow()
    first.take_over()
    second.follow()
    for _ in range(10):
        first.holder.beat()
        assert second.step() is None
    log = second.standby._log
    assert isinstance(log, MemoryLog)
    # No broker leads the log: neither the owner nor the standby gets through, and nobody is silent.
    log.is_reachable = False
    for _ in range(25):
        assert second.step() is None
    log.is_reachable = True
    # There is a leader again. The owner needs a moment to get through.
    for _ in range(20):
        assert second.step() is None
    first.holder.beat()
    for _ in range(20):
        assert second.step() is None
    first.crash()
    second.take_over()


def pulled_by(node: Node) -> dict[str, int]:
    """The attempts that a consumer gets at once, by their tokens."""
    server = node.server
    subscription = server.calls.subscription("p")
    got: dict[str, int] = {}
    server.calls.consumers.pull(
        subscription,
        PullRequest(
            9,
            60_000,
            0,
            lambda found: got.update({token: one.told_attempt for one, token in found}),
        ),
    )
    server.rest()
    return got


def with_pulls(cluster: Cluster) -> dict[str, int]:
    """Leases that a consumer holds of the first node, where two messages were due."""
    first, second = cluster.nodes
    first.follow()
    first.take_over()
    second.follow()
    registry = first.server.engine.registry
    first.server.engine.subscribing.put_subscription(
        Subscription(registry.next_id(), "p", "orders", "pull", created_ms=0)
    )
    assert first.publish(b"1", 0)
    assert first.publish(b"2", 0)
    first.deliver(200)
    held = pulled_by(first)
    assert list(held.values()) == [1, 1]
    for _ in range(30):
        first.holder.beat()
        assert second.step() is None
    return held


def acked(node: Node, tokens: Sequence[str]) -> list[str]:
    """The tokens that were over."""
    answers: list[list[str]] = []
    node.server.ack(list(tokens), answers.append)
    node.server.rest()
    (over,) = answers
    return over


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_lease_is_good_at_the_next_owner_if_the_last_one_has_left(
    cluster: Cluster, restarts: int
) -> None:
    held = with_pulls(cluster)
    first, second = cluster.nodes
    first.leave(second)
    for _ in range(restarts):
        # It has read what was left, and checkpoints, and starts anew before it claims.
        second.standby.set_rank(9)
        second.standby._read(0)
        second.standby.checkpoint()
        second.standby.abandon()
        second.crash()
        second.follow()
    second.take_over()
    second.deliver(200)
    assert not pulled_by(second)
    assert acked(second, list(held)) == []
    second.deliver(70_000)
    assert not pulled_by(second)


def test_a_lease_goes_over_an_owner_that_leaves_before_it_serves(cluster: Cluster) -> None:
    held = with_pulls(cluster)
    first, second = cluster.nodes
    first.leave(second)
    while (holder := second.step()) is None:
        pass
    second.standby.finish()
    holder.leave()
    second.crash()
    first.follow()
    first.take_over()
    assert acked(first, list(held)) == []


def test_behind_a_kill_leases_are_over_and_what_had_fallen_due_counts_an_attempt_more(
    cluster: Cluster,
) -> None:
    held = with_pulls(cluster)
    first, second = cluster.nodes
    first.crash()
    second.take_over()
    assert second.publish(b"3", 10_000)
    second.deliver(200)
    assert acked(second, list(held)) == list(held)
    again = pulled_by(second)
    assert list(again.values()) == [2, 2]
    # The record of the log goes over planned hand-overs, and is the same for a replica made anew.
    second.leave(first)
    first.disk, first.catalog = SimulatedFiles(), MemoryCatalog()
    first.follow()
    first.take_over()
    assert acked(first, list(again)[:1]) == []
    first.deliver(70_000)
    # A message that may be a bad one goes alone.
    assert [list(pulled_by(first).values()) for _ in range(2)] == [[3], [1]]


def test_behind_an_owner_that_could_not_say_that_it_leaves_leases_are_over(
    cluster: Cluster,
) -> None:
    held = with_pulls(cluster)
    first, second = cluster.nodes
    first.holder.log.outcome = AppendOutcome.UNANSWERED  # type: ignore[attr-defined]
    first.leave(second)
    second.take_over()
    assert acked(second, list(held)) == list(held)
