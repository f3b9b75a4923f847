"""What a task does with Arrow batches, against a real server; no Spark is needed for that."""

import json
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types as T
from pyspark.sql.pandas.types import from_arrow_schema

from delayserver.client.transport import JSON, HttpAnswer, HttpTransport
from delayserver.errors import InputError, PipelineError
from delayserver.pipeline.publish.columns import ColumnReader
from delayserver.pipeline.publish.mapping import MessageColumns
from delayserver.pipeline.publish.publish import DelayServerSink, TableWriter
from delayserver.pipeline.publish.sending import ARROW, Sender, SendingPlan, SendingReport
from tests.arrow_streams import HEADERS
from tests.integration.api_support import ApiServer, make_token, now_ms, time_ms, unique
from tests.waiting import wait_until

DAY_MS = 86_400_000


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    server = ApiServer(tmp_path_factory.mktemp("sending"), body_max_bytes=10_000)
    server.start()
    yield server
    server.shut_down()


@pytest.fixture
def make(api: ApiServer, tmp_path: Path) -> Callable[..., SendingPlan]:
    """A plan with a subject of its own."""

    def plan(columns: MessageColumns | None = None, **rest: Any) -> SendingPlan:
        columns = columns or MessageColumns("due", subject=unique("sent"), key="key", body="body")
        defaults: dict[str, Any] = {
            "url": str(api.base_url),
            "token": None,
            "tls_ca": None,
            "columns": columns,
            "needs_key": True,
            "run": "3f2504e0",
            "rejects": str(tmp_path / "rejects"),
            "report": None,
            "batch_rows": 2,
            "timeout_s": 60.0,
        }
        return SendingPlan(**(defaults | rest))

    return plan


def send(plan: SendingPlan, columns: dict[str, Any]) -> SendingReport:
    """Send columns as one batch."""
    batch = pa.RecordBatch.from_pydict(columns)
    schema = from_arrow_schema(batch.schema)
    plan.columns.check(schema)
    return Sender(plan, schema).send(iter([batch]))


def rejected(plan: SendingPlan, sent: SendingReport) -> list[dict[str, Any]]:
    assert plan.rejects is not None
    if sent.rejects_file is None:
        return []
    text = Path(plan.rejects, sent.rejects_file).read_text()
    return [json.loads(line) for line in text.splitlines()]


def by_key(api: ApiServer, plan: SendingPlan, key: str) -> dict[str, Any]:
    found: dict[str, Any] = api.ask("GET", f"/v1/subjects/{plan.columns.subject}/keys/{key}")
    return found


TOMORROW = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
TOMORROW_MS = int(TOMORROW.timestamp() * 1000)


@pytest.mark.parametrize(
    ("due", "expected_ms"),
    [
        (pa.array([TOMORROW_MS]), TOMORROW_MS),
        (pa.array([TOMORROW_MS]).cast(pa.decimal128(20, 0)), TOMORROW_MS),
        # Never earlier than it says.
        (
            pa.array([TOMORROW + timedelta(microseconds=1)], pa.timestamp("us", "UTC")),
            TOMORROW_MS + 1,
        ),
        (pa.array([TOMORROW.replace(tzinfo=None)], pa.timestamp("us")), TOMORROW_MS),
        (pa.array([TOMORROW.isoformat()]), TOMORROW_MS),
        (pa.array([str(TOMORROW_MS)]), TOMORROW_MS),
        (
            pa.array([TOMORROW.date() + timedelta(days=1)]),
            (TOMORROW.date() + timedelta(days=1) - date(1970, 1, 1)).days * DAY_MS,
        ),
    ],
    # The values differ from process to process, and so would names that are made of them.
    ids=["long", "decimal", "microseconds", "no zone", "text", "number as text", "date"],
)
def test_due_times(
    api: ApiServer, make: Callable[..., SendingPlan], due: pa.Array, expected_ms: int
) -> None:
    plan = make()
    assert send(plan, {"due": due, "key": ["k"], "body": ["1"]}).published == 1
    assert time_ms(by_key(api, plan, "k")["deliver_at"]) == expected_ms


@pytest.mark.parametrize("due", [pa.array([1]), pa.array([-5]), pa.array(["-7"])])
def test_what_is_past_is_due_now(
    api: ApiServer, make: Callable[..., SendingPlan], due: pa.Array
) -> None:
    plan, before_ms = make(), now_ms()
    send(plan, {"due": due, "key": ["k"], "body": ["1"]})
    assert before_ms <= time_ms(by_key(api, plan, "k")["deliver_at"]) <= now_ms()


@pytest.mark.parametrize(
    ("column", "body"),
    [
        (pa.array(['{"n": [1, null]}']), {"n": [1, None]}),
        (pa.array([None], pa.string()), None),
        (pa.array([7]), 7),
        (
            pa.array([{"n": 1, "at": None}], pa.struct([("n", pa.int64()), ("at", pa.date32())])),
            {"n": 1, "at": None},
        ),
        (pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())), {"a": 1}),
        (pa.array([[[("a", 1)]]], pa.list_(pa.map_(pa.string(), pa.int64()))), [{"a": 1}]),
        (pa.array([b"\xff\x00"]), None),
    ],
)
def test_bodies(
    api: ApiServer, make: Callable[..., SendingPlan], column: pa.Array, body: object
) -> None:
    plan = make()
    send(plan, {"due": [TOMORROW_MS], "key": ["k"], "body": column})
    found = by_key(api, plan, "k")
    if pa.types.is_binary(column.type):
        assert found["body_base64"] == "/wA="
    else:
        assert found["body"] == body


def test_without_a_column_for_it_the_other_columns_are_the_body(
    api: ApiServer, make: Callable[..., SendingPlan]
) -> None:
    plan = make(MessageColumns("due", subject_column="kind", key="id", headers="extra"))
    subject = unique("kind")
    sent = send(
        plan,
        {
            "due": [TOMORROW_MS, TOMORROW_MS],
            "kind": [subject, subject],
            "id": [1, 2],
            "extra": pa.array([[("x-a", "b")], None], pa.map_(pa.string(), pa.string())),
            "price": pa.array([1.5, None]).cast(pa.decimal128(6, 2)),
            "on": [date(2026, 11, 20), None],
        },
    )
    assert sent.published == 2
    first, second = (api.ask("GET", f"/v1/subjects/{subject}/keys/{key}") for key in (1, 2))
    assert (first["body"], first["headers"]) == ({"price": 1.5, "on": "2026-11-20"}, {"x-a": "b"})
    assert (second["body"], second["headers"]) == ({"price": None, "on": None}, {})


def test_a_row_that_is_sent_again_is_a_duplicate(
    api: ApiServer, make: Callable[..., SendingPlan]
) -> None:
    plan = make()
    rows: dict[str, list[Any]] = {
        "due": [TOMORROW_MS] * 5,
        "key": list("abcde"),
        "body": list("12345"),
    }
    assert send(plan, rows) == SendingReport(published=5)
    again = {name: values[::-1] for name, values in rows.items()}
    assert send(replace(plan, batch_rows=3), again) == SendingReport(duplicates=5)


BAD: dict[str, list[Any]] = {
    "due": [TOMORROW_MS, None, TOMORROW_MS + 3 * 365 * DAY_MS, *[TOMORROW_MS] * 5],
    "key": ["good", "undated", "far", "broken", "large", "k" * 257, None, "good"],
    "body": ["1", "1", "1", "{", json.dumps("x" * 10_001), "1", "1", "2"],
}


@pytest.fixture
def sent_as(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The content types of the requests, in order."""
    types: list[str] = []
    request = HttpTransport.request

    async def noted(self: HttpTransport, *arguments: Any, **named: Any) -> HttpAnswer:
        types.append(named["content_type"])
        return await request(self, *arguments, **named)

    monkeypatch.setattr(HttpTransport, "request", noted)
    return types


def without_arrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is one that does not take it."""
    request = HttpTransport.request

    async def refused(self: HttpTransport, *arguments: Any, **named: Any) -> HttpAnswer:
        if named["content_type"] == ARROW:
            return HttpAnswer(415, b"{}")
        return await request(self, *arguments, **named)

    monkeypatch.setattr(HttpTransport, "request", refused)


WAYS: dict[str, dict[str, Any]] = {
    "text": {"body": ['{"n": 1.10} ', None, "[]"]},
    "binary": {"body": [b"\xff", b"", b" {"]},
    "numbers": {"body": [1, None, 3]},
    "the rest": {"n": [1, 2, 3], "at": [TOMORROW] * 3},
    "headers": {"body": ["1"] * 3, "extra": pa.array([[("a", "b")], [], None], HEADERS)},
    "subjects": {"kind": ["a.b", "a.c", "a.b"]},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_row_is_the_same_message_as_a_column_and_as_json(
    make: Callable[..., SendingPlan], monkeypatch: pytest.MonkeyPatch, sent_as: list[str], way: str
) -> None:
    columns = WAYS[way]
    keys = [unique("k") for _ in range(3)]
    plan = make(
        MessageColumns(
            "due",
            subject=None if "kind" in columns else unique("sent"),
            subject_column="kind" if "kind" in columns else None,
            key="key",
            body="body" if "body" in columns else None,
            headers="extra" if "extra" in columns else None,
        )
    )
    rows = {"due": [TOMORROW, TOMORROW, TOMORROW], "key": keys, **columns}
    sent = send(plan, rows)
    assert (sent.published, sent.duplicates) == (3, 0)
    assert sent_as == [ARROW, ARROW]
    without_arrow(monkeypatch)
    sent_as.clear()
    again = send(plan, rows)
    assert (again.published, again.duplicates) == (0, 3)
    assert set(sent_as) == {JSON}


@pytest.mark.parametrize(
    "columns",
    [
        {"due": [None, TOMORROW]},
        {"due": [TOMORROW.isoformat(), "soon"]},
        {"key": ["k", None]},
        {"kind": [None, "a.b"]},
        {"body": [b"a", None]},
        {"extra": [{"a": "b"}] * 2},
        {"extra": ['{"a": "b"}'] * 2},
    ],
    ids=["no due time", "not read", "no key", "no subject", "no body", "a struct", "text"],
)
def test_rows_that_are_to_be_looked_at_are_no_stream(columns: dict[str, Any]) -> None:
    usual = {"due": [TOMORROW] * 2, "key": ["k", "l"], "body": ["1", "2"], "kind": ["a", "b"]}
    table = usual | columns
    batch = pa.RecordBatch.from_pydict(table)
    mapping = MessageColumns(
        "due",
        subject_column="kind",
        key="key",
        body="body",
        headers="extra" if "extra" in table else None,
    )
    schema = from_arrow_schema(batch.schema)
    assert ColumnReader(mapping, schema, needs_key=True).stream(batch) is None
    usual_batch = pa.RecordBatch.from_pydict(usual)
    plain = replace(mapping, headers=None)
    reader = ColumnReader(plain, from_arrow_schema(usual_batch.schema), needs_key=True)
    assert reader.stream(usual_batch) is not None


def test_long_rows_are_sent_in_several_requests(
    make: Callable[..., SendingPlan], sent_as: list[str]
) -> None:
    plan = make(batch_rows=2_000)
    body = json.dumps("x" * 9_000)
    keys = [unique("long") for _ in range(600)]
    assert send(plan, {"due": [TOMORROW_MS] * 600, "key": keys, "body": [body] * 600}).published
    assert sent_as == [ARROW] * 2  # of 5.4 MB


def any_text(*values: bytes) -> pa.Array:
    """A column of texts as Spark makes them of bytes, whatever these are."""
    return pa.array(values).view(pa.string())


NO_JSON = "cannot be written as JSON: not UTF-8"
NOT_TEXTS: dict[str, tuple[dict[str, Any], str]] = {
    "body": ({"body": any_text(b"1", b'"\xff"')}, "body is not UTF-8"),
    "key": ({"key": any_text(b"good", b"\xff")}, "key is not UTF-8"),
    "key as bytes": ({"key": pa.array([b"good", b"\xff"])}, "key is not UTF-8"),
    "due time": (
        {"due": any_text(str(TOMORROW_MS).encode(), b"\xff")},
        "due time cannot be read: '\ufffd'",
    ),
    "subject": ({"kind": any_text(b"good", b"\xff")}, "subject is not UTF-8"),
    "a column": ({"body": None, "n": any_text(b"1", b"\xff")}, f"{NO_JSON} (column n)"),
    "within": (
        {"body": pa.StructArray.from_arrays([any_text(b"1", b"\xff")], ["n"])},
        f"{NO_JSON} (column n)",
    ),
    "a header": (
        {"extra": pa.StructArray.from_arrays([any_text(b"1", b"\xff")], ["n"])},
        f"{NO_JSON} (column headers)",
    ),
    "headers": ({"extra": any_text(b"{}", b'{"a":"\xff"}')}, "headers are not UTF-8"),
}


@pytest.mark.parametrize("what", NOT_TEXTS)
def test_a_row_whose_text_is_none_is_refused_and_the_others_are_sent(
    make: Callable[..., SendingPlan], what: str
) -> None:
    """Spark casts any bytes to text; they ended the query (`UnicodeDecodeError`)."""
    columns, reason = NOT_TEXTS[what]
    rows = {"due": [TOMORROW_MS] * 2, "key": ["good", "bad"], "body": ["1", "1"], **columns}
    rows = {name: values for name, values in rows.items() if values is not None}
    plan = make(
        MessageColumns(
            "due",
            subject=None if "kind" in rows else unique("sent"),
            subject_column="kind" if "kind" in rows else None,
            key="key",
            body="body" if "body" in rows else None,
            headers="extra" if "extra" in rows else None,
        )
    )
    sent = send(plan, rows)
    assert (sent.published, sent.rejected) == (1, 1)
    assert [row["reason"] for row in rejected(plan, sent)] == [reason]


def test_refused_rows_go_to_a_file_with_the_reason(make: Callable[..., SendingPlan]) -> None:
    plan = make(batch_rows=100)
    sent = send(plan, BAD)
    assert (sent.published, sent.rejected) == (1, 7)
    rows = rejected(plan, sent)
    assert {row["key"] for row in rows} == {*BAD["key"]}
    reasons = {row["key"]: row["reason"] for row in rows if row["key"] != "good"}
    assert (reasons["undated"], reasons["broken"]) == ("no due time", "body is not JSON")
    assert reasons[None] == "no key"
    assert "further away than" in reasons["far"]
    assert "body_max_bytes" in reasons["large"]
    assert "256" in reasons["k" * 257]
    # Nothing of a row is left out.
    (large,) = (row for row in rows if row["key"] == "large")
    assert len(large["body"]) == 10_003
    (conflict,) = (row for row in rows if row["key"] == "good")
    assert "stands for a message with other content" in conflict["reason"]
    assert (conflict["body"], conflict["subject"]) == ("2", plan.columns.subject)


def test_without_a_directory_refused_rows_are_an_error_that_names_them(
    make: Callable[..., SendingPlan],
) -> None:
    plan = make(rejects=None)
    with pytest.raises(PipelineError, match=r"1 rows .*key 'far'.*further away than"):
        send(plan, {"due": [TOMORROW_MS * 2] * 1, "key": ["far"], "body": ["1"]})
    rows = {"due": [None] * 8, "key": list("abcdefgh"), "body": ["1"] * 8}
    with pytest.raises(PipelineError, match=r"8 rows .*key 'e'.*no due time; and 3 more"):
        send(plan, {**rows, "due": pa.nulls(8, pa.int64())})


def test_a_task_that_fails_leaves_no_file(make: Callable[..., SendingPlan]) -> None:
    plan = make(token="wrong", url="http://127.0.0.1:1", timeout_s=0.0)
    with pytest.raises(PipelineError, match="no server can be reached"):
        send(plan, BAD)
    assert not list(Path(plan.rejects or "").glob("*"))


def write_until_killed(plan: SendingPlan) -> None:
    """A task that has put a row aside, and gets no more rows then."""

    def batches() -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict(UNDATED)
        threading.Event().wait()

    TableWriter(plan, from_arrow_schema(pa.RecordBatch.from_pydict(UNDATED).schema)).write(
        batches()
    )


UNDATED: dict[str, Any] = {"due": pa.nulls(1, pa.int64()), "key": ["k"], "body": ["1"]}


@pytest.mark.parametrize("is_done", [True, False])
def test_what_a_killed_task_has_put_aside_is_swept(
    make: Callable[..., SendingPlan], is_done: bool
) -> None:
    plan = make()
    assert plan.rejects is not None
    directory = Path(plan.rejects)
    directory.mkdir()
    of_another = directory / ".c0ffee00-1.jsonl"
    of_another.touch()
    task = multiprocessing.get_context("spawn").Process(target=write_until_killed, args=(plan,))
    task.start()
    wait_until(lambda: list(directory.glob(f".{plan.run}-*")))
    task.kill()
    task.join()
    batch = pa.RecordBatch.from_pydict(UNDATED)
    writer = TableWriter(plan, from_arrow_schema(batch.schema))
    sent = writer.write(iter([batch]))
    if is_done:
        writer.commit([sent])
    else:
        writer.abort([sent])
    names = [path.name for path in directory.iterdir() if path != of_another]
    assert len(names) == is_done and not any(name.startswith(".") for name in names)
    assert of_another.exists()


def test_without_a_key_rows_are_sent_at_least_once(
    api: ApiServer, make: Callable[..., SendingPlan]
) -> None:
    plan = make(MessageColumns("due", subject=unique("sent"), body="body"), needs_key=False)
    rows = {"due": [TOMORROW_MS] * 3, "body": ["1"] * 3}
    assert send(plan, rows) == send(plan, rows) == SendingReport(published=3)
    path = f"/v1/subjects/{plan.columns.subject}/messages"
    assert len(api.ask("GET", path)["messages"]) == 6


def test_a_token_is_shown_and_its_limits_are_told(
    tmp_path: Path, make: Callable[..., SendingPlan]
) -> None:
    with_tokens = ApiServer(tmp_path)
    token = make_token(with_tokens.data_dir, "spark", "publish:order.*")
    with_tokens.start()
    try:
        plan = make(
            MessageColumns("due", subject="order.a", key="key", body="body"),
            url=str(with_tokens.base_url),
            token=token,
        )
        rows = {"due": [TOMORROW_MS], "key": ["k"], "body": ["1"]}
        assert send(plan, rows).published == 1
        assert token not in repr(plan)
        other = replace(plan, columns=replace(plan.columns, subject="envelope"))
        # That is no matter of one row.
        with pytest.raises(PipelineError, match="Not allowed"):
            send(other, rows)
    finally:
        with_tokens.shut_down()


def test_a_server_that_is_killed_meanwhile_is_waited_for(
    tmp_path: Path, make: Callable[..., SendingPlan]
) -> None:
    api = ApiServer(tmp_path, checkpoint_ms=100)
    api.start()
    plan = make(batch_rows=20, url=str(api.base_url))
    count = 6_000
    path = f"/v1/subjects/{plan.columns.subject}/messages?limit=1000"
    rows = {
        "due": [TOMORROW_MS + n for n in range(count)],
        "key": [f"k{n}" for n in range(count)],
        "body": [str(n) for n in range(count)],
    }
    results: list[SendingReport] = []
    thread = threading.Thread(target=lambda: results.append(send(plan, rows)))
    thread.start()
    try:
        wait_until(lambda: api.get(path).json().get("messages"))
        api.restart(kill=True)
        thread.join()
        (sent,) = results
        assert sent.published + sent.duplicates == count
        found: list[str] = []
        cursor = ""
        while cursor is not None:
            page = api.ask("GET", path + (f"&cursor={cursor}" if cursor else ""))
            found += [message["key"] for message in page["messages"]]
            cursor = page["cursor"]
        assert found == rows["key"]
    finally:
        thread.join()
        api.shut_down()


# ── options ────────────────────────────────────────────────────────────────────────────────────

OPTIONS = {"subject": "a", "dueColumn": "due", "keyColumn": "key"}
SCHEMA = T.StructType([T.StructField("due", T.LongType()), T.StructField("key", T.StringType())])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"keyColumn": None}, "only a key of its own"),
        ({"dueColumn": None}, "needs the option dueColumn"),
        ({"subject": None}, "subject or subjectColumn"),
        ({"subjectColumn": "key"}, "subject or subjectColumn"),
        ({"subject": "no subject"}, "cannot be a subject"),
        ({"delivery": "at-most-once"}, "exactly-once or at-least-once"),
        ({"url": "127.0.0.1:8080"}, "not an address"),
        ({"url": "http://127.0.0.1:8080/?a=b"}, "give scheme, host, port and path"),
        ({"timeout": "soon"}, "duration"),
        ({"keyColum": "key"}, "no option 'keycolum'"),
        ({"bodyColumn": "body"}, "no column 'body'; it has due, key"),
        ({"headersColumn": "due"}, "column due is bigint; headers are"),
    ],
)
def test_a_wrong_option_is_named(changes: dict[str, str | None], text: str) -> None:
    options = {name: value for name, value in {**OPTIONS, **changes}.items() if value is not None}
    with pytest.raises((InputError, PipelineError), match=text):
        DelayServerSink(options).writer(SCHEMA, overwrite=False)


def test_messages_are_added_never_overwritten() -> None:
    DelayServerSink({**OPTIONS, "checkpointLocation": "/tmp"}).streamWriter(SCHEMA, overwrite=False)
    DelayServerSink({"subject": "a", "dueColumn": "due", "delivery": "at-least-once"}).writer(
        SCHEMA, overwrite=False
    )
    with pytest.raises(InputError, match="mode append"):
        DelayServerSink(OPTIONS).writer(SCHEMA, overwrite=True)


@pytest.mark.parametrize(
    ("due", "unit", "given"),
    [
        (
            ["tomorrow at noon", "2026-13-45T00:00:00Z", None, " 2030-01-02T03:04:05+05:30"],
            None,
            None,
        ),
        ([1, None, 4_102_444_800, -5], "s", None),
        (
            pa.array([1, None, 4_102_444_800_000_001, -1], pa.timestamp("us", "UTC")),
            None,
            [
                "1970-01-01T00:00:00.000001Z",
                None,
                "2100-01-01T00:00:00.000001Z",
                "1969-12-31T23:59:59.999999Z",
            ],
        ),
    ],
)
def test_a_rejected_due_time_is_as_the_table_had_it(
    make: Callable[..., SendingPlan],
    tmp_path: Path,
    due: Any,
    unit: str | None,
    given: list[Any] | None,
) -> None:
    columns = MessageColumns("due", subject=unique("sent"), key="key", body="body", due_unit=unit)
    plan = replace(make(columns), rejects=str(tmp_path / "rejects"))
    send(plan, {"due": due, "key": list("abcd"), "body": ["{"] * 4})
    (path,) = (tmp_path / "rejects").iterdir()
    rows = {row["key"]: row["due"] for row in map(json.loads, path.read_text().splitlines())}
    assert rows == dict(zip("abcd", given or due, strict=True))
