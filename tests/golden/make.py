"""Writes the golden files of the current format version: `python -m tests.golden.make`.

Everything in them stands here as literals, so the same bytes come out each time. Files of a version
that was released are never written again: if this changes them, the format has changed. Version 1
had no definitions log; all else is the same.
"""

from pathlib import Path

import msgspec
import numpy as np

from delayserver.records.message import Origin, Payload, encode_payload
from delayserver.records.tables import DeadLetter
from storage.buckets import DAY_MS, bucket_path, day_of
from storage.definitions_log import (
    Definition,
    DefinitionsLog,
    DefinitionsPlace,
    definitions_path,
)
from storage.directory import FORMAT_FILE, FORMAT_VERSION, open_identity
from storage.files import Files
from storage.frame import Rows, seal, unseal
from storage.hour_log import HourLog
from storage.message_log import Durability, MessageLog
from storage.rows import DISPATCH_DTYPE, MESSAGE_DTYPE, SCHEDULE_DTYPE, LogKind
from tests.world.storage.files import SimulatedFiles

DIRECTORIES = {version: Path(__file__).parent / f"v{version}" for version in (1, 2, 3)}
HOUR = 498_663  # 2026-11-20T15 UTC
START_MS = HOUR * 3_600_000
FAR_MS = 3 * DAY_MS
DAY = day_of(HOUR) + 3
KEY_HASH = bytes(range(16))

BODY = b'{"order": 7, "state": "unpaid"}'
PAYLOADS = {
    1: seal(b"order.unpaid"),
    2: seal(msgspec.msgpack.encode({"id": 1, "name": "shop", "subject": "order.*"})),
    3: encode_payload(Payload(BODY, key="order-7", headers={"trace": "a1"})),
    4: encode_payload(Payload(b"\x00\xff", content=1)),
    6: encode_payload(Payload(BODY, key="order-7", origin=Origin(3, START_MS + 1, 1, 5, 1))),
    7: encode_payload(Payload(b"\x00\xff", 1, origin=Origin(4, START_MS + 2, 1, 6, 2))),
}
LETTER = DeadLetter("it answered 500", START_MS + 4000, 2, PAYLOADS[7])
PAYLOADS[8] = seal(msgspec.msgpack.encode(LETTER))
PAYLOADS[9] = PAYLOADS[7]
# By checkpoint: table, key, value.
DEFINITIONS = {
    5: [
        Definition(1, b"\0\0\0\1", unseal(PAYLOADS[1])),
        Definition(2, b"\0\0\0\1", unseal(PAYLOADS[2])),
    ],
    8: [Definition(3, b"\0\0\0\1" + bytes(7) + b"\7", unseal(PAYLOADS[8]))],
    10: [Definition(3, b"\0\0\0\1" + bytes(7) + b"\7", None)],
}

# seq, due_ms, message_seq, target_seq, target_due_ms, key_hash, subject_id, subscription_id,
# attempt, kind
GROUPS: list[list[tuple[object, ...]]] = [
    [
        (1, 0, 1, 0, 0, bytes(16), 1, 0, 0, 7),
        (2, 0, 2, 0, 0, bytes(16), 0, 1, 0, 8),
        (3, START_MS + 1, 3, 0, 0, KEY_HASH, 1, 0, 0, 1),
        (4, START_MS + 2, 4, 0, 0, bytes(16), 1, 0, 0, 1),
        (5, 0, 3, 3, START_MS + 1, bytes(16), 0, 0, 0, 2),
    ],
    [
        (6, START_MS + 3_599_999, 3, 3, START_MS + 1, KEY_HASH, 1, 0, 0, 3),
        (7, START_MS + 3, 4, 4, START_MS + 2, bytes(16), 1, 1, 2, 4),
        (8, 0, 4, 7, START_MS + 3, bytes(16), 1, 1, 2, 5),
        (9, START_MS + 4, 4, 7, 0, bytes(16), 1, 1, 1, 6),
        (10, 0, 4, 7, 0, bytes(16), 0, 1, 0, 9),
    ],
]

# seq, due_ms, message_seq, key_hash, subject_id, subscription_id, attempt, kind, flags
ENTRIES: list[tuple[object, ...]] = [
    (3, START_MS + 1, 3, KEY_HASH, 1, 0, 0, 1, 0),
    (4, START_MS + 2, 4, bytes(16), 1, 0, 0, 1, 0),
    (5, START_MS + 1, 3, bytes(16), 0, 0, 0, 2, 1),
    (6, START_MS + 3_599_999, 3, KEY_HASH, 1, 0, 0, 3, 0),
    (6, START_MS + 1, 3, bytes(16), 1, 0, 0, 3, 1),
    (7, START_MS + 3, 4, bytes(16), 1, 1, 2, 4, 0),
    (7, START_MS + 2, 4, bytes(16), 1, 1, 2, 4, 1),
    (8, START_MS + 3, 7, bytes(16), 1, 1, 2, 5, 1),
    (9, START_MS + 4, 4, bytes(16), 1, 1, 1, 6, 0),
]

# seq, message_seq, due_ms, settled_ms, subscription_id, attempt, outcome, flags
DELIVERIES = [
    (9, 4, START_MS + 4, START_MS + 9, 1, 1, 1, 0),
    (6, 3, START_MS + 3_599_999, START_MS + 3_600_100, 0, 1, 2, 0),
]


def build() -> dict[str, bytes]:
    """All files by path, as the code writes them now."""
    files = SimulatedFiles()
    identity = open_identity(files, random_bytes=lambda length: bytes(range(1, length + 1)))
    log = MessageLog(files, stamp=identity.stamp, segment_bytes=4096, durability=Durability.FSYNC)
    for number, group in enumerate(GROUPS):
        rows, payload = message_rows(group)
        log.append(
            rows.tobytes(),
            payload,
            first_seq=int(rows["seq"][0]),
            last_seq=int(rows["seq"][-1]),
            created_ms=START_MS - 1000 + number,
        )
    log.close()
    for kind, (rows, payload) in (
        (LogKind.SCHEDULE, schedule_rows()),
        (LogKind.DISPATCH, (dispatch_rows(), b"")),
    ):
        hour_log = HourLog(files, kind, stamp=identity.stamp)
        hour_log.append(
            HOUR,
            rows.tobytes(),
            payload,
            offset=0,
            first_seq=int(rows["seq"].min()),
            last_seq=int(rows["seq"].max()),
            created_ms=START_MS,
        )
        hour_log.close()
    rows, payload = far_rows()
    days = HourLog(files, LogKind.SCHEDULE, stamp=identity.stamp)
    days.append(
        DAY,
        rows.tobytes(),
        payload,
        offset=0,
        first_seq=int(rows["seq"].min()),
        last_seq=int(rows["seq"].max()),
        created_ms=START_MS,
    )
    days.close()
    definitions = DefinitionsLog(files, stamp=identity.stamp)
    definitions.resume(DefinitionsPlace())
    for seq, changes in DEFINITIONS.items():
        definitions.record(changes, seq)
        definitions.committed()
    definitions.close()
    paths = [FORMAT_FILE, MessageLog.path(1), definitions_path(1)]
    paths += [bucket_path(kind, HOUR) for kind in (LogKind.SCHEDULE, LogKind.DISPATCH)]
    paths += [bucket_path(LogKind.SCHEDULE, DAY)]
    return {path: _content(files, path) for path in paths}


def message_rows(group: list[tuple[object, ...]]) -> tuple[Rows, bytes]:
    """The records of a group and their payloads."""
    rows = np.zeros(len(group), MESSAGE_DTYPE)
    fill(rows, group, ("payload_offset", "payload_length", "payload_crc", "flags"))
    return rows, _place(rows, np.ones(len(rows), bool))


def schedule_rows() -> tuple[Rows, bytes]:
    """The rows of the hour and their payloads."""
    rows = np.zeros(len(ENTRIES), SCHEDULE_DTYPE)
    fill(rows, ENTRIES, ("payload_offset", "payload_length", "payload_crc"))
    return rows, _place(rows, rows["flags"] == 0)


def far_rows() -> tuple[Rows, bytes]:
    """The same three days later: where they stand by day."""
    rows, payload = schedule_rows()
    rows["due_ms"] += FAR_MS
    return rows, payload


def dispatch_rows() -> Rows:
    """The finished deliveries of the hour."""
    return np.array(DELIVERIES, DISPATCH_DTYPE)


def fill(rows: Rows, values: list[tuple[object, ...]], left_out: tuple[str, ...]) -> None:
    """Set all columns but those, in their order."""
    names = [name for name in rows.dtype.names or () if name not in left_out]
    for row, row_values in zip(rows, values, strict=True):
        for name, value in zip(names, row_values, strict=True):
            row[name] = np.void(value) if isinstance(value, bytes) else value


def _place(rows: Rows, has_payload: np.ndarray) -> bytes:
    blob = b""
    for index, seq in enumerate(rows["seq"].tolist()):
        payload = PAYLOADS.get(seq, b"") if has_payload[index] else b""
        rows["payload_offset"][index] = len(blob)
        rows["payload_length"][index] = len(payload)
        rows["payload_crc"][index] = int.from_bytes(payload[:4], "little")
        blob += payload
    return blob


def _content(files: Files, path: str) -> bytes:
    file = files.open(path)
    try:
        return file.pread(file.size(), 0)
    finally:
        file.close()


if __name__ == "__main__":
    for name, data in build().items():
        target = DIRECTORIES[FORMAT_VERSION] / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        print(f"{target}: {len(data)} bytes")
