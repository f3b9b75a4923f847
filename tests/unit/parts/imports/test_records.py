"""Archives that were confirmed, as they stand in the catalog."""

import pytest

from delayserver.parts.imports.records import (
    Archived,
    check_archived,
    pack_archived,
    read_archived,
    unpack_archived,
)
from delayserver.records.tables import UNREADABLE, hour_key
from storage.catalog import Table
from tests.world.storage.catalog import MemoryCatalog

ARCHIVED = Archived(64, 40, 9, 2, "abc", "s3://x", 1_700_000_000_000)


def test_an_archive_comes_back() -> None:
    assert unpack_archived(pack_archived(ARCHIVED)) == ARCHIVED
    check_archived(hour_key(500_000), pack_archived(ARCHIVED))


@pytest.mark.parametrize(
    ("key", "value"),
    [(b"abc", pack_archived(ARCHIVED)), (hour_key(1), b"\xc1"), (hour_key(1), b"")],
)
def test_an_entry_of_another_form_is_named(key: bytes, value: bytes) -> None:
    with pytest.raises(UNREADABLE):
        check_archived(key, value)


def test_an_entry_that_cannot_be_read_is_left_out_of_the_table() -> None:
    catalog = MemoryCatalog()
    pairs = [(hour_key(500_000), pack_archived(ARCHIVED)), (hour_key(500_001), b"\xc1")]
    catalog.commit({Table.ARCHIVES: pairs})
    assert read_archived(catalog) == {500_000: ARCHIVED}
