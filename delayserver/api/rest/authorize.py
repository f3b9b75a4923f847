"""Asks, for every call on FastAPI, whether the caller has the scope that `scopes` wants.

Cost: a dictionary access; by message id, a look-up of the message, for callers that are not admin.
Threads: belongs to the event loop.
"""

from typing import Annotated

from fastapi import Depends, Request

from delayserver.api.rest.common import PartsOf
from delayserver.api.scopes import PUBLIC, Of, rule_of
from delayserver.security.tokens import Action, Caller


async def _caller(request: Request) -> Caller | None:
    caller: Caller | None = request.scope.get("caller")
    return caller


CallerOf = Annotated[Caller | None, Depends(_caller)]
"""Who calls; None where nobody is asked for a token."""


def require(caller: Caller | None, action: Action, subject: str) -> None:
    """Raises AccessError unless that is allowed."""
    if caller is not None:
        caller.require((action,), subject)


async def authorize(request: Request, caller: CallerOf, parts: PartsOf) -> None:
    """What every call on FastAPI depends on. Raises AccessError, NotFoundError, DamageError."""
    calls = parts.calls
    if caller is None or caller.is_admin:
        return
    rule = rule_of(calls.parts, request.method, request.scope["route"].path_format)
    subject = ""
    match rule.of:
        case Of.BODY | Of.ANYONE:
            return
        case Of.EVERYTHING:
            subject = "*"
        case Of.SUBJECT:
            subject = request.path_params["subject"]
        case Of.MESSAGE:
            found = calls.message_id(request.path_params["message_id"])
            subject = await calls.subject_of(found.seq, found.due_ms)
        case Of.SUBSCRIPTION:
            subject = calls.subscription(request.path_params["name"]).subject
    if rule is not PUBLIC:
        caller.require(rule.actions, subject)
