"""Sourcing: each offset once, messages and positions in one group."""

from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from delayserver.errors import InputError, NotFoundError, OverloadedError, PreconditionError
from delayserver.parts.part import Core
from delayserver.parts.sources.records import OnError, SourceRecord, SourceState
from delayserver.parts.sources.sourcing import Sourcing, WantedSource, due_ms_of
from delayserver.records.message import Content, Payload
from delayserver.records.subscriptions import KafkaTarget
from storage.catalog import Table
from storage.errors import DiskFullError
from storage.frame import unseal
from storage.rows import RecordKind
from tests.unit.fakes import START_MS, SUBJECT, MessageParts, rows_of
from tests.world.source_records import unpack_source_change

TOPIC = KafkaTarget("127.0.0.1:9092", "orders")


def wanted(name: str = "orders", **fields: Any) -> WantedSource:
    chosen = {"subject": SUBJECT, "topic": TOPIC, "due_header": "delay-until", "group": "g"}
    return WantedSource(name, **{**chosen, **fields})


def record(
    offset: int, value: bytes | None = b"1", partition: int = 0, **more: Any
) -> SourceRecord:
    headers = tuple((name, text) for name, text in more.pop("headers", {}).items())
    return SourceRecord(partition, offset, more.pop("key", None), value, headers)


class Parts(MessageParts):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.told: list[str] = []
        self.sources = self.made()

    def made(self) -> Sourcing:
        sources = Sourcing(cast(Core, self))
        sources.on_changed = self.told.append
        return sources

    def not_understood(self, kind: str, name: str, reason: str) -> None:
        """As the core."""

    def put(self, **fields: Any) -> SourceState:
        return self.sources.put(wanted(**fields), START_MS)[0].state

    def take(self, *records: SourceRecord) -> bool:
        version = self.state().version
        return self.sources.take("orders", version, records, START_MS) is not None

    def state(self) -> SourceState:
        return self.sources.get("orders").state

    def published(self) -> list[tuple[int, Payload]]:
        group = self.sequencer.group
        return [
            (
                int(row["due_ms"]) - START_MS,
                msgspec.msgpack.decode(
                    unseal(group.payload(int(row["seq"]))[0]) or b"", type=Payload
                ),
            )
            for row in rows_of(group)
            if row["kind"] == RecordKind.PUBLISH
        ]

    def changes(self) -> list[Any]:
        group = self.sequencer.group
        return [
            unpack_source_change(unseal(group.payload(int(row["seq"]))[0]) or b"")
            for row in rows_of(group)
            if row["kind"] == RecordKind.SOURCE
        ]


def test_messages_and_positions_are_one_group_and_the_positions_stand_last() -> None:
    parts = Parts()
    parts.put()
    assert parts.take(record(7), record(8), record(3, partition=1))
    kinds = [int(row["kind"]) for row in rows_of(parts.sequencer.group)]
    assert kinds[-4:] == [RecordKind.PUBLISH] * 3 + [RecordKind.SOURCE]
    assert parts.state().positions == {0: 9, 1: 4} and parts.state().taken == 3
    assert parts.sources.taken_total == 3


def test_an_offset_that_was_taken_is_not_taken_again() -> None:
    parts = Parts()
    parts.put()
    assert parts.take(record(0), record(1))
    assert not parts.take(record(0), record(1))
    assert parts.take(record(1), record(2))
    assert len(parts.published()) == 3


@hypothesis_settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.booleans()), max_size=20))
def test_each_offset_of_a_source_is_a_message_once(
    steps: list[tuple[int, int, bool]],
) -> None:
    parts = Parts()
    parts.put()
    ends: dict[int, int] = {}
    for partition, count, again in steps:
        begin = 0 if again else ends.get(partition, 0)
        end = ends.get(partition, 0) + count
        parts.take(*(record(one, b"%d" % one, partition) for one in range(begin, end)))
        ends[partition] = end
    assert len(parts.published()) == sum(ends.values()) == parts.sources.taken_total
    assert parts.state().positions == ends


def test_what_a_record_becomes() -> None:
    parts = Parts()
    parts.put(due_header="due")
    assert parts.take(
        record(0, b' {"n": 1}\n', key=b"k", headers={"due": b"30m", "x-a": b"1", "bad name": b"2"}),
        record(1, b"\xff", key=b"\xff", headers={"due": b"%d" % (START_MS + 5)}),
        record(2, None),
        record(3, b"", headers={"due": b"2000-01-01T00:00:00Z"}),
    )
    (first_ms, first), (second_ms, second), (_, third), (fourth_ms, fourth) = parts.published()
    assert first == Payload(b'{"n": 1}', Content.JSON, "k", {"x-a": "1"})
    assert first_ms == 30 * 60_000
    assert (second_ms, second) == (5, Payload(b"\xff", Content.BINARY))
    assert third == Payload(b"null", Content.JSON)
    assert (fourth_ms, fourth) == (0, Payload(b"", Content.BINARY))


def test_two_records_with_one_key_are_two_messages() -> None:
    parts = Parts()
    parts.put()
    parts.take(record(0, b"1", key=b"k"), record(1, b"1", key=b"k"), record(2, b"2", key=b"k"))
    assert [payload.body for _, payload in parts.published()] == [b"1", b"1", b"2"]


def test_what_cannot_be_published_is_left_out_counted_and_shown() -> None:
    parts = Parts(body_max_bytes=1024)
    parts.put()
    assert parts.take(record(0, bytes(1025)), record(1), record(2, headers={"delay-until": b"x"}))
    state = parts.state()
    assert (state.positions, state.taken, state.skipped) == ({0: 3}, 1, 2)
    last = state.last_skipped
    assert last is not None and (last.partition, last.offset) == (0, 2)
    assert "delay-until is 'x'" in last.reason
    assert parts.sources.skipped_total == 2


def test_one_that_is_to_stop_stands_before_the_record_until_it_is_resumed() -> None:
    parts = Parts()
    parts.put(on_error=OnError.STOP)
    assert parts.take(record(0), record(1, headers={"delay-until": b"9999d"}), record(2))
    state = parts.state()
    assert state.is_paused and state.is_stopped and state.positions == {0: 1}
    assert "delay_max_ms" in (state.last_skipped.reason if state.last_skipped else "")
    assert parts.told[-1] == "orders" and not parts.take(record(2))
    parts.sources.resume("orders", START_MS)
    assert not parts.state().is_paused and not parts.state().is_stopped


def test_a_reader_of_what_is_no_longer_wanted_takes_nothing() -> None:
    parts = Parts()
    version = parts.put().version
    parts.sources.pause("orders", START_MS)
    assert parts.sources.take("orders", version, [record(0)], START_MS) is None
    parts.sources.resume("orders", START_MS)
    assert parts.sources.take("orders", version, [record(0)], START_MS) is None
    parts.sources.delete("orders")
    assert parts.sources.take("orders", version, [record(0)], START_MS) is None
    assert not parts.published()
    with pytest.raises(NotFoundError):
        parts.sources.get("orders")


def test_another_topic_begins_at_its_beginning_and_another_subject_goes_on() -> None:
    parts = Parts()
    parts.put()
    parts.take(record(4))
    assert parts.put(subject="other").positions == {0: 5}
    assert parts.put(topic=KafkaTarget("127.0.0.1:9092", "bills")).positions == {}


def test_conditions() -> None:
    parts = Parts()
    version = str(parts.put().version)
    assert parts.sources.put(wanted(), START_MS)[1] is False  # as it is
    with pytest.raises(PreconditionError):
        parts.sources.put(wanted(group="h"), START_MS, only_new=True)
    parts.sources.put(wanted(group="h"), START_MS, expected=(version,))
    with pytest.raises(PreconditionError):
        parts.sources.delete("orders", expected=(version,))
    with pytest.raises(PreconditionError):
        parts.sources.pause("orders", START_MS, expected=(version,))
    with pytest.raises(PreconditionError, match="there is no source"):
        parts.sources.put(wanted("another"), START_MS, expected=(version,))


def test_there_are_no_more_than_the_limit() -> None:
    parts = Parts(sources_max=1)
    parts.put()
    with pytest.raises(OverloadedError, match="sources_max"):
        parts.put(name="another")
    parts.put(group="h")


def test_a_group_that_could_not_be_written_was_never_taken() -> None:
    parts = Parts()
    parts.put()
    parts.commit()
    parts.take(record(0), record(1))
    parts.groups.flush(START_MS)
    parts.told.clear()
    parts.groups.on_commit_failed(DiskFullError("messages/0", "full", "free some space"))
    assert parts.state().positions == {} and parts.state().taken == 0
    assert parts.told == ["orders"]


def test_a_start_knows_what_the_catalog_has() -> None:
    parts = Parts()
    parts.put()
    parts.take(record(0))
    for change in parts.changes():
        writes: dict[Table, list[tuple[bytes, bytes | None]]]
        writes = {Table.SOURCE_STATES: [(b"orders", change.state)]}
        if change.source is not None:
            writes[Table.SOURCES] = [(b"orders", change.source)]
        parts.catalog.commit(writes)
    parts.sources = parts.made()
    (known,) = parts.sources.all()
    assert known.state.positions == {0: 1} and known.definition.topic == TOPIC
    assert parts.sources.page("orders", 10) == ([], None)
    assert not parts.take(record(0)) and parts.take(record(1))


@pytest.mark.parametrize(
    ("value", "due_ms"),
    [
        (b"1700000000000", 1_700_000_000_000),
        (b"2023-11-14T22:13:20Z", 1_700_000_000_000),
        (b" 1h30m ", START_MS + 5_400_000),
    ],
)
def test_when_a_record_is_due(value: bytes, due_ms: int) -> None:
    assert due_ms_of(value, "due", START_MS) == due_ms


@pytest.mark.parametrize("value", [b"", b"soon", b"\xff", b"-5", b"9" * 30])
def test_what_says_no_time(value: bytes) -> None:
    with pytest.raises(InputError, match="due is"):
        due_ms_of(value, "due", START_MS)


def test_a_record_that_is_due_in_seconds_is_left_out_with_the_reason() -> None:
    parts = Parts()
    parts.put()
    parts.take(record(0, headers={"delay-until": b"1795192200"}), record(1))
    state = parts.state()
    assert (state.positions, state.taken, state.skipped) == ({0: 2}, 1, 1)
    assert state.last_skipped is not None
    assert "milliseconds, not seconds" in state.last_skipped.reason


def test_a_mark_moves_the_position_and_publishes_nothing() -> None:
    parts = Parts()
    parts.put()
    mark = SourceRecord(0, 6, None, None, is_mark=True)
    assert parts.take(record(0), mark)
    assert (parts.state().positions, parts.state().taken) == ({0: 7}, 1)
    assert not parts.take(mark)
    assert not parts.take(record(3))
