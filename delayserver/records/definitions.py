"""The tables that no hour file tells of, and how the definitions log keeps them.

Subjects, subscriptions, why and when a message died, adopted imports, confirmed archives, and the
tables of parts stand in the message log until a checkpoint, and in the catalog from then on. The
definitions log (`storage.definitions_log`) holds them besides: so the catalog can be built again.

The numbers of all tables are listed here, also those of parts: they are a format on the disk, and
a server without a part must not drop its rows when it writes the log anew.

Cost: 1 µs per change. Threads: functions without state.
"""

from collections.abc import Iterator, Mapping, Sequence

from storage.catalog import PART_TABLES, Catalog, Table
from storage.definitions_log import Definition, State

TABLE_NUMBERS = {
    Table.SUBJECTS: 1,
    Table.SUBSCRIPTIONS: 2,
    Table.DEAD_LETTERS: 3,
    Table.HEARTBEATS: 4,
    Table.IMPORTS: 5,
    Table.ARCHIVES: 6,
    Table.SCHEDULES: 13,
    Table.SCHEDULE_STATES: 14,
    Table.SOURCES: 15,
    Table.SOURCE_STATES: 16,
    **PART_TABLES,
}
"""In a row of the definitions log."""
DEFINED_TABLES = {number: table for table, number in TABLE_NUMBERS.items()}


def definitions_among(
    writes: Mapping[Table, Sequence[tuple[bytes, bytes | None]]],
) -> list[Definition]:
    """The changes that a commit of the catalog makes in them; the last one of each key."""
    return [
        Definition(number, key, value)
        for table, number in TABLE_NUMBERS.items()
        for key, value in dict(writes.get(table, ())).items()
    ]


def read_definitions(catalog: Catalog) -> Iterator[Definition]:
    """All that the catalog holds of them."""
    for table, number in TABLE_NUMBERS.items():
        for key, value in catalog.scan(table):
            yield Definition(number, key, value)


def by_table(state: State) -> dict[Table, dict[bytes, bytes]]:
    """A state of the log as tables; of a table that is not known nothing."""
    tables: dict[Table, dict[bytes, bytes]] = {table: {} for table in TABLE_NUMBERS}
    for (number, key), value in state.items():
        if number in DEFINED_TABLES:
            tables[DEFINED_TABLES[number]][key] = value
    return tables
