"""Which columns of a table make messages, and whether they can; for a load and for a writer.

    subject    one for all rows, or a column
    due        a timestamp, a date, RFC 3339 text, or whole milliseconds since 1970 (or s, us, ns)
    key        text, a number, a truth value, a time or a date
    body       JSON text, binary, or a struct, map or array; without a column, all other columns as
               one JSON object
    headers    a map, a struct, or text with a JSON object

Cost: none. Threads: values.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from pyspark.sql import types as T

from delayserver.errors import PipelineError
from delayserver.pipeline.publish.values import TIME_UNITS
from delayserver.records.subjects import is_subject

NESTED = (T.StructType, T.MapType, T.ArrayType)
TIMES = (T.TimestampType, T.TimestampNTZType, T.DateType)
_WHOLE = (T.ByteType, T.ShortType, T.IntegerType, T.LongType)
_BODIES = (*NESTED, T.BinaryType, T.StringType, T.NumericType, T.BooleanType)
_HEADERS = (T.MapType, T.StructType, T.StringType)


def is_whole(kind: T.DataType) -> bool:
    """Whether its values are whole numbers."""
    return isinstance(kind, _WHOLE) or (isinstance(kind, T.DecimalType) and kind.scale == 0)


@dataclass(frozen=True, slots=True)
class MessageColumns:
    """The column of the table for each field of a message."""

    due: str
    subject: str | None = None
    """The subject of all rows."""
    subject_column: str | None = None
    key: str | None = None
    body: str | None = None
    """None: all columns without another use, as one JSON object."""
    headers: str | None = None
    due_unit: str | None = None
    """The unit of a due time in whole numbers, one of TIME_UNITS; None: none was given, ms."""

    def check_names(self, names: Collection[str], others: Iterable[str] = ()) -> None:
        """Raises PipelineError if the table lacks a column, one of `others` included."""
        for name in self._named(others):
            if name not in names:
                raise PipelineError(f"the table has no column {name!r}; it has {', '.join(names)}")

    def names(self, others: Iterable[str] = ()) -> set[str]:
        """The columns that are named, those of `others` among them."""
        return set(self._named(others))

    def _named(self, others: Iterable[str]) -> list[str]:
        named = (self.due, self.subject_column, self.key, self.body, self.headers, *others)
        return [name for name in named if name is not None]

    def check_values(self) -> None:
        """Raises PipelineError if the subject of all rows, or the unit, is not valid."""
        if self.subject is not None and not is_subject(self.subject):
            raise PipelineError(f"{self.subject!r} cannot be a subject")
        if self.due_unit is not None and self.due_unit not in TIME_UNITS:
            raise PipelineError(f"{self.due_unit!r} is no unit of a due time: s, ms, us or ns")

    def check(self, schema: T.StructType, others: Iterable[str] = ()) -> None:
        """Raises PipelineError if the table lacks a column, one of `others` included, or if a
        column has a type that its field cannot have."""
        self.check_names(schema.names, others)
        self.check_values()
        if self.subject_column is not None:
            column = schema[self.subject_column]
            if not isinstance(column.dataType, T.StringType):
                raise _wrong(column, "a subject is text")
        if self.key is not None and isinstance(schema[self.key].dataType, NESTED):
            raise _wrong(schema[self.key], "a key is text, a number, a time or a date")
        due = schema[self.due].dataType
        if not (isinstance(due, (*TIMES, T.StringType)) or is_whole(due)):
            raise _wrong(
                schema[self.due],
                "a due time is a timestamp, a date, whole milliseconds since 1970, or RFC 3339 "
                "text",
            )
        if self.body is not None and not isinstance(schema[self.body].dataType, _BODIES):
            raise _wrong(
                schema[self.body], "a body is JSON text, binary, or a struct, map or array"
            )
        if self.headers is not None and not isinstance(schema[self.headers].dataType, _HEADERS):
            raise _wrong(schema[self.headers], "headers are a map, a struct, or a JSON object")
        bodies = self.rest(schema.names) if self.body is None else [self.body]
        for name in [*bodies, *(one for one in (self.key, self.headers) if one is not None)]:
            refused = _without_json(schema[name].dataType, name)
            if refused is not None:
                raise PipelineError(
                    f"column {refused[0]} is {refused[1].simpleString()}, which JSON does not "
                    "have: give it as text or as a number"
                )

    def rest(self, names: Iterable[str]) -> list[str]:
        """The columns that make up the body if no column is named for it."""
        taken = {self.due, self.subject_column, self.key, self.headers}
        return [name for name in names if name not in taken]


def _without_json(kind: T.DataType, name: str) -> tuple[str, T.DataType] | None:
    """Returns where a type has a part without a form in JSON, and that part; None: it has none."""
    inner: list[tuple[str, T.DataType]] = []
    if isinstance(kind, T.StructType):
        inner = [(f"{name}.{field.name}", field.dataType) for field in kind.fields]
        if len(set(kind.names)) < len(kind.names):
            return name, kind
    elif isinstance(kind, T.ArrayType):
        inner = [(f"{name}[]", kind.elementType)]
    elif isinstance(kind, T.MapType):
        if isinstance(kind.keyType, NESTED):
            return f"a key of {name}", kind.keyType
        inner = [(f"a key of {name}", kind.keyType), (f"{name}{{}}", kind.valueType)]
    elif not isinstance(kind, _IN_JSON):
        return name, kind
    found = (_without_json(one, place) for place, one in inner)
    return next((one for one in found if one is not None), None)


_IN_JSON = (
    *TIMES,
    T.TimeType,
    T.StringType,
    T.CharType,
    T.VarcharType,
    T.BinaryType,
    T.BooleanType,
    T.NumericType,
    T.NullType,
)


def _wrong(column: T.StructField, expected: str) -> PipelineError:
    return PipelineError(f"column {column.name} is {column.dataType.simpleString()}; {expected}")
