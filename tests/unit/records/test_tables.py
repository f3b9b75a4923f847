"""What the catalog says about the logs."""

import numpy as np
import pytest

from delayserver.records.tables import (
    CHECKPOINT_KEY,
    Change,
    ChangeState,
    HourState,
    change_key,
    hour_key,
    pack_cancels,
    pack_change,
    pack_checkpoint,
    read_checkpoint,
    read_hour,
    read_hours,
)
from storage.catalog import Table
from storage.testing.catalog import MemoryCatalog


@pytest.fixture
def catalog() -> MemoryCatalog:
    return MemoryCatalog()


def test_hours_are_read_as_they_were_written_and_in_order(catalog: MemoryCatalog) -> None:
    states = {hour: HourState(64 * hour, hour, 1, 2, -3, 4) for hour in (500_000, 7, 1 << 31)}
    catalog.commit({Table.HOURS: [(hour_key(hour), s.pack()) for hour, s in states.items()]})
    assert read_hours(catalog) == states
    assert list(read_hours(catalog)) == sorted(states)


def test_an_hour_that_was_written_before_there_was_a_first_seq(catalog: MemoryCatalog) -> None:
    value = HourState(64, 3, 1, 2, 5).pack()[:-8]
    catalog.commit({Table.HOURS: [(hour_key(7), value)]})
    assert read_hour(catalog, 7) == HourState(64, 3, 1, 2, 5, first_seq=0)


def test_without_a_checkpoint_nothing_is_filed(catalog: MemoryCatalog) -> None:
    assert read_checkpoint(catalog) == 0
    catalog.commit({Table.META: [(CHECKPOINT_KEY, pack_checkpoint(1 << 40))]})
    assert read_checkpoint(catalog) == 1 << 40


def test_cancels_are_packed_as_one_by_one() -> None:
    seqs, entries, dues_ms = [5, 1 << 40], [5, 7], [0, 1_700_000_000_123]
    keys, values = pack_cancels(
        np.array(seqs, np.uint64), np.array(entries, np.uint64), np.array(dues_ms, np.int64)
    )
    assert keys == [change_key(seq, 0) for seq in seqs]
    assert values == [
        pack_change(Change(ChangeState.CANCELLED, entry, due_ms, 0, 0))
        for entry, due_ms in zip(entries, dues_ms, strict=True)
    ]
