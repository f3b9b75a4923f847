"""The table of a bulk load: files that we read (`reading`), or a table that Spark reads.

    parquet, csv, json          FileTable: our own reader, each file by its own schema
    jdbc, orc, avro, iceberg …  FrameTable: Spark reads it, with the types that Spark has

Both give the rows that staging takes. Both refuse a column whose type JSON does not have, and name
it. The first can be checked without Spark (`look`), so a missing column is reported before Spark
starts, which takes a while.

Cost: a listing; a footer, a header or some lines of each file. Threads: the caller's.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any, Final, Protocol, TypeVar

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_type

from delayserver.errors import PipelineError
from delayserver.pipeline.exports.place import is_url
from delayserver.pipeline.load import text as texts_of
from delayserver.pipeline.load.files import (
    TableFile,
    decompressed,
    find_files,
    has_pattern,
    is_compressed,
    opened,
)
from delayserver.pipeline.load.reading import (
    FilePiece,
    RowPlan,
    csv_names,
    parquet_file,
    read_rows,
)
from delayserver.pipeline.load.staging import BODY, DUE, HEADERS, KEY, SUBJECT
from delayserver.pipeline.load.text import Malformed, TextFormat
from delayserver.pipeline.progress import Job
from delayserver.pipeline.publish.mapping import TIMES, MessageColumns
from delayserver.pipeline.publish.values import text_or_none
from delayserver.pipeline.workers import spare_imports
from delayserver.records.arrow import texts
from delayserver.records.message import Content

FORMATS: Final = {
    ".parquet": "parquet",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
}
"""The format that the ending of a file's name stands for."""
COMPRESSED: Final = (".gz", ".bz2", ".zst", ".xz", ".lz4")
OWN: Final = ("parquet", "csv", "json")
"""Formats that we read."""
LOOK_ROWS: Final = 1_000
"""Rows of JSON that are read before Spark starts, to check its columns."""
PIECE_BYTES: Final = 64 * 1024 * 1024
_NAMES_SHOWN: Final = 50
Item = TypeVar("Item")
_PASSED = "__passed_{}"
"""Columns for the file of ids, by number, because their names may be the same as ours."""


class LoadTable(Protocol):
    """A table that is to be loaded."""

    def check(self, columns: MessageColumns, others: Sequence[str] = ()) -> None:
        """Raises PipelineError if it lacks a column, one of `others` included, or if a column has a
        type that its field cannot have."""

    def content(self, columns: MessageColumns) -> Content:
        """The kind of content that its bodies are."""

    def passed(self, names: Sequence[str]) -> list[T.StructField]:
        """Columns for the file of ids, by the names that they have among the rows."""

    def rows(self, job: Job, columns: MessageColumns, others: Sequence[str]) -> DataFrame:
        """The columns that staging takes, and `others` by their names in `passed`."""

    def due_unit(self, columns: MessageColumns) -> str:
        """The unit of whole numbers in the due times of the rows."""

    def has_numbers(self, columns: MessageColumns) -> bool:
        """Whether due times may be numbers, whose unit may be another than the given one."""

    def subjects(self, job: Job, columns: MessageColumns, most: int) -> list[str | None]:
        """The values of the column of subjects, each once; at most `most`."""


def format_of(source: str | None, file_format: str | None) -> str:
    """The format by its name, or by the name of the files. Raises PipelineError."""
    if file_format is not None:
        return file_format.lower()
    path = PurePath(source or "")
    if path.suffix.lower() in COMPRESSED:
        path = path.with_suffix("")
    found = FORMATS.get(path.suffix.lower())
    if found is None:
        raise PipelineError(f"the format of {source} is not known by its name; give --format")
    return found


def look(
    source: str | None,
    file_format: str | None,
    options: Mapping[str, str],
    columns: MessageColumns,
    others: Sequence[str],
) -> None:
    """Look at a table without Spark, as far as that is possible. Raises PipelineError if it does
    not exist, cannot be read, or lacks a column."""
    kind = format_of(source, file_format)
    if source is None or kind not in OWN or is_url(source) or has_pattern(source):
        return
    open_files(source, kind, options).check(columns, others, LOOK_ROWS)


def read_table(
    job: Job, source: str | None, file_format: str | None, options: Mapping[str, str]
) -> LoadTable:
    """The table. Raises PipelineError."""
    kind = format_of(source, file_format)
    if source is not None and kind in OWN:
        return open_files(source, kind, options)
    if kind == "jdbc":
        options = {"url": source, **options} if source else options
        source = None
    reader = job.spark.read.format(kind).options(**options)
    return FrameTable(reader.load(source) if source else reader.load())


def open_files(source: str, kind: str, options: Mapping[str, str]) -> "FileTable":
    """The table of some files. Raises PipelineError if there are none."""
    style = TextFormat()
    if kind == "parquet":
        for name in options:
            if name.lower() != "mergeschema":  # Each file has its own.
                raise PipelineError(f"the option {name} is not known for parquet files")
    else:
        style = texts_of.options_of(kind, options)
    seen = (_look_at(file, kind, style) for file in find_files(source))
    return FileTable(source, kind, style, [one for one in seen if one is not None])


def quoted(name: str) -> str:
    """A column by its name, whatever characters it has."""
    return "`" + name.replace("`", "``") + "`"


# ── files ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Seen:
    """The facts that are known of a file before it is read."""

    file: TableFile
    pieces: tuple[FilePiece, ...]
    types: dict[str, pa.DataType] | None
    """Its columns, those of its folders among them; None: each row has its own (JSON)."""


def _look_at(file: TableFile, kind: str, style: TextFormat) -> "_Seen | None":
    """A file; None if it is empty and may be."""
    if not file.size_bytes and kind == "json":
        return None
    try:
        if kind == "parquet":
            return _look_at_parquet(file)
        if kind == "csv":
            return _look_at_csv(file, style)
    except PipelineError as error:
        raise (
            error if file.name in str(error) else PipelineError(f"{file.name}: {error}")
        ) from error
    return _Seen(file, tuple(_json_pieces(file, style)), None)


def _with_folders(
    file: TableFile, types: Sequence[tuple[str, pa.DataType]]
) -> dict[str, pa.DataType]:
    known: dict[str, str] = {}
    for name, _ in types:
        other = known.setdefault(name.lower(), name)
        if other is not name:
            raise PipelineError(
                f"{file.name}: the columns {other!r} and {name!r} differ in nothing, or only in "
                "case: rename one"
            )
    return {name: pa.string() for name, _ in file.folders} | dict(types)


def _look_at_parquet(file: TableFile) -> _Seen:
    with opened(file) as stream:
        parquet = parquet_file(stream)
        groups = parquet.metadata
        sizes = [groups.row_group(one).total_byte_size for one in range(groups.num_row_groups)]
        types = [(one.name, one.type) for one in parquet.schema_arrow]
        for index in range(len(parquet.schema)):
            leaf = parquet.schema.column(index)
            if leaf.converted_type == "INTERVAL":
                name = leaf.path.partition(".")[0]
                types = [
                    (one, pa.month_day_nano_interval() if one == name else t) for one, t in types
                ]
    pieces = []
    for some in _gathered(list(enumerate(sizes)), lambda pair: pair[1]):
        size = sum(pair[1] for pair in some)
        pieces.append(FilePiece(file, size, tuple(pair[0] for pair in some)))
    return _Seen(file, tuple(pieces), _with_folders(file, types))


def _look_at_csv(file: TableFile, style: TextFormat) -> _Seen:
    with decompressed(file) as stream:
        lines = texts_of.lines_of(stream, style.encoding)
        first = None if style.has_header else next(texts_of.csv_rows(lines, style), None)
        names = csv_names(lines, style, first)
    types = _with_folders(file, [(name, pa.string()) for name in names])
    return _Seen(file, (FilePiece(file, file.size_bytes),), types)


def _json_pieces(file: TableFile, style: TextFormat) -> Iterator[FilePiece]:
    """Lines may be read from anywhere; an array, or a file compressed or not UTF-8, may not."""
    if file.size_bytes <= PIECE_BYTES or style.encoding is not None or style.is_one_document:
        yield FilePiece(file, file.size_bytes)
        return
    with opened(file) as stream:
        begin = stream.read(4096)
    if is_compressed(file) or begin.lstrip()[:1] != b"{":
        yield FilePiece(file, file.size_bytes)
        return
    for start in range(0, file.size_bytes, PIECE_BYTES):
        end = min(start + PIECE_BYTES, file.size_bytes)
        yield FilePiece(file, end - start, start=start, end=end)


@dataclass(frozen=True, slots=True)
class FileTable:
    """Files that are read by our own reader."""

    source: str
    kind: str
    style: TextFormat
    files: list[_Seen] = field(repr=False)

    def check(
        self, columns: MessageColumns, others: Sequence[str] = (), rows_max: int | None = None
    ) -> None:
        """See `LoadTable`: each file must have each column that is named. `rows_max`: of JSON."""
        if self.kind == "json":
            self._check_json(columns, others, rows_max)
            return
        kinds: dict[str, Content] = {}
        for seen in self.files:
            assert seen.types is not None
            try:
                schema = T.StructType(
                    [T.StructField(name, spark_type(kind)) for name, kind in seen.types.items()]
                )
                columns.check(schema, others)
            except PipelineError as error:
                if len(self.files) == 1:
                    raise
                raise PipelineError(f"{seen.file.name}: {error}") from error
            if columns.body is not None:
                kinds[seen.file.name] = _content_of(schema[columns.body].dataType)
        if len(set(kinds.values())) > 1:
            binary = next(name for name, kind in kinds.items() if kind is Content.BINARY)
            other = next(name for name, kind in kinds.items() if kind is not Content.BINARY)
            raise PipelineError(
                f"column {columns.body} is binary in {binary}, and not in {other}: load them apart"
            )

    def _check_json(
        self, columns: MessageColumns, others: Sequence[str], rows_max: int | None
    ) -> None:
        """Each column must be in some row. Mostly the first row has it. The whole table is read
        only if a column is rare, or misspelt. After `rows_max` rows only the columns that each row
        must have are looked for."""
        count = 0
        columns.check_values()
        missing = columns.names(others)
        known: dict[str, None] = {}
        for seen in self.files:
            names = [name for name, _ in seen.file.folders]
            known.update(dict.fromkeys(names))
            missing -= set(names)
            if not missing:
                return
            with decompressed(seen.file) as stream:
                for row in texts_of.json_rows(stream, self.style):
                    if isinstance(row, Malformed):
                        continue
                    if len(known) < _NAMES_SHOWN:
                        known.update(dict.fromkeys(row))
                    missing -= row.keys()
                    if not missing:
                        return
                    count += 1
                    if count == rows_max:
                        needed = MessageColumns(columns.due, subject_column=columns.subject_column)
                        needed.check_names(list(known))
                        return
        columns.check_names([name for name in known if name not in missing], others)

    def content(self, columns: MessageColumns) -> Content:
        """See `LoadTable`."""
        types = next((seen.types for seen in self.files), None)
        if columns.body is None or types is None:
            return Content.JSON
        return _content_of(spark_type(types[columns.body]))

    def passed(self, names: Sequence[str]) -> list[T.StructField]:
        """See `LoadTable`: with a type that all files have, or as text."""
        fields = []
        for number, name in enumerate(names):
            kinds = {seen.types[name] if seen.types else pa.string() for seen in self.files}
            kind = _passed_type(kinds.pop()) if len(kinds) == 1 else T.StringType()
            fields.append(T.StructField(_PASSED.format(number), kind))
        return fields

    def rows(self, job: Job, columns: MessageColumns, others: Sequence[str]) -> DataFrame:
        """See `LoadTable`."""
        fields = self.passed(others)
        passed = tuple(
            (name, one.name, to_arrow_type(one.dataType, timezone="UTC"))
            for name, one in zip(others, fields, strict=True)
        )
        plan = self._plan(columns, passed)
        return self._read(job, plan, lambda batches: batches, _spark_schema(plan.schema))

    def due_unit(self, columns: MessageColumns) -> str:
        """See `LoadTable`: the reader makes milliseconds of them."""
        return "ms"

    def has_numbers(self, columns: MessageColumns) -> bool:
        """See `LoadTable`."""
        kinds = [spark_type(seen.types[columns.due]) for seen in self.files if seen.types]
        return not kinds or not all(isinstance(kind, TIMES) for kind in kinds)

    def subjects(self, job: Job, columns: MessageColumns, most: int) -> list[str | None]:
        """See `LoadTable`."""
        assert columns.subject_column is not None
        # Only this column is needed, and Parquet reads no others.
        alone = MessageColumns(
            due=columns.due, subject_column=columns.subject_column, body=columns.due
        )
        plan = replace(self._plan(alone, ()), is_binary=False)
        schema = T.StructType([T.StructField(SUBJECT, T.StringType())])
        found = self._read(job, plan, _distinct_subjects, schema).distinct().limit(most).collect()
        return [row[0] for row in found]

    def _plan(
        self, columns: MessageColumns, passed: tuple[tuple[str, str, pa.DataType], ...]
    ) -> RowPlan:
        is_binary = self.content(columns) is Content.BINARY
        return RowPlan(self.kind, self.style, columns, is_binary, passed)

    def _read(
        self,
        job: Job,
        plan: RowPlan,
        then: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
        schema: T.StructType,
    ) -> DataFrame:
        pieces = [piece for seen in self.files for piece in seen.pieces]
        tasks = list(_gathered(pieces, lambda piece: piece.size_bytes)) or [[]]

        # Executors get functions by value: no method of an object that holds the session.
        def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            spare_imports()
            numbers = [number for batch in batches for number in batch.column(0).to_pylist()]
            for number in numbers:
                yield from then(read_rows(plan, tasks[number]))

        numbers = job.spark.range(0, len(tasks), 1, len(tasks))
        return numbers.mapInArrow(read, schema)


def _distinct_subjects(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Each subject of a task, once."""
    known: set[str | None] = set()
    for batch in batches:
        dictionary = batch.column(SUBJECT).dictionary_encode().dictionary
        found = set(text_or_none(dictionary)) - known
        known |= found
        if found:
            yield pa.RecordBatch.from_arrays([texts(list(found))], [SUBJECT])


def _gathered(items: Sequence[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Items in their order, in groups of PIECE_BYTES."""
    some: list[Item] = []
    total_bytes = 0
    for item in items:
        if some and total_bytes + size(item) > PIECE_BYTES:
            yield some
            some, total_bytes = [], 0
        some.append(item)
        total_bytes += size(item)
    if some:
        yield some


def _spark_schema(schema: pa.Schema) -> T.StructType:
    return T.StructType([T.StructField(one.name, from_arrow_type(one.type)) for one in schema])


def _content_of(kind: T.DataType) -> Content:
    return Content.BINARY if isinstance(kind, T.BinaryType) else Content.JSON


def _passed_type(kind: pa.DataType) -> T.DataType:
    """The type of a column in the file of ids: its own if Spark has it, or text."""
    found = spark_type(kind)
    is_plain = isinstance(
        found,
        T.StringType
        | T.BooleanType
        | T.BinaryType
        | T.DateType
        | T.TimestampType
        | T.TimestampNTZType
        | T.IntegralType
        | T.FractionalType,
    )
    return found if is_plain and not isinstance(found, T.DecimalType) else T.StringType()


def spark_type(kind: pa.DataType) -> T.DataType:
    """The type of Spark that stands for one of Arrow, to say which fields a column can fill. If
    Spark has none, a type that holds the same values."""
    if isinstance(kind, pa.BaseExtensionType):
        is_uuid = kind.extension_name == "arrow.uuid"
        return T.StringType() if is_uuid else spark_type(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return spark_type(kind.value_type)
    if pa.types.is_timestamp(kind):
        return T.TimestampNTZType() if kind.tz is None else T.TimestampType()
    if pa.types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        return T.StructType([T.StructField(one.name, spark_type(one.type)) for one in fields])
    if pa.types.is_map(kind):
        return T.MapType(spark_type(kind.key_type), spark_type(kind.item_type))
    if pa.types.is_decimal(kind):
        return T.DecimalType(min(kind.precision, 38), max(0, min(kind.scale, 38)))
    if hasattr(kind, "value_type"):  # Lists of all kinds.
        return T.ArrayType(spark_type(kind.value_type))
    for is_one, found in _SPARK_TYPES:
        if is_one(kind):
            return found
    with contextlib.suppress(Exception):  # Spark says so in several ways.
        return from_arrow_type(kind)
    return T.CalendarIntervalType() if pa.types.is_interval(kind) else T.VariantType()


_SPARK_TYPES: Final[tuple[tuple[Callable[[Any], bool], T.DataType], ...]] = (
    (pa.types.is_null, T.StringType()),
    (lambda kind: kind in (pa.string_view(), pa.large_string()), T.StringType()),
    (pa.types.is_date, T.DateType()),
    (pa.types.is_time, T.TimeType()),
    (pa.types.is_duration, T.DayTimeIntervalType()),
    (pa.types.is_uint64, T.DecimalType(20, 0)),
    (pa.types.is_unsigned_integer, T.LongType()),
    (pa.types.is_float16, T.FloatType()),
    (pa.types.is_fixed_size_binary, T.BinaryType()),
    (pa.types.is_large_binary, T.BinaryType()),
    (lambda kind: kind == pa.binary_view(), T.BinaryType()),
)


# ── tables that Spark reads ────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class FrameTable:
    """A table that Spark has read, or made."""

    frame: DataFrame

    def check(self, columns: MessageColumns, others: Sequence[str] = ()) -> None:
        """See `LoadTable`."""
        columns.check(self.frame.schema, others)

    def content(self, columns: MessageColumns) -> Content:
        """See `LoadTable`."""
        if columns.body is None:
            return Content.JSON
        return _content_of(self.frame.schema[columns.body].dataType)

    def passed(self, names: Sequence[str]) -> list[T.StructField]:
        """See `LoadTable`."""
        schema = self.frame.schema
        return [
            T.StructField(_PASSED.format(number), schema[name].dataType)
            for number, name in enumerate(names)
        ]

    def rows(self, job: Job, columns: MessageColumns, others: Sequence[str]) -> DataFrame:
        """See `LoadTable`."""
        chosen = [F.col(quoted(columns.due)).alias(DUE)]
        body = self._body(columns)
        if body is not None:
            chosen.append(body.alias(BODY))
        for name, alias in (
            (columns.subject_column, SUBJECT),
            (columns.key, KEY),
            (columns.headers, HEADERS),
        ):
            if name is not None:
                chosen.append(F.col(quoted(name)).alias(alias))
        for number, name in enumerate(others):
            chosen.append(F.col(quoted(name)).alias(_PASSED.format(number)))
        return self.frame.select(*chosen)

    def _body(self, columns: MessageColumns) -> Column | None:
        """A column, or all columns without another use; None: there is none."""
        if columns.body is not None:
            return F.col(quoted(columns.body))
        rest = columns.rest(self.frame.columns)
        return F.struct(*map(quoted, rest)) if rest else None

    def due_unit(self, columns: MessageColumns) -> str:
        """See `LoadTable`."""
        return columns.due_unit or "ms"

    def has_numbers(self, columns: MessageColumns) -> bool:
        """See `LoadTable`."""
        return not isinstance(self.frame.schema[columns.due].dataType, TIMES)

    def subjects(self, job: Job, columns: MessageColumns, most: int) -> list[str | None]:
        """See `LoadTable`."""
        assert columns.subject_column is not None
        column = F.col(quoted(columns.subject_column))
        found = self.frame.select(column).distinct().limit(most).collect()
        return [row[0] for row in found]
