"""A job, and how far it is: the tasks of the stages that run, reported to a display.

Spark counts tasks, not rows, so a bar moves in steps of one partition. On Spark Connect the server
reports the same counts by itself.

Cost: one call into the JVM per poll. Threads: one of its own while a job runs.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

POLL_S = 0.2

Progress = Callable[[str, int, int], None]
"""Called with the current step, the number of tasks that are done, and the number of all tasks."""


@dataclass(frozen=True, slots=True)
class Job:
    """The environment of a job: its session, and its progress."""

    spark: SparkSession
    progress: Progress = lambda what, done, total: None

    @property
    def cores(self) -> int:
        """How many tasks run at a time."""
        if self.is_connect:
            return int(self.spark.conf.get("spark.sql.shuffle.partitions") or 1)
        return self.spark.sparkContext.defaultParallelism

    @property
    def is_connect(self) -> bool:
        """Whether the session is that of a Spark Connect server."""
        return type(self.spark).__module__.startswith("pyspark.sql.connect")

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Show how far Spark is with whatever runs within the context."""
        self.progress(what, 0, 0)
        if self.is_connect:
            yield  # The client shows its own progress.
            return
        ended = threading.Event()
        thread = threading.Thread(
            target=_poll, args=(self, what, ended), name="progress", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _poll(job: Job, what: str, ended: threading.Event) -> None:
    tracker = job.spark.sparkContext.statusTracker()
    while not ended.wait(POLL_S):
        done = total = 0
        # A session that ends meanwhile has nothing more to tell.
        with contextlib.suppress(Py4JError, OSError):
            for stage in tracker.getActiveStageIds():
                info = tracker.getStageInfo(stage)
                if info is not None:
                    done += info.numCompletedTasks
                    total += info.numTasks
        if total:
            job.progress(what, done, total)
