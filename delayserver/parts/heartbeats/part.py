"""Registers heartbeats, and the call for events, with the core.

The decisions about watch keys are in the core, since publishing, filing and purging know them: a
watch is an option of a message (`delayserver.decisions.watches`).

Cost: none. Threads: immutable values.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from delayserver.api.hot.paths import HEARTBEATS_PATH
from delayserver.api.scopes import EITHER_BODY, PUBLISH_BODY, CoveredSubject, Rule
from delayserver.parts.heartbeats.heartbeats import Heartbeats
from delayserver.parts.heartbeats.records import (
    HEARTBEATS,
    check_heartbeat,
    heartbeat_key,
    unpack_heartbeat,
)
from delayserver.parts.part import Feature, Halves, HotPut, KeyedCalls, Write
from delayserver.security.tokens import Action
from storage.catalog import Table
from storage.rows import RecordKind

if TYPE_CHECKING:
    from fastapi import APIRouter

    from delayserver.api.intake import Intake
    from delayserver.server.calls import Calls


def _effect(payload: bytes) -> Iterator[Write]:
    # The next process may understand a heartbeat that this one does not.
    heartbeat, _ = HEARTBEATS.read(payload)
    if heartbeat.key:
        value = payload if heartbeat.subject_id else None
        yield Table.HEARTBEATS, heartbeat_key(heartbeat.key), value


def _routes() -> "APIRouter":
    from delayserver.parts.heartbeats.rest import router

    return router


def _hot_put(calls: "Calls", intake: "Intake") -> HotPut:
    from delayserver.parts.heartbeats.hot import hot_put

    return hot_put(calls, intake)


HEARTBEATS_PART: Final = Feature(
    name="heartbeat",
    effects={RecordKind.HEARTBEAT: _effect},
    checks={Table.HEARTBEATS: check_heartbeat},
    halves=Halves(Table.HEARTBEATS, lambda value: unpack_heartbeat(value).subject_id),
    decide=Heartbeats,
    routes=_routes,
    rules={
        ("POST", "/v1/events/{key}"): Rule((Action.PUBLISH,), CoveredSubject.EVERYTHING),
        ("PUT", "/v1/heartbeats/{key}"): PUBLISH_BODY,
        ("GET", "/v1/heartbeats/{key}"): EITHER_BODY,
        ("DELETE", "/v1/heartbeats/{key}"): PUBLISH_BODY,
    },
    keyed=(
        KeyedCalls("PUT GET DELETE", "/v1/heartbeats/{key}"),
        KeyedCalls("POST", "/v1/events/{key}", ("cancelled", "fired")),
    ),
    hot={HEARTBEATS_PATH: _hot_put},
    examples={
        "HeartbeatModel": [{"timeout": "10s", "subject": "worker.lost", "body": {"worker": 7}}]
    },
)
