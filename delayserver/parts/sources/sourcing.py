"""Sources: what stands in a topic is published, each offset once.

    PUT ──▶ definition and state ──▶ a record SOURCE, durable before it is answered
    take: records of the topic ──▶ messages, and a record SOURCE with the positions behind them
                                   all in one group, which is one frame of the message log

Messages and positions are written as one, so after a crash either both are there or neither: the
broker is asked for what follows the positions, and no offset is published twice or never. What the
broker itself knows of progress is for show.

Each offset is a message of its own, whatever has the same key: records of a topic have the key of
what they are about, and two of them are no repetition. A look-up by key finds the newest, as behind
a PUT of it. The shard of the source keeps its messages, with whatever key: nothing has to be
recorded in two logs.

A record that cannot be published is counted, shown and left out, or stops its source, as that says.
Time is the only reason for it to be asked again, and one that is due too far away would be.

Cost: 8 µs for each record, and one record of the log for each batch. Threads: belongs to the event
loop.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from delayserver.decisions.defining import Defining, DefinitionKind
from delayserver.decisions.group import Group
from delayserver.decisions.messages import Versions
from delayserver.decisions.new_messages import NewMessage
from delayserver.errors import InputError
from delayserver.parts.part import Core
from delayserver.parts.sources.records import (
    SOURCES,
    KnownSource,
    OnError,
    Source,
    SourceChange,
    SourceRecord,
    SourceState,
    UnpublishedRecord,
    pack_source,
    pack_source_change,
    pack_source_state,
    pack_source_state_with,
    read_source_state,
)
from delayserver.records.message import Content, Payload, check_headers, check_key
from delayserver.records.named import Known
from delayserver.records.nesting import check_nesting
from delayserver.records.subscriptions import KafkaTarget
from delayserver.times import format_duration, parse_duration_ms, read_time_ms
from storage.catalog import Table
from storage.rows import RecordKind

if TYPE_CHECKING:
    from delayserver.server.metrics import Metrics

HEADERS_MAX: Final = 100
"""Headers of a record that are looked at."""
REASON_CHARACTERS_MAX: Final = 500
_ALL: Final = 10_000
"""More than there may be."""

_read_json = msgspec.json.Decoder(msgspec.Raw).decode


class WantedSource(msgspec.Struct, frozen=True):
    """A source that somebody wants, checked."""

    name: str
    subject: str
    topic: KafkaTarget
    due_header: str
    group: str
    on_error: OnError = OnError.SKIP


SOURCE: Final = DefinitionKind(
    "source",
    RecordKind.SOURCE,
    Table.SOURCES,
    Table.SOURCE_STATES,
    pack_source,
    SOURCES,
    pack_source_state_with,
    read_source_state,
    lambda *change: pack_source_change(SourceChange(*change)),
)


class _Read(NamedTuple):
    """The outcome of records of a topic."""

    messages: list[NewMessage]
    positions: dict[int, int]
    """By partition, the offset behind the last one."""
    skipped: int
    last_skipped: UnpublishedRecord | None
    is_stopped: bool = False
    """A record cannot be published, and the source stops at it."""


class Sourcing(Defining[WantedSource, Source, SourceState]):
    """All sources."""

    def __init__(self, core: Core) -> None:
        super().__init__(SOURCE, core, core.settings.sources_max)
        self.on_changed: Callable[[str], None] = lambda name: None
        """Told of a source whose version has changed, or that has ended."""
        self.errors: dict[str, str] = {}
        """By name, why nothing can be read now; the runner says it."""
        self.taken_total = 0
        self.skipped_total = 0

    def __len__(self) -> int:
        return len(self.all())

    def all(self) -> list[KnownSource]:
        """In the order of their names."""
        return self.page("", _ALL)[0]

    def add_metrics(self, metrics: "Metrics") -> None:
        """Add the counters and gauges of sources."""
        metrics.counter("source_records", "Records of sources published", lambda: self.taken_total)
        metrics.counter(
            "source_records_skipped",
            "Records of sources that could not be published",
            lambda: self.skipped_total,
        )
        metrics.gauge("sources", "Sources", self.__len__)

    def look(self) -> None:
        """Say which of them are not understood here."""
        for known in self.all():
            self._note(known.definition.name, known)

    # ── what clients do ────────────────────────────────────────────────────────────────────────

    def _define(self, wanted: WantedSource, before: KnownSource | None, now_ms: int) -> KnownSource:
        """One that is changed goes on where it is, unless it is to read another topic."""
        source = Source(
            wanted.name,
            self._publishing.admit(wanted.subject, 0),
            wanted.topic,
            wanted.due_header,
            wanted.group,
            wanted.on_error,
        )
        seq = self._sequencer.next_seq
        if before is None:
            return Known(source, SourceState(seq, seq, now_ms))
        is_other_topic = source.topic.topic != before.definition.topic.topic
        state = msgspec.structs.replace(
            before.state,
            seq=seq,
            version=seq,
            changed_ms=now_ms,
            positions={} if is_other_topic else before.state.positions,
            identity="" if is_other_topic else before.state.identity,
        )
        return Known(source, state)

    def pause(
        self, name: str, now_ms: int, *, expected: Versions = None
    ) -> tuple[KnownSource, Group | None]:
        """Take nothing until it is resumed. Raises as `delete`."""
        wanted = {"is_paused": True, "is_stopped": False}
        return self._change(name, expected, wanted, changed_ms=now_ms)

    def resume(
        self, name: str, now_ms: int, *, expected: Versions = None
    ) -> tuple[KnownSource, Group | None]:
        """Go on where it is. Raises as `delete`."""
        wanted = {"is_paused": False, "is_stopped": False}
        return self._change(name, expected, wanted, changed_ms=now_ms)

    def _stands(self, name: str, known: KnownSource | None) -> None:
        self.on_changed(name)

    # ── what its reader does ───────────────────────────────────────────────────────────────────

    def take(
        self,
        name: str,
        version: int,
        records: Sequence[SourceRecord],
        now_ms: int,
        identity: str = "",
    ) -> Group | None:
        """Publish records of its topic, in the order of each partition, and go on behind them.
        Returns the group that has both; None: there was nothing that had not been taken.

        `version`: of the state that the reader began with; one that reads what is no longer wanted
        takes nothing. `identity`: of the topic that they stand in. Raises OverloadedError,
        DiskReserveError, StoppingError: nothing was taken, and the same records may be given
        again."""
        known = self.find(name)
        if known is None or known.problem or known.state.is_paused:
            return None
        source, state = known.definition, known.state
        if state.version != version:
            return None
        read = self._read(known, records, now_ms)
        messages, is_stopped = read.messages, read.is_stopped
        if read.positions == state.positions and not is_stopped:
            return None
        state = msgspec.structs.replace(
            state,
            positions=read.positions,
            taken=state.taken + len(messages),
            skipped=state.skipped + read.skipped,
            last_skipped=read.last_skipped,
            is_paused=is_stopped,
            is_stopped=is_stopped,
            identity=identity or state.identity,
        )
        # Nothing may come between the first message and the record: they are one frame.
        room_bytes = _room_bytes(Known(source, state))
        self._publishing.publish_taken(source.subject_id, messages, room_bytes)
        group = self._sequencer.group
        seq = self._sequencer.next_seq
        state = msgspec.structs.replace(
            state,
            seq=seq,
            version=seq if is_stopped else state.version,
            changed_ms=now_ms if is_stopped else state.changed_ms,
        )
        self._record(Known(source, state), has_room=True)
        assert self._sequencer.group is group
        self.taken_total += len(messages)
        self.skipped_total += read.skipped
        self._groups.wake()
        if is_stopped:
            self.on_changed(name)
        return group

    def _read(
        self, known: Known[Source, SourceState], records: Sequence[SourceRecord], now_ms: int
    ) -> _Read:
        """Records that were not taken before, up to one at which the source stops."""
        source, state = known.definition, known.state
        positions, messages = dict(state.positions), list[NewMessage]()
        skipped, last_skipped = 0, state.last_skipped
        for record in records:
            if record.offset < positions.get(record.partition, 0):
                continue  # it was taken before the reader had begun
            if record.is_mark:
                positions[record.partition] = record.offset + 1
                continue
            try:
                messages.append(self._message(source, record, now_ms))
            except InputError as error:
                reason = str(error)[:REASON_CHARACTERS_MAX]
                last_skipped = UnpublishedRecord(record.partition, record.offset, reason, now_ms)
                if source.on_error == OnError.STOP:
                    return _Read(messages, positions, skipped, last_skipped, is_stopped=True)
                skipped += 1
            positions[record.partition] = record.offset + 1
        return _Read(messages, positions, skipped, last_skipped)

    def _message(self, source: Source, record: SourceRecord, now_ms: int) -> NewMessage:
        """What is published of a record. Raises InputError."""
        body = b"null" if record.value is None else record.value
        if len(body) > self._settings.body_max_bytes:
            raise InputError(
                f"the value has {len(body)} bytes; at most {self._settings.body_max_bytes} "
                "(body_max_bytes)"
            )
        due_ms = self._due_ms(source.due_header, record, now_ms)
        content = _content(body)
        body = body.strip() if content is Content.JSON else body
        payload = Payload(body, content, _key(record.key), _headers(source, record))
        return NewMessage("", due_ms, payload)

    def _due_ms(self, header: str, record: SourceRecord, now_ms: int) -> int:
        """Of several headers of that name the last one counts, as in Kafka's own clients."""
        value = next((value for name, value in reversed(record.headers) if name == header), None)
        if value is None:
            return now_ms
        due_ms = due_ms_of(value, header, now_ms)
        if due_ms - now_ms > self._settings.delay_max_ms:
            longest = format_duration(self._settings.delay_max_ms)
            raise InputError(f"{header} is further away than {longest} (delay_max_ms)")
        return max(now_ms, due_ms)


def _room_bytes(known: KnownSource) -> int:
    """No less than the payload of a record with all of it has."""
    return len(pack_source(known.definition)) + len(pack_source_state(known.state)) + 512


# ── records of topics ────────────────────────────────────────────────────────────────────────────


def due_ms_of(value: bytes, header: str, now_ms: int) -> int:
    """When a message is due: a time in RFC 3339, digits (ms since the epoch), or a duration with a
    unit. Raises InputError."""
    text = value.decode("ascii", "replace").strip()
    if not text.isdigit():
        with suppress(InputError):
            return now_ms + parse_duration_ms(text)
    try:
        return read_time_ms(text)
    except InputError as error:
        raise InputError(
            f"{header} is {text[:60]!r}: {error.detail}; or a duration such as 30m"
        ) from None


def _content(body: bytes) -> Content:
    try:
        body.decode()
        _read_json(body)
        check_nesting((body,))
    except (ValueError, msgspec.DecodeError, InputError, RecursionError):
        return Content.BINARY
    return Content.JSON


def _key(key: bytes | None) -> str | None:
    """None where it is no key of a message."""
    if key is None:
        return None
    try:
        text = key.decode()
        check_key(text)
    except (UnicodeDecodeError, InputError):
        return None
    return text


def _headers(source: Source, record: SourceRecord) -> dict[str, str] | None:
    """Those that a message may have, the first ones that fit; not the one that said when."""
    kept: dict[str, str] = {}
    for name, value in record.headers[:HEADERS_MAX]:
        if name == source.due_header or value is None:
            continue
        try:
            with_it = {**kept, name: value.decode()}
            check_headers(with_it)
        except (UnicodeDecodeError, InputError):
            continue
        kept = with_it
    return kept or None
