"""pipeline export: the files of the jobs are copied to a place that needs no mount.

Exit status: 0 done, 1 done, and files of the directory are damaged, 2 it could not run.

Cost: see delayserver.pipeline.exports.export. Threads: one.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from delayserver.cli.operations import DataDirOption
from delayserver.cli.output import help_text, progress_bar, text_of
from delayserver.cli.pipeline import (
    FOUND_STATUS,
    JsonFileOption,
    group_of,
    is_stdout,
    job_errors,
    print_parts,
    write_document,
)

if TYPE_CHECKING:
    from rich.table import Table

    from delayserver.pipeline.exports.export import Exported

_EXAMPLES = (
    "pipeline export --data-dir data --to s3://company/delays",
    "pipeline audit --data-dir s3://company/delays --master spark://host:7077",
)


def register(app: typer.Typer) -> None:
    """Add the command to those of the pipeline."""
    group_of(app).command("export", help=help_text(export.__doc__, *_EXAMPLES))(export)


def export(
    to: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="A directory, or s3://, gs://, abfs://, hdfs://: one place for each data "
            "directory.",
        ),
    ],
    data_dir: DataDirOption = Path("data"),
    json_file: JsonFileOption = None,
) -> None:
    """Copy the files that jobs read to a place that needs no mount, such as an object store.

    Nothing is changed in the directory; a server may be running. The next export to the same place
    adds the files that have grown. The other jobs take the URL as their --data-dir."""
    quiet = is_stdout(json_file)
    with job_errors(as_json=quiet), progress_bar("", quiet=quiet) as progress:
        from delayserver.pipeline.exports import export as exports

        now_ms = time.time_ns() // 1_000_000
        done = exports.export(str(data_dir), to, now_ms=now_ms, progress=progress)
        write_document(json_file, done.document())
    if not quiet:
        print_parts([_rendered(done)])
    for text in done.damage:
        typer.echo(f"damaged: {text}", err=True)
    if done.damage:
        advice = (
            "Copied as it stands. Repair the directory; the next export copies these files anew"
        )
        typer.echo(advice, err=True)
        raise typer.Exit(FOUND_STATUS)


def _rendered(done: "Exported") -> "Table":
    from rich.table import Table

    table = Table(title=f"Exported to {done.to}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    if len(done.shards) > 1:
        table.add_row("shards", text_of(len(done.shards)))
    table.add_row("files", text_of(sum(one.files for one in done.shards)))
    table.add_row("bytes in it", text_of(sum(one.total_bytes for one in done.shards)))
    table.add_row("bytes copied now", text_of(sum(one.copied_bytes for one in done.shards)))
    table.add_row("took", f"{done.took_s:.1f} s")
    return table
