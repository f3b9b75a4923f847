"""Publishing: messages of many callers go out together, in batches of each shard.

    publish ──▶ encoded ──▶ natural batch ──POST /v1/messages/batch──▶ each caller its own answer
                            of its shard

A server that has several shards is asked at the addresses of their owners, as far as `owners` knows
them.

Every `publish` returns when its own message is durable, however many share a request, and raises
only errors of its own message.

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
import weakref
from functools import partial
from typing import Any, Literal, Unpack

from delayserver.client.batches import (
    BATCH_PATH,
    FILED_PATH,
    Cancelling,
    PublishItem,
    send_cancels,
    send_publishes,
)
from delayserver.client.batching import Batcher
from delayserver.client.calling import RetryingClient
from delayserver.client.cluster_map import is_allowed
from delayserver.client.options import ClientConfig
from delayserver.client.owners import Owners
from delayserver.client.retries import within
from delayserver.client.transport import Request
from delayserver.client.values import Published, PublishOptions
from delayserver.client.writing import encode_message, is_filed, new_message
from delayserver.records.sharding import shard_of

BATCH_MAX = 2000
BATCH_MAX_BYTES = 4 * 1024 * 1024
Ack = Literal["durable", "filed"]
"""When a publish is answered: when the message is in the message log, or also in its hour, where
lists show it."""


class Publisher(RetryingClient):
    """Publishes to the owners of shards; one serves any number of tasks.

    It may be made anywhere, and used by one event loop after the other, and on both sides of a
    fork; each begins anew, with connections and generated keys of its own. In two loops that run at
    the same time it is refused: OtherLoopError."""

    def __init__(self, options: ClientConfig) -> None:
        super().__init__(options, options.home())
        url, hosts = options.url, options.owner_hosts
        self._asks_for_map = options.connect is not None or options.transport is None
        self._make_owners = partial(
            Owners,
            self._transport,
            url,
            options.connected,
            None if hosts == "none" else partial(is_allowed, url, hosts=hosts),
            self._time,
        )
        self._owners = self._make_owners()
        self._ending: weakref.finalize[..., Publisher] | None = None
        self._generates_keys = options.generate_keys and options.retry.timeout_s > 0
        self._key_prefix = _key_prefix()
        self._next_key = itertools.count(1).__next__
        self._batcher = partial(
            Batcher,
            in_flight_max=options.in_flight_max,
            batch_max=BATCH_MAX,
            batch_max_bytes=BATCH_MAX_BYTES,
            pending_max=options.pending_max,
            pending_max_bytes=options.pending_max_bytes,
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
            # The task that asks in the background does not keep a client that was dropped.
            self._ending = weakref.finalize(self, _abort, loop, self._owners)
            self._ending.atexit = False

    def _leave_owners(self) -> None:
        """The owners of another loop ask nothing more there."""
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
        """Take nothing more, wait for publishes under way, at most `timeout_s`, and disconnect."""
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

        - `watch`: up to 8 keys. An event for one of them cancels the message, or delivers it at
          once with `on_event="fire"`.
        - `ack`: with "filed" the message is also filed when this returns, so that lists show it
          (`Published.filed` says so).
        - `ttl`: a message that cannot be delivered within this time after it is due becomes a dead
          letter (`expired`).
        - `jitter`: the message is due up to so much later; `Published.deliver_at` says when.
        - `priority`: of messages that are due, higher ones (0, the default, to 9) go first.
        - `to`: a URL, or more (`To`). The message goes there by webhook, and to no subscription.
        - `on_delivered`, `on_dead`: a subject. When the message is delivered, or is a dead letter,
          a message about that is published there, for each subscription.
        - `group`: each subscription has one message of a group under way at a time, in due order. A
          message with a group gets no generated key, since the key decides about its shard.

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
        data = encode_message(new_message(subject, body, key=key, options=options))
        lane, owners = None, self._owners
        if owners.are_apart:
            lane = owners.of_any() if key is None else owners.of_key(subject, key)
        batcher = self._filed if is_filed(ack) else self._publishes
        if not batcher.try_reserve(len(data)):
            await batcher.reserve(len(data))
        future: asyncio.Future[Published] = loop.create_future()
        batcher.put(PublishItem(data, future, subject, own_key, lane))
        return await future

    def _generated_key(self, subject: str = "", shard: int | None = None) -> str:
        """A key that no other client has; `shard`: one that belongs there with that subject."""
        while True:
            key = f"{self._key_prefix}{self._next_key():x}"
            if shard is None or shard_of(subject, key, self._owners.count) == shard:
                return key

    def _shard_of(
        self, message_id: str | None, subject: str | None = None, key: str | None = None
    ) -> int | None:
        """Where a message is asked for, by its id or else by subject and key."""
        self._settle()
        if message_id is not None:
            return self._owners.of_id(message_id)
        assert subject is not None and key is not None
        return self._owners.of_key(subject, key)


_inherited: list[Owners] = []
"""Those of the parent, in the child of a fork: they are kept as its connections are."""


def _abort(loop: asyncio.AbstractEventLoop, owners: Owners) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(owners.abort)


def _key_prefix() -> str:
    """64 random bits tell producers apart; a number that follows, the messages of one."""
    return f"auto-{os.urandom(8).hex()}-"
