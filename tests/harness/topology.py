"""A topology: the processes of a run, and everything that can be done to them.

    Topology     the interface that a run needs
    tests.crash.servers    one server, or one of N shards, alone or with brokers beside it
    tests.chaos.cluster    a cluster of nodes on brokers
    tests.soak.weather     one server whose clock and files obey the run

A topology writes down in the ledger what a strike excuses, and the time for which shards were away.
A process that ends by itself is a failure: ServerFailed ends the run.

Cost: its processes. Threads: belongs to the event loop; blocking calls go to threads.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delayserver.cli.demo.process import damage_in
from tests.harness.notes import Notes
from tests.harness.strikes import RoundPlan
from tests.harness.traffic import Doors

if TYPE_CHECKING:
    from rich.table import Table


class Topology:
    """The processes of a run."""

    host = "127.0.0.1"
    """The address of the clients, at which they receive webhooks."""

    def __init__(self, notes: Notes, client: Doors) -> None:
        self.notes = notes
        self.ledger = notes.ledger
        self.counts = notes.counts
        self.client = client

    @asynccontextmanager
    async def standing(self) -> AsyncIterator[None]:
        """Everything that the servers need; behind it no process is left."""
        yield

    async def start(self) -> None:
        """Start all servers, and wait until they serve. Raises ServerFailed."""
        raise NotImplementedError

    async def stop(self) -> None:
        """End all servers in order."""
        raise NotImplementedError

    async def strike(self, kind: StrEnum, plan: RoundPlan) -> None:
        """Do it, for as long as the plan says, and take it back. Raises ServerFailed."""
        raise NotImplementedError

    def data_dirs(self) -> list[Path]:
        """The data directories."""
        raise NotImplementedError

    async def before(self, plan: RoundPlan) -> None:
        """Let the load go on until the moment of the first strike."""
        await asyncio.sleep(plan.load_s)

    async def well(self) -> None:
        """Wait until all is as it was before the strikes. Raises ServerFailed."""

    async def settle(self, plan: RoundPlan) -> None:
        """Write down the round, when all is well."""

    async def all_due(self) -> None:
        """Have all messages fall due."""

    def watching(self) -> list[Coroutine[Any, Any, None]]:
        """Watch the processes while there is traffic; raises ServerFailed if one ends."""
        return []

    async def look(self) -> None:
        """Look at the processes when all was delivered and no client is left."""

    def table(self) -> "Table | None":
        """More figures, for people."""
        return None

    def unreadable(self) -> int:
        """How many messages at most the servers have said that they cannot read before their next
        start."""
        return 0

    async def between(self, plan: RoundPlan) -> None:
        """Wait for the moment of another strike, while the servers come back."""

    async def ended(self) -> None:
        """Look at all that was written, when no server runs any more."""

    async def check(self) -> None:
        """Check the files of servers that are down."""
        self.counts["checks of the files"] += 1
        for data_dir in self.data_dirs():
            for damage in await asyncio.to_thread(damage_in, data_dir):
                self.notes.fail(f"{data_dir.name}: {damage}")
