"""The contract of the catalog, which LMDB and the catalog in memory both keep."""

from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import numpy as np
import pytest

from storage.catalog import Catalog, LmdbCatalog, Table
from storage.catalog_columns import Columns
from storage.errors import CatalogError, DamageError, DiskFullError
from storage.frame import crc32c
from tests.world.storage.catalog import MemoryCatalog

MAX_BYTES = 1 << 20

Reopen = Callable[[], Catalog]


@pytest.fixture(params=["lmdb", "memory"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Catalog, Reopen]]:
    """A catalog, and how to close it and open it again."""
    current: Catalog

    def reopen() -> Catalog:
        nonlocal current
        if isinstance(current, MemoryCatalog):
            current = current.crash()
        else:
            current.close()
            current = LmdbCatalog(str(tmp_path), max_bytes=MAX_BYTES)
        return current

    if request.param == "lmdb":
        current = LmdbCatalog(str(tmp_path), max_bytes=MAX_BYTES)
    else:
        current = MemoryCatalog()
    yield current, reopen
    current.close()


@pytest.fixture
def catalog(opened: tuple[Catalog, Reopen]) -> Catalog:
    return opened[0]


def put(catalog: Catalog, *pairs: tuple[bytes, bytes | None], table: Table = Table.KEYS) -> None:
    catalog.commit({table: list(pairs)})


def test_a_new_catalog_is_empty(catalog: Catalog) -> None:
    for table in Table:
        assert catalog.get(table, b"key") is None
        assert list(catalog.scan(table)) == []


def test_values_are_read_back(catalog: Catalog) -> None:
    put(catalog, (b"b", b"2"), (b"a", b"1"), (b"empty", b""))
    assert catalog.get(Table.KEYS, b"a") == b"1"
    assert catalog.get(Table.KEYS, b"b") == b"2"
    assert catalog.get(Table.KEYS, b"empty") == b""
    assert catalog.get(Table.KEYS, b"ab") is None


def test_a_commit_survives(opened: tuple[Catalog, Reopen]) -> None:
    catalog, reopen = opened
    catalog.commit({Table.META: [(b"checkpoint", b"7")], Table.HOURS: [(b"h", b"x")]})
    catalog = reopen()
    assert catalog.get(Table.META, b"checkpoint") == b"7"
    assert list(catalog.scan(Table.HOURS)) == [(b"h", b"x")]


def test_tables_are_apart(catalog: Catalog) -> None:
    for table in Table:
        put(catalog, (b"key", table.value.encode()), table=table)
    assert [catalog.get(table, b"key") for table in Table] == [t.value.encode() for t in Table]


def test_none_removes(catalog: Catalog) -> None:
    put(catalog, (b"a", b"1"), (b"b", b"2"))
    put(catalog, (b"a", None), (b"unknown", None))
    assert list(catalog.scan(Table.KEYS)) == [(b"b", b"2")]


def test_later_pairs_win(catalog: Catalog) -> None:
    put(catalog, (b"a", b"1"), (b"a", b"2"), (b"b", b"1"), (b"b", None), (b"c", None), (b"c", b"3"))
    assert list(catalog.scan(Table.KEYS)) == [(b"a", b"2"), (b"c", b"3")]


def test_what_comes_in_columns_comes_last(catalog: Catalog) -> None:
    keys = [f"{n * 7_919 % 2_000:04}".encode() for n in range(2_000)]
    columns = Columns(np.array(keys, "V4"), np.array([key[::-1] for key in keys], "V4"))
    again = Columns(np.array([keys[1]], "V4"), np.array([b"last"], "V4"))
    removed: list[tuple[bytes, bytes | None]] = [(keys[0], None), (keys[1], b"first")]
    catalog.commit({Table.KEYS: removed}, {Table.KEYS: [columns, again], Table.CHANGES: []})
    expected = {**{key: key[::-1] for key in keys}, keys[1]: b"last"}
    assert list(catalog.scan(Table.KEYS)) == sorted(expected.items())
    assert not list(catalog.scan(Table.CHANGES))


def test_an_empty_commit(catalog: Catalog) -> None:
    catalog.commit({})
    catalog.commit({table: [] for table in Table})
    assert all(not list(catalog.scan(table)) for table in Table)


def test_a_scan_is_in_the_order_of_the_bytes(catalog: Catalog) -> None:
    keys = [b"\xff", b"a", b"ab", b"\x00\x01", b"b", b"\x00"]
    put(catalog, *((key, key) for key in keys))
    assert [key for key, _ in catalog.scan(Table.KEYS)] == sorted(keys)


@pytest.mark.parametrize(
    ("start", "prefix", "expected"),
    [
        (b"", b"", [b"a", b"b1", b"b2", b"b3", b"c"]),
        (b"b2", b"", [b"b2", b"b3", b"c"]),
        (b"b15", b"", [b"b2", b"b3", b"c"]),
        (b"", b"b", [b"b1", b"b2", b"b3"]),
        (b"b2", b"b", [b"b2", b"b3"]),
        (b"a", b"b", [b"b1", b"b2", b"b3"]),
        (b"c", b"b", []),
        (b"d", b"", []),
        (b"", b"x", []),
        (b"", b"b3", [b"b3"]),
    ],
)
def test_a_scan_has_a_start_and_a_prefix(
    catalog: Catalog, start: bytes, prefix: bytes, expected: list[bytes]
) -> None:
    put(catalog, *((key, b"") for key in (b"a", b"b1", b"b2", b"b3", b"c")))
    assert [key for key, _ in catalog.scan(Table.KEYS, start, prefix=prefix)] == expected


def test_a_scan_may_be_left_half_way(catalog: Catalog) -> None:
    put(catalog, (b"a", b"1"), (b"b", b"2"))
    for _ in range(300):  # More than there are readers.
        assert next(iter(catalog.scan(Table.KEYS))) == (b"a", b"1")
    put(catalog, (b"c", b"3"))


def test_a_commit_is_all_or_nothing(catalog: Catalog) -> None:
    put(catalog, (b"a", b"1"))
    too_long = b"x" * 600
    with pytest.raises(CatalogError, match="commit"):
        catalog.commit({Table.META: [(b"m", b"1")], Table.KEYS: [(b"a", b"2"), (too_long, b"1")]})
    assert catalog.get(Table.META, b"m") is None
    assert list(catalog.scan(Table.KEYS)) == [(b"a", b"1")]


def test_a_value_may_be_large(catalog: Catalog) -> None:
    put(catalog, (b"a", b"x" * 100_000))
    assert catalog.get(Table.KEYS, b"a") == b"x" * 100_000


def test_the_readers_own_copy_of_a_value_stays(catalog: Catalog) -> None:
    put(catalog, (b"a", b"1"))
    value = catalog.get(Table.KEYS, b"a")
    put(catalog, (b"a", b"2"))
    assert value == b"1"


# ---- LMDB alone ------------------------------------------------------------------------------


def test_a_catalog_that_is_full_is_a_full_disk(tmp_path: Path) -> None:
    catalog = LmdbCatalog(str(tmp_path), max_bytes=MAX_BYTES)
    put(catalog, (b"a", b"1"))
    with pytest.raises(DiskFullError, match="commit failed on catalog"):
        put(catalog, *((b"%d" % index, bytes(4000)) for index in range(1000)))
    assert list(catalog.scan(Table.KEYS)) == [(b"a", b"1")]
    put(catalog, (b"b", b"2"))
    catalog.close()


def test_values_are_sealed(tmp_path: Path) -> None:
    """As FORMAT.md says: crc32c of table, zero byte, key and value; then the value."""
    catalog = LmdbCatalog(str(tmp_path), max_bytes=MAX_BYTES)
    put(catalog, (b"a key", b"its value"))
    catalog.close()
    crc = crc32c(b"keys" + b"\0" + b"a key" + b"its value")
    data = (tmp_path / "data.mdb").read_bytes()
    assert b"a key" + crc.to_bytes(4, "little") + b"its value" in data


def test_the_table_of_a_part_is_there_from_its_first_entry_on(
    opened: tuple[Catalog, Reopen],
) -> None:
    catalog, reopen = opened
    words, others = Table("part_192"), Table("part_255")
    assert catalog.get(words, b"a") is None and list(catalog.scan(words)) == []
    put(catalog, (b"a", b"1"), table=words)
    assert catalog.get(words, b"a") == b"1"
    catalog = reopen()
    assert list(catalog.scan(words)) == [(b"a", b"1")] and catalog.size(others) == 0
    assert not catalog.verify()
    for name in ("part_191", "part_256", "part_0192", "words"):
        with pytest.raises(ValueError, match="not a valid Table"):
            Table(name)


def test_a_file_has_no_tables_of_parts_that_have_none(tmp_path: Path) -> None:
    catalog = LmdbCatalog(str(tmp_path), max_bytes=MAX_BYTES)
    put(catalog, (b"a", b"1"))
    catalog.close()
    with lmdb.open(str(tmp_path), max_dbs=1) as environment, environment.begin() as transaction:
        assert {key.decode() for key, _ in transaction.cursor()} == {*Table}


def test_a_reader_in_read_only_mode(tmp_path: Path) -> None:
    catalog = LmdbCatalog(str(tmp_path), max_bytes=MAX_BYTES)
    put(catalog, (b"a", b"1"))
    catalog.close()
    catalog = LmdbCatalog(str(tmp_path), max_bytes=MAX_BYTES, readonly=True)
    assert catalog.get(Table.KEYS, b"a") == b"1"
    with pytest.raises(CatalogError):
        put(catalog, (b"b", b"2"))
    catalog.close()


def test_who_only_reads_finds_nothing_in_a_table_that_is_newer_than_the_directory(
    tmp_path: Path,
) -> None:
    LmdbCatalog(str(tmp_path), max_bytes=MAX_BYTES).close()
    with lmdb.open(str(tmp_path), max_dbs=len(Table)) as environment:
        newer = environment.open_db(Table.SCHEDULES.value.encode(), create=False)
        with environment.begin(write=True) as transaction:
            transaction.drop(newer)
    catalog = LmdbCatalog(str(tmp_path), max_bytes=MAX_BYTES, readonly=True)
    assert catalog.get(Table.SCHEDULES, b"s") is None
    assert catalog.get_many(Table.SCHEDULES, [b"s"]) == {}
    assert list(catalog.scan(Table.SCHEDULES)) == [] and catalog.size(Table.SCHEDULES) == 0
    catalog.close()
    catalog = LmdbCatalog(str(tmp_path), max_bytes=MAX_BYTES)
    put(catalog, (b"s", b"1"), table=Table.SCHEDULES)
    assert catalog.get(Table.SCHEDULES, b"s") == b"1"
    catalog.close()


@pytest.mark.parametrize("readonly", [False, True])
def test_what_is_no_catalog_is_an_error(tmp_path: Path, readonly: bool) -> None:
    (tmp_path / "data.mdb").write_bytes(b"something else" * 1000)
    with pytest.raises(
        DamageError, match=r"data\.mdb is damaged at offset 0: it is not a meta page"
    ):
        LmdbCatalog(str(tmp_path), max_bytes=MAX_BYTES, readonly=readonly)


def test_a_catalog_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="open"):
        LmdbCatalog(str(tmp_path / "nowhere"), max_bytes=MAX_BYTES, readonly=True)


def test_a_view_sees_one_moment_until_it_is_refreshed(catalog: Catalog) -> None:
    put(catalog, (b"a", b"1"))
    view = catalog.view()
    assert view.get(Table.KEYS, b"a") == b"1"
    put(catalog, (b"a", b"2"), (b"b", b"2"))
    assert [view.get(Table.KEYS, key) for key in (b"a", b"b")] == [b"1", None]
    assert view.scan(Table.KEYS, b"a") == [(b"a", b"1")]
    assert view.scan(Table.KEYS, b"b") == []
    assert view.get_many(Table.KEYS, [b"b", b"a"]) == {b"a": b"1"}
    assert view.prefixes(Table.KEYS, [b"a", b"b"]) == {b"a"}
    view.refresh()
    view.refresh()
    put(catalog, (b"a", None), (b"b2", b"3"), (b"c", b"4"))
    assert [view.get(Table.KEYS, key) for key in (b"a", b"b")] == [None, b"2"]
    assert view.scan(Table.KEYS, b"b") == [(b"b", b"2"), (b"b2", b"3")]


def test_a_view_of_a_catalog_that_is_closed_says_so(catalog: Catalog) -> None:
    view = catalog.view()
    catalog.close()
    view.refresh()
    with pytest.raises(CatalogError):
        view.get(Table.KEYS, b"a")
    with pytest.raises(CatalogError):
        view.get_many(Table.KEYS, [b"a"])
    with pytest.raises(CatalogError):
        view.prefixes(Table.KEYS, [b"a"])


@pytest.mark.parametrize("what", ["value", "checksum", "length", "key"])
def test_one_damaged_value_among_many_is_named(tmp_path: Path, what: str) -> None:
    catalog = LmdbCatalog(str(tmp_path), max_bytes=MAX_BYTES)
    pairs = [(bytes([number]) * 16, bytes([number]) * 24) for number in range(5)]
    catalog.commit({Table.KEYS: pairs})
    keys, bad = [key for key, _ in pairs], pairs[2][0]
    assert catalog.get_many(Table.KEYS, keys) == catalog.view().get_many(Table.KEYS, keys)
    table = catalog._tables[Table.KEYS]
    with catalog._environment.begin(write=True) as transaction:
        sealed = transaction.get(bad, db=table)
        other = transaction.get(pairs[3][0], db=table)
        assert sealed is not None
        assert other is not None
        damaged = {
            "value": sealed[:-1] + b"x",
            "checksum": b"x" + sealed[1:],
            "length": sealed[:3],
            "key": other,
        }
        transaction.put(bad, damaged[what], db=table)
    for look_up in (catalog.get_many, catalog.view().get_many):
        assert look_up(Table.KEYS, keys[:2] + keys[3:]) == dict(pairs[:2] + pairs[3:])
        with pytest.raises(DamageError, match=f"keys: entry {bad.hex()} does not match"):
            look_up(Table.KEYS, keys)
    catalog.close()
