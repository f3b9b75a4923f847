"""Which columns of a table make messages, and whether they can: what a load and a writer share.

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
    """Which columns of the table are what."""

    due: str
    subject: str | None = None
    """The subject of all rows."""
    subject_column: str | None = None
    key: str | None = None
    body: str | None = None
    """None: all columns that are nothing else, as one JSON object."""
    headers: str | None = None
    due_unit: str | None = None
    """In what whole numbers tell the due time, one of TIME_UNITS; None: nobody has said, ms."""

    def check_names(self, names: Collection[str], others: Iterable[str] = ()) -> None:
        """Raises PipelineError where the table lacks a column, one of `others` included."""
        named = (self.due, self.subject_column, self.key, self.body, self.headers, *others)
        for name in named:
            if name is not None and name not in names:
                raise PipelineError(f"the table has no column {name!r}; it has {', '.join(names)}")

    def check(self, schema: T.StructType, others: Iterable[str] = ()) -> None:
        """Raises PipelineError where the table lacks a column, one of `others` included, or where
        one cannot be what it is to be."""
        self.check_names(schema.names, others)
        if self.subject is not None and not is_subject(self.subject):
            raise PipelineError(f"{self.subject!r} cannot be a subject")
        if self.due_unit is not None and self.due_unit not in TIME_UNITS:
            raise PipelineError(f"{self.due_unit!r} is no unit of a due time: s, ms, us or ns")
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

    def rest(self, names: Iterable[str]) -> list[str]:
        """The columns that are the body where no other is."""
        taken = {self.due, self.subject_column, self.key, self.headers}
        return [name for name in names if name not in taken]


def _wrong(column: T.StructField, expected: str) -> PipelineError:
    return PipelineError(f"column {column.name} is {column.dataType.simpleString()}; {expected}")
