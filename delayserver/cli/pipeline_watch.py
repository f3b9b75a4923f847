"""pipeline watch: a verdict on each hour of a cluster once it is over, from its brokers' topics.

Exit status: 0 it ended, and all that was told is clean, 1 something was found, 2 it could not run,
or go on.

Cost: see delayserver.pipeline.topics. Threads: Spark's, and this one, which prints.
"""

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from delayserver.cli.cluster.brokers import KafkaConfigOption
from delayserver.cli.options import option
from delayserver.cli.output import help_text, make_console
from delayserver.cli.pipeline import (
    FOUND_STATUS,
    ConfOption,
    DataDirsOption,
    MasterOption,
    TopicsOption,
    duration_option,
    group_of,
    is_stdout,
    job,
)

if TYPE_CHECKING:
    from delayserver.pipeline.topics.following import FollowedTopics
    from delayserver.pipeline.topics.pieces import DamagedRecord
    from delayserver.pipeline.topics.verdicts import HourVerdict

LOOK_S = 0.5
EXAMPLES_SHOWN = 3
_URL = "kafka://b1:9092,b2:9092/delays"
_EXAMPLES = (
    f"pipeline watch --cluster {_URL} --state watch",
    f"pipeline watch --cluster {_URL} --state watch --once --json -",
)
_COLUMNS = ("hour (UTC)", "entries", "delivered", "cancelled", "dead", "waiting", "p99", "verdict")
_WIDTHS = (17, 12, 12, 12, 8, 10, 9, 0)


def register(app: typer.Typer) -> None:
    """Add the command to those of the pipeline."""
    group_of(app).command("watch", help=help_text(watch.__doc__, *_EXAMPLES))(watch)


def watch(
    cluster: TopicsOption,
    state: Annotated[
        Path,
        typer.Option(
            metavar="DIRECTORY",
            help="Keeps the rows that are not judged yet, on this machine; a watch that is started "
            "again with it goes on.",
        ),
    ],
    once: Annotated[
        bool, typer.Option("--once", help="End when all is read that there is now.")
    ] = False,
    for_: Annotated[str | None, option("--for", "End after so long.", "DURATION")] = None,
    patience: Annotated[
        str,
        typer.Option(
            metavar="DURATION",
            help="An hour is told so long after its end though some of it waits.",
        ),
    ] = "1h",
    json_file: Annotated[
        Path | None,
        option(
            "--json", "Add a line of JSON for each verdict ('-': print them, and no table).", "FILE"
        ),
    ] = None,
    data_dir: DataDirsOption = None,
    kafka_config: KafkaConfigOption = None,
    master: MasterOption = "local[*]",
    conf: ConfOption = None,
) -> None:
    """Judge each hour of a cluster when it is over, from the topics of its brokers, until Ctrl-C.

    It is the audit as a stream: every message accepted from its start on is settled exactly once,
    in time, by its own receivers. Nothing is changed. An hour is told when none of its messages
    waits, or when one waits for longer than --patience. If a log does not reach back to its
    beginning, the subscriptions are taken from --data-dir, the directory of a node or an export.
    Status 1: something was found. It needs Spark's Kafka source, see docs/spark.md."""
    patience_ms = duration_option(patience, "--patience")
    for_s = None if for_ is None else duration_option(for_, "--for") / 1000
    quiet = is_stdout(json_file)
    with _output(json_file) as output, job("watch", master, conf, as_json=quiet) as running:
        from delayserver.pipeline.topics.following import follow
        from delayserver.pipeline.topics.names import names_in_directories
        from delayserver.pipeline.topics.source import open_topics

        running.progress("asking the brokers", 0, 0)
        topics = open_topics(cluster, kafka_config)
        known = names_in_directories(topics.identity, *(data_dir or ()))
        running.progress("reading the topics", 0, 0)
        with follow(running, topics, state, known, once=once, patience_ms=patience_ms) as followed:
            teller = _Teller(output, quiet=quiet)
            # Ctrl-C is how it ends.
            with contextlib.suppress(KeyboardInterrupt):
                _follow(followed, teller, for_s)
            teller.tell(followed)
            teller.end(followed)
    if teller.has_found:
        raise typer.Exit(FOUND_STATUS)


def _follow(followed: "FollowedTopics", teller: "_Teller", for_s: float | None) -> None:
    began_s = time.monotonic()
    while not followed.has_ended() and (for_s is None or time.monotonic() - began_s < for_s):
        teller.tell(followed)
        time.sleep(LOOK_S)


@contextlib.contextmanager
def _output(json_file: Path | None) -> Iterator[TextIO | None]:
    if json_file is None:
        yield None
    elif is_stdout(json_file):
        yield sys.stdout
    else:
        with json_file.open("a", encoding="utf-8") as file:
            yield file


class _Teller:
    """Tells verdicts as they come: to people a line each, to programs a line of JSON."""

    def __init__(self, output: TextIO | None, *, quiet: bool) -> None:
        self.has_found = False
        self._output = output
        self._console = None if quiet else make_console()
        self._has_head = False

    def tell(self, followed: "FollowedTopics") -> None:
        """All that is news."""
        from delayserver.pipeline.topics.pieces import DamagedRecord

        for one in followed.news():
            if isinstance(one, DamagedRecord):
                self._tell_damage(one)
            else:
                self._tell(one)

    def end(self, followed: "FollowedTopics") -> None:
        """Print the hours that are left open."""
        from delayserver.times import format_time
        from storage.rows import HOUR_MS

        hours = [format_time(hour * HOUR_MS)[:16] for hour in followed.watch.open_hours]
        if hours:
            self._print(f"Over, and not closed: {', '.join(hours)}")
        if followed.watch.late:
            self._print(f"Rows that came too late to be judged: {followed.watch.late:,}")

    def _tell_damage(self, damage: "DamagedRecord") -> None:
        self.has_found = True
        place = {"log": damage.log, "offset": damage.offset, "reason": damage.reason}
        self._write({"damaged": place})
        self._print(f"[red]damaged[/]: {damage.log} at offset {damage.offset}: {damage.reason}")

    def _tell(self, verdict: "HourVerdict") -> None:
        from rich.markup import escape

        from delayserver.pipeline.reports.lateness import duration

        self.has_found |= not verdict.is_clean
        document = verdict.document()
        self._write(document)
        if not self._has_head:
            self._has_head = True
            self._print(_row(_COLUMNS))
        p99_ms = verdict.line["p99_ms"]
        numbers = ("entries", "delivered", "cancelled", "dead", "pending")
        cells = [
            document["hour"][:16].replace("T", " "),
            *(f"{document[name]:,}" for name in numbers),
            "–" if p99_ms is None else duration(p99_ms),
        ]
        colour = "green" if verdict.is_clean else "bold red"
        self._print(f"{_row(cells)}[{colour}]{escape(verdict.said())}[/]")
        for one in verdict.examples[:EXAMPLES_SHOWN]:
            self._print(
                f"  [red]{one['problem']}[/]: shard {one['shard']}, seq {one['seq']} of "
                f"{escape(one['subject'] or 'an unknown subject')}, due {one['due']}, "
                f"subscription {escape(one['subscription'] or '–')}"
            )

    def _write(self, document: dict[str, object]) -> None:
        if self._output is not None:
            print(json.dumps(document, ensure_ascii=False), file=self._output, flush=True)

    def _print(self, text: str) -> None:
        if self._console is not None:
            self._console.print(text, soft_wrap=True)


def _row(cells: "list[str] | tuple[str, ...]") -> str:
    """Cells in columns, the first to the left."""
    first, *rest = zip(cells, _WIDTHS, strict=False)
    return (
        first[0].ljust(first[1])
        + "".join(f"  {cell}" if not width else cell.rjust(width) for cell, width in rest)
        + ("" if len(cells) == len(_WIDTHS) else "  ")
    )
