"""pipeline: jobs on Apache Spark over all files of a data directory.

`job` is what they share: a session, a bar on standard error, and an exit status for what goes
wrong. pyspark, an extra, is imported when a job runs.

Exit status: 0 done, 1 the job found something wrong, 2 it could not run.

Cost: 3–6 s for the start of Spark. Threads: see delayserver.pipeline.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from delayserver.cli.output import help_text, print_json

if TYPE_CHECKING:
    from delayserver.pipeline.progress import Job, Progress

FOUND_STATUS = 1
CANNOT_RUN_STATUS = 2
HELP = """Jobs on Apache Spark: what looks at millions of messages at once.

They read the files of a data directory, also beside a running server. Spark needs Java 17 or
newer, and the extra `spark` of this package."""

pipeline_app = typer.Typer(help=help_text(HELP), no_args_is_help=True)

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
    typer.Option(
        "--conf",
        metavar="NAME=VALUE",
        help="A setting of Spark, such as spark.driver.memory=4g; may be repeated.",
        show_default=False,
        rich_help_panel="Spark",
    ),
]


@pipeline_app.callback()
def _root() -> None:
    pass


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.add_typer(pipeline_app, name="pipeline")


@contextlib.contextmanager
def job(
    name: str, master: str, conf: list[str] | None, *, as_json: bool = False
) -> "Iterator[Job]":
    """A session and a progress bar; what goes wrong is said in a sentence, with exit status 2."""
    settings = _settings(conf)
    with _errors(as_json=as_json):
        from delayserver.pipeline.progress import Job
        from delayserver.pipeline.session import open_session

        with _bar(quiet=as_json) as progress:
            progress("starting Spark", 0, 0)
            with open_session(name, master=master, settings=settings) as spark:
                yield Job(spark, progress)


@contextlib.contextmanager
def _errors(*, as_json: bool) -> Iterator[None]:
    from delayserver.errors import DelayServerError
    from storage.errors import StorageError

    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("pyspark", "pyarrow", "pandas", "py4j"):
            raise
        text = f"The pipeline needs {error.name}: pip install 'delayserver[spark]'"
        _refuse(text, error, as_json=as_json)
    except (DelayServerError, StorageError, OSError) as error:
        _refuse(str(error), error, as_json=as_json)
    except Exception as error:
        # pyspark may be missing, so its errors are known by the module of their class.
        if not type(error).__module__.startswith(("pyspark.", "py4j.")):
            raise
        _refuse(f"Spark failed: {_first_lines(str(error))}", error, as_json=as_json)


def _refuse(text: str, error: Exception, *, as_json: bool) -> None:
    if as_json:
        print_json({"title": text}, err=True)
    else:
        typer.echo(f"error: {text}", err=True)
    raise typer.Exit(CANNOT_RUN_STATUS) from error


def _first_lines(text: str) -> str:
    """The message without the stack traces of the JVM."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("at ")]
    return "\n".join(lines[:20])


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


@contextlib.contextmanager
def _bar(*, quiet: bool) -> "Iterator[Progress]":
    """A bar on standard error that disappears in the end."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=quiet,
    ) as progress:
        bar = progress.add_task("", total=None)

        def show(what: str, done: int, total: int) -> None:
            progress.update(bar, description=what, completed=done, total=total or None)

        yield show
