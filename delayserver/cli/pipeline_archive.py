"""pipeline archive: settled hours as Parquet, for good, so that the server may delete them.

Exit status: 0 all that could be archived is, 1 an hour is damaged or was not read back as it should
be, 2 it could not run, or the server refused.

Cost: see delayserver.pipeline.archive.archive. Threads: one.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from delayserver.cli.operations import DataDirOption
from delayserver.cli.output import help_text, text_of
from delayserver.cli.pipeline import (
    FOUND_STATUS,
    ConfOption,
    JsonFileOption,
    MasterOption,
    ServerOption,
    group_of,
    is_stdout,
    job,
    print_parts,
    write_document,
)
from delayserver.cli.session import URL_DEFAULT, TokenOption

if TYPE_CHECKING:
    from rich.table import Table

    from delayserver.pipeline.archive.archive import ArchiveRun

_EXAMPLES = (
    "pipeline archive --data-dir data --to /srv/archive",
    "pipeline archive --data-dir data --to s3a://company/delays --until 2026-11-20T00:00:00Z",
)
_UNKEPT = (
    "note: the server deletes hours after its retention, archived or not; with --archive it waits"
)


def register(app: typer.Typer) -> None:
    """Add the command to those of the pipeline."""
    group_of(app).command("archive", help=help_text(archive.__doc__, *_EXAMPLES))(archive)


def archive(
    to: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help="Where the archive is: any path that Hadoop knows, one for each data directory.",
        ),
    ],
    data_dir: DataDirOption = Path("data"),
    until: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Only hours that ended by then (RFC 3339, or ms since 1970)."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Read what waits, and archive nothing.")
    ] = False,
    json_file: JsonFileOption = None,
    server: ServerOption = URL_DEFAULT,
    token: TokenOption = None,
    master: MasterOption = "local[*]",
    conf: ConfOption = None,
) -> None:
    """Archive settled hours as Parquet by date and subject, and tell the server that they are.

    Each hour is read back, and compared with the server's files by count and checksum, before the
    server is told. It may be interrupted, and run again: nothing is archived twice. Status 1: an
    hour is damaged, or is not in the archive as it should be."""
    quiet = is_stdout(json_file)
    with job("archive", master, conf, as_json=quiet) as running:
        from delayserver.pipeline.archive.archive import Archive, run
        from delayserver.times import parse_time_ms

        until_ms = None
        if until is not None:
            until_ms = parse_time_ms(int(until) if until.isdecimal() else until, "--until")
        wanted = Archive(data_dir, to, server, token, until_ms, dry_run)
        archived = run(running, wanted)
        write_document(json_file, archived.document())
    if not quiet:
        print_parts([_rendered(archived)])
        for hour in archived.hours:
            if hour.reason:
                of = "" if hour.shard is None else f"shard {hour.shard}, "
                typer.echo(f"{of}{hour.hour} {hour.fate}: {hour.reason}")
        if not archived.is_kept:
            typer.echo(_UNKEPT)
    if not archived.is_clean:
        raise typer.Exit(FOUND_STATUS)


_LINES = {
    "archived": "hours archived",
    "sound": "hours that would be archived",
    "changed": "hours that came back meanwhile: run it again",
    "gone": "hours that the server has deleted meanwhile",
    "damaged": "hours whose files are damaged",
    "different": "hours that are not in the archive as they should be",
}


def _rendered(archived: "ArchiveRun") -> "Table":
    from rich.table import Table

    from delayserver.pipeline.archive.archive import FAILURES, HourFate

    table = Table(title=f"Archive: {archived.to}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for fate in HourFate:
        count = archived.total(fate)
        if count or fate is HourFate.ARCHIVED:
            style = "red" if fate in FAILURES else "bold" if fate is HourFate.ARCHIVED else ""
            table.add_row(_LINES[fate], text_of(count), style=style)
    done = [hour for hour in archived.hours if hour.fate is HourFate.ARCHIVED]
    table.add_row("entries in them", text_of(sum(hour.count for hour in done)))
    table.add_row("of these, added now", text_of(sum(hour.added for hour in archived.hours)))
    table.add_row(
        "bytes that the server may delete", text_of(sum(hour.total_bytes for hour in done))
    )
    table.add_row("took", f"{archived.took_s:.1f} s")
    return table
