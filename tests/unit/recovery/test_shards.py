"""Check and repair of a directory of several shards."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from delayserver.cli import make_app
from delayserver.recovery.dropping import drop
from delayserver.recovery.shards import count_shards
from storage.directory import FORMAT_FILE, LOCK_FILE
from storage.files import OsFiles
from storage.shards import (
    find_directory_above,
    fix_shard_count,
    parse_shard_directory,
    shard_directory,
)
from tests.pipeline.store import make_shards


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three shards with messages whose seqs are the same."""
    for store in make_shards(tmp_path / "data"):
        store.publish("order.unpaid", [1000, 2000, 3000])
        store.checkpoint()
        store.stop()
    return tmp_path / "data"


def delayserver(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(make_app(), list(arguments), env={"COLUMNS": "300"})
    return result.exit_code, result.output


def report(root: Path, command: str = "check", *options: str) -> tuple[int, dict[int, dict]]:
    status, text = delayserver(command, "--data-dir", str(root), "--json", *options)
    return status, {shard["shard"]: shard for shard in json.loads(text)["shards"]}


def flip(path: Path, offset: int = -20) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def schedule_of(root: Path, shard: int) -> Path:
    (path,) = (root / shard_directory(shard) / "schedule").iterdir()
    return path


def test_all_shards_are_checked(root: Path) -> None:
    status, text = delayserver("check", "--data-dir", str(root))
    assert status == 0
    assert [f"shard-000{shard}" in text for shard in range(4)] == [True, True, True, False]
    assert text.count("Sound:") == 3
    status, shards = report(root)
    assert (status, list(shards)) == (0, [0, 1, 2])
    assert all(one["is_clean"] and one["logs"]["schedule"]["rows"] == 3 for one in shards.values())


@pytest.mark.damaged("that is what the check is to find")
def test_damage_is_named_with_its_shard(root: Path) -> None:
    flip(schedule_of(root, 1))
    status, shards = report(root)
    assert status == 1
    assert [shards[shard]["is_clean"] for shard in range(3)] == [True, False, True]
    assert shards[1]["findings"][0]["file"].startswith("schedule/")
    status, text = delayserver("check", "--data-dir", str(root))
    assert status == 1
    before, _, rest = text.partition("shard-0001\n")
    assert "damage:" not in before and "damage:" in rest.partition("shard-0002\n")[0]


def test_a_shard_may_be_given_by_itself(root: Path) -> None:
    flip(schedule_of(root, 1))
    for shard, wanted in ((0, 0), (1, 1)):
        status, text = delayserver("check", "--data-dir", str(root / shard_directory(shard)))
        assert (status, "shard-0002" in text) == (wanted, False)
    assert delayserver("repair", "--data-dir", str(root / shard_directory(1)))[0] == 0
    assert report(root)[0] == 0


@pytest.mark.damaged("that is what the check is to find")
def test_a_missing_shard_is_said_and_the_others_are_checked(root: Path) -> None:
    shutil.rmtree(root / shard_directory(1))
    flip(schedule_of(root, 2))
    status, shards = report(root)
    assert status == 2
    assert "shard-0001 is not a data directory" in shards[1]["error"]
    assert shards[0]["is_clean"] and not shards[2]["is_clean"]
    status, text = delayserver("check", "--data-dir", str(root))
    assert status == 2 and "error:" in text and "Damaged in" in text


@pytest.mark.unchecked
def test_a_shard_that_a_node_is_not_to_have_is_not_missing(root: Path) -> None:
    drop(OsFiles(str(root / shard_directory(1))))
    for command in ("check", "repair"):
        status, shards = report(root, command)
        assert status == 0
        assert shards[1] == {"shard": 1, "dropped": True}
    status, text = delayserver("check", "--data-dir", str(root))
    assert status == 0 and "is not to have it" in text and text.count("Sound:") == 2


def test_a_shard_under_the_name_of_another_is_refused(root: Path) -> None:
    (root / shard_directory(1)).rename(root / "x")
    (root / shard_directory(2)).rename(root / shard_directory(1))
    (root / "x").rename(root / shard_directory(2))
    for command in ("check", "repair"):
        status, shards = report(root, command)
        assert status == 2
        assert "made for shard 2" in shards[1]["error"]
        assert "made for shard 1" in shards[2]["error"]
        assert "error" not in shards[0]


def test_what_is_damaged_is_repaired_in_each_shard(root: Path) -> None:
    flip(schedule_of(root, 0))
    flip(schedule_of(root, 2))
    status, shards = report(root, "repair", "--dry-run")
    assert status == 1
    assert [bool(shards[shard]["remedies"]) for shard in range(3)] == [True, False, True]
    status, shards = report(root, "repair")
    assert status == 0
    assert [bool(shards[shard]["backups"]) for shard in range(3)] == [True, False, True]
    assert report(root)[0] == 0
    status, text = delayserver("repair", "--data-dir", str(root))
    assert status == 0 and text.count("nothing to repair") == 3


def test_no_repair_beside_a_server(root: Path) -> None:
    with OsFiles(str(root)).lock(LOCK_FILE):
        status, text = delayserver("repair", "--data-dir", str(root))
        assert status == 2 and "in use" in text
    flip(schedule_of(root, 2))
    with OsFiles(str(root / shard_directory(1))).lock(LOCK_FILE):
        status, shards = report(root, "repair")
    assert status == 2
    assert "in use" in shards[1]["error"] and shards[2]["backups"]


def test_a_directory_of_one_is_as_it_was(root: Path) -> None:
    alone = root / shard_directory(1)
    assert count_shards(alone) is None
    status, text = delayserver("check", "--data-dir", str(alone), "--json")
    assert status == 0
    assert json.loads(text)["is_clean"] and "shards" not in json.loads(text)
    assert (alone / FORMAT_FILE).is_file()


def test_where_a_shard_belongs(tmp_path: Path) -> None:
    (tmp_path / "shard-0001").mkdir()
    assert find_directory_above(str(tmp_path / "shard-0001")) is None
    fix_shard_count(OsFiles(str(tmp_path)), 2)
    assert count_shards(tmp_path) == 2
    assert find_directory_above(str(tmp_path / "shard-0001")) == str(tmp_path.resolve())
    assert find_directory_above(str(tmp_path)) is None
    names = ("shard-0012", "shard-12", "shard-00012", "shards")
    assert [parse_shard_directory(name) for name in names] == [12, None, None, None]
    assert parse_shard_directory(shard_directory(7)) == 7
