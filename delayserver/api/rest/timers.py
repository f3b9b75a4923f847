"""Timers for users: heartbeats, and events for watch keys.

`PUT` of a heartbeat is served by `hot`, since renewals come by the thousand; it stands here for the
OpenAPI document, and for whoever reaches FastAPI by another way.

Cost: about 100 µs per call. Threads: belongs to the event loop.
"""

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request, Response

from delayserver.api.documents import encode, heartbeat_document
from delayserver.api.hot.asgi import HotPath
from delayserver.api.rest import models
from delayserver.api.rest.authorize import CallerOf, make_authorize, require
from delayserver.api.rest.messages import INVALID, LOGGED, MISSING, PROBLEM, Forward
from delayserver.api.rest.openapi import json_body
from delayserver.records.message import check_key
from delayserver.security.tokens import Action
from delayserver.server.calls import Calls

HeartbeatKey = Annotated[str, Path(description="1 to 256 bytes")]
EventKey = Annotated[str, Path(description="the watch key that something happened to")]


def make_timer_router(calls: Calls, path: HotPath) -> APIRouter:
    """The routes."""
    router = APIRouter(dependencies=[Depends(make_authorize(calls))])

    @router.post(
        "/v1/events/{key:key}",
        tags=["timers"],
        responses=INVALID | LOGGED,
    )
    async def event(key: EventKey) -> models.EventModel:
        """Complete everything that watches a key, at once: durable when this answers."""
        check_key(key, "/path/key")
        cancelled, fired = await calls.event(key)
        return models.EventModel(cancelled=cancelled, fired=fired)

    @router.put(
        "/v1/heartbeats/{key:key}",
        tags=["timers"],
        status_code=201,
        response_model=models.HeartbeatViewModel,
        responses={
            200: {"model": models.HeartbeatViewModel, "description": "Renewed"},
            507: PROBLEM,
            **INVALID,
        },
        openapi_extra=json_body(models.HeartbeatModel),
    )
    async def put_heartbeat(key: HeartbeatKey, request: Request) -> Response:
        """Publish a message unless this call is made again within `timeout`.

        A renewal with the same content costs no write; another content replaces it. After a
        restart of the server every heartbeat begins its whole timeout anew."""
        return Forward(path.publish, request)

    @router.get(
        "/v1/heartbeats/{key:key}",
        tags=["timers"],
        response_model=models.HeartbeatViewModel,
        responses=MISSING,
    )
    async def get_heartbeat(key: HeartbeatKey, caller: CallerOf) -> Response:
        """A heartbeat, and when it expires."""
        heartbeat, left_ms = calls.heartbeat(key)
        subject = calls.subject_names[heartbeat.subject_id]
        if caller is not None:
            caller.require((Action.PUBLISH, Action.CONSUME), subject)
        document = heartbeat_document(heartbeat, subject, calls.clock() + left_ms)
        return Response(encode(document), media_type="application/json")

    @router.delete(
        "/v1/heartbeats/{key:key}",
        tags=["timers"],
        status_code=204,
        responses=MISSING | LOGGED,
    )
    async def delete_heartbeat(key: HeartbeatKey, caller: CallerOf) -> None:
        """End a heartbeat: when this answers, it will never publish its message."""
        heartbeat, _ = calls.heartbeat(key)
        require(caller, Action.PUBLISH, calls.subject_names[heartbeat.subject_id])
        await calls.durable(calls.delete_heartbeat(key))

    return router
