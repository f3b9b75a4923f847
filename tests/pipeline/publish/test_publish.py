"""A stream that is published, with everything restarted in the middle, and a table."""

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from delayserver.errors import PipelineError
from delayserver.pipeline.publish.publish import _show_rejects
from delayserver.pipeline.publish.sending import SendingReport
from tests.integration.api_support import ApiServer, now_ms
from tests.waiting import wait_until

DAY_MS = 86_400_000
ROWS_PER_FILE = 400
SUBJECT = "order.unpaid"


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiServer]:
    server = ApiServer(tmp_path, checkpoint_ms=200)
    server.start()
    yield server
    server.shut_down()


def write_file(directory: Path, number: int, due_ms: int) -> None:
    """Events, two of which cannot be messages."""
    first = number * ROWS_PER_FILE
    events: list[dict[str, Any]] = [
        {"order": f"o{n}", "due": due_ms + n, "cents": n}
        for n in range(first, first + ROWS_PER_FILE)
    ]
    events.insert(7, {"order": f"undated{number}", "cents": 1})
    # It says something else about an order of the first file.
    events.append({"order": "o0", "due": due_ms, "cents": number + 1})
    path = directory / f"{number}.json"
    path.with_suffix(".new").write_text("\n".join(map(json.dumps, events)))
    os.utime(path.with_suffix(".new"), (number, number))
    path.with_suffix(".new").rename(path)


def lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def pending(api: ApiServer) -> list[tuple[str, int]]:
    """Keys and bodies of all messages, in the order of their due times."""
    found, cursor = [], ""
    while cursor is not None:
        query = "limit=1000" + (f"&cursor={cursor}" if cursor else "")
        page = api.ask("GET", f"/v1/subjects/{SUBJECT}/messages?{query}")
        found += [(one["key"], one["body"]["cents"]) for one in page["messages"]]
        cursor = page["cursor"]
    return found


@pytest.mark.timeout(900)
def test_every_row_is_one_message_whatever_is_killed(
    api: ApiServer, spark: SparkSession, tmp_path: Path
) -> None:
    """SIGKILL of the server while rows are sent; then a micro-batch that was published and not
    committed, which is repeated with the rows in other tasks."""
    events, report, rejects = tmp_path / "events", tmp_path / "report", tmp_path / "rejects"
    checkpoint = tmp_path / "checkpoint"
    events.mkdir()
    due_ms = now_ms() + DAY_MS

    def start(partitions: int) -> StreamingQuery:
        rows = spark.readStream.schema("order string, due long, cents long")
        return (
            rows.option("maxFilesPerTrigger", 1)
            .json(str(events))
            .repartition(partitions)
            .writeStream.format("delayserver")
            .options(url=str(api.base_url), subject=SUBJECT, dueColumn="due", keyColumn="order")
            .options(report=str(report), rejects=str(rejects), batchSize=50)
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )

    for number in range(4):
        write_file(events, number, due_ms)
    query = start(1)
    wait_until(lambda: lines(report), timeout_s=300)
    api.process.kill()
    restarting = threading.Timer(0.5, api.start)
    restarting.start()
    assert query.awaitTermination(300)
    restarting.join()
    assert [line["batch"] for line in lines(report)] == [0, 1, 2, 3]
    counts = lines(report)
    # What was under way when the server was killed may have been sent twice.
    assert sum(line["published"] + line["duplicates"] for line in counts) == 4 * ROWS_PER_FILE
    assert [line["rejected"] for line in counts] == [2, 2, 2, 2]

    # As if Spark had been killed before it noted that the last one is done.
    for path in (checkpoint / "commits").glob("*3*"):
        path.unlink()
    write_file(events, 4, due_ms)
    assert start(3).awaitTermination(300)
    repeated, new = lines(report)[4:]
    assert (repeated["batch"], repeated["published"]) == (3, 0)
    assert (repeated["duplicates"], repeated["rejected"]) == (ROWS_PER_FILE, 2)
    assert (new["batch"], new["published"], new["rejected"]) == (4, ROWS_PER_FILE, 2)
    assert {line["query"] for line in lines(report)} == {new["query"]}

    assert pending(api) == [(f"o{n}", n) for n in range(5 * ROWS_PER_FILE)]
    # Each once, though one micro-batch was done twice.
    refused = [line for path in rejects.glob("*.jsonl") for line in lines(path)]
    assert sorted((row["key"], json.loads(row["body"])["cents"]) for row in refused) == [
        *(("o0", number + 1) for number in range(5)),
        *((f"undated{number}", 1) for number in range(5)),
    ]
    assert not list(rejects.glob(".*"))


@pytest.mark.timeout(300)
def test_a_table_is_published_once(api: ApiServer, spark: SparkSession, tmp_path: Path) -> None:
    table = spark.range(0, 100, 1, 2).selectExpr(
        "concat('o', id) as order",
        f"timestamp_millis({now_ms() + DAY_MS} + id) as due",
        "named_struct('cents', id) as body",
    )
    writer = table.write.format("delayserver").mode("append").option("url", str(api.base_url))
    writer = writer.options(subject=SUBJECT, dueColumn="due", bodyColumn="body")
    with pytest.raises(
        PySparkException, match="needs the option keyColumn: Spark sends rows again"
    ):
        writer.save()
    writer.options(keyColumn="order", report=str(tmp_path / "report"))
    writer.save()
    writer.save()
    assert [(one["published"], one["duplicates"]) for one in lines(tmp_path / "report")] == [
        (100, 0),
        (0, 100),
    ]
    assert pending(api) == [(f"o{n}", n) for n in range(100)]
    other = table.where("order = 'o7'").selectExpr("order", "due", "array(7) as body")
    with pytest.raises(PySparkException, match="key 'o7', due"):
        other.write.format("delayserver").mode("append").options(
            url=str(api.base_url), subject=SUBJECT, dueColumn="due", keyColumn="order"
        ).option("bodyColumn", "body").save()


def test_rejected_rows_that_the_driver_does_not_find_are_an_error(tmp_path: Path) -> None:
    sent = [SendingReport(rejected=1, rejects_file=".q-part.jsonl")]
    with pytest.raises(PipelineError, match="the same directory on all machines"):
        _show_rejects(tmp_path, sent, None)
