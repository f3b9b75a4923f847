"""The forwarder alone: for workers that should not do it, or cannot (gevent, eventlet).

python -m delayserver.integrations.celery -A shop
"""

import argparse
import atexit
import logging
import signal
import sys
from types import FrameType
from typing import Final

from celery.app.utils import find_app

from delayserver.client import ClientError
from delayserver.integrations.celery.tasks import delayed_tasks
from delayserver.log_writer import LogWriter

STANDARD_ERROR: Final = 2
LAST_LINES_S: Final = 1.0
"""The process waits so long at its end for the last lines of the log."""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m delayserver.integrations.celery",
        description="Bring delayed tasks that are due from the delay server onto the broker, until "
        "SIGTERM or ctrl-C. Any number may run, beside workers that forward, too.",
        epilog="example: python -m delayserver.integrations.celery -A shop.celery",
    )
    parser.add_argument(
        *("-A", "--app"), required=True, metavar="APP", help="as for celery: module, or module:app"
    )
    parser.add_argument(
        *("-l", "--loglevel"),
        default="INFO",
        type=str.upper,
        choices=("DEBUG", "INFO", "WARNING", "ERROR"),
        help="what is told on stderr (INFO)",
    )
    options = parser.parse_args()
    # Tasks do not wait for the reader of the log, and a terminal that is closed ends nothing.
    writer = LogWriter(STANDARD_ERROR)
    atexit.register(writer.drain, LAST_LINES_S)
    logging.basicConfig(
        level=options.loglevel,
        format="%(asctime)s %(levelname)s %(message)s",
        handlers=[logging.StreamHandler(writer)],
    )
    signal.signal(signal.SIGHUP, _on_hangup)
    try:
        app = find_app(options.app)
    except (ImportError, AttributeError) as error:
        sys.exit(f"error: no app of Celery at {options.app!r}: {error}")
    app.finalize()
    delayed = delayed_tasks(app)
    if delayed is None:
        sys.exit(f"error: the app {app.main!r} at {options.app!r} has no DelayedTasks")
    logging.info("forwarding tasks of %s to %s", delayed.subject, app.connection_for_write())
    try:
        delayed.forwarder().run()
    except ClientError as error:
        sys.exit(f"error: the delay server refuses: {error}")


def _on_hangup(number: int, frame: FrameType | None) -> None:
    logging.info("SIGHUP: there is nothing to read again")


if __name__ == "__main__":
    main()
