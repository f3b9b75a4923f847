"""The keys of an import against a dictionary."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from delayserver.decisions.imported_keys import ImportedKeys, sort_keys
from storage.staging import Keys

# Few halves, so that hashes share the first one, and some are the same.
HALVES = st.integers(0, 3).map(lambda number: number.to_bytes(8, "big"))
HASHES = st.lists(st.tuples(HALVES, HALVES).map(b"".join), max_size=60)
BASE = 1000


def keys_of(hashes: list[bytes]) -> Keys:
    count = len(hashes)
    return Keys(
        np.arange(count, dtype=np.uint32) * 2,
        np.frombuffer(b"".join(hashes), "V16"),
        np.arange(count, dtype=np.int64) + 10,
        np.arange(count, dtype=np.uint64) % 3,
        np.ones(count, np.uint32),
    )


def based(hashes: list[bytes]) -> ImportedKeys:
    keys, _ = sort_keys(keys_of(hashes))
    keys.first_seq = BASE
    return keys


@given(st.lists(st.binary(min_size=16, max_size=16), max_size=60))
def test_keys_are_looked_up_in_the_order_of_the_catalog(hashes: list[bytes]) -> None:
    keys, _ = sort_keys(keys_of(hashes))
    assert keys.hashes(0, len(keys)) == sorted(set(hashes))


@given(HASHES)
def test_a_key_stands_for_the_first_row_that_has_it(hashes: list[bytes]) -> None:
    keys, repeats = sort_keys(keys_of(hashes))
    keys.first_seq = BASE
    first: dict[bytes, int] = {}
    again: dict[int, int] = {}
    for number, key_hash in enumerate(hashes):
        if first.setdefault(key_hash, number) != number:
            again[number] = first[key_hash]
    assert len(keys) == len(first)
    for key_hash, number in first.items():
        assert keys.get(key_hash) == (BASE + number * 2, number + 10, number % 3)
    found = dict(zip(repeats.rows.tolist(), keys.rows[repeats.first].tolist(), strict=True))
    assert found == {number * 2: other * 2 for number, other in again.items()}
    assert dict(zip(repeats.rows.tolist(), repeats.digests.tolist(), strict=True)) == {
        number * 2: number % 3 for number in again
    }


@given(HASHES, HASHES)
def test_what_is_not_there_is_not_found(hashes: list[bytes], others: list[bytes]) -> None:
    keys = based(hashes)
    for index, key_hash in zip(keys.find(others).tolist(), others, strict=True):
        assert (index >= 0) == (key_hash in hashes)
        if index >= 0:
            assert keys.hash_at(index) == key_hash
            assert keys.hashes(index, index + 1) == [key_hash]
        else:
            assert keys.get(key_hash) is None


def test_keys_that_are_left_out_stand_for_nothing_here() -> None:
    hashes = [bytes([number]) * 16 for number in range(5)]
    keys = based(hashes)
    keys.leave_out(keys.find([hashes[1], hashes[4]]))
    assert [keys.get(key_hash) is None for key_hash in hashes] == [False, True, False, False, True]
