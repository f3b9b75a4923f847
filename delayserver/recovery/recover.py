"""Recovery: from whatever a crash left on the disk to the state as if it had not happened.

    lock → catalog → cut schedule files and definitions log to their committed lengths → replay the
    message log to its end → cut torn tails of dispatch logs → checkpoint → load the hours due or
    near → ready

Nothing is delivered before replay has reached the end of the message log, else a cancel that was
logged could be overtaken (I11). Every hour with unsettled messages counts, however old (I13).

Cost: depends on the rows that are due soon and on the unfiled tail of the message log, never on the
whole backlog (I10): one directory listing, the tail, and the columns of the hours that are due.
Threads: runs before any other thread starts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from delayserver.delivery.settler import Settler
from delayserver.records.horizon import Mark
from delayserver.records.kept_leases import LEASED_DTYPE
from delayserver.records.subscriptions import Registry
from delayserver.records.tables import read_subjects, read_subscriptions
from delayserver.schedule.committed import Records
from delayserver.schedule.loader import Leased, LoadedHour, Loader
from delayserver.schedule.replay import Replay
from storage.catalog import Catalog
from storage.errors import DamageError
from storage.frame import Damage, Frame, Rows, damaged_payloads
from storage.hour_log import HourLog
from storage.rows import HOUR_MS, RecordKind, select
from storage.write_ahead_log import TailLog

BATCH_BYTES = 32 * 1024 * 1024

NONE_LEASED: Final = np.zeros(0, LEASED_DTYPE)

Progress = Callable[[str, int, int], None]
"""Told the name of the step, how much of it is done, and of how much."""


@dataclass(slots=True)
class Recovered:
    """The state that the server starts with."""

    next_seq: int
    subjects: dict[str, int]
    registry: Registry
    through_hour: int
    loaded: list[LoadedHour]
    damage: list[Damage] = field(default_factory=list)
    replayed: int = 0
    torn: list[Damage] = field(default_factory=list)
    """Stretches that were cut off at the ends of logs, as a crash leaves them: never answered."""
    retired_through_hour: int = -1
    """The newest hour that is settled, for `Engine.start`."""
    fired: list[Mark] = field(default_factory=list)
    """Marks of rows that have fired though they are not due yet: the clock was set back since."""


def recover(
    catalog: Catalog,
    message_log: TailLog,
    replay: Replay,
    settler: Settler,
    loader: Loader,
    *,
    now_ms: int,
    lead_ms: int,
    is_carried_over: bool = False,
    leases: Rows = NONE_LEASED,
    progress: Progress = lambda what, done, total: None,
) -> Recovered:
    """Bring the directory to a checkpoint at the end of the message log; load due and near hours.

    `is_carried_over`: the directory was made before there was a definitions log. `leases`: the
    deliveries that consumers hold (LEASED_DTYPE): it does not wait for these consumers.
    Raises StorageError when the disk does not let it; nothing was answered by then."""
    damage: list[Damage] = []
    for found in catalog.verify() if is_carried_over else ():
        raise found.error()  # The definitions log is written from it, so it must be right.
    next_seq, replayed = file_message_log(
        message_log,
        replay,
        damage,
        now_ms=now_ms,
        is_carried_over=is_carried_over,
        progress=progress,
    )
    # After the replay, which may have opened a settled hour again.
    damage += settler.recover(hour for hour in settler.hours() if not replay.is_retired(hour))
    _note_damage(replay, damage, now_ms)
    # A row that has fired once was live, and stays so, also if the clock was set back since.
    through_hour = max((now_ms + lead_ms) // HOUR_MS, replay.live_once_through_hour)
    damage += _split_days(replay, through_hour, now_ms, progress)
    snapshots = replay.snapshot(through_hour)
    for hour in {*replay.schedule.buckets(), *settler.hours()} - replay.hours.keys():
        replay.purging.delete_files(hour)
    replay.delete_adopted()
    registry, names = Registry(read_subscriptions(catalog)), read_subjects(catalog)
    loaded = []
    leased = leased_by_hour(leases, registry, now_ms)
    for done, snapshot in enumerate(snapshots):
        progress("loading hours", done, len(snapshots))
        of_hour = leased.get(snapshot.hour)
        loaded.append(loader.load(snapshot, registry, names, now_ms=now_ms, leased=of_hour))
        damage += loaded[-1].damage
    retired = [hour for hour, state in replay.hours.items() if state.retired_ms]
    return Recovered(
        next_seq,
        {name: number for number, name in names.items()},
        registry,
        through_hour,
        loaded,
        damage,
        replayed,
        [*([message_log.torn] if message_log.torn else []), *settler.torn],
        max(retired, default=-1),
        [*_fired_ahead(replay, retired, now_ms), *(mark for hour in loaded for mark in hour.fired)],
    )


def _note_damage(replay: Replay, damage: list[Damage], now_ms: int) -> None:
    for found in damage:
        replay.effects.note_damage(found, now_ms)
    if damage:
        replay.effects.name_lost_subjects()


def _split_days(replay: Replay, through_hour: int, now_ms: int, progress: Progress) -> list[Damage]:
    """Have no hour that is due wait in the file of its day. Returns the damage that it found."""
    damage: list[Damage] = []
    slices = 0
    while replay.must_split(through_hour):
        damage += replay.split(through_hour, now_ms).damage
        slices += 1
        progress("splitting days", slices, slices)
    return damage


def leased_by_hour(leases: Rows, registry: Registry, now_ms: int) -> dict[int, Leased]:
    """Returns the leases that consumers hold, by hour. A lease is over if its subscription is gone,
    or if its message is not due yet, since the clock was set back: it will fall due again."""
    is_known = np.isin(leases["subscription_id"], [one.id for one in registry])
    leases = leases[is_known & (leases["due_ms"] <= now_ms)]
    hours = leases["due_ms"] // HOUR_MS
    return {
        hour: Leased(leases["seq"][hours == hour], leases["subscription_id"][hours == hour])
        for hour in np.unique(hours).tolist()
    }


def _fired_ahead(replay: Replay, retired: list[int], now_ms: int) -> Iterator[Mark]:
    """Marks of the hours that are settled and not over: the clock was set back."""
    for hour in retired:
        if (hour + 1) * HOUR_MS > now_ms:
            yield Mark(replay.hours[hour].last_entry_seq, (hour + 1) * HOUR_MS)


def file_message_log(
    message_log: TailLog,
    replay: Replay,
    damage: list[Damage],
    *,
    now_ms: int,
    is_carried_over: bool = False,
    progress: Progress,
) -> tuple[int, int]:
    """Cut the logs back to the checkpoint and file the records behind it; a checkpoint is not made
    yet. Returns the next seq and the number of records, and adds to `damage`."""
    first_seq = message_log.first_seq()
    damage += cut_to_checkpoint(first_seq, replay, is_carried_over=is_carried_over)
    known = len(damage)
    next_seq, replayed = _replay_tail(message_log, replay, damage, now_ms, progress)
    lost = [(found.first_seq, found.last_seq) for found in damage[known:]]
    replay.effects.remove_lost_keys(lost, next_seq)
    return next_seq, replayed


def cut_to_checkpoint(
    first_seq: int | None, replay: Replay, *, is_carried_over: bool = False
) -> list[Damage]:
    """Cut the logs back to the checkpoint (I7): the rows behind it are filed again. Returns the
    damage: rows that it covers and that are missing. `first_seq`: where the message log begins;
    None: it is empty."""
    _check_catalog(first_seq, replay.schedule, replay)
    _cut_schedule(replay.schedule, replay)
    missing = replay.resume_definitions(from_catalog=is_carried_over)
    return [] if missing is None else [missing]


def _check_catalog(first_seq: int | None, schedule: HourLog, replay: Replay) -> None:
    """A catalog that is gone or older than the logs must not make us cut them back to it."""
    if first_seq is None and not replay.has_checkpoint and schedule.buckets():
        reason = "it is empty, and so is the message log, but there are hours: it is missing"
        raise DamageError("catalog", 0, reason)
    if first_seq is not None and first_seq > replay.checkpoint_seq + 1:
        raise DamageError(
            "catalog",
            0,
            f"its checkpoint is {replay.checkpoint_seq}, but the message log begins with "
            f"{first_seq}: the catalog is missing or from another time",
            replay.checkpoint_seq + 1,
            first_seq - 1,
        )


def _cut_schedule(schedule: HourLog, replay: Replay) -> None:
    """Cut every schedule file back to its length at the checkpoint (I7)."""
    for hour in schedule.buckets():
        state = replay.hours.get(hour)
        committed = state.length if state else 0
        if schedule.size(hour) > committed:
            schedule.cut(hour, committed)
    schedule.sync()


def _replay_tail(
    message_log: TailLog,
    replay: Replay,
    damage: list[Damage],
    now_ms: int,
    progress: Progress,
) -> tuple[int, int]:
    """File everything behind the checkpoint; returns the next seq and the number of records."""
    waiting: list[Records] = []
    waiting_bytes = replayed = 0
    next_seq = replay.checkpoint_seq + 1
    for found in message_log.read(next_seq):
        if isinstance(found, Damage):
            damage.append(found)
            message_log.keep_segment(found.path)
            next_seq = max(next_seq, found.last_seq + 1)
            continue
        next_seq = found.header.last_seq + 1
        records = _intact(found, damage)
        waiting.append(records)
        waiting_bytes += found.end - found.offset
        replayed += len(records.rows)
        if waiting_bytes >= BATCH_BYTES:
            _file(waiting, replay, damage, now_ms, progress)
            progress("replaying the message log", replayed, replayed)
            waiting, waiting_bytes = [], 0
    _file(waiting, replay, damage, now_ms, progress)
    return next_seq, replayed


def _file(
    waiting: list[Records],
    replay: Replay,
    damage: list[Damage],
    now_ms: int,
    progress: Progress,
) -> None:
    """File records; an import is the last of its batch, and comes slice by slice."""
    batch: list[Records] = []
    imported_bytes = 0
    for records in waiting:
        batch.append(records)
        if is_import(records):
            replay.file(batch, now_ms)
            batch = []
        while replay.is_importing:
            filed = replay.file_import(now_ms)
            damage += filed.damage
            progress("filing an import", filed.last_seq, filed.last_seq)
            imported_bytes += filed.total_bytes
            if imported_bytes >= BATCH_BYTES:
                # This bounds the changes for the catalog that it holds in memory.
                replay.checkpoint()
                imported_bytes = 0
    if batch:
        replay.file(batch, now_ms)


def is_import(records: Records) -> bool:
    """Whether these records end with that of an import, which is filed slice by slice."""
    return is_import_row(records.rows)


def is_import_row(rows: Rows) -> bool:
    """Whether the last of these rows of the message log is that of an import."""
    return bool(len(rows)) and rows["kind"][-1] == RecordKind.IMPORT


def _intact(frame: Frame, damage: list[Damage]) -> Records:
    """The records of a frame; where its blob is damaged, those whose own payload is not (I8)."""
    assert frame.payload is not None
    if frame.payload_intact:
        return Records(frame.rows, frame.payload)
    keep = np.ones(len(frame.rows), bool)
    for index, found in damaged_payloads(frame):
        keep[index] = False
        is_import = frame.rows["kind"][index] == RecordKind.IMPORT
        damage.append(replace(found, last_seq=frame.last_seq) if is_import else found)
    return Records(select(frame.rows, keep), frame.payload)
