"""Schedules: messages that are published again and again, each planned time once.

    PUT ──▶ definition and state ──▶ a record SCHEDULE, durable before it is answered
    a planned time has come ──▶ a record RUN: the message, and the state behind it
                            └─▶ left out (missed, or another is under way): SCHEDULE, the state

A run is one record, which is the message and the step of its schedule at once. After a crash either
both have happened or neither, so no run is skipped and none is made twice. The next planned time is
counted from the one that was run, never from the clock, which may be late, or set.

A waiting schedule is a row of a `DueTable`, and only the earliest of all has a timer. Definition
and state stay packed, in the catalog or in an overlay until a checkpoint has them there.

A run that comes more than MISSED_MS late was missed: `catch_up` decides. So a quick restart, or
another node that takes over, leaves nothing out, whatever the setting. The number of planned times
that are looked at in one turn of the event loop is bounded: a schedule of every second that was
away for a month catches up, or leaves out, between all else.

At the start, when the files of zones have changed and when the clock was set, each schedule is
looked at once (`look_again`). The look finds whether it is understood here, when the clock on the
wall shows its next planned time, and whether planned times lie before it that have not been run.
Until then its row is due, the earliest rows before the others, and so looks are bounded as runs
are.

Cost: 80 µs per run, half of it for the next planned time; 110 bytes of memory per schedule; a start
reads all states, 100,000 in 0.2 s, and a look takes 20 µs. Threads: belongs to the event loop.
"""

from typing import TYPE_CHECKING, Final

import msgspec

from delayserver.decisions.defining import Defining, DefinitionKind
from delayserver.decisions.group import Group
from delayserver.decisions.messages import Versions
from delayserver.decisions.publishing import Accepted
from delayserver.errors import (
    ConflictError,
    DiskReserveError,
    InputError,
    OverloadedError,
    StoppingError,
)
from delayserver.parts.part import Core
from delayserver.parts.schedules.records import (
    ENDED,
    ENDED_MS,
    SCHEDULES,
    CatchUp,
    KnownSchedule,
    Overlap,
    Schedule,
    ScheduleChange,
    ScheduleState,
    as_zones_are,
    behind,
    forget_zones,
    next_times,
    pack_schedule,
    pack_schedule_change,
    pack_state,
    read_state,
    set_back,
    stepped,
    upcoming,
)
from delayserver.parts.schedules.recurrence import Planned
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
from delayserver.timers.due_table import NEVER_MS, DueTable
from delayserver.times import format_time
from storage.catalog import Table
from storage.rows import RecordKind

if TYPE_CHECKING:
    from delayserver.server.metrics import Metrics

MISSED_MS: Final = 10_000
"""A run that begins later than this behind its planned time was missed."""
RETRY_MS: Final = 1000
"""A record that could not be written (the disk is full) is tried again after this."""
STEPS_MAX: Final = 100
"""Planned times that are looked at in one turn of the event loop: some 10 ms."""
GIVEN_UP_MAX: Final = 1000
"""Planned times that a change gives up are counted up to this."""


class WantedSchedule(msgspec.Struct, frozen=True):
    """A schedule that a client wants, checked."""

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
        """Its definition. `base_ms`: the moment to be in step with, if it has no start."""
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
    SCHEDULES,
    pack_state,
    read_state,
    lambda *change: pack_schedule_change(ScheduleChange(*change)),
)


class Scheduling(Defining[WantedSchedule, Schedule, ScheduleState]):
    """All schedules."""

    def __init__(self, core: Core) -> None:
        super().__init__(SCHEDULE, core, core.settings.schedules_max)
        self._messages = core.messages
        self._stopwatch = core.timeouts.stopwatch
        self._random = core.random
        self._table = DueTable()
        self._held_until_ms = self._stopwatch()
        """Nothing is run before the stopwatch shows this."""
        self._next_row = 0
        """The row of `_table` with which the next turn begins, among the schedules that are due."""
        self._is_started = False
        self.runs_total = 0
        self.skipped_total = 0

    def __len__(self) -> int:
        return len(self._table)

    def add_metrics(self, metrics: "Metrics") -> None:
        """Add the counters and gauges of schedules."""
        metrics.counter("schedule_runs", "Runs of schedules", lambda: self.runs_total)
        metrics.counter(
            "schedule_runs_skipped", "Runs that were left out", lambda: self.skipped_total
        )
        metrics.gauge("schedules", "Schedules", self.__len__)

    def start(self) -> None:
        """Take over the schedules of earlier processes."""
        if self._is_started:
            return
        self._is_started = True
        pairs = list(self._catalog.scan(Table.SCHEDULE_STATES))
        self._table.load([key.decode() for key, _ in pairs], next_times(one for _, one in pairs))
        self._table.hurry()

    def look_again(self) -> None:
        """The clock was set, or the files of zones have changed: look at each schedule once."""
        forget_zones()
        self.start()
        self._table.hurry()

    # ── requests of clients ────────────────────────────────────────────────────────────────────

    def _define(
        self, wanted: WantedSchedule, before: KnownSchedule | None, now_ms: int
    ) -> KnownSchedule:
        """One that is changed keeps its counts, and goes on in its step unless it is to run at
        other times."""
        sealed = encode_payload(wanted.payload)
        subject_id = self._publishing.admit(wanted.subject, len(sealed))
        seq = self._sequencer.next_seq
        if before is None or before.tail is None:
            schedule = wanted.made(subject_id, sealed, now_ms)
            planned = schedule.following(now_ms)
            state = ScheduleState(seq, seq, now_ms, ENDED_MS, since_ms=planned.time_ms)
            return Known(schedule, state.at(planned))
        is_in_step = before.definition.every_ms == wanted.every_ms
        base_ms = before.definition.base_ms if is_in_step else now_ms
        schedule = wanted.made(subject_id, sealed, base_ms)
        state = msgspec.structs.replace(
            _changed(before, schedule, now_ms), seq=seq, version=seq, changed_ms=now_ms
        )
        return Known(schedule, state)

    def _check_new(self, known: KnownSchedule, now_ms: int) -> None:
        _check_ends(known.definition, known.state)

    def _put_again(self, known: KnownSchedule, now_ms: int) -> ScheduleState | None:
        """It plans again: the clock may have been set since."""
        state = set_back(known.definition, known.state, now_ms)
        if state is None:
            return None
        seq = self._sequencer.next_seq
        return msgspec.structs.replace(state, seq=seq, version=seq, changed_ms=now_ms)

    def find(self, name: str) -> KnownSchedule | None:
        """The schedule under a name, if there is one."""
        # A client may change one before time has passed for the first time: it has a row by then.
        self.start()
        return super().find(name)

    def _understood(self, name: str, definition: bytes, state: bytes) -> KnownSchedule:
        known = super()._understood(name, definition, state)
        if known.problem:
            return known
        return known._replace(state=as_zones_are(known.definition, known.state))

    def pause(
        self, name: str, now_ms: int, *, expected: Versions = None
    ) -> tuple[KnownSchedule, Group | None]:
        """Run it no more until it is resumed. Raises as `delete`."""
        return self._change(name, expected, {"is_paused": True})

    def resume(
        self, name: str, now_ms: int, *, expected: Versions = None
    ) -> tuple[KnownSchedule, Group | None]:
        """Run it again; times that passed meanwhile were missed. Raises as `delete`."""
        return self._change(name, expected, {"is_paused": False}, resumed_ms=now_ms)

    def trigger(self, name: str, now_ms: int) -> tuple[Accepted, str]:
        """Run it now, whatever its definition and its state say: a person's decision. It counts as
        a run, and leaves the next planned time as it is. Returns the message and its key.

        Raises NotFoundError, ConflictError, OverloadedError, DiskReserveError, StoppingError."""
        known = self.get(name)
        if known.problem:
            raise ConflictError(
                f"the schedule {name!r} is not understood here ({known.problem}): put it again"
            )
        self._admit()
        self._groups.admit(len(known.definition.payload))
        planned_ms = now_ms
        while self._is_taken(known.definition, planned_ms):
            planned_ms += 1
        accepted, state = self._run(known, planned_ms, known.state.planned, due_ms=now_ms)
        self._table.put(name, _due_ms(known._replace(state=state)))
        return accepted, run_key(name, planned_ms)

    # ── time ───────────────────────────────────────────────────────────────────────────────────

    def run_due(self, now_ms: int) -> bool:
        """Run all due schedules that fit into a turn of the event loop; True: there are more."""
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
                # A server that is stopping leaves them to the next process.
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

    def on_stand_still(self, stood_ms: int) -> None:
        """Planned times are moments of the clock: nothing to do."""

    def _admit(self) -> None:
        self._publishing.refuse_when_disk_is_low()
        self._groups.admit(0)

    def _step(self, row: int, now_ms: int, steps_max: int) -> int:
        """Run the schedule of a row, which is due, once, or leave out the times that must be left
        out. Returns how many planned times were looked at."""
        name = self._table.name(row)
        known = self.find(name)
        assert known is not None, name
        if known.problem or self._table.is_hurried(row):
            self._look(row, name, known, now_ms)
            return 1
        schedule, state = known.definition, known.state
        if state.next_ms > now_ms:
            self._table.set(row, state.next_ms)  # the rules of its zone have changed
            return 1
        missed_before_ms = max(now_ms - MISSED_MS, state.resumed_ms)
        is_overlapping = schedule.overlap == Overlap.SKIP and self._is_under_way(state)
        planned_ms, skipped = state.next_ms, 0
        while True:
            following = behind(schedule, state, planned_ms)
            is_newest = following.time_ms == ENDED_MS or following.time_ms > now_ms
            is_left_out = planned_ms < missed_before_ms and (
                schedule.catch_up == CatchUp.NONE
                or (schedule.catch_up == CatchUp.LAST and not is_newest)
            )
            if not (is_left_out or is_overlapping):
                late = known._replace(state=_skipping(state, skipped))
                jitter_ms = int(self._random() * (schedule.jitter_ms + 1))
                due_ms = max(now_ms, planned_ms + jitter_ms)
                _, state = self._run(late, planned_ms, following, due_ms=due_ms)
                break
            skipped += 1
            if is_left_out:
                state = _left_out(state, planned_ms, following)
            if is_newest or skipped >= steps_max:
                seq = self._sequencer.next_seq
                state = msgspec.structs.replace(
                    stepped(_skipping(state, skipped), following), seq=seq
                )
                self._record(known._replace(state=state))
                break
            planned_ms = following.time_ms
        self._table.set(row, _due_ms(known._replace(state=state)))
        self.skipped_total += skipped
        return skipped + 1

    def _look(self, row: int, name: str, known: KnownSchedule, now_ms: int) -> None:
        """Whether a schedule is understood, and where it goes on if the clock was set back."""
        self._note(name, known)
        state = None if known.problem else set_back(known.definition, known.state, now_ms)
        if state is not None:
            state = msgspec.structs.replace(state, seq=self._sequencer.next_seq)
            known = known._replace(state=state)
            self._record(known)
        self._table.set(row, _due_ms(known))

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
        following: Planned,
        *,
        due_ms: int,
    ) -> tuple[Accepted, ScheduleState]:
        """Put the record of a run into the open group: the message, and the state behind it, which
        are returned."""
        schedule, state = known.definition, known.state
        seq, runs = self._sequencer.next_seq, state.runs + 1
        state = msgspec.structs.replace(
            stepped(state, following),
            seq=seq,
            last_planned_ms=planned_ms,
            last_seq=seq,
            last_due_ms=due_ms,
            runs=runs,
        )
        if _is_over(schedule, state):
            state = state.at(ENDED)
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
            self._table.put(name, _due_ms(known))

    def _look_again(self, name: str) -> None:
        self._held_until_ms = self._stopwatch() + RETRY_MS
        super()._look_again(name)


def run_key(name: str, planned_ms: int) -> str:
    """The key of the message of a run."""
    return f"{name}@{format_time(planned_ms)}"


def _due_ms(known: KnownSchedule) -> int:
    """When there is something to do for a schedule."""
    state = known.state
    is_waiting = state.next_ms != ENDED_MS and not state.is_paused and not known.problem
    return state.next_ms if is_waiting else NEVER_MS


def _skipping(state: ScheduleState, skipped: int) -> ScheduleState:
    return msgspec.structs.replace(state, skipped=state.skipped + skipped)


def _left_out(state: ScheduleState, planned_ms: int, following: Planned) -> ScheduleState:
    """The state where a planned time has passed without a run: nothing since is without a gap."""
    next_ms = planned_ms + 1 if following.time_ms == ENDED_MS else following.time_ms
    left_from_ms = state.left_from_ms
    if planned_ms < state.passed_from_ms <= next_ms:
        left_from_ms = next_ms  # between them stand the runs before the clock was set back
    elif state.since_ms != planned_ms:
        left_from_ms = planned_ms
    return msgspec.structs.replace(state, left_from_ms=left_from_ms, since_ms=next_ms)


def _is_over(schedule: Schedule, state: ScheduleState) -> bool:
    """Whether it has made all its runs."""
    return schedule.runs_max is not None and state.runs >= schedule.runs_max


def _changed(before: KnownSchedule, schedule: Schedule, now_ms: int) -> ScheduleState:
    """The state of a schedule after a change of its definition.

    It goes on as before where the new definition has that planned time, too. If only its zone, its
    start or its end was changed, times that waited to be caught up were missed: it goes on from
    there. If its times have changed, it goes on from the clock, and the waiting times are counted
    as left out."""
    state = before.state
    if _is_over(schedule, state):
        return state.at(ENDED)
    anew = msgspec.structs.replace(state, left_from_ms=0, passed_from_ms=0, passed_until_ms=0)
    waits_ms = state.next_ms
    if waits_ms != ENDED_MS and schedule.runs_when(before.definition):
        # The time at which the clock on the wall of the new zone shows the waiting reading.
        same = schedule.following(schedule.recurrence.moment_ms(state.planned) - 1)
        if same.time_ms == waits_ms:
            return state.at(same)
        if waits_ms <= now_ms:
            return msgspec.structs.replace(anew.at(same), since_ms=same.time_ms)
    elif ENDED_MS < waits_ms <= now_ms and not before.problem:
        through_ms = min(now_ms, before.definition.end_ms or now_ms)
        given_up = before.definition.recurrence.count(waits_ms, through_ms, GIVEN_UP_MAX)
        anew = _skipping(anew, given_up)
    if (last_ms := state.last_planned_ms) > now_ms:
        # The clock was set back behind the last run, which the new definition may plan, too.
        until_ms = schedule.following(last_ms).time_ms
        anew = msgspec.structs.replace(anew, passed_from_ms=last_ms, passed_until_ms=until_ms)
    planned = behind(schedule, anew, now_ms)
    return msgspec.structs.replace(anew.at(planned), since_ms=planned.time_ms)


def _check_ends(schedule: Schedule, state: ScheduleState) -> None:
    """Raises InputError where a schedule that is put now has no planned time."""
    if state.next_ms == ENDED_MS and not _is_over(schedule, state):
        raise InputError(
            "there is no planned time between now and its end, so it would never run",
            "/end_at" if schedule.end_ms is not None else "/cron",
        )


def preview(wanted: WantedSchedule, now_ms: int, most: int) -> list[int]:
    """The first planned times of a schedule that is put now. Raises InputError: there are none."""
    schedule = wanted.made(0, b"", now_ms)
    state = ScheduleState(0, 0, now_ms, schedule.following_ms(now_ms))
    _check_ends(schedule, state)
    return list(upcoming(schedule, state, now_ms, most))
