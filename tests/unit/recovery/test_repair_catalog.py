"""What takes the place of definitions that are lost."""

import numpy as np

from delayserver.parts.installed import PARTS
from delayserver.parts.schedules.records import ScheduleState, unpack_state
from delayserver.records.attempts import History
from delayserver.records.direct import DIRECT_FIRST_ID
from delayserver.records.message import Origin, Payload, ScheduledRun, encode_payload
from delayserver.records.subscriptions import decode_subscription
from delayserver.records.tables import (
    Change,
    ChangeState,
    change_key,
    dead_letter_key,
    number_key,
    unpack_change,
)
from delayserver.recovery.repair_catalog import Rebuilt, name_what_is_lost
from storage.catalog import Table
from storage.rows import FLAG_REPLAY, SCHEDULE_DTYPE, RecordKind
from tests.unit.fakes import START_MS


def test_a_schedule_is_where_its_newest_run_has_brought_it_and_half_of_one_is_lost() -> None:
    states = [ScheduleState(seq, 1, 0, 100 + seq) for seq in range(9)]
    rebuilt = Rebuilt(PARTS)
    take = rebuilt.hour()
    for seq, name in ((5, "s"), (3, "s"), (6, "newer"), (7, "gone"), (8, "half")):
        run = ScheduledRun(name, states[seq].pack())
        sealed = encode_payload(Payload(b"1", run=run))
        rows = np.zeros(1, SCHEDULE_DTYPE)
        rows["seq"] = rows["message_seq"] = seq
        rows["kind"], rows["payload_length"] = RecordKind.RUN, len(sealed)
        take(rows, sealed)
    defined: dict[Table, dict[bytes, bytes]] = {table: {} for table in Table}
    schedules, known = defined[Table.SCHEDULES], defined[Table.SCHEDULE_STATES]
    schedules.update({b"s": b"1", b"newer": b"2", b"half": b"3", b"stateless": b"4"})
    known.update({b"s": states[4].pack(), b"newer": states[8].pack(), b"nameless": b"5"})
    losses = rebuilt.mend_parts(defined)
    assert {key: unpack_state(value).seq for key, value in known.items()} == {
        b"s": 5,
        b"newer": 8,
        b"half": 8,
    }
    assert schedules.keys() == known.keys()
    assert losses == [
        "the schedule 'nameless': put it again",
        "the schedule 'stateless': put it again",
    ]


def test_a_run_of_a_newer_server_is_kept_as_it_is() -> None:
    state = ScheduleState(5, 1, 0, 100).pack().ljust(130, b"x")
    sealed = encode_payload(Payload(b"1", run=ScheduledRun("s", state)))
    rows = np.zeros(1, SCHEDULE_DTYPE)
    rows["kind"], rows["payload_length"] = RecordKind.RUN, len(sealed)
    rebuilt = Rebuilt(PARTS)
    rebuilt.hour()(rows, sealed)
    defined: dict[Table, dict[bytes, bytes]] = {table: {} for table in Table}
    defined[Table.SCHEDULES][b"s"] = b"1"
    assert rebuilt.mend_parts(defined) == []
    assert defined[Table.SCHEDULE_STATES] == {b"s": state}


def test_the_dead_letters_of_a_lost_subscription_can_be_asked_for() -> None:
    defined: dict[Table, dict[bytes, bytes]] = {table: {} for table in Table}
    defined[Table.DEAD_LETTERS] = {dead_letter_key(3, 9): b"a letter"}
    lost, losses = name_what_is_lost(defined, Rebuilt(PARTS), is_damaged=False)
    assert [*lost[Table.SUBSCRIPTIONS]] == [number_key(3)]
    definition = decode_subscription(lost[Table.SUBSCRIPTIONS][number_key(3)])
    assert (definition.name, definition.deleted) == ("lost-subscription-3", True)
    assert [definition.name in loss for loss in losses] == [True]


def test_where_a_message_was_that_was_replayed_is_derived_again() -> None:
    """Of one that was moved its own row tells where to, whichever is read first."""
    origin = Origin(3, START_MS, 1, START_MS)
    replay = encode_payload(Payload(b"{}", origin=origin, history=History(is_replay=True)))
    moved = encode_payload(Payload(b"{}", origin=origin))

    def row(seq: int, due_ms: int, kind: RecordKind, **more: int) -> np.ndarray:
        found = np.zeros(1, SCHEDULE_DTYPE)
        found["seq"], found["due_ms"], found["message_seq"] = seq, due_ms, 3
        found["subject_id"], found["kind"] = 1, kind
        for name, value in more.items():
            found[name] = value
        return found

    sealed = (("payload_length", len(replay)), ("attempt", 1), ("subscription_id", 7))
    replayed = row(9, START_MS + 5, RecordKind.REPLAY, flags=FLAG_REPLAY, **dict(sealed))
    move = row(4, START_MS + 2, RecordKind.MOVE, payload_length=len(moved))
    for hours, where in (
        ([(replayed, replay)], (3, START_MS)),
        ([(move, moved), (replayed, replay)], (4, START_MS + 2)),
        ([(replayed, replay), (move, moved)], (4, START_MS + 2)),
    ):
        rebuilt = Rebuilt(PARTS)
        for rows, blob in hours:
            rebuilt.hour()(rows, blob)
        assert {key: unpack_change(value) for key, value in rebuilt.changes().items()} == {
            change_key(3, 0): Change(ChangeState.REPLAYED, *where, 0, 1),
            change_key(3, 7): Change(ChangeState.RETRYING, 9, START_MS + 5, 1, 1),
        }


def test_what_says_itself_where_it_goes_has_lost_no_subscription_and_is_moved_as_any() -> None:
    rows = np.zeros(1, SCHEDULE_DTYPE)
    rows["seq"], rows["message_seq"], rows["due_ms"] = 4, 3, START_MS
    rows["kind"], rows["subject_id"], rows["subscription_id"] = RecordKind.MOVE, 1, DIRECT_FIRST_ID
    rebuilt = Rebuilt(PARTS)
    rebuilt.hour()(rows, b"")
    assert {key: unpack_change(value) for key, value in rebuilt.changes().items()} == {
        change_key(3, 0): Change(ChangeState.MOVED, 4, START_MS, 0, 1)
    }
    defined: dict[Table, dict[bytes, bytes]] = {table: {} for table in Table}
    defined[Table.DEAD_LETTERS] = {dead_letter_key(DIRECT_FIRST_ID + 1, 9): b"a letter"}
    lost, _ = name_what_is_lost(defined, rebuilt, is_damaged=True)
    assert not lost[Table.SUBSCRIPTIONS]
