"""Every call that is not hot, on FastAPI. What each does is in its docstring, which OpenAPI shows.

Statuses that may come with every call are added in `openapi`.

Cost: about 100 µs per call. Threads: belongs to the event loop.
"""

from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from fastapi import APIRouter, Body, Depends, Header, Path, Query, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.convertors import Convertor, register_url_convertor

from delayserver.api.conditions import entity_tag, expected_versions, wants_new
from delayserver.api.documents import (
    DeadLettersDocument,
    PendingListDocument,
    dead_letter_document,
    encode,
    message_document,
    pending_document,
)
from delayserver.api.hot.asgi import HotPath, read_body
from delayserver.api.hot.paths import ALIVE_PATH, READY_PATH
from delayserver.api.intake import Intake
from delayserver.api.rest import models
from delayserver.api.rest.authorize import CallerOf, make_authorize, require
from delayserver.api.rest.openapi import batch_body, json_body
from delayserver.decisions.imports import Import
from delayserver.errors import ConflictError, InputError, NotFoundError
from delayserver.queries.dead_letters import DeadLetters
from delayserver.queries.listing import Listing
from delayserver.queries.look_up import MessageView, Queries
from delayserver.records.message import State, check_key
from delayserver.records.message_id import MessageId
from delayserver.records.subjects import SUBJECT_PATTERN
from delayserver.records.subscriptions import RetryPolicy, Subscription
from delayserver.records.tables import Archived
from delayserver.records.tracecontext import trace_of
from delayserver.schedule.archives import RetiredHour
from delayserver.schedule.pending import Position
from delayserver.security.signing import WebhookSecret
from delayserver.security.targets import TargetPolicy
from delayserver.security.tokens import Action
from delayserver.server.calls import Calls
from delayserver.times import (
    TIME_MS_MAX,
    format_duration,
    format_time,
    parse_duration_ms,
    parse_time_ms,
)
from storage.hour_log import hour_name, parse_hour

PAGE_MAX = 1000
DUPLICATES_PAGE_MAX = 10_000
SEQ_MAX = 2**64 - 1
TIME_DIGITS_MAX = 15
HOUR_PATTERN = "[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}"
_FROM = "due at this time or later: RFC 3339, or milliseconds since the epoch"
_TO = "due before this time"
_REDRIVE_ALL = models.RedriveModel()

Responses = dict[int | str, dict[str, Any]]

PROBLEM: dict[str, Any] = {"model": models.ProblemModel}
INVALID: Responses = {422: PROBLEM, 503: PROBLEM}
MISSING: Responses = {404: PROBLEM, **INVALID}
CONFLICT: Responses = {409: PROBLEM, **MISSING}
CONDITIONAL: Responses = {412: PROBLEM, **CONFLICT}
PUBLISH: Responses = {409: PROBLEM, 507: PROBLEM, **INVALID}
STORED: Responses = {500: PROBLEM}
"""What is read from the disk may turn out to be damaged."""
LOGGED: Responses = {507: PROBLEM}
"""What is recorded may find the disk full."""


class _KeyConvertor(Convertor[str]):
    """The rest of the path, slashes and line breaks included."""

    regex = "(?s:.*)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("key", _KeyConvertor())

SubjectPath = Annotated[str, Path(pattern=f"^{SUBJECT_PATTERN}$")]
KeyPath = Annotated[str, Path(description="the key of the message")]
IfMatch = Annotated[
    str | None, Header(description="only if this is its version (ETag), or * for any")
]
IfNoneMatch = Annotated[str | None, Header(description="*: only if nothing waits under the key")]
AckQuery = Annotated[
    Literal["durable", "filed"], Query(description="when to answer: synced, or also in its hour")
]
AckTimeout = Annotated[
    models.DurationMs, Query(le=60_000, description="then the answer is 202 or 504")
]
ImportPath = Annotated[str, Path(pattern="^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
HourPath = Annotated[
    str, Path(pattern=f"^{HOUR_PATTERN}$", description="the hour in UTC, such as 2026-11-20T15")
]
NamePath = Annotated[str, Path(pattern=f"^{SUBJECT_PATTERN}$")]


def make_router(
    calls: Calls,
    intake: Intake,
    path: HotPath,
    targets: TargetPolicy,
    registry: CollectorRegistry,
) -> APIRouter:
    """All routes of one server."""
    router = APIRouter(dependencies=[Depends(make_authorize(calls))])
    queries, dead_letters, listing = Queries(calls), DeadLetters(calls), Listing(calls)

    # ── publish ────────────────────────────────────────────────────────────────────────────────

    @router.post(
        "/v1/messages",
        tags=["messages"],
        status_code=201,
        response_model=models.PublishedModel,
        responses={
            200: {"model": models.PublishedModel, "description": "the key was published before"},
            202: {"model": models.PublishedModel, "description": "durable, not yet filed"},
            504: PROBLEM,
            **PUBLISH,
        },
        openapi_extra=json_body(models.PublishModel),
    )
    async def publish(
        request: Request, ack: AckQuery = "durable", timeout: AckTimeout = 60_000
    ) -> Response:
        """Publish a message: it is durable when this answers, or also filed, if `ack` says so."""
        return Forward(path.publish, request)

    @router.post(
        "/v1/messages/batch",
        tags=["messages"],
        response_model=models.BatchModel,
        responses={
            202: {"model": models.BatchModel, "description": "durable, not yet filed"},
            504: PROBLEM,
            **PUBLISH,
        },
        openapi_extra=batch_body(),
    )
    async def publish_batch(
        request: Request, ack: AckQuery = "durable", timeout: AckTimeout = 60_000
    ) -> Response:
        """Publish up to 10,000 messages, all or none: JSON array, NDJSON or MessagePack."""
        return Forward(path.publish, request)

    @router.post(
        "/v1/messages/cancel",
        tags=["messages"],
        response_model=models.CancelledModel,
        responses=INVALID | LOGGED,
        openapi_extra=json_body(models.CancelModel),
    )
    async def cancel_many(request: Request) -> Response:
        """Cancel many messages by id and by key; one result for each."""
        return Forward(path.publish, request)

    # ── one message ────────────────────────────────────────────────────────────────────────────

    @router.get(
        "/v1/messages/{message_id}",
        tags=["messages"],
        response_model=models.MessageModel,
        responses=MISSING | STORED,
    )
    async def get_message(message_id: str) -> Response:
        """A message, its state, and what became of it."""
        found = calls.message_id(message_id)
        return _message(await queries.look_up(found.seq, found.due_ms))

    @router.delete(
        "/v1/messages/{message_id}",
        tags=["messages"],
        response_model=models.StateModel,
        responses=CONDITIONAL | STORED | LOGGED,
    )
    async def cancel_message(
        message_id: str, request: Request, if_match: IfMatch = None
    ) -> Response:
        """Cancel a message: when this answers, it will never be delivered, crash or not."""
        return Forward(path.publish, request)

    @router.patch(
        "/v1/messages/{message_id}", tags=["messages"], responses=CONDITIONAL | STORED | LOGGED
    )
    async def move_message(
        message_id: str, move: models.MoveModel, response: Response, if_match: IfMatch = None
    ) -> models.MovedModel:
        """Give a message a new due time; its id stays."""
        found = calls.message_id(message_id)
        return await _move(calls, intake, found, move, response, if_match)

    # ── one message, by key ────────────────────────────────────────────────────────────────────

    @router.get(
        "/v1/subjects/{subject}/keys/{key:key}",
        tags=["keys"],
        response_model=models.MessageModel,
        responses=MISSING | STORED,
    )
    async def get_by_key(subject: SubjectPath, key: KeyPath) -> Response:
        """The message that a key stands for."""
        found = calls.by_key(subject, key)
        return _message(await queries.look_up(found.seq, found.due_ms))

    @router.delete(
        "/v1/subjects/{subject}/keys/{key:key}",
        tags=["keys"],
        response_model=models.StateModel,
        responses=CONDITIONAL | LOGGED,
    )
    async def cancel_by_key(
        subject: SubjectPath, key: KeyPath, request: Request, if_match: IfMatch = None
    ) -> Response:
        """Cancel the message that a key stands for."""
        return Forward(path.publish, request)

    @router.patch(
        "/v1/subjects/{subject}/keys/{key:key}",
        tags=["keys"],
        responses=CONDITIONAL | STORED | LOGGED,
    )
    async def move_by_key(
        subject: SubjectPath,
        key: KeyPath,
        move: models.MoveModel,
        response: Response,
        if_match: IfMatch = None,
    ) -> models.MovedModel:
        """Give the message that a key stands for a new due time."""
        found = calls.by_key(subject, key)
        return await _move(calls, intake, found, move, response, if_match)

    @router.put(
        "/v1/subjects/{subject}/keys/{key:key}",
        tags=["keys"],
        status_code=201,
        response_model=models.PublishedModel,
        responses={
            200: {"model": models.PublishedModel, "description": "a message was replaced"},
            412: PROBLEM,
            **PUBLISH,
        },
        openapi_extra=json_body(models.PublishUnderKeyModel, required=False),
    )
    async def put_by_key(
        subject: SubjectPath,
        key: KeyPath,
        request: Request,
        if_match: IfMatch = None,
        if_none_match: IfNoneMatch = None,
    ) -> Response:
        """Publish, or replace what waits under the key: a timer that each call pushes back."""
        check_key(key)
        expected, only_new = expected_versions(if_match), wants_new(if_none_match)
        data = await read_body(request.receive)
        message = intake.under_key(data, subject, key, calls.clock())
        message.trace = trace_of(request.headers.raw)
        published, replaced = calls.replace(
            message, calls.clock(), expected=expected, only_new=only_new
        )
        await calls.durable(published.group)
        document = models.PublishedModel(
            id=published.message_id,
            subject=subject,
            key=key,
            deliver_at=format_time(published.due_ms),
            state=State.SCHEDULED,
            duplicate=False,
        )
        return JSONResponse(
            document.model_dump(),
            200 if replaced else 201,
            {
                "location": f"/v1/messages/{published.message_id}",
                "etag": entity_tag(str(published.seq)),
            },
        )

    # ── what is pending ────────────────────────────────────────────────────────────────────────

    @router.get(
        "/v1/subjects/{subject}/messages",
        tags=["messages"],
        response_model=models.PendingListModel,
        responses=INVALID | STORED,
    )
    async def list_pending(
        subject: SubjectPath,
        since: Annotated[str | None, Query(alias="from", description=_FROM)] = None,
        until: Annotated[str | None, Query(alias="to", description=_TO)] = None,
        limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 100,
        cursor: Annotated[str | None, Query(pattern="^[0-9]{1,15}-[0-9]{1,20}$")] = None,
    ) -> Response:
        """Messages of a subject that wait, in due order; also what no subscription matches."""
        from_ms = 0 if since is None else _time_ms(since, "/query/from")
        until_ms = TIME_MS_MAX + 1 if until is None else _time_ms(until, "/query/to")
        start = Position(from_ms, 0)
        if cursor is not None:
            due_ms, _, seq = cursor.partition("-")
            start = max(start, Position(int(due_ms), min(int(seq), SEQ_MAX)))
        views, following = await listing.page(subject, start, until_ms, limit)
        return _json(
            PendingListDocument(
                [pending_document(view) for view in views],
                cursor=following and f"{following.due_ms}-{following.seq}",
            )
        )

    # ── subscriptions ──────────────────────────────────────────────────────────────────────────

    @router.put(
        "/v1/subscriptions/{name}",
        tags=["subscriptions"],
        responses={
            201: {"model": models.SubscriptionViewModel, "description": "Created"},
            409: PROBLEM,
            **INVALID,
            **LOGGED,
        },
    )
    async def put_subscription(
        name: NamePath, wanted: models.SubscriptionModel, response: Response, caller: CallerOf
    ) -> models.SubscriptionViewModel:
        """Create or change a subscription."""
        async with calls.subscription_lock:
            existing = calls.registry.by_name(name)
            for subject in {wanted.subject, existing.subject if existing else wanted.subject}:
                require(caller, Action.CONSUME, subject)
            subscription = _subscription(calls, targets, name, wanted, existing)
            await calls.put_subscription(subscription)
        response.status_code = 200 if existing else 201
        return _view(calls, subscription)

    @router.get("/v1/subscriptions", tags=["subscriptions"])
    async def list_subscriptions(caller: CallerOf) -> models.SubscriptionsModel:
        """All subscriptions that the token may consume, oldest first."""
        return models.SubscriptionsModel(
            subscriptions=[
                _view(calls, subscription)
                for subscription in calls.registry
                if caller is None or caller.may(Action.CONSUME, subscription.subject)
            ]
        )

    @router.get("/v1/subscriptions/{name}", tags=["subscriptions"], responses=MISSING)
    async def get_subscription(name: NamePath) -> models.SubscriptionViewModel:
        """One subscription."""
        return _view(calls, calls.subscription(name))

    @router.delete(
        "/v1/subscriptions/{name}",
        tags=["subscriptions"],
        status_code=204,
        responses=MISSING | LOGGED,
    )
    async def delete_subscription(name: NamePath) -> None:
        """Delete a subscription. What only it was to get waits for the next one that matches."""
        await _change(calls, name, deleted=True)

    @router.post(
        "/v1/subscriptions/{name}/pause", tags=["subscriptions"], responses=MISSING | LOGGED
    )
    async def pause(name: NamePath) -> models.SubscriptionViewModel:
        """Deliver nothing until it is resumed; what falls due waits."""
        return _view(calls, await _change(calls, name, paused=True))

    @router.post(
        "/v1/subscriptions/{name}/resume", tags=["subscriptions"], responses=MISSING | LOGGED
    )
    async def resume(name: NamePath) -> models.SubscriptionViewModel:
        """Deliver again."""
        return _view(calls, await _change(calls, name, paused=False))

    # ── pull ───────────────────────────────────────────────────────────────────────────────────

    @router.post(
        "/v1/subscriptions/{name}/pull",
        tags=["pull"],
        response_model=models.PulledListModel,
        responses=CONFLICT,
        openapi_extra=json_body(models.PullModel, required=False),
    )
    async def pull(name: NamePath, request: Request) -> Response:
        """Messages that are due, each with a lease; waits for `min_messages` up to `wait`, and
        then answers with what there is."""
        return Forward(path.consume, request)

    @router.post(
        "/v1/subscriptions/{name}/ack",
        tags=["pull"],
        response_model=models.AckedModel,
        responses=MISSING,
        openapi_extra=json_body(models.LeasesModel),
    )
    async def ack(name: NamePath, request: Request) -> Response:
        """These are done; when this answers it is recorded, and they never come again."""
        return Forward(path.consume, request)

    @router.post(
        "/v1/subscriptions/{name}/nack",
        tags=["pull"],
        response_model=models.NackedModel,
        responses=MISSING | LOGGED,
        openapi_extra=json_body(models.NackModel),
    )
    async def nack(name: NamePath, request: Request) -> Response:
        """These are not done: deliver them again, now or after `delay`."""
        return Forward(path.consume, request)

    @router.post(
        "/v1/subscriptions/{name}/extend",
        tags=["pull"],
        response_model=models.ExtendedModel,
        responses=MISSING,
        openapi_extra=json_body(models.ExtendModel),
    )
    async def extend(name: NamePath, request: Request) -> Response:
        """These need more time: `lease` from now."""
        return Forward(path.consume, request)

    # ── dead letters ───────────────────────────────────────────────────────────────────────────

    @router.get(
        "/v1/subscriptions/{name}/dead-letters",
        tags=["dead letters"],
        response_model=models.DeadLettersModel,
        responses=MISSING | STORED,
    )
    async def list_dead_letters(
        name: NamePath,
        limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 100,
        cursor: Annotated[str | None, Query(pattern="^[0-9]{1,20}$")] = None,
    ) -> Response:
        """Messages that were given up, in the order of their last attempts."""
        subscription = calls.subscription(name)
        from_seq = min(int(cursor or 0), SEQ_MAX)
        letters = await dead_letters.page(subscription, from_seq, limit + 1)
        return _json(
            DeadLettersDocument(
                [dead_letter_document(letter) for letter in letters[:limit]],
                cursor=str(letters[limit].entry_seq) if len(letters) > limit else None,
            )
        )

    @router.post(
        "/v1/subscriptions/{name}/dead-letters/redrive",
        tags=["dead letters"],
        responses=MISSING | STORED | LOGGED,
    )
    async def redrive(
        name: NamePath, which: Annotated[models.RedriveModel, Body()] = _REDRIVE_ALL
    ) -> models.RedrivenModel:
        """Deliver dead letters again, all or those named by message id."""
        ids = None if which.ids is None else set(which.ids)
        return models.RedrivenModel(
            redriven=await dead_letters.redrive(calls.subscription(name), ids)
        )

    @router.delete(
        "/v1/subscriptions/{name}/dead-letters/{message_id}",
        tags=["dead letters"],
        status_code=204,
        responses=MISSING | LOGGED,
    )
    async def discard(name: NamePath, message_id: str) -> None:
        """Delete a dead letter, by message id."""
        await dead_letters.discard(calls.subscription(name), message_id)

    # ── bulk ───────────────────────────────────────────────────────────────────────────────────

    @router.put("/v1/imports/{import_id}", tags=["bulk"], responses=INVALID | LOGGED)
    async def begin_import(
        import_id: ImportPath, wanted: models.ImportSubjectsModel
    ) -> models.ImportBegunModel:
        """Begin a bulk load: the numbers of its subjects, and whether it was adopted before."""
        try:
            state = str(calls.find_import(import_id).stage)
        except NotFoundError:
            state = "staging"
        numbers, group = calls.begin_import(wanted.subjects)
        await calls.durable(group)
        return models.ImportBegunModel(
            id=import_id,
            state=state,
            subjects=numbers,
            now=format_time(calls.clock()),
            delay_max_ms=calls.settings.delay_max_ms,
            body_max_bytes=calls.settings.body_max_bytes,
        )

    @router.post("/v1/imports", tags=["bulk"], status_code=201, responses=CONFLICT | LOGGED)
    async def adopt_import(wanted: models.ImportModel) -> models.ImportViewModel:
        """Adopt what a bulk load has staged, all or nothing. It is durable when this answers; the
        same again is answered the same."""
        path = _below(calls.settings.data_dir, wanted.manifest)
        return _import_view(await calls.adopt(path))

    @router.get("/v1/imports/{import_id}", tags=["bulk"], responses=MISSING)
    async def get_import(import_id: ImportPath) -> models.ImportViewModel:
        """How far an import is."""
        return _import_view(calls.find_import(import_id))

    @router.get("/v1/imports/{import_id}/duplicates", tags=["bulk"], responses=MISSING)
    async def list_duplicates(
        import_id: ImportPath,
        limit: Annotated[int, Query(ge=1, le=DUPLICATES_PAGE_MAX)] = 1000,
        cursor: Annotated[str | None, Query(pattern="^[0-9]{1,10}$")] = None,
    ) -> models.DuplicatesModel:
        """Rows of an adopted import that were left out, and the messages that hold their keys."""
        rows = calls.import_state(import_id).record.left_out()
        first = int(np.searchsorted(rows["row"], int(cursor or 0)))
        page = rows[first : first + limit].tolist()
        rest = rows["row"][first + limit : first + limit + 1].tolist()
        encode_id = calls.encode_id
        return models.DuplicatesModel(
            duplicates=[
                models.DuplicateModel(row=row, id=encode_id(due_ms, seq))
                for row, seq, due_ms in page
            ],
            cursor=str(rest[0]) if rest else None,
        )

    @router.get("/v1/archives", tags=["bulk"], responses=INVALID)
    async def list_archives(
        state: Literal["waiting", "archived", "all"] = "waiting",
        limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 100,
        cursor: Annotated[str | None, Query(pattern=f"^{HOUR_PATTERN}$")] = None,
    ) -> models.ArchivesModel:
        """Settled hours that are kept, the oldest first: those that wait to be archived, those that
        were, or all."""
        from_hour = 0 if cursor is None else _hour(cursor, "/cursor")
        found = [
            retired
            for retired in await calls.retired_hours()
            if retired.hour >= from_hour and state in ("all", _archive_state(retired))
        ]
        return models.ArchivesModel(
            archive=calls.settings.archive,
            hours=[_archive_view(retired) for retired in found[:limit]],
            cursor=hour_name(found[limit].hour) if len(found) > limit else None,
        )

    @router.put("/v1/archives/{hour}", tags=["bulk"], responses=CONFLICT | LOGGED)
    async def confirm_archive(
        hour: HourPath, archive: models.ArchiveModel
    ) -> models.ArchiveConfirmedModel:
        """An hour was archived: with the setting `archive` the server may delete it from now on,
        after its retention. Refused if the archive does not cover what the hour holds now. It is
        durable when this answers; the same again is answered the same."""
        archived = Archived(**archive.model_dump(), archived_ms=calls.clock())
        await calls.confirm_archive(_hour(hour, ""), archived)
        return models.ArchiveConfirmedModel(
            hour=hour, state="archived", archived_at=format_time(archived.archived_ms)
        )

    # ── operations ─────────────────────────────────────────────────────────────────────────────

    @router.get(ALIVE_PATH, tags=["operations"], response_model=dict[str, str])
    async def healthz(request: Request) -> Response:
        """The process is alive."""
        return Forward(path.health, request)

    @router.get(
        READY_PATH,
        tags=["operations"],
        response_model=dict[str, str],
        responses={503: PROBLEM},
    )
    async def readyz(request: Request) -> Response:
        """The server has recovered and accepts messages."""
        return Forward(path.health, request)

    @router.get("/metrics", tags=["operations"], response_class=Response)
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        await queries.count_later()
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @router.get("/v1/stats", tags=["operations"])
    async def stats() -> dict[str, Any]:
        """How much is pending, on its way and done, since this process started."""
        return await queries.stats()

    @router.get("/v1/forecast", tags=["operations"], responses=INVALID)
    async def forecast(bucket: str = "1h") -> dict[str, Any]:
        """How many messages fall due when, cancelled ones already taken out."""
        bucket_ms = parse_duration_ms(bucket, "/bucket")
        return {"bucket": format_duration(bucket_ms), "buckets": await queries.forecast(bucket_ms)}

    return router


def _time_ms(text: str, pointer: str) -> int:
    """A time in a query, where a number cannot be told from text. Raises InputError."""
    is_number = text.isascii() and text.isdigit() and len(text) <= TIME_DIGITS_MAX
    return max(0, parse_time_ms(int(text) if is_number else text, pointer))


def _json(document: msgspec.Struct) -> Response:
    return Response(encode(document), media_type="application/json")


def _message(view: MessageView) -> Response:
    answer = _json(message_document(view))
    answer.headers["etag"] = entity_tag(view.version)
    return answer


class Forward(Response):
    """An answer that a plain ASGI function gives."""

    def __init__(self, handler: Any, request: Request) -> None:
        super().__init__()
        self._handler = handler
        self._request = request

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._handler(scope, self._request.receive, send)


def _below(data_dir: FilePath, path: str) -> str:
    """A path that a client gave, from the data directory on. Raises InputError."""
    if not FilePath(path).is_absolute():
        return path
    try:
        return FilePath(path).relative_to(data_dir.resolve()).as_posix()
    except ValueError:
        raise InputError(
            "the manifest is not in the server's data directory", "/manifest"
        ) from None


def _hour(text: str, pointer: str) -> int:
    """The number of an hour. Raises InputError."""
    hour = parse_hour(text)
    if hour is None:
        raise InputError(f"{text!r} is not an hour such as 2026-11-20T15", pointer)
    return hour


def _archive_state(retired: RetiredHour) -> Literal["waiting", "archived"]:
    return "waiting" if retired.archived is None else "archived"


def _archive_view(retired: RetiredHour) -> models.ArchiveViewModel:
    archived = retired.archived
    return models.ArchiveViewModel(
        hour=hour_name(retired.hour),
        state=_archive_state(retired),
        retired_at=format_time(retired.retired_ms),
        count=retired.count,
        **retired.extent._asdict(),
        archived_at=archived and format_time(archived.archived_ms),
        checksum=archived and archived.checksum,
        location=archived and archived.location,
    )


def _import_view(found: Import) -> models.ImportViewModel:
    return models.ImportViewModel(
        id=found.id,
        state=found.stage,
        count=found.count,
        done=found.done,
        accepted=found.count - found.duplicates if found.first_seq else 0,
        duplicates=found.duplicates,
        conflicts=found.conflicts,
        first_seq=found.first_seq,
    )


async def _move(
    calls: Calls,
    intake: Intake,
    found: MessageId,
    move: models.MoveModel,
    response: Response,
    if_match: str | None,
) -> models.MovedModel:
    if move.delay is None and move.deliver_at is None:
        raise InputError("give delay or deliver_at", "/delay")
    new_due_ms = intake.due_ms(move.delay, move.deliver_at, calls.clock())
    seq, due_ms = found.seq, found.due_ms
    version = await calls.move(seq, due_ms, new_due_ms, expected_versions(if_match))
    response.headers["etag"] = entity_tag(version)
    return models.MovedModel(
        id=calls.encode_id(due_ms, seq),
        deliver_at=format_time(new_due_ms),
        state=State.SCHEDULED,
    )


def _subscription(
    calls: Calls,
    targets: TargetPolicy,
    name: str,
    wanted: models.SubscriptionModel,
    existing: Subscription | None,
) -> Subscription:
    settings, registry = calls.settings, calls.registry
    if existing is None and len(registry) >= settings.subscriptions_max:
        raise ConflictError(f"there are {len(registry)} subscriptions, the limit")
    if existing is not None and existing.type != wanted.type:
        raise ConflictError(f"the subscription is of type {existing.type}; delete it first")
    webhook = wanted.type == "webhook"
    if webhook != (wanted.url is not None):
        raise InputError("a webhook needs a url, and only a webhook has one", "/url")
    if wanted.url is not None:
        targets.check_url(wanted.url)
    if not webhook and (wanted.rate or wanted.batch):
        pointer = "/rate" if wanted.rate else "/batch"
        raise InputError("only a webhook has it; who pulls says how many, and when", pointer)
    secrets = _secrets(wanted)
    rate, catch_up = wanted.rate, wanted.catch_up
    backoff_ms = tuple(wanted.retry.backoff)
    try:
        RetryPolicy(wanted.retry.max_attempts, *([backoff_ms] if backoff_ms else []))
    except InputError as error:
        raise error.below("/retry") from error
    return Subscription(
        id=existing.id if existing else registry.next_id(),
        name=name,
        subject=wanted.subject,
        type=wanted.type,
        created_ms=existing.created_ms if existing else calls.clock(),
        url=wanted.url or "",
        secrets=secrets,
        timeout_ms=wanted.timeout,
        max_in_flight=wanted.max_in_flight or settings.in_flight_max,
        max_attempts=wanted.retry.max_attempts,
        backoff_ms=backoff_ms,
        lease_ms=wanted.lease,
        rate_per_s=rate.per_second if rate else 0.0,
        rate_burst=(rate.burst or max(1, int(rate.per_second))) if rate else 0,
        batch_max=wanted.batch.max if wanted.batch else 0,
        linger_ms=wanted.batch.linger if wanted.batch else 0,
        spread_ms=catch_up.spread if isinstance(catch_up, models.SpreadModel) else 0,
        drop_older_than_ms=(
            catch_up.drop_older_than if isinstance(catch_up, models.DropModel) else 0
        ),
        paused=existing.paused if existing else False,
    )


def _secrets(wanted: models.SubscriptionModel) -> tuple[str, ...]:
    """Newest first. Raises InputError."""
    if wanted.secret is not None and wanted.secrets is not None:
        raise InputError("give either secret or secrets, not both", "/secrets")
    if wanted.secret is not None:
        WebhookSecret.parse(wanted.secret, "/secret")
        return (wanted.secret,)
    for index, secret in enumerate(wanted.secrets or ()):
        WebhookSecret.parse(secret, f"/secrets/{index}")
    return tuple(wanted.secrets or ())


def _catch_up(subscription: Subscription) -> str | dict[str, str]:
    if subscription.spread_ms:
        return {"spread": format_duration(subscription.spread_ms)}
    if subscription.drop_older_than_ms:
        return {"drop_older_than": format_duration(subscription.drop_older_than_ms)}
    return "all"


async def _change(calls: Calls, name: str, **changes: bool) -> Subscription:
    async with calls.subscription_lock:
        existing = calls.subscription(name)
        changed = msgspec.structs.replace(existing, **changes)
        await calls.put_subscription(changed)
        return changed


def _view(calls: Calls, subscription: Subscription) -> models.SubscriptionViewModel:
    queued, in_flight = calls.waiting(subscription)
    policy = subscription.retry_policy
    webhook = subscription.type == "webhook"
    return models.SubscriptionViewModel(
        name=subscription.name,
        subject=subscription.subject,
        type=subscription.type,
        created_at=format_time(subscription.created_ms),
        paused=subscription.paused,
        queued=queued,
        in_flight=in_flight,
        url=subscription.url or None,
        signed=bool(subscription.secrets) if webhook else None,
        timeout=format_duration(subscription.timeout_ms) if webhook else None,
        max_in_flight=subscription.max_in_flight if webhook else None,
        retry={
            "max_attempts": policy.max_attempts,
            "backoff": [format_duration(wait_ms) for wait_ms in policy.backoff_ms],
        },
        rate={"per_second": subscription.rate_per_s, "burst": subscription.rate_burst}
        if subscription.rate_per_s
        else None,
        batch={"max": subscription.batch_max, "linger": format_duration(subscription.linger_ms)}
        if subscription.batch_max
        else None,
        catch_up=_catch_up(subscription),
        lease=None if webhook else format_duration(subscription.lease_ms),
    )
