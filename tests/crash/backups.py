"""Backups that are made under load, and what is in them: compared with what the ledger had.

Before a backup is asked for it is written down what was answered by then (`Facts`). Each one that
is complete is restored, and a server that delivers nothing is asked for every message. So it is at
moments between them, for which the log behind the backups is taken as well (`until_ms`).

Cost: half a second a backup and shard, and a look-up a message. Threads: a server of its own, on a
loop in the caller's thread.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import uvloop

from delayserver.backup.restoring import restore
from delayserver.cli.demo.ledger import Order
from delayserver.clocks import wall_clock_ms
from delayserver.config import Settings
from delayserver.errors import NotFoundError
from delayserver.queries.look_up import Queries
from delayserver.records.message import State
from delayserver.records.message_id import read_id
from delayserver.server.server import Server
from storage.errors import StorageError
from storage.files import OsFiles
from storage.shards import read_shard_count, shard_directory


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
    server = Server(settings, fatal=fatal, shard=shard, shards=shards, tokens_directory=whole)
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
