"""Limits of all shards together: never more than allowed, and all of it for who needs it alone."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from delayserver.records.subscriptions import Subscription
from delayserver.shards.allotment import MEET_MS, QUIET_MS
from delayserver.shards.limits import ASK, GRANT, HOLD
from tests.unit.delivery.parts import webhook
from tests.unit.shards.processes import Cluster, Process, Request

COUNT = 3
HOME = 1
TIMEOUT_MS = 5_000


def hook(**more: Any) -> Subscription:
    """Its home is shard 1 of 3."""
    return webhook(1, timeout_ms=TIMEOUT_MS, **more)


def used(cluster: Cluster) -> list[int]:
    return [cluster.processes[n].queue().used_places() for n in sorted(cluster.processes)]


# ---- places --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", range(COUNT))
def test_who_has_something_to_send_alone_has_all_places(shard: int) -> None:
    cluster = Cluster(COUNT, hook(max_in_flight=8))
    process = cluster.processes[shard]
    process.fire(20)
    cluster.run()
    assert len(process.requests) == 8
    process.end(process.requests[0])
    cluster.run()
    assert len(process.requests) == 8
    cluster.finish()
    assert cluster.done_rows == 20
    assert cluster.leaks() == []


@pytest.mark.parametrize("first", range(COUNT))
def test_who_has_more_than_its_part_leaves_it_to_those_who_wait(first: int) -> None:
    cluster = Cluster(COUNT, hook(max_in_flight=10))
    cluster.processes[first].fire(60)
    cluster.run()
    assert used(cluster)[first] == 10
    for process in cluster.living:
        process.fire(60)
    cluster.run()
    ended = 0
    while max(used(cluster)) > 4:
        cluster.processes[first].end(cluster.processes[first].requests[0])
        cluster.run()
        assert cluster.places() == 10
        ended += 1
    assert ended <= 7
    assert sorted(used(cluster)) == [3, 3, 4]
    # From now on each uses its places again, and nobody has to be asked.
    for process in cluster.living:
        process.told.clear()
    for _ in range(30):
        for process in cluster.living:
            process.end(process.requests[0])
        cluster.run()
        assert cluster.places() == 10
    assert [one.told for one in cluster.living] == [[], [], []]
    cluster.finish()
    assert cluster.leaks() == []


def test_of_fewer_places_than_shards_everybody_has_turns() -> None:
    cluster = Cluster(COUNT, hook(max_in_flight=2))
    for process in cluster.living:
        process.fire(60)
    out: list[tuple[Process, Request]] = []
    turns: Counter[int] = Counter()
    for _ in range(120):
        cluster.run()
        known = [request for _, request in out]
        for process in cluster.living:
            out += [(process, one) for one in process.requests if one not in known]
        process, request = out.pop(0)
        process.end(request)
        turns[process.own] += 1
    assert max(turns.values()) - min(turns.values()) <= 2


def test_of_one_place_everybody_has_a_turn() -> None:
    cluster = Cluster(COUNT, hook(max_in_flight=1))
    for process in cluster.living:
        process.fire(4)
    turns: list[int] = []
    for _ in range(12):
        cluster.run()
        [process] = [one for one in cluster.living if one.requests]
        turns.append(process.own)
        process.end(process.requests[0])
    assert all(Counter(turns[n : n + COUNT]) == Counter(range(COUNT)) for n in range(0, 12, COUNT))
    cluster.run()
    assert cluster.leaks() == []


def test_what_is_told_in_a_turn_goes_in_one_notice() -> None:
    cluster = Cluster(COUNT, hook(max_in_flight=25))
    process, home = cluster.processes[0], cluster.processes[HOME]
    process.told.clear()
    process.fire(30)
    cluster.run()
    assert [topic for _, topic, _ in process.told] == [ASK]
    assert len(process.requests) == 25
    for request in process.requests[:8]:
        process.end(request)
    cluster.run()
    assert [topic for _, topic, _ in process.told] == [ASK, ASK]
    assert [topic for _, topic, _ in home.told if topic != HOLD] == [GRANT]


def test_what_is_gone_before_it_may_leave_gives_its_places_back() -> None:
    cluster = Cluster(COUNT, hook(max_in_flight=4))
    process, other = cluster.processes[0], cluster.processes[2]
    process.fire(4)
    process.change(hook(max_in_flight=4, paused=True))
    cluster.run()
    assert process.requests == []
    assert cluster.leaks() == []
    other.fire(9)
    cluster.run()
    assert len(other.requests) == 4


def test_a_shard_that_stops_keeps_nobody_waiting() -> None:
    cluster = Cluster(COUNT, hook(max_in_flight=3))
    process, other = cluster.processes[0], cluster.processes[2]
    process.fire(9)
    other.fire(9)
    cluster.run()
    process.parts.dispatcher.drain()
    for request in list(process.requests):
        process.end(request)
    cluster.run()
    assert process.requests == []
    assert len(other.requests) == 3


def test_what_has_failed_has_its_place_until_it_is_recorded() -> None:
    cluster = Cluster(COUNT, hook(max_in_flight=2))
    process, other = cluster.processes[0], cluster.processes[2]
    process.fire(2)
    cluster.run()
    other.fire(2)
    for request in list(process.requests):
        process.end(request, fails=True)
    cluster.run()
    assert other.requests == []
    process.record()
    cluster.run()
    assert len(other.requests) == 2


# ---- batches and rates ---------------------------------------------------------------------------


def test_a_batch_is_one_place() -> None:
    cluster = Cluster(COUNT, hook(max_in_flight=2, batch_max=10, linger_ms=0))
    first, second = cluster.processes[0], cluster.processes[2]
    first.fire(15)
    second.fire(25)
    cluster.run()
    assert [len(one.carried) for one in first.requests] == [10, 5]
    assert second.requests == []
    first.end(first.requests[0])
    cluster.run()
    assert [len(one.carried) for one in second.requests] == [10]
    cluster.finish()
    assert cluster.done_rows == 40
    assert cluster.leaks() == []


def test_a_batch_lingers_without_a_place() -> None:
    cluster = Cluster(COUNT, hook(max_in_flight=1, batch_max=10, linger_ms=5_000))
    first, second = cluster.processes[0], cluster.processes[2]
    first.fire(3)
    second.fire(10)
    cluster.run()
    assert [len(one.requests) for one in cluster.living] == [0, 0, 1]
    second.end(second.requests[0])
    cluster.advance(5_000)
    cluster.run()
    assert [len(one.carried) for one in first.requests] == [3]


@pytest.mark.parametrize("batch_max", [0, 10])
@pytest.mark.parametrize("senders", [(0,), (HOME,), (0, 2), (0, 1, 2)])
def test_the_rate_is_kept_and_used(senders: tuple[int, ...], batch_max: int) -> None:
    definition = hook(rate_per_s=20.0, rate_burst=5, max_in_flight=64, batch_max=batch_max)
    cluster = Cluster(COUNT, definition)
    for shard in senders:
        cluster.processes[shard].fire(300)
    begun_ms = cluster.now_ms
    for _ in range(1_000):
        cluster.run()
        allowed = 5 + 20 * (cluster.now_ms - begun_ms) / 1000
        # A token goes to somebody at the latest a millisecond after it is there.
        assert allowed - 1.05 <= cluster.sent_rows <= allowed
        for process in cluster.living:
            for request in list(process.requests):
                process.end(request)
        cluster.advance(10)
    sent = [300 - cluster.processes[shard].queue().count for shard in senders]
    assert max(sent) - min(sent) <= 6


@pytest.mark.parametrize("asked_ms", range(80, 105))
def test_time_that_passes_while_the_home_looks_at_the_rate_keeps_nothing_back(
    asked_ms: int,
) -> None:
    cluster = Cluster(COUNT, hook(rate_per_s=10.0, rate_burst=1))
    cluster.advance(MEET_MS)
    cluster.processes[0].fire(1)
    cluster.finish()
    cluster.advance(asked_ms)
    cluster.step_ms = 1
    cluster.processes[2].fire(1)
    cluster.finish()


def test_tokens_that_are_not_used_come_back() -> None:
    cluster = Cluster(COUNT, hook(rate_per_s=0.001, rate_burst=5))
    process, other = cluster.processes[0], cluster.processes[2]
    process.fire(5)
    process.change(hook(rate_per_s=0.001, rate_burst=5, paused=True))
    cluster.run()
    other.fire(5)
    cluster.run()
    assert len(other.requests) == 5


def test_a_spread_is_as_even_over_all_shards() -> None:
    """Each spreads its own rows over the same time, so all of them are spread over it."""
    cluster = Cluster(COUNT, hook(spread_ms=10_000, created_ms=2 * 10**12, max_in_flight=500))
    for shard, count in enumerate((100, 10, 50)):
        cluster.processes[shard].fire(count)
    cluster.run()
    for at_ms in range(0, 10_001, 500):
        assert cluster.sent_rows == pytest.approx(160 * at_ms / 10_000, abs=4)
        cluster.advance(500)
        cluster.run()
    assert cluster.sent_rows == 160


# ---- definitions ---------------------------------------------------------------------------------


def test_another_limit_counts_at_once() -> None:
    cluster = Cluster(COUNT, hook(max_in_flight=2))
    process = cluster.processes[0]
    process.fire(20)
    cluster.run()
    # The home is told last.
    for shard in (0, 2, HOME):
        cluster.processes[shard].change(hook(max_in_flight=6))
    cluster.run()
    assert len(process.requests) == 6
    for shard in (HOME, 0, 2):
        cluster.processes[shard].change(hook(max_in_flight=3))
    for left in (5, 4, 3, 3):
        process.end(process.requests[0])
        cluster.run()
        assert len(process.requests) == left


def test_another_rate_counts_at_once() -> None:
    cluster = Cluster(COUNT, hook(rate_per_s=0.001, rate_burst=1))
    process = cluster.processes[0]
    process.fire(20)
    cluster.run()
    assert cluster.sent_rows == 1
    for one in cluster.living:
        one.change(hook(rate_per_s=0.001, rate_burst=4))
    cluster.run()
    assert cluster.sent_rows == 5
    for one in cluster.living:
        one.change(hook())
    cluster.run()
    assert cluster.sent_rows == 20


def test_singles_become_batches() -> None:
    cluster = Cluster(COUNT, hook(max_in_flight=4))
    process = cluster.processes[0]
    process.fire(30)
    cluster.run()
    for one in cluster.living:
        one.change(hook(max_in_flight=4, batch_max=5))
    cluster.finish()
    assert cluster.done_rows == 30
    assert cluster.leaks() == []


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 0, 1)])
def test_of_one_that_is_deleted_nothing_is_left(order: tuple[int, ...]) -> None:
    cluster = Cluster(COUNT, hook(max_in_flight=4))
    for process in cluster.living:
        process.fire(10)
    cluster.run()
    for shard in order:
        cluster.processes[shard].change(hook(deleted=True))
        cluster.settle()
    assert cluster.leaks() == []
    assert not any(one.limits._allotments or one.limits._permits for one in cluster.living)


def test_of_one_that_is_deleted_the_requests_that_are_out_count_as_long_as_others_go_on() -> None:
    cluster = Cluster(COUNT, hook(max_in_flight=4))
    busy, other = cluster.processes[0], cluster.processes[2]
    busy.fire(10)
    cluster.run()
    busy.change(hook(deleted=True))
    other.fire(10)
    cluster.run()
    assert (len(busy.requests), other.requests) == (4, [])
    for shard in (HOME, 2):
        cluster.processes[shard].change(hook(deleted=True))
    cluster.run()
    assert cluster.leaks() == []


def test_a_home_that_never_knew_one_that_is_deleted_forgets_what_was_out() -> None:
    cluster = Cluster(COUNT, hook(max_in_flight=4))
    busy = cluster.processes[0]
    busy.fire(10)
    cluster.run()
    cluster.kill(HOME)
    cluster.settle()
    cluster.definitions.clear()
    home = cluster.begin(HOME)
    cluster.connect_all()
    cluster.run()
    assert [list(one.out) for one in home.limits._allotments.values()] == [[4, 0, 0]]
    for shard in (0, 2):  # the home has nothing to delete
        cluster.processes[shard].change(hook(deleted=True))
    cluster.advance(TIMEOUT_MS + QUIET_MS)
    cluster.run()
    assert not home.limits._allotments


def test_one_that_the_home_does_not_know_yet_waits_for_it() -> None:
    cluster = Cluster(COUNT)
    process = cluster.processes[0]
    process.change(hook(max_in_flight=4))
    process.fire(10)
    cluster.run()
    assert process.requests == []
    cluster.processes[HOME].change(hook(max_in_flight=4))
    cluster.run()
    assert len(process.requests) == 4


def test_what_is_asked_of_one_that_the_home_has_deleted_is_forgotten() -> None:
    cluster = Cluster(COUNT, hook(max_in_flight=4))
    cluster.processes[HOME].change(hook(deleted=True))
    process = cluster.processes[0]
    process.fire(10)
    cluster.run()
    assert process.requests == []
    process.change(hook(deleted=True))
    cluster.run()
    assert cluster.leaks() == []


# ---- links and processes come and go -------------------------------------------------------------


def test_without_its_home_a_shard_goes_on_with_what_it_had_up_to_its_share() -> None:
    cluster = Cluster(COUNT, hook(max_in_flight=9))
    busy, other = cluster.processes[0], cluster.processes[2]
    busy.fire(50)
    cluster.run()
    cluster.kill(HOME)
    other.fire(50)
    cluster.run()
    assert used(cluster) == [9, 0]
    for _ in range(20):
        busy.end(busy.requests[0])
        cluster.run()
    assert used(cluster) == [3, 0]
    # Everything that was out when the home was lost has ended by now.
    cluster.advance(TIMEOUT_MS + QUIET_MS - 1)
    cluster.run()
    assert used(cluster) == [3, 0]
    cluster.advance(1)
    cluster.run()
    assert used(cluster) == [3, 3]


def test_a_home_that_is_back_counts_what_is_out() -> None:
    cluster = Cluster(COUNT, hook(max_in_flight=9))
    busy, other = cluster.processes[0], cluster.processes[2]
    busy.fire(50)
    cluster.run()
    cluster.kill(HOME)
    cluster.settle()
    other.fire(50)
    home = cluster.begin(HOME)
    home.fire(50)
    cluster.run()
    assert used(cluster) == [9, 0, 0]
    cluster.connect_all()
    cluster.run()
    assert used(cluster) == [9, 0, 0]
    for taken in range(1, 7):
        busy.end(busy.requests[0])
        cluster.run()
        assert cluster.places() == 9
        assert used(cluster)[0] >= 9 - taken
    cluster.finish()
    assert cluster.leaks() == []


def test_a_home_that_begins_waits_for_the_others_or_for_a_while() -> None:
    cluster = Cluster(COUNT, hook(max_in_flight=9), linked=False)
    home = cluster.processes[HOME]
    home.fire(50)
    cluster.connect(0, HOME)
    cluster.run()
    assert home.requests == []
    cluster.advance(MEET_MS)
    cluster.run()
    assert len(home.requests) == 6
    cluster.connect(HOME, 2)
    cluster.run()
    assert len(home.requests) == 9


def test_of_a_shard_that_has_ended_the_home_counts_what_it_had_and_then_its_share() -> None:
    cluster = Cluster(COUNT, hook(max_in_flight=9))
    busy, home = cluster.processes[0], cluster.processes[HOME]
    busy.fire(50)
    cluster.run()
    home.fire(50)
    cluster.kill(0)
    cluster.run()
    assert home.requests == []
    cluster.advance(TIMEOUT_MS + QUIET_MS)
    cluster.run()
    assert len(home.requests) == 6
    cluster.begin(0)
    cluster.connect_all()
    cluster.run()
    assert len(home.requests) == 9


def test_a_shard_that_is_back_has_nothing_out() -> None:
    cluster = Cluster(COUNT, hook(max_in_flight=9))
    cluster.processes[0].fire(50)
    cluster.run()
    cluster.kill(0)
    cluster.begin(0)
    home = cluster.processes[HOME]
    home.fire(50)
    cluster.run()
    assert home.requests == []
    cluster.connect_all()
    cluster.run()
    assert len(home.requests) == 9


def test_what_was_called_back_over_a_link_that_has_ended_is_called_back_again() -> None:
    cluster = Cluster(COUNT, hook(max_in_flight=10))
    busy, other = cluster.processes[0], cluster.processes[2]
    busy.fire(60)
    cluster.run()
    other.fire(60)
    cluster.run()
    cluster.cut(0, HOME, random.Random("cut"))
    cluster.settle()
    cluster.connect(0, HOME)
    for _ in range(20):
        cluster.run()
        busy.end(busy.requests[0])
    cluster.run()
    assert used(cluster) == [5, 0, 5]


def test_a_limit_smaller_than_the_number_of_shards_waits_for_its_home() -> None:
    cluster = Cluster(COUNT, hook(max_in_flight=2))
    cluster.kill(HOME)
    process = cluster.processes[0]
    process.fire(5)
    cluster.run()
    cluster.advance(60_000)
    cluster.run()
    assert process.requests == []
    cluster.begin(HOME)
    cluster.connect_all()
    cluster.run()
    assert len(process.requests) == 2


def test_without_its_home_each_shard_has_its_part_of_the_rate() -> None:
    cluster = Cluster(COUNT, hook(rate_per_s=30.0, rate_burst=6, max_in_flight=600))
    process = cluster.processes[0]
    process.queue()
    cluster.kill(HOME)
    cluster.settle()
    cluster.advance(TIMEOUT_MS + QUIET_MS)
    process.fire(500)
    begun_ms = cluster.now_ms
    for _ in range(500):
        cluster.run()
        allowed = 2 + 10 * (cluster.now_ms - begun_ms) / 1000
        assert allowed - 1.2 <= cluster.sent_rows <= allowed
        cluster.advance(10)
    definition = hook(rate_per_s=300.0, rate_burst=6, max_in_flight=600)
    cluster.definitions = [definition]
    for one in cluster.living:
        one.change(definition)
    sent = cluster.sent_rows
    for _ in range(100):
        cluster.advance(5)
        cluster.run()
    assert cluster.sent_rows - sent == pytest.approx(50, abs=3)


def test_the_home_leaves_its_part_of_the_rate_to_whom_it_has_lost() -> None:
    cluster = Cluster(COUNT, hook(rate_per_s=30.0, rate_burst=6, max_in_flight=900))
    away, home, other = (cluster.processes[n] for n in (0, HOME, 2))
    for process in cluster.living:
        process.queue()
    cluster.cut(0, HOME, random.Random("cut"))
    cluster.settle()
    cluster.advance(TIMEOUT_MS + QUIET_MS)
    for process in (away, home, other):
        process.fire(300)
    begun_ms = cluster.now_ms
    for _ in range(500):
        cluster.run()
        allowed = 6 + 30 * (cluster.now_ms - begun_ms) / 1000
        assert allowed - 3 <= cluster.sent_rows <= allowed
        cluster.advance(10)
    cluster.connect(0, HOME)
    for _ in range(100):
        cluster.run()
        allowed = 6 + 30 * (cluster.now_ms - begun_ms) / 1000
        assert allowed - 6 <= cluster.sent_rows <= allowed
        cluster.advance(10)


def test_a_home_that_is_lost_does_not_make_a_burst_come_twice() -> None:
    cluster = Cluster(COUNT, hook(rate_per_s=0.003, rate_burst=6, max_in_flight=30))
    process = cluster.processes[0]
    process.fire(20)
    cluster.run()
    assert len(process.requests) == 6
    cluster.kill(HOME)
    cluster.settle()
    process.end(process.requests[0])
    cluster.advance(TIMEOUT_MS + QUIET_MS)
    cluster.run()
    assert cluster.sent_rows == 6


# ---- every interleaving --------------------------------------------------------------------------


class Story:
    """What happens to shards, as a seed says."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(f"limits {seed}")
        self.limit = rng.choice([1, 2, 3, 5, 7])
        self.rate = rng.choice([0.0, 0.0, 5.0, 200.0])
        self.burst = rng.choice([1, 3, 8]) if self.rate else 0
        self.count = rng.choice([2, 3, 4])
        definition = hook(
            max_in_flight=self.limit,
            rate_per_s=self.rate,
            rate_burst=self.burst,
            batch_max=rng.choice([0, 0, 4]),
        )
        self.cluster = Cluster(self.count, definition, linked=rng.random() < 0.5)
        self.home = 1 % self.count
        self.homes = 1
        self.fired = self.lost = 0
        self.cut_ms: dict[tuple[int, int], int] = {}
        """When a link between two that live was cut."""
        self.most = 0

    def tell(self, steps: int) -> None:
        for _ in range(steps):
            self._step()
            self._check()
        cluster = self.cluster
        for shard in range(self.count):
            if shard not in cluster.processes:
                self._begin(shard)
        cluster.finish()
        self._check()
        assert cluster.done_rows == self.fired - self.lost
        assert cluster.leaks() == []

    def _check(self) -> None:
        cluster = self.cluster
        self.most = max(self.most, cluster.places())
        assert cluster.places() <= self.limit, used(cluster)
        assert sum(len(one.requests) for one in cluster.living) <= self.limit
        if self.rate:
            earned = self.rate * cluster.now_ms / 1000
            assert cluster.sent_rows <= self.burst * self.homes + earned + 1e-6

    def _step(self) -> None:
        rng, cluster = self.rng, self.cluster
        process = rng.choice(cluster.living)
        wires = [
            pair
            for pair, wire in cluster.wires.items()
            if wire.items and pair[1] in cluster.processes
        ]
        what = rng.choices(
            ("fire", "turn", "read", "end", "fail", "record", "deliver", "pass", "link", "process"),
            (10, 40, 25, 25, 5, 10, 60, 10, 4, 1),
        )[0]
        if what == "fire":
            count = rng.choice([1, 2, 9])
            process.fire(count)
            self.fired += count
        elif what == "turn":
            process.turn()
        elif what == "read" and process.parts.ports.handouts:
            process.read()
        elif what in ("end", "fail") and process.requests:
            process.end(rng.choice(process.requests), fails=what == "fail")
        elif what == "record":
            process.record()
        elif what == "deliver" and wires:
            cluster.deliver(*rng.choice(wires))
        elif what == "pass":
            self._pass(rng.choice([1, 20, 400, 400, 3_000]))
        elif what == "link":
            self._link()
        elif what == "process":
            self._process(process)

    def _pass(self, by_ms: int) -> None:
        """No link between two that live is away for long, whoever has lost a link has heard of it
        before time passes, and no request takes longer than its timeout."""
        cluster = self.cluster
        while by_ms > 0:
            for pair, since_ms in list(self.cut_ms.items()):
                if cluster.now_ms - since_ms >= 500 and cluster.may_connect(*pair):
                    cluster.connect(*pair)
                    del self.cut_ms[pair]
            cluster.settle() if self.rng.random() < 0.3 else self._hear_of_ends()
            for process in cluster.living:
                process.read_all()
                for request in list(process.requests):
                    if cluster.now_ms - request.since_ms >= TIMEOUT_MS:
                        process.end(request)
                process.record()
            self._check()
            step_ms = min(by_ms, 250)
            cluster.advance(step_ms)
            self._check()
            by_ms -= step_ms

    def _hear_of_ends(self) -> None:
        cluster = self.cluster
        for (sender, receiver), wire in cluster.wires.items():
            while any(topic in ("up", "down") for topic, _ in wire.items):
                cluster.deliver(sender, receiver)
                self._check()

    def _link(self) -> None:
        cluster, rng = self.cluster, self.rng
        one, other = rng.sample(range(self.count), 2)
        pair = min(one, other), max(one, other)
        if cluster.may_connect(*pair):
            cluster.connect(*pair)
            self.cut_ms.pop(pair, None)
        elif cluster.are_linked(*pair) and rng.random() < 0.3:
            cluster.cut(*pair, rng)
            self.cut_ms[pair] = cluster.now_ms

    def _process(self, process: Process) -> None:
        cluster, rng = self.cluster, self.rng
        away = [shard for shard in range(self.count) if shard not in cluster.processes]
        if away and rng.random() < 0.8:
            self._begin(rng.choice(away))
        elif len(cluster.processes) > 1:
            shard = process.own
            self.lost += cluster.kill(shard)
            self.cut_ms = {pair: ms for pair, ms in self.cut_ms.items() if shard not in pair}

    def _begin(self, shard: int) -> None:
        """The others know that the process before has ended."""
        cluster = self.cluster
        self._hear_of_ends()
        cluster.begin(shard)
        self.homes += shard == self.home
        for other in range(self.count):
            if other != shard and other in cluster.processes:
                self.cut_ms[min(shard, other), max(shard, other)] = cluster.now_ms


@pytest.mark.parametrize("seed", range(150))
def test_no_order_of_events_lets_more_out_than_allowed(seed: int) -> None:
    Story(seed).tell(500)


def test_stories_reach_the_limit() -> None:
    stories = [Story(seed) for seed in range(20)]
    for story in stories:
        story.tell(200)
    assert sum(story.most == story.limit for story in stories) > 10


def test_notices_are_short() -> None:
    cluster = Cluster(COUNT, hook(max_in_flight=30))
    cluster.processes[0].fire(30)
    cluster.run()
    [notice] = [notice for _, topic, notice in cluster.processes[0].told if topic == ASK]
    assert msgspec.msgpack.decode(notice) == [[1, 30, 30, 0, 0]]
