"""The bulk load against a real server: what is loaded and rejected, and what a crash leaves."""

import csv
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

from delayserver.errors import PipelineError
from delayserver.pipeline.audits.audit import audit_here
from delayserver.pipeline.calls import CallRefusedError
from delayserver.pipeline.load.adoption import Adoption
from delayserver.pipeline.load.load import LoadJob, run
from delayserver.pipeline.load.note import NoteFile
from delayserver.pipeline.load.source import read_table
from delayserver.pipeline.load.staging import KEY
from delayserver.pipeline.progress import Job
from delayserver.pipeline.publish.mapping import MessageColumns
from delayserver.pipeline.publish.values import SECONDS
from storage.staging import OnConflict, import_of
from tests.integration.api_support import ApiServer, now_ms, unique
from tests.pipeline.load.test_reading import rows_of
from tests.waiting import wait_until

DAY_MS = 86_400_000


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    server = ApiServer(tmp_path_factory.mktemp("load"), body_max_bytes=10_000)
    server.start()
    yield server
    server.shut_down()


@pytest.fixture
def job(spark: SparkSession) -> Job:
    return Job(spark)


@pytest.fixture
def make(api: ApiServer, tmp_path: Path) -> Callable[..., LoadJob]:
    """A load with a subject and a name of its own."""

    def load(columns: MessageColumns | None = None, **rest: Any) -> LoadJob:
        columns = columns or MessageColumns(
            "due", subject=unique("load.subject"), key="key", body="body"
        )
        return LoadJob(
            unique("import"),
            api.data_dir,
            str(api.base_url),
            columns,
            rejects=tmp_path / "rejected.jsonl",
            ids=tmp_path / "ids.parquet",
            **rest,
        )

    return load


def table(spark: SparkSession, *rows: tuple[Any, ...], schema: str = "") -> DataFrame:
    return spark.createDataFrame(list(rows), schema or "due bigint, key string, body string")


def ids(load: LoadJob) -> list[dict[str, Any]]:
    assert load.ids is not None
    rows: list[dict[str, Any]] = pq.read_table(load.ids).to_pylist()
    return rows


def rejected(load: LoadJob) -> dict[str, str]:
    """Reasons by the key of the row."""
    assert load.rejects is not None
    rows = [json.loads(line) for line in load.rejects.read_text().splitlines()]
    return {row["key"]: row["reason"] for row in rows}


def staged(load: LoadJob) -> list[str]:
    """What is left of a load, besides its note."""
    found = (load.data_dir / "imports").glob(f"{load.id}.*")
    return [path.name for path in found if path.suffix != ".load"]


def test_rows_become_messages(api: ApiServer, job: Job, make: Callable[..., LoadJob]) -> None:
    load, tomorrow = make(), now_ms() + DAY_MS
    rows = [(tomorrow + number * 1000, f"k{number}", f'{{"n": {number}}}') for number in range(50)]
    loaded = run(job, table(job.spark, *rows), load)
    assert (loaded.state, loaded.read, loaded.accepted, loaded.duplicates) == ("adopted", 50, 50, 0)
    found = {row["key"]: row for row in ids(load)}
    assert len(found) == 50
    for due_ms, key, body in rows[::10]:
        message = api.look_up(found[key]["id"])
        assert message["key"] == key
        assert message["body"] == json.loads(body)
        assert message["state"] == "scheduled"
        assert datetime.fromisoformat(message["deliver_at"]).timestamp() * 1000 == due_ms
        by_key = api.ask("GET", f"/v1/subjects/{load.columns.subject}/keys/{key}")
        assert by_key["id"] == message["id"]
    assert staged(load) == []


def test_what_is_due_already_comes_at_once(
    api: ApiServer, job: Job, make: Callable[..., LoadJob]
) -> None:
    load = make()
    path = api.subscribe(unique("queue"), load.columns.subject or "")
    rows = [(now_ms() - number * DAY_MS, f"k{number}", f"{number}") for number in range(20)]
    run(job, table(job.spark, *rows), load)
    assert sorted(message["body"] for message in api.pull_all(path, 20)) == list(range(20))


def test_bad_rows_are_rejected_with_the_reason(job: Job, make: Callable[..., LoadJob]) -> None:
    load, due_ms = make(), now_ms() + DAY_MS
    rows = [
        (due_ms, "good", "1"),
        (None, "undated", "1"),
        (due_ms + 3 * 365 * DAY_MS, "far", "1"),
        (due_ms, "broken", "{"),
        (due_ms, "large", json.dumps("x" * 10_001)),
        (due_ms, "k" * 257, "1"),
    ]
    loaded = run(job, table(job.spark, *rows), load)
    assert (loaded.read, loaded.accepted) == (6, 1)
    assert rejected(load) == {
        "undated": "no due time",
        "far": "due too far away",
        "broken": "body is not JSON",
        "large": "body too large",
        "k" * 257: "key is empty or too long",
    }
    assert loaded.rejected == Counter(rejected(load).values())


def not_utf8(*values: bytes) -> pa.Array:
    """Text as other writers of Parquet let it pass."""
    return pa.array(values, pa.binary()).view(pa.string())


def test_a_row_that_is_no_text_or_no_time_keeps_no_other_back(
    api: ApiServer, job: Job, make: Callable[..., LoadJob], tmp_path: Path
) -> None:
    path, due_ms = tmp_path / "edges.parquet", now_ms() + DAY_MS
    most_us = (1 << 63) - 1
    due = [due_ms * 1000] * 4 + [most_us, -most_us]
    columns = {
        "due": pa.array(due, pa.timestamp("us", "UTC")),
        "key": not_utf8(b"good", b"\xff", b"body", b"note", b"far", b"past"),
        "body": not_utf8(b"1", b"2", b'"\xff\xfe"', b"4", b"5", b"6"),
        "note": not_utf8(b"a", b"b", b"c", b"\xff", b"e", b"f"),
        "kind": not_utf8(b"a", b"\xff", b"a", b"a", b"a", b"a"),
    }
    pq.write_table(pa.table(columns), path)
    load = make()
    loaded = run(job, read_table(job, str(path), None, {}), load)
    assert (loaded.accepted, loaded.past) == (3, 1)
    assert rejected(load) == {
        "\ufffd": "key is not UTF-8",
        "body": "body is not UTF-8",
        "far": "due too far away",
    }
    assert api.ask("GET", f"/v1/subjects/{load.columns.subject}/keys/note")["body"] == 4

    load = make(MessageColumns("due", subject=unique("rest"), key="body"))
    loaded = run(job, read_table(job, str(path), None, {}), load)
    assert loaded.accepted == 2
    assert rejected(load)["4"] == "cannot be written as JSON: not UTF-8 (column note)"

    load = make(MessageColumns("due", subject_column="kind", key="note", body="body"))
    loaded = run(job, read_table(job, str(path), None, {}), load)
    assert loaded.accepted == 2
    assert rejected(load)["b"] == "bad subject"


def test_a_number_that_is_too_large_for_a_due_time(job: Job, make: Callable[..., LoadJob]) -> None:
    load, due_ms = make(), now_ms() + DAY_MS
    rows = table(job.spark, (due_ms, "good", "1")).selectExpr(
        "cast(due as decimal(20,0)) as due", "key", "body"
    )
    huge = rows.selectExpr("cast(1e19 as decimal(20,0)) as due", "'huge' as key", "body")
    assert run(job, rows.union(huge), load).accepted == 1
    assert rejected(load) == {"huge": "due too far away"}


def test_seconds(api: ApiServer, job: Job, make: Callable[..., LoadJob]) -> None:
    """Taken for milliseconds they would all be due at once."""
    load, due_s = make(), now_ms() // 1000 + 86_400
    rows = table(job.spark, *((due_s + number, f"k{number}", "1") for number in range(5)))
    with pytest.raises(PipelineError, match=r"5 of 5 rows .* as if column due were in seconds"):
        run(job, rows, load)
    assert staged(load) == []
    api.ask("GET", f"/v1/imports/{load.id}", 404)
    in_seconds = replace(load, columns=replace(load.columns, due_unit="s"))
    loaded = run(job, rows, in_seconds)
    assert (loaded.accepted, loaded.past) == (5, 0)
    message = api.ask("GET", f"/v1/subjects/{load.columns.subject}/keys/k3")
    assert datetime.fromisoformat(message["deliver_at"]).timestamp() == due_s + 3
    good = table(job.spark, (now_ms() + DAY_MS, "good", "1"))
    other = unique("import")
    certain = replace(load, id=other, columns=replace(load.columns, due_unit="ms"))
    loaded = run(job, rows.union(good), certain)
    assert (loaded.accepted, loaded.past) == (1, 0)
    assert rejected(certain) == dict.fromkeys((f"k{number}" for number in range(5)), SECONDS)


def test_seconds_in_a_file(job: Job, make: Callable[..., LoadJob], tmp_path: Path) -> None:
    """The rows are judged by the reader then, and the unit is doubted as in any other table."""
    path = tmp_path / "table.csv"
    due_s = now_ms() // 1000 + 86_400
    path.write_text("due,key,body\n" + "".join(f"{due_s},k{number},1\n" for number in range(3)))
    load = make()
    with pytest.raises(PipelineError, match=r"3 of 3 rows .* as if column due were in seconds"):
        run(job, read_table(job, str(path), None, {}), load)
    assert staged(load) == []


def test_what_is_past_is_counted_or_rejected(job: Job, make: Callable[..., LoadJob]) -> None:
    day_ago_ms = now_ms() - DAY_MS
    rows = table(job.spark, (day_ago_ms, "past", "1"), (now_ms() + DAY_MS, "coming", "1"))
    loaded = run(job, rows, make())
    assert (loaded.accepted, loaded.past) == (2, 1)
    load = make(past="reject")
    loaded = run(job, rows, load)
    assert (loaded.accepted, loaded.past) == (1, 0)
    assert rejected(load) == {"past": "due in the past"}


@pytest.mark.parametrize("file_format", ["csv", "json"])
def test_text_of_another_encoding_is_named_and_not_altered(
    api: ApiServer, job: Job, make: Callable[..., LoadJob], tmp_path: Path, file_format: str
) -> None:
    path, due_ms = tmp_path / f"table.{file_format}", now_ms() + DAY_MS
    rows = [("café", "7"), ("a", "naïve"), ("b", "7")]
    if file_format == "csv":
        lines = ["due,key,shop", *(f"{due_ms},{key},{shop}" for key, shop in rows)]
    else:
        documents = [{"due": due_ms, "key": key, "shop": shop} for key, shop in rows]
        lines = [json.dumps(one, ensure_ascii=False) for one in documents]
    path.write_text("\n".join(lines), encoding="latin-1")
    load = make(MessageColumns("due", subject=unique("text"), key="key"))
    loaded = run(job, read_table(job, str(path), None, {}), load)
    assert (loaded.read, loaded.accepted, sum(loaded.rejected.values())) == (3, 1, 2)
    if file_format == "json":
        return  # It is UTF-8, by definition.
    assert list(loaded.rejected) == ["text is not in the file's encoding (--option encoding=…)"]
    again = replace(load, id=f"{load.id}-again")
    table = read_table(job, str(path), None, {"encoding": "iso-8859-1"})
    assert run(job, table, again).accepted == 2  # The third is there already.
    message = api.ask("GET", f"/v1/subjects/{load.columns.subject}/keys/a")
    assert message["body"] == {"shop": "naïve"}


@pytest.mark.parametrize("file_format", ["csv", "json"])
def test_a_malformed_line_is_a_row_of_its_own(
    api: ApiServer, job: Job, make: Callable[..., LoadJob], tmp_path: Path, file_format: str
) -> None:
    path, due_ms = tmp_path / f"table.{file_format}", now_ms() + DAY_MS
    if file_format == "csv":
        broken = f"{due_ms},b,8,9"
        path.write_text(f"due,key,shop\n{due_ms},a,7\n{broken}\n{due_ms},c,\n")
    else:
        broken = "{broken"
        documents = [{"due": due_ms, "key": key, "shop": "7"} for key in "ac"]
        path.write_text(f"\n{broken}\n".join(map(json.dumps, documents)))
    load = make(MessageColumns("due", subject=unique("text"), key="key"))
    loaded = run(job, read_table(job, str(path), None, {}), load)
    assert (loaded.accepted, loaded.rejected) == (2, {"malformed line": 1})
    assert load.rejects is not None
    assert json.loads(load.rejects.read_text())["body"] == broken
    message = api.ask("GET", f"/v1/subjects/{load.columns.subject}/keys/a")
    assert message["body"] == {"shop": "7"}


def test_strict_loads_nothing_if_a_row_is_rejected(
    api: ApiServer, job: Job, make: Callable[..., LoadJob]
) -> None:
    load, due_ms = make(strict=True), now_ms() + DAY_MS
    loaded = run(job, table(job.spark, (due_ms, "a", "1"), (due_ms, "b", "{")), load)
    assert (loaded.state, loaded.accepted, loaded.rejected) == (
        "rejected",
        0,
        {"body is not JSON": 1},
    )
    assert staged(load) == []
    api.ask("GET", f"/v1/subjects/{load.columns.subject}/keys/a", 404)


def test_a_dry_run_checks_and_loads_nothing(
    api: ApiServer, job: Job, make: Callable[..., LoadJob]
) -> None:
    load, due_ms = make(dry_run=True), now_ms() + DAY_MS
    large = json.dumps("x" * 10_001)  # more than this server takes, and less than others do
    rows = [(due_ms, "a", "1"), (due_ms, "b", "{"), (due_ms, "c", large)]
    loaded = run(job, table(job.spark, *rows), load)
    assert (loaded.state, loaded.staged, loaded.rejected_total) == ("checked", 1, 2)
    assert rejected(load)["c"] == "body too large"
    assert staged(load) == []
    api.ask("GET", f"/v1/imports/{load.id}", 404)


def test_keys_that_are_taken_are_left_out(
    api: ApiServer, job: Job, make: Callable[..., LoadJob]
) -> None:
    load, due_ms = make(), now_ms() + DAY_MS
    subject = load.columns.subject or ""
    first = api.publish(subject, key="a", body=1, delay="2d")["id"]
    rows = [(due_ms, "a", "1"), (due_ms, "b", "2"), (due_ms + 1, "b", "2"), (due_ms, None, "3")]
    loaded = run(job, table(job.spark, *rows), load)
    assert (loaded.accepted, loaded.duplicates, loaded.conflicts) == (2, 2, 0)
    found = {(row["key"], row["duplicate"]): row["id"] for row in ids(load)}
    assert found["a", True] == first
    assert found["b", True] == found["b", False]
    assert len(found) == 4


def test_conflicts_refuse_everything_or_are_left_out(
    api: ApiServer, job: Job, make: Callable[..., LoadJob]
) -> None:
    load, due_ms = make(), now_ms() + DAY_MS
    subject = load.columns.subject or ""
    first = api.publish(subject, key="a", body="another", delay="2d")["id"]
    rows = table(job.spark, (due_ms, "a", "1"), (due_ms, "b", "2"))
    with pytest.raises(CallRefusedError, match="other content") as caught:
        run(job, rows, load)
    assert caught.value.status == 409
    assert staged(load) == []
    api.ask("GET", f"/v1/subjects/{subject}/keys/b", 404)
    loaded = run(job, rows, replace(load, on_conflict=OnConflict.KEEP))
    assert (loaded.accepted, loaded.duplicates, loaded.conflicts) == (1, 1, 1)
    assert {row["key"]: row["id"] for row in ids(load)}["a"] == first


def test_the_same_name_is_loaded_once(job: Job, make: Callable[..., LoadJob]) -> None:
    load, rows = make(), table(job.spark, (now_ms() + DAY_MS, None, "1"))
    first, second = run(job, rows, load), run(job, rows, replace(load, ids=None))
    assert (first.was_adopted, first.accepted) == (False, 1)
    assert (second.was_adopted, second.accepted, second.staged) == (True, 1, 1)


def test_another_table_under_a_name_that_was_loaded(job: Job, make: Callable[..., LoadJob]) -> None:
    """A job of every night with one name would load once, and say that all is well."""
    load, due_ms = make(past="reject"), now_ms() + DAY_MS
    rows = [(due_ms + number, f"k{number}", f"{number}") for number in range(8)]
    rows.append((now_ms() - 1, "past", "1"))
    run(job, table(job.spark, *rows), load)
    load = replace(load, ids=None)
    # In another order, and as Spark cuts it then.
    again = run(job, table(job.spark, *rows[::-1]).repartition(3), load)
    assert (again.was_adopted, again.read, again.accepted) == (True, 9, 8)
    others = {
        "its 9 rows have other content": [(due_ms, "k0", "7"), *rows[1:]],
        "it had 9 rows, and has 8": rows[1:],
        "8 of its rows were messages, and 7 are": [(due_ms, "k0", "{"), *rows[1:]],
    }
    for difference, other in others.items():
        with pytest.raises(PipelineError, match=f"another table was loaded .*{difference}"):
            run(job, table(job.spark, *other), load)
    keyless = replace(load, columns=replace(load.columns, key=None))
    with pytest.raises(PipelineError, match="key was key, and is None"):
        run(job, table(job.spark, *rows), keyless)


def test_what_was_staged_of_another_table_and_not_adopted_is_staged_again(
    api: ApiServer, job: Job, make: Callable[..., LoadJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    load, due_ms = make(wait_s=0), now_ms() + DAY_MS
    interrupt(job, load, table(job.spark, (due_ms, "a", "1")), monkeypatch)
    assert run(job, table(job.spark, (due_ms, "b", "1")), load).accepted == 1
    assert [row["key"] for row in ids(load)] == ["b"]
    assert staged(load) == []


def interrupt(job: Job, load: LoadJob, rows: DataFrame, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is staged, and the server cannot be reached then."""

    def unreachable(self: Adoption) -> None:
        raise PipelineError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(Adoption, "adopt", unreachable)
        with pytest.raises(PipelineError, match=f"--id {load.id}"):
            run(job, rows, load)
    assert any(import_of(name) == load.id for name in staged(load))


def test_what_an_interrupted_run_has_staged_is_adopted(
    job: Job, make: Callable[..., LoadJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    load, rows = make(wait_s=0), table(job.spark, (now_ms() + DAY_MS, "a", "1"))
    interrupt(job, load, rows, monkeypatch)
    loaded = run(job, rows, load)
    assert (loaded.accepted, loaded.read, loaded.staged) == (1, 1, 1)
    assert len(ids(load)) == 1
    assert staged(load) == []


def test_the_ids_are_told_by_a_run_that_follows(
    job: Job, make: Callable[..., LoadJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first has ended between the adoption and the file."""
    load, rows = make(), table(job.spark, (now_ms() + DAY_MS, "a", "1"))

    def full(*_: object) -> None:
        raise OSError("planted")

    with monkeypatch.context() as patch:
        patch.setattr("delayserver.pipeline.load.load.write_ids", full)
        with pytest.raises(OSError, match="planted"):
            run(job, rows, load)
    loaded = run(job, rows, load)
    assert (loaded.was_adopted, loaded.ids_file) == (True, str(load.ids))
    assert [row["key"] for row in ids(load)] == ["a"]
    assert staged(load) == []


def test_two_loads_under_one_name(job: Job, make: Callable[..., LoadJob]) -> None:
    load, rows = make(), table(job.spark, (now_ms() + DAY_MS, "a", "1"))
    directory = load.data_dir / "imports"
    directory.mkdir(exist_ok=True)
    with (
        NoteFile(directory, load.id),
        pytest.raises(PipelineError, match="another load runs under the name"),
    ):
        run(job, rows, load)
    assert run(job, rows, load).accepted == 1


def test_columns_of_every_kind(api: ApiServer, job: Job, make: Callable[..., LoadJob]) -> None:
    tomorrow = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
    load = make(MessageColumns("at", subject_column="kind", key="id", headers="extra"))
    load = replace(load, ids_columns=("amount",))
    prefix = unique("kind")
    rows = [
        (tomorrow + timedelta(microseconds=1), f"{prefix}.a", 1, {"x-shop": "7"}, 1.5, None),
        (tomorrow, f"{prefix}.b", 2, None, None, "text"),
        (tomorrow, "not a subject!", 3, None, 2.0, None),
        (tomorrow, f"{prefix}.a", 4, {"host": "x"}, 2.0, None),
    ]
    schema = (
        "at timestamp, kind string, id bigint, extra map<string,string>, amount double, note string"
    )
    loaded = run(job, table(job.spark, *rows, schema=schema), load)
    assert loaded.accepted == 2
    assert rejected(load)["3"] == "bad subject"
    assert rejected(load)["4"].startswith("bad headers: the header host")
    found = {row["key"]: row for row in ids(load)}
    assert found["1"]["amount"] == 1.5
    message = api.look_up(found["1"]["id"])
    assert message["body"] == {"amount": 1.5, "note": None}
    assert message["headers"] == {"x-shop": "7"}
    # Never earlier than it says: a part of a millisecond is rounded up.
    assert message["deliver_at"][-5:] == ".001Z"


@pytest.mark.parametrize("many", [False, True])
def test_nanoseconds_as_pandas_writes_them(
    api: ApiServer, job: Job, make: Callable[..., LoadJob], tmp_path: Path, many: bool
) -> None:
    times = ["2027-11-20T15:30:00.500000000Z", "2027-11-20T15:30:00.500000001Z", "NaT"]
    due = pd.to_datetime(times)
    frame = pd.DataFrame({"due": due, "key": ["exact", "later", "never"], "shop": ["7"] * 3})
    path = tmp_path / "table.parquet"
    if many:
        path.mkdir()
    frame.to_parquet(path / "part-0.parquet" if many else path)
    load = make(MessageColumns("due", subject=unique("nanos"), key="key"))
    loaded = run(job, read_table(job, str(path), None, {}), load)
    assert loaded.accepted == 2
    assert set(rejected(load)) == {"never"}
    for key, deliver_at in (("exact", "00.500Z"), ("later", "00.501Z")):
        message = api.ask("GET", f"/v1/subjects/{load.columns.subject}/keys/{key}")
        assert message["deliver_at"] == f"2027-11-20T15:30:{deliver_at}"


@pytest.mark.parametrize("file_format", ["csv", "json"])
def test_files_of_text(
    api: ApiServer, job: Job, make: Callable[..., LoadJob], tmp_path: Path, file_format: str
) -> None:
    path, due = tmp_path / f"table.{file_format}", "2027-11-20T16:30:00.5+01:00"
    if file_format == "csv":
        path.write_text(f"due,key,shop\n{due},a,7\ntomorrow,b,8\n{now_ms()},c,9\n")
    else:
        documents = [{"due": due, "key": "a", "shop": "7"}, {"due": "tomorrow", "key": "b"}]
        path.write_text("\n".join(map(json.dumps, documents)))
    load = make(MessageColumns("due", subject=unique("text"), key="key"))
    loaded = run(job, read_table(job, str(path), None, {}), load)
    assert rejected(load) == {"b": "due time cannot be read: 'tomorrow'"}
    assert loaded.accepted == (2 if file_format == "csv" else 1)
    message = api.ask("GET", f"/v1/subjects/{load.columns.subject}/keys/a")
    assert message["body"] == {"shop": "7"}
    assert message["deliver_at"] == "2027-11-20T15:30:00.500Z"


def test_binary_bodies(api: ApiServer, job: Job, make: Callable[..., LoadJob]) -> None:
    load = make()
    rows = table(
        job.spark, (now_ms() + DAY_MS, "a", b"\xff\0"), schema="due bigint, key string, body binary"
    )
    assert run(job, rows, load).accepted == 1
    assert api.look_up(ids(load)[0]["id"])["body_base64"] == "/wA="


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        (MessageColumns("none", subject="a"), "no column 'none'; it has due, key, body"),
        (MessageColumns("due", subject="no subject"), "cannot be a subject"),
        (MessageColumns("key", subject_column="due"), "column due is bigint; a subject is text"),
        (MessageColumns("due", subject_column="key"), "no valid subject"),
    ],
)
def test_what_cannot_be_loaded_says_why(
    job: Job, make: Callable[..., LoadJob], columns: MessageColumns, text: str
) -> None:
    with pytest.raises(PipelineError, match=text):
        run(job, table(job.spark, (None, "not one!", "1")), make(columns))


def test_a_directory_of_nobody(job: Job, make: Callable[..., LoadJob], tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="not a data directory"):
        run(job, table(job.spark, (1, "a", "1")), replace(make(), data_dir=tmp_path))


def test_what_is_loaded_is_pulled_byte_by_byte(
    api: ApiServer, job: Job, make: Callable[..., LoadJob], tmp_path: Path
) -> None:
    """A folder with blanks in its name, of several formats of one table, through Spark and back."""
    subject, due_ms = unique("bytes"), now_ms() - 1
    keys = [
        'a "quoted" key',
        "007",
        " blanks ",
        "é\u2028\r\n, ;\t",
        "back\\slash\\",
        "\ufffd",
        "\U0001f4a9",
    ]
    bodies = [
        json.dumps({"n": n, "t": key, "x": 12345678901234567890123}) for n, key in enumerate(keys)
    ]
    root = tmp_path / "my table 50% é"
    for kind in ("csv", "parquet"):
        (root / kind / f"subject={subject}").mkdir(parents=True)
    with (root / "csv" / f"subject={subject}" / "1.csv").open("w", newline="") as file:
        rows = [(due_ms, key, body) for key, body in zip(keys, bodies, strict=True)]
        csv.writer(file, lineterminator="\n").writerows([("due", "key", "body"), *rows])
    for unit in ("ns", "us"):
        per_ms = {"ns": 10**6, "us": 1000}[unit]
        columns = {
            "due": pa.array([due_ms * per_ms] * len(keys), pa.timestamp(unit)),
            "key": [f"{unit}{key}" for key in keys],
            "body": bodies,
        }
        pq.write_table(
            pa.table(columns), root / "parquet" / f"subject={subject}" / f"{unit}.parquet"
        )
    path = api.subscribe(unique("queue"), subject)
    for kind in ("csv", "parquet"):
        load = make(MessageColumns("due", subject_column="subject", key="key", body="body"))
        assert run(job, read_table(job, str(root / kind), kind, {}), load).rejected == {}
    found = {message["key"]: message for message in api.pull_all(path, 3 * len(keys))}
    wanted = {
        f"{unit}{key}": json.loads(body)
        for unit in ("", "ns", "us")
        for key, body in zip(keys, bodies, strict=True)
    }
    assert {key: message["body"] for key, message in found.items()} == wanted
    at = {datetime.fromisoformat(message["deliver_at"]) for message in found.values()}
    assert max(at).timestamp() * 1000 <= now_ms()


def test_what_spark_itself_has_written(job: Job, tmp_path: Path) -> None:
    keys = ['say "hi"', "a\\b", 'a\\"b', "x,y", "two\nlines", "007"]
    rows = job.spark.createDataFrame(
        [(1_900_000_000_000, key, "k=1") for key in keys], "due long, key string, kind string"
    )
    columns = MessageColumns("due", subject_column="kind", key="key")
    for kind, options in (("csv", {"escape": "\\"}), ("json", {}), ("parquet", {})):
        path = tmp_path / f"by spark.{kind}"
        rows.coalesce(1).write.option("header", "true").format(kind).save(str(path))
        assert sorted(row[KEY] for row in rows_of(path, columns, **options)) == sorted(keys)
        path = tmp_path / f"in folders.{kind}"
        rows.coalesce(1).write.option("header", "true").partitionBy("key").format(kind).save(
            str(path)
        )
        # A line break is none in the name of a folder.
        found = {row[KEY] for row in rows_of(path, columns, **options)}
        assert found == set(keys)


def test_a_directory_with_blanks_and_other_signs(job: Job, tmp_path: Path) -> None:
    (tmp_path / "my data 50% é").mkdir()
    server = ApiServer(tmp_path / "my data 50% é")
    server.start()
    try:
        columns = MessageColumns("due", subject="s", key="key", body="body")
        load = LoadJob(
            "odd",
            server.data_dir,
            str(server.base_url),
            columns,
            ids=tmp_path / "ids.parquet",
            ids_columns=("kind", "row", "due", "body", "reason"),
        )
        path = tmp_path / "table.parquet"
        due = now_ms() + DAY_MS
        row = {"due": due, "key": "a", "body": "1", "kind": "x", "row": 7, "reason": None}
        pq.write_table(pa.Table.from_pylist([row]), path)
        assert run(job, read_table(job, str(path), None, {}), load).accepted == 1
        (told,) = ids(load)
        assert {name: told[name] for name in load.ids_columns} == {
            "kind": "x",
            "row": 7,
            "due": due,
            "body": "1",
            "reason": None,
        }
        assert [one.name for one in tmp_path.iterdir() if one.is_dir()] == ["my data 50% é"]
    finally:
        server.shut_down()


@pytest.mark.parametrize("names", [("id",), ("Duplicate",), ("shop", "shop"), ("a", "A")])
def test_columns_that_cannot_stand_in_the_file_of_ids(
    job: Job, make: Callable[..., LoadJob], names: tuple[str, ...]
) -> None:
    load = replace(make(), ids_columns=names)
    with pytest.raises(PipelineError, match=r"of its own|twice"):
        run(job, table(job.spark, (1, "a", "1")), load)


def test_old_timestamps_are_no_seconds(
    job: Job, make: Callable[..., LoadJob], tmp_path: Path
) -> None:
    """The unit of numbers may be doubted, that of timestamps stands in the file."""
    path = tmp_path / "table.parquet"
    due = pa.array([86_400_000_000, 0, -1], pa.timestamp("us"))
    pq.write_table(pa.table({"due": due, "key": list("abc"), "body": ["1"] * 3}), path)
    loaded = run(job, read_table(job, str(path), None, {}), make())
    assert (loaded.accepted, loaded.past) == (3, 3)


def test_a_type_of_spark_that_json_has_not(job: Job, make: Callable[..., LoadJob]) -> None:
    rows = table(job.spark, (now_ms() + DAY_MS, "a", "1"))
    load = make(MessageColumns("due", subject=unique("s"), key="key"))
    for column in ("interval 1 day", "array(named_struct('x', interval 1 month))"):
        with pytest.raises(PipelineError, match=r"column took.* which JSON does not have"):
            run(job, rows.selectExpr("due", "key", f"{column} as took"), load)


# ── a crash in the middle ──────────────────────────────────────────────────────────────────────


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    server = ApiServer(tmp_path)
    server.start()
    yield server
    server.shut_down()


ROWS, LATER_ROWS, POSTED = 200_000, 10_000, 2_000
CANCELLED = 100


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_nothing_is_lost_or_repeated_when_the_server_is_killed(
    server: ApiServer, job: Job, tmp_path: Path
) -> None:
    """200,000 rows beside posted ones; SIGKILL in the verification, in the filing, and in the
    delivery. The ledger is kept outside: keys that were promised, and what came."""
    queue = server.subscribe("coupons", "coupon.expiry", lease="60s")
    soon_ms = now_ms() + 20_000
    source = tmp_path / "coupons.parquet"
    _write_coupons(source, soon_ms)
    load = LoadJob(
        "coupons",
        server.data_dir,
        str(server.base_url),
        MessageColumns("expires_at", subject="coupon.expiry", key="coupon", body="body"),
        ids=tmp_path / "ids.parquet",
    )
    results: list[Any] = []
    loading = threading.Thread(
        target=lambda: results.append(run(job, read_table(job, str(source), None, {}), load))
    )
    loading.start()
    posted = {f"posted{number}" for number in range(POSTED)}
    _post(server, sorted(posted))
    _kill_in(server, load, "verifying")
    _kill_in(server, load, "filing")
    loading.join()
    (loaded,) = results
    assert (loaded.accepted, loaded.duplicates) == (ROWS, 0)

    found = {row["key"]: row["id"] for row in pq.read_table(load.ids).to_pylist()}
    assert len(found) == ROWS
    later = [f"later{number}" for number in range(LATER_ROWS)]
    for key in later[:CANCELLED]:
        server.ask("DELETE", f"/v1/subjects/coupon.expiry/keys/{key}")
    assert server.look_up(found[later[0]])["state"] == "cancelled"
    assert server.look_up(found[later[-1]])["state"] == "scheduled"

    expected = (found.keys() - set(later)) | posted
    acked = _consume(server, queue, expected, found)
    assert acked == expected
    assert server.pull(queue, wait="100ms") == []

    # And the files prove the same, of the import and of what was posted.
    proof = audit_here(str(server.data_dir))
    assert proof.is_clean, (proof.violations, proof.damage)
    assert proof.messages["accepted"] == ROWS + POSTED
    assert proof.messages["cancelled"] == CANCELLED
    assert proof.messages["delivered"] == len(expected)
    assert proof.messages["pending"] == LATER_ROWS - CANCELLED


def _write_coupons(path: Path, soon_ms: int) -> None:
    due = [soon_ms - 30_000 + number * 50_000 // ROWS for number in range(ROWS - LATER_ROWS)]
    due += [soon_ms + DAY_MS + number * 60_000 for number in range(LATER_ROWS)]
    keys = [f"coupon{number}" for number in range(ROWS - LATER_ROWS)]
    keys += [f"later{number}" for number in range(LATER_ROWS)]
    columns = {
        "coupon": keys,
        "expires_at": pa.array(due, pa.timestamp("ms", tz="UTC")),
        "body": [json.dumps({"coupon": key, "text": "x" * 100}) for key in keys],
    }
    pq.write_table(pa.table(columns), path)


def _post(server: ApiServer, keys: list[str]) -> None:
    for start in range(0, len(keys), 500):
        messages = [
            {"subject": "coupon.expiry", "key": key, "body": {"coupon": key}, "delay": "5s"}
            for key in keys[start : start + 500]
        ]
        server.ask("POST", "/v1/messages/batch", json=messages)


def _kill_in(server: ApiServer, load: LoadJob, state: str) -> None:
    """SIGKILL as soon as the import is in that state."""

    def is_there() -> bool:
        answer = server.get(f"/v1/imports/{load.id}")
        found = answer.json().get("state")
        assert found != "adopted", f"it was adopted before it was seen as {state}"
        return bool(found == state)

    wait_until(is_there, timeout_s=300)
    server.restart(kill=True)


def _consume(server: ApiServer, queue: str, expected: set[str], found: dict[str, str]) -> set[str]:
    """Pull and acknowledge everything, with a SIGKILL in the middle; the keys that were acked."""
    acked: set[str] = set()
    killed = False
    deadline = time.monotonic() + 400
    while len(acked) < len(expected):
        assert time.monotonic() < deadline, f"{len(acked)} of {len(expected)} came"
        messages = server.pull(queue, max=2000, wait="5s")
        for message in messages:
            key = message["key"]
            assert key not in acked, f"{key} was acknowledged, and comes again"
            assert message["id"] == found.get(key, message["id"])
            assert message["body"]["coupon"] == key
            assert datetime.fromisoformat(message["deliver_at"]).timestamp() * 1000 <= now_ms()
        if not killed and len(acked) > len(expected) // 3:
            killed = True
            server.restart(kill=True)
            continue  # What was leased comes again.
        answer = server.ack(queue, *messages)
        assert not answer["expired"]
        acked |= {message["key"] for message in messages}
    assert killed
    return acked
