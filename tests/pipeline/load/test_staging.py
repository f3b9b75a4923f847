"""What is staged column by column is what the rules of a publish make of each row."""

import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from delayserver.errors import InputError
from delayserver.pipeline.load import staging
from delayserver.pipeline.load.staging import (
    BODY,
    DUE,
    HEADERS,
    KEY,
    SUBJECT,
    Stager,
    StagingPlan,
    StagingTarget,
)
from delayserver.pipeline.publish.values import SECONDS
from delayserver.records.ids import KeyHasher
from delayserver.records.message import Content, Payload, check_headers, check_key, encode_payload
from delayserver.times import TIME_MS_MAX, parse_time_ms
from storage.files import OsFiles
from storage.frame import Frame, scan
from storage.rows import NO_KEY, LogKind

NOW_MS = 1_800_000_000_000
DELAY_MAX_MS = 10_000_000
BODY_MAX_BYTES = 300
STAMP = 7
SECRET = b"s" * 32
SUBJECTS = {"order.unpaid": 3, "envelope.refund": 5}
OUTCOME = pa.schema(
    [
        ("kind", pa.int32()),
        ("part", pa.string()),
        ("row", pa.int64()),
        ("bytes", pa.int64()),
        ("checksum", pa.int64()),
        ("due_ms", pa.int64()),
        ("subject", pa.string()),
        ("key", pa.string()),
        ("reason", pa.string()),
        ("due", pa.string()),
        ("body", pa.string()),
        ("shard", pa.int32()),
    ]
)
Row = tuple[str | None, Any, str | None, Any, str | None]
"""Subject, due, key, body, headers."""


def plan(root: Path, **changes: Any) -> StagingPlan:
    return StagingPlan(
        **{
            "import_id": "imp",
            "targets": (StagingTarget(str(root), STAMP, SECRET, SUBJECTS),),
            "now_ms": NOW_MS,
            "delay_max_ms": DELAY_MAX_MS,
            "body_max_bytes": BODY_MAX_BYTES,
            "subject": None,
            "has_key": True,
            "has_headers": True,
            "content": Content.JSON,
            "due_unit": "ms",
            "is_past_refused": False,
            "with_rows": True,
            "schema": OUTCOME.serialize().to_pybytes(),
            **changes,
        }
    )


def plain(row: Row, content: Content = Content.JSON) -> tuple[int, int, bytes, bytes] | str:
    """Due time, subject number, hash and sealed payload of one row, or what is wrong with it."""
    subject, due, key, body, headers = row
    if subject not in SUBJECTS:
        return "bad subject"
    if due is None:
        return "no due time"
    if (isinstance(due, int) or due.isdigit()) and 10**8 <= int(due) <= 10**11:
        return SECONDS.partition(":")[0]
    try:
        due_ms = due if isinstance(due, int) else parse_time_ms(int(due) if due.isdigit() else due)
    except InputError:
        return "due time cannot be read"
    if due_ms - NOW_MS > DELAY_MAX_MS or due_ms > TIME_MS_MAX:
        return "due too far away"
    if body is None and content is Content.BINARY:
        return "no body"
    data = b"null" if body is None else body.encode() if isinstance(body, str) else body
    try:
        if content is Content.JSON:
            data = bytes(msgspec.json.decode(data, type=msgspec.Raw))
            msgspec.json.decode(data)
    except msgspec.DecodeError:
        return "body is not JSON"
    if len(data) > BODY_MAX_BYTES:
        return "body too large"
    if content is Content.JSON and data.startswith(b"[" * 257):
        return "body nested too deeply"
    number = SUBJECTS[subject]
    hashed = NO_KEY
    if key is not None:
        try:
            check_key(key)
        except InputError:
            return "key is empty or too long"
        hashed = KeyHasher(SECRET)(number, key)
    own = None
    if headers is not None:
        try:
            own = msgspec.json.decode(headers, type=dict[str, str])
            check_headers(own)
        except (msgspec.DecodeError, InputError):
            return "bad headers"
    return (
        max(due_ms, NOW_MS),
        number,
        hashed,
        encode_payload(Payload(data, content, key, own or None)),
    )


def due_of(row: Row) -> int | None:
    due = row[1]
    if due is None or isinstance(due, int):
        return due
    with contextlib.suppress(InputError):
        return parse_time_ms(int(due) if due.isdigit() else due)
    return None


def staged(root: Path, outcome: list[pa.RecordBatch]) -> list[tuple[int, int, bytes, bytes]]:
    """The rows of the part, as `plain` has them."""
    parts = [row for batch in outcome for row in batch.to_pylist() if row["kind"] == staging.PART]
    rows = []
    for part in parts:
        file = OsFiles(str(root)).open(f"imports/{part['part']}")
        for frame in scan(file, 0, part["bytes"], kind=LogKind.SCHEDULE, stamp=STAMP, payload=True):
            assert isinstance(frame, Frame) and frame.payload is not None and frame.payload_intact
            for row in frame.rows:
                start = int(row["payload_offset"])
                sealed = frame.payload[start : start + int(row["payload_length"])]
                assert int(row["payload_crc"]) == int.from_bytes(sealed[:4], "little")
                number = int(row["subject_id"])
                rows.append((int(row["due_ms"]), number, bytes(row["key_hash"]), sealed))
        file.close()
    return rows


def check(root: Path, rows: list[Row], due_type: pa.DataType, **changes: Any) -> None:
    """Stage rows in two batches, and compare."""
    content = changes.get("content", Content.JSON)
    table = pa.table(
        {
            SUBJECT: pa.array([row[0] for row in rows], pa.string()),
            DUE: pa.array([row[1] for row in rows], due_type),
            KEY: pa.array([row[2] for row in rows], pa.string()),
            BODY: pa.array(
                [row[3] for row in rows],
                pa.binary() if content is Content.BINARY else pa.string(),
            ),
            HEADERS: pa.array([row[4] for row in rows], pa.string()),
        }
    )
    half = len(rows) // 2  # Each is staged by itself.
    # A slice begins in the middle of its buffers.
    pieces = [table.slice(0, half), table.slice(half)]
    batches = [batch for piece in pieces for batch in piece.to_batches()]
    outcome = list(Stager(plan(root, **changes)).stage(batches))
    expected: list[tuple[int, int, bytes, bytes]] = []
    reasons = []
    for piece in (rows[:half], rows[half:]):
        # What is past is due now, in the order in which it was due.
        in_order = sorted(piece, key=lambda row: due_of(row) or 0)
        found = [plain(row, content) for row in in_order]
        expected += [one for one in found if not isinstance(one, str)]
        reasons += [one for one in found if isinstance(one, str)]
    assert staged(root, outcome) == expected
    listed = [row for batch in outcome for row in batch.to_pylist()]
    rejected = [row["reason"] for row in listed if row["kind"] == staging.REJECT]
    assert Counter(reason.partition(":")[0] for reason in rejected) == Counter(reasons)
    told = [row["due_ms"] for row in listed if row["kind"] == staging.ROW]
    assert told == [one[0] for one in expected]


@pytest.fixture(autouse=True)
def one_batch_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """… and some rows a step."""
    monkeypatch.setattr(staging, "CHUNK_BYTES", 1)
    monkeypatch.setattr(staging, "STEP_BYTES", 300)


def test_batches_are_staged_together(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each hour has one frame from all of them, and not one from each."""
    monkeypatch.setattr(staging, "CHUNK_BYTES", 1 << 20)
    monkeypatch.setattr(staging, "STEP_BYTES", 1 << 20)
    due = [NOW_MS + hour * 3_600_000 for hour in (0, 1)]
    batch = pa.record_batch({DUE: pa.array(due), BODY: pa.array(["1", "2"])})
    changes: dict[str, Any] = {"subject": "order.unpaid", "has_key": False, "has_headers": False}
    outcome = list(Stager(plan(root, **changes)).stage([batch] * 50))
    (part,) = (row for one in outcome for row in one.to_pylist() if row["kind"] == staging.PART)
    file = OsFiles(str(root)).open(f"imports/{part['part']}")
    frames = list(scan(file, 0, part["bytes"], kind=LogKind.SCHEDULE, stamp=STAMP, payload=True))
    file.close()
    assert [len(frame.rows) for frame in frames if isinstance(frame, Frame)] == [50, 50]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    OsFiles(str(tmp_path)).make_directory("imports")
    return tmp_path


good_due = st.integers(NOW_MS - 10, NOW_MS + DELAY_MAX_MS)
due = good_due | st.none() | st.integers(10**8, 10**11) | st.integers(-(1 << 63), (1 << 63) - 1)
text = st.text(st.characters(codec="utf-8"), max_size=20)
json_text = st.one_of(text, st.integers(), st.lists(text, max_size=3), text.map(lambda t: t * 30))
body = json_text.map(json.dumps) | json_text.map(lambda v: json.dumps(v, ensure_ascii=False)) | text
row = st.tuples(
    st.sampled_from(["order.unpaid", "envelope.refund", "order.unpaid", "unknown", None]),
    due,
    st.none() | text | text.map(lambda t: (t or "k") * 20),
    st.none() | body,
    st.sampled_from([None, None, "{}", '{"x-shop": "7"}', '{"x": 1}', '{"webhook-id": "1"}']),
)
common = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@common
@given(st.lists(row, min_size=1, max_size=40))
def test_rows_are_staged_as_one_by_one(root: Path, rows: list[Row]) -> None:
    check(root, rows, pa.int64())


@common
@given(st.lists(row, min_size=1, max_size=10), st.data())
def test_due_times_as_text(root: Path, rows: list[Row], data: st.DataObject) -> None:
    form = st.sampled_from(
        ["2027-01-15T08:00:01Z", "2027-01-15T09:30:00+01:30", "2026-01-01T00:00:00Z", "soon", ""]
    )
    texts = st.none() | good_due.map(str) | st.integers(10**8, 10**11).map(str) | form
    rows = [(row[0], data.draw(texts), *row[2:]) for row in rows]
    check(root, rows, pa.string())


@common
@given(st.lists(st.tuples(row, st.none() | st.binary(max_size=400)), min_size=1, max_size=10))
def test_binary_bodies(root: Path, rows: list[tuple[Row, bytes | None]]) -> None:
    binary = [(row[0], row[1], row[2], body, row[4]) for row, body in rows]
    check(root, binary, pa.int64(), content=Content.BINARY)


@pytest.mark.parametrize("length", [0, 255, 256, 65_535, 65_536])
def test_lengths_at_which_the_encoding_changes(
    root: Path, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.BODY_MAX_BYTES", 1 << 20)
    body = json.dumps("x" * length)[: length + 2]
    rows: list[Row] = [("order.unpaid", NOW_MS, "k" * (length % 256 + 1), body, None)] * 2
    check(root, rows, pa.int64(), body_max_bytes=1 << 20)


def test_a_body_that_is_nested_too_deeply(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.BODY_MAX_BYTES", 1 << 20)
    bodies = ["[" * depth + "]" * depth for depth in (256, 257)]
    rows: list[Row] = [("order.unpaid", NOW_MS, None, body, None) for body in bodies]
    check(root, rows, pa.int64(), body_max_bytes=1 << 20)


def test_a_plan_without_keys_and_headers_and_with_one_subject(root: Path) -> None:
    batch = pa.record_batch({DUE: pa.array([NOW_MS + 1, NOW_MS]), BODY: pa.array(["1", None])})
    changes: dict[str, Any] = {"subject": "order.unpaid", "has_key": False, "has_headers": False}
    outcome = list(Stager(plan(root, **changes)).stage([batch]))
    rows: list[Row] = [("order.unpaid", NOW_MS, None, None, None)]
    rows.append(("order.unpaid", NOW_MS + 1, None, "1", None))
    assert staged(root, outcome) == [plain(row) for row in rows]
