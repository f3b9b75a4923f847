"""Messages: publish, look up, move, cancel, by id and by key; and the list of pending messages.

Publish and cancel are hot: `delayserver.api.hot` serves them, and they stand here for the OpenAPI
document and for a call that comes to FastAPI by another way. The docstring of a call describes it,
and OpenAPI shows it; statuses that may come with every call are added in `openapi`.

Cost: about 100 µs per call. Threads: belongs to the event loop.
"""

from contextlib import suppress
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Header, Path, Query, Request, Response

from delayserver.api.conditions import entity_tag, expected_versions, wants_new
from delayserver.api.documents import encode, message_document, pending_document
from delayserver.api.hot.asgi import read_body
from delayserver.api.rest.authorize import CallerOf, require
from delayserver.api.rest.common import (
    CONDITIONAL,
    INVALID,
    LOGGED,
    MISSING,
    PAGE_MAX,
    PROBLEM,
    PUBLISH,
    SEQ_MAX,
    STORED,
    Forward,
    IfMatch,
    Parts,
    PartsOf,
    PlacesHeader,
    SubjectPath,
    json_answer,
    json_of,
    shard_page,
)
from delayserver.api.rest.openapi import answer, batch_body, json_body
from delayserver.decisions.new_messages import NewMessage
from delayserver.errors import InputError, NotFoundError
from delayserver.queries.look_up import MessageView
from delayserver.records.message import State, check_key, debounced
from delayserver.records.message_id import MessageId
from delayserver.records.tracecontext import trace_of
from delayserver.schedule.pending import Position
from delayserver.security.tokens import Action
from delayserver.server.calls import Calls
from delayserver.times import TIME_MS_MAX, format_time, read_time_ms
from delayserver.wire.fields import DURATION_FORMS, DURATION_HELP
from delayserver.wire.messages import (
    BatchDocument,
    CancelBody,
    CancelledDocument,
    MessageDocument,
    MovedModel,
    MoveModel,
    PendingListDocument,
    PublishedDocument,
    PublishModel,
    PublishUnderKeyModel,
    StateDocument,
)
from delayserver.wire.reading import read
from storage.errors import DamageError

_FROM = "due at this time or later: RFC 3339, or milliseconds (not seconds) since the epoch"
_TO = "due before this time"


KeyPath = Annotated[str, Path(description="the key of the message")]
IfNoneMatch = Annotated[str | None, Header(description="*: only if nothing waits under the key")]
AckQuery = Annotated[
    Literal["durable", "filed"], Query(description="when to answer: synced, or also in its hour")
]
AckTimeout = Annotated[
    int | str,
    Query(
        description="then the answer is 202 or 504",
        json_schema_extra={
            "anyOf": DURATION_FORMS,
            "description": DURATION_HELP,
            "examples": ["30s"],
        },
    ),
]

router = APIRouter()

# ── publish ───────────────────────────────────────────────────────────────────────────────────────


@router.post(
    "/v1/messages",
    tags=["messages"],
    status_code=201,
    responses={
        201: answer(PublishedDocument),
        200: answer(PublishedDocument, "the key was published before"),
        202: answer(PublishedDocument, "durable, not yet filed"),
        504: PROBLEM,
        **PUBLISH,
    },
    openapi_extra=json_body(PublishModel),
)
async def publish_message(
    request: Request, parts: PartsOf, ack: AckQuery = "durable", timeout: AckTimeout = 60_000
) -> Response:
    """Publish a message: it is durable when this answers, or also filed, if `ack` says so."""
    return Forward(parts.path.publish, request)


@router.post(
    "/v1/messages/batch",
    tags=["messages"],
    responses={
        200: answer(BatchDocument),
        202: answer(BatchDocument, "durable, not yet filed"),
        504: PROBLEM,
        **PUBLISH,
    },
    openapi_extra=batch_body(),
)
async def publish_batch(
    request: Request, parts: PartsOf, ack: AckQuery = "durable", timeout: AckTimeout = 60_000
) -> Response:
    """Publish up to 10,000 messages, all or none: JSON array, NDJSON or MessagePack."""
    return Forward(parts.path.publish, request)


@router.post(
    "/v1/messages/cancel",
    tags=["messages"],
    responses=INVALID | LOGGED | {200: answer(CancelledDocument)},
    openapi_extra=json_body(CancelBody),
)
async def cancel_messages(request: Request, parts: PartsOf) -> Response:
    """Cancel many messages by id and by key; one result for each."""
    return Forward(parts.path.publish, request)


# ── one message ───────────────────────────────────────────────────────────────────────────────────


@router.get(
    "/v1/messages/{message_id}",
    tags=["messages"],
    responses=MISSING | STORED | {200: answer(MessageDocument)},
)
async def get_message(message_id: str, parts: PartsOf) -> Response:
    """A message, its state, and its result at each subscription."""
    found = parts.calls.message_id(message_id)
    return _message(await parts.queries.look_up(found.seq, found.due_ms))


@router.delete(
    "/v1/messages/{message_id}",
    tags=["messages"],
    responses=CONDITIONAL | STORED | LOGGED | {200: answer(StateDocument)},
)
async def cancel_message(
    message_id: str, request: Request, parts: PartsOf, if_match: IfMatch = None
) -> Response:
    """Cancel a message: when this answers, it will never be delivered, crash or not."""
    return Forward(parts.path.publish, request)


@router.patch(
    "/v1/messages/{message_id}",
    tags=["messages"],
    responses=CONDITIONAL | STORED | LOGGED | {200: answer(MovedModel)},
    openapi_extra=json_body(MoveModel),
)
async def move_message(
    message_id: str, request: Request, parts: PartsOf, if_match: IfMatch = None
) -> Response:
    """Give a message a new due time; its id stays."""
    move = read(await json_of(request), MoveModel)
    return await _move(parts, parts.calls.message_id(message_id), move, if_match)


# ── one message, by key ───────────────────────────────────────────────────────────────────────────


@router.get(
    "/v1/subjects/{subject}/keys/{key:key}",
    tags=["keys"],
    responses=MISSING | STORED | {200: answer(MessageDocument)},
)
async def get_message_by_key(subject: SubjectPath, key: KeyPath, parts: PartsOf) -> Response:
    """The message that a key stands for."""
    found = parts.calls.by_key(subject, key)
    return _message(await parts.queries.look_up(found.seq, found.due_ms))


@router.delete(
    "/v1/subjects/{subject}/keys/{key:key}",
    tags=["keys"],
    responses=CONDITIONAL | LOGGED | {200: answer(StateDocument)},
)
async def cancel_message_by_key(
    subject: SubjectPath, key: KeyPath, request: Request, parts: PartsOf, if_match: IfMatch = None
) -> Response:
    """Cancel the message that a key stands for."""
    return Forward(parts.path.publish, request)


@router.patch(
    "/v1/subjects/{subject}/keys/{key:key}",
    tags=["keys"],
    responses=CONDITIONAL | STORED | LOGGED | {200: answer(MovedModel)},
    openapi_extra=json_body(MoveModel),
)
async def move_message_by_key(
    subject: SubjectPath, key: KeyPath, request: Request, parts: PartsOf, if_match: IfMatch = None
) -> Response:
    """Give the message that a key stands for a new due time."""
    move = read(await json_of(request), MoveModel)
    return await _move(parts, parts.calls.by_key(subject, key), move, if_match)


@router.put(
    "/v1/subjects/{subject}/keys/{key:key}",
    tags=["keys"],
    status_code=201,
    responses={
        201: answer(PublishedDocument),
        200: answer(PublishedDocument, "a message was replaced"),
        412: PROBLEM,
        **PUBLISH,
    },
    openapi_extra=json_body(PublishUnderKeyModel, required=False),
)
async def put_message_by_key(
    subject: SubjectPath,
    key: KeyPath,
    request: Request,
    caller: CallerOf,
    parts: PartsOf,
    if_match: IfMatch = None,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Publish, or replace the message that waits under the key. Each call restarts the timer."""
    check_key(key)
    expected, only_new = expected_versions(if_match), wants_new(if_none_match)
    data = await read_body(request.receive)
    message = parts.intake.under_key(data, subject, key, parts.calls.clock())
    if caller is not None:
        caller.require_target(message.payload.to)
    for one in message.outcome_subjects():
        require(caller, Action.PUBLISH, one)
    message.trace = trace_of(request.headers.raw)
    options = message.payload.options
    is_debounced = options is not None and options.debounce is not None
    now_ms = parts.calls.clock()
    if is_debounced:
        message, now_ms = await _debounced(parts, message, key)
    published, replaced = parts.calls.replace(
        message, now_ms, expected=expected, only_new=only_new, leaves_due=is_debounced
    )
    await parts.calls.durable(published.group)
    document = PublishedDocument(
        id=published.message_id,
        subject=subject,
        key=key,
        deliver_at=format_time(published.due_ms),
        state=State.SCHEDULED,
        duplicate=False,
    )
    response = json_answer(document, 200 if replaced else 201)
    response.headers["location"] = f"/v1/messages/{published.message_id}"
    response.headers["etag"] = entity_tag(str(published.seq))
    return response


# ── pending messages ──────────────────────────────────────────────────────────────────────────────


@router.get(
    "/v1/subjects/{subject}/messages",
    tags=["messages"],
    responses=INVALID | STORED | {200: answer(PendingListDocument)},
)
async def list_messages(
    subject: SubjectPath,
    parts: PartsOf,
    since: Annotated[str | None, Query(alias="from", description=_FROM)] = None,
    until: Annotated[str | None, Query(alias="to", description=_TO)] = None,
    limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 100,
    cursor: Annotated[str | None, Query(pattern="^[0-9]{1,15}-[0-9]{1,20}$")] = None,
    places: PlacesHeader = None,
) -> Response:
    """Messages of a subject that wait, in due order; also those that no subscription matches."""
    from_ms = 0 if since is None else read_time_ms(since, "/query/from")
    until_ms = TIME_MS_MAX + 1 if until is None else read_time_ms(until, "/query/to")
    start, until_ms = Position(max(0, from_ms), 0), max(0, until_ms)
    if cursor is not None:
        due_ms, _, seq = cursor.partition("-")
        start = max(start, Position(int(due_ms), min(int(seq), SEQ_MAX)))
    views, following = await parts.listing.page(subject, start, until_ms, limit)
    if places is not None:
        items = (encode(pending_document(view)) for view in views)
        return shard_page(items, ((one.due_ms, one.entry_seq) for one in views), following, limit)
    return json_answer(
        PendingListDocument(
            [pending_document(view) for view in views],
            cursor=following and f"{following.due_ms}-{following.seq}",
        )
    )


def _message(view: MessageView) -> Response:
    response = json_answer(message_document(view))
    response.headers["etag"] = entity_tag(view.version)
    return response


async def _debounced(parts: Parts, message: NewMessage, key: str) -> tuple[NewMessage, int]:
    """The message as it is put now, and when that is: it goes on where the one stands that waits
    under its key, which has to be read. The caller puts it before any other call is heard."""
    calls = parts.calls
    while True:
        waiting, before = _waiting(calls, message.subject, key, calls.clock()), None
        if waiting is not None:
            # One that has gone meanwhile, or cannot be read, is none.
            with suppress(NotFoundError, DamageError):
                before = (await parts.queries.look_up(waiting.seq, waiting.due_ms)).payload
        now_ms = calls.clock()
        if _waiting(calls, message.subject, key, now_ms) == waiting:
            payload, due_ms = debounced(message.payload, before, now_ms)
            return msgspec.structs.replace(message, payload=payload, due_ms=due_ms), now_ms


def _waiting(calls: Calls, subject: str, key: str, now_ms: int) -> MessageId | None:
    """The message that waits under the key. One whose time has come is on its way (`replace`)."""
    try:
        found = calls.by_key(subject, key)
        located = calls.locate(found.seq, found.due_ms)
    except NotFoundError:
        return None
    is_waiting = located.state is State.SCHEDULED and located.entry.due_ms > now_ms
    return found if is_waiting else None


async def _move(
    parts: Parts,
    found: MessageId,
    move: MoveModel,
    if_match: str | None,
) -> Response:
    if move.delay is None and move.deliver_at is None:
        raise InputError("give delay or deliver_at", "/delay")
    calls = parts.calls
    new_due_ms = parts.intake.due_ms(move.delay, move.deliver_at, calls.clock())
    seq, due_ms = found.seq, found.due_ms
    version = await calls.move(seq, due_ms, new_due_ms, expected_versions(if_match))
    moved = MovedModel(calls.encode_id(due_ms, seq), format_time(new_due_ms), State.SCHEDULED)
    response = json_answer(moved)
    response.headers["etag"] = entity_tag(version)
    return response
