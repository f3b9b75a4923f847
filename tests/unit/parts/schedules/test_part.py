"""Schedules, as the core is told of them."""

from delayserver.parts.part import TimedDecider
from delayserver.parts.schedules.part import SCHEDULES_PART
from delayserver.parts.schedules.records import ScheduleChange, ScheduleState, pack_schedule_change
from delayserver.parts.schedules.scheduling import Scheduling
from delayserver.records.message import Payload, ScheduledRun, encode_payload, unseal_payload
from storage.catalog import Table
from storage.rows import RecordKind


def test_a_record_changes_the_state_the_definition_or_both_and_ends_both() -> None:
    effect = SCHEDULES_PART.effects[RecordKind.SCHEDULE]
    for change, writes in (
        (ScheduleChange("a", b"d", b"s"), [(Table.SCHEDULE_STATES, b"s"), (Table.SCHEDULES, b"d")]),
        (ScheduleChange("a", None, b"s"), [(Table.SCHEDULE_STATES, b"s")]),
        (ScheduleChange("a"), [(Table.SCHEDULE_STATES, None), (Table.SCHEDULES, None)]),
        (ScheduleChange(""), []),
    ):
        expected = [(table, b"a", value) for table, value in writes]
        assert list(effect(pack_schedule_change(change))) == expected


def test_a_run_brings_its_state_and_another_message_none() -> None:
    effect, halves = SCHEDULES_PART.effects[RecordKind.RUN], SCHEDULES_PART.halves
    state = ScheduleState(7, 1, 0, 100).pack()
    sealed = encode_payload(Payload(b"1", run=ScheduledRun("a", state)))
    run = unseal_payload(sealed, "messages", 0, 7)
    assert list(effect(run)) == [(Table.SCHEDULE_STATES, b"a", state)]
    assert halves is not None and halves.state_seq(state) == 7 and halves.state_seq(b"") == 0
    other = unseal_payload(encode_payload(Payload(b"1")), "messages", 0, 7)
    assert list(effect(other)) == []


def test_schedules_are_asked_as_time_passes() -> None:
    assert issubclass(Scheduling, TimedDecider)
