"""From the delay server onto Celery's broker: due tasks are pulled, put there, and acknowledged.

    pull ──▶ in due order ──▶ Broker.put, in a thread ──▶ the broker has it ──▶ ack
                                    │
                                    └── killed here: it comes again after its lease, same task id

Any number of forwarders share the work: each worker of an app has one as a step of its own, in a
thread of its main process, or it runs alone (`python -m delayserver.integrations.celery`).

Cost: a round trip to the broker for each task, one after the other. Threads: `stop` is safe.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from celery import Celery, bootsteps
from celery.exceptions import ImproperlyConfigured

from delayserver.client import ClientError, Consumer, Message, Retry
from delayserver.client.values import Delay
from delayserver.integrations.celery.broker import Broker, StoppedError
from delayserver.integrations.celery.wire import WireTask

CONCURRENCY = 64
GRACE_S = 5.0
REFUSED_S = 30.0
"""A worker waits so long between two attempts, if the delay server refuses it."""

log = logging.getLogger("delayserver.celery")


class TaskForwarder:
    """Brings the due tasks of a subject back, until it is stopped; it runs once."""

    def __init__(
        self,
        app: Celery,
        make_consumer: Callable[[], Consumer],
        subject: str,
        *,
        lease: Delay,
        now_ms: Callable[[], int],
    ) -> None:
        self._subject = subject
        self._broker = Broker(app, now_ms=now_ms)
        self._consumer = make_consumer()
        self._consumer.subscribe(subject, lease=lease)(self._forward)

    def run(self) -> None:
        """Forward until `stop` is called; in the main thread, SIGTERM and ctrl-C do it. Raises
        ClientError if the delay server refuses a request and waiting cannot help."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="celery-broker")
        try:
            self._consumer.run(grace_s=GRACE_S)
        finally:
            self._broker.stop()
            self._thread.submit(self._broker.close)
            self._thread.shutdown()

    def stop(self) -> None:
        """End `run`; from any thread, also before it has begun."""
        self._consumer.stop()

    async def _forward(self, message: Message) -> None:
        task = WireTask.decode(message.raw)
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._broker.put, task)
        except StoppedError:
            raise Retry(0) from None
        log.debug("task %s is on the broker", message.key)


def forwarding_step(make: Callable[[], TaskForwarder]) -> type[bootsteps.StartStopStep]:
    """A step of each worker of an app."""

    class ForwardingStep(bootsteps.StartStopStep):
        """Starts behind the pool, so that the pool's first processes are forked without it."""

        requires = ("celery.worker.components:Pool",)

        def __init__(self, worker: Any, **options: Any) -> None:
            super().__init__(worker, **options)
            self._stopping = threading.Event()
            self._forwarder: TaskForwarder | None = None
            self._thread: threading.Thread | None = None

        def start(self, worker: Any) -> None:
            if worker.pool_cls.__module__.endswith(("gevent", "eventlet")):
                raise ImproperlyConfigured(
                    "a worker with a pool of gevent or eventlet has no threads to forward delayed "
                    "tasks with: give DelayedTasks forward=False, and run `python -m "
                    "delayserver.integrations.celery -A APP`"
                )
            self._thread = threading.Thread(
                target=self._keep_running, name="delayserver-forwarder", daemon=True
            )
            self._thread.start()

        def _keep_running(self) -> None:
            while not self._stopping.is_set():
                self._forwarder = make()
                if self._stopping.is_set():
                    return
                try:
                    self._forwarder.run()
                except ClientError as error:
                    log.error(
                        "delayed tasks are not forwarded: %s; trying again in %d s",
                        error,
                        REFUSED_S,
                    )
                    self._stopping.wait(REFUSED_S)

        def stop(self, worker: Any) -> None:
            self._stopping.set()
            if self._forwarder is not None:
                self._forwarder.stop()
            if self._thread is not None:
                # The second GRACE_S is for a call that holds up the end of `run`.
                self._thread.join(2 * GRACE_S + 1)

        def terminate(self, worker: Any) -> None:
            self.stop(worker)

    return ForwardingStep
