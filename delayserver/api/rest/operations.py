"""Operations: the server's health, its counters, its forecast, and the places of its shards.

Cost: about 100 µs per call; metrics, stats and the forecast go over all hours of the catalog.
Threads: belongs to the event loop.
"""

from typing import Annotated

import msgspec
from fastapi import APIRouter, Header, Query, Request, Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from delayserver.api.documents import NAMED_PAGE_MAX
from delayserver.api.hot.paths import ALIVE_PATH, CLUSTER_PATH, READY_PATH
from delayserver.api.map_call import WAIT, answer_map
from delayserver.api.rest.authorize import CallerOf
from delayserver.api.rest.common import INVALID, PROBLEM, Forward, PartsOf, json_answer
from delayserver.api.rest.named import CursorQuery, LimitQuery
from delayserver.api.rest.openapi import answer
from delayserver.security.tokens import Action
from delayserver.times import format_duration, parse_duration_ms
from delayserver.wire.fields import DURATION_HELP, DURATION_PATTERN
from delayserver.wire.operations import (
    ClusterDocument,
    ForecastBucketDocument,
    ForecastDocument,
    HealthDocument,
    StatsDocument,
    SubjectDocument,
    SubjectListDocument,
)

Bucket = Annotated[
    str,
    Query(
        description=f"a whole number of hours: {DURATION_HELP}",
        json_schema_extra={"pattern": DURATION_PATTERN},
    ),
]

After = Annotated[
    int | None, Query(ge=0, description="answer when the version is another one than this")
]
Wait = Annotated[
    str,
    Query(
        description=f"… or so long has gone by, at most 60s: {DURATION_HELP}",
        json_schema_extra={"pattern": DURATION_PATTERN},
    ),
]
Known = Annotated[
    str | None, Header(alias="if-none-match", description="304 while the version is one of these")
]
router = APIRouter()


@router.get(ALIVE_PATH, tags=["operations"], responses={200: answer(HealthDocument)})
async def get_health(request: Request, parts: PartsOf) -> Response:
    """The process is alive."""
    return Forward(parts.path.health, request)


@router.get(
    READY_PATH,
    tags=["operations"],
    responses={200: answer(HealthDocument), 503: PROBLEM},
)
async def get_readiness(request: Request, parts: PartsOf) -> Response:
    """The server has recovered and accepts messages."""
    return Forward(parts.path.health, request)


@router.get("/metrics", tags=["operations"], response_class=Response)
async def get_metrics(parts: PartsOf) -> Response:
    """Metrics for Prometheus."""
    await parts.queries.count_later()
    return Response(generate_latest(parts.registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/stats", tags=["operations"], responses={200: answer(StatsDocument)})
async def get_stats(parts: PartsOf) -> Response:
    """How much is pending, on its way and done, since this process started."""
    return json_answer(msgspec.convert(await parts.queries.stats(), StatsDocument))


@router.get(
    "/v1/subjects", tags=["operations"], responses=INVALID | {200: answer(SubjectListDocument)}
)
async def list_subjects(
    caller: CallerOf,
    parts: PartsOf,
    limit: LimitQuery = NAMED_PAGE_MAX,
    cursor: CursorQuery = None,
) -> Response:
    """Subjects that the token may publish or consume, with the counts of each."""

    def may_see(name: str) -> bool:
        return caller is None or any(
            caller.may(action, name) for action in (Action.PUBLISH, Action.CONSUME)
        )

    page, following = parts.calls.gauges.subjects(cursor or "", limit, may_see)
    documents = msgspec.convert(page, list[SubjectDocument])
    return json_answer(SubjectListDocument(documents, following))


@router.get(
    "/v1/forecast", tags=["operations"], responses=INVALID | {200: answer(ForecastDocument)}
)
async def get_forecast(parts: PartsOf, bucket: Bucket = "1h") -> Response:
    """How many messages fall due when, without those that were cancelled or delivered."""
    bucket_ms = parse_duration_ms(bucket, "/bucket")
    buckets = msgspec.convert(await parts.queries.forecast(bucket_ms), list[ForecastBucketDocument])
    return json_answer(ForecastDocument(format_duration(bucket_ms), buckets))


@router.get(
    CLUSTER_PATH,
    tags=["operations"],
    responses=INVALID
    | {200: answer(ClusterDocument), 304: {"description": "It is the version of `If-None-Match`"}},
)
async def get_cluster(
    request: Request,
    parts: PartsOf,
    after: After = None,
    wait: Wait = WAIT,
    if_none_match: Known = None,
) -> Response:
    """Which shards there are, and where each is asked by itself.

    Any of them takes any call, and forwards a call for another one. A client that asks the owner
    saves the hop, and may say `delay-forward: no`: if it asks another
    shard, the answer is 421, and `delay-owner` names the owner.

    With `after` it is a long poll: it is answered as soon as the version is another one. A server
    alone is one shard, whose version never changes. Any token will do."""
    found = await answer_map(
        parts.cluster,
        request.scope,
        host=request.headers.get("host", ""),
        after=after,
        wait=wait,
        if_none_match=if_none_match,
    )
    headers = dict(line.split(": ", 1) for line in found.fields.decode().splitlines())
    media_type = found.content_type.decode() if found.body else None
    return Response(found.body, found.status, headers, media_type)
