"""Pairs in columns: their order and their checksums."""

import random

import google_crc32c
import numpy as np
import pytest

from storage.catalog_columns import Columns, as_columns, ascending, row_checksums
from storage.catalog_file import seal, seal_columns


def columns(*pairs: tuple[bytes, bytes]) -> Columns:
    keys, values = [key for key, _ in pairs], [value for _, value in pairs]
    return Columns(
        np.frombuffer(b"".join(keys), f"V{len(keys[0])}"),
        np.frombuffer(b"".join(values), f"V{len(values[0])}"),
    )


def pairs_of(found: Columns) -> list[tuple[bytes, bytes]]:
    return list(zip(found.keys.tolist(), found.values.tolist(), strict=True))


@pytest.mark.parametrize("length", [3, 8, 12, 16])
def test_keys_are_in_the_order_of_their_bytes(length: int) -> None:
    rng = random.Random(0)
    pairs = [(rng.randbytes(length), bytes([n, 0])) for n in range(200)]
    assert pairs_of(ascending([columns(*pairs[:50]), columns(*pairs[50:])])) == sorted(pairs)


def test_keys_that_begin_alike_are_in_the_order_of_the_rest() -> None:
    pairs = [(bytes(8) + bytes([n % 7, n, 0, 0]), bytes([n])) for n in range(100)]
    assert pairs_of(ascending([columns(*pairs)])) == sorted(pairs)


def test_of_a_key_the_last_value_counts() -> None:
    first = columns((b"key-b", b"1"), (b"key-a", b"2"), (b"key-b", b"3"))
    found = ascending([first, columns((b"key-c", b"4"), (b"key-a", b"5"))])
    assert pairs_of(found) == [(b"key-a", b"5"), (b"key-b", b"3"), (b"key-c", b"4")]


@pytest.mark.parametrize(("count", "length"), [(0, 3), (1, 1), (7, 40), (20_000, 5)])
def test_checksums_are_those_of_row_by_row(count: int, length: int) -> None:
    data = random.Random(0).randbytes(count * length)
    rows = np.frombuffer(data, np.uint8).reshape(count, length)
    expected = [google_crc32c.value(b"before" + row.tobytes()) for row in rows]
    assert row_checksums(b"before", rows).tolist() == expected


def test_values_are_sealed_as_one_by_one() -> None:
    rng = random.Random(0)
    pairs = [(rng.randbytes(16), rng.randbytes(24)) for _ in range(50)]
    sealed = seal_columns("keys", columns(*pairs))
    assert sealed.tolist() == [seal("keys", key, value) for key, value in pairs]


def test_columns_of_other_rows_are_their_bytes() -> None:
    rows = np.array([(1, 2), (3, 4)], np.dtype([("a", "<u2"), ("b", "u1")]))[::-1]
    assert as_columns(rows).tolist() == [[3, 0, 4], [1, 0, 2]]
