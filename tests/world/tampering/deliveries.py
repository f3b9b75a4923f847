"""What is altered of the dispatch log: who had what, when, and whether.

Each alteration takes a scene, and says what it has done, or None where nothing is for it. It
changes only what an audit has to notice.

Cost: one file is written. Threads: functions without state.
"""

from dataclasses import replace

import numpy as np

from delayserver.pipeline.audits.plan import SKEW_MS
from storage.buckets import bucket_path
from storage.frame import Rows
from storage.rows import HOUR_MS, LogKind, Outcome, concatenate
from tests.world.tampering.scene import Mask, RowPlace, Scene

DISPATCH = LogKind.DISPATCH
_LATE_MS = (1, HOUR_MS, 40_000 * HOUR_MS, 1 << 61)


def _is_delivered(bucket: int, rows: Rows) -> Mask:
    mask: Mask = rows["outcome"] == Outcome.DELIVERED
    return mask


def _delivered(scene: Scene) -> RowPlace | None:
    return scene.choose(DISPATCH, _is_delivered)


def _any(scene: Scene) -> RowPlace | None:
    return scene.choose(DISPATCH, lambda bucket, rows: np.ones(len(rows), bool))


def _proof(scene: Scene) -> RowPlace | None:
    """A row that alone says that somebody had what is settled."""
    return scene.choose(DISPATCH, lambda bucket, rows: _is_proof(scene, bucket, rows))


def _is_proof(scene: Scene, bucket: int, rows: Rows) -> Mask:
    if not scene.is_retired(bucket):
        return np.zeros(len(rows), bool)
    mask = _is_delivered(bucket, rows)
    mask &= scene.is_owed(bucket, rows)
    return mask


def become_dropped(scene: Scene) -> str | None:
    """What was delivered was dropped."""
    place = _delivered(scene)
    return scene.set(place, outcome=Outcome.DROPPED)


def become_unknown_outcome(scene: Scene) -> str | None:
    """Something happened that no server does."""
    place = _any(scene)
    return scene.set(place, outcome=scene.rng.choice((0, 3, 9, 255)))


def become_unknown_subscription(scene: Scene) -> str | None:
    """Somebody had it who never was."""
    place = _any(scene)
    unknown = max(scene.subscriptions, default=0) + scene.rng.randrange(1, 1000)
    return scene.set(place, subscription_id=unknown)


def become_another_subscription(scene: Scene) -> str | None:
    """Somebody else had it."""
    place = _proof(scene)
    if place is None:
        return None
    mine = int(scene.row(place)["subscription_id"])
    others = [number for number in scene.subscriptions if number != mine]
    return scene.set(place, subscription_id=scene.rng.choice(others)) if others else None


def become_another_row(scene: Scene) -> str | None:
    """It says of another schedule row what is so of its own."""
    place = _delivered(scene)
    if place is None:
        return None
    row = scene.row(place)
    others = scene.entries[place.bucket]
    others = others[(others["seq"] != row["seq"]) & (others["message_seq"] != row["message_seq"])]
    if not len(others):
        return None
    return scene.set(place, seq=int(scene.rng.choice(others["seq"].tolist())))


def become_unknown_row(scene: Scene) -> str | None:
    """It is of a schedule row that is none of its hour."""
    place = _any(scene)
    if place is None:
        return None
    known = scene.entries[place.bucket]["seq"].tolist()
    free = [seq for seq in range(1, max([0, *known])) if seq not in known]
    return scene.set(place, seq=scene.rng.choice(free)) if free else None


def become_another_message(scene: Scene) -> str | None:
    """It names another message than its schedule row does."""
    place = _any(scene)
    if place is None:
        return None
    seq = int(scene.row(place)["message_seq"])
    other = scene.rng.choice([one for one in (seq - 1, seq + 1, 1, seq + 1000) if one != seq])
    return scene.set(place, message_seq=other)


def become_due_otherwise(scene: Scene) -> str | None:
    """It names another due time than its schedule row does."""
    place = _any(scene)
    if place is None:
        return None
    by_ms = scene.rng.choice((-HOUR_MS, -500, -1, 1, 60_000))
    return scene.set(place, due_ms=int(scene.row(place)["due_ms"]) + by_ms)


def become_early(scene: Scene) -> str | None:
    """It was delivered before its time."""
    place = _delivered(scene)
    if place is None:
        return None
    by_ms = scene.rng.choice((1, 1000, HOUR_MS))
    return scene.set(place, settled_ms=int(scene.row(place)["due_ms"]) - by_ms)


def become_future(scene: Scene) -> str | None:
    """It was settled at a time that has not come."""
    place = _any(scene)
    by_ms = SKEW_MS + scene.rng.choice(_LATE_MS)
    return scene.set(place, settled_ms=scene.now_ms + by_ms)


def become_timeless(scene: Scene) -> str | None:
    """It was settled before there was time."""
    place = _any(scene)
    return scene.set(place, settled_ms=scene.rng.choice((0, -1, -(1 << 62))))


def be_removed(scene: Scene) -> str | None:
    """The record of a delivery is taken out of an hour that is settled."""
    place = _proof(scene)
    if place is None:
        return None
    row = scene.row(place)
    scene.change(place, lambda rows: np.delete(rows, place.row))
    return f"{bucket_path(DISPATCH, place.bucket)}, seq {int(row['seq'])}: taken out"


def be_repeated(scene: Scene) -> str | None:
    """It was delivered twice."""
    place = _delivered(scene)
    if place is None:
        return None

    def repeat(rows: Rows) -> Rows:
        at = scene.rng.randrange(len(rows) + 1)
        mine = rows[place.row : place.row + 1]
        return concatenate([rows[:at], mine, rows[at:]], rows.dtype)

    seq = int(scene.row(place)["seq"])
    scene.change(place, repeat)
    return f"{bucket_path(DISPATCH, place.bucket)}, seq {seq}: stands there twice"


# ── files ──────────────────────────────────────────────────────────────────────────────────────


def _proven_file(scene: Scene) -> tuple[int, int] | None:
    """A file, and a frame of it that alone says that somebody had something."""
    place = _proof(scene)
    return None if place is None else (place.bucket, place.frame)


def lose_file(scene: Scene) -> str | None:
    """The dispatch log of a settled hour is gone."""
    found = _proven_file(scene)
    if found is None:
        return None
    scene.path(DISPATCH, found[0]).unlink()
    return f"{bucket_path(DISPATCH, found[0])}: removed"


def be_cut(scene: Scene) -> str | None:
    """The dispatch log of a settled hour ends before or within a frame."""
    found = _proven_file(scene)
    if found is None:
        return None
    bucket, number = found
    frames = scene.frames(DISPATCH, bucket)
    end = sum(len(frame.sealed()) for frame in frames[:number])
    end += scene.rng.choice((0, 1, 100, len(frames[number].sealed()) - 1))
    path = scene.path(DISPATCH, bucket)
    path.write_bytes(path.read_bytes()[:end])
    return f"{bucket_path(DISPATCH, bucket)}: cut at {end}"


def lose_frame(scene: Scene) -> str | None:
    """A frame of the dispatch log of a settled hour is gone."""
    found = _proven_file(scene)
    if found is None:
        return None
    bucket, number = found
    frames = scene.frames(DISPATCH, bucket)
    scene.write(DISPATCH, bucket, frames[:number] + frames[number + 1 :])
    return f"{bucket_path(DISPATCH, bucket)}: without frame {number}"


def be_of_another_hour(scene: Scene) -> str | None:
    """The dispatch logs of two hours have changed places."""
    buckets = scene.files(DISPATCH)
    if len(buckets) < 2:
        return None
    one, other = scene.rng.sample(buckets, 2)
    frames = scene.frames(DISPATCH, one)
    scene.write(DISPATCH, one, scene.frames(DISPATCH, other))
    scene.write(DISPATCH, other, frames)
    names = (bucket_path(DISPATCH, bucket) for bucket in (one, other))
    return " and ".join(names) + ": exchanged"


def be_flipped(scene: Scene) -> str | None:
    """A byte of a record of a settled hour is another one, and its checksum is not made anew."""
    found = _proven_file(scene)
    if found is None:
        return None
    bucket, number = found
    frames = scene.frames(DISPATCH, bucket)
    start = sum(len(frame.sealed()) for frame in frames[:number])
    whole = replace(frames[number], payload=b"").sealed()
    at = start + scene.rng.randrange(len(whole) - 8)
    path = scene.path(DISPATCH, bucket)
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << scene.rng.randrange(8)
    path.write_bytes(data)
    return f"{bucket_path(DISPATCH, bucket)}: a bit of byte {at}"
