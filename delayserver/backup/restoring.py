"""A data directory is made of a backup: verified, copied, and opened once.

    BACKUP ── every file: length, checksum ──▶ RESTORING ──▶ copied ──▶ opened at its checkpoint,
        and next_seq is set far ahead ──▶ checked ──▶ RESTORING is removed: the directory counts

Nothing is written before every byte of the backup has been read and matches its manifest. The
new directory must be empty. RESTORING comes first and goes last, and both are synced: a restore
that is interrupted at any moment leaves a directory that no server and no command takes for whole.
With several shards each directory has one, besides the one above them.

A restored directory begins another life of its server (`storage.kinds`), so it never takes up the
backups and the shipped log of the life before.

With a moment (`until_ms`) the message log behind the backup is taken as well, cut behind the last
record that was accepted by then: it is copied into messages/, and filed as a start files it.

The server that made the backup has gone on, and has given out ids behind it, which are made of due
time and seq. So the restored one skips as many seqs as no server reaches in the time between two
backups. A client that asks for a message that came after the backup is told that there is none, and
does not get another one.

Cost: each byte is read twice and written once. Memory: a piece. Threads: one, the caller's, which
owns both directories.
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import google_crc32c

from delayserver.backup.backing_up import PIECE_BYTES
from delayserver.backup.shelf import (
    BackupFile,
    BackupManifest,
    is_backup_name,
    read_manifest,
)
from delayserver.backup.shipped_log import LogCut, find_cut
from delayserver.config import Settings
from delayserver.parts.installed import PARTS
from delayserver.recovery.check import check_path
from delayserver.recovery.openers import Openers
from delayserver.recovery.recover import file_message_log
from delayserver.recovery.store import Store, Surroundings
from delayserver.security.tokens import TOKENS_FILE
from delayserver.times import format_time
from storage.catalog import MAX_BYTES, Catalog, LmdbCatalog
from storage.directory import CATALOG_DIRECTORY, FORMAT_VERSION, LOCK_FILE
from storage.errors import BackupError, DamageError, FormatVersionError
from storage.files import FILE_MODE, PRIVATE_MODE, Files, OsFiles, replace_file
from storage.frame import Damage
from storage.kinds import (
    LIFE_BYTES,
    MANIFEST_FILE,
    DirectoryMark,
    Kind,
    begin_restore,
    below,
    end_restore,
    require_fresh,
    require_servable,
    write_mark,
)
from storage.message_log import DIRECTORY as MESSAGES
from storage.message_log import SPARE_NAMES, parse_segment_name
from storage.shards import SHARDS_FILE, encode_shard_count, read_shard_count, shard_directory

SEGMENT_BYTES: Final = 4096
"""Nothing is written to the message log here, but a spare segment is made."""
SKIPPED_SEQS: Final = 1 << 32
"""A day of 50,000 records a second; an id has room for 65,000 times as many."""

Progress = Callable[[str, int, int], None]


class Restored(NamedTuple):
    """The result of restoring one shard."""

    manifest: BackupManifest
    last_seq: int
    """The last record that is in it."""
    last_ms: int | None
    """When that was accepted, if it came behind the backup; None: all is of the backup itself."""
    total_bytes: int
    """The bytes that were copied."""
    problem: str
    """The fault that the check has found in the new directory; empty: it is sound."""


class PartToRestore(NamedTuple):
    """A shard's part of a backup, and where it goes."""

    manifest: BackupManifest
    source: Files
    place: str
    """Its directory, below `source`."""
    target: str
    """… and below the new directory."""


def find_parts(backup: Path) -> list[PartToRestore]:
    """The parts of the backup in that directory, one for each shard. Raises BackupError,
    DamageError, DiskError, FormatVersionError."""
    if not backup.is_dir():
        raise BackupError(f"there is no directory {backup}: name that of one backup")
    files = OsFiles(str(backup), readonly=True)
    count = read_shard_count(files)
    places = [""] if count is None else [shard_directory(shard) for shard in range(count)]
    parts = []
    for shard, place in enumerate(places):
        manifest = read_manifest(files, place)
        if manifest is None:
            what = f"the part of shard {shard} in {backup}" if count else f"{backup}"
            raise BackupError(
                f"{what} is no backup that counts: it has no manifest, or was never finished"
            )
        if (manifest.shard, manifest.shards) != (shard, count or 1):
            raise BackupError(f"{backup / place} is that of shard {manifest.shard}")
        if manifest.format_version > FORMAT_VERSION:
            raise FormatVersionError(str(backup / place), manifest.format_version, FORMAT_VERSION)
        parts.append(PartToRestore(manifest, files, place, place))
    if len({(part.manifest.name, part.manifest.life) for part in parts}) > 1:
        names = ", ".join(part.manifest.name for part in parts)
        raise BackupError(f"{backup} has parts of several backups ({names}): copy one of them anew")
    return parts


def find_backup(backups: Path, until_ms: int) -> list[PartToRestore]:
    """The parts of the newest backup in a directory of backups that is not newer than a moment.

    Raises BackupError, DamageError, DiskError, FormatVersionError."""
    found: list[list[PartToRestore]] = []
    for path in sorted(backups.iterdir()):
        if not is_backup_name(path.name) or not path.is_dir():
            continue
        # A backup that is being made counts for nothing, and a damaged one must not be passed over:
        # an older one may have no log any more.
        try:
            parts = find_parts(path)
        except BackupError:
            continue
        found.append(parts)
    if not found:
        raise BackupError(
            f"{backups} is neither a backup that counts nor a directory with one: name either"
        )
    servers = {(parts[0].manifest.stamp, parts[0].manifest.life) for parts in found}
    # An older version did not say of which life a backup is.
    lives = {life for _, life in servers if life}
    if len({stamp for stamp, _ in servers}) > 1 or len(lives) > 1:
        raise BackupError(
            f"there are backups of several servers in {backups}, or of one before and after it was "
            "restored: name one of them"
        )
    fitting = [parts for parts in found if taken_ms_of(parts) <= until_ms]
    if not fitting:
        oldest_ms = min(map(taken_ms_of, found))
        raise BackupError(
            f"the oldest backup in {backups} was taken at {format_time(oldest_ms)}: nothing before "
            "that can be restored"
        )
    return max(fitting, key=lambda parts: parts[0].manifest.order)


def taken_ms_of(parts: Sequence[PartToRestore]) -> int:
    """Nothing that came later than this is in a backup."""
    return max(part.manifest.taken_ms for part in parts)


def find_parts_until(backup: Path, until_ms: int) -> tuple[Path, list[PartToRestore]]:
    """The directory of all backups, and the parts of the one in `backup`, or of the newest in that
    directory, which is not newer than a moment. Raises as `find_backup`."""
    if not backup.is_dir():
        raise BackupError(f"there is no directory {backup}: name that of a backup, or of all")
    if not any((backup / name).exists() for name in (MANIFEST_FILE, SHARDS_FILE)):
        return backup, find_backup(backup, until_ms)
    parts = find_parts(backup)
    taken_ms = taken_ms_of(parts)
    if taken_ms > until_ms:
        raise BackupError(
            f"the backup {backup.name} was taken at {format_time(taken_ms)}, and goes no further "
            f"back: name an older one, or {backup.resolve().parent} for the newest that fits"
        )
    return backup.resolve().parent, parts


def restore(
    backup: Path,
    data_dir: Path,
    *,
    now_ms: int,
    until_ms: int | None = None,
    catalog_max_bytes: int = MAX_BYTES,
    progress: Progress = lambda what, done, total: None,
) -> list[Restored]:
    """Make the data directory `data_dir`, which is empty or not there, of a backup.

    `until_ms`: with all records that were accepted behind it by then (LATEST_MS: as far as the log
    reaches); `backup` may be the directory of all backups then. A directory that is found damaged
    in the end counts all the same, for `delayserver repair`. Raises BackupError, DamageError,
    DiskError, DirectoryKindError, FormatVersionError."""
    backups = backup
    if until_ms is None:
        parts = find_parts(backup)
    else:
        backups, parts = find_parts_until(backup, until_ms)
    log_files = OsFiles(str(backups), readonly=True)
    require_fresh(OsFiles(str(data_dir), readonly=True))
    require_servable(str(data_dir))
    total = sum(part.manifest.total_bytes for part in parts)
    done = 0
    for part in parts:
        for file in part.manifest.files:
            verify_file(part, file)
            done += file.length
            progress("verifying the backup", done, total)
    cuts: list[LogCut | None] = [None] * len(parts)
    if until_ms is not None:
        cuts = [*cut_all(log_files, parts, until_ms, progress)]

    def check(target: Files) -> str:
        report = check_path(
            Path(target.root), catalog_max_bytes=catalog_max_bytes, of={Kind.UNFINISHED}
        )
        return str(report.damage[0]) if report.damage else ""

    making = Restoring(
        log_files,
        lambda name: OsFiles(str(data_dir / name)),
        lambda target: LmdbCatalog(
            f"{target.root}/{CATALOG_DIRECTORY}", max_bytes=catalog_max_bytes
        ),
        check,
        life=os.urandom(LIFE_BYTES).hex(),
        now_ms=now_ms,
        progress=progress,
    )
    return making.run(parts, cuts)


class Restoring:
    """Makes a directory of the parts of a backup, which were verified."""

    def __init__(
        self,
        log_files: Files,
        open_directory: Callable[[str], Files],
        open_catalog: Callable[[Files], Catalog],
        check: Callable[[Files], str],
        *,
        life: str,
        now_ms: int,
        progress: Progress = lambda what, done, total: None,
    ) -> None:
        """`log_files`: those of the directory of all backups; `open_directory`: opens the new
        directory (""), or one below it, which is made; `check` returns the fault of a directory,
        empty if it is sound; `life`: the name of the life that begins."""
        self._log_files = log_files
        self._open_directory = open_directory
        self._open_catalog = open_catalog
        self._check = check
        self._life = life
        self._now_ms = now_ms
        self._progress = progress
        self._done_bytes = 0
        self._total_bytes = 0

    def run(self, parts: Sequence[PartToRestore], cuts: Sequence[LogCut | None]) -> list[Restored]:
        """Make it; `cuts`: the part of the log that belongs to each shard. Raises StorageError:
        every opener refuses the unfinished directory then."""
        self._total_bytes = sum(part.manifest.total_bytes for part in parts)
        self._total_bytes += sum(cut.total_bytes for cut in cuts if cut is not None)
        root = self._open_directory("")
        with root.lock(LOCK_FILE):
            begin_restore(root, parts[0].manifest.name)
        targets = [root]
        if len(parts) > 1:
            write_mark(root, DirectoryMark(Kind.SHARDS, self._life))
            replace_file(root, SHARDS_FILE, encode_shard_count(len(parts)))
            targets = [self._open_directory(part.target) for part in parts]
            for target in targets:
                begin_restore(target, parts[0].manifest.name)
        restored = [
            self._make(part, cut, root, target)
            for part, cut, target in zip(parts, cuts, targets, strict=True)
        ]
        for target in targets if len(parts) > 1 else ():
            end_restore(target)
        end_restore(root)
        return restored

    def _make(
        self, part: PartToRestore, cut: LogCut | None, root: Files, target: Files
    ) -> Restored:
        """The directory of one shard, whole but for its RESTORING."""
        write_mark(target, DirectoryMark(Kind.DATA, self._life))
        if cut is not None:
            copy_log(self._log_files, cut, target)
            self._tell("copying", cut.total_bytes)
        for file in part.manifest.files:
            # Those of all shards stand above them.
            copy_file(part, file, root if file.path == TOKENS_FILE else target)
            self._tell("copying", file.length)
        last_seq = go_ahead(
            target,
            part.manifest,
            self._now_ms,
            lambda: self._open_catalog(target),
            self._progress,
        )
        assert cut is None or cut.last_seq == last_seq, (cut, last_seq)
        self._tell("checking", 0)
        problem = self._check(target)
        last_ms = None if cut is None else cut.last_ms
        copied_bytes = part.manifest.total_bytes + (0 if cut is None else cut.total_bytes)
        return Restored(part.manifest, last_seq, last_ms, copied_bytes, problem)

    def _tell(self, what: str, count: int) -> None:
        self._done_bytes += count
        self._progress(what, self._done_bytes, self._total_bytes)


def cut_all(
    files: Files, parts: list[PartToRestore], until_ms: int, progress: Progress
) -> list[LogCut]:
    """The part of the log behind each shard that belongs to it. Raises BackupError, DiskError."""
    read_bytes = 0

    def told(count: int) -> None:
        nonlocal read_bytes
        read_bytes += count
        progress("verifying the log", read_bytes, read_bytes)

    return [find_cut(files, part.manifest, until_ms, told) for part in parts]


def copy_log(files: Files, cut: LogCut, target: Files) -> None:
    """Copy a cut of a log into the message log of a new directory; durable on return. Filing
    verifies it again."""
    target.make_directory(MESSAGES)
    for name, length in cut.segments:
        with (
            contextlib.closing(files.open(f"{cut.place}/{name}")) as source,
            contextlib.closing(target.open(f"{MESSAGES}/{name}", create=True)) as copy,
        ):
            for start in range(0, length, PIECE_BYTES):
                copy.pwrite([source.pread(min(PIECE_BYTES, length - start), start)], start)
            copy.fdatasync()
    target.sync_directory(MESSAGES)


def verify_file(part: PartToRestore, wanted: BackupFile) -> None:
    """Raises DamageError."""
    path = below(part.place, wanted.path)
    try:
        file = part.source.open(path)
    except FileNotFoundError:
        raise DamageError(path, 0, "it is a file of the backup, and is not there") from None
    with contextlib.closing(file):
        if file.size() != wanted.length:
            reason = f"it has {file.size()} bytes, its manifest says {wanted.length}"
            raise DamageError(path, min(file.size(), wanted.length), reason)
        crc = 0
        for start in range(0, wanted.length, PIECE_BYTES):
            crc = google_crc32c.extend(crc, file.pread(PIECE_BYTES, start))
        if crc != wanted.crc32c:
            raise DamageError(path, 0, "it does not match the checksum in its manifest")


def copy_file(part: PartToRestore, wanted: BackupFile, target: Files) -> None:
    """Copy a file that was verified; durable on return."""
    parent = wanted.path.rpartition("/")[0]
    target.make_directory(parent)
    mode = PRIVATE_MODE if wanted.path == TOKENS_FILE else FILE_MODE
    with (
        contextlib.closing(part.source.open(below(part.place, wanted.path))) as source,
        contextlib.closing(target.open(wanted.path, create=True, mode=mode)) as copy,
    ):
        for start in range(0, wanted.length, PIECE_BYTES):
            copy.pwrite([source.pread(PIECE_BYTES, start)], start)
        copy.fdatasync()
    target.sync_directory(parent)


def go_ahead(
    files: Files,
    manifest: BackupManifest,
    now_ms: int,
    open_catalog: Callable[[], Catalog],
    progress: Progress,
) -> int:
    """Open the directory, file the records in its message log, and skip seqs that are taken;
    returns the last seq that is in it."""

    def now() -> int:
        return now_ms

    def chance(length: int) -> bytes:
        raise AssertionError("the directory has its identity already")

    surroundings = Surroundings(
        clock=now,
        stopwatch=now,
        random_bytes=chance,
        random=lambda: 0.0,
        monotonic=lambda: 0.0,
        parts=PARTS,
        shard=manifest.shard,
        openers=Openers(of=frozenset({Kind.UNFINISHED})),
    )
    # No setting matters here but the directory, whatever the environment says.
    settings = Settings.model_construct(data_dir=Path(files.root), segment_bytes=SEGMENT_BYTES)
    with contextlib.closing(Store(settings, files, open_catalog, surroundings)) as store:
        damage: list[Damage] = []
        next_seq, _ = file_message_log(
            store.write_ahead_log,
            store.replay,
            damage,
            now_ms=now_ms,
            progress=progress,
        )
        for found in damage:
            raise found.error()
        store.replay.skip_to(next_seq - 1 + SKIPPED_SEQS)
        store.replay.checkpoint()
    for name in files.list(MESSAGES):
        if parse_segment_name(name) is not None or name in SPARE_NAMES:
            files.unlink(f"{MESSAGES}/{name}")
    files.sync_directory(MESSAGES)
    return next_seq - 1
