"""Where a cluster's logs are, and a stream of their records as Spark's Kafka source gives them.

The number of shards and the stamps of the cluster stand in NAME.meta, which the driver reads with
the client that servers and `delayserver cluster` have. Spark reads the records themselves: its
source is no part of pyspark, and comes as jars.

Cost: half a second to ask the brokers; a stream has a consumer in each task. Threads: values.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, DataFrameReader, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamReader

from delayserver.errors import PipelineError
from delayserver.pipeline.topics.java_client import java_settings
from storage.errors import ClusterMissingError
from storage.replicated.engine import EngineLog
from storage.replicated.kafka_settings import ClientSettings, ClusterUrl, read_properties
from storage.replicated.meta import ClusterIdentity, MetaLog

COORDINATES: Final = "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0"
"""The newest version that exists; it works with the pinned pyspark."""
RECORD_COLUMNS: Final = ("topic", "value", "partition", "offset")
Topic = Literal["log", "settled"]


class KafkaSourceMissingError(PipelineError):
    """Spark was started without the jars of its Kafka source."""

    def __init__(self) -> None:
        super().__init__(
            f"Spark has no Kafka source: start it with --conf spark.jars.packages={COORDINATES} "
            "(fetched from Maven), or with the paths of its jars, --conf spark.jars=A.jar,B.jar,…"
        )


class KafkaClientMissingError(PipelineError):
    """The client that asks the brokers about the cluster comes with an extra."""

    def __init__(self) -> None:
        super().__init__(
            "a cluster's topics need the package confluent-kafka: pip install 'delayserver[kafka]'"
        )


@dataclass(frozen=True, slots=True)
class ClusterTopics:
    """The logs of a cluster."""

    url: ClusterUrl
    identity: ClusterIdentity
    client: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Settings that Spark's client needs besides the addresses (`java_client`); some are secret."""

    @property
    def stamps(self) -> Mapping[int, int]:
        """The stamp of the frames of each shard."""
        return dict(enumerate(self.identity.stamps))

    def name(self, topic: Topic) -> str:
        """The name of a topic at the brokers."""
        return self.url.log_topic if topic == "log" else self.url.settled_topic

    def stream(self, spark: SparkSession, *topics: Topic, **options: str) -> DataFrame:
        """The records of topics, RECORD_COLUMNS, from `startingOffsets` on, as they come.

        Raises KafkaSourceMissingError."""
        return _loaded(spark.readStream.options(**self._options(topics), **options))

    def table(self, spark: SparkSession, *topics: Topic) -> DataFrame:
        """The records that there are now. Raises KafkaSourceMissingError."""
        return _loaded(spark.read.options(**self._options(topics)))

    def _options(self, topics: Sequence[Topic]) -> dict[str, str]:
        return {
            "kafka.bootstrap.servers": ",".join(self.url.brokers),
            "kafka.isolation.level": "read_committed",
            # Brokers admit the cluster's readers by the beginning of their names.
            "groupIdPrefix": f"{self.url.name}.spark",
            "subscribe": ",".join(map(self.name, topics)),
            **{f"kafka.{name}": value for name, value in self.client.items()},
        }


def _loaded(reader: DataStreamReader | DataFrameReader) -> DataFrame:
    try:
        return reader.format("kafka").load().select(*RECORD_COLUMNS)
    except AnalysisException as error:
        if "Failed to find data source: kafka" not in str(error):
            raise
        raise KafkaSourceMissingError from None


def open_topics(url: str, kafka_config: Path | None = None) -> ClusterTopics:
    """The cluster of that URL (`kafka://HOST:PORT[,…]/NAME`). `kafka_config`: a file with the
    settings that its brokers want of clients.

    Raises EngineSettingsError for another URL or file, EngineError if the brokers cannot be
    reached, ClusterMissingError, KafkaClientMissingError."""
    where = ClusterUrl.parse(url)
    properties = {} if kafka_config is None else read_properties(kafka_config)
    client = java_settings(properties)
    try:
        from storage.replicated.kafka import KafkaEngine
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "confluent_kafka":
            raise
        raise KafkaClientMissingError from error
    engine = KafkaEngine(ClientSettings(where, properties))
    if not engine.has_topics():
        raise ClusterMissingError(where.meta_topic)
    return ClusterTopics(where, _identity(engine.meta()), client)


def _identity(meta: EngineLog) -> ClusterIdentity:
    with contextlib.closing(meta):
        identity, _ = MetaLog(meta).read_cluster()
    return identity
