"""Arrow arrays from values of NumPy and Python, and back.

`pyarrow.array` takes anything, and imports pandas to find the type of its argument, as `to_numpy`
does: half a second of a processor and 40 MB in each of Spark's workers. Here the caller knows.

Cost: one strided copy of a column, none if it is contiguous; 0.1 µs per text.
Threads: pure functions.
"""

from collections.abc import Mapping, Sequence
from itertools import chain, pairwise

import numpy as np
import pyarrow as pa


def fixed(column: np.ndarray, kind: pa.DataType | None = None) -> pa.Array:
    """A column of fixed width, without nulls; `kind` gives the meaning of its bytes in Arrow, if it
    differs from the dtype. The array keeps the memory: a column must not be changed any more."""
    data = np.ascontiguousarray(column)
    if data.dtype == bool:
        data, kind = np.packbits(data, bitorder="little"), pa.bool_()
    elif kind is None:
        kind = pa.from_numpy_dtype(data.dtype)
    return pa.Array.from_buffers(kind, len(column), [None, pa.py_buffer(data)])


def texts(values: Sequence[str | None]) -> pa.Array:
    """Text; null for None."""
    encoded = [None if value is None else value.encode() for value in values]
    return binaries(encoded, pa.string())


def binaries(values: Sequence[bytes | None], kind: pa.DataType) -> pa.Array:
    """Bytes, as binary or text; null for None. At most 2 GiB together."""
    data = pa.py_buffer(b"".join([value for value in values if value]))
    return pa.Array.from_buffers(kind, len(values), [*_places(values), data])


def text_maps(values: Sequence[Mapping[str, str] | None], kind: pa.MapType) -> pa.Array:
    """Texts by texts; null for None."""
    some = [value for value in values if value]
    keys = texts(list(chain.from_iterable(some)))
    items = texts(list(chain.from_iterable(value.values() for value in some)))
    pairs = pa.StructArray.from_arrays([keys, items], fields=[kind.key_field, kind.item_field])
    return pa.Array.from_buffers(kind, len(values), list(_places(values)), children=[pairs])


def _places(
    values: Sequence[bytes | Mapping[str, str] | None],
) -> tuple[pa.Buffer | None, pa.Buffer]:
    """Which are not None, and where each begins and ends if they stand one behind the other."""
    present = np.fromiter((value is not None for value in values), bool, len(values))
    ends = np.zeros(len(values) + 1, np.int64)
    np.cumsum([len(value or ()) for value in values], out=ends[1:])
    assert ends[-1] < 1 << 31
    bits = None if present.all() else pa.py_buffer(np.packbits(present, bitorder="little"))
    return bits, pa.py_buffer(ends.astype(np.int32))


def integers(array: pa.Array) -> np.ndarray:
    """Whole numbers, times or durations of any width as they stand; where it is null there is any
    number."""
    kind = array.type
    dtype = np.dtype(f"i{kind.byte_width}")
    if pa.types.is_unsigned_integer(kind):
        dtype = np.dtype(f"u{kind.byte_width}")
    assert pa.types.is_integer(kind) or pa.types.is_temporal(kind), kind
    if not len(array):
        return np.zeros(0, dtype)
    return np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)


def present(array: pa.Array) -> np.ndarray:
    """Which values are not null."""
    bits = array.buffers()[0]
    if bits is None:
        return np.ones(len(array), bool)
    flags = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").view(bool)
    return flags[array.offset : array.offset + len(array)]


def strings(array: pa.Array) -> list[str]:
    """Each value of an array of text; where it is null, any text."""
    offsets = _offsets(array)
    data = _between(array, offsets)
    if data.isascii():  # all is decoded at once
        text = data.decode()
        return [text[start:end] for start, end in pairwise((offsets - offsets[0]).tolist())]
    return [piece.decode("utf-8", "replace") for piece in pieces(array)]


def are_utf8(array: pa.Array) -> np.ndarray:
    """Which values of an array of text or binary are UTF-8; where it is null, any answer."""
    offsets = _offsets(array)
    data = _between(array, offsets)
    if data.isascii():
        return np.ones(len(array), bool)
    pairs = pairwise((offsets - offsets[0]).tolist())
    return np.fromiter((_is_utf8(data[start:end]) for start, end in pairs), bool, len(array))


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def lengths(array: pa.Array) -> np.ndarray:
    """Bytes of each value of an array of text or binary; where it is null, any number."""
    return np.diff(_offsets(array))


def pieces(array: pa.Array) -> list[bytes]:
    """The bytes of each value of an array of text or binary; where it is null, any bytes."""
    offsets = _offsets(array)
    data = _between(array, offsets)
    return [data[start:end] for start, end in pairwise((offsets - offsets[0]).tolist())]


def _between(array: pa.Array, offsets: np.ndarray) -> bytes:
    """The bytes of all values, one behind the other."""
    first, last = int(offsets[0]), int(offsets[-1])
    data = array.buffers()[2]
    return data.slice(first, last - first).to_pybytes() if data is not None else b""


def _offsets(array: pa.Array) -> np.ndarray:
    kind = array.type
    is_large = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
    assert is_large or pa.types.is_string(kind) or pa.types.is_binary(kind), kind
    offsets = array.buffers()[1]
    if offsets is None or not len(array):
        return np.zeros(len(array) + 1, np.int64)
    width = np.dtype(np.int64 if is_large else np.int32)
    start = array.offset * width.itemsize
    return np.frombuffer(offsets, width, len(array) + 1, start)
