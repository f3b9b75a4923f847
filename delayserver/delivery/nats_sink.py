"""Streams of NATS JetStream: a message for each, confirmed when the stream has stored it.

    send ──▶ publish_async ──▶ NATS
      report ◀── the acknowledgement of the stream, or the time-out

`Nats-Msg-Id` is the message id, so a message that comes again within the stream's window of
duplicates is there once. The other headers are those of every broker
(`delayserver.delivery.carried`), but `delay-key` is percent-encoded where it is not visible ASCII,
as in a webhook: a line break in a header would end it. Headers of a message that begin with `nats-`
are orders to the server (`Nats-Rollup` empties a stream) and do not leave; nor does anything go to
a subject that begins with `$` or `_INBOX`, where NATS itself listens.

One connection for all subscriptions with the same URL and the same time-out; acknowledgements come
in any order, so one stream that hangs holds up no other. The client does not connect again by
itself: the servers that it hears of have passed no allow list. Pings find a server that has gone.

Cost: 45 µs of the event loop for a message: nats-py's, nearly all of it. Threads: belongs to the
event loop.
"""

import asyncio
import re
import ssl
from collections.abc import Hashable
from contextlib import suppress
from functools import partial
from typing import Any, Final
from urllib.parse import quote

from nats.aio.client import Client
from nats.errors import Error
from nats.js import JetStreamContext

from delayserver.delivery.addresses import checked_address
from delayserver.delivery.carried import filled, headers
from delayserver.delivery.outlets import Outlet, OutletError, Report, target_of
from delayserver.delivery.webhook import KEY_SAFE
from delayserver.errors import InputError
from delayserver.records.message import DueDelivery
from delayserver.records.subscriptions import NatsTarget, Subscription
from delayserver.security.broker_urls import BrokerUrl, split_broker_url
from delayserver.security.targets import TargetPolicy

PORTS: Final = {"nats": 4222, "tls": 4222}
OPEN_TIMEOUT_S: Final = 5.0
CLOSE_S: Final = 1.0
PING_S: Final = 10
WATCH_S: Final = 0.2
"""How long it may take until a lost connection is seen."""
IN_FLIGHT_MAX: Final = 20_000
"""Messages of a connection; who has more waits."""
_SUBJECT: Final = re.compile(r"[!-)+\-/-=?-~]+(?:\.[!-)+\-/-=?-~]+)*")
_OWN: Final = ("$", "_INBOX")


def split_nats_url(url: str) -> BrokerUrl:
    """The parts of a URL. Raises InputError at `/url`."""
    parts = split_broker_url(url, PORTS)
    if parts.path not in ("", "/"):
        raise InputError("behind the host of NATS stands nothing", "/url")
    if parts.user and not parts.password:
        # Other clients take such a name for a token, which would be shown in answers.
        raise InputError("write user:password@, or :token@ for a token", "/url")
    return parts


def check_subject(subject: str) -> None:
    """Whether messages may go there. Raises InputError at `/nats_subject`."""
    if not _SUBJECT.fullmatch(subject) or subject.startswith(_OWN):
        raise InputError(
            f"{subject!r} is not a subject of NATS to publish to: words of visible ASCII with dots "
            "between, without * and >, not beginning with $ or _INBOX",
            "/nats_subject",
        )


def nats_headers(delivery: DueDelivery) -> dict[str, str]:
    """All headers of a message."""
    carried = dict(headers(delivery))
    if "delay-key" in carried:
        carried["delay-key"] = quote(carried["delay-key"], KEY_SAFE)
    kept = {name: text for name, text in carried.items() if not name.lower().startswith("nats-")}
    return {"Nats-Msg-Id": delivery.message_id, **kept}


class NatsOpener:
    """Makes connections to NATS."""

    def __init__(self, policy: TargetPolicy, tls: ssl.SSLContext | None = None) -> None:
        """`tls`: what is trusted instead of the system's certificates."""
        self._policy = policy
        self._tls = tls

    def key(self, subscription: Subscription) -> Hashable:
        """See `OutletOpener`."""
        return target_of(subscription, NatsTarget).url, subscription.timeout_ms

    async def open(self, subscription: Subscription) -> Outlet:
        """See `OutletOpener`."""
        parts = split_nats_url(target_of(subscription, NatsTarget).url)
        target = parts.target
        address = await checked_address(self._policy, target)
        client = Client()
        errors: list[Exception] = []

        async def on_error(error: Exception) -> None:
            errors[:] = [error]

        def password() -> str:
            # Asked when the server has said whether it wants TLS. The client goes on without where
            # the server does not, and would send the password to anybody in between.
            if target.scheme == "tls" and not client._server_info.get("tls_required"):
                raise Error("nats: the server offers no TLS")
            return parts.password

        tls: dict[str, Any] = {}
        if target.scheme == "tls":
            tls = {"tls": self._tls or ssl.create_default_context(), "tls_hostname": target.host}
        host = f"[{address}]" if ":" in address else address
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await client.connect(
                    f"nats://{host}:{target.port}",
                    name="delayserver",
                    user=parts.user or None,
                    password=password if parts.user or target.scheme == "tls" else None,
                    token=parts.password if parts.password and not parts.user else None,
                    allow_reconnect=False,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0,
                    ping_interval=PING_S,
                    max_outstanding_pings=1,
                    error_cb=on_error,
                    **tls,
                )
        except Exception as error:  # Its own, the network's, and ValueError for what is no NATS.
            await _close(client)
            raise OutletError(_refusal(errors[0] if errors else error, client)) from error
        return _NatsOutlet(client, subscription.timeout_ms)


class _NatsOutlet:
    """An `Outlet`: one connection."""

    def __init__(self, client: Client, timeout_ms: int) -> None:
        self._client = client
        self._stream: JetStreamContext = client.jetstream(
            timeout=timeout_ms / 1000, publish_async_max_pending=IN_FLIGHT_MAX
        )
        self._timeout_ms = timeout_ms
        self._under_way: set[asyncio.Future[Any]] = set()
        self._watching: asyncio.TimerHandle | None = None

    @property
    def is_broken(self) -> bool:
        return not self._client.is_connected

    async def send(
        self, subscription: Subscription, deliveries: list[DueDelivery], report: Report
    ) -> None:
        sent: list[asyncio.Future[Any]] = []
        # The clock of all that is sent here runs from the first one on.
        timer = asyncio.get_running_loop().call_later(self._timeout_ms / 1000, self._time_out, sent)
        for delivery in deliveries:
            failure = None
            try:
                acknowledged = await self._publish(target_of(subscription, NatsTarget), delivery)
            except InputError as error:
                failure = f"NATS: {error.detail}"
            except Exception as error:
                # Its own, the network's, and AttributeError where it closes at this moment.
                failure = _text(error)
            if failure is not None:
                report(delivery, failure)
                continue
            sent.append(acknowledged)
            self._under_way.add(acknowledged)
            acknowledged.add_done_callback(partial(self._on_done, delivery, report))
        if not sent:
            timer.cancel()
        elif self._watching is None:
            self._watch()

    async def _publish(self, target: NatsTarget, delivery: DueDelivery) -> "asyncio.Future[Any]":
        """Raises InputError where it would be no message for NATS; what is refused behind its
        publish would take one of the client's places for good."""
        subject = filled(target.subject, delivery) or ""
        check_subject(subject)
        body, carried = delivery.payload.body, nats_headers(delivery)
        size = len(body) + sum(len(name) + 4 * len(text) + 4 for name, text in carried.items())
        if size > self._client.max_payload:
            raise InputError(f"it is longer than the server takes ({self._client.max_payload})")
        return await self._stream.publish_async(subject, body, headers=carried)

    def _on_done(
        self, delivery: DueDelivery, report: Report, acknowledged: "asyncio.Future[Any]"
    ) -> None:
        self._under_way.discard(acknowledged)
        if acknowledged.cancelled():
            waited = f"no acknowledgement within {self._timeout_ms} ms"
            report(delivery, f"NATS: {'the connection was lost' if self.is_broken else waited}")
        else:
            error = acknowledged.exception()
            report(delivery, None if error is None else _text(error))

    def _watch(self) -> None:
        """The client does not always say that it has lost its connection: not where it failed to
        write what was left."""
        self._watching = None
        if self.is_broken:
            self._time_out(list(self._under_way))
        elif self._under_way:
            self._watching = asyncio.get_running_loop().call_later(WATCH_S, self._watch)

    @staticmethod
    def _time_out(sent: "list[asyncio.Future[Any]]") -> None:
        for acknowledged in sent:
            acknowledged.cancel()

    async def close(self) -> None:
        await _close(self._client)
        self._time_out(list(self._under_way))
        if self._watching is not None:
            self._watching.cancel()


async def _close(client: Client) -> None:
    """With an error where the broker has gone, and for ever where it was refused while TLS began;
    closed all the same."""
    with suppress(Error, OSError):
        async with asyncio.timeout(CLOSE_S):
            await client.close()


def _refusal(error: Exception, client: Client) -> str:
    """Why there is no connection. The server closes it behind what it says to a wrong password, and
    what the client has sent meanwhile makes that a reset, which may overtake its words."""
    if client._server_info and isinstance(error, ConnectionResetError | BrokenPipeError):
        return f"{_text(error)} when it was told who comes: a wrong user, password or token?"
    return _text(error)


def _text(error: BaseException) -> str:
    """An error as a dead letter names it."""
    text = str(error).removeprefix("nats: ") or type(error).__name__
    return f"NATS: {text}"
