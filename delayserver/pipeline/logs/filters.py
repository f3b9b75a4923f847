"""Filters that Spark pushes down: which of them are applied here, to files, to frames, to rows.

    due_ms, due, hour   pick the files of the logs by hour
    seq                 picks segments and frames, by the range in their headers
    any number or name  picks rows, with a mask over the columns
    shard               picks directories, whose other files are not looked at

A filter that is taken is applied in full, so Spark does not apply it again; the others go back.

Cost: a few ns per row and filter. Threads: values and pure functions.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow.compute as pc
from pyspark.sql import datasource

from delayserver.pipeline.logs.columns import LogColumns, Names, values
from delayserver.pipeline.logs.logs import ALL, Range
from delayserver.records.arrow import texts
from storage.frame import Rows
from storage.rows import HOUR_MS

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_TIMES = ("due", "settled")
_SHARD = "shard"
_NAMES = {"subject": "subject_id", "subscription": "subscription_id"}
_OPERATORS: dict[type[datasource.Filter], str] = {
    datasource.EqualTo: "=",
    datasource.In: "in",
    datasource.LessThan: "<",
    datasource.LessThanOrEqual: "<=",
    datasource.GreaterThan: ">",
    datasource.GreaterThanOrEqual: ">=",
}
_COMPARE: dict[str, Callable[[np.ndarray, Any], np.ndarray]] = {
    "=": np.equal,
    "in": np.isin,
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
}


@dataclass(frozen=True, slots=True)
class Condition:
    """`column operator value`; of a name only equality. Times are microseconds since the epoch."""

    column: str
    operator: str
    value: Any

    def numbered(self, names: Names) -> "Condition":
        """With the numbers of subjects and subscriptions in place of their names."""
        if self.column not in _NAMES:
            return self
        table = names.subjects if self.column == "subject" else names.subscriptions
        wanted = [self.value] if self.operator == "=" else list(self.value)
        present = pc.is_in(table, value_set=texts(wanted), skip_nulls=True)
        numbers = np.flatnonzero(present.to_numpy(zero_copy_only=False))
        return Condition(_NAMES[self.column], "in", numbers)

    def mask(self, rows: Rows) -> np.ndarray:
        """Which rows it holds for."""
        return self._holds_for(values(rows, self.column))

    def holds_for(self, number: int) -> bool:
        """Whether it holds where the column is that number."""
        return bool(self._holds_for(np.array([number]))[0])

    def _holds_for(self, column: np.ndarray) -> np.ndarray:
        return _COMPARE[self.operator](column, self.value)

    @property
    def range(self) -> Range:
        """The whole numbers it may hold for."""
        match self.operator:
            case "=":
                return Range(self.value, self.value)
            case "in":
                return Range(min(self.value, default=0), max(self.value, default=-1))
            case "<":
                return Range(last=self.value - 1)
            case "<=":
                return Range(last=self.value)
            case ">":
                return Range(first=self.value + 1)
            case _:
                return Range(first=self.value)


def condition_of(columns: LogColumns, wanted: datasource.Filter) -> Condition | None:
    """The filter as a condition, or None if Spark has to apply it."""
    operator = _OPERATORS.get(type(wanted))
    if operator is None or len(wanted.attribute) != 1:  # type: ignore[attr-defined]
        return None
    (column,) = wanted.attribute  # type: ignore[attr-defined]
    value = wanted.value  # type: ignore[attr-defined]
    if column not in columns.types or value is None:
        return None
    if column in _NAMES:
        return Condition(column, operator, value) if operator in ("=", "in") else None
    if column not in (*columns.stored, "hour", _SHARD, *_TIMES):
        return None
    numbers = [_number(column, one) for one in (value if operator == "in" else (value,))]
    if None in numbers:
        return None
    return Condition(column, operator, numbers if operator == "in" else numbers[0])


def take(
    columns: LogColumns, filters: Iterable[datasource.Filter], taken: list[Condition]
) -> Iterator[datasource.Filter]:
    """Take the filters that are applied here; those that are not, for Spark."""
    for wanted in filters:
        condition = condition_of(columns, wanted)
        if condition is None:
            yield wanted
        else:
            taken.append(condition)


def within(conditions: Sequence[Condition], shard: int) -> list[Condition] | None:
    """What is left of the conditions in a shard; None if no row of it is wanted."""
    of_shard = [condition for condition in conditions if condition.column == _SHARD]
    if not all(condition.holds_for(shard) for condition in of_shard):
        return None
    return [condition for condition in conditions if condition.column != _SHARD]


def _number(column: str, value: object) -> int | None:
    if column in _TIMES:
        if not isinstance(value, datetime):
            return None
        moment = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
        return (moment - _EPOCH) // timedelta(microseconds=1)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def mask(conditions: Sequence[Condition], rows: Rows) -> np.ndarray:
    """Which rows all conditions hold for."""
    keep = np.ones(len(rows), bool)
    for condition in conditions:
        keep &= condition.mask(rows)
    return keep


def hours_of(conditions: Iterable[Condition]) -> Range:
    """The hours whose files may hold rows that are wanted."""
    hours = ALL
    for condition in conditions:
        unit = {"due_ms": HOUR_MS, "due": HOUR_MS * 1000, "hour": 1}.get(condition.column)
        if unit is not None:
            wanted = condition.range
            hours = _both(hours, Range(wanted.first // unit, wanted.last // unit))
    return hours


def seqs_of(conditions: Iterable[Condition]) -> Range:
    """The seqs of the rows that are wanted."""
    seqs = ALL
    for condition in conditions:
        if condition.column == "seq":
            seqs = _both(seqs, condition.range)
    return seqs


def _both(one: Range, other: Range) -> Range:
    return Range(max(one.first, other.first), min(one.last, other.last))
