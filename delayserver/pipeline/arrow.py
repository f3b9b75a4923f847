"""Arrow arrays from what NumPy and Python have.

`pyarrow.array` takes anything, and imports pandas to find out what it was given: half a second of a
processor and 40 MB in each of Spark's workers. Here the caller knows.

Cost: one strided copy of a column, none if it is contiguous; 0.1 µs per text.
Threads: pure functions.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa


def fixed(column: np.ndarray, kind: pa.DataType | None = None) -> pa.Array:
    """A column of fixed width, without nulls; `kind` says what its bytes mean in Arrow, if that is
    not what the dtype says. The array keeps the memory: a column must not be changed any more."""
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
    present = np.fromiter((value is not None for value in values), bool, len(values))
    ends = np.zeros(len(values) + 1, np.int64)
    np.cumsum([len(value or b"") for value in values], out=ends[1:])
    assert ends[-1] < 1 << 31
    return pa.Array.from_buffers(
        kind,
        len(values),
        [
            None if present.all() else pa.py_buffer(np.packbits(present, bitorder="little")),
            pa.py_buffer(ends.astype(np.int32)),
            pa.py_buffer(b"".join([value for value in values if value])),
        ],
    )
