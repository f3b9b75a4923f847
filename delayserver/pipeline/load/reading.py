"""Reading: the files of a table become rows of one schema, each file by its own.

    a row group of Parquet ─┐
    a file of CSV           ├─▶ due_ms, due, subject, key, body, headers, problem ─▶ staging
    lines of JSON          ─┘

Spark reads no values here. Its readers want one type for a column of all files, and get there by
changing values: a file in microseconds is read in the nanoseconds of another, an object of JSON
gets the fields of all others, `007` in the name of a folder becomes 7, and text that is not UTF-8
gets other characters. Here a task reads its files with pyarrow, or as text, and converts each value
as `publish.values` says. Nothing is guessed from the values of other rows.

A problem of a row (a line that is malformed, a key that is no text) goes with the row, and never
ends the others. A problem of a file ends the load, and the error names the file.

In JSON a body that is text is taken as JSON text if it is valid JSON, as in the other formats.
Other text becomes a JSON string. Text that begins like an object or array was meant to be JSON:
staging checks it, and rejects the row if it is not.

Cost: per row of 200 bytes 2 µs of Parquet, 6 of JSON and 8 of CSV with a quoted cell (one busy
core); memory of a batch of BATCH_BYTES.
Threads: tasks of Spark's, one file open in each.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from delayserver.errors import PipelineError
from delayserver.pipeline.load import text as texts_of
from delayserver.pipeline.load.files import TableFile, decompressed, opened
from delayserver.pipeline.load.staging import BODY, DUE, GIVEN_DUE, HEADERS, KEY, PROBLEM, SUBJECT
from delayserver.pipeline.load.text import Fields, Malformed, TextFormat
from delayserver.pipeline.publish.mapping import MessageColumns
from delayserver.pipeline.publish.values import (
    Problems,
    body_pieces,
    due_times,
    header_pieces,
    is_text,
    object_pieces,
    text_array,
    text_or_none,
    unwrapped,
)
from delayserver.records.arrow import binaries, fixed, texts

BATCH_BYTES: Final = 8 * 1024 * 1024
BATCH_ROWS: Final = 16_384
NOT_ENCODED: Final = "text is not in the file's encoding (--option encoding=…)"


@dataclass(frozen=True, slots=True)
class FilePiece:
    """A file, or a part of it, that is read in one go."""

    file: TableFile
    size_bytes: int
    groups: tuple[int, ...] = ()
    """Parquet: these row groups are read."""
    start: int = 0
    end: int | None = None
    """Lines of JSON: the lines that begin in these bytes are read; None: up to the end."""


@dataclass(frozen=True, slots=True)
class RowPlan:
    """How rows are made of a table."""

    kind: str
    style: TextFormat
    columns: MessageColumns
    is_binary: bool
    """Whether the bodies are no JSON."""
    passed: tuple[tuple[str, str, pa.DataType], ...] = ()
    """Columns for the file of ids: the name in the table, the name in the rows, the type."""

    @property
    def schema(self) -> pa.Schema:
        """The schema of the rows."""
        columns = self.columns
        fields: list[tuple[str, pa.DataType]] = [(DUE, pa.int64()), (GIVEN_DUE, pa.string())]
        fields.append((BODY, pa.binary() if self.is_binary else pa.string()))
        if columns.subject_column is not None:
            fields.append((SUBJECT, pa.string()))
        if columns.key is not None:
            fields.append((KEY, pa.string()))
        if columns.headers is not None:
            fields.append((HEADERS, pa.string()))
        fields.append((PROBLEM, pa.string()))
        return pa.schema(fields + [(name, kind) for _, name, kind in self.passed])


def read_rows(plan: RowPlan, pieces: Iterable[FilePiece]) -> Iterator[pa.RecordBatch]:
    """All rows of some pieces. Raises PipelineError, which names the file."""
    for piece in pieces:
        try:
            if plan.kind == "parquet":
                yield from _parquet_rows(plan, piece)
            elif plan.kind == "csv":
                yield from _csv_rows(plan, piece)
            else:
                yield from _json_rows(plan, piece)
        except PipelineError as error:
            name = piece.file.name
            raise error if name in str(error) else PipelineError(f"{name}: {error}") from error


# ── columns: Parquet and CSV ───────────────────────────────────────────────────────────────────


def _parquet_rows(plan: RowPlan, piece: FilePiece) -> Iterator[pa.RecordBatch]:
    with opened(piece.file) as stream:
        parquet = parquet_file(stream)
        instants = instants_of(parquet)
        inside = [name for name in parquet.schema_arrow.names if _is_wanted(plan, name)]
        for number in piece.groups:
            group = parquet.metadata.row_group(number)
            row_bytes = group.total_byte_size // max(1, group.num_rows)
            rows = max(1, min(BATCH_ROWS, BATCH_BYTES // max(1, row_bytes)))
            # Without a column the batch still has its number of rows.
            for batch in parquet.iter_batches(rows, row_groups=[number], columns=inside):
                columns = {
                    field.name: column.cast(instants[field.name])
                    if field.name in instants
                    else column
                    for field, column in zip(batch.schema, batch.columns, strict=True)
                }
                yield _rows_of(plan, piece.file, columns, batch.num_rows, Problems())


def parquet_file(stream: Any) -> pq.ParquetFile:
    """A file of Parquet; a page that does not match its checksum, where it has one, is an error."""
    return pq.ParquetFile(stream, coerce_int96_timestamp_unit="us", page_checksum_verification=True)


def instants_of(parquet: pq.ParquetFile) -> dict[str, pa.DataType]:
    """Columns with timestamps of 96 bits (Spark's and Hive's), and the right types for them:
    moments in UTC. Arrow has them without a time zone."""
    leaves = iter([parquet.schema.column(index) for index in range(len(parquet.schema))])
    found = {}
    for field in parquet.schema_arrow:
        kind = _with_instants(field.type, leaves)
        if kind != field.type:
            found[field.name] = kind
    return found


def _with_instants(kind: pa.DataType, leaves: Iterator[Any]) -> pa.DataType:
    if pa.types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        return pa.struct([one.with_type(_with_instants(one.type, leaves)) for one in fields])
    if pa.types.is_map(kind):
        key = _with_instants(kind.key_type, leaves)
        return pa.map_(key, _with_instants(kind.item_type, leaves))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        value = kind.value_field.with_type(_with_instants(kind.value_type, leaves))
        if pa.types.is_fixed_size_list(kind):
            return pa.list_(value, kind.list_size)
        return pa.large_list(value) if pa.types.is_large_list(kind) else pa.list_(value)
    leaf = next(leaves, None)
    if leaf is not None and leaf.physical_type == "INT96":
        return pa.timestamp("us", "UTC")
    return kind


def _csv_rows(plan: RowPlan, piece: FilePiece) -> Iterator[pa.RecordBatch]:
    with decompressed(piece.file) as stream:
        lines = texts_of.lines_of(stream, plan.style.encoding)
        rows = texts_of.csv_rows(lines, plan.style)
        first = next(rows, None) if not plan.style.has_header else None
        names = csv_names(lines, plan.style, first)
        for some in _batches(itertools.chain([] if first is None else [first], rows)):
            problems = Problems()
            cells: list[texts_of.Cells] = []
            for index, row in enumerate(some):
                if isinstance(row, Malformed) or len(row) != len(names):
                    problems[index] = row.reason if isinstance(row, Malformed) else "malformed line"
                    cells.append([None] * len(names))
                else:
                    cells.append(row)
            columns = dict(zip(names, map(list, zip(*cells, strict=True)), strict=True))
            arrays = {
                name: _as_text(columns[name], problems) for name in names if _is_wanted(plan, name)
            }
            malformed = {
                index: str(row.text) if isinstance(row, Malformed) else _joined(row, plan.style)
                for index, row in enumerate(some)
                if index in problems and (isinstance(row, Malformed) or len(row) != len(names))
            }
            yield _rows_of(plan, piece.file, arrays, len(some), problems, malformed)


def csv_names(
    lines: texts_of.TextLines, style: TextFormat, first: texts_of.Cells | Malformed | None
) -> list[str]:
    """The names of the columns. `first`: the first row of a file without a header."""
    if style.has_header:
        return texts_of.csv_header(lines, style)
    count = 0 if first is None or isinstance(first, Malformed) else len(first)
    return [f"_c{number}" for number in range(count)]


def _joined(row: texts_of.Cells, style: TextFormat) -> str:
    return style.separator.join(cell or "" for cell in row)


def _as_text(cells: Sequence[str | None], problems: Problems) -> pa.Array:
    try:
        return texts(cells)
    except UnicodeEncodeError:  # Bytes that are not in the encoding, as lone surrogates.
        encoded = []
        for index, cell in enumerate(cells):
            try:
                encoded.append(None if cell is None else cell.encode())
            except UnicodeEncodeError:
                problems.setdefault(index, NOT_ENCODED)
                assert cell is not None
                encoded.append(cell.encode("utf-8", "surrogateescape"))
        return binaries(encoded, pa.string())


def _is_wanted(plan: RowPlan, name: str) -> bool:
    columns = plan.columns
    named = {columns.due, columns.subject_column, columns.key, columns.body, columns.headers}
    is_rest = columns.body is None and name in columns.rest([name])
    return is_rest or name in named or any(name == one for one, _, _ in plan.passed)


def _rows_of(
    plan: RowPlan,
    file: TableFile,
    columns: dict[str, pa.Array],
    count: int,
    problems: Problems,
    malformed: "dict[int, str] | None" = None,
) -> pa.RecordBatch:
    """Rows of columns, those among them that the names of folders say."""
    for name, value in file.folders:
        if _is_wanted(plan, name):
            said = texts([value] * count)
            if name in columns and not _is_same(columns[name], value):
                raise PipelineError(
                    f"column {name} has other values than the name of its folder, {name}={value}"
                )
            columns.setdefault(name, said)
    of, due = plan.columns, columns[plan.columns.due]
    due_ms = due_times(due, of.due_unit or "ms", problems)
    made: dict[str, pa.Array] = {GIVEN_DUE: text_array(due, "due", Problems())}
    if of.subject_column is not None:
        made[SUBJECT] = unwrapped(columns[of.subject_column])
    if of.key is not None:
        made[KEY] = text_array(columns[of.key], "key", problems)
    if of.headers is not None:
        made[HEADERS] = _headers(columns[of.headers], problems)
    made[BODY] = _bodies(plan, columns, count, problems)
    for name, own, kind in plan.passed:
        made[own] = _passed(columns[name], kind)
    made[DUE] = _without(due_ms, problems)
    made[PROBLEM] = _texts([problems.get(index) for index in range(count)])
    if malformed:
        shown = text_or_none(made[BODY].cast(pa.string())) if not plan.is_binary else []
        if shown:
            for index, text in malformed.items():
                shown[index] = text.rstrip("\r\n")
            made[BODY] = _texts(shown)
    schema = plan.schema
    arrays = [_in_type(made[field.name], field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _without(due_ms: NDArray[np.int64], problems: Problems) -> pa.Array:
    """Due times; null in rows with a problem."""
    if not problems:
        return fixed(due_ms)
    is_sound = np.ones(len(due_ms), bool)
    is_sound[list(problems)] = False
    bits = pa.py_buffer(np.packbits(is_sound, bitorder="little"))
    return pa.Array.from_buffers(pa.int64(), len(due_ms), [bits, pa.py_buffer(due_ms)])


def _in_type(column: pa.Array, kind: pa.DataType) -> pa.Array:
    return column if column.type == kind else column.cast(kind)


def _texts(values: Sequence[str | None]) -> pa.Array:
    """Text for people, whatever characters it has."""
    encoded = [None if one is None else one.encode("utf-8", "surrogateescape") for one in values]
    return binaries(encoded, pa.string())


def _is_same(column: pa.Array, value: str | None) -> bool:
    found = text_or_none(text_array(column, "", Problems()))
    return all(one == value for one in found)


def _bodies(
    plan: RowPlan, columns: dict[str, pa.Array], count: int, problems: Problems
) -> pa.Array:
    kind = pa.binary() if plan.is_binary else pa.string()
    body = plan.columns.body
    if body is None:
        names = plan.columns.rest(columns)
        if not names:
            return pa.nulls(count, kind)
        rest = [columns[name] for name in names]
        return binaries(object_pieces(names, rest, count, problems), kind)
    column = unwrapped(columns[body])
    if is_text(column.type) or plan.is_binary:
        return column  # Staging looks whether it is JSON.
    return binaries(body_pieces(column, problems), kind)


def _headers(column: pa.Array, problems: Problems) -> pa.Array:
    column = unwrapped(column)
    if is_text(column.type):
        return column
    return binaries(header_pieces(column, problems), pa.string())


def _passed(column: pa.Array, kind: pa.DataType) -> pa.Array:
    column = unwrapped(column)
    if kind != pa.string():
        return column.cast(kind, safe=False)
    if pa.types.is_nested(column.type):
        return binaries(body_pieces(column, Problems()), kind)
    return text_array(column, "", Problems())


# ── JSON ───────────────────────────────────────────────────────────────────────────────────────


def _json_rows(plan: RowPlan, piece: FilePiece) -> Iterator[pa.RecordBatch]:
    if piece.start or piece.end is not None:
        with opened(piece.file) as stream:
            lines = _lines_between(stream, piece.start, piece.end)
            rows = texts_of.rows_of_lines(lines, plan.style, is_begin=not piece.start)
            yield from _of_objects(plan, piece.file, rows)
    else:
        with decompressed(piece.file) as stream:
            yield from _of_objects(plan, piece.file, texts_of.json_rows(stream, plan.style))


def _lines_between(stream: Any, start: int, end: int | None) -> Iterator[bytes]:
    """The lines that begin in these bytes."""
    if start:
        stream.seek(start - 1)
        stream.readline()  # The rest of one that has begun before, or a line end.
    while end is None or stream.tell() < end:
        line = stream.readline()
        if not line:
            return
        yield line


def _of_objects(
    plan: RowPlan, file: TableFile, rows: Iterator[Fields | Malformed]
) -> Iterator[pa.RecordBatch]:
    maker = _ObjectMaker(plan, file)
    for some in _batches(rows):
        yield maker.batch(some)


class _ObjectMaker:
    """Makes rows of objects of JSON. The names of folders are fields, too."""

    def __init__(self, plan: RowPlan, file: TableFile) -> None:
        self._plan = plan
        self._folders = {
            name: msgspec.Raw(msgspec.json.encode(value)) for name, value in file.folders
        }
        of = plan.columns
        self._taken = {of.due, of.subject_column, of.key, of.headers}

    def batch(self, rows: Sequence[Fields | Malformed]) -> pa.RecordBatch:
        plan, of, count = self._plan, self._plan.columns, len(rows)
        problems = Problems()
        cells: dict[str, list[bytes | None]] = {
            name: [None] * count for name in plan.schema.names if name != DUE
        }
        for index, row in enumerate(rows):
            if isinstance(row, Malformed):
                problems[index] = row.reason
                assert isinstance(row.text, bytes)
                cells[BODY][index] = row.text
                continue
            fields = self._folders | row if self._folders else row
            self._put(cells, index, fields, problems)
        given = binaries(cells[GIVEN_DUE], pa.string())
        due_ms = due_times(given, of.due_unit or "ms", problems)
        cells[PROBLEM] = [
            problems[index].encode() if index in problems else None for index in range(count)
        ]
        schema = plan.schema
        arrays = [
            _without(due_ms, problems)
            if field.name == DUE
            else binaries(cells[field.name], field.type)
            for field in schema
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _put(
        self, cells: dict[str, list[bytes | None]], index: int, row: Fields, problems: Problems
    ) -> None:
        plan, of = self._plan, self._plan.columns

        def take(name: str, what: str) -> bytes | None:
            raw = row.get(name)
            text = None if raw is None else _text_of(bytes(raw))
            if text is None or text[:1] not in (b"{", b"["):
                return text
            if bytes(raw or b"")[:1] == b'"':
                return text
            problems.setdefault(index, f"{what} is {_kind_of(text)}")
            return None

        try:
            cells[GIVEN_DUE][index] = take(of.due, "due time")
            if of.subject_column is not None:
                raw = row.get(of.subject_column)
                if raw is not None and bytes(raw)[:1] not in (b'"', b"n"):
                    problems.setdefault(index, "subject is not text")
                cells[SUBJECT][index] = take(of.subject_column, "subject")
            if of.key is not None:
                cells[KEY][index] = take(of.key, "key")
            if of.headers is not None:
                raw = row.get(of.headers)
                cells[HEADERS][index] = None if raw is None else _text_of(bytes(raw))
            for name, own, _ in plan.passed:
                raw = row.get(name)
                cells[own][index] = None if raw is None else _text_of(bytes(raw))
            cells[BODY][index] = self._body(row)
        except (msgspec.DecodeError, UnicodeDecodeError):
            problems.setdefault(index, NOT_ENCODED)

    def _body(self, row: Fields) -> bytes | None:
        name = self._plan.columns.body
        if name is not None:
            raw = row.get(name)
            return None if raw is None else _body_of(bytes(raw))
        taken = self._taken
        pairs = [
            msgspec.json.encode(one) + b":" + bytes(raw)
            for one, raw in row.items()
            if one not in taken
        ]
        body = b"{" + b",".join(pairs) + b"}"
        if not body.isascii():
            body.decode()
        return body


_decode_text: Callable[[bytes], str] = msgspec.json.Decoder(str).decode
_check_json = msgspec.json.Decoder(msgspec.Raw).decode


def _text_of(raw: bytes) -> bytes | None:
    """A value as text; a number as it stands, and None for null."""
    if raw[:1] == b'"':
        return _decode_text(raw).encode()
    return None if raw == b"null" else raw


def _body_of(raw: bytes) -> bytes | None:
    """A value as a body."""
    if raw[:1] != b'"':
        if not raw.isascii():
            raw.decode()
        return None if raw == b"null" else raw
    text = _decode_text(raw).encode()
    if text.lstrip()[:1] in (b"{", b"["):
        return text  # Staging looks whether it is JSON.
    try:
        _check_json(text)
    except (msgspec.DecodeError, RecursionError):
        return raw
    return text


def _kind_of(text: bytes) -> str:
    return "an object" if text[:1] == b"{" else "an array"


# ── batches ────────────────────────────────────────────────────────────────────────────────────


def _batches(rows: Iterable[Any]) -> Iterator[list[Any]]:
    """Rows, so many at a time as make a batch."""
    some: list[Any] = []
    total_bytes = 0
    for row in rows:
        some.append(row)
        total_bytes += _bytes_of(row)
        if len(some) >= BATCH_ROWS or total_bytes >= BATCH_BYTES:
            yield some
            some, total_bytes = [], 0
    if some:
        yield some


def _bytes_of(row: Any) -> int:
    if isinstance(row, Malformed):
        return len(row.text)
    if isinstance(row, dict):
        return sum(len(memoryview(raw)) for raw in row.values())
    return sum(len(cell) for cell in row if cell)
