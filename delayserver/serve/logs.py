"""The form of log lines, and their way out: a thread writes them.

    structlog of the server, logging of libraries ──▶ one form ──┐
    warnings, exceptions that ended a thread      ──▶ one form ──┼──▶ LogWriter ──▶ descriptor 2
    anything else that prints on `sys.stderr`     ────────────────┘

Nothing that logs waits for who reads the log, and nothing raises because of it: a server whose log
cannot be written goes on, and counts the lines that are missing.

Cost: some 10 µs a line. Threads: set up once, before there are any; then lines come from all.
"""

import atexit
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TextIO, cast

import structlog
from structlog.typing import EventDict

from delayserver.config import Settings
from delayserver.log_writer import LogWriter
from delayserver.shards.place import ShardPlace

STANDARD_ERROR: Final = 2
EXIT_S: Final = 1.0
"""The end of a process waits so long for its last lines."""
_LOST: Final = "lines of the log were lost"

log = structlog.get_logger()


def _name_shard(shard: int, logger: object, method: str, event: EventDict) -> EventDict:
    return {**event, "shard": shard}


def escape_controls(logger: object, method: str, event: EventDict) -> EventDict:
    """Write each character that is not printable as an escape: a key or a name from a client must
    not clear a screen, or hide a line. An exception keeps its lines."""
    for name, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            keeps = "\n\t" if name == "exception" else ""
            event[name] = "".join(
                one if one.isprintable() or one in keeps else one.encode("unicode_escape").decode()
                for one in value
            )
    return event


class _Form:
    """All processors as one, which does not raise: a value whose text cannot be had costs its line
    the form, not the caller an exception."""

    def __init__(self, processors: Sequence[Callable[[Any, str, Any], Any]]) -> None:
        self._processors = processors

    def __call__(self, logger: object, method: str, event: EventDict) -> str:
        said = event.get("event")
        try:
            shown: Any = event
            for processor in self._processors:
                shown = processor(logger, method, shown)
            return str(shown)
        except Exception as error:
            return f"{method}: {said!s:.1000} (the rest cannot be shown: {type(error).__name__})"


class _Lines:
    """Where structlog puts a line that is made, whatever its level."""

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer

    def msg(self, line: str) -> None:
        self._writer.write(line + "\n")

    debug = info = warning = error = critical = msg


class _Handler(logging.Handler):
    """Where libraries put a line."""

    def __init__(self, writer: LogWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._writer.write(self.format(record) + "\n")
        except Exception:
            self.handleError(record)


def set_up_logging(settings: Settings, place: ShardPlace | None = None) -> LogWriter:
    """Lines for people on a terminal, JSON for programs; always on standard error. They name the
    shard where there are several. Returns the writer of the lines."""
    open_standard_descriptors()
    renderers: list[Any] = (
        [structlog.processors.JSONRenderer()]  # which escapes by itself
        if settings.log_json
        else [
            escape_controls,
            structlog.dev.ConsoleRenderer(colors=os.isatty(STANDARD_ERROR)),
        ]
    )
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    shared: list[Any] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    if place is not None:
        shared.append(partial(_name_shard, place.shard))
    form = _Form([*shared, *renderers])

    def say_lost(count: int) -> str:
        return form(None, "error", {"event": _LOST, "count": count}) + "\n"

    writer = LogWriter(STANDARD_ERROR, say_lost=say_lost)
    atexit.register(writer.drain, EXIT_S)
    sys.stderr = cast(TextIO, writer)
    structlog.configure(
        processors=[form],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: _Lines(writer),
        cache_logger_on_first_use=True,
    )
    # Lines of libraries have the same form.
    handler = _Handler(writer)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        )
    )
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[handler], force=True)
    logging.captureWarnings(True)
    threading.excepthook = _on_thread_error
    sys.unraisablehook = _on_unraisable
    return writer


def finish_logging(timeout_s: float) -> None:
    """Wait until all that was logged is written, but no longer than that."""
    log_file: object = sys.stderr
    if isinstance(log_file, LogWriter):
        log_file.drain(timeout_s)


def open_standard_descriptors() -> None:
    """Open those of 0, 1 and 2 that are closed, on /dev/null. Otherwise the next file that the
    server opens would get such a number, and lines of the log would be written into it."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # It gets the lowest number that is free.
            assert opened == descriptor
            os.set_inheritable(opened, True)


def _on_thread_error(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is not SystemExit:
        name = None if args.thread is None else args.thread.name
        log.error("an exception has ended a thread", thread=name, exc_info=args.exc_value)


def _on_unraisable(args: "sys.UnraisableHookArgs") -> None:
    where = "nowhere"
    with contextlib.suppress(Exception):
        where = repr(args.object)
    log.error("an exception could not be raised", where=where, exc_info=args.exc_value)
