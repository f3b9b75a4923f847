"""The form of what a process logs.

Cost: some 10 µs a line. Threads: set up once, before there are any; then lines come from all.
"""

import logging
import sys
from functools import partial
from typing import Any

import structlog
from structlog.typing import EventDict

from delayserver.api.cluster.place import ShardPlace
from delayserver.config import Settings


def _name_shard(shard: int, logger: object, method: str, event: EventDict) -> EventDict:
    return {**event, "shard": shard}


def escape_controls(logger: object, method: str, event: EventDict) -> EventDict:
    """Write what is no printable character as an escape: a key or a name that a client chose must
    not clear a screen, or hide a line. An exception keeps its lines."""
    for name, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            keeps = "\n\t" if name == "exception" else ""
            event[name] = "".join(
                one if one.isprintable() or one in keeps else one.encode("unicode_escape").decode()
                for one in value
            )
    return event


def set_up_logging(settings: Settings, place: ShardPlace | None = None) -> None:
    """Lines for people on a terminal, JSON for programs; always on standard error. They name the
    shard where there are several."""
    renderers: list[Any] = (
        [structlog.processors.JSONRenderer()]  # which escapes by itself
        if settings.log_json
        else [escape_controls, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    )
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    shared: list[Any] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    if place is not None:
        shared.append(partial(_name_shard, place.shard))
    structlog.configure(
        processors=[*shared, *renderers],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    # What libraries log has the same form.
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        )
    )
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[handler])
