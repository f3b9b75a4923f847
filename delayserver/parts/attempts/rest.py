"""The attempts to deliver a message: their list, and another one for a message that is settled.

Cost: as `attempts`; a replay makes a record for each receiver besides. Threads: belongs to the
event loop.
"""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from delayserver.api.rest.common import (
    CONFLICT,
    LOGGED,
    MISSING,
    OWNER_PATTERN,
    STORED,
    PartsOf,
    json_answer,
)
from delayserver.api.rest.openapi import answer
from delayserver.parts.attempts.attempts import AttemptQueries, AttemptsView
from delayserver.records.direct import DIRECT_NAME
from delayserver.records.message import State
from delayserver.times import format_duration, format_time
from delayserver.wire.messages import AttemptDocument, AttemptsDocument, ReplayedDocument

router = APIRouter()


@router.get(
    "/v1/messages/{message_id}/attempts",
    tags=["messages"],
    responses=MISSING | STORED | LOGGED | {200: answer(AttemptsDocument)},
)
async def get_attempts(message_id: str, parts: PartsOf) -> Response:
    """How each attempt to deliver a message went: when, how long, and the answer; kept as long
    as the message. An ending without a record is not listed: a lease that ran out before the last
    one, a nack without delay, an answer of 410."""
    found = parts.calls.message_id(message_id)
    return json_answer(
        attempts_document(await AttemptQueries(parts.calls).look_up(found.seq, found.due_ms))
    )


@router.post(
    "/v1/messages/{message_id}/replay",
    tags=["messages"],
    responses=CONFLICT | STORED | LOGGED | {200: answer(ReplayedDocument)},
)
async def replay_message(
    message_id: str,
    parts: PartsOf,
    subscription: Annotated[
        str | None,
        Query(
            pattern=OWNER_PATTERN,
            description="to this one alone, whose subject has to match; else to all that had it. "
            f"{DIRECT_NAME}: where the message says that it goes (`to`)",
        ),
    ] = None,
) -> Response:
    """Deliver a message that is settled again, with the same id, and `delay-replay: 1`. A message
    that is not settled is a 409. So is one that is a dead letter of every subscription that could
    receive it: redrive that."""
    calls = parts.calls
    found = calls.message_id(message_id)
    replayable, subscription_ids = await AttemptQueries(calls).replayable(found.seq, found.due_ms)
    if subscription is not None:
        subscription_ids = [calls.receiver(subscription, replayable).id]
    receivers = await calls.replay(replayable, subscription_ids)
    names = tuple(one.name for one in receivers)
    return json_answer(ReplayedDocument(message_id, State.DELIVERING, names))


def attempts_document(view: AttemptsView) -> AttemptsDocument:
    """The attempts of a message."""
    return AttemptsDocument(
        [
            AttemptDocument(
                subscription=one.subscription,
                attempt=one.attempt.number,
                at=format_time(one.attempt.began_ms),
                duration=None
                if one.attempt.duration_ms is None
                else format_duration(one.attempt.duration_ms),
                outcome="failed" if one.attempt.error else "delivered",
                status=one.attempt.status or None,
                answer=one.attempt.answer or None,
                error=one.attempt.error or None,
            )
            for one in view.attempts
        ],
        view.dropped,
    )
