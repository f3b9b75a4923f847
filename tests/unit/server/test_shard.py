"""The shard: groups are committed on the event loop or in the committer's thread, to one effect."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from delayserver.config import Settings
from delayserver.decisions.group import Group
from delayserver.decisions.new_messages import NewMessage
from delayserver.records.message import Payload
from delayserver.server.threads import QUICK_BYTES
from storage.errors import DiskFullError, SyncError
from storage.message_log import MessageLog
from tests.world.server import Observer, SimulatedClock, SimulatedServer
from tests.world.storage.catalog import MemoryCatalog
from tests.world.storage.faults import Fault, FaultKind, Faults, FaultyFiles, Moment
from tests.world.storage.files import SimulatedFiles

DAY_MS = 86_400_000


class Machine:
    def __init__(self, quick: Callable[[], bool]) -> None:
        self.disk, self.catalog, self.clock = SimulatedFiles(), MemoryCatalog(), SimulatedClock()
        self.faults = Faults()
        self.quick = quick
        self.told: list[tuple[int, Exception | None]] = []
        self.start()
        # The first group fills a segment, which takes long.
        self.publish(0)
        self.server.rest()
        assert self.told == [(0, None)]
        self.told.clear()

    def start(self) -> None:
        self.server = SimulatedServer(
            Settings(),
            FaultyFiles(self.disk, self.faults),
            self.catalog,
            self.clock,
            random.Random(0),
            Observer(),
            quick=self.quick,
        )

    def publish(self, number: int, body: bytes = b"1") -> Group:
        message = NewMessage("orders", self.clock() + DAY_MS, Payload(body))
        group = self.server.engine.publishing.publish_one(message, self.clock()).group
        assert group is not None
        group.when_durable(lambda error: self.told.append((number, error)))
        return group

    def fail_next(self, kind: FaultKind) -> None:
        self.faults.faults.append(Fault(self.faults.call_count + 1, kind, Moment.BEFORE))

    def turns(self) -> None:
        while self.server.turn():
            pass


def test_on_a_quick_disk_a_group_is_durable_at_the_end_of_the_turn() -> None:
    machine = Machine(lambda: True)
    machine.publish(1)
    machine.publish(2)
    assert not machine.told
    assert machine.server.turn()
    assert machine.told == [(1, None), (2, None)]
    assert not machine.server.committer.backlog
    next_seq = machine.server.engine.sequencer.next_seq
    machine.disk, machine.catalog = machine.disk.crash(), machine.catalog.crash()
    machine.start()
    assert machine.server.recovered.next_seq == next_seq


def test_on_a_slow_disk_the_thread_has_it() -> None:
    machine = Machine(lambda: False)
    machine.publish(1)
    machine.turns()
    assert not machine.told
    assert machine.server.committer.backlog == 1


def test_what_comes_while_a_long_group_is_written_is_not_told_before_it() -> None:
    machine = Machine(lambda: True)
    machine.publish(1, b'"%b"' % (b"x" * QUICK_BYTES))
    machine.turns()
    assert machine.server.committer.backlog == 1
    machine.publish(2)
    machine.turns()
    assert not machine.told
    machine.server.rest()
    assert machine.told == [(1, None), (2, None)]
    assert not machine.server.committer.backlog


def test_what_waiters_publish_is_a_group_of_its_own() -> None:
    machine = Machine(lambda: True)

    def publish_more(_error: Exception | None) -> None:
        machine.publish(2)

    machine.publish(1).when_durable(publish_more)
    machine.publish(3)
    machine.server.rest()
    assert machine.told == [(1, None), (3, None), (2, None)]


@pytest.mark.parametrize("quick", [False, True])
def test_a_group_that_does_not_fit_on_the_disk_is_refused(quick: bool) -> None:
    machine = Machine(lambda: quick)
    machine.fail_next(FaultKind.NO_SPACE)
    machine.publish(1)
    machine.server.rest()
    [(number, error)] = machine.told
    assert number == 1
    assert isinstance(error, DiskFullError)
    machine.publish(2)
    machine.server.rest()
    assert machine.told[1:] == [(2, None)]


@pytest.mark.parametrize("quick", [False, True])
def test_a_sync_that_fails_answers_nobody(quick: bool) -> None:
    machine = Machine(lambda: quick)
    machine.fail_next(FaultKind.IO_ERROR)
    machine.publish(1)
    with pytest.raises(SyncError):
        machine.server.rest()
    assert not machine.told


def test_either_way_writes_the_same_bytes() -> None:
    def written(**options: Any) -> dict[str, bytes]:
        machine = Machine(**options)
        for number in range(5):
            machine.publish(number)
            machine.server.rest()
        message_log = machine.server.message_log
        assert isinstance(message_log, MessageLog)
        return {path: machine.disk.open(path).pread(1 << 20, 0) for path in message_log.segments()}

    assert written(quick=lambda: True) == written(quick=lambda: False)


def test_filing_waits_for_its_time_but_not_with_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, woken = Machine(lambda: True), list[bool]()

    def put(item: object, *, wake: bool) -> None:
        woken.append(wake)

    monkeypatch.setattr(machine.server.replayer, "put", put)
    group = machine.publish(1)
    machine.server.file(group)
    group.import_count = 1
    machine.server.file(group)
    assert woken == [False, True]
