"""The jobs on a cluster whose nodes work elsewhere, lose an executor, or see another directory."""

import json
import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from delayserver.pipeline.audits import on_spark, telling
from delayserver.pipeline.audits.audit import Audit, audit_here
from delayserver.pipeline.load.load import Loaded, LoadJob
from delayserver.pipeline.load.load import run as load
from delayserver.pipeline.progress import Job
from delayserver.pipeline.publish.mapping import MessageColumns
from storage.rows import HOUR_MS
from storage.staging import PART_SUFFIX
from tests.integration.api_support import ApiServer, now_ms
from tests.pipeline.spark_cluster import SETTINGS, Driver, DriverError, SparkCluster, the_session
from tests.pipeline.store import Store
from tests.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]

HOURS = 8
SETTLED = 3
PER_HOUR = 20
ROWS = 100_000
PARTITIONS = 4
DAY_MS = 24 * HOUR_MS


def make_store(path: Path, hours: int) -> None:
    """Three hours are settled, and others to come where there are more."""
    store = Store(path, retention_ms=10 * 365 * DAY_MS)
    store.subscribe("mail", "*")
    for hour in range(hours):
        store.publish("order.unpaid", [hour * HOUR_MS + 1000 * n for n in range(1, PER_HOUR)])
        store.publish("envelope", [hour * HOUR_MS + 500])
    store.run(SETTLED * HOUR_MS + HOUR_MS // 2)
    store.checkpoint()
    store.stop()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`data` is everywhere; `hidden/data` is the same, and not there on node two."""
    root = tmp_path_factory.mktemp("cluster")
    make_store(root / "data", HOURS)
    shutil.copytree(root / "data", root / "hidden" / "data")
    return root


@pytest.fixture(scope="module")
def cluster(root: Path) -> Iterator[SparkCluster]:
    cluster = SparkCluster(root, root / "hidden")
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def driver(cluster: SparkCluster, root: Path) -> Iterator[Driver]:
    driver = Driver(cluster.url, root, SETTINGS)
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def api(root: Path, cluster: SparkCluster) -> Iterator[ApiServer]:
    """A server that keeps hours until they are archived."""
    (root / "served").mkdir()
    make_store(root / "served" / "data", SETTLED)
    server = ApiServer(
        root / "served", archive=True, retention_ms=10 * 365 * DAY_MS, checkpoint_ms=50
    )
    server.start()
    yield server
    server.shut_down()


# ── in the driver ──────────────────────────────────────────────────────────────────────────────


def executors() -> list[tuple[str, str]]:
    """Where tasks run: host name and working directory of each."""

    # Executors get functions by value: they know no module of the tests.
    def where(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            row = {"host": socket.gethostname(), "path": str(Path.cwd())}
            yield pa.RecordBatch.from_pylist([row])

    frame = the_session().range(0, 8, 1, 8).mapInArrow(where, "host string, path string")
    return sorted({(row["host"], row["path"]) for row in frame.collect()})


def count(source: str, path: str, **options: str) -> int:
    return the_session().read.format(source).options(**options).load(path).count()


def audited(path: str, progress: Path) -> Audit:
    return on_spark.audit(Job(the_session(), _into(progress)), path)


def loaded(load_job: LoadJob, progress: Path) -> Loaded:
    due = f"{now_ms() + DAY_MS} + id % {2 * HOUR_MS}"
    table = the_session().range(0, ROWS, 1, PARTITIONS)
    rows = table.selectExpr(
        f"{due} as due", "concat('k', id) as key", "to_json(struct(id)) as body"
    )
    return load(Job(the_session(), _into(progress)), rows, load_job)


def sunk(url: str) -> None:
    """A row without a due time is among others."""
    table = the_session().range(0, 20, 1, PARTITIONS)
    due = f"if(id = 3, null, {now_ms() + DAY_MS}) as due"
    rows = table.selectExpr(due, "concat('s', id) as key", "'1' as body")
    writer = rows.write.format("delayserver").mode("append").option("url", url)
    writer = writer.options(subject="sunk", dueColumn="due", keyColumn="key", bodyColumn="body")
    writer.option("rejects", "refused").save()


def _into(path: Path) -> Any:
    def progress(what: str, done: int, total: int) -> None:
        path.with_suffix(".new").write_text(f"{what}: {done} of {total}")
        path.with_suffix(".new").replace(path)

    return progress


# ── as it should be ────────────────────────────────────────────────────────────────────────────


def test_tasks_run_on_both_nodes_each_in_its_own_directory(driver: Driver, root: Path) -> None:
    found = driver.run(executors)
    assert [host for host, _ in found] == ["one", "two"]
    assert len({path for _, path in found} | {str(root)}) == 3


def test_what_is_found_is_what_one_machine_finds(driver: Driver, root: Path) -> None:
    here = telling.document(audit_here(str(root / "data")))
    for path in ("data", str(root / "data")):  # Relative to where the command is given.
        status, printed, error = driver.command("audit", "--data-dir", path, "--json", "-")
        assert status == 0, error
        there = json.loads(printed)
        for changing in ("took_s", "taken_at"):
            del there[changing]
            here.pop(changing, None)
        assert there == here
    status, printed, error = driver.command("forecast", "--data-dir", "data", "--json", "-")
    assert status == 0, error
    forecast = json.loads(printed)
    assert forecast["waiting"] + forecast["overdue"] == here["messages"]["pending"]
    assert driver.run(count, "delaystate", "data") == here["messages"]["accepted"]
    assert driver.run(count, "delaylog", "data", log="schedule") == HOURS * PER_HOUR


def test_a_load_and_an_archive(driver: Driver, api: ApiServer, root: Path) -> None:
    due_ms = [now_ms() + DAY_MS + n for n in range(1000)]
    rows = {"due": due_ms, "key": [f"r{n}" for n in range(1000)], "body": ["1"] * 1000}
    pq.write_table(pa.table(rows), root / "rows.parquet")
    columns = ("--due-column", "due", "--key-column", "key", "--body-column", "body")
    status, printed, error = driver.command(
        *("load", "--input", "rows.parquet", "--data-dir", "served/data"),
        *("--server", str(api.base_url), "--subject", "loaded", *columns, "--json"),
    )
    assert status == 0, error
    assert json.loads(printed)["accepted"] == 1000
    wait_until(lambda: len(api.ask("GET", "/v1/archives?limit=1000")["hours"]) == SETTLED)
    words = ("archive", "--data-dir", "served/data", "--to", "archive")
    status, printed, error = driver.command(*words, "--server", str(api.base_url), "--json", "-")
    assert status == 0, error
    hours = json.loads(printed)["hours"]
    assert [hour["fate"] for hour in hours] == ["archived"] * SETTLED
    assert [hour["count"] for hour in hours] == [PER_HOUR] * SETTLED


def test_rejected_rows_come_to_where_the_driver_works(
    driver: Driver, api: ApiServer, root: Path
) -> None:
    driver.run(sunk, str(api.base_url))
    (file,) = (root / "refused").iterdir()
    (row,) = map(json.loads, file.read_text().splitlines())
    assert (row["reason"], row["key"]) == ("no due time", "s3")


# ── a node that does not see the directory ─────────────────────────────────────────────────────


def test_a_node_without_the_mount_is_named(
    driver: Driver, cluster: SparkCluster, root: Path
) -> None:
    path = str(root / "hidden" / "data")
    with cluster.frozen("one"):
        for command in ("audit", "forecast"):
            status, printed, error = driver.command(command, "--data-dir", path, "--json", "-")
            assert status == 2, printed
            told = f"executor two does not see {path}, or sees another directory there"
            assert json.loads(error)["title"].startswith(told), error
        for source, log in (("delaystate", {}), ("delaylog", {"log": "schedule"})):
            with pytest.raises(DriverError, match="executor two does not see"):
                driver.run(count, source, path, **log)


def test_what_another_node_does_instead_is_all_of_it(driver: Driver, root: Path) -> None:
    """Spark tries a task again, maybe on a node that sees the directory."""
    path = str(root / "hidden" / "data")
    try:
        found = driver.run(count, "delaylog", path, log="schedule")
    except DriverError as error:
        assert "executor two does not see" in str(error)
    else:
        assert found == HOURS * PER_HOUR


def test_a_load_writes_nothing_on_a_node_without_the_mount(
    driver: Driver, cluster: SparkCluster, root: Path, tmp_path: Path
) -> None:
    (root / "hidden" / "served").mkdir()
    server = ApiServer(root / "hidden" / "served")
    server.start()
    try:
        columns = MessageColumns("due", subject="hidden", key="key", body="body")
        wanted = LoadJob("hidden", server.data_dir, str(server.base_url), columns)
        named = f"executor two does not see {server.data_dir}"
        with cluster.frozen("one"):
            # A dry run writes there what it finds, too.
            for one in (wanted, replace(wanted, dry_run=True)):
                with pytest.raises(DriverError, match=named):
                    driver.run(loaded, one, tmp_path / "progress")
        assert not list((server.data_dir / "imports").glob("hidden*"))
        assert audit_here(str(server.data_dir)).messages["accepted"] == 0
    finally:
        server.shut_down()


# ── an executor is killed ──────────────────────────────────────────────────────────────────────


def wait_for_the_last(running: "Future[Any]", progress: Path, what: str) -> None:
    """Until only the task that does not end is left of those that run."""

    def is_left() -> bool:
        assert not running.done(), running.result()
        name, _, counts = progress.read_text().partition(": ") if progress.exists() else ("",) * 3
        if name != what:
            return False
        done, total = map(int, counts.split(" of "))
        return done == total - 1

    wait_until(is_left, 60)


def test_an_executor_is_killed_in_an_audit(
    driver: Driver, cluster: SparkCluster, root: Path, tmp_path: Path
) -> None:
    cluster.stop_python("one")
    running = driver.start(audited, str(root / "data"), tmp_path / "progress")
    wait_for_the_last(running, tmp_path / "progress", "reading and judging")
    cluster.kill_executor("one")
    found, here = running.result(120), audit_here(str(root / "data"))
    assert found.is_clean
    assert (found.messages, found.deliveries) == (here.messages, here.deliveries)
    wait_until(lambda: cluster.executor("one"), 60)


def test_an_executor_is_killed_in_a_load(
    driver: Driver, cluster: SparkCluster, api: ApiServer, tmp_path: Path
) -> None:
    before = audit_here(str(api.data_dir)).messages["accepted"]
    columns = MessageColumns("due", subject="killed", key="key", body="body")
    wanted = LoadJob("killed", api.data_dir, str(api.base_url), columns)
    progress = tmp_path / "progress"
    wanted = replace(wanted, rejects=tmp_path / "rejects")
    running = driver.start(loaded, wanted, progress)
    parts = api.data_dir / "imports"
    # One has begun to write, and never ends.
    wait_until(lambda: any(parts.glob(f"killed.*{PART_SUFFIX}")), 60)
    cluster.stop_python("two")
    wait_for_the_last(running, progress, "staging")
    cluster.kill_executor("two")
    done = running.result(120)
    assert (done.state, done.accepted, done.duplicates) == ("adopted", ROWS, 0)
    # Of what the killed task wrote nothing is left.
    assert not list(parts.glob(f"killed*{PART_SUFFIX}")) + list(parts.glob("killed*.work"))
    found = audit_here(str(api.data_dir))
    assert found.is_clean
    assert found.messages["accepted"] == before + ROWS
