"""Spark without the jars of its Kafka source: what is to be done is said."""

import subprocess
import sys

import pytest

from delayserver.pipeline.topics.source import COORDINATES

PROGRAM = """
from delayserver.errors import PipelineError
from delayserver.pipeline.session import open_session
from delayserver.pipeline.topics.source import ClusterTopics
from storage.replicated.kafka_settings import ClusterUrl
from storage.replicated.meta import make_identity

identity = make_identity("c", 1, "os", lambda length: bytes(range(1, length + 1)))
topics = ClusterTopics(ClusterUrl(("127.0.0.1:1",), "c"), identity)
settings = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"}
with open_session("bare", master="local[1]", settings=settings) as spark:
    for read in (topics.stream, topics.table):
        try:
            read(spark, "log")
        except PipelineError as error:
            print(error)
"""


@pytest.mark.spark
def test_without_the_jars_it_is_said_how_to_get_them() -> None:
    """A process of its own: the session of the tests has them."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], text=True, capture_output=True, timeout=110, check=True
    )
    first, second = done.stdout.splitlines()
    assert first == second
    assert first.startswith("Spark has no Kafka source: start it with --conf ")
    assert f"spark.jars.packages={COORDINATES}" in first
