"""Rows and payloads for tests of the logs: small, sound, and different in every field."""

import numpy as np

from storage.directory import open_identity
from storage.files import Files
from storage.frame import Rows, seal
from storage.hour_log import OPEN_FILES_MAX, HourLog
from storage.message_log import Durability, MessageLog
from storage.rows import (
    DISPATCH_DTYPE,
    FLAG_REMOVAL,
    HOUR_MS,
    MESSAGE_DTYPE,
    SCHEDULE_DTYPE,
    LogKind,
    Outcome,
    RecordKind,
)

STAMP = 0x5EED_0001
HOUR = 498_663
"""2026-11-20T15 UTC."""
SEGMENT_BYTES = 4096


def body(seq: int) -> bytes:
    """The sealed payload of a record."""
    return seal(b"body of %d " % seq * (seq % 3 + 1))


def message_group(first_seq: int, count: int = 1, hour: int = HOUR) -> tuple[Rows, bytes]:
    """Publishes with consecutive seqs, due within `hour`."""
    rows = np.zeros(count, MESSAGE_DTYPE)
    payloads = [body(seq) for seq in range(first_seq, first_seq + count)]
    rows["seq"] = rows["message_seq"] = np.arange(first_seq, first_seq + count)
    rows["due_ms"] = hour * HOUR_MS + rows["seq"].astype(np.int64) % HOUR_MS
    rows["kind"] = RecordKind.PUBLISH
    rows["subject_id"] = 1
    _place(rows, payloads)
    return rows, b"".join(payloads)


def schedule_group(
    seqs: list[int], *, removed: dict[int, int] | None = None, hour: int = HOUR
) -> tuple[Rows, bytes]:
    """Entries with these seqs, and tombstones: seq of the record → seq of the entry it removes."""
    entries = np.zeros(len(seqs), SCHEDULE_DTYPE)
    entries["seq"] = entries["message_seq"] = seqs
    entries["kind"] = RecordKind.PUBLISH
    entries["subject_id"] = 1
    payloads = [body(seq) for seq in seqs]
    _place(entries, payloads)
    removed = removed or {}
    tombstones = np.zeros(len(removed), SCHEDULE_DTYPE)
    tombstones["seq"], tombstones["message_seq"] = list(removed), list(removed.values())
    tombstones["kind"] = RecordKind.CANCEL
    tombstones["flags"] = FLAG_REMOVAL
    # A record that stands among the entries, too, is a move.
    both = np.isin(entries["seq"], tombstones["seq"])
    entries["kind"][both] = RecordKind.MOVE
    tombstones["kind"][np.isin(tombstones["seq"], entries["seq"])] = RecordKind.MOVE
    rows = np.concatenate([entries, tombstones])
    rows["due_ms"] = hour * HOUR_MS + rows["seq"].astype(np.int64) % HOUR_MS
    return rows[np.argsort(rows["seq"], kind="stable")], b"".join(payloads)


def dispatch_group(seqs: list[int], *, hour: int = HOUR, subscription_id: int = 1) -> Rows:
    """Deliveries of these schedule rows."""
    rows = np.zeros(len(seqs), DISPATCH_DTYPE)
    rows["seq"] = rows["message_seq"] = seqs
    rows["due_ms"] = hour * HOUR_MS + rows["seq"].astype(np.int64) % HOUR_MS
    rows["settled_ms"] = rows["due_ms"] + 2
    rows["subscription_id"] = subscription_id
    rows["attempt"] = 1
    rows["outcome"] = Outcome.DELIVERED
    return rows


def _place(rows: Rows, payloads: list[bytes]) -> None:
    lengths = np.array([len(payload) for payload in payloads], np.int64)
    rows["payload_length"] = lengths
    rows["payload_offset"] = np.cumsum(lengths) - lengths
    rows["payload_crc"] = [int.from_bytes(payload[:4], "little") for payload in payloads]


def message_log(
    files: Files,
    *,
    segment_bytes: int = SEGMENT_BYTES,
    durability: Durability = Durability.FSYNC,
) -> MessageLog:
    """The message log of a directory."""
    return MessageLog(files, stamp=STAMP, segment_bytes=segment_bytes, durability=durability)


def append_group(log: MessageLog, first_seq: int, count: int = 1) -> None:
    """Append a group of publishes."""
    rows, payload = message_group(first_seq, count)
    log.append(
        rows.tobytes(), payload, first_seq=first_seq, last_seq=first_seq + count - 1, created_ms=1
    )


def append_rows(
    log: HourLog, offset: int, rows: Rows, payload: bytes = b"", *, hour: int = HOUR
) -> int:
    """Append a frame to an hour's file; returns where it ends."""
    return log.append(
        hour,
        rows.tobytes(),
        payload,
        offset=offset,
        first_seq=int(rows["seq"].min()),
        last_seq=int(rows["seq"].max()),
        created_ms=1,
    )[1]


def schedule_log(files: Files, *, open_files_max: int = OPEN_FILES_MAX) -> HourLog:
    """The schedule log of a directory."""
    return HourLog(files, LogKind.SCHEDULE, stamp=STAMP, open_files_max=open_files_max)


def dispatch_log(files: Files) -> HourLog:
    """The dispatch log of a directory."""
    return HourLog(files, LogKind.DISPATCH, stamp=STAMP)


def content(files: Files, path: str) -> bytes:
    """All bytes of a file."""
    file = files.open(path)
    try:
        return file.pread(file.size(), 0)
    finally:
        file.close()


def overwrite(files: Files, path: str, offset: int, data: bytes) -> None:
    """Change bytes of a file behind everybody's back, durably."""
    file = files.open(path, create=True)
    try:
        file.pwrite([data], offset)
        file.fdatasync()
    finally:
        file.close()


def flip(files: Files, path: str, offset: int) -> None:
    """Change one byte of a file."""
    overwrite(files, path, offset, bytes([content(files, path)[offset] ^ 0xFF]))


def directory(files: Files) -> None:
    """Ten records in two segments; some filed into an hour of two frames; some delivered."""
    open_identity(files, random_bytes=lambda length: STAMP.to_bytes(length, "big"))
    for groups in ((1, 2), (3, 3)), ((6, 1), (7, 4)):
        log = message_log(files)
        list(log.read(1))
        for first_seq, count in groups:
            append_group(log, first_seq, count)
        log.close()
    schedule, dispatch = schedule_log(files), dispatch_log(files)
    end = append_rows(schedule, 0, *schedule_group([1, 2, 3]))
    append_rows(schedule, end, *schedule_group([5, 6, 8], removed={7: 2, 8: 3}))
    append_rows(dispatch, append_rows(dispatch, 0, dispatch_group([5, 6])), dispatch_group([1]))
    for hour_log in (schedule, dispatch):
        hour_log.sync()
        hour_log.close()
