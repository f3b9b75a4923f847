"""A data directory that is open for alterations: its frames, and what its catalog says.

Whoever alters it knows all formats: checksums are made anew, and where a schedule file is longer or
shorter than it was, the catalog says so, too.

Cost: a copy of every file of both logs. Threads: one.
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from delayserver.records.receivers import had_for
from delayserver.records.subscriptions import Subscription, decode_subscription
from delayserver.records.tables import HourState, hour_key, read_hours, read_subjects
from storage.buckets import bucket_path
from storage.catalog import LmdbCatalog, Table
from storage.directory import CATALOG_DIRECTORY
from storage.frame import Rows
from storage.rows import FLAG_REMOVAL, SCHEDULE_DTYPE, LogKind, concatenate
from tests.world.resealing import OpenFrame, read_frames, write_frames
from tests.world.tampering.victims import CATALOG_BYTES, Victim

Mask = np.ndarray
Wanted = Callable[[int, Rows], Mask]
"""Which rows of a frame of a bucket are for an alteration."""


@dataclass(frozen=True, slots=True)
class RowPlace:
    """Where a row stands."""

    kind: LogKind
    bucket: int
    frame: int
    row: int


class Scene:
    """A data directory, and somebody with dice who means it ill."""

    def __init__(self, victim: Victim, rng: random.Random) -> None:
        self.rng = rng
        self.root = victim.root
        self.now_ms = victim.now_ms
        with self.catalog() as catalog:
            self.hours = read_hours(catalog)
            self.subjects = read_subjects(catalog)
            found = (decode_subscription(value) for _, value in catalog.scan(Table.SUBSCRIPTIONS))
            self.subscriptions = {one.id: one for one in found}
        self._logs: dict[tuple[LogKind, int], list[OpenFrame]] = {}

    @contextlib.contextmanager
    def catalog(self) -> Iterator[LmdbCatalog]:
        """Its catalog, to be read and written."""
        catalog = LmdbCatalog(str(self.root / CATALOG_DIRECTORY), max_bytes=CATALOG_BYTES)
        try:
            yield catalog
        finally:
            catalog.close()

    def path(self, kind: LogKind, bucket: int) -> Path:
        """The file of a bucket."""
        return self.root / bucket_path(kind, bucket)

    def files(self, kind: LogKind) -> list[int]:
        """The buckets that have a file with rows in it."""
        return [bucket for bucket in sorted(self.hours) if self.frames(kind, bucket)]

    def frames(self, kind: LogKind, bucket: int) -> list[OpenFrame]:
        """The frames of a file, as far as they count."""
        place = kind, bucket
        if place not in self._logs:
            path = self.path(kind, bucket)
            frames = read_frames(path) if path.exists() else []
            if kind is LogKind.SCHEDULE:
                # What is behind the committed length is not filed yet, and stands elsewhere.
                ends = np.cumsum([len(frame.sealed()) for frame in frames])
                frames = frames[: np.searchsorted(ends, self.hours[bucket].length, "right")]
            self._logs[place] = frames
        return self._logs[place]

    def write(self, kind: LogKind, bucket: int, frames: list[OpenFrame]) -> None:
        """Put frames in place of those that a file has."""
        path, before = self.path(kind, bucket), path_bytes(self.path(kind, bucket))
        write_frames(path, frames)
        if kind is LogKind.SCHEDULE:
            length, known = path.stat().st_size, self.hours[bucket].length
            with path.open("ab") as file:
                file.write(before[known:])
            if length != known:
                self.say_of_hour(bucket, replace(self.hours[bucket], length=length))
        self._logs[kind, bucket] = frames

    def say_of_hour(self, bucket: int, state: HourState) -> None:
        """Let the catalog say something else of an hour."""
        with self.catalog() as catalog:
            catalog.commit({Table.HOURS: [(hour_key(bucket), state.pack())]})
        self.hours[bucket] = state

    # ── choosing ───────────────────────────────────────────────────────────────────────────────

    def choose(self, kind: LogKind, wanted: Wanted) -> RowPlace | None:
        """Any of the rows that are wanted; None: there is none."""
        places: list[RowPlace] = []
        for bucket in self.files(kind):
            for number, frame in enumerate(self.frames(kind, bucket)):
                for row in np.flatnonzero(wanted(bucket, frame.rows)).tolist():
                    places.append(RowPlace(kind, bucket, number, row))
        return self.rng.choice(places) if places else None

    def change(self, place: RowPlace, change: Callable[[Rows], Rows]) -> None:
        """Give a frame other rows, which `change` makes of a copy."""
        frames = list(self.frames(place.kind, place.bucket))
        frame = frames[place.frame]
        frames[place.frame] = replace(frame, rows=change(frame.rows.copy()))
        self.write(place.kind, place.bucket, frames)

    def set(self, place: RowPlace | None, **fields: int) -> str | None:
        """Give a row other values; says what was done. None: there is no row."""
        if place is None:
            return None
        before = self.row(place)

        def change(rows: Rows) -> Rows:
            for name, value in fields.items():
                rows[name][place.row] = value
            return rows

        self.change(place, change)
        path = bucket_path(place.kind, place.bucket)
        changes = (f"{name} {int(before[name])} → {value}" for name, value in fields.items())
        return f"{path}, seq {int(before['seq'])}: {', '.join(changes)}"

    def row(self, place: RowPlace) -> np.void:
        """The row that stands there."""
        found: np.void = self.frames(place.kind, place.bucket)[place.frame].rows[place.row].copy()
        return found

    # ── what is known ──────────────────────────────────────────────────────────────────────────

    def is_retired(self, bucket: int) -> bool:
        """Whether an hour says that all its messages are settled."""
        return bool(self.hours[bucket].retired_ms)

    @cached_property
    def entries(self) -> dict[int, Rows]:
        """The filed entries of each bucket, in the order of their seqs."""
        found = {}
        for bucket in self.hours:
            parts = [frame.rows for frame in self.frames(LogKind.SCHEDULE, bucket)]
            rows = concatenate(parts, SCHEDULE_DTYPE)
            found[bucket] = rows[(rows["flags"] & FLAG_REMOVAL) == 0]
        return found

    def entries_of(self, bucket: int, seqs: np.ndarray) -> tuple[Rows, Mask]:
        """The entry of each seq, and whether there is one."""
        entries = self.entries[bucket]
        if not len(entries):
            return np.zeros(len(seqs), SCHEDULE_DTYPE), np.zeros(len(seqs), bool)
        at = np.minimum(np.searchsorted(entries["seq"], seqs), len(entries) - 1)
        return entries[at], entries["seq"][at] == seqs

    @property
    def faithful(self) -> list[Subscription]:
        """The subscriptions that exist, and never had another subject."""
        return [
            one
            for one in self.subscriptions.values()
            if not one.deleted and not one.subject_since_ms and len(one.spans) == 1
        ]

    def is_for(self, one: Subscription, entries: Rows) -> Mask:
        """Which entries a subscription that exists is to have, by the rule."""
        mask: Mask = entries["subscription_id"] == one.id
        for number, name in self.subjects.items():
            is_of_subject = entries["subject_id"] == number
            is_of_subject &= entries["subscription_id"] == 0
            mask |= is_of_subject & had_for(one, name, entries["seq"], entries["due_ms"])
        return mask

    def is_owed(self, bucket: int, deliveries: Rows) -> Mask:
        """Which rows of the dispatch log somebody who exists was to have."""
        entries, is_there = self.entries_of(bucket, deliveries["seq"])
        owed = np.zeros(len(deliveries), bool)
        for one in self.faithful:
            owed |= (deliveries["subscription_id"] == one.id) & self.is_for(one, entries)
        owed &= is_there
        return owed


def path_bytes(path: Path) -> bytes:
    """What a file holds."""
    return path.read_bytes()
