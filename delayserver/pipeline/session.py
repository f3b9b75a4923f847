"""The Spark session of a job: quiet, in UTC, with the interpreter that runs it.

A local master starts a JVM below this process, for which Java 17 or newer must be installed. Any
other master, or a Spark Connect address (`sc://host`), runs the same job on a cluster; the data
directory must be readable there under the same path.

Cost: 3–6 s. Threads: one session per process; Spark's own rule.
"""

import contextlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from delayserver.errors import PipelineError
from delayserver.pipeline.logs.source import DelayLog
from delayserver.pipeline.publish.publish import DelayServerSink
from delayserver.pipeline.states.history import DelayHistory
from delayserver.pipeline.states.states import DelayState

JAVA_MAJOR_MIN = 17
JAVA_HOMES = Path("/usr/lib/jvm")
LOCAL_MASTER = "local[*]"

_JAVA_VERSION = re.compile(r'version "(\d+)')
_JAVA_ADVICE = (
    f"Spark needs Java {JAVA_MAJOR_MIN} or newer, and none was found. "
    "On Debian and Ubuntu: apt-get install openjdk-17-jre-headless (or set JAVA_HOME)"
)
_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.adaptive.coalescePartitions.parallelismFirst": "false",
    "spark.sql.shuffle.partitions": "8",
    # The type that other tools read, too; Spark's own is INT96.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_QUIET = f"-Dlog4j2.configurationFile=file:{resources.files(__package__) / 'log4j2.properties'}"
_LOCAL_SETTINGS = {
    "spark.driver.memory": "2g",
    # The name of this machine may not resolve, and nobody else has to reach it.
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


class JavaMissingError(PipelineError):
    """There is no Java that Spark can run on."""

    def __init__(self) -> None:
        super().__init__(_JAVA_ADVICE)


def is_connect(master: str) -> bool:
    """Whether `master` is the address of a Spark Connect server."""
    return master.startswith("sc://")


def find_java(homes: Path = JAVA_HOMES) -> Path | None:
    """The home of a Java that is new enough; None if the one on the PATH is.

    Looked for in JAVA_HOME, on the PATH, and where distributions put it. Raises JavaMissingError.
    """
    named = os.environ.get("JAVA_HOME")
    if named and _java_major(f"{named}/bin/java") >= JAVA_MAJOR_MIN:
        return Path(named)
    on_path = shutil.which("java")
    if on_path and _java_major(on_path) >= JAVA_MAJOR_MIN:
        return None
    for home in sorted(homes.glob("*")):
        if _java_major(f"{home}/bin/java") >= JAVA_MAJOR_MIN:
            return home
    raise JavaMissingError


def _java_major(java: str) -> int:
    """The major version of a java command; 0 if it does not run."""
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    found = _JAVA_VERSION.search(done.stderr + done.stdout)
    return int(found[1]) if found else 0


@contextlib.contextmanager
def open_session(
    job: str, *, master: str = LOCAL_MASTER, settings: Mapping[str, str] | None = None
) -> Iterator[SparkSession]:
    """A session for one job; it ends with the context. `settings` go before ours.

    Raises JavaMissingError, PipelineError when the master cannot be reached."""
    builder = SparkSession.Builder().appName(f"delayserver {job}")
    if is_connect(master):
        # The server of Spark Connect was started with settings of its own.
        builder = builder.remote(master)
        wanted = {name: text for name, text in _SETTINGS.items() if name.startswith("spark.sql.")}
    else:
        builder = builder.master(master)
        wanted = _SETTINGS | (_LOCAL_SETTINGS if master.startswith("local") else {})
        _use_java()
        # The workers must be able to import what this process imports.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    wanted |= settings or {}
    if not is_connect(master):
        wanted[_JAVA_OPTIONS] = f"{_QUIET} {wanted.get(_JAVA_OPTIONS, '')}".rstrip()
    for name, text in wanted.items():
        builder = builder.config(name, text)
    # It logs, as an error, what is raised as an exception besides.
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    spark = _start(builder, master)
    for source in (DelayLog, DelayState, DelayHistory, DelayServerSink):
        spark.dataSource.register(source)
    try:
        yield spark
    finally:
        spark.stop()


def _start(builder: SparkSession.Builder, master: str) -> SparkSession:
    """Start Spark. What the JVM says on standard error is kept, and shown only if it fails."""
    with tempfile.TemporaryFile() as said, _stderr_to(said.fileno()):
        try:
            return builder.getOrCreate()
        except (PySparkException, OSError, RuntimeError) as error:
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines()
            reason = "\n".join([str(error), *lines[-5:]])
            raise PipelineError(f"Spark did not start on {master}: {reason}") from error


@contextlib.contextmanager
def _stderr_to(descriptor: int) -> Iterator[None]:
    """Processes that are started now inherit this as their standard error, for good."""
    sys.stderr.flush()
    saved = os.dup(2)
    os.dup2(descriptor, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)


def _use_java() -> None:
    home = find_java()
    if home is not None:
        os.environ["JAVA_HOME"] = str(home)
    else:
        # Spark would take an old one that it names.
        os.environ.pop("JAVA_HOME", None)
