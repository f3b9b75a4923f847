"""How many shards a directory has is said once, and never changed."""

import json

import pytest

from storage.directory import FORMAT_FILE
from storage.errors import DamageError, FormatVersionError, ShardCountError
from storage.files import replace_file
from storage.shards import SHARDS_FILE, fix_shard_count, read_shard_count, shard_directory
from tests.world.storage.files import SimulatedFiles


def test_the_number_is_fixed_by_the_first_start() -> None:
    files = SimulatedFiles("data")
    assert read_shard_count(files) is None
    fix_shard_count(files, 3)
    assert read_shard_count(files) == 3
    fix_shard_count(files, 3)
    with pytest.raises(ShardCountError, match=r"was made with 3 shards.*--shards 3"):
        fix_shard_count(files, 4)
    with pytest.raises(ShardCountError, match="was made with 3 shards"):
        fix_shard_count(files, 1)


def test_the_directory_of_a_server_alone_stays_so() -> None:
    files = SimulatedFiles("data")
    fix_shard_count(files, 1)
    assert not files.exists(SHARDS_FILE)
    replace_file(files, FORMAT_FILE, b"{}")
    fix_shard_count(files, 1)
    with pytest.raises(ShardCountError, match="was made with 1 shard, "):
        fix_shard_count(files, 2)
    assert not files.exists(SHARDS_FILE)


@pytest.mark.parametrize(
    "document",
    [b"", b"[]", b'{"format": 1}', b'{"format": 1, "shards": 1}', b'{"format": 1, "shards": 257}'],
)
def test_what_is_no_file_of_shards_is_damage(document: bytes) -> None:
    files = SimulatedFiles("data")
    replace_file(files, SHARDS_FILE, document)
    with pytest.raises(DamageError, match="not a file of shards"):
        read_shard_count(files)


@pytest.mark.parametrize("beside", [2, 3, 255])
def test_a_shard_that_is_not_counted_is_damage(beside: int) -> None:
    files = SimulatedFiles("data")
    fix_shard_count(files, 2)
    for shard in (1, beside):
        files.make_directory(shard_directory(shard))
    replace_file(files, f"{shard_directory(1)}/{FORMAT_FILE}", b"{}")
    assert read_shard_count(files) == 2
    replace_file(files, f"{shard_directory(beside)}/{FORMAT_FILE}", b"{}")
    with pytest.raises(DamageError, match=f"there are 2 shards, and shard-0*{beside} stands"):
        read_shard_count(files)
    with pytest.raises(DamageError, match="there are 2 shards"):
        fix_shard_count(files, 2)


def test_a_newer_file_is_named() -> None:
    files = SimulatedFiles("data")
    replace_file(files, SHARDS_FILE, json.dumps({"format": 2, "shards": 2}).encode())
    with pytest.raises(FormatVersionError, match="format version 2"):
        read_shard_count(files)


def test_directories_sort_as_their_numbers() -> None:
    names = [shard_directory(number) for number in range(256)]
    assert names == sorted(names)
    assert names[2] == "shard-0002"
