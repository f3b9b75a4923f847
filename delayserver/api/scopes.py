"""Which call needs which scope: one row for each call of the API, and nothing else decides.

A call without a row is for `admin` alone. Where a row says BODY, the subjects stand in the request
itself, and the handler asks with `Caller.require`; everywhere else it was asked before.

Cost: a dictionary access; by message id, a look-up of the message, for callers that are not admin.
Threads: belongs to the event loop.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Annotated

from fastapi import Depends, Request

from delayserver.server import Server
from delayserver.tokens import Action, Caller


class Of(Enum):
    """Whose subject a scope has to cover."""

    NOTHING = auto()
    """The scope has no subject."""
    EVERYTHING = auto()
    """It may change messages of any subject: only a scope for all of them will do."""
    SUBJECT = auto()
    """The one in the path."""
    MESSAGE = auto()
    """That of the message whose id is in the path."""
    SUBSCRIPTION = auto()
    """That of the subscription whose name is in the path."""
    BODY = auto()
    """All that the request names, or lists: the handler asks."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One of these actions has to be allowed. None at all: nobody is asked who they are."""

    actions: tuple[Action, ...]
    of: Of = Of.NOTHING


PUBLIC = Rule(())
ADMIN = Rule((Action.ADMIN,))
OBSERVE = Rule((Action.OBSERVE,))
_PUBLISH = (Action.PUBLISH,)
_CONSUME = (Action.CONSUME,)
_EITHER = (Action.PUBLISH, Action.CONSUME)

RULES: Mapping[tuple[str, str], Rule] = {
    ("POST", "/v1/messages"): Rule(_PUBLISH, Of.BODY),
    ("POST", "/v1/messages/batch"): Rule(_PUBLISH, Of.BODY),
    ("POST", "/v1/messages/cancel"): Rule(_PUBLISH, Of.BODY),
    ("GET", "/v1/messages/{message_id}"): Rule(_EITHER, Of.MESSAGE),
    ("DELETE", "/v1/messages/{message_id}"): Rule(_PUBLISH, Of.MESSAGE),
    ("PATCH", "/v1/messages/{message_id}"): Rule(_PUBLISH, Of.MESSAGE),
    ("GET", "/v1/subjects/{subject}/messages"): Rule(_EITHER, Of.SUBJECT),
    ("GET", "/v1/subjects/{subject}/keys/{key}"): Rule(_EITHER, Of.SUBJECT),
    ("DELETE", "/v1/subjects/{subject}/keys/{key}"): Rule(_PUBLISH, Of.SUBJECT),
    ("PATCH", "/v1/subjects/{subject}/keys/{key}"): Rule(_PUBLISH, Of.SUBJECT),
    ("PUT", "/v1/subjects/{subject}/keys/{key}"): Rule(_PUBLISH, Of.SUBJECT),
    ("PUT", "/v1/subscriptions/{name}"): Rule(_CONSUME, Of.BODY),
    ("GET", "/v1/subscriptions"): Rule(_CONSUME, Of.BODY),
    ("GET", "/v1/subscriptions/{name}"): Rule(_CONSUME, Of.SUBSCRIPTION),
    ("DELETE", "/v1/subscriptions/{name}"): Rule(_CONSUME, Of.SUBSCRIPTION),
    ("POST", "/v1/subscriptions/{name}/pause"): Rule(_CONSUME, Of.SUBSCRIPTION),
    ("POST", "/v1/subscriptions/{name}/resume"): Rule(_CONSUME, Of.SUBSCRIPTION),
    ("POST", "/v1/subscriptions/{name}/pull"): Rule(_CONSUME, Of.SUBSCRIPTION),
    ("POST", "/v1/subscriptions/{name}/ack"): Rule(_CONSUME, Of.SUBSCRIPTION),
    ("POST", "/v1/subscriptions/{name}/nack"): Rule(_CONSUME, Of.SUBSCRIPTION),
    ("POST", "/v1/subscriptions/{name}/extend"): Rule(_CONSUME, Of.SUBSCRIPTION),
    ("GET", "/v1/subscriptions/{name}/dead-letters"): Rule(_CONSUME, Of.SUBSCRIPTION),
    ("POST", "/v1/subscriptions/{name}/dead-letters/redrive"): Rule(_CONSUME, Of.SUBSCRIPTION),
    ("DELETE", "/v1/subscriptions/{name}/dead-letters/{message_id}"): Rule(
        _CONSUME, Of.SUBSCRIPTION
    ),
    ("POST", "/v1/events/{key}"): Rule(_PUBLISH, Of.EVERYTHING),
    ("PUT", "/v1/heartbeats/{key}"): Rule(_PUBLISH, Of.BODY),
    ("GET", "/v1/heartbeats/{key}"): Rule(_EITHER, Of.BODY),
    ("DELETE", "/v1/heartbeats/{key}"): Rule(_PUBLISH, Of.BODY),
    ("PUT", "/v1/imports/{import_id}"): ADMIN,
    ("POST", "/v1/imports"): ADMIN,
    ("GET", "/v1/imports/{import_id}"): ADMIN,
    ("GET", "/v1/imports/{import_id}/duplicates"): ADMIN,
    ("GET", "/v1/archives"): ADMIN,
    ("PUT", "/v1/archives/{hour}"): ADMIN,
    ("GET", "/metrics"): OBSERVE,
    ("GET", "/v1/stats"): OBSERVE,
    ("GET", "/v1/forecast"): OBSERVE,
    ("GET", "/healthz"): PUBLIC,
    ("GET", "/readyz"): PUBLIC,
}
PUBLIC_PATHS = frozenset(path for (_, path), rule in RULES.items() if rule is PUBLIC)


def _caller(request: Request) -> Caller | None:
    caller: Caller | None = request.scope.get("caller")
    return caller


CallerOf = Annotated[Caller | None, Depends(_caller)]
"""Who calls; None where nobody is asked for a token."""


def require(caller: Caller | None, action: Action, subject: str) -> None:
    """Raises AccessError unless that is allowed."""
    if caller is not None:
        caller.require((action,), subject)


def make_authorize(server: Server) -> Callable[[Request], Awaitable[None]]:
    """What every call on FastAPI depends on. Raises AccessError, NotFoundError, DamageError."""

    async def authorize(request: Request) -> None:
        caller = _caller(request)
        if caller is None or caller.is_admin:
            return
        rule = RULES.get((request.method, request.scope["route"].path_format), ADMIN)
        subject = ""
        match rule.of:
            case Of.BODY:
                return
            case Of.EVERYTHING:
                subject = "*"
            case Of.SUBJECT:
                subject = request.path_params["subject"]
            case Of.MESSAGE:
                found = server.engine.messages.message_id(request.path_params["message_id"])
                subject = await server.subject_of(found.seq, found.due_ms)
            case Of.SUBSCRIPTION:
                subject = server.engine.subscription(request.path_params["name"]).subject
        if rule is not PUBLIC:
            caller.require(rule.actions, subject)

    return authorize
