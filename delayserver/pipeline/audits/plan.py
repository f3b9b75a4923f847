"""The plan of an audit: a data directory at one moment, cut into tasks.

A task is an hour of a shard, or a part of an hour with very many entries. A part is a range of
seqs, so that an entry and all rows that ended it are in the same one; it begins and ends with a
frame.

Cost: a snapshot of each shard (`states.snapshot`); of large hours the headers of the frames.
Threads: values.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from delayserver.pipeline.audits.facts import HourFacts
from delayserver.pipeline.audits.verdicts import Verdicts
from delayserver.pipeline.exports.place import absolute_root
from delayserver.pipeline.logs.logs import ALL, Range
from delayserver.pipeline.states.entry_states import SETTLED_DTYPE, EntryState
from delayserver.pipeline.states.hour_files import read_hour
from delayserver.pipeline.states.settlement import Judgement, KnownSubscriptions, settle
from delayserver.pipeline.states.snapshot import (
    Directory,
    StatesSnapshot,
    open_directories,
    take_snapshot,
)
from delayserver.records.tables import HourState
from storage.buckets import bucket_path, day_of, end_ms, hours_of, is_day, parse_bucket_file
from storage.files import Files, size_of
from storage.frame import Damage, Rows
from storage.frame_runs import scan_heads
from storage.rows import HOUR_MS, SCHEDULE_DTYPE, LogKind, concatenate

PART_ENTRIES = 2_000_000
"""A larger hour is cut: a task holds about 300 bytes per entry in memory."""
SKEW_MS = HOUR_MS
"""A row that was settled so much later than an audit began is in the future. The allowance covers
clocks that differ, and the time that the audit takes."""


@dataclass(frozen=True, slots=True)
class ShardBasis:
    """A shard at one moment, by which its hours are judged."""

    directory: Directory
    snapshot: StatesSnapshot
    now_ms: int

    def judgement(self, definitions: KnownSubscriptions, retired_through_seq: int) -> Judgement:
        """The basis on which one of its hours is judged."""
        return Judgement(
            through_seq=self.snapshot.through_seq,
            retired_through_seq=retired_through_seq,
            now_ms=self.now_ms,
            definitions=definitions,
            settled_until_ms=self.now_ms + SKEW_MS,
        )

    @property
    def definitions(self) -> KnownSubscriptions:
        """Its subjects and subscriptions."""
        return KnownSubscriptions(self.snapshot.subjects, self.snapshot.subscriptions)


@dataclass(frozen=True, slots=True)
class HourTask:
    """An hour (or a day that is far) of a shard, or a part of it."""

    shard: int
    hour: int
    state: HourState
    retired_through_seq: int
    unfiled: Rows
    size: int
    """About how much work the task is: rows of both logs."""
    seqs: Range = ALL
    with_bodies: bool = False


@dataclass(frozen=True, slots=True)
class AuditPlan:
    """Everything that is to be judged."""

    roots: tuple[str, ...]
    bases: dict[int, ShardBasis]
    """The bases, by shard."""
    tasks: list[HourTask]
    now_ms: int
    damage: list[Damage]
    """Damage that belongs to no hour."""
    hours_left_out: int = 0
    """Hours before the time that was asked for."""
    since_ms: int | None = None
    with_bodies: bool = False
    verdicts: Verdicts | None = None
    kept: dict[int, list[HourFacts]] = field(default_factory=dict)
    """By shard: the facts of hours that are not judged again."""


def make_plan(
    *data_dirs: str,
    now_ms: int,
    with_bodies: bool = False,
    since_ms: int | None = None,
    verdicts: Verdicts | None = None,
) -> AuditPlan:
    """Look at a data directory, also beside its server, at the shards of several, or at exports.
    Hours that are over by `since_ms` are left out. An hour that has a valid verdict contributes its
    facts.

    Raises NotADataDirectoryError, also for a shard that is not there, CatalogError, DamageError for
    a broken FORMAT file."""
    kept: dict[int, list[HourFacts]] = {}
    bases: dict[int, ShardBasis] = {}
    tasks: list[HourTask] = []
    damage: list[Damage] = []
    left_out = 0
    roots = tuple(map(absolute_root, data_dirs))
    for directory in open_directories(*roots):
        basis = bases[directory.shard] = look(directory, now_ms)
        damage += map(directory.named, (*basis.snapshot.damage, *find_strays(basis)))
        for task in _hours(basis, with_bodies=with_bodies):
            if since_ms is not None and end_ms(task.hour) <= since_ms:
                left_out += 1
            elif verdicts is not None and (facts := verdicts.find(basis, task)) is not None:
                kept.setdefault(directory.shard, []).append(facts)
            else:
                tasks += _parts(directory, task)
    return AuditPlan(
        roots, bases, tasks, now_ms, damage, left_out, since_ms, with_bodies, verdicts, kept
    )


def look(directory: Directory, now_ms: int) -> ShardBasis:
    """A shard as it is now."""
    with directory.catalog() as catalog:
        snapshot = take_snapshot(directory.files, catalog, stamp=directory.stamp)
    return ShardBasis(directory, snapshot, now_ms)


def find_strays(basis: ShardBasis) -> Iterator[Damage]:
    """Files of the schedule log that the catalog does not know, and that hold messages which wait.

    A server that was ended while it purged a past hour may leave both files behind, in which all is
    settled, or the schedule log alone, which tells nothing."""
    snapshot, files = basis.snapshot, basis.directory.files
    names = (parse_bucket_file(LogKind.SCHEDULE, name) for name in files.list("schedule"))
    for bucket in names:
        if bucket is None or any(_is_filed(snapshot, one) for one in _places(bucket)):
            continue
        path = bucket_path(LogKind.SCHEDULE, bucket)
        is_over = end_ms(bucket) <= basis.now_ms
        if is_over and not files.exists(bucket_path(LogKind.DISPATCH, bucket)):
            continue
        rows, _ = read_hour(
            files,
            bucket,
            HourState(length=size_of(files, path)),
            np.empty(0, SCHEDULE_DTYPE),
            stamp=basis.directory.stamp,
            checkpoint_seq=snapshot.checkpoint_seq,
        )
        # Rows behind the checkpoint are filed, and the next checkpoint will know them.
        judgement = replace(
            basis.judgement(basis.definitions, snapshot.checkpoint_seq),
            through_seq=snapshot.checkpoint_seq,
        )
        settled = concatenate(list(settle(rows, judgement)), SETTLED_DTYPE)
        waiting = np.unique(settled["seq"][settled["state"] == EntryState.MISSING])
        if len(waiting):
            reason = (
                f"the catalog does not know the file, and {len(waiting):,} in it are not settled"
            )
            first, last = int(waiting.min()), int(waiting.max())
            yield Damage(path, 0, 0, reason, torn=False, first_seq=first, last_seq=last)


def _is_filed(snapshot: StatesSnapshot, bucket: int) -> bool:
    """Whether the catalog knows a file; the message log may know an hour without one."""
    return bucket in snapshot.hours and bool(snapshot.hours[bucket].length)


def _places(bucket: int) -> tuple[int, ...]:
    """The buckets in which the rows of a bucket may be known. A day is split into its hours, and
    the files of both exist until the catalog has the hours."""
    return (bucket, *hours_of(bucket)) if is_day(bucket) else (bucket, day_of(bucket))


def _hours(basis: ShardBasis, *, with_bodies: bool) -> Iterator[HourTask]:
    snapshot, files = basis.snapshot, basis.directory.files
    nothing = np.empty(0, SCHEDULE_DTYPE)
    for hour, state in sorted(snapshot.hours.items()):
        unfiled = snapshot.unfiled.get(hour, nothing)
        yield HourTask(
            basis.directory.shard,
            hour,
            state,
            snapshot.retired.get(hour, 0),
            unfiled,
            state.entries
            + state.removals
            + len(unfiled)
            + size_of(files, bucket_path(LogKind.DISPATCH, hour)) // 40,
            with_bodies=with_bodies,
        )


def _parts(directory: Directory, task: HourTask) -> Iterator[HourTask]:
    """The task, or the parts of a large hour."""
    if task.state.entries <= PART_ENTRIES or task.with_bodies:
        yield task
        return
    cuts = _cuts(directory.files, task, directory.stamp)
    firsts = [0, *(cut + 1 for cut in cuts)]
    for first, last in zip(firsts, [*cuts, ALL.last], strict=True):
        yield HourTask(
            task.shard,
            task.hour,
            task.state,
            task.retired_through_seq,
            task.unfiled,
            task.size // len(firsts),
            Range(first, last),
        )


def _cuts(files: Files, task: HourTask, stamp: int) -> list[int]:
    """The seqs after which an hour is cut."""
    counts, lasts = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    try:
        file = files.open(bucket_path(LogKind.SCHEDULE, task.hour))
    except FileNotFoundError:
        return []  # The task that reads it reports the damage.
    with contextlib.closing(file):
        for heads in scan_heads(file, 0, task.state.length, kind=LogKind.SCHEDULE, stamp=stamp):
            counts.append(heads.headers["count"].astype(np.int64))
            lasts.append(heads.headers["last_seq"].astype(np.int64))
    through, last = np.cumsum(np.concatenate(counts)), np.concatenate(lasts)
    if not len(through):
        return []
    pieces = -(-int(through[-1]) // PART_ENTRIES)
    wanted = np.arange(1, pieces) * through[-1] // pieces
    cuts = np.unique(last[np.searchsorted(through, wanted)])
    found: list[int] = cuts[cuts < last[-1]].tolist()
    return found
