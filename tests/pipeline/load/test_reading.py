"""A table that any program has written comes out as the rows that it was made of, byte by byte."""

import csv
import gzip
import io
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delayserver.errors import PipelineError
from delayserver.pipeline.load import reading, source
from delayserver.pipeline.load.reading import read_rows
from delayserver.pipeline.load.source import open_files
from delayserver.pipeline.load.staging import BODY, DUE, GIVEN_DUE, HEADERS, KEY, PROBLEM, SUBJECT
from delayserver.pipeline.publish.mapping import MessageColumns
from delayserver.pipeline.publish.values import SECONDS, text_or_none
from delayserver.times import parse_time_ms

DUE_MS = 1_900_000_000_000
ALL = MessageColumns("due", subject_column="subject", key="key", body="body")
REST = MessageColumns("due", subject="s", key="key")
Row = tuple[str, str, int, str]
"""Subject, key, due time in ms, body as JSON text."""


def rows_of(
    path: Path | str,
    columns: MessageColumns = ALL,
    kind: str | None = None,
    passed: Sequence[str] = (),
    **options: str,
) -> list[dict[str, Any]]:
    """Returns the rows of a table that staging gets."""
    table = open_files(str(path), source.format_of(str(path), kind), options)
    table.check(columns, passed)
    fields = table.passed(passed)
    own = tuple((name, one.name, pa.string()) for name, one in zip(passed, fields, strict=True))
    plan = table._plan(columns, own)
    pieces = [piece for seen in table.files for piece in seen.pieces]
    return [row for batch in read_rows(plan, pieces) for row in listed(batch)]


def listed(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """The rows of a batch, in which a text need not be UTF-8."""
    columns = [
        text_or_none(column) if column.type == pa.string() else column.to_pylist()
        for column in batch.columns
    ]
    return [dict(zip(batch.schema.names, row, strict=True)) for row in zip(*columns, strict=True)]


def messages_of(*arguments: Any, **named: Any) -> list[Row]:
    """Rows without problems; the others fail."""
    rows = rows_of(*arguments, **named)
    assert [row[PROBLEM] for row in rows if row[PROBLEM] is not None] == []
    return [(row[SUBJECT], row[KEY], row[DUE], row[BODY]) for row in rows]


# ── any writer ─────────────────────────────────────────────────────────────────────────────────

# Most of what a writer may have to quote, escape or guess a type of.
word = st.sampled_from(
    ["007", "1e3", "1.000", "NULL", "NaN", "true", "2026-01-01", '"', "\\", " a "]
)
text = word | st.text(
    st.sampled_from("a\",;\\\n\r\t 'é{}[]") | st.characters(codec="utf-8"), max_size=9
)
value = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=5,
)
body = value.map(json.dumps) | value.map(lambda one: json.dumps(one, ensure_ascii=False, indent=1))
row = st.tuples(
    st.sampled_from(["a.b", "1", "007"]),
    # NUL is not text to pandas and DuckDB.
    text.filter(lambda one: bool(one) and "\0" not in one),
    st.integers(DUE_MS, DUE_MS + 10**10),
    body.filter(lambda one: one == one.strip()),
)
NAMES = ["subject", "key", "due", "body"]


def frame(rows: list[Row]) -> pd.DataFrame:
    return pd.DataFrame([dict(zip(NAMES, one, strict=True)) for one in rows])


def arrow(rows: list[Row]) -> pa.Table:
    return pa.Table.from_pylist([dict(zip(NAMES, one, strict=True)) for one in rows])


def by_csv(rows: list[Row], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([NAMES, *rows])


def by_duckdb(options: str) -> Callable[[list[Row], Path], None]:
    def write(rows: list[Row], path: Path) -> None:
        made = arrow(rows)
        with duckdb.connect() as database:
            database.register("made", made)
            database.execute(f"copy made to '{path}' ({options})")

    return write


def by_json(rows: list[Row], path: Path) -> None:
    lines = (json.dumps(dict(zip(NAMES, one, strict=True))) for one in rows)
    path.write_text("\n".join(lines))


WRITERS: dict[str, tuple[str, Callable[[list[Row], Path], None]]] = {
    "csv": ("csv", by_csv),
    "pandas, CSV": ("csv", lambda rows, path: frame(rows).to_csv(path, index=False)),
    "pandas, CSV in UTF-16": (
        "csv",
        lambda rows, path: frame(rows).to_csv(path, index=False, encoding="utf-16"),
    ),
    "pandas, gzip": ("csv.gz", lambda rows, path: frame(rows).to_csv(path, index=False)),
    "pandas, Parquet": ("parquet", lambda rows, path: frame(rows).to_parquet(path)),
    "pandas, categories": (
        "parquet",
        lambda rows, path: frame(rows).astype({"key": "category"}).to_parquet(path),
    ),
    "pandas, JSON lines": (
        "jsonl",
        lambda rows, path: frame(rows).to_json(path, orient="records", lines=True),
    ),
    "pandas, JSON": ("json", lambda rows, path: frame(rows).to_json(path, orient="records")),
    "DuckDB, CSV": ("csv", by_duckdb("format csv, header")),
    "DuckDB, Parquet": ("parquet", by_duckdb("format parquet, compression zstd")),
    "DuckDB, JSON": ("json", by_duckdb("format json")),
    "pyarrow, CSV": ("csv", lambda rows, path: pa.csv.write_csv(arrow(rows), path)),
    "pyarrow, Parquet": ("parquet", lambda rows, path: pq.write_table(arrow(rows), path)),
    "json": ("jsonl", by_json),
}


@pytest.mark.parametrize("writer", WRITERS)
@settings(max_examples=15, deadline=None)
@given(rows=st.lists(row, min_size=1, max_size=4))
def test_a_load_keeps_every_byte(writer: str, rows: list[Row]) -> None:
    ending, write = WRITERS[writer]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, f"table.{ending}")
        write(rows, path)
        found = messages_of(path)
    assert [(*one[:3], one[3] or "null") for one in found] == rows


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(text.filter(bool), value), min_size=1, max_size=4))
def test_lines_of_json_are_each_their_own(rows: list[tuple[str, Any]]) -> None:
    """As by POST: no line gets fields of another, and a value keeps its type and its digits."""
    documents = [
        {"due": DUE_MS, "key": key, **({"body": one} if n % 2 else {f"f{n}": one})}
        for n, (key, one) in enumerate(rows)
    ]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "table.jsonl")
        path.write_text("".join(json.dumps(one) + "\n" for one in documents))
        found = rows_of(path, REST)
    for document, one in zip(documents, found, strict=True):
        rest = {name: inner for name, inner in document.items() if name not in ("due", "key")}
        assert (one[KEY], one[DUE]) == (document["key"], DUE_MS)
        assert json.loads(one[BODY]) == rest
        assert repr(json.loads(one[BODY])) == repr(rest)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('{"z": 1,"a":1.10}', '{"z": 1,"a":1.10}'),
        ("12345678901234567890123", "12345678901234567890123"),
        ("null", None),
        ('"plain text"', '"plain text"'),
        ('"{\\"a\\": 1}"', '{"a": 1}'),
        ('"5"', "5"),
        ('"{broken"', "{broken"),
    ],
)
def test_a_body_in_json(tmp_path: Path, body: str, expected: str | None) -> None:
    path = tmp_path / "table.jsonl"
    path.write_text(f'{{"due": {DUE_MS}, "key": "k", "body": {body}}}\n')
    columns = MessageColumns("due", subject="s", key="key", body="body")
    assert [row[BODY] for row in rows_of(path, columns)] == [expected]


def test_fields_of_json_that_cannot_be_what_they_are_to_be(tmp_path: Path) -> None:
    path = tmp_path / "table.jsonl"
    lines = [
        f'{{"due": {DUE_MS}, "subject": "a", "key": 1.10, "body": 1}}',
        f'{{"due": {DUE_MS}, "subject": "a", "key": {{"a": 1}}, "body": 1}}',
        '{"due": [1], "subject": "a", "key": "a", "body": 1}',
        f'{{"due": {DUE_MS}, "subject": 7, "key": "a", "body": 1}}',
        '{"due": 1.5, "subject": "a", "key": true, "body": 1}',
        '{"subject": "a"}',
        "{broken",
    ]
    path.write_text("\n".join(lines))
    rows = rows_of(path)
    assert [row[PROBLEM] for row in rows] == [
        None,
        "key is an object",
        "due time is an array",
        "subject is not text",
        "due time cannot be read: '1.5'",
        "no due time",
        "malformed line",
    ]
    assert [row[KEY] for row in rows] == ["1.10", None, "a", "a", "true", None, None]
    assert (rows[4][GIVEN_DUE], rows[6][BODY]) == ("1.5", "{broken")


def test_pieces_of_a_large_file_of_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.jsonl"
    lines = [json.dumps({"due": DUE_MS + n, "key": "é" * (n % 40 + 1)}) for n in range(300)]
    lines[1::2] = [f"[{line}]" for line in lines[1::2]]  # None of them is the begin of an array.
    path.write_bytes("\n".join(lines).encode())
    for size in (100, 1_000, path.stat().st_size - 1):
        monkeypatch.setattr(source, "PIECE_BYTES", size)
        assert len(open_files(str(path), "json", {}).files[0].pieces) > 1
        rows = rows_of(path, REST)
        assert [row[DUE] for row in rows[::2]] == [DUE_MS + n for n in range(0, 300, 2)]
        assert [row[BODY] for row in rows[1::2]] == lines[1::2]


# ── Parquet ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("zone", [None, "UTC", "America/New_York"])
def test_each_file_of_a_folder_has_its_own_unit(tmp_path: Path, zone: str | None) -> None:
    for n, (unit, per_ms) in enumerate({"ns": 10**6, "us": 1000, "ms": 1}.items()):
        due = pa.array([DUE_MS * per_ms], pa.timestamp(unit, zone))
        columns = {"due": due, "key": [unit], "seen": due, "inner": [{"at": [due[0]]}]}
        pq.write_table(pa.table(columns), tmp_path / f"{n}.parquet")
    columns = {"due": pa.array([DUE_MS // 1000], pa.timestamp("s", zone)), "key": ["s"]}
    pq.write_table(pa.table(columns), tmp_path / "3.parquet")
    pq.write_table(pa.table({"due": [DUE_MS], "key": ["int"]}), tmp_path / "4.parquet")
    pq.write_table(pa.table({"due": [str(DUE_MS)], "key": ["text"]}), tmp_path / "5.parquet")
    rows = rows_of(tmp_path, REST, "parquet")
    assert {row[KEY]: row[DUE] for row in rows} == dict.fromkeys(
        ("ns", "us", "ms", "s", "int", "text"), DUE_MS
    )
    at = "2030-03-17T17:46:40" + ("Z" if zone else "")
    wanted = {"seen": at, "inner": {"at": [at]}}
    assert [json.loads(row[BODY]) for row in rows[:3]] == [wanted] * 3


def test_nanoseconds_are_rounded_up_however_deep(tmp_path: Path) -> None:
    path, kind = tmp_path / "t.parquet", pa.timestamp("ns")
    moments = [10**18 + 1, 10**18, None, -1]
    columns = {
        "due": [DUE_MS] * 4,
        "key": list("abcd"),
        "top": pa.array(moments, kind),
        "list": pa.array([[one] for one in moments], pa.list_(kind)),
        "map": pa.array([[("k", one)] for one in moments], pa.map_(pa.string(), kind)),
        "deep": pa.array(
            [{"a": [{"b": one}]} for one in moments],
            pa.struct([("a", pa.list_(pa.struct([("b", kind)])))]),
        ),
    }
    pq.write_table(pa.table(columns), path)
    second = "2001-09-09T01:46:40"
    for row, at in zip(
        rows_of(path, REST),
        [f"{second}.000001", second, None, "1970-01-01T00:00:00"],
        strict=True,
    ):
        wanted = {"top": at, "list": [at], "map": {"k": at}, "deep": {"a": [{"b": at}]}}
        assert json.loads(row[BODY]) == wanted


def test_int96_is_a_moment_and_no_number(tmp_path: Path) -> None:
    path, moment = tmp_path / "t.parquet", datetime(2030, 1, 2, 3, 4, 5, 6)  # noqa: DTZ001
    far = [datetime(1, 1, 1), datetime(1582, 10, 10), datetime(9999, 12, 31), moment]  # noqa: DTZ001
    columns = {
        "due": pa.array([moment] * 4, pa.timestamp("us")),
        "key": list("abcd"),
        "seen": pa.array(far, pa.timestamp("us")),
        "inner": pa.array([{"n": 1, "at": [one]} for one in far]),
    }
    pq.write_table(pa.table(columns), path, use_deprecated_int96_timestamps=True)
    rows = rows_of(path, REST)
    assert {row[DUE] for row in rows} == {parse_time_ms("2030-01-02T03:04:05.001Z")}
    for row, one in zip(rows, far, strict=True):
        at = one.isoformat() + "Z"
        assert json.loads(row[BODY]) == {"seen": at, "inner": {"n": 1, "at": [at]}}


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("far", [(1 << 63) - 1, -(1 << 63) + 1])
def test_a_far_timestamp_ends_no_other_row(tmp_path: Path, unit: str, far: int) -> None:
    path, kind = tmp_path / "t.parquet", pa.timestamp(unit)
    soon = DUE_MS * 10**6 // {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}[unit]
    columns = {"due": [DUE_MS] * 3, "key": list("abc"), "at": pa.array([soon, far, soon], kind)}
    table = pa.table({**columns, "in": pa.array([[soon], [far], [soon]], pa.list_(kind))})
    # Parquet has no seconds, and pyarrow would not convert this one.
    if unit == "s":
        with pytest.raises(pa.ArrowInvalid):
            pq.write_table(table, path)
        return
    pq.write_table(table, path, version="2.6")
    rows = rows_of(path, REST)
    is_near = unit == "ns"  # 1677 to 2262
    assert [row[PROBLEM] is None for row in rows] == [True, is_near, True]
    due = {
        row[KEY]: row[DUE] for row in rows_of(path, MessageColumns("at", subject="s", key="key"))
    }
    assert due["a"] == due["c"] == DUE_MS


TYPES: dict[str, tuple[pa.Array, Any]] = {
    "uint64": (pa.array([(1 << 64) - 1], pa.uint64()), (1 << 64) - 1),
    "decimal": (
        pa.array([Decimal("1.10")], pa.decimal128(38, 18)),
        Decimal("1.100000000000000000"),
    ),
    "decimal256": (pa.array([Decimal(10) ** 50], pa.decimal256(60, 0)), 10**50),
    "time": (pa.array([1_500_000], pa.time64("us")), "00:00:01.500000"),
    "date": (pa.array([date(2026, 1, 2)]), "2026-01-02"),
    "date64": (pa.array([date(2026, 1, 2)], pa.date64()), "2026-01-02"),
    "dictionary": (pa.array(["a"]).dictionary_encode(), "a"),
    "binary": (pa.array([b"\xff"]), "/w=="),
    "fixed": (pa.array([b"\xff"], pa.binary(1)), "/w=="),
    "large": (pa.array(["a"], pa.large_string()), "a"),
    "view": (pa.array(["a"], pa.string_view()), "a"),
    "half": (pa.array([1.5], pa.float16()), 1.5),
    "null": (pa.nulls(1), None),
    "large list": (pa.array([[1]], pa.large_list(pa.int8())), [1]),
    "fixed list": (pa.array([[1, 2]], pa.list_(pa.int8(), 2)), [1, 2]),
    "map": (
        pa.array(
            [[("a", {"b": [None]})]], pa.map_(pa.string(), pa.struct([("b", pa.list_(pa.int8()))]))
        ),
        {"a": {"b": [None]}},
    ),
    "map of numbers": (pa.array([[(7, 1)]], pa.map_(pa.int64(), pa.int64())), {"7": 1}),
    "uuid": (
        pa.ExtensionArray.from_storage(pa.uuid(), pa.array([bytes(range(16))], pa.binary(16))),
        "00010203-0405-0607-0809-0a0b0c0d0e0f",
    ),
}


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("around", ["top", "list", "struct"])
def test_types_that_json_can_carry(tmp_path: Path, name: str, around: str) -> None:
    column, expected = TYPES[name]
    if around == "list":
        column, expected = pa.ListArray.from_arrays([0, 1], column), [expected]
    elif around == "struct":
        column, expected = pa.StructArray.from_arrays([column], ["x"]), {"x": expected}
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"due": [DUE_MS], "key": ["k"], "v": column}), path)
    (row,) = rows_of(path, REST)
    assert row[PROBLEM] is None
    assert json.loads(row[BODY], parse_float=Decimal) == {"v": expected}


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (pa.array([timedelta(1)]), "column v is interval day to second, which JSON does not have"),
        (pa.array([{"x": timedelta(1)}]), "column v.x is interval"),
        (pa.array([[timedelta(1)]]), r"column v\[\] is interval"),
    ],
)
def test_types_that_json_has_not_are_refused_by_name(
    tmp_path: Path, column: pa.Array, said: str
) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"due": [DUE_MS], "key": ["k"], "v": column}), path)
    with pytest.raises(PipelineError, match=said):
        rows_of(path, REST)


def test_an_interval_of_duckdb_is_no_binary(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    with duckdb.connect() as database:
        query = f"select {DUE_MS} as due, 'k' as key, interval 1 day as v"
        database.execute(f"copy ({query}) to '{path}' (format parquet)")
    with pytest.raises(PipelineError, match="column v is interval, which JSON does not have"):
        rows_of(path, REST)


def test_a_map_that_has_a_key_twice(tmp_path: Path) -> None:
    path, kind = tmp_path / "t.parquet", pa.map_(pa.string(), pa.int64())
    columns = {
        "due": [DUE_MS] * 2,
        "key": list("ab"),
        "m": pa.array([[("a", 1)], [("b", 1), ("b", 2)]], kind),
    }
    pq.write_table(pa.table(columns), path)
    rows = rows_of(path, REST)
    assert [row[PROBLEM] for row in rows] == [
        None,
        "cannot be written as JSON: a map has a key twice",
    ]


def test_a_due_time_beyond_64_bits(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    columns = {"due": pa.array([1 << 63, DUE_MS], pa.uint64()), "key": list("ab")}
    pq.write_table(pa.table(columns), path)
    assert [row[DUE] for row in rows_of(path, REST)] == [(1 << 63) - 1, DUE_MS]


@pytest.mark.parametrize("name", ["t.parquet", "t.csv", "t.jsonl"])
def test_seconds_are_a_problem_of_their_row_unless_they_are_the_unit(
    tmp_path: Path, name: str
) -> None:
    path, due = tmp_path / name, [DUE_MS // 1000, DUE_MS]
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"due": due, "key": list("ab")}), path)
    else:
        made = pd.DataFrame({"due": due, "key": list("ab")})
        is_csv = path.suffix == ".csv"
        path.write_text(
            made.to_csv(index=False) if is_csv else made.to_json(orient="records", lines=True)
        )
    rows = rows_of(path, REST)
    assert [(row[DUE], row[GIVEN_DUE], row[PROBLEM]) for row in rows] == [
        (None, str(due[0]), SECONDS),
        (DUE_MS, str(DUE_MS), None),
    ]
    first, _ = rows_of(path, replace(REST, due_unit="s"))
    assert (first[DUE], first[PROBLEM]) == (DUE_MS, None)


# ── folders ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["parquet", "csv", "json"])
def test_folders_are_columns_as_their_text(tmp_path: Path, kind: str) -> None:
    values = ["007", "08", "9", "1e3", "a/b é", None]
    for number, one in enumerate(values):
        name = {"a/b é": "a%2Fb é", None: "__HIVE_DEFAULT_PARTITION__"}.get(one, one)
        folder = tmp_path / "kind=x.y" / f"key={name}"
        folder.mkdir(parents=True)
        columns = {"due": [DUE_MS + number], "body": [str(number)]}
        if kind == "parquet":
            pq.write_table(pa.table(columns), folder / "part.parquet")
        elif kind == "csv":
            (folder / "part.csv").write_text(f"due,body\n{DUE_MS + number},{number}\n")
        else:
            (folder / "part.json").write_text(f'{{"due":{DUE_MS + number},"body":{number}}}\n')
    columns_ = MessageColumns("due", subject_column="kind", key="key", body="body")
    rows = rows_of(tmp_path, columns_, kind)
    assert {row[BODY]: row[KEY] for row in rows} == {str(n): one for n, one in enumerate(values)}
    assert {row[SUBJECT] for row in rows} == {"x.y"}
    (first, *_) = sorted(rows_of(tmp_path, REST, kind), key=lambda row: row[DUE])
    assert json.loads(first[BODY])["kind"] == "x.y"


def test_all_columns_may_be_folders(tmp_path: Path) -> None:
    folder = tmp_path / f"due={DUE_MS}" / "key=007"
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"v": [1, 2, 3], "a.b": ["x"] * 3}), folder / "part.parquet")
    columns = MessageColumns("due", subject="s", key="key", body="due")
    rows = rows_of(tmp_path, columns, "parquet")
    assert [(row[DUE], row[KEY], row[BODY]) for row in rows] == [(DUE_MS, "007", str(DUE_MS))] * 3
    rows = rows_of(tmp_path, REST, "parquet")
    assert json.loads(rows[0][BODY]) == {"v": 1, "a.b": "x"}


@pytest.mark.parametrize("name", ["007", "7"])
def test_a_column_that_is_in_the_file_and_in_its_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / f"key={name}"
    folder.mkdir()
    pq.write_table(pa.table({"due": [DUE_MS], "key": ["007"], "v": [1]}), folder / "part.parquet")
    if name == "007":
        assert [row[KEY] for row in rows_of(tmp_path, REST, "parquet")] == ["007"]
    else:
        with pytest.raises(PipelineError, match="other values than the name of its folder, key=7"):
            rows_of(tmp_path, REST, "parquet")


def test_a_dataset_of_pyarrow_in_folders(tmp_path: Path) -> None:
    table = pa.table({"key": ["007", "08"], "due": [DUE_MS] * 2, "v": [1, 2]})
    ds.write_dataset(
        table, tmp_path / "t", format="parquet", partitioning=["key"], partitioning_flavor="hive"
    )
    rows = rows_of(tmp_path / "t", REST, "parquet")
    assert {(row[KEY], row[BODY]) for row in rows} == {("007", '{"v":1}'), ("08", '{"v":2}')}


def test_files_of_csv_with_columns_in_another_order(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text(f"due,key,v\n{DUE_MS},a,1\n")
    (tmp_path / "2.csv").write_text(f"v,key,due,more\n2,b,{DUE_MS},x\n")
    rows = rows_of(tmp_path, REST, "csv")
    assert [(row[KEY], json.loads(row[BODY])) for row in rows] == [
        ("a", {"v": "1"}),
        ("b", {"v": "2", "more": "x"}),
    ]


def test_a_file_of_a_folder_that_differs_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"due": [DUE_MS], "key": ["a"], "body": ["1"]}), tmp_path / "1.parquet")
    columns = MessageColumns("due", subject="s", key="key", body="body")
    bad = tmp_path / "2.parquet"
    for table, said in (
        ({"due": [DUE_MS], "id": ["a"], "body": ["1"]}, r"2\.parquet: .*no column 'key'"),
        ({"due": [1.5], "key": ["a"], "body": ["1"]}, r"2\.parquet: column due is double"),
        ({"due": [DUE_MS], "key": ["a"], "body": [b"1"]}, "column body is binary in .*2"),
        ({"due": [DUE_MS], "key": ["a"], "KEY": ["a"], "body": ["1"]}, "'key' and 'KEY' differ"),
    ):
        pq.write_table(pa.table(table), bad)
        with pytest.raises(PipelineError, match=said):
            rows_of(tmp_path, columns, "parquet")
    data = (tmp_path / "1.parquet").read_bytes()
    bad.write_bytes(data[: len(data) // 2])
    with pytest.raises(PipelineError, match=r"cannot read .*2\.parquet"):
        rows_of(tmp_path, columns, "parquet")
    bad.write_text("due,key\n")
    with pytest.raises(PipelineError, match=r"cannot read .*2\.parquet"):
        rows_of(tmp_path, columns, "parquet")


def test_text_that_is_not_in_the_encoding(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"due,key,v\n%d,caf\xe9,7\n%d,b,\xef\xbf\xbd\n" % (DUE_MS, DUE_MS))
    rows = rows_of(path, REST)
    assert [row[PROBLEM] for row in rows] == [reading.NOT_ENCODED, None]
    assert json.loads(rows[1][BODY]) == {"v": "\ufffd"}  # It stands in the file.


def test_malformed_lines_are_shown_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f'due,key,v\n{DUE_MS},a,"b"c\n{DUE_MS},b\n{DUE_MS},c,"x\ny"z\n{DUE_MS},d,1\n')
    rows = rows_of(path, REST)
    assert [row[PROBLEM] for row in rows] == [
        "malformed line",
        "malformed line",
        "malformed line: 2 lines",
        None,
    ]
    assert [row[BODY] for row in rows] == [
        f'{DUE_MS},a,"b"c',
        f"{DUE_MS},b",
        f'{DUE_MS},c,"x\ny"z',
        '{"v":"1"}',
    ]


def test_headers_and_columns_that_are_passed_on(tmp_path: Path) -> None:
    columns = MessageColumns("due", subject="s", key="key", body="v", headers="h")
    path = tmp_path / "t.jsonl.gz"
    line = {"due": DUE_MS, "key": "k", "v": 1, "h": {"x": "7"}, "n": 1.5}
    path.write_bytes(gzip.compress(json.dumps(line).encode()))
    (row,) = rows_of(path, columns, passed=["n"])
    assert (row[HEADERS], row["__passed_0"]) == ('{"x": "7"}', "1.5")
    path = tmp_path / "t.parquet"
    pq.write_table(pa.Table.from_pylist([line]), path)
    (row,) = rows_of(path, columns, passed=["n"])
    assert (msgspec.json.decode(row[HEADERS]), row["__passed_0"]) == ({"x": "7"}, "1.5")


def test_batches_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BATCH_ROWS", 7)
    monkeypatch.setattr(reading, "BATCH_BYTES", 300)
    made = io.StringIO()
    for n in range(100):
        made.write(f'{{"due":{DUE_MS + n},"key":"k","v":"{"x" * (n % 50)}"}}\n')
    path = tmp_path / "t.jsonl"
    path.write_text(made.getvalue())
    table = open_files(str(path), "json", {})
    plan = table._plan(REST, ())
    batches = list(read_rows(plan, table.files[0].pieces))
    assert len(batches) > 14
    assert [row[DUE] for one in batches for row in one.to_pylist()] == [
        DUE_MS + n for n in range(100)
    ]
