"""The Spark session of a benchmark: an operator's, or one that only has to work, and soon."""

from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

from delayserver.pipeline import session

QUICK_SETTINGS = {
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.shuffle.partitions": "2",
    # Compiling a query takes longer than so few rows.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
}


@contextmanager
def open_session(name: str, master: str, *, quick: bool) -> Iterator[SparkSession]:
    """A session that ends with the block."""
    settings = QUICK_SETTINGS if quick else {}
    with session.open_session(name, master=master, settings=settings) as opened:
        yield opened
