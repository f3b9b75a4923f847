"""Sources: topics whose records are published, each once.

Cost: about 100 µs per call. Threads: belongs to the event loop.
"""

from typing import Final, Literal

from fastapi import APIRouter, Request
from msgspec import UNSET

from delayserver.api.rest.authorize import require
from delayserver.api.rest.common import Parts, json_of
from delayserver.api.rest.named import NamedKind, NamedRoutes, add_named_routes, subject_of
from delayserver.api.rest.targets import check_client, kafka_topic, topic_fields
from delayserver.parts.sources.records import KnownSource, OnError, Source, SourceState
from delayserver.parts.sources.sourcing import Sourcing, WantedSource
from delayserver.security.tokens import Action
from delayserver.times import format_time
from delayserver.wire.reading import read
from delayserver.wire.sources import (
    SkippedRecordDocument,
    SourceDocument,
    SourceListDocument,
    SourceModel,
)

GROUP_PREFIX: Final = "delayserver."

Sources = NamedRoutes[WantedSource, Source, SourceState, SourceDocument]


async def _read(sources: Sources, name: str, request: Request) -> WantedSource:
    wanted = read(await json_of(request), SourceModel)
    # Before anybody is told which brokers are allowed.
    require(sources.caller, Action.PUBLISH, wanted.subject)
    check_client("kafka")
    return WantedSource(
        name,
        wanted.subject,
        kafka_topic(wanted, sources.parts.targets),
        wanted.due_header,
        wanted.group or GROUP_PREFIX + name,
        OnError[wanted.on_error.upper()],
    )


def _document(parts: Parts, known: KnownSource) -> SourceDocument:
    source, state = known.definition, known.state
    error = parts.calls.part(Sourcing).errors.get(source.name)
    last = state.last_skipped
    reason: Literal["asked", "error"] = "error" if state.is_stopped else "asked"
    return SourceDocument(
        name=source.name,
        subject=subject_of(parts, known),
        type="kafka",
        due_header=source.due_header,
        group=source.group,
        on_error="stop" if source.on_error == OnError.STOP else "skip",
        paused=state.is_paused,
        pause_reason=reason if state.is_paused else None,
        error=None if state.is_paused else error,
        positions={str(one): offset for one, offset in sorted(state.positions.items())},
        published=state.taken,
        skipped=state.skipped,
        last_skipped=None
        if last is None
        else SkippedRecordDocument(
            last.partition, last.offset, last.reason, format_time(last.time_ms)
        ),
        changed_at=format_time(state.changed_ms),
        not_understood=known.problem or UNSET,
        **topic_fields(source.topic),
    )


router = APIRouter()
add_named_routes(
    router,
    NamedKind(
        word="source",
        decider=Sourcing,
        model=SourceModel,
        read=_read,
        one=SourceDocument,
        many=SourceListDocument,
        document=_document,
        put_text="Publish what stands in a topic, each offset once, from the first one on.\n\n"
        "One that is there is changed, and goes on where it is, unless it is to read another "
        "topic.",
        get_text="A source, how far it is, and what it could not publish last.",
        delete_text="End a source: when this answers, it takes nothing more. Its messages stay.",
        pause_text="Take nothing until it is resumed.",
        resume_text="Go on where it is; one that an error has stopped tries that record again.",
    ),
)
