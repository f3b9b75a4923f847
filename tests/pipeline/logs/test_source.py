"""The logs as tables."""

from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from delayserver.pipeline.logs.options import parse_options
from delayserver.pipeline.logs.source import DelayLog
from storage.buckets import DAY_MS
from storage.rows import HOUR_MS, LogKind, RecordKind
from tests.pipeline.reading import read_table
from tests.pipeline.store import FAILED, HOUR, START_MS, Store

Load = Callable[..., DataFrame]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Two subjects over three hours; one message is retried, one cancelled."""
    store = Store(tmp_path_factory.mktemp("source"))
    store.subscribe("mail", "order.*")
    (first, *_) = store.publish("order.unpaid", [1000, 2000, HOUR_MS + 5], headers={"x": "y"})
    store.publish("envelope", [1500, 2 * HOUR_MS])
    store.cancel(first + 1, 2000)
    store.run(1100, answer=lambda subject: FAILED)
    store.run(HOUR_MS // 2)
    store.checkpoint()
    store.publish("envelope", [2 * HOUR_MS + 1], key="k1")
    store.kill()
    return store


@pytest.fixture
def load(spark: SparkSession, store: Store) -> Load:
    def load(log: str, schema: str = "", **options: object) -> DataFrame:
        reader = spark.read.format("delaylog").option("log", log).options(**options)  # type: ignore[arg-type]
        return (reader.schema(schema) if schema else reader).load(store.root)

    return load


def tuples(frame: DataFrame) -> list[tuple[object, ...]]:
    return sorted(map(tuple, frame.collect()), key=lambda row: str(row[0]).zfill(20))


def test_the_schedule_log(load: Load) -> None:
    rows = load("schedule", "due_ms long, subject string, subscription string, kind int, flags int")
    found = tuples(rows.withColumn("due_ms", F.col("due_ms") - START_MS).where("flags = 0"))
    retried = [row for row in found if row[3] == RecordKind.RETRY]
    assert [row for row in found if row not in retried] == [
        (1000, "order.unpaid", None, RecordKind.PUBLISH, 0),
        (1500, "envelope", None, RecordKind.PUBLISH, 0),
        (2000, "order.unpaid", None, RecordKind.PUBLISH, 0),
        (HOUR_MS + 5, "order.unpaid", None, RecordKind.PUBLISH, 0),
        (2 * HOUR_MS, "envelope", None, RecordKind.PUBLISH, 0),
    ]
    assert [row[1:3] for row in retried] == [("order.unpaid", "mail")]
    assert load("schedule").where("flags = 1").count() == 2


def test_the_message_log_holds_what_is_not_filed_yet(load: Load) -> None:
    rows = load("message", "kind int, key string, subject string").where("key is not null")
    assert tuples(rows) == [(RecordKind.PUBLISH, "k1", "envelope")]


def test_the_dispatch_log_with_times(load: Load) -> None:
    rows = load("dispatch", "subscription string, attempt int, due timestamp, settled timestamp")
    ((name, attempt, due, settled),) = tuples(rows)
    assert (name, attempt) == ("mail", 2)
    assert 2000 < int(due.timestamp() * 1000) - START_MS < 2200  # type: ignore[attr-defined]
    assert settled > due  # type: ignore[operator]


def test_payloads_are_decoded_if_they_are_asked_for(load: Load) -> None:
    assert not {"body", "key"} & set(load("schedule").columns)
    rows = load("schedule", payload="true").where(f"kind = 1 and due_ms < {START_MS + 1001}")
    (row,) = rows.collect()
    assert (bytes(row["body"]), row["headers"], row["key"]) == (b'{"n": 1000}', {"x": "y"}, None)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"to": START_MS + HOUR_MS}, 6),
        ({"from_": START_MS + HOUR_MS}, 2),
        ({"to": "2026-05-31T04:00:01.5Z"}, 2),
        ({"from_": "2026-05-31T04:00:01.5Z", "to": START_MS + 1501}, 1),
        ({"from_": START_MS + 9 * HOUR_MS}, 0),
        ({"subject": "envelope"}, 2),
        ({"subject": "nobody,envelope"}, 2),
        ({"subject": "nobody"}, 0),
        ({"subscription": "mail"}, 2),
        ({"seq": "5..6"}, 1),
        ({"seq": "..4"}, 2),
        ({"seq": "5", "subject": "envelope"}, 0),
        ({"shard": "0"}, 8),
    ],
)
def test_a_selection_picks_rows(store: Store, options: dict[str, object], count: int) -> None:
    for columns in (("seq",), ("due", "subject", "body")):  # Also where payloads are read.
        assert read_table(DelayLog, store.root, *columns, **options).num_rows == count
    assert read_table(DelayLog, store.root, "seq").num_rows == 8


def test_a_query_is_answered_anew_each_time(load: Load) -> None:
    """What one query asks of a DataFrame does not stay with it (Spark's pushdown would)."""
    rows = load("schedule", "seq long, subject string, due timestamp")
    some = rows.where("subject = 'envelope'")
    assert (some.count(), rows.count()) == (2, 8)
    assert rows.where("seq < 5").union(rows.where("seq >= 5")).count() == 8
    assert rows.where("due >= timestamp'2026-05-31 05:00:00Z'").count() == 2
    few = load("schedule", "seq long, subject string", seq="5..")
    assert few.where("subject = 'envelope'").count() == 2
    assert (few.count(), few.where("seq < 5").count()) == (6, 0)


def test_a_wrong_option_or_column_is_named(spark: SparkSession, store: Store, load: Load) -> None:
    with pytest.raises(ValueError, match="needs the data directory"):
        _raise(lambda: parse_options("delaylog", {}, ()))
    for options, schema, text in (
        ({"log": "audit"}, "", "schedule or message or dispatch"),
        ({"lag": "1"}, "", "no option 'lag'"),
        ({"damage": "rows"}, "seq long", "_corrupt"),
        ({}, "sequence long", "no column 'sequence'"),
    ):
        with pytest.raises(PySparkException, match=text):
            reader = spark.read.format("delaylog").options(**options)
            (reader.schema(schema) if schema else reader).load(store.root).collect()


def _raise(call: Callable[[], object]) -> None:
    from delayserver.errors import InputError

    try:
        call()
    except InputError as error:
        raise ValueError(str(error)) from error


@pytest.fixture
def damaged(tmp_path: Path) -> Store:
    """The second of three frames of an hour is damaged."""
    store = Store(tmp_path)
    for due_ms in (10_000, 20_000, 30_000):
        store.publish("a", [due_ms])
        store.checkpoint()
    store.kill()
    path = store.path(LogKind.SCHEDULE)
    data = bytearray(path.read_bytes())
    data[len(data) // 3 + 80] ^= 1
    path.write_bytes(data)
    return store


@pytest.mark.damaged("a frame of the schedule log")
def test_damage_is_an_error_that_names_the_place(spark: SparkSession, damaged: Store) -> None:
    with pytest.raises(PySparkException, match=r"schedule is damaged at offset \d+, seq 3–3"):
        spark.read.format("delaylog").load(damaged.root).collect()


@pytest.mark.damaged("a frame of the schedule log")
def test_damage_is_a_row_beside_what_is_intact(spark: SparkSession, damaged: Store) -> None:
    rows = spark.read.format("delaylog").option("damage", "rows").load(damaged.root)
    assert rows.where("seq is not null").count() == 2
    (found,) = rows.where("_corrupt is not null").select("_corrupt.*").collect()
    assert found["file"].startswith("schedule/")
    assert (found["first_seq"], found["last_seq"]) == (3, 3)
    assert "checksum" in found["reason"]


def test_a_stream_reads_each_frame_once(spark: SparkSession, tmp_path: Path) -> None:
    store = Store(tmp_path / "data")
    store.subscribe("all", "*")

    def deliver(due_ms: int) -> None:
        store.publish("a", [due_ms])
        store.run(due_ms + 1)

    def read() -> list[int]:
        query = (
            spark.readStream.format("delaylog")
            .option("log", "dispatch")
            .schema("due_ms long")
            .load(store.root)
            .writeStream.format("parquet")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start(str(tmp_path / "out"))
        )
        assert query.awaitTermination(60)
        rows = spark.read.parquet(str(tmp_path / "out")).collect()
        return sorted(row["due_ms"] - START_MS for row in rows)

    deliver(1000)
    assert read() == [1000]
    deliver(2000)
    # A delivery that is being written is left for the next read.
    path = store.path(LogKind.DISPATCH)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:70])
    assert read() == [1000, 2000]
    path.write_bytes(whole)
    deliver(HOUR_MS + 1)
    assert read() == [1000, 2000, HOUR_MS + 1]
    store.kill()


def test_what_is_far_is_read_from_its_day_and_comes_into_a_stream_once(
    spark: SparkSession, tmp_path: Path
) -> None:
    store = Store(tmp_path / "data")
    store.subscribe("all", "*")
    near_ms, far_ms = 2 * HOUR_MS, 2 * DAY_MS

    def scheduled() -> list[int]:
        rows = spark.read.format("delaylog").option("log", "schedule").schema("due_ms long")
        hour_ms = (START_MS + far_ms) // HOUR_MS * HOUR_MS
        of_hour = f"due_ms >= {hour_ms} and due_ms < {hour_ms + HOUR_MS}"
        assert rows.load(store.root).where(of_hour).count() == 1
        return sorted(row["due_ms"] - START_MS for row in rows.load(store.root).collect())

    def streamed() -> list[int]:
        query = (
            spark.readStream.format("delaylog")
            .option("log", "schedule")
            .schema("due_ms long")
            .load(store.root)
            .writeStream.format("parquet")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start(str(tmp_path / "out"))
        )
        assert query.awaitTermination(60)
        rows = spark.read.parquet(str(tmp_path / "out")).collect()
        return sorted(row["due_ms"] - START_MS for row in rows)

    store.publish("a", [near_ms, far_ms, far_ms + DAY_MS])
    store.checkpoint()
    assert scheduled() == [near_ms, far_ms, far_ms + DAY_MS]
    assert streamed() == [near_ms]
    store.run(far_ms - DAY_MS)
    store.checkpoint()
    assert store.path(LogKind.SCHEDULE, (START_MS + far_ms) // HOUR_MS).exists()
    assert far_ms in scheduled()
    assert streamed() == [near_ms, far_ms]
    store.kill()


def test_subjects_of_what_was_dispatched_are_looked_up(spark: SparkSession, tmp_path: Path) -> None:
    """Of filed rows, of a retry, and of what was delivered before it was filed."""
    store = Store(tmp_path)
    store.subscribe("all", "*")
    store.publish("a", [1000, 2000])
    store.publish("b", [1500])
    store.run(1200, answer=lambda subject: FAILED)
    store.run(3000)
    store.checkpoint()
    store.publish("c", [HOUR_MS // 2])
    store.run(HOUR_MS // 2 + 1, late_ms=70)
    store.kill()

    def read(columns: str) -> DataFrame:
        reader = spark.read.format("delaylog").option("log", "dispatch").schema(columns)
        return reader.load(store.root)

    rows = read("subject string, lateness_ms long, lateness_bucket int")
    assert (
        "subject"
        not in spark.read.format("delaylog").option("log", "dispatch").load(store.root).columns
    )
    found = rows.groupBy("subject").count().collect()
    assert {row["subject"]: row["count"] for row in found} == {"a": 2, "b": 1, "c": 1}
    (late,) = rows.where("subject = 'c'").collect()
    assert (late["lateness_ms"], late["lateness_bucket"]) == (70, 70)
    # What is picked by what is looked up needs no column of it.
    some = read_table(DelayLog, store.root, "seq", log="dispatch", subject="a,c")
    assert some.num_rows == 3


@pytest.mark.timeout(600)
def test_a_stream_takes_so_many_rows_at_a_time_and_no_file_that_is_gone(
    spark: SparkSession, tmp_path: Path
) -> None:
    store = Store(tmp_path / "data")
    store.subscribe("all", "*")
    deliveries = [1000, 2000, 3000, HOUR_MS + 1, HOUR_MS + 2, 2 * HOUR_MS + 1]

    def deliver(due_ms: int) -> None:
        store.publish("a", [due_ms])
        store.run(due_ms + 1)

    def start(**options: object) -> DataFrame:
        reader = spark.readStream.format("delaylog").option("log", "dispatch").options(**options)  # type: ignore[arg-type]
        return reader.schema("due_ms long").load(store.root)

    batches: list[list[int]] = []

    def take(rows: DataFrame, number: int) -> None:
        batches.append(sorted(row["due_ms"] - START_MS for row in rows.collect()))

    def run(name: str, **options: object) -> list[list[int]]:
        """What the query reads until it has everything, by micro-batch."""
        batches.clear()
        query = (
            start(**options)
            .writeStream.foreachBatch(take)
            .option("checkpointLocation", str(tmp_path / name))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(60)
        return [batch for batch in batches if batch]

    for due_ms in deliveries:
        deliver(due_ms)
    assert run("some", maxRowsPerTrigger=2) == [
        [1000, 2000],
        [3000, HOUR_MS + 1],
        [HOUR_MS + 2, 2 * HOUR_MS + 1],
    ]
    assert run("latest", startingOffsets="latest") == []
    # Retention deletes an hour, another goes on, and a torn tail is no end to begin at.
    store.path(LogKind.DISPATCH).unlink()
    deliver(2 * HOUR_MS + 2)
    path = store.path(LogKind.DISPATCH, HOUR + 2)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:90])
    assert run("torn", startingOffsets="latest") == []
    assert run("some", maxRowsPerTrigger=2) == [[2 * HOUR_MS + 2]]
    path.write_bytes(whole)
    deliver(2 * HOUR_MS + 3)
    for name in ("some", "latest", "torn"):
        expected = [2 * HOUR_MS + 2] if name == "latest" else []
        assert run(name) == [[*expected, 2 * HOUR_MS + 3]]
    store.kill()
