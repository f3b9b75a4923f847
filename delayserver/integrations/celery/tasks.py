"""How `apply_async`, `retry` and `revoke` use the delay server, once an app has `DelayedTasks`.

    apply_async ─▶ send_task ─due soon──▶ Celery, as without it
                       └─────due later──▶ Celery makes the message ─▶ POST /v1/messages ─▶ durable
    revoke ─▶ the workers are told, as without it; and the waiting task is cancelled

All ways to send a task end in `app.send_task`, so the decision is made there. Celery itself makes
the message, with routes, signals, stamps and all, and hands it to a producer, which is ours. The
due time goes into the header `eta`, where Celery has it. It does not go into `send_task`, because
RabbitMQ would then delay the task a second time if it has quorum queues.

The key of the message is the id of the task: a task that is sent again after a lost answer is the
same message. A new message with the id of a waiting one takes its place. This happens for a retry
after a worker was killed, or for an id that the caller chose.

Cost: a request to the delay server instead of one to the broker. Threads: any, and both sides of a
fork.
"""

import logging
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from functools import cached_property, partial
from typing import Any, Self

import kombu
import msgspec
from celery import Celery
from celery.app.control import Control
from celery.app.task import Context
from celery.result import AsyncResult
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.utils.imports import symbol_by_name

from delayserver.client import (
    Client,
    ClientError,
    ConflictError,
    DiskFullError,
    NotFoundError,
    OverloadedError,
    RetryPolicy,
    UnansweredError,
    UnreachableError,
)
from delayserver.client.cluster_map import OwnerHosts
from delayserver.client.options import URL_DEFAULT
from delayserver.client.transport import Transport
from delayserver.client.values import Delay, duration
from delayserver.integrations.celery.forwarder import CONCURRENCY, TaskForwarder, forwarding_step
from delayserver.integrations.celery.wire import NotATaskError, WireTask
from delayserver.times import parse_duration_ms

SUBJECT = "celery.tasks"
THRESHOLD = "5m"
LEASE = "30s"
RETRY = RetryPolicy(timeout_s=10)
"""The sender of a task is often in the middle of a request, and its client waits."""
REPLACE_ATTEMPTS = 2
CONTROL = "celery.app.control:Control"
_NOT_NOW = (UnansweredError, OverloadedError, DiskFullError)
"""Errors that say nothing against the task itself."""

log = logging.getLogger("delayserver.celery")


class DelayedTasks:
    """Has tasks that are due later than `threshold` wait in the delay server.

        app = Celery("shop", broker="redis://127.0.0.1:6379/0")
        DelayedTasks(app, "http://127.0.0.1:8080", token=os.environ["DELAYSERVER_TOKEN"])

    Every process that sends tasks makes one, and so do the workers. It opens nothing before it is
    used, so it may be made before a fork.

    - `threshold`: tasks that are due sooner go to the broker at once, as without it. A timedelta,
      text such as "5m", or whole milliseconds.
    - `subject`: the subject of waiting tasks. Apps that share a delay server and not a broker need
      different ones, or tasks come out at the wrong broker.
    - `fallback`: if the delay server cannot take a task for the moment, the task goes to the broker
      with its ETA, as without it, and a warning is logged. If only the answer was lost, the task
      may run twice. Without `fallback` the sender gets the error of the client library.
    - `forward`: each worker of the app brings back the tasks that are due. Without it, run
      `python -m delayserver.integrations.celery -A APP`.
    - `lease`: the time after which the tasks of a killed forwarder come again; `concurrency`: how
      many tasks it takes at once.
    - `retry`: how long to ask again while the server is away, ten seconds by default; `token`,
      `tls`, `owner_hosts` are those of the client library.
    - `now_ms`: the clock, in ms since the epoch; `transport`: for tests.

    Raises ValueError for a second one of the same app; InputError for a duration that is none."""

    def __init__(
        self,
        app: Celery,
        url: str = URL_DEFAULT,
        *,
        token: str | None = None,
        threshold: Delay = THRESHOLD,
        subject: str = SUBJECT,
        fallback: bool = False,
        forward: bool = True,
        lease: Delay = LEASE,
        concurrency: int = CONCURRENCY,
        retry: RetryPolicy = RETRY,
        owner_hosts: OwnerHosts = "same",
        tls: ssl.SSLContext | None = None,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        transport: Transport | None = None,
    ) -> None:
        if delayed_tasks(app) is not None:
            raise ValueError(f"{app!r} has DelayedTasks already; make one for each app")
        self.app = app
        self.subject = subject
        self._threshold = timedelta(milliseconds=parse_duration_ms(duration(threshold)))
        self._fallback = fallback
        self._now_ms = now_ms
        self._client = Client(
            url, token=token, retry=retry, tls=tls, owner_hosts=owner_hosts, transport=transport
        )
        self._make_consumer = partial(self._client.consumer, concurrency=concurrency)
        self._lease = lease
        vars(app)["send_task"] = self._send_task
        control: type[Control] = symbol_by_name(app.control_cls or CONTROL)
        vars(app)["control_cls"] = _revoking(control, self)
        vars(app).pop("control", None)
        if forward:
            app.steps["worker"].add(forwarding_step(self.forwarder))
        vars(app)[_NAME] = self

    def forwarder(self) -> TaskForwarder:
        """The forwarder that brings due tasks back; for a process of its own."""
        return TaskForwarder(
            self.app, self._make_consumer, self.subject, lease=self._lease, now_ms=self._now_ms
        )

    def close(self) -> None:
        """Disconnect; no task can be stored any more. A process that ends need not."""
        self._client.close()

    # ── send ───────────────────────────────────────────────────────────────────────────────────

    def _send_task(
        self,
        name: str,
        args: Sequence[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        countdown: float | None = None,
        eta: datetime | str | None = None,
        task_id: str | None = None,
        producer: kombu.Producer | None = None,
        connection: kombu.Connection | None = None,
        *others: Any,
        **options: Any,
    ) -> "AsyncResult[Any]":
        """In place of `Celery.send_task`, with the same arguments."""
        # The class is asked at each call, because other code may have wrapped its method since.
        send: Callable[..., AsyncResult[Any]] = partial(
            type(self.app).send_task, self.app, name, args, kwargs
        )
        due = self._due(countdown, eta)
        if due is None or not self._is_own_broker(connection, producer):
            return send(countdown, eta, task_id, producer, connection, *others, **options)
        options["headers"] = {**(options.get("headers") or {}), "eta": due.isoformat()}
        store = partial(self._store, due)
        with _StoringProducer(self.app, producer, store, fallback=self._fallback) as storing:
            return send(None, None, task_id, storing, None, *others, **options)

    def _due(self, countdown: float | None, eta: datetime | str | None) -> datetime | None:
        """When a task is due, if it must wait in the delay server. If both arguments are given, the
        first counts, as in Celery, and a time without a zone is read as its workers read it."""
        if isinstance(eta, int | float):
            raise TypeError(
                f"eta={eta!r} is a number: Celery takes a datetime, or ISO 8601 text. Seconds from "
                "now are `countdown`"
            )
        now = datetime.fromtimestamp(self._now_ms() / 1000, UTC)
        if countdown:
            due = now + timedelta(seconds=countdown)
        elif time := maybe_iso8601(eta) if eta else None:
            due = maybe_make_aware(time, self.app.timezone)
        else:
            return None
        return due if due - now >= self._threshold else None

    def _is_own_broker(
        self, connection: kombu.Connection | None, producer: kombu.Producer | None
    ) -> bool:
        """Whether a task goes where a forwarder of the app would put it."""
        connection = connection or (producer.connection if producer is not None else None)
        return connection is None or _urls(connection) == _urls(self.app.connection_for_write())

    def _store(self, due: datetime, body: object, headers: dict[str, Any], **options: Any) -> None:
        """Publish a task that Celery has made. Raises ClientError."""
        task = WireTask.make(body, headers=headers, now_ms=self._now_ms(), **options)
        key = str(headers.get("id") or options["correlation_id"])
        message = msgspec.Raw(task.encode())
        try:
            self._client.messages.publish(self.subject, message, deliver_at=due, key=key)
        except ConflictError:
            self._replace(key, message, due)

    def _replace(self, key: str, message: msgspec.Raw, due: datetime) -> None:
        """Put a task in the place of one with the same id. After a lost answer the request is sent
        once more, which the client library leaves to its caller. Whether the first was taken or
        not, the task is due much later, so that one of the two waits."""
        for attempt in range(1, REPLACE_ATTEMPTS + 1):
            try:
                self._client.messages.replace(self.subject, key, message, deliver_at=due)
                return
            except UnreachableError:
                raise
            except UnansweredError:
                if attempt == REPLACE_ATTEMPTS:
                    raise

    # ── revoke ─────────────────────────────────────────────────────────────────────────────────

    def cancel(self, task_id: str) -> bool:
        """Cancel a task that waits in the delay server; when this returns True, it never runs, and
        its state is REVOKED. False: it does not wait there, or is on its way. Raises ClientError.

        `app.control.revoke` and `AsyncResult.revoke` do it besides their own work."""
        try:
            stored = self._client.messages.get(subject=self.subject, key=task_id)
            if stored.state != "scheduled":
                return False
            self._client.messages.cancel(subject=self.subject, key=task_id)
        except (ConflictError, NotFoundError):
            return False
        self._mark_revoked(task_id, stored.raw)
        return True

    def _mark_revoked(self, task_id: str, body: bytes) -> None:
        """Report it to the result backend, and to its chord, as a worker with the task does."""
        headers: dict[str, Any] = {}
        args: Any = ()
        kwargs: Any = {}
        embedded: dict[str, Any] = {}
        try:
            task = WireTask.decode(body)
            headers = task.headers
            args, kwargs, embedded = task.content(self.app.conf.accept_content)
        except (NotATaskError, ValueError) as error:
            log.warning("task %s is cancelled, and its chord is not told: %s", task_id, error)
        request = Context({**headers, **embedded, "id": task_id, "args": args, "kwargs": kwargs})
        store = not headers.get("ignore_result")
        self.app.backend.mark_as_revoked(task_id, "revoked", request=request, store_result=store)


class _StoringProducer:
    """A producer of kombu to Celery, which stores the one task that it is made for. Anything
    published after it is an event about the task, and goes to the broker.

    A producer of the pool is taken only when the broker is needed: while the delay server is away,
    tasks that wait for it must not hold up tasks that go to the broker."""

    def __init__(
        self,
        app: Celery,
        given: kombu.Producer | None,
        store: Callable[..., None],
        *,
        fallback: bool,
    ) -> None:
        self._app = app
        self._given = given
        self._store: Callable[..., None] | None = store
        self._fallback = fallback
        self._taken = ExitStack()
        connection = None if given is None else given.connection
        self.connection = connection or app.connection_for_write()
        """It need not be connected for this; Celery asks it for the errors of a broker."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._taken.close()

    @cached_property
    def _broker(self) -> kombu.Producer:
        taken: kombu.Producer = self._taken.enter_context(
            self._app.producer_or_acquire(self._given)
        )
        return taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    def publish(self, body: object, **options: Any) -> Any:
        store, self._store = self._store, None
        if store is None:
            return self._broker.publish(body, **options)
        about_the_broker = ("retry", "retry_policy", "timeout", "confirm_timeout")
        kept = {name: value for name, value in options.items() if name not in about_the_broker}
        try:
            return store(body, **kept)
        except _NOT_NOW as error:
            if not self._fallback:
                raise
            log.warning("the delay server takes no task, a worker keeps it instead: %s", error)
            return self._broker.publish(body, **options)


def _urls(connection: kombu.Connection) -> list[str]:
    """Where a connection goes, or may go."""
    return connection.alt or [connection.as_uri(include_password=True)]


def _revoking(control: type[Control], delayed: DelayedTasks) -> type[Control]:
    """A control whose `revoke` also cancels the task if it waits in the delay server."""

    class DelayedControl(control):  # type: ignore[misc, valid-type]
        def revoke(self, task_id: str | Sequence[str], *arguments: Any, **options: Any) -> Any:
            # The workers are told first, so they refuse a task that the delay server releases just
            # now.
            replies = super().revoke(task_id, *arguments, **options)
            failed: ClientError | None = None
            for one in (task_id,) if isinstance(task_id, str) else task_id:
                try:
                    delayed.cancel(one)
                except ClientError as error:
                    failed = failed or error
            if failed is not None:
                raise failed
            return replies

    return DelayedControl


_NAME = "delayed_tasks"
"""The attribute in which an app keeps its delayed tasks."""


def delayed_tasks(app: Celery) -> DelayedTasks | None:
    """The delayed tasks of an app."""
    return vars(app).get(_NAME)
