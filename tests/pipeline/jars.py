"""Jars that Spark needs besides its own, fetched once for all checkouts."""

import subprocess
from functools import cache
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "scripts"
FETCH_TIMEOUT_S = 200


@cache
def spark_kafka_jars() -> tuple[str, ...]:
    """Paths of the jars of Spark's Kafka source."""
    command = 'source "$0"; ensure_spark_kafka; printf "%s\\n" "$spark_kafka_jars"/*.jar'
    return tuple(
        subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command, SCRIPTS / "environment.sh"],
            text=True,
            stdout=subprocess.PIPE,
            timeout=FETCH_TIMEOUT_S,
            check=True,
        ).stdout.split()
    )
