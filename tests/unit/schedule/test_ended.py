"""What has ended: in order, whoever it ended for, in memory and in files."""

from __future__ import annotations

import numpy as np
import pytest

from delayserver.schedule import ended as ended_module
from delayserver.schedule.ended import Ended, is_among_sorted
from storage.scratch import Scratch
from tests.world.storage.files import SimulatedFiles


@pytest.fixture(params=[(0, 1), (1 << 20, 1), (64, 3), (1 << 20, ended_module.PART_ROWS)])
def ended(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Ended:
    memory_bytes, part_rows = request.param
    monkeypatch.setattr(ended_module, "PART_ROWS", part_rows)
    return Ended(Scratch(SimulatedFiles(), memory_bytes, piece_bytes=1 << 10))


def seqs(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def test_nothing_has_ended_in_the_beginning(ended: Ended) -> None:
    assert ended.removed.tolist() == ended.by_somebody.tolist() == ended.by(1).tolist() == []


def test_what_comes_in_any_order_is_sorted(ended: Ended) -> None:
    for some in (seqs(5, 9), seqs(), seqs(3), seqs(8, 1, 2)):
        ended.add_removed(some)
    assert ended.removed.tolist() == [1, 2, 3, 5, 8, 9]
    assert ended.by_somebody.tolist() == []


def test_what_is_settled_is_known_by_whom(ended: Ended) -> None:
    ended.add_settled(seqs(7, 3, 5, 3), ids(2, 1, 0, 2))
    ended.add_settled(seqs(), ids())
    ended.add_settled(seqs(1, 2), ids(2, 2))
    assert ended.by(2).tolist() == [1, 2, 3, 7]
    assert ended.by(1).tolist() == [3]
    assert ended.by(3).tolist() == []
    # A row that was dropped is done for nobody.
    assert ended.by(0).tolist() == [5]
    assert ended.by_somebody.tolist() == [1, 2, 3, 3, 7]
    assert ended.removed.tolist() == []


def test_columns_of_rows_are_not_kept(ended: Ended) -> None:
    rows = np.zeros(100, [("seq", "<u8"), ("rest", "V100")])
    rows["seq"] = np.arange(100, 0, -1)
    ended.add_removed(rows["seq"])
    rows["seq"] = 0
    assert ended.removed.tolist() == list(range(1, 101))


def test_is_among_sorted_finds_what_is_there() -> None:
    ascending = seqs(2, 4, 4, 9)
    assert is_among_sorted(seqs(9, 1, 4, 10), ascending).tolist() == [True, False, True, False]
    assert is_among_sorted(seqs(1), seqs()).tolist() == [False]
