"""The two files of an hour, read together with the rows that are not filed yet.

Both are opened before either is read, the dispatch log first: the server deletes them in the other
order, so where a schedule log is found its dispatch log was not deleted before it.

A large hour can be read in parts, by ranges of seq. An entry and all rows that ended it name the
same seq, so no part needs another. Each part reads both files, and keeps its own rows alone.

Bytes that verify are doubted, too: the catalog says how many rows a schedule file has, and which
are the first and the last. A row must belong to the hour of its file, and stand in the order of its
seq.

Cost: the columns of both files. Threads: functions without state.
"""

import contextlib
from collections.abc import Iterator

import numpy as np

from delayserver.pipeline.logs.logs import ALL, LogPiece, Range, read_file
from delayserver.pipeline.states.settlement import HourRows
from delayserver.records.tables import HourState
from storage.buckets import bucket_path, end_ms, start_ms
from storage.files import File, Files
from storage.frame import Damage, Frame, Rows
from storage.rows import (
    DISPATCH_DTYPE,
    FLAG_REMOVAL,
    SCHEDULE_DTYPE,
    SCHEDULES,
    LogKind,
    concatenate,
    keep,
    select,
)

_IS_ENTRY_KIND = np.zeros(256, bool)
_IS_ENTRY_KIND[list(SCHEDULES)] = True


def read_hour(
    files: Files,
    hour: int,
    state: HourState,
    unfiled: Rows,
    *,
    stamp: int,
    checkpoint_seq: int,
    dispatch_bytes: int | None = None,
    seqs: Range = ALL,
) -> tuple[HourRows, list[Damage]]:
    """The rows of an hour that are about entries of these seqs, and the damaged or missing parts of
    its files.

    `dispatch_bytes`: how much of the dispatch log to read, all of which must be there; None: all
    bytes that are there."""
    damage: list[Damage] = []
    path = bucket_path(LogKind.SCHEDULE, hour)
    with (
        _open(files, bucket_path(LogKind.DISPATCH, hour)) as dispatch_file,
        _open(files, path) as file,
    ):
        schedule = _schedule_of(file, hour, state, stamp, seqs, damage)
        dispatch = _dispatch_of(dispatch_file, hour, stamp, dispatch_bytes, seqs, damage)
    if schedule is None:
        return HourRows(np.empty(0, SCHEDULE_DTYPE), dispatch), damage
    lost, behind = _not_filed(schedule, _within(unfiled, seqs), checkpoint_seq)
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


def _schedule_of(
    file: File | None, hour: int, state: HourState, stamp: int, seqs: Range, damage: list[Damage]
) -> Rows | None:
    """The filed rows, by seq; None: the file is missing, and the catalog knows it."""
    path = bucket_path(LogKind.SCHEDULE, hour)
    if file is None and state.length:
        reason = "the file is missing, and the catalog knows it"
        damage.append(Damage(path, 0, state.length, reason, torn=False))
        return None
    piece = LogPiece(LogKind.SCHEDULE, path, 0, state.length, state.length)
    filed = _Filed(hour, path)
    frames = filed.counted(_frames(file, piece, stamp, damage))
    schedule = concatenate([_within(one.rows, seqs) for one in frames], SCHEDULE_DTYPE)
    if not damage:
        damage += filed.differences(state)
    damage += filed.damage
    if filed.is_out_of_order:
        schedule = select(schedule, np.argsort(schedule["seq"], kind="stable"))
    return schedule


def _dispatch_of(
    file: File | None,
    hour: int,
    stamp: int,
    dispatch_bytes: int | None,
    seqs: Range,
    damage: list[Damage],
) -> Rows:
    path, promised = bucket_path(LogKind.DISPATCH, hour), dispatch_bytes or 0
    if file is None and promised:
        damage.append(Damage(path, 0, promised, "the file is missing", torn=False))
    end = file.size() if file and dispatch_bytes is None else promised
    piece = LogPiece(LogKind.DISPATCH, path, 0, end, promised)
    parts = [
        one.rows if seqs == ALL else keep(one.rows, _is_in(one.rows["seq"], seqs))
        for one in _frames(file, piece, stamp, damage)
    ]
    return concatenate(parts, DISPATCH_DTYPE)


@contextlib.contextmanager
def _open(files: Files, path: str) -> Iterator[File | None]:
    try:
        file = files.open(path)
    except FileNotFoundError:
        yield None
        return
    with contextlib.closing(file):
        yield file


def _frames(
    file: File | None, piece: LogPiece, stamp: int, damage: list[Damage]
) -> Iterator[Frame]:
    if file is not None and piece.end:
        for found in read_file(file, piece, stamp=stamp):
            if isinstance(found, Frame):
                yield found
            else:
                damage.append(found)


def _within(schedule: Rows, seqs: Range) -> Rows:
    """Entries of these seqs, and the tombstones of such."""
    if seqs == ALL or not len(schedule):
        return schedule
    is_entry = (schedule["flags"] & FLAG_REMOVAL) == 0
    return keep(
        schedule, _is_in(np.where(is_entry, schedule["seq"], schedule["message_seq"]), seqs)
    )


def _is_in(numbers: np.ndarray, seqs: Range) -> np.ndarray:
    is_in: np.ndarray = (numbers >= np.uint64(seqs.first)) & (numbers <= np.uint64(seqs.last))
    return is_in


class _Filed:
    """The rows of a schedule file, as far as it was read."""

    def __init__(self, hour: int, path: str) -> None:
        self._path = path
        self._due_ms = range(start_ms(hour), end_ms(hour))
        self._first_seq = self._last_seq = self._last_entry_seq = 0
        self._entries = self._removals = 0
        self.damage: list[Damage] = []
        self.is_out_of_order = False

    def counted(self, frames: Iterator[Frame]) -> Iterator[Frame]:
        """The same frames."""
        for frame in frames:
            self._count(frame)
            yield frame

    def _count(self, frame: Frame) -> None:
        rows = frame.rows
        seqs, due_ms = rows["seq"], rows["due_ms"]
        is_entry = (rows["flags"] & FLAG_REMOVAL) == 0
        entries = seqs if is_entry.all() else seqs[is_entry]
        self._entries += len(entries)
        self._removals += len(rows) - len(entries)
        self._first_seq = self._first_seq or int(seqs[0])
        in_order = int(seqs[0]) >= self._last_seq and not (seqs[1:] < seqs[:-1]).any()
        if not in_order:
            self.is_out_of_order = True
            self._add(frame, seqs, "its rows are not in the order of their seqs")
        elif len(entries) and (
            int(entries[0]) == self._last_entry_seq or (entries[1:] == entries[:-1]).any()
        ):
            self._add(frame, seqs, "two entries have the same seq")
        self._last_seq = max(self._last_seq, int(seqs[-1]))
        if len(entries):
            self._last_entry_seq = int(entries[-1])
        is_odd = is_entry & ~_IS_ENTRY_KIND[rows["kind"]]
        if is_odd.any():
            self._add(frame, seqs[is_odd], "entries of a kind that makes none")
        is_odd = (due_ms < self._due_ms.start) | (due_ms >= self._due_ms.stop)
        if is_odd.any():
            self._add(frame, seqs[is_odd], "rows of another hour than the file's")

    def _add(self, frame: Frame, seqs: np.ndarray, reason: str) -> None:
        first, last = int(seqs.min()), int(seqs.max())
        place = (self._path, frame.offset, frame.end, reason)
        self.damage.append(Damage(*place, torn=False, first_seq=first, last_seq=last))

    def differences(self, state: HourState) -> Iterator[Damage]:
        """The differences from the catalog, so that no row can be taken out unnoticed."""
        found = f"{self._entries} entries and {self._removals} tombstones"
        said = f"{state.entries} and {state.removals}"
        if (self._entries, self._removals) != (state.entries, state.removals):
            yield self._of_all(state, f"the file has {found}, the catalog says {said}")
            return
        for what, seq, known in (
            ("begins with", self._first_seq, state.first_seq or self._first_seq),
            ("has as its last entry", self._last_entry_seq, state.last_entry_seq),
        ):
            if seq != known:
                yield self._of_all(state, f"the file {what} seq {seq}, the catalog says {known}")

    def _of_all(self, state: HourState, reason: str) -> Damage:
        return Damage(self._path, 0, state.length, reason, torn=False)


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
    # Rows that the file has lost count as accepted, too.
    return rest[is_old], rest
