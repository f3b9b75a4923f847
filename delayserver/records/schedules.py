"""Schedules: what publishes again and again, and how far it is.

    Schedule        what somebody has put: the message, when it runs, what becomes of late runs
    ScheduleState   where it stands: the next run, the last one, counts, whether it is paused

Both are kept packed, and decoded when they are used. The state is bytes of one length, since a
start reads the next run of all of them; it is in the payload of each run
(`records.message.ScheduledRun`), so that a run and the step of its schedule are one record.

Cost: 1 µs to decode, 30 µs for the next planned time of a cron expression.
Threads: immutable values, pure functions.
"""

import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum
from functools import lru_cache
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from delayserver.records.named import Known, NamedDefinition, NamedState
from delayserver.records.recurrence import Cron, Every, Recurrence

ENDED_MS: Final = 0
"""In the place of a planned time: there is no next one."""


class CatchUp(IntEnum):
    """What becomes of planned times that passed while nobody could run them."""

    LAST = 0
    """The last of them is run, once."""
    NONE = 1
    ALL = 2


class Overlap(IntEnum):
    """What becomes of a run while the message of the one before is not settled."""

    ALLOW = 0
    SKIP = 1
    """It is left out."""


class Schedule(NamedDefinition, array_like=True, frozen=True):
    """A value of the table SCHEDULES (MessagePack)."""

    payload: bytes
    """The sealed payload of each message, without key."""
    cron: str
    """Empty: it runs every so often."""
    every_ms: int
    """0: it runs as `cron` says."""
    timezone: str
    base_ms: int
    """With `every_ms`: what its runs are in step with."""
    jitter_ms: int = 0
    catch_up: int = CatchUp.LAST
    overlap: int = Overlap.ALLOW
    start_ms: int | None = None
    end_ms: int | None = None
    runs_max: int | None = None

    @property
    def recurrence(self) -> Recurrence:
        """When it runs, start and end left aside. Raises InputError."""
        return _recurrence(self.cron, self.timezone, self.every_ms, self.base_ms)

    def following_ms(self, time_ms: int) -> int:
        """The first planned time later than that; ENDED_MS: there is none. Raises InputError."""
        if self.start_ms is not None:
            time_ms = max(time_ms, self.start_ms - 1)
        found = self.recurrence.after(time_ms)
        if found is None or (self.end_ms is not None and found > self.end_ms):
            return ENDED_MS
        return found


@lru_cache(maxsize=4096)
def _recurrence(cron: str, timezone: str, every_ms: int, base_ms: int) -> Recurrence:
    return Every(every_ms, base_ms) if every_ms else Cron(cron, timezone)


_STATE: Final = struct.Struct(">QQqqqQqQQq?")


class ScheduleState(NamedState, frozen=True, gc=False):
    """A value of the table SCHEDULE_STATES: numbers in this order, big-endian."""

    next_ms: int
    """The next planned time; ENDED_MS: there is none."""
    last_planned_ms: int = 0
    """Of the last run. All four are 0 until there is one."""
    last_seq: int = 0
    """Of its message, as in the id."""
    last_due_ms: int = 0
    runs: int = 0
    skipped: int = 0
    resumed_ms: int = 0
    """What was planned before this passed while it was paused."""
    is_paused: bool = False

    def pack(self) -> bytes:
        """The bytes of it."""
        return _STATE.pack(*(getattr(self, name) for name in self.__struct_fields__))


def unpack_state(value: bytes) -> ScheduleState:
    """The state in such bytes. Raises struct.error."""
    return ScheduleState(*_STATE.unpack(value))


_STATES: Final = np.dtype(
    {
        "names": ["next_ms", "is_paused"],
        "formats": [">i8", "u1"],
        "offsets": [24, _STATE.size - 1],
        "itemsize": _STATE.size,
    }
)


def next_times(values: Iterable[bytes]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The next planned time of each state, and whether it is paused. Shapes: (n,)."""
    rows = np.frombuffer(b"".join(values), _STATES)
    return rows["next_ms"].astype(np.int64), rows["is_paused"] != 0


KnownSchedule = Known[Schedule, ScheduleState]


class ScheduleChange(msgspec.Struct, array_like=True, frozen=True):
    """The payload of a SCHEDULE (MessagePack). None of both: it has ended."""

    name: str
    schedule: bytes | None = None
    """A Schedule. None: the one that there is."""
    state: bytes | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Schedule).decode
_decode_change = msgspec.msgpack.Decoder(ScheduleChange).decode


def pack_schedule(schedule: Schedule) -> bytes:
    """A value of the table SCHEDULES."""
    return _encode(schedule)


def unpack_schedule(value: bytes) -> Schedule:
    """The definition in such a value. Raises msgspec.DecodeError."""
    return _decode(value)


def pack_schedule_change(change: ScheduleChange) -> bytes:
    """The payload of a SCHEDULE, not sealed."""
    return _encode(change)


def unpack_schedule_change(data: bytes) -> ScheduleChange:
    """The change in such a payload. Raises msgspec.DecodeError."""
    return _decode_change(data)


def upcoming(schedule: Schedule, state: ScheduleState, now_ms: int, most: int) -> Iterator[int]:
    """The next planned times, as they are while nothing changes; of one that is paused, as if it
    went on now."""
    if schedule.runs_max is not None:
        most = min(most, schedule.runs_max - state.runs)
    planned_ms = state.next_ms
    if state.is_paused and ENDED_MS < planned_ms <= now_ms:
        planned_ms = schedule.following_ms(now_ms)
    for _ in range(most):
        if planned_ms == ENDED_MS:
            return
        yield planned_ms
        planned_ms = schedule.following_ms(planned_ms)
