"""Values: from the columns of a table to a message. There is one form, for a load and for a sink.

    due time    whole milliseconds (not seconds) since 1970; a part of one is rounded up, so that
                nothing is early
    text        keys and subjects: as it stands; another type as JSON writes it between quotes
    JSON        a time is RFC 3339 in UTC, with six digits of a second where there is a part of one,
                rounded up; binary is base64; a decimal is a number; NaN and infinities, which JSON
                lacks, are null. It is the same however deep the value is nested
    JSON text   as it stands, without blanks around it, as a publish over HTTP keeps it

A row must give the same message whichever way it goes, because a key stands for one content. The
same row sent in another form would contradict it.

A value that cannot be converted is a problem of its row, reported by the row's index, and never
ends the others: text that is no UTF-8, a time that no calendar has, a body that is not JSON. In a
row with a problem the value means nothing.

Cost: next to nothing for a key in ASCII, 0.6 µs for 170 bytes of text that have to be JSON, 0.8 µs
for a row that becomes JSON and 0.25 for each column beyond its first (numbers and short texts;
nested ones and decimals take longer). Threads: pure.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from delayserver.errors import InputError
from delayserver.records.arrow import are_utf8, binaries, fixed, integers, pieces, present, strings
from delayserver.times import (
    SECONDS_REASON,
    TIME_MS_MAX,
    TIME_MS_MIN,
    are_seconds,
    parse_time_ms,
)

TIME_UNITS: Final = ("s", "ms", "us", "ns")
"""The units of due times in whole numbers."""
SECONDS: Final = f"due time: {SECONDS_REASON}, or say that the unit is s"
"""The problem of a row whose number is seconds, and would be read as milliseconds."""
_MOST = np.iinfo(np.int64).max
_PER_MS: Final = {"us": 1_000, "ns": 1_000_000}
_WHOLE = re.compile(r"-?[0-9]{1,40}")
_BLANKS = b" \t\n\r"

_encode = msgspec.json.Encoder(decimal_format="number").encode
_check_json = msgspec.json.Decoder(msgspec.Raw).decode


class Problems(dict[int, str]):
    """Why rows of a batch cannot be messages, by their index; for each row the first reason."""

    def add(self, bad: NDArray[np.bool_], reason: str) -> None:
        """These rows are bad; `bad`: shape (n), of all rows of the batch."""
        self.add_rows(np.flatnonzero(bad), reason)

    def add_rows(self, rows: NDArray[np.int64], reason: str) -> None:
        """These rows are bad; `rows`: their indexes, each perhaps several times."""
        for index in rows.tolist():
            self.setdefault(index, reason)


# ── due times ──────────────────────────────────────────────────────────────────────────────────


def due_times(column: pa.Array, unit: str, problems: Problems) -> NDArray[np.int64]:
    """Milliseconds since 1970, shape (n); a time beyond the range of 64 bits becomes the end of
    that range. `unit`: of whole numbers, one of TIME_UNITS."""
    column = unwrapped(column)
    problems.add(~present(column), "no due time")
    kind = column.type
    if is_text(kind):
        return _parsed(column, unit, problems)
    if pa.types.is_timestamp(kind):
        return in_ms(integers(column), kind.unit)
    if pa.types.is_date(kind):
        return integers(column.cast(pa.timestamp("ms"))).astype(np.int64)
    values = _whole_decimals(column) if pa.types.is_decimal(kind) else integers(column)
    if values.dtype == np.uint64:
        values = np.minimum(values, np.uint64(_MOST))
    return _of_numbers(values.astype(np.int64), unit, present(column), problems)


def _of_numbers(
    values: NDArray[np.int64], unit: str, there: NDArray[np.bool_], problems: Problems
) -> NDArray[np.int64]:
    if unit == "ms":
        problems.add(there & are_seconds(values), SECONDS)
    return in_ms(values, unit)


def in_ms(values: NDArray[np.int64], unit: str) -> NDArray[np.int64]:
    """Times in milliseconds, rounded up, and no further away than 64 bits can tell."""
    if unit == "ms":
        return values
    if unit == "s":
        return np.clip(values, -(_MOST // 1000), _MOST // 1000) * 1000
    return -(-np.maximum(values, -_MOST) // _PER_MS[unit])


def _whole_decimals(column: pa.Array) -> NDArray[np.int64]:
    try:
        return integers(column.cast(pa.int64()))
    except pa.ArrowInvalid:  # one of them has more than 64 bits
        values = (0 if value is None else int(value) for value in column.to_pylist())
        return np.fromiter((_within_64_bits(value) for value in values), np.int64, len(column))


def _within_64_bits(value: int) -> int:
    return max(-_MOST, min(value, _MOST))


def _parsed(column: pa.Array, unit: str, problems: Problems) -> NDArray[np.int64]:
    """Due times that are text: RFC 3339, or the digits of a whole number."""
    due_ms = np.zeros(len(column), np.int64)
    numbers = []
    there = np.flatnonzero(present(column)).tolist()
    texts = strings(column)
    for index in there:
        text = texts[index].strip()
        if _WHOLE.fullmatch(text):
            due_ms[index] = _within_64_bits(int(text))
            numbers.append(index)
            continue
        try:
            due_ms[index] = parse_time_ms(text)
        except InputError:
            problems.setdefault(index, f"due time cannot be read: {texts[index][:64]!r}")
    are_numbers = np.zeros(len(column), np.bool_)
    are_numbers[numbers] = True
    return np.where(are_numbers, _of_numbers(due_ms, unit, are_numbers, problems), due_ms)


def given_times(column: pa.Array) -> list[str | int | None]:
    """Due times as the table has them, for people that look at a rejected row: whole numbers in
    their own unit, text as it stands, and all other types as text."""
    column = unwrapped(column)
    if pa.types.is_integer(column.type):
        numbers: list[str | int | None] = column.to_pylist()
        return numbers
    return list(text_or_none(text_array(column, "due", Problems())))


# ── text ───────────────────────────────────────────────────────────────────────────────────────


def text_array(column: pa.Array, what: str, problems: Problems) -> pa.Array:
    """A column as text, null if there is nothing; `what` is its name in problems."""
    column = unwrapped(column)
    kind = column.type
    if is_text(kind) or _is_binary(kind):
        problems.add(present(column) & ~are_utf8(column), f"{what} is not UTF-8")
        return column if is_text(kind) else column.view(_text_of(kind))
    if pa.types.is_integer(kind):
        return column.cast(pa.string())
    texts = (None if one is None else one.strip(b'"') for one in json_pieces(column, problems))
    return binaries([None if text == b"null" else text for text in texts], pa.string())


def text_or_none(column: pa.Array) -> list[str | None]:
    """The values of a column of text; text that is not UTF-8 has marks in place of bad bytes."""
    if not column.null_count:
        return list(strings(column))
    pairs = zip(strings(column), present(column).tolist(), strict=True)
    return [text if there else None for text, there in pairs]


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of that type holds text."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _text_of(kind: pa.DataType) -> pa.DataType:
    return pa.large_string() if pa.types.is_large_binary(kind) else pa.string()


# ── JSON ───────────────────────────────────────────────────────────────────────────────────────


def body_pieces(column: pa.Array, problems: Problems) -> list[bytes | None]:
    """The body of each row: binary as it stands, text as its JSON, other types as JSON."""
    column = unwrapped(column)
    if _is_binary(column.type):
        return _or_none(pieces(column), column)
    if is_text(column.type):
        return json_text_pieces(column, "body is", problems)
    return json_pieces(column, problems)


def json_text_pieces(column: pa.Array, what: str, problems: Problems) -> list[bytes | None]:
    """Text that has to be JSON, without blanks around it; `what`: `body is` or `headers are`."""
    texts = _or_none(pieces(column), column)
    for index in _not_json(texts):
        problems.setdefault(index, f"{what} not JSON")
    # The decoder does not look into texts.
    problems.add(present(column) & ~are_utf8(column), f"{what} not UTF-8")
    for index, text in enumerate(texts):
        if text and (text[0] in _BLANKS or text[-1] in _BLANKS):
            texts[index] = text.strip(_BLANKS)
    return texts


def json_pieces(column: pa.Array, problems: Problems) -> list[bytes | None]:
    """Each value as JSON; None if there is nothing."""
    values = _values(column, problems)
    return _or_none(_encoded(values, problems), column)


def object_pieces(
    names: Sequence[str], columns: Sequence[pa.Array], count: int, problems: Problems
) -> list[bytes]:
    """Each row as a JSON object of these columns."""
    if not names:
        return [b"{}"] * count
    values = [_values(column, problems, name) for name, column in zip(names, columns, strict=True)]
    rows = (dict(zip(names, row, strict=True)) for row in zip(*values, strict=True))
    return _encoded(rows, problems)


def header_pieces(column: pa.Array, problems: Problems) -> list[bytes | None]:
    """The headers of each row as a JSON object; a field of a struct that is null is no header."""
    column = unwrapped(column)
    if is_text(column.type):
        return json_text_pieces(column, "headers are", problems)
    if not pa.types.is_struct(column.type):
        return json_pieces(column, problems)
    rows = _values(column, problems, "headers")
    given = ({k: v for k, v in (row or {}).items() if v is not None} for row in rows)
    return _or_none(_encoded(given, problems), column)


def _not_json(texts: Sequence[bytes | None]) -> Iterator[int]:
    """The indexes of those that are not JSON."""
    remaining = enumerate(texts)
    at = -1
    while True:
        try:
            for at, text in remaining:  # noqa: B007 - the index at which the check failed
                if text is not None:
                    _check_json(text)
            return
        except (msgspec.DecodeError, RecursionError):
            yield at


def _encoded(values: Any, problems: Problems) -> list[bytes]:
    """Each value as JSON; `null` for a value that JSON cannot hold."""
    encoded: list[bytes] = []
    for value in values:
        try:
            encoded.append(_encode(value))
        except (TypeError, ValueError, RecursionError) as error:
            problems.setdefault(len(encoded), f"cannot be written as JSON: {error}")
            encoded.append(b"null")
    return encoded


def _or_none(values: Sequence[bytes], column: pa.Array) -> list[bytes | None]:
    if not column.null_count:
        return list(values)
    there = present(column).tolist()
    return [value if one else None for value, one in zip(values, there, strict=True)]


# ── values that are encoded ────────────────────────────────────────────────────────────────────


def unwrapped(column: pa.Array) -> pa.Array:
    """The same values in a type that says how they are stored: without dictionaries, views, and
    extensions other than UUIDs, which are text."""
    kind = column.type
    if pa.types.is_null(kind):
        return pa.nulls(len(column), _TEXT)
    if isinstance(kind, pa.BaseExtensionType):
        if kind.extension_name == "arrow.uuid":
            return pa.array(
                [None if one is None else str(one) for one in column.to_pylist()], _TEXT
            )
        return unwrapped(column.storage)
    if pa.types.is_dictionary(kind):
        return unwrapped(column.dictionary_decode())
    if pa.types.is_run_end_encoded(kind):
        return unwrapped(pc.run_end_decode(column))
    if kind == pa.string_view():
        return column.cast(_TEXT)
    if kind == pa.binary_view() or pa.types.is_fixed_size_binary(kind):
        return column.cast(pa.binary())
    if pa.types.is_float16(kind):
        return column.cast(pa.float32())
    return column


_TEXT = pa.string()


def _values(
    column: pa.Array, problems: Problems, name: str = "", rows: NDArray[np.int64] | None = None
) -> list[Any]:
    """The values of a column, of types that the encoder knows; shape (n). `name`: of the column, in
    problems; without one it is the field of a struct. `rows`: to which row of the batch each value
    belongs; None: its own."""
    where = f" (column {name})" if name else ""
    if rows is None:
        rows = np.arange(len(column))
    column = unwrapped(column)
    kind = column.type
    if is_text(kind):
        bad = present(column) & ~are_utf8(column)
        problems.add_rows(rows[bad], f"cannot be written as JSON: not UTF-8{where}")
        return text_or_none(column)
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return _times(column, where, problems, rows)
    if pa.types.is_time(kind):
        texts: list[str | None] = column.cast(_TEXT).to_pylist()
        return [None if text is None else _FRACTION_OF_ZERO.sub("", text) for text in texts]
    if pa.types.is_struct(kind):
        return _structs(column, problems, name, rows)
    if pa.types.is_map(kind):
        return _maps(column, problems, name, rows)
    if _is_list(kind):
        return _lists(column, problems, name, rows)
    if not (
        pa.types.is_primitive(kind) or pa.types.is_decimal(kind) or _is_binary(kind)
    ) or pa.types.is_duration(kind):
        problems.add_rows(rows, f"cannot be written as JSON: {kind}{where}")
        return [None] * len(column)
    values: list[Any] = column.to_pylist()
    return values


_FRACTION_OF_ZERO = re.compile(r"\.0+$")


def _is_list(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(kind)
        or pa.types.is_large_list(kind)
        or pa.types.is_fixed_size_list(kind)
        or pa.types.is_list_view(kind)
        or pa.types.is_large_list_view(kind)
    )


def _structs(
    column: pa.Array, problems: Problems, name: str, rows: NDArray[np.int64]
) -> list[dict[str, Any] | None]:
    names = [column.type.field(index).name for index in range(column.type.num_fields)]
    if not names:
        return [{} if one else None for one in present(column).tolist()]
    fields = zip(names, column.flatten(), strict=True)
    parts = [_values(part, problems, name or field, rows) for field, part in fields]
    found = [dict(zip(names, row, strict=True)) for row in zip(*parts, strict=True)]
    return _where_present(found, column)


def _lists(
    column: pa.Array, problems: Problems, name: str, rows: NDArray[np.int64]
) -> list[list[Any] | None]:
    counts = integers(pc.list_value_length(column).fill_null(0)).astype(np.int64)
    values = _values(column.flatten(), problems, name, np.repeat(rows, counts))
    ends = np.cumsum(counts).tolist()
    return _where_present(
        [values[end - n : end] for n, end in zip(counts, ends, strict=True)], column
    )


def _maps(
    column: pa.Array, problems: Problems, name: str, rows: NDArray[np.int64]
) -> list[dict[str, Any] | None]:
    # Not by a cast to a list of pairs: pyarrow 26 makes invalid ones where a type is null.
    offsets = column.offsets.to_numpy().astype(np.int64)
    counts = np.where(present(column), np.diff(offsets), 0)
    keys, items = (
        part.slice(offsets[0], offsets[-1] - offsets[0]) for part in (column.keys, column.items)
    )
    if counts.sum() < len(keys):  # Some null maps hold entries, which are skipped.
        stays = np.repeat(present(column), np.diff(offsets))
        keys, items = keys.filter(fixed(stays)), items.filter(fixed(stays))
    inner, of_keys = np.repeat(rows, counts), Problems()
    texts = text_or_none(text_array(keys, "a key of a map", of_keys))
    for index, reason in of_keys.items():
        problems.setdefault(int(inner[index]), f"cannot be written as JSON: {reason}")
    values = _values(items, problems, name, inner)
    ends = np.cumsum(counts).tolist()
    found = []
    for row, count, end in zip(rows.tolist(), counts.tolist(), ends, strict=True):
        made: dict[Any, Any] = dict(
            zip(texts[end - count : end], values[end - count : end], strict=True)
        )
        if len(made) < count:
            problems.setdefault(row, "cannot be written as JSON: a map has a key twice")
        found.append(made)
    return _where_present(found, column)


_V = TypeVar("_V")


def _where_present(values: list[_V], column: pa.Array) -> list[_V | None]:
    if not column.null_count:
        return list(values)
    there = present(column).tolist()
    return [value if one else None for value, one in zip(values, there, strict=True)]


def _times(
    column: pa.Array, where: str, problems: Problems, rows: NDArray[np.int64]
) -> list[str | None]:
    """Times and dates as text, as the encoder writes those of Python, in a tenth of the time."""
    kind = column.type
    if pa.types.is_timestamp(kind):
        moments = in_ms(integers(column), kind.unit)
    else:
        moments = integers(column).astype(np.int64)
        moments = moments * _DAY_MS if pa.types.is_date32(kind) else moments
    strange = (moments < TIME_MS_MIN) | (moments > TIME_MS_MAX)
    problems.add_rows(
        rows[present(column) & strange],
        f"cannot be written as JSON: a time before the year 1 or after 9999{where}",
    )
    if strange.any():  # There is no text for it.
        column = pc.if_else(fixed(strange), pa.scalar(None, kind), column)
    if not pa.types.is_timestamp(kind):
        return text_or_none(column.cast(pa.date32()).cast(_TEXT))
    texts = _in_microseconds(column).cast(_TEXT)
    texts = pc.replace_substring(texts, " ", "T")
    return text_or_none(pc.replace_substring_regex(texts, r"\.0+(Z?)$", r"\1"))


_DAY_MS = 86_400_000


def _in_microseconds(column: pa.Array) -> pa.Array:
    """Timestamps in microseconds, rounded up, and in UTC if they have a time zone: Spark hands them
    over in that of the session."""
    kind = column.type
    wanted = pa.timestamp("us", None if kind.tz is None else "UTC")
    if kind.unit != "ns":
        return column.cast(wanted)
    micros = fixed(-(-integers(column) // 1000), wanted)
    return micros if not column.null_count else pc.if_else(column.is_valid(), micros, None)
