"""The threads: each is fed by a queue, reports to the loop, and outlives a full disk.

What a thread does with its items is tested by calling `handle` here, without a thread.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from delayserver.decisions.group import Group
from delayserver.delivery.handout import Handout
from delayserver.records.subscriptions import Registry
from delayserver.schedule.loader import LoadedHour
from delayserver.schedule.wheel_rows import FiredRows
from delayserver.server import threads as workers_module
from delayserver.server.threads import (
    QUICK_BYTES,
    QUICK_S,
    CallRequest,
    CommitterThread,
    HandoutRequest,
    HourRequest,
    LoaderThread,
    ReaderThread,
    SettleRequest,
    SettlerThread,
    Worker,
)
from storage.errors import DiskFullError, ExhaustedError, SyncError
from storage.frame import Frame
from storage.message_log import MessageLog
from storage.rows import HOUR_MS
from tests.unit.fakes import HOUR, START_MS, Disk, Log, dispatch_row, subscription
from tests.unit.server.thread_parts import Clock, Loop, fatal, faulty_disk, no_descriptor
from tests.world.storage.faults import Fault, FaultKind, Faults, FaultyFiles
from tests.world.storage.files import SimulatedFiles

WAIT_S = 10
NEXT_MS = START_MS + HOUR_MS


# ---- what all have in common -----------------------------------------------------------------


class Adder(Worker[int]):
    """Adds up its items; waits at a gate first, fails on request."""

    def __init__(self, fatal: Any = fatal) -> None:
        super().__init__("adder", fatal)
        self.gate = threading.Event()
        self.calls: list[list[int]] = []
        self.failures: list[Exception] = []
        self.idle = threading.Event()
        self.closed = False

    def handle(self, items: list[int]) -> None:
        assert self.gate.wait(WAIT_S)
        if self.failures:
            raise self.failures.pop(0)
        self.calls.append(list(items))
        items.clear()

    def close(self) -> None:
        self.closed = True


def run_to_end(worker: Worker[Any]) -> None:
    worker.start()
    worker.join(WAIT_S)
    assert not worker.is_alive()


def test_everything_that_was_put_is_handled_in_order_before_the_end() -> None:
    worker = Adder()
    worker.gate.set()
    for number in range(5):
        worker.put(number)
    worker.finish()
    run_to_end(worker)
    assert worker.calls == [[0, 1, 2, 3, 4]]
    assert worker.closed
    assert worker.name == "delayserver-adder"


def test_what_is_put_quietly_waits_until_something_wakes_the_thread() -> None:
    worker = Adder()
    worker.gate.set()
    worker.put(1, wake=False)
    worker.put(2, wake=False)
    assert worker.backlog == 2
    worker.put(3)
    worker.finish()
    run_to_end(worker)
    assert worker.calls[0] == [1, 2, 3]


def test_a_step_takes_no_more_items_than_asked_for_and_repeats_what_failed() -> None:
    worker = Adder()
    worker.gate.set()
    worker.failures = [DiskFullError("pwrite", "x", "no space")]
    for number in range(3):
        worker.put(number)
    with pytest.raises(DiskFullError):
        worker.step(2)
    assert worker.backlog == 3
    worker.step(1)
    worker.step(2)
    assert worker.calls == [[0, 1], [2]]
    assert worker.backlog == 0


def test_a_full_disk_is_waited_for_with_the_same_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "SHORTAGE_WAIT_S", 0)
    worker = Adder()
    worker.gate.set()
    worker.failures = [DiskFullError("pwrite", "x", "no space")] * 2
    worker.put(1)
    worker.put(2)
    worker.finish()
    run_to_end(worker)
    assert worker.calls == [[1, 2]]
    assert worker.closed


def test_any_other_error_ends_the_server() -> None:
    error = SyncError("fdatasync", "x", "I/O error")
    errors: list[BaseException] = []
    worker = Adder(errors.append)
    worker.gate.set()
    worker.failures = [error]
    worker.put(1)
    worker.finish()
    run_to_end(worker)
    assert errors == [error]
    assert not worker.closed


def test_a_timeout_calls_handle_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Adder()
    worker.gate.set()
    monkeypatch.setattr(worker, "timeout_s", lambda: 0.001)
    handle = worker.handle

    def once(items: list[int]) -> None:
        handle(items)
        worker.finish()

    monkeypatch.setattr(worker, "handle", once)
    run_to_end(worker)
    assert worker.calls[0] == []


# ---- the committer ---------------------------------------------------------------------------


class Committing:
    now_s = 0.0

    def __init__(self, *faults: Fault) -> None:
        self.files = SimulatedFiles()
        self.faults = Faults(*faults, only=["pwrite_durable"])
        self.disk = Disk(FaultyFiles(self.files, self.faults))
        self.loop = Loop()
        self.log = Log()
        self.thread = CommitterThread(
            self.disk.message_log,
            lambda: self.now_s,
            self.loop.post,
            self.on_committed,
            self.on_failed,
            fatal,
        )

    def on_committed(self) -> None: ...

    def on_failed(self, error: Exception) -> None: ...

    def group(self) -> Group:
        self.log.publish(START_MS)
        return self.log.close()

    def durable(self) -> list[int]:
        found = Disk(self.files.crash()).message_log.read(1)
        return [frame.header.first_seq for frame in found if isinstance(frame, Frame)]


def test_a_group_is_durable_before_it_is_reported() -> None:
    parts = Committing()
    groups = [parts.group(), parts.group()]
    parts.thread.handle(groups)
    assert groups == []
    assert parts.loop.take() == [(parts.on_committed,)] * 2
    assert parts.durable() == [1, 2]


def test_a_group_that_does_not_fit_on_the_disk_is_refused_and_the_next_is_tried() -> None:
    parts = Committing(Fault(at=1, kind=FaultKind.NO_SPACE))
    parts.thread.handle([parts.group()])
    [(function, error)] = parts.loop.take()
    assert function == parts.on_failed
    assert isinstance(error, DiskFullError)
    parts.log = Log()
    parts.thread.handle([parts.group()])
    assert parts.loop.take() == [(parts.on_committed,)]
    parts.thread.close()
    assert parts.durable() == [1]


def test_a_group_that_needs_a_segment_and_gets_no_descriptor_is_refused() -> None:
    disk, log, loop = faulty_disk(), Log(), Loop()

    def on_committed() -> None: ...

    def on_failed(error: Exception) -> None: ...

    thread = CommitterThread(
        disk.message_log, lambda: 0.0, loop.post, on_committed, on_failed, fatal
    )
    log.publish(START_MS)
    group = log.close()
    with no_descriptor(disk):
        thread.handle([group])
    thread.handle([group])
    [[failed, error], *committed] = loop.take()
    assert failed == on_failed
    assert isinstance(error, ExhaustedError)
    assert committed == [(on_committed,)]


def test_a_sync_that_fails_is_not_reported_but_raised() -> None:
    parts = Committing(Fault(at=1, kind=FaultKind.IO_ERROR))
    with pytest.raises(SyncError):
        parts.thread.handle([parts.group()])
    assert parts.loop.take() == []


def test_a_group_is_committed_in_the_thread_of_the_caller() -> None:
    parts = Committing()
    group, told = parts.group(), list[tuple[object, ...]]()
    assert not parts.thread.takes_at_once(group)  # there is no segment: to fill one takes long
    parts.thread.handle([group])
    parts.loop.take()
    group = parts.group()
    assert parts.thread.takes_at_once(group)
    parts.thread.commit(group, lambda *call: told.append(call))
    assert told == [(parts.on_committed,)]
    assert parts.loop.take() == []
    assert parts.durable() == [1, 2]


def test_a_long_group_keeps_nobody_but_the_thread() -> None:
    parts = Committing()
    parts.thread.handle([parts.group()])
    parts.log.publish(START_MS, body=b'"%b"' % bytes(QUICK_BYTES).replace(b"\0", b"x"))
    assert not parts.thread.takes_at_once(parts.log.close())


def test_a_slow_disk_is_noticed_and_so_is_a_quick_one() -> None:
    parts = Committing()
    assert parts.thread.is_quick

    def commit(took_s: float) -> None:
        append = MessageLog.append

        def slow(log: MessageLog, *arguments: Any, **named: Any) -> None:
            append(log, *arguments, **named)
            parts.now_s += took_s

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MessageLog, "append", slow)
            parts.thread.handle([parts.group()])

    commit(QUICK_S)
    assert parts.thread.is_quick  # once is not always
    commit(100 * QUICK_S)
    assert not parts.thread.is_quick
    for _ in range(40):
        commit(QUICK_S / 10)
    assert parts.thread.is_quick


# ---- loader and reader -----------------------------------------------------------------------


def test_hours_are_loaded_and_reported_one_by_one() -> None:
    disk, log, loop = Disk(), Log(), Loop()
    log.publish(START_MS)
    log.publish(NEXT_MS)
    disk.file(log.close())
    thread = LoaderThread(disk.loader, loop.post, on_loaded := lambda loaded: None, fatal)
    requests = [
        HourRequest(snapshot, Registry(), disk.names) for snapshot in disk.replay.snapshot(HOUR + 1)
    ]
    thread.handle(requests)
    assert requests == []
    loaded = [arguments for _, *arguments in loop.posted]
    assert {function for function, *_ in loop.posted} == {on_loaded}
    hours = [one for [one] in loaded if isinstance(one, LoadedHour)]
    assert [(hour.hour, hour.count) for hour in hours] == [(HOUR, 1), (HOUR + 1, 1)]


def test_an_hour_whose_file_cannot_be_opened_for_now_is_loaded_at_the_next_try() -> None:
    disk, log, loop = faulty_disk(), Log(), Loop()
    log.publish(START_MS)
    disk.file(log.close())
    thread = LoaderThread(disk.loader, loop.post, lambda loaded: None, fatal)
    for snapshot in disk.replay.snapshot(HOUR):
        thread.put(HourRequest(snapshot, Registry(), disk.names))
    with no_descriptor(disk), pytest.raises(ExhaustedError):
        thread.step(8)
    assert loop.posted == []
    thread.step(8)
    assert [loaded.hour for _, loaded in loop.posted] == [HOUR]
    assert thread.backlog == 0


def test_bodies_whose_file_cannot_be_opened_for_now_are_read_at_the_next_try() -> None:
    disk, log, loop = faulty_disk(), Log(), Loop()
    disk.replay.snapshot(HOUR)
    log.publish(START_MS, body=b"body")
    [(hour, rows)] = disk.file(log.close()).live
    handout = Handout(subscription().id, [FiredRows(hour, rows)])
    thread = ReaderThread(disk.reader, loop.post, fatal)
    thread.put(HandoutRequest(handout, {}, lambda *_: None))
    with no_descriptor(disk):
        # The event loop leaves it to the thread.
        assert disk.reader.fetch_now(handout, {}) is None
        with pytest.raises(ExhaustedError):
            thread.step(8)
    assert loop.posted == []
    thread.step(8)
    [[_, _, fetched]] = loop.posted
    assert [one.payload.body for one in disk.reader.open(handout, fetched)] == [b"body"]
    assert thread.backlog == 0


def test_bodies_and_answers_go_back_to_the_loop() -> None:
    disk, log, loop = Disk(), Log(), Loop()
    disk.replay.snapshot(HOUR)
    log.publish(START_MS, body=b"body")
    [(hour, rows)] = disk.file(log.close()).live
    handout = Handout(subscription().id, [FiredRows(hour, rows)])
    thread = ReaderThread(disk.reader, loop.post, fatal)
    done, answered = (lambda *_: None), (lambda *_: None)
    error = ValueError("not today")

    def fails(reader: object) -> None:
        raise error

    items: list[HandoutRequest | CallRequest] = [
        HandoutRequest(handout, {}, done),
        CallRequest(lambda reader: reader is disk.reader, answered),
        CallRequest(fails, answered),
    ]
    thread.handle(items)
    assert items == []
    read, answer, failure = loop.posted
    assert read[:2] == (done, handout)
    assert [one.payload.body for one in disk.reader.open(handout, read[2])] == [b"body"]
    assert answer == (answered, True, None)
    assert failure == (answered, None, error)


# ---- the settler -----------------------------------------------------------------------------


class Settling:
    def __init__(self, *faults: Fault, sync_ms: int = 100, durable: bool = True) -> None:
        self.files = SimulatedFiles()
        self.disk = Disk(FaultyFiles(self.files, Faults(*faults, only=["pwrite"])))
        self.loop = Loop()
        self.clock = Clock()
        self.thread = SettlerThread(
            self.disk.settler,
            self.clock,
            self.clock.monotonic,
            self.loop.post,
            fatal,
            sync_ms=sync_ms,
            durable=durable,
        )

    def done(self) -> None: ...

    def handle(self, *requests: SettleRequest) -> None:
        self.thread.handle(list(requests))

    def seqs(self) -> list[int]:
        return [
            seq
            for frame in self.disk.dispatch.scan(HOUR)
            if isinstance(frame, Frame)
            for seq in frame.rows["seq"].tolist()
        ]


def row(seq: int) -> SettleRequest:
    return SettleRequest({HOUR: [dispatch_row(seq)]})


def test_the_result_of_a_webhook_is_written_at_once_and_synced_within_the_interval() -> None:
    parts = Settling()
    assert parts.thread.timeout_s() is None
    parts.handle(row(1), row(2))
    assert parts.seqs() == [1, 2]
    assert len(list(parts.disk.dispatch.scan(HOUR))) == 1
    assert parts.disk.settler.unsynced
    assert parts.thread.timeout_s() == pytest.approx(0.1)
    parts.clock.now_ms += 60
    parts.handle(row(3))
    assert parts.thread.timeout_s() == pytest.approx(0.04)
    assert parts.disk.settler.unsynced
    parts.clock.now_ms += 40
    parts.handle()
    assert not parts.disk.settler.unsynced
    assert parts.thread.timeout_s() is None


def test_an_acknowledgement_is_answered_when_it_is_durable() -> None:
    parts = Settling()
    request = row(1)
    request.done.append(parts.done)
    parts.handle(request)
    assert parts.loop.take() == [(parts.done,)]
    assert not parts.disk.settler.unsynced
    parts.handle(row(2))
    assert parts.loop.take() == []
    assert parts.seqs() == [1, 2]


def test_without_an_interval_every_row_is_synced() -> None:
    parts = Settling(sync_ms=0)
    parts.handle(row(1))
    assert not parts.disk.settler.unsynced


def test_nothing_is_synced_where_the_page_cache_is_enough() -> None:
    parts = Settling(durable=False)
    request = row(1)
    request.done.append(parts.done)
    parts.clock.now_ms += 1000
    parts.handle(request)
    assert parts.loop.take() == [(parts.done,)]
    assert parts.disk.settler.unsynced
    assert parts.thread.timeout_s() is None


def test_a_settled_hour_is_forgotten_after_its_last_row_is_durable() -> None:
    parts = Settling()
    parts.handle(row(1), SettleRequest(settled_hours=[HOUR]))
    assert not parts.disk.settler.unsynced
    parts.handle(row(2), SettleRequest(settled_hours=[HOUR], done=[parts.done]))
    assert parts.loop.take() == [(parts.done,)]
    parts.disk.replay.purging.delete_files(HOUR)
    parts.handle(row(3))
    assert parts.seqs() == [3]


def test_a_full_disk_answers_nobody_and_writes_every_row_once() -> None:
    parts = Settling(Fault(at=2, kind=FaultKind.NO_SPACE))
    parts.handle(row(1))
    waiting = [row(2), SettleRequest({HOUR: [dispatch_row(3)]}, done=[parts.done])]
    with pytest.raises(DiskFullError):
        parts.thread.handle(waiting)
    assert parts.loop.take() == []
    parts.thread.handle(waiting)
    assert waiting == []
    assert parts.loop.take() == [(parts.done,)]
    assert parts.seqs() == [1, 2, 3]


def test_at_the_end_the_rows_are_durable() -> None:
    parts = Settling()
    parts.handle(row(1))
    parts.thread.close()
    assert not parts.disk.settler.unsynced
