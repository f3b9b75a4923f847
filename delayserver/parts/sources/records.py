"""Sources: topics that messages are taken from, and how far each of them is.

    Source       the client's definition: where the topic is, and how its records become messages
    SourceState  where it stands: the next offset of each partition, counts, whether it is paused

Both are kept packed, and decoded when they are used. The state is written with each batch that is
taken, in the group of its messages: so after a crash either both are there or neither.

Cost: 1 µs to decode, and 0.1 µs for each partition. Threads: immutable values, pure functions.
"""

from enum import IntEnum
from typing import Final, NamedTuple

import msgspec

from delayserver.records.named import Known, NamedDefinition, NamedState
from delayserver.records.subscriptions import KafkaTarget
from delayserver.records.tables import must, must_be_understood, named_key, whole
from delayserver.records.understanding import Understanding, elements_behind, with_elements


class OnError(IntEnum):
    """The reaction of a source to a record that cannot be published."""

    SKIP = 0
    """It is counted, and left out."""
    STOP = 1
    """Nothing is taken any more, until a client resumes it."""


class SourceRecord(NamedTuple):
    """A record of a topic, as it stands there."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    is_mark: bool = False
    """Nothing to publish: all through `offset` was read, such as the marker of a transaction, which
    no consumer gets."""


class Source(NamedDefinition, array_like=True, frozen=True):
    """A value of the table SOURCES (MessagePack)."""

    topic: KafkaTarget
    """Its brokers, its name, and whom they let in."""
    due_header: str
    """The header that says when a message is due."""
    group: str
    """The group in which progress is shown; the state is authoritative."""
    on_error: int = OnError.SKIP


class UnpublishedRecord(msgspec.Struct, array_like=True, frozen=True):
    """A record that could not be published, and why."""

    partition: int
    offset: int
    reason: str
    time_ms: int


class SourceState(NamedState, array_like=True, frozen=True):
    """A value of the table SOURCE_STATES (MessagePack)."""

    is_paused: bool = False
    is_stopped: bool = False
    """It is paused since it came upon a record that cannot be published."""
    positions: dict[int, int] = msgspec.field(default_factory=dict)
    """By partition the offset that is taken next; where there is none: the first that there is."""
    taken: int = 0
    """Messages that were published."""
    skipped: int = 0
    """Records that were left out."""
    last_skipped: UnpublishedRecord | None = None
    """The last that could not be published."""
    identity: str = ""
    """The topic that the positions belong to: another one of the same name has another identity.
    Empty: it is unknown."""


KnownSource = Known[Source, SourceState]


class SourceChange(msgspec.Struct, array_like=True, frozen=True):
    """The payload of a SOURCE (MessagePack). None of both: it has ended."""

    name: str
    source: bytes | None = None
    """A Source. None: the one that there is."""
    state: bytes | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Source).decode
_decode_state = msgspec.msgpack.Decoder(SourceState).decode


def pack_source(source: Source) -> bytes:
    """A value of the table SOURCES."""
    return _encode(source)


def _check(source: Source) -> None:
    """Raises where a source cannot be read here."""
    OnError(source.on_error)


SOURCES: Final = Understanding(
    Source,
    {"name": "", "subject_id": 0, "topic": KafkaTarget("", ""), "due_header": "", "group": ""},
    _check,
)
"""How definitions are read."""
_STATES: Final = Understanding(SourceState, {"seq": 0, "version": 0, "changed_ms": 0})


def read_source_state(value: bytes) -> tuple[SourceState, bytes | None, str]:
    """The state in such bytes, the bytes behind the fields that are known here, and why it is not
    understood; see `Known`. Never raises."""
    state, problem = _STATES.read(value)
    if not problem:
        return state, b"", ""
    return state, elements_behind(value, SourceState), problem


def pack_source_state_with(state: SourceState, tail: bytes) -> bytes:
    """A value of the table SOURCE_STATES; `tail` as from `read_source_state`."""
    return with_elements(_encode(state), tail)


def unpack_source(value: bytes) -> Source:
    """The definition in such a value. Raises msgspec.DecodeError."""
    return _decode(value)


def pack_source_state(state: SourceState) -> bytes:
    """A value of the table SOURCE_STATES."""
    # One without an identity is as it was before there were any.
    fields = msgspec.structs.astuple(state)
    return _encode(fields if state.identity else fields[:-1])


def unpack_source_state(value: bytes) -> SourceState:
    """The state in such a value. Raises msgspec.DecodeError."""
    return _decode_state(value)


SOURCE_CHANGES: Final = Understanding(SourceChange, {"name": ""})
"""How the payloads of records are read."""


def pack_source_change(change: SourceChange) -> bytes:
    """The payload of a SOURCE, not sealed."""
    return _encode(change)


# ── the checks of both tables ────────────────────────────────────────────────────────────────────


def check_source(key: bytes, value: bytes) -> None:
    """Check an entry of the table SOURCES. Raises one of UNREADABLE."""
    source, problem = whole(SOURCES, value)
    must(named_key(source.name) == key, "a source of another name")
    must_be_understood(problem)


def check_source_state(key: bytes, value: bytes) -> None:
    """Check an entry of the table SOURCE_STATES. Raises one of UNREADABLE."""
    key.decode()
    state, tail, problem = read_source_state(value)
    must(tail is not None, problem)
    positions = state.positions.items()
    must(all(one >= 0 for pair in positions for one in pair), "a place before the first")
    must_be_understood(problem)
