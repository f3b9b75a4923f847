"""The JVM is killed below a job, as the kernel does where memory runs out: real commands."""

import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sessions import QUICK_SETTINGS

from delayserver.pipeline.session import JvmEndedError, open_session
from storage.rows import HOUR_MS
from tests.pipeline.processes import children, runs
from tests.pipeline.quick import QUICK_CONF
from tests.pipeline.store import Store
from tests.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
ENDED = "Spark's JVM ended in the middle of the job {}: it was killed"


def kill_jvm(pid: int, worker: str) -> None:
    """Kill the JVM of a driver, once it has such a worker: a job runs."""

    def find() -> int | None:
        for jvm in children(pid):
            if any(runs(one, "-m\0pyspark.", worker) for one in children(jvm)):
                return jvm
        return None

    jvm = wait_until(find, timeout_s=120)
    assert jvm is not None
    os.kill(jvm, signal.SIGKILL)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = Store(tmp_path_factory.mktemp("jvm") / "data")
    store.publish("order.unpaid", range(1000, 200_000, 1000))
    store.publish("envelope", [5 * HOUR_MS])
    store.run(2 * HOUR_MS)
    store.kill()
    return store


@pytest.mark.parametrize(
    ("command", "worker"), [("audit", "pyspark.worker"), ("lateness", "streaming")]
)
def test_a_command_says_that_it_was_killed(command: str, worker: str, store: Store) -> None:
    arguments = ["pipeline", command, "--data-dir", store.root, "--master", "local[2]", *QUICK_CONF]
    process = subprocess.Popen(
        [sys.executable, "-m", "delayserver", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    kill_jvm(process.pid, worker)
    printed, error = process.communicate(timeout=120)
    assert process.returncode == 2, printed + error
    assert ENDED.format(command) in " ".join(error.split())
    assert "dmesg" in error
    assert "Errno" not in error and "Traceback" not in error


SCRIPT = """
import sys
from tests.pipeline.test_jvm_ends import in_one_process
in_one_process(sys.argv[1])
"""


def in_one_process(root: str) -> None:
    """A program goes on after its JVM was killed, with another one."""
    killer = threading.Thread(target=kill_jvm, args=(os.getpid(), "pyspark.worker"))
    killer.start()
    with (
        pytest.raises(JvmEndedError) as caught,
        open_session("first", master="local[1]", settings=QUICK_SETTINGS) as spark,
    ):
        spark.range(1).mapInArrow(_for_ever, "id long").count()
    killer.join()
    assert caught.value.status == -signal.SIGKILL
    with open_session("again", master="local[1]", settings=QUICK_SETTINGS) as spark:
        log = spark.read.format("delaylog").option("log", "schedule").load(root)
        print(log.where("kind = 1").count())


def _for_ever(batches: Iterator[object]) -> Iterator[object]:
    """A job that lasts until it is killed."""
    for batch in batches:
        yield from itertools.repeat(batch)


def test_the_next_session_has_another_jvm(store: Store) -> None:
    # A process of its own: that of the tests has a session that others use.
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, store.root],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts' / 'benchmarks'}"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["200"]
