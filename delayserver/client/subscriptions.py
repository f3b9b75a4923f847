"""Subscriptions: made, looked up, paused and deleted; and the dead letters of each.

A consumer makes its own subscription when it runs. This is for webhooks, for options that a
consumer does not have, and for looking after what was given up.

Cost: one request per call. Threads: belongs to the event loop.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import msgspec

from delayserver.client.cutting import decoded_page
from delayserver.client.definitions import DefinitionsClient
from delayserver.client.transport import HttpAnswer, decoded, path_of
from delayserver.client.values import DeadLetter, Delay, Subscription
from delayserver.client.writing import duration_or_none, given, retry_of
from delayserver.wire.fields import Delivery, Mechanism, Method
from delayserver.wire.subscriptions import SubscriptionType


class PullOptions(TypedDict, total=False):
    """Options that all subscriptions have; see `put_webhook`."""

    max_attempts: int | None
    backoff: Sequence[Delay] | None
    spread: Delay | None
    drop_older_than: Delay | None
    timeout_s: float | None
    """For the call."""


class PushOptions(PullOptions, total=False):
    """Options of subscriptions whose messages the server sends."""

    timeout: Delay | None
    max_in_flight: int | None
    per_second: float | None
    burst: int | None


class _List(msgspec.Struct):
    subscriptions: list[Subscription]


class _Letters(msgspec.Struct):
    dead_letters: list[DeadLetter]
    cursor: str | None = None


class _Redriven(msgspec.Struct):
    redriven: int


class AsyncSubscriptions(DefinitionsClient[Subscription]):
    """The subscriptions of a server, for asyncio.

        async with AsyncSubscriptions("http://127.0.0.1:8080") as subscriptions:
            await subscriptions.put_webhook("shop", "order.*", "http://127.0.0.1:9000/unpaid")

    Durations are timedeltas, text such as "15s", or whole milliseconds."""

    _kind = "subscriptions"

    async def put_webhook(
        self,
        name: str,
        subject: str,
        url: str,
        *,
        secret: str | None = None,
        secrets: Sequence[str] | None = None,
        batch_max: int | None = None,
        batch_linger: Delay | None = None,
        headers: Mapping[str, str] | None = None,
        method: Method | None = None,
        disable_after: Delay | None = None,
        **options: Unpack[PushOptions],
    ) -> Subscription:
        """Have the messages of a subject POSTed to `url`. What is not given has the default of the
        server, also where the subscription is there and had another one.

        - `subject`: exact, or a prefix that ends in `.*`, or `*`.
        - `secret`: `whsec_…`, signs every request; or `secrets`, newest first, to change them over.
        - `timeout`: of one delivery. `max_in_flight`: deliveries at once.
        - `max_attempts`, `backoff`: how often, and the waits before the attempts after the first.
        - `per_second`, `burst`: at most so many messages. `batch_max`, `batch_linger`: several in
          one request, and how long one waits for others.
        - `spread` or `drop_older_than`: what fell due during downtime or a pause is handed out over
          this time, or becomes a dead letter when it is older.
        - `headers`: sent along with each request, such as `authorization`; never shown again.
          `method`: `PUT` instead of POST.
        - `disable_after`: after so long of nothing but failures the server pauses it.

        Raises InvalidError, ConflictError (it is a pull subscription), NotAllowedError."""
        batch = {"max": batch_max, "linger": duration_or_none(batch_linger)}
        document = {
            "url": url,
            "secret": secret,
            "secrets": secrets,
            "headers": None if headers is None else dict(headers),
            "method": method,
            "disable_after": duration_or_none(disable_after),
            "batch": given(batch) or None,
        }
        return await self._define(name, "webhook", subject, document, **options)

    async def put_pull(
        self,
        name: str,
        subject: str,
        *,
        lease: Delay | None = None,
        **options: Unpack[PullOptions],
    ) -> Subscription:
        """Have the messages of a subject wait for consumers. `lease`: the time to acknowledge one,
        unless a consumer asks for another. The rest is as for `put_webhook`."""
        document = {"lease": duration_or_none(lease)}
        return await self._define(name, "pull", subject, document, **options)

    async def put_kafka(
        self,
        name: str,
        subject: str,
        bootstrap: str,
        topic: str,
        *,
        key: str | None = None,
        delivery: Delivery | None = None,
        username: str | None = None,
        password: str | None = None,
        mechanism: Mechanism | None = None,
        tls: bool | None = None,
        **options: Unpack[PushOptions],
    ) -> Subscription:
        """Have the messages of a subject written to a topic of Kafka.

        - `bootstrap`: brokers to begin with, `host:port` with commas between them.
        - `key`: of each record: `{key}` (the default), `{subject}` or `{id}` of its message, or
          this text.
        - `delivery`: `exactly_once` only from a cluster into its own brokers.
        - `username`, `password`, `mechanism` (SASL; `PLAIN` if nothing is said), `tls`: how brokers
          let somebody in.
        - `timeout`: how long brokers may take to confirm a message; `max_in_flight`: messages that
          they have not confirmed.

        The rest is as for `put_webhook`."""
        document = {
            "bootstrap": bootstrap,
            "topic": topic,
            "key": key,
            "delivery": delivery,
            "username": username,
            "password": password,
            "mechanism": mechanism,
            "tls": tls,
        }
        return await self._define(name, "kafka", subject, document, **options)

    async def put_redis(
        self,
        name: str,
        subject: str,
        url: str,
        stream: str,
        *,
        max_length: int | None = None,
        **options: Unpack[PushOptions],
    ) -> Subscription:
        """Have the messages of a subject added to a stream of Redis.

        - `url`: `redis://[user:password@]host[:port][/database]`, or `rediss://` for TLS. Answers
          show `***` instead of the password.
        - `max_length`: about how many entries the stream keeps.
        - `timeout`: how long the broker may take to confirm a message; `max_in_flight`: messages
          that it has not confirmed.

        The rest is as for `put_webhook`."""
        document = {
            "url": url,
            "stream": stream,
            "max_length": max_length,
        }
        return await self._define(name, "redis", subject, document, **options)

    async def put_nats(
        self,
        name: str,
        subject: str,
        url: str,
        *,
        nats_subject: str | None = None,
        **options: Unpack[PushOptions],
    ) -> Subscription:
        """Have the messages of a subject published to a stream of NATS JetStream.

        - `url`: `nats://[user:password@]host[:port]`, or `tls://`.
        - `nats_subject`: where to; `{subject}` (the default), `{key}` and `{id}` in it are those of
          the message.

        The rest is as for `put_redis`."""
        document = {
            "url": url,
            "nats_subject": nats_subject,
        }
        return await self._define(name, "nats", subject, document, **options)

    async def put_amqp(
        self,
        name: str,
        subject: str,
        url: str,
        exchange: str,
        *,
        routing_key: str | None = None,
        **options: Unpack[PushOptions],
    ) -> Subscription:
        """Have the messages of a subject published to an exchange of RabbitMQ.

        - `url`: `amqp://[user:password@]host[:port][/virtual host]`, or `amqps://`.
        - `exchange`: its name; empty: the default exchange, whose routing keys are names of queues.
        - `routing_key`: `{subject}` (the default), `{key}` and `{id}` in it are those of the
          message.

        The rest is as for `put_redis`."""
        document = {
            "url": url,
            "exchange": exchange,
            "routing_key": routing_key,
        }
        return await self._define(name, "amqp", subject, document, **options)

    async def get(self, name: str, *, timeout_s: float | None = None) -> Subscription:
        """A subscription. Raises NotFoundError."""
        return await self._get(name, timeout_s)

    async def list(self, *, timeout_s: float | None = None) -> tuple[Subscription, ...]:
        """All that the token may consume, oldest first."""
        answer = await self._call("GET", path_of("subscriptions"), timeout_s=timeout_s)
        return tuple(decoded(answer.body, _List).subscriptions)

    async def pause(self, name: str, *, timeout_s: float | None = None) -> Subscription:
        """Deliver nothing until it is resumed; what falls due waits. Raises NotFoundError."""
        return await self._post(name, "pause", timeout_s)

    async def resume(self, name: str, *, timeout_s: float | None = None) -> Subscription:
        """Deliver again. Raises NotFoundError."""
        return await self._post(name, "resume", timeout_s)

    async def delete(self, name: str, *, timeout_s: float | None = None) -> None:
        """Delete a subscription; what only it was to get waits for the next one that matches.
        Raises NotFoundError."""
        await self._end(name, timeout_s)

    # ── dead letters ───────────────────────────────────────────────────────────────────────────

    def dead_letters(self, name: str, *, page: int = 100) -> AsyncIterator[DeadLetter]:
        """Messages that were given up, in the order in which their last attempts were scheduled.
        Raises NotFoundError.

        One request for each `page` of them."""
        path = path_of("subscriptions", name, "dead-letters")
        return self._pages(path, {"limit": str(page)}, _read_letters)

    async def redrive(
        self, name: str, ids: Sequence[str] | None = None, *, timeout_s: float | None = None
    ) -> int:
        """Deliver dead letters again, all or those with these message ids; how many they are.

        A lost answer is an UnansweredError: asked again, it would redrive what died meanwhile."""
        path = path_of("subscriptions", name, "dead-letters", "redrive")
        document = {} if ids is None else {"ids": ids}
        answer = await self._call("POST", path, document, repeatable=False, timeout_s=timeout_s)
        return decoded(answer.body, _Redriven).redriven

    async def discard(self, name: str, message_id: str, *, timeout_s: float | None = None) -> None:
        """Delete a dead letter. Raises NotFoundError."""
        path = path_of("subscriptions", name, "dead-letters", message_id)
        await self._delete(path, timeout_s)

    async def _define(
        self,
        name: str,
        kind: SubscriptionType,
        subject: str,
        fields: dict[str, Any],
        *,
        timeout: Delay | None = None,
        max_in_flight: int | None = None,
        max_attempts: int | None = None,
        backoff: Sequence[Delay] | None = None,
        per_second: float | None = None,
        burst: int | None = None,
        spread: Delay | None = None,
        drop_older_than: Delay | None = None,
        timeout_s: float | None = None,
    ) -> Subscription:
        """Make or change one; `fields`: those of its type."""
        catch_up = {
            "spread": duration_or_none(spread),
            "drop_older_than": duration_or_none(drop_older_than),
        }
        document = {
            **fields,
            "subject": subject,
            "type": kind,
            "timeout": duration_or_none(timeout),
            "max_in_flight": max_in_flight,
            "rate": given({"per_second": per_second, "burst": burst}) or None,
            "retry": retry_of(max_attempts, backoff),
            "catch_up": given(catch_up) or None,
        }
        return await self._put(name, document, timeout_s)

    def _read(self, answer: HttpAnswer) -> Subscription:
        return decoded(answer.body, Subscription)


def _read_letters(body: bytes) -> tuple[list[DeadLetter], str | None]:
    page = decoded_page(body, _Letters, "dead_letters", DeadLetter)
    return page.dead_letters, page.cursor
