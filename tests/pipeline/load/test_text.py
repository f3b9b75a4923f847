"""Cells and fields come out as they stand, and what is malformed is named and never taken apart."""

import codecs
import csv
import io
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from delayserver.errors import PipelineError
from delayserver.pipeline.load import text as texts
from delayserver.pipeline.load.text import (
    Cells,
    Malformed,
    TextFormat,
    csv_header,
    csv_rows,
    json_rows,
    lines_of,
    options_of,
)

Rows = list[Cells | Malformed]
PLAIN = TextFormat()
A1, A3 = {"a": b"1"}, {"a": b"3"}


def cells_of(data: bytes, style: TextFormat = PLAIN) -> Rows:
    return list(csv_rows(lines_of(io.BytesIO(data), style.encoding), style))


def fields_of(data: bytes, style: TextFormat = PLAIN) -> list[dict[str, bytes] | Malformed]:
    found = json_rows(io.BytesIO(data), style)
    return [
        row if isinstance(row, Malformed) else {name: bytes(raw) for name, raw in row.items()}
        for row in found
    ]


# Everything that a writer may have to quote, often.
other = st.characters(codec="utf-8", exclude_characters="\0")
cell = st.text(st.sampled_from("a\",;\\\n\r\t 'é|") | other, max_size=12)
row = st.lists(cell, min_size=2, max_size=4).filter(any)


@given(
    st.lists(row, min_size=1, max_size=5),
    st.sampled_from([",", ";", "\t", "|"]),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32"]),
)
def test_what_csv_has_written_is_read(
    rows: list[list[str]], separator: str, end: str, quotes_all: bool, encoding: str
) -> None:
    # It writes a `\\r` without quotes before a plain line end, and that is refused by name.
    assume(end == "\r\n" or quotes_all or not any(row[-1].endswith("\r") for row in rows))
    made = io.StringIO(newline="")
    quoting: Any = csv.QUOTE_ALL if quotes_all else csv.QUOTE_MINIMAL
    csv.writer(made, delimiter=separator, lineterminator=end, quoting=quoting).writerows(rows)
    found = cells_of(made.getvalue().encode(encoding), TextFormat(separator=separator))
    # Python writes empty text without quotes, unless it is told to quote everything.
    assert found == [[one if quotes_all else one or None for one in row] for row in rows]


@given(st.lists(row, min_size=1, max_size=5))
def test_what_spark_has_written_is_read_with_its_escape(rows: list[list[str]]) -> None:
    """Spark's writer: a backslash before each quote and backslash, where a cell is quoted."""

    def written(text: str) -> str:
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    data = "".join(",".join(map(written, row)) + "\n" for row in rows).encode()
    assert cells_of(data, TextFormat(escape="\\")) == rows


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'a,""\n,b\n\n\r\n', [["a", ""], [None, "b"]]),
        (b'5" pipe, x \n', [['5" pipe', " x "]]),
        (b'"a\r\nb","c\nd"\r\n', [["a\r\nb", "c\nd"]]),
        (b'"a\nb",\r\nc,d\r\n', [["a\nb", None], ["c", "d"]]),
        (b'"a""",b', [['a"', "b"]]),
        (b'a,"b"c\nd,e\n', [Malformed('a,"b"c\n'), ["d", "e"]]),
        (b'a,"b\nc"d,\ne,f\n', [Malformed('a,"b\nc"d,\n', 2), ["e", "f"]]),
        (b'a,"b\nc,d\ne,f\n', [Malformed('a,"b\nc,d\ne,f\n', 3)]),
        (b'a,"b\\"c"\n', [Malformed('a,"b\\"c"\n')]),
        (b"a,\xff\n", [["a", "\udcff"]]),
    ],
)
def test_cells(data: bytes, expected: Rows) -> None:
    assert cells_of(data) == expected


def test_line_ends_that_others_take_for_ends() -> None:
    """pandas writes a `\\r` within a cell without quotes."""
    assert cells_of(b"a,b\nc\rd,e\n") == [["a", "b"], ["c\rd", "e"]]
    assert cells_of(b"a,b\nc,d\r\ne,f\n") == [["a", "b"], Malformed("c,d\r\n"), ["e", "f"]]
    assert cells_of(b'a,b\nc,"d"\r\n') == [["a", "b"], ["c", "d"]]
    assert cells_of(b"a,b\r\nc\rd,e\r\n") == [["a", "b"], ["c\rd", "e"]]
    assert cells_of(b"a,b\rc,d\r") == [["a", "b"], ["c", "d"]]


def test_a_cell_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "CELL_MAX_CHARACTERS", 100)
    with pytest.raises(PipelineError, match="does not end: 'a,\"b'"):
        cells_of(b'a,"b\n' + b"c,d\n" * 100)


def test_null_and_no_quotes() -> None:
    style = TextFormat(null="NULL", quote="")
    assert cells_of(b'NULL,"a"\n', style) == [[None, '"a"']]
    assert cells_of(b'NULL,"NULL"\n', TextFormat(null="NULL")) == [[None, "NULL"]]


def test_a_header() -> None:
    assert csv_header(lines_of(io.BytesIO(b'\xef\xbb\xbf"a b",,c\n'), None), TextFormat()) == [
        "a b",
        "_c1",
        "c",
    ]
    for data, said in ((b"", "it is empty"), (b'"a"b,c\n', "malformed")):
        with pytest.raises(PipelineError, match=said):
            csv_header(lines_of(io.BytesIO(data), None), TextFormat())


@pytest.mark.parametrize(
    ("data", "given", "said"),
    [
        ("a,b\n".encode("utf-16-le"), None, "encoding=UTF-16LE"),
        (codecs.BOM_UTF16_LE + b"a\0", "iso-8859-1", "its first bytes say that it is utf-16"),
        (b"a", "klingon", "no encoding 'klingon'"),
    ],
)
def test_encodings_that_cannot_be(data: bytes, given: str | None, said: str) -> None:
    with pytest.raises(PipelineError, match=said):
        list(lines_of(io.BytesIO(data), given))


@pytest.mark.parametrize("encoding", ["UTF-16", "utf-16le", "UTF-16BE", "iso-8859-1", "cp1252"])
def test_encodings_that_are_named(encoding: str) -> None:
    assert cells_of("é,b\n".encode(encoding), TextFormat(encoding=encoding)) == [["é", "b"]]
    data = '{"a":"é"}\n'.encode(encoding)
    assert fields_of(data, TextFormat(encoding=encoding)) == [{"a": '"é"'.encode()}]


def test_fields_are_those_of_their_own_line_as_they_stand() -> None:
    data = b'\xef\xbb\xbf{"a": 1.10, "b": {"z": 1,"a": [ ]}}\r\n\n{"c":12345678901234567890123}\n'
    assert fields_of(data) == [
        {"a": b"1.10", "b": b'{"z": 1,"a": [ ]}'},
        {"c": b"12345678901234567890123"},
    ]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'[{"a":1},\n{"b":2}]', [{"a": b"1"}, {"b": b"2"}]),
        (b" [ ] ", []),
        (b"[5]", [Malformed(b"5")]),
        (b'{broken\n{"a":1}', [Malformed(b"{broken"), {"a": b"1"}]),
        (b"5\n", [Malformed(b"5")]),
        (b'{"a":1}\n[{"a":2}]\n[5\n{"a":3}', [A1, Malformed(b'[{"a":2}]'), Malformed(b"[5"), A3]),
        (b'5\n[{"a":3}]', [Malformed(b"5"), Malformed(b'[{"a":3}]')]),
        (b'\n \n[{"a":1},\n{"a":3}]', [A1, A3]),
        (b'\xef\xbb\xbf [{"a":1}]', [A1]),
    ],
)
def test_arrays_and_lines(data: bytes, expected: list[object]) -> None:
    assert fields_of(data) == expected


def test_one_document_over_several_lines() -> None:
    style = TextFormat(is_one_document=True)
    assert fields_of(b'{\n "a":\n 1\n}\n', style) == [{"a": b"1"}]
    with pytest.raises(PipelineError, match="begins as a JSON array"):
        fields_of(b'[{"a":1},')


def test_options() -> None:
    style = options_of(
        "csv", {"SEP": "\\t", "escape": "\\", "header": "false", "mode": "permissive"}
    )
    assert style == TextFormat(separator="\t", escape="\\", has_header=False)
    assert options_of("json", {"multiLine": "true"}).is_one_document
    for kind, options in (
        ("csv", {"inferSchema": "true"}),
        ("csv", {"mode": "DROPMALFORMED"}),
        ("json", {"sep": ";"}),
        ("csv", {"quote": "ab"}),
        ("csv", {"sep": '"'}),
        ("csv", {"header": "yes"}),
    ):
        with pytest.raises(PipelineError, match=next(iter(options)) if kind == "json" else "."):
            options_of(kind, options)
