"""Timers for users: heartbeats, and events for watch keys.

`PUT` of a heartbeat is served by `hot`, since renewals come by the thousand; it stands here for the
OpenAPI document, and for whoever reaches FastAPI by another way.

Cost: about 100 µs per call. Threads: belongs to the event loop.
"""

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from msgspec import UNSET

from delayserver.api.documents import stored_payload
from delayserver.api.rest.authorize import CallerOf, require
from delayserver.api.rest.common import (
    INVALID,
    LOGGED,
    MISSING,
    PROBLEM,
    Forward,
    PartsOf,
    json_answer,
)
from delayserver.api.rest.named import subject_name
from delayserver.api.rest.openapi import answer, json_body
from delayserver.delivery.batch import body_fields
from delayserver.parts.heartbeats.heartbeats import Heartbeats
from delayserver.parts.heartbeats.records import Heartbeat
from delayserver.records.message import check_key
from delayserver.security.tokens import Action
from delayserver.times import format_duration, format_time
from delayserver.wire.messages import EventModel, HeartbeatDocument, HeartbeatModel

HeartbeatKey = Annotated[str, Path(description="1 to 256 bytes")]
EventKey = Annotated[str, Path(description="the watch key that something happened to")]

router = APIRouter()


def heartbeat_document(
    heartbeat: Heartbeat, problem: str, subject: str, expires_ms: int
) -> HeartbeatDocument:
    """Returns the document that a caller gets for a heartbeat. `problem`: why the heartbeat is not
    understood; empty where it is."""
    payload = stored_payload(heartbeat.payload)
    return HeartbeatDocument(
        heartbeat.key,
        format_duration(heartbeat.timeout_ms),
        subject,
        format_time(expires_ms),
        payload.headers or {},
        *body_fields(payload),
        problem or UNSET,
    )


@router.post(
    "/v1/events/{key:key}",
    tags=["timers"],
    responses=INVALID | LOGGED | {200: answer(EventModel)},
)
async def complete_watching(key: EventKey, parts: PartsOf) -> Response:
    """Complete everything that watches a key, at once: durable when this answers."""
    check_key(key, "/path/key")
    cancelled, fired = await parts.calls.event(key)
    return json_answer(EventModel(cancelled, fired))


@router.put(
    "/v1/heartbeats/{key:key}",
    tags=["timers"],
    status_code=201,
    responses={
        201: answer(HeartbeatDocument),
        200: answer(HeartbeatDocument, "Renewed"),
        507: PROBLEM,
        **INVALID,
    },
    openapi_extra=json_body(HeartbeatModel),
)
async def put_heartbeat(key: HeartbeatKey, request: Request, parts: PartsOf) -> Response:
    """Publish a message unless this call is made again within `timeout`.

    A renewal with the same content costs no write; another content replaces it. After a
    restart of the server every heartbeat begins its whole timeout anew."""
    return Forward(parts.path.publish, request)


@router.get(
    "/v1/heartbeats/{key:key}",
    tags=["timers"],
    responses=MISSING | {200: answer(HeartbeatDocument)},
)
async def get_heartbeat(key: HeartbeatKey, caller: CallerOf, parts: PartsOf) -> Response:
    """A heartbeat, and when it expires."""
    heartbeat, problem, left_ms = parts.calls.part(Heartbeats).get(key)
    subject = subject_name(parts, heartbeat.subject_id)
    if caller is not None:
        caller.require((Action.PUBLISH, Action.CONSUME), subject)
    document = heartbeat_document(heartbeat, problem, subject, parts.calls.clock() + left_ms)
    return json_answer(document)


@router.delete(
    "/v1/heartbeats/{key:key}",
    tags=["timers"],
    status_code=204,
    responses=MISSING | LOGGED,
)
async def delete_heartbeat(key: HeartbeatKey, caller: CallerOf, parts: PartsOf) -> None:
    """End a heartbeat: when this answers, it will never publish its message."""
    heartbeat, *_ = parts.calls.part(Heartbeats).get(key)
    require(caller, Action.PUBLISH, subject_name(parts, heartbeat.subject_id))
    await parts.calls.durable(parts.calls.part(Heartbeats).delete(key))
