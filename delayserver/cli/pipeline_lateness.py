"""pipeline lateness: how late deliveries are, live, as a table and as lines of JSON.

It goes on until Ctrl-C, or for the time that it is told. Exit status: 0 it ended so, 2 it could not
run, or go on.

Cost: see delayserver.pipeline.reports.live. Threads: Spark's, and those that draw.
"""

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from delayserver.cli.cluster.brokers import KafkaConfigOption
from delayserver.cli.command_options import CommandOptions, with_options
from delayserver.cli.options import option
from delayserver.cli.output import help_text, make_console
from delayserver.cli.pipeline import (
    ConfOption,
    DataDirsOption,
    MasterOption,
    duration_option,
    group_of,
    job,
    roots_of,
)
from delayserver.times import format_time

if TYPE_CHECKING:
    from rich.console import RenderableType

    from delayserver.pipeline.logs.columns import Names
    from delayserver.pipeline.progress import Job
    from delayserver.pipeline.reports.live import WatchedStream

REFRESH_S = 0.5
GRACE_MS = 2_000
"""After its end a window's last deliveries are still on their way through Spark."""
_EXAMPLES = (
    "pipeline lateness --data-dir data",
    "pipeline lateness --data-dir data --by subject --window 10s",
    "pipeline lateness --data-dir data --for 10m --json lateness.jsonl",
    "pipeline lateness --cluster kafka://b1:9092,b2:9092/delays",
)


def register(app: typer.Typer) -> None:
    """Add the command to those of the pipeline."""
    group_of(app).command("lateness", help=help_text(lateness.__doc__, *_EXAMPLES))(lateness)


@dataclass(frozen=True, kw_only=True)
class LatenessOptions(CommandOptions):
    """Options of `pipeline lateness`."""

    data_dir: DataDirsOption = None
    cluster: Annotated[
        str | None,
        option(
            "--cluster",
            "Follow the topics of a cluster instead: kafka://HOST:PORT/NAME. Names "
            "come from --data-dir, or else from the log as far as it reaches back.",
            "URL",
        ),
    ] = None
    kafka_config: KafkaConfigOption = None
    window: Annotated[
        str, typer.Option(metavar="DURATION", help="Deliveries of so long count together.")
    ] = "1m"
    by: Annotated[
        str,
        typer.Option(
            metavar="subscription|subject",
            help="A line for each; subjects cost a look into the schedule log.",
        ),
    ] = "subscription"
    for_: Annotated[str | None, option("--for", "End after so long.", "DURATION")] = None
    json_file: Annotated[
        Path | None,
        option(
            "--json",
            "Write a line of JSON for each window that has ended ('-': print them, and no table).",
            "FILE",
        ),
    ] = None
    master: MasterOption = "local[*]"
    conf: ConfOption = None


@with_options
def lateness(options: LatenessOptions) -> None:
    """Show how late deliveries are while a server makes them, window by window, until Ctrl-C.

    It follows the dispatch log from now on: for each window the deliveries recorded in it, and by
    how much they came after their due times. Nothing is changed. A line of JSON that comes twice
    for one window and name has more deliveries the second time."""
    by = options.by
    if by not in ("subscription", "subject"):
        raise typer.BadParameter("subscription or subject", param_hint="--by")
    if by == "subject" and options.cluster is not None:
        raise typer.BadParameter(
            "the log of settled deliveries has no subjects; only the schedule log of a --data-dir "
            "has them",
            param_hint="--by",
        )
    # Errors that can be found without Spark are reported before it starts.
    window_ms = duration_option(options.window, "--window")
    for_s = None if options.for_ is None else duration_option(options.for_, "--for") / 1000
    prints_json = options.json_file is not None and str(options.json_file) == "-"
    with (
        _output(options.json_file) as output,
        _Screen(by, options.window, quiet=prints_json) as screen,
        job(
            *("lateness", options.master, options.conf),
            as_json=prints_json,
            progress=screen.progress,
        ) as running,
        _watched(running, options, window_ms) as watched,
    ):
        # Ctrl-C is how it ends.
        with contextlib.suppress(KeyboardInterrupt):
            _follow(watched, screen, output, for_s)
        # The last window counts, too, as far as it has come.
        _write(watched, output, sys.maxsize)
        screen.show(watched)


@contextlib.contextmanager
def _watched(running: "Job", options: LatenessOptions, window_ms: int) -> "Iterator[WatchedStream]":
    from delayserver.pipeline.reports import live

    data_dirs = options.data_dir
    if options.cluster is None:
        roots = roots_of(data_dirs)
        with live.watch(running, *roots, by=options.by, window_ms=window_ms) as watched:
            yield watched
        return
    from delayserver.pipeline.topics.names import names_in_directories, names_in_log
    from delayserver.pipeline.topics.source import open_topics

    running.progress("asking the brokers", 0, 0)
    topics = open_topics(options.cluster, options.kafka_config)
    in_log = None if data_dirs else names_in_log(running, topics)

    def names() -> "dict[int, Names]":
        known = in_log or names_in_directories(topics.identity, *(data_dirs or ()))
        return {shard: one.columns(shard) for shard, one in known.items()}

    with live.watch_topics(running, topics, names, window_ms=window_ms) as watched:
        yield watched


def _follow(
    watched: "WatchedStream", screen: "_Screen", output: TextIO | None, for_s: float | None
) -> None:
    began_s = time.monotonic()
    while for_s is None or time.monotonic() - began_s < for_s:
        _write(watched, output, time.time_ns() // 1_000_000 - GRACE_MS)
        screen.show(watched)
        time.sleep(REFRESH_S)
        watched.check()


def _write(watched: "WatchedStream", output: TextIO | None, now_ms: int) -> None:
    """A line of JSON for each window that has ended by then."""
    if output is None:
        return
    for line in watched.windows.news(now_ms):
        document = line.document(watched.by, watched.windows.window_ms)
        print(json.dumps(document, ensure_ascii=False), file=output, flush=True)


@contextlib.contextmanager
def _output(json_file: Path | None) -> Iterator[TextIO | None]:
    if json_file is None:
        yield None
    elif str(json_file) == "-":
        yield sys.stdout
    else:
        with json_file.open("w", encoding="utf-8") as file:
            yield file


class _Screen:
    """A table that is drawn again and again; where nobody looks, once at the end."""

    def __init__(self, by: str, window: str, *, quiet: bool) -> None:
        from rich.live import Live

        self._by = by
        self._title = f"Lateness by {by}, windows of {window}"
        self._console = make_console()
        self._console.quiet = quiet
        self._live = Live(console=self._console, auto_refresh=False)

    def __enter__(self) -> "_Screen":
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._live.update("")  # An error says all.
        self._live.stop()

    def progress(self, what: str, done: int, total: int) -> None:
        """Show the present step before there is a table."""
        self._live.update(f"{what} …", refresh=True)

    def show(self, watched: "WatchedStream") -> None:
        """Draw the table."""
        self._live.update(self._table(watched), refresh=True)

    def _table(self, watched: "WatchedStream") -> "RenderableType":
        from rich.console import Group
        from rich.markup import escape
        from rich.table import Table

        from delayserver.pipeline.reports.lateness import duration

        lines = watched.windows.lines()
        table = Table(title=self._title, title_justify="left", box=None, padding=(0, 2, 0, 0))
        table.add_column("window (UTC)", no_wrap=True)
        table.add_column(self._by, overflow="fold")
        for name in ("delivered", "per s", "p50", "p99", "max"):
            table.add_column(name, justify="right")
        # Nine lines are for the texts around it.
        shown = lines[: max(5, self._console.height - 9)] if self._console.is_terminal else lines
        before_ms = -1
        for line in shown:
            start = format_time(line.start_ms)[11:19]
            per_s = line.count * 1000 / watched.windows.window_ms
            table.add_row(
                start if line.start_ms != before_ms else "",
                escape(line.name),
                f"{line.count:,}",
                f"{per_s:,.1f}",
                *(duration(value) for value in (line.p50_ms, line.p99_ms, line.max_ms)),
            )
            before_ms = line.start_ms
        parts: list[RenderableType] = [table]
        if not lines:
            parts.append("Nothing was delivered yet.")
        if len(shown) < len(lines):
            parts.append(f"… {len(lines) - len(shown)} lines more")
        parts += [f"[red]damaged: {escape(place)}[/red]" for place in watched.damage[-3:]]
        return Group(*parts)
