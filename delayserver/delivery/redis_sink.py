"""Streams of Redis: an entry for each message (XADD), confirmed when Redis has answered.

    send ──▶ waiting messages ── one pipeline under way ──▶ Redis
      report ◀── the answer to each command ◀──────────┘

Its fields are the headers (`delayserver.delivery.carried`) and, last, `body`: the body as it was
published. A header of the message that is called `body` stands in the field `header-body`, one that
is called `header-body` in `header-header-body`, and so on: each header has a field of its own.

One connection for all subscriptions with the same URL and the same time-out. While a pipeline is
under way new messages wait, and go together in the next one, so the rate is a pipeline of up to
BATCH_MAX messages for each round trip. Both together are no more than WINDOW_BYTES, in turn between
subscriptions, so that over a slow line a short message waits for a second or two at most. A
pipeline that is not answered within the time-out breaks the connection: Redis answers in order, so
nothing behind it could be answered either. It is unknown whether its messages are there; they are
tried again, with the same id.

The protocol is RESP2: with RESP3 a server could tell the client to go on at another address, which
no allow list would have seen.

Cost: 40 µs of the event loop for one of many messages: redis-py's, nearly all of it. Threads:
belongs to the event loop.
"""

import asyncio
import re
import ssl
from collections import deque
from collections.abc import Hashable, Mapping
from contextlib import suppress
from typing import Any, Final

from redis.asyncio import Connection, ConnectionPool, Redis, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    BusyLoadingError,
    ClusterCrossSlotError,
    ClusterDownError,
    DataError,
    ExecAbortError,
    InvalidResponse,
    MasterDownError,
    MaxConnectionsError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from delayserver.delivery.addresses import checked_address
from delayserver.delivery.answers import (
    STORED,
    UNSENT,
    AnswerTable,
    BrokerAnswer,
    Certainty,
    Meaning,
    unknown,
)
from delayserver.delivery.carried import headers
from delayserver.delivery.outlet import Outlet, OutletError, Report, target_of
from delayserver.errors import InputError
from delayserver.records.message import DueDelivery
from delayserver.records.subscriptions import RedisTarget, Subscription
from delayserver.security.broker_urls import BrokerUrl, split_broker_url
from delayserver.security.targets import TargetPolicy

PORTS: Final = {"redis": 6379, "rediss": 6379}
OPEN_TIMEOUT_S: Final = 5.0
CLOSE_S: Final = 1.0
WINDOW_BYTES: Final = 4 * 1024 * 1024
BATCH_MAX: Final = 500
"""Messages in a pipeline, and …"""
BATCH_BYTES_MAX: Final = 1024 * 1024
"""… their bodies, unless one alone has more."""

ANSWERS: Final = AnswerTable(
    "Redis",
    {
        # Redis answers an error instead of carrying out the command.
        "WRONGTYPE": Meaning(Certainty.NOT_STORED),
        "MISCONF": Meaning(Certainty.NOT_STORED),
        "NOREPLICAS": Meaning(Certainty.NOT_STORED),
        "BUSY": Meaning(Certainty.NOT_STORED),
        OutOfMemoryError: Meaning(Certainty.NOT_STORED),
        ReadOnlyError: Meaning(Certainty.NOT_STORED),
        NoPermissionError: Meaning(Certainty.NOT_STORED),
        MovedError: Meaning(Certainty.NOT_STORED),
        AskError: Meaning(Certainty.NOT_STORED),
        TryAgainError: Meaning(Certainty.NOT_STORED),
        ClusterDownError: Meaning(Certainty.NOT_STORED),
        ClusterCrossSlotError: Meaning(Certainty.NOT_STORED),
        MasterDownError: Meaning(Certainty.NOT_STORED),
        ExecAbortError: Meaning(Certainty.NOT_STORED),
        ResponseError: Meaning(Certainty.NOT_STORED),
        # The client takes these for failed connections; Redis has refused the command.
        AuthenticationError: Meaning(Certainty.NOT_STORED),
        AuthenticationWrongNumberOfArgsError: Meaning(Certainty.NOT_STORED),
        BusyLoadingError: Meaning(Certainty.NOT_STORED),
        MaxConnectionsError: Meaning(Certainty.NOT_STORED),
        # The client could not write one of them down, so none was sent.
        DataError: Meaning(Certainty.NOT_STORED, is_shared=True),
        UnicodeError: Meaning(Certainty.NOT_STORED, is_shared=True),
        # The connection went. Redis ends one for the sake of a single command, such as a body
        # that is longer than its proto-max-bulk-len.
        RedisConnectionError: Meaning(Certainty.UNKNOWN, is_shared=True),
        ConnectionError: Meaning(Certainty.UNKNOWN, is_shared=True),
        OSError: Meaning(Certainty.UNKNOWN, is_shared=True),
        InvalidResponse: Meaning(Certainty.UNKNOWN, is_shared=True),
        RedisTimeoutError: Meaning(Certainty.UNKNOWN),
        TimeoutError: Meaning(Certainty.UNKNOWN),
    },
)
_ELSEWHERE: Final = (ReadOnlyError, MasterDownError, BusyLoadingError, AuthenticationError)
"""Another connection may find a Redis that takes messages, or lets us in."""

_OF_BODY: Final = re.compile(r"(?:header-)*body")


def split_redis_url(url: str) -> tuple[BrokerUrl, int]:
    """The parts of a URL, and the number of the database. Raises InputError at `/url`."""
    parts = split_broker_url(url, PORTS)
    number = parts.path[1:] or "0"
    if not (number.isascii() and number.isdigit() and len(number) <= 4):
        raise InputError("behind the host stands the number of a database: /0 or none", "/url")
    return parts, int(number)


def fields(delivery: DueDelivery) -> list[str | bytes]:
    """The fields of an entry and their values, in order and by turns."""
    found: list[str | bytes] = []
    for name, value in headers(delivery):
        found += (f"header-{name}" if _OF_BODY.fullmatch(name) else name, value)
    found += ("body", delivery.payload.body)
    return found


class _Abrupt:
    """A connection whose socket is closed when it is told so. Else that would wait until a Redis
    that reads nothing has read the rest."""

    _writer: asyncio.StreamWriter | None

    async def disconnect(self, *given: Any, **more: Any) -> None:
        writer = self._writer
        try:
            await super().disconnect(*given, **more)  # type: ignore[misc]  # the client's
        finally:
            if writer is not None:
                writer.transport.abort()


class _PlainConnection(_Abrupt, Connection):
    """Connects to an address."""


class _NamedConnection(_Abrupt, SSLConnection):
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
            connection_class=_NamedConnection if target.scheme == "rediss" else _PlainConnection,
            max_connections=1,
            **settings,
        )
        client = Redis(connection_pool=pool)
        try:
            # Without a command: an account may be allowed no other than XADD.
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await pool.release(await pool.get_connection())
        except BaseException as error:
            await _disconnect(pool)
            if not isinstance(error, Exception):
                raise
            # Errors of the client and the network, and others for a peer that does not speak Redis.
            raise OutletError(answer_of(error).reason) from error
        return _RedisOutlet(client, pool, subscription.timeout_ms)


class _RedisOutlet:
    """An `Outlet`: one connection, one pipeline at a time."""

    window_bytes = WINDOW_BYTES
    is_blocked = False
    connections, channels = 1, 0

    def __init__(self, client: Redis, pool: ConnectionPool, timeout_ms: int) -> None:
        self._client = client
        self._pool = pool
        self._timeout_ms = timeout_ms
        self._waiting: deque[_Waiting] = deque()
        self._task: asyncio.Task[None] | None = None
        self._failure: BrokerAnswer | None = None
        """Why nothing can be sent any more."""

    @property
    def is_broken(self) -> bool:
        return self._failure is not None

    def send(
        self, subscription: Subscription, deliveries: list[DueDelivery], report: Report
    ) -> None:
        self._waiting += [(subscription, delivery, report) for delivery in deliveries]
        if self._failure is not None:
            self._report_all(self._take_all(), UNSENT)
        elif self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work())

    def let_go(self, subscription_id: int) -> None:
        """Nothing is kept for one subscription."""

    async def close(self) -> None:
        self._failure = self._failure or unknown("Redis: the connection was closed")
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._report_all(self._take_all(), UNSENT)
        await _disconnect(self._pool)

    async def _work(self) -> None:
        """Pipelines, as long as something waits."""
        while self._waiting:
            batch = self._take()
            try:
                async with asyncio.timeout(self._timeout_ms / 1000):
                    answers = await self._execute(batch)
            except TimeoutError:
                failure = unknown(f"Redis: no answer within {self._timeout_ms} ms")
            except Exception as error:
                # Any error: messages without a report would stay on their way for good.
                failure = answer_of(error)
            except asyncio.CancelledError:
                assert self._failure is not None
                self._report_all(batch, self._failure)
                raise
            else:
                self._on_answers(batch, answers)
                if self._failure is None:
                    continue
                failure = self._failure
                batch = []
            self._failure = failure
            self._report_all(batch, failure if len(batch) > 1 else failure.alone())
            self._report_all(self._take_all(), UNSENT)
            await _disconnect(self._pool)
            return
        self._task = None

    def _on_answers(self, batch: "list[_Waiting]", answers: list[Any]) -> None:
        for (_, delivery, report), answer in zip(batch, answers, strict=True):
            if not isinstance(answer, Exception):
                # The id of the entry; nothing else is known to be an answer to XADD.
                is_id = isinstance(answer, bytes | str) and bool(answer)
                odd = unknown(f"Redis: an answer that is no id: {str(answer)[:100]}")
                report(delivery, STORED if is_id else odd)
                continue
            found = answer_of(answer)
            if isinstance(answer, _ELSEWHERE):
                self._failure = found
            report(delivery, found.alone())

    async def _execute(self, batch: "list[_Waiting]") -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for subscription, delivery, _ in batch:
            target = target_of(subscription, RedisTarget)
            most = ("MAXLEN", "~", target.max_length) if target.max_length else ()
            pipeline.execute_command("XADD", target.stream, *most, "*", *fields(delivery))
        answers: list[Any] = await pipeline.execute(raise_on_error=False)
        return answers

    def _take(self) -> "list[_Waiting]":
        """The messages of the next pipeline, in the order in which they came."""
        batch: list[_Waiting] = []
        size = 0
        while self._waiting and len(batch) < BATCH_MAX:
            size += len(self._waiting[0][1].payload.body)
            if batch and size > BATCH_BYTES_MAX:
                break
            batch.append(self._waiting.popleft())
        return batch

    def _take_all(self) -> "list[_Waiting]":
        waiting, self._waiting = list(self._waiting), deque()
        return waiting

    @staticmethod
    def _report_all(batch: "list[_Waiting]", answer: BrokerAnswer) -> None:
        for _, delivery, report in batch:
            report(delivery, answer)


_Waiting = tuple[Subscription, DueDelivery, Report]


def answer_of(error: BaseException) -> BrokerAnswer:
    """The answer about a message that an error of the client stands for. Where the client has no
    class for an error that Redis has answered, the first word of the error counts."""
    first = str(error).split(" ", 1)[0]
    is_plain = type(error) is ResponseError
    return ANSWERS.of_error(error, (first,) if is_plain else ())


async def _disconnect(pool: ConnectionPool) -> None:
    """A Redis that hangs does not say goodbye."""
    with suppress(RedisError, OSError):
        async with asyncio.timeout(CLOSE_S):
            await pool.disconnect()
