"""Subscriptions: who gets the messages of a subject; pull; dead letters.

The calls of consumers are hot: `delayserver.api.hot` serves them, and they stand here for the
OpenAPI document and for whoever reaches FastAPI by another way.

Cost: about 100 µs per call; a change waits for the disk, and dead letters for a checkpoint.
Threads: belongs to the event loop.
"""

from functools import partial
from itertools import islice
from typing import Annotated, Final

import msgspec
import structlog
from fastapi import APIRouter, Query, Request, Response

from delayserver.api.documents import NAMED_PAGE_MAX, dead_letter_document, encode
from delayserver.api.rest.authorize import CallerOf, require
from delayserver.api.rest.common import (
    CONFLICT,
    INVALID,
    LOGGED,
    MISSING,
    OWNER_PATTERN,
    PAGE_MAX,
    PROBLEM,
    SEQ_MAX,
    STORED,
    Forward,
    NamePath,
    OwnerPath,
    Parts,
    PartsOf,
    PlacesHeader,
    Responses,
    json_answer,
    json_of,
    shard_page,
)
from delayserver.api.rest.named import LimitQuery
from delayserver.api.rest.openapi import answer, json_body
from delayserver.api.rest.targets import load_client, target_fields, target_of
from delayserver.errors import ConflictError, InputError
from delayserver.records.direct import DIRECT_NAME
from delayserver.records.subscriptions import Registry, StandIn, Subscription, check_own_headers
from delayserver.records.understanding import reason_of
from delayserver.security.signing import WebhookSecret
from delayserver.security.targets import TargetPolicy
from delayserver.security.tokens import Action, Caller
from delayserver.server.calls import Calls
from delayserver.times import format_duration, format_time
from delayserver.wire.fields import MASK
from delayserver.wire.pulls import (
    AckedDocument,
    ExtendBody,
    ExtendedDocument,
    LeasesBody,
    NackBody,
    NackedDocument,
    PullBody,
    PulledListDocument,
)
from delayserver.wire.reading import read
from delayserver.wire.subscriptions import (
    BatchingViewModel,
    DeadLetterCountDocument,
    DeadLetterCountsDocument,
    DeadLettersDocument,
    KafkaSubscription,
    PushedSubscription,
    RateViewModel,
    RedriveModel,
    RedrivenModel,
    RetryViewModel,
    SubscriptionModel,
    SubscriptionRequest,
    SubscriptionsModel,
    SubscriptionViewModel,
    WebhookSubscription,
    read_subscription,
)

SINK_IN_FLIGHT: Final = 1000
"""Default of `max_in_flight` where messages go to a broker. They wait there for milliseconds."""

SHOWN: Final[Responses] = {200: answer(SubscriptionViewModel)}

log = structlog.get_logger()
router = APIRouter()


@router.put(
    "/v1/subscriptions/{name}",
    tags=["subscriptions"],
    responses={
        200: answer(SubscriptionViewModel),
        201: answer(SubscriptionViewModel, "Created"),
        409: PROBLEM,
        **INVALID,
        **LOGGED,
    },
    openapi_extra=json_body(SubscriptionModel),
)
async def put_subscription(
    name: NamePath, request: Request, caller: CallerOf, parts: PartsOf
) -> Response:
    """Create or change a subscription. With another subject it keeps the messages that fell due
    before, and receives those that fall due from now on."""
    wanted = read_subscription(await json_of(request))
    await load_client(wanted.kind)
    if isinstance(wanted, KafkaSubscription) and wanted.delivery == "exactly_once":
        await parts.calls.check_exactly_once(wanted.bootstrap)
    is_new = True

    def define(existing: Subscription | None, known: Registry) -> Subscription:
        nonlocal is_new
        subjects = {wanted.subject}
        if existing is not None:
            subjects.add(existing.subject)
            if existing.is_pushed:
                # Waiting messages go where this definition says; a consumer gets only its own.
                subjects.update(parts.calls.subjects_of(existing))
        for subject in sorted(subjects):
            require(caller, Action.CONSUME, subject)
        is_new = existing is None
        return _subscription(parts.calls, parts.targets, name, wanted, existing, known)

    put = await parts.calls.put_subscription(name, define)
    return json_answer(_view(parts.calls, put), 201 if is_new else 200)


@router.get(
    "/v1/subscriptions",
    tags=["subscriptions"],
    responses=INVALID | {200: answer(SubscriptionsModel)},
)
async def list_subscriptions(
    caller: CallerOf,
    parts: PartsOf,
    limit: Annotated[
        int | None, Query(ge=1, le=PAGE_MAX, description="of a page; all, if nothing is said")
    ] = None,
    cursor: Annotated[str | None, Query(pattern="^[0-9]{1,10}$")] = None,
    prefix: Annotated[str, Query(max_length=128, description="those whose names begin so")] = "",
) -> Response:
    """Subscriptions that the token may consume, oldest first."""
    from_id = int(cursor or 0)
    found = (
        one
        for one in parts.calls.registry
        if one.id >= from_id
        and one.name.startswith(prefix)
        and (caller is None or caller.may(Action.CONSUME, one.subject))
    )
    page = [_view(parts.calls, one) for one in islice(found, limit)]
    following = next(found, None) if limit is not None else None
    return json_answer(SubscriptionsModel(page, None if following is None else str(following.id)))


@router.get("/v1/subscriptions/{name}", tags=["subscriptions"], responses=MISSING | SHOWN)
async def get_subscription(name: NamePath, parts: PartsOf) -> Response:
    """One subscription."""
    return json_answer(_view(parts.calls, parts.calls.subscription(name)))


@router.delete(
    "/v1/subscriptions/{name}",
    tags=["subscriptions"],
    status_code=204,
    responses=MISSING | LOGGED,
)
async def delete_subscription(name: NamePath, parts: PartsOf) -> None:
    """Delete a subscription. Messages that only it was to get wait for the next one that matches;
    its dead letters stay listed under its name."""
    await parts.calls.change_subscription(name, deleted=True)


@router.post(
    "/v1/subscriptions/{name}/pause",
    tags=["subscriptions"],
    responses=MISSING | LOGGED | SHOWN,
)
async def pause_subscription(name: NamePath, parts: PartsOf) -> Response:
    """Deliver nothing until it is resumed; messages that fall due wait."""
    changed = await parts.calls.change_subscription(name, paused=True, pause_reason="")
    return json_answer(_view(parts.calls, changed))


@router.post(
    "/v1/subscriptions/{name}/resume",
    tags=["subscriptions"],
    responses=MISSING | LOGGED | SHOWN,
)
async def resume_subscription(name: NamePath, parts: PartsOf) -> Response:
    """Deliver again."""
    changed = await parts.calls.change_subscription(name, paused=False)
    return json_answer(_view(parts.calls, changed))


# ── pull ──────────────────────────────────────────────────────────────────────────────────────────


@router.post(
    "/v1/subscriptions/{name}/pull",
    tags=["pull"],
    responses=CONFLICT | {200: answer(PulledListDocument)},
    openapi_extra=json_body(PullBody, required=False),
)
async def pull_messages(name: NamePath, request: Request, parts: PartsOf) -> Response:
    """Messages that are due, each with a lease; waits for `min_messages` up to `wait`, and
    then answers with those that are there. `ack` acknowledges messages that were pulled before: it
    is recorded within `settle_sync_ms`, and the answer does not wait for that."""
    return Forward(parts.path.consume, request)


@router.post(
    "/v1/subscriptions/{name}/ack",
    tags=["pull"],
    responses=MISSING | {200: answer(AckedDocument)},
    openapi_extra=json_body(LeasesBody),
)
async def ack_messages(name: NamePath, request: Request, parts: PartsOf) -> Response:
    """These are done; when this answers it is recorded, and they never come again."""
    return Forward(parts.path.consume, request)


@router.post(
    "/v1/subscriptions/{name}/nack",
    tags=["pull"],
    responses=MISSING | LOGGED | {200: answer(NackedDocument)},
    openapi_extra=json_body(NackBody),
)
async def nack_messages(name: NamePath, request: Request, parts: PartsOf) -> Response:
    """These are not done: deliver them again, now or after `delay`."""
    return Forward(parts.path.consume, request)


@router.post(
    "/v1/subscriptions/{name}/extend",
    tags=["pull"],
    responses=MISSING | {200: answer(ExtendedDocument)},
    openapi_extra=json_body(ExtendBody),
)
async def extend_leases(name: NamePath, request: Request, parts: PartsOf) -> Response:
    """These need more time: `lease` from now."""
    return Forward(parts.path.consume, request)


# ── dead letters ──────────────────────────────────────────────────────────────────────────────────


@router.get(
    "/v1/dead-letters",
    tags=["dead letters"],
    responses=INVALID | {200: answer(DeadLetterCountsDocument)},
)
async def count_dead_letters(
    caller: CallerOf,
    parts: PartsOf,
    limit: LimitQuery = NAMED_PAGE_MAX,
    cursor: Annotated[str | None, Query(pattern=OWNER_PATTERN)] = None,
) -> Response:
    """Subscriptions with dead letters, and how many, as of the last checkpoint: those that the
    token may consume, also those that were deleted."""

    may_see = partial(_may_read, caller)
    found, following = await parts.dead_letters.counts(cursor or "", limit, may_see)
    documents = [DeadLetterCountDocument(*one) for one in found]
    return json_answer(DeadLetterCountsDocument(documents, following))


@router.get(
    "/v1/subscriptions/{name}/dead-letters",
    tags=["dead letters"],
    responses=MISSING | STORED | {200: answer(DeadLettersDocument)},
)
async def list_dead_letters(
    name: OwnerPath,
    caller: CallerOf,
    parts: PartsOf,
    limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 100,
    cursor: Annotated[str | None, Query(pattern="^[0-9]{1,20}$")] = None,
    places: PlacesHeader = None,
) -> Response:
    """Messages that were given up, in the order in which their last attempts were scheduled; also
    those of subscriptions of that name that were deleted. `_to`: those that said themselves where
    they go (`to`)."""
    owners = await _owners(name, caller, parts)
    from_seq = min(int(cursor or 0), SEQ_MAX)
    may_read = partial(_may_read, caller)
    letters, following = await parts.dead_letters.page(owners, from_seq, limit, may_read)
    if places is not None:
        items = (encode(dead_letter_document(letter)) for letter in letters)
        next_place = None if following is None else (following,)
        return shard_page(items, ((one.entry_seq,) for one in letters), next_place, limit)
    return json_answer(
        DeadLettersDocument(
            [dead_letter_document(letter) for letter in letters],
            cursor=None if following is None else str(following),
        )
    )


@router.post(
    "/v1/subscriptions/{name}/dead-letters/redrive",
    tags=["dead letters"],
    responses=CONFLICT | STORED | LOGGED | {200: answer(RedrivenModel)},
    openapi_extra=json_body(RedriveModel, required=False),
)
async def redrive_dead_letters(
    name: OwnerPath, request: Request, caller: CallerOf, parts: PartsOf
) -> Response:
    """Deliver dead letters again, all or those named by message id; also those of subscriptions
    of that name that were deleted. `_to`: each to where its message says."""
    which = read(await json_of(request, b"{}"), RedriveModel)
    owners = await _owners(name, caller, parts)
    heir = parts.calls.registry.by_name(name)
    if heir is not None:
        require(caller, Action.CONSUME, heir.subject)
    elif name != DIRECT_NAME:
        raise ConflictError(f"the subscription {name!r} was deleted; make it again, and redrive")
    ids = None if which.ids is None else set(which.ids)
    redriven = await parts.calls.redrive(owners, heir, ids, partial(_may_read, caller))
    return json_answer(RedrivenModel(redriven))


@router.delete(
    "/v1/subscriptions/{name}/dead-letters/{message_id}",
    tags=["dead letters"],
    status_code=204,
    responses=MISSING | LOGGED,
)
async def discard_dead_letter(
    name: OwnerPath, message_id: str, caller: CallerOf, parts: PartsOf
) -> None:
    """Delete a dead letter, by message id."""
    owners = await _owners(name, caller, parts)
    await parts.calls.discard(owners, message_id, partial(_may_read, caller))


def _may_read(caller: Caller | None, subject: str) -> bool:
    return caller is None or caller.may(Action.CONSUME, subject)


async def _owners(name: str, caller: Caller | None, parts: Parts) -> list[Subscription]:
    """The owners of the dead letters that the name stands for, as far as the token may consume
    them. The token may read only letters of its subjects.

    A token that takes over the name of a deleted subscription does not get to read its messages by
    that. Raises NotFoundError, AccessError."""
    owners = await parts.calls.dead_letter_owners(name)
    allowed = [one for one in owners if _may_read(caller, one.subject)]
    if not allowed:
        require(caller, Action.CONSUME, owners[-1].subject)
    return allowed


def _subscription(
    calls: Calls,
    targets: TargetPolicy,
    name: str,
    wanted: SubscriptionRequest,
    existing: Subscription | None,
    known: Registry,
) -> Subscription:
    settings = calls.settings
    if existing is None and len(known) >= settings.subscriptions_max:
        raise ConflictError(f"there are {len(known)} subscriptions, the limit")
    is_understood = not isinstance(existing, StandIn)
    if existing is not None and is_understood and existing.type != wanted.kind:
        raise ConflictError(f"the subscription is of type {existing.type}; delete it first")
    if existing is not None and existing.subject != wanted.subject:
        calls.check_subjects_of(existing)
    webhook = wanted if isinstance(wanted, WebhookSubscription) else None
    target, webhook_url = target_of(wanted, targets), "" if webhook is None else webhook.url
    if webhook_url:
        targets.check_url(webhook_url)
    rate = wanted.rate if isinstance(wanted, PushedSubscription) else None
    catch_up = None if wanted.catch_up == "all" else wanted.catch_up
    subscription = Subscription(
        id=existing.id if existing else known.next_id(),
        name=name,
        subject=wanted.subject,
        type=wanted.kind,
        created_ms=existing.created_ms if existing else calls.clock(),
        url=webhook_url,
        timeout_ms=int(wanted.timeout),
        max_in_flight=wanted.max_in_flight
        or (settings.in_flight_max if target is None else SINK_IN_FLIGHT),
        max_attempts=wanted.retry.max_attempts,
        backoff_ms=tuple(map(int, wanted.retry.backoff)),
        lease_ms=int(wanted.lease),
        rate_per_s=rate.per_second if rate else 0.0,
        rate_burst=(rate.burst or max(1, int(rate.per_second))) if rate else 0,
        spread_ms=0 if catch_up is None else int(catch_up.spread or 0),
        drop_older_than_ms=0 if catch_up is None else int(catch_up.drop_older_than or 0),
        paused=existing is not None and existing.stays_paused(webhook_url),
        pause_reason=existing.asked_pause[1] if existing else "",
        target=target,
    )
    return subscription if webhook is None else _with_webhook(subscription, webhook)


def _with_webhook(subscription: Subscription, wanted: WebhookSubscription) -> Subscription:
    """The same, with the fields that webhooks alone have. Raises InputError."""
    return subscription.with_changes(
        secrets=_secrets(wanted),
        batch_max=wanted.batch.max if wanted.batch else 0,
        linger_ms=int(wanted.batch.linger) if wanted.batch else 0,
        headers=check_own_headers(wanted.headers or {}),
        method=wanted.method or "POST",
        disable_after_ms=int(wanted.disable_after or 0),
    )


def _secrets(wanted: WebhookSubscription) -> tuple[str, ...]:
    """Newest first. Raises InputError."""
    if wanted.secret is not None and wanted.secrets is not None:
        raise InputError("give either secret or secrets, not both", "/secrets")
    if wanted.secret is not None:
        WebhookSecret.parse(wanted.secret, "/secret")
        return (wanted.secret,)
    for index, secret in enumerate(wanted.secrets or ()):
        WebhookSecret.parse(secret, f"/secrets/{index}")
    return wanted.secrets or ()


def _catch_up(subscription: Subscription) -> str | dict[str, str]:
    if subscription.spread_ms:
        return {"spread": format_duration(subscription.spread_ms)}
    if subscription.drop_older_than_ms:
        return {"drop_older_than": format_duration(subscription.drop_older_than_ms)}
    return "all"


def _failing_since(calls: Calls, subscription: Subscription) -> str | None:
    since_ms = calls.gauges.failing_since_ms(subscription.id)
    return format_time(since_ms) if since_ms else None


def _view(calls: Calls, subscription: Subscription) -> SubscriptionViewModel:
    """Returns one as it is shown. A subscription that cannot be shown is shown bare, so it takes
    neither its page with it nor the answer to a change that is recorded."""
    try:
        return _shown(calls, subscription)
    except Exception as error:
        log.error("a subscription cannot be shown", name=subscription.name, error=reason_of(error))
        bare = Subscription(subscription.id, subscription.name, "*", "pull", 0, paused=True)
        return msgspec.structs.replace(_shown(calls, bare), not_understood=reason_of(error))


def _shown(calls: Calls, subscription: Subscription) -> SubscriptionViewModel:
    queued, in_flight = calls.waiting(subscription)
    policy = subscription.retry_schedule
    is_pushed, webhook = subscription.is_pushed, subscription.type == "webhook"
    return SubscriptionViewModel(
        name=subscription.name,
        subject=subscription.subject,
        type=subscription.type,
        created_at=format_time(subscription.created_ms),
        paused=subscription.paused,
        pause_reason=(subscription.pause_reason or "asked") if subscription.paused else None,
        queued=queued,
        in_flight=in_flight,
        failing_since=_failing_since(calls, subscription),
        **target_fields(subscription),
        signed=bool(subscription.secrets) if webhook else None,
        headers=dict.fromkeys(subscription.headers, MASK) if subscription.headers else None,
        method=subscription.method if webhook else None,
        disable_after=format_duration(subscription.disable_after_ms)
        if subscription.disable_after_ms
        else None,
        timeout=format_duration(subscription.timeout_ms) if is_pushed else None,
        max_in_flight=subscription.max_in_flight if is_pushed else None,
        retry=RetryViewModel(
            max_attempts=policy.max_attempts,
            backoff=[format_duration(wait_ms) for wait_ms in policy.backoff_ms],
        ),
        rate=RateViewModel(per_second=subscription.rate_per_s, burst=subscription.rate_burst)
        if subscription.rate_per_s
        else None,
        batch=BatchingViewModel(
            max=subscription.batch_max, linger=format_duration(subscription.linger_ms)
        )
        if subscription.batch_max
        else None,
        catch_up=_catch_up(subscription),
        not_understood=subscription.problem if isinstance(subscription, StandIn) else None,
        lease=None if is_pushed else format_duration(subscription.lease_ms),
    )
