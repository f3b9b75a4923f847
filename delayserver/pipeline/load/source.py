"""The table of a bulk load: files of a format that Spark knows, or a query of a database.

What can be known without Spark is asked before it starts (`look`), for a start takes a while: a
column that is not there is told at once. Spark cannot read timestamps in nanoseconds, which is what
pandas writes; a column of them is read as whole numbers, and becomes microseconds here, rounded up,
so that nothing is due too early.

Cost: one Parquet footer before Spark starts. Threads: the caller's.
"""

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from delayserver.errors import PipelineError
from delayserver.pipeline.progress import Job
from delayserver.pipeline.publish.mapping import MessageColumns

FORMATS = {
    ".parquet": "parquet",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
}
"""What a file's name says of its format."""


def format_of(source: str | None, file_format: str | None) -> str:
    """The format by its name, or by the name of the files. Raises PipelineError."""
    found = file_format or FORMATS.get(Path(source or "").suffix.lower())
    if found is None:
        raise PipelineError(f"the format of {source} is not known by its name; give --format")
    return found


def look(
    source: str | None, file_format: str | None, columns: MessageColumns, others: tuple[str, ...]
) -> None:
    """Look at a table without Spark, as far as that is possible. Raises PipelineError where it is
    not there, cannot be read, or lacks a column."""
    kind = format_of(source, file_format)
    if source is None or kind == "jdbc" or "://" in source or any(c in source for c in "*?[{"):
        return
    if not Path(source).exists():
        raise PipelineError(f"there is no {source}")
    schema = _parquet_schema(source) if kind == "parquet" else None
    if schema is not None:
        columns.check_names(schema.names, others)


def read_table(
    job: Job, source: str | None, file_format: str | None, options: Mapping[str, str]
) -> DataFrame:
    """The table. Raises PipelineError."""
    kind = format_of(source, file_format)
    if kind == "jdbc":
        options = {"url": source, **options} if source else options
        source = None
    defaults = {"header": "true"} if kind == "csv" else {}
    reader = job.spark.read.format(kind).options(**{**defaults, **options})
    nanoseconds = _nanosecond_columns(source) if source and kind == "parquet" else []
    if nanoseconds:
        job.spark.conf.set("spark.sql.legacy.parquet.nanosAsLong", "true")
    table = reader.load(source) if source else reader.load()
    if not nanoseconds:
        return table  # Spark Connect does not take "no columns".
    return table.withColumns({name: _to_microseconds(name) for name in nanoseconds})


def _to_microseconds(name: str) -> Column:
    # Up, for negative numbers, too: `div` goes towards zero, `pmod` is never negative.
    nanos = F.col(quoted(name))
    down = F.expr(f"({quoted(name)} - pmod({quoted(name)}, 1000)) div 1000")
    return F.timestamp_micros(down + F.when(F.pmod(nanos, F.lit(1000)) > 0, 1).otherwise(0))


def quoted(name: str) -> str:
    """A column by its name, whatever characters it has."""
    return "`" + name.replace("`", "``") + "`"


def _nanosecond_columns(source: str) -> list[str]:
    schema = _parquet_schema(source)
    if schema is None:
        return []
    return [one.name for one in schema if pa.types.is_timestamp(one.type) and one.type.unit == "ns"]


def _parquet_schema(source: str) -> pa.Schema | None:
    """Of the first file, where this machine sees it. Raises PipelineError."""
    path = Path(source)
    if path.is_dir():
        found = (
            one for one in sorted(path.rglob("*.parquet")) if not one.name.startswith((".", "_"))
        )
        path = next(found, path)
    if not path.is_file():
        return None
    try:
        return pq.read_schema(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise PipelineError(f"cannot read {path}: {error}") from error
