"""Heartbeats, as the core is told of them."""

import msgspec

from delayserver.parts.heartbeats.heartbeats import Heartbeats
from delayserver.parts.heartbeats.part import HEARTBEATS_PART
from delayserver.parts.heartbeats.records import Heartbeat
from delayserver.parts.part import TimedDecider
from storage.catalog import Table
from storage.rows import RecordKind


def test_a_record_makes_a_heartbeat_and_one_without_a_subject_ends_it() -> None:
    effect = HEARTBEATS_PART.effects[RecordKind.HEARTBEAT]
    made, ended = map(msgspec.msgpack.encode, (Heartbeat("a", 100, 3, b"p"), Heartbeat("a")))
    assert list(effect(made)) == [(Table.HEARTBEATS, b"a", made)]
    assert list(effect(ended)) == [(Table.HEARTBEATS, b"a", None)]
    assert list(effect(msgspec.msgpack.encode(Heartbeat("")))) == []


def test_heartbeats_are_asked_as_time_passes() -> None:
    assert issubclass(Heartbeats, TimedDecider)
