"""Packing: a row that is packed alone is a row of the dtype. (Many: see test_sequencer.)"""

from __future__ import annotations

from delayserver.decisions.packing import MESSAGE_ROW
from storage.rows import MESSAGE_DTYPE


def test_the_packed_row_is_the_dtype() -> None:
    assert MESSAGE_ROW.size == MESSAGE_DTYPE.itemsize
