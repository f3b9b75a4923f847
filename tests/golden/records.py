"""Records, payloads and definitions of kinds that the directories do not hold: each once, with
every field that it may have, beside the bytes that it had when it was written first.

The directories are the same for all versions, and what came since is read by servers that know of
it: kinds of records, tables, and fields at the end of payloads. It stands in `records.txt`, to
which `python -m tests.golden.records` adds what is not there yet. It changes nothing: what has
other bytes than there has another format.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from delayserver.parts.heartbeats.records import Heartbeat, unpack_heartbeat
from delayserver.parts.imports.records import Archived, pack_archived, unpack_archived
from delayserver.parts.schedules.records import (
    CatchUp,
    Overlap,
    Schedule,
    ScheduleChange,
    ScheduleState,
    pack_schedule,
    pack_schedule_change,
    unpack_schedule,
    unpack_state,
)
from delayserver.parts.sources.records import (
    OnError,
    Source,
    SourceChange,
    SourceState,
    UnpublishedRecord,
    pack_source,
    pack_source_change,
    pack_source_state,
    unpack_source,
    unpack_source_state,
)
from delayserver.records.attempts import DeliveryAttempt, History
from delayserver.records.definitions import TABLE_NUMBERS
from delayserver.records.direct import Destination
from delayserver.records.horizon import Mark
from delayserver.records.message import (
    Content,
    DebounceState,
    MessageOptions,
    Origin,
    OutcomeSubjects,
    Payload,
    ScheduledRun,
    Watch,
    decode_payload,
    encode_payload,
    row_flags,
)
from delayserver.records.subscriptions import (
    AmqpTarget,
    KafkaTarget,
    NatsTarget,
    RedisTarget,
    SubjectSpan,
    Subscription,
    decode_subscription,
    encode_subscription,
)
from delayserver.schedule.expansion import ImportRecord, ImportState, pack_import, unpack_import
from delayserver.schedule.filing import parts_by_bucket, schedule_rows
from storage.catalog import Table
from storage.definitions_log import Definition, definitions_in, encode_definitions
from storage.frame import Frame, Rows, encode, scan, seal
from storage.notes import Note, encode_note, framed, unpack_notes
from storage.rows import DISPATCH_DTYPE, MESSAGE_DTYPE, NO_KEY, LogKind, RecordKind
from tests.golden.make import BODY, HOUR, KEY_HASH, START_MS, fill
from tests.world.schedule_records import unpack_schedule_change
from tests.world.source_records import unpack_source_change

GOLDEN = Path(__file__).with_name("records.txt")
STAMP = 0x01020304


@dataclass(frozen=True)
class Value:
    """Something as it is meant, and how it is written and read."""

    value: object
    written: bytes
    read: Callable[[bytes], object]


# ── payloads of messages ───────────────────────────────────────────────────────────────────────

DIRECT = Destination(
    *("https://shop.example:8443/paid", "order.unpaid", "whsec_c2VjcmV0"),
    *(5_000, 3, (1_000, 60_000)),
)
ATTEMPTS = (
    DeliveryAttempt(1, 1, START_MS + 2, 31, 500, "no", "HTTP 500"),
    DeliveryAttempt(2, 1, START_MS + 3, None, 0, "", "größer"),
)
STATE = ScheduleState(
    *(13, 12, START_MS - 9, START_MS + 86_400_000, START_MS, 13, START_MS + 7, 41, 2),
    *(START_MS - 5, True),
)
SET_BACK = msgspec.structs.replace(
    STATE,
    next_reading_ms=START_MS + 1,
    left_from_ms=START_MS - 4,
    since_ms=START_MS - 3,
    passed_from_ms=START_MS + 5,
    passed_until_ms=START_MS + 6,
)
PAYLOADS = {
    "history": Payload(
        BODY, origin=Origin(4, START_MS + 2, 1, 6, 2), history=History(ATTEMPTS, 7, True)
    ),
    "watch": Payload(BODY, watch=Watch(("order:7", "shop:1"), 1)),
    "ttl and priority": Payload(
        b"{}", key="k", options=MessageOptions(60_000, since_ms=5, priority=9)
    ),
    "group": Payload(BODY, options=MessageOptions(priority=2, group="customer:7")),
    "to": Payload(BODY, options=MessageOptions(to=DIRECT)),
    "to with defaults": Payload(
        BODY, options=MessageOptions(to=Destination("http://127.0.0.1/", "a"))
    ),
    "debounce": Payload(
        BODY, key="k", options=MessageOptions(debounce=DebounceState(5_000, 60_000, True, 70))
    ),
    "outcomes": Payload(BODY, options=MessageOptions(outcomes=OutcomeSubjects("paid", "unpaid"))),
    "outcome of the dead": Payload(
        BODY, options=MessageOptions(outcomes=OutcomeSubjects(dead="unpaid"))
    ),
    "run": Payload(
        BODY,
        key="nightly@1795575600000",
        headers={"delay-schedule": "nightly"},
        run=ScheduledRun("nightly", STATE.pack()),
    ),
    "all of it": Payload(
        b"\0\xff",
        Content.BINARY,
        "order-7",
        {"trace": "a1"},
        Origin(4, START_MS + 2, 1, 6, 2),
        Watch(("order:7",)),
        History(ATTEMPTS[:1]),
        MessageOptions(1, 2, 3, "g", DIRECT, OutcomeSubjects("paid")),
        ScheduledRun("nightly", STATE.pack()),
    ),
}


def _read_payload(sealed: bytes) -> Payload:
    return decode_payload(sealed, "golden", 0, 1)


# ── payloads of other records, and definitions ─────────────────────────────────────────────────

HEARTBEAT = Heartbeat("pump-1", 10_000, 1, encode_payload(Payload(BODY)))
IMPORT = ImportRecord(
    *("nightly", 3, [("nightly.000.part", 4096, 2, 17), ("nightly.001.part", 64, 1, 18)]),
    *(bytes(range(20)), 1),
)
SCHEDULE = Schedule(
    *("nightly", 1, encode_payload(Payload(BODY)), "0 9 * * MON-FRI", 0, "Europe/Berlin", 0),
    *(30_000, CatchUp.ALL, Overlap.SKIP, START_MS, START_MS + 9, 100),
)
EVERY = Schedule("pulse", 1, encode_payload(Payload(BODY)), "", 60_000, "UTC", START_MS)
SOURCE = Source(
    *("orders", 1),
    KafkaTarget(
        "a:9092,b:9092", "orders", "{subject}", True, "me", "secret", "SCRAM-SHA-256", True
    ),
    "delay-until",
    "delayserver-orders",
    OnError.STOP,
)
SOURCE_STATE = SourceState(
    *(21, 20, START_MS, True, True, {0: 17, 2: 1 << 40}, 1000, 3),
    UnpublishedRecord(2, 16, "the value has 9 bytes", START_MS + 1),
)
KNOWN_TOPIC = msgspec.structs.replace(SOURCE_STATE, identity="n6UzA3jHTnyyBqoyHb4DcQ")
HEARTBEAT_BYTES = msgspec.msgpack.encode(HEARTBEAT)
IMPORT_BYTES = msgspec.msgpack.encode(IMPORT)
IMPORTED = ImportState(22, START_MS, IMPORT)
ARCHIVED = Archived(4096, 128, 22, 3, "5f2a", "s3://archive/2026-11-20T15", START_MS)
CHANGES = {
    "schedule": ScheduleChange("nightly", pack_schedule(SCHEDULE), STATE.pack()),
    "schedule, its state alone": ScheduleChange("nightly", None, STATE.pack()),
    "schedule, its end": ScheduleChange("nightly"),
}
SOURCE_CHANGES = {
    "source": SourceChange("orders", pack_source(SOURCE), pack_source_state(SOURCE_STATE)),
    "source, its state alone": SourceChange("orders", None, pack_source_state(SOURCE_STATE)),
    "source, its end": SourceChange("orders"),
}

TARGETS = (
    KafkaTarget("a:9092", "due", "{id}", True, "me", "secret", "SCRAM-SHA-512", True),
    RedisTarget("rediss://:secret@127.0.0.1:6379/1", "due", 1000),
    NatsTarget("tls://me:secret@127.0.0.1:4222", "due.{key}"),
    AmqpTarget("amqps://me:secret@127.0.0.1/shop", "due", "{key}"),
)
HOOK = Subscription(
    id=1,
    name="hook",
    subject="order.*",
    type="webhook",
    created_ms=START_MS,
    url="https://shop.example/paid",
    secrets=("whsec_c2VjcmV0",),
    timeout_ms=5_000,
    max_in_flight=8,
    max_attempts=3,
    backoff_ms=(1_000, 60_000),
    lease_ms=20_000,
    rate_per_s=2.5,
    rate_burst=5,
    batch_max=100,
    linger_ms=50,
    spread_ms=60_000,
    drop_older_than_ms=3_600_000,
    paused=True,
    deleted=True,
    subject_since_ms=START_MS + 1,
    horizon=(Mark(17, START_MS), Mark(19, START_MS - 9)),
    target=TARGETS[0],
    headers={"authorization": "Bearer secret"},
    method="PUT",
    disable_after_ms=259_200_000,
    pause_reason="failures",
    failing_since_ms=START_MS + 2,
)
"""With all that a definition may hold; no subscription has that together."""
CHANGED = Subscription(
    *(3, "moved", "order.*", "pull", START_MS),
    history=(
        SubjectSpan("order.paid", 17, (Mark(16, START_MS), Mark(16, START_MS - 9))),
        SubjectSpan("order.*", 90, (Mark(89, START_MS + 60_000),)),
    ),
)
DELETED = Subscription(
    *(4, "gone", "refund", "pull", START_MS),
    deleted=True,
    history=(
        SubjectSpan("refund", 18, (Mark(17, START_MS),)),
        SubjectSpan("", 91, (Mark(90, START_MS + 60_001),)),
    ),
)


def _read_import_record(data: bytes) -> ImportRecord:
    return msgspec.msgpack.decode(data, type=ImportRecord)


# ── rows ───────────────────────────────────────────────────────────────────────────────────────

# seq, due_ms, message_seq, target_seq, target_due_ms, key_hash, subject_id, subscription_id,
# attempt, kind; and the payload: that of a message, or what is sealed.
RECORDS: list[tuple[tuple[object, ...], Payload | bytes]] = [
    ((11, 0, 11, 0, 0, NO_KEY, 0, 0, 0, RecordKind.HEARTBEAT), HEARTBEAT_BYTES),
    (
        (12, START_MS + 9, 3, 3, START_MS + 1, KEY_HASH, 1, 0, 0, RecordKind.FIRE),
        Payload(BODY, key="order-7", origin=Origin(3, START_MS + 1, 1, 5, 1)),
    ),
    (
        (13, START_MS + 7, 13, 0, 1 << 62, KEY_HASH, 1, 0, 0, RecordKind.RUN),
        PAYLOADS["run"],
    ),
    (
        (14, 0, 14, 0, 0, NO_KEY, 0, 0, 0, RecordKind.SCHEDULE),
        pack_schedule_change(CHANGES["schedule"]),
    ),
    (
        (15, START_MS + 50, 4, 4, START_MS + 2, NO_KEY, 1, 1, 1, RecordKind.REPLAY),
        PAYLOADS["history"],
    ),
    (
        (16, START_MS + 8, 16, 0, 0, NO_KEY, 1, 0, 0, RecordKind.PUBLISH),
        PAYLOADS["ttl and priority"],
    ),
    ((17, START_MS + 8, 17, 0, 0, NO_KEY, 1, 0, 0, RecordKind.PUBLISH), PAYLOADS["group"]),
    (
        (18, START_MS + 8, 18, 0, 0, NO_KEY, 1, DIRECT.subscription_id, 0, RecordKind.PUBLISH),
        PAYLOADS["to"],
    ),
    ((19, START_MS + 8, 19, 0, 0, NO_KEY, 1, 0, 0, RecordKind.PUBLISH), PAYLOADS["outcomes"]),
    ((20, START_MS + 8, 20, 0, 0, NO_KEY, 1, 0, 0, RecordKind.PUBLISH), PAYLOADS["watch"]),
    (
        (21, 0, 21, 0, 0, NO_KEY, 0, 0, 0, RecordKind.SOURCE),
        pack_source_change(SOURCE_CHANGES["source"]),
    ),
    # It takes the seqs up to 24.
    ((22, 0, 22, 0, 0, NO_KEY, 0, 0, 0, RecordKind.IMPORT), IMPORT_BYTES),
]
# seq, message_seq, due_ms, settled_ms, subscription_id, attempt, outcome, flags
SETTLED = [(seq, 4, START_MS + 4, START_MS + 9, 1, 1, 1, 0) for seq in (9, 10)]
NOTES = [Note(HOUR, 9, 1, 2, START_MS + 4, 5, 204, "thanks"), Note(HOUR, 9, 1, 2, START_MS, 0)]
DEFINED = {
    Table.HEARTBEATS: (b"pump-1", HEARTBEAT_BYTES),
    Table.IMPORTS: (b"nightly", pack_import(IMPORTED)),
    Table.ARCHIVES: (HOUR.to_bytes(4, "big"), pack_archived(ARCHIVED)),
    Table.SCHEDULES: (b"nightly", pack_schedule(SCHEDULE)),
    Table.SCHEDULE_STATES: (b"nightly", STATE.pack()),
    Table.SOURCES: (b"orders", pack_source(SOURCE)),
    Table.SOURCE_STATES: (b"orders", pack_source_state(SOURCE_STATE)),
}


def message_rows() -> tuple[Rows, bytes]:
    """A record of each kind, and their payloads."""
    rows = np.zeros(len(RECORDS), MESSAGE_DTYPE)
    columns = [values for values, _ in RECORDS]
    fill(rows, columns, ("payload_offset", "payload_length", "payload_crc", "flags"))
    blob = b""
    for row, (_, payload) in zip(rows, RECORDS, strict=True):
        sealed = encode_payload(payload) if isinstance(payload, Payload) else seal(payload)
        row["payload_offset"], row["payload_length"] = len(blob), len(sealed)
        row["payload_crc"] = int.from_bytes(sealed[:4], "little")
        row["flags"] = row_flags(payload) if isinstance(payload, Payload) else 0
        blob += sealed
    return rows, blob


def filed_rows() -> tuple[Rows, bytes]:
    """What is filed of them: the rows of their hour."""
    rows, blob = message_rows()
    scheduled, starts = schedule_rows(rows)
    hours = np.full(len(scheduled), HOUR)
    (part,) = parts_by_bucket(blob, scheduled, starts, hours)
    return part.rows, bytes(part.payload)


def settled_rows() -> tuple[Rows, bytes]:
    """Rows of the dispatch log, with notes about them."""
    rows = np.array(SETTLED, DISPATCH_DTYPE)
    written, payload = framed([rows.tobytes(), *map(encode_note, NOTES)])
    assert bytes(written) == rows.tobytes()
    return rows, payload


def _frame(kind: LogKind, rows: Rows, payload: bytes, last_seq: int) -> bytes:
    return encode(
        kind,
        rows.tobytes(),
        payload,
        first_seq=int(rows["seq"].min()),
        last_seq=last_seq,
        created_ms=START_MS,
        stamp=STAMP,
    )


class _InMemory:
    path = "golden"

    def __init__(self, data: bytes) -> None:
        self._data = data

    def pread(self, length: int, offset: int) -> bytes:
        return self._data[offset : offset + length]


def _read_frame(kind: LogKind) -> Callable[[bytes], Frame]:
    def read(data: bytes) -> Frame:
        found = scan(_InMemory(data), 0, len(data), kind=kind, stamp=STAMP, payload=True)
        (frame,) = found
        assert isinstance(frame, Frame) and frame.payload_intact
        return frame

    return read


def _read_rows(kind: LogKind) -> Callable[[bytes], object]:
    return lambda data: (
        (frame := _read_frame(kind)(data)).rows.tolist(),
        frame.payload,
        frame.header.last_seq,
    )


def _read_settled(data: bytes) -> object:
    frame = _read_frame(LogKind.DISPATCH)(data)
    return frame.rows.tolist(), unpack_notes(frame.payload or b"")


def _read_definitions(data: bytes) -> object:
    return list(definitions_in(_read_frame(LogKind.DEFINITIONS)(data)))


# ── all of them ────────────────────────────────────────────────────────────────────────────────


def values() -> dict[str, Value]:
    """By the names that they have in the file."""
    return {
        **{
            f"payload: {name}": Value(payload, encode_payload(payload), _read_payload)
            for name, payload in PAYLOADS.items()
        },
        **{
            name: Value(change, pack_schedule_change(change), unpack_schedule_change)
            for name, change in CHANGES.items()
        },
        "definition of a schedule": Value(SCHEDULE, pack_schedule(SCHEDULE), unpack_schedule),
        "schedule of an interval": Value(EVERY, pack_schedule(EVERY), unpack_schedule),
        "state of a schedule": Value(STATE, STATE.pack(), unpack_state),
        "state of a schedule that was set back": Value(SET_BACK, SET_BACK.pack(), unpack_state),
        **{
            name: Value(change, pack_source_change(change), unpack_source_change)
            for name, change in SOURCE_CHANGES.items()
        },
        "definition of a source": Value(SOURCE, pack_source(SOURCE), unpack_source),
        "state of a source": Value(
            SOURCE_STATE, pack_source_state(SOURCE_STATE), unpack_source_state
        ),
        "state of a source whose topic is known": Value(
            KNOWN_TOPIC, pack_source_state(KNOWN_TOPIC), unpack_source_state
        ),
        "heartbeat": Value(HEARTBEAT, HEARTBEAT_BYTES, unpack_heartbeat),
        "import": Value(IMPORT, IMPORT_BYTES, _read_import_record),
        "state of an import": Value(IMPORTED, pack_import(IMPORTED), unpack_import),
        "archive": Value(ARCHIVED, pack_archived(ARCHIVED), unpack_archived),
        "subscription": Value(HOOK, encode_subscription(HOOK), decode_subscription),
        **{
            f"subscription: {name}": Value(one, encode_subscription(one), decode_subscription)
            for name, one in {"another subject": CHANGED, "deleted": DELETED}.items()
        },
        **{
            f"subscription: {target.__struct_config__.tag}": Value(
                one := Subscription(2, "out", "*", "pull", 0, target=target),
                encode_subscription(one),
                decode_subscription,
            )
            for target in TARGETS
        },
        **_frames(),
    }


def _frames() -> dict[str, Value]:
    rows, payload = message_rows()
    last_seq = int(rows["seq"][-1]) + IMPORT.count - 1
    filed, filed_payload = filed_rows()
    filed_seq = int(filed["seq"][-1])
    settled, notes = settled_rows()
    defined = [Definition(TABLE_NUMBERS[table], *entry) for table, entry in DEFINED.items()]
    defined.append(Definition(TABLE_NUMBERS[Table.SOURCES], b"ended", None))
    (pieces,) = encode_definitions(defined, seq=25, stamp=STAMP)
    return {
        "frame of the message log": Value(
            (rows.tolist(), payload, last_seq),
            _frame(LogKind.MESSAGE, rows, payload, last_seq),
            _read_rows(LogKind.MESSAGE),
        ),
        "frame of the schedule log": Value(
            (filed.tolist(), filed_payload, filed_seq),
            _frame(LogKind.SCHEDULE, filed, filed_payload, filed_seq),
            _read_rows(LogKind.SCHEDULE),
        ),
        "frame of the dispatch log": Value(
            (settled.tolist(), NOTES),
            _frame(LogKind.DISPATCH, settled, notes, 10),
            _read_settled,
        ),
        "frame of the definitions log": Value(defined, b"".join(pieces), _read_definitions),
    }


# ── the file ───────────────────────────────────────────────────────────────────────────────────


def golden() -> dict[str, bytes]:
    """What the file holds, by name: the bytes as they were written first."""
    found: dict[str, str] = {}
    name = ""
    for line in GOLDEN.read_text("utf-8").splitlines():
        if line.startswith("  "):
            found[name] += line.strip()
        else:
            name = line
            assert name not in found, name
            found[name] = ""
    return {name: bytes.fromhex(text) for name, text in found.items()}


def as_text(written: dict[str, bytes]) -> str:
    """The same as a file: a name, and below it the bytes in hexadecimal, 48 in a line."""
    lines = []
    for name, data in written.items():
        lines.append(name)
        lines += [f"  {data[at : at + 48].hex()}" for at in range(0, len(data), 48)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    new = {name: value.written for name, value in values().items()}
    known = golden() if GOLDEN.exists() else {}
    GOLDEN.write_text(as_text({**new, **known}), "utf-8")
    print(f"{GOLDEN}: {len(new.keys() - known.keys())} new")
