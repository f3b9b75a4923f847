"""What durable records say of sources, held against those before.

A message of a source says in a header which record of which topic it was. So across all lives none
is published twice, none is left out that could be published, and the counts of a source are true.
What a state covers may be published by a later record, as long as no crash comes between.

Cost: about 20 µs per message; each recovery looks at all of them. Threads: none.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from delayserver.parts.sources.records import (
    SOURCE_CHANGES,
    Source,
    SourceChange,
    SourceState,
    unpack_source,
    unpack_source_state,
)
from delayserver.records.message import Payload
from storage.catalog import Catalog, Table
from tests.world.violation import Violation

PLACE_HEADER: Final = "x-place"


class TopicPlace(NamedTuple):
    """Where a record stands."""

    topic: str
    partition: int
    offset: int

    def to_header(self) -> str:
        """As the header of a record has it."""
        return f"{self.topic}/{self.partition}/{self.offset}"


def name_of(topic: str) -> str:
    """The source that reads a topic: no two read the same."""
    return topic.partition(".")[0]


def place_of(headers: Mapping[str, str] | None) -> TopicPlace | None:
    """Which record a message was; None: it was published by somebody else."""
    text = (headers or {}).get(PLACE_HEADER)
    if text is None:
        return None
    topic, partition, offset = text.split("/")
    return TopicPlace(topic, int(partition), int(offset))


def unpack_source_change(data: bytes) -> SourceChange:
    """The change in the payload of a SOURCE, as the server reads it."""
    change, problem = SOURCE_CHANGES.read(data)
    assert not problem, problem
    return change


class SourceRecords:
    """What durable records say of sources, each held against those before it."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        self.known: dict[str, tuple[Source, SourceState]] = {}
        self.is_bad: Callable[[TopicPlace], bool] = lambda place: False
        """Whether a record cannot be published."""
        self._published: dict[str, set[TopicPlace]] = {}
        """By name, what was published since its source began to read that topic."""
        self._totals: Counter[str] = Counter()
        """By name, how many were published since the source was made."""

    def published(self, payload: Payload) -> bool:
        """A message is durable; whether it was a record of a topic. Raises Violation."""
        place = place_of(payload.headers)
        if place is None:
            return False
        name = name_of(place.topic)
        known = self.known.get(name)
        if known is None:
            raise Violation(f"{name} has ended, and publishes {place} (I5)")
        if known[1].is_paused or known[0].topic.topic != place.topic:
            raise Violation(f"{name} is not to read, and publishes {place}: {known} (I5)")
        if place in self._published[name]:
            raise Violation(f"{name} has published {place} twice (I4)")
        if self.is_bad(place):
            raise Violation(f"{name} has published {place}, which says no time")
        self._published[name].add(place)
        self._totals[name] += 1
        self._counts["taken from topics"] += 1
        return True

    def changed(self, data: bytes) -> None:
        """The record of a source is durable. Raises Violation."""
        change = unpack_source_change(data)
        name, before = change.name, self.known.get(change.name)
        if change.state is None:
            self._check(name)
            del self.known[name]
            return
        state = unpack_source_state(change.state)
        if change.source is None:
            assert before is not None
            source = before[0]
        else:
            source = unpack_source(change.source)
        is_new = before is None or source.topic.topic != before[0].topic.topic
        if before is None:
            self._totals[name] = 0
        if is_new:
            if before is not None:
                self._check(name)
            self._published[name] = set()
        elif before is not None and any(
            state.positions.get(one, 0) < offset for one, offset in before[1].positions.items()
        ):
            raise Violation(f"{name} goes back from {before[1].positions}: {state} (I4)")
        if before is not None:
            self._counts["records left out"] += state.skipped - before[1].skipped
            self._counts["sources stopped"] += state.is_stopped > before[1].is_stopped
        self.known[name] = source, state

    def _check(self, name: str) -> None:
        """Whether all that a source has behind it was published, unless it cannot be."""
        source, state = self.known[name]
        topic, published = source.topic.topic, self._published[name]
        behind = {
            TopicPlace(topic, partition, offset)
            for partition, end in state.positions.items()
            for offset in range(end)
        }
        for place in behind - published:
            if not self.is_bad(place):
                raise Violation(f"{name} goes on behind {place}, and has not published it (I3)")
        if published - behind:
            raise Violation(f"{name} has published {published - behind}, and will again (I4)")
        if state.taken != self._totals[name]:
            raise Violation(f"{name} has published {self._totals[name]}, and says {state}")

    def check_catalog(self, catalog: Catalog) -> None:
        """Whether the catalog of a recovered server has just these, and none is half recorded."""
        states = dict(catalog.scan(Table.SOURCE_STATES))
        found = {
            key.decode(): (unpack_source(value), unpack_source_state(states.pop(key)))
            for key, value in catalog.scan(Table.SOURCES)
        }
        if found != self.known or states:
            raise Violation(f"sources are {found} {states}, not {self.known} (I7)")
        for name in self.known:
            self._check(name)

    def check_all_taken(self, ends: Callable[[str], dict[int, int]]) -> None:
        """Whether all of each topic was taken; `ends`: by partition the offset behind its end."""
        for name, (source, state) in self.known.items():
            self._check(name)
            wanted = {one: end for one, end in ends(source.topic.topic).items() if end}
            if state.positions != wanted:
                raise Violation(f"{name} is to take {wanted}: {state} (I3)")
