"""Payloads: they come back as they were, and a damaged one never does."""

from __future__ import annotations

import msgspec
import pytest

from delayserver.records.message import (
    Content,
    Origin,
    Payload,
    ScheduleEntry,
    Watch,
    decode_payload,
    encode_payload,
)
from storage.errors import DamageError
from storage.frame import seal
from storage.rows import HOUR_MS

FULL = Payload(
    b'{"order": 1001}\x00\xff',
    Content.BINARY,
    "1001",
    {"x-shop": "7"},
    Origin(5, 1_000, 2, 3_000, attempt=4),
    Watch(("order-1001",), on_event=1),
)
UNWATCHED = msgspec.structs.replace(FULL, watch=None)


@pytest.mark.parametrize("payload", [Payload(b""), Payload(b"{}"), UNWATCHED, FULL])
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
    for payload in (UNWATCHED, FULL):
        # What is new comes after every field of today, also after those that may be left out.
        newer = seal(msgspec.msgpack.encode([*msgspec.structs.astuple(payload), "something new"]))
        assert decode_payload(newer, "file", 0, 1) == payload


def test_an_entry_knows_its_hour() -> None:
    assert [ScheduleEntry(1, due_ms).hour for due_ms in (0, HOUR_MS - 1, HOUR_MS)] == [0, 0, 1]
