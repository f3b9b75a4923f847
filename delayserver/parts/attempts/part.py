"""Registers the attempts of messages with the core. Cost: none. Threads: immutable values.

The core itself notes each attempt, in the payload of the retry (`delayserver.records.attempts`) and
in the frame that settles a delivery (`storage.notes`), and makes a replay (`Redriving.replay`).
"""

from typing import TYPE_CHECKING, Final

from delayserver.api.scopes import CoveredSubject, Rule
from delayserver.parts.part import Feature
from delayserver.security.tokens import Action

if TYPE_CHECKING:
    from fastapi import APIRouter

_EITHER: Final = Rule((Action.PUBLISH, Action.CONSUME), CoveredSubject.MESSAGE)
_PUBLISH: Final = Rule((Action.PUBLISH,), CoveredSubject.MESSAGE)


def _routes() -> "APIRouter":
    from delayserver.parts.attempts.rest import router

    return router


ATTEMPTS_PART: Final = Feature(
    name="attempt",
    routes=_routes,
    rules={
        ("GET", "/v1/messages/{message_id}/attempts"): _EITHER,
        ("POST", "/v1/messages/{message_id}/replay"): _PUBLISH,
    },
)
