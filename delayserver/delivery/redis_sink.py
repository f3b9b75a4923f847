"""Streams of Redis: an entry for each message (XADD), confirmed when Redis has answered.

    send ──▶ what waits ── one pipeline under way ──▶ Redis
      report ◀── the answer to each command ◀──────────┘

Its fields are the headers (`delayserver.delivery.carried`) and, last, `body`: the body as it was
published. A header of the message that is called `body` stands in the field `header-body`.

One connection for all subscriptions with the same URL and the same time-out. While a pipeline is
under way what comes waits, and goes together in the next one, so the rate is a pipeline of up to
BATCH_MAX messages for each round trip. A pipeline that is not answered within the time-out breaks
the connection: Redis answers in order, so nothing behind it could be answered either. Whether its
messages are there, nobody knows; they are tried again, with the same id.

The protocol is RESP2: with RESP3 a server could tell the client to go on at another address, which
no allow list would have seen.

Cost: 40 µs of the event loop for one of many messages: redis-py's, nearly all of it. Threads:
belongs to the event loop.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Hashable, Mapping
from typing import Any, Final

from redis.asyncio import Connection, ConnectionPool, Redis, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ReadOnlyError, RedisError
from redis.typing import EncodableT, FieldT

from delayserver.delivery.addresses import checked_address
from delayserver.delivery.carried import headers
from delayserver.delivery.outlets import Outlet, OutletError, Report, target_of
from delayserver.errors import InputError
from delayserver.records.message import DueDelivery
from delayserver.records.subscriptions import RedisTarget, Subscription
from delayserver.security.broker_urls import BrokerUrl, split_broker_url
from delayserver.security.targets import TargetPolicy

PORTS: Final = {"redis": 6379, "rediss": 6379}
OPEN_TIMEOUT_S: Final = 5.0
BATCH_MAX: Final = 500
"""Messages in a pipeline, and …"""
BATCH_BYTES_MAX: Final = 8 * 1024 * 1024
"""… their bodies, unless one alone has more."""


def split_redis_url(url: str) -> tuple[BrokerUrl, int]:
    """The parts of a URL, and the number of the database. Raises InputError at `/url`."""
    parts = split_broker_url(url, PORTS)
    number = parts.path[1:] or "0"
    if not (number.isascii() and number.isdigit() and len(number) <= 4):
        raise InputError("behind the host stands the number of a database: /0 or none", "/url")
    return parts, int(number)


def fields(delivery: DueDelivery) -> dict[FieldT, EncodableT]:
    """The fields of an entry, in order."""
    found: dict[FieldT, EncodableT] = {}
    found.update(headers(delivery))
    if "body" in found:
        found["header-body"] = found.pop("body")
    found["body"] = delivery.payload.body
    return found


class _NamedConnection(SSLConnection):
    """Connects to an address, and wants the certificate of a name."""

    def __init__(self, *, certificate_name: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._certificate_name = certificate_name

    def _connection_arguments(self) -> Mapping[str, Any]:
        return {**super()._connection_arguments(), "server_hostname": self._certificate_name}


class RedisOpener:
    """Makes connections to Redis."""

    def __init__(self, policy: TargetPolicy, ca_data: str | None = None) -> None:
        """`ca_data`: certificates (PEM) that are trusted instead of the system's."""
        self._policy = policy
        self._ca_data = ca_data

    def key(self, subscription: Subscription) -> Hashable:
        """See `OutletOpener`."""
        return target_of(subscription, RedisTarget).url, subscription.timeout_ms

    async def open(self, subscription: Subscription) -> Outlet:
        """See `OutletOpener`."""
        parts, database = split_redis_url(target_of(subscription, RedisTarget).url)
        target = parts.target
        settings: dict[str, Any] = {
            "host": await checked_address(self._policy, target),
            "port": target.port,
            "db": database,
            "username": parts.user or None,
            "password": parts.password or None,
            "protocol": 2,
            "socket_connect_timeout": OPEN_TIMEOUT_S,
            # The outlet looks after time-outs and second attempts.
            "socket_timeout": None,
            "retry": Retry(NoBackoff(), 0),
        }
        if target.scheme == "rediss":
            settings |= {
                "certificate_name": target.host,
                "ssl_check_hostname": True,
                "ssl_min_version": ssl.TLSVersion.TLSv1_2,
                "ssl_ca_data": self._ca_data,
            }
        pool = ConnectionPool(
            connection_class=_NamedConnection if target.scheme == "rediss" else Connection,
            max_connections=1,
            **settings,
        )
        client = Redis(connection_pool=pool)
        try:
            # Without a command: an account may be allowed no other than XADD.
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await pool.release(await pool.get_connection())
        except (RedisError, OSError) as error:
            await pool.disconnect()
            raise OutletError(_text(error)) from error
        return _RedisOutlet(client, pool, subscription.timeout_ms)


class _RedisOutlet:
    """An `Outlet`: one connection, one pipeline at a time."""

    def __init__(self, client: Redis, pool: ConnectionPool, timeout_ms: int) -> None:
        self._client = client
        self._pool = pool
        self._timeout_ms = timeout_ms
        self._waiting: deque[tuple[Subscription, DueDelivery, Report]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._failure = ""
        """Why nothing can be sent any more."""

    @property
    def is_broken(self) -> bool:
        return bool(self._failure)

    async def send(
        self, subscription: Subscription, deliveries: list[DueDelivery], report: Report
    ) -> None:
        self._waiting += [(subscription, delivery, report) for delivery in deliveries]
        if self._failure:
            self._fail_waiting()
        elif self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work())

    async def close(self) -> None:
        self._failure = self._failure or "Redis: the connection was closed"
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fail_waiting()
        await self._pool.disconnect()

    async def _work(self) -> None:
        """Pipelines, as long as something waits."""
        while self._waiting:
            batch = self._take()
            try:
                async with asyncio.timeout(self._timeout_ms / 1000):
                    answers = await self._execute(batch)
            except TimeoutError:
                self._failure = f"Redis: no answer within {self._timeout_ms} ms"
            except Exception as error:
                # Whatever it is: messages that nobody reports would stay on their way for good.
                self._failure = _text(error)
            except asyncio.CancelledError:
                self._report_all(batch, self._failure)
                raise
            if self._failure:
                self._report_all(batch, self._failure)
                self._fail_waiting()
                await self._pool.disconnect()
                return
            for (_, delivery, report), answer in zip(batch, answers, strict=True):
                if isinstance(answer, Exception):
                    report(delivery, _text(answer))
                    if isinstance(answer, ReadOnlyError):
                        # It has become a replica. Another connection finds the one that writes.
                        self._failure = _text(answer)
                else:
                    report(delivery, None)
            if self._failure:
                self._fail_waiting()
                return
        self._task = None

    async def _execute(self, batch: list[tuple[Subscription, DueDelivery, Report]]) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for subscription, delivery, _ in batch:
            target = target_of(subscription, RedisTarget)
            pipeline.xadd(
                target.stream,
                fields(delivery),
                maxlen=target.max_length or None,
                approximate=True,
            )
        answers: list[Any] = await pipeline.execute(raise_on_error=False)
        return answers

    def _take(self) -> list[tuple[Subscription, DueDelivery, Report]]:
        batch, size = [self._waiting.popleft()], 0
        while self._waiting and len(batch) < BATCH_MAX and size <= BATCH_BYTES_MAX:
            batch.append(self._waiting.popleft())
            size += len(batch[-1][1].payload.body)
        return batch

    def _fail_waiting(self) -> None:
        waiting, self._waiting = list(self._waiting), deque()
        self._report_all(waiting, self._failure)

    @staticmethod
    def _report_all(batch: list[tuple[Subscription, DueDelivery, Report]], failure: str) -> None:
        for _, delivery, report in batch:
            report(delivery, failure)


def _text(error: BaseException) -> str:
    """An error as a dead letter names it."""
    return f"Redis: {str(error) or type(error).__name__}"
