"""The table of a bulk load: files of a format that Spark knows, or a query of a database.

What can be known without Spark is asked before it starts (`look`), for a start takes a while: a
column that is not there is told at once. Spark cannot read timestamps in nanoseconds, which is what
pandas writes; a column of them is read as whole numbers, and becomes microseconds here, rounded up,
so that nothing is due too early.

A line of CSV or JSON that cannot be read becomes a row that says so, in a column of its own
(`staging.MALFORMED`), and changes no other row.

Cost: one Parquet footer, a header, or a thousand lines before Spark starts. Threads: the caller's.
"""

import contextlib
import csv
import json
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, DataFrameReader
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.types import from_arrow_schema

from delayserver.errors import PipelineError
from delayserver.pipeline.load.staging import MALFORMED
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
LINES = ("csv", "json")
"""Formats of text, in which a line may be anything."""


LOOK_ROWS = 1_000
"""Of a file of JSON, to know its columns."""


def format_of(source: str | None, file_format: str | None) -> str:
    """The format by its name, or by the name of the files. Raises PipelineError."""
    found = file_format or FORMATS.get(Path(source or "").suffix.lower())
    if found is None:
        raise PipelineError(f"the format of {source} is not known by its name; give --format")
    return found


def look(
    source: str | None,
    file_format: str | None,
    options: Mapping[str, str],
    columns: MessageColumns,
    others: tuple[str, ...],
) -> None:
    """Look at a table without Spark, as far as that is possible. Raises PipelineError where it is
    not there, cannot be read, or lacks a column."""
    kind = format_of(source, file_format)
    if source is None or kind == "jdbc" or "://" in source or any(c in source for c in "*?[{"):
        return
    if not Path(source).exists():
        raise PipelineError(f"there is no {source}")
    path = _first_file(source, kind)
    if path is None:
        return
    given = {name.lower(): text for name, text in options.items()}
    if kind == "parquet":
        schema = _parquet_schema(path)
        columns.check_names(schema.names, others)
        with contextlib.suppress(PySparkException):  # of a type that Spark may still know
            columns.check(from_arrow_schema(schema), others)
    elif kind == "csv" and given.get("header", "true").lower() == "true":
        names = _csv_header(path, given)
        if names:
            columns.check_names(names, others)
    elif kind == "json" and given.get("multiline", "false").lower() != "true":
        _look_at_json(path, columns, others)


def _csv_header(path: Path, options: Mapping[str, str]) -> list[str]:
    """The names in the first line; none, if they cannot be told like that."""
    delimiter = options.get("sep") or options.get("delimiter") or ","
    encoding = options.get("encoding") or options.get("charset") or "utf-8-sig"
    quote = options.get("quote", '"')
    if len(delimiter) != 1 or len(quote) != 1:
        return []
    try:
        with path.open(encoding=encoding, newline="") as file:
            return next(csv.reader(file, delimiter=delimiter, quotechar=quote), [])
    except (ValueError, LookupError, csv.Error):
        return []


def _look_at_json(path: Path, columns: MessageColumns, others: tuple[str, ...]) -> None:
    """What none of the first rows has is told if each row has to have it, or if there are no other
    rows."""
    names: dict[str, None] = {}
    with path.open("rb") as file:
        for line in islice(file, LOOK_ROWS):
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                names.update(dict.fromkeys(row) if isinstance(row, dict) else {})
        is_all = not file.read(1)
    if is_all:
        columns.check_names(list(names), others)
    elif names:
        needed = MessageColumns(columns.due, columns.subject, columns.subject_column)
        needed.check_names(list(names))


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
    if kind in LINES and not {"mode", "columnnameofcorruptrecord"} & set(map(str.lower, options)):
        reader = _told_of_malformed(reader, source)
    nanoseconds = _nanosecond_columns(source) if source and kind == "parquet" else []
    if nanoseconds:
        job.spark.conf.set("spark.sql.legacy.parquet.nanosAsLong", "true")
    table = reader.load(source) if source else reader.load()
    if not nanoseconds:
        return table  # Spark Connect does not take "no columns".
    return table.withColumns({name: _to_microseconds(name) for name in nanoseconds})


def _told_of_malformed(reader: DataFrameReader, source: str | None) -> DataFrameReader:
    """A line that cannot be read is a row whose column MALFORMED holds it. Spark adds such a column
    only where it found such a line when it looked for columns, and of CSV never."""
    reader = reader.option("columnNameOfCorruptRecord", MALFORMED)
    found = (reader.load(source) if source else reader.load()).schema
    columns = [field for field in found.fields if field.name != MALFORMED]
    return reader.schema(T.StructType([*columns, T.StructField(MALFORMED, T.StringType())]))


def _to_microseconds(name: str) -> Column:
    # Up, for negative numbers, too: `div` goes towards zero, `pmod` is never negative.
    nanos = F.col(quoted(name))
    down = F.expr(f"({quoted(name)} - pmod({quoted(name)}, 1000)) div 1000")
    return F.timestamp_micros(down + F.when(F.pmod(nanos, F.lit(1000)) > 0, 1).otherwise(0))


def quoted(name: str) -> str:
    """A column by its name, whatever characters it has."""
    return "`" + name.replace("`", "``") + "`"


def _nanosecond_columns(source: str) -> list[str]:
    path = _first_file(source, "parquet")
    schema = () if path is None else _parquet_schema(path)
    return [one.name for one in schema if pa.types.is_timestamp(one.type) and one.type.unit == "ns"]


def _first_file(source: str, kind: str) -> Path | None:
    """A file, or the first of a directory, where this machine sees one."""
    path = Path(source)
    if path.is_dir():
        found = (one for one in sorted(path.rglob("*")) if FORMATS.get(one.suffix.lower()) == kind)
        path = next((one for one in found if not one.name.startswith((".", "_"))), path)
    return path if path.is_file() else None


def _parquet_schema(path: Path) -> pa.Schema:
    """Raises PipelineError."""
    try:
        return pq.read_schema(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise PipelineError(f"cannot read {path}: {error}") from error
