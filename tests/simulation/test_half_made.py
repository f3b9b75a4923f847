"""A restore, a backup or a replica that is made anew is interrupted at any call: refused, or whole.

The machinery is `tests.simulation.half_made`; the bugs that it has to notice are planted in
`test_invariants.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from storage.errors import DirectoryKindError
from tests.depth import every
from tests.simulation.half_made import (
    adoptions,
    backups,
    fate_of_restore,
    kept,
    restore_into,
    restores,
)
from tests.world.storage.files import SimulatedFiles

RUNS = 1000
pytestmark = pytest.mark.unchecked("hundreds of machines, each of which is checked here")


@pytest.mark.parametrize(("shards", "with_log"), [(1, False), (1, True), (2, False)])
def test_a_restore_that_is_interrupted_is_refused_or_whole(shards: int, with_log: bool) -> None:
    found = restores(every(3, range(RUNS)), kept(shards, with_log=with_log))
    assert min(found["refused"], found["whole"] + found["empty"]) > 3, found


def test_a_restore_that_ends_is_whole_and_is_not_restored_into_again() -> None:
    for shards in (1, 2):
        disk = SimulatedFiles()
        restore_into(disk, kept(shards))
        disk = disk.crash()
        assert fate_of_restore(disk, kept(shards)) == "whole"
        with pytest.raises(DirectoryKindError):
            restore_into(disk, kept(shards))


@pytest.mark.parametrize(
    ("interrupt", "sampled", "fates"),
    [
        (backups, 10, {"nothing", "refused", "whole"}),
        (adoptions, 25, {"aside", "refused until it is finished", "whole"}),
    ],
)
def test_a_backup_and_a_replica(
    interrupt: Callable[[Iterable[int]], Counter[str]], sampled: int, fates: set[str]
) -> None:
    """(`tests/unit/recovery` has every call of them once.)"""
    found = interrupt(every(sampled, range(RUNS)))
    assert found.keys() == fates, found
