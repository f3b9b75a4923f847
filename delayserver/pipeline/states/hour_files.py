"""The two files of an hour, read together with what is not filed yet.

Both are opened before either is read, the dispatch log first: the server deletes them in the other
order, so where a schedule log is found its dispatch log was not deleted before it.

Cost: the columns of both files. Threads: functions without state.
"""

import contextlib

import numpy as np

from delayserver.pipeline.logs.logs import LogPiece, read_file
from delayserver.pipeline.states.settlement import HourRows
from delayserver.records.tables import HourState
from storage.buckets import bucket_path
from storage.files import File, Files
from storage.frame import Damage, Frame, Rows
from storage.rows import DISPATCH_DTYPE, FLAG_REMOVAL, SCHEDULE_DTYPE, LogKind, concatenate


def read_hour(
    files: Files,
    hour: int,
    state: HourState,
    unfiled: Rows,
    *,
    stamp: int,
    checkpoint_seq: int,
    dispatch_bytes: int | None = None,
) -> tuple[HourRows, list[Damage]]:
    """All rows of an hour, and what is damaged or missing of them.

    `dispatch_bytes`: how much of the dispatch log to read, all of which must be there; None: what
    there is."""
    damage: list[Damage] = []
    path = bucket_path(LogKind.SCHEDULE, hour)
    with contextlib.ExitStack() as cleanup:
        dispatch_file = _open(files, bucket_path(LogKind.DISPATCH, hour), cleanup)
        schedule_file = _open(files, path, cleanup)
        schedule = _rows(
            schedule_file,
            LogPiece(LogKind.SCHEDULE, path, 0, state.length, state.length),
            SCHEDULE_DTYPE,
            stamp,
            damage,
        )
        if schedule_file is None and state.length:
            reason = "the file is missing, and the catalog knows it"
            damage.append(Damage(path, 0, state.length, reason, torn=False))
        elif not damage:
            damage += _counted(path, schedule, state)
        promised = dispatch_bytes or 0
        end = dispatch_file.size() if dispatch_file and dispatch_bytes is None else promised
        path_of_dispatch = bucket_path(LogKind.DISPATCH, hour)
        if dispatch_file is None and promised:
            reason = "the file is missing"
            damage.append(Damage(path_of_dispatch, 0, promised, reason, torn=False))
        dispatch = _rows(
            dispatch_file,
            LogPiece(LogKind.DISPATCH, path_of_dispatch, 0, end, promised),
            DISPATCH_DTYPE,
            stamp,
            damage,
        )
    if schedule_file is not None or not state.length:
        lost, behind = _not_filed(schedule, unfiled, checkpoint_seq)
        if len(behind):
            schedule = concatenate([schedule, behind], SCHEDULE_DTYPE)
        if len(lost) and not damage:
            damage.append(
                Damage(
                    path,
                    state.length,
                    state.length,
                    "rows that were accepted before the checkpoint are not filed",
                    torn=False,
                    first_seq=int(lost["seq"].min()),
                    last_seq=int(lost["seq"].max()),
                )
            )
    return HourRows(schedule, dispatch), damage


def _open(files: Files, path: str, cleanup: contextlib.ExitStack) -> File | None:
    try:
        file = files.open(path)
    except FileNotFoundError:
        return None
    cleanup.callback(file.close)
    return file


def _rows(
    file: File | None, piece: LogPiece, dtype: np.dtype[np.void], stamp: int, damage: list[Damage]
) -> Rows:
    parts: list[Rows] = []
    if file is not None and piece.end:
        for found in read_file(file, piece, stamp=stamp):
            if isinstance(found, Frame):
                parts.append(found.rows)
            else:
                damage.append(found)
    return concatenate(parts, dtype)


def _counted(path: str, schedule: Rows, state: HourState) -> list[Damage]:
    """The catalog counts the rows of a file, so that none can be taken out of it unnoticed."""
    removals = int(((schedule["flags"] & FLAG_REMOVAL) != 0).sum())
    entries = len(schedule) - removals
    if (entries, removals) == (state.entries, state.removals):
        return []
    reason = (
        f"the file has {entries} entries and {removals} tombstones, "
        f"the catalog says {state.entries} and {state.removals}"
    )
    return [Damage(path, 0, state.length, reason, torn=False)]


def _not_filed(schedule: Rows, unfiled: Rows, checkpoint_seq: int) -> tuple[Rows, Rows]:
    """Rows that should be in the file and are not, and all rows that are not in the file."""
    if not len(unfiled):
        return unfiled, unfiled
    is_filed = np.zeros(len(unfiled), bool)
    for flag in (0, FLAG_REMOVAL):
        here = (unfiled["flags"] & FLAG_REMOVAL) == flag
        there = schedule["seq"][(schedule["flags"] & FLAG_REMOVAL) == flag]
        is_filed[here] = np.isin(unfiled["seq"][here], there)
    rest = unfiled[~is_filed]
    is_old = rest["seq"] <= checkpoint_seq
    # What was lost counts as accepted, too.
    return rest[is_old], rest
