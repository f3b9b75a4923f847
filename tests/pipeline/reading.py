"""The data sources without Spark: what its driver and its tasks do with them, in this process."""

import pickle
from typing import TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from delayserver.pipeline.logs.columns import log_types
from delayserver.pipeline.logs.source import DelayLog
from delayserver.pipeline.states.history import TYPES, DelayHistory
from delayserver.pipeline.states.states import COLUMNS, DelayState
from storage.rows import LogKind

Part = TypeVar("Part", bound=InputPartition)


def read_table(
    source: type[DataSource], path: object, *columns: str, **options: object
) -> pa.Table:
    """All rows of a source, of these columns; by default those that it has by itself."""
    reader, schema = open_reader(source, path, *columns, **options)
    batches = [batch for part in reader.partitions() for batch in reader.read(sent(part))]
    return pa.Table.from_batches(batches, to_arrow_schema(schema, timezone="UTC"))


def open_reader(
    source: type[DataSource], path: object, *columns: str, **options: object
) -> tuple[DataSourceReader, StructType]:
    """The reader of a source, and its schema. An option that Python cannot name ends in `_`."""
    given = {name.rstrip("_"): str(value) for name, value in options.items()}
    made = source({"path": str(path), **given})
    schema = made.schema()
    if columns:
        types = {
            DelayLog: log_types(LogKind[str(options.get("log", "schedule")).upper()]),
            DelayState: COLUMNS.types,
            DelayHistory: TYPES,
        }[source]
        schema = from_arrow_schema(pa.schema([(name, types[name]) for name in columns]))
    assert isinstance(schema, StructType)
    return made.reader(schema), schema


def sent(part: Part) -> Part:
    """A partition as it comes to a task."""
    found: Part = pickle.loads(pickle.dumps(part))
    return found
