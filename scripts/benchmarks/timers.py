"""What timers cost: the designs of ``delayserver.timers`` and three ways of doing without them.

    scripts/bench timers [--quick] [--json FILE] [--plot FILE.png] [--sizes 10000,1000000]

With N timers pending, their times spread evenly over an hour, for each design:

add          cost of one ``add`` with a delay from the same hour; N stays within 2 %
cancel       cost of one ``cancel`` of a timer drawn at random from all that are pending
add+cancel   cost of adding a timer and cancelling it at once, as a timeout that is not needed
expire       cost of each timer when the clock runs through the hour; ten fire in each advance
empty hour   one advance over an hour in which nothing is due, N timers waiting in the third hour

The first three are the best of some rounds (the machine may be busy with other things), with the
garbage collector as it is. Every case runs in a process of its own. All designs run with their
default tick, since a wheel whose ticks are walked is only sensible with a coarse one.

The others: ``heapq`` with entries that are marked when cancelled; asyncio's ``call_later`` in a
loop whose time is set by hand, whose cancelled handles also stay in its heap (what sweeping them
out will cost later is not in the figure); and a table in SQLite (WAL, synchronous=NORMAL) that is
polled, each change a transaction of its own, and each due row claimed with a version column, so
that several pollers could run. Of the table only a sample is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import operator
import random
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import Any

from report import Figure, add_options, make_console, new_drawing, parse, write_json
from rich.console import Console
from rich.table import Table

from delayserver.timers import (
    HashedWheelTimer,
    HeapTimer,
    HierarchicalTimer,
    SimpleWheelTimer,
    Timer,
)

HOUR_MS = 3_600_000
# Advanced by so much before anything is measured, with nothing due: the hashed wheel takes 100,000
# of its pending timers into the wheel in each tick.
SETTLE_MS = 2_000
ROUNDS = 7
FIRED_PER_ADVANCE = 10


def callback() -> None:
    """What every timer calls."""


@dataclass
class Subject:
    """One design, ready to be measured. Calls go straight to it, with no wrapper to be paid."""

    arguments: Callable[[int], tuple[Any, ...]]  # of add, for a delay in ms
    add: Callable[..., Any]
    cancel: Callable[[Any], Any]
    advance: Callable[[int], object]  # to a time in ms
    operations: int = 10_000  # in one round, and never more than pending
    fill: Callable[[list[int]], list[Any]] | None = None  # if there is a quicker way than add
    expire_all: bool = True  # or only as many as one round has


@dataclass
class TimerFigures:
    """The result of one case. Times are for one timer, except the last."""

    design: str
    pending: int
    add_ns: float
    cancel_ns: float
    add_cancel_ns: float
    expire_ns: float
    empty_hour_ms: float


# ---- the subjects ----------------------------------------------------------------------------


@contextmanager
def a_timer(make: Callable[..., Timer[Any]]) -> Iterator[Subject]:
    timer = make(start_ms=0)
    yield Subject(
        arguments=lambda delay_ms: (callback, delay_ms),
        add=timer.add,
        cancel=timer.cancel,
        advance=timer.advance_clock,
    )


class Heapq:
    """The usual few lines around ``heapq``."""

    def __init__(self) -> None:
        self._heap: list[list[Any]] = []
        self._numbers = count()
        self._now_ms = 0

    def add(self, callback: Callable[[], object], delay_ms: int) -> list[Any]:
        entry = [self._now_ms + delay_ms, next(self._numbers), callback]
        heappush(self._heap, entry)
        return entry

    def cancel(self, entry: list[Any]) -> None:
        entry[2] = None

    def advance(self, now_ms: int) -> None:
        self._now_ms = now_ms
        heap = self._heap
        while heap and heap[0][0] <= now_ms:
            callback = heappop(heap)[2]
            if callback is not None:
                callback()


@contextmanager
def a_heapq() -> Iterator[Subject]:
    timer = Heapq()
    yield Subject(
        arguments=lambda delay_ms: (callback, delay_ms),
        add=timer.add,
        cancel=timer.cancel,
        advance=timer.advance,
    )


@contextmanager
def an_event_loop() -> Iterator[Subject]:
    loop = asyncio.SelectorEventLoop()
    now_s = 0.0
    loop.time = lambda: now_s  # type: ignore[method-assign]

    def advance(now_ms: int) -> None:
        nonlocal now_s
        now_s = now_ms / 1000
        # One pass of the loop, without the task that run_until_complete would make.
        loop.call_soon(loop.stop)
        loop.run_forever()

    yield Subject(
        arguments=lambda delay_ms: (delay_ms / 1000, callback),
        add=loop.call_later,
        cancel=operator.methodcaller("cancel"),
        advance=advance,
    )
    loop.close()


class PolledTable:
    """Messages in a table, claimed with a version column. ``add`` returns the row's id."""

    BATCH = 100

    def __init__(self, path: Path) -> None:
        self._connection = connection = sqlite3.connect(path, isolation_level=None)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(
            "CREATE TABLE timer (id INTEGER PRIMARY KEY, due_ms INTEGER NOT NULL,"
            " state TEXT NOT NULL DEFAULT 'waiting', version INTEGER NOT NULL DEFAULT 0)"
        )
        connection.execute("CREATE INDEX due ON timer (due_ms) WHERE state = 'waiting'")
        self._now_ms = 0

    def fill(self, delays_ms: list[int]) -> list[int]:
        self._connection.execute("BEGIN")
        self._connection.executemany(
            "INSERT INTO timer (due_ms) VALUES (?)", ((delay_ms,) for delay_ms in delays_ms)
        )
        self._connection.execute("COMMIT")
        return list(range(1, len(delays_ms) + 1))

    def add(self, delay_ms: int) -> int | None:
        due_ms = self._now_ms + delay_ms
        return self._connection.execute(
            "INSERT INTO timer (due_ms) VALUES (?)", (due_ms,)
        ).lastrowid

    def cancel(self, row: int) -> bool:
        return self._settle(row, "cancelled")

    def advance(self, now_ms: int) -> None:
        """Poll until nothing is due: read a batch, claim each row if nobody else has."""
        self._now_ms = now_ms
        while True:
            due = self._connection.execute(
                "SELECT id, version FROM timer WHERE state = 'waiting' AND due_ms <= ?"
                " ORDER BY due_ms LIMIT ?",
                (now_ms, self.BATCH),
            ).fetchall()
            for row, version in due:
                if self._settle(row, "fired", version):
                    callback()
            if len(due) < self.BATCH:
                return

    def _settle(self, row: int, state: str, version: int = 0) -> bool:
        changed = self._connection.execute(
            "UPDATE timer SET state = ?, version = version + 1"
            " WHERE id = ? AND version = ? AND state = 'waiting'",
            (state, row, version),
        ).rowcount
        return changed == 1

    def close(self) -> None:
        self._connection.close()


@contextmanager
def a_polled_table() -> Iterator[Subject]:
    with tempfile.TemporaryDirectory() as directory:
        table = PolledTable(Path(directory, "timers.sqlite"))
        yield Subject(
            arguments=lambda delay_ms: (delay_ms,),
            add=table.add,
            cancel=table.cancel,
            advance=table.advance,
            operations=300,
            fill=table.fill,
            expire_all=False,
        )
        table.close()


DESIGNS: dict[str, Callable[[], AbstractContextManager[Subject]]] = {
    "SimpleWheelTimer (500 ms)": partial(a_timer, SimpleWheelTimer),
    "HashedWheelTimer (100 ms)": partial(a_timer, HashedWheelTimer),
    "HierarchicalTimer (1 ms)": partial(a_timer, HierarchicalTimer),
    "HeapTimer": partial(a_timer, HeapTimer),
    "heapq": a_heapq,
    "asyncio call_later": an_event_loop,
    "SQLite, polled": a_polled_table,
}


# ---- measuring -------------------------------------------------------------------------------


def delays_ms(chance: random.Random, number: int, first_hour: int = 0) -> list[int]:
    begin_ms = SETTLE_MS + first_hour * HOUR_MS + 1
    return [begin_ms + chance.randrange(HOUR_MS) for _ in range(number)]


def fill(subject: Subject, delays_ms: list[int]) -> list[Any]:
    if subject.fill is not None:
        return subject.fill(delays_ms)
    return [subject.add(*subject.arguments(delay_ms)) for delay_ms in delays_ms]


def measure(design: str, pending: int) -> TimerFigures:
    """All figures of one case; called in a process that has done nothing else."""
    chance = random.Random(pending)
    with DESIGNS[design]() as subject:
        fill(subject, delays_ms(chance, pending, first_hour=2))
        subject.advance(SETTLE_MS)
        gc.collect()
        begun_ns = time.perf_counter_ns()
        subject.advance(SETTLE_MS + HOUR_MS)
        empty_hour_ms = (time.perf_counter_ns() - begun_ns) / 1e6
    with DESIGNS[design]() as subject:
        handles = fill(subject, delays_ms(chance, pending))
        subject.advance(SETTLE_MS)
        add_ns, cancel_ns, add_cancel_ns = measure_churn(subject, handles, chance)
        del handles
        gc.collect()
        expire_ns = measure_expire(subject, pending)
    return TimerFigures(design, pending, add_ns, cancel_ns, add_cancel_ns, expire_ns, empty_hour_ms)


def measure_churn(
    subject: Subject, handles: list[Any], chance: random.Random
) -> tuple[float, float, float]:
    """Nanoseconds for an add, a cancel, and an add with its cancel."""
    add, cancel = subject.add, subject.cancel
    operations = min(subject.operations, len(handles) // 50)
    best_ns = [float("inf")] * 3
    for _ in range(ROUNDS):
        adds = [subject.arguments(delay_ms) for delay_ms in delays_ms(chance, operations)]
        chosen = chance.sample(range(len(handles)), operations)
        victims = [handles[index] for index in chosen]

        times_ns = [time.perf_counter_ns()]
        added = [add(*arguments) for arguments in adds]
        times_ns.append(time.perf_counter_ns())
        for handle in victims:
            cancel(handle)
        times_ns.append(time.perf_counter_ns())
        for arguments in adds:
            cancel(add(*arguments))
        times_ns.append(time.perf_counter_ns())

        for index, handle in zip(chosen, added, strict=True):
            handles[index] = handle
        for step in range(3):
            taken_ns = (times_ns[step + 1] - times_ns[step]) / operations
            best_ns[step] = min(best_ns[step], taken_ns)
    return best_ns[0], best_ns[1], best_ns[2]


def measure_expire(subject: Subject, pending: int) -> float:
    """Nanoseconds for each timer that fires. The table shows its figure in a part of the hour."""
    step_ms = max(1, HOUR_MS * FIRED_PER_ADVANCE // pending)
    fired = pending if subject.expire_all else subject.operations
    until_ms = SETTLE_MS + HOUR_MS * fired // pending
    begun_ns = time.perf_counter_ns()
    for now_ms in range(SETTLE_MS + step_ms, until_ms + step_ms, step_ms):
        subject.advance(now_ms)
    return (time.perf_counter_ns() - begun_ns) / fired


# ---- reporting -------------------------------------------------------------------------------


def show(rows: list[TimerFigures], console: Console) -> None:
    table = Table(title="One timer, in ns; the empty hour in ms")
    table.add_column("design", no_wrap=True)
    for name in ("pending", "add", "cancel", "add+cancel", "expire", "empty hour"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.design,
            f"{row.pending:,}",
            *(f"{x:,.0f}" for x in (row.add_ns, row.cancel_ns, row.add_cancel_ns, row.expire_ns)),
            f"{row.empty_hour_ms:,.3f}",
            end_section=row.pending == rows[-1].pending,
        )
    console.print(table)


def figures(rows: list[TimerFigures]) -> list[Figure]:
    """One for each case: its add+cancel, and the others beside it; then the ratios."""
    found = []
    for row in rows:
        figure = Figure(
            f"{row.design}, {row.pending:,} pending: add+cancel", row.add_cancel_ns, "ns"
        )
        figure.note = (
            f"add {row.add_ns:,.0f} ns, cancel at random {row.cancel_ns:,.0f} ns, "
            f"expire {row.expire_ns:,.0f} ns, empty hour {row.empty_hour_ms:,.3f} ms"
        )
        found.append(figure)
    return found + [Figure(case, ratio, "×") for case, ratio in ratios(rows).items()]


def ratios(rows: list[TimerFigures]) -> dict[str, float]:
    """How the hierarchical wheel grows with the timers, and how it stands beside asyncio."""
    by_case = {(row.design.split(maxsplit=1)[0], row.pending): row for row in rows}
    few, many = min(row.pending for row in rows), max(row.pending for row in rows)
    wheel, asyncio_ = by_case["HierarchicalTimer", many], by_case["asyncio", many]
    wheel_few = by_case["HierarchicalTimer", few]
    return {
        f"hierarchical add+cancel, {many:,} / {few:,} pending": wheel.add_cancel_ns
        / wheel_few.add_cancel_ns,
        f"hierarchical add, then cancel at random, {many:,} / {few:,} pending": (
            (wheel.add_ns + wheel.cancel_ns) / (wheel_few.add_ns + wheel_few.cancel_ns)
        ),
        f"hierarchical / asyncio add+cancel, {many:,} pending": wheel.add_cancel_ns
        / asyncio_.add_cancel_ns,
        f"hierarchical / asyncio expire, {many:,} pending": wheel.expire_ns / asyncio_.expire_ns,
    }


def plot(rows: list[TimerFigures], path: Path) -> None:
    steps = {
        "add": "add_ns",
        "cancel at random": "cancel_ns",
        "add + cancel": "add_cancel_ns",
        "expire": "expire_ns",
    }
    figure, panels = new_drawing(len(steps), figsize=(15, 5), sharey=True)
    for panel, (title, name) in zip(panels, steps.items(), strict=True):
        for design in DESIGNS:
            own = [row for row in rows if row.design == design]
            panel.plot(
                [row.pending for row in own],
                [getattr(row, name) for row in own],
                marker="o",
                label=design,
                linewidth=2.5 if design.startswith("Hierarchical") else 1.2,
            )
        panel.set(title=title, xscale="log", yscale="log", xlabel="pending timers")
        panel.grid(True, which="both", alpha=0.25)
    panels[0].set_ylabel("ns for each timer")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(DESIGNS), frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/bench timers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, "them, log-log, into this PNG file")
    parser.add_argument("--sizes", default="10000,100000,1000000", help="pending timers, by commas")
    options = parse(parser, sizes="1000,2000")
    sizes = sorted(int(size) for size in options.sizes.split(","))
    console = make_console()

    rows = []
    # A process for each case: none runs in the memory that another one has left behind.
    with ProcessPoolExecutor(
        1,
        mp_context=multiprocessing.get_context("spawn"),
        max_tasks_per_child=None if options.quick else 1,
    ) as pool:
        for design in DESIGNS:
            for pending in sizes:
                console.print(f"{design}, {pending:,} pending …", style="dim")
                rows.append(pool.submit(measure, design, pending).result())
    show(rows, console)
    for name, ratio in ratios(rows).items():
        console.print(f"{name}: {ratio:.2f}")

    if options.json is not None:
        write_json(options.json, "timers", figures(rows))
    if options.plot is not None:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
