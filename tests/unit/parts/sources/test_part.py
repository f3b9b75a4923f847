"""Sources, as the core is told of them."""

from delayserver.parts.sources.part import SOURCES_PART
from delayserver.parts.sources.records import SourceChange, pack_source_change
from storage.catalog import Table
from storage.rows import RecordKind


def test_a_record_changes_the_state_the_definition_or_both_and_ends_both() -> None:
    effect = SOURCES_PART.effects[RecordKind.SOURCE]
    for change, writes in (
        (SourceChange("a", b"d", b"s"), [(Table.SOURCE_STATES, b"s"), (Table.SOURCES, b"d")]),
        (SourceChange("a", None, b"s"), [(Table.SOURCE_STATES, b"s")]),
        (SourceChange("a"), [(Table.SOURCE_STATES, None), (Table.SOURCES, None)]),
        (SourceChange(""), []),
    ):
        expected = [(table, b"a", value) for table, value in writes]
        assert list(effect(pack_source_change(change))) == expected
