"""A data directory is made of a backup: verified, copied, and opened once.

    BACKUP ── every file: length, checksum ──▶ copied ──▶ FORMAT ──▶ opened at its checkpoint, and
                                                                     next_seq is set far ahead

Nothing is written before every byte of the backup has been read and is what its manifest says. The
new directory must be empty. FORMAT comes last: who is interrupted leaves a directory that no server
starts on.

The server that made the backup has gone on, and has given out ids behind it, which are made of due
time and seq. So the restored one skips as many seqs as no server reaches in the time between two
backups: whoever asks for a message that came after the backup is told that there is none, and not
about another one.

Cost: each byte is read twice and written once. Memory: a piece. Threads: one, the caller's, which
owns both directories.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import google_crc32c

from delayserver.config import Settings
from delayserver.recovery.backing_up import PIECE_BYTES
from delayserver.recovery.backups import BackupFile, BackupManifest, below, read_manifest
from delayserver.recovery.check import check_path
from delayserver.recovery.recover import file_message_log
from delayserver.recovery.store import Store, Surroundings
from delayserver.security.tokens import TOKENS_FILE
from storage.catalog import Catalog, LmdbCatalog
from storage.directory import CATALOG_DIRECTORY, FORMAT_FILE, FORMAT_VERSION
from storage.errors import BackupError, DamageError, FormatVersionError
from storage.files import FILE_MODE, PRIVATE_MODE, Files, OsFiles
from storage.frame import Damage
from storage.message_log import DIRECTORY as MESSAGES
from storage.message_log import SPARE_NAMES, parse_segment_name
from storage.shards import fix_shard_count, read_shard_count, shard_directory

SEGMENT_BYTES: Final = 4096
"""Nothing is written to the message log here, but a spare segment is made."""
CATALOG_MAX_BYTES: Final[int] = Settings.model_fields["catalog_max_bytes"].default
SKIPPED_SEQS: Final = 1 << 32
"""A day of 50,000 records a second; an id has room for 65,000 times as many."""

Progress = Callable[[str, int, int], None]


class Restored(NamedTuple):
    """What became of one shard."""

    manifest: BackupManifest
    last_seq: int
    """The last record that is in it."""
    problem: str
    """What the check has found in the new directory; empty: it is sound."""


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
    return parts


def restore(
    backup: Path,
    data_dir: Path,
    *,
    now_ms: int,
    catalog_max_bytes: int = CATALOG_MAX_BYTES,
    progress: Progress = lambda what, done, total: None,
) -> list[Restored]:
    """Make the data directory `data_dir`, which is empty or not there, of a backup.

    Raises BackupError, DamageError, DiskError, FormatVersionError."""
    parts = find_parts(backup)
    if data_dir.exists() and any(data_dir.iterdir()):
        raise BackupError(
            f"{data_dir} is not empty: name another directory, or move what is there out of the way"
        )
    total = sum(part.manifest.total_bytes for part in parts)
    done = 0
    for part in parts:
        for file in part.manifest.files:
            verify_file(part, file)
            done += file.length
            progress("verifying the backup", done, total)
    root = OsFiles(str(data_dir))
    fix_shard_count(root, len(parts))
    done = 0
    restored = []
    for part in parts:
        target = OsFiles(str(data_dir / part.target)) if part.target else root
        for file in sorted(part.manifest.files, key=lambda one: one.path == FORMAT_FILE):
            # Those of all shards stand above them.
            copy_file(part, file, root if file.path == TOKENS_FILE else target)
            done += file.length
            progress("copying", done, total)
        last_seq = go_ahead(target, part.manifest, now_ms, catalog_max_bytes)
        progress("checking", done, total)
        report = check_path(Path(target.root), catalog_max_bytes=catalog_max_bytes)
        problem = str(report.damage[0]) if report.damage else ""
        restored.append(Restored(part.manifest, last_seq, problem))
    return restored


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


def go_ahead(files: OsFiles, manifest: BackupManifest, now_ms: int, catalog_max_bytes: int) -> int:
    """Open the directory, file what stands in its message log, and skip seqs that are taken;
    returns the last one that is in it."""

    def open_catalog() -> Catalog:
        return LmdbCatalog(f"{files.root}/{CATALOG_DIRECTORY}", max_bytes=catalog_max_bytes)

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
        shard=manifest.shard,
    )
    # Of the settings none matters here but the directory, whatever the environment says.
    settings = Settings.model_construct(data_dir=Path(files.root), segment_bytes=SEGMENT_BYTES)
    with contextlib.closing(Store(settings, files, open_catalog, surroundings)) as store:
        damage: list[Damage] = []
        next_seq, _ = file_message_log(
            store.message_log,
            store.schedule,
            store.replay,
            damage,
            now_ms=now_ms,
            progress=lambda what, done, total: None,
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
