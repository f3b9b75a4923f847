"""pipeline archive: settled hours as a table of Iceberg, so that the server may delete them.

Exit status: 0 all that could be archived is, 1 an hour is damaged or was not read back as it should
be, 2 it could not run, or the server refused.

Cost: see delayserver.pipeline.archive.archive. Threads: one.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from delayserver.cli.command_options import CommandOptions, with_options
from delayserver.cli.options import option
from delayserver.cli.output import help_text, text_of
from delayserver.cli.pipeline import (
    FOUND_STATUS,
    ConfOption,
    DataDirsOption,
    JsonFileOption,
    MasterOption,
    ServerOption,
    group_of,
    is_stdout,
    job,
    job_errors,
    print_parts,
    roots_of,
    write_document,
)
from delayserver.cli.session import URL_DEFAULT, TokenOption
from delayserver.errors import InputError
from delayserver.times import read_time_ms
from storage.buckets import parse_hour

if TYPE_CHECKING:
    from rich.table import Table

    from delayserver.pipeline.archive.job import Archive, ArchiveRun

_EXAMPLES = (
    "pipeline archive --data-dir data --to /srv/archive",
    "pipeline archive --data-dir data --to /srv/archive --compact",
    "pipeline archive --data-dir data --to s3://company/delays --until 2026-11-20T00:00:00Z",
)
_UNKEPT = (
    "note: the server deletes hours after its retention, archived or not; with --archive it waits"
)


def register(app: typer.Typer) -> None:
    """Add the command to those of the pipeline."""
    group_of(app).command("archive", help=help_text(archive.__doc__, *_EXAMPLES))(archive)


@dataclass(frozen=True, kw_only=True)
class ArchiveOptions(CommandOptions):
    """Options of `pipeline archive`."""

    to: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help="Where the archive is: a directory, s3://, gs://, abfs:// or hdfs://.",
        ),
    ]
    data_dir: DataDirsOption = None
    form: Annotated[
        Literal["iceberg", "parquet"],
        typer.Option("--format", help="A table of Iceberg, or plain files, one for each hour."),
    ] = "iceberg"
    buckets: Annotated[
        int, typer.Option(min=1, max=1024, help="Of subjects, in each day of a new table.")
    ] = 8
    until: Annotated[
        str | None,
        option("--until", "Only hours that ended by then (RFC 3339, or ms since 1970).", "TIME"),
    ] = None
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Read the hours that wait, and archive nothing.")
    ] = False
    again: Annotated[
        list[str] | None,
        option(
            "--again",
            "Archive this hour anew (2026-11-20T15), in place of its rows in the archive, "
            "even if it was reported to the server already; may be repeated.",
            "HOUR",
        ),
    ] = None
    without_unsettled: Annotated[
        bool,
        typer.Option(
            "--without-unsettled",
            help="Also hours that ended an hour ago and that messages keep open which are not "
            "settled, without these. The server keeps such an hour; the rest is added later.",
        ),
    ] = False
    compact: Annotated[
        bool,
        typer.Option(
            "--compact",
            help="Make few files of small ones, where there are two in a partition (without it: "
            "16), and give up snapshots that are older than 5 days.",
        ),
    ] = False
    json_file: JsonFileOption = None
    server: ServerOption = URL_DEFAULT
    token: TokenOption = None
    master: MasterOption = "local[*]"
    conf: ConfOption = None

    def job(self) -> "Archive":
        """The archive that they ask for. Raises InputError."""
        from delayserver.pipeline.archive.job import Archive, ArchiveFormat

        return Archive(
            roots_of(self.data_dir),
            self.to,
            self.server,
            self.token,
            format=ArchiveFormat(self.form),
            buckets=self.buckets,
            until_ms=None if self.until is None else read_time_ms(self.until, "--until"),
            dry_run=self.dry_run,
            again=frozenset(map(_hour_of, self.again or ())),
            without_unsettled=self.without_unsettled,
            compact=self.compact,
        )


@with_options
def archive(options: ArchiveOptions) -> None:
    """Archive settled hours as a table of Apache Iceberg, and tell the server that they are.

    Each hour is read back, and compared with the server's files by count and checksum, before the
    server is told. It may be interrupted, and run again: nothing is archived twice. Status 1: an
    hour is damaged, or is not in the archive as it should be."""
    quiet = is_stdout(options.json_file)
    with job_errors(as_json=quiet):
        # Errors that can be found without Spark are reported before it starts.
        wanted = options.job()
    with job("archive", options.master, options.conf, as_json=quiet) as running:
        from delayserver.pipeline.archive.archive import run

        archived = run(running, wanted)
        write_document(options.json_file, archived.document())
    if not quiet:
        print_parts([_rendered(archived)])
        for hour in archived.hours:
            if hour.left_out:
                typer.echo(f"{hour.hour} is kept open by {hour.left_out:,} that are not settled")
            if hour.reason:
                of = "" if hour.shard is None else f"shard {hour.shard}, "
                typer.echo(f"{of}{hour.hour} {hour.fate}: {hour.reason}")
        if not archived.is_kept:
            typer.echo(_UNKEPT)
    if not archived.is_clean:
        raise typer.Exit(FOUND_STATUS)


def _hour_of(text: str) -> int:
    hour = parse_hour(text)
    if hour is None:
        raise InputError(f"--again takes an hour, as in 2026-11-20T15, and not {text!r}")
    return hour


_LINES = {
    "archived": "hours archived",
    "partly": "hours archived without their unsettled messages",
    "sound": "hours that would be archived",
    "changed": "hours that came back meanwhile: run it again",
    "gone": "hours that the server has deleted meanwhile",
    "damaged": "hours whose files are damaged",
    "different": "hours that are not in the archive as they should be",
}


def _rendered(archived: "ArchiveRun") -> "Table":
    from rich.table import Table

    from delayserver.pipeline.archive.job import FAILURES, HourFate

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
    if archived.compacted.files_before:
        compacted = archived.compacted
        files = f"{text_of(compacted.files_before)} → {text_of(compacted.files_after)}"
        table.add_row("small files compacted", files)
    table.add_row("took", f"{archived.took_s:.1f} s")
    return table
