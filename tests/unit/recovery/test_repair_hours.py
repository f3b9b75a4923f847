"""The files by hour of a directory that is repaired: which are written again, and in which way."""

from __future__ import annotations

import pytest

from delayserver.recovery.repair_hours import HourFiles
from storage.check import Finding, Severity
from storage.files import File
from storage.frame_runs import FrameRun
from storage.hour_log import HourLog
from storage.rows import LogKind
from storage.swap import Swap, finish
from tests.unit.fakes import HOUR, STAMP, START_MS, Disk, dispatch_row
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.files import SimulatedFiles

BACKUP = "repair/1"


class Directory:
    """Three frames of the dispatch log; the second one is damaged."""

    def __init__(self) -> None:
        self.files = SimulatedFiles()
        self.disk = Disk(self.files)
        for seq in (1, 2, 3):
            self.disk.settler.write({HOUR: [dispatch_row(seq)]}, START_MS)
            self.disk.settler.sync()
        self.path = self.disk.dispatch.path(HOUR)
        size = self.file.size() // 3
        self.file.pwrite([b"X"], size + size // 2)
        self.finding = Finding(self.path, size, 2 * size, "", 2, 2, Severity.DAMAGE)
        self.swap = Swap(self.files, BACKUP)

    @property
    def file(self) -> File:
        return self.files.open(self.path)

    def mend(self, *findings: Finding, dry_run: bool = False) -> HourFiles:
        hours = HourFiles(
            self.files, STAMP, self.swap, lambda what, done, total: None, dry_run=dry_run
        )
        hours.mend_dispatch(findings)
        return hours


@pytest.mark.unchecked("a frame is damaged")
def test_a_damaged_file_is_written_again_with_the_rows_that_verify() -> None:
    directory = Directory()
    hours = directory.mend(directory.finding)
    assert hours.buckets(LogKind.DISPATCH) == [HOUR]
    directory.swap.commit()
    finish(directory.files, MemoryCatalog)
    log = HourLog(directory.files, LogKind.DISPATCH, stamp=STAMP)
    runs = [run for run in log.scan_runs(HOUR) if isinstance(run, FrameRun)]
    assert [seq for run in runs for seq in run.rows["seq"].tolist()] == [1, 3]
    assert directory.files.exists(f"{BACKUP}/{directory.path}")


@pytest.mark.unchecked("a frame is damaged")
def test_no_file_is_replaced_without_a_finding_and_in_a_dry_run() -> None:
    directory = Directory()
    directory.mend()
    directory.mend(directory.finding, dry_run=True)
    assert directory.swap.is_empty
