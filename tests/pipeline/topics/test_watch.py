"""Verdicts on hours, from the logs of a simulated server and beside what it did."""

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from delayserver.pipeline.logs import logs
from delayserver.pipeline.states.snapshot import open_directory
from delayserver.pipeline.topics.folding import LogPlace
from delayserver.pipeline.topics.hours import WatchStateError
from delayserver.pipeline.topics.names import KnownNames
from delayserver.pipeline.topics.pieces import (
    BEGUN,
    DAMAGED,
    DEFINED,
    PLACE,
    SCHEDULED,
    SETTLED,
    DamagedRecord,
    definitions,
    pack_place,
)
from delayserver.pipeline.topics.verdicts import HourVerdict
from delayserver.pipeline.topics.watch import GRACE_MS, HourAuditStream, LogBeginningError, Piece
from delayserver.schedule.filing import schedule_rows
from storage.files import OsFiles
from storage.frame import Frame
from storage.replicated.meta import make_identity
from storage.replicated.office import OfficeState
from storage.rows import DISPATCH_DTYPE, HOUR_MS, Outcome
from tests.pipeline.store import FAILED, HOUR, OK, START_MS, Store

MINUTE_MS = 60_000
IDENTITY = make_identity("c", 1, "os", lambda length: bytes(range(1, length + 1)))


class Topics:
    """What the brokers would have of a simulated server, micro-batch by micro-batch."""

    def __init__(self, store: Store, *, first_seq: int = 1) -> None:
        self.store = store
        self._first_seq = self._next_seq = first_seq
        self._settled: dict[str, int] = {}
        self._has_begun = False

    def batch(self, at_ms: int) -> list[Piece]:
        """All that is new, and the owner's clock, START_MS + at_ms."""
        found = [*self._of_log(), *self._of_settled()]
        if not self._has_begun:
            self._has_begun = True
            found.append((0, BEGUN, self._first_seq.to_bytes(8, "little")))
        state = OfficeState(next_seq=self._next_seq, epoch=1, clock_ms=START_MS + at_ms)
        return [*found, (0, PLACE, pack_place(LogPlace(state.pack())))]

    def _of_log(self) -> Iterator[Piece]:
        for frame in self._frames(logs.message_pieces(self._files)):
            if frame.first_seq >= self._next_seq:
                yield 0, SCHEDULED, schedule_rows(frame.rows)[0].tobytes()
                for one in definitions(frame):
                    yield 0, DEFINED, msgspec.msgpack.encode(one)
                self._next_seq = frame.last_seq + 1

    def _of_settled(self) -> Iterator[Piece]:
        for piece in logs.dispatch_pieces(self._files):
            rows = b"".join(frame.rows.tobytes() for frame in self._frames([piece]))
            before = self._settled.get(piece.path, 0)
            self._settled[piece.path] = len(rows)
            if len(rows) > before:
                yield 0, SETTLED, rows[before:]

    @property
    def _files(self) -> OsFiles:
        return OsFiles(self.store.root, readonly=True)

    def _frames(self, pieces: list[logs.LogPiece]) -> Iterator[Frame]:
        stamp = open_directory(self.store.root).stamp
        for piece in pieces:
            for found in logs.read(self._files, piece, stamp=stamp, payload=True):
                assert isinstance(found, Frame)
                yield found


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "data")
    yield made
    made.kill()


@pytest.fixture
def open_watch(tmp_path: Path) -> Callable[..., HourAuditStream]:
    """The watch, as it was left."""

    def opened(**options: Any) -> HourAuditStream:
        return HourAuditStream(tmp_path / "watch", IDENTITY, **options)

    return opened


def numbers(verdict: HourVerdict) -> dict[str, int]:
    """What became of the hour, but for what never happened."""
    names = ("delivered", "cancelled", "moved", "retried", "dead", "dropped", "pending")
    return {name: verdict.line[name] for name in names if verdict.line[name]}


def test_an_hour_is_told_once_when_it_is_over_and_nothing_of_it_waits(
    store: Store, open_watch: Callable[..., HourAuditStream]
) -> None:
    watch, topics = open_watch(), Topics(store)
    store.subscribe("all", "*")
    store.publish("order.unpaid", [MINUTE_MS + n for n in range(100)])
    for seq in store.publish("order.paid", [2 * MINUTE_MS] * 9):
        store.cancel(seq, 2 * MINUTE_MS)
    (moved,) = store.publish("order.moved", [3 * MINUTE_MS])
    store.move(moved, 3 * MINUTE_MS, HOUR_MS + MINUTE_MS, "order.moved")
    assert watch.take(0, topics.batch(MINUTE_MS // 2)) == []
    store.run(10 * MINUTE_MS, late_ms=7)
    assert watch.take(1, topics.batch(HOUR_MS + GRACE_MS - 1)) == []
    (verdict,) = watch.take(2, topics.batch(HOUR_MS + GRACE_MS))
    assert (verdict.hour, verdict.is_clean, verdict.waiting) == (HOUR, True, 0)
    assert numbers(verdict) == {"delivered": 100, "cancelled": 9, "moved": 1}
    assert verdict.line["max_ms"] >= 7 and verdict.unjudged == 0
    # What was moved is judged in its own hour, and nothing is told twice.
    store.run(HOUR_MS + 2 * MINUTE_MS)
    assert watch.take(3, topics.batch(2 * HOUR_MS)) == []
    (verdict,) = watch.take(4, topics.batch(2 * HOUR_MS + GRACE_MS))
    assert (verdict.hour, numbers(verdict)) == (HOUR + 1, {"delivered": 1})
    assert watch.open_hours == []


def test_an_hour_is_judged_when_the_clocks_of_all_shards_say_that_it_is_over(
    store: Store, tmp_path: Path
) -> None:
    identity = make_identity("c", 2, "os", random.Random(1).randbytes)
    watch, topics = HourAuditStream(tmp_path / "watch", identity), Topics(store)
    store.subscribe("all", "*")
    store.publish("order.unpaid", [MINUTE_MS])
    store.run(2 * MINUTE_MS)

    def other_shard(at_ms: int) -> Piece:
        """It has no messages, and its owner is heard of."""
        state = OfficeState(epoch=1, clock_ms=START_MS + at_ms)
        return 1, PLACE, pack_place(LogPlace(state.pack()))

    over_ms, begun = HOUR_MS + GRACE_MS, (1, BEGUN, (1).to_bytes(8, "little"))
    assert watch.take(0, [*topics.batch(over_ms), begun, other_shard(over_ms - 1)]) == []
    (verdict,) = watch.take(1, [*topics.batch(over_ms), other_shard(over_ms)])
    assert numbers(verdict) == {"delivered": 1}


def test_what_failed_and_was_tried_again_is_one_story(
    store: Store, open_watch: Callable[..., HourAuditStream]
) -> None:
    watch, topics = open_watch(), Topics(store)
    store.subscribe("all", "*")
    store.publish("order.flaky", [MINUTE_MS])
    answers = iter([FAILED])
    store.run(5 * MINUTE_MS, lambda subject: next(answers, OK))
    (verdict,) = watch.take(0, topics.batch(HOUR_MS + GRACE_MS))
    assert numbers(verdict) == {"delivered": 1, "retried": 1}
    assert verdict.is_clean


def test_an_hour_that_waits_is_told_when_patience_is_over_and_again_when_it_is_closed(
    store: Store, open_watch: Callable[..., HourAuditStream]
) -> None:
    watch, topics = open_watch(patience_ms=10 * MINUTE_MS), Topics(store)
    store.subscribe("all", "*")
    store.publish("a", [MINUTE_MS, 2 * MINUTE_MS])
    store.run(MINUTE_MS + 1000)
    assert watch.take(0, topics.batch(HOUR_MS + GRACE_MS)) == []
    assert watch.open_hours == [HOUR]
    (verdict,) = watch.take(1, topics.batch(HOUR_MS + 10 * MINUTE_MS))
    assert (verdict.waiting, verdict.said(), verdict.is_clean) == (1, "waits", True)
    assert watch.take(2, topics.batch(HOUR_MS + 11 * MINUTE_MS)) == []
    store.run(3 * MINUTE_MS)
    (verdict,) = watch.take(3, topics.batch(HOUR_MS + 12 * MINUTE_MS))
    assert (verdict.waiting, verdict.said()) == (0, "closed")
    # Its rows are forgotten now: what comes is counted.
    again = np.zeros(3, DISPATCH_DTYPE)
    again["due_ms"] = START_MS
    late: list[Piece] = [(0, SETTLED, again.tobytes())]
    assert watch.take(4, [*late, *topics.batch(HOUR_MS + 13 * MINUTE_MS)]) == []
    assert watch.late == 3


def settled_of(pieces: list[Piece]) -> np.ndarray:
    return np.concatenate(
        [np.frombuffer(data, DISPATCH_DTYPE) for _, what, data in pieces if what == SETTLED]
    )


@pytest.mark.parametrize(
    ("problem", "changes"),
    [
        ("repeated", {"settled_ms": START_MS + 5 * MINUTE_MS}),
        ("unknown", {"seq": 1}),
        ("unknown_outcome", {"outcome": 9, "subscription_id": 1, "seq": -1}),
        ("unknown_subscription", {"subscription_id": 77}),
        ("mismatched", {"message_seq": 1, "settled_ms": START_MS + 5 * MINUTE_MS}),
        ("early", {"settled_ms": START_MS + 1}),
        ("in_the_future", {"settled_ms": START_MS + 90 * 24 * HOUR_MS}),
        ("wrongly_dropped", {"outcome": Outcome.DROPPED, "subscription_id": 0}),
    ],
)
def test_a_row_that_is_not_true_is_named(
    store: Store, open_watch: Callable[..., HourAuditStream], problem: str, changes: dict[str, int]
) -> None:
    """With a correct checksum, as somebody would write it who may write to the topic."""
    watch, topics = open_watch(), Topics(store)
    store.subscribe("all", "*")
    store.publish("a", [MINUTE_MS, MINUTE_MS + 1])
    store.run(2 * MINUTE_MS)
    pieces = topics.batch(HOUR_MS + GRACE_MS)
    row = settled_of(pieces)[:1].copy()
    for name, value in changes.items():
        row[name] = value if value >= 0 else row[name]
    (verdict,) = watch.take(0, [*pieces, (0, SETTLED, row.tobytes())])
    assert not verdict.is_clean
    assert verdict.violations[problem] == 1, verdict.violations
    assert problem.replace("_", " ") in {
        part for one in verdict.examples for part in one["problem"].split(", ")
    }
    assert verdict.document()["violations"][problem] == 1


def test_the_same_row_twice_is_one(
    store: Store, open_watch: Callable[..., HourAuditStream]
) -> None:
    watch, topics = open_watch(), Topics(store)
    store.subscribe("all", "*")
    store.publish("a", [MINUTE_MS])
    store.run(2 * MINUTE_MS)
    pieces = topics.batch(HOUR_MS + GRACE_MS)
    again: list[Piece] = [one for one in pieces if one[1] == SETTLED]
    (verdict,) = watch.take(0, [*pieces, *again])
    assert verdict.is_clean and verdict.line["delivered"] == 1
    # What comes for an hour that was told has it judged again.
    row = settled_of(pieces).copy()
    row["settled_ms"] += 1
    (verdict,) = watch.take(1, [(0, SETTLED, row.tobytes()), *topics.batch(HOUR_MS + 2 * GRACE_MS)])
    assert verdict.said() == "closed, 1 repeated"


def test_a_micro_batch_counts_once_wherever_it_was_killed(
    store: Store, open_watch: Callable[..., HourAuditStream], tmp_path: Path
) -> None:
    """Behind the index: the batch is there. Before it: nothing of the batch is."""
    topics = Topics(store)
    store.subscribe("all", "*")
    store.publish("a", [MINUTE_MS + n for n in range(50)])
    first = topics.batch(0)
    open_watch().take(0, first)
    store.run(2 * MINUTE_MS)
    second = topics.batch(HOUR_MS + GRACE_MS)
    kept = tmp_path / "watch" / "index"
    before = kept.read_bytes()
    (expected,) = open_watch().take(1, second)
    assert open_watch().take(1, second) == []
    kept.write_bytes(before)
    (again,) = open_watch().take(1, second)
    assert again == expected
    assert numbers(again) == {"delivered": 50}


def test_rows_that_are_not_what_was_written_end_it(
    store: Store, open_watch: Callable[..., HourAuditStream], tmp_path: Path
) -> None:
    topics = Topics(store)
    store.publish("a", [MINUTE_MS])
    open_watch().take(0, topics.batch(0))
    (path,) = (tmp_path / "watch").glob("*.schedule")
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(WatchStateError, match=r"schedule: it is not what was written"):
        open_watch().take(1, topics.batch(HOUR_MS + GRACE_MS))
    other = make_identity("d", 1, "os", lambda length: bytes(range(2, length + 2)))
    with pytest.raises(WatchStateError, match="it is of another cluster"):
        HourAuditStream(tmp_path / "watch", other)
    (tmp_path / "watch" / "index").write_bytes(b"x")
    with pytest.raises(WatchStateError, match="it cannot be read"):
        open_watch()


def test_a_log_that_does_not_reach_back_needs_somebody_who_knows_the_names(
    store: Store, open_watch: Callable[..., HourAuditStream], tmp_path: Path
) -> None:
    """Messages from before are not judged, and what is published from then on is, by everybody who
    subscribed."""
    subscription = store.subscribe("all", "*")
    store.publish("a", [MINUTE_MS] * 3)
    (seq,) = store.publish("a", [2 * MINUTE_MS])
    with pytest.raises(LogBeginningError, match=r"the log of shard 0 begins with seq .*--data-dir"):
        open_watch().take(0, Topics(store, first_seq=seq).batch(0))
    shutil.rmtree(tmp_path / "watch")
    known = {0: KnownNames({1: "a"}, {subscription.id: subscription})}
    watch = open_watch(known=known)
    store.run(3 * MINUTE_MS)
    (verdict,) = watch.take(0, Topics(store, first_seq=seq).batch(HOUR_MS + GRACE_MS))
    assert (numbers(verdict), verdict.is_clean, verdict.unjudged) == ({"delivered": 1}, True, 3)


def test_damage_of_the_log_takes_nothing_in(
    store: Store, open_watch: Callable[..., HourAuditStream]
) -> None:
    watch, topics = open_watch(), Topics(store)
    broken = DamagedRecord("c.log/0", 7, "it does not match its checksum", ends_log=True)
    piece: Piece = (0, DAMAGED, msgspec.msgpack.encode(broken))
    assert watch.take(0, [*topics.batch(HOUR_MS * 2), piece]) == []
    assert (watch.damage, watch.is_new, watch.places) == ([broken], True, {})
