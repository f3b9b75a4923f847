"""One, few, many: what each lane of publish, cancel and load saves beside the path in its place.

    scripts/bench lanes [--quick] [--only NAME] [--json FILE]

A lane is a second way of doing the same, for some sizes. It stays if it takes the time of the other
way divided by at least 1.15, at the sizes at which it is used. Both ways are measured in turn in
one process, and of each its best round counts; docs/decisions/0024-lanes.md says what became of
each.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from load import arrow_stream
from report import Figure, add_options, make_console, parse, report

from delayserver.api.intake import Intake
from delayserver.config import Settings
from delayserver.decisions import packing
from delayserver.decisions.new_messages import PublishBatch
from delayserver.decisions.packing import ARRAYS_MIN, Publishes
from delayserver.decisions.sequencer import Sequencer
from delayserver.parts.installed import PARTS
from delayserver.records.ids import COLUMNS_MIN, IdCodec, KeyHasher
from delayserver.records.subscriptions import Registry
from delayserver.schedule.wheel_rows import wheel_rows
from delayserver.server.engine import Engine
from delayserver.times import format_time
from storage.catalog import LmdbCatalog
from storage.frame import Frame, crcs_of, encode, scan, seal
from storage.frame_runs import FrameRun, scan_runs
from storage.rows import HOUR_MS, SCHEDULE_DTYPE, LogKind

RATIO_MIN = 1.15
MESSAGES = 2_000
"""In one round, in calls of the size that is measured."""
ROUNDS = 15
NOW_MS = 500_000 * HOUR_MS
SUBJECT = "order.unpaid"
BODY = b'{"order": 1001, "user": "u-77120", "amount_cents": 2999, "note": "' + b"x" * 60 + b'"}'


class NoPorts:
    """What the engine needs done elsewhere is not done."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments, **named: None


class EngineParts:
    """An engine that accepts, and writes nothing."""

    def __init__(self, catalog: LmdbCatalog) -> None:
        settings, secret = Settings(), bytes(16)
        sequencer = Sequencer(catalog, next_seq=1, subjects={})
        self.ids, self.hasher = IdCodec(0, secret), KeyHasher(secret)
        ports: Any = NoPorts()
        self.engine = Engine(
            settings,
            catalog,
            sequencer,
            Registry(()),
            self.ids,
            self.hasher,
            ports,
            first_hour=NOW_MS // HOUR_MS,
            now_ms=NOW_MS,
            stopwatch=lambda: 0,
            epoch="",
            random=lambda: 0.5,
            parts=PARTS,
        )
        self.intake = Intake(settings, sequencer.subjects, lambda: 0.5)
        sequencer.subject_id(SUBJECT)
        self.engine.start(NOW_MS // HOUR_MS, ())


@contextmanager
def new_parts() -> Iterator[Callable[[], EngineParts]]:
    """EngineParts on an empty catalog, as often as they are asked for."""
    with tempfile.TemporaryDirectory() as directory:
        catalog = LmdbCatalog(directory, max_bytes=1 << 26)
        try:
            yield lambda: EngineParts(catalog)
        finally:
            catalog.close()


Way = Callable[[EngineParts, Any], object]
"""One call of the size, with what was prepared for it."""


@dataclass(frozen=True, slots=True)
class MeasuredLane:
    """A way beside another one, at sizes at which it is used."""

    name: str
    beside: str
    sizes: Sequence[int]
    prepare: Callable[[EngineParts, int, int], Any]
    """For the call of that number, of so many messages. Not timed."""
    lane: Way
    other: Way


# ── what is prepared ───────────────────────────────────────────────────────────────────────────


def documents(parts: EngineParts, number: int, size: int, *, keyed: bool = False) -> list[bytes]:
    """Requests that each publish a message."""
    start = b'{"subject": "%b", "delay": 86400000, ' % SUBJECT.encode()
    return [
        start
        + (b'"key": "order-%d", ' % (number * size + index) if keyed else b"")
        + b'"body": %b}' % BODY
        for index in range(size)
    ]


def keyed_documents(parts: EngineParts, number: int, size: int) -> list[bytes]:
    return documents(parts, number, size, keyed=True)


def batch(parts: EngineParts, number: int, size: int) -> PublishBatch:
    return parts.intake.many(documents(parts, number, size), NOW_MS)


def keyed_batch(parts: EngineParts, number: int, size: int) -> PublishBatch:
    return parts.intake.many(keyed_documents(parts, number, size), NOW_MS)


def array(parts: EngineParts, number: int, size: int) -> bytes:
    return b"[" + b",".join(documents(parts, number, size)) + b"]"


def seqs_and_dues(parts: EngineParts, number: int, size: int) -> tuple[range, list[int]]:
    first_seq = 1 + number * size
    return range(first_seq, first_seq + size), [NOW_MS + seq for seq in range(size)]


def timed_array(parts: EngineParts, number: int, size: int) -> bytes:
    """A request body: a JSON array of `size` messages, each due at a moment of its own."""
    first_ms = NOW_MS + 1000 + number * size
    return b"[%b]" % b",".join(
        b'{"subject": "%b", "deliver_at": %d, "body": %b}'
        % (SUBJECT.encode(), first_ms + index, BODY)
        for index in range(size)
    )


def table(parts: EngineParts, number: int, size: int) -> tuple[bytes, bytes]:
    """Messages with keys, each due at a moment of its own: as Arrow, and as JSON with the moments
    as text, as most write them."""
    moments_ms = [NOW_MS + 1000 + number * size + index for index in range(size)]
    messages = [
        {
            "subject": SUBJECT,
            "body": msgspec.Raw(BODY),
            "key": f"order-{due_ms}",
            "deliver_at": due_ms,
        }
        for due_ms in moments_ms
    ]
    in_text = [
        {**message, "deliver_at": format_time(due_ms)}
        for message, due_ms in zip(messages, moments_ms, strict=True)
    ]
    return arrow_stream(messages), msgspec.json.encode(in_text)


def publishes(parts: EngineParts, number: int, size: int) -> Publishes:
    bodies = [BODY] * size
    return Publishes([NOW_MS] * size, [1] * size, bodies, crcs_of(bodies))


def keys(parts: EngineParts, number: int, size: int) -> tuple[list[int], list[str]]:
    return [1] * size, [f"order-{number * size + index}" for index in range(size)]


def published(parts: EngineParts, number: int, size: int) -> Any:
    """Seqs, due times and subjects of messages of the next day."""
    done = parts.engine.publishing.publish_new(batch(parts, number, size))
    assert done is not None
    seqs = np.arange(done.last_seq - size + 1, done.last_seq + 1, dtype=np.uint64)
    dues_ms = np.full(size, NOW_MS + 24 * HOUR_MS, np.int64)
    return seqs, dues_ms, np.ones(size, np.uint32)


class HourInMemory:
    """An hour's file of frames of one row each, with payloads of 200 bytes."""

    def __init__(self, frames: int) -> None:
        self.path = ""
        sealed = seal(bytes(200))
        row = np.zeros(1, SCHEDULE_DTYPE)
        row["payload_length"] = len(sealed)
        numbers = {"created_ms": NOW_MS, "stamp": 1}
        self._data = b"".join(
            encode(LogKind.SCHEDULE, row.tobytes(), sealed, first_seq=seq, last_seq=seq, **numbers)
            for seq in range(1, frames + 1)
        )
        self.end = len(self._data)

    def pread(self, length: int, offset: int) -> bytes:
        return self._data[offset : offset + length]


def hour_in_memory(parts: EngineParts, number: int, size: int) -> HourInMemory:
    return HourInMemory(size)


# ── the ways ───────────────────────────────────────────────────────────────────────────────────


def each_alone(parts: EngineParts, requests: list[bytes]) -> None:
    """Publish each request by itself, as the server does when it came in alone."""
    for data in requests:
        parts.engine.publishing.publish_one(parts.intake.one(data, NOW_MS), NOW_MS)


def together(parts: EngineParts, requests: list[bytes]) -> None:
    """Publish all requests at once, as the server does when they came in together."""
    parts.engine.publishing.publish_new(parts.intake.many(requests, NOW_MS))


def look_up_keys(parts: EngineParts, one: PublishBatch) -> None:
    """A batch whose keys are looked at one by one."""
    publishing: Any = parts.engine.publishing
    publishing._are_new_keys = lambda new: False
    publishing.publish_batch(one, NOW_MS)


def read_batch(parts: EngineParts, data: bytes) -> PublishBatch:
    return parts.intake.batch(data, "application/json", NOW_MS)


def read_pairs(parts: EngineParts, data: bytes) -> None:
    """A batch whose due times are made from what each message says of them."""

    def dues_ms(delays: list[Any], moments: list[Any], now_ms: int) -> list[int]:
        pairs = list(zip(delays, moments, strict=True))
        known = {pair: parts.intake.due_ms(*pair, now_ms) for pair in set(pairs)}
        return [known[pair] for pair in pairs]

    intake: Any = parts.intake
    intake._dues_ms = dues_ms
    read_batch(parts, data)


def publish_arrow(parts: EngineParts, made: tuple[bytes, bytes]) -> None:
    parts.engine.publishing.publish_batch(parts.intake.arrow(made[0], NOW_MS), NOW_MS)


def publish_json(parts: EngineParts, made: tuple[bytes, bytes]) -> None:
    parts.engine.publishing.publish_batch(read_batch(parts, made[1]), NOW_MS)


def cancel_each(parts: EngineParts, found: Any) -> None:
    seqs, dues_ms, _ = found
    for seq, due_ms in zip(seqs, dues_ms, strict=True):
        parts.engine.messages.cancel(int(seq), int(due_ms), subject=SUBJECT)


def read_in_runs(parts: EngineParts, hour: HourInMemory) -> None:
    """The rows of an hour as the loader makes them, of many frames at once."""
    for run in scan_runs(hour, 0, hour.end, kind=LogKind.SCHEDULE, stamp=1):
        assert isinstance(run, FrameRun)
        wheel_rows(run.rows, 0, run.payload_starts())


def read_frame_by_frame(parts: EngineParts, hour: HourInMemory) -> None:
    for found in scan(hour, 0, hour.end, kind=LogKind.SCHEDULE, stamp=1, payload=False):
        assert isinstance(found, Frame)
        wheel_rows(found.rows, 0, found.payload_start)


LANES = [
    MeasuredLane(
        "publish: one message alone",
        "columns of one",
        (1,),
        documents,
        each_alone,
        together,
    ),
    MeasuredLane(
        "publish: requests together",
        "each alone",
        (COLUMNS_MIN, 16, 64, 128),
        documents,
        together,
        each_alone,
    ),
    MeasuredLane(
        "publish: requests together, keys",
        "each alone",
        (COLUMNS_MIN, 16, 64, 128),
        keyed_documents,
        together,
        each_alone,
    ),
    MeasuredLane(
        "publish: keys of a batch in one look",
        "key by key",
        (16, 100, 1000),
        keyed_batch,
        lambda parts, one: parts.engine.publishing.publish_batch(one, NOW_MS),
        look_up_keys,
    ),
    MeasuredLane(
        "publish: due times of a batch, delays",
        "pair by pair",
        (16, 100, 1000),
        array,
        read_batch,
        read_pairs,
    ),
    MeasuredLane(
        "publish: due times of a batch, moments",
        "pair by pair",
        (16, 100, 1000),
        timed_array,
        read_batch,
        read_pairs,
    ),
    MeasuredLane(
        "publish: a table with keys as Arrow",
        "JSON, due times as text",
        (100, 500, 2000),
        table,
        publish_arrow,
        publish_json,
    ),
    MeasuredLane(
        "rows: a few, one by one",
        "an array",
        (2, 4, 8, 16, ARRAYS_MIN // 2),
        publishes,
        lambda parts, one: packing._pack_few(one, 1, 0),
        lambda parts, one: packing._pack_many(one, 1, 0),
    ),
    MeasuredLane(
        "ids: arrays",
        "each alone",
        (16, 64, 1000),
        seqs_and_dues,
        lambda parts, one: parts.ids.encode_many(one[1], one[0]),
        lambda parts, one: [
            parts.ids.encode(due_ms, seq) for seq, due_ms in zip(*one, strict=True)
        ],
    ),
    MeasuredLane(
        "key hashes: by subject",
        "each alone",
        (16, 64, 1000),
        keys,
        lambda parts, one: parts.hasher.many(*one),
        lambda parts, one: [parts.hasher(*each) for each in zip(*one, strict=True)],
    ),
    MeasuredLane(
        "cancel: columns",
        "each alone",
        (COLUMNS_MIN, 64, 500),
        published,
        lambda parts, found: parts.engine.cancels.cancel(*found),
        cancel_each,
    ),
    MeasuredLane(
        "load: short frames in runs",
        "frame by frame",
        (16, 100, 1000),
        hour_in_memory,
        read_in_runs,
        read_frame_by_frame,
    ),
]


# ── measuring ──────────────────────────────────────────────────────────────────────────────────


def measure(lane: MeasuredLane, size: int, messages: int, rounds: int) -> Figure:
    """The best round of both ways, in turn."""
    calls = max(1, messages // size)
    best_s = {"lane": float("inf"), "other": float("inf")}
    ways = {"lane": lane.lane, "other": lane.other}
    with new_parts() as make_parts:
        for number in range(rounds):
            for name in sorted(ways, reverse=bool(number % 2)):
                parts, way = make_parts(), ways[name]
                prepared = [lane.prepare(parts, call, size) for call in range(calls)]
                begun = time.thread_time()
                for one in prepared:
                    way(parts, one)
                best_s[name] = min(best_s[name], time.thread_time() - begun)
    taken_s = best_s["lane"]
    ratio = best_s["other"] / taken_s
    figure = Figure(
        case=f"{lane.name}, {size}",
        value=taken_s / (calls * size) * 1e6,
        unit="µs",
        ratios={"the time of the lane": ratio},
        note=f"beside: {lane.beside}",
    )
    figure.demand(f"≥ {RATIO_MIN}", ratio >= RATIO_MIN)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_options(parser)
    parser.add_argument("--only", default="", metavar="TEXT", help="lanes with this in their name")
    options = parse(parser)
    messages, rounds = (200, 1) if options.quick else (MESSAGES, ROUNDS)
    console = make_console()
    figures = []
    gc.disable()
    for lane in LANES:
        if options.only in lane.name:
            with console.status(lane.name):
                figures += [measure(lane, size, messages, rounds) for size in lane.sizes]
        gc.collect()
    report(
        options, "lanes", "Lanes beside the path in their place, µs per message", figures, console
    )


if __name__ == "__main__":
    main()
