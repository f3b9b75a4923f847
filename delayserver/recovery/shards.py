"""The check and the repair of a directory of several shards: one shard after the other.

Each shard is a data directory of its own, so each is looked at by itself, and one that cannot be
looked at keeps no other from it. A repair also owns the directory of all shards, so that no server
starts meanwhile; one that was interrupted goes on in each shard where it was.

Cost: that of each shard, in turn. Threads: one, any.
"""

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from delayserver.recovery.check import check_path
from delayserver.recovery.repair import RepairReport, repair_path
from storage import kinds
from storage.check import Progress, Report
from storage.directory import DROPPED_FILE, FORMAT_FILE, LOCK_FILE, open_identity
from storage.errors import StorageError
from storage.files import OsFiles
from storage.shards import read_shard_count, refuse_another, shard_directory

Found = TypeVar("Found", Report, RepairReport)


@dataclass(slots=True)
class ShardReports(Generic[Found]):
    """The findings in each shard."""

    root: str
    count: int
    """How many shards there are."""
    reports: dict[int, Found] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)
    """Why a shard could not be looked at: each shard is here, or among the reports, or …"""
    dropped: list[int] = field(default_factory=list)
    """… the node of a cluster is not to have it."""

    def to_json(self) -> str:
        """As a JSON document: a member for each shard, with its report, or the error, or that it is
        dropped."""
        shards: list[dict[str, Any]] = []
        for shard in range(self.count):
            if shard in self.errors:
                shards.append({"shard": shard, "error": str(self.errors[shard])})
            elif shard in self.dropped:
                shards.append({"shard": shard, "dropped": True})
            else:
                shards.append({"shard": shard, **json.loads(self.reports[shard].to_json())})
        return json.dumps({"root": self.root, "shards": shards}, indent=1)


def count_shards(data_dir: Path, of: Collection[kinds.Kind] = kinds.READABLE) -> int | None:
    """How many shards the directory is of; None where it is that of a server alone, of one shard,
    or no data directory.

    `of`: the kinds of directory that the caller can use, besides that of several shards. Raises
    DirectoryKindError, DamageError, FormatVersionError."""
    files = OsFiles(str(data_dir), readonly=True)
    kinds.require(files, {*of, kinds.Kind.SHARDS})
    return read_shard_count(files)


def check_shards(
    data_dir: Path,
    count: int,
    *,
    catalog_max_bytes: int,
    progress: Progress = lambda what, done, total: None,
) -> ShardReports[Report]:
    """Check all shards below `data_dir`; nothing is written."""

    def check_one(path: Path, told: Progress) -> Report:
        return check_path(path, catalog_max_bytes=catalog_max_bytes, progress=told)

    found: ShardReports[Report] = ShardReports(str(data_dir), count)
    _each(data_dir, found, check_one, progress)
    return found


def repair_shards(
    data_dir: Path,
    count: int,
    *,
    now_ms: int,
    dry_run: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> ShardReports[RepairReport]:
    """Repair all shards below `data_dir`. May be interrupted at any point and called again.

    Raises DirectoryLockedError while a server runs on it, DiskError."""

    def repair_one(path: Path, told: Progress) -> RepairReport:
        return repair_path(path, now_ms=now_ms, dry_run=dry_run, progress=told)

    found: ShardReports[RepairReport] = ShardReports(str(data_dir), count)
    with OsFiles(str(data_dir)).lock(LOCK_FILE):
        _each(data_dir, found, repair_one, progress)
    return found


def _each(
    data_dir: Path,
    found: ShardReports[Found],
    look: Callable[[Path, Progress], Found],
    progress: Progress,
) -> None:
    for shard in range(found.count):
        path = data_dir / shard_directory(shard)
        if (path / DROPPED_FILE).is_file():
            found.dropped.append(shard)
            continue
        try:
            if (path / FORMAT_FILE).is_file():
                files = OsFiles(str(path), readonly=True)
                made = open_identity(files, random_bytes=None, of=kinds.ANY)
                refuse_another(str(path), made.shard, shard)
            found.reports[shard] = look(path, partial(_tell, progress, shard))
        except (StorageError, OSError) as error:
            found.errors[shard] = error


def _tell(progress: Progress, shard: int, what: str, done: int, total: int) -> None:
    progress(f"shard {shard}: {what}", done, total)
