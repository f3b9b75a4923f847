"""An app of Celery for the tests: `celery -A tests.integration.celery_app worker`.

Where it connects to stands in its environment. Each run of a task is a line of a file: what ran how
often is counted there, whatever becomes of brokers and workers."""

import faulthandler
import os
import signal
import time
from collections.abc import Mapping

from celery import Celery

from delayserver.integrations.celery import DelayedTasks

DUMP_SIGNAL = signal.SIGUSR2
"""Has a process say where its threads are, whatever they wait for."""


def make_app(settings: Mapping[str, str]) -> Celery:
    """The same app, for a process that only sends, too."""
    app = Celery("shop", broker=settings["TEST_BROKER"], backend=settings.get("TEST_BACKEND"))
    app.conf.update(
        broker_connection_retry_on_startup=True,
        # What a killed worker had and has not acknowledged comes again after that.
        broker_transport_options={"visibility_timeout": 2},
        result_chord_join_timeout=20,
        task_acks_late=True,
        task_default_queue="shop",
        timezone="Europe/Berlin",
        worker_hijack_root_logger=False,
        worker_prefetch_multiplier=1,
    )
    if settings["TEST_BROKER"].startswith("amqp"):
        app.conf.broker_transport_options = {}
    DelayedTasks(
        app,
        settings["TEST_SERVER"],
        token=settings.get("TEST_TOKEN"),
        subject=settings["TEST_SUBJECT"],
        threshold="1s",
        lease="3s",
        forward=settings.get("TEST_FORWARD") != "no",
    )

    def note(*words: object) -> None:
        """One line, in one write."""
        line = " ".join(map(str, (*words, os.getpid(), f"{time.time():.3f}"))) + "\n"
        file = os.open(settings["TEST_RUNS"], os.O_APPEND | os.O_CREAT | os.O_WRONLY)
        os.write(file, line.encode())
        os.close(file)

    @app.task(name="run", bind=True)
    def run(self, label="run", *parents):
        info = self.request.delivery_info
        note(self.request.id, label, info["routing_key"], info["priority"])
        return label

    @app.task(name="fail", bind=True)
    def fail(self):
        note(self.request.id, "fail")
        raise ValueError("no")

    @app.task(name="again", bind=True)
    def again(self, label):
        """Wants to be tried again once."""
        note(self.request.id, f"{label}-{self.request.retries}")
        if not self.request.retries:
            raise self.retry(countdown=1.5)
        return self.request.retries

    @app.task(name="start", bind=True)
    def start(self):
        """Sends another task, from within a worker."""
        note(self.request.id, "start")
        run.apply_async(("child",), countdown=1.5, task_id=f"{self.request.id}-child")

    return app


if "TEST_BROKER" in os.environ:
    faulthandler.register(DUMP_SIGNAL)
    app = make_app(os.environ)
