"""What is altered of the schedule log: which messages there are, and what ended them.

As in `deliveries`, an alteration takes a scene and says what it has done, or None.

Cost: one or two files are written. Threads: functions without state.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from delayserver.records.receivers import had_for
from storage.buckets import bucket_path, end_ms, start_ms
from storage.frame import Rows
from storage.rows import (
    FLAG_REMOVAL,
    HOUR_MS,
    PUBLISHES,
    REMOVES,
    SCHEDULES,
    LogKind,
    Outcome,
    RecordKind,
    concatenate,
)
from tests.world.tampering.scene import Mask, RowPlace, Scene

SCHEDULE = LogKind.SCHEDULE


def _is_entry(bucket: int, rows: Rows) -> Mask:
    mask: Mask = (rows["flags"] & FLAG_REMOVAL) == 0
    return mask


def _is_tombstone(bucket: int, rows: Rows) -> Mask:
    return ~_is_entry(bucket, rows)


def _entry(scene: Scene) -> RowPlace | None:
    return scene.choose(SCHEDULE, _is_entry)


def _ended(scene: Scene) -> RowPlace | None:
    """An entry of which another row says how it ended."""

    def wanted(bucket: int, rows: Rows) -> Mask:
        mask = _is_entry(bucket, rows)
        mask &= np.isin(rows["seq"], _endings(scene, bucket))
        return mask

    return scene.choose(SCHEDULE, wanted)


def _endings(scene: Scene, bucket: int) -> np.ndarray:
    """The seqs of entries of a bucket that ended."""
    parts = [frame.rows["seq"] for frame in scene.frames(LogKind.DISPATCH, bucket)]
    for frame in scene.frames(SCHEDULE, bucket):
        parts.append(frame.rows["message_seq"][_is_tombstone(bucket, frame.rows)])
    return np.concatenate([np.empty(0, np.uint64), *parts])


def _had_by(scene: Scene, bucket: int, subscription_id: int) -> np.ndarray:
    """The seqs of entries of a bucket that were delivered to a subscription."""
    parts = [
        frame.rows["seq"][
            (frame.rows["subscription_id"] == subscription_id)
            & (frame.rows["outcome"] == Outcome.DELIVERED)
        ]
        for frame in scene.frames(LogKind.DISPATCH, bucket)
    ]
    return np.concatenate([np.empty(0, np.uint64), *parts])


def _said(place: RowPlace, scene: Scene, what: str) -> str:
    return f"{bucket_path(SCHEDULE, place.bucket)}, seq {int(scene.row(place)['seq'])}: {what}"


# ── entries ────────────────────────────────────────────────────────────────────────────────────


def entry_removed(scene: Scene) -> str | None:
    """A message is taken out."""
    return _removed(scene, _entry(scene))


def tombstone_removed(scene: Scene) -> str | None:
    """What ended a message is taken out: it would come back."""
    return _removed(scene, scene.choose(SCHEDULE, _is_tombstone))


def _removed(scene: Scene, place: RowPlace | None) -> str | None:
    if place is None:
        return None
    said = _said(place, scene, "taken out")
    scene.change(place, lambda rows: np.delete(rows, place.row))
    return said


def entry_repeated(scene: Scene) -> str | None:
    """A message stands there twice."""
    place = _entry(scene)
    if place is None:
        return None
    said = _said(place, scene, "stands there twice")
    here = place.row
    scene.change(place, lambda rows: concatenate([rows[: here + 1], rows[here:]], rows.dtype))
    return said


def rows_swapped(scene: Scene) -> str | None:
    """Two rows of a frame have changed places."""
    place = scene.choose(SCHEDULE, lambda bucket, rows: rows["seq"] != rows["seq"][0])
    if place is None:
        return None
    said = _said(place, scene, "exchanged with the first of its frame")

    def swap(rows: Rows) -> Rows:
        rows[[0, place.row]] = rows[[place.row, 0]]
        return rows

    scene.change(place, swap)
    return said


def entry_of_another_hour(scene: Scene) -> str | None:
    """A message is due in another hour than its file's."""
    place = _entry(scene)
    if place is None:
        return None
    others = (start_ms(place.bucket) - 1, end_ms(place.bucket), -HOUR_MS, 0, 1 << 50, 1 << 62)
    return scene.set(place, due_ms=scene.rng.choice(others))


def entry_due_otherwise(scene: Scene) -> str | None:
    """A message that ended is due at another time of its hour."""
    place = _ended(scene)
    if place is None:
        return None
    first_ms, due_ms = start_ms(place.bucket), int(scene.row(place)["due_ms"])
    other_ms = scene.rng.choice((first_ms, first_ms + 1, end_ms(place.bucket) - 1))
    return scene.set(place, due_ms=other_ms) if other_ms != due_ms else None


def entry_of_unknown_subject(scene: Scene) -> str | None:
    """A message is of a subject that nobody knows."""
    place = _entry(scene)
    unknown = scene.rng.choice((0, max(scene.subjects, default=0) + 1, 1 << 31))
    return scene.set(place, subject_id=unknown)


def entry_of_another_subject(scene: Scene) -> str | None:
    """A message went to somebody whom its subject is not for, or not to somebody."""
    options: list[tuple[Callable[[int, Rows], Mask], int]] = []
    for number, name in scene.subjects.items():
        for one in scene.faithful:
            if one.matches(name):
                if one.subject != "*":
                    options.append((_owed_nothing(scene, one.id, number), number))
            else:
                options.append((_had(scene, one.id, number), number))
    scene.rng.shuffle(options)
    for wanted, number in options:
        if (place := scene.choose(SCHEDULE, wanted)) is not None:
            return scene.set(place, subject_id=number)
    return None


def _had(scene: Scene, subscription_id: int, number: int) -> Callable[[int, Rows], Mask]:
    """Entries of other subjects that a subscription had, which matches none of this number."""

    def wanted(bucket: int, rows: Rows) -> Mask:
        mask: Mask = _is_entry(bucket, rows) & (rows["subscription_id"] == 0)
        mask &= rows["subject_id"] != number
        mask &= np.isin(rows["seq"], _had_by(scene, bucket, subscription_id))
        return mask

    return wanted


def _owed_nothing(scene: Scene, subscription_id: int, number: int) -> Callable[[int, Rows], Mask]:
    """Settled entries that a subscription was not to have, and would be by that subject."""
    one = scene.subscriptions[subscription_id]

    def wanted(bucket: int, rows: Rows) -> Mask:
        if not scene.is_retired(bucket):
            return np.zeros(len(rows), bool)
        mask: Mask = _is_entry(bucket, rows) & (rows["subscription_id"] == 0)
        mask &= ~scene.is_for(one, rows)
        mask &= had_for(one, one.subject, rows["seq"], rows["due_ms"])
        # One that was cancelled, or has moved, is owed to nobody.
        parts = [frame.rows for frame in scene.frames(SCHEDULE, bucket)]
        whole = [rows[_is_whole(rows)]["message_seq"] for rows in parts]
        mask &= ~np.isin(rows["seq"], np.concatenate([np.empty(0, np.uint64), *whole]))
        mask &= ~np.isin(rows["seq"], _had_by(scene, bucket, subscription_id))
        return mask

    return wanted


def _is_whole(rows: Rows) -> Mask:
    """Tombstones for everybody."""
    kinds = (RecordKind.CANCEL, RecordKind.MOVE, RecordKind.FIRE)
    mask: Mask = ((rows["flags"] & FLAG_REMOVAL) != 0) & np.isin(rows["kind"], kinds)
    return mask


def entry_of_another_message(scene: Scene) -> str | None:
    """A message that was published is a row of another one."""
    place = _publish(scene)
    if place is None:
        return None
    seq = int(scene.row(place)["message_seq"])
    others = [one for one in (seq - 1, seq + 1, 1, seq + 1000, 1 << 60) if one != seq]
    return scene.set(place, message_seq=scene.rng.choice(others))


def _publish(scene: Scene) -> RowPlace | None:
    return scene.choose(
        SCHEDULE,
        lambda bucket, rows: _is_entry(bucket, rows) & np.isin(rows["kind"], PUBLISHES),
    )


def entry_of_another_kind(scene: Scene) -> str | None:
    """A message that was published was moved or tried again, or the other way round."""
    place = _entry(scene)
    if place is None:
        return None
    is_publish = int(scene.row(place)["kind"]) in PUBLISHES
    kinds = [kind for kind in SCHEDULES if (kind in PUBLISHES) != is_publish]
    kinds.append(RecordKind.CANCEL)
    return scene.set(place, kind=scene.rng.choice(kinds))


def entry_for_somebody_else(scene: Scene) -> str | None:
    """What somebody had was for another one, who exists, or for one who never was."""
    faithful = {one.id for one in scene.faithful}

    def wanted(bucket: int, rows: Rows) -> Mask:
        had = [_had_by(scene, bucket, number) for number in faithful]
        mask: Mask = _is_entry(bucket, rows) & (rows["subscription_id"] == 0)
        mask &= np.isin(rows["seq"], np.concatenate([np.empty(0, np.uint64), *had]))
        return mask

    place = scene.choose(SCHEDULE, wanted)
    if place is None:
        return None
    seq = scene.row(place)["seq"]
    owners = {number for number in faithful if seq in _had_by(scene, place.bucket, number)}
    unknown = max(scene.subscriptions) + scene.rng.randrange(1, 1000)
    others = [*(faithful - owners), unknown]
    return scene.set(place, subscription_id=scene.rng.choice(others))


# ── tombstones ─────────────────────────────────────────────────────────────────────────────────


def tombstone_of_another(scene: Scene) -> str | None:
    """What ended a message ends another one of its hour."""
    place = scene.choose(SCHEDULE, _is_tombstone)
    if place is None:
        return None
    row = scene.row(place)
    others = scene.entries[place.bucket]
    # One of the same subject that is due at the same time cannot be told from it.
    is_other = others["due_ms"] != row["due_ms"]
    is_other |= (others["subject_id"] != row["subject_id"]) & (row["subject_id"] != 0)
    others = others[is_other & (others["seq"] != row["message_seq"])]
    if not len(others):
        return None
    return scene.set(place, message_seq=int(scene.rng.choice(others["seq"].tolist())))


def tombstone_of_nothing(scene: Scene) -> str | None:
    """What ended a message ends one that never was."""
    place = scene.choose(SCHEDULE, _is_tombstone)
    if place is None:
        return None
    known = scene.entries[place.bucket]["seq"].tolist()
    free = [seq for seq in range(max([0, *known]) + 2) if seq not in known]
    return scene.set(place, message_seq=scene.rng.choice(free))


def tombstone_due_otherwise(scene: Scene) -> str | None:
    """What ended a message names another due time."""
    place = scene.choose(SCHEDULE, _is_tombstone)
    if place is None:
        return None
    by_ms = scene.rng.choice((-1, 1, 60_000, HOUR_MS))
    return scene.set(place, due_ms=int(scene.row(place)["due_ms"]) + by_ms)


def tombstone_of_another_kind(scene: Scene) -> str | None:
    """A message was cancelled, and is said to go on; or what ended it is nothing that does."""
    kinds = [kind for kind in RecordKind if kind not in REMOVES]

    def is_cancel(bucket: int, rows: Rows) -> Mask:
        mask = _is_tombstone(bucket, rows)
        mask &= rows["kind"] == RecordKind.CANCEL
        return mask

    wanted = _is_tombstone
    if scene.rng.random() < 0.5:
        wanted, kinds = is_cancel, [RecordKind.MOVE, RecordKind.FIRE]
    place = scene.choose(SCHEDULE, wanted)
    return scene.set(place, kind=scene.rng.choice(kinds))


# ── files ──────────────────────────────────────────────────────────────────────────────────────


def _file(scene: Scene) -> int | None:
    buckets = scene.files(SCHEDULE)
    return scene.rng.choice(buckets) if buckets else None


def lose_schedule(scene: Scene) -> str | None:
    """The schedule log of an hour is gone, or both of its files."""
    bucket = _file(scene)
    if bucket is None:
        return None
    scene.path(SCHEDULE, bucket).unlink()
    both = scene.rng.random() < 0.5
    if both:
        scene.path(LogKind.DISPATCH, bucket).unlink(missing_ok=True)
    return f"{bucket_path(SCHEDULE, bucket)}: removed{', with its dispatch log' if both else ''}"


def cut_schedule(scene: Scene) -> str | None:
    """The schedule log of an hour ends before its length."""
    bucket = _file(scene)
    if bucket is None:
        return None
    path = scene.path(SCHEDULE, bucket)
    end = scene.rng.randrange(scene.hours[bucket].length)
    path.write_bytes(path.read_bytes()[:end])
    return f"{bucket_path(SCHEDULE, bucket)}: cut at {end}"


def lose_schedule_frame(scene: Scene) -> str | None:
    """A frame of the schedule log is gone, and the catalog knows how long the file is now."""
    bucket = _file(scene)
    if bucket is None:
        return None
    frames = scene.frames(SCHEDULE, bucket)
    number = scene.rng.randrange(len(frames))
    scene.write(SCHEDULE, bucket, frames[:number] + frames[number + 1 :])
    return f"{bucket_path(SCHEDULE, bucket)}: without frame {number}"


def swap_schedule_frames(scene: Scene) -> str | None:
    """Two frames of the schedule log have changed places."""
    buckets = [one for one in scene.files(SCHEDULE) if len(scene.frames(SCHEDULE, one)) > 1]
    if not buckets:
        return None
    bucket = scene.rng.choice(buckets)
    frames = list(scene.frames(SCHEDULE, bucket))
    one, other = scene.rng.sample(range(len(frames)), 2)
    frames[one], frames[other] = frames[other], frames[one]
    scene.write(SCHEDULE, bucket, frames)
    return f"{bucket_path(SCHEDULE, bucket)}: frames {one} and {other} exchanged"


def exchange_schedules(scene: Scene) -> str | None:
    """The schedule logs of two hours have changed places."""
    buckets = scene.files(SCHEDULE)
    if len(buckets) < 2:
        return None
    one, other = scene.rng.sample(buckets, 2)
    frames = scene.frames(SCHEDULE, one)
    scene.write(SCHEDULE, one, scene.frames(SCHEDULE, other))
    scene.write(SCHEDULE, other, frames)
    names = (bucket_path(SCHEDULE, bucket) for bucket in (one, other))
    return " and ".join(names) + ": exchanged"


def flip_schedule(scene: Scene) -> str | None:
    """A bit of a header or a row is another one, and its checksum is not made anew."""
    bucket = _file(scene)
    if bucket is None:
        return None
    frames = scene.frames(SCHEDULE, bucket)
    number = scene.rng.randrange(len(frames))
    start = sum(len(frame.sealed()) for frame in frames[:number])
    whole = replace(frames[number], payload=b"").sealed()
    at = start + scene.rng.randrange(len(whole) - 8)
    path = scene.path(SCHEDULE, bucket)
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << scene.rng.randrange(8)
    path.write_bytes(data)
    return f"{bucket_path(SCHEDULE, bucket)}: a bit of byte {at}"
