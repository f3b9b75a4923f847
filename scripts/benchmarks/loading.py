"""What the loader takes to read an hour, by itself: in this process, without a server.

The hour is one of a real data directory, or one that is written here, with its rows in frames of
chosen lengths: how an hour was filed decides what loading it costs.

Cost: `write_hour` some 10 µs for each frame and the time of its bytes. Threads: one.
"""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from delayserver.records.message import Payload, encode_payload
from delayserver.records.subscriptions import Registry
from delayserver.schedule.loader import Loader
from delayserver.schedule.replay import Snapshot
from storage.buckets import is_day
from storage.directory import open_identity
from storage.files import OsFiles
from storage.hour_log import HourLog
from storage.rows import HOUR_MS, SCHEDULE_DTYPE, LogKind, RecordKind, buffer_of

SLOT_MS = 500
ROUNDS = 3
SEED = 4


@dataclass(frozen=True, slots=True)
class TimedLoad:
    """One load of an hour."""

    hour: int
    rows: int
    """That wait."""
    seconds: float
    """The best of ROUNDS."""

    @property
    def row_us(self) -> float:
        return self.seconds / max(1, self.rows) * 1e6


def time_fullest(directory: Path) -> TimedLoad | None:
    """The longest file of an hour in a data directory that no server has; None: it has none."""
    files, stamp = _open(directory)
    log = HourLog(files, LogKind.SCHEDULE, stamp=stamp)
    try:
        hours = {hour: log.size(hour) for hour in log.buckets() if not is_day(hour)}
    finally:
        log.close()
    return time_load(directory, max(hours, key=hours.__getitem__)) if hours else None


def time_load(directory: Path, hour: int) -> TimedLoad:
    """Load an hour of a data directory, a few times. Its file is in the system's memory."""
    files, stamp = _open(directory)
    logs = [HourLog(files, kind, stamp=stamp) for kind in (LogKind.SCHEDULE, LogKind.DISPATCH)]
    try:
        loader = Loader(*logs, slot_ms=SLOT_MS)
        times_s = []
        for _ in range(ROUNDS):
            snapshot = Snapshot(hour, logs[0].size(hour))
            begun_at = time.perf_counter()
            loaded = loader.load(snapshot, Registry(()), {})
            times_s.append(time.perf_counter() - begun_at)
            assert not loaded.damage, loaded.damage
        return TimedLoad(hour, loaded.count, min(times_s))
    finally:
        for log in logs:
            log.close()


def write_hour(directory: Path, hour: int, body: bytes, frames: Iterable[int]) -> None:
    """The file of one hour, in a new data directory: a frame of each of these numbers of rows, all
    with this body, due at any time of the hour. There is nothing else in it, no catalog either."""
    files = OsFiles(str(directory))
    log = HourLog(
        files, LogKind.SCHEDULE, stamp=open_identity(files, random_bytes=os.urandom).stamp
    )
    sealed = encode_payload(Payload(body))
    rng = np.random.default_rng(SEED)
    seq, offset = 1, 0
    try:
        for count in frames:
            rows = np.zeros(count, SCHEDULE_DTYPE)
            rows["seq"] = rows["message_seq"] = seq + np.arange(count)
            rows["due_ms"] = hour * HOUR_MS + rng.integers(0, HOUR_MS, count)
            rows["kind"], rows["subject_id"] = RecordKind.PUBLISH, 1
            rows["payload_length"] = len(sealed)
            rows["payload_crc"] = int.from_bytes(sealed[:4], "little")
            rows["payload_offset"] = np.arange(count) * len(sealed)
            _, offset = log.append(
                hour,
                buffer_of(rows),
                sealed * count,
                offset=offset,
                first_seq=seq,
                last_seq=seq + count - 1,
                created_ms=0,
            )
            seq += count
        log.sync()
    finally:
        log.close()


def _open(directory: Path) -> tuple[OsFiles, int]:
    files = OsFiles(str(directory))
    return files, open_identity(files, random_bytes=None).stamp
