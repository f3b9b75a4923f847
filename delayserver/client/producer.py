"""The producer: publishes messages, and looks them up, moves and cancels them.

    publish ──▶ encoded ──▶ natural batch ──POST /v1/messages/batch──▶ each caller its own answer
                            of its shard

Of a server that has several shards each is asked itself, as far as `owners` knows them.

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
import weakref
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Unpack
from urllib.parse import urlencode

import msgspec

from delayserver.client.batches import (
    BATCH_PATH,
    FILED_PATH,
    Cancelling,
    PublishItem,
    batch_path,
    message_path,
    published_in_parts,
    read_published,
    send_cancels,
    send_publishes,
)
from delayserver.client.batching import Batcher
from delayserver.client.calling import RETRY, URL_DEFAULT, RetryingClient
from delayserver.client.cluster_map import OwnerHosts, check_hosts, is_allowed
from delayserver.client.cutting import decoded_message, decoded_page
from delayserver.client.nodes import Connect
from delayserver.client.owners import Owners
from delayserver.client.retries import RetryPolicy, Time, within
from delayserver.client.transport import (
    TIMEOUT_S,
    HttpTransport,
    Request,
    Transport,
    decoded,
    path_of,
)
from delayserver.client.values import (
    Attempts,
    Debounce,
    Delay,
    DeliverAt,
    Draft,
    EventResult,
    Heartbeat,
    Moved,
    Published,
    PublishOptions,
    Replayed,
    Stored,
    duration,
    time,
)
from delayserver.client.writing import (
    debounce_to_send,
    due,
    encode,
    fields,
    is_filed,
    new_message,
    text_to_send,
    to_send,
)
from delayserver.records.sharding import shard_of

BATCH_MAX = 2000
BATCH_MAX_BYTES = 4 * 1024 * 1024
IN_FLIGHT_MAX = 2
"""Requests: the server works on one while the next is made."""
PENDING_MAX = 10_000
PENDING_MAX_BYTES = 64 * 1024 * 1024
Ack = Literal["durable", "filed"]
"""When a publish is answered: when the message is in the message log, or also in its hour, where
lists show it."""


class _Id(msgspec.Struct):
    id: str


class _Page(msgspec.Struct):
    messages: list[Stored]
    cursor: str | None


class _Key(msgspec.Struct, gc=False):
    subject: str
    key: str


class AsyncProducer(RetryingClient):
    """A producer for asyncio; one serves any number of tasks.

        async with AsyncProducer("http://127.0.0.1:8080") as producer:
            published = await producer.publish("order.unpaid", {"order": 1001}, delay="30m")

    It may be made anywhere, and used by one event loop after the other, and on both sides of a
    fork; each begins anew, with connections and generated keys of its own. In two loops that run at
    the same time it is refused: OtherLoopError."""

    def __init__(
        self,
        url: str = URL_DEFAULT,
        *,
        token: str | None = None,
        retry: RetryPolicy = RETRY,
        timeout_s: float = TIMEOUT_S,
        generate_keys: bool = True,
        pending_max: int = PENDING_MAX,
        pending_max_bytes: int = PENDING_MAX_BYTES,
        in_flight_max: int = IN_FLIGHT_MAX,
        owner_hosts: OwnerHosts = "same",
        tls: ssl.SSLContext | None = None,
        transport: Transport | None = None,
        connect: Connect | None = None,
        time: Time | None = None,
    ) -> None:
        """- `retry`: how long to ask again while the server is away; a minute by default.
        - `timeout_s`: how long one request may take; with retries never longer than they may. Each
          call takes a `timeout_s`, too, for all of its requests: UnansweredError when that is over.
        - `generate_keys`: without keys of its own, a message is not sent again after a lost answer.
        - `pending_max`, `pending_max_bytes`: what may be published and not answered; `publish`
          waits while there is no room. `in_flight_max`: batches that may be under way at once.
        - `owner_hosts`: where a server has several shards, they are asked at their own addresses.
          Those are used that are on the same host as `url`; of any, with "any": then the token goes
          wherever the server says. With "none" everything goes to `url`.
        - `token`; `tls`: instead of the system's certificates; `transport`, `connect`, `time`: for
          tests."""
        super().__init__(
            url,
            token=token,
            retry=retry,
            timeout_s=timeout_s,
            tls=tls,
            transport=transport,
            time=time,
        )
        check_hosts(owner_hosts)
        self._asks_for_map = connect is not None or transport is None
        self._make_owners = partial(
            Owners,
            self._transport,
            url,
            connect or partial(HttpTransport, token=token, tls=tls),
            None if owner_hosts == "none" else partial(is_allowed, url, hosts=owner_hosts),
            self._time,
        )
        self._owners = self._make_owners()
        self._ending: weakref.finalize[..., AsyncProducer] | None = None
        self._generates_keys = generate_keys and retry.timeout_s > 0
        self._key_prefix = _key_prefix()
        self._next_key = itertools.count(1).__next__
        self._batcher = partial(
            Batcher,
            in_flight_max=in_flight_max,
            batch_max=BATCH_MAX,
            batch_max_bytes=BATCH_MAX_BYTES,
            pending_max=pending_max,
            pending_max_bytes=pending_max_bytes,
        )
        self._begin_batches()

    def _begin_batches(self) -> None:
        self._publishes: Batcher[PublishItem] = self._batcher(self._send_publishes)
        self._filed: Batcher[PublishItem] = self._batcher(
            partial(self._send_publishes, path=FILED_PATH)
        )
        self._cancels: Batcher[Cancelling] = self._batcher(self._send_cancels)

    async def _send_publishes(self, items: list[PublishItem], path: str = BATCH_PATH) -> None:
        await send_publishes(partial(self._ask, items[0].lane), items, path=path)

    async def _send_cancels(self, items: list[Cancelling]) -> None:
        await send_cancels(partial(self._ask, items[0].lane), items)

    def _settle_in(self, loop: asyncio.AbstractEventLoop) -> None:
        super()._settle_in(loop)
        self._begin_batches()
        if self._asks_for_map:
            self._leave_owners()
            self._owners = self._make_owners()
            self._owners.begin()
            # What asks in the background does not keep a producer that nobody has any more.
            self._ending = weakref.finalize(self, _abort, loop, self._owners)
            self._ending.atexit = False

    def _leave_owners(self) -> None:
        """Those of another loop ask nothing more there."""
        if self._ending is not None:
            self._ending()

    def _way_to(self, shard: int | None) -> Request:
        owners = self._owners
        return owners.home.request if shard is None else partial(owners.request, shard)

    def after_fork(self) -> None:
        """In the child: nothing of the parent is under way here, and its keys are not used."""
        super().after_fork()
        if self._ending is not None:
            self._ending.detach()
            self._ending = None
            _inherited.append(self._owners)
            self._owners = self._make_owners()
        self._key_prefix = _key_prefix()

    async def close(self, timeout_s: float | None = None) -> None:
        """Take nothing more, wait for what is under way, at most `timeout_s`, and disconnect."""
        self._closed = True
        if self._loop is asyncio.get_running_loop():
            ends = self._publishes.close, self._filed.close, self._cancels.close
            await asyncio.gather(*(end(timeout_s) for end in ends))
            if self._ending is not None:
                self._ending.detach()
            await self._owners.close()
        else:
            self._leave_owners()
        await super().close()

    # ── publish ────────────────────────────────────────────────────────────────────────────────

    async def publish(
        self,
        subject: str,
        body: Any = None,
        *,
        key: str | None = None,
        ack: Ack = "durable",
        timeout_s: float | None = None,
        **options: Unpack[PublishOptions],
    ) -> Published:
        """Publish a message; when this returns, it is durable.

        `body` is anything that msgspec writes as JSON (dataclasses and datetimes among it), a
        pydantic model, or bytes. Give `delay` or `deliver_at`; neither means now. `delay` is a
        timedelta, text such as "30m", or whole milliseconds, as in `delay=30_000`; it counts from
        when the server takes the message. `deliver_at` is a datetime that knows its zone, text in
        RFC 3339, or milliseconds since the epoch.

        `watch` names up to 8 keys: an `event` for one of them cancels the message, or delivers it
        at once with `on_event="fire"`. With `ack="filed"` it is filed, too, when this returns, so
        that lists show it (`Published.filed` says so).

        What cannot be delivered within `ttl` of its due time becomes a dead letter (`expired`).
        With `jitter` it is due up to so much later: `Published.deliver_at` says when. Of what is
        due, that of a higher `priority` (0, the default, to 9) is delivered first. With `to`, a URL
        or more (`To`), it goes there by webhook, and to no subscription. When it was
        delivered, or is a dead letter, a message that tells so is published under the subject
        `on_delivered` or `on_dead`, for each subscription. Of the messages
        of a `group` each subscription has one under way at a time, in due order. A message with a
        group gets no key by itself, since the key would say to which shard it goes.

        Raises InvalidError; ConflictError where the key stands for a message with other content;
        NotAllowedError, DiskFullError; OverloadedError and UnansweredError when the retries are
        used up; UnsendableError for a value that JSON would change, ValueError for a time without
        a zone and an unknown `ack`."""
        if timeout_s is not None:
            published = self.publish(subject, body, key=key, ack=ack, **options)
            return await within(timeout_s, published)
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._settle_in(loop)
        own_key = key
        if key is None and self._generates_keys and options.get("group") is None:
            own_key, key = "", self._generated_key()
        message = new_message(subject, body, key=key, **options)
        data = encode(message)
        lane, owners = None, self._owners
        if owners.are_apart:
            lane = owners.of_any() if key is None else owners.of_key(subject, key)
        batcher = self._filed if is_filed(ack) else self._publishes
        if not batcher.try_reserve(len(data)):
            await batcher.reserve(len(data))
        future: asyncio.Future[Published] = loop.create_future()
        batcher.put(PublishItem(data, future, subject, own_key, lane))
        return await future

    async def publish_all(
        self,
        messages: Iterable[Draft],
        *,
        ack: Ack = "durable",
        atomic: bool = False,
        timeout_s: float | None = None,
    ) -> list[Published]:
        """Publish messages in one step: all of them, or none, in each shard that has some of them.
        At most 10,000, in one request for each shard. A server alone is one shard.

        Messages belong to shards by subject and key; those without a key stay together, and go
        along with most of the others. With `atomic` a batch that needs more than one shard is
        refused before anything is done.

        Raises as `publish`, but an InvalidError also where a key stands for other content: its
        `errors` name the bad ones by their index (`/3/key`). PartlyPublishedError where some shards
        have published their part and others have not."""
        documents, keys = [to_send(draft) for draft in messages], list[str | None]()
        self._settle()
        if atomic and self._asks_for_map:
            # Which keys are generated decides whether they belong together.
            told = self._owners.is_told.wait()
            await (told if timeout_s is None else within(timeout_s, told))
        shard = self._owners.together([(one.subject, one.key) for one in documents])
        for document in documents:
            keys.append(document.key)
            if document.key is None and document.group is None and self._generates_keys:
                keys[-1], document.key = "", self._generated_key(document.subject, shard)
        # A body that cannot be written is refused before anything is sent.
        bodies = [msgspec.Raw(encode(document)) for document in documents]
        parts = self._owners.parts([(one.subject, one.key) for one in documents])
        if len(parts) <= 1 or atomic:
            # Of several shards none is better than another: one will refuse it, and say why.
            parts = {next(iter(parts), None): list(range(len(keys)))}
        path = batch_path(is_filed=is_filed(ack), is_atomic=atomic)

        async def publish(shard: int | None, which: Sequence[int]) -> list[Published]:
            own_keys = [keys[index] for index in which]
            answer = await self._call(
                "POST",
                path,
                [bodies[index] for index in which],
                shard=shard,
                repeatable=None not in own_keys,
                timeout_s=timeout_s,
            )
            return read_published(answer, own_keys, path)

        return await published_in_parts(publish, parts)

    def _generated_key(self, subject: str = "", shard: int | None = None) -> str:
        """A key that nobody else has; `shard`: one that belongs there with that subject."""
        while True:
            key = f"{self._key_prefix}{self._next_key():x}"
            if shard is None or shard_of(subject, key, self._owners.count) == shard:
                return key

    # ── cancel ─────────────────────────────────────────────────────────────────────────────────

    async def cancel(
        self,
        message_id: str | None = None,
        *,
        subject: str | None = None,
        key: str | None = None,
        if_match: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Cancel a message, by its id or by subject and key; when this returns, it never fires.

        `if_match`: only if that is its version (`Stored.version`). Raises ConflictError, whose
        `state` says what it is: delivering, delivered or dead; NotFoundError; ChangedError with
        `if_match`; and as `publish`."""
        if timeout_s is not None:
            again = self.cancel(message_id, subject=subject, key=key, if_match=if_match)
            return await within(timeout_s, again)
        if if_match is not None:
            path = message_path(message_id, subject, key)
            shard = self._shard_of(message_id, subject, key)
            await self._call("DELETE", path, shard=shard, if_match=if_match)
            return None
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._settle_in(loop)
        if message_id is None and subject is not None and key is not None:
            data = encode(_Key(text_to_send("subject", subject), text_to_send("key", key)))
        else:
            data = b"" if message_id is None else encode(text_to_send("message_id", message_id))
            if message_id is None or subject is not None or key is not None:
                message_path(message_id, subject, key)  # which says what is wrong
        lane = self._shard_of(message_id, subject, key)
        batcher = self._cancels
        if not batcher.try_reserve(len(data)):
            await batcher.reserve(len(data))
        future: asyncio.Future[None] = loop.create_future()
        batcher.put(Cancelling(data, future, message_id, subject, key, lane))
        return await future

    def _shard_of(
        self, message_id: str | None, subject: str | None = None, key: str | None = None
    ) -> int | None:
        """Where a message is asked for, by its id or else by subject and key."""
        self._settle()
        if message_id is not None:
            return self._owners.of_id(message_id)
        assert subject is not None and key is not None
        return self._owners.of_key(subject, key)

    # ── one message ────────────────────────────────────────────────────────────────────────────

    async def get(
        self,
        message_id: str | None = None,
        *,
        subject: str | None = None,
        key: str | None = None,
        timeout_s: float | None = None,
    ) -> Stored:
        """Look a message up, by its id or by subject and key. Raises NotFoundError."""
        path = message_path(message_id, subject, key)
        shard = self._shard_of(message_id, subject, key)
        answer = await self._call("GET", path, shard=shard, timeout_s=timeout_s)
        return msgspec.structs.replace(decoded_message(answer.body, Stored), version=answer.version)

    async def attempts(self, message_id: str, *, timeout_s: float | None = None) -> Attempts:
        """How each attempt to deliver a message went. Raises NotFoundError."""
        path = path_of("messages", message_id, "attempts")
        shard = self._shard_of(message_id)
        answer = await self._call("GET", path, shard=shard, timeout_s=timeout_s)
        return decoded(answer.body, Attempts)

    async def replay(
        self,
        message_id: str,
        *,
        subscription: str | None = None,
        timeout_s: float | None = None,
    ) -> Replayed:
        """Have a message that is settled delivered again, to all that had it, or to `subscription`;
        with the same id, and the header `delay-replay`.

        A lost answer is an UnansweredError: asked again, it may deliver it twice. Raises
        ConflictError, whose `state` says what it is, NotFoundError."""
        path = path_of("messages", message_id, "replay")
        if subscription is not None:
            path += "?" + urlencode({"subscription": subscription})
        shard = self._shard_of(message_id)
        answer = await self._call("POST", path, shard=shard, repeatable=False, timeout_s=timeout_s)
        return decoded(answer.body, Replayed)

    def pending(
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
        return self._pages(path_of("subjects", subject, "messages"), query, _read_page)

    async def move(
        self,
        message_id: str | None = None,
        *,
        subject: str | None = None,
        key: str | None = None,
        delay: Delay | None = None,
        deliver_at: DeliverAt | None = None,
        if_match: str | None = None,
        timeout_s: float | None = None,
    ) -> Moved:
        """Give a message a new due time; `delay` and `deliver_at` as for `publish`. Raises as
        `cancel`, and InvalidError."""
        path = message_path(message_id, subject, key)
        document = due(delay, deliver_at)
        shard = self._shard_of(message_id, subject, key)
        answer = await self._call(
            "PATCH", path, document, shard=shard, if_match=if_match, timeout_s=timeout_s
        )
        return msgspec.structs.replace(decoded(answer.body, Moved), version=answer.version)

    async def replace(
        self,
        subject: str,
        key: str,
        body: Any = None,
        *,
        debounce: Debounce | None = None,
        if_match: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[PublishOptions],
    ) -> Published:
        """Publish in place of the message that waits under the key: a timer that each call pushes
        back. The arguments are those of `publish`; `debounce` takes the place of `delay`.

        Raises as `publish`; ChangedError with `if_match`. After a lost answer it is sent again only
        where a message still waits under the key, so that it never fires twice; else, an
        UnansweredError leaves it to the caller."""
        message = new_message(subject, body, **options)
        document, path = fields(message), path_of("subjects", subject, "keys", key)
        if debounce is not None:
            document["debounce"] = debounce_to_send(debounce)
        shard = self._shard_of(None, subject, key)
        if if_match is None:
            answer = await self._replace(path, document, timeout_s, shard=shard)
        else:
            answer = await self._call(
                "PUT", path, document, shard=shard, if_match=if_match, timeout_s=timeout_s
            )
        return Published(decoded(answer.body, _Id).id)

    # ── timers ─────────────────────────────────────────────────────────────────────────────────

    async def event(self, key: str, *, timeout_s: float | None = None) -> EventResult:
        """Something happened: complete every message that watches the key, at once. Durable when
        this returns. After a lost answer it is asked again, and the result is that of the last."""
        answer = await self._call("POST", path_of("events", key), timeout_s=timeout_s)
        return decoded(answer.body, EventResult)

    async def heartbeat(
        self,
        key: str,
        *,
        timeout: Delay,
        subject: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Heartbeat:
        """Publish a message unless this is called again within `timeout`, which is a timedelta,
        text such as "10s", or whole milliseconds. Raises as `publish`."""
        message = fields(new_message(subject, body, headers=headers))
        document = {**message, "subject": subject, "timeout": duration(timeout)}
        path, shard = self._heartbeat(key)
        answer = await self._call("PUT", path, document, shard=shard, timeout_s=timeout_s)
        return decoded_message(answer.body, Heartbeat)

    async def get_heartbeat(self, key: str, *, timeout_s: float | None = None) -> Heartbeat:
        """A heartbeat, and when it expires. Raises NotFoundError."""
        path, shard = self._heartbeat(key)
        answer = await self._call("GET", path, shard=shard, timeout_s=timeout_s)
        return decoded_message(answer.body, Heartbeat)

    async def delete_heartbeat(self, key: str, *, timeout_s: float | None = None) -> None:
        """End a heartbeat: when this returns, it never publishes. Raises NotFoundError."""
        path, shard = self._heartbeat(key)
        await self._delete(path, timeout_s, shard=shard)

    def _heartbeat(self, key: str) -> tuple[str, int | None]:
        """Where a heartbeat is, and at which shard."""
        self._settle()
        return path_of("heartbeats", key), self._owners.of_heartbeat(key)


def _read_page(body: bytes) -> tuple[list[Stored], str | None]:
    page = decoded_page(body, _Page, "messages", Stored)
    return page.messages, page.cursor


_inherited: list[Owners] = []
"""Those of the parent, in the child of a fork: they are kept as its connections are."""


def _abort(loop: asyncio.AbstractEventLoop, owners: Owners) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(owners.abort)


def _key_prefix() -> str:
    """64 random bits tell producers apart; a number that follows, the messages of one."""
    return f"auto-{os.urandom(8).hex()}-"
