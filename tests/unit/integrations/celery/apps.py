"""Apps of Celery whose broker is this process, and whose delay server is a fake.

They are `Any` to the tests: what is known of Celery's types is stricter than Celery."""

import itertools
from typing import Any

from celery import Celery

from delayserver.client import NO_RETRIES
from delayserver.integrations.celery import DelayedTasks
from tests.unit.client.fake_server import FakeTransport, Reply, publishing

NOW_MS = 1_795_600_000_000
_numbers = itertools.count(1)


def make_app(**conf: Any) -> Any:
    """An app with a queue and results of its own, on a broker that all of them share."""
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    name = f"shop-{next(_numbers)}"
    app.conf.update(
        task_default_queue=name,
        result_backend_transport_options={"global_keyprefix": name},
        **conf,
    )

    @app.task(name="run")
    def run(*arguments: object, **named: object) -> None:
        """What is sent here."""

    return app


def delayed(app: Any, *replies: Reply, **options: Any) -> FakeTransport:
    """Give the app its delayed tasks; what they ask their server."""
    transport = FakeTransport(*replies, default=publishing())
    options.setdefault("retry", NO_RETRIES)
    DelayedTasks(app, now_ms=lambda: NOW_MS, transport=transport, **options)
    return transport


def on_the_broker(app: Any) -> list[Any]:
    """What lies in its queue, as messages of kombu; they are taken."""
    found = []
    with app.connection_for_read() as connection:
        queue = app.amqp.queues[app.conf.task_default_queue](connection.default_channel)
        queue.declare()
        while (message := queue.get(no_ack=True)) is not None:
            found.append(message)
    return found
