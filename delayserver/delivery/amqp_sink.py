"""Exchanges of AMQP 0-9-1 (RabbitMQ): a message for each, confirmed by the broker.

    send ──▶ a task for each message: Channel.basic_publish ──▶ broker
      report ◀── ack, nack, return, or the time-out

A message is persistent and mandatory: one that no queue gets is returned, and has failed. Its
`message_id` is the message id; its headers are those of every broker
(`delayserver.delivery.carried`), but for `CC` and `BCC`, which would have the broker route it
elsewhere, too.

One connection for all subscriptions with the same URL and the same time-out, and on it a channel
for each subscription: an exchange that is not there makes the broker close the channel that named
it, and only that one. Also, the client finds what was returned by its message id, and two
subscriptions may have the same message under way. Heartbeats find a broker that has gone.

Cost: 100 to 200 µs of the processor for a message: aiormq's, nearly all of it. Threads: belongs to
the event loop.
"""

import asyncio
import ssl
from collections.abc import Hashable
from contextlib import suppress
from typing import Any, Final
from urllib.parse import unquote

from aiormq import Channel, Connection
from aiormq.exceptions import AMQPError, DeliveryError, PublishError
from pamqp.commands import Basic
from yarl import URL

from delayserver.delivery.addresses import checked_address
from delayserver.delivery.carried import filled, headers
from delayserver.delivery.outlets import Outlet, OutletError, Report, target_of
from delayserver.delivery.webhook import CONTENT_TYPES
from delayserver.errors import InputError
from delayserver.records.message import Content, DueDelivery
from delayserver.records.subscriptions import AmqpTarget, Subscription
from delayserver.security.broker_urls import BrokerUrl, split_broker_url
from delayserver.security.targets import TargetPolicy

PORTS: Final = {"amqp": 5672, "amqps": 5671}
OPEN_TIMEOUT_S: Final = 5.0
CLOSE_S: Final = 1.0
HEARTBEAT_S: Final = 10
ROUTING_KEY_BYTES_MAX: Final = 255
_ROUTING: Final = ("cc", "bcc")
_PERSISTENT: Final = 2


def split_amqp_url(url: str) -> tuple[BrokerUrl, str]:
    """The parts of a URL, and the virtual host. Raises InputError at `/url`."""
    parts = split_broker_url(url, PORTS)
    if "/" in parts.path[1:]:
        raise InputError(
            "behind the host stands a virtual host; write a slash in it as %2F", "/url"
        )
    return parts, unquote(parts.path[1:]) or "/"


def properties(delivery: DueDelivery) -> Basic.Properties:
    """What a message says of itself."""
    carried: dict[str, Any] = {
        name: text for name, text in headers(delivery) if name.lower() not in _ROUTING
    }
    return Basic.Properties(
        content_type=CONTENT_TYPES[Content(delivery.payload.content)],
        delivery_mode=_PERSISTENT,
        message_id=delivery.message_id,
        headers=carried,
    )


class AmqpOpener:
    """Makes connections to RabbitMQ."""

    def __init__(self, policy: TargetPolicy, tls: ssl.SSLContext | None = None) -> None:
        """`tls`: what is trusted instead of the system's certificates."""
        self._policy = policy
        self._tls = tls

    def key(self, subscription: Subscription) -> Hashable:
        """See `OutletOpener`."""
        return target_of(subscription, AmqpTarget).url, subscription.timeout_ms

    async def open(self, subscription: Subscription) -> Outlet:
        """See `OutletOpener`."""
        parts, virtual_host = split_amqp_url(target_of(subscription, AmqpTarget).url)
        target = parts.target
        url = URL.build(
            scheme=target.scheme,
            user=parts.user or "guest",
            password=parts.password or "guest",
            host=await checked_address(self._policy, target),
            port=target.port,
            path=f"/{virtual_host}",
            query={"heartbeat": str(HEARTBEAT_S), "name": "delayserver"},
        )
        tls: dict[str, Any] = {}
        if target.scheme == "amqps":
            # The certificate is that of the name, not of the address that is connected to.
            tls = {
                "context": self._tls or ssl.create_default_context(),
                "server_hostname": target.host,
            }
        connection = Connection(url, **tls)
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await connection.connect()
        except Exception as error:  # The client's, the network's, and KeyError for what is no AMQP.
            await _close(connection)
            raise OutletError(_text(error)) from error
        return _AmqpOutlet(connection, subscription.timeout_ms)


class _AmqpOutlet:
    """An `Outlet`: one connection, a channel for each subscription."""

    def __init__(self, connection: Connection, timeout_ms: int) -> None:
        self._connection = connection
        self._timeout_s = timeout_ms / 1000
        self._channels: dict[int, asyncio.Task[Channel]] = {}
        """By subscription id."""
        self._under_way: set[asyncio.Task[None]] = set()

    @property
    def is_broken(self) -> bool:
        return self._connection.is_closed

    async def send(
        self, subscription: Subscription, deliveries: list[DueDelivery], report: Report
    ) -> None:
        loop = asyncio.get_running_loop()
        for delivery in deliveries:
            task = loop.create_task(self._publish(subscription, delivery, report))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def _publish(
        self, subscription: Subscription, delivery: DueDelivery, report: Report
    ) -> None:
        target, failure = target_of(subscription, AmqpTarget), None
        try:
            routing_key = filled(target.routing_key, delivery) or ""
            if len(routing_key.encode()) > ROUTING_KEY_BYTES_MAX:
                raise InputError(f"a routing key has at most {ROUTING_KEY_BYTES_MAX} bytes")
            async with asyncio.timeout(self._timeout_s):
                channel = await asyncio.shield(self._channel(subscription.id))
                await channel.basic_publish(
                    delivery.payload.body,
                    exchange=target.exchange,
                    routing_key=routing_key,
                    properties=properties(delivery),
                    mandatory=True,
                    wait=False,
                )
        except TimeoutError:
            failure = f"AMQP: no confirmation within {int(self._timeout_s * 1000)} ms"
        except InputError as error:
            failure = f"AMQP: {error.detail}"
        except asyncio.CancelledError:
            failure = "AMQP: the connection was closed"
        except Exception as error:
            # The client raises RuntimeError and others where a connection goes. A message that
            # nobody reports would stay on its way for good.
            failure = _text(error)
        report(delivery, failure)

    def _channel(self, subscription_id: int) -> "asyncio.Task[Channel]":
        opening = self._channels.get(subscription_id)
        if opening is None or (
            opening.done()
            and (opening.cancelled() or opening.exception() or opening.result().is_closed)
        ):
            opening = asyncio.get_running_loop().create_task(self._open_channel())
            self._channels[subscription_id] = opening
        return opening

    async def _open_channel(self) -> Channel:
        channel = await self._connection.channel(publisher_confirms=True)
        assert isinstance(channel, Channel)
        return channel

    async def close(self) -> None:
        for task in list(self._under_way):
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)
        for opening in self._channels.values():
            opening.cancel()
        await asyncio.gather(*self._channels.values(), return_exceptions=True)
        await _close(self._connection)


async def _close(connection: Connection) -> None:
    """A broker that hangs does not say goodbye."""
    with suppress(AMQPError, OSError):
        async with asyncio.timeout(CLOSE_S):
            await connection.close()


def _text(error: BaseException) -> str:
    """An error as a dead letter names it."""
    match error:
        case PublishError():
            return "AMQP: no queue gets it (it was returned by the exchange)"
        case DeliveryError():
            return "AMQP: the broker has refused it (nack)"
        case _:
            return f"AMQP: {str(error) or type(error).__name__}"
