"""Heartbeats: renewed in memory, fired once, and never early."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from delayserver.errors import NotFoundError, OverloadedError
from delayserver.parts.heartbeats.heartbeats import FIRE_ITEMS, RETRY_MS, Heartbeats
from delayserver.parts.heartbeats.records import Heartbeat
from delayserver.parts.part import Core
from delayserver.records.message import Payload, decode_payload
from delayserver.slices import TurnBudget
from delayserver.timers.timeouts import Timeouts
from storage.catalog import Table
from storage.frame import unseal
from storage.rows import RecordKind
from tests.unit.fakes import START_MS, SUBJECT, MessageParts, Stopwatch, rows_of

BODY = Payload(b'{"worker": 7}')


class Parts(MessageParts):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.stopwatch = Stopwatch()
        self.timeouts = Timeouts(self.stopwatch)
        self.heartbeats = self.made()
        self.heartbeats.start()

    def made(self) -> Heartbeats:
        return Heartbeats(cast(Core, self))

    def not_understood(self, kind: str, name: str, reason: str) -> None:
        """As the core."""

    def put(self, key: str, passed_ms: int = 0, timeout_ms: int = 100) -> bool:
        self.stopwatch.shows_ms = passed_ms
        return self.heartbeats.put(key, timeout_ms, SUBJECT, BODY, START_MS + passed_ms)[0]

    def advance(self, passed_ms: int, most: int = 100) -> bool:
        self.stopwatch.shows_ms = passed_ms
        self.timeouts.advance()
        return self.heartbeats.fire_due(START_MS + passed_ms, TurnBudget(most * (FIRE_ITEMS + 1)))

    def kinds(self) -> list[int]:
        kinds: list[int] = rows_of(self.sequencer.group)["kind"].tolist()
        return kinds

    def store(self) -> None:
        """What a checkpoint would leave in the catalog."""
        group = self.sequencer.group
        for row in rows_of(group):
            if row["kind"] == RecordKind.HEARTBEAT:
                value = unseal(group.payload(int(row["seq"]))[0]) or b""
                one = msgspec.msgpack.decode(value, type=Heartbeat)
                pair = (one.key.encode(), value if one.subject_id else None)
                self.catalog.commit({Table.HEARTBEATS: [pair]})


def test_a_heartbeat_that_is_not_renewed_publishes_its_message_in_the_group_that_ends_it() -> None:
    parts = Parts()
    assert parts.put("w")
    parts.commit()
    parts.advance(99)
    assert parts.kinds() == []
    parts.advance(100)
    assert parts.kinds() == [RecordKind.PUBLISH, RecordKind.HEARTBEAT]
    publish, end = rows_of(parts.sequencer.group)
    assert end["message_seq"] == publish["seq"]
    assert publish["due_ms"] == START_MS + 100
    sealed, _ = parts.sequencer.group.payload(int(publish["seq"]))
    assert decode_payload(sealed, "", 0, 0) == BODY
    assert len(parts.heartbeats) == 0
    parts.commit()
    parts.advance(10_000)
    assert parts.kinds() == []


def test_a_renewal_writes_nothing_and_starts_the_timeout_anew() -> None:
    parts = Parts()
    parts.put("w")
    parts.commit()
    for passed_ms in range(60, 1000, 60):
        assert not parts.put("w", passed_ms)
        parts.advance(passed_ms)
    assert parts.kinds() == []
    assert parts.timeouts.size() == 1
    assert parts.heartbeats.renewed_total == 16
    parts.advance(960 + 99)
    assert parts.kinds() == []
    parts.advance(960 + 100)
    assert parts.kinds() == [RecordKind.PUBLISH, RecordKind.HEARTBEAT]


def test_a_renewal_of_what_is_not_durable_waits_for_it() -> None:
    parts = Parts()
    _, _, group = parts.heartbeats.put("w", 100, SUBJECT, BODY, START_MS)
    assert parts.heartbeats.put("w", 100, SUBJECT, BODY, START_MS)[2] is group
    parts.commit()
    assert parts.heartbeats.put("w", 100, SUBJECT, BODY, START_MS)[2] is None


@pytest.mark.parametrize(
    ("timeout_ms", "subject", "payload"),
    [(101, SUBJECT, BODY), (100, "other", BODY), (100, SUBJECT, Payload(b"2"))],
)
def test_another_definition_is_recorded(timeout_ms: int, subject: str, payload: Payload) -> None:
    parts = Parts()
    parts.put("w")
    parts.commit()
    is_new, _, group = parts.heartbeats.put("w", timeout_ms, subject, payload, START_MS)
    assert not is_new and group is parts.sequencer.group
    assert parts.kinds()[-1] == RecordKind.HEARTBEAT
    assert parts.timeouts.size() == 1
    assert parts.heartbeats.get("w")[0].timeout_ms == timeout_ms


def test_one_that_was_deleted_never_fires() -> None:
    parts = Parts()
    parts.put("w")
    parts.commit()
    parts.heartbeats.delete("w")
    [row] = rows_of(parts.sequencer.group)
    assert row["message_seq"] == row["seq"]
    assert parts.timeouts.size() == 0
    for call in (parts.heartbeats.delete, parts.heartbeats.get):
        with pytest.raises(NotFoundError):
            call("w")


def test_a_new_process_gives_each_its_whole_timeout() -> None:
    parts = Parts()
    parts.put("a")
    parts.put("b", timeout_ms=500)
    parts.heartbeats.delete("b")
    parts.store()
    parts.sequencer.close_group(START_MS)
    parts.stopwatch.shows_ms = 5000
    parts.timeouts = Timeouts(parts.stopwatch)
    parts.heartbeats = parts.made()
    parts.heartbeats.start()
    assert len(parts.heartbeats) == 1
    parts.advance(5099)
    assert parts.kinds() == []
    assert not parts.put("a", 5099)
    assert parts.kinds() == []  # It knows it for the same.
    parts.advance(5199)
    assert parts.kinds() == [RecordKind.PUBLISH, RecordKind.HEARTBEAT]


def test_a_group_that_is_rolled_back_gives_everything_back() -> None:
    parts = Parts()
    parts.put("old")
    parts.commit()
    parts.put("new")
    parts.heartbeats.delete("old")
    parts.groups.flush(START_MS)
    parts.groups.on_commit_failed(OSError())
    assert len(parts.heartbeats) == parts.timeouts.size() == 1
    parts.advance(100)
    parts.groups.flush(START_MS)
    parts.groups.on_commit_failed(OSError())
    # The disk was full: again, but not at once.
    parts.advance(100 + RETRY_MS - 1)
    assert parts.kinds() == []
    parts.advance(100 + RETRY_MS)
    assert parts.kinds() == [RecordKind.PUBLISH, RecordKind.HEARTBEAT]


def test_many_at_once_fire_in_slices() -> None:
    parts = Parts()
    for number in range(10):
        parts.put(f"w{number}")
    parts.commit()
    assert parts.advance(100, most=4)
    assert len(parts.heartbeats) == 6
    assert not parts.put("w9", 100)  # renewed at the last moment
    assert parts.advance(100, most=4)
    assert not parts.advance(100, most=4)
    assert len(parts.heartbeats) == 1
    assert parts.heartbeats.fired_total == 9


def test_after_a_stand_still_that_was_longer_the_timeout_begins_anew() -> None:
    """A client could not renew `short` meanwhile. It could have renewed `long` before."""
    parts = Parts()
    parts.put("short", 0, timeout_ms=100)
    parts.put("long", 0, timeout_ms=500)
    parts.put("over", 0, timeout_ms=90)
    parts.commit()
    parts.stopwatch.shows_ms = 95
    parts.timeouts.advance()  # and the loop stands still from now on
    parts.stopwatch.shows_ms = 505
    parts.heartbeats.on_stand_still(410)
    parts.advance(505)
    parts.commit()
    assert parts.heartbeats.fired_total == 2
    assert [key for key in ("short", "long", "over") if key in parts.heartbeats._beats] == ["short"]
    parts.advance(604)
    assert parts.heartbeats.fired_total == 2
    parts.advance(605)
    assert parts.heartbeats.fired_total == 3


def test_there_is_a_limit() -> None:
    parts = Parts(heartbeats_max=1)
    parts.put("a")
    with pytest.raises(OverloadedError, match="heartbeats_max"):
        parts.put("b")
    assert not parts.put("a")
