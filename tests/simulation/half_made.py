"""A restore, a backup, or a replica that is made anew, is interrupted at a call: what is left is
refused by every opener, or whole.

Each run cuts the power or kills the process in one call to the files, which its seed decides, and
then opens what there is. A directory that is neither refused nor whole is a Violation.

    python -m tests.simulation.half_made --runs 100000

Cost: 0.5 ms a run. Threads: one.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import NamedTuple

import structlog
from msgspec.structs import replace

from delayserver.backup.log_shipping import LogShipper
from delayserver.backup.restoring import SKIPPED_SEQS, PartToRestore, Restoring, verify_file
from delayserver.backup.shelf import BackupManifest, Shelf
from delayserver.backup.shipped_log import LATEST_MS, LogCut, find_cut
from delayserver.decisions.new_messages import NewMessage
from delayserver.records.message import Payload
from delayserver.records.tables import read_checkpoint
from delayserver.recovery.check import check
from delayserver.recovery.incoming import ASIDE, finish_swap, set_aside
from storage import kinds
from storage.catalog import Writes
from storage.catalog_file import DATA_FILE
from storage.directory import CATALOG_DIRECTORY, FORMAT_FILE, Identity, open_identity
from storage.errors import DamageError, DirectoryKindError, RepairUnfinishedError
from storage.files import Files, replace_file
from storage.message_log import MessageLog
from storage.rows import HOUR_MS
from storage.swap import is_unfinished
from tests.peers import content_of
from tests.simulation.below import Below
from tests.simulation.test_shipped_log import rows_in
from tests.unit.backup.test_backing_up import LIFE, back_up
from tests.unit.recovery.test_incoming import (
    IDENTITY,
    Source,
    _copy_of,
    found_in,
    incoming,
    old_replica,
)
from tests.world import Violation
from tests.world.server import START_MS
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.faults import Fault, FaultKind, Faults, FaultyFiles, Moment, SimulatedCrash
from tests.world.storage.files import SimulatedFiles

NEXT_LIFE = "the next life"
MOMENTS = tuple(Moment)
ALL_BYTES = 1 << 30

Content = dict[str, object]
Act = Callable[[Files], object]


class FileCatalog(MemoryCatalog):
    """A catalog that is durable with each commit, as LMDB's is."""

    files: Files

    @classmethod
    def opened(cls, files: Files) -> FileCatalog:
        made = cls.copied(files, CATALOG_DIRECTORY)
        assert isinstance(made, FileCatalog)
        made.files = files
        return made

    def _commit(self, writes: Writes) -> None:
        super()._commit(writes)
        spare, path = SimulatedFiles(), f"{CATALOG_DIRECTORY}/{DATA_FILE}"
        spare.make_directory(CATALOG_DIRECTORY)
        self.freeze().copy(spare, CATALOG_DIRECTORY)
        replace_file(self.files, path, spare.open(path).pread(ALL_BYTES, 0))


# ── the strike ─────────────────────────────────────────────────────────────────────────────────


def calls_of(act: Act, disk: SimulatedFiles | None = None) -> int:
    """How many calls there are to strike in."""
    trace = Faults()
    act(FaultyFiles(disk or SimulatedFiles(), trace))
    return trace.call_count


def struck(seed: int, calls: int, act: Act, disk: SimulatedFiles | None = None) -> SimulatedFiles:
    """Act on a machine, an empty one if none is given, until it is struck; what comes up again."""
    rng = random.Random(seed)
    machine = SimulatedFiles(rng=rng) if disk is None else disk
    fault = Fault(rng.randrange(1, calls + 1), FaultKind.CRASH, rng.choice(MOMENTS))
    with contextlib.suppress(SimulatedCrash):  # Not every run makes the last of the calls.
        act(FaultyFiles(machine, Faults(fault)))
    return machine.kill() if rng.random() < 0.3 else machine.crash()


# ── a restore ──────────────────────────────────────────────────────────────────────────────────


class Kept(NamedTuple):
    """The source of a restore."""

    disk: SimulatedFiles
    """The directory of backups."""
    parts: list[PartToRestore]
    cuts: list[LogCut | None]
    contents: list[Content]
    """The content that each shard is to have."""


@cache
def kept(shards: int, *, with_log: bool = False) -> Kept:
    """A backup of so many shards, and the log behind it."""
    disk = SimulatedFiles()
    parts: list[PartToRestore] = []
    cuts: list[LogCut | None] = []
    contents: list[Content] = []
    for shard in range(shards):
        identity = Identity(IDENTITY.stamp + shard, shard, IDENTITY.id_secret)
        source = Source(3, seed=1 + shard, identity=identity)
        manifest, cut = back_up(source, disk, shards=shards), None
        name = "" if shards == 1 else f"shard-{shard:04d}"
        if with_log:
            manifest, cut = _with_more(source, disk, manifest)
        parts.append(PartToRestore(manifest, disk, f"one/{name}".rstrip("/"), name))
        cuts.append(cut)
        contents.append(source.content())
    for part in parts:
        for file in part.manifest.files:
            verify_file(part, file)
    made = Kept(disk, parts, cuts, contents)
    if with_log:
        whole = SimulatedFiles()
        restore_into(whole, made)
        contents[0] = content_of(whole, MemoryCatalog.copied(whole, CATALOG_DIRECTORY))
        assert len(rows_in(contents[0])) == 6
    return made


def _with_more(
    source: Source, disk: SimulatedFiles, manifest: BackupManifest
) -> tuple[BackupManifest, LogCut]:
    """Publish behind a backup, and ship the log."""
    server, log = source.server, source.server.store.message_log
    assert isinstance(log, MessageLog)
    log._held_max_bytes = 1 << 30
    shipper = LogShipper(
        source.disk,
        log,
        disk,
        server.store.identity,
        take=lambda count: None,
        next_seq=server.engine.sequencer.next_seq,
        life=LIFE,
    )
    shipper.resume([])
    manifest = replace(manifest, timeline=shipper.begin(manifest.checkpoint_seq))
    for number in range(3):
        message = NewMessage("later", START_MS + HOUR_MS * (number + 2), Payload(b"1"))
        server.engine.publishing.publish_one(message, START_MS + 100_000)
        server.rest()
    shipper.step(START_MS + 200_000)
    return manifest, find_cut(disk, manifest, LATEST_MS)


def restore_into(files: Files, wanted: Kept) -> None:
    """Make a directory of it."""
    Restoring(
        wanted.disk,
        lambda name: Below(files, name) if name else files,
        FileCatalog.opened,
        lambda target: "",
        life=NEXT_LIFE,
        now_ms=0,
    ).run(wanted.parts, wanted.cuts)


def restores(seeds: Iterable[int], wanted: Kept) -> Counter[str]:
    """Interrupt restores; how many are refused, whole, or have not begun. Raises Violation."""
    act = partial(restore_into, wanted=wanted)
    calls = calls_of(act)
    return Counter(fate_of_restore(struck(seed, calls, act), wanted) for seed in seeds)


def fate_of_restore(disk: SimulatedFiles, wanted: Kept) -> str:
    """The fate of the directory, as a server and every command see it. Raises Violation."""
    roots: list[Files] = [disk]
    if len(wanted.parts) > 1:
        try:
            kinds.require(disk, {kinds.Kind.SHARDS})
        except DirectoryKindError:
            return "refused"
        if not set(disk.list("")) - kinds.FRESH_NAMES:
            return "empty"
        roots = [Below(disk, part.target) for part in wanted.parts]
    for files, part, content in zip(roots, wanted.parts, wanted.contents, strict=True):
        if files is disk and not set(files.list("")) - kinds.FRESH_NAMES:
            return "empty"
        try:
            identity = open_identity(files, random_bytes=random.Random(0).randbytes)
        except DirectoryKindError:
            _must_refuse(files)
            return "refused"
        except DamageError as error:
            raise Violation(f"a server starts on what a restore has left: {error}") from error
        _must_be_whole(files, identity, part.manifest, content)
    return "whole"


def _must_refuse(files: Files) -> None:
    for of in (kinds.OWNED, kinds.READABLE):
        with contextlib.suppress(DirectoryKindError):
            open_identity(files, random_bytes=None, of=of)
            raise Violation("a command takes a directory for whole that a server refuses")


def _must_be_whole(
    files: Files, identity: Identity, manifest: BackupManifest, content: Content
) -> None:
    problem = ""
    try:
        catalog = MemoryCatalog.copied(files, CATALOG_DIRECTORY)
        report = check(files, catalog)
        if identity.stamp != manifest.stamp:
            problem = "it is that of a new server"
        elif kinds.read_mark(files) != kinds.DirectoryMark(kinds.Kind.DATA, NEXT_LIFE):
            problem = "it does not say whose it is"
        elif not report.is_clean:
            problem = str(report.damage[0])
        elif rows_in(content_of(files, catalog)) != rows_in(content):
            problem = "it has other messages"
        elif read_checkpoint(catalog) < manifest.checkpoint_seq + SKIPPED_SEQS:
            problem = "it gives out ids that the lost server may have given out"
    except (FileNotFoundError, DamageError) as error:
        problem = str(error)
    if problem:
        raise Violation(f"a server starts on what a restore has left: {problem}")


# ── a backup ───────────────────────────────────────────────────────────────────────────────────


@cache
def source() -> Source:
    """The source of backups."""
    return Source(3)


def backups(seeds: Iterable[int]) -> Counter[str]:
    """Interrupt backups, as `restores` does restores."""
    act = partial(back_up, source())
    calls = calls_of(act)
    return Counter(fate_of_backup(struck(seed, calls, act)) for seed in seeds)


def fate_of_backup(disk: SimulatedFiles) -> str:
    """The fate of a backup, as a server, a command and a restore see it. Raises Violation."""
    shelf = Shelf(disk, IDENTITY, 1, LIFE)
    found, fate = shelf.find("one"), "nothing" if shelf.is_free("one") else "refused"
    place = Below(disk, "one")
    with contextlib.suppress(DirectoryKindError):
        kinds.require(place, kinds.OWNED)
        if set(place.list("")) - {f"{kinds.PARTIAL_FILE}.new"}:
            raise Violation("a server starts on a backup")
    if found is not None:
        fate = "whole"
        for file in found.files:
            verify_file(PartToRestore(found, disk, "one", ""), file)
    elif fate == "refused":
        with contextlib.suppress(DirectoryKindError):
            kinds.require(place, kinds.READABLE)
            raise Violation("a command reads half a backup")
    shelf.clear()
    if found is None and not shelf.is_free("one"):
        raise Violation("what a backup has left is not deleted")
    return fate


# ── a replica that is made anew: `cluster adopt` sets the other one aside, and copies ────────────


@cache
def replicas() -> tuple[SimulatedFiles, Content, Content]:
    """A replica, what is in it, and what it is to have."""
    replica = old_replica()
    return replica, found_in(replica), source().content()


def renew(files: Files, machine: SimulatedFiles) -> None:
    """Set a replica aside, and copy another one."""
    set_aside(files, 41)
    incoming(files).fetch([source().peer()])


def adoptions(seeds: Iterable[int]) -> Counter[str]:
    """Interrupt replicas that are made anew, as `restores` does restores."""
    replica, _, _ = replicas()
    calls = calls_of(lambda files: renew(files, replica), _copy_of(replica))
    found: Counter[str] = Counter()
    for seed in seeds:
        machine = _copy_of(replica)
        machine._rng = random.Random(seed)
        found[fate_of_replica(struck(seed, calls, partial(renew, machine=machine), machine))] += 1
    return found


def fate_of_replica(disk: SimulatedFiles) -> str:
    """The fate of a replica after a start, which ends a swap that was begun. Raises Violation."""
    _, old, new = replicas()
    if is_unfinished(disk):
        with contextlib.suppress(RepairUnfinishedError):
            open_identity(disk, random_bytes=random.Random(0).randbytes, given=IDENTITY)
            raise Violation("a node starts on a replica that is half another one")
        finish_swap(disk)
        fate = "refused until it is finished"
    else:
        fate = "whole"
    aside = Below(disk, f"{ASIDE}/seq-41")
    is_aside = aside.exists(FORMAT_FILE)
    if is_aside and not _has(aside, old):
        raise Violation("what was set aside is not what the replica was")
    if not disk.exists(FORMAT_FILE):
        if not is_aside:
            raise Violation("the replica is neither in its place nor aside")
        return "aside"
    if not _has(disk, new if is_aside else old):
        raise Violation("a replica is neither the old one nor the new one")
    return fate


def _has(files: Files, content: Content) -> bool:
    return content_of(files, MemoryCatalog.copied(files, CATALOG_DIRECTORY)) == content


def main() -> None:
    """Interrupt many of each, and print what became of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000, help="of each (default 1000)")
    seeds = range(parser.parse_args().runs)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    print("restores", dict(restores(seeds, kept(1))))
    print("restores with a log", dict(restores(seeds, kept(1, with_log=True))))
    print("restores of two shards", dict(restores(seeds, kept(2))))
    print("backups", dict(backups(seeds)))
    print("replicas", dict(adoptions(seeds)))


if __name__ == "__main__":
    main()
