"""Which files make up a table, and what the names of their folders say."""

import bz2
import gzip
import lzma
from pathlib import Path

import pyarrow as pa
import pytest

from delayserver.errors import PipelineError
from delayserver.pipeline.load.files import decompressed, find_files, is_compressed, opened


@pytest.fixture
def table(tmp_path: Path) -> Path:
    root = tmp_path / "a table 50% é"
    for name in (
        "kind=a/part-0.csv",
        "kind=b%2Fc/id=007/part-0.csv",
        "kind=__HIVE_DEFAULT_PARTITION__/part-0.csv",
        "_SUCCESS",
        "_temporary/0/part-0.csv",
        ".part-0.csv.crc",
        "_x=1/part-0.csv",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("1")
    return root


def test_folders_are_columns_of_text(table: Path) -> None:
    found = {file.path.removeprefix(f"{table}/"): file.folders for file in find_files(str(table))}
    assert found == {
        "kind=a/part-0.csv": (("kind", "a"),),
        "kind=b%2Fc/id=007/part-0.csv": (("kind", "b/c"), ("id", "007")),
        "kind=__HIVE_DEFAULT_PARTITION__/part-0.csv": (("kind", None),),
        "_x=1/part-0.csv": (("_x", "1"),),
    }
    assert [file.path for file in find_files(table.as_uri())] == [
        file.path for file in find_files(str(table))
    ]


@pytest.mark.parametrize(
    ("pattern", "count"),
    [("*/*.csv", 3), ("kind=*", 3), ("{kind=a,_x=*}/*", 2), ("kind=[ab]*", 2), ("*/*/*.csv", 1)],
)
def test_patterns(table: Path, pattern: str, count: int) -> None:
    found = find_files(f"{table}/{pattern}")
    assert len(found) == count
    assert all(file.folders for file in found)


@pytest.mark.parametrize("pattern", ["{kind=a,kind=a/*}", "{kind=a,kind=*}/*", "{,kind=a}"])
def test_a_file_that_two_patterns_name_is_there_once(table: Path, pattern: str) -> None:
    found = [file.path for file in find_files(f"{table}/{pattern}")]
    assert f"{table}/kind=a/part-0.csv" in found and len(found) == len(set(found))


def test_a_name_that_looks_like_a_pattern(tmp_path: Path) -> None:
    path = tmp_path / "orders[1].csv"
    path.write_text("a")
    assert [file.path for file in find_files(str(path))] == [str(path)]


def test_nothing_there(tmp_path: Path) -> None:
    assert find_files(str(tmp_path)) == []
    for name in ("no.csv", "*.csv"):
        with pytest.raises(PipelineError, match="there is no"):
            find_files(f"{tmp_path}/{name}")
    with pytest.raises(PipelineError, match="no place that a table can be at"):
        find_files("ftp://host/a.csv")


@pytest.mark.parametrize("codec", ["gzip", "bz2", "xz", "zstd", "lz4", None])
def test_compression_is_known_by_the_first_bytes(tmp_path: Path, codec: str | None) -> None:
    data = b"a,b\n" * 100_000
    made = {
        "gzip": lambda: gzip.compress(data[:100]) + gzip.compress(data[100:]),
        "bz2": lambda: bz2.compress(data),
        "xz": lambda: lzma.compress(data),
        None: lambda: data,
    }
    packed = made[codec]() if codec in made else pa.Codec(codec).compress(data, asbytes=True)
    path = tmp_path / "any.name"
    path.write_bytes(packed)
    (file,) = find_files(str(path))
    assert is_compressed(file) == (codec is not None)
    with decompressed(file) as stream:
        assert stream.read() == data
    with opened(file) as stream:
        assert stream.read() == packed
    path.write_bytes(packed[: len(packed) // 2])
    if codec is not None:
        with (
            pytest.raises(PipelineError, match=r"cannot read .*any\.name"),
            decompressed(file) as s,
        ):
            s.read()
