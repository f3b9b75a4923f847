"""The calls of a server whose threads and loop are moved by hand."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from delayserver.config import Settings
from delayserver.decisions.new_messages import NewMessage
from delayserver.records.message import Payload
from delayserver.records.message_id import MessageId
from delayserver.security.tokens import TokenFile, TokenTable
from delayserver.server.calls import Calls
from delayserver.server.gauges import Gauges
from tests.unit.fakes import subscription
from tests.waiting import turns
from tests.world.server import Observer, SimulatedClock, SimulatedServer
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.faults import Faults, FaultyFiles
from tests.world.storage.files import SimulatedFiles

DAY_MS = 86_400_000
T = TypeVar("T")


class Machine:
    """The calls of a server whose threads and loop are moved by hand."""

    def __init__(self) -> None:
        self.clock, self.faults = SimulatedClock(), Faults()
        files = FaultyFiles(SimulatedFiles(), self.faults)
        catalog, chance = MemoryCatalog(), random.Random(0)
        self.server = SimulatedServer(
            Settings(), files, catalog, self.clock, chance, Observer(), quick=lambda: False
        )
        gauges = Gauges(self.server.engine, self.server.settings, self.clock)
        tokens = TokenTable(TokenFile(files), None, self.clock.monotonic_s)
        self.calls = Calls(self.server, gauges, tokens)

    def wait(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The answer, with everything else moving meanwhile."""

        async def answer() -> T:
            asked = asyncio.ensure_future(ask())
            while not asked.done():
                await turns()
                self.server.rest()
                self.server.tick()
                self.clock.move(100)
            return await asked

        return asyncio.run(answer())

    def publish(self, *, due_in_ms: int = DAY_MS, key: str | None = None) -> MessageId:
        message = NewMessage("orders", self.clock() + due_in_ms, Payload(b"1", key=key))
        published = self.calls.publish_one(message, self.clock())
        return self.calls.message_id(published.message_id)

    def subscribe(self, number: int = 1, **more: Any) -> None:
        one = subscription(number, subject="*", created_ms=self.clock(), **more)
        self.wait(lambda: self.calls.subscriptions.put(one.name, lambda existing, known: one))
