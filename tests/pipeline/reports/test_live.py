"""Live lateness: windows of counts, and the stream of a server that delivers."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from delayserver.cli import make_app
from delayserver.cli.pipeline_lateness import _Screen
from delayserver.errors import PipelineError
from delayserver.pipeline import session as sessions
from delayserver.pipeline.progress import Job
from delayserver.pipeline.reports.lateness import bucket_of, percentile_ms
from delayserver.pipeline.reports.live import UNKNOWN, Line, Windows, watch
from storage.check import NotADataDirectoryError
from storage.rows import LogKind
from tests.integration.api_support import ApiServer, Receiver
from tests.pipeline.quick import QUICK_CONF
from tests.pipeline.store import HOUR, START_MS, Store
from tests.waiting import wait_until

SECOND = 1000


@given(st.lists(st.integers(0, 1 << 40), min_size=1), st.sampled_from([0.5, 0.99, 1.0]))
def test_a_percentile_is_little_above_the_value_it_stands_for(
    values: list[int], share: float
) -> None:
    buckets = bucket_of(np.array(values)).tolist()
    counts = {bucket: buckets.count(bucket) for bucket in buckets}
    exact = sorted(values)[max(0, int(np.ceil(share * len(values))) - 1)]
    assert exact <= percentile_ms(counts, share) <= exact + exact / 64


def test_windows_add_up_what_micro_batches_counted() -> None:
    windows = Windows(SECOND)
    windows.add([(0, "a", 3, 98, 3), (0, "a", 50, 1, 50), (SECOND, "a", 7, 1, 7)])
    windows.add([(0, "a", 60, 1, 60), (0, "b", 9, 1, 9)])
    assert windows.lines() == [
        Line(SECOND, "a", 1, 7, 7, 7),
        Line(0, "a", 100, 3, 50, 60),
        Line(0, "b", 1, 9, 9, 9),
    ]
    document = windows.lines()[1].document("subject", SECOND)
    assert document["window"] == "1970-01-01T00:00:00.000Z"
    assert (document["subject"], document["count"], document["per_s"]) == ("a", 100, 100.0)
    # No percentile is above the latest, though its bucket ends behind it.
    windows.add([(2 * SECOND, "a", int(bucket_of(np.array([1000]))[0]), 1, 1000)])
    assert windows.lines()[0].p99_ms == 1000


def test_names_are_whole_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """What goes to a file or another program has no screen's width."""
    windows, name = Windows(SECOND), "order." + "unpaid." * 20
    windows.add([(0, name, 3, 98, 3)])
    with _Screen("subject", "1s", quiet=False) as screen:
        screen.show(SimpleNamespace(by="subject", windows=windows, damage=[]))  # type: ignore[arg-type]
    printed = capsys.readouterr().out
    (line,) = (line for line in printed.splitlines() if name in line)
    assert line.split()[:3] == ["00:00:00", name, "98"]


def test_windows_are_told_when_they_have_ended_and_again_if_more_comes() -> None:
    windows = Windows(SECOND)
    windows.add([(SECOND, "a", 1, 1, 1), (0, "a", 1, 2, 1)])
    assert windows.news(999) == []
    assert [(line.start_ms, line.count) for line in windows.news(1999)] == [(0, 2)]
    windows.add([(0, "a", 1, 1, 1)])
    assert [(line.start_ms, line.count) for line in windows.news(2000)] == [(0, 3), (SECOND, 1)]
    assert windows.news(10_000) == []


def test_old_windows_are_forgotten() -> None:
    windows = Windows(SECOND)
    for number in range(1000):
        windows.add([(number * SECOND, "a", 1, 1, 1)])
    assert len(windows.lines()) == 120
    assert windows.lines()[0].start_ms == 999 * SECOND


@pytest.mark.damaged("a frame of the dispatch log")
@pytest.mark.timeout(600)
def test_what_is_delivered_from_now_on_is_seen_by_subject(
    spark: SparkSession, tmp_path: Path
) -> None:
    """What was delivered before is not, and damage is named and passed over."""
    store = Store(tmp_path)
    store.subscribe("all", "*")
    for subject in ("before", "a", "b"):
        store.publish(subject, [500])
    # A second later their names stand in the catalog, long before the next checkpoint is due.
    assert store.settings.checkpoint_ms > SECOND
    store.run(1000)
    path = store.path(LogKind.DISPATCH, HOUR)
    with watch(Job(spark), store.root, by="subject", window_ms=SECOND) as watched:
        store.publish("a", [1200, 1300, 2100])
        store.publish("b", [1250])
        store.run(1500, late_ms=40)
        begun = path.stat().st_size
        store.run(2500, late_ms=70)
        wait_until(lambda: sum(line.count for line in watched.windows.lines()) == 4, timeout_s=200)
        lines = watched.windows.lines()
        assert watched.damage == []
        # A frame that is damaged, and an intact one behind it.
        intact = path.read_bytes()[begun:]
        end = path.stat().st_size
        with path.open("ab") as file:
            file.write(intact[:70] + bytes([intact[70] ^ 1]) + intact[71:] + intact)
        wait_until(lambda: watched.windows.lines()[0].count == 2, timeout_s=200)
        watched.check()
    (place,) = watched.damage
    assert f"offset {end}: the rows do not match their checksum" in place
    assert [(line.start_ms - START_MS, line.name, line.count, line.max_ms) for line in lines] == [
        (2000, "a", 1, 70),
        (1000, "a", 2, 40),
        (1000, "b", 1, 40),
    ]
    assert UNKNOWN not in {line.name for line in lines}
    store.kill()


def test_no_directory_and_no_driver(spark: SparkSession, tmp_path: Path) -> None:
    with (
        pytest.raises(NotADataDirectoryError),
        watch(Job(spark), str(tmp_path), by="subject", window_ms=SECOND),
    ):
        raise AssertionError("it watches nothing")

    class Remote(Job):
        is_connect = True

    with (
        pytest.raises(PipelineError, match="not run over Spark Connect"),
        watch(Remote(spark), str(tmp_path), by="subject", window_ms=SECOND),
    ):
        raise AssertionError("it watches nothing")


@pytest.mark.parametrize("options", [["--by", "hour"], ["--window", "0s"], ["--for", "soon"]])
def test_a_wrong_option_is_named_before_spark_starts(
    options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(sessions, "open_session")
    result = CliRunner().invoke(make_app(), ["pipeline", "lateness", *options])
    assert result.exit_code == 2
    assert options[0] in result.output


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiServer]:
    server = ApiServer(tmp_path)
    server.start()
    yield server
    server.shut_down()


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_the_command_goes_on_beside_a_server_until_ctrl_c(api: ApiServer, tmp_path: Path) -> None:
    receiver = Receiver()
    api.subscribe("reminders", "order.*", url=receiver.hook(200))
    ended = threading.Event()
    published = 0

    def publish() -> None:
        nonlocal published
        while not ended.is_set():
            api.ask("POST", "/v1/messages", 201, json={"subject": "order.unpaid"})
            published += 1
            ended.wait(0.2)

    command = [sys.executable, "-m", "delayserver", "pipeline", "lateness", "--window", "1s"]
    command += ["--data-dir", str(api.data_dir), "--json", "-", "--master", "local[1]"]
    command += QUICK_CONF
    out, err = tmp_path / "out", tmp_path / "err"
    thread = threading.Thread(target=publish)
    thread.start()
    with out.open("w") as stdout, err.open("w") as stderr:
        # A group of its own, all of which gets the signal, as from a terminal.
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, start_new_session=True)
    try:
        wait_until(lambda: len(out.read_text().splitlines()) > 1, timeout_s=300)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 0, err.read_text()
    finally:
        ended.set()
        thread.join()
        process.kill()
        process.wait()
        receiver.close()
    assert err.read_text() == ""
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {line["subscription"] for line in lines} == {"reminders"}
    newest = {line["window"]: line["count"] for line in lines}
    assert 0 < sum(newest.values()) <= published
    assert all(0 <= line["p50_ms"] <= line["p99_ms"] <= line["max_ms"] for line in lines)
