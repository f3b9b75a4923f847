"""Pending rows of one hour, or of a day: the waiting rows of a subject, in due order, found by
columns alone.

    dispatch file ─▶ settled rows        ┐
    schedule file ─▶ removed rows        ├─▶ schedule file again ─▶ the first `limit` rows that wait
                                         ┘

The file of an hour is in the order of arrival, so all of its columns are read, twice. The memory
meanwhile holds the seqs of the ended rows and `limit` rows, never the hour. The work is cut into
steps: its caller does other things in between.

Cost: 16 bytes read and 50 ns spent per row of the hour and pass, per page. Threads: pure but for
reading; the logs belong to one thread.
"""

from collections.abc import Generator, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayserver.records.subscriptions import Registry
from delayserver.schedule.ended import Ended, is_among_sorted
from delayserver.schedule.loader import remaining
from delayserver.schedule.replay import Snapshot
from delayserver.schedule.wheel_rows import WHEEL_DTYPE, wheel_rows
from storage.buckets import start_ms
from storage.frame import Damage, Rows
from storage.frame_runs import FrameRun
from storage.hour_log import HourLog
from storage.rows import FLAG_REMOVAL, concatenate, select
from storage.scratch import Scratch

STEP_ROWS = 50_000
MEMORY_BYTES = 16 << 20
"""Memory for the ended rows of an hour; where it needs more, see `storage.scratch`."""


class Position(NamedTuple):
    """A place in the order of a list: due time, then seq."""

    due_ms: int
    seq: int


class Wanted(NamedTuple):
    """The request of a page of the list."""

    subject_id: int
    subject: str
    start: Position
    """The first one that is wanted."""
    until_ms: int
    """None that is due at this moment or later."""
    limit: int


class Page(NamedTuple):
    """The rows that were found in one hour."""

    rows: Rows
    """Up to `limit`, in order (WHEEL_DTYPE)."""
    scanned: int
    damage: list[Damage]


def pending_rows(
    schedule: HourLog, dispatch: HourLog, snapshot: Snapshot, wanted: Wanted, registry: Registry
) -> Generator[None, None, Page]:
    """Find the first rows of the hour that wait; every step is about STEP_ROWS rows of work."""
    hour, damage = snapshot.hour, list[Damage]()
    ended, scanned = yield from _ended(schedule, dispatch, snapshot)
    first = np.empty(0, WHEEL_DTYPE)
    kept: list[Rows] = []
    kept_count = 0
    for found in schedule.scan_runs(hour, end=snapshot.length):
        if isinstance(found, Damage):
            damage.append(found)
            continue
        scanned += len(found.rows)
        which = np.flatnonzero(_matches(found.rows, wanted))
        rows = select(found.rows, which)
        waits = ~is_among_sorted(rows["seq"], ended.removed)
        rows, which = select(rows, waits), which[waits]
        waits = _waits(rows, ended, wanted, registry)
        rows, which = select(rows, waits), which[waits]
        if len(rows):
            kept.append(wheel_rows(rows, hour, found.payload_starts(which)))
            kept_count += len(rows)
        if kept_count > max(wanted.limit, STEP_ROWS):
            first, kept, kept_count = _first([first, *kept], wanted.limit), [], 0
        if scanned % STEP_ROWS < len(found.rows):
            yield
    return Page(_first([first, *kept], wanted.limit), scanned, damage)


def _ended(
    schedule: HourLog, dispatch: HourLog, snapshot: Snapshot
) -> Generator[None, None, tuple[Ended, int]]:
    """The ended rows of the hour, and how many rows were looked at for that."""
    ended = Ended(Scratch(schedule.files, MEMORY_BYTES))
    scanned = 0
    for rows in _rows(schedule.scan_runs(snapshot.hour, end=snapshot.length)):
        scanned += len(rows)
        tombstones = select(rows, (rows["flags"] & FLAG_REMOVAL) != 0)
        is_whole = tombstones["subscription_id"] == 0
        ended.add_removed(tombstones["message_seq"][is_whole])
        for_one = select(tombstones, ~is_whole)
        ended.add_settled(for_one["message_seq"], for_one["subscription_id"])
        if scanned % STEP_ROWS < len(rows):
            yield
    for rows in _rows(dispatch.scan_runs(snapshot.hour)):
        scanned += len(rows)
        ended.add_settled(rows["seq"], rows["subscription_id"])
        if scanned % STEP_ROWS < len(rows):
            yield
    return ended, scanned


def _rows(found: Iterable[FrameRun | Damage]) -> Iterable[Rows]:
    return (run.rows for run in found if isinstance(run, FrameRun))


def _matches(rows: Rows, wanted: Wanted) -> NDArray[np.bool_]:
    due_ms, start = rows["due_ms"], wanted.start
    mask: NDArray[np.bool_] = rows["subject_id"] == wanted.subject_id
    mask &= (rows["flags"] & FLAG_REMOVAL) == 0
    mask &= (due_ms > start.due_ms) | ((due_ms == start.due_ms) & (rows["seq"] >= start.seq))
    mask &= due_ms < wanted.until_ms
    return mask


def _waits(rows: Rows, ended: Ended, wanted: Wanted, registry: Registry) -> np.ndarray:
    """The rows that some subscription, or one that does not exist yet, is still to get."""
    waits = ~is_among_sorted(rows["seq"], ended.by_somebody)
    # See `Ended`: a dropped row has ended for one subscription alone.
    waits &= (rows["subscription_id"] == 0) | ~is_among_sorted(rows["seq"], ended.by(0))
    partly = np.flatnonzero(~waits)
    if len(partly):
        here = select(rows, partly)
        names = {wanted.subject_id: wanted.subject}
        for _, remains in remaining(here, ended.by, registry, names):
            waits[partly[remains]] = True
    return waits


def _first(parts: list[Rows], limit: int) -> Rows:
    rows = concatenate(parts, WHEEL_DTYPE)
    order = np.lexsort((rows["seq"], rows["due_offset_ms"]))
    return select(rows, order[:limit])


def position_of(hour: int, row: np.void) -> Position:
    """Where a row stands in the list."""
    return Position(start_ms(hour) + int(row["due_offset_ms"]), int(row["seq"]))
