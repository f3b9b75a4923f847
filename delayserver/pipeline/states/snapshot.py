"""A data directory as readers find it: its stamp, its catalog, and the rows not filed yet.

If a directory has several shards, each is opened by itself (`open_directories`): seqs and the
numbers of subjects and subscriptions are each shard's own.

Nothing is locked and nothing is written: a server may be running on the directory. Each read of the
catalog is a transaction of its own and sees the newest commit, so the order of the reads matters:

    1. which hours are retired      everything that settled them is recorded already
    2. the message log              records up to some seq; records deleted meanwhile were filed
    3. checkpoint, table of hours   how far the schedule log is filed, at least up to there
    4. the hours' files             they only grow, or are deleted after their retention

So every record up to `through_seq` is seen in the schedule log or in the message log.

A directory that was opened goes to tasks on other machines as its path. A file that is missing
there would count as one past its retention, so each task first asks whether it sees the same
directory (`Directory.check_here`).

Cost: one pass over the small tables of the catalog and the message log, which is as long as a
segment and the records that are not filed. Threads: values.
"""

import contextlib
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from delayserver.errors import InputError, PipelineError
from delayserver.pipeline.exports.exported import (
    is_export,
    newest_moment,
    open_export,
    shard_places,
)
from delayserver.pipeline.exports.place import shown_url
from delayserver.pipeline.logs import logs
from delayserver.records import tables
from delayserver.records.subscriptions import Subscription, decode_subscription
from delayserver.records.tables import HourState, read_checkpoint, read_hours, read_subjects
from delayserver.schedule.filing import by_bucket, schedule_rows
from storage.buckets import days_of, is_day
from storage.catalog import MAX_BYTES, Catalog, LmdbCatalog, Table
from storage.check import NotADataDirectoryError
from storage.directory import CATALOG_DIRECTORY, ID_SECRET_BYTES, open_identity
from storage.errors import DiskError
from storage.files import Files, OsFiles
from storage.frame import Damage, Frame, Rows, unseal
from storage.kinds import READABLE
from storage.message_log import DIRECTORY as MESSAGES
from storage.message_log import parse_segment_name
from storage.replicated.log import OFFICE_KEY
from storage.rows import HOUR_MS, MESSAGE_DTYPE, RecordKind, concatenate
from storage.shards import read_shard_count, refuse_another, shard_directory


class OtherNodeError(PipelineError):
    """A task does not see the data directory, or sees another one under its path."""

    def __init__(self, root: str, host: str) -> None:
        super().__init__(
            f"executor {host} does not see {shown_url(root)}, or sees another directory there; "
            "mount it under the same path on the driver and on each executor"
        )


@dataclass(frozen=True, slots=True)
class Directory:
    """A data directory, open for reading."""

    root: str
    stamp: int
    shard: int = 0
    id_secret: bytes = bytes(ID_SECRET_BYTES)
    prefix: str = ""
    """The beginning of the paths of its files, if several shards are read together."""
    moment: str = ""
    """The moment of an export; empty for a directory that a server has."""

    def named(self, damage: Damage) -> Damage:
        """The damage, with a path that names the shard."""
        return replace(damage, path=f"{self.prefix}{damage.path}") if self.prefix else damage

    def check_here(self) -> None:
        """Check this before a task reads anything. Raises OtherNodeError."""
        check_here(self.files, self.root, self.stamp)

    @property
    def files(self) -> Files:
        """Its files."""
        if self.moment:
            return open_export(self.root, self.moment)
        return OsFiles(self.root, readonly=True)

    @contextlib.contextmanager
    def catalog(self) -> Iterator[Catalog]:
        """Its catalog. Raises CatalogError if there is none."""
        if self.moment:
            with open_export(self.root, self.moment).catalog(MAX_BYTES) as exported:
                yield exported
            return
        path = str(Path(self.root) / CATALOG_DIRECTORY)
        catalog = LmdbCatalog(path, max_bytes=MAX_BYTES, readonly=True)
        try:
            yield catalog
        finally:
            catalog.close()


def check_here(files: Files, root: str, stamp: int) -> None:
    """Check that the directory with this stamp is here. Raises OtherNodeError."""
    try:
        found = open_identity(files, random_bytes=None, of=READABLE)
    except (FileNotFoundError, DiskError):
        found = None  # An export in a directory depends on mounts, too.
    if found is None or found.stamp != stamp:
        raise OtherNodeError(root, socket.gethostname())


def open_directory(root: str) -> Directory:
    """Raises NotADataDirectoryError, FormatVersionError, DamageError."""
    try:
        files = OsFiles(root, readonly=True)
        identity = open_identity(files, random_bytes=None, of=READABLE)
    except FileNotFoundError:
        raise NotADataDirectoryError(root) from None
    return Directory(root, identity.stamp, identity.shard, identity.id_secret)


def open_directories(*roots: str) -> list[Directory]:
    """The shards of all of these: each is a data directory, one of several shards, or an export.

    They are in the order of their numbers. Raises the errors of `open_directory`, also for a shard
    that is not there; InputError where two have the same number, and so are different servers."""
    found = [one for root in roots for one in _open_one(root)]
    known: dict[int, Directory] = {}
    for one in found:
        other = known.setdefault(one.shard, one)
        if other is not one:
            raise InputError(
                f"{shown_url(other.root)} and {shown_url(one.root)} are both shard {one.shard}, so "
                "they are of different servers, or the same twice: run the job for each"
            )
    if len(roots) > 1:
        found = [replace(one, prefix=f"{shown_url(one.root)}/") for one in found]
    return sorted(found, key=lambda one: one.shard)


def _open_one(root: str) -> list[Directory]:
    if is_export(root):
        return _open_exported(root)
    count = read_shard_count(OsFiles(root, readonly=True))
    if count is None:
        return [open_directory(root)]
    found = []
    for shard in range(count):
        name = shard_directory(shard)
        directory = replace(open_directory(f"{root}/{name}"), prefix=f"{name}/")
        refuse_another(directory.root, directory.shard, shard)
        found.append(directory)
    return found


def wanted_directories(roots: Sequence[str], shards: Sequence[int]) -> list[Directory]:
    """The wanted shards of these directories; all, if none is named.

    Raises the errors of `open_directories`, and InputError for a shard that does not exist."""
    found = open_directories(*roots)
    if not shards:
        return found
    known = [one.shard for one in found]
    unknown = [shard for shard in shards if shard not in known]
    if unknown:
        raise InputError(
            f"the option shard names shard {unknown[0]}, but {', '.join(roots)} has "
            f"{'shard' if len(known) == 1 else 'shards'} {', '.join(map(str, known))}"
        )
    return [one for one in found if one.shard in shards]


def _open_exported(url: str) -> list[Directory]:
    """The shards of an export, each at its newest moment. Raises NotAnExportError, DamageError."""
    found = []
    places = shard_places(url)
    for shard, place in enumerate(places):
        moment = newest_moment(place)
        identity = open_identity(open_export(place, moment), random_bytes=None)
        prefix = ""
        if len(places) > 1:
            refuse_another(place, identity.shard, shard)
            prefix = f"{shard_directory(shard)}/"
        stamp, secret = identity.stamp, identity.id_secret
        found.append(Directory(place, stamp, identity.shard, secret, prefix, moment))
    return found


def read_subscriptions(catalog: Catalog) -> dict[int, Subscription]:
    """Subscriptions by their numbers, deleted ones too."""
    return {one.id: one for one in tables.read_subscriptions(catalog)}


@dataclass(frozen=True, slots=True)
class StatesSnapshot:
    """Everything that was known at one moment, except the rows in the hours' files."""

    hours: dict[int, HourState]
    """Hours and days that are in the catalog, or hours that a record in the message log is due
    in."""
    retired: dict[int, int]
    """Hours that were retired, and the last entry that this holds for."""
    through_seq: int
    """Every record up to this seq is seen."""
    checkpoint_seq: int
    unfiled: dict[int, Rows]
    """By hour or day, the schedule rows that stand in the message log; most are filed as well."""
    subjects: dict[int, str]
    subscriptions: dict[int, Subscription]
    """Deleted ones too."""
    damage: list[Damage] = field(default_factory=list)
    """Damage of the message log."""


def take_snapshot(files: Files, catalog: Catalog, *, stamp: int) -> StatesSnapshot:
    """Read the directory in the order of the module's docstring. Raises CatalogError, DiskError."""
    retired = {
        hour: state.last_entry_seq
        for hour, state in read_hours(catalog).items()
        if state.retired_ms
    }
    filed_seq = read_checkpoint(catalog)
    tail = _read_message_log(files, stamp)
    checkpoint_seq = read_checkpoint(catalog)
    hours = read_hours(catalog)
    records = tail.rows
    unfiled = {}
    scheduled, _ = schedule_rows(records)
    hours_due = scheduled["due_ms"] // HOUR_MS
    days_due = days_of(hours_due)
    is_far = np.isin(days_due, [bucket for bucket in hours if is_day(bucket)])
    for hour, here in by_bucket(np.where(is_far, days_due, hours_due)):
        rows = scheduled[here]
        # The hour of filed records that the catalog does not know is past its retention.
        rows = rows if hour in hours else rows[rows["seq"] > checkpoint_seq]
        if len(rows):
            unfiled[hour] = rows
            hours.setdefault(hour, HourState())
    return StatesSnapshot(
        hours=hours,
        retired={hour: seq for hour, seq in retired.items() if hour in hours},
        through_seq=max(tail.seen_through_seq(checkpoint_seq), checkpoint_seq),
        checkpoint_seq=checkpoint_seq,
        unfiled=unfiled,
        subjects=tail.subjects | read_subjects(catalog),
        subscriptions=read_subscriptions(catalog) | tail.subscriptions_after(checkpoint_seq),
        damage=[
            *tail.damage,
            *_gaps(records["seq"], tail.last_seqs, checkpoint_seq),
            *_missing_end(files, catalog, tail, filed_seq),
        ],
    )


@dataclass(slots=True)
class _Tail:
    """The message log."""

    rows: Rows
    last_seqs: np.ndarray
    """The last seq that each record takes: an import takes as many as it has rows."""
    subjects: dict[int, str]
    subscriptions: list[tuple[int, Subscription]]
    damage: list[Damage]

    def seen_through_seq(self, checkpoint_seq: int) -> int:
        """The last seq, without those of an import that is not filed: its rows stand elsewhere."""
        unseen = (self.rows["kind"] == RecordKind.IMPORT) & (self.last_seqs > checkpoint_seq)
        if unseen.any():
            return int(self.rows["seq"][np.argmax(unseen)]) - 1
        return int(self.last_seqs[-1]) if len(self.last_seqs) else 0

    def subscriptions_after(self, checkpoint_seq: int) -> dict[int, Subscription]:
        """The newest definitions that the catalog does not have."""
        return {one.id: one for seq, one in self.subscriptions if seq > checkpoint_seq}


def _read_message_log(files: Files, stamp: int) -> _Tail:
    tail = _Tail(np.empty(0, MESSAGE_DTYPE), np.empty(0, np.uint64), {}, [], [])
    parts: list[Rows] = []
    lasts: list[np.ndarray] = []
    for piece in logs.message_pieces(files):
        for found in logs.read(files, piece, stamp=stamp, payload=True):
            if isinstance(found, Damage):
                tail.damage.append(found)
            else:
                parts.append(found.rows)
                lasts.append(found.rows["seq"].copy())
                lasts[-1][-1] = found.last_seq
                _read_definitions(found, tail)
    tail.rows = concatenate(parts, MESSAGE_DTYPE)
    tail.last_seqs = np.concatenate([tail.last_seqs, *lasts])
    return tail


def _read_definitions(frame: Frame, tail: _Tail) -> None:
    assert frame.payload is not None
    kinds = (RecordKind.SUBJECT, RecordKind.SUBSCRIPTION)
    for row in frame.rows[np.isin(frame.rows["kind"], kinds)]:
        start = int(row["payload_offset"])
        data = unseal(frame.payload[start : start + int(row["payload_length"])])
        if data is None:
            continue  # A start of the server reports it as damage.
        if row["kind"] == RecordKind.SUBJECT:
            tail.subjects[int(row["subject_id"])] = data.decode()
        else:
            found = decode_subscription(data, int(row["subscription_id"]))
            tail.subscriptions.append((int(row["seq"]), found))


def _gaps(seqs: np.ndarray, last_seqs: np.ndarray, checkpoint_seq: int) -> Iterator[Damage]:
    """Damage for records behind the checkpoint that are missing."""
    if not len(seqs):
        return
    before = np.concatenate([[np.uint64(min(int(seqs[0]) - 1, checkpoint_seq))], last_seqs[:-1]])
    for at in np.flatnonzero(seqs > before + np.uint64(1)).tolist():
        first, last = int(before[at]) + 1, int(seqs[at]) - 1
        if last > checkpoint_seq:
            reason = "records are missing"
            yield Damage(MESSAGES, 0, 0, reason, torn=False, first_seq=first, last_seq=last)


def _missing_end(files: Files, catalog: Catalog, tail: _Tail, filed_seq: int) -> Iterator[Damage]:
    """Damage at the end of the message log, if it does not reach as far as the catalog had filed.

    A server deletes filed segments except for its newest one, and makes the directory at its start.
    A replica has its message log elsewhere."""
    if not filed_seq or catalog.get(Table.META, OFFICE_KEY) is not None:
        return
    names = (parse_segment_name(name) for name in files.list(MESSAGES))
    first_seqs = [first_seq for first_seq in names if first_seq is not None]
    last_seq = max([first_seq - 1 for first_seq in first_seqs] + tail.last_seqs[-1:].tolist() + [0])
    if first_seqs and last_seq < filed_seq:
        reason = f"the message log ends with seq {last_seq}, the checkpoint is {filed_seq}"
        first, last = last_seq + 1, filed_seq
        yield Damage(MESSAGES, 0, 0, reason, torn=False, first_seq=first, last_seq=last)
    elif not first_seqs and not files.exists(MESSAGES):
        reason = "the message log is missing: what was accepted behind the checkpoint is lost"
        yield Damage(MESSAGES, 0, 0, reason, torn=False, first_seq=filed_seq + 1)
