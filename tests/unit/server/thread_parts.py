"""Parts for tests of threads: a loop that takes notes, a clock, a disk that may be full."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tests.unit.fakes import START_MS, Disk
from tests.world.storage.faults import Fault, FaultKind, Faults, FaultyFiles
from tests.world.storage.files import SimulatedFiles


class Loop:
    """Takes the place of the event loop: remembers what was posted, or runs it at once."""

    def __init__(self) -> None:
        self.posted: list[tuple[Any, ...]] = []

    def post(self, function: Any, *arguments: object) -> None:
        self.posted.append((function, *arguments))

    def take(self) -> list[tuple[Any, ...]]:
        posted, self.posted = self.posted, []
        return posted


def faulty_disk() -> Disk:
    return Disk(FaultyFiles(SimulatedFiles(), Faults()))


@contextlib.contextmanager
def no_descriptor(disk: Disk) -> Iterator[None]:
    """As long as this lasts, no file of `faulty_disk` can be opened."""
    faults = disk.files._faults  # type: ignore[attr-defined]
    faults.faults.append(Fault(1, FaultKind.NO_DESCRIPTOR, for_good=True))
    yield
    faults.faults.clear()


class Clock:
    def __init__(self) -> None:
        self.now_ms = START_MS
        self.set_by_ms = 0

    def __call__(self) -> int:
        return self.now_ms + self.set_by_ms

    def stopwatch(self) -> int:
        return self.now_ms - START_MS

    def monotonic(self) -> float:
        return (self.now_ms - START_MS) / 1000


def fatal(error: BaseException) -> None:
    raise AssertionError(f"not expected: {error!r}")
