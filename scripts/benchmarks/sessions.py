"""The Spark session of a benchmark: an operator's, or one that only has to work, and soon."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import SparkSession

from delayserver.pipeline import session

CLASSES = Path(sys.prefix) / "spark.jsa"
"""Those of Spark as Java has them in memory, if `ensure_spark_classes` (scripts/environment.sh) has
kept them. They save half of what a start takes of a processor."""
QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
if CLASSES.exists():
    # Java prints it, and goes on without, when they are those of other jars.
    QUICK_JAVA += f" -XX:SharedArchiveFile={CLASSES} -Xlog:cds*=off"

QUICK_SETTINGS = {
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": QUICK_JAVA,
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
