"""Subscriptions: made, looked up, paused and deleted; and the dead letters of each.

A consumer makes its own subscription when it runs. This is for webhooks, for options that a
consumer does not have, and for looking after what was given up.

Cost: one request per call. Threads: belongs to the event loop.
"""

import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal
from urllib.parse import urlencode

import msgspec

from delayserver.client.calling import RETRY, URL_DEFAULT, RetryingClient
from delayserver.client.cluster_map import OwnerHosts
from delayserver.client.cutting import decoded_page
from delayserver.client.following import followed
from delayserver.client.nodes import Connect
from delayserver.client.retries import RetryPolicy, Time
from delayserver.client.transport import (
    TIMEOUT_S,
    HttpTransport,
    Transport,
    decoded,
    path_of,
)
from delayserver.client.values import DeadLetter, Delay, Subscription, duration


class _List(msgspec.Struct):
    subscriptions: list[Subscription]


class _Letters(msgspec.Struct):
    dead_letters: list[DeadLetter]
    cursor: str | None = None


class _Redriven(msgspec.Struct):
    redriven: int


class AsyncSubscriptions(RetryingClient):
    """The subscriptions of a server, for asyncio.

        async with AsyncSubscriptions("http://127.0.0.1:8080") as subscriptions:
            await subscriptions.put_webhook("shop", "order.*", "http://127.0.0.1:9000/unpaid")

    - `retry`: how long to ask again while the server is away; a minute by default.
    - `timeout_s`: how long one request may take. Each call takes a `timeout_s`, too, for all of its
      requests: UnansweredError when that is over.
    - `owner_hosts`: of a cluster any node is asked, when the one at `url` cannot be reached. Those
      are asked that are on the same host as `url`; on any, with "any": then the token goes wherever
      the server says. With "none" only `url` is.
    - `token`; `tls`: instead of the system's certificates; `transport`, `connect`, `time`: for
      tests.

    Durations are timedeltas, text such as "15s", or whole milliseconds."""

    def __init__(
        self,
        url: str = URL_DEFAULT,
        *,
        token: str | None = None,
        retry: RetryPolicy = RETRY,
        timeout_s: float = TIMEOUT_S,
        owner_hosts: OwnerHosts = "same",
        tls: ssl.SSLContext | None = None,
        transport: Transport | None = None,
        connect: Connect | None = None,
        time: Time | None = None,
    ) -> None:
        make = partial(HttpTransport, token=token, tls=tls)
        asked = followed(transport, connect, make, url, owner_hosts)
        super().__init__(url, retry=retry, timeout_s=timeout_s, transport=asked, time=time)

    async def put_webhook(
        self,
        name: str,
        subject: str,
        url: str,
        *,
        secret: str | None = None,
        secrets: Sequence[str] | None = None,
        timeout: Delay | None = None,
        max_in_flight: int | None = None,
        max_attempts: int | None = None,
        backoff: Sequence[Delay] | None = None,
        per_second: float | None = None,
        burst: int | None = None,
        batch_max: int | None = None,
        batch_linger: Delay | None = None,
        spread: Delay | None = None,
        drop_older_than: Delay | None = None,
        headers: Mapping[str, str] | None = None,
        method: Literal["POST", "PUT"] | None = None,
        disable_after: Delay | None = None,
        timeout_s: float | None = None,
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
        batch = {"max": batch_max, "linger": _duration(batch_linger)}
        document = {
            "url": url,
            "secret": secret,
            "secrets": secrets,
            "headers": None if headers is None else dict(headers),
            "method": method,
            "disable_after": _duration(disable_after),
            "batch": _given(batch) or None,
            **_pushed(timeout, max_in_flight, per_second, burst),
            **_common("webhook", subject, max_attempts, backoff, spread, drop_older_than),
        }
        return await self._put(name, document, timeout_s)

    async def put_pull(
        self,
        name: str,
        subject: str,
        *,
        lease: Delay | None = None,
        max_attempts: int | None = None,
        backoff: Sequence[Delay] | None = None,
        spread: Delay | None = None,
        drop_older_than: Delay | None = None,
        timeout_s: float | None = None,
    ) -> Subscription:
        """Have the messages of a subject wait for consumers. `lease`: the time to acknowledge one,
        unless a consumer asks for another. The rest is as for `put_webhook`."""
        document = {
            "lease": _duration(lease),
            **_common("pull", subject, max_attempts, backoff, spread, drop_older_than),
        }
        return await self._put(name, document, timeout_s)

    async def put_kafka(
        self,
        name: str,
        subject: str,
        bootstrap: str,
        topic: str,
        *,
        key: str | None = None,
        delivery: Literal["at_least_once", "exactly_once"] | None = None,
        username: str | None = None,
        password: str | None = None,
        mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] | None = None,
        tls: bool | None = None,
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
            **_pushed(timeout, max_in_flight, per_second, burst),
            **_common("kafka", subject, max_attempts, backoff, spread, drop_older_than),
        }
        return await self._put(name, document, timeout_s)

    async def put_redis(
        self,
        name: str,
        subject: str,
        url: str,
        stream: str,
        *,
        max_length: int | None = None,
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
            **_pushed(timeout, max_in_flight, per_second, burst),
            **_common("redis", subject, max_attempts, backoff, spread, drop_older_than),
        }
        return await self._put(name, document, timeout_s)

    async def put_nats(
        self,
        name: str,
        subject: str,
        url: str,
        *,
        nats_subject: str | None = None,
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
        """Have the messages of a subject published to a stream of NATS JetStream.

        - `url`: `nats://[user:password@]host[:port]`, or `tls://`.
        - `nats_subject`: where to; `{subject}` (the default), `{key}` and `{id}` in it are those of
          the message.

        The rest is as for `put_redis`."""
        document = {
            "url": url,
            "nats_subject": nats_subject,
            **_pushed(timeout, max_in_flight, per_second, burst),
            **_common("nats", subject, max_attempts, backoff, spread, drop_older_than),
        }
        return await self._put(name, document, timeout_s)

    async def put_amqp(
        self,
        name: str,
        subject: str,
        url: str,
        exchange: str,
        *,
        routing_key: str | None = None,
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
            **_pushed(timeout, max_in_flight, per_second, burst),
            **_common("amqp", subject, max_attempts, backoff, spread, drop_older_than),
        }
        return await self._put(name, document, timeout_s)

    async def get(self, name: str, *, timeout_s: float | None = None) -> Subscription:
        """A subscription. Raises NotFoundError."""
        answer = await self._call("GET", path_of("subscriptions", name), timeout_s=timeout_s)
        return decoded(answer.body, Subscription)

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
        await self._delete(path_of("subscriptions", name), timeout_s)

    # ── dead letters ───────────────────────────────────────────────────────────────────────────

    async def dead_letters(self, name: str, *, page: int = 100) -> AsyncIterator[DeadLetter]:
        """Messages that were given up, in the order of their last attempts. Raises NotFoundError.

        One request for each `page` of them."""
        query = {"limit": str(page)}
        while True:
            path = f"{path_of('subscriptions', name, 'dead-letters')}?{urlencode(query)}"
            answer = await self._call("GET", path)
            found = decoded_page(answer.body, _Letters, "dead_letters", DeadLetter)
            for letter in found.dead_letters:
                yield letter
            if found.cursor is None:
                return
            query["cursor"] = found.cursor

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

    # ── requests ───────────────────────────────────────────────────────────────────────────────

    async def _put(
        self, name: str, document: dict[str, Any], timeout_s: float | None
    ) -> Subscription:
        path = path_of("subscriptions", name)
        answer = await self._call("PUT", path, _given(document), timeout_s=timeout_s)
        return decoded(answer.body, Subscription)

    async def _post(self, name: str, what: str, timeout_s: float | None) -> Subscription:
        path = path_of("subscriptions", name, what)
        answer = await self._call("POST", path, timeout_s=timeout_s)
        return decoded(answer.body, Subscription)


def _common(
    kind: str,
    subject: str,
    max_attempts: int | None,
    backoff: Sequence[Delay] | None,
    spread: Delay | None,
    drop_older_than: Delay | None,
) -> dict[str, Any]:
    waits = None if backoff is None else [duration(wait) for wait in backoff]
    retry = {"max_attempts": max_attempts, "backoff": waits}
    catch_up = {"spread": _duration(spread), "drop_older_than": _duration(drop_older_than)}
    return {
        "subject": subject,
        "type": kind,
        "retry": _given(retry) or None,
        "catch_up": _given(catch_up) or None,
    }


def _pushed(
    timeout: Delay | None,
    max_in_flight: int | None,
    per_second: float | None,
    burst: int | None,
) -> dict[str, Any]:
    return {
        "timeout": _duration(timeout),
        "max_in_flight": max_in_flight,
        "rate": _given({"per_second": per_second, "burst": burst}) or None,
    }


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _duration(value: Delay | None) -> int | str | None:
    return None if value is None else duration(value)
