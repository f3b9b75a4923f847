"""stats and check: what a server does, and whether its files are sound.

Cost: one request; `check` reads every byte of a data directory. Threads: one.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from delayserver.cli.output import details, help_text, print_json, rows
from delayserver.cli.session import JsonOption, Session, path, server_command

if TYPE_CHECKING:
    from rich.console import RenderableType

    from storage.check import Finding, Progress, Report

DAMAGED_STATUS = 1
CANNOT_RUN_STATUS = 2

DataDirOption = Annotated[
    Path,
    typer.Option(
        "--data-dir",
        metavar="DIRECTORY",
        envvar="DELAYSERVER_DATA_DIR",
        help="The directory that the server was started with.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    server_command(app, "stats", "stats", "stats --json")(stats)
    examples = ("check --data-dir data", "check --data-dir /var/lib/delayserver --json")
    app.command("check", help=help_text(check.__doc__, *examples))(check)


def stats(session: Session) -> None:
    """Show how much waits, is on its way, and was done since the server started."""
    answer = session.call("GET", path("stats"))
    session.show(answer, lambda: details(answer))


def check(data_dir: DataDirOption = Path("data"), as_json: JsonOption = False) -> None:
    """Verify every byte of a data directory. Nothing is written; a server may be running on it.

    Status 0: sound. 1: damage was found. 2: it could not be checked."""
    from delayserver.check import check_path
    from delayserver.config import Settings
    from storage.errors import StorageError

    catalog_max_bytes = Settings.model_fields["catalog_max_bytes"].default
    try:
        with _progress(quiet=as_json) as progress:
            report = check_path(data_dir, catalog_max_bytes=catalog_max_bytes, progress=progress)
    except (StorageError, OSError) as error:
        if as_json:
            print_json({"title": str(error)}, err=True)
        else:
            typer.echo(f"error: {error}", err=True)
        raise typer.Exit(CANNOT_RUN_STATUS) from error
    if as_json:
        typer.echo(report.to_json())
    else:
        from rich.console import Console

        Console().print(*_rendered(report), sep="\n")
    if not report.is_clean:
        raise typer.Exit(DAMAGED_STATUS)


@contextlib.contextmanager
def _progress(*, quiet: bool) -> "Iterator[Progress]":
    """A bar on standard error that disappears in the end."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=quiet) as progress:
        bar = progress.add_task("checking", total=None)

        def show(what: str, done: int, total: int) -> None:
            progress.update(bar, description=what, completed=done, total=total)

        yield show


def _rendered(report: "Report") -> "Iterator[RenderableType]":
    logs: list[dict[str, Any]] = [
        {
            "log": name,
            "files": log.files,
            "frames": log.frames,
            "rows": log.rows,
            "payload_bytes": log.payload_bytes,
        }
        for name, log in report.logs.items()
    ]
    yield rows(logs, ("log", "files", "frames", "rows", "payload_bytes"), empty="no logs")
    entries = [f"{name} {count:,}" for name, count in report.tables.items() if count]
    if entries:
        yield f"catalog: {', '.join(entries)}"
    for finding in sorted(report.findings, key=lambda one: (one.file, one.offset)):
        yield _line(finding)
    where = f"{report.root}, format {report.format_version}"
    if report.is_clean:
        yield f"[green]Sound:[/green] {where}."
    else:
        yield (
            f"[bold red]Damaged in {len(report.damage)} places:[/bold red] {where}. What is named "
            "above is not delivered; everything else is. Keep a copy of the directory."
        )


def _line(finding: "Finding") -> str:
    from rich.markup import escape

    from storage.check import Severity

    style = "bold red" if finding.severity is Severity.DAMAGE else "dim"
    return f"[{style}]{escape(str(finding))}[/{style}]"
