"""Operations: whether the server is well, what it has done, what it will have to do, and where its
shards are.

Cost: about 100 µs per call; metrics, stats and the forecast go over all hours of the catalog.
Threads: belongs to the event loop.
"""

import asyncio
from typing import Annotated

import msgspec
from fastapi import APIRouter, Header, Query, Request, Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from delayserver.api.conditions import entity_tag, is_known
from delayserver.api.documents import (
    ClusterDocument,
    ForecastBucketDocument,
    ForecastDocument,
    HealthDocument,
    StatsDocument,
    encode,
)
from delayserver.api.fields import DURATION_HELP, DURATION_PATTERN
from delayserver.api.hot.consume import WHEN_GONE
from delayserver.api.hot.paths import ALIVE_PATH, CLUSTER_PATH, READY_PATH
from delayserver.api.rest.common import INVALID, PROBLEM, Forward, PartsOf, json_answer
from delayserver.api.rest.openapi import answer
from delayserver.errors import InputError
from delayserver.times import format_duration, parse_duration_ms

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
CLUSTER_WAIT_MAX_MS = 60_000

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
    wait: Wait = "30s",
    if_none_match: Known = None,
) -> Response:
    """Which shards there are, and where each is asked by itself.

    Any of them takes any call, and forwards what is not its own. Who asks the owner saves the hop,
    and may say `delay-forward: no` to be told (421, `delay-owner`) when it is another one.

    With `after` it is a long poll: it is answered as soon as the version is another one. A server
    alone is one shard, whose version never changes. Any token will do."""
    wait_ms = parse_duration_ms(wait, "/query/wait")
    if wait_ms > CLUSTER_WAIT_MAX_MS:
        raise InputError(f"wait is at most {format_duration(CLUSTER_WAIT_MAX_MS)}", "/query/wait")
    cluster = parts.cluster
    if after is not None:
        waiting = asyncio.ensure_future(cluster.other_than(after, wait_ms / 1000))
        request.scope[WHEN_GONE](waiting.cancel)
        try:
            await asyncio.wait((waiting,))
        finally:
            waiting.cancel()
            request.scope[WHEN_GONE](None)
    document = cluster.document(request.headers.get("host", ""))
    version = str(document.version)
    # Weak: what else stands in the document, such as when a node was seen, is not in the version.
    headers = {"etag": f"W/{entity_tag(version)}"}
    if is_known(if_none_match, version):
        return Response(status_code=304, headers=headers)
    return Response(encode(document), headers=headers, media_type="application/json")
