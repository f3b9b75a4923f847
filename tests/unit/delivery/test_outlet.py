"""A broker whose client is not installed."""

import asyncio

from delayserver.delivery.outlet import NoClient
from delayserver.delivery.outlets import OutletSink
from delayserver.delivery.sink import Failed, Result
from tests.unit.delivery.outlet_machine import to
from tests.unit.fakes import always, delivery


def test_a_client_that_is_not_installed_is_the_reason() -> None:
    told: list[Result] = []

    async def main() -> None:
        sink = OutletSink(NoClient("redis"))
        await sink.deliver(to("a"), [delivery(1)], always, lambda some, result: told.append(result))
        await sink.close()

    asyncio.run(main())
    (result,) = told
    assert isinstance(result, Failed) and "delayserver[redis]" in result.reason
