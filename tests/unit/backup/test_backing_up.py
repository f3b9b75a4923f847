"""A backup is made of a snapshot: what is copied and what is linked, at which pace, and what is
left of it by a crash at any call."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from delayserver.backup.backing_up import BackingUp, ReadPace, WantedBackup
from delayserver.backup.shelf import (
    BackupManifest,
    Shelf,
    decode_manifest,
    encode_manifest,
    is_backup_name,
    view_of,
)
from delayserver.recovery.snapshots import Snapshots
from storage.check import assert_clean
from storage.directory import Identity
from storage.errors import BackupError, DamageError, DiskError, StorageError
from storage.files import Files, replace_file
from tests.peers import content_of
from tests.unit.recovery.test_incoming import IDENTITY, Source
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.faults import Fault, FaultKind, Faults, FaultyFiles, SimulatedCrash
from tests.world.storage.files import SimulatedFiles

TAKEN_MS = 5000
LIFE = "a life"


@pytest.fixture(scope="module")
def source() -> Source:
    return Source(4)


def back_up(
    source: Source,
    files: Files,
    name: str = "one",
    *,
    check: Callable[[str], str] = lambda place: "",
    wait: Callable[[float], bool] = lambda s: False,
    taken_ms: int = TAKEN_MS,
    shards: int = 1,
    snapshots: Snapshots | None = None,
) -> BackupManifest:
    snapshots = snapshots or source.snapshots
    identity = source.server.store.identity
    making = BackingUp(
        WantedBackup(name, 4000, is_verified=True),
        Shelf(files, identity, shards, LIFE),
        snapshots,
        identity,
        shards=shards,
        pace=ReadPace(1 << 20, lambda: 0.0, wait),
        check=check,
        tokens=lambda: b"{}",
        clock=lambda: 6000,
    )
    manifest = making.run(source.make(), taken_ms)
    assert making.copied_bytes == manifest.copied_bytes
    return manifest


def copied(files: SimulatedFiles, place: str) -> SimulatedFiles:
    """A backup as a directory of its own."""
    single = SimulatedFiles()
    for path in paths_below(files, place):
        name = path.removeprefix(f"{place}/")
        single.make_directory(name.rpartition("/")[0])
        single.open(name, create=True).pwrite([files.open(path).pread(1 << 30, 0)], 0)
    return single


def paths_below(files: SimulatedFiles, place: str) -> list[str]:
    found = []
    for name in files.list(place):
        path = f"{place}/{name}"
        found += paths_below(files, path) if path in files._names else [path]
    return found


def test_it_is_a_data_directory_with_all_that_the_source_had(source: Source) -> None:
    files = SimulatedFiles()
    checked: list[str] = []

    def check(place: str) -> str:
        checked.append(place)
        return ""

    manifest = back_up(source, files, check=check)
    assert checked == ["one"]
    assert decode_manifest(encode_manifest(manifest), "BACKUP") == manifest
    assert Shelf(files, IDENTITY, 1, LIFE).manifests() == [manifest]
    assert (manifest.began_ms, manifest.taken_ms, manifest.completed_ms) == (4000, 5000, 6000)
    assert manifest.total_bytes == sum(
        files.open(f"one/{path}").size() for path, _, _ in manifest.files
    )
    single = copied(files, "one")
    catalog = MemoryCatalog.copied(single, "catalog")
    assert_clean(single, catalog)
    assert content_of(single, catalog) == source.content()
    assert single.exists("TOKENS") and not single.exists("PARTIAL")


def test_what_has_not_changed_is_the_same_file(source: Source) -> None:
    files = SimulatedFiles()
    first, second = back_up(source, files), back_up(source, files, "two", taken_ms=TAKEN_MS + 1)
    # The catalog is copied page by page, and is the same here; FORMAT and TOKENS are written anew.
    assert (second.copied_bytes, second.files) == (0, first.files)
    shared = [path for path, _, _ in first.files if "/" in path]
    assert shared
    for path in shared:
        assert files._find(f"one/{path}") is files._find(f"two/{path}")
    Shelf(files, IDENTITY, 1, LIFE).remove("one")
    assert files.list("") == ["two"]
    assert Shelf(files, IDENTITY, 1, LIFE).manifests() == [second]


def test_a_name_and_a_length_prove_nothing(source: Source) -> None:
    files = SimulatedFiles()
    first = back_up(source, files)
    path = next(path for path, _, _ in first.files if path.startswith("schedule/"))
    changed = [
        one._replace(crc32c=one.crc32c ^ 1) if one.path == path else one for one in first.files
    ]
    replace_file(files, "one/BACKUP", encode_manifest(replace(first, files=changed)))
    second = back_up(source, files, "two", taken_ms=TAKEN_MS + 1)
    assert second.copied_bytes == files.open(f"two/{path}").size()
    assert files._find(f"one/{path}") is not files._find(f"two/{path}")


def test_a_file_system_without_links_is_copied_to(source: Source) -> None:
    class NoLinks(SimulatedFiles):
        def link(self, source: str, target: str) -> None:
            raise DiskError("link", source, "Operation not permitted")

    files = NoLinks()
    first, second = back_up(source, files), back_up(source, files, "two")
    assert second.copied_bytes == first.copied_bytes > 0


def test_it_is_read_no_faster_than_it_may(source: Source) -> None:
    waits: list[float] = []

    def wait(s: float) -> bool:
        waits.append(s)
        return False

    manifest = back_up(source, SimulatedFiles(), wait=wait)
    read_bytes = sum(file.length for file in manifest.files if "/" in file.path)
    assert waits[0] == 0 and waits == sorted(waits)
    assert waits[-1] == pytest.approx(read_bytes / (1 << 20), rel=0.5)


@pytest.mark.parametrize("pieces", [0, 2])
def test_one_that_is_given_up_leaves_nothing(source: Source, pieces: int) -> None:
    files, count = SimulatedFiles(), itertools.count()
    with pytest.raises(BackupError, match="given up"):
        back_up(source, files, wait=lambda s: next(count) >= pieces)
    assert files.list("") == []
    assert source.disk.list("snapshots") and not any(
        source.disk.list(f"snapshots/{one}/schedule") for one in source.disk.list("snapshots")
    )


def test_one_that_is_not_sound_leaves_nothing(source: Source) -> None:
    files = SimulatedFiles()
    with pytest.raises(BackupError, match="a bit is wrong"):
        back_up(source, files, check=lambda place: "a bit is wrong")
    assert files.list("") == []


def test_a_part_of_several_shards_stands_below_all_of_them(source: Source) -> None:
    files = SimulatedFiles()
    manifest = back_up(source, files, shards=2)
    assert (manifest.shard, manifest.shards) == (0, 2)
    assert files.list("one") == ["KIND", "SHARDS", "shard-0000"]
    shelf = Shelf(files, IDENTITY, 2, LIFE)
    assert shelf.find("one") == manifest and not shelf.is_free("one")
    # The name is taken for whoever has one shard alone, and for another server.
    assert not Shelf(files, IDENTITY, 1, LIFE).is_free("one")
    shelf.remove("one")
    assert files.list("") == []


def test_a_crash_at_any_call_leaves_a_backup_or_none(source: Source) -> None:
    """And the next one deletes what is left."""
    trace = Faults()
    back_up(source, FaultyFiles(SimulatedFiles(), trace), snapshots=source.snapshots)
    outcomes = set()
    for at in range(1, trace.call_count + 1):
        disk = SimulatedFiles()
        with pytest.raises(SimulatedCrash):
            back_up(source, FaultyFiles(disk, Faults(Fault(at, FaultKind.CRASH))))
        left = disk.crash() if at % 2 else disk.kill()
        shelf = Shelf(left, IDENTITY, 1, LIFE)
        found = shelf.manifests()
        outcomes.add(len(found))
        for manifest in found:
            single = copied(left, manifest.name)
            assert_clean(single, MemoryCatalog.copied(single, "catalog"))
        shelf.clear()
        assert shelf.manifests() == found
        if not found:
            assert shelf.is_free("one")
            assert back_up(source, left).name == "one"
    assert outcomes == {0, 1}


def test_a_call_that_fails_leaves_none(source: Source) -> None:
    trace = Faults()
    back_up(source, FaultyFiles(SimulatedFiles(), trace))
    failed = 0
    for at in range(1, trace.call_count + 1, 3):
        disk = SimulatedFiles()
        try:
            back_up(source, FaultyFiles(disk, Faults(Fault(at=at, kind=FaultKind.IO_ERROR))))
        except StorageError:
            failed += 1
            assert Shelf(disk, IDENTITY, 1, LIFE).manifests() == []
            Shelf(disk, IDENTITY, 1, LIFE).clear()
            assert disk.list("") == []
    assert failed > 10


def test_what_is_of_another_server_is_left_alone(source: Source) -> None:
    files = SimulatedFiles()
    back_up(source, files)
    other = Shelf(files, Identity(stamp=78, shard=0, id_secret=bytes(16)), 1, LIFE)
    assert other.manifests() == [] and other.find("one") is None
    files.open("one/PARTIAL", create=True).pwrite([b'{"stamp": 77, "shard": 0}'], 0)
    other.clear()
    assert files.exists("one/BACKUP")
    Shelf(files, IDENTITY, 1, LIFE).clear()
    assert files.list("") == []


def test_a_manifest_that_is_damaged_is_none(source: Source) -> None:
    files = SimulatedFiles()
    manifest = back_up(source, files)
    assert view_of(manifest).checkpoint_seq == manifest.checkpoint_seq
    data = encode_manifest(manifest)
    for broken in (b"", b"{}", data.replace(b'"shard":0', b'"shard":1'), data[:-20]):
        with pytest.raises(DamageError):
            decode_manifest(broken, "BACKUP")
    newer = encode_manifest(replace(manifest, version=2))
    with pytest.raises(BackupError, match="newer version"):
        decode_manifest(newer, "BACKUP")
    file = files.open("one/BACKUP")
    file.pwrite([b"x"], 0)
    assert Shelf(files, IDENTITY, 1, LIFE).manifests() == []


def test_names() -> None:
    assert all(map(is_backup_name, ("a", "2026-11-20T03-00-00.000Z", "a_b.c")))
    assert not any(map(is_backup_name, ("", ".a", "a/b", "..", "a\n", "a" * 101)))
