"""The Spark session of a job: quiet, in UTC, with the interpreter that runs it.

A local master starts a JVM below this process, for which Java 17 or newer must be installed. Any
other master, or a Spark Connect address (`sc://host`), runs the same job on a cluster; the data
directory must be readable there under the same path.

A Connect server that does not answer is waited for ten seconds, not for ten minutes as by its
client, because a server that has ended took the session with it.

The JVM may be killed, mostly by the kernel for want of memory. Its clients then say only that a
connection was refused. So this module raises an error of our own instead, and the next session
starts another JVM.

Cost: 3–6 s. Threads: one session per process; Spark's own rule.
"""

import contextlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from delayserver.errors import PipelineError
from delayserver.pipeline.archive.source import DelayArchive
from delayserver.pipeline.logs.source import DelayLog
from delayserver.pipeline.publish.publish import DelayServerSink
from delayserver.pipeline.states.history import DelayHistory
from delayserver.pipeline.states.states import DelayState

JAVA_MAJOR_MIN = 17
JAVA_HOMES = Path("/usr/lib/jvm")
LOCAL_MASTER = "local[*]"
CONNECT_RETRIES = 5
CONNECT_WAIT_MAX_MS = 5_000
"""The waits between retries: about 10 s in all."""
ENDING_S = 5.0
"""The connections of a JVM end before it does, but by no more than that."""

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
    # Other tools read this type, too; Spark's own is INT96.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
_REFUSED = "stopped SparkContext"
"""The text of Spark's error if no master takes the job."""
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_QUIET = f"-Dlog4j2.configurationFile=file:{resources.files(__package__) / 'log4j2.properties'}"
_LOCAL_SETTINGS = {
    "spark.driver.memory": "2g",
    # The name of this machine may not resolve, and no other machine has to reach it.
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


class JavaMissingError(PipelineError):
    """There is no Java that can run Spark."""

    def __init__(self) -> None:
        super().__init__(_JAVA_ADVICE)


class JvmEndedError(PipelineError):
    """The JVM that Spark's driver runs in ended in the middle of a job. `status`: the exit status,
    or the negative number of the signal that killed it."""

    def __init__(self, when: str, status: int) -> None:
        """`when`: the step in which it ended."""
        if status == -signal.SIGKILL:
            how = "it was killed"
            advice = (
                "The kernel does that where memory runs out (see dmesg): free some, or give Spark "
                "less with --conf spark.driver.memory=1g"
            )
        else:
            how = f"it was ended by signal {-status}" if status < 0 else f"exit status {status}"
            advice = "Where its memory was too little: --conf spark.driver.memory=4g"
        super().__init__(f"Spark's JVM ended {when}: {how}. {advice}; then run it again")
        self.status = status


class ConnectMissingError(PipelineError):
    """Packages that Spark Connect needs are not installed."""

    def __init__(self) -> None:
        super().__init__(
            "Spark Connect needs more packages: install the extra `spark-connect` (see "
            "docs/spark.md)"
        )


class ConnectEndedError(PipelineError):
    """A Spark Connect server that answered before does not answer any more."""

    def __init__(self, job: str, master: str) -> None:
        super().__init__(
            f"the Spark Connect server at {master} ended in the middle of the job {job}, or cannot "
            "be reached any more. Start it again; then run the job again"
        )


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

    Raises JavaMissingError, PipelineError when the master cannot be reached, JvmEndedError when
    the JVM ends before the context does."""
    builder = SparkSession.Builder().appName(f"delayserver {job}")
    if is_connect(master):
        # The server of Spark Connect was started with settings of its own.
        wanted = {name: text for name, text in _SETTINGS.items() if name.startswith("spark.sql.")}
    else:
        builder = builder.master(master)
        wanted = _SETTINGS | (_LOCAL_SETTINGS if master.startswith("local") else {})
        _use_java()
        # The workers must be able to import the modules that this process imports.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    wanted |= settings or {}
    # It logs each exception as an error, and the exception is raised as well.
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    if is_connect(master):
        spark, jvm = _connect(master, wanted), None
    else:
        wanted[_JAVA_OPTIONS] = f"{_QUIET} {wanted.get(_JAVA_OPTIONS, '')}".rstrip()
        for name, text in wanted.items():
            builder = builder.config(name, text)
        spark, jvm = _start(builder, master), _jvm()
    if jvm is not None:
        _quieten(spark)
    try:
        for source in (DelayLog, DelayState, DelayHistory, DelayArchive, DelayServerSink):
            spark.dataSource.register(source)
        yield spark
    except Exception as error:
        status = _ended(jvm, error)
        if status is not None:
            raise JvmEndedError(f"in the middle of the job {job}", status) from error
        if is_connect(master) and _is_away(error):
            raise ConnectEndedError(job, master) from error
        raise
    finally:
        if jvm is None or jvm.poll() is None:
            spark.stop()
        else:
            _forget(spark)


def _jvm() -> "subprocess.Popen[bytes] | None":
    """The JVM below this process; None if another process has started it."""
    gateway = SparkContext._gateway
    return None if gateway is None else gateway.proc


def _quieten(spark: SparkSession) -> None:
    """Drop messages at the end of the JVM. A server in this process, which takes the counters of
    tasks, and a client of the JVM would print them."""
    server = spark.sparkContext._accumulatorServer
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    logging.getLogger().addFilter(_is_not_of_py4j)


def _is_not_of_py4j(record: logging.LogRecord) -> bool:
    return "py4j" not in record.pathname


def _ended(jvm: "subprocess.Popen[bytes] | None", error: Exception) -> int | None:
    """The exit status of a JVM whose end made this error; None if it goes on."""
    if jvm is None:
        return None
    if isinstance(error, Py4JError | OSError | EOFError) and not isinstance(error, Py4JJavaError):
        # Its connections may be seen to end before its process does.
        with contextlib.suppress(subprocess.TimeoutExpired):
            jvm.wait(ENDING_S)
    return jvm.poll()


def _forget(spark: SparkSession) -> None:
    """Do the same as `stop`, without the JVM: the next session starts one."""
    with contextlib.suppress(Py4JError, OSError), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # It warns that it cannot be shut down.
        spark.sparkContext.stop()
    SparkContext._active_spark_context = None
    SparkContext._gateway = SparkContext._jvm = None
    SparkSession._instantiatedSession = SparkSession._activeSession = None


def _start(builder: SparkSession.Builder, master: str) -> SparkSession:
    """Start Spark. The JVM's standard error is kept, and shown only if the start fails."""
    with tempfile.TemporaryFile() as said, _stderr_to(said.fileno()):
        try:
            return builder.getOrCreate()
        except (PySparkException, Py4JError, OSError, RuntimeError) as error:
            is_refused = _REFUSED in str(error)  # The JVM goes on.
            if not is_refused and (status := _ended(_jvm(), error)) is not None:
                SparkContext._gateway = SparkContext._jvm = None
                raise JvmEndedError(f"while Spark started on {master}", status) from error
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines()
            raise PipelineError(
                f"Spark did not start on {master}: {_reason(error, lines)}"
            ) from error


def _reason(error: Exception, lines: list[str]) -> str:
    """Why the start failed, with the last lines of the JVM."""
    text = str(error)
    if _REFUSED in text:
        # Spark asks for a minute, and then ends by itself.
        return "no master answers there, or it refused the job"
    return "\n".join([text, *lines[-5:]])


def _connect(master: str, settings: Mapping[str, str]) -> SparkSession:
    """A session of a Spark Connect server. Raises ConnectMissingError, PipelineError."""
    try:
        from pyspark.sql.connect.client.retries import DefaultPolicy
    except ImportError as error:
        raise ConnectMissingError from error
    # The error is raised as well.
    warnings.filterwarnings("ignore", r"\[RETRIES_EXCEEDED\]")
    spark = SparkSession.Builder().remote(master).getOrCreate()
    # No request was sent yet.
    policy = DefaultPolicy(max_retries=CONNECT_RETRIES, max_backoff=CONNECT_WAIT_MAX_MS)
    spark.client.set_retry_policies([policy])
    for name, text in settings.items():
        try:
            spark.conf.set(name, text)
        except PySparkException as error:
            spark.stop()
            if error.getCondition() == "CANNOT_MODIFY_CONFIG":
                reason = f"its server has one {name} for all sessions; start that with it"
            elif _is_away(error):
                reason = "nobody answers there; sbin/start-connect-server.sh of Spark starts one"
            else:
                reason = str(error)
            raise PipelineError(f"Spark did not start on {master}: {reason}") from error
    return spark


def _is_away(error: Exception) -> bool:
    """Whether an error means that a Connect server does not answer, or does not know the session,
    because it was started anew."""
    from grpc import StatusCode
    from pyspark.errors.exceptions.connect import SparkConnectGrpcException

    if not isinstance(error, SparkConnectGrpcException):
        return False
    return error.getGrpcStatusCode() == StatusCode.UNAVAILABLE or "SESSION_NOT_FOUND" in str(error)


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
