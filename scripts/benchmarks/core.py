"""What the core costs without HTTP and without threads: one call after the other on one core.

    python scripts/benchmarks/core.py [--json FILE] [--rows 1000000] [--only publish,wheel]

publish   decisions of `Messages.publish`: one by one and 500 at a time, with and without a key.
          Groups are closed every 1,000 messages, never written. Base: a tuple into a dictionary
group     a group of 250-byte messages encoded and appended to the message log, durably and not.
          Base: a write of 4 KiB, with and without fdatasync, by turns with the appends
replay    `Replay.file` of 100,000 records due within 1 hour and within 24, and the checkpoint.
          Base: the same bytes in one write
loader    an hour of --rows messages read into a run. Base: `numpy.fromfile` of the same rows
wheel     insert, remove, and advance through the hour in steps of 10 ms, with 10,000 and with
          --rows messages waiting. Base: heapq
reader    bodies of messages in random order, 512 at a time. Base: `os.pread` of each
memory    what tracemalloc counts for each message of an hour that is loaded. Base: heapq

A figure is the best of some rounds, since the machine may be busy with other things; the ratio to
the base is of the same run, and is what results from different machines can be compared by. The
garbage collector is on, as it is in the server. Files are written below the current directory, and
removed again.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import json
import os
import platform
import random
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table

from delayserver.config import Settings
from delayserver.decisions.group import Group
from delayserver.decisions.groups import Groups
from delayserver.decisions.messages import Messages
from delayserver.decisions.publishing import NewMessage, Publishing
from delayserver.decisions.sequencer import Sequencer
from delayserver.delivery.deliveries import Deliveries
from delayserver.delivery.dispatcher import Dispatcher
from delayserver.delivery.queue import Take
from delayserver.delivery.reader import Reader
from delayserver.records.ids import IdCodec, KeyHasher
from delayserver.records.message import Delivery, Payload, encode_payload
from delayserver.records.subscriptions import Registry, Subscription
from delayserver.schedule.committed import Records
from delayserver.schedule.expansion import Staging
from delayserver.schedule.hours import Hours
from delayserver.schedule.loader import Loader
from delayserver.schedule.replay import Replay
from delayserver.schedule.wheel import SLOT_MS, Wheel, build_run
from delayserver.schedule.wheel_rows import WHEEL_DTYPE, Batch
from delayserver.timers.timeouts import Timeouts
from storage.catalog import LmdbCatalog
from storage.definitions_log import DefinitionsLog
from storage.files import OsFiles
from storage.frame import Rows
from storage.hour_log import HourLog
from storage.message_log import Durability, MessageLog
from storage.rows import HOUR_MS, LogKind, RecordKind

ROUNDS = 5
STAMP = 1
SECRET = bytes(16)
START_MS = 500_000 * HOUR_MS
HOUR = START_MS // HOUR_MS
SUBJECT = "order.unpaid"
BODY = b'{"order": 1001, "note": "' + b"x" * 196 + b'"}'
GROUP_RECORDS = 1_000
REPLAY_ROWS = 100_000
LATER_MS = 30 * 60_000


@dataclass
class Row:
    """One figure: how much, of what, and how many times the base of the same run."""

    case: str
    figure: float
    unit: str
    base: str = ""
    ratio: float | None = None


def best(measure: Callable[[], float], rounds: int = ROUNDS) -> float:
    """The least of some measurements."""
    return min(measure() for _ in range(rounds))


def seconds(work: Callable[[], object]) -> float:
    """How long one call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# ---- the parts, on a disk --------------------------------------------------------------------


class NoPorts:
    """Takes what the core hands on, and does nothing with it."""

    def wake(self) -> None: ...
    def commit(self, group: Group) -> None: ...
    def file(self, group: Group) -> None: ...
    def read(self, take: Take) -> None: ...
    def send(self, subscription: Subscription, delivery: Delivery) -> None: ...
    def hand_out(self, take: Take, deliveries: Deliveries) -> None: ...
    def settle(self, hour: int, rows: bytes) -> None: ...


class Disk:
    """Files and catalog in a directory of their own."""

    def __init__(self, directory: str, durability: Durability = Durability.FSYNC) -> None:
        self.directory = directory
        self.files = OsFiles(directory)
        self.files.make_directory("catalog")
        self.catalog = LmdbCatalog(f"{directory}/catalog", max_bytes=1 << 34)
        self.message_log = MessageLog(
            self.files, stamp=STAMP, segment_bytes=64 << 20, durability=durability
        )
        self.schedule = HourLog(self.files, LogKind.SCHEDULE, stamp=STAMP)
        self.dispatch = HourLog(self.files, LogKind.DISPATCH, stamp=STAMP)
        self.replay = Replay(
            self.catalog,
            self.schedule,
            self.dispatch,
            self.message_log,
            Staging(self.files, STAMP),
            DefinitionsLog(self.files, stamp=STAMP),
        )

    def close(self) -> None:
        self.message_log.close()
        self.schedule.close()
        self.dispatch.close()
        self.catalog.close()


@contextmanager
def a_disk(durability: Durability = Durability.FSYNC) -> Iterator[Disk]:
    with tempfile.TemporaryDirectory(prefix="core-", dir=".") as directory:
        disk = Disk(directory, durability)
        try:
            yield disk
        finally:
            disk.close()


class Door:
    """`Messages` with what it needs; what is accepted is forgotten, group by group."""

    def __init__(self, catalog: LmdbCatalog) -> None:
        settings = Settings()
        self.sequencer = Sequencer(catalog, next_seq=1, subjects={SUBJECT: 1})
        self.groups = Groups(settings, self.sequencer, NoPorts())
        registry, hours = Registry(), Hours(live_through_hour=HOUR)
        dispatcher = Dispatcher(
            registry, self.sequencer.subject_names, hours, NoPorts(), Timeouts(START_MS)
        )
        ids, key_hasher = IdCodec(0, SECRET), KeyHasher(SECRET)
        messages = Messages(
            settings,
            catalog,
            self.sequencer,
            self.groups,
            Wheel(START_MS),
            hours,
            dispatcher,
            registry,
            ids,
            key_hasher,
            now_ms=START_MS,
        )
        self.publishing = Publishing(
            settings, self.sequencer, self.groups, messages, ids, key_hasher
        )

    def publish(self, messages: list[NewMessage], batch: int) -> None:
        publish = self.publishing.publish
        for start in range(0, len(messages), batch):
            publish(messages[start : start + batch], START_MS)
            if start % GROUP_RECORDS == 0:
                self.forget()

    def forget(self) -> None:
        self.groups.flush(START_MS)
        if not self.groups.is_idle:
            group = self.groups.on_committed(START_MS)
            group.end(None)
            self.groups.on_filed(group.last_seq)
            self.sequencer.prune(group.last_seq)


def a_group(
    count: int, first_seq: int, spread_ms: int, *, body: bytes, keyed: bool = False
) -> Group:
    """A group of messages that are due within `spread_ms`, in random order."""
    sequencer = Sequencer(None, next_seq=first_seq, subjects={SUBJECT: 1})  # type: ignore[arg-type]
    rng, hasher = random.Random(first_seq), KeyHasher(SECRET)
    for seq in range(first_seq, first_seq + count):
        sequencer.append(
            RecordKind.PUBLISH,
            due_ms=START_MS + rng.randrange(spread_ms),
            key_hash=hasher(1, str(seq)) if keyed else bytes(16),
            subject_id=1,
            payload=encode_payload(Payload(body)),
        )
    return sequencer.close_group(START_MS)


def records(group: Group) -> Records:
    return Records.from_bytes(*group.encode(), frozenset())


# ---- the cases -------------------------------------------------------------------------------


def publish(rows: int) -> Iterator[Row]:
    count = min(rows, 50_000)
    keys = iter(range(1 << 60))

    def messages(keyed: bool) -> list[NewMessage]:
        return [
            NewMessage(
                SUBJECT,
                START_MS + LATER_MS + n % 1000,
                Payload(BODY, key=str(next(keys)) if keyed else None),
            )
            for n in range(count)
        ]

    def dictionary() -> float:
        table: dict[int, tuple[int, bytes]] = {}
        pairs = [(n, (START_MS + n, BODY)) for n in range(count)]

        def fill() -> None:
            for key, value in pairs:
                table[key] = value

        return seconds(fill)

    base = count / best(dictionary)
    yield Row("dictionary, insert", base, "/s")
    with a_disk() as disk:
        for keyed in (False, True):
            for batch in (1, 500):

                def decide(keyed: bool = keyed, batch: int = batch) -> float:
                    door, new = Door(disk.catalog), messages(keyed)
                    return seconds(lambda: door.publish(new, batch))

                figure = count / best(decide)
                name = f"publish, {'key' if keyed else 'no key'}, {batch} at a time"
                yield Row(name, figure, "/s", "dictionary", figure / base)


def group(rows: int) -> Iterator[Row]:
    del rows
    for durability in (Durability.FSYNC, Durability.OS):
        with a_disk(durability) as disk:
            path = Path(disk.directory, "probe")
            path.write_bytes(bytes(1 << 20))
            descriptor = os.open(path, os.O_RDWR)

            def write_once(descriptor: int = descriptor, durability: str = durability) -> None:
                os.pwrite(descriptor, bytes(4096), 0)
                if durability is Durability.FSYNC:
                    os.fdatasync(descriptor)

            seq = 1
            for count in (1, 100, 1_000):
                probes: list[float] = []
                appends: list[float] = []
                groups = [a_group(count, seq + count * n, HOUR_MS, body=BODY) for n in range(50)]
                seq += count * len(groups)
                # By turns, since the disk may be busy with other things.
                for new in groups:
                    probes.append(seconds(write_once))
                    appends.append(seconds(lambda new=new: append(disk.message_log, new)))
                base, figure = 1 / median(probes), 1 / median(appends)
                name = "write" if durability is Durability.OS else "fdatasync"
                yield Row(f"{name} of 4 KiB, median", base, "/s")
                yield Row(
                    f"group of {count:,}, {durability}, median",
                    figure,
                    "groups/s",
                    name,
                    figure / base,
                )
            os.close(descriptor)


def append(message_log: MessageLog, group: Group) -> None:
    """What the committer does."""
    data, payload = group.encode()
    message_log.append(
        data,
        payload,
        first_seq=group.first_seq,
        last_seq=group.last_seq,
        created_ms=group.created_ms,
    )


def replay(rows: int) -> Iterator[Row]:
    del rows
    for keyed in (False, True):
        for hours in (1, 24):
            writing: list[float] = []
            filing: list[float] = []
            checkpoint: list[float] = []
            with a_disk() as disk:
                disk.replay.checkpoint()
                file = disk.files.open("probe", create=True)
                for first_seq in range(1, 3 * REPLAY_ROWS, REPLAY_ROWS):
                    batch = [
                        records(a_group(10_000, seq, hours * HOUR_MS, keyed=keyed, body=BODY))
                        for seq in range(first_seq, first_seq + REPLAY_ROWS, 10_000)
                    ]
                    length = sum(len(one.payload) + one.rows.nbytes for one in batch)
                    data = bytes(length)
                    writing.append(seconds(partial(file.pwrite, [data], 0)))
                    filing.append(seconds(lambda batch=batch: disk.replay.file(batch, START_MS)))
                    checkpoint.append(seconds(disk.replay.checkpoint))
                file.close()
            name = f"file {REPLAY_ROWS:,}, {hours} h, {'key' if keyed else 'no key'}"
            figure, ratio = REPLAY_ROWS / min(filing), min(writing) / min(filing)
            yield Row(name, figure, "rows/s", "one write", ratio)
            yield Row("… and its checkpoint", 1000 * min(checkpoint), "ms")


def file_hour(disk: Disk, rows: int, body: bytes) -> Rows:
    """File an hour of messages; returns them as rows of the wheel."""
    disk.replay.snapshot(HOUR)
    live = []
    for first_seq in range(1, rows + 1, 50_000):
        count = min(50_000, rows + 1 - first_seq)
        new = a_group(count, first_seq, HOUR_MS, body=body)
        [(_, here)] = disk.replay.file([records(new)], START_MS).live
        live.append(here)
    disk.replay.checkpoint()
    return np.concatenate(live)


def loader(rows: int) -> Iterator[Row]:
    with a_disk() as disk:
        waiting = file_hour(disk, rows, b"{}")
        path = Path(disk.directory, "rows")
        waiting.tofile(path)
        base = rows / best(lambda: seconds(lambda: np.fromfile(path, WHEEL_DTYPE)), 3)
        yield Row("numpy.fromfile", base, "rows/s")
        reader = Loader(disk.schedule, disk.dispatch, slot_ms=SLOT_MS)
        disk.replay.live_through_hour = HOUR - 1
        [snapshot] = disk.replay.snapshot(HOUR)

        def load() -> float:
            return seconds(lambda: reader.load(snapshot, Registry(), {1: SUBJECT}))

        figure = rows / best(load, 3)
        yield Row(f"load an hour of {rows:,}", figure, "rows/s", "fromfile", figure / base)
        figure = rows / best(lambda: seconds(lambda: build_run(waiting)), 3)
        yield Row("… of this, to sort by slot", figure, "rows/s", "fromfile", figure / base)
        gc.collect()
        tracemalloc.start()
        loaded = reader.load(snapshot, Registry(), {1: SUBJECT})
        kept, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        yield Row("kept for each row", kept / rows, "B")
        yield Row("at the peak, for each row", peak / rows, "B")
        assert loaded.count == rows


def random_rows(count: int, *, first_seq: int = 1) -> Rows:
    rng = np.random.default_rng(first_seq)
    rows = np.zeros(count, WHEEL_DTYPE)
    rows["seq"] = np.arange(first_seq, first_seq + count)
    rows["locator"] = rows["seq"]
    # The first slots are left alone, so that nothing falls due while rows are put in and out.
    rows["due_offset_ms"] = rng.integers(60_000, HOUR_MS, count)
    rows["route"] = 1
    return rows


def wheel(rows: int) -> Iterator[Row]:
    single = 5_000
    for waiting in sorted({10_000, rows}):
        loaded = random_rows(waiting)
        extra = random_rows(single, first_seq=waiting + 1)
        entries = [(offset, seq) for seq, _, offset, _ in loaded.tolist()]
        heap = list(entries)
        heapq.heapify(heap)
        more = [(offset, seq) for seq, _, offset, _ in extra.tolist()]

        def push_all(
            heap: list[tuple[int, int]] = heap, more: list[tuple[int, int]] = more
        ) -> None:
            for entry in more:
                heapq.heappush(heap, entry)

        push = single / seconds(push_all)
        wheel = Wheel(0)
        wheel.load(0, build_run(loaded))
        pieces = [extra[index : index + 1] for index in range(single)]

        def insert_all(wheel: Wheel = wheel, pieces: list[Rows] = pieces) -> None:
            for piece in pieces:
                wheel.insert(0, piece)

        figure = single / seconds(insert_all)
        name = f"with {waiting:,}: insert one"
        yield Row(name, figure, "/s", "heapq push", figure / push)

        bulk = random_rows(100_000, first_seq=waiting + single + 1)

        def insert_bulk(wheel: Wheel = wheel, bulk: Rows = bulk) -> None:
            for start in range(0, len(bulk), 1_000):
                wheel.insert(0, bulk[start : start + 1_000])

        figure = len(bulk) / seconds(insert_bulk)
        yield Row("… insert 1,000 at a time", figure, "rows/s", "heapq push", figure / push)

        for name, which in (("loaded", loaded), ("inserted", extra)):
            picked = random.Random(1).sample(which.tolist(), 2_000)

            def remove_all(
                wheel: Wheel = wheel, picked: list[tuple[int, int, int, int]] = picked
            ) -> None:
                for seq, _, offset_ms, _ in picked:
                    assert wheel.remove(seq, offset_ms) is not None

            figure = len(picked) / seconds(remove_all)
            yield Row(f"… remove one that was {name}", figure, "/s")

        pop = len(heap) / seconds(lambda heap=heap: [heapq.heappop(heap) for _ in range(len(heap))])
        fired = steps = 0
        began = time.perf_counter()
        for now_ms in range(0, HOUR_MS + 1, 10):
            for batch in wheel.advance(now_ms, loaded_until_ms=2 * HOUR_MS, rows_max=10_000):
                fired += len(batch.rows)
            steps += 1
        taken = time.perf_counter() - began
        yield Row("… advance by 10 ms", 1e6 * taken / steps, "µs")
        yield Row("… and fire", fired / taken, "rows/s", "heapq pop", fired / taken / pop)


def reader(rows: int) -> Iterator[Row]:
    count = min(rows, 100_000)
    with a_disk() as disk:
        waiting = file_hour(disk, count, BODY)
        waiting = waiting[np.random.default_rng(1).permutation(count)]
        subscription = Subscription(id=1, name="s", subject=SUBJECT, type="pull", created_ms=0)
        bodies = Reader(
            disk.schedule, disk.dispatch, IdCodec(0, SECRET), {1: SUBJECT}, lambda error: None
        )
        path = Path(disk.directory, disk.schedule.path(HOUR))
        descriptor = os.open(path, os.O_RDONLY)
        places = [(locator & 0xFFFFFF, locator >> 24) for locator in waiting["locator"].tolist()]

        def pread() -> None:
            for length, offset in places:
                os.pread(descriptor, length, offset)

        base = count / best(lambda: seconds(pread), 3)
        os.close(descriptor)
        yield Row("os.pread of each body", base, "/s")
        by_due = waiting[np.argsort(waiting["due_offset_ms"], kind="stable")]
        for name, order in (
            ("as they were filed", np.sort(waiting, order="seq")),
            ("as due", by_due),
        ):
            takes = [
                Take(subscription, [Batch(HOUR, order[start : start + 512])], {})
                for start in range(0, count, 512)
            ]

            def read_all(takes: list[Take] = takes) -> None:
                for take in takes:
                    assert len(bodies.deliveries(take, {})) == take.count

            figure = count / best(lambda work=read_all: seconds(work), 3)
            yield Row(f"deliveries, {name}", figure, "/s", "os.pread", figure / base)


def memory(rows: int) -> Iterator[Row]:
    def traced(make: Callable[[], object]) -> float:
        gc.collect()
        tracemalloc.start()
        kept = make()
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        del kept
        return size / rows

    loaded = random_rows(rows)

    def a_heap() -> object:
        return [(due, seq, str(seq)) for seq, due in enumerate(loaded["due_offset_ms"].tolist())]

    def a_loaded_wheel() -> object:
        wheel = Wheel(0)
        wheel.load(0, build_run(loaded))
        return wheel

    def a_filled_wheel() -> object:
        wheel = Wheel(0)
        for start in range(0, rows, 1_000):
            wheel.insert(0, loaded[start : start + 1_000])
        return wheel

    base = traced(a_heap)
    yield Row("heapq of (due, seq, id)", base, "B")
    for name, make in (("loaded", a_loaded_wheel), ("inserted", a_filled_wheel)):
        figure = traced(make)
        yield Row(f"each message of an hour, {name}", figure, "B", "heapq", figure / base)


CASES = {
    "publish": publish,
    "group": group,
    "replay": replay,
    "loader": loader,
    "wheel": wheel,
    "reader": reader,
    "memory": memory,
}


# ---- reporting -------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--rows", type=int, default=1_000_000, help="messages of the large hour")
    parser.add_argument("--only", default=",".join(CASES), help="cases, by commas")
    options = parser.parse_args()
    console = Console()
    if not console.is_terminal:
        console.width = 110
    table = Table(title="The core, one core, no HTTP")
    for name in ("case", "figure", "unit", "base", "ratio"):
        right = name in ("figure", "ratio")
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    results: dict[str, list[Row]] = {}
    for name in options.only.split(","):
        console.print(f"{name} …", style="dim")
        rows = results[name] = list(CASES[name](options.rows))
        for row in rows:
            figure = f"{row.figure:,.1f}" if row.figure < 1000 else f"{row.figure:,.0f}"
            ratio = "" if row.ratio is None else f"{row.ratio:.3g}"
            case = row.case if row.case.startswith("…") else f"{name}: {row.case}"
            table.add_row(case, figure, row.unit, row.base, ratio, end_section=row is rows[-1])
    console.print(table)
    if options.json is not None:
        report = {
            "benchmark": "core",
            "python": platform.python_version(),
            "rows": options.rows,
            "cases": {name: [asdict(row) for row in rows] for name, rows in results.items()},
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
