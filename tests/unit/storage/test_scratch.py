"""Arrays in files: as much memory as was allowed, and the rest where it can be had."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from storage.files import OsFiles
from storage.scratch import Scratch
from tests.world.storage.faults import Fault, FaultKind, Faults, FaultyFiles
from tests.world.storage.files import SimulatedFiles


class CountingFiles(SimulatedFiles):
    """Notes how long each file is."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def scratch(self, length: int) -> memoryview:
        self.lengths.append(length)
        return super().scratch(length)


def test_memory_comes_first_then_files_that_small_arrays_share() -> None:
    files = CountingFiles()
    scratch = Scratch(files, 1_000, piece_bytes=4_096)
    scratch.empty(125, np.uint64)
    assert files.lengths == []
    for _ in range(4):
        scratch.empty(125, np.uint64)
    assert files.lengths == [4_096]
    scratch.empty(10, np.uint64)
    assert files.lengths == [4_096, 8_192]
    scratch.empty(2_100, np.uint64)
    assert files.lengths == [4_096, 8_192, 16_800]


def test_arrays_of_one_file_do_not_touch_each_other() -> None:
    scratch = Scratch(SimulatedFiles(), 0, piece_bytes=1 << 12)
    arrays = [scratch.empty(count, np.uint8) for count in (1, 7, 64, 65, 3)]
    for number, array in enumerate(arrays):
        array[:] = number
    assert [set(array.tolist()) for array in arrays] == [{0}, {1}, {2}, {3}, {4}]
    assert all(array.ctypes.data % 8 == 0 for array in arrays)


def test_parts_are_joined_in_their_order() -> None:
    dtype = np.dtype([("seq", "<u8"), ("due", "<u4")])
    scratch = Scratch(SimulatedFiles(), 0)
    parts = [np.array([(1, 2), (3, 4)], dtype), np.empty(0, dtype), np.array([(5, 6)], dtype)]
    assert scratch.join(parts, dtype).tolist() == [(1, 2), (3, 4), (5, 6)]
    assert scratch.join([], dtype).tolist() == []


@pytest.mark.parametrize("kind", [FaultKind.NO_SPACE, FaultKind.NO_DESCRIPTOR, FaultKind.IO_ERROR])
def test_where_no_file_can_be_had_memory_has_to_do(kind: FaultKind) -> None:
    faults = Faults(Fault(at=1, kind=kind), only={"scratch"})
    array = Scratch(FaultyFiles(SimulatedFiles(), faults), 0).empty(1_000, np.uint64)
    assert len(faults.struck) == 1
    array[:] = 7
    assert int(array.sum()) == 7_000


def test_a_file_of_the_system_has_its_space_and_no_name_and_ends_with_its_arrays(
    tmp_path: Path,
) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    gc.collect()
    before = descriptors()
    files = OsFiles(str(tmp_path))
    scratch = Scratch(files, 0, piece_bytes=1 << 16)
    arrays = [scratch.empty(1 << 12, np.uint64) for _ in range(4)]
    for number, array in enumerate(arrays):
        array[:] = number
    assert descriptors() == before + 4 - 2  # pieces of 64 and 128 KiB
    assert os.listdir(tmp_path) == []
    assert [int(array[-1]) for array in arrays] == [0, 1, 2, 3]
    del arrays, array, scratch
    assert descriptors() == before


def test_a_file_that_finds_no_space_is_refused_at_once(tmp_path: Path) -> None:
    # More than any device has: it must not be found out when a page is written.
    scratch = Scratch(OsFiles(str(tmp_path)), 0)
    with pytest.raises(MemoryError):
        scratch.empty(1 << 58, np.uint8)
    assert os.listdir(tmp_path) == []
