"""The producer: publishes messages, and looks them up, moves and cancels them.

    publish ──▶ encoded ──▶ natural batch ──POST /v1/messages/batch──▶ each caller its own answer

Every `publish` returns when its own message is durable, however many share a request. A batch is
accepted whole or refused whole; when it is refused because of some items, the others are sent again
without them, and each bad one alone, so that its caller gets the error that is its own.

Retries reuse the key. A message without a key gets a generated one, so that a retry after a lost
answer makes no second message; consumers see it (`auto-…`, below 40 bytes of the 256 that a key may
have). Without generated keys a message is sent again only where the server has certainly not taken
it; a lost answer is an `UnansweredError` then.

JSON, since the server stores JSON: a body goes through untouched, while one in MessagePack would
have to be decoded and encoded again there.

Cost: 5 µs per publish among many. Threads: belongs to the event loop.
"""

import asyncio
import itertools
import os
import ssl
from collections.abc import Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, Self, TypeVar

import msgspec

from delayserver.client.batching import Batcher, Item
from delayserver.client.errors import (
    ClientError,
    ConflictError,
    FieldError,
    InvalidError,
    NotADelayServerError,
    NotFoundError,
    Problem,
    RefusedError,
    UnansweredError,
    UnreachableError,
)
from delayserver.client.http import Answer, HttpTransport, Transport, decoded, path_of
from delayserver.client.retries import RetryPolicy, Time, answered
from delayserver.client.values import Delay, DeliverAt, Moved, Published, Stored, duration, time
from delayserver.ids import read_id

URL_DEFAULT = "http://127.0.0.1:8080"
BATCH_PATH = "/v1/messages/batch"
CANCEL_PATH = "/v1/messages/cancel"
BATCH_MAX = 2000
BATCH_MAX_BYTES = 4 * 1024 * 1024
IN_FLIGHT_MAX = 2
PENDING_MAX = 10_000
PENDING_MAX_BYTES = 64 * 1024 * 1024
RETRY = RetryPolicy()

T = TypeVar("T")
_UNSET = msgspec.UNSET


class _NewMessage(msgspec.Struct, omit_defaults=True, gc=False):
    subject: str
    body: Any = None
    body_base64: bytes | None = None
    delay: int | str | None = None
    deliver_at: int | str | None = None
    key: str | None = None
    headers: Mapping[str, str] | None = None


class _BatchAnswer(msgspec.Struct, gc=False):
    duplicates: int
    ids: list[str]


class _PublishedAnswer(msgspec.Struct):
    id: str
    duplicate: bool = False


class _Key(msgspec.Struct):
    subject: str
    key: str


class _CancelResult(msgspec.Struct):
    state: str | None = None
    error: str | None = None


class _CancelAnswer(msgspec.Struct):
    results: list[_CancelResult]


_encode = msgspec.json.Encoder().encode
_decode_batch = msgspec.json.Decoder(_BatchAnswer).decode


class _Publishing(Item):
    """A message on its way."""

    __slots__ = ("key", "subject")

    def __init__(
        self, data: bytes, future: "asyncio.Future[Published]", subject: str, key: str | None
    ) -> None:
        self.data = data
        self.future = future
        self.subject = subject
        self.key = key
        """That it may be sent again under; empty for a generated one, None without any."""


class _Cancelling(Item):
    """A cancel on its way; `data` is the id as JSON, or subject and key."""

    __slots__ = ("by_key",)

    def __init__(self, data: bytes, future: "asyncio.Future[None]", by_key: bool) -> None:
        self.data = data
        self.future = future
        self.by_key = by_key


class AsyncProducer:
    """A producer for asyncio; one serves any number of tasks.

        async with AsyncProducer("http://127.0.0.1:8080") as producer:
            published = await producer.publish("order.unpaid", {"order": 1001}, delay="30m")

    `pending_max` and `pending_max_bytes` bound what is published and not answered: `publish` waits
    while there is no room. `in_flight_max` is how many batches may be under way at once."""

    def __init__(
        self,
        url: str = URL_DEFAULT,
        *,
        token: str | None = None,
        retry: RetryPolicy = RETRY,
        generate_keys: bool = True,
        pending_max: int = PENDING_MAX,
        pending_max_bytes: int = PENDING_MAX_BYTES,
        in_flight_max: int = IN_FLIGHT_MAX,
        tls: ssl.SSLContext | None = None,
        transport: Transport | None = None,
        time: Time | None = None,
    ) -> None:
        self._transport = transport or HttpTransport(url, token=token, tls=tls)
        self._retry = retry
        self._time = time or Time()
        self._generates_keys = generate_keys and retry.timeout_s > 0
        # 64 random bits tell producers apart; the number, the messages of this one.
        self._key_prefix = f"auto-{os.urandom(8).hex()}-"
        self._next_key = itertools.count(1).__next__
        batcher = partial(
            Batcher,
            in_flight_max=in_flight_max,
            batch_max=BATCH_MAX,
            batch_max_bytes=BATCH_MAX_BYTES,
            pending_max=pending_max,
            pending_max_bytes=pending_max_bytes,
        )
        self._publishes: Batcher[_Publishing] = batcher(self._send_publishes)
        self._cancels: Batcher[_Cancelling] = batcher(self._send_cancels)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, timeout_s: float | None = None) -> None:
        """Take nothing more, wait for what is under way, at most `timeout_s`, and disconnect."""
        await asyncio.gather(self._publishes.close(timeout_s), self._cancels.close(timeout_s))
        await self._transport.close()

    # ── publish ────────────────────────────────────────────────────────────────────────────────

    async def publish(
        self,
        subject: str,
        body: Any = None,
        *,
        delay: Delay | None = None,
        deliver_at: DeliverAt | None = None,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Published:
        """Publish a message; when this returns, it is durable.

        `body` is anything that msgspec writes as JSON, or bytes. Give `delay` or `deliver_at`;
        neither means now. A delay counts from when the server takes the message.

        Raises InvalidError; ConflictError where the key stands for a message with other content;
        NotAllowedError, DiskFullError; OverloadedError and UnansweredError when the retries are
        used up; TypeError and ValueError for a body, a delay or a time that cannot be written."""
        if key is not None:
            own_key: str | None = key
        elif self._generates_keys:
            own_key, key = "", f"{self._key_prefix}{self._next_key():x}"
        else:
            own_key = None
        data = _encode(_new_message(subject, body, delay, deliver_at, key, headers))
        batcher = self._publishes
        if not batcher.has_room(len(data)):
            await batcher.room(len(data))
        future: asyncio.Future[Published] = asyncio.get_running_loop().create_future()
        batcher.put(_Publishing(data, future, subject, own_key))
        return await future

    async def _send_publishes(self, items: list[_Publishing]) -> None:
        """Settle each of the messages, with one request if all goes well."""
        body = b"[" + b",".join([item.data for item in items]) + b"]"
        repeatable = all(item.key is not None for item in items)
        try:
            answer = await self._ask("POST", BATCH_PATH, body, repeatable=repeatable)
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
                await self._send_publishes(keyed)
            return
        if answer.status == HTTPStatus.OK:
            _tell(items, answer.body)
            return
        for part in self._parts(items, answer):
            await self._send_publishes(part)

    def _parts(self, items: list[_Publishing], answer: Answer) -> list[list[_Publishing]]:
        """A batch was refused: fail what is to blame, and return what is to be sent again, in
        batches that are smaller."""
        error = answer.error()
        if len(items) > 1 and isinstance(error, RefusedError):
            bad = _indexes(error.errors, len(items))
            if bad:
                good = [item for index, item in enumerate(items) if index not in bad]
                # Each bad one alone: its answer is then the one that a single publish gets.
                return [part for part in (good, *([items[index]] for index in bad)) if part]
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

    # ── cancel ─────────────────────────────────────────────────────────────────────────────────

    async def cancel(
        self, message_id: str | None = None, *, subject: str | None = None, key: str | None = None
    ) -> None:
        """Cancel a message, by its id or by subject and key; when this returns, it never fires.

        Raises ConflictError, whose `state` says what it is: delivering, delivered or dead;
        NotFoundError; and as `publish`."""
        by_key = message_id is None
        if by_key:
            name = _Key(*_subject_and_key(message_id, subject, key))
            data = _encode(name)
        else:
            _only_id(subject, key)
            data = _encode(message_id)
        batcher = self._cancels
        if not batcher.has_room(len(data)):
            await batcher.room(len(data))
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        batcher.put(_Cancelling(data, future, by_key))
        await future

    async def _send_cancels(self, items: list[_Cancelling]) -> None:
        ids = [item for item in items if not item.by_key]
        keys = [item for item in items if item.by_key]
        body = b'{"ids":[%b],"keys":[%b]}' % (
            b",".join([item.data for item in ids]),
            b",".join([item.data for item in keys]),
        )
        answer = await self._ask("POST", CANCEL_PATH, body)
        if not answer.is_success:
            error = answer.error()
            middle = len(items) // 2
            if isinstance(error, InvalidError) and middle:
                for part in (items[:middle], items[middle:]):
                    await self._send_cancels(part)
                return
            for item in items:
                item.fail(error)
            return
        results = decoded(answer.body, _CancelAnswer).results
        _check_count(len(results), len(items))
        for item, result in zip(ids + keys, results, strict=True):
            if result.error is None:
                item.succeed(None)
            else:
                item.fail(_cancel_error(result))

    # ── one message ────────────────────────────────────────────────────────────────────────────

    async def get(
        self, message_id: str | None = None, *, subject: str | None = None, key: str | None = None
    ) -> Stored:
        """Look a message up, by its id or by subject and key. Raises NotFoundError."""
        return await self._call("GET", _path(message_id, subject, key), None, Stored)

    async def move(
        self,
        message_id: str | None = None,
        *,
        subject: str | None = None,
        key: str | None = None,
        delay: Delay | None = None,
        deliver_at: DeliverAt | None = None,
    ) -> Moved:
        """Give a message a new due time. Raises as `cancel`, and InvalidError."""
        return await self._call(
            "PATCH", _path(message_id, subject, key), _due(delay, deliver_at), Moved
        )

    async def replace(
        self,
        subject: str,
        key: str,
        body: Any = None,
        *,
        delay: Delay | None = None,
        deliver_at: DeliverAt | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Published:
        """Publish in place of what waits under the key: a timer that each call pushes back.

        Raises as `publish`."""
        message = _new_message(subject, body, delay, deliver_at, None, headers)
        document = {name: value for name, value in _fields(message) if name != "subject"}
        path = path_of("subjects", subject, "keys", key)
        found = await self._call("PUT", path, document, _PublishedAnswer)
        return Published(found.id, found.duplicate)

    async def _call(self, method: str, path: str, document: object, answer_type: type[T]) -> T:
        body = None if document is None else _encode(document)
        answer = await self._ask(method, path, body)
        if not answer.is_success:
            raise answer.error()
        return decoded(answer.body, answer_type)

    async def _ask(
        self, method: str, path: str, body: bytes | None, *, repeatable: bool = True
    ) -> Answer:
        request = partial(self._transport.request, method, path, body)
        return await answered(request, self._retry, self._time, repeatable=repeatable)


# ── what is sent ───────────────────────────────────────────────────────────────────────────────


def _new_message(
    subject: str,
    body: Any,
    delay: Delay | None,
    deliver_at: DeliverAt | None,
    key: str | None,
    headers: Mapping[str, str] | None,
) -> _NewMessage:
    if delay is not None and not isinstance(delay, int | str):
        delay = duration(delay)
    if deliver_at is not None and not isinstance(deliver_at, int | str):
        deliver_at = time(deliver_at)
    if isinstance(body, bytes):
        return _NewMessage(subject, None, body, delay, deliver_at, key, headers)
    return _NewMessage(subject, body, None, delay, deliver_at, key, headers)


def _fields(message: _NewMessage) -> Sequence[tuple[str, Any]]:
    return [
        (name, value)
        for name, value in msgspec.structs.asdict(message).items()
        if value is not None
    ]


def _due(delay: Delay | None, deliver_at: DeliverAt | None) -> dict[str, Any]:
    due: dict[str, Any] = {}
    if delay is not None:
        due["delay"] = duration(delay)
    if deliver_at is not None:
        due["deliver_at"] = time(deliver_at)
    return due


def _path(message_id: str | None, subject: str | None, key: str | None) -> str:
    if message_id is not None:
        _only_id(subject, key)
        return path_of("messages", message_id)
    subject, key = _subject_and_key(message_id, subject, key)
    return path_of("subjects", subject, "keys", key)


_WHICH = "give either the message's id, or both subject= and key="


def _only_id(subject: str | None, key: str | None) -> None:
    if subject is not None or key is not None:
        raise TypeError(_WHICH)


def _subject_and_key(
    message_id: str | None, subject: str | None, key: str | None
) -> tuple[str, str]:
    if message_id is not None or subject is None or key is None:
        raise TypeError(_WHICH)
    return subject, key


# ── what is answered ───────────────────────────────────────────────────────────────────────────


def _tell(items: list[_Publishing], body: bytes) -> None:
    """Give each caller its part of the answer to a batch."""
    try:
        answer = _decode_batch(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        answer = decoded(body, _BatchAnswer)
    ids = answer.ids
    _check_count(len(ids), len(items))
    if not answer.duplicates:
        for item, message_id in zip(items, ids, strict=True):
            item.succeed(Published(message_id))
        return
    for item, message_id, duplicate in zip(items, ids, _duplicates(answer), strict=True):
        # What bears a generated key is a duplicate only of what this call sent itself before.
        item.succeed(Published(message_id, duplicate and item.key != ""))


def _check_count(answered_count: int, asked_count: int) -> None:
    if answered_count != asked_count:
        raise NotADelayServerError(f"{asked_count} were asked for, {answered_count} answered")


def _duplicates(answer: _BatchAnswer) -> list[bool]:
    """Which messages of a batch were there before; the answer only says how many.

    A batch is taken in one step, so its new messages have consecutive numbers, in order, and every
    earlier message has a lower one."""
    seqs = [read_id(message_id).seq for message_id in answer.ids]
    next_new = max(seqs) - (len(seqs) - answer.duplicates) + 1
    found: list[bool] = []
    for seq in seqs:
        found.append(seq != next_new)
        next_new += seq == next_new
    return found


def _indexes(errors: Sequence[FieldError], count: int) -> list[int]:
    """Which items of a batch are to blame, by the pointers (`/12/key`)."""
    steps = (error.pointer.split("/")[1:2] for error in errors)
    numbers = {int(step[0]) for step in steps if step and step[0].isdecimal()}
    return sorted(number for number in numbers if number < count)


def _of_one(error: RefusedError) -> RefusedError:
    """The refusal of a batch of one, as that of a single message."""
    errors = tuple(FieldError(one.pointer.removeprefix("/0"), one.detail) for one in error.errors)
    detail = errors[0].detail if len(errors) == 1 else error.detail
    problem = msgspec.structs.replace(error.problem, errors=errors, detail=detail)
    return type(error)(problem, error.retry_after_s)


def _cancel_error(result: _CancelResult) -> ClientError:
    detail = result.error or ""
    if result.state is None:
        return NotFoundError(Problem("Not found", HTTPStatus.NOT_FOUND, detail))
    return ConflictError(
        Problem("The state does not allow it", HTTPStatus.CONFLICT, detail, state=result.state)
    )
