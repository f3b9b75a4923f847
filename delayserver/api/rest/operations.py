"""Operations: whether the server is well, what it has done, and what it will have to do.

Cost: about 100 µs per call; metrics, stats and the forecast go over all hours of the catalog.
Threads: belongs to the event loop.
"""

from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from delayserver.api.documents import HealthDocument
from delayserver.api.hot.paths import ALIVE_PATH, READY_PATH
from delayserver.api.rest.common import INVALID, PROBLEM, Forward, PartsOf
from delayserver.api.rest.openapi import answer
from delayserver.times import format_duration, parse_duration_ms

router = APIRouter()


@router.get(ALIVE_PATH, tags=["operations"], responses={200: answer(HealthDocument)})
async def healthz(request: Request, parts: PartsOf) -> Response:
    """The process is alive."""
    return Forward(parts.path.health, request)


@router.get(
    READY_PATH,
    tags=["operations"],
    responses={200: answer(HealthDocument), 503: PROBLEM},
)
async def readyz(request: Request, parts: PartsOf) -> Response:
    """The server has recovered and accepts messages."""
    return Forward(parts.path.health, request)


@router.get("/metrics", tags=["operations"], response_class=Response)
async def metrics(parts: PartsOf) -> Response:
    """Metrics for Prometheus."""
    await parts.queries.count_later()
    return Response(generate_latest(parts.registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/stats", tags=["operations"])
async def stats(parts: PartsOf) -> dict[str, Any]:
    """How much is pending, on its way and done, since this process started."""
    return await parts.queries.stats()


@router.get("/v1/forecast", tags=["operations"], responses=INVALID)
async def forecast(parts: PartsOf, bucket: str = "1h") -> dict[str, Any]:
    """How many messages fall due when, without those that were cancelled or delivered."""
    bucket_ms = parse_duration_ms(bucket, "/bucket")
    return {
        "bucket": format_duration(bucket_ms),
        "buckets": await parts.queries.forecast(bucket_ms),
    }
