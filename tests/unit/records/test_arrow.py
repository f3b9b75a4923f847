"""Arrow arrays made by hand are those that pyarrow makes."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayserver.records.arrow import (
    binaries,
    fixed,
    integers,
    lengths,
    pieces,
    present,
    strings,
    text_maps,
    texts,
)


@pytest.mark.parametrize("dtype", ["<i8", "<u8", "<i4", "<u4", "u1", "?"])
@pytest.mark.parametrize("count", [0, 1, 9, 64])
def test_columns(dtype: str, count: int) -> None:
    rows = np.zeros(count, [("before", "u1"), ("column", dtype)])
    rows["column"] = np.arange(count) % 2
    made = fixed(rows["column"])
    made.validate(full=True)
    assert made.equals(pa.array(np.ascontiguousarray(rows["column"])))


def test_the_same_bytes_as_something_else() -> None:
    micros = np.array([0, 1_700_000_000_000_000])
    kind = pa.timestamp("us", tz="UTC")
    assert fixed(micros, kind).equals(pa.array(micros).cast(kind))


@given(st.lists(st.none() | st.dictionaries(st.text(), st.text())))
def test_maps(values: list[dict[str, str] | None]) -> None:
    kind = pa.map_(pa.string(), pa.string())
    made = text_maps(values, kind)
    made.validate(full=True)
    pairs = [None if value is None else list(value.items()) for value in values]
    assert made.equals(pa.array(pairs, kind))


@given(st.lists(st.none() | st.text()))
def test_texts(values: list[str | None]) -> None:
    made = texts(values)
    made.validate(full=True)
    assert made.equals(pa.array(values, pa.string()))


@given(st.lists(st.none() | st.binary()))
def test_binaries(values: list[bytes | None]) -> None:
    made = binaries(values, pa.binary())
    made.validate(full=True)
    assert made.equals(pa.array(values, pa.binary()))


@given(st.lists(st.none() | st.binary(max_size=5)), st.integers(0, 5))
@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
def test_bytes_and_back(kind: pa.DataType, values: list[bytes | None], start: int) -> None:
    array, values = pa.array(values, kind).slice(start), values[start:]
    assert present(array).tolist() == [value is not None for value in values]
    found = zip(pieces(array), lengths(array).tolist(), values, strict=True)
    assert all((data, length) == (value, len(value)) for data, length, value in found if value)


@given(st.lists(st.none() | st.text(max_size=5)), st.integers(0, 5))
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_texts_and_back(kind: pa.DataType, values: list[str | None], start: int) -> None:
    array, values = pa.array(values, kind).slice(start), values[start:]
    found = zip(strings(array), values, strict=True)
    assert all(text == value for text, value in found if value is not None)


@pytest.mark.parametrize(
    "kind",
    [
        pa.int8(),
        pa.uint8(),
        pa.int32(),
        pa.uint32(),
        pa.uint64(),
        pa.timestamp("us", "UTC"),
        pa.duration("s"),
    ],
    ids=str,
)
@pytest.mark.parametrize("count", [0, 3])
def test_numbers_of_any_width(kind: pa.DataType, count: int) -> None:
    values = [0, 1, 127][:count]
    array = pa.array([5, *values], pa.int64()).cast(kind).slice(1)
    assert integers(array).tolist() == values
    if kind == pa.uint64():
        assert integers(pa.array([(1 << 64) - 1], kind)).tolist() == [(1 << 64) - 1]


@given(st.lists(st.none() | st.integers(-(1 << 63), (1 << 63) - 1)), st.integers(0, 5))
def test_integers_and_back(values: list[int | None], start: int) -> None:
    array, values = pa.array(values, pa.int64()).slice(start), values[start:]
    found = zip(integers(array).tolist(), present(array).tolist(), strict=True)
    assert [number if there else None for number, there in found] == values
