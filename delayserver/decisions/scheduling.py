"""Schedules: what is published again and again, each planned time once.

    PUT ──▶ definition and state ──▶ a record SCHEDULE, durable before it is answered
    a planned time has come ──▶ a record RUN: the message, and the state behind it
                            └─▶ left out (missed, or another is under way): SCHEDULE, the state

A run is one record, which is the message and the step of its schedule at once: after a crash either
both have happened or neither, so no run is skipped and none is made twice. The next planned time is
counted from the one that was run, never from the clock, which may be late, or set.

What waits is a row of a `DueTable`, and nobody wakes for it but for the earliest of all. Definition
and state stay packed, in the catalog or in an overlay until a checkpoint has them there.

A run that comes more than MISSED_MS late was missed: `catch_up` decides. So a quick restart, or
another node that takes over, leaves nothing out, whatever it says. How many planned times are
looked at in one turn of the event loop is bounded: a schedule of every second that was away for a
month catches up, or leaves out, between all else.

Cost: 80 µs per run, half of it for the next planned time; 110 bytes of memory per schedule; a start
reads all states, 100,000 in 0.2 s. Threads: belongs to the event loop.
"""

from collections.abc import Callable
from typing import Final

import msgspec

from delayserver.config import Settings
from delayserver.decisions.defining import Defining, DefinitionKind
from delayserver.decisions.group import Group
from delayserver.decisions.groups import Groups
from delayserver.decisions.messages import Messages, Versions
from delayserver.decisions.publishing import Accepted, Publishing
from delayserver.decisions.sequencer import Sequencer
from delayserver.errors import DiskReserveError, OverloadedError, StoppingError
from delayserver.records.message import (
    PLANNED_HEADER,
    SCHEDULE_HEADER,
    Payload,
    ScheduledRun,
    State,
    decode_payload,
    encode_payload,
)
from delayserver.records.named import Known
from delayserver.records.schedules import (
    ENDED_MS,
    CatchUp,
    KnownSchedule,
    Overlap,
    Schedule,
    ScheduleChange,
    ScheduleState,
    next_times,
    pack_schedule,
    pack_schedule_change,
    unpack_schedule,
    unpack_state,
    upcoming,
)
from delayserver.timers.due_table import NEVER_MS, DueTable
from delayserver.times import format_time
from storage.catalog import Catalog, Table
from storage.rows import RecordKind

MISSED_MS: Final = 10_000
"""A run that begins later than this behind its planned time was missed."""
RETRY_MS: Final = 1000
"""What could not be recorded (the disk is full) is tried again after this."""
STEPS_MAX: Final = 100
"""Planned times that are looked at in one turn of the event loop: some 10 ms."""


class WantedSchedule(msgspec.Struct, frozen=True):
    """A schedule that somebody wants, checked."""

    name: str
    subject: str
    payload: Payload
    cron: str
    """Empty: `every_ms` says when it runs."""
    every_ms: int
    timezone: str
    jitter_ms: int = 0
    catch_up: CatchUp = CatchUp.LAST
    overlap: Overlap = Overlap.ALLOW
    start_ms: int | None = None
    end_ms: int | None = None
    runs_max: int | None = None

    def made(self, subject_id: int, sealed: bytes, base_ms: int) -> Schedule:
        """Its definition. `base_ms`: what it is in step with, where it has no start."""
        return Schedule(
            self.name,
            subject_id,
            sealed,
            self.cron,
            self.every_ms,
            self.timezone,
            (base_ms if self.start_ms is None else self.start_ms) if self.every_ms else 0,
            self.jitter_ms,
            self.catch_up,
            self.overlap,
            self.start_ms,
            self.end_ms,
            self.runs_max,
        )


SCHEDULE: Final = DefinitionKind(
    "schedule",
    RecordKind.SCHEDULE,
    Table.SCHEDULES,
    Table.SCHEDULE_STATES,
    pack_schedule,
    unpack_schedule,
    ScheduleState.pack,
    unpack_state,
    lambda *change: pack_schedule_change(ScheduleChange(*change)),
)


class Scheduling(Defining[WantedSchedule, Schedule, ScheduleState]):
    """All schedules."""

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog,
        sequencer: Sequencer,
        groups: Groups,
        messages: Messages,
        publishing: Publishing,
        *,
        stopwatch: Callable[[], int],
        random: Callable[[], float],
    ) -> None:
        """`random`: numbers from 0 to before 1, for the jitter."""
        super().__init__(SCHEDULE, catalog, sequencer, groups, settings.schedules_max)
        self._messages = messages
        self._publishing = publishing
        self._stopwatch = stopwatch
        self._random = random
        self._table = DueTable()
        self._held_until_ms = stopwatch()
        """Nothing is run before the stopwatch shows this."""
        self._next_row = 0
        """Of the schedules that are due, whose turn is next."""
        self._is_started = False
        self.runs_total = 0
        self.skipped_total = 0

    def __len__(self) -> int:
        return len(self._table)

    def start(self) -> None:
        """Take over the schedules of earlier processes."""
        if self._is_started:
            return
        self._is_started = True
        pairs = list(self._catalog.scan(Table.SCHEDULE_STATES))
        dues_ms, are_paused = next_times(value for _, value in pairs)
        dues_ms[are_paused | (dues_ms == ENDED_MS)] = NEVER_MS
        self._table.load([key.decode() for key, _ in pairs], dues_ms)

    # ── what clients do ────────────────────────────────────────────────────────────────────────

    def _define(
        self, wanted: WantedSchedule, before: KnownSchedule | None, now_ms: int
    ) -> KnownSchedule:
        """One that is changed keeps its counts, and goes on in its step unless it is to run at
        other times."""
        sealed = encode_payload(wanted.payload)
        subject_id = self._publishing.admit(wanted.subject, len(sealed))
        seq = self._sequencer.next_seq
        if before is None:
            schedule = wanted.made(subject_id, sealed, now_ms)
            state = ScheduleState(seq, seq, now_ms, schedule.following_ms(now_ms))
            return Known(schedule, state)
        is_in_step = before.definition.every_ms == wanted.every_ms
        base_ms = before.definition.base_ms if is_in_step else now_ms
        schedule = wanted.made(subject_id, sealed, base_ms)
        state = msgspec.structs.replace(
            before.state,
            seq=seq,
            version=seq,
            changed_ms=now_ms,
            next_ms=_next_of_changed(before, schedule, now_ms),
        )
        return Known(schedule, state)

    def find(self, name: str) -> KnownSchedule | None:
        """What is under a name, if there is one."""
        # Somebody may change one before time has passed for the first time: it has a row by then.
        self.start()
        return super().find(name)

    def pause(self, name: str, *, expected: Versions = None) -> tuple[KnownSchedule, Group | None]:
        """Run it no more until it is resumed. Raises as `delete`."""
        return self._change(name, expected, {"is_paused": True})

    def resume(
        self, name: str, now_ms: int, *, expected: Versions = None
    ) -> tuple[KnownSchedule, Group | None]:
        """Run it again; what passed meanwhile was missed. Raises as `delete`."""
        return self._change(name, expected, {"is_paused": False}, resumed_ms=now_ms)

    def trigger(self, name: str, now_ms: int) -> tuple[Accepted, str]:
        """Run it now, whatever its definition and its state say: a person's decision. It counts as
        a run, and leaves the next planned time as it is. Returns the message and its key.

        Raises NotFoundError, OverloadedError, DiskReserveError, StoppingError."""
        known = self.get(name)
        self._admit()
        self._groups.admit(len(known.definition.payload))
        planned_ms = now_ms
        while self._is_taken(known.definition, planned_ms):
            planned_ms += 1
        accepted, state = self._run(known, planned_ms, known.state.next_ms, due_ms=now_ms)
        self._table.put(name, _due_ms(state))
        return accepted, run_key(name, planned_ms)

    # ── time ───────────────────────────────────────────────────────────────────────────────────

    def run_due(self, now_ms: int) -> bool:
        """Run what is due, as much as fits into a turn of the event loop; True: there is more."""
        self.start()
        if self._stopwatch() < self._held_until_ms or self._table.next_ms() > now_ms:
            return False
        steps = 0
        rows = self._table.due(now_ms, STEPS_MAX, self._next_row)
        # A schedule that has a month to catch up with does not hold up one that is on time.
        share = max(1, STEPS_MAX // len(rows))
        for row in rows:
            self._next_row = row + 1
            try:
                self._admit()
            except (OverloadedError, DiskReserveError, StoppingError):
                # What is stopping leaves them to the next process.
                self._held_until_ms = self._stopwatch() + RETRY_MS
                return False
            steps += self._step(row, now_ms, share)
            if steps >= STEPS_MAX:
                break
        self._groups.wake()
        return self._table.next_ms() <= now_ms

    def wait_ms(self, now_ms: int) -> int:
        """How long to wait for the next call of `run_due` at most."""
        return max(self._table.next_ms() - now_ms, self._held_until_ms - self._stopwatch())

    def _admit(self) -> None:
        self._publishing.refuse_when_disk_is_low()
        self._groups.admit(0)

    def _step(self, row: int, now_ms: int, steps_max: int) -> int:
        """Run the schedule of a row, which is due, once, or leave out what is to be left out.
        Returns how many planned times were looked at."""
        name = self._table.name(row)
        known = self.find(name)
        assert known is not None, name
        schedule, state = known.definition, known.state
        missed_before_ms = max(now_ms - MISSED_MS, state.resumed_ms)
        is_overlapping = schedule.overlap == Overlap.SKIP and self._is_under_way(state)
        planned_ms, skipped = state.next_ms, 0
        while True:
            following_ms = schedule.following_ms(planned_ms)
            is_newest = following_ms == ENDED_MS or following_ms > now_ms
            is_left_out = planned_ms < missed_before_ms and (
                schedule.catch_up == CatchUp.NONE
                or (schedule.catch_up == CatchUp.LAST and not is_newest)
            )
            if not (is_left_out or is_overlapping):
                late = Known(schedule, _skipping(state, skipped))
                jitter_ms = int(self._random() * (schedule.jitter_ms + 1))
                due_ms = max(now_ms, planned_ms + jitter_ms)
                _, state = self._run(late, planned_ms, following_ms, due_ms=due_ms)
                break
            skipped += 1
            if is_newest or skipped >= steps_max:
                seq = self._sequencer.next_seq
                state = msgspec.structs.replace(
                    _skipping(state, skipped), seq=seq, next_ms=following_ms
                )
                self._record(Known(schedule, state))
                break
            planned_ms = following_ms
        self._table.set(row, _due_ms(state))
        self.skipped_total += skipped
        return skipped + 1

    def _is_under_way(self, state: ScheduleState) -> bool:
        """Whether the message of the last run is not settled."""
        if not state.last_seq:
            return False
        located = self._messages.locate(state.last_seq, state.last_due_ms)
        return located.state in (State.SCHEDULED, State.DELIVERING)

    def _run(
        self,
        known: KnownSchedule,
        planned_ms: int,
        following_ms: int,
        *,
        due_ms: int,
    ) -> tuple[Accepted, ScheduleState]:
        """Put the record of a run into the open group: the message, and the state behind it, which
        are returned."""
        schedule, state = known.definition, known.state
        seq, runs = self._sequencer.next_seq, state.runs + 1
        is_over = schedule.runs_max is not None and runs >= schedule.runs_max
        state = msgspec.structs.replace(
            state,
            seq=seq,
            next_ms=ENDED_MS if is_over else following_ms,
            last_planned_ms=planned_ms,
            last_seq=seq,
            last_due_ms=due_ms,
            runs=runs,
        )
        payload = decode_payload(schedule.payload, "catalog", 0, seq)
        planned = format_time(planned_ms)
        headers = {SCHEDULE_HEADER: schedule.name, PLANNED_HEADER: planned}
        message = msgspec.structs.replace(
            payload,
            key=run_key(schedule.name, planned_ms),
            headers={**headers, **(payload.headers or {})},
            run=ScheduledRun(schedule.name, state.pack()),
        )
        accepted = self._publishing.publish_run(schedule.subject_id, message, due_ms)
        assert accepted.seq == seq
        self._show(seq, schedule.name, None, state.pack())
        self.runs_total += 1
        return accepted, state

    def _is_taken(self, schedule: Schedule, planned_ms: int) -> bool:
        """Whether the key for that time is the one of another run, or of one that comes."""
        if schedule.following_ms(planned_ms - 1) == planned_ms:
            return True
        key = run_key(schedule.name, planned_ms)
        key_hash = self._messages.key_hash(schedule.subject_id, key)
        return self._sequencer.key(key_hash) is not None

    def _stands(self, name: str, known: KnownSchedule | None) -> None:
        if known is None:
            self._table.remove(name)
        else:
            self._table.put(name, _due_ms(known.state))

    def _look_again(self, name: str) -> None:
        self._held_until_ms = self._stopwatch() + RETRY_MS
        super()._look_again(name)


def run_key(name: str, planned_ms: int) -> str:
    """The key of the message of a run."""
    return f"{name}@{format_time(planned_ms)}"


def _due_ms(state: ScheduleState) -> int:
    """When there is something to do for a schedule."""
    is_waiting = state.next_ms != ENDED_MS and not state.is_paused
    return state.next_ms if is_waiting else NEVER_MS


def _skipping(state: ScheduleState, skipped: int) -> ScheduleState:
    return msgspec.structs.replace(state, skipped=state.skipped + skipped)


def _next_of_changed(before: KnownSchedule, schedule: Schedule, now_ms: int) -> int:
    """When a schedule runs next that was changed: as before, unless it runs at other times now."""
    is_over = schedule.runs_max is not None and before.state.runs >= schedule.runs_max
    if is_over:
        return ENDED_MS
    names = ("cron", "every_ms", "timezone", "base_ms", "start_ms", "end_ms")
    is_as_before = all(getattr(schedule, one) == getattr(before.definition, one) for one in names)
    if is_as_before and before.state.next_ms != ENDED_MS:
        return before.state.next_ms
    return schedule.following_ms(now_ms)


def preview(wanted: WantedSchedule, now_ms: int, most: int) -> list[int]:
    """The first planned times of a schedule that is put now. Raises InputError."""
    schedule = wanted.made(0, b"", now_ms)
    state = ScheduleState(0, 0, now_ms, schedule.following_ms(now_ms))
    return list(upcoming(schedule, state, now_ms, most))
