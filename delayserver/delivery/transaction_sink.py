"""Exactly once: messages and their settled rows, in one transaction.

    deliver ──▶ waiting messages, by subscription ── a turn: one of a few slots ──▶ transaction
                                                                │
      committed: confirmed, and recorded already ◀──────────────┤
      aborted: failed where a record is to blame, else untried ◀┘
               (where one of several is, they go again: halves, then singly)

A reader of committed records finds a message in its topic if and only if the log of settled
deliveries says that it was delivered. So an owner that starts behind a crash, or another in its
stead, delivers the messages that are not settled, and repeats none.

A transaction is of one subscription, so that a topic that is not there holds up no other. Messages
that come while all slots are busy go together in the next one.

Cost: some 60 ms for each message, and 20 transactions a second of each slot, whatever they hold (up
to BATCH_MAX messages). Threads: belongs to the event loop; a thread of a pool waits for each
transaction.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import structlog

from delayserver.delivery.complaints import Complaints
from delayserver.delivery.own_threads import in_own_thread
from delayserver.delivery.sending import HandedDeliveries, halves
from delayserver.delivery.settler import pack_settled
from delayserver.delivery.sink import (
    Confirmed,
    Failed,
    MayBegin,
    Recorded,
    Result,
    ResultCallback,
    Untried,
)
from delayserver.delivery.turns import Turns
from delayserver.records.message import DueDelivery
from delayserver.records.subscriptions import Subscription
from storage.errors import EngineError
from storage.replicated.transactions import (
    SLOTS,
    Aborted,
    Committed,
    SettledTransactions,
    TopicRecord,
)
from storage.rows import Outcome

BATCH_MAX: Final = 1000
"""Messages in a transaction, and …"""
BATCH_BYTES_MAX: Final = 8 * 1024 * 1024
"""… their bodies, unless one alone has more."""
ABORTED_PAUSE_S: Final = 0.2
"""A trouble that no record caused passes, but not at once."""

log = structlog.get_logger()


@dataclass(slots=True)
class _Waiting:
    delivery: DueDelivery
    record: TopicRecord
    may_begin: MayBegin
    handed: HandedDeliveries


class TransactionSink:
    """Delivers in transactions, and tells like a `Sink`."""

    def __init__(
        self,
        transactions: SettledTransactions,
        clock: Callable[[], int],
        make_record: Callable[[Subscription, DueDelivery], TopicRecord],
    ) -> None:
        self._transactions = transactions
        self._clock = clock
        self._make_record = make_record
        self._turns = Turns(SLOTS)
        self._free_slots = list(range(SLOTS))
        self._waiting: dict[int, deque[_Waiting]] = {}
        """By subscription."""
        self._opening: asyncio.Future[None] | None = None
        self._aborted = Complaints()
        self._threads = ThreadPoolExecutor(SLOTS, "delayserver-transactions")

    async def deliver(
        self,
        subscription: Subscription,
        deliveries: list[DueDelivery],
        may_begin: MayBegin,
        told: ResultCallback,
    ) -> None:
        """See `Sink`. Raises FencedError: the process has to end."""
        handed = HandedDeliveries(len(deliveries), told)
        try:
            await self._open()
        except EngineError as error:
            if self._aborted.wrong("no transactions") is not None:
                log.warning("no transactions", error=str(error))
            await asyncio.sleep(ABORTED_PAUSE_S)
            handed.tell(deliveries, Untried())
            return
        waiting = self._waiting.setdefault(subscription.id, deque())
        waiting.extend(
            _Waiting(delivery, self._make_record(subscription, delivery), may_begin, handed)
            for delivery in deliveries
        )
        try:
            # The call that has a turn takes the messages that wait longest: when none waits any
            # more, ours is under way, in a transaction of another call.
            while waiting:
                await self._turns.take(subscription.id)
                try:
                    await self._transact(_take(waiting))
                finally:
                    self._turns.give_back(subscription.id)
            if self._waiting.get(subscription.id) is waiting:
                del self._waiting[subscription.id]
            await handed.done
        except asyncio.CancelledError:
            handed.done.cancel()
            raise

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        if self._opening is None:
            self._opening = loop.run_in_executor(self._threads, self._transactions.open)
        try:
            await asyncio.shield(self._opening)
        except EngineError:
            self._opening = None
            raise

    async def _transact(self, batch: list[_Waiting]) -> None:
        batch, withheld = _begun(batch)
        _tell(withheld, lambda index: Untried())
        if not batch:
            return
        settled_ms = self._clock()
        rows = b"".join(pack_settled(one.delivery, Outcome.DELIVERED, settled_ms) for one in batch)
        records = [one.record for one in batch]
        slot = self._free_slots.pop()
        under_way = asyncio.get_running_loop().run_in_executor(
            self._threads, self._transactions.commit, slot, records, rows, settled_ms
        )
        # It goes on even if no caller waits for it: its slot is free when it has ended.
        under_way.add_done_callback(lambda ended: self._free_slots.append(slot))
        match await asyncio.shield(under_way):
            case Committed(offset):
                taken = Confirmed(Recorded(settled_ms, offset))
                _tell(batch, lambda index: taken)
            case Aborted(reason, refused, neighbours):
                said = self._aborted.wrong(reason)
                if said is not None:
                    log.warning(
                        "a transaction was aborted",
                        error=reason,
                        messages=len(batch),
                        times=said.unsaid,
                    )
                if len(neighbours) > 1:
                    suspects = [one for index, one in enumerate(batch) if index in neighbours]
                    left = {id(one) for one in suspects}
                    refused = {one: refused[one] for one in refused.keys() - neighbours}
                    numbers = [index for index, one in enumerate(batch) if id(one) not in left]
                    _tell(
                        [batch[index] for index in numbers],
                        lambda index: _of_aborted(numbers[index], refused),
                    )
                    for part in halves(suspects):
                        await self._transact(part)
                    return
                if not refused:
                    await asyncio.sleep(ABORTED_PAUSE_S)
                _tell(batch, lambda index: _of_aborted(index, refused))

    async def close(self) -> None:
        """See `Sink`. Transactions under way come to their end, unless brokers are away."""
        self._transactions.give_up()
        await in_own_thread("delayserver-transactions-end", self._threads.shutdown)
        await in_own_thread("delayserver-transactions-end", self._transactions.close)


def _of_aborted(index: int, refused: Mapping[int, str]) -> Result:
    return Failed(f"Kafka: {refused[index]}") if index in refused else Untried()


def _take(waiting: deque[_Waiting]) -> list[_Waiting]:
    """The messages that go together in a transaction."""
    batch: list[_Waiting] = []
    size = 0
    while waiting and len(batch) < BATCH_MAX:
        if waiting[0].handed.done.done():
            waiting.popleft()  # Cancelled.
            continue
        size += len(waiting[0].record.value)
        if batch and size > BATCH_BYTES_MAX:
            break
        batch.append(waiting.popleft())
    return batch


def _begun(batch: list[_Waiting]) -> tuple[list[_Waiting], list[_Waiting]]:
    """Those that may begin now, and the others."""
    begun: list[_Waiting] = []
    withheld: list[_Waiting] = []
    for one in batch:
        (begun if one.may_begin([one.delivery]) else withheld).append(one)
    return begun, withheld


def _tell(batch: list[_Waiting], result_of: Callable[[int], Result]) -> None:
    """In parts of equal results and of one `deliver`, in their order."""
    parts: list[tuple[HandedDeliveries, Result, list[DueDelivery]]] = []
    for index, one in enumerate(batch):
        result = result_of(index)
        if not parts or parts[-1][0] is not one.handed or parts[-1][1] != result:
            parts.append((one.handed, result, []))
        parts[-1][2].append(one.delivery)
    for handed, result, deliveries in parts:
        handed.tell(deliveries, result)
