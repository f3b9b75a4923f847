"""Data directories with many messages, made by the parts of the server that write them.

What a server keeps for ten million messages does not depend on how they came. So they need not pass
through its door: their records are filed as replay files them, a hundred thousand at a time.

Cost: about 1 µs per message and its bytes. Threads: one.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from delayserver.parts.installed import PARTS
from delayserver.records.message import Payload, encode_payload
from delayserver.records.subscriptions import Subscription, encode_subscription
from delayserver.schedule.committed import Records
from delayserver.schedule.expansion import Staging
from delayserver.schedule.replay import Replay
from storage.catalog import LmdbCatalog
from storage.definitions_log import DefinitionsLog
from storage.directory import open_identity
from storage.files import OsFiles
from storage.frame import Rows, seal
from storage.hour_log import HourLog
from storage.message_log import Durability, MessageLog
from storage.rows import (
    DISPATCH_DTYPE,
    FLAG_AFTER_SYNC,
    HOUR_MS,
    MESSAGE_DTYPE,
    LogKind,
    Outcome,
    RecordKind,
)
from storage.tiered_catalog import TieredCatalog

CATALOG_MAX_BYTES = 1 << 36
BATCH_ROWS = 100_000
DISPATCH_ROWS = 5_000


class Maker:
    """A data directory, made with the parts of the server that write it."""

    def __init__(self, root: Path, body: bytes, subjects: Sequence[str]) -> None:
        """`body` is that of every message."""
        self._subjects = subjects
        files = OsFiles(str(root))
        self.identity = open_identity(files, random_bytes=os.urandom)
        files.make_directory("catalog")
        for kind in ("schedule", "dispatch"):
            files.make_directory(kind)
        stamp = self.identity.stamp
        catalog = LmdbCatalog(str(root / "catalog"), max_bytes=CATALOG_MAX_BYTES)
        self._catalog = TieredCatalog(catalog, files, stamp=stamp)
        self._log = MessageLog(files, stamp=stamp, segment_bytes=1 << 16, durability=Durability.OS)
        schedule, dispatch = (
            HourLog(files, kind, stamp=stamp) for kind in (LogKind.SCHEDULE, LogKind.DISPATCH)
        )
        self._dispatch = dispatch
        staging = Staging(files, stamp)
        definitions = DefinitionsLog(files, stamp=stamp)
        self._replay = Replay(
            self._catalog, schedule, dispatch, self._log, staging, definitions, PARTS
        )
        self._sealed = encode_payload(Payload(body))
        self._seq = 0
        self._rng = np.random.default_rng(5)

    def define(self, *subscriptions: Subscription) -> None:
        """The subjects, and these subscriptions, whose ids count from 1."""
        payloads = [
            *map(encode_subscription, subscriptions),
            *(name.encode() for name in self._subjects),
        ]
        numbers = [*range(1, len(subscriptions) + 1), *range(1, len(self._subjects) + 1)]
        first = len(subscriptions)
        rows = self._rows(len(payloads))
        rows["kind"][:first], rows["kind"][first:] = RecordKind.SUBSCRIPTION, RecordKind.SUBJECT
        rows["subscription_id"][:first] = numbers[:first]
        rows["subject_id"][first:] = numbers[first:]
        sealed = [seal(payload) for payload in payloads]
        lengths = np.array([len(data) for data in sealed])
        rows["payload_length"], rows["payload_offset"] = lengths, np.cumsum(lengths) - lengths
        self._replay.file([Records(rows, b"".join(sealed))], 0)

    def _rows(self, count: int) -> Rows:
        rows = np.zeros(count, MESSAGE_DTYPE)
        rows["seq"] = self._seq + 1 + np.arange(count)
        rows["message_seq"] = rows["seq"]
        self._seq += count
        return rows

    def publish(
        self, due_ms: NDArray[np.int64], now_ms: int | None = None, *, keyed: bool = False
    ) -> Rows:
        """Messages that are due at these times; one frame in each of their files.

        They are filed at `now_ms`, or when the first of them is due. `keyed`: each has a key of its
        own, of which nobody knows the text."""
        count = len(due_ms)
        rows = self._rows(count)
        rows["kind"] = RecordKind.PUBLISH
        rows["due_ms"] = due_ms
        if keyed:
            rows["key_hash"] = np.frombuffer(self._rng.bytes(16 * count), "V16")
        rows["subject_id"] = self._rng.integers(1, len(self._subjects) + 1, count)
        length = len(self._sealed)
        rows["payload_length"] = length
        rows["payload_offset"] = np.arange(count) * length
        rows["payload_crc"] = int.from_bytes(self._sealed[:4], "little")
        self._replay.file(
            [Records(rows, self._sealed * count)], int(due_ms[0]) if now_ms is None else now_ms
        )
        self._replay.checkpoint()
        while self._replay.tidy():
            pass
        return rows

    def cancel(self, messages: Rows) -> None:
        """Cancel messages."""
        rows = self._rows(len(messages))
        rows["kind"] = RecordKind.CANCEL
        rows["message_seq"] = rows["target_seq"] = messages["seq"]
        rows["target_due_ms"] = messages["due_ms"]
        self._replay.file([Records(rows, b"")], int(messages["due_ms"][0]))

    def deliver(self, messages: Rows) -> None:
        """Record messages as delivered, a few milliseconds late, a few of them more."""
        late_ms = self._rng.lognormal(1.0, 1.1, len(messages)).astype(np.int64)
        rows = np.zeros(len(messages), DISPATCH_DTYPE)
        for name in ("seq", "message_seq", "due_ms"):
            rows[name] = messages[name]
        rows["settled_ms"] = messages["due_ms"] + late_ms
        rows["subscription_id"] = rows["attempt"] = 1
        rows["outcome"] = Outcome.DELIVERED
        hours = rows["due_ms"] // HOUR_MS
        for hour in np.unique(hours).tolist():
            here = rows[hours == hour]
            for start in range(0, len(here), DISPATCH_ROWS):
                some = here[start : start + DISPATCH_ROWS].copy()
                some["flags"][0] = FLAG_AFTER_SYNC
                self._dispatch.append(
                    hour,
                    some.tobytes(),
                    b"",
                    offset=self._dispatch.size(hour),
                    first_seq=int(some["seq"].min()),
                    last_seq=int(some["seq"].max()),
                    created_ms=int(some["settled_ms"][0]),
                )

    def close(self, retired: range = range(0)) -> None:
        """End, with these hours settled."""
        for hour in retired:
            self._replay.retire(hour, self._seq, (hour + 1) * HOUR_MS)
        self._replay.checkpoint()
        self._dispatch.sync()
        self._log.close()
        self._catalog.close()
