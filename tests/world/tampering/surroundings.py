"""What is altered around the hours: message log, catalog, FORMAT; and bodies.

As in `deliveries`, an alteration takes a scene and says what it has done, or None.

Cost: one file is written, or one commit. Threads: functions without state.
"""

import json
import shutil
from dataclasses import replace

import numpy as np

from delayserver.records.tables import (
    CHECKPOINT_KEY,
    hour_key,
    number_key,
    pack_checkpoint,
    read_checkpoint,
)
from storage.buckets import bucket_path, end_ms
from storage.catalog import Table
from storage.directory import CATALOG_DIRECTORY, FORMAT_FILE
from storage.frame import Rows
from storage.message_log import DIRECTORY as MESSAGES
from storage.rows import FLAG_REMOVAL, LogKind, Outcome, RecordKind
from tests.world.resealing import OpenFrame, read_frames, write_frames
from tests.world.tampering.scene import Mask, RowPlace, Scene

SCHEDULE, DISPATCH = LogKind.SCHEDULE, LogKind.DISPATCH

# ── message log ────────────────────────────────────────────────────────────────────────────────


def lose_messages(scene: Scene) -> str | None:
    """The message log is gone, though something was filed."""
    with scene.catalog() as catalog:
        if not read_checkpoint(catalog):
            return None
    shutil.rmtree(scene.root / MESSAGES)
    return f"{MESSAGES}/: removed"


def lose_record(scene: Scene) -> str | None:
    """A record is taken out of the middle of the message log."""
    with scene.catalog() as catalog:
        checkpoint_seq = read_checkpoint(catalog)
    options = []
    for path in sorted((scene.root / MESSAGES).iterdir()):
        frames = read_frames(path)
        for number, frame in enumerate(frames):
            seqs = frame.rows["seq"]
            # The last of a frame may stand for many, and what is behind the last of all was never
            # accepted as far as anybody can tell.
            where = np.flatnonzero((seqs > checkpoint_seq) & (seqs != seqs[-1]))
            options += [(path, frames, number, row) for row in where.tolist()]
    if not options:
        return None
    path, frames, number, row = scene.rng.choice(options)
    seq = int(frames[number].rows["seq"][row])
    frames[number] = OpenFrame(
        frames[number].header, np.delete(frames[number].rows, row), frames[number].payload
    )
    write_frames(path, frames)
    return f"{MESSAGES}/{path.name}, seq {seq}: taken out"


# ── catalog ────────────────────────────────────────────────────────────────────────────────────


def miscount_hour(scene: Scene) -> str | None:
    """The catalog says of an hour what its file does not."""
    buckets = scene.files(SCHEDULE)
    if not buckets:
        return None
    bucket = scene.rng.choice(buckets)
    state = scene.hours[bucket]
    field = scene.rng.choice(("length", "entries", "removals", "last_entry_seq", "first_seq"))
    value = int(getattr(state, field))
    if field == "length":
        ends = np.cumsum([0, *(len(frame.sealed()) for frame in scene.frames(SCHEDULE, bucket))])
        value = int(scene.rng.choice([*ends[:-1].tolist(), value + 64]))
    else:
        value += scene.rng.choice((1, 7)) if not value else scene.rng.choice((-1, 1, 7))
    if field == "first_seq" and not value:
        return None
    scene.say_of_hour(bucket, replace(state, **{field: value}))  # type: ignore[arg-type]
    return f"the catalog of {bucket_path(SCHEDULE, bucket)}: {field} is {value}"


def _recorded(scene: Scene, kind: RecordKind) -> set[int]:
    """The subjects or subscriptions that the message log still tells of."""
    field = "subject_id" if kind is RecordKind.SUBJECT else "subscription_id"
    found: set[int] = set()
    for path in (scene.root / MESSAGES).iterdir():
        for frame in read_frames(path):
            found.update(frame.rows[field][frame.rows["kind"] == kind].tolist())
    return found


def forget_subscription(scene: Scene) -> str | None:
    """The catalog knows nothing of a subscription that had something."""
    seen: set[int] = set()
    for bucket in scene.files(DISPATCH):
        for frame in scene.frames(DISPATCH, bucket):
            delivered = frame.rows["outcome"] == Outcome.DELIVERED
            seen.update(frame.rows["subscription_id"][delivered].tolist())
    options = sorted(seen & scene.subscriptions.keys() - _recorded(scene, RecordKind.SUBSCRIPTION))
    if not options:
        return None
    number = scene.rng.choice(options)
    with scene.catalog() as catalog:
        catalog.commit({Table.SUBSCRIPTIONS: [(number_key(number), None)]})
    return f"the catalog: without subscription {number}"


def forget_subject(scene: Scene) -> str | None:
    """The catalog knows nothing of a subject that something is of."""
    seen: set[int] = set()
    for bucket in scene.files(SCHEDULE):
        seen.update(scene.entries[bucket]["subject_id"].tolist())
    options = sorted(seen & scene.subjects.keys() - _recorded(scene, RecordKind.SUBJECT))
    if not options:
        return None
    number = scene.rng.choice(options)
    with scene.catalog() as catalog:
        catalog.commit({Table.SUBJECTS: [(number_key(number), None)]})
    return f"the catalog: without subject {number}"


def run_ahead(scene: Scene) -> str | None:
    """The checkpoint is behind what was ever accepted."""
    with scene.catalog() as catalog:
        ahead = read_checkpoint(catalog) + 10_000
        catalog.commit({Table.META: [(CHECKPOINT_KEY, pack_checkpoint(ahead))]})
    return f"the catalog: checkpoint {ahead}"


def forget_hour(scene: Scene) -> str | None:
    """The catalog knows nothing of an hour in which something waits."""
    options = [
        bucket
        for bucket in scene.files(SCHEDULE)
        if _waits(scene, bucket)
        # Else it may be what a purge has left.
        and (end_ms(bucket) > scene.now_ms or scene.path(DISPATCH, bucket).exists())
    ]
    if not options:
        return None
    bucket = scene.rng.choice(options)
    with scene.catalog() as catalog:
        catalog.commit({Table.HOURS: [(hour_key(bucket), None)]})
    return f"the catalog: without {bucket_path(SCHEDULE, bucket)}"


def retire_hour(scene: Scene) -> str | None:
    """The catalog says that all of an hour is settled in which something waits."""
    options = [bucket for bucket in scene.files(SCHEDULE) if _waits(scene, bucket)]
    if not options:
        return None
    bucket = scene.rng.choice(options)
    scene.say_of_hour(bucket, replace(scene.hours[bucket], retired_ms=scene.now_ms))
    return f"the catalog: {bucket_path(SCHEDULE, bucket)} is retired"


def _waits(scene: Scene, bucket: int) -> bool:
    """Whether an entry that is filed has no ending at all."""
    ended = [frame.rows["seq"] for frame in scene.frames(DISPATCH, bucket)]
    for frame in scene.frames(SCHEDULE, bucket):
        is_removal = (frame.rows["flags"] & FLAG_REMOVAL) != 0
        ended.append(frame.rows["message_seq"][is_removal])
    for path in (scene.root / MESSAGES).iterdir():  # What ended it may not be filed.
        ended += [frame.rows["target_seq"] for frame in read_frames(path)]
    seqs = scene.entries[bucket]["seq"]
    return not np.isin(seqs, np.concatenate([np.empty(0, np.uint64), *ended])).all()


def lose_catalog(scene: Scene) -> str | None:
    """The catalog is gone."""
    shutil.rmtree(scene.root / CATALOG_DIRECTORY)
    return f"{CATALOG_DIRECTORY}/: removed"


# ── FORMAT ─────────────────────────────────────────────────────────────────────────────────────


def change_stamp(scene: Scene) -> str | None:
    """FORMAT names another stamp than the frames have."""
    if not any(scene.files(kind) for kind in (SCHEDULE, DISPATCH)):
        return None
    path = scene.root / FORMAT_FILE
    document = json.loads(path.read_text())
    document["stamp"] = document["stamp"] % ((1 << 32) - 1) + 1
    path.write_text(json.dumps(document))
    return f"{FORMAT_FILE}: another stamp"


def break_format(scene: Scene) -> str | None:
    """FORMAT is gone, is not one, or is one of a server to come."""
    path = scene.root / FORMAT_FILE
    match scene.rng.randrange(3):
        case 0:
            path.unlink()
            return f"{FORMAT_FILE}: removed"
        case 1:
            path.write_bytes(path.read_bytes()[: scene.rng.randrange(10)])
            return f"{FORMAT_FILE}: cut"
        case _:
            document = json.loads(path.read_text())
            path.write_text(json.dumps({**document, "format": 1000}))
            return f"{FORMAT_FILE}: of format 1000"


# ── bodies ─────────────────────────────────────────────────────────────────────────────────────


def _body(scene: Scene) -> RowPlace | None:
    def wanted(bucket: int, rows: Rows) -> Mask:
        mask: Mask = (rows["flags"] & FLAG_REMOVAL) == 0
        return mask

    return scene.choose(SCHEDULE, wanted)


def alter_body(scene: Scene) -> str | None:
    """A bit of a payload is another one; the checksum of all payloads together is made anew."""
    place = _body(scene)
    if place is None:
        return None
    row = scene.row(place)
    start, length = int(row["payload_offset"]), int(row["payload_length"])
    frames = list(scene.frames(SCHEDULE, place.bucket))
    payload = bytearray(frames[place.frame].payload)
    at = start + scene.rng.randrange(length)
    payload[at] ^= 1 << scene.rng.randrange(8)
    frames[place.frame] = replace(frames[place.frame], payload=bytes(payload))
    scene.write(SCHEDULE, place.bucket, frames)
    return f"{bucket_path(SCHEDULE, place.bucket)}, seq {int(row['seq'])}: byte {at} of payloads"


def exchange_body(scene: Scene) -> str | None:
    """A row has the payload of another one, or a stretch that is none."""
    place = _body(scene)
    if place is None:
        return None
    rows = scene.frames(SCHEDULE, place.bucket)[place.frame].rows
    offset = int(scene.row(place)["payload_offset"])
    others = [one for one in (0, 1, offset + 1, *rows["payload_offset"].tolist()) if one != offset]
    return scene.set(place, payload_offset=scene.rng.choice(others))


def misname_body(scene: Scene) -> str | None:
    """A row names another checksum of its payload."""
    place = _body(scene)
    if place is None:
        return None
    crc = int(scene.row(place)["payload_crc"]) ^ 1 << scene.rng.randrange(32)
    return scene.set(place, payload_crc=crc)


def hide_key(scene: Scene) -> str | None:
    """A row has a key that its payload has not, or the other way round."""
    place = _body(scene)
    if place is None:
        return None
    row = scene.row(place)
    other = bytes(16) if any(row["key_hash"].tobytes()) else b"k" * 16

    def change(rows: Rows) -> Rows:
        rows["key_hash"][place.row] = np.void(other)
        return rows

    scene.change(place, change)
    return f"{bucket_path(SCHEDULE, place.bucket)}, seq {int(row['seq'])}: another key"
