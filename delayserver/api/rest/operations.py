"""Operations: whether the server is well, what it has done, and what it will have to do.

Cost: about 100 µs per call; metrics, stats and the forecast go over all hours of the catalog.
Threads: belongs to the event loop.
"""

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request, Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from delayserver.api.documents import (
    ForecastBucketDocument,
    ForecastDocument,
    HealthDocument,
    StatsDocument,
)
from delayserver.api.fields import DURATION_HELP, DURATION_PATTERN
from delayserver.api.hot.paths import ALIVE_PATH, READY_PATH
from delayserver.api.rest.common import INVALID, PROBLEM, Forward, PartsOf, json_answer
from delayserver.api.rest.openapi import answer
from delayserver.times import format_duration, parse_duration_ms

Bucket = Annotated[
    str,
    Query(
        description=f"a whole number of hours: {DURATION_HELP}",
        json_schema_extra={"pattern": DURATION_PATTERN},
    ),
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
    "/v1/forecast", tags=["operations"], responses=INVALID | {200: answer(ForecastDocument)}
)
async def get_forecast(parts: PartsOf, bucket: Bucket = "1h") -> Response:
    """How many messages fall due when, without those that were cancelled or delivered."""
    bucket_ms = parse_duration_ms(bucket, "/bucket")
    buckets = msgspec.convert(await parts.queries.forecast(bucket_ms), list[ForecastBucketDocument])
    return json_answer(ForecastDocument(format_duration(bucket_ms), buckets))
