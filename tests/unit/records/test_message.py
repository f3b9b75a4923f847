"""Payloads: they come back as they were, and a damaged one never does."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayserver.records.direct import Destination
from delayserver.records.message import (
    Content,
    DebounceState,
    MessageOptions,
    Origin,
    Payload,
    ScheduleEntry,
    Watch,
    debounced,
    decode_payload,
    encode_payload,
    encode_payloads,
    row_flags,
)
from storage.errors import DamageError
from storage.frame import CRC_BYTES, seal
from storage.rows import FLAG_OPTIONS, FLAG_WATCHES, HOUR_MS, PRIORITY_OF_GROUP, PRIORITY_SHIFT

FULL = Payload(
    b'{"order": 1001}\x00\xff',
    Content.BINARY,
    "1001",
    {"x-shop": "7"},
    Origin(5, 1_000, 2, 3_000, attempt=4),
    Watch(("order-1001",), on_event=1),
)
UNWATCHED = msgspec.structs.replace(FULL, watch=None)


WITH_OPTIONS = msgspec.structs.replace(FULL, options=MessageOptions(60_000, 5, 9))
TO = Destination("http://a:1/b", "s", "whsec_x", 5, 6, (7, 8))
DIRECTED = Payload(b"{}", options=MessageOptions(to=TO))
URGENT = Payload(b"{}", options=MessageOptions(priority=9))


@pytest.mark.parametrize(
    "payload", [Payload(b""), Payload(b"{}"), UNWATCHED, FULL, WITH_OPTIONS, URGENT]
)
def test_a_payload_comes_back_as_it_was(payload: Payload) -> None:
    assert decode_payload(encode_payload(payload), "file", 0, 1) == payload


@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: b + b"\0", lambda b: b"", None])
def test_a_damaged_payload_is_named(change) -> None:
    sealed = encode_payload(FULL)
    damaged = (
        sealed[:9] + bytes([sealed[9] ^ 1]) + sealed[10:] if change is None else change(sealed)
    )
    with pytest.raises(DamageError) as caught:
        decode_payload(damaged, "schedule/hour", 64, 17)
    error = caught.value
    assert (error.path, error.offset, error.first_seq, error.last_seq) == (
        "schedule/hour",
        64,
        17,
        17,
    )


def test_intact_bytes_that_are_no_payload_are_damage_too() -> None:
    with pytest.raises(DamageError, match="cannot be read"):
        decode_payload(seal(b"\xc1"), "file", 0, 1)


def test_a_payload_of_an_older_or_newer_version_can_be_read() -> None:
    older = seal(msgspec.msgpack.encode([b"body"]))
    assert decode_payload(older, "file", 0, 1) == Payload(b"body")
    for payload in (UNWATCHED, FULL, WITH_OPTIONS):
        # What is new comes after every field of today, also after those that may be left out.
        newer = seal(msgspec.msgpack.encode([*msgspec.structs.astuple(payload), "something new"]))
        assert decode_payload(newer, "file", 0, 1) == payload


def test_an_entry_knows_its_hour() -> None:
    assert [ScheduleEntry(1, due_ms).hour for due_ms in (0, HOUR_MS - 1, HOUR_MS)] == [0, 0, 1]


def test_what_has_no_options_has_the_bytes_that_it_had_before_there_were_any() -> None:
    """Else a publish with a key that is known would be a conflict after an update."""
    plain = [FULL.body, FULL.content, FULL.key, FULL.headers, [5, 1_000, 2, 3_000, 4]]
    watch = [["order-1001"], 1]
    assert encode_payload(UNWATCHED) == seal(msgspec.msgpack.encode(plain))
    assert encode_payload(FULL) == seal(msgspec.msgpack.encode([*plain, watch]))
    with_options = [*plain, watch, None, [60_000, 5, 9]]
    assert encode_payload(WITH_OPTIONS) == seal(msgspec.msgpack.encode(with_options))


def test_a_message_says_where_it_goes() -> None:
    assert (UNWATCHED.to, UNWATCHED.direct_id, WITH_OPTIONS.direct_id) == (None, 0, 0)
    assert DIRECTED.to == TO
    assert DIRECTED.direct_id == TO.subscription_id
    assert decode_payload(encode_payload(DIRECTED), "file", 0, 1) == DIRECTED
    # Nothing has to be read before it leaves, to know when it expires.
    assert row_flags(DIRECTED) == 0


def test_many_payloads_are_encoded_as_each_is() -> None:
    ones = [Payload(b"1"), DIRECTED, URGENT, Payload(b"2", watch=FULL.watch), WITH_OPTIONS]
    ones = [msgspec.structs.replace(one, origin=None) for one in ones]
    columns = (
        [getattr(one, name) for one in ones]
        for name in ("body", "content", "key", "headers", "watch", "options")
    )
    assert list(map(seal, encode_payloads(*columns))) == list(map(encode_payload, ones))


def test_flags_tell_of_watch_keys_options_and_priority() -> None:
    flags = [row_flags(one) for one in (UNWATCHED, FULL, URGENT, WITH_OPTIONS)]
    urgent = 9 << 4
    assert flags == [0, FLAG_WATCHES, urgent, urgent | FLAG_OPTIONS | FLAG_WATCHES]


def test_a_group_takes_the_place_of_a_priority_in_the_flags() -> None:
    grouped = MessageOptions(priority=9, group="a")
    assert row_flags(Payload(b"", options=grouped)) == PRIORITY_OF_GROUP << PRIORITY_SHIFT
    sealed = encode_payload(Payload(b"", options=grouped))
    assert decode_payload(sealed, "", 0, 0).options == grouped


def test_options_without_a_group_have_the_bytes_that_they_had_before_there_were_groups() -> None:
    data = encode_payload(Payload(b"", options=MessageOptions(50, priority=9)))[CRC_BYTES:]
    assert msgspec.msgpack.decode(data)[7] == [50, 0, 9]


def test_when_a_message_expires() -> None:
    assert Payload(b"").expires_ms(100) is None
    assert URGENT.expires_ms(100) is None
    assert Payload(b"", options=MessageOptions(50)).expires_ms(100) == 150
    assert Payload(b"", options=MessageOptions(50, since_ms=300)).expires_ms(100) == 350


PUTS = st.lists(
    st.tuples(
        st.integers(-50, 500),  # ms since the put before; the clock may have been set back
        st.integers(1, 100),
        st.sampled_from([0, 100, 300]),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


@given(PUTS)
def test_each_put_pushes_a_message_back_and_none_beyond_the_end_of_the_first(puts: Any) -> None:
    """Beside a model that keeps the moment of the first put, and the body of either."""
    now_ms, due_ms, first = 1_000, 0, (1_000, b"")
    waiting: Payload | None = None
    for number, (passed_ms, quiet_ms, more_ms, keeps_first) in enumerate(puts):
        now_ms += passed_ms
        if waiting is not None and due_ms <= now_ms:
            waiting = None  # It was delivered: the key is free.
        at_most_ms = quiet_ms + more_ms if more_ms else 0
        body = b"%d" % number
        if waiting is None:
            first = now_ms, body
        wanted = MessageOptions(
            priority=number % 10, debounce=DebounceState(quiet_ms, at_most_ms, keeps_first, now_ms)
        )
        new = Payload(body, key="k", headers={"n": str(number)}, options=wanted)
        before = waiting
        waiting, due_ms = debounced(new, waiting, now_ms)
        first = min(first[0], now_ms), first[1]
        latest_ms = first[0] + at_most_ms if at_most_ms else now_ms + quiet_ms
        assert due_ms == max(now_ms, min(now_ms + quiet_ms, latest_ms))
        expected = before if keeps_first and before is not None else new
        assert (waiting.body, waiting.headers) == (expected.body, expected.headers)
        options = waiting.options
        assert options is not None and options.debounce is not None
        assert options.debounce.since_ms == first[0]
        assert options.priority == expected.options.priority  # type: ignore[union-attr]
        assert decode_payload(encode_payload(waiting), "", 0, 1) == waiting


def test_what_waits_without_a_debounce_may_be_kept_and_its_deliveries_are_not() -> None:
    new = Payload(b"2", key="1001", options=MessageOptions(debounce=DebounceState(5, 0, True, 70)))
    kept, due_ms = debounced(new, FULL, 70)
    assert due_ms == 75 and kept.origin is None and kept.history is None
    assert (kept.body, kept.watch) == (FULL.body, FULL.watch)
    assert kept.options == new.options


def test_the_time_to_live_of_a_kept_dead_letter_begins_when_the_new_message_is_due() -> None:
    again = MessageOptions(ttl_ms=10, since_ms=20)
    before = Payload(b"1", key="k", options=again)
    new = Payload(b"2", key="k", options=MessageOptions(debounce=DebounceState(50, 0, True, 70)))
    kept, due_ms = debounced(new, before, 70)
    assert (kept.body, kept.expires_ms(due_ms)) == (b"1", due_ms + 10)


def test_a_debounce_begins_anew_behind_an_attempt_that_failed() -> None:
    debounce = DebounceState(50, 60, True, 10)
    before = Payload(b"1", key="k", options=MessageOptions(debounce=debounce))
    new = Payload(b"2", key="k", options=MessageOptions(debounce=debounce))
    for attempt, expected in ((1, (10, 90)), (2, (90, 140))):
        moved = msgspec.structs.replace(before, origin=Origin(7, 60, 1, 60, attempt))
        kept, due_ms = debounced(new, moved, 90)
        assert kept.options is not None and kept.options.debounce is not None
        assert (kept.body, kept.options.debounce.since_ms, due_ms) == (b"1", *expected)
