"""The producer: publishes messages, and looks them up, moves and cancels them.

    publish ──▶ encoded ──▶ natural batch ──POST /v1/messages/batch──▶ each caller its own answer

Every `publish` returns when its own message is durable, however many share a request, and raises
only what is wrong with its own.

Retries reuse the key. A message without a key gets a generated one, so that a retry after a lost
answer makes no second message; consumers see it (`auto-…`, below 40 bytes of the 256 that a key may
have). Without generated keys a message is sent again only where the server has certainly not taken
it; a lost answer is an `UnansweredError` then.

JSON, since the server stores JSON: a body goes through untouched, while one in MessagePack would
have to be decoded and encoded again there.

Cost: 3 µs of CPU per publish among 512 tasks on uvloop, encoding, their own turns of the loop and a
share of the request included; a task that publishes alone pays for a request each time. Threads:
belongs to the event loop.
"""

import asyncio
import itertools
import os
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Self
from urllib.parse import urlencode

import msgspec

from delayserver.client.batches import (
    Cancelling,
    PublishItem,
    message_path,
    send_cancels,
    send_publishes,
)
from delayserver.client.batching import Batcher
from delayserver.client.retries import RetryPolicy, Time, answered
from delayserver.client.transport import HttpAnswer, HttpTransport, Transport, decoded, path_of
from delayserver.client.values import Delay, DeliverAt, Moved, Published, Stored, duration, time

URL_DEFAULT = "http://127.0.0.1:8080"
BATCH_MAX = 2000
BATCH_MAX_BYTES = 4 * 1024 * 1024
IN_FLIGHT_MAX = 2
"""Requests: the server works on one while the next is made."""
PENDING_MAX = 10_000
PENDING_MAX_BYTES = 64 * 1024 * 1024
RETRY = RetryPolicy()
EXIT_S = 5.0
"""What is under way is given this long when a block is left by an exception."""


class _NewMessage(msgspec.Struct, omit_defaults=True, gc=False):
    subject: str
    body: Any = None
    body_base64: bytes | None = None
    delay: int | str | None = None
    deliver_at: int | str | None = None
    key: str | None = None
    headers: Mapping[str, str] | None = None


class _Id(msgspec.Struct):
    id: str


class _Page(msgspec.Struct):
    messages: list[Stored]
    cursor: str | None


class _Key(msgspec.Struct, gc=False):
    subject: str
    key: str


_encode = msgspec.json.Encoder().encode


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
        self._publishes: Batcher[PublishItem] = batcher(partial(send_publishes, self._ask))
        self._cancels: Batcher[Cancelling] = batcher(partial(send_cancels, self._ask))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.close(None if kind is None else EXIT_S)

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
        if not batcher.try_reserve(len(data)):
            await batcher.reserve(len(data))
        future: asyncio.Future[Published] = asyncio.get_running_loop().create_future()
        batcher.put(PublishItem(data, future, subject, own_key))
        return await future

    # ── cancel ─────────────────────────────────────────────────────────────────────────────────

    async def cancel(
        self,
        message_id: str | None = None,
        *,
        subject: str | None = None,
        key: str | None = None,
        if_match: str | None = None,
    ) -> None:
        """Cancel a message, by its id or by subject and key; when this returns, it never fires.

        `if_match`: only if that is its version (`Stored.version`). Raises ConflictError, whose
        `state` says what it is: delivering, delivered or dead; NotFoundError; ChangedError with
        `if_match`; and as `publish`."""
        if if_match is not None:
            path = message_path(message_id, subject, key)
            await self._ask_if("DELETE", path, None, if_match)
            return
        if message_id is None and subject is not None and key is not None:
            data = _encode(_Key(subject, key))
        else:
            data = _encode(message_id)
            if message_id is None or subject is not None or key is not None:
                message_path(message_id, subject, key)  # which says what is wrong
        batcher = self._cancels
        if not batcher.try_reserve(len(data)):
            await batcher.reserve(len(data))
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        batcher.put(Cancelling(data, future, message_id, subject, key))
        await future

    # ── one message ────────────────────────────────────────────────────────────────────────────

    async def get(
        self, message_id: str | None = None, *, subject: str | None = None, key: str | None = None
    ) -> Stored:
        """Look a message up, by its id or by subject and key. Raises NotFoundError."""
        answer = await self._ask_if("GET", message_path(message_id, subject, key), None, None)
        return msgspec.structs.replace(decoded(answer.body, Stored), version=_version(answer))

    async def pending(
        self,
        subject: str,
        *,
        since: DeliverAt | None = None,
        until: DeliverAt | None = None,
        page: int = 1000,
    ) -> AsyncIterator[Stored]:
        """Messages of a subject that wait, in due order: due from `since` on, and before `until`.

        One request for each `page` of them."""
        query = {"limit": str(page)}
        if since is not None:
            query["from"] = str(time(since))
        if until is not None:
            query["to"] = str(time(until))
        while True:
            path = f"{path_of('subjects', subject, 'messages')}?{urlencode(query)}"
            found = decoded((await self._ask_if("GET", path, None, None)).body, _Page)
            for message in found.messages:
                yield message
            if found.cursor is None:
                return
            query["cursor"] = found.cursor

    async def move(
        self,
        message_id: str | None = None,
        *,
        subject: str | None = None,
        key: str | None = None,
        delay: Delay | None = None,
        deliver_at: DeliverAt | None = None,
        if_match: str | None = None,
    ) -> Moved:
        """Give a message a new due time. Raises as `cancel`, and InvalidError."""
        path, due = message_path(message_id, subject, key), _due(delay, deliver_at)
        answer = await self._ask_if("PATCH", path, due, if_match)
        return msgspec.structs.replace(decoded(answer.body, Moved), version=_version(answer))

    async def replace(
        self,
        subject: str,
        key: str,
        body: Any = None,
        *,
        delay: Delay | None = None,
        deliver_at: DeliverAt | None = None,
        headers: Mapping[str, str] | None = None,
        if_match: str | None = None,
    ) -> Published:
        """Publish in place of what waits under the key: a timer that each call pushes back.

        Raises as `publish`; ChangedError with `if_match`."""
        message = _new_message(subject, body, delay, deliver_at, None, headers)
        document = {name: value for name, value in _fields(message) if name != "subject"}
        path = path_of("subjects", subject, "keys", key)
        answer = await self._ask_if("PUT", path, document, if_match)
        return Published(decoded(answer.body, _Id).id)

    async def _ask_if(
        self, method: str, path: str, document: object, if_match: str | None
    ) -> HttpAnswer:
        """One call; its answer, which is a success."""
        body = None if document is None else _encode(document)
        headers = {} if if_match is None else {"if-match": f'"{if_match}"'}
        request = partial(self._transport.request, method, path, body, headers=headers)
        # Asked again after a lost answer, it would find the version that it has made itself.
        repeatable = if_match is None
        answer = await answered(request, self._retry, self._time, repeatable=repeatable)
        if not answer.is_success:
            raise answer.error()
        return answer

    async def _ask(
        self, method: str, path: str, body: bytes | None, *, repeatable: bool = True
    ) -> HttpAnswer:
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
    if isinstance(delay, timedelta):
        delay = duration(delay)
    if isinstance(deliver_at, datetime):
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


def _version(answer: HttpAnswer) -> str:
    return answer.headers.get("etag", "").strip('"')
