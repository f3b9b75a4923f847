"""What a sink says of a message that did not get through, for the tests of each kind of broker."""

import asyncio
from collections.abc import Awaitable, Callable

from delayserver.delivery.outlet import OutletOpener
from delayserver.delivery.outlets import OutletSink
from delayserver.delivery.sink import Failed, Result
from delayserver.records.message import DueDelivery
from delayserver.records.subscriptions import Subscription
from tests.unit.fakes import always, delivery

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def reason(opener: OutletOpener, subscription: Subscription) -> str:
    """Why one message was not delivered."""
    told: list[Result] = []

    def tell(some: list[DueDelivery], result: Result) -> None:
        told.append(result)

    sink = OutletSink(opener)
    await sink.deliver(subscription, [delivery(1)], always, tell)
    await sink.close()
    (result,) = told
    assert isinstance(result, Failed)
    return result.reason


async def reason_at(
    serve: Serve, opener: OutletOpener, subscribed: Callable[[str], Subscription]
) -> str:
    """The same with a server of our own; `subscribed`: to one at that address."""
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        return await reason(opener, subscribed(f"{host}:{port}"))


def saying(answer: bytes) -> Serve:
    """A server that says that, and no more."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()
        writer.close()

    return serve
