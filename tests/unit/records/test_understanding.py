"""Understanding: whatever is stored is read, and what is not understood says why."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayserver.errors import InputError
from delayserver.parts.heartbeats.records import HEARTBEATS
from delayserver.parts.schedules.records import SCHEDULES, Schedule
from delayserver.parts.sources.records import SOURCES, SourceState, read_source_state
from delayserver.records import understanding
from delayserver.records.subscriptions import (
    Registry,
    StandIn,
    Subscription,
    decode_subscription,
    encode_subscription,
)
from delayserver.records.understanding import (
    REASON_CHARACTERS_MAX,
    Understanding,
    elements_behind,
    parts_of,
    reason_of,
    with_elements,
)
from delayserver.wire.fields import ATTEMPTS_MAX
from tests.golden.records import HEARTBEAT_BYTES, HOOK, SCHEDULE, SOURCE, SOURCE_STATE

ENCODE = msgspec.msgpack.encode
ARRAYS: dict[str, tuple[Understanding[Any], bytes]] = {
    "schedule": (SCHEDULES, ENCODE(SCHEDULE)),
    "source": (SOURCES, ENCODE(SOURCE)),
    "heartbeat": (HEARTBEATS, HEARTBEAT_BYTES),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_what_was_written_is_understood(kind: str) -> None:
    reader, data = ARRAYS[kind]
    value, problem = reader.read(data)
    assert not problem and ENCODE(value) == data


@pytest.mark.parametrize("kind", ARRAYS)
def test_a_field_of_a_newer_server_is_not_and_the_others_are_shown(kind: str) -> None:
    reader, data = ARRAYS[kind]
    newer = ENCODE([*msgspec.msgpack.decode(data), {"parallel": 3}])
    value, problem = reader.read(newer)
    assert "1 fields that are not known" in problem and ENCODE(value) == data


@given(data=st.data(), kind=st.sampled_from(sorted(ARRAYS)))
def test_nothing_that_is_stored_raises(data: st.DataObject, kind: str) -> None:
    reader, stored = ARRAYS[kind]
    at, end = data.draw(st.integers(0, len(stored) - 1)), data.draw(st.integers(0, len(stored)))
    flipped = bytearray(stored)
    flipped[at] ^= data.draw(st.integers(1, 255))
    for read in (stored[:end], bytes(flipped), data.draw(st.binary(max_size=30))):
        value, problem = reader.read(read, name="n") if kind != "heartbeat" else reader.read(read)
        assert problem or ENCODE(value) == read or msgspec.msgpack.decode(read) is not None


@given(data=st.data())
def test_no_stored_subscription_raises_and_each_is_kept(data: st.DataObject) -> None:
    stored = encode_subscription(HOOK)
    flipped = bytearray(stored)
    flipped[data.draw(st.integers(0, len(stored) - 1))] ^= data.draw(st.integers(1, 255))
    cut = stored[: data.draw(st.integers(0, len(stored)))]
    for read in (bytes(flipped), cut, data.draw(st.binary(max_size=30))):
        found = decode_subscription(read, 7)
        assert found.id == 7 and found.name
        if isinstance(found, StandIn):
            assert encode_subscription(found) == read and found.paused and found.problem


def test_each_field_that_can_be_read_is_shown() -> None:
    values = msgspec.msgpack.decode(ENCODE(SCHEDULE))
    values[3], values[9] = 17, "queue"  # cron, overlap
    value, problem = SCHEDULES.read(ENCODE(values), name="other")
    assert problem.startswith("Expected `str`, got `int`")
    assert value == msgspec.structs.replace(SCHEDULE, name="other", cron="", overlap=0)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"timezone": "Mars/Base"}, "no time zone that is known here: .*(timezone)"),
        ({"catch_up": 9}, "9 is not a valid CatchUp"),
        ({"overlap": 7}, "7 is not a valid Overlap"),
        ({"cron": "@fortnightly"}, "no cron expression"),
        ({"cron": "", "every_ms": 0}, "neither cron nor every"),
        ({"payload": b"\0\0\0\0x"}, "does not match its checksum"),
    ],
)
def test_what_cannot_be_used_here_is_not_understood(fields: dict[str, Any], said: str) -> None:
    schedule: Schedule = msgspec.structs.replace(SCHEDULE, **fields)
    _, problem = SCHEDULES.read(ENCODE(schedule))
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(problem)


@pytest.mark.parametrize("error", [KeyError("x"), RecursionError("deep"), MemoryError(), TypeError])
def test_a_library_that_reads_less_harms_one_definition(error: Any, monkeypatch: Any) -> None:
    def check(value: Schedule) -> None:
        raise error

    reader = Understanding(Schedule, SCHEDULES._fallbacks, check)
    value, problem = reader.read(ENCODE(SCHEDULE))
    assert value == SCHEDULE and problem


def test_a_state_that_has_grown_keeps_what_it_has_grown_by() -> None:
    written = ENCODE(SOURCE_STATE)
    assert read_source_state(written) == (SOURCE_STATE, b"", "")
    newer = ENCODE([*msgspec.msgpack.decode(written), "new", {"a": 1}])
    state, tail, problem = read_source_state(newer)
    assert state == SOURCE_STATE and "2 fields" in problem and tail is not None
    changed = msgspec.structs.replace(state, is_paused=False)
    again = msgspec.msgpack.decode(with_elements(ENCODE(changed), tail))
    assert again == [*msgspec.msgpack.decode(ENCODE(changed)), "new", {"a": 1}]
    assert with_elements(written, b"") == written
    assert elements_behind(b"\xc1", SourceState) is None
    assert read_source_state(ENCODE(["no seq"]))[1] is None


def test_a_reason_is_a_line() -> None:
    assert reason_of(InputError("it is\nempty", "/cron")) == "it is empty (cron)"
    assert reason_of(ValueError("")) == "ValueError"
    assert reason_of(KeyError("k")) == "KeyError: 'k'"
    assert len(reason_of(ValueError("x" * 1000))) == REASON_CHARACTERS_MAX


def test_what_is_no_map_has_no_parts() -> None:
    assert parts_of(b"") == parts_of(b"\x93\1\2\3") == parts_of(b"\xc1") == {}
    assert understanding.parts_of(encode_subscription(HOOK)).keys() >= {"id", "name"}


# ── subscriptions ──────────────────────────────────────────────────────────────────────────────

NEWER = {"flow": {"parallel": 3}, "id": 3, "name": "s", "subject": "order.*", "type": "webhook"}
NEWER |= {"created_ms": 5, "url": "http://127.0.0.1/"}


def test_a_subscription_of_a_newer_server_matches_and_stands_still() -> None:
    found = decode_subscription(ENCODE(NEWER), 3)
    assert isinstance(found, StandIn) and "`flow`" in found.problem
    assert (found.name, found.subject, found.created_ms) == ("s", "order.*", 5)
    assert found.matches("order.late") and not found.matches("mail")
    assert found.paused and found.pause_reason == "not_understood"
    assert not found.stays_paused(found.url)


def test_what_is_changed_of_it_changes_nothing_else() -> None:
    found = decode_subscription(ENCODE(NEWER), 3)
    paused = found.with_changes(paused=True, pause_reason="")
    assert isinstance(paused, StandIn) and paused.stays_paused("") and paused.can_be_changed
    assert msgspec.msgpack.decode(paused.stored) == NEWER | {"paused": True}
    resumed = paused.with_changes(paused=False)
    assert msgspec.msgpack.decode(encode_subscription(resumed)) == NEWER
    deleted = found.with_changes(deleted=True)
    assert deleted.deleted and msgspec.msgpack.decode(encode_subscription(deleted))["flow"]
    # A server that knows the field reads what it wrote.
    known = {name: value for name, value in NEWER.items() if name != "flow"}
    assert type(decode_subscription(ENCODE(known), 3)) is Subscription


@pytest.mark.parametrize(
    ("changes", "name", "subject"),
    [
        ({"type": "sqs"}, "s", "order.*"),
        ({"target": {"type": "kafka", "topic": "t", "bootstrap": "b", "acks": 1}}, "s", "order.*"),
        ({"target": {"type": "sqs"}}, "s", "order.*"),
        ({"subject": ["order.*", "mail"]}, "s", "*"),
        ({"subject": "order.?"}, "s", "*"),
        ({"name": 7}, "unreadable-3", "order.*"),
        ({"id": 4}, "s", "order.*"),
    ],
)
def test_what_it_gets_waits_for_it(changes: dict[str, Any], name: str, subject: str) -> None:
    """Where its subject cannot be read, everything: some of that may be for it."""
    stored = {**{k: v for k, v in NEWER.items() if k != "flow"}, **changes}
    found = decode_subscription(ENCODE(stored), 3)
    assert isinstance(found, StandIn)
    assert (found.id, found.name, found.subject) == (3, name, subject)


@pytest.mark.parametrize(
    ("reason", "url", "stays"),
    [
        ("", "http://127.0.0.1/new", True),
        ("failures", "http://127.0.0.1/", False),
        ("gone", "http://127.0.0.1/", True),
        ("gone", "http://127.0.0.1/new", False),
    ],
)
def test_a_new_definition_ends_the_same_pauses_of_both(reason: str, url: str, stays: bool) -> None:
    paused = {"paused": True, "pause_reason": reason} if reason else {"paused": True}
    for stored in (NEWER, {name: value for name, value in NEWER.items() if name != "flow"}):
        found = decode_subscription(ENCODE(stored | paused), 3)
        assert (found.stays_paused(url), found.asked_pause) == (stays, (True, reason))


def test_it_is_found_by_the_subject_that_can_be_read() -> None:
    unreadable = NEWER | {"id": 4, "name": "t", "subject": ["mail", "order.*"]}
    registry = Registry([decode_subscription(ENCODE(one)) for one in (NEWER, unreadable)])
    assert [one.id for one in registry.candidates("order.late")] == [3, 4]
    assert [one.id for one in registry.candidates("mail")] == [4]


def test_its_newest_subject_is_the_one_that_can_be_read() -> None:
    """And no change of it, nor another shard, changes what is stored of its history."""
    history = [["mail", 1, []], ["order.?", 7, [[9, 100]]]]
    stored = NEWER | {"subject": "order.?", "history": history}
    found = decode_subscription(ENCODE(stored), 3)
    assert [span.subject for span in found.spans] == ["mail", "*"]
    elsewhere = decode_subscription(ENCODE(NEWER | {"subject": "order.?", "url": "http://x/"}), 3)
    taken = elsewhere.of_shard_of(found)
    assert msgspec.msgpack.decode(encode_subscription(taken)) == stored | {"url": "http://x/"}
    # A server that understands it goes by its subject, whatever a stand-in has recorded.
    known = {name: value for name, value in NEWER.items() if name != "flow"}
    understood = decode_subscription(ENCODE(known | {"history": [["*", 7, [[9, 100]]]]}), 3)
    assert [span.subject for span in understood.spans] == ["order.*"]


def test_what_cannot_be_read_at_all_can_be_deleted_alone() -> None:
    found = decode_subscription(b"\xc1", 9)
    assert isinstance(found, StandIn) and not found.can_be_changed
    assert found.with_changes(paused=True) is found
    deleted = found.with_changes(deleted=True)
    assert not isinstance(deleted, StandIn) and deleted.deleted and deleted.id == 9


def test_a_limit_that_was_lowered_holds_for_what_was_accepted_before() -> None:
    many = msgspec.structs.replace(HOOK, max_attempts=10**6, backoff_ms=(10**12, 0))
    found = decode_subscription(encode_subscription(many), 1)
    assert type(found) is Subscription
    assert found.retry_schedule.max_attempts == ATTEMPTS_MAX
    assert found.retry_schedule.backoff_ms == (24 * 60 * 60 * 1000, 1)
