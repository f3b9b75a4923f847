"""One connection to Celery's broker: puts tasks onto it, one by one, and waits for its word.

    put ──▶ declare the queue ──▶ publish ──▶ the broker has it: Redis has answered LPUSH,
             ▲                                RabbitMQ has confirmed, and had a queue for it
             └── the broker is away: again, until it is back or `stop` is called

A broker that is away says nothing about a task, so no task is given up for it. An error of the
broker about one task (a queue that is declared otherwise, an exchange that does not exist) is
raised.

Cost: a round trip for each task. Threads: `put` and `close` belong to one thread, `stop` is safe.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import kombu
from celery import Celery
from celery.exceptions import QueueNotFound

from delayserver.errors import DelayServerError
from delayserver.integrations.celery.wire import WireTask

WAIT_S = 0.1
WAIT_S_MAX = 5.0
ANSWER_S = 30.0
"""A broker that says nothing for so long is away."""

log = logging.getLogger("delayserver.celery")


class StoppedError(DelayServerError):
    """The broker was away, and is not waited for any longer."""


class Broker:
    """Puts due tasks onto the broker. `now_ms`: in ms since the epoch; `wait`: waits for so many
    seconds, or until `stop` is called, and then returns True."""

    def __init__(
        self,
        app: Celery,
        *,
        now_ms: Callable[[], int],
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        self._app = app
        self._now_ms = now_ms
        self._connection: kombu.Connection | None = None
        self._producer: kombu.Producer | None = None
        self._stopping = threading.Event()
        self._wait = wait or self._stopping.wait

    def stop(self) -> None:
        """End the waiting for a broker that is away: `put` raises StoppedError."""
        self._stopping.set()

    def put(self, task: WireTask) -> None:
        """Put a task onto the broker; when this returns, the broker has it.

        Raises StoppedError, NotATaskError, and the broker's error about this task. Raises
        QueueNotFound if the app does not create queues that it does not know."""
        # Before the loop, because an unknown name does not mean that the broker is away.
        queues = self._queues(task.queues)
        data, failures = task.data, 0
        while True:
            try:
                self._publish(task, data, queues)
            except Exception as error:
                connection = self._connection
                self.close()
                if connection is None or not isinstance(error, _away(connection)):
                    raise
                failures += 1
                if failures == 1:
                    log.warning("the broker of Celery is away: %s; trying again", error)
            else:
                if failures:
                    log.info("the broker of Celery is back")
                return
            if self._wait(min(WAIT_S_MAX, WAIT_S * 2.0 ** min(failures, 30))):
                raise StoppedError("the broker of Celery is away, and the forwarder ends")

    def _queues(self, names: Iterable[str]) -> list[kombu.Queue]:
        known = self._app.amqp.queues
        try:
            return [known[name] for name in names]
        except KeyError as error:
            raise QueueNotFound(
                f"the app that forwards knows no queue {error}: name it in task_queues, as the "
                "app that has sent the task does"
            ) from error

    def _publish(self, task: WireTask, data: str | bytes, queues: list[kombu.Queue]) -> None:
        options = {
            **task.properties,
            "content_type": task.content_type,
            "content_encoding": task.content_encoding,
            "headers": dict(task.headers),
            "exchange": task.exchange,
            "routing_key": task.routing_key,
            "declare": list(queues),
            # RabbitMQ then reports that a queue is gone; otherwise it confirms and drops the task.
            "mandatory": bool(queues),
            "expiration": task.expiration_s(self._now_ms()),
            "confirm_timeout": ANSWER_S,
        }
        self._connected().publish(data, **options)

    def _connected(self) -> kombu.Producer:
        if self._producer is None:
            connection = self._connection = self._app.connection_for_write()
            connection.transport_options = connection_options(connection)
            # If there are several brokers, the next one is tried.
            connection.ensure_connection(
                max_retries=max(1, len(connection.alt)),
                interval_start=0,
                interval_step=0,
                reraise_as_library_errors=False,
            )
            self._producer = kombu.Producer(connection, auto_declare=False)
        return self._producer

    def close(self) -> None:
        """Disconnect; `put` connects again."""
        connection, self._connection, self._producer = self._connection, None, None
        if connection is not None:
            with suppress(Exception):  # the connection may be broken already
                connection.release()


def connection_options(connection: kombu.Connection) -> dict[str, Any]:
    """Options that report a stored task, and a silent broker. With Redis the app's own win."""
    options = connection.transport_options or {}
    match connection.get_transport_cls().driver_type:
        case "amqp":
            return {**options, "confirm_publish": True}
        case "redis":
            return {"socket_timeout": ANSWER_S, "socket_keepalive": True, **options}
    return options


def _away(connection: kombu.Connection) -> tuple[type[BaseException], ...]:
    """The errors that a call raises while the broker is away."""
    errors: tuple[type[BaseException], ...] = (OSError, *connection.connection_errors)
    if connection.get_transport_cls().driver_type == "redis":
        # Redis reports nothing about single tasks, only: out of memory, read-only, loading.
        errors += connection.channel_errors
    return errors
