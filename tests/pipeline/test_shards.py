"""A directory of several shards as tables: seqs and numbers are each shard's own."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource

from delayserver.errors import InputError
from delayserver.pipeline.audits.audit import audit_here
from delayserver.pipeline.audits.on_spark import audit
from delayserver.pipeline.logs.source import DelayLog
from delayserver.pipeline.progress import Job
from delayserver.pipeline.reports.forecast import forecast, memory_bytes
from delayserver.pipeline.reports.names import SharedNumbers
from delayserver.pipeline.states.history import DelayHistory
from delayserver.pipeline.states.snapshot import Directory, open_directories
from delayserver.pipeline.states.states import DelayState
from storage.check import NotADataDirectoryError
from storage.errors import CatalogError, DamageError
from storage.rows import HOUR_MS
from tests.pipeline.reading import read_table
from tests.pipeline.store import FAILED, START_MS, Store, make_shards

Load = Callable[..., DataFrame]
SHARDS = 3


def fill(root: Path) -> list[Store]:
    """The same names under other numbers in each shard; one message of shard 1 is tried again, one
    of shard 2 moved, and shard 2 has something that is not filed."""
    stores = make_shards(root, SHARDS)
    for shard, store in enumerate(stores):
        names = [("mail", "order.*"), ("everything", "*")]
        for name, subject in names if shard % 2 == 0 else reversed(names):
            store.subscribe(name, subject)
        subjects = ["order.unpaid", "envelope"] if shard < 2 else ["envelope", "order.unpaid"]
        seqs = [store.publish(subject, [1000 + shard, 2000 + shard]) for subject in subjects]
        if shard == 2:
            store.move(seqs[1][1], 2000 + shard, HOUR_MS + 7, "order.unpaid")
        if shard == 1:
            store.run(1050, lambda subject: FAILED)
        store.run(2 * HOUR_MS)
        store.checkpoint()
        store.publish("envelope", [5 * HOUR_MS + shard] * (shard + 1))
    for store in stores:
        store.kill()
    return stores


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shards") / "data"
    fill(root)
    return root


@pytest.fixture
def load(spark: SparkSession, root: Path) -> Load:
    def load(source: str, schema: str = "", path: Path = root, **options: object) -> DataFrame:
        reader = spark.read.format(source).options(**options)  # type: ignore[arg-type]
        return (reader.schema(schema) if schema else reader).load(str(path))

    return load


def counts(frame: DataFrame, *columns: str) -> dict[tuple[object, ...], int]:
    return {tuple(row)[:-1]: row["count"] for row in frame.groupBy(*columns).count().collect()}


def test_each_shard_has_its_own_numbers(root: Path) -> None:
    directories = open_directories(str(root))
    assert [one.shard for one in directories] == [0, 1, 2]
    assert len({one.stamp for one in directories}) == SHARDS
    assert open_directories(str(root / "shard-0001"))[0] == Directory(
        f"{root}/shard-0001",
        directories[1].stamp,
        1,
        directories[1].id_secret,
    )


def test_a_shard_that_is_not_there_is_no_empty_one(root: Path, tmp_path: Path) -> None:
    copy = tmp_path / "data"
    shutil.copytree(root, copy)
    shutil.rmtree(copy / "shard-0001")
    with pytest.raises(NotADataDirectoryError, match="shard-0001"):
        open_directories(str(copy))
    (copy / "shard-0002").rename(copy / "shard-0001")
    with pytest.raises(DamageError, match="made for shard 2"):
        open_directories(str(copy))


def test_logs_of_all_shards(load: Load) -> None:
    rows = load("delaylog", "shard int, seq long, subject string, kind int, flags int")
    published = rows.where("kind = 1 and flags = 0")
    assert counts(published, "shard", "subject") == {
        (shard, subject): 2 for shard in range(SHARDS) for subject in ("order.unpaid", "envelope")
    }
    seqs = published.select("seq").distinct().count()
    assert published.select("shard", "seq").distinct().count() == 12 > seqs
    messages = load("delaylog", "shard int, kind int", log="message").where("kind = 1")
    unfiled = counts(messages, "shard")
    assert set(unfiled) == {(shard,) for shard in range(SHARDS)}
    assert "shard" in load("delaylog").columns


def test_names_are_those_of_the_shard(load: Load) -> None:
    schema = "shard int, subject string, subscription string, subscription_id int"
    rows = load("delaylog", schema, log="dispatch")
    delivered = counts(rows.where("subject = 'order.unpaid'"), "shard", "subscription")
    assert set(delivered) == {
        (shard, name) for shard in range(SHARDS) for name in ("mail", "everything")
    }
    numbers = counts(rows.where("subscription = 'mail'"), "shard", "subscription_id")
    assert set(numbers) == {(0, 1), (1, 2), (2, 1)}


SOURCES = (DelayLog, DelayState, DelayHistory)


@pytest.mark.parametrize("source", SOURCES)
def test_shards_are_picked(root: Path, source: type[DataSource]) -> None:
    def shards(**options: object) -> set[int]:
        return set(read_table(source, root, "shard", **options).column("shard").to_pylist())

    assert shards(shard="1") == {1}
    assert shards(shard="0, 2") == {0, 2}
    # The same name has another number in each.
    assert shards(shard="1,2", subject="envelope") == {1, 2}
    with pytest.raises(InputError, match=r"names shard 7, but .* has shards 0, 1, 2"):
        shards(shard="7")


@pytest.mark.damaged("a catalog is gone")
@pytest.mark.parametrize("source", SOURCES)
def test_shards_that_are_not_wanted_are_not_looked_at(
    root: Path, tmp_path: Path, source: type[DataSource]
) -> None:
    copy = tmp_path / "data"
    shutil.copytree(root, copy)
    shutil.rmtree(copy / "shard-0001" / "catalog")
    with pytest.raises(CatalogError):
        read_table(source, copy)
    assert read_table(source, copy, shard="0,2").num_rows > 0


def test_states_of_all_shards(load: Load) -> None:
    rows = load("delaystate", now_ms=START_MS + 3 * HOUR_MS)
    assert rows.where("problem is not null").count() == 0
    delivered = counts(rows.where("state = 'delivered'"), "shard", "subject", "subscription")
    assert delivered == {
        (shard, subject, subscription): 2
        for shard in range(SHARDS)
        for subject, subscription in (
            ("order.unpaid", "mail"),
            ("order.unpaid", "everything"),
            ("envelope", "everything"),
        )
    }
    pending = counts(rows.where("state = 'pending'"), "shard")
    assert pending == {(0,): 1, (1,): 2, (2,): 3}


def test_history_of_all_shards(load: Load, root: Path) -> None:
    rows = load("delayhistory").select("id", "shard", "made_by").collect()
    assert {row["shard"] for row in rows} == {0, 1, 2}
    assert all(int(row["id"][:4], 16) == row["shard"] for row in rows)
    published = {row["id"] for row in rows if row["made_by"] == "publish"}
    assert len(published) == 12
    with pytest.raises(PySparkException, match="for one shard"):
        load("delayhistory", hours="[]").count()
    one = load("delayhistory", path=root / "shard-0001")
    assert {row["shard"] for row in one.select("shard").collect()} == {1}


@pytest.mark.damaged("a frame of a shard")
def test_damage_names_its_shard(root: Path, tmp_path: Path) -> None:
    copy = tmp_path / "data"
    shutil.copytree(root, copy)
    path = min((copy / "shard-0002" / "schedule").iterdir())
    data = bytearray(path.read_bytes())
    data[30] ^= 1
    path.write_bytes(data)
    file = f"shard-0002/schedule/{path.name}"
    for source in SOURCES:
        with pytest.raises(DamageError, match=file):
            read_table(source, copy)
        found = read_table(source, copy, "shard", "_corrupt", damage="rows").to_pylist()
        places = {(row["shard"], row["_corrupt"]["file"]) for row in found if row["_corrupt"]}
        assert places == {(2, file)}
        assert read_table(source, copy, "shard", shard="0,1").num_rows > 0


def test_a_stream_has_the_files_of_all_shards(
    spark: SparkSession, root: Path, tmp_path: Path
) -> None:
    def run() -> list[int]:
        """The rows of each micro-batch."""
        stream = (
            spark.readStream.format("delaylog")
            .option("maxRowsPerTrigger", 3)
            .schema("shard int, seq long, flags int, subject string")
            .load(str(tmp_path / "data"))
        )
        found: list[int] = []

        def take(batch: DataFrame, _: int) -> None:
            rows = batch.collect()
            found.append(len(rows))
            seen.extend((row["shard"], row["seq"], row["flags"], row["subject"]) for row in rows)

        query = (
            stream.writeStream.foreachBatch(take)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return found

    seen: list[tuple[int, int, int, str]] = []
    shutil.copytree(root, tmp_path / "data")
    batches = run()
    rows = spark.read.format("delaylog").schema("shard int, seq long, flags int, subject string")
    wanted = sorted(map(tuple, rows.load(str(tmp_path / "data")).collect()))
    assert sorted(seen) == wanted
    assert len(batches) > 1
    assert run() == []
    assert sorted(seen) == wanted


def test_one_verdict_over_all_shards(spark: SparkSession, root: Path) -> None:
    found = audit(Job(spark), str(root), now_ms=START_MS + 3 * HOUR_MS)
    assert found.is_clean, (found.violations, found.damage, found.examples)
    assert found.shards == SHARDS
    messages = {name: count for name, count in found.messages.items() if count}
    assert messages == {"accepted": 18, "delivered": 12, "pending": 6}
    subjects = {line["name"]: line["delivered"] for line in found.of("subject")}
    assert subjects == {"order.unpaid": 12, "envelope": 6}
    subscriptions = {line["name"]: line["delivered"] for line in found.of("subscription")}
    assert subscriptions == {"mail": 6, "everything": 12}


def test_a_finding_names_its_shard(root: Path, tmp_path: Path) -> None:
    copy = tmp_path / "data"
    shutil.copytree(root, copy)
    for path in (copy / "shard-0001" / "dispatch").iterdir():
        path.unlink()
    found = audit_here(str(copy), now_ms=START_MS + 3 * HOUR_MS)
    assert found.violations["missing"] == 6
    assert found.messages["missing"] == 4
    assert {one["shard"] for one in found.examples} == {1}
    assert {one["subscription"] for one in found.examples} == {"mail", "everything"}
    ids = [one["message_id"] for one in found.examples if one["message_id"]]
    assert ids and {one[:4] for one in ids} == {"0001"}


def test_a_forecast_of_all_shards(spark: SparkSession, root: Path) -> None:
    found = forecast(Job(spark), str(root), now_ms=START_MS + 3 * HOUR_MS)
    assert (found.waiting, found.overdue, found.damaged) == (6, 0, 0)
    assert found.subjects.to_dict("records") == [{"due": 6, "subject": "envelope"}]
    assert found.hours["memory_bytes"].tolist() == [memory_bytes(6, SHARDS)]


def test_names_have_one_number_over_all_shards() -> None:
    numbers = SharedNumbers({0: {1: "a", 2: "b", 3: "a"}, 1: {1: "b", 2: "c", 5: "a", 7: "a"}})
    assert sorted(numbers.names.values()) == ["a", "a", "b", "c"]
    assert SharedNumbers({4: {7: "a", 9: "a"}}).names == {7: "a", 9: "a"}
