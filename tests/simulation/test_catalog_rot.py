"""Every byte of LMDB's data file of a small catalog is damaged, one at a time (I8).

Either the catalog is what it was, and stays sound when it is written to, or the damage is named
before LMDB maps the file. LMDB is no part of Python: if it died of a page, so would the tests, and
therefore another process does it."""

import multiprocessing
import random
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from storage.catalog import TABLES, LmdbCatalog, Table
from storage.catalog_file import DATA_FILE, find_damage
from storage.errors import DamageError
from tests.depth import every, least
from tests.simulation.on_disk import copy, deliver_all, flip, make_directory

MAX_BYTES = 1 << 24
USED_STRIDE = 23
UNUSED_STRIDE = 197
COMMIT_EVERY = 5


def fill(path: Path) -> None:
    """All that LMDB's file can hold: trees of two levels, long values, free pages."""
    path.mkdir()
    catalog, rng = LmdbCatalog(str(path), max_bytes=MAX_BYTES), random.Random(0)
    for turn in range(6):
        number = turn.to_bytes(4, "big")
        catalog.commit(
            {
                Table.META: [(b"checkpoint", bytes(4) + number)],
                Table.KEYS: [(rng.randbytes(16), rng.randbytes(24)) for _ in range(40)],
                Table.CHANGES: [(rng.randbytes(12), rng.randbytes(23)) for _ in range(20)],
                Table.HOURS: [(bytes(3) + bytes([hour]), rng.randbytes(40)) for hour in range(5)],
                Table.SUBJECTS: [(number, b"orders %d" % turn)],
                Table.SUBSCRIPTIONS: [(number, rng.randbytes(100))],
                Table.DEAD_LETTERS: [(rng.randbytes(12), rng.randbytes(3000 if turn % 3 else 90))],
            }
        )
        keys = [key for key, _ in catalog.scan(Table.KEYS)]
        catalog.commit({Table.KEYS: [(key, None) for key in keys[:10]]})
    catalog.close()


def everything(catalog: LmdbCatalog) -> dict[Table, list[tuple[bytes, bytes]]]:
    return {table: list(catalog.scan(table)) for table in Table}


def try_offsets(path: Path, offsets: list[int]) -> Counter[str]:
    """What becomes of each flipped bit: `right`, `named`, or an assertion fails."""
    ends: Counter[str] = Counter()
    catalog = LmdbCatalog(str(path), max_bytes=MAX_BYTES)
    before = everything(catalog)
    catalog.close()
    data = (path / DATA_FILE).read_bytes()
    rng = random.Random(1)
    for offset in offsets:
        (path / DATA_FILE).write_bytes(data)
        flip(path, DATA_FILE, offset)
        try:
            catalog = LmdbCatalog(str(path), max_bytes=MAX_BYTES)
        except DamageError:
            ends["named"] += 1
            continue
        assert everything(catalog) == before, f"silence about byte {offset}"
        if offset % COMMIT_EVERY == 0:
            catalog.commit({Table.KEYS: [(rng.randbytes(16), bytes(24)) for _ in range(99)]})
            assert not catalog.verify(), f"byte {offset} led to more"
        catalog.close()
        ends["right"] += 1
    return ends


@pytest.mark.timeout(600)
def test_every_byte(in_memory: Path) -> None:
    path = in_memory / "catalog"
    fill(path)
    data = (path / DATA_FILE).read_bytes()
    used = [at for at in range(len(data)) if any(data[at // 16 * 16 : at // 16 * 16 + 16])]
    unused = sorted(set(range(len(data))) - set(used))
    offsets = every(7, used[::USED_STRIDE]) + every(7, unused[::UNUSED_STRIDE])
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        ends = pool.submit(try_offsets, path, offsets).result()
    assert ends.total() == len(offsets)
    # Half of what is not zero stands in free pages, old copies for the most part.
    assert ends["named"] > len(offsets) / 5 and ends["right"] > len(offsets) / 5, ends


def test_a_server_refuses_what_it_cannot_trust(in_memory: Path) -> None:
    """It delivers what it always did, or it says which file is damaged and does not start."""
    directory = in_memory / "directory"
    make_directory(directory)
    expected = deliver_all(copy(directory, in_memory / "x")).receipts
    used = (directory / "catalog" / DATA_FILE).read_bytes()
    refused = 0
    for offset in every(7, [at for at in range(0, len(used), 7) if used[at]][::31]):
        damaged = copy(directory, in_memory / "x")
        flip(damaged, f"catalog/{DATA_FILE}", offset)
        try:
            assert deliver_all(damaged).receipts == expected
        except DamageError as error:
            assert error.path == f"catalog/{DATA_FILE}"
            refused += 1
    assert refused >= least(4)


def test_a_value_that_rots_while_it_is_open(in_memory: Path) -> None:
    """What was sound at the start is held against its checksum at every reading."""
    path = in_memory / "open" / "catalog"
    path.mkdir(parents=True)
    catalog = LmdbCatalog(str(path), max_bytes=MAX_BYTES)
    catalog.commit({Table.KEYS: [(b"key", b"a value of its own")]})
    at = (path / DATA_FILE).read_bytes().index(b"a value of its own")
    flip(path, DATA_FILE, at)
    with pytest.raises(DamageError, match="keys: entry 6b6579 does not match"):
        catalog.get(Table.KEYS, b"key")
    with pytest.raises(DamageError, match="keys: entry 6b6579 does not match"):
        list(catalog.scan(Table.KEYS))
    with pytest.raises(DamageError, match="keys: entry 6b6579 does not match"):
        catalog.view().get(Table.KEYS, b"key")
    with pytest.raises(DamageError, match="keys: entry 6b6579 does not match"):
        catalog.view().scan(Table.KEYS, b"k")
    assert [found.reason for found in catalog.verify()] == [
        "keys: entry 6b6579 does not match its checksum"
    ]
    catalog.close()


def test_a_long_catalog_is_read_in_part(in_memory: Path) -> None:
    """The leaves of a long catalog are left out at the start, and nothing else is."""
    path = in_memory / "long"
    path.mkdir()
    catalog, rng = LmdbCatalog(str(path), max_bytes=1 << 28), random.Random(0)
    for _ in range(30):
        pairs = [(rng.randbytes(16), rng.randbytes(24)) for _ in range(4000)]
        catalog.commit({Table.KEYS: pairs})
    key, value = pairs[0]
    catalog.close()
    assert (path / DATA_FILE).stat().st_size > 8 << 20
    data = (path / DATA_FILE).read_bytes()
    flip(path, DATA_FILE, data.rindex(value))
    assert find_damage(str(path), TABLES, verify_all=False) == []
    (found,) = find_damage(str(path), TABLES, verify_all=True)
    assert key.hex() in found.reason
    catalog = LmdbCatalog(str(path), max_bytes=1 << 28)
    with pytest.raises(DamageError, match=key.hex()):
        catalog.get(Table.KEYS, key)
    catalog.close()
    (path / DATA_FILE).write_bytes(data)
    branches = [at for at in range(0, len(data), 4096) if data[at + 10] == 1]
    flip(path, DATA_FILE, branches[-1] + 12)
    flip(path, DATA_FILE, branches[0] + 12)
    assert find_damage(str(path), TABLES, verify_all=False)
