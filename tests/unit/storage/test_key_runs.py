"""Key runs by themselves: where rows stand, which the filter knows, and what damage does."""

import random

import numpy as np
import pytest

from storage.catalog_columns import Columns
from storage.errors import DamageError
from storage.key_runs import (
    BLOCK_BYTES,
    BLOCK_ROWS,
    DIRECTORY,
    FilterBits,
    KeyRun,
    RunWriter,
    merged,
    run_path,
)
from tests.unit.storage.samples import overwrite
from tests.world.storage.files import SimulatedFiles

STAMP = 77


def rows(heads: list[int], seed: int = 0) -> dict[bytes, bytes]:
    """Pairs whose keys have these heads."""
    rng = random.Random(seed)
    return {head.to_bytes(8, "big") + rng.randbytes(8): rng.randbytes(24) for head in heads}


def columns(pairs: dict[bytes, bytes]) -> Columns:
    keys, values = b"".join(pairs), b"".join(pairs.values())
    return Columns(np.frombuffer(keys, "V16"), np.frombuffer(values, "V24"))


def run_of(files: SimulatedFiles, pairs: dict[bytes, bytes], cuts: list[int]) -> KeyRun:
    files.make_directory(DIRECTORY)
    writer = RunWriter(files, 1, stamp=STAMP, count_max=len(pairs))
    items = list(pairs.items())
    for start, end in zip([0, *cuts], [*cuts, len(items)], strict=True):
        writer.append(columns(dict(items[start:end])))
    return KeyRun(files, writer.finish(), stamp=STAMP)


def found_in(run: KeyRun, keys: list[bytes]) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    run.add_found(keys, FilterBits.of(np.frombuffer(b"".join(keys), "V16")), found)
    return found


@pytest.mark.parametrize("before", [0, 1, BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 1])
@pytest.mark.parametrize("same", [1, 2, BLOCK_ROWS, 2 * BLOCK_ROWS + 1])
def test_rows_with_one_head_are_found_wherever_they_stand(before: int, same: int) -> None:
    pairs = rows([*range(10, 10 + before), *[5000] * same, *range(9000, 9003)])
    run = run_of(SimulatedFiles(), pairs, [before // 2])
    assert {key: run.get(key) for key in pairs} == pairs
    assert found_in(run, list(pairs)) == pairs
    absent = list(rows([0, 9, 10, 4999, *[5000] * 50, 5001, 9002, (1 << 64) - 1], seed=1))
    assert all(run.get(key) is None and run._find(key) is None for key in absent)
    assert found_in(run, absent) == {}
    between = run.between(5000, 5001)
    wanted = {key for key in pairs if key[:8] == (5000).to_bytes(8, "big")}
    assert set(between.keys.tolist()) == wanted


def test_the_filter_knows_nearly_all_that_are_not_there() -> None:
    rng = random.Random(3)
    pairs = rows(sorted(rng.getrandbits(64) for _ in range(5000)))
    run = run_of(SimulatedFiles(), pairs, [])
    looked = 0
    find = run._find

    def counted(key: bytes) -> bytes | None:
        nonlocal looked
        looked += 1
        return find(key)

    run._find = counted  # type: ignore[method-assign]
    absent = [rng.randbytes(16) for _ in range(5000)]
    assert all(run.get(key) is None for key in absent)
    assert looked < 150  # 97 in 100
    alone, looked = looked, 0
    assert found_in(run, absent) == {}
    assert looked == alone


def test_what_is_found_in_a_newer_run_is_not_looked_for() -> None:
    pairs = rows(list(range(300)))
    run = run_of(SimulatedFiles(), pairs, [])
    newer = dict.fromkeys(list(pairs)[::2], b"\x01" * 24)
    found = dict(newer)
    run.add_found(list(pairs), FilterBits.of(np.frombuffer(b"".join(pairs), "V16")), found)
    assert found == pairs | newer


@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_damaged_block_is_named_and_the_others_are_read(block: int) -> None:
    files = SimulatedFiles()
    pairs = rows(list(range(3 * BLOCK_ROWS)))
    run = run_of(files, pairs, [])
    overwrite(files, run_path(1), (1 + block) * BLOCK_BYTES + 100, b"\xff\xff")
    for index, (key, value) in enumerate(pairs.items()):
        if index // BLOCK_ROWS == block:
            with pytest.raises(DamageError, match=f"block {block}"):
                run.get(key)
        elif index % BLOCK_ROWS:  # the first of a block may be looked for in the one before, too
            assert run.get(key) == value
    (damage,) = run.verify()
    assert (damage.path, damage.offset) == (run_path(1), (1 + block) * BLOCK_BYTES)


def test_of_keys_that_are_in_several_parts_the_last_counts() -> None:
    old, new = rows([1, 2, 2, 3]), rows([2, 4], seed=5)
    shared = dict.fromkeys(list(old)[:2], b"\2" * 24)
    both = merged([columns(old), columns(new | shared)], drop_nothing=False)
    found = dict(zip(both.keys.tolist(), both.values.tolist(), strict=True))
    assert found == old | new | shared
    assert [key[:8] for key in both.keys.tolist()] == sorted(key[:8] for key in found)
