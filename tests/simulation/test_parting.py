"""Replicas that move while nodes come, go and see it late: there are never fewer than there are to
be, though none but the nodes themselves decides.

One shard, some nodes with clocks of their own. What a node sees of the cluster, and what it says,
goes through the code of the server (`ClusterMeta`, `news_of`, `Parting`), and is late, or does not
come for a while. Copying takes its time. Nothing is lost here but by a node that lets go.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest

from delayserver.cluster import watch
from delayserver.cluster.placement import Placement
from delayserver.cluster.watch import (
    PROGRESS_S,
    Heard,
    News,
    Parting,
    ReplicaNote,
    ReplicaState,
    Stage,
    news_of,
)
from storage.replicated.meta import ClusterMeta, make_identity
from tests.depth import every, least

SEEDS = range(60)
STEP_MS = 500
LIFE_MS = 200_000
START_MS = 1_800_000_000_000
SKEW_MS = 900
SHARD = 3


class TooFew(AssertionError):
    """Fewer replicas are there than there are to be."""


class Node:
    """A supervisor that looks, and a process that has a replica or none."""

    def __init__(self, world: World, name: str, *, has_replica: bool) -> None:
        self.world = world
        self.name = name
        self.has_replica = has_replica
        self.parting = Parting(SHARD, name)
        self.skew_ms = world.rng.randrange(-SKEW_MS, SKEW_MS)
        self.stage: Stage = "replica" if has_replica else "passing"
        self.news = News()
        self.copied_ms: int | None = None
        self._replicas: list[ReplicaState] = []
        self._heard = Heard()
        self._looked_ms = self._said_ms = -LIFE_MS
        self._deaf_ms = self._mute_ms = self._still_ms = 0
        """Until when it sees nothing, says nothing, does nothing."""

    def step(self) -> None:
        world, rng = self.world, self.world.rng
        for what in ("_deaf_ms", "_mute_ms", "_still_ms"):
            if rng.random() < world.trouble:
                most_ms = rng.choice((5_000, 10_000, 10_000, 60_000))
                setattr(self, what, world.now_ms + rng.randrange(most_ms))
        wall_ms = START_MS + world.now_ms + self.skew_ms
        if world.now_ms >= self._deaf_ms:
            if world.now_ms - self._looked_ms >= PROGRESS_S * 1000:
                self._looked_ms = world.now_ms
                texts = {
                    (node, SHARD): note.pack()
                    for node, note in world.notes.items()
                    if node not in world.meta.forgotten
                }
                found = self._heard.take(texts, START_MS + world.now_ms)
                self._replicas = [ReplicaState(node, 0, found[node, _], 0) for node, _ in found]
            now_ms = START_MS + world.now_ms
            self.news = news_of(world.meta, {SHARD: self._replicas}, now_ms, wall_ms)
        if world.now_ms >= self._still_ms:
            self._decide()
        if world.now_ms >= self._mute_ms and world.now_ms - self._said_ms >= 3_000:
            self._said_ms = world.now_ms
            note = ReplicaNote(wall_ms, "http://n", 0, 0, stage=self.stage)
            world.say(self.name, note, rng.randrange(4_000))

    def _decide(self) -> None:
        world, news = self.world, self.news
        if not news.at_ms:
            return
        found = self.parting.judge(news.placement, news, START_MS + world.now_ms)
        if self.has_replica:
            self.stage = found
            if found == "passing":
                self.has_replica = False
                world.counts["left"] += 1
        elif found != "replica":
            self.stage, self.copied_ms = "passing", None
        elif self.copied_ms is None:
            self.stage, self.copied_ms = "copying", world.now_ms + world.rng.randrange(15_000)
        elif world.now_ms >= self.copied_ms:
            self.has_replica, self.stage, self.copied_ms = True, "replica", None
            world.counts["copied"] += 1


class World:
    """One seed."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(f"parting {seed}")
        self.counts: Counter[str] = Counter()
        self.now_ms = 0
        self.trouble = rng.choice((0.0, 0.003, 0.01, 0.03))
        """How likely a node is to see, say or do nothing for a while, at each step."""
        self._changes = rng.choice((0.01, 0.02, 0.05))
        self._again_ms = LIFE_MS
        """One change often comes soon after another."""
        self.replicas = rng.choice((2, 3))
        self.meta = ClusterMeta("c.meta/0")
        identity = make_identity("c", 4, "os", rng.randbytes, self.replicas)
        self._append(msgspec.json.encode(identity))
        self.notes: dict[str, ReplicaNote] = {}
        self._under_way: list[tuple[int, str, ReplicaNote]] = []
        names = [f"n{number}" for number in range(rng.randrange(3, 7))]
        for name in names:
            self._register(name)
        placed = Placement.of(self.meta).nodes(SHARD)
        self.nodes = [Node(self, name, has_replica=name in placed) for name in names]

    def _append(self, record: bytes) -> None:
        self.meta.apply(self.meta.next_offset, record)

    def _register(self, name: str) -> None:
        zone = self.rng.choice((None, "a", "b", "c"))
        self._append(msgspec.json.encode({"node": name, **({"zone": zone} if zone else {})}))

    def say(self, name: str, note: ReplicaNote, late_ms: int) -> None:
        """The brokers have it some time."""
        self._under_way.append((self.now_ms + late_ms, name, note))

    def live(self) -> None:
        while self.now_ms < LIFE_MS:
            self.now_ms += STEP_MS
            for due_ms, name, note in [*self._under_way]:
                if due_ms <= self.now_ms:
                    self._under_way.remove((due_ms, name, note))
                    if name not in self.notes or self.notes[name].at_ms < note.at_ms:
                        self.notes[name] = note
            if self.rng.random() < self._changes or self.now_ms >= self._again_ms:
                self._change()
                soon_ms = self.now_ms + self.rng.randrange(15_000)
                self._again_ms = soon_ms if self.rng.random() < 0.5 else LIFE_MS
            for node in self.rng.sample(self.nodes, len(self.nodes)):
                node.step()
                there = sum(one.has_replica for one in self.nodes)
                if there < self.replicas:
                    raise TooFew(f"{there} of {self.replicas}, at {self.now_ms}")

    def _change(self) -> None:
        """A node comes, or is put into another zone; or others are forgotten, and run on."""
        rng, known = self.rng, [*self.meta.nodes]
        if rng.random() < 0.1 and len(known) < 8:
            self._register(f"n{len(known)}")
            self.nodes.append(Node(self, f"n{len(known)}", has_replica=False))
        elif rng.random() < 0.4:
            self._register(rng.choice(known))
        else:
            stay = rng.sample(known, rng.randrange(self.replicas, len(known) + 1))
            for name in known:
                if name not in stay:
                    self._append(msgspec.json.encode({"forget": name}))
                elif name in self.meta.forgotten:
                    self._register(name)


def test_there_are_never_fewer_replicas_than_there_are_to_be() -> None:
    counts: Counter[str] = Counter()
    for seed in every(4, SEEDS):
        world = World(seed)
        world.live()
        counts += world.counts
    assert counts["left"] >= least(len(SEEDS) + 1), counts
    assert counts["copied"] >= least(len(SEEDS) + 1), counts


def leave_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(watch, "LEAVE_MS", 0)


def count_on_those_that_copy(patch: pytest.MonkeyPatch) -> None:
    judge = Parting.judge

    def judged(self: Parting, placement: Placement, news: News, present_ms: int) -> Stage:
        here = [
            msgspec.structs.replace(one, note=msgspec.structs.replace(one.note, stage="replica"))
            for one in news.replicas[SHARD]
        ]
        news = msgspec.structs.replace(news, replicas={SHARD: here})
        return judge(self, placement, news, present_ms)

    patch.setattr(Parting, "judge", judged)


CANARIES = {
    "it leaves at once": leave_at_once,
    "it counts on those that are copied": count_on_those_that_copy,
}


@pytest.mark.parametrize("canary", CANARIES.values(), ids=CANARIES)
def test_a_mistake_in_it_is_found(
    canary: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    canary(monkeypatch)
    with pytest.raises(TooFew):
        for seed in range(200):
            World(seed).live()
