"""A node joins its cluster: it learns the cluster's facts, and the number that it has in it.

    Settings ──▶ the log of the cluster's facts ──▶ Membership, for all processes of the node

A node that is started together with the brokers waits for them. One that has been in the cluster
before gets the number that it had.

Cost: two reads of a short log, and an append the first time. Threads: one, before all others.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import structlog

from delayserver.clocks import stopwatch_ms, wall_clock_ms
from delayserver.cluster.membership import Membership
from delayserver.cluster.placement import Placement
from delayserver.cluster.watch import ClusterObserver
from delayserver.config import Settings
from delayserver.errors import LibraryError
from storage.errors import EngineError
from storage.replicated.meta import MetaLog

if TYPE_CHECKING:
    from storage.replicated.kafka import KafkaEngine

RETRY_S: Final = 2.0

log = structlog.get_logger()


def open_engine(settings: Settings) -> "KafkaEngine":
    """The engine that keeps the cluster's logs. Raises LibraryError, EngineSettingsError."""
    try:
        from storage.replicated.kafka import KafkaEngine
    except ImportError as error:
        raise LibraryError(
            "a cluster needs confluent-kafka: pip install 'delayserver[kafka]'"
        ) from error
    from storage.replicated.kafka_settings import ClientSettings, ClusterUrl, read_properties

    assert settings.cluster is not None, "a relation of the settings"
    config = settings.kafka_config
    return KafkaEngine(
        ClientSettings(
            ClusterUrl.parse(settings.cluster), {} if config is None else read_properties(config)
        )
    )


def open_watch(settings: Settings, shards: int) -> ClusterObserver:
    """Watch the cluster from now on. Raises EngineSettingsError."""
    engine = open_engine(settings)
    meta = MetaLog(engine.meta())
    return ClusterObserver(engine, meta, shards, clock=wall_clock_ms, stopwatch=stopwatch_ms)


def join(settings: Settings, sleep: Callable[[float], None]) -> Membership:
    """Waits for the brokers, however long they take. Raises StorageError, LibraryError."""
    engine = open_engine(settings)
    assert settings.node is not None, "a relation of the settings"
    while True:
        meta = engine.meta()
        try:
            cluster = MetaLog(meta)
            number = cluster.register(settings.node, settings.zone)
            identity, _ = cluster.read_cluster()
            return Membership(settings.node, number, identity, Placement.of(cluster.read()))
        except EngineError as error:
            log.warning("waiting for the brokers of the cluster", error=str(error))
        finally:
            meta.close()
        sleep(RETRY_S)
