"""What the values of columns become, and that no value ends the others."""

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import combinations
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayserver.pipeline.publish.values import (
    SECONDS,
    Problems,
    body_pieces,
    due_times,
    header_pieces,
    json_pieces,
    object_pieces,
    text_array,
    text_or_none,
)
from delayserver.times import parse_time_ms

MOST = (1 << 63) - 1
NOON = datetime(2026, 11, 20, 12, 0, 0, tzinfo=UTC)
NOON_US = int(NOON.timestamp()) * 1_000_000


def not_utf8(*values: bytes | None) -> pa.Array:
    """Text as Spark hands it over, which does not look into it."""
    return pa.array(values, pa.binary()).view(pa.string())


# ── due times ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("column", "unit", "expected"),
    [
        (pa.array([1, -1]), "ms", [1, -1]),
        (pa.array([1, MOST, -MOST]), "s", [1000, MOST // 1000 * 1000, -(MOST // 1000) * 1000]),
        (pa.array([1, 1000, -1, MOST]), "us", [1, 1, 0, -(-MOST // 1000)]),
        (pa.array([1, -1_000_001]), "ns", [1, -1]),
        (pa.array([7], pa.int32()), "s", [7000]),
        (pa.array([Decimal(10**19), Decimal(5)], pa.decimal128(20, 0)), "ms", [MOST, 5]),
        (pa.array([Decimal(5)], pa.decimal128(20, 0)), "s", [5000]),
        (pa.array([1, MOST, -MOST - 1], pa.timestamp("us", "UTC")), "ms", None),
        (pa.array([date(1970, 1, 2)]), "s", [86_400_000]),
        (pa.array(["1970-01-01T00:00:00.0001Z", " 5 ", "-7"]), "ms", [1, 5, -7]),
        (pa.array(["1970-01-01T00:00:01Z", "5"]), "s", [1000, 5000]),
        (pa.array(["9" * 30]), "ms", [MOST]),
    ],
)
def test_due_times(column: pa.Array, unit: str, expected: list[int] | None) -> None:
    problems = Problems()
    found = due_times(column, unit, problems).tolist()
    assert found == (expected or [1, -(-MOST // 1000), -(MOST // 1000)])
    assert not problems


@pytest.mark.parametrize("text", ["--5", "²", "٣", "", "soon", "1e12", "2027-01-01 00:00:00"])
def test_due_times_that_cannot_be_read(text: str) -> None:
    problems = Problems()
    due_times(pa.array(["5", text, None]), "ms", problems)
    assert problems == {1: f"due time cannot be read: {text!r}", 2: "no due time"}


@pytest.mark.parametrize(
    "column",
    [
        pa.array([0, 1_795_192_200, None, 10**8, 10**11, 10**11 + 1]),
        pa.array(["0", " 1795192200 ", None, "100000000", "100000000000", "100000000001"]),
        pa.array(
            [
                None if one is None else Decimal(one)
                for one in (0, 1_795_192_200, None, 10**8, 10**11, 10**11 + 1)
            ],
            pa.decimal128(20, 0),
        ),
    ],
    ids=["numbers", "text", "decimals"],
)
def test_due_times_in_seconds_are_problems_unless_the_unit_says_so(column: pa.Array) -> None:
    problems = Problems()
    due_times(column, "ms", problems)
    assert problems == {1: SECONDS, 2: "no due time", 3: SECONDS, 4: SECONDS}
    assert "milliseconds, not seconds" in SECONDS
    problems = Problems()
    found = due_times(column, "s", problems)
    assert problems == {2: "no due time"}
    assert found[1] == 1_795_192_200_000


def test_a_timestamp_before_1973_is_no_number_of_seconds() -> None:
    problems = Problems()
    column = pa.array([1_795_192_200], pa.timestamp("ms", "UTC"))
    assert due_times(column, "ms", problems).tolist() == [1_795_192_200]
    assert not problems


# ── text ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array(["a", None, ""]), ["a", None, ""]),
        (pa.array(["ä"], pa.large_string()), ["ä"]),
        (pa.array([b"a", None]), ["a", None]),
        (pa.array([7, None]), ["7", None]),
        (pa.array([True]), ["true"]),
        (pa.array([1.5, float("nan"), 2.0]), ["1.5", None, "2.0"]),
        (pa.array([Decimal("1.10")]), ["1.10"]),
        (pa.array([NOON]), ["2026-11-20T12:00:00Z"]),
        (pa.array([date(2026, 11, 20)]), ["2026-11-20"]),
    ],
)
def test_text(column: pa.Array, expected: list[str | None]) -> None:
    problems = Problems()
    assert text_or_none(text_array(column, "key", problems)) == expected
    assert not problems


@pytest.mark.parametrize("kind", [pa.string(), pa.binary()])
def test_text_that_is_not_utf8(kind: pa.DataType) -> None:
    problems = Problems()
    # Cut within a character: both parts are bad, though together they are not.
    column = not_utf8(b"a", "ä".encode()[:1], "ä".encode()[1:], None, b"b").view(kind)
    assert text_or_none(text_array(column, "key", problems))[::4] == ["a", "b"]
    assert problems == {1: "key is not UTF-8", 2: "key is not UTF-8"}


# ── JSON ───────────────────────────────────────────────────────────────────────────────────────

ZONE = pa.timestamp("us", "America/New_York")


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([float("nan"), float("inf"), -1.5]), [b"null", b"null", b"-1.5"]),
        (
            pa.array([NOON_US, NOON_US + 5000, None], ZONE),
            [
                b'"2026-11-20T12:00:00Z"',
                b'"2026-11-20T12:00:00.005000Z"',
                None,
            ],
        ),
        (pa.array([NOON_US], pa.timestamp("us")), [b'"2026-11-20T12:00:00"']),
        (pa.array([[NOON_US]], pa.list_(ZONE)), [b'["2026-11-20T12:00:00Z"]']),
        (pa.array([Decimal("1.10")]), [b"1.10"]),
        (pa.array([[b"\xff"]]), [b'["/w=="]']),
        (pa.array([[(1, float("nan"))]], pa.map_(pa.int64(), pa.float64())), [b'{"1":null}']),
        (
            pa.array([{"a": {"at": NOON_US}}, None], pa.struct([("a", pa.struct([("at", ZONE)]))])),
            [
                b'{"a":{"at":"2026-11-20T12:00:00Z"}}',
                None,
            ],
        ),
    ],
)
def test_json(column: pa.Array, expected: list[bytes | None]) -> None:
    problems = Problems()
    assert json_pieces(column, problems) == expected
    assert not problems


PAIR = pa.struct([("a", pa.null()), ("b", pa.int64())])
ITEMS: dict[pa.DataType, list[object]] = {
    pa.int64(): [1, None, 3],
    pa.null(): [None, None, None],
    pa.list_(pa.null(), 2): [[None, None], None, [None, None]],
    pa.list_(pa.null()): [[None], None, []],
    PAIR: [{"a": None, "b": 1}, None, {"a": None, "b": 2}],
    pa.map_(pa.string(), pa.null()): [[("y", None)], None, []],
}


@pytest.mark.parametrize("kind", ITEMS, ids=str)
def test_maps_wherever_they_stand(kind: pa.DataType) -> None:
    """A part of a column, with maps that are null, below which something may stand."""
    one, two, three = ITEMS[kind]
    maps = [[("x", one)], None, [("x", two), ("z", three)], []]
    column = pa.array(maps, pa.map_(pa.string(), kind))
    items = pa.array([one, one, two, three], kind)
    filled = pa.MapArray.from_arrays(
        pa.array([0, 1, 2, 4, 4], pa.int32()),
        pa.array(["x", "x", "x", "z"]),
        items,
        mask=pa.array([False, True, False, False]),
    )
    assert filled.to_pylist() == column.to_pylist()

    def written(value: object) -> object:
        is_map = pa.types.is_map(kind) and isinstance(value, list)
        return dict(value) if is_map else value  # type: ignore[call-overload]

    def check(column: pa.Array, maps: list[Any]) -> None:
        expected = [
            None if some is None else {key: written(one) for key, one in some} for some in maps
        ]
        for start, end in combinations(range(len(maps) + 1), 2):
            problems = Problems()
            found = json_pieces(column.slice(start, end - start), problems)
            values = [None if one is None else json.loads(one) for one in found]
            assert values == expected[start:end]
            assert not problems

    check(column, maps)
    check(filled, maps)
    without_null = [[("x", one)], [("y", three)]]
    check(pa.array(without_null, column.type), without_null)


@given(st.lists(st.datetimes() | st.none(), min_size=1))
def test_times_are_what_the_encoder_makes_of_them(times: list[datetime | None]) -> None:
    """Whole columns of them are text in one go."""
    problems = Problems()
    zoned = [None if one is None else one.replace(tzinfo=UTC) for one in times]
    for values, kind in ((times, pa.timestamp("us")), (zoned, pa.timestamp("us", "UTC"))):
        found = json_pieces(pa.array(values, kind), problems)
        assert found == [None if one is None else msgspec.json.encode(one) for one in values]
    assert not problems


def test_an_object_of_columns() -> None:
    problems = Problems()
    columns = [
        pa.array([1, None]),
        not_utf8(b"ok", b"\xff"),
        pa.array([NOON_US, MOST], pa.timestamp("us", "UTC")),
    ]
    first, _ = object_pieces(["n", "note", "at"], columns, 2, problems)
    assert first == b'{"n":1,"note":"ok","at":"2026-11-20T12:00:00Z"}'
    assert problems == {1: "cannot be written as JSON: not UTF-8 (column note)"}
    assert object_pieces([], [], 2, problems) == [b"{}", b"{}"]


def test_what_is_nested_and_cannot_be_had() -> None:
    problems = Problems()
    column = pa.array([[NOON_US], [MOST]], pa.list_(pa.timestamp("us", "UTC")))
    assert json_pieces(column, problems)[0] == b'["2026-11-20T12:00:00Z"]'
    assert list(problems) == [1]
    assert problems[1].startswith("cannot be written as JSON: ")


def test_text_that_is_json_stands_as_it_is() -> None:
    problems = Problems()
    column = not_utf8(b' {"n": 1.10}\n', None, b"{", b'"\xff"', b"", b"NaN")
    assert body_pieces(column, problems)[:2] == [b'{"n": 1.10}', None]
    assert problems == {
        2: "body is not JSON",
        3: "body is not UTF-8",
        4: "body is not JSON",
        5: "body is not JSON",
    }


HEADERS = pa.map_(pa.string(), pa.string())


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([[("a", "b")], None], HEADERS), [{"a": "b"}, None]),
        (pa.array([{"a": "b", "c": None}, None]), [{"a": "b"}, None]),
        (pa.array(['{"a": "b"}', None]), [{"a": "b"}, None]),
    ],
)
def test_headers(column: pa.Array, expected: list[Any]) -> None:
    problems = Problems()
    found = header_pieces(column, problems)
    assert [None if one is None else msgspec.json.decode(one) for one in found] == expected
    assert not problems


@given(st.lists(st.none() | st.text() | st.binary(), max_size=5))
def test_whatever_a_text_is_it_is_a_body_or_a_problem(values: list[str | bytes | None]) -> None:
    problems = Problems()
    encoded = [
        one.encode("utf-8", "surrogatepass") if isinstance(one, str) else one for one in values
    ]
    for index, body in enumerate(body_pieces(not_utf8(*encoded), problems)):
        if index not in problems and body is not None:
            msgspec.json.decode(body.decode())  # Raises for what is neither.


def test_a_time_is_read_as_it_is_written() -> None:
    (text,) = json_pieces(pa.array([NOON_US + 1], ZONE), Problems())
    assert text is not None
    assert parse_time_ms(msgspec.json.decode(text)) == NOON_US // 1000 + 1
