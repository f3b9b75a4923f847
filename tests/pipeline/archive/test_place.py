"""The place of an archive: what a commit stands on, what is left over, one job at a time."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from delayserver.errors import InputError, PipelineError
from delayserver.pipeline.archive.place import LEFTOVER_S, LOCK, ArchivePlace, _location
from storage.errors import DiskError


@pytest.fixture
def place(tmp_path: Path) -> ArchivePlace:
    return ArchivePlace(f"file://{tmp_path}/archive")


def test_of_two_that_create_a_file_one_fails_and_leaves_nothing(place: ArchivePlace) -> None:
    place.create("a/one", b"1")
    with pytest.raises(FileExistsError):
        place.create("a/one", b"2")
    assert place.read("a/one") == b"1"
    assert list(place.files_below("")) == ["a/one"]


def test_that_holds_when_the_other_comes_between(
    place: ArchivePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.create("one", b"1")
    monkeypatch.setattr(ArchivePlace, "exists", lambda self, name: False)
    with pytest.raises(FileExistsError):
        place.create("one", b"2")
    assert place.read("one") == b"1"


def test_replace_rename_delete(place: ArchivePlace) -> None:
    place.replace("one", b"1")
    place.replace("one", b"2")
    place.rename("one", "a/b/two")
    assert (place.exists("one"), place.read("a/b/two")) == (False, b"2")
    place.delete("a/b/two")
    place.delete("a/b/two")
    place.delete_directory("a")
    place.delete_directory("a")
    with pytest.raises(FileNotFoundError):
        place.read("a/b/two")
    assert place.leftovers("nowhere") == []


def test_what_is_left_over_in_a_store_is_a_day_old(
    place: ArchivePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.replace("old", b"")
    place.replace("young", b"")
    assert place.leftovers("") == ["old", "young"]
    written_s = os.stat(place.path("old")).st_mtime - LEFTOVER_S - 1
    os.utime(place.path("old"), (written_s, written_s))
    monkeypatch.setattr(ArchivePlace, "is_local", False)
    assert place.leftovers("") == ["old"]


def test_names_and_locations(place: ArchivePlace) -> None:
    assert place.location("a/one") == f"{place.url}/a/one"
    assert place.name_of(place.location("a/one")) == "a/one"
    assert place.name_of(f"file://{place.url}/a/one") == "a/one"
    with pytest.raises(PipelineError, match="not below"):
        place.name_of("/elsewhere/one")


def test_a_task_that_works_elsewhere_has_the_same_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sent = pickle.dumps(ArchivePlace("archive"))
    monkeypatch.chdir("/")
    there = pickle.loads(sent)
    assert (there.url, there.given) == (str(tmp_path / "archive"),) * 2


def test_the_options_of_a_url_are_not_in_its_locations() -> None:
    place = ArchivePlace("s3a://company/delays?region=eu-west-1&endpoint_override=localhost:9")
    assert place.location("one") == "s3://company/delays/one"
    assert place.path("one") == "company/delays/one"
    assert not place.is_local


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("s3://key:secret@company/delays/?scheme=http", "s3://company/delays"),
        (
            "abfs://delays:key@company.dfs.core.windows.net/a?x=1",
            "abfs://delays@company.dfs.core.windows.net/a",
        ),
        ("abfs://:key@company.dfs.core.windows.net/a", "abfs://company.dfs.core.windows.net/a"),
    ],
)
def test_keys_are_not_in_locations(url: str, location: str) -> None:
    assert _location(url) == location


def test_one_job_at_a_time_and_a_killed_one_holds_nothing(place: ArchivePlace) -> None:
    program = (
        "import sys, time\n"
        "from delayserver.pipeline.archive.place import ArchivePlace\n"
        f"with ArchivePlace({place.url!r}).locked():\n"
        "    print('locked', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdin is not None
    assert holder.stdout.readline() == "locked\n"
    with pytest.raises(PipelineError, match="another job"), place.locked():
        pass
    holder.kill()
    holder.wait()
    holder.stdin.close()
    holder.stdout.close()
    with place.locked():
        assert place.exists(LOCK)


def test_places_that_cannot_be() -> None:
    with pytest.raises(InputError, match="s3://"):
        ArchivePlace("ftp://somewhere/archive")
    with pytest.raises(InputError, match=r"ftp://somewhere/x") as found:
        ArchivePlace("ftp://key:secret@somewhere/x")
    assert "secret" not in str(found.value)


def test_what_the_disk_says_is_told_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match="file/_below"):
        ArchivePlace(str(tmp_path / "file")).replace("below", b"")
