"""Backups that are made under load, and what is in them: compared with what the ledger had.

Before a backup is asked for, everything that was answered by then is written down (`Facts`). At the
end each complete backup is restored, and a server that delivers nothing is asked for every message.
The same is done for moments between them, with the log that is shipped behind (`until_ms`).

Cost: half a second a backup and shard, and a look-up a message. Threads: a server of its own, on a
loop in the caller's thread.
"""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import uvloop

from delayserver.backup.restoring import restore
from delayserver.cli.demo.ledger import Order
from delayserver.cli.demo.shop import call
from delayserver.cli.session import path
from delayserver.client.errors import UnansweredError
from delayserver.clocks import wall_clock_ms
from delayserver.config import Settings
from delayserver.errors import NotFoundError
from delayserver.queries.look_up import Queries
from delayserver.records.message import State
from delayserver.records.message_id import read_id
from delayserver.server.server import Server, of_this_machine
from storage.errors import StorageError
from storage.files import OsFiles
from storage.shards import read_shard_count, shard_directory
from tests.harness.notes import Notes
from tests.harness.traffic import Doors

SHARE = 0.5
"""The share of the rounds in which a backup is begun with the load."""
WAIT_SHARE = 0.6
"""The share of these in which the load goes on until it is complete."""
WAIT_S = 30.0
POLL_S = 0.02
MOMENT_SHARE = 0.7
"""The share of the rounds behind the first backup that note a moment, which is to be restored."""


@dataclass(frozen=True, slots=True)
class Fact:
    """What was answered of a message before a backup was asked for."""

    message_ids: frozenset[str]
    is_cancelled: bool
    is_acknowledged: bool
    """By all who are to get it: it cannot be delivered again."""
    may_be_over: bool
    """It was received by somebody, or a cancel was sent: it may be settled, and purged."""


class Facts:
    """What the ledger had at a moment."""

    def __init__(
        self, name: str, orders: list[Order], offset_ms: int, until_ms: int | None = None
    ) -> None:
        """`until_ms`: the moment, by the server's clock, if it is none of a backup."""
        self.name = name
        self.until_ms = until_ms
        self.offset_ms = offset_ms
        """Of the server's clock."""
        self._orders = orders
        self._known = [_fact(order) for order in orders if order.answered]
        self._count: int | None = None

    def completed(self) -> None:
        """It is complete now: what is made from here on is not in it."""
        self._count = len(self._orders)

    def broken_in(self, backup_dir: Path, directory: Path) -> list[str]:
        """Restore it into a new directory, and say what is not as it was."""
        assert self._count is not None
        now_ms = wall_clock_ms() + self.offset_ms
        backup = backup_dir / self.name if self.until_ms is None else backup_dir
        try:
            restored = restore(backup, directory, now_ms=now_ms, until_ms=self.until_ms)
        except StorageError as error:
            return [f"backup {self.name}: {error}"]
        problems = [f"backup {self.name}: {one.problem}" for one in restored if one.problem]
        later = {
            message_id for order in self._orders[self._count :] for message_id in order.message_ids
        }
        ids = later.union(*(fact.message_ids for fact in self._known))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            states = runner.run(states_in(directory, self.offset_ms, ids))
        problems += [f"backup {self.name}: {one}" for one in self._broken(states, later)]
        return problems

    def _broken(self, states: dict[str, State | None], later: set[str]) -> Iterator[str]:
        for fact in self._known:
            # A message that was asked for again may have two ids, if the first answer was lost.
            found = {states[one] for one in fact.message_ids}
            if found == {None} and not fact.may_be_over:
                yield f"{sorted(fact.message_ids)} was answered before it, and is not in it"
            if fact.is_cancelled and found - {None, State.CANCELLED}:
                yield f"{sorted(fact.message_ids)} was cancelled before it, and is {found}"
            # Of what is delivered, a moment has as much as the backup before it.
            if self.until_ms is None and fact.is_acknowledged and State.SCHEDULED in found:
                yield f"{sorted(fact.message_ids)} was settled before it, and is pending"
        for message_id in later:
            if states[message_id] is not None:
                yield f"{message_id} came behind it, and is in it"


class Backups:
    """The backups and the moments of a run."""

    def __init__(self, notes: Notes, client: Doors, seed: int, *, may_fail: bool) -> None:
        """`may_fail`: a part of the server may be away, and the rest goes on."""
        self._notes = notes
        self._client = client
        self._may_fail = may_fail
        self._fate = random.Random(seed + 2)
        self._directory = notes.directory / "backups"
        self._made: list[Facts] = []
        self._count = 0
        self._making: asyncio.Task[None] | None = None

    def options(self) -> list[str]:
        """The options of the next start."""
        # As long as a step of the copy takes, and too long for a round.
        interval_ms = self._fate.choice((1, 50, 400, 10_000))
        return [f"--backup-dir={self._directory}", f"--backup-log-ms={interval_ms}"]

    def _facts(self, kind: str, until_ms: int | None = None) -> Facts:
        self._count += 1
        ledger = self._notes.ledger
        return Facts(f"{kind}-{self._count}", ledger.orders, ledger.clock.offset_ms, until_ms)

    async def under_load(self, load_s: float) -> None:
        """Let the load go on; in some rounds a backup is begun, and a moment is noted."""
        if self._fate.random() < SHARE:
            self._making = asyncio.create_task(self._make())
        before_s = load_s
        if self._made and self._fate.random() < MOMENT_SHARE:
            before_s = self._fate.uniform(0, load_s)
        await asyncio.sleep(before_s)
        if before_s < load_s:
            facts = self._facts("moment", self._notes.ledger.server_ms())
            await asyncio.sleep(0.002)  # a message that is made from here on is later by the clock
            facts.completed()
            self._made.append(facts)
            self._notes.counts["moments"] += 1
        await asyncio.sleep(load_s - before_s)
        if self._making is not None and self._fate.random() < WAIT_SHARE:
            await asyncio.wait([self._making], timeout=WAIT_S)

    async def cut_off(self) -> None:
        """The server was struck: wait until the backup has failed, or is complete."""
        if self._making is not None:
            making, self._making = self._making, None
            await making

    async def _make(self) -> None:
        facts = self._facts("round")
        try:
            status, answer = await self._ask("POST", path("backups"), {"name": facts.name})
            while status in (200, 202) and answer["state"] == "running":
                await asyncio.sleep(POLL_S)
                status, answer = await self._ask("GET", path("backups", facts.name))
        except UnansweredError:
            self._notes.counts["backups cut off"] += 1
            return
        if answer.get("state") == "complete":
            facts.completed()
            self._made.append(facts)
            self._notes.counts["backups"] += 1
        elif self._may_fail:
            self._notes.counts["backups cut off"] += 1
        else:
            self._notes.fail(f"the backup {facts.name} came to nothing: {answer}")

    async def _ask(self, method: str, where: str, document: object = None) -> tuple[int, dict]:
        status, answer = await call(self._client, method, where, document)
        is_later = status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS)
        if is_later or (self._may_fail and status >= HTTPStatus.BAD_REQUEST):
            # A shard is away, or still makes its part of one that was cut off.
            raise UnansweredError(f"{status} {answer}")
        return status, answer

    async def compare(self) -> None:
        """Restore each backup and each moment, when no server runs any more, and ask it for all
        that the ledger had."""
        for facts in self._made:
            restored = self._notes.directory / "restored" / facts.name
            for broken in await asyncio.to_thread(facts.broken_in, self._directory, restored):
                self._notes.fail(broken)


def _fact(order: Order) -> Fact:
    receipts = [one for some in order.receipts.values() for one in some]
    return Fact(
        frozenset(order.message_ids),
        order.cancelled_ms is not None and not receipts,
        all(
            any(one.is_recorded for one in order.receipts.get(name, ()))
            for name in order.subscriptions
        ),
        bool(receipts) or order.cancel_asked or order.cancelled_ms is not None,
    )


async def states_in(
    directory: Path, offset_ms: int, message_ids: set[str]
) -> dict[str, State | None]:
    """What servers that deliver nothing say of these messages, each shard of its own; None: it
    does not know them."""
    count = read_shard_count(OsFiles(str(directory), readonly=True))
    states: dict[str, State | None] = {}
    for shard in range(count or 1):
        own = {one for one in message_ids if count is None or read_id(one).shard == shard}
        place = directory if count is None else directory / shard_directory(shard)
        states |= await _states_in(place, offset_ms, own, shard, count or 1, directory)
    return states


async def _states_in(
    place: Path, offset_ms: int, message_ids: set[str], shard: int, shards: int, whole: Path
) -> dict[str, State | None]:
    def fatal(error: BaseException) -> None:
        raise error

    settings = Settings(
        data_dir=place, clock_offset_ms=offset_ms, disk_reserve_bytes=0, segment_bytes=1 << 16
    )
    server = Server(
        settings,
        of_this_machine(settings, shard),
        fatal=fatal,
        shards=shards,
        tokens_directory=whole,
    )
    server.hold_back()
    await server.start()
    queries = Queries(server.calls)
    states: dict[str, State | None] = {}
    try:
        for one in message_ids:
            try:
                found = server.calls.message_id(one)
                states[one] = (await queries.look_up(found.seq, found.due_ms)).state
            except NotFoundError:
                states[one] = None
    finally:
        await server.stop()
    return states
