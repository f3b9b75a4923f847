"""Celery: tasks that are due much later wait in the delay server, not in a worker's memory.

    from celery import Celery
    from delayserver.integrations.celery import DelayedTasks

    app = Celery("shop", broker="redis://127.0.0.1:6379/0")
    DelayedTasks(app, "http://127.0.0.1:8080")

    remind.apply_async((1001,), countdown=1800)     as always
    AsyncResult(task_id).revoke()                   as always, and it never comes back

In reading order:

    wire        a task as it goes onto the broker, as the body of a message
    tasks       how apply_async, retry and revoke use the delay server
    broker      one connection to the broker, which waits for it and for its word
    forwarder   from the delay server onto the broker: a step of each worker, or a command

    python -m delayserver.integrations.celery -A shop     the forwarder alone

docs/celery.md has the promises. It needs the extra `delayserver[celery]`.
"""

from delayserver.integrations.celery.forwarder import TaskForwarder
from delayserver.integrations.celery.tasks import SUBJECT, THRESHOLD, DelayedTasks
from delayserver.integrations.celery.wire import NotATaskError

__all__ = ["SUBJECT", "THRESHOLD", "DelayedTasks", "NotATaskError", "TaskForwarder"]
