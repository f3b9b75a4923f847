"""Backups that are made under load, and what is in them: compared with what the ledger had.

Before a backup is asked for it is written down what was answered by then (`Facts`). Each one that
is complete is restored, and a server that delivers nothing is asked for every message.

Cost: half a second a backup, and a look-up a message. Threads: a server of its own, on a loop in
the caller's thread.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import uvloop

from delayserver.cli.demo.ledger import Order
from delayserver.config import Settings
from delayserver.errors import NotFoundError
from delayserver.queries.look_up import Queries
from delayserver.records.message import State
from delayserver.recovery.restoring import restore
from delayserver.server.server import Server, wall_clock_ms


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

    def __init__(self, name: str, orders: list[Order], offset_ms: int) -> None:
        self.name = name
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
        restored = restore(backup_dir / self.name, directory, now_ms=now_ms)
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
            if fact.is_acknowledged and State.SCHEDULED in found:
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
    """What a server that delivers nothing says of these messages; None: it does not know them."""

    def fatal(error: BaseException) -> None:
        raise error

    settings = Settings(
        data_dir=directory, clock_offset_ms=offset_ms, disk_reserve_bytes=0, segment_bytes=1 << 16
    )
    server = Server(settings, fatal=fatal)
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
