"""The same table by a bulk load and by the sink: the same messages, byte for byte."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from delayserver.pipeline.load.load import LoadJob, run
from delayserver.pipeline.progress import Job
from delayserver.pipeline.publish.mapping import MessageColumns
from tests.integration.api_support import ApiServer, now_ms

DAY_MS = 86_400_000


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiServer]:
    server = ApiServer(tmp_path)
    server.start()
    yield server
    server.shut_down()


def rows(spark: SparkSession) -> Any:
    """Times with and without a part of a second, NaN, infinity, nulls, and blanks around JSON."""
    due = f"timestamp_millis({now_ms() + DAY_MS} + id)"
    time = "timestamp_micros(1795192200000000 + id * 1500)"
    return spark.range(8).selectExpr(
        f"{due} as due",
        "id / 4 as id",
        "cast(id / 8 as decimal(6,2)) as price",
        f"if(id = 3, null, {time}) as at",
        f"cast({time} as timestamp_ntz) as local",
        f"cast({time} as date) as day",
        "case id when 1 then double('NaN') when 2 then double('Infinity') else id / 3 end as ratio",
        "array(id > 3, null) as flags",
        "cast(concat('b', id) as binary) as raw",
        f"map('first', {time}) as by",
        "if(id = 5, null, concat('ä\"', id)) as note",
        f"named_struct('seen', {time}, 'size', float(id) / 3) as part",
        "concat(' {\"n\": ', id, '.10} ') as text",
        "map('x-n', string(id)) as extra",
    )


WAYS = {
    "all columns": MessageColumns("due", subject="form.all", key="id"),
    "a struct": MessageColumns("due", subject="form.struct", key="at", body="part"),
    "JSON text": MessageColumns("due", subject="form.text", key="id", body="text"),
    "a number": MessageColumns("due", subject="form.number", key="price", body="ratio"),
    "binary": MessageColumns("due", subject="form.binary", key="local", body="raw"),
    "headers": MessageColumns("due", subject="form.headers", key="id", body="by", headers="extra"),
}


def by_sink(api: ApiServer, columns: MessageColumns, table: Any, report: Path) -> None:
    writer = table.write.format("delayserver").mode("append")
    names = {"keyColumn": columns.key, "bodyColumn": columns.body, "headersColumn": columns.headers}
    writer.options(
        url=str(api.base_url),
        subject=columns.subject,
        dueColumn=columns.due,
        delivery="at-least-once",
        report=str(report),
        **{name: text for name, text in names.items() if text is not None},
    ).save()


def messages(api: ApiServer, subject: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = api.ask("GET", f"/v1/subjects/{subject}/messages")["messages"]
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first", ["load", "sink"])
def test_a_load_and_the_sink_make_the_same_messages(
    api: ApiServer, spark: SparkSession, tmp_path: Path, way: str, first: str
) -> None:
    """Whoever comes second adds nothing, and contradicts nothing: its keys are known, and stand
    for the same bytes."""
    columns, table = WAYS[way], rows(spark).cache()
    load = LoadJob(
        f"form-{first}",
        api.data_dir,
        str(api.base_url),
        columns,
        rejects=tmp_path / "rejected",
    )
    # A key that is null makes a message each time.
    nulls = table.where(f"{columns.key} is null").count()
    if first == "sink":
        by_sink(api, columns, table, tmp_path / "report")
        loaded = run(Job(spark), table, load)
        assert (loaded.accepted, loaded.conflicts) == (nulls, 0)
    else:
        assert run(Job(spark), table, load).accepted == 8
        by_sink(api, columns, table, tmp_path / "report")
    assert len(messages(api, columns.subject or "")) == 8 + nulls
    table.unpersist()


def test_what_the_bytes_are(api: ApiServer, spark: SparkSession, tmp_path: Path) -> None:
    table = rows(spark).where("id = 0.25").select("due", "id", "at", "ratio", "price", "raw")
    columns = MessageColumns("due", subject="form.bytes", key="id")
    run(Job(spark), table, LoadJob("bytes", api.data_dir, str(api.base_url), columns))
    answer = api.get("/v1/subjects/form.bytes/keys/0.25")
    expected = '"body":{"at":"2026-11-20T16:30:00.001500Z","ratio":null,"price":0.13,"raw":"YjE="}'
    assert expected in answer.text
