"""Kinds of directories: marks, directories of older versions, and openers that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from delayserver.cli.tokens import _tokens
from delayserver.recovery.check import check_path
from delayserver.recovery.repair import repair_path
from delayserver.recovery.shards import count_shards
from storage import kinds
from storage.directory import Identity, encode_identity, keep_mark, life_of, open_identity
from storage.errors import (
    DamageError,
    DirectoryKindError,
    MissingFileError,
    StorageError,
)
from storage.files import OsFiles, replace_file
from storage.kinds import (
    OWNED,
    READABLE,
    SERVED,
    DirectoryMark,
    Kind,
    begin_restore,
    end_restore,
    read_mark,
    require,
    require_fresh,
    require_servable,
    write_mark,
)
from storage.shards import encode_shard_count, fix_shard_count
from tests.world.storage.files import SimulatedFiles

IDENTITY = Identity(stamp=7, shard=0, id_secret=bytes(16))
FORMAT = encode_identity(IDENTITY)
OLD = {
    "new": ({}, None),
    "foreign": ({"notes.txt": b""}, None),
    "data": ({"FORMAT": FORMAT}, Kind.DATA),
    "shards": ({"SHARDS": encode_shard_count(2), "shard-0000/FORMAT": FORMAT}, Kind.SHARDS),
    "backup": ({"FORMAT": FORMAT, "BACKUP": b"{}"}, Kind.BACKUP),
    "half a backup": ({"FORMAT": FORMAT, "PARTIAL": b"{}"}, Kind.PARTIAL),
    "a backup of shards": (
        {"SHARDS": encode_shard_count(2), "shard-0000/BACKUP": b"{}"},
        Kind.BACKUP,
    ),
    "half a backup of shards": (
        {"SHARDS": encode_shard_count(2), "shard-0000/PARTIAL": b"{}"},
        Kind.BACKUP,
    ),
    "backups": ({"one/BACKUP": b"{}", "two/PARTIAL": b"{}"}, Kind.BACKUPS),
    "backups of shards": ({"one/shard-0000/BACKUP": b"{}"}, Kind.BACKUPS),
    "backups with a log": ({"_log/00000007-0000/00000001/REACH": b"{}"}, Kind.BACKUPS),
}


def kind_of(files: SimulatedFiles) -> Kind | None:
    return kinds._kind(files, "", files.list(""))


def fill(files: SimulatedFiles | OsFiles, content: dict[str, bytes]) -> None:
    for path, data in content.items():
        files.make_directory(path.rpartition("/")[0])
        replace_file(files, path, data)


@pytest.mark.unchecked("no logs are in it")
@pytest.mark.parametrize("name", OLD)
def test_a_directory_without_a_mark_is_known_by_what_is_in_it(name: str) -> None:
    content, kind = OLD[name]
    files = SimulatedFiles()
    fill(files, content)
    assert kind_of(files) is kind
    for asked in (SERVED, OWNED, READABLE, {Kind.SHARDS}, {Kind.BACKUPS}):
        if kind is None or kind in asked:
            require(files, asked)
        else:
            with pytest.raises(DirectoryKindError, match="simulated is"):
                require(files, asked)


@pytest.mark.unchecked("no logs are in it")
def test_a_mark_says_more_than_the_files_and_what_is_unfinished_more_than_a_mark() -> None:
    files = SimulatedFiles()
    fill(files, {"FORMAT": FORMAT})
    assert life_of(files, IDENTITY) == IDENTITY.fingerprint
    for kind in (Kind.DATA, Kind.REPLICA, Kind.BACKUP, Kind.LOG):
        write_mark(files, DirectoryMark(kind, "a life"))
        assert (kind_of(files), life_of(files, IDENTITY)) == (kind, "a life")
    keep_mark(files, Kind.DATA, life_of(files, IDENTITY))
    assert read_mark(files) == DirectoryMark(Kind.LOG, "a life"), "it was there"
    fill(files, {"RESTORING": b""})
    assert kind_of(files) is Kind.UNFINISHED
    for damaged in (b"", b"{}", b'{"format": 2, "kind": "data", "life": "x"}', b'{"format": 1}'):
        fill(files, {"KIND": damaged})
        with pytest.raises(DamageError):
            read_mark(files)


@pytest.mark.unchecked("no logs are in it")
def test_a_directory_of_an_older_version_gets_its_mark() -> None:
    files = SimulatedFiles()
    fill(files, {"FORMAT": FORMAT})
    keep_mark(files, Kind.DATA, life_of(files, IDENTITY))
    assert read_mark(files.crash()) == DirectoryMark(Kind.DATA, IDENTITY.fingerprint)


@pytest.mark.unchecked("no logs are in it")
def test_a_server_alone_does_not_start_on_a_replica_nor_a_node_on_a_backup() -> None:
    files = SimulatedFiles()
    fill(files, {"FORMAT": FORMAT})
    write_mark(files, DirectoryMark(Kind.REPLICA, "a life"))
    with pytest.raises(DirectoryKindError, match="--cluster"):
        open_identity(files, random_bytes=bytes)
    assert open_identity(files, random_bytes=bytes, given=IDENTITY) == IDENTITY
    write_mark(files, DirectoryMark(Kind.BACKUP, "a life"))
    with pytest.raises(DirectoryKindError, match="delayserver restore"):
        open_identity(files, random_bytes=bytes, given=IDENTITY)


@pytest.mark.unchecked("no logs are in it")
def test_what_a_restore_makes_counts_when_it_has_ended() -> None:
    files = SimulatedFiles()
    fill(files, {"lost+found/1": b""})
    require_fresh(files)
    begin_restore(files, "one")
    fill(files, {"FORMAT": FORMAT})
    files = files.crash()
    with pytest.raises(DirectoryKindError, match="delete what is in the directory"):
        open_identity(files, random_bytes=bytes)
    with pytest.raises(DirectoryKindError):
        begin_restore(files, "one")
    end_restore(files)
    files = files.crash()
    assert open_identity(files, random_bytes=bytes) == IDENTITY
    with pytest.raises(DirectoryKindError):
        require_fresh(files)
    other = SimulatedFiles()
    fill(other, {"notes.txt": b""})
    with pytest.raises(DirectoryKindError, match="not empty"):
        begin_restore(other, "one")


def test_no_server_starts_in_a_directory_of_backups(tmp_path: Path) -> None:
    for above, content in (
        ("marked", None),
        ("backup", {"BACKUP": b"{}"}),
        ("half", {"PARTIAL": b"{}"}),
        ("restored", {"RESTORING": b"{}"}),
    ):
        files = OsFiles(str(tmp_path / above))
        if content is None:
            write_mark(files, DirectoryMark(Kind.BACKUPS, "a life"))
        else:
            fill(files, content)
        with pytest.raises(DirectoryKindError, match=f"in {tmp_path / above}"):
            require_servable(str(tmp_path / above / "deep/data"))
        assert not (tmp_path / above / "deep").exists()
    write_mark(OsFiles(str(tmp_path / "data")), DirectoryMark(Kind.SHARDS, "a life"))
    require_servable(str(tmp_path / "data/shard-0000"))
    require_servable(str(tmp_path / "not there/data"))
    for name in ("BACKUP", "PARTIAL", "KIND", "RESTORING"):  # Others have such names, too.
        (tmp_path / "ours" / name / "data").mkdir(parents=True)
        require_servable(str(tmp_path / "ours" / name / "data"))
        (tmp_path / "text" / name).mkdir(parents=True)
        (tmp_path / "text" / name / name).write_text("where the backups are")
        require_servable(str(tmp_path / "text" / name / "data"))


OPENERS: dict[str, Callable[[Path], object]] = {
    "serve": lambda path: require_servable(str(path)),
    "serve, behind the lock": lambda path: open_identity(OsFiles(str(path)), random_bytes=bytes),
    "shards": lambda path: fix_shard_count(OsFiles(str(path)), 2),
    "repair": lambda path: repair_path(path, now_ms=0),
    "repair of shards": lambda path: count_shards(path, OWNED),
    "tokens": _tokens,
    "restore": lambda path: require_fresh(OsFiles(str(path), readonly=True)),
}
READERS: dict[str, Callable[[Path], object]] = {
    "check": lambda path: check_path(path, catalog_max_bytes=1 << 20),
    "check of shards": count_shards,
}
FOREIGN = {
    **{name: OLD[name][0] for name in ("backup", "half a backup")},
    "half a restore": {"FORMAT": FORMAT, "RESTORING": b"{}"},
    "marked": {
        "FORMAT": FORMAT,
        "KIND": json.dumps({"format": 1, "kind": "log", "life": ""}).encode(),
    },
}


@pytest.mark.parametrize("content", FOREIGN)
def test_every_opener_refuses_a_directory_of_another_kind_and_changes_nothing(
    content: str, tmp_path: Path
) -> None:
    fill(OsFiles(str(tmp_path)), FOREIGN[content])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*")}
    openers = OPENERS if content == "backup" else OPENERS | READERS
    for name, opener in openers.items():
        with pytest.raises(DirectoryKindError, match=str(tmp_path)):
            opener(tmp_path)
            pytest.fail(name)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*")} == before, name


@pytest.mark.parametrize("make", [SimulatedFiles, None])
def test_a_missing_file_is_an_error_of_the_disk_too(
    make: type[SimulatedFiles] | None, tmp_path: Path
) -> None:
    files = SimulatedFiles() if make else OsFiles(str(tmp_path))
    calls: list[Callable[[], object]] = [
        lambda: files.open("x"),
        lambda: files.open("x/y", create=True),
        lambda: files.unlink("x"),
        lambda: files.rename("x", "y"),
        lambda: files.link("x", "y"),
        lambda: files.remove_directory("x"),
        lambda: files.map_to_read("x"),
    ]
    for call in calls:
        with pytest.raises(FileNotFoundError):
            call()
        with pytest.raises(StorageError, match=r"No such file.*not mounted") as caught:
            call()
        assert isinstance(caught.value, MissingFileError) and caught.value.errno == 2
