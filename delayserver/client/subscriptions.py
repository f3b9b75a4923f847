"""Subscriptions: made, looked up, paused and deleted.

A consumer makes its own subscription when it runs. This is for webhooks and brokers, and for
options that a consumer does not have.

Cost: one request per call. Threads: belongs to the event loop.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

import msgspec

from delayserver.client.definitions import ClientDefinitions
from delayserver.client.transport import HttpAnswer, decoded, path_of
from delayserver.client.values import Delay, Subscription
from delayserver.client.writing import options_to_send
from delayserver.wire.fields import Delivery, Mechanism, Method
from delayserver.wire.subscriptions import SubscriptionType


class AnyOptions(TypedDict, total=False):
    """Options that all subscriptions have; see `put_webhook`."""

    max_attempts: int | None
    backoff: Sequence[Delay] | None
    spread: Delay | None
    drop_older_than: Delay | None


class PullOptions(AnyOptions, total=False):
    """Options of `put_pull`."""

    lease: Delay | None


class PushOptions(AnyOptions, total=False):
    """Options of subscriptions whose messages the server sends."""

    timeout: Delay | None
    max_in_flight: int | None
    per_second: float | None
    burst: int | None


class WebhookOptions(PushOptions, total=False):
    """Options of `put_webhook`."""

    secret: str | None
    secrets: Sequence[str] | None
    batch_max: int | None
    batch_linger: Delay | None
    headers: Mapping[str, str] | None
    method: Method | None
    disable_after: Delay | None


class KafkaOptions(PushOptions, total=False):
    """Options of `put_kafka`."""

    key: str | None
    delivery: Delivery | None
    username: str | None
    password: str | None
    mechanism: Mechanism | None
    tls: bool | None


class RedisOptions(PushOptions, total=False):
    """Options of `put_redis`."""

    max_length: int | None


class NatsOptions(PushOptions, total=False):
    """Options of `put_nats`."""

    nats_subject: str | None


class AmqpOptions(PushOptions, total=False):
    """Options of `put_amqp`."""

    routing_key: str | None


class _List(msgspec.Struct):
    subscriptions: list[Subscription]


class AsyncClientSubscriptions(ClientDefinitions[Subscription]):
    """The subscriptions of a server.

        url = "http://127.0.0.1:9000/unpaid"
        await client.subscriptions.put_webhook("shop", "order.*", url)

    Durations are timedeltas, text such as "15s", or whole milliseconds. A `put_…` makes a
    subscription or replaces it, and an option that is not given has its default then."""

    _kind = "subscriptions"

    async def put_webhook(
        self,
        name: str,
        subject: str,
        url: str,
        *,
        timeout_s: float | None = None,
        **options: Unpack[WebhookOptions],
    ) -> Subscription:
        """Have the messages of a subject POSTed to `url`.

        - `subject`: exact, or a prefix that ends in `.*`, or `*`.
        - `secret`: `whsec_…`, signs every request; or `secrets`, newest first, to change them over.
        - `timeout`: of one delivery. `max_in_flight`: deliveries at once.
        - `max_attempts`, `backoff`: how often, and the waits before the attempts after the first.
        - `per_second`, `burst`: at most so many messages. `batch_max`, `batch_linger`: several in
          one request, and how long one waits for others.
        - `spread` or `drop_older_than`: messages that fell due during downtime or a pause are
          handed out over this time, or become dead letters when they are older.
        - `headers`: sent along with each request, such as `authorization`; never shown again.
          `method`: `PUT` instead of POST.
        - `disable_after`: after so long of nothing but failures the server pauses it.

        Raises InvalidError, ConflictError (it is a pull subscription), NotAllowedError."""
        fields = {"url": url, **options_to_send(WebhookOptions, options)}
        return await self._define(name, "webhook", subject, fields, timeout_s)

    async def put_pull(
        self,
        name: str,
        subject: str,
        *,
        timeout_s: float | None = None,
        **options: Unpack[PullOptions],
    ) -> Subscription:
        """Have the messages of a subject wait for consumers. `lease`: the time to acknowledge one,
        unless a consumer asks for another. The rest is as for `put_webhook`."""
        fields = options_to_send(PullOptions, options)
        return await self._define(name, "pull", subject, fields, timeout_s)

    async def put_kafka(
        self,
        name: str,
        subject: str,
        bootstrap: str,
        topic: str,
        *,
        timeout_s: float | None = None,
        **options: Unpack[KafkaOptions],
    ) -> Subscription:
        """Have the messages of a subject written to a topic of Kafka.

        - `bootstrap`: brokers to begin with, `host:port` with commas between them.
        - `key`: of each record: `{key}` (the default), `{subject}` or `{id}` of its message, or
          this text.
        - `delivery`: `exactly_once` only from a cluster into its own brokers.
        - `username`, `password`, `mechanism` (SASL; `PLAIN` by default), `tls`: how the server logs
          in to the brokers.
        - `timeout`: how long brokers may take to confirm a message; `max_in_flight`: messages that
          they have not confirmed.

        The rest is as for `put_webhook`."""
        fields = {"bootstrap": bootstrap, "topic": topic, **options_to_send(KafkaOptions, options)}
        return await self._define(name, "kafka", subject, fields, timeout_s)

    async def put_redis(
        self,
        name: str,
        subject: str,
        url: str,
        stream: str,
        *,
        timeout_s: float | None = None,
        **options: Unpack[RedisOptions],
    ) -> Subscription:
        """Have the messages of a subject added to a stream of Redis.

        - `url`: `redis://[user:password@]host[:port][/database]`, or `rediss://` for TLS. Answers
          show `***` instead of the password.
        - `max_length`: about how many entries the stream keeps.
        - `timeout`: how long the broker may take to confirm a message; `max_in_flight`: messages
          that it has not confirmed.

        The rest is as for `put_webhook`."""
        fields = {"url": url, "stream": stream, **options_to_send(RedisOptions, options)}
        return await self._define(name, "redis", subject, fields, timeout_s)

    async def put_nats(
        self,
        name: str,
        subject: str,
        url: str,
        *,
        timeout_s: float | None = None,
        **options: Unpack[NatsOptions],
    ) -> Subscription:
        """Have the messages of a subject published to a stream of NATS JetStream.

        - `url`: `nats://[user:password@]host[:port]`, or `tls://`.
        - `nats_subject`: where to; `{subject}` (the default), `{key}` and `{id}` in it are those of
          the message.

        The rest is as for `put_redis`."""
        fields = {"url": url, **options_to_send(NatsOptions, options)}
        return await self._define(name, "nats", subject, fields, timeout_s)

    async def put_amqp(
        self,
        name: str,
        subject: str,
        url: str,
        exchange: str,
        *,
        timeout_s: float | None = None,
        **options: Unpack[AmqpOptions],
    ) -> Subscription:
        """Have the messages of a subject published to an exchange of RabbitMQ.

        - `url`: `amqp://[user:password@]host[:port][/virtual host]`, or `amqps://`.
        - `exchange`: its name; empty: the default exchange, whose routing keys are names of queues.
        - `routing_key`: `{subject}` (the default), `{key}` and `{id}` in it are those of the
          message.

        The rest is as for `put_redis`."""
        fields = {"url": url, "exchange": exchange, **options_to_send(AmqpOptions, options)}
        return await self._define(name, "amqp", subject, fields, timeout_s)

    async def list(self, *, timeout_s: float | None = None) -> tuple[Subscription, ...]:
        """All that the token may consume, oldest first."""
        answer = await self._client._call("GET", path_of("subscriptions"), timeout_s=timeout_s)
        return tuple(decoded(answer.body, _List).subscriptions)

    async def pause(self, name: str, *, timeout_s: float | None = None) -> Subscription:
        """Deliver nothing until it is resumed; messages that fall due wait. Raises
        NotFoundError."""
        return await self._post(name, "pause", None, timeout_s)

    async def resume(self, name: str, *, timeout_s: float | None = None) -> Subscription:
        """Deliver again. Raises NotFoundError."""
        return await self._post(name, "resume", None, timeout_s)

    async def delete(self, name: str, *, timeout_s: float | None = None) -> None:
        """Delete a subscription. Messages that only it would get wait for the next one that
        matches. Raises NotFoundError."""
        await self._client._delete(path_of(self._kind, name), timeout_s)

    async def _define(
        self,
        name: str,
        kind: SubscriptionType,
        subject: str,
        fields: dict[str, Any],
        timeout_s: float | None,
    ) -> Subscription:
        document = {**fields, "subject": subject, "type": kind}
        return await self._put(name, document, if_match=None, timeout_s=timeout_s)

    def _read(self, answer: HttpAnswer) -> Subscription:
        return decoded(answer.body, Subscription)
