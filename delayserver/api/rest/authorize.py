"""Asks, for every call on FastAPI, whether the caller has the scope that `scopes` wants.

Cost: a dictionary access; by message id, a look-up of the message, for callers that are not admin.
Threads: belongs to the event loop.
"""

from typing import Annotated

from fastapi import Depends, Request

from delayserver.api.rest.common import PartsOf
from delayserver.api.scopes import PUBLIC, CoveredSubject, rule_of
from delayserver.security.tokens import Action, Caller


async def _caller(request: Request) -> Caller | None:
    caller: Caller | None = request.scope.get("caller")
    return caller


CallerOf = Annotated[Caller | None, Depends(_caller)]
"""The caller; None where no token is needed."""


def require(caller: Caller | None, action: Action, subject: str) -> None:
    """Raises AccessError unless that is allowed."""
    if caller is not None:
        caller.require((action,), subject)


async def authorize(request: Request, caller: CallerOf, parts: PartsOf) -> None:
    """The check before every call on FastAPI. Raises AccessError, NotFoundError, DamageError."""
    calls = parts.calls
    if caller is None or caller.is_admin:
        return
    rule = rule_of(calls.parts, request.method, request.scope["route"].path_format)
    subject = ""
    match rule.of:
        case CoveredSubject.BODY | CoveredSubject.ANYONE:
            return
        case CoveredSubject.EVERYTHING:
            subject = "*"
        case CoveredSubject.SUBJECT:
            subject = request.path_params["subject"]
        case CoveredSubject.MESSAGE:
            found = calls.message_id(request.path_params["message_id"])
            subject = await calls.subject_of(found.seq, found.due_ms)
        case CoveredSubject.SUBSCRIPTION:
            subject = calls.subscription(request.path_params["name"]).subject
    if rule is not PUBLIC:
        caller.require(rule.actions, subject)
