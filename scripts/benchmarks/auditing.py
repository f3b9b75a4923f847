"""The audit's part of `scripts/bench pipeline`: what it takes of directories of several sizes, and
once more when an hour was settled since.

Each directory is made with the server's own parts: hours of the same length, of which the last is
open, 5 % of the messages cancelled, and all others of the settled hours delivered. It is deleted
when it was measured. The session is warm: its workers have audited a small directory.

Cost: about 3 µs per message to make, 160 bytes on the disk. Threads: one, and one that watches
memory.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from directories import CATALOG_MAX_BYTES
from pyspark.sql import SparkSession
from report import Figure

from delayserver.pipeline.audits.audit import Audit, audit_here
from delayserver.pipeline.audits.on_spark import audit
from delayserver.pipeline.audits.verdicts import Verdicts
from delayserver.pipeline.progress import Job
from delayserver.records.tables import hour_key, read_hours
from storage.catalog import LmdbCatalog, Table

HOURS = 24
SECONDS_MAX = {2_000_000: 4.0, 10_000_000: 10.0}
MEMORY_MAX_BYTES = 2 * 2**30
SPREAD_MAX = 1.2
"""A message of the largest directory may take so many times what one of LINEAR_ROWS takes."""
LINEAR_ROWS = 10_000_000
FIXED_S = 1.0
"""What an audit takes however little there is to be judged: a job of Spark, and the catalog."""
ROUNDS = 3
_WARM_ROWS = 20_000
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")

Make = Callable[[Path, int, int], None]
"""Makes a directory of so many messages in so many hours."""


def measure_audits(
    spark: SparkSession, root: Path, sizes: Sequence[int], make: Make
) -> list[Figure]:
    """A figure for each size, how it grows, and a second audit of the last size but those that are
    only for growth."""
    warm = root / "warm"
    make(warm, min(_WARM_ROWS, *sizes), HOURS)
    for _ in range(2):
        audit(Job(spark), str(warm))
    figures, seconds = [], dict[int, float]()
    for size in sorted(sizes):
        path = root / f"audit-{size}"
        make(path, size, HOURS)
        figure, seconds[size] = _whole(spark, path, size)
        figures.append(figure)
        if size == max((one for one in sizes if one <= LINEAR_ROWS), default=min(sizes)):
            figures += [_here(path, size), _again(spark, path, size, root / "verdicts")]
        shutil.rmtree(path)
    if len(seconds) > 1:
        figures.append(_growth(seconds))
    return figures


def _whole(spark: SparkSession, path: Path, size: int) -> tuple[Figure, float]:
    """The best of some audits, and the most memory of all of them."""
    best, cpu_s, most_bytes = float("inf"), float("inf"), 0
    for _ in range(ROUNDS):
        began_s = cpu_seconds()
        with watched_memory() as most:
            found = audit(Job(spark), str(path))
        best, cpu_s = min(best, found.took_s), min(cpu_s, cpu_seconds() - began_s)
        most_bytes = max(most_bytes, most[-1])
    figure = Figure(f"audit {_millions(size)}", size / best, "messages/s")
    figure.cpu_us = cpu_s / size * 1e6
    figure.note = f"{best:.2f} s, {cpu_s:.2f} s of processor, {most_bytes / 2**30:.2f} GB"
    _expect(figure, found, size)
    if size in SECONDS_MAX:
        figure.demand(f"≤ {SECONDS_MAX[size]:g} s", best <= SECONDS_MAX[size])
    figure.demand("≤ 2 GB", most_bytes <= MEMORY_MAX_BYTES)
    return figure, best


def _here(path: Path, size: int) -> Figure:
    """The same question in one process, without Spark."""
    began_s = time.process_time()
    found = audit_here(str(path))
    cpu_s = time.process_time() - began_s
    figure = Figure(f"audit {_millions(size)} in one process", size / found.took_s, "messages/s")
    figure.cpu_us = cpu_s / size * 1e6
    figure.note = f"check --settled: {found.took_s:.2f} s, {cpu_s:.2f} s of processor"
    _expect(figure, found, size)
    return figure


def _again(spark: SparkSession, path: Path, size: int, kept: Path) -> Figure:
    """An audit when one more hour was settled since the last one with the same verdicts."""
    last = _reopen(path)
    first = audit(Job(spark), str(path), verdicts=Verdicts(kept))
    _retire(path, last)
    began_s = cpu_seconds()
    found = audit(Job(spark), str(path), verdicts=Verdicts(kept))
    cpu_s = cpu_seconds() - began_s
    shutil.rmtree(kept)
    figure = Figure(f"audit {_millions(size)} again, an hour later", found.took_s, "s")
    figure.note = (
        f"the first {first.took_s:.2f} s; {found.hours_judged} hours judged, {found.hours_kept} "
        f"kept; {cpu_s:.2f} s of processor"
    )
    _expect(figure, found, size)
    # The hour, and the one that is open.
    figure.expect("hours judged", found.hours_judged, 2)
    most_s = FIXED_S + 2 * found.hours_judged * first.took_s / HOURS
    figure.demand(f"≤ {FIXED_S:g} s and twice its share", found.took_s <= most_s)
    return figure


def _growth(seconds: dict[int, float]) -> Figure:
    """What a message of the largest directory takes, in multiples of one of LINEAR_ROWS."""
    largest = max(seconds)
    base = LINEAR_ROWS if LINEAR_ROWS in seconds and largest > LINEAR_ROWS else min(seconds)
    ratio = (seconds[largest] / largest) / (seconds[base] / base)
    title = f"audit growth from {_millions(base)} to {_millions(largest)}"
    figure = Figure(title, ratio, "× per message")
    figure.note = ", ".join(f"{_millions(size)} {took:.2f} s" for size, took in seconds.items())
    figure.demand(f"≤ {SPREAD_MAX:g}", ratio <= SPREAD_MAX)
    return figure


def _expect(figure: Figure, found: Audit, size: int) -> None:
    figure.expect("accepted", found.messages["accepted"], size)
    figure.expect("violations", sum(found.violations.values()), 0)


def _millions(size: int) -> str:
    return f"{size / 1e6:g} M"


# ── an hour that is settled later ──────────────────────────────────────────────────────────────


def _reopen(path: Path) -> int:
    """Let the newest settled hour be open again; which it is."""
    with _catalog(path) as catalog:
        hour = max(hour for hour, state in read_hours(catalog).items() if state.retired_ms)
    _say_retired(path, hour, 0)
    return hour


def _retire(path: Path, hour: int) -> None:
    _say_retired(path, hour, 1)


def _say_retired(path: Path, hour: int, retired_ms: int) -> None:
    with _catalog(path) as catalog:
        state = replace(read_hours(catalog)[hour], retired_ms=retired_ms)
        catalog.commit({Table.HOURS: [(hour_key(hour), state.pack())]})


def _catalog(path: Path) -> closing[LmdbCatalog]:
    return closing(LmdbCatalog(str(path / "catalog"), max_bytes=CATALOG_MAX_BYTES))


# ── memory and processor time ──────────────────────────────────────────────────────────────────


def _family() -> list[int]:
    """This process and everything below it."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sorted(ours)


def memory_bytes() -> int:
    """What this process and everything below it hold for themselves."""
    held = 0
    for pid in _family():
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            lines = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
            held += int(lines.get("RssAnon", "0").split()[0]) * 1024
        except (OSError, ValueError):
            continue
    return held


def cpu_seconds() -> float:
    """Processor time of this process and of everything below it, also of what has ended there."""
    ticks = 0
    for pid in _family():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
        except (OSError, ValueError):
            continue
    return ticks * _TICK_S


@contextmanager
def watched_memory() -> Iterator[list[int]]:
    """The most that was held within the context, as the last item."""
    most, ended = [memory_bytes()], threading.Event()

    def watch() -> None:
        while not ended.wait(0.2):
            most.append(max(most[-1], memory_bytes()))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        ended.set()
        thread.join()
