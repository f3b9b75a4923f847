"""The eight tables that the definitions log keeps."""

from delayserver.records.definitions import (
    DEFINED_TABLES,
    TABLE_NUMBERS,
    by_table,
    definitions_among,
    read_definitions,
)
from storage.catalog import Table, Writes
from storage.definitions_log import Definition, State, apply
from tests.world.storage.catalog import MemoryCatalog


def test_tables_keep_their_numbers() -> None:
    assert {number: table.value for number, table in DEFINED_TABLES.items()} == {
        **{number: f"part_{number}" for number in range(192, 256)},
        1: "subjects",
        2: "subscriptions",
        3: "dead_letters",
        4: "heartbeats",
        5: "imports",
        6: "archives",
        13: "schedules",
        14: "schedule_states",
        15: "sources",
        16: "source_states",
    }


def test_of_a_commit_the_last_change_of_each_key_counts() -> None:
    writes: Writes = {
        Table.KEYS: [(b"k", b"not here")],
        Table.HEARTBEATS: [(b"a", b"1"), (b"b", b"1"), (b"a", None)],
        Table.SUBJECTS: [(b"s", b"orders")],
    }
    assert definitions_among(writes) == [
        Definition(1, b"s", b"orders"),
        Definition(4, b"a", None),
        Definition(4, b"b", b"1"),
    ]


def test_a_catalog_comes_back() -> None:
    catalog, state = MemoryCatalog(), State()
    tables = {table: {b"a": table.encode(), b"b": b""} for table in TABLE_NUMBERS}
    catalog.commit({table: list(pairs.items()) for table, pairs in tables.items()})
    catalog.commit({Table.KEYS: [(b"k", b"not here")]})
    apply(read_definitions(catalog), state)
    assert by_table(state) == tables
    assert by_table({**state, (99, b"of a newer server"): b""}) == tables
