"""What the fake catalog adds to the contract: commits that fail as planned, and the next process.

What every catalog does is in `tests/unit/storage/test_catalog.py`, which runs over this one too."""

import pytest

from storage.catalog import Table
from storage.errors import CatalogError, DiskFullError
from tests.world.storage.catalog import CATALOG_KEY_BYTES_MAX, MemoryCatalog
from tests.world.storage.faults import Fault, FaultKind, Faults, Moment, SimulatedCrash

WRITES = {Table.KEYS: [(b"a", b"1")], Table.HOURS: [(b"b", b"2")]}


def committed(catalog: MemoryCatalog) -> list[bytes | None]:
    return [catalog.get(table, key) for table, pairs in WRITES.items() for key, _ in pairs]


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (FaultKind.IO_ERROR, CatalogError),
        (FaultKind.NO_SPACE, DiskFullError),
        (FaultKind.CRASH, SimulatedCrash),
    ],
)
@pytest.mark.parametrize("moment", Moment)
def test_a_commit_that_fails_has_happened_as_a_whole_or_not_at_all(kind, error, moment) -> None:
    catalog = MemoryCatalog(Faults(Fault(1, kind, moment)))
    with pytest.raises(error):
        catalog.commit(WRITES)
    after = moment is Moment.AFTER
    assert committed(catalog.crash()) == ([b"1", b"2"] if after else [None, None])


def test_the_next_commit_counts_as_the_next_call() -> None:
    faults = Faults(Fault(2, FaultKind.IO_ERROR))
    catalog = MemoryCatalog(faults)
    catalog.commit(WRITES)
    with pytest.raises(CatalogError):
        catalog.commit({Table.KEYS: [(b"a", None)]})
    assert committed(catalog) == [b"1", b"2"]
    assert [(one.call, one.path) for one in faults.struck] == [("commit", "catalog")]


@pytest.mark.parametrize("end", [MemoryCatalog.crash, MemoryCatalog.kill])
def test_the_next_process_has_a_catalog_of_its_own(end) -> None:
    first = MemoryCatalog()
    first.commit(WRITES)
    second = end(first)
    with pytest.raises(CatalogError, match="closed"):
        first.get(Table.KEYS, b"a")
    third = second.crash()
    third.commit({Table.KEYS: [(b"a", None)]})
    assert end(third).get(Table.KEYS, b"a") is None
    assert second._values[Table.KEYS] == {b"a": b"1"}


@pytest.mark.parametrize("key", [b"", b"x" * (CATALOG_KEY_BYTES_MAX + 1)])
def test_a_key_that_lmdb_would_not_take_is_refused(key) -> None:
    with pytest.raises(CatalogError, match=f"a key of {len(key)} bytes"):
        MemoryCatalog().commit({Table.KEYS: [(key, b"1")]})
