"""pipeline load: a table of future messages, loaded past the front door.

Exit status: 0 loaded (rejected rows, if any, stand in the reject file), 1 nothing was loaded since
rows were rejected (--strict), 2 it could not run, or the server refused.

Cost: see delayserver.pipeline.load.load. Threads: one.
"""

import uuid
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from delayserver.cli.command_options import CommandOptions, with_options
from delayserver.cli.operations import DataDirOption
from delayserver.cli.options import option
from delayserver.cli.output import help_text, make_console, print_json, text_of
from delayserver.cli.pipeline import (
    FOUND_STATUS,
    ConfOption,
    MasterOption,
    ServerOption,
    group_of,
    job,
    job_errors,
)
from delayserver.cli.session import URL_DEFAULT, JsonOption, TokenOption

if TYPE_CHECKING:
    from rich.console import RenderableType

    from delayserver.pipeline.load.load import Loaded, LoadJob

_EXAMPLES = (
    "pipeline load --input coupons.parquet --subject coupon.expiry --due-column expires_at "
    "--key-column key --body-column body --data-dir data",
    "pipeline load --input orders.csv --subject order.unpaid --due-column due --key-column id",
    "pipeline load --format jdbc --option url=jdbc:postgresql://db/shop --option dbtable=coupons "
    "--subject-column kind --due-column expires_at --conf spark.jars.packages=org.postgresql:...",
)


PATIENCE_S = 5.0
"""For a server that does not answer before anything was done."""


def register(app: typer.Typer) -> None:
    """Add the command to those of the pipeline."""
    group_of(app).command("load", help=help_text(load.__doc__, *_EXAMPLES))(load)


@dataclass(frozen=True, kw_only=True)
class LoadOptions(CommandOptions):
    """Options of `pipeline load`."""

    due_column: Annotated[
        str,
        typer.Option(
            metavar="COLUMN",
            help="When it is due: a timestamp, milliseconds since 1970, or RFC 3339 text.",
        ),
    ]
    source: Annotated[str | None, option("--input", "The table.", "PATH")] = None
    file_format: Annotated[
        str | None,
        option(
            "--format",
            "parquet, csv, json, jdbc, or any other that Spark knows; default: by the name.",
            "FORMAT",
        ),
    ] = None
    settings: Annotated[
        list[str] | None,
        option("--option", "Option of the format; may be repeated.", "NAME=VALUE"),
    ] = None
    subject: Annotated[
        str | None, typer.Option(metavar="SUBJECT", help="Subject of all rows.", show_default=False)
    ] = None
    subject_column: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Subject of each row.", show_default=False)
    ] = None
    key_column: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Key.", show_default=False)
    ] = None
    body_column: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="Body: JSON text, binary, struct, map or array; default: all other columns as "
            "one JSON object.",
            show_default=False,
        ),
    ] = None
    headers_column: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN", help="Headers: a map, or a JSON object.", show_default=False
        ),
    ] = None
    due_unit: Annotated[
        str | None,
        typer.Option(
            metavar="s|ms|us|ns",
            help="The unit of due times that are whole numbers; default: ms, unless most look "
            "like s.",
            show_default=False,
        ),
    ] = None
    past: Annotated[
        str, typer.Option(metavar="now|reject", help="Rows in the past are due now, or rejected.")
    ] = "now"
    import_id: Annotated[
        str | None,
        option(
            "--id",
            "Name of the import. The same name is loaded once, however often it is run.",
            "NAME",
        ),
    ] = None
    on_conflict: Annotated[
        str,
        typer.Option(
            metavar="refuse|keep",
            help="A key stands for other content: refuse everything, or keep the present message.",
        ),
    ] = "refuse"
    strict: Annotated[
        bool, typer.Option("--strict", help="Load nothing if any row is rejected.")
    ] = False
    rejects: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Rejected rows with the reason, as JSON lines; default: NAME.rejected.jsonl.",
            show_default=False,
        ),
    ] = None
    ids: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.parquet", help="Write the id of each row there.", show_default=False
        ),
    ] = None
    ids_column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN",
            help="A column to stand in the file of ids, too; may be repeated.",
            show_default=False,
        ),
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check all rows, and load none.")] = (
        False
    )
    data_dir: DataDirOption = Path("data")
    server: ServerOption = URL_DEFAULT
    token: TokenOption = None
    as_json: JsonOption = False
    master: MasterOption = "local[*]"
    conf: ConfOption = None

    def check(self) -> None:
        """Refuse values that do not go together."""
        if (self.subject is None) == (self.subject_column is None):
            raise typer.BadParameter("give either --subject or --subject-column")
        if self.source is None and self.file_format != "jdbc":
            raise typer.BadParameter("give the table", param_hint="--input")
        if self.on_conflict not in ("refuse", "keep"):
            raise typer.BadParameter("refuse or keep", param_hint="--on-conflict")
        if self.past not in ("now", "reject"):
            raise typer.BadParameter("now or reject", param_hint="--past")
        if self.due_unit not in (None, "s", "ms", "us", "ns"):
            raise typer.BadParameter("s, ms, us or ns", param_hint="--due-unit")

    def job(self) -> "LoadJob":
        """The load that they ask for."""
        from delayserver.pipeline.load.load import LoadJob
        from delayserver.pipeline.publish.mapping import MessageColumns
        from storage.staging import OnConflict

        columns = MessageColumns(
            self.due_column,
            self.subject,
            self.subject_column,
            self.key_column,
            self.body_column,
            self.headers_column,
            self.due_unit,
        )
        return LoadJob(
            self.import_id or f"load-{datetime.now(UTC):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:6]}",
            self.data_dir,
            self.server,
            columns,
            self.token,
            OnConflict(self.on_conflict),
            self.strict,
            self.dry_run,
            self.past,
            self.rejects,
            self.ids,
            tuple(self.ids_column or ()),
        )


@with_options
def load(options: LoadOptions) -> None:
    """Load a table of future messages into a running server: all of it, or nothing; of a server
    with several shards, for each of them.

    Executors write the rows beside the server's logs, and the server takes them over at once. Rows
    that cannot be messages go to the reject file. Under a name (--id) it can be run again after
    any failure, and loads once."""
    options.check()
    source, form, as_json = options.source, options.file_format, options.as_json
    settings = _settings(options.settings)
    with job_errors(as_json=as_json):
        from delayserver.pipeline.load import source as table
        from delayserver.pipeline.load.load import check, run

        wanted = options.job()
        # Spark takes a while to start: errors that can be found without it are reported before.
        table.look(source, form, settings, wanted.columns, wanted.ids_columns)
        check(replace(wanted, wait_s=PATIENCE_S))
    with job("load", options.master, options.conf, as_json=as_json) as running:
        loaded = run(running, table.read_table(running, source, form, settings), wanted)
    if as_json:
        print_json(loaded.document())
    else:
        make_console().print(_rendered(loaded))
    if loaded.past * 2 > loaded.staged:
        said = "would be" if options.dry_run else "were"
        text = f"warning: {loaded.past} of {loaded.staged} rows {said} due in the past, so at once"
        typer.echo(text, err=True)
    if options.strict and loaded.rejected:
        raise typer.Exit(FOUND_STATUS)


def _settings(texts: list[str] | None) -> dict[str, str]:
    settings = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--option")
        settings[name] = value
    return settings


_STATES = {
    "adopted": "Loaded",
    "filing": "Loaded, being filed",
    "checked": "Checked, nothing was loaded",
    "rejected": "Nothing was loaded: rows were rejected (--strict)",
    "empty": "Nothing was loaded: no row can be a message",
}


def _rendered(loaded: "Loaded") -> "RenderableType":
    from rich.table import Table

    title = "Loaded before, nothing was done" if loaded.was_adopted else _STATES[loaded.state]
    table = Table(title=f"{title}: {loaded.id}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")

    def line(name: str, value: object, style: str = "") -> None:
        table.add_row(name, text_of(value), style=style)

    if loaded.read:
        line("rows of the table", loaded.read)
    for reason, count in sorted(loaded.rejected.items()):
        line(f"rejected: {reason}", count, "yellow")
    line("messages", loaded.accepted if loaded.state != "checked" else loaded.staged, "bold")
    if loaded.past:
        is_most = loaded.past * 2 > loaded.staged
        line("… due in the past, so now", loaded.past, "yellow" if is_most else "")
    if loaded.duplicates:
        line("left out, the key is taken", loaded.duplicates)
    if loaded.conflicts:
        line("… by other content", loaded.conflicts, "yellow")
    if loaded.staging_s:
        line("read and staged", f"{loaded.staging_s:.1f} s")
    if loaded.adopting_s:
        line("verified and committed", f"{loaded.adopting_s:.1f} s")
        line("filed", f"{loaded.filing_s:.1f} s")
    if loaded.staging_s and loaded.adopting_s:
        line("rows per second, until durable", round(loaded.rows_per_s))
    if loaded.rejects_file:
        line("rejected rows", loaded.rejects_file)
    if loaded.ids_file:
        line("ids", loaded.ids_file)
    return table
