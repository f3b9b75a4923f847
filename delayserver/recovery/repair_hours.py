"""The repair of the files by hour: of the schedule log and of the dispatch log.

    findings ──▶ mend_schedule ──▶ the table HOURS as it has to be ─┐
             └─▶ mend_dispatch ─────────────────────────────────────┴─▶ new files, in the swap

Cost: reads each file that is damaged once, and once more to write it again; without a catalog that
is current, all of them. Threads: none.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence

from delayserver.records.tables import (
    Change,
    HourState,
    hour_key,
    parse_change_key,
    parse_hours,
    unpack_change,
)
from delayserver.recovery.repair_catalog import (
    Rebuilt,
    Tables,
)
from delayserver.recovery.repair_logs import Changes, Mended, Mender
from storage.buckets import bucket_path, hours_of, is_day, parse_bucket_file
from storage.catalog import Table
from storage.check import Finding, Progress
from storage.files import File, Files
from storage.frame import Damage, Rows
from storage.frame_runs import FrameRun
from storage.hour_log import HourLog
from storage.rows import SEQ_MAX, LogKind
from storage.swap import Swap


class HourFiles:
    """The files by hour of a directory that is repaired."""

    def __init__(
        self, files: Files, stamp: int, swap: Swap, progress: Progress, *, dry_run: bool
    ) -> None:
        """`swap` gets the new files; `dry_run`: none is written."""
        self._files = files
        self._stamp = stamp
        self._swap = swap
        self._progress = progress
        self._dry_run = dry_run

    def mend_schedule(
        self,
        catalog: Tables | None,
        is_current: bool,
        findings: Sequence[Finding],
        rebuilt: Rebuilt,
        checkpoint: int,
    ) -> dict[int, HourState]:
        """The table HOURS as it has to be; files that have to change are written again."""
        known: dict[int, HourState] = {}
        if catalog is not None and is_current:
            known = parse_hours(catalog[Table.HOURS].items())
        damaged = {found.file for found in findings}
        changes = _changes(catalog[Table.CHANGES] if catalog is not None else {})
        hours: dict[int, HourState] = {}
        on_disk = self.buckets(LogKind.SCHEDULE)
        copies = self._copies(on_disk) if not is_current else {*on_disk} - known.keys()
        for done, hour in enumerate(sorted({*on_disk, *known})):
            path = bucket_path(LogKind.SCHEDULE, hour)
            self._progress(path, done, len(on_disk))
            if is_current and path not in damaged:
                hours[hour] = known.get(hour, HourState())
                continue
            if hour in copies:
                # As a start does: its rows are filed elsewhere, or were deleted.
                self._swap.remove(path)
                continue
            before = known.get(hour)
            size = self._size(path)
            end = size if before is None else before.length
            mended = self._mend(
                LogKind.SCHEDULE, hour, min(end, size), checkpoint, changes, rebuilt, damaged
            )
            if before is not None:
                mended.state.retired_ms = before.retired_ms
            if mended.state.length:
                hours[hour] = mended.state
            if is_current:
                value = mended.state.pack() if mended.state.length else None
                self._swap.put(Table.HOURS, hour_key(hour), value)
        return hours

    def _copies(self, on_disk: Sequence[int]) -> set[int]:
        """Files whose rows stand in others, too, since a day was being split (`schedule.days`).

        If an hour has rows behind those of its day, the day had been split; else its hours are not
        known to be whole."""
        copies: set[int] = set()
        for day in filter(is_day, on_disk):
            hours = [hour for hour in hours_of(day) if hour in on_disk]
            last_seq = self._last_seq(day)
            is_split = any(self._last_seq(hour) > last_seq for hour in hours)
            copies.update([day] if is_split else hours)
        return copies

    def _last_seq(self, bucket: int) -> int:
        with contextlib.closing(
            HourLog(self._files, LogKind.SCHEDULE, stamp=self._stamp)
        ) as schedule:
            runs = (one for one in schedule.scan_runs(bucket) if isinstance(one, FrameRun))
            return max((int(run.rows["seq"][-1]) for run in runs), default=0)

    def mend_dispatch(self, findings: Sequence[Finding]) -> None:
        """Write the damaged files of the dispatch log again."""
        for path in sorted({found.file for found in findings}):
            directory, _, name = path.partition("/")
            hour = parse_bucket_file(LogKind.DISPATCH, name)
            if directory == LogKind.DISPATCH.name.lower() and hour is not None:
                self._mend(LogKind.DISPATCH, hour, self._size(path), SEQ_MAX, {}, None, {path})

    def _mend(
        self,
        kind: LogKind,
        hour: int,
        end: int,
        through_seq: int,
        changes: Changes,
        rebuilt: Rebuilt | None,
        damaged: Collection[str],
    ) -> Mended:
        path = bucket_path(kind, hour)
        with self._opened(path) as source:
            if source is None:
                return Mended()
            mender = Mender(
                source,
                kind,
                hour,
                stamp=self._stamp,
                end=end,
                through_seq=through_seq,
                changes=changes,
            )
            visit = rebuilt.hour() if rebuilt else _ignore
            mended = mender.mend(None, visit)
            if not mended.is_changed and end == source.size() and path not in damaged:
                return mended
            if self._dry_run:
                return mended
            if not mended.kept_rows:
                self._swap.remove(path)
                return mended
            with self._swap.new_file(path) as target:
                return mender.mend(target)

    def buckets(self, kind: LogKind) -> list[int]:
        """The hours and days that have a file."""
        names = self._files.list(kind.name.lower())
        hours = (parse_bucket_file(kind, name) for name in names)
        return [hour for hour in hours if hour is not None]

    def schedule_seqs(self) -> set[int]:
        """All records that are filed, as far as the files can be read."""
        log = HourLog(self._files, LogKind.SCHEDULE, stamp=self._stamp)
        try:
            return {
                seq
                for hour in log.buckets()
                for found in log.scan_runs(hour)
                if not isinstance(found, Damage)
                for seq in found.rows["seq"].tolist()
            }
        finally:
            log.close()

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[File | None]:
        try:
            file = self._files.open(path)
        except FileNotFoundError:
            yield None
            return
        try:
            yield file
        finally:
            file.close()

    def _size(self, path: str) -> int:
        with self._opened(path) as file:
            return file.size() if file else 0


def _ignore(rows: Rows, payload: bytes) -> None:
    pass


def _changes(values: Mapping[bytes, bytes]) -> Changes:
    """The table CHANGES by message."""
    changes: dict[int, dict[int, Change]] = {}
    for key, value in values.items():
        message_seq, subscription_id = parse_change_key(key)
        changes.setdefault(message_seq, {})[subscription_id] = unpack_change(value)
    return changes
