"""Deliveries in transactions: what goes together, what comes of it, and who waits for it."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import pytest

from delayserver.delivery import transaction_sink
from delayserver.delivery.sink import Confirmed, Failed, Recorded, Result, Untried
from delayserver.delivery.transaction_sink import TransactionSink
from delayserver.records.message import DueDelivery
from delayserver.records.subscriptions import KafkaTarget, Subscription
from storage.errors import EngineError, FencedError
from storage.replicated.transactions import SLOTS, Aborted, Committed, TopicRecord
from storage.rows import DISPATCH_DTYPE
from tests.unit.fakes import START_MS, always, delivery, subscription
from tests.waiting import until

TARGET = KafkaTarget(bootstrap="127.0.0.1:9092", topic="t", exactly_once=True)


def kafka(number: int = 1) -> Subscription:
    return subscription(number, type="kafka", target=TARGET)


class Fake:
    """`SettledTransactions` that do as they are told."""

    def __init__(self) -> None:
        self.opened = 0
        self.open_errors: list[Exception] = []
        self.gate = threading.Event()
        self.gate.set()
        self.under_way: set[int] = set()
        self.most = 0
        self.batches: list[list[int]] = []
        self.results: list[Committed | Aborted | Exception] = []
        self.calls: list[str] = []

    def differs(self, bootstrap: str) -> str | None:
        return None

    def open(self) -> None:
        self.opened += 1
        if self.open_errors:
            raise self.open_errors.pop()

    def commit(
        self, slot: int, records: Sequence[TopicRecord], rows: bytes, now_ms: int
    ) -> Committed | Aborted:
        assert slot not in self.under_way
        self.under_way.add(slot)
        self.most = max(self.most, len(self.under_way))
        assert self.gate.wait(10)
        found = np.frombuffer(rows, DISPATCH_DTYPE)
        assert [int(record.value) for record in records] == found["seq"].tolist()
        assert set(found["settled_ms"].tolist()) == {now_ms}
        self.batches.append(found["seq"].tolist())
        self.under_way.remove(slot)
        result = self.results.pop(0) if self.results else Committed(100 + len(self.batches))
        if isinstance(result, Exception):
            raise result
        return result

    def give_up(self) -> None:
        self.calls.append("give up")

    def close(self) -> None:
        self.calls.append("close")


def record(subscription: Subscription, one: DueDelivery) -> TopicRecord:
    return TopicRecord("t", b"%d" % one.entry.seq, None, [])


class Machine:
    def __init__(self) -> None:
        self.fake = Fake()
        self.sink = TransactionSink(self.fake, lambda: START_MS, record)
        self.told: dict[int, Result] = {}

    def tell(self, deliveries: list[DueDelivery], result: Result) -> None:
        for one in deliveries:
            assert one.entry.seq not in self.told
            self.told[one.entry.seq] = result

    def deliver(self, *seqs: int, number: int = 1) -> Coroutine[Any, Any, None]:
        return self.sink.deliver(kafka(number), [*map(delivery, seqs)], always, self.tell)


def run(main: Callable[[Machine], Coroutine[Any, Any, None]]) -> Machine:
    async def whole() -> Machine:
        machine = Machine()
        await main(machine)
        await machine.sink.close()
        return machine

    return asyncio.run(whole())


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction_sink, "ABORTED_PAUSE_S", 0)


def test_a_batch_is_a_transaction() -> None:
    machine = run(lambda m: m.deliver(1, 2, 3))
    assert machine.fake.batches == [[1, 2, 3]]
    taken = Confirmed(Recorded(START_MS, 101))
    assert machine.told == {1: taken, 2: taken, 3: taken}
    assert (machine.fake.opened, machine.fake.calls) == (1, ["give up", "close"])


def test_what_comes_while_all_slots_are_busy_goes_together() -> None:
    async def main(m: Machine) -> None:
        m.fake.gate.clear()
        tasks = [asyncio.create_task(m.deliver(seq)) for seq in range(1, 4 + SLOTS)]
        await until(lambda: len(m.fake.under_way) == SLOTS)
        m.fake.gate.set()
        await asyncio.gather(*tasks)

    machine = run(main)
    assert machine.fake.most == SLOTS
    assert len(machine.fake.batches) == SLOTS + 1
    assert sorted(machine.fake.batches)[-1] == [5, 6, 7]
    assert len(machine.told) == 3 + SLOTS
    assert all(isinstance(result, Confirmed) for result in machine.told.values())


def test_a_long_queue_goes_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction_sink, "BATCH_MAX", 2)
    machine = run(lambda m: m.deliver(1, 2, 3, 4, 5))
    assert machine.fake.batches == [[1, 2], [3, 4], [5]]
    assert sorted(machine.told) == [1, 2, 3, 4, 5]
    monkeypatch.setattr(transaction_sink, "BATCH_MAX", 1000)
    monkeypatch.setattr(transaction_sink, "BATCH_BYTES_MAX", 2)
    machine = run(lambda m: m.deliver(1, 2, 333, 4))
    assert machine.fake.batches == [[1, 2], [333], [4]]


def test_an_aborted_transaction_was_no_attempt_but_for_what_is_at_fault() -> None:
    async def main(m: Machine) -> None:
        m.fake.results = [Aborted("bad", {1: "no such topic"}), Aborted("away", {})]
        await m.deliver(1, 2, 3)
        await m.deliver(4)

    machine = run(main)
    refused = Failed("Kafka: no such topic")
    assert machine.told == {1: Untried(), 2: refused, 3: Untried(), 4: Untried()}


def test_subscriptions_do_not_share_a_transaction() -> None:
    async def main(m: Machine) -> None:
        await asyncio.gather(m.deliver(1, 2), m.deliver(3, number=2))

    assert sorted(run(main).fake.batches) == [[1, 2], [3]]


def test_who_is_fenced_ends() -> None:
    async def main(m: Machine) -> None:
        m.fake.results = [FencedError("c.0.0", "another is in office")]
        with pytest.raises(FencedError):
            await m.deliver(1)

    assert run(main).told == {}


def test_slots_that_cannot_be_opened_yet() -> None:
    async def main(m: Machine) -> None:
        m.fake.open_errors = [EngineError("open", "here", "nobody is there", "wait")]
        await m.deliver(1)
        await m.deliver(2)

    machine = run(main)
    assert machine.told[1] == Untried()
    assert isinstance(machine.told[2], Confirmed)
    assert machine.fake.opened == 2


def test_who_is_cancelled_is_told_nothing_and_frees_its_slot() -> None:
    async def main(m: Machine) -> None:
        m.fake.gate.clear()
        tasks = [asyncio.create_task(m.deliver(seq)) for seq in range(1, 3 + SLOTS)]
        await until(lambda: len(m.fake.under_way) == SLOTS)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        m.fake.gate.set()
        await until(lambda: not m.fake.under_way)
        assert m.told == {}
        for seq in range(10, 20):
            await m.deliver(seq)

    machine = run(main)
    assert sorted(machine.told) == list(range(10, 20))
    assert sum(map(len, machine.fake.batches)) == SLOTS + 10


def test_records_that_were_refused_together_go_in_halves_then_singly() -> None:
    """A batch is refused as a whole; only the record that is refused alone has failed."""

    class Picky(Fake):
        def commit(
            self, slot: int, records: Sequence[TopicRecord], rows: bytes, now_ms: int
        ) -> Committed | Aborted:
            values = [int(record.value) for record in records]
            if 5 in values:
                # 8 was in another batch, and its topic is not there.
                refused = {index: "too large" for index, one in enumerate(values) if one != 8}
                neighbours = frozenset(refused)
                if 8 in values:
                    refused[values.index(8)] = "no such topic"
                self.results = [Aborted("bad", refused, neighbours)]
            return super().commit(slot, records, rows, now_ms)

    async def main(m: Machine) -> None:
        m.fake = Picky()
        m.sink = TransactionSink(m.fake, lambda: START_MS, record)
        await m.deliver(*range(1, 9))

    told = run(main).told
    assert sorted(told) == [*range(1, 9)]
    assert told[5] == Failed("Kafka: too large") and told[8] == Failed("Kafka: no such topic")
    assert all(isinstance(told[seq], Confirmed) for seq in (1, 2, 3, 4, 6, 7))
