"""The jobs on a Spark Connect server, a process of its own from the jars of pyspark."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.table import StaticTable
from sessions import QUICK_JAVA

from delayserver.pipeline.audits import telling
from delayserver.pipeline.audits.audit import audit_here
from storage.rows import HOUR_MS
from tests.integration.api_support import ApiServer, now_ms
from tests.pipeline.processes import descendants, runs
from tests.pipeline.quick import QUICK_SQL
from tests.pipeline.spark_cluster import HOME, Driver, start_program, the_session
from tests.pipeline.store import Store
from tests.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]

DAY_MS = 24 * HOUR_MS
MESSAGES = 60


class ConnectServer:
    """The server, and its address."""

    def __init__(self, here: Path) -> None:
        settings = {
            "spark.connect.grpc.binding.port": "0",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.memory": "1g",
            "spark.driver.extraJavaOptions": QUICK_JAVA,
            "spark.ui.enabled": "false",
        }
        program = "org.apache.spark.sql.connect.service.SparkConnectServer"
        command = [str(HOME / "bin" / "spark-submit"), "--class", program, "--master", "local[2]"]
        for name, text in settings.items():
            command += ["--conf", f"{name}={text}"]
        self.process, log = start_program(command, here, {"SPARK_CONNECT_MODE": "0"})
        try:
            found = wait_until(
                partial(log.search, r"Spark Connect server started at: \S*:(\d+)"), 120
            )
        except BaseException:
            self.close()
            raise
        assert found is not None
        self.url = f"sc://127.0.0.1:{found[1]}"

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What was settled and what waits, in `data`."""
    root = tmp_path_factory.mktemp("connect")
    store = Store(root / "data")
    store.subscribe("mail", "order.*")
    store.publish("order.unpaid", [60_000 * n for n in range(1, MESSAGES + 1)])
    store.publish("envelope", [5 * HOUR_MS])
    store.run(HOUR_MS // 2)
    store.kill()
    return root


@pytest.fixture(scope="module")
def connect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConnectServer]:
    server = ConnectServer(tmp_path_factory.mktemp("server"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def driver(connect: ConnectServer, root: Path) -> Iterator[Driver]:
    driver = Driver(connect.url, root, QUICK_SQL)
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def api(root: Path) -> Iterator[ApiServer]:
    (root / "served").mkdir()
    server = ApiServer(root / "served")
    server.start()
    yield server
    server.shut_down()


def counts(path: str) -> dict[str, int]:
    states = the_session().read.format("delaystate").load(path)
    return {row["state"]: row["count"] for row in states.groupBy("state").count().collect()}


def publish(url: str, rows: int) -> None:
    """As a table that is written to a server."""
    table = (
        the_session()
        .range(0, rows)
        .selectExpr(f"{now_ms() + DAY_MS} + id as due", "concat('s', id) as key", "id")
    )
    writer = table.write.format("delayserver").mode("append").option("url", url)
    writer.options(subject="sunk", dueColumn="due", keyColumn="key").save()


def test_reports_are_those_of_one_machine(driver: Driver, root: Path) -> None:
    here = telling.document(audit_here(str(root / "data")))
    status, printed, error = driver.command("audit", "--data-dir", "data", "--json", "-")
    assert status == 0, error
    there = json.loads(printed)
    assert there["messages"] == here["messages"]
    assert there["subjects"] == here["subjects"]
    status, printed, error = driver.command("forecast", "--data-dir", "data", "--json", "-")
    assert status == 0, error
    forecast = json.loads(printed)
    assert forecast["waiting"] + forecast["overdue"] == here["messages"]["pending"]
    states = driver.run(counts, str(root / "data"))
    assert sum(states.values()) == here["messages"]["accepted"] == MESSAGES + 1


def test_a_load_and_a_writer(driver: Driver, api: ApiServer, root: Path) -> None:
    due_ms = [now_ms() + DAY_MS + n for n in range(500)]
    rows = {"due": due_ms, "key": [f"r{n}" for n in range(500)], "body": ["1"] * 500}
    pq.write_table(pa.table(rows), root / "rows.parquet")
    columns = ("--due-column", "due", "--key-column", "key", "--body-column", "body")
    status, printed, error = driver.command(
        *("load", "--input", str(root / "rows.parquet"), "--data-dir", "served/data"),
        *("--server", str(api.base_url), "--subject", "loaded", *columns, "--json"),
    )
    assert status == 0, error
    assert json.loads(printed)["accepted"] == 500
    driver.run(publish, str(api.base_url), 300)
    assert audit_here(str(api.data_dir)).messages["accepted"] == 800


def test_an_archive(driver: Driver, tmp_path: Path) -> None:
    store = Store(tmp_path / "data", retention_ms=10 * 365 * DAY_MS)
    store.subscribe("mail", "order.*")
    store.publish("order.unpaid", [60_000 * n for n in range(1, 31)])
    store.run(HOUR_MS)
    store.checkpoint()
    store.stop()
    server = ApiServer(tmp_path, archive=True, retention_ms=10 * 365 * DAY_MS, checkpoint_ms=50)
    server.start()
    try:
        wait_until(lambda: server.ask("GET", "/v1/archives")["hours"])
        status, printed, error = driver.command(
            *("archive", "--data-dir", str(server.data_dir), "--to", str(tmp_path / "archive")),
            *("--server", str(server.base_url), "--json", "-"),
        )
        assert status == 0, error
        (hour,) = json.loads(printed)["hours"]
        assert (hour["fate"], hour["added"]) == ("archived", 30)
        assert server.ask("GET", "/v1/archives")["hours"] == []
    finally:
        server.shut_down()
    rows = StaticTable.from_metadata(str(tmp_path / "archive")).scan().to_arrow()
    assert rows["state"].to_pylist() == ["delivered"] * 30


def test_what_cannot_run_there_says_so(driver: Driver) -> None:
    status, _, error = driver.command("lateness", "--data-dir", "data")
    assert status == 2
    assert "Spark Connect" in error and "master" in error


def test_a_server_that_is_killed_is_named(connect: ConnectServer, root: Path) -> None:
    """The last test that needs it."""
    for pid in descendants(connect.process.pid):
        os.kill(pid, signal.SIGKILL)  # Python that has nothing to do: the next is of the job.
    arguments = ["pipeline", "audit", "--data-dir", str(root / "data"), "--master", connect.url]
    command = subprocess.Popen(
        [sys.executable, "-m", "delayserver", *arguments], stderr=subprocess.PIPE, text=True
    )
    wait_until(
        lambda: any(runs(one, "pyspark.worker") for one in descendants(connect.process.pid)), 60
    )
    connect.process.kill()
    _, error = command.communicate(timeout=120)
    assert command.returncode == 2
    told = f"the Spark Connect server at {connect.url} ended in the middle of the job audit"
    assert told in " ".join(error.split())
    assert "Traceback" not in error


def test_nobody_answers(root: Path) -> None:
    arguments = (
        "pipeline",
        "audit",
        "--data-dir",
        str(root / "data"),
        "--master",
        "sc://127.0.0.1:9",
    )
    command = [sys.executable, "-m", "delayserver", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    told = "error: Spark did not start on sc://127.0.0.1:9: nobody answers there; "
    assert done.stderr.strip().startswith(told), done.stderr


def test_without_its_packages_the_error_names_the_extra(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
import sys
sys.modules["grpc"] = None
from delayserver.pipeline.session import ConnectMissingError, open_session
try:
    with open_session("test", master="sc://127.0.0.1:9"):
        pass
except ConnectMissingError as error:
    print(error)
""")
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "install the extra `spark-connect`" in done.stdout
