"""stats, subjects, forecast, shards, whoami, ready, check, repair: a server's past and future work,
and its files.

Cost: one request; `check` reads every byte of a data directory, `repair` some of them again.
Threads: one.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlencode

import typer

from delayserver.cli.options import number_or_text, option
from delayserver.cli.output import help_text, make_console, progress_bar, rows
from delayserver.cli.session import (
    NAMED_PAGE_MAX,
    CannotRun,
    CommandError,
    JsonOption,
    Session,
    error_exit,
    path,
    server_command,
)
from delayserver.errors import InputError, PipelineError
from delayserver.times import parse_duration_ms, read_time_ms
from storage.errors import StorageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from delayserver.recovery.repair import RepairReport
    from delayserver.recovery.shards import ShardReports
    from storage.check import Finding, Report

BAR_WIDTH = 40
READY_TIMEOUT_S = 5.0
READY_POLL_S = 0.1
DAMAGED_STATUS = 1

DataDirOption = Annotated[
    Path,
    typer.Option(
        "--data-dir",
        metavar="DIRECTORY",
        envvar="DELAYSERVER_DATA_DIR",
        help="The directory that the server was started with.",
    ),
]

SinceOption = Annotated[
    str | None,
    option("--since", "Leave out the hours before (RFC 3339); the verdict says so.", "TIME"),
]
BodiesOption = Annotated[
    bool, typer.Option("--bodies", help="Read the body of everything in the schedule log, too.")
]
VerdictsOption = Annotated[
    Path | None,
    option(
        "--verdicts",
        "Keep the finding on each settled hour here, and do not work it out again until "
        "the files of the hour change.",
        "DIRECTORY",
    ),
]


def since_option(text: str | None) -> int | None:
    """The moment that --since names."""
    try:
        return None if text is None else read_time_ms(text)
    except InputError as error:
        raise typer.BadParameter(error.detail, param_hint="--since") from error


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    server_command(app, "stats", "stats", "stats --json")(stats)
    server_command(app, "subjects", "subjects", "subjects --limit 1000 --json")(subjects)
    server_command(app, "forecast", "forecast", "forecast --bucket 1d")(forecast)
    server_command(app, "shards", "shards", "shards --json")(shards)
    server_command(app, "whoami", "whoami --json")(whoami)
    server_command(app, "ready", "ready --wait 30s", "ready --here")(ready)
    examples = (
        "check --data-dir data",
        "check --data-dir /var/lib/delayserver --json",
        "check --data-dir data --settled",
        "check --data-dir data --settled --verdicts verdicts",
    )
    app.command("check", help=help_text(check.__doc__, *examples))(check)
    repairs = ("repair --data-dir data --dry-run", "repair --data-dir data")
    app.command("repair", help=help_text(repair.__doc__, *repairs))(repair)


def stats(session: Session) -> None:
    """Show how much waits, is on its way, and was done since the server started."""
    session.show(session.call("GET", path("stats")))


def subjects(
    session: Session, *, limit: Annotated[int, typer.Option(min=1, help="Most to list.")] = 100
) -> None:
    """List subjects, with the counts of each since the server started."""
    answer = session.pages(path("subjects"), "subjects", limit, page_max=NAMED_PAGE_MAX)
    columns = ("name", "accepted", "cancelled", "delivered", "retried", "dead")
    session.show(answer, lambda: rows(answer["subjects"], columns, empty="There are none yet."))


def forecast(
    session: Session,
    *,
    bucket: Annotated[
        str, typer.Option(metavar="DURATION", help="Whole hours that are counted together.")
    ] = "1h",
) -> None:
    """Show how many messages fall due when, without those that were cancelled or delivered."""
    answer = session.call("GET", f"{path('forecast')}?{urlencode({'bucket': bucket})}")
    most = max((one["count"] for one in answer["buckets"]), default=0) or 1
    buckets = [
        {**one, "share": "█" * -(-one["count"] * BAR_WIDTH // most)} for one in answer["buckets"]
    ]
    columns = ("from", "count", "share")
    session.show(answer, lambda: rows(buckets, columns, empty="Nothing is pending."))


def shards(session: Session) -> None:
    """Show the shards of a server, and where each is asked by itself. A server alone is one."""
    answer = session.call("GET", path("cluster"))
    columns = ("shard", "state", "owner", "url")
    session.show(answer, lambda: rows(answer["shards"], columns, empty="It has no shards."))


def whoami(session: Session) -> None:
    """Show the scopes of the token. Without one, where none is needed: everything."""
    session.show(session.call("GET", path("tokens", "self")))


def ready(
    session: Session,
    *,
    wait: Annotated[
        str, typer.Option(metavar="DURATION", help="Wait this long for it to become ready.")
    ] = "0",
    here: Annotated[
        bool,
        typer.Option(
            "--here",
            help="Ask the server that runs on this machine with the settings of this environment "
            "(variables DELAYSERVER_…, --config): at its port, by HTTPS if it has a certificate. "
            "For health checks: nothing is verified, and no token is sent.",
        ),
    ] = False,
    config: Annotated[
        Path | None,
        option(
            "--config",
            "With --here: the TOML file that the server was started with.",
            "FILE",
            envvar="DELAYSERVER_CONFIG",
        ),
    ] = None,
) -> None:
    """Tell whether the server has recovered and accepts messages.

    Status 0: it does. 1: not yet, or it is stopping. 3: nobody is there."""
    try:
        wait_s = parse_duration_ms(number_or_text(wait)) / 1000
    except InputError as error:
        raise typer.BadParameter(error.detail, param_hint="--wait") from error
    if not here:
        _wait_ready(session, wait_s)
        return
    from delayserver.cli.here import session_here

    own = session_here(session, config)
    with own.client:
        _wait_ready(own, wait_s)


def _wait_ready(session: Session, wait_s: float) -> None:
    import time

    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            answer = session.call("GET", "/readyz", timeout_s=READY_TIMEOUT_S)
        except CommandError:
            if time.monotonic() >= deadline_s:
                raise
            time.sleep(READY_POLL_S)
        else:
            session.show(answer, lambda: f"{session.url} is ready")
            return


def check(
    data_dir: DataDirOption = Path("data"),
    settled: Annotated[
        bool,
        typer.Option(
            "--settled",
            help="Check not the bytes but the accounts: every accepted message was settled exactly "
            "once. `delayserver pipeline audit` checks the same on all cores.",
        ),
    ] = False,
    since: SinceOption = None,
    bodies: BodiesOption = False,
    verdicts: VerdictsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Verify every byte of a data directory. Nothing is written; a server may be running on it.

    If the directory has several shards, all are checked; one may be given by itself, too.

    Status 0: sound. 1: damage was found, or something was not settled as it should be. 2: it, or a
    shard of it, could not be checked."""
    since_ms = since_option(since)
    if settled:
        _check_settled(data_dir, since_ms, verdicts, with_bodies=bodies, as_json=as_json)
        return
    if bodies or since_ms is not None or verdicts is not None:
        raise typer.BadParameter("--since, --bodies and --verdicts go with --settled")
    from delayserver.recovery.check import check_path
    from delayserver.recovery.shards import check_shards, count_shards
    from storage.catalog import MAX_BYTES

    found: Report | ShardReports[Report]
    with _disk_errors(as_json), progress_bar("checking", quiet=as_json) as progress:
        if count := count_shards(data_dir):
            found = shards = check_shards(
                data_dir, count, catalog_max_bytes=MAX_BYTES, progress=progress
            )
            lines = _of_each(shards, _rendered)
            status = _status(shards, [not one.is_clean for one in shards.reports.values()])
        else:
            found = report = check_path(data_dir, catalog_max_bytes=MAX_BYTES, progress=progress)
            lines, status = _rendered(report), 0 if report.is_clean else DAMAGED_STATUS
    _end(found.to_json() if as_json else lines, status)


def _check_settled(
    data_dir: Path, since_ms: int | None, verdicts: Path | None, *, with_bodies: bool, as_json: bool
) -> None:
    import json

    from delayserver.pipeline.audits.audit import audit_here
    from delayserver.pipeline.audits.telling import document, lines
    from delayserver.pipeline.audits.verdicts import Verdicts

    with _disk_errors(as_json), progress_bar("looking", quiet=as_json) as progress:
        found = audit_here(
            str(data_dir),
            since_ms=since_ms,
            with_bodies=with_bodies,
            verdicts=None if verdicts is None else Verdicts(verdicts),
            progress=progress,
        )
    shown = json.dumps(document(found), ensure_ascii=False, indent=1) if as_json else lines(found)
    _end(shown, 0 if found.is_clean else DAMAGED_STATUS)


def repair(
    data_dir: DataDirOption = Path("data"),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan, and do nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Make a damaged data directory sound again. No server may be running on it.

    Torn tails are cut off, damaged places are taken out, the catalog is built again. Replaced files
    are kept under DIRECTORY/repair first. It may be interrupted, and run again. If the
    directory has several shards, all are repaired, each by itself; one may be given, too.

    Status 0: sound now, or it was. 1: with --dry-run, there is something to repair; without,
    damage is left. 2: it, or a shard of it, could not be repaired."""
    import time

    from delayserver.recovery.repair import repair_path
    from delayserver.recovery.shards import count_shards, repair_shards
    from storage.kinds import OWNED

    found: RepairReport | ShardReports[RepairReport]
    with _disk_errors(as_json), progress_bar("repairing", quiet=as_json) as progress:
        now_ms = time.time_ns() // 1_000_000
        if count := count_shards(data_dir, OWNED):
            found = shards = repair_shards(
                data_dir, count, now_ms=now_ms, dry_run=dry_run, progress=progress
            )
            lines = _of_each(shards, _rendered_repair)
            status = _status(shards, [_is_left(one) for one in shards.reports.values()])
        else:
            found = report = repair_path(
                data_dir, now_ms=now_ms, dry_run=dry_run, progress=progress
            )
            lines, status = _rendered_repair(report), DAMAGED_STATUS if _is_left(report) else 0
    _end(found.to_json() if as_json else lines, status)


def _is_left(report: "RepairReport") -> bool:
    return bool(report.remaining) or (report.dry_run and report.is_needed)


def _status(found: "ShardReports[Any]", damaged: "Iterable[bool]") -> int:
    """The worst of all shards."""
    if found.errors:
        return CannotRun.exit_status
    return DAMAGED_STATUS if any(damaged) else 0


def _of_each(
    found: "ShardReports[Any]", rendered: "Callable[[Any], Iterator[RenderableType]]"
) -> "Iterator[RenderableType]":
    """A heading for each shard, and the report on it."""
    from rich.markup import escape

    from storage.shards import shard_directory

    for shard in range(found.count):
        yield f"[bold]{shard_directory(shard)}[/bold]"
        if shard in found.errors:
            yield f"[bold red]error:[/bold red] {escape(str(found.errors[shard]))}"
        elif shard in found.dropped:
            yield "This node of a cluster is not to have it."
        else:
            yield from rendered(found.reports[shard])


def _end(shown: "str | Iterable[RenderableType]", status: int) -> None:
    if isinstance(shown, str):
        typer.echo(shown)
    else:
        make_console().print(*shown, sep="\n")
    if status:
        raise typer.Exit(status)


def _disk_errors(as_json: bool) -> error_exit:
    also = (StorageError, OSError, PipelineError)
    return error_exit(as_json=as_json, also=also, kind=CannotRun)


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
            f"[bold red]Damaged in {len(report.damage)} places:[/bold red] {where}. The messages "
            "named above are not delivered; all others are. `delayserver repair --dry-run` shows "
            "the remedy."
        )


def _rendered_repair(report: "RepairReport") -> "Iterator[RenderableType]":
    from dataclasses import asdict

    from rich.markup import escape

    if not report.is_needed:
        yield f"[green]Sound:[/green] {escape(report.root)}. There is nothing to repair."
        return
    columns = ("file", "offset", "end", "first_seq", "last_seq", "problem", "remedy")
    yield rows([asdict(remedy) for remedy in report.remedies], columns, empty="")
    for loss in report.losses:
        yield f"[bold red]Lost:[/bold red] {escape(loss)}"
    if report.dry_run:
        yield "Nothing was changed. Run it again without --dry-run."
        return
    for backup in report.backups:
        yield f"Replaced files are kept in {escape(backup)}"
    for left in report.remaining:
        yield f"[bold red]Still damaged:[/bold red] {escape(left)}"
    if not report.remaining:
        yield f"[green]Sound now:[/green] {escape(report.root)}."


def _line(finding: "Finding") -> str:
    from rich.markup import escape

    from storage.check import Severity

    style = "bold red" if finding.severity is Severity.DAMAGE else "dim"
    return f"[{style}]{escape(str(finding))}[/{style}]"
