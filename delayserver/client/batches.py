"""Publishes and cancels in batches, and each item's part of the answer.

A batch of messages is accepted whole or refused whole, by each shard that has a part in it. When it
is refused because of some of them, the others are sent again without those, and each bad one alone,
so that its caller gets the error that is its own. A batch that is too large is cut in halves, and
one of which a subject is not allowed by subject. A refusal may name messages that were published
nevertheless. They are not sent again, unless they have keys of their own, in which case the answer
says whether they are duplicates.

Cost: one request for all, as long as nothing is wrong with any. Threads: belongs to the event loop.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Protocol

import msgspec

from delayserver.client.batching import Item
from delayserver.client.errors import (
    ClientError,
    ConflictError,
    FieldError,
    InvalidError,
    NotADelayServerError,
    OverloadedError,
    PartlyPublishedError,
    Problem,
    RefusedError,
    UnansweredError,
    UnreachableError,
)
from delayserver.client.transport import UNKNOWN, HttpAnswer, decoded, path_of
from delayserver.client.values import Published
from delayserver.errors import NotFoundError
from delayserver.records.message_id import read_id
from delayserver.wire.messages import CancelledDocument

BATCH_PATH = "/v1/messages/batch"
_FILED = "ack=filed"
FILED_PATH = f"{BATCH_PATH}?{_FILED}"
CANCEL_PATH = "/v1/messages/cancel"
_SAID_ONCE = (
    HTTPStatus.FORBIDDEN,
    HTTPStatus.CONFLICT,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNPROCESSABLE_ENTITY,
)
"""Statuses that some of the messages have caused, so that the others are worth another request."""


class Ask(Protocol):
    """One request, made again as often as the retries allow. Raises UnansweredError."""

    async def __call__(
        self, method: str, path: str, body: bytes | None, *, repeatable: bool = True
    ) -> HttpAnswer: ...


def batch_path(*, is_filed: bool, is_atomic: bool) -> str:
    """Where a batch goes that waits until it is filed, or must not be cut."""
    query = "&".join([_FILED] * is_filed + ["atomic=true"] * is_atomic)
    return f"{BATCH_PATH}?{query}" if query else BATCH_PATH


# ── publish ────────────────────────────────────────────────────────────────────────────────────


class PublishItem(Item):
    """A message on its way."""

    __slots__ = ("key", "subject")

    def __init__(
        self,
        data: bytes,
        future: "asyncio.Future[Published]",
        subject: str,
        key: str | None,
        lane: int | None = None,
    ) -> None:
        self.data = data
        self.future = future
        self.lane = lane
        self.subject = subject
        self.key = key
        """That it may be sent again under; empty for a generated one, None without any."""


class _BatchAnswer(msgspec.Struct, gc=False):
    duplicates: int
    ids: list[str]
    duplicates_by_shard: dict[int, int] = {}


async def send_publishes(ask: Ask, items: list[PublishItem], *, path: str = BATCH_PATH) -> None:
    """Settle each of the messages, with one request if all goes well."""
    body = b"[" + b",".join([item.data for item in items]) + b"]"
    repeatable = all(item.key is not None for item in items)
    try:
        answer = await ask("POST", path, body, repeatable=repeatable)
    except UnreachableError:
        raise
    except UnansweredError as error:
        if repeatable:
            raise
        for item in items:
            if item.key is None:
                item.fail(error)
        keyed = [item for item in items if item.key is not None]
        if keyed:
            await send_publishes(ask, keyed, path=path)
        return
    if answer.is_success:
        told = read_published(answer, [item.key for item in items], path)
        for item, published in zip(items, told, strict=True):
            item.succeed(published)
        return
    left = _left(items, answer)
    if left is None:
        parts = _parts(items, answer)
    elif repeatable and answer.status not in _SAID_ONCE:
        parts = []  # The retries are used up.
        for item in left:
            item.fail(answer.error())
    else:
        parts = [left]
    for part in parts:
        if part:
            await send_publishes(ask, part, path=path)


def _left(items: list[PublishItem], answer: HttpAnswer) -> list[PublishItem] | None:
    """A batch over several shards was refused by some: settle the messages that others have
    published and that must not be sent again, and return the rest. None: nothing was."""
    problem = answer.problem
    published = _published_nevertheless(problem)
    done = [index for index in published if index < len(items) and not items[index].key]
    if not done:
        return None
    for index in done:
        items[index].succeed(published[index])
    left = [item for index, item in enumerate(items) if index not in published or item.key]
    if problem is not None and problem.outcome:
        for item in left:
            if item.key is None:
                item.fail(answer.error())
        left = [item for item in left if item.key is not None]
    return left


def _parts(items: list[PublishItem], answer: HttpAnswer) -> list[list[PublishItem]]:
    """A batch was refused whole: fail the messages that are to blame, and return the others in
    smaller batches, to be sent again."""
    error = answer.error()
    if len(items) > 1 and isinstance(error, RefusedError):
        bad = _indexes(error.errors, len(items))
        if bad:
            good = [item for index, item in enumerate(items) if index not in bad]
            # Each bad one alone: its answer is then the one that a single publish gets.
            alone = [[items[index]] for index in sorted(bad)]
            return [good, *alone] if good else alone
        if error.status in (
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            HTTPStatus.UNPROCESSABLE_ENTITY,
        ):
            middle = len(items) // 2
            return [items[:middle], items[middle:]]
        subjects = {item.subject for item in items}
        if error.status == HTTPStatus.FORBIDDEN and len(subjects) > 1:
            return [[item for item in items if item.subject == name] for name in subjects]
    elif isinstance(error, RefusedError):
        error = _of_one(error)
    for item in items:
        item.fail(error)
    return []


async def published_in_parts(
    publish: Callable[[int | None, Sequence[int]], Awaitable[list[Published]]],
    parts: Mapping[int | None, Sequence[int]],
) -> list[Published]:
    """A batch, of which `publish` publishes each part; as it does if there is one. `parts`: indexes
    by shard. Raises ClientError, of a part, whose pointers are those of the whole batch then."""
    asked = (publish(shard, which) for shard, which in parts.items())
    results = await asyncio.gather(*asked, return_exceptions=True)
    published: dict[int, Published] = {}
    errors: dict[int, ClientError] = {}
    for which, result in zip(parts.values(), results, strict=True):
        if not isinstance(result, BaseException):
            published.update(zip(which, result, strict=True))
            continue
        if not isinstance(result, ClientError) or not which:
            raise result
        problem = result.problem if isinstance(result, RefusedError) else None
        done = _published_nevertheless(problem)
        error = _of_whole(result, which)
        for place, index in enumerate(which):
            if place in done:
                published[index] = done[place]
            else:
                errors[index] = error
    if not errors:
        return [published[index] for index in range(len(published))]
    if published:
        raise PartlyPublishedError(published, errors)
    raise _gravest(list(errors.values()))


def _of_whole(error: ClientError, which: Sequence[int]) -> ClientError:
    """The error of a part of a batch, with the pointers of the whole."""
    if not isinstance(error, RefusedError) or not error.errors:
        return error
    errors: list[FieldError] = []
    for one in error.errors:
        _, index, *rest = one.pointer.split("/") if one.pointer else ("", "")
        if index.isdecimal() and int(index) < len(which):
            pointer = "/".join(("", str(which[int(index)]), *rest))
            errors.append(FieldError(pointer, one.detail))
        else:
            errors.append(one)
    return _with_errors(error, errors)


def _with_errors(error: RefusedError, errors: Sequence[FieldError]) -> RefusedError:
    problem = msgspec.structs.replace(error.problem, errors=tuple(errors))
    return type(error)(problem, error.retry_after_s)


def _gravest(errors: Sequence[ClientError]) -> ClientError:
    """The error to raise when no part was published. An unknown outcome comes first, then errors
    that a repetition cannot mend; the errors of single messages are joined."""

    def rank(error: ClientError) -> int:
        if isinstance(error, UnreachableError):
            return 2
        if isinstance(error, OverloadedError):
            return 0 if error.problem.outcome or error.status in UNKNOWN else 2
        return 0 if isinstance(error, UnansweredError) else 1

    gravest = min(errors, key=rank)
    if not isinstance(gravest, RefusedError):
        return gravest
    refused = {id(one): one for one in errors if isinstance(one, RefusedError)}
    return _with_errors(gravest, [field for one in refused.values() for field in one.errors])


def _published_nevertheless(problem: Problem | None) -> dict[int, Published]:
    """The messages of a batch that are durable though some shard refused its part, by their
    indexes."""
    # A 504 leaves the outcome unknown.
    if problem is None or problem.status == HTTPStatus.GATEWAY_TIMEOUT:
        return {}
    return {index: Published(one) for index, one in enumerate(problem.ids) if one is not None}


def read_published(answer: HttpAnswer, keys: Sequence[str | None], path: str) -> list[Published]:
    """The result of each message of a batch that was accepted; an empty key is a generated one.
    Raises NotADelayServerError."""
    batch = decoded(answer.body, _BatchAnswer)
    ids = batch.ids
    _check_count(len(ids), len(keys))
    is_filed = _FILED in path and answer.status == HTTPStatus.OK
    if not batch.duplicates:
        return [Published(one, False, is_filed) for one in ids]
    # A message with a generated key is a duplicate only of one that this call sent itself before.
    return [
        Published(one, is_duplicate and key != "", is_filed)
        for one, is_duplicate, key in zip(ids, _duplicates(batch), keys, strict=True)
    ]


def _check_count(answered_count: int, asked_count: int) -> None:
    if answered_count != asked_count:
        raise NotADelayServerError(f"{asked_count} were asked for, {answered_count} answered")


def _duplicates(answer: _BatchAnswer) -> list[bool]:
    """Which messages of a batch were there before; the answer only says how many.

    Each shard takes its part in one step, so its new messages have consecutive numbers there, in
    order, and every earlier message has a lower one."""
    try:
        ids = [read_id(message_id) for message_id in answer.ids]
    except NotFoundError as error:
        raise NotADelayServerError(f"an id that this client cannot read: {error}") from error
    duplicates = answer.duplicates_by_shard
    next_new: dict[int, int] = {}
    for shard in {one.shard for one in ids}:
        seqs = [one.seq for one in ids if one.shard == shard]
        count = len(seqs) - duplicates.get(shard, 0 if duplicates else answer.duplicates)
        next_new[shard] = max(seqs) - count + 1
    found: list[bool] = []
    for one in ids:
        is_new = one.seq == next_new[one.shard]
        next_new[one.shard] += is_new
        found.append(not is_new)
    return found


def _indexes(errors: Sequence[FieldError], count: int) -> set[int]:
    """Which items of a batch are to blame, by the pointers (`/12/key`)."""
    steps = (error.pointer.split("/")[1:2] for error in errors)
    numbers = {int(step[0]) for step in steps if step and step[0].isdecimal()}
    return {number for number in numbers if number < count}


def _of_one(error: RefusedError) -> RefusedError:
    """The refusal of a batch of one, as that of a single message."""
    errors = tuple(FieldError(one.pointer.removeprefix("/0"), one.detail) for one in error.errors)
    detail = errors[0].detail if len(errors) == 1 else error.detail
    problem = msgspec.structs.replace(error.problem, errors=errors, detail=detail)
    return type(error)(problem, error.retry_after_s)


# ── cancel ─────────────────────────────────────────────────────────────────────────────────────


class Cancelling(Item):
    """A cancel on its way; `data` is the id as JSON, or subject and key."""

    __slots__ = ("key", "message_id", "subject")

    def __init__(
        self,
        data: bytes,
        future: "asyncio.Future[None]",
        message_id: str | None,
        subject: str | None,
        key: str | None,
        lane: int | None = None,
    ) -> None:
        self.data = data
        self.future = future
        self.lane = lane
        self.message_id = message_id
        self.subject = subject
        self.key = key

    def path(self) -> str:
        """The path of the message."""
        return message_path(self.message_id, self.subject, self.key)


def message_path(message_id: str | None, subject: str | None, key: str | None) -> str:
    """Where a message is looked up. Raises TypeError."""
    if message_id is not None and subject is None and key is None:
        return path_of("messages", message_id)
    if message_id is None and subject is not None and key is not None:
        return path_of("subjects", subject, "keys", key)
    raise TypeError("give either the message's id, or both subject= and key=")


async def send_cancels(ask: Ask, items: list[Cancelling]) -> None:
    """Settle each of the cancels, with one request."""
    ids = [item for item in items if item.message_id is not None]
    keys = [item for item in items if item.message_id is None]
    body = b'{"ids":[%b],"keys":[%b]}' % (
        b",".join([item.data for item in ids]),
        b",".join([item.data for item in keys]),
    )
    answer = await ask("POST", CANCEL_PATH, body)
    if not answer.is_success:
        error = answer.error()
        middle = len(items) // 2
        if isinstance(error, InvalidError) and middle:
            for part in (items[:middle], items[middle:]):
                await send_cancels(ask, part)
            return
        for item in items:
            item.fail(error)
        return
    results = decoded(answer.body, CancelledDocument).results
    _check_count(len(results), len(items))
    for item, result in zip(ids + keys, results, strict=True):
        if result.error is None:
            if not (future := item.future).done():
                future.set_result(None)
        elif result.state is not None:
            item.fail(_conflict(result.error, result.state))
        else:
            # No such message, or not allowed: asked for alone, the answer says which.
            alone = await ask("DELETE", item.path(), None)
            if alone.is_success:
                item.succeed(None)
            else:
                item.fail(alone.error())


def _conflict(detail: str, state: str) -> ConflictError:
    return ConflictError(
        Problem("The state does not allow it", HTTPStatus.CONFLICT, detail, state=state)
    )
