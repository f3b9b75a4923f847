"""Each process reports on its replica to all others, and an owner deletes old logs by the reports.

    replica ── how far, where from, in which stage ──▶ note ──▶ brokers ──▶ `watch` of each node
    notes of all ──▶ the part that two replicas have on disk ──▶ an owner has it deleted (R6)

Cost: a question to the brokers every few seconds. Threads: one of its own; the fields that others
set are read as they are just then.
"""

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog

from delayserver.cluster.membership import Lines
from delayserver.cluster.watch import Deletable, ReplicaNote, Stage, kept_by_two
from delayserver.recovery.standby import LAG_MAX_MS
from storage.errors import EngineError

if TYPE_CHECKING:
    from storage.replicated.kafka import KafkaEngine

REPORT_S: Final = 3.0
UNSEEN_MAX: Final = 30
"""Nodes that a note names at most: the brokers keep 4 KiB of it."""
DELETE_MS: Final = 60_000
KEPT_MS: Final = 3_600_000
"""Records that two replicas have filed stay in the logs for so long."""

log = structlog.get_logger()


class HowFar(NamedTuple):
    """How far a replica is."""

    kept: tuple[int, int] = (0, 0)
    """Offsets of the last checkpoint, in the shard's log and in that of settled deliveries."""
    read: int = 0
    """The shard's log was read up to here."""
    lag_ms: int = 0
    """All that stood in the shard's log so long ago is filed."""


class Reports(threading.Thread):
    """Says how far the replica is, and deletes records that no replica needs any more."""

    def __init__(
        self,
        engine: "KafkaEngine",
        shard: int,
        node: str,
        url: str,
        lines: Lines,
        *,
        clock: Callable[[], int],
        stopwatch: Callable[[], int],
    ) -> None:
        """`url`: where clients reach the node. `clock` gives ms since the epoch, `stopwatch` ms
        that only go on."""
        super().__init__(name="delayserver-reports", daemon=True)
        self.how_far: Callable[[], HowFar] = HowFar
        self.process_url = ""
        """Where others get a copy of the replica; empty: there is none."""
        self.stopped: tuple[int, int] = (0, 0)
        """The epoch and the last seq of a replica that waits for people; (0, 0): it does not."""
        self.stage: Stage = "copying"
        self.office = (0, "")
        """The epoch in which this process owns the shard, and where it is found; 0: it does not."""
        self._brokers = engine
        self._number = shard
        self._node = node
        self._url = url
        self._lines = lines
        self._clock = clock
        self._stopwatch = stopwatch
        self._ending = threading.Event()
        self._asked = threading.Event()
        self._is_behind = False
        self._deletable = Deletable(KEPT_MS), Deletable(KEPT_MS)
        """The first is for the shard's log, the second for the log of settled rows."""
        self._deleted_ms = stopwatch()

    def run(self) -> None:
        while not self._ending.is_set():
            self._asked.wait(REPORT_S)
            self._asked.clear()
            if self._ending.is_set():
                return
            try:
                self._report()
                if self._stopwatch() - self._deleted_ms >= DELETE_MS:
                    self._deleted_ms = self._stopwatch()
                    self._delete()
            except EngineError as error:
                log.debug("the brokers do not answer", error=str(error))
            except Exception as error:
                # It only helps: the shard is served without it.
                log.error("a report failed", error=str(error), exc_info=error)

    def _report(self) -> None:
        (kept, settled), read, lag_ms = self.how_far()
        stage, (epoch, address) = self.stage, self.office
        self._tell_lag(lag_ms)
        note = ReplicaNote(
            self._clock(),
            self._url,
            read,
            settled,
            self.process_url,
            lag_ms=lag_ms,
            unseen=self._lines.news.unseen.get(self._node, [])[:UNSEEN_MAX],
            stage=stage,
            epoch=epoch,
            address=address,
            stopped_epoch=self.stopped[0],
            stopped_seq=self.stopped[1],
        )
        self._brokers.commit_progress(self._node, self._number, kept, note.pack())

    def _tell_lag(self, lag_ms: int) -> None:
        """Tell people, once, that the replica is behind, and that it is not any more."""
        is_behind = lag_ms > LAG_MAX_MS
        if is_behind and not self._is_behind:
            log.warning("the replica is behind, and does not take over", lag_ms=lag_ms)
        elif self._is_behind and not is_behind:
            log.info("the replica has caught up")
        self._is_behind = is_behind

    def _delete(self) -> None:
        """R6: records that two replicas have had behind a checkpoint for an hour are not needed."""
        news, present_ms = self._lines.news, self._stopwatch()
        places = (
            kept_by_two(news, self._number, present_ms, lambda one: one.checkpoint_offset),
            kept_by_two(news, self._number, present_ms, lambda one: one.note.settled_offset),
        )
        opened = (self._brokers.log, self._brokers.settled)
        for place, deletable, open_log in zip(places, self._deletable, opened, strict=True):
            offset = deletable.before(place, present_ms)
            if self.office[0] and offset:
                with contextlib.closing(open_log(self._number)) as shard_log:
                    shard_log.delete_before(offset)

    def have_none(self, stage: Stage | None = None) -> None:
        """There is no replica that counts, and so none to copy. `stage`: None: as before."""
        self.process_url, self.how_far = "", HowFar
        if stage is not None:
            self.stage = stage

    def stop(self, epoch: int, seq: int) -> None:
        """Say at once that the replica waits for people: see `stopped`."""
        self.have_none()
        self.stopped = (epoch, seq)
        self._asked.set()

    def end(self) -> None:
        """Say nothing more."""
        self._ending.set()
        self._asked.set()
