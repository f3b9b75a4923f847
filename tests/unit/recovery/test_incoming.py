"""A replica is copied from another one: what comes, what is refused, and crashes at each call."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgspec
import pytest

from delayserver.config import Settings
from delayserver.decisions.new_messages import NewMessage
from delayserver.records.message import Payload
from delayserver.recovery.incoming import ASIDE, Incoming, clear, finish_swap, set_aside
from delayserver.recovery.snapshots import (
    HeldSnapshot,
    SnapshotFile,
    SnapshotManifest,
    Snapshots,
    taken,
)
from delayserver.recovery.store import Surroundings
from storage.check import assert_clean
from storage.directory import Identity, open_identity
from storage.errors import CopySourceError, DamageError, NoPeerError, RepairUnfinishedError
from storage.files import Files
from storage.replicated.own import OWN_FILE
from storage.rows import HOUR_MS
from storage.swap import is_unfinished
from tests.peers import LocalPeer, content_of
from tests.world.server import START_MS, Observer, SimulatedClock, SimulatedServer
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.faults import Fault, FaultKind, Faults, FaultyFiles, Moment, SimulatedCrash
from tests.world.storage.files import SimulatedFiles

IDENTITY = Identity(stamp=77, shard=0, id_secret=bytes(range(16)))


class Source:
    """A server with some messages, from which others copy."""

    def __init__(self, messages: int, seed: int = 1, identity: Identity = IDENTITY) -> None:
        self.disk, self.catalog = SimulatedFiles(), MemoryCatalog()
        rng = random.Random(seed)
        clock = SimulatedClock()
        self.server = SimulatedServer(
            Settings(disk_reserve_bytes=0, segment_bytes=65_536),
            self.disk,
            self.catalog,
            clock,
            rng,
            Observer(),
            around=partial(_with_identity, identity=identity),
        )
        for number in range(messages):
            body = rng.randbytes(rng.randrange(3000))
            due_ms = START_MS + (number + 1) * HOUR_MS * 5
            message = NewMessage("orders", due_ms, Payload(body, key=f"k{number}"))
            self.server.engine.publishing.publish_one(message, clock())
            self.server.rest()
            clock.move(2_000)
            self.server.replayer.step(1000)
            if number % 3 == 0:
                self.server.replay.checkpoint()
                while self.server.replay.tidy():
                    pass
        self.server.replay.checkpoint()
        self.snapshots = Snapshots(self.disk, self.server.store.identity)

    def make(self) -> SnapshotManifest:
        return self.snapshots.complete(self.snapshots.take(self.server.store))

    def peer(self) -> LocalPeer:
        return LocalPeer(self.snapshots, self.make)

    def content(self) -> dict[str, object]:
        return content_of(self.disk, self.catalog)


def _with_identity(around: Surroundings, identity: Identity = IDENTITY) -> Surroundings:
    openers = replace(around.openers, identity=identity)
    return replace(around, shard=identity.shard, openers=openers)


def incoming(files: Files, told: Callable[[str, int, int], None] | None = None) -> Incoming:
    seconds = itertools.count()
    return Incoming(
        files,
        IDENTITY,
        partial(MemoryCatalog.copied, files),
        progress=told or (lambda what, done, total: None),
        sleep=lambda s: None,
        monotonic=lambda: float(next(seconds)),
    )


def found_in(files: SimulatedFiles) -> dict[str, object]:
    catalog = MemoryCatalog.copied(files, "catalog")
    assert_clean(files, catalog)
    return content_of(files, catalog)


@pytest.fixture(scope="module")
def source() -> Source:
    return Source(12)


def old_replica() -> SimulatedFiles:
    """A directory with fewer and other messages, all of it in its files."""
    old = Source(1, seed=2)
    old.disk.make_directory("catalog")
    old.catalog.freeze().copy(old.disk, "catalog")
    for directory in ("catalog", "schedule", "definitions", "keys", ""):
        for name in old.disk.list(directory):
            path = f"{directory}/{name}".lstrip("/")
            if path not in old.disk._names:
                old.disk.open(path).fdatasync()
        old.disk.sync_directory(directory)
    return old.disk.kill()


def test_an_empty_directory_becomes_the_replica(source: Source) -> None:
    disk = SimulatedFiles()
    told: list[tuple[str, int, int]] = []
    manifest = incoming(disk, lambda *progress: told.append(progress)).fetch([source.peer()])
    assert manifest.checkpoint_seq == 13  # a name and twelve messages
    assert found_in(disk) == source.content()
    assert open_identity(disk, random_bytes=None) == IDENTITY
    assert any(path.startswith("keys/") for path, _ in manifest.files)
    assert any(path.startswith("definitions/") for path, _ in manifest.files)
    what, done, total = told[-1]
    assert what == "copying the shard" and 0 < done <= total == manifest.total_bytes


def test_what_was_there_is_replaced_and_the_own_message_log_stays(source: Source) -> None:
    disk = old_replica()
    before = found_in(disk)
    disk.open(OWN_FILE, create=True).pwrite([b'{"epoch": 3}'], 0)
    segments = disk.list("messages")
    incoming(disk).fetch([source.peer()])
    assert found_in(disk) == source.content() != before
    assert disk.list("messages") == segments
    assert disk.exists(OWN_FILE)
    clear(disk)
    assert [disk.list(f"incoming/{name}") for name in ("schedule", "keys", "catalog")] == [[]] * 3


def test_it_serves_as_it_did_at_the_source(source: Source) -> None:
    disk = SimulatedFiles()
    incoming(disk).fetch([source.peer()])
    server = SimulatedServer(
        Settings(disk_reserve_bytes=0, segment_bytes=65_536),
        disk,
        MemoryCatalog.copied(disk, "catalog"),
        SimulatedClock(),
        random.Random(1),
        Observer(),
        around=_with_identity,
    )
    assert not server.recovered.damage
    assert server.recovered.next_seq == 14


def test_a_copy_that_breaks_goes_on_where_it_was(source: Source) -> None:
    whole = begun = 0
    for breaks_after_bytes in range(2_000, 20_000, 1_300):
        disk, peer = SimulatedFiles(), source.peer()
        peer.breaks_after_bytes = breaks_after_bytes
        incoming(disk).fetch([peer])
        assert found_in(disk) == source.content()
        seen: set[str] = set()
        for path, start, length in peer.sent:
            whole += path in seen and start == length
            begun += path in seen and 0 < start < length
            seen.add(path)
    assert whole and begun


def test_what_came_from_another_replica_is_not_continued(source: Source) -> None:
    disk, other = SimulatedFiles(), Source(12, seed=3).peer()
    other.breaks_after_bytes = 9_000
    unlucky = LocalPeer(other._snapshots, _broken)
    unlucky.read = other.read  # type: ignore[method-assign]
    with pytest.raises(NoPeerError, match="it has hung up"):
        incoming(disk).fetch([unlucky])
    first = LocalPeer(other._snapshots, other._make)
    first.breaks_after_bytes = 9_000
    made = incoming(disk)
    with pytest.raises(ConnectionResetError):
        made._copy(first)
    made.fetch([source.peer()])
    assert found_in(disk) == source.content()


def _broken() -> SnapshotManifest:
    raise ConnectionResetError("it has hung up")


@pytest.mark.unchecked
def test_what_is_damaged_is_named_and_another_is_asked(source: Source) -> None:
    damaged = Source(12)
    path = f"schedule/{damaged.disk.list('schedule')[2]}"
    damaged.disk.open(path).pwrite([b"?"], 100)
    disk = SimulatedFiles()
    with pytest.raises(NoPeerError, match=f"{path} is damaged at offset 0"):
        incoming(disk).fetch([damaged.peer()])
    assert not disk.exists("FORMAT") and not disk.list("schedule")
    incoming(disk).fetch([damaged.peer(), source.peer()])
    assert found_in(disk) == source.content()


@pytest.mark.unchecked
@pytest.mark.parametrize("directory", ["keys", "definitions", "dispatch"])
def test_damage_in_each_log(directory: str) -> None:
    damaged = Source(12)
    if directory == "dispatch":
        damaged.server.settler.write({494_500: [bytes(40)]}, 0)
        damaged.server.settler.sync()
        damaged.server.settler.write({494_500: [bytes(40)]}, 0)
        damaged.server.settler.sync()
    path = f"{directory}/{damaged.disk.list(directory)[0]}"
    damaged.disk.open(path).pwrite([b"?"], 70 if directory != "keys" else 4096 + 70)
    with pytest.raises(NoPeerError, match="is damaged at offset"):
        incoming(SimulatedFiles()).fetch([damaged.peer()])


@pytest.mark.unchecked
def test_a_torn_end_of_a_dispatch_log_is_cut_off() -> None:
    writing = Source(3)
    writing.server.settler.write({494_500: [bytes(40)]}, 0)
    writing.server.settler.sync()
    path = f"dispatch/{writing.disk.list('dispatch')[0]}"
    file = writing.disk.open(path)
    whole = file.size()
    file.pwrite([b"half a fr"], whole)
    disk = SimulatedFiles()
    incoming(disk).fetch([writing.peer()])
    assert disk.open(path).size() == whole


def test_a_damaged_catalog_is_not_opened(source: Source) -> None:
    disk, peer = SimulatedFiles(), source.peer()

    def make() -> SnapshotManifest:
        manifest = source.make()
        file = source.disk.open(f"snapshots/{manifest.id}/catalog/data.mdb")
        file.pwrite([b"?"], 200)
        return manifest

    peer._make = make
    with pytest.raises(NoPeerError, match="its catalog is damaged"):
        incoming(disk).fetch([peer])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"stamp": 78}, "it has another shard"),
        ({"shard": 1}, "it has another shard, 1"),
        ({"format_version": 99}, "its format, 99, is newer"),
        ({"checkpoint_seq": 5}, "names other files"),
        ({"files": []}, "does not begin with a catalog"),
        ({"files": ["../x"]}, "'../x' is no file of a replica"),
        ({"files": ["messages/00000000000000000001.log"]}, "is no file of a replica"),
        ({"files": ["keys/../../passwd.run"]}, "is no file of a replica"),
        ({"files": ["schedule/2030-01-01T00.schedule"]}, "names other files"),
    ],
)
def test_what_is_something_else_is_refused(
    source: Source, change: dict[str, object], why: str
) -> None:
    peer = source.peer()

    def make() -> SnapshotManifest:
        manifest = source.make()
        if "files" in change:
            names = change["files"]
            assert isinstance(names, list)
            more = [SnapshotFile(name, 1) for name in names]
            return msgspec.structs.replace(manifest, files=[*manifest.files[: len(more)], *more])
        return msgspec.structs.replace(manifest, **change)

    peer._make = make
    disk = SimulatedFiles()
    with pytest.raises(NoPeerError, match=why):
        incoming(disk).fetch([peer])
    assert not disk.exists("FORMAT")


@pytest.mark.unchecked
def test_a_file_that_is_gone_at_the_source_is_damage() -> None:
    damaged = Source(6)
    damaged.disk.unlink(f"schedule/{damaged.disk.list('schedule')[0]}")
    held, error = taken(lambda: damaged.snapshots.take(damaged.server.store))
    assert held is None and isinstance(error, DamageError)
    assert not any(damaged.disk.list(f"snapshots/{name}/keys") for name in ("1", "2"))


def test_links_of_an_earlier_process_are_removed() -> None:
    source = Source(6)
    held = source.snapshots.take(source.server.store)
    assert isinstance(held, HeldSnapshot)
    below = f"snapshots/{held.manifest.id}/schedule"
    assert source.disk.list(below)
    Snapshots(source.disk, IDENTITY)
    assert not source.disk.list(below)


def test_only_a_few_snapshots_are_kept() -> None:
    source = Source(3)
    first, *others = (source.make() for _ in range(5))
    assert source.snapshots.open(first.id, first.files[0].path) is None
    assert all(source.snapshots.open(one.id, one.files[0].path) for one in others)
    source.snapshots.release_all()
    assert not any(source.snapshots.open(one.id, one.files[0].path) for one in others)


def test_it_ends_when_it_is_told_to(source: Source) -> None:
    made = incoming(SimulatedFiles())
    made._is_ending = lambda: True
    with pytest.raises(NoPeerError, match="none is known"):
        made.fetch([source.peer()])


@pytest.mark.unchecked  # hundreds of machines, each of which is checked here
@pytest.mark.parametrize("moment", [Moment.BEFORE, Moment.AFTER])
def test_a_crash_at_any_call_leaves_the_old_or_the_new(moment: Moment) -> None:
    source = Source(2)
    replica = old_replica()
    old, new = found_in(replica), source.content()
    seen = {"old": 0, "new": 0, "decided": 0}
    for at in itertools.count(1):
        disk = _copy_of(replica)
        faults = Faults(Fault(at, FaultKind.CRASH, moment))
        try:
            incoming(FaultyFiles(disk, faults)).fetch([source.peer()])
        except SimulatedCrash:
            pass
        else:
            break
        disk = disk.crash()
        if is_unfinished(disk):
            seen["decided"] += 1
            with pytest.raises(RepairUnfinishedError):
                open_identity(disk, random_bytes=random.Random(1).randbytes)
            _crash_while_finishing(disk, at)
            finish_swap(disk)
            assert found_in(disk) == new
        else:
            found = found_in(disk)
            assert found in (old, new)
            seen["old" if found == old else "new"] += 1
        if at % 10 == 0:
            incoming(disk).fetch([source.peer()])
            assert found_in(disk) == new
    assert all(seen.values()), seen


# ── a replica that is set aside ────────────────────────────────────────────────────────────────


def with_own_log() -> SimulatedFiles:
    disk = old_replica()
    own = disk.open(OWN_FILE, create=True)
    own.pwrite([b'{"epoch": 3}'], 0)
    own.fdatasync()
    disk.sync_directory("")
    return disk


def test_a_replica_is_set_aside_with_all_that_it_has(source: Source) -> None:
    disk = with_own_log()
    before, segments = found_in(disk), disk.list("messages")
    assert segments
    kept = set_aside(disk, 41)
    assert kept == f"{ASIDE}/seq-41"
    assert not disk.exists("FORMAT") and not disk.list("schedule") and not disk.list("messages")
    assert disk.list(f"{kept}/messages") == segments
    assert disk.exists(f"{kept}/{OWN_FILE}")
    incoming(disk).fetch([source.peer()])
    clear(disk)
    assert found_in(disk) == source.content()
    assert found_in(_below(disk, kept)) == before
    assert set_aside(disk, 41) == f"{ASIDE}/seq-41-2", "the first one stays"
    assert found_in(_below(disk, kept)) == before


@pytest.mark.parametrize("moment", [Moment.BEFORE, Moment.AFTER])
def test_a_crash_at_any_call_leaves_it_where_it_was_or_aside(moment: Moment) -> None:
    replica = with_own_log()
    before, seen = found_in(replica), {"here": 0, "aside": 0}
    for at in itertools.count(1):
        disk = _copy_of(replica)
        try:
            set_aside(FaultyFiles(disk, Faults(Fault(at, FaultKind.CRASH, moment))), 41)
        except SimulatedCrash:
            pass
        else:
            break
        disk = disk.crash()
        finish_swap(disk)
        is_here = disk.exists("FORMAT")
        seen["here" if is_here else "aside"] += 1
        assert found_in(disk if is_here else _below(disk, f"{ASIDE}/seq-41")) == before
    assert all(seen.values()), seen


def _below(disk: SimulatedFiles, path: str) -> SimulatedFiles:
    """A directory as a machine of its own."""
    made, whole = SimulatedFiles(rng=random.Random(1)), _copy_of(disk)
    for directory, names in whole._names.items():
        if not f"{directory}/".startswith(f"{path}/"):
            continue
        parent = directory.removeprefix(path).lstrip("/")
        made.make_directory(parent)
        for name, inode in names.items():
            made.open(f"{parent}/{name}".lstrip("/"), create=True).pwrite([inode.content], 0)
    return made


def _copy_of(disk: SimulatedFiles) -> SimulatedFiles:
    """The same files on a machine of its own."""
    made = SimulatedFiles(rng=random.Random(1))
    for directory, names in disk._names.items():
        made.make_directory(directory)
        for name, inode in names.items():
            path = f"{directory}/{name}".lstrip("/")
            file = made.open(path, create=True)
            file.pwrite([bytes(inode.content)], 0)
            file.fdatasync()
            file.close()
        made.sync_directory(directory)
    return made


def _crash_while_finishing(disk: SimulatedFiles, seed: int) -> None:
    """It is begun, and interrupted, on a copy: then it can still be finished."""
    other = _copy_of(disk)
    at = random.Random(seed).randrange(1, 60)
    try:
        finish_swap(FaultyFiles(other, Faults(Fault(at, FaultKind.CRASH))))
    except SimulatedCrash:
        other = other.crash()
        finish_swap(other)
    assert not is_unfinished(other)
    found_in(other)


def test_a_peer_error_says_who_and_why() -> None:
    error = NoPeerError(3, [CopySourceError("http://n2", "it is not there")])
    assert "no other node gives a copy of shard 3 (http://n2: it is not there)" in str(error)
