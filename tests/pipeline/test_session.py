"""The Spark session of a job."""

import os
import subprocess
import sys
import venv
from pathlib import Path
from types import SimpleNamespace

import pytest
from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.sql import SparkSession

from delayserver.errors import PipelineError
from delayserver.pipeline.session import (
    JavaMissingError,
    JvmEndedError,
    _start,
    find_java,
    is_connect,
)
from tests.pipeline.quick import QUICK_CONF
from tests.pipeline.store import Store


def make_java(home: Path, version: str) -> Path:
    """A command that says it is this version of Java."""
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-01-01' >&2\n")
    java.chmod(0o755)
    return home


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No Java in any place."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    homes = tmp_path / "jvm"
    homes.mkdir()
    return homes


def test_without_java_the_error_says_what_to_install(nowhere: Path) -> None:
    with pytest.raises(JavaMissingError, match="apt-get install openjdk-17-jre-headless"):
        find_java(nowhere)


def test_a_java_that_is_too_old_does_not_count(
    nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(make_java(tmp_path / "old", "11.0.20")))
    make_java(nowhere / "java-8", "1.8.0_392")
    with pytest.raises(JavaMissingError):
        find_java(nowhere)
    make_java(nowhere / "java-17", "17.0.15")
    assert find_java(nowhere) == nowhere / "java-17"


def test_java_home_goes_first_and_then_the_path(
    nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(make_java(tmp_path / "path", "21") / "bin"))
    make_java(nowhere / "java-17", "17.0.15")
    # `sh` of the false Java is found by its full path.
    assert find_java(nowhere) is None
    home = make_java(tmp_path / "named", "18.0.1")
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert find_java(nowhere) == home


def test_addresses_of_spark_connect_are_known() -> None:
    assert is_connect("sc://cluster:15002")
    assert not is_connect("local[*]")
    assert not is_connect("spark://cluster:7077")


def test_workers_run_this_interpreter_in_utc(spark: SparkSession) -> None:
    found = spark.sparkContext.parallelize([0]).map(lambda _: sys.executable).collect()
    assert found == [sys.executable]
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"


def test_a_master_that_does_not_answer_is_named() -> None:
    """As Spark says it after a minute and a half; which no test waits for."""

    class Builder:
        def getOrCreate(self) -> SparkSession:
            raise Py4JError(
                "java.lang.IllegalStateException: Cannot call … a stopped SparkContext."
            )

    told = "did not start on spark://host:7077: no master answers there, or it refused the job$"
    with pytest.raises(PipelineError, match=told):
        _start(Builder(), "spark://host:7077")  # type: ignore[arg-type]


def test_a_jvm_that_is_killed_while_spark_starts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    jvm = subprocess.Popen(["sleep", "60"])

    class Builder:
        def getOrCreate(self) -> SparkSession:
            jvm.kill()
            raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(SparkContext, "_gateway", SimpleNamespace(proc=jvm))
    monkeypatch.setattr(SparkContext, "_jvm", object())
    told = "^Spark.s JVM ended while Spark started on local: it was killed. The kernel .* it again$"
    with pytest.raises(JvmEndedError, match=told):
        _start(Builder(), "local")  # type: ignore[arg-type]
    # The next session starts another one.
    assert SparkContext._gateway is SparkContext._jvm is None


@pytest.mark.spark
def test_a_python_of_executors_that_lacks_the_package_is_named(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    store = Store(tmp_path / "data")
    store.publish("order.unpaid", [1000])
    store.kill()
    command = [sys.executable, "-m", "delayserver", "pipeline", "audit"]
    done = subprocess.run(
        [*command, "--data-dir", store.root, *QUICK_CONF],
        env={**os.environ, "PYSPARK_PYTHON": str(tmp_path / "bare" / "bin" / "python")},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 2
    assert "executors have no such package: No module named" in done.stderr
    assert "Traceback" not in done.stderr
