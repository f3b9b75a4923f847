"""Values: what the columns of a table become in a message. The one form, for a load and for a sink.

    due time    whole milliseconds (not seconds) since 1970; a part of one is rounded up, so that
                nothing is early
    text        keys and subjects: as it stands, and of another type what JSON has between quotes
    JSON        a time is RFC 3339 in UTC, with six digits of a second where there is a part of one;
                binary is base64; a decimal is a number; NaN and infinities, which JSON lacks, are
                null. That is how the client library writes times, too
    JSON text   as it stands, without blanks around it, as a publish over HTTP keeps it

Which row goes which way must make no difference: a key stands for one content, and the same row
sent in another form would contradict it.

What cannot be had of a row is a problem of that row, told by its index, and never ends the others:
text that is no UTF-8, a time that no calendar has, a body that is not JSON. Where there is a
problem the value is any.

Cost: next to nothing for a key in ASCII, 0.6 µs for 170 bytes of text that have to be JSON, 0.8 µs
for a row that becomes JSON and 0.25 for each column beyond its first (numbers and short texts;
nested ones and decimals take longer). Threads: pure.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from delayserver.errors import InputError
from delayserver.records.arrow import are_utf8, binaries, integers, pieces, present, strings
from delayserver.times import (
    SECONDS_REASON,
    TIME_MS_MAX,
    TIME_MS_MIN,
    are_seconds,
    parse_time_ms,
)

TIME_UNITS: Final = ("s", "ms", "us", "ns")
"""In which whole numbers may tell a due time."""
SECONDS: Final = f"due time: {SECONDS_REASON}, or say that the unit is s"
"""The problem of a row whose number is seconds, where it would be read as milliseconds."""
_MOST = np.iinfo(np.int64).max
_PER_MS: Final = {"us": 1_000, "ns": 1_000_000}
_WHOLE = re.compile(r"-?[0-9]{1,40}")
_BLANKS = b" \t\n\r"

_encode = msgspec.json.Encoder(decimal_format="number").encode
_check_json = msgspec.json.Decoder(msgspec.Raw).decode


class Problems(dict[int, str]):
    """Why rows of a batch cannot be messages, by their index: the first reason of each."""

    def add(self, bad: NDArray[np.bool_], reason: str) -> None:
        """These rows are bad; `bad`: shape (n), of all rows of the batch."""
        for index in np.flatnonzero(bad).tolist():
            self.setdefault(index, reason)


# ── due times ──────────────────────────────────────────────────────────────────────────────────


def due_times(column: pa.Array, unit: str, problems: Problems) -> NDArray[np.int64]:
    """Milliseconds since 1970, shape (n); what is further away than 64 bits can tell is as far as
    they can. `unit`: of whole numbers, one of TIME_UNITS."""
    problems.add(~present(column), "no due time")
    kind = column.type
    if is_text(kind):
        return _parsed(column, unit, problems)
    if pa.types.is_timestamp(kind):
        return in_ms(integers(column), kind.unit)
    if pa.types.is_date(kind):
        return integers(column.cast(pa.timestamp("ms"))).astype(np.int64)
    is_decimal = pa.types.is_decimal(kind)
    values = _whole_decimals(column) if is_decimal else integers(column).astype(np.int64)
    return _of_numbers(values, unit, present(column), problems)


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


# ── text ───────────────────────────────────────────────────────────────────────────────────────


def text_array(column: pa.Array, what: str, problems: Problems) -> pa.Array:
    """A column as text, null where there is nothing; `what` is its name in problems."""
    kind = column.type
    if is_text(kind) or _is_binary(kind):
        problems.add(present(column) & ~are_utf8(column), f"{what} is not UTF-8")
        return column if is_text(kind) else column.view(_text_of(kind))
    if pa.types.is_integer(kind):
        return column.cast(pa.string())
    texts = (None if one is None else one.strip(b'"') for one in json_pieces(column, problems))
    return binaries([None if text == b"null" else text for text in texts], pa.string())


def text_or_none(column: pa.Array) -> list[str | None]:
    """The values of a column of text; what is not UTF-8 with marks in place of it."""
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
    """The body of each row: binary as it stands, text as the JSON that it is, all else as JSON."""
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
    """Each value as JSON; None where there is nothing."""
    if pa.types.is_struct(column.type):
        names = [column.type.field(index).name for index in range(column.type.num_fields)]
        return _or_none(object_pieces(names, column.flatten(), len(column), problems), column)
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
            for at, text in remaining:  # noqa: B007 - whoever was at it when it failed
                if text is not None:
                    _check_json(text)
            return
        except (msgspec.DecodeError, RecursionError):
            yield at


def _encoded(values: Any, problems: Problems) -> list[bytes]:
    """Each value as JSON; of what cannot be, `null`."""
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


def _values(column: pa.Array, problems: Problems, name: str = "") -> list[Any]:
    """The values of a column, of types that the encoder knows."""
    where = f" (column {name})" if name else ""
    kind = column.type
    if is_text(kind):
        problems.add(
            present(column) & ~are_utf8(column), f"cannot be written as JSON: not UTF-8{where}"
        )
        return text_or_none(column)
    if pa.types.is_timestamp(kind) or pa.types.is_date32(kind):
        return _times(column, where, problems)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        simple: list[Any] = column.to_pylist()
        return simple
    column = column.cast(_in_utc(kind))
    try:
        values: list[Any] = column.to_pylist(maps_as_pydicts="lossy")
    except _UNREADABLE:
        return [_value(one, index, where, problems) for index, one in enumerate(column)]
    return values


_UNREADABLE = (ArithmeticError, TypeError, ValueError, pa.ArrowException)
"""What Arrow raises for a value that Python does not have."""


def _value(scalar: pa.Scalar, index: int, where: str, problems: Problems) -> Any:
    try:
        return scalar.as_py(maps_as_pydicts="lossy")
    except _UNREADABLE as error:
        reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        problems.setdefault(index, f"cannot be written as JSON: {reason}{where}")
        return None


def _times(column: pa.Array, where: str, problems: Problems) -> list[str | None]:
    """Times and dates as text, as the encoder writes those of Python, in a tenth of the time."""
    kind = column.type
    if pa.types.is_timestamp(kind):
        moments = in_ms(integers(column), kind.unit)
        column = column.cast(_in_utc(kind))
    else:
        moments = integers(column).astype(np.int64) * 86_400_000
    strange = (moments < TIME_MS_MIN) | (moments > TIME_MS_MAX)
    problems.add(
        present(column) & strange,
        f"cannot be written as JSON: a time before the year 1 or after 9999{where}",
    )
    texts = column.cast(pa.string())
    if pa.types.is_timestamp(kind):
        texts = pc.replace_substring(texts, " ", "T")
        texts = pc.replace_substring_regex(texts, r"\.0+(Z?)$", r"\1")
    return text_or_none(texts)


def _in_utc(kind: pa.DataType) -> pa.DataType:
    """The type with all times in UTC and microseconds, however deep they are: Spark hands them over
    in the time zone of the session."""
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", None if kind.tz is None else "UTC")
    if pa.types.is_list(kind):
        return pa.list_(_in_utc(kind.value_type))
    if pa.types.is_map(kind):
        return pa.map_(_in_utc(kind.key_type), _in_utc(kind.item_type))
    if pa.types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        return pa.struct([(field.name, _in_utc(field.type)) for field in fields])
    return kind
