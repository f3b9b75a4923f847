"""pipeline: jobs on Apache Spark over all files of a data directory.

`job` is their common frame: a session, a bar on standard error, and an exit status for errors.
pyspark, an extra, is imported when a job runs.

Exit status: 0 done, 1 the job found something wrong, 2 it could not run.

Cost: 3–6 s for the start of Spark. Threads: see delayserver.pipeline.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from delayserver.cli.operations import BodiesOption, SinceOption, VerdictsOption, since_option
from delayserver.cli.options import option
from delayserver.cli.output import help_text, make_console, print_json, progress_bar
from delayserver.cli.session import CannotRun, error_exit
from delayserver.errors import DelayServerError, InputError
from delayserver.times import parse_duration_ms
from storage.errors import StorageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from delayserver.pipeline.progress import Job, Progress

FOUND_STATUS = 1
HELP = """Jobs on Apache Spark: they look at millions of messages at once.

They read the files of a data directory, also beside a running server. Spark needs Java 17 or
newer, and the extra `spark` of this package."""
_GROUP = "pipeline"
_RAISED = re.compile(r"^Traceback .*\n(?:[ \t].*\n|\n)+(\S.*)$", re.MULTILINE)
"""Finds, in Spark's message, the error that ended a worker, behind its stack trace."""

DataDirsOption = Annotated[
    list[str] | None,
    option(
        "--data-dir",
        "The directory that the server was started with, or the URL of an export; repeat it"
        " where the shards are in several. Also DELAYSERVER_DATA_DIR; data, if nothing is "
        "said.",
        "DIRECTORY",
    ),
]
TopicsOption = Annotated[
    str,
    typer.Option(
        "--cluster",
        metavar="URL",
        help="Brokers and name of a cluster: kafka://HOST:PORT[,HOST:PORT...]/NAME.".replace(
            "[", r"\["
        ),
        show_default=False,
    ),
]
MasterOption = Annotated[
    str,
    typer.Option(
        "--master",
        metavar="MASTER",
        envvar="DELAYSERVER_SPARK_MASTER",
        help="Where it runs: local[*], spark://host:7077, yarn, or Spark Connect (sc://host).",
        rich_help_panel="Spark",
    ),
]
ConfOption = Annotated[
    list[str] | None,
    option(
        "--conf",
        "A setting of Spark, such as spark.driver.memory=4g; may be repeated.",
        "NAME=VALUE",
        rich_help_panel="Spark",
    ),
]


ServerOption = Annotated[
    str,
    typer.Option("--server", metavar="URL", envvar="DELAYSERVER_URL", help="Where the server is."),
]
JsonFileOption = Annotated[
    Path | None, option("--json", "Write it as JSON ('-': print it).", "FILE")
]
HtmlOption = Annotated[Path | None, option("--html", "Write one HTML page with drawings.", "FILE")]
ParquetOption = Annotated[
    str | None,
    option(
        "--parquet", "Write its tables as Parquet, to any place that Spark can write to.", "DIR"
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    group = group_of(app)
    examples: tuple[str, ...] = (
        "pipeline audit --data-dir data",
        "pipeline audit --data-dir data --html audit.html --json audit.json",
        "pipeline audit --data-dir data --verdicts verdicts",
    )
    group.command("audit", help=help_text(audit.__doc__, *examples))(audit)
    examples = (
        "pipeline forecast --data-dir data",
        "pipeline forecast --days 30 --html coming.html",
    )
    group.command("forecast", help=help_text(forecast.__doc__, *examples))(forecast)


def group_of(app: typer.Typer) -> typer.Typer:
    """The commands of the pipeline, to which several modules add theirs."""
    for known in app.registered_groups:
        if known.name == _GROUP and known.typer_instance is not None:
            return known.typer_instance
    group = typer.Typer(help=help_text(HELP), no_args_is_help=True)
    app.add_typer(group, name=_GROUP)
    group.callback()(_root)
    return group


def _root() -> None:
    pass


def audit(
    data_dir: DataDirsOption = None,
    json_file: JsonFileOption = None,
    html: HtmlOption = None,
    parquet: ParquetOption = None,
    since: SinceOption = None,
    bodies: BodiesOption = False,
    verdicts: VerdictsOption = None,
    master: MasterOption = "local[*]",
    conf: ConfOption = None,
) -> None:
    """Prove over all files that every accepted message was settled exactly once, and how late.

    Nothing is changed; a server may be running. Status 0: clean. 1: something is missing,
    repeated, early, damaged, or contradicts itself. 2: it could not run. `delayserver check
    --settled` asks the same without Spark."""
    quiet = is_stdout(json_file)
    since_ms = since_option(since)
    with job("audit", master, conf, as_json=quiet) as running:
        from delayserver.pipeline.audits import on_spark, telling
        from delayserver.pipeline.audits.verdicts import Verdicts

        found = on_spark.audit(
            running,
            *roots_of(data_dir),
            since_ms=since_ms,
            with_bodies=bodies,
            verdicts=None if verdicts is None else Verdicts(verdicts),
        )
        if parquet is not None:
            running.progress("writing Parquet", 0, 0)
            on_spark.write_parquet(running.spark, found, parquet)
        write_document(json_file, telling.document(found))
        if html is not None:
            from delayserver.pipeline.reports import audit_report

            html.write_text(audit_report.page(found))
        if not quiet:
            lines = telling.lines(found)
    if not quiet:
        print_parts(lines)
    if not found.is_clean:
        raise typer.Exit(FOUND_STATUS)


def forecast(
    data_dir: DataDirsOption = None,
    days: Annotated[int, typer.Option(min=1, max=366, help="By the minute for so many days.")] = 7,
    json_file: JsonFileOption = None,
    html: HtmlOption = None,
    master: MasterOption = "local[*]",
    conf: ConfOption = None,
) -> None:
    """Show how many messages fall due when, which minutes are hot, and the memory of each hour.

    Nothing is changed; a server may be running."""
    quiet = is_stdout(json_file)
    with job("forecast", master, conf, as_json=quiet) as running:
        from delayserver.pipeline.reports import forecast as forecasts
        from delayserver.pipeline.reports import forecast_report

        found = forecasts.forecast(running, *roots_of(data_dir), days=days)
        write_document(json_file, forecast_report.document(found))
        if html is not None:
            html.write_text(forecast_report.page(found))
        lines = forecast_report.lines(found)
    if not quiet:
        print_parts(lines)


def roots_of(data_dirs: list[str] | None) -> list[str]:
    """Where to read. The variable is not an option's: its value would be split at blanks."""
    return data_dirs or [os.environ.get("DELAYSERVER_DATA_DIR", "data")]


def duration_option(text: str, option: str) -> int:
    """Milliseconds. Raises typer.BadParameter."""
    try:
        duration_ms = parse_duration_ms(text)
    except InputError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error
    if duration_ms == 0:
        raise typer.BadParameter("longer than nothing", param_hint=option)
    return duration_ms


def is_stdout(json_file: Path | None) -> bool:
    """Whether the document is all that is printed."""
    return json_file is not None and str(json_file) == "-"


def write_document(json_file: Path | None, document: dict[str, Any]) -> None:
    """Write the JSON document of a job, if one is wanted."""
    if json_file is None:
        return
    if is_stdout(json_file):
        print_json(document)
    else:
        json_file.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n")


def print_parts(parts: "Iterable[RenderableType]") -> None:
    """Print the findings of a job, for people."""
    make_console().print(*parts, sep="\n")


@contextlib.contextmanager
def job(
    name: str,
    master: str,
    conf: list[str] | None,
    *,
    as_json: bool = False,
    progress: "Progress | None" = None,
) -> "Iterator[Job]":
    """A session and a progress bar, unless there is another place for the `progress`. An error is
    printed as a sentence, with exit status 2."""
    settings = _settings(conf)
    with job_errors(as_json=as_json):
        from delayserver.pipeline.progress import Job
        from delayserver.pipeline.session import open_session

        bar = (
            progress_bar("", quiet=as_json)
            if progress is None
            else contextlib.nullcontext(progress)
        )
        with bar as show:
            show("starting Spark", 0, 0)
            with open_session(name, master=master, settings=settings) as spark:
                yield Job(spark, show)


@contextlib.contextmanager
def job_errors(*, as_json: bool) -> Iterator[None]:
    """Print an error as a sentence, with exit status 2."""
    ours = (DelayServerError, StorageError, OSError)
    with error_exit(as_json=as_json, also=ours, kind=CannotRun), _spark_errors():
        yield


@contextlib.contextmanager
def _spark_errors() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("pyspark", "pyarrow", "pandas", "py4j"):
            raise
        text = f"The pipeline needs {error.name}: install the extra `spark` (see docs/spark.md)"
        raise CannotRun(text) from error
    except Exception as error:
        # pyspark may be missing, so its errors are known by the module of their class.
        if not type(error).__module__.startswith(("pyspark.", "py4j.")):
            raise
        raise CannotRun(_sentence(str(error))) from error


def _sentence(text: str) -> str:
    """Spark's message without stack traces; an error of ours keeps our own words."""
    raised = _RAISED.findall(text)
    if raised:
        name, _, said = raised[-1].partition(": ")
        if name.startswith(("delayserver.", "storage.")):
            return str(said)
        if name == "ModuleNotFoundError":
            return (
                f"executors have no such package: {said}. Nothing is shipped to them: install this "
                "one in the Python that they run (see docs/spark.md)"
            )
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("at ")]
    return "\n".join(["Spark failed: " + "".join(lines[:1]), *lines[1:20]])


def _settings(conf: list[str] | None) -> dict[str, str]:
    """`["spark.driver.memory=4g"]` as a dictionary."""
    settings = {}
    for setting in conf or ():
        name, equals, value = setting.partition("=")
        if not equals or not name.startswith("spark."):
            raise typer.BadParameter(
                f"{setting!r} is not like spark.driver.memory=4g", param_hint="--conf"
            )
        settings[name] = value
    return settings
