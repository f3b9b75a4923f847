"""Scheduling: each planned time once, and what is late as `catch_up` says."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any, cast
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delayserver.errors import (
    ConflictError,
    DiskReserveError,
    InputError,
    NotFoundError,
    OverloadedError,
    PreconditionError,
    StoppingError,
)
from delayserver.parts.part import Core
from delayserver.parts.schedules import recurrence
from delayserver.parts.schedules.records import (
    ENDED_MS,
    CatchUp,
    Overlap,
    ScheduleChange,
    ScheduleState,
    forget_zones,
    pack_schedule,
    pack_state,
    set_back,
    unpack_state,
    upcoming,
)
from delayserver.parts.schedules.scheduling import (
    MISSED_MS,
    RETRY_MS,
    STEPS_MAX,
    Scheduling,
    WantedSchedule,
    preview,
    run_key,
)
from delayserver.records import zones
from delayserver.records.message import Content, Payload, decode_payload
from delayserver.timers.timeouts import Timeouts
from delayserver.times import format_time
from storage.catalog import Table
from storage.errors import DiskFullError
from storage.frame import unseal
from storage.rows import RecordKind
from tests.unit.fakes import START_MS, SUBJECT, MessageParts, Stopwatch, rows_of
from tests.world.schedule_records import unpack_schedule_change

MINUTE_MS = 60_000
BODY = Payload(b'{"shop": 7}', Content.JSON, headers={"x-shop": "7"})


def wanted(name: str = "daily", every_ms: int = MINUTE_MS, **fields: Any) -> WantedSchedule:
    subject, payload = fields.pop("subject", SUBJECT), fields.pop("payload", BODY)
    cron, timezone = fields.pop("cron", ""), fields.pop("timezone", "UTC")
    return WantedSchedule(name, subject, payload, cron, 0 if cron else every_ms, timezone, **fields)


class Parts(MessageParts):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.stopwatch = Stopwatch()
        self.timeouts = Timeouts(self.stopwatch)
        self.jitter = 0.0
        self.said: list[tuple[str, str, str]] = []
        self.schedules = self.made()
        self.schedules.start()

    def made(self) -> Scheduling:
        return Scheduling(cast(Core, self))

    def random(self) -> float:
        return self.jitter

    def not_understood(self, kind: str, name: str, reason: str) -> None:
        self.said.append((kind, name, reason))

    def put(self, passed_ms: int = 0, **fields: Any) -> bool:
        return self.schedules.put(wanted(**fields), START_MS + passed_ms)[1]

    def advance(self, passed_ms: int) -> bool:
        self.stopwatch.shows_ms = passed_ms
        return self.schedules.run_due(START_MS + passed_ms)

    def look(self, now_ms: int) -> None:
        """Time passes until nothing is to be done; the clock may have been set."""
        self.stopwatch.shows_ms += RETRY_MS
        while self.schedules.run_due(now_ms):
            pass

    def stored_as(self, name: str, definition: bytes | None, state: bytes | None = None) -> None:
        """Start another process, which finds this in the catalog."""
        self.store()
        if definition is not None:
            self.catalog.commit({Table.SCHEDULES: [(name.encode(), definition)]})
        if state is not None:
            self.catalog.commit({Table.SCHEDULE_STATES: [(name.encode(), state)]})
        self.schedules = self.made()
        self.said.clear()

    def records(self) -> list[tuple[int, int, bytes]]:
        """Kind, due time and unsealed payload of each record of the open group."""
        group = self.sequencer.group
        return [
            (row["kind"], row["due_ms"], unseal(group.payload(int(row["seq"]))[0]) or b"")
            for row in rows_of(group)
        ]

    def runs(self) -> list[tuple[int, int]]:
        """Planned and due time of each run in the open group, since the start."""
        found = []
        for row in rows_of(self.sequencer.group):
            if row["kind"] == RecordKind.RUN:
                sealed = self.sequencer.group.payload(int(row["seq"]))[0]
                run = decode_payload(sealed, "", 0, 0).run
                assert run is not None
                planned_ms = unpack_state(run.state).last_planned_ms
                found.append((planned_ms - START_MS, int(row["due_ms"]) - START_MS))
        return found

    def state(self, name: str = "daily") -> ScheduleState:
        return self.schedules.get(name).state

    def payloads(self) -> list[Payload]:
        """Returns the payloads of the messages in the open group."""
        runs = (data for kind, _, data in self.records() if kind == RecordKind.RUN)
        return [msgspec.msgpack.decode(data, type=Payload) for data in runs]

    def changes(self, name: str) -> list[ScheduleChange]:
        """Returns the changes of a schedule in the open group since it was put last."""
        found: list[ScheduleChange] = []
        for kind, _, data in self.records():
            if kind != RecordKind.SCHEDULE or (change := unpack_schedule_change(data)).name != name:
                continue
            found = [] if change.schedule is not None else [*found, change]
        return found

    def store(self) -> None:
        """What a checkpoint would leave in the catalog."""
        for kind, _, data in self.records():
            if kind == RecordKind.SCHEDULE:
                change = unpack_schedule_change(data)
                writes: dict[Table, list[tuple[bytes, bytes | None]]] = {
                    Table.SCHEDULE_STATES: [(change.name.encode(), change.state)]
                }
                if change.schedule is not None or change.state is None:
                    writes[Table.SCHEDULES] = [(change.name.encode(), change.schedule)]
                self.catalog.commit(writes)
            elif kind == RecordKind.RUN:
                run = msgspec.msgpack.decode(data, type=Payload).run
                assert run is not None
                self.catalog.commit({Table.SCHEDULE_STATES: [(run.schedule.encode(), run.state)]})


def test_a_run_is_one_record_which_is_the_message_and_the_step_of_its_schedule() -> None:
    parts = Parts()
    assert parts.put(every_ms=MINUTE_MS)
    assert not parts.advance(MINUTE_MS - 1)
    assert [kind for kind, *_ in parts.records()] == [RecordKind.SUBJECT, RecordKind.SCHEDULE]
    assert not parts.advance(MINUTE_MS + 3)
    kind, due_ms, data = parts.records()[2]
    assert (kind, due_ms) == (RecordKind.RUN, START_MS + MINUTE_MS + 3)  # never in the past
    payload = msgspec.msgpack.decode(data, type=Payload)
    planned = format_time(START_MS + MINUTE_MS)
    assert payload.key == f"daily@{planned}" and payload.body == BODY.body
    assert payload.headers == {
        "delay-schedule": "daily",
        "delay-planned": planned,
        "x-shop": "7",
    }
    assert payload.run is not None and payload.run.schedule == "daily"
    state = parts.state()
    assert unpack_state(payload.run.state) == state
    assert (state.runs, state.last_seq, state.seq) == (1, 3, 3)
    assert (state.last_planned_ms, state.last_due_ms) == (START_MS + MINUTE_MS, due_ms)
    # Counted from what was planned, not from the clock.
    assert state.next_ms == START_MS + 2 * MINUTE_MS
    assert parts.schedules.wait_ms(START_MS + MINUTE_MS + 3) == MINUTE_MS - 3
    found = parts.messages.by_key(SUBJECT, payload.key)
    assert (found.seq, found.due_ms) == (3, due_ms)
    assert parts.schedules.runs_total == 1


def test_what_is_missed_is_run_as_catch_up_says() -> None:
    late_ms = 5 * MINUTE_MS + MISSED_MS + 1
    for catch_up, runs, skipped in (
        (CatchUp.NONE, [], 5),
        (CatchUp.LAST, [5], 4),
        (CatchUp.ALL, [1, 2, 3, 4, 5], 0),
    ):
        parts = Parts()
        parts.put(catch_up=catch_up)
        while parts.advance(late_ms):
            pass
        assert parts.runs() == [(n * MINUTE_MS, late_ms) for n in runs]
        state = parts.state()
        assert (state.runs, state.skipped) == (len(runs), skipped)
        assert state.next_ms == START_MS + 6 * MINUTE_MS
        assert parts.schedules.skipped_total == skipped


@pytest.mark.parametrize("catch_up", CatchUp)
def test_a_run_that_is_a_little_late_is_made_whatever_catch_up_says(catch_up) -> None:
    parts = Parts()
    parts.put(every_ms=2000, catch_up=catch_up)
    while parts.advance(2000 + MISSED_MS):
        pass
    assert [planned_ms for planned_ms, _ in parts.runs()] == [*range(2000, 12_001, 2000)]
    assert parts.state().skipped == 0


def test_what_passes_while_it_is_paused_is_missed_also_a_moment_ago() -> None:
    for catch_up, planned in ((CatchUp.NONE, []), (CatchUp.LAST, [3]), (CatchUp.ALL, [1, 2, 3])):
        parts = Parts()
        parts.put(catch_up=catch_up)
        parts.schedules.pause("daily", START_MS)
        assert not parts.advance(3 * MINUTE_MS + 5) and parts.runs() == []
        assert parts.schedules.wait_ms(START_MS) > 10**12
        known, _ = parts.schedules.resume("daily", START_MS + 3 * MINUTE_MS + 5)
        assert not known.state.is_paused
        while parts.advance(3 * MINUTE_MS + 5):
            pass
        assert [planned_ms // MINUTE_MS for planned_ms, _ in parts.runs()] == planned
        parts.advance(4 * MINUTE_MS)
        assert parts.runs()[-1][0] == 4 * MINUTE_MS
    # Again the same is no record.
    count = len(parts.records())
    parts.schedules.resume("daily", START_MS)
    assert len(parts.records()) == count


def test_a_run_is_left_out_while_the_message_of_the_one_before_waits() -> None:
    parts = Parts()
    parts.put(overlap=Overlap.SKIP)
    for minute in (1, 2, 3):
        parts.advance(minute * MINUTE_MS)
    state = parts.state()
    assert (state.runs, state.skipped, state.next_ms) == (1, 2, START_MS + 4 * MINUTE_MS)
    parts.messages.cancel(state.last_seq, state.last_due_ms)
    parts.advance(4 * MINUTE_MS)
    assert [planned_ms // MINUTE_MS for planned_ms, _ in parts.runs()] == [1, 4]


def test_jitter_is_drawn_per_run_and_moves_no_planned_time() -> None:
    parts = Parts()
    parts.put(jitter_ms=1000)
    for minute, jitter in ((1, 0.0), (2, 0.5), (3, 0.9999)):
        parts.jitter = jitter
        parts.advance(minute * MINUTE_MS)
    late = [due_ms - planned_ms for planned_ms, due_ms in parts.runs()]
    assert late == [0, 500, 1000]
    assert [planned_ms for planned_ms, _ in parts.runs()] == [60_000, 120_000, 180_000]


def test_start_end_and_number_of_runs() -> None:
    parts = Parts()
    parts.put(start_ms=START_MS + 90_000, end_ms=START_MS + 210_000)
    parts.put(name="two", runs_max=2)
    for second in range(300):
        parts.advance(second * 1000)
    planned = sorted(planned_ms for planned_ms, _ in parts.runs())
    assert planned == [60_000, 90_000, 120_000, 150_000, 210_000]
    assert parts.state().next_ms == parts.state("two").next_ms == ENDED_MS
    assert list(upcoming(*_known(parts), START_MS, 5)) == []
    # One that is changed may go on.
    parts.put(passed_ms=300_000, name="two", runs_max=4)
    assert list(upcoming(*_known(parts, "two"), START_MS + 300_000, 5)) == [
        START_MS + 360_000,
        START_MS + 420_000,
    ]
    assert preview(wanted(start_ms=START_MS + 7, runs_max=2), START_MS, 5) == [
        START_MS + 7,
        START_MS + 7 + MINUTE_MS,
    ]


def _known(parts: Parts, name: str = "daily") -> tuple[Any, Any]:
    known = parts.schedules.get(name)
    return known.definition, known.state


def test_putting_it_again_changes_what_differs_and_nothing_else() -> None:
    parts = Parts()
    parts.put()
    parts.advance(MINUTE_MS)
    count = len(parts.records())
    assert not parts.put(passed_ms=MINUTE_MS + 7)
    assert len(parts.records()) == count  # the same
    before = parts.state()
    assert not parts.put(passed_ms=MINUTE_MS + 9, payload=Payload(b"2"))
    state = parts.state()
    assert state.next_ms == before.next_ms  # in step
    assert (state.runs, state.last_seq) == (1, before.last_seq)
    assert state.version == state.seq > before.version
    assert not parts.put(passed_ms=MINUTE_MS + 11, every_ms=5000)
    assert parts.state().next_ms == START_MS + MINUTE_MS + 11 + 5000
    parts.advance(MINUTE_MS + 5011)
    assert decode_payload(parts.schedules.get("daily").definition.payload, "", 0, 0) == BODY


def test_a_trigger_runs_now_and_counts_and_leaves_the_next_run_as_it_is() -> None:
    parts = Parts()
    parts.put(runs_max=3)
    parts.schedules.pause("daily", START_MS)
    # A time that is planned is left to the run that is.
    _, key = parts.schedules.trigger("daily", START_MS + MINUTE_MS)
    assert key == run_key("daily", START_MS + MINUTE_MS + 1)
    parts = Parts()
    parts.put(runs_max=3)
    parts.schedules.pause("daily", START_MS)
    first, key = parts.schedules.trigger("daily", START_MS + 5)
    second, _ = parts.schedules.trigger("daily", START_MS + 5)
    assert first.due_ms == second.due_ms == START_MS + 5
    assert parts.runs() == [(5, 5), (6, 5)]  # keys of their own
    parts.schedules.resume("daily", START_MS + 6)
    for minute in range(4):
        parts.advance(minute * MINUTE_MS)
    assert parts.runs()[2:] == [(MINUTE_MS, MINUTE_MS)]
    assert parts.state().next_ms == ENDED_MS
    assert key == run_key("daily", START_MS + 5)
    assert parts.messages.by_key(SUBJECT, key).seq == first.seq


def test_versions_that_are_expected() -> None:
    parts = Parts()
    schedules = parts.schedules
    with pytest.raises(PreconditionError, match="no schedule"):
        schedules.put(wanted(), START_MS, expected={"1"})
    known, is_new, _ = schedules.put(wanted(), START_MS, only_new=True)
    assert is_new
    with pytest.raises(PreconditionError) as caught:
        schedules.put(wanted(), START_MS, only_new=True)
    assert caught.value.version == known.version
    paused, _ = schedules.pause("daily", START_MS, expected={known.version})
    for call in (
        lambda: schedules.resume("daily", START_MS, expected={known.version}),
        lambda: schedules.delete("daily", expected={known.version}),
        lambda: schedules.put(wanted(every_ms=1000), START_MS, expected={known.version}),
    ):
        with pytest.raises(PreconditionError, match="has changed"):
            call()
    schedules.delete("daily", expected={paused.version})
    with pytest.raises(NotFoundError):
        schedules.get("daily")
    # A run is no change that somebody has to know of.
    known, *_ = schedules.put(wanted(), START_MS)
    parts.advance(MINUTE_MS)
    assert schedules.get("daily").version == known.version


def test_one_that_was_deleted_never_runs() -> None:
    parts = Parts()
    parts.put()
    parts.schedules.delete("daily")
    parts.advance(MINUTE_MS)
    assert parts.runs() == [] and len(parts.schedules) == 0
    pause = partial(parts.schedules.pause, now_ms=START_MS)
    for call in (parts.schedules.get, parts.schedules.delete, pause):
        with pytest.raises(NotFoundError, match="no schedule 'daily'"):
            call("daily")
    assert parts.put()


def test_another_process_goes_on_where_the_state_stands() -> None:
    parts = Parts()
    for name in ("gone", "paused", "runs"):
        parts.put(name=name)
    parts.schedules.delete("gone")
    parts.schedules.pause("paused", START_MS)
    parts.advance(MINUTE_MS)
    parts.store()
    before = {name: parts.state(name) for name in ("paused", "runs")}
    parts.schedules = parts.made()
    parts.advance(MINUTE_MS)
    assert len(parts.schedules) == 2
    assert {name: parts.state(name) for name in before} == before
    assert len(parts.runs()) == 1
    parts.advance(2 * MINUTE_MS)
    assert len(parts.runs()) == 2


def test_one_that_is_changed_before_time_has_passed_waits_once() -> None:
    parts = Parts()
    parts.put()
    parts.store()
    parts.schedules = parts.made()
    parts.put(every_ms=2000)
    assert len(parts.schedules) == 1
    parts.advance(2000)
    assert parts.runs() == [(2000, 2000)]
    parts.schedules.delete("daily")
    assert len(parts.schedules) == 0


def test_what_cannot_be_recorded_is_as_it_was_and_is_tried_again() -> None:
    parts = Parts()
    parts.put()
    group = parts.sequencer.group
    parts.advance(MINUTE_MS)
    parts.put(name="other")
    parts.groups.flush(START_MS)
    parts.groups.on_commit_failed(DiskFullError("write", "messages", "full"))
    assert parts.sequencer.group is not group and len(parts.schedules) == 0
    assert parts.put()
    parts.groups.flush(START_MS)
    parts.groups.on_committed()
    parts.advance(MINUTE_MS)
    assert parts.runs() == []  # not yet: it is held for a moment
    parts.advance(MINUTE_MS + RETRY_MS)
    assert len(parts.runs()) == 1
    parts.schedules.delete("daily")
    parts.groups.flush(START_MS)
    parts.groups.on_commit_failed(DiskFullError("write", "messages", "full"))
    state = parts.state()
    assert (state.runs, state.next_ms) == (0, START_MS + MINUTE_MS)
    parts.advance(MINUTE_MS + 2 * RETRY_MS)
    assert len(parts.runs()) == 1


@pytest.mark.parametrize("error", [OverloadedError("much"), DiskReserveError(""), StoppingError()])
def test_what_is_refused_is_tried_a_moment_later(error, monkeypatch) -> None:
    parts = Parts()
    parts.put()

    def refuse() -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(parts.publishing, "refuse_when_disk_is_low", refuse)
        assert not parts.advance(MINUTE_MS)
        with pytest.raises(type(error)):
            parts.schedules.trigger("daily", START_MS)
    assert parts.schedules.wait_ms(START_MS + MINUTE_MS) == RETRY_MS
    assert not parts.advance(MINUTE_MS + RETRY_MS - 1) and parts.runs() == []
    parts.advance(MINUTE_MS + RETRY_MS)
    assert parts.runs() == [(MINUTE_MS, MINUTE_MS + RETRY_MS)]


def test_a_turn_of_the_event_loop_looks_at_so_many_planned_times() -> None:
    parts = Parts()
    count = STEPS_MAX + 20
    for number in range(count):
        parts.put(name=f"s{number}")
    assert parts.advance(MINUTE_MS) and len(parts.runs()) == STEPS_MAX
    assert not parts.advance(MINUTE_MS) and len(parts.runs()) == count
    parts = Parts()
    parts.put(every_ms=1000)
    assert parts.advance(250_000) and parts.runs() == []
    assert parts.state().skipped == STEPS_MAX
    parts.store()
    parts.schedules = parts.made()  # Also if it ends in between.
    while parts.advance(250_000):
        pass
    assert [planned_ms for planned_ms, _ in parts.runs()] == [*range(240_000, 250_001, 1000)]
    assert parts.state().skipped == 239


@pytest.mark.parametrize("behind", [1, STEPS_MAX + 50])
@pytest.mark.parametrize("catch_up", [CatchUp.ALL, CatchUp.LAST])
def test_the_backlog_of_some_does_not_hold_up_one_that_is_on_time(
    behind: int, catch_up: CatchUp
) -> None:
    """Each that is behind has a day of seconds to catch up with."""
    day_ms = 24 * 60 * MINUTE_MS
    parts = Parts()
    for number in range(behind):
        parts.put(name=f"behind{number}", every_ms=1000, catch_up=catch_up)
    parts.put(day_ms - MINUTE_MS, name="on-time")
    turns = 0
    while not any(row == "on-time" for row in run_names(parts)):
        assert parts.advance(day_ms)
        turns += 1
        assert turns <= 2 + 2 * behind // STEPS_MAX


def run_names(parts: Parts) -> list[str]:
    """The schedules whose runs stand in the open group."""
    group = parts.sequencer.group
    runs = [row for row in rows_of(group) if row["kind"] == RecordKind.RUN]
    payloads = [
        decode_payload(group.payload(int(row["seq"]))[0], "", 0, int(row["seq"])) for row in runs
    ]
    return [payload.run.schedule for payload in payloads if payload.run is not None]


def test_there_are_no_more_than_the_limit() -> None:
    parts = Parts(schedules_max=1)
    parts.put()
    with pytest.raises(OverloadedError, match="schedules_max"):
        parts.put(name="other")
    parts.put(every_ms=2000)


@given(st.sets(st.sampled_from("abcdefgh")), st.sets(st.sampled_from("abcdefgh")), st.data())
@settings(max_examples=50)
def test_pages_are_in_the_order_of_names_also_of_what_no_checkpoint_has(stored, fresh, data):
    parts = Parts()
    for name in stored:
        parts.put(name=name)
    parts.store()
    parts.schedules.prune(10_000)
    for name in fresh:
        parts.put(name=name, every_ms=7000)
    known = sorted(stored | fresh)
    gone = data.draw(st.sets(st.sampled_from(known)) if known else st.just(set()))
    for name in gone:
        parts.schedules.delete(name)
    expected = sorted((stored | fresh) - gone)
    most = data.draw(st.integers(1, 4))
    found: list[str] = []
    after: str | None = ""
    while after is not None:
        page, after = parts.schedules.page(after, most)
        assert len(page) <= most and (after is None or len(page) == most)
        found += [one.definition.name for one in page]
    assert found == expected


# ── what is not understood ─────────────────────────────────────────────────────────────────────


def stored(parts: Parts, name: str = "daily", **fields: Any) -> bytes:
    known = parts.schedules.get(name).definition
    return pack_schedule(msgspec.structs.replace(known, **fields))


FOREIGN: dict[str, Callable[[Parts], bytes]] = {
    "a zone that is missing": lambda parts: stored(parts, timezone="Sea/Atlantis"),
    "a field of a newer server": lambda parts: msgspec.msgpack.encode(
        [*msgspec.msgpack.decode(stored(parts)), {"flow": 1}]
    ),
    "a value of a newer server": lambda parts: stored(parts, catch_up=7),
    "another type": lambda parts: msgspec.msgpack.encode(
        [*msgspec.msgpack.decode(stored(parts))[:5], 17]
    ),
    "a payload that has rotted": lambda parts: stored(parts, payload=b"rotten"),
    "a subject that is lost": lambda parts: stored(parts, subject_id=99),
    "no definition at all": lambda parts: b"\xc1",
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_schedule_that_is_not_understood_stands_still_and_harms_nobody(kind: str) -> None:
    parts = Parts()
    parts.put(cron="* * * * *")
    parts.put(name="other")
    foreign = FOREIGN[kind](parts)
    parts.stored_as("daily", foreign)
    parts.look(START_MS + 5 * MINUTE_MS)
    assert [(word, name) for word, name, _ in parts.said] == [("schedule", "daily")]
    assert parts.schedules.not_understood == {"daily": parts.said[0][2]}
    assert {payload.run.schedule for payload in parts.payloads() if payload.run} == {"other"}
    shown, _ = parts.schedules.page("", 9)
    assert [(one.definition.name, bool(one.problem)) for one in shown] == [
        ("daily", True),
        ("other", False),
    ]
    with pytest.raises(ConflictError, match="not understood here"):
        parts.schedules.trigger("daily", START_MS)
    # It can be paused and resumed, and keeps its bytes.
    assert parts.schedules.pause("daily", START_MS)[0].state.is_paused
    paused = parts.schedules.get("daily")
    assert paused.problem and paused.state.is_paused
    parts.schedules.resume("daily", START_MS + 5 * MINUTE_MS)
    assert parts.catalog.get(Table.SCHEDULES, b"daily") == foreign
    assert not any(change.schedule for change in parts.changes("daily"))
    # A client that puts it replaces it, and a client that deletes it is rid of it.
    parts.put(5 * MINUTE_MS, cron="0 * * * *")
    assert not parts.schedules.get("daily").problem and not parts.schedules.not_understood
    parts.stored_as("daily", foreign)
    parts.look(START_MS + 5 * MINUTE_MS)
    parts.schedules.delete("daily")
    assert parts.schedules.find("daily") is None and not parts.schedules.not_understood


@pytest.mark.parametrize(("catch_up", "made"), [("all", 5), ("last", 1), ("none", 0)])
def test_a_schedule_goes_on_by_its_catch_up_when_it_is_understood_again(
    catch_up: str, made: int
) -> None:
    parts = Parts()
    parts.put(cron="* * * * *", catch_up=CatchUp[catch_up.upper()])
    understood = stored(parts)
    parts.stored_as("daily", stored(parts, timezone="Sea/Atlantis"))
    later_ms = (START_MS // MINUTE_MS + 5) * MINUTE_MS + 30_000
    parts.look(later_ms)
    assert not parts.runs()
    parts.stored_as("daily", understood)
    parts.look(later_ms)
    assert len(parts.runs()) == made and not parts.said
    assert parts.state().runs + parts.state().skipped == 5


def test_a_state_that_is_not_understood_is_changed_as_far_as_it_can_be_kept() -> None:
    parts = Parts()
    parts.put()
    newer = pack_state(parts.state(), b"newer")
    parts.stored_as("daily", None, newer)
    parts.look(START_MS + 5 * MINUTE_MS)
    assert not parts.runs() and parts.schedules.not_understood
    parts.schedules.pause("daily", START_MS)
    (change,) = parts.changes("daily")[-1:]
    assert change.state is not None and change.state.endswith(b"newer")
    assert unpack_state(change.state[:-5]).is_paused
    parts.stored_as("daily", None, b"short")
    with pytest.raises(ConflictError, match="put it again, or delete it"):
        parts.schedules.pause("daily", START_MS)
    parts.put(MINUTE_MS, payload=Payload(b"2", Content.JSON))
    assert parts.state().runs == 0 and not parts.schedules.get("daily").problem


# ── what changes while it waits ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "changed",
    [
        {"end_ms": START_MS + 90 * MINUTE_MS},
        {"start_ms": START_MS},
        {"timezone": "Europe/Berlin"},
        {"payload": Payload(b"2", Content.JSON)},
    ],
)
def test_a_change_of_anything_but_the_times_drops_nothing_that_waits(changed: Any) -> None:
    parts = Parts()
    fields = {"catch_up": CatchUp.ALL, "end_ms": START_MS + 60 * MINUTE_MS}
    parts.put(**fields)
    parts.schedules.pause("daily", START_MS)
    parts.put(5 * MINUTE_MS + 1, **{**fields, **changed})
    parts.schedules.resume("daily", START_MS + 5 * MINUTE_MS + 1)
    parts.look(START_MS + 5 * MINUTE_MS + 1)
    assert [planned for planned, _ in parts.runs()] == [n * MINUTE_MS for n in range(1, 6)]


def test_what_waits_on_the_clock_of_another_zone_is_run_by_that_clock() -> None:
    parts = Parts()
    parts.put(cron="0 9 * * *", timezone="Europe/Berlin")
    (planned_ms,) = [parts.state().next_ms]
    assert datetime.fromtimestamp(planned_ms / 1000, ZoneInfo("Europe/Berlin")).hour == 9
    late_ms = planned_ms + 3 * 24 * 60 * MINUTE_MS + 13 * 60 * MINUTE_MS
    parts.put(late_ms - START_MS, cron="0 9 * * *", timezone="Asia/Tokyo")
    parts.look(late_ms)
    state = parts.state()
    for one_ms in (state.last_planned_ms, state.next_ms):
        assert datetime.fromtimestamp(one_ms / 1000, ZoneInfo("Asia/Tokyo")).hour == 9
    assert state.runs == 1 and state.skipped == 3 and state.next_ms > late_ms


@pytest.mark.parametrize("cron", ["", "* * * * *"])
def test_what_waits_is_counted_where_it_is_to_run_at_other_times(cron: str) -> None:
    parts = Parts()
    parts.put(cron=cron)
    parts.schedules.pause("daily", START_MS)
    first_ms = parts.state().next_ms
    now_ms = first_ms + 4 * MINUTE_MS + 1
    parts.put(now_ms - START_MS, every_ms=7 * MINUTE_MS)
    assert (parts.state().skipped, parts.state().next_ms) == (5, now_ms + 7 * MINUTE_MS)


def test_one_that_has_ended_may_be_put_again_and_a_new_one_has_to_run() -> None:
    parts = Parts()
    fields = {"end_ms": START_MS + MINUTE_MS}
    parts.put(**fields)
    parts.look(START_MS + MINUTE_MS)
    before = parts.schedules.get("daily")
    assert before.state.next_ms == ENDED_MS and before.state.runs == 1
    assert not parts.put(9 * MINUTE_MS, **fields)
    assert parts.schedules.get("daily") == before
    for name in ("daily", "new"):
        with pytest.raises(InputError, match="no planned time") as caught:
            parts.put(9 * MINUTE_MS, name=name, **fields, jitter_ms=5)
        assert caught.value.pointer == "/end_at"
    with pytest.raises(InputError, match="no planned time"):
        preview(wanted(cron="0 0 1 1 *", end_ms=START_MS + 1), START_MS, 5)
    assert parts.put(9 * MINUTE_MS, end_ms=START_MS + 99 * MINUTE_MS) is False
    assert parts.state().next_ms == START_MS + 10 * MINUTE_MS


# ── zones and clocks ───────────────────────────────────────────────────────────────────────────


def test_the_same_reading_is_run_once_when_the_rules_of_a_zone_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = Parts()
    parts.put(cron="0 * * * *", timezone="Europe/Berlin", catch_up=CatchUp.ALL)
    parts.look(hour_ms := parts.state().next_ms)
    assert parts.state().runs == 1
    # The clock of Berlin goes an hour ahead: what it shows next has passed.
    monkeypatch.setattr(zones, "zone_of", lambda name: ZoneInfo("Europe/Helsinki"))
    monkeypatch.setattr(recurrence, "zone_of", lambda name: ZoneInfo("Europe/Helsinki"))
    forget_zones()
    parts.schedules.look_again()
    parts.look(hour_ms + 1)
    state = parts.state()
    assert (state.runs, state.last_planned_ms) == (2, hour_ms)
    assert state.next_ms == hour_ms + 60 * MINUTE_MS
    # And back: the clock shows again what was run.
    monkeypatch.undo()
    forget_zones()
    parts.schedules.look_again()
    parts.look(hour_ms + 60 * MINUTE_MS)
    assert parts.state().runs == 2 and parts.state().next_ms == hour_ms + 120 * MINUTE_MS
    forget_zones()


class OneClock:
    """A schedule on a clock that is set, and what it has made."""

    def __init__(self, catch_up: CatchUp) -> None:
        self.parts = Parts()
        self.parts.put(catch_up=catch_up)
        self.now_ms = START_MS
        self.made: set[int] = set()
        self.fresh: list[int] = []
        publish_run = self.parts.publishing.publish_run

        def published(subject_id: int, payload: Payload, due_ms: int) -> Any:
            assert payload.run is not None
            self.fresh.append(unpack_state(payload.run.state).last_planned_ms - START_MS)
            return publish_run(subject_id, payload, due_ms)

        self.parts.publishing.publish_run = published  # type: ignore[method-assign]

    def pass_by(self, by_ms: int) -> None:
        """Time passes, as it does while a server runs."""
        end_ms = self.now_ms + by_ms
        while self.now_ms < end_ms:
            self.now_ms = min(end_ms, max(self.now_ms + 1, self.parts.state().next_ms))
            self.look()
            self.count()

    def set(self, by_ms: int) -> None:
        self.now_ms += by_ms
        before = self.parts.state()
        self.parts.schedules.look_again()
        self.look()
        if before.passed_from_ms and self.parts.state().passed_from_ms not in (
            0,
            before.passed_from_ms,
        ):
            # It was set back within what was run before it was set back the first time.
            again_ms = before.passed_from_ms - START_MS
            self.made -= {one for one in self.made if one >= again_ms}
        self.count()

    def count(self) -> None:
        """Each planned time that was run is a new one."""
        assert not self.made & set(self.fresh) and len(set(self.fresh)) == len(self.fresh)
        self.made |= set(self.fresh)
        self.fresh.clear()

    def look(self) -> None:
        self.parts.look(self.now_ms)
        assert set_back(*self.parts.schedules.get("daily")[:2], self.now_ms) is None


@settings(max_examples=20)
@given(
    st.sampled_from([CatchUp.LAST, CatchUp.NONE, CatchUp.ALL]),
    st.lists(
        st.tuples(st.booleans(), st.integers(-30, 30), st.integers(0, 9)), min_size=1, max_size=5
    ),
)
def test_each_planned_time_is_run_once_however_the_clock_is_set(
    catch_up: CatchUp, steps: list[tuple[bool, int, int]]
) -> None:
    clock = OneClock(catch_up)
    for is_restart, set_min, pass_min in steps:
        if is_restart:
            clock.parts.stored_as("daily", None)
        clock.set(set_min * MINUTE_MS + 7)
        clock.pass_by(pass_min * MINUTE_MS)


def test_what_was_run_between_two_gaps_is_not_run_again() -> None:
    clock = OneClock(CatchUp.LAST)
    clock.pass_by(2 * MINUTE_MS)
    for set_min in (-5, 10, -8):
        clock.set(set_min * MINUTE_MS)
    clock.pass_by(9 * MINUTE_MS)
    assert {MINUTE_MS, 2 * MINUTE_MS} <= clock.made


def test_the_same_put_plans_again_when_the_clock_was_set_back() -> None:
    parts = Parts()
    year_ms = 365 * 24 * 60 * MINUTE_MS
    parts.put(year_ms)
    before = parts.schedules.get("daily")
    assert not parts.put(0)
    after = parts.schedules.get("daily")
    assert before.state.next_ms == START_MS + year_ms + MINUTE_MS
    assert START_MS < after.state.next_ms <= START_MS + MINUTE_MS and after != before


def test_a_start_looks_at_schedules_in_turns_the_next_ones_first() -> None:
    parts = Parts()
    for number in range(STEPS_MAX + 20):
        parts.put(name=f"s{number}", every_ms=MINUTE_MS * (number + 1))
    parts.store()
    parts.schedules = parts.made()
    assert parts.advance(MINUTE_MS)  # there is more
    while parts.advance(MINUTE_MS):
        pass
    assert parts.schedules.wait_ms(START_MS + MINUTE_MS) == MINUTE_MS
    assert parts.runs() == [(MINUTE_MS, MINUTE_MS)]
