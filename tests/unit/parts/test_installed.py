"""The parts of this server: each record kind and each table belongs to the core or to one part."""

from delayserver.parts.installed import PARTS
from delayserver.records.tables import CHECKS
from storage.catalog import Table


def test_each_table_is_checked_by_the_core_or_by_one_part() -> None:
    owned = [*CHECKS, *(table for part in PARTS for table in part.checks)]
    assert sorted(owned) == sorted(Table)


def test_no_two_parts_share_a_name_or_a_record_kind() -> None:
    for owned in (
        [part.name for part in PARTS],
        [part.collection for part in PARTS if part.collection],
        [kind for part in PARTS for kind in part.effects],
    ):
        assert len(owned) == len({*owned})
