"""Who makes sources in the simulation, and the topics that these read, in three of ten worlds.

Topics stand outside of the server: what was appended stays there, whatever a crash takes. The real
runner reads them, through feeds that fail now and then, and that may give once more what was taken.

Their luck is their own, so that what else happens in a world does not depend on them.

Cost: some 50 µs per batch. Threads: none.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from delayserver.errors import DelayServerError
from delayserver.parts.sources.feeds import Batch, FeedError, Health
from delayserver.parts.sources.records import KnownSource, OnError, SourceRecord
from delayserver.parts.sources.runner import SourceRunner
from delayserver.parts.sources.sourcing import Sourcing, WantedSource
from delayserver.records.subscriptions import KafkaTarget
from delayserver.server.engine import Engine
from tests.world.server import SimulatedServer
from tests.world.source_records import PLACE_HEADER, SourceRecords, TopicPlace, name_of

NAMES: Final = ("t1", "t2")
TOPICS: Final = tuple(f"{name}.{letter}" for name in NAMES for letter in "ab")
PARTITIONS: Final = 2
SUBJECTS: Final = ("orders.paid", "misc")
KEYS: Final = (None, None, b"k1", b"k2")
DUE: Final = "due"
SHORT_DELAYS: Final = (b"0s", b"40ms", b"700ms")
NO_TIME: Final = b"soon"
BATCH_MAX: Final = 4
PAUSE_SHARE: Final = 0.01
"""Of the real pauses: lives are short."""

Act = Callable[[Engine], None]


class SimulatedTopic:
    """Records of some partitions, and those who read them."""

    def __init__(self) -> None:
        self.partitions: list[list[SourceRecord]] = [[] for _ in range(PARTITIONS)]
        self.feeds: list[SimulatedFeed] = []

    def append(self, partition: int, record: SourceRecord) -> None:
        """Put a record behind the others."""
        self.partitions[partition].append(record)
        for feed in self.feeds:
            feed.news.set()


class SimulatedFeed:
    """A `Feed` of such a topic."""

    identity = "simulated"

    def __init__(
        self, topic: SimulatedTopic, positions: Mapping[int, int], luck: random.Random
    ) -> None:
        self._topic = topic
        self._luck = luck
        # A broker's client may begin a little earlier; what was taken is not taken again.
        back = luck.choice((0, 0, 0, 1, 3))
        self._next = {one: max(0, positions.get(one, 0) - back) for one in range(PARTITIONS)}
        self.news = asyncio.Event()
        topic.feeds.append(self)

    async def read(self) -> Batch:
        """See `Feed`."""
        while not (batch := self._batch()):
            self.news.clear()
            await self.news.wait()
            if self._luck.random() < 0.1:
                raise FeedError("the broker is away")
        return batch

    def _batch(self) -> list[SourceRecord]:
        luck, batch = self._luck, list[SourceRecord]()
        for partition in luck.sample(range(PARTITIONS), PARTITIONS):
            begin = self._next[partition]
            found = self._topic.partitions[partition][begin : begin + luck.randint(1, BATCH_MAX)]
            self._next[partition] += len(found)
            batch += found
            if batch and luck.random() < 0.5:
                break
        return batch

    def took(self, positions: Mapping[int, int]) -> None:
        """See `Feed`."""

    async def close(self) -> None:
        """See `Feed`."""
        self._topic.feeds.remove(self)


class Feeders:
    """Everybody who makes, changes, pauses, resumes and deletes sources, and fills their topics."""

    def __init__(
        self,
        seed: str,
        counts: Counter[str],
        ask: Callable[[str, Act], None],
        delays: Sequence[bytes] = (*SHORT_DELAYS, b"1h"),
        act_share: float = 0.1,
    ) -> None:
        """`ask`: calls what it is given with the engine that has a source of that name, on the
        event loop of its server; or not, if none is. `delays`: what a record may say; `act_share`:
        in how many steps somebody does something."""
        self._luck = random.Random(f"sources {seed}")
        self.is_there = self._luck.random() < 0.3
        self._counts = counts
        self._ask = ask
        self._act_share = act_share
        self._delays = (None, *delays)
        self._topics = {name: SimulatedTopic() for name in TOPICS}

    def begin(self, server: SimulatedServer, records: SourceRecords) -> None:
        """A life of a server has begun, whose durable records these are: it reads what it is to
        read."""
        if not self.is_there:
            return
        records.is_bad = self._is_bad
        sources, loop = server.engine.part(Sourcing), server.event_loop

        async def sleep(seconds: float) -> None:
            await asyncio.sleep(seconds * PAUSE_SHARE)

        runner = SourceRunner(sources, lambda: self, server.clock, _raise, sleep)
        with loop.running():
            runner.start()
        look_at = sources.on_changed

        def on_changed(name: str) -> None:
            # A group that could not be written is rolled back by a callback of the simulation.
            with loop.running():
                look_at(name)

        sources.on_changed = on_changed

    async def open(self, known: KnownSource, health: Health) -> SimulatedFeed:
        """See `FeedOpener`."""
        if self._luck.random() < 0.1:
            raise FeedError("there is no broker")
        return SimulatedFeed(
            self._topics[known.definition.topic.topic], known.state.positions, self._luck
        )

    def maybe_act(self, now_ms: int) -> None:
        """Now and then one of them does something."""
        luck = self._luck
        if not self.is_there or luck.random() >= self._act_share:
            return
        if luck.random() < 0.6:
            self._append()
            return
        name = luck.choice(NAMES)
        weights = {"put": 4, "pause": 1, "resume": 3, "delete": 0.5}
        do = luck.choices(tuple(weights), tuple(weights.values()))[0]
        self._ask(name, lambda engine: self._act(engine, name, do, now_ms))

    def _append(self) -> None:
        luck = self._luck
        topic, partition = luck.choice(TOPICS), luck.randrange(PARTITIONS)
        for _ in range(luck.choice((1, 1, 3))):
            offset = len(self._topics[topic].partitions[partition])
            place = TopicPlace(topic, partition, offset).to_header()
            delay = NO_TIME if luck.random() < 0.08 else luck.choice(self._delays)
            self._topics[topic].append(
                partition,
                SourceRecord(
                    partition,
                    offset,
                    luck.choice(KEYS),
                    f'"{place}"'.encode(),
                    ((PLACE_HEADER, place.encode()), (DUE, delay)),
                ),
            )

    def _is_bad(self, place: TopicPlace) -> bool:
        record = self._topics[place.topic].partitions[place.partition][place.offset]
        return (DUE, NO_TIME) in record.headers

    def _act(self, engine: Engine, name: str, do: str, now_ms: int) -> None:
        sources = engine.part(Sourcing)
        try:
            match do:
                case "put":
                    sources.put(self._wanted(name), now_ms)
                case "pause":
                    sources.pause(name, now_ms)
                case "resume":
                    sources.resume(name, now_ms)
                case _:
                    sources.delete(name)
        except DelayServerError:
            return
        self._counts[f"sources {do}"] += 1

    def _wanted(self, name: str) -> WantedSource:
        """One of few, so that many are put that are there."""
        luck = self._luck
        topic = luck.choice([one for one in TOPICS if name_of(one) == name])
        target = KafkaTarget("127.0.0.1:9092", topic)
        on_error = luck.choice(tuple(OnError))
        return WantedSource(name, luck.choice(SUBJECTS), target, DUE, "g", on_error)

    # ── the end ────────────────────────────────────────────────────────────────────────────────

    def have_all_taken(self, engine: Engine, now_ms: int) -> None:
        """Have the sources of a server take all that is there, and leave out what cannot be
        published."""
        for source, *_ in engine.part(Sourcing).all():
            subject = engine.sequencer.subject_names[source.subject_id]
            wanted = WantedSource(source.name, subject, source.topic, DUE, "g", OnError.SKIP)
            engine.part(Sourcing).put(wanted, now_ms)
            engine.part(Sourcing).resume(source.name, now_ms)

    def ends(self, topic: str) -> dict[int, int]:
        """By partition, the offset behind the last record."""
        return {number: len(one) for number, one in enumerate(self._topics[topic].partitions)}


def end_sources(engine: Engine) -> None:
    """Delete all of them."""
    for source, *_ in engine.part(Sourcing).all():
        engine.part(Sourcing).delete(source.name)


def _raise(error: BaseException) -> None:
    raise error
