"""Registers sources with the core. Cost: none. Threads: immutable values."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from delayserver.api.scopes import named_rules
from delayserver.parts.part import Feature, Halves, Host, Runner, Write
from delayserver.parts.sources.records import (
    SOURCE_CHANGES,
    check_source,
    check_source_state,
    read_source_state,
    unpack_source,
)
from delayserver.parts.sources.sourcing import Sourcing
from delayserver.records.tables import named_writes
from storage.catalog import Table
from storage.rows import RecordKind

if TYPE_CHECKING:
    from fastapi import APIRouter

    from delayserver.parts.sources.feeds import FeedOpener

VERBS: Final = ("pause", "resume")


def _effect(payload: bytes) -> Iterator[Write]:
    change, _ = SOURCE_CHANGES.read(payload)
    tables = Table.SOURCES, Table.SOURCE_STATES
    return named_writes(tables, change.name, change.source, change.state)


def _run(sources: Sourcing, host: Host) -> Runner:
    from delayserver.parts.sources.runner import SourceRunner

    def make_opener() -> "FeedOpener":
        # The client of Kafka may be missing, and is imported once there is a source.
        from delayserver.parts.sources.kafka_source import KafkaFeedOpener

        return KafkaFeedOpener(host.targets)

    runner = SourceRunner(sources, make_opener, host.clock, host.on_fatal)
    host.metrics.gauge("sources_failing", "Sources that cannot go on", runner.failing)
    return runner


def _routes() -> "APIRouter":
    from delayserver.parts.sources.rest import router

    return router


SOURCES_PART: Final = Feature(
    name="source",
    effects={RecordKind.SOURCE: _effect},
    checks={Table.SOURCES: check_source, Table.SOURCE_STATES: check_source_state},
    halves=Halves(
        Table.SOURCES,
        lambda value: unpack_source(value).subject_id,
        Table.SOURCE_STATES,
        lambda value: read_source_state(value)[0].seq,
        "how far it is",
    ),
    decide=Sourcing,
    run=_run,
    routes=_routes,
    rules=named_rules("sources", VERBS),
    collection="sources",
    verbs=VERBS,
    examples={
        "SourceModel": [
            {
                "type": "kafka",
                "bootstrap": "127.0.0.1:9092",
                "topic": "orders",
                "subject": "order.unpaid",
                "due_header": "delay-until",
            }
        ]
    },
)
