"""How a benchmark begins: a directory on a disk, processes that have started, and who tells what is
being done. A terminal shows that with a bar; the log of a build gets a line for each step. And how
each of its cases is run, in a directory of its own.
"""

import multiprocessing
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from load import LoadError, wait_for
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from servers import ROOT, BenchmarkError, disk_directory

from levels.bench import Bench, Size

POOL_PROCESSES = 3
"""As many as publish and receive at once."""
POOL_START_S = 1.5


@contextmanager
def open_bench(parent: Path, size: Size, console: Console) -> Iterator[Bench]:
    """What the cases share, for the server of this source tree, until the block ends."""
    columns = (
        SpinnerColumn(),
        TimeElapsedColumn(),
        BarColumn(20),
        TextColumn("{task.description}"),
    )
    context = multiprocessing.get_context("spawn")
    with (
        disk_directory(parent) as directory,
        ProcessPoolExecutor(POOL_PROCESSES, mp_context=context) as pool,
        Progress(*columns, console=console, transient=True) as progress,
    ):
        task = progress.add_task("begin", total=None)

        def step(what: str) -> None:
            progress.reset(task, start=False, total=None, description=what)
            if not console.is_terminal:
                print(f"{what} …", file=sys.stderr, flush=True)

        def share(done: float) -> None:
            progress.update(task, total=1.0, completed=done)

        # Every process has started, and imported what it needs, before anything is measured.
        list(pool.map(wait_for, [time.monotonic() + POOL_START_S] * POOL_PROCESSES))
        yield Bench(ROOT, directory, pool, size, step, share)


def run_case(bench: Bench, name: str, case: Callable[[Bench], None], console: Console) -> bool:
    """Run one case; a case that fails does not keep the others from running."""
    first = len(bench.figures)
    home, bench.directory = bench.directory, bench.directory / name
    bench.directory.mkdir(parents=True)
    try:
        case(bench)
    except (BenchmarkError, LoadError, OSError) as error:
        console.print(f"[bold red]{name} failed:[/]", escape(str(error)))
        for figure in bench.figures[first:]:
            figure.wrong.append("not checked to the end, since the case failed")
        return False
    finally:
        shutil.rmtree(bench.directory)
        bench.directory = home
    for figure in bench.figures[first:]:
        figure.group = figure.group or name
    return not any(figure.wrong for figure in bench.figures[first:])
