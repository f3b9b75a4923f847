"""Exchanges of AMQP 0-9-1 (RabbitMQ): a message for each, confirmed by the broker.

    send ──▶ a task for each message: Channel.basic_publish ──▶ broker
      report ◀── ack, nack, return, the end of the channel, or the time-out

A message is persistent and mandatory: one that no queue gets is returned, and has failed. Its
`message_id` is the message id; its headers are those of every broker
(`delayserver.delivery.carried`), but for `CC` and `BCC`, which would have the broker route it
elsewhere, too.

Subscriptions with the same URL and the same time-out share connections, and each has a channel of
its own: an exchange that is not there makes the broker close the channel that named it, and only
that one. Also, the client finds a returned message by its message id, and two subscriptions may
have the same message under way. A channel is closed when its subscription is deleted or goes
elsewhere, or when another one needs its place. A connection has as many places as the broker allows
(`channel_max`); where all are busy, another connection is opened, up to CONNECTIONS_MAX.

A broker that lacks memory or disk stops reading and says so (`connection.blocked`). Messages
that were sent before then lie in its socket and will be stored. So their time stands still, and
nothing else is sent until the broker goes on. A repetition would be stored as well.

Heartbeats find a broker that has gone.

Cost: 100 to 200 µs of the processor for a message: aiormq's, nearly all of it. Threads: belongs to
the event loop.
"""

import asyncio
import ssl
import struct
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote

from aiormq import Channel, Connection
from aiormq.connection import TCPTransportFactory, TLSTransportFactory, TransportFactory
from aiormq.exceptions import (
    AMQPChannelError,
    AMQPConnectionError,
    ChannelAccessRefused,
    ChannelClosed,
    ChannelInvalidStateError,
    ChannelLockedResource,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    DeliveryError,
    MethodNotImplemented,
    ProtocolSyntaxError,
    PublishError,
)
from pamqp.commands import Basic
from pamqp.exceptions import PAMQPException
from yarl import URL

from delayserver.delivery.addresses import checked_address
from delayserver.delivery.answers import (
    STORED,
    AnswerTable,
    Certainty,
    Meaning,
    not_stored,
    unknown,
)
from delayserver.delivery.carried import filled, headers
from delayserver.delivery.complaints import quiet
from delayserver.delivery.outlet import Outlet, OutletError, Report, target_of
from delayserver.delivery.webhook import CONTENT_TYPES
from delayserver.errors import InputError
from delayserver.records.message import DueDelivery
from delayserver.records.subscriptions import AmqpTarget, Subscription
from delayserver.security.broker_urls import BrokerUrl, split_broker_url
from delayserver.security.targets import TargetPolicy

PORTS: Final = {"amqp": 5672, "amqps": 5671}
OPEN_TIMEOUT_S: Final = 5.0
CLOSE_S: Final = 1.0
HEARTBEAT_S: Final = 10
WATCH_S: Final = 0.2
"""How long it may take until a blocked connection, or one that goes on, is seen."""
WINDOW_BYTES: Final = 8 * 1024 * 1024
CONNECTIONS_MAX: Final = 16
"""The most connections of one outlet."""
CHANNELS_MAX: Final = 2047
"""The most channels of a connection whose broker names no limit."""
CHANNEL_IDLE_S: Final = 1.0
"""A channel that was idle for so long makes room for another subscription's."""
ROUTING_KEY_BYTES_MAX: Final = 255
HEADER_NAME_BYTES_MAX: Final = 128
"""The longest name of a field in a table of AMQP; the client cuts longer ones off."""
_ROUTING: Final = ("cc", "bcc")
_PERSISTENT: Final = 2


_LOST = Meaning(Certainty.UNKNOWN, is_shared=True)
ANSWERS: Final = AnswerTable(
    "AMQP",
    {
        PublishError: Meaning(
            Certainty.NOT_STORED, text="no queue gets it (it was returned by the exchange)"
        ),
        # If the exchange feeds several queues, some of them may have the message.
        DeliveryError: Meaning(Certainty.UNKNOWN, text="the broker has refused it (nack)"),
        # The broker closes a channel because of one message. The others that were under way there
        # are not confirmed.
        ChannelPreconditionFailed: Meaning(Certainty.NOT_STORED, is_shared=True),
        ChannelAccessRefused: Meaning(Certainty.NOT_STORED, is_shared=True),
        ChannelClosed: Meaning(Certainty.UNKNOWN, is_shared=True),
        ChannelInvalidStateError: Meaning(Certainty.UNKNOWN, is_shared=True),
        # These two are about the exchange, which is the same for all on a channel.
        ChannelNotFoundEntity: Meaning(Certainty.NOT_STORED),
        ChannelLockedResource: Meaning(Certainty.NOT_STORED),
        # The client could not write it down.
        MethodNotImplemented: Meaning(Certainty.NOT_STORED),
        TypeError: Meaning(Certainty.NOT_STORED),
        ValueError: Meaning(Certainty.NOT_STORED),
        struct.error: Meaning(Certainty.NOT_STORED),
        # The connection went, or is not to be understood any more.
        AMQPConnectionError: _LOST,
        ProtocolSyntaxError: _LOST,
        PAMQPException: _LOST,
        RuntimeError: _LOST,
        OSError: _LOST,
        asyncio.CancelledError: Meaning(
            Certainty.UNKNOWN, is_shared=True, text="the connection was closed"
        ),
        TimeoutError: Meaning(Certainty.UNKNOWN),
    },
)


def split_amqp_url(url: str) -> tuple[BrokerUrl, str]:
    """The parts of a URL, and the virtual host. Raises InputError at `/url`."""
    parts = split_broker_url(url, PORTS)
    if "/" in parts.path[1:]:
        raise InputError(
            "behind the host stands a virtual host; write a slash in it as %2F", "/url"
        )
    return parts, unquote(parts.path[1:]) or "/"


def properties(delivery: DueDelivery) -> Basic.Properties:
    """The properties and headers of a message. Raises InputError where AMQP cannot carry a
    header."""
    carried: dict[str, Any] = {
        name: text for name, text in headers(delivery) if name.lower() not in _ROUTING
    }
    for name in carried:
        if len(name) > HEADER_NAME_BYTES_MAX:
            raise InputError(
                f"the name of the header {name[:40]}… has more than {HEADER_NAME_BYTES_MAX} bytes, "
                "the most that AMQP carries"
            )
    return Basic.Properties(
        content_type=CONTENT_TYPES[delivery.payload.content],
        delivery_mode=_PERSISTENT,
        message_id=delivery.message_id,
        headers=carried,
    )


class _Transport(TransportFactory):
    """Connects like the client itself, and keeps the stream."""

    def __init__(self, scheme: str) -> None:
        self._client = TLSTransportFactory() if scheme == "amqps" else TCPTransportFactory()
        self.writer: asyncio.StreamWriter | None = None

    async def create(
        self, url: URL, **more: Any
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, self.writer = await self._client.create(url, **more)
        return reader, self.writer


class _Connection(Connection):
    """A connection that can be dropped. The client makes its closer wait until a broker that reads
    nothing has read the rest, and takes no cancellation meanwhile."""

    def __init__(self, url: URL, **more: Any) -> None:
        self._own_transport = _Transport(url.scheme)
        super().__init__(url, transport_factory=self._own_transport, **more)

    def abort(self) -> None:
        """Close the socket, whatever is left to be sent."""
        if self._own_transport.writer is not None:
            self._own_transport.writer.transport.abort()


class AmqpOpener:
    """Makes connections to RabbitMQ."""

    def __init__(self, policy: TargetPolicy, tls: ssl.SSLContext | None = None) -> None:
        """`tls`: the certificates to trust instead of the system's."""
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

        async def connect() -> _Connection:
            connection = _Connection(url, **tls)
            try:
                async with asyncio.timeout(OPEN_TIMEOUT_S):
                    await connection.connect()
                    await connection.ready()
            except BaseException as error:
                await _close(connection)
                if not isinstance(error, Exception):
                    raise
                # Errors of the client and of the network, and KeyError for a peer that does not
                # speak AMQP.
                raise OutletError(ANSWERS.of_error(error).reason) from error
            return connection

        quiet("aiormq.connection", "aiormq.channel", "pamqp.encode")
        return _AmqpOutlet(connect, await connect(), subscription.timeout_ms)


@dataclass(eq=False, slots=True)
class _Link:
    """A connection, and the numbers of its channels."""

    connection: _Connection
    used: set[int] = field(default_factory=set)

    def free_number(self) -> int | None:
        """The lowest number that no channel has, there or at the client; None: all are taken."""
        most = self.connection.connection_tune.channel_max or CHANNELS_MAX
        taken = self.used | self.connection.channels.keys()
        return next((one for one in range(1, most + 1) if one not in taken), None)

    @property
    def is_open(self) -> bool:
        return not self.connection.is_closed


@dataclass(eq=False, slots=True)
class _ChannelUse:
    """The channel of one subscription."""

    link: _Link
    number: int
    opening: asyncio.Task[Channel]
    under_way: int = 0
    idle_since_s: float = 0.0
    is_leaving: bool = False
    """Its subscription is gone: it is closed once the messages under way have ended."""

    @property
    def is_gone(self) -> bool:
        opening = self.opening
        return opening.done() and (
            opening.cancelled() or opening.exception() is not None or opening.result().is_closed
        )


class _AmqpOutlet:
    """An `Outlet`: some connections, a channel for each subscription."""

    window_bytes = WINDOW_BYTES

    def __init__(
        self, connect: Callable[[], Awaitable[_Connection]], first: _Connection, timeout_ms: int
    ) -> None:
        self._connect = connect
        self._timeout_s = timeout_ms / 1000
        self._links = [_Link(first)]
        self._linking = asyncio.Lock()
        self._places: dict[int, _ChannelUse] = {}
        """By subscription id."""
        self._under_way: set[asyncio.Task[None]] = set()
        self._deadlines: set[asyncio.Timeout] = set()
        self._watching: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def is_broken(self) -> bool:
        return not any(link.is_open for link in self._links)

    @property
    def is_blocked(self) -> bool:
        return any(_is_blocked(link.connection) for link in self._links if link.is_open)

    @property
    def connections(self) -> int:
        return sum(link.is_open for link in self._links)

    @property
    def channels(self) -> int:
        return sum(not place.is_gone for place in self._places.values())

    def send(
        self, subscription: Subscription, deliveries: list[DueDelivery], report: Report
    ) -> None:
        loop = asyncio.get_running_loop()
        for delivery in deliveries:
            task = loop.create_task(self._publish(subscription, delivery, report))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)
        if self._watching is None:
            self._watch()

    async def _publish(
        self, subscription: Subscription, delivery: DueDelivery, report: Report
    ) -> None:
        target, answer = target_of(subscription, AmqpTarget), STORED
        place: _ChannelUse | None = None
        is_alone = False
        try:
            routing_key = filled(target.routing_key, delivery) or ""
            if len(routing_key.encode()) > ROUTING_KEY_BYTES_MAX:
                raise InputError(f"a routing key has at most {ROUTING_KEY_BYTES_MAX} bytes")
            about = properties(delivery)
            async with asyncio.timeout(self._timeout_s) as deadline:
                self._deadlines.add(deadline)
                try:
                    place = await self._place(subscription.id)
                    place.under_way += 1
                    channel = await asyncio.shield(place.opening)
                    await channel.basic_publish(
                        delivery.payload.body,
                        exchange=target.exchange,
                        routing_key=routing_key,
                        properties=about,
                        mandatory=True,
                        wait=False,
                    )
                finally:
                    self._deadlines.discard(deadline)
        except TimeoutError:
            answer = unknown(f"AMQP: no confirmation within {int(self._timeout_s * 1000)} ms")
        except InputError as error:
            answer = not_stored(f"AMQP: {error.detail}")
        except OutletError as error:
            answer = not_stored(str(error))
        except (Exception, asyncio.CancelledError) as error:
            # The client raises RuntimeError and others where a connection goes. A message without a
            # report would stay on its way for good.
            answer = ANSWERS.of_error(error)
            is_of_channel = isinstance(error, AMQPChannelError)
            # Those that have failed with it are still counted: they are told in the same turn.
            is_alone = (place is None or place.under_way == 1) and (
                is_of_channel or len(self._under_way) == 1
            )
        if place is not None:
            asyncio.get_running_loop().call_soon(self._free, subscription.id, place)
        report(delivery, answer.alone() if is_alone else answer)

    def _free(self, subscription_id: int, place: _ChannelUse) -> None:
        place.under_way -= 1
        place.idle_since_s = asyncio.get_running_loop().time()
        if place.is_leaving and not place.under_way and self._places.get(subscription_id) is place:
            self._give_up(subscription_id)

    # ---- channels ----------------------------------------------------------------------------

    async def _place(self, subscription_id: int) -> _ChannelUse:
        """The channel of a subscription. Raises OutletError."""
        found = self._places.get(subscription_id)
        if found is not None and not found.is_gone and found.link.is_open:
            found.is_leaving = False
            return found
        if found is not None:
            self._give_up(subscription_id)
        link = self._free_link()
        if link is None:
            async with self._linking:
                link = self._free_link() or await self._make_room()
        # Another message of the same subscription may have been quicker.
        found = self._places.get(subscription_id)
        if found is None:
            number = link.free_number() or 1
            link.used.add(number)
            opening = asyncio.get_running_loop().create_task(_open_channel(link, number))
            found = self._places[subscription_id] = _ChannelUse(link, number, opening)
        return found

    def _free_link(self) -> _Link | None:
        """A connection that another channel may be opened on."""
        self._links = [link for link in self._links if link.is_open]
        return next((link for link in self._links if link.free_number() is not None), None)

    async def _make_room(self) -> _Link:
        """Close the channel that has been idle longest, else open a connection. Raises
        OutletError."""
        now_s = asyncio.get_running_loop().time()
        idle = [
            (place.idle_since_s, one)
            for one, place in self._places.items()
            if not place.under_way and now_s - place.idle_since_s >= CHANNEL_IDLE_S
        ]
        if idle:
            # Beside this task, so that a cancelled task ends at once.
            await asyncio.wait({self._give_up(min(idle)[1])})
            if (link := self._free_link()) is not None:
                return link
        if len(self._links) >= CONNECTIONS_MAX:
            raise OutletError(
                f"AMQP: all channels of {CONNECTIONS_MAX} connections are in use (channel_max)"
            )
        link = _Link(await self._connect())
        self._links.append(link)
        return link

    def _give_up(self, subscription_id: int) -> asyncio.Task[None]:
        """Close the channel of a subscription, in a task; its messages under way fail."""
        place = self._places.pop(subscription_id)
        task = asyncio.get_running_loop().create_task(_close_place(place))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    def let_go(self, subscription_id: int) -> None:
        place = self._places.get(subscription_id)
        if place is None:
            return
        if place.under_way:
            place.is_leaving = True
        else:
            self._give_up(subscription_id)

    # ---- time --------------------------------------------------------------------------------

    def _watch(self) -> None:
        """While the broker is blocked, the messages under way lie in its socket, and their time
        stands still."""
        self._watching = None
        loop = asyncio.get_running_loop()
        if self.is_blocked:
            until_s = loop.time() + self._timeout_s
            for deadline in self._deadlines:
                if not deadline.expired():
                    deadline.reschedule(until_s)
        if self._under_way:
            wait_s = min(WATCH_S, self._timeout_s / 4)
            self._watching = loop.call_later(wait_s, self._watch)

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        for task in list(self._under_way):
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)
        for place in self._places.values():
            place.opening.cancel()
        openings = [place.opening for place in self._places.values()]
        await asyncio.gather(*openings, return_exceptions=True)
        await asyncio.gather(*(_close(link.connection) for link in self._links))
        await asyncio.gather(*self._closing, return_exceptions=True)


async def _open_channel(link: _Link, number: int) -> Channel:
    channel = await link.connection.channel(channel_number=number, publisher_confirms=True)
    assert isinstance(channel, Channel)
    return channel


async def _close_place(place: _ChannelUse) -> None:
    """A broker that hangs does not say goodbye. The number stays taken at the client until it
    has."""
    try:
        async with asyncio.timeout(CLOSE_S):
            if not place.opening.done():
                place.opening.cancel()
            channel = await place.opening
            if not channel.is_closed:
                await channel.close()
    except (Exception, asyncio.CancelledError):
        # Whatever kept it from being closed: the connection is looked at before the next use.
        pass
    finally:
        place.link.used.discard(place.number)


def _is_blocked(connection: Connection) -> bool:
    """Whether the broker has said that it takes nothing now. `ready` waits as long as it does."""
    waiting = connection.ready()
    try:
        waiting.send(None)
    except StopIteration:
        return False
    waiting.close()
    return True


async def _close(connection: "_Connection") -> None:
    """A broker that hangs does not say goodbye."""
    closing = asyncio.ensure_future(connection.close())
    try:
        await asyncio.wait({closing}, timeout=CLOSE_S)
    finally:
        connection.abort()
    await asyncio.wait({closing}, timeout=CLOSE_S)
    if closing.done() and not closing.cancelled():
        closing.exception()  # The error of a channel that is gone does not matter.
