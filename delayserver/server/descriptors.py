"""The budget of descriptors: how many files and sockets each part may open, settled at the start.

    limit of the process      RLIMIT_NOFILE, raised as far as the system allows
    ├── OWN_MIN               logs, catalog, name look-ups, the event loop, …
    ├── connections_max       clients, each from the moment when its connection is accepted
    ├── webhook_connections_max
    └── the rest              more hours of the schedule log, up to half of the limit

The schedule log is filed into as many hours as messages are due in, two years are 17,520. A file
that stays open need not be opened and closed in each pass. The other logs come back to few hours.

So no part waits for a descriptor, and no client can take one that a log needs. If the limit is too
small for the settings, webhooks get less first (they wait for their turn), down to a quarter of the
rest, then clients; a server that could serve hardly any client does not start.

Cost: two system calls, once. Threads: any.
"""

import resource
from dataclasses import dataclass
from typing import Final

import structlog

from delayserver.config import Settings
from delayserver.delivery.open_outlets import OUTLETS_MAX
from delayserver.errors import InputError
from delayserver.recovery.store import READ_HOURS_MAX, WRITTEN_HOURS_MIN

SCHEDULE_HOURS_MAX: Final = 20_000
"""Files of hours that the schedule log may have open, however large the limit is: those of more
than two years."""
_WRITTEN_LOGS: Final = 2
_READ_LOGS: Final = 7
_OTHERS_MAX: Final = 128 + OUTLETS_MAX
"""Segments, definitions, catalog, tokens, staged files; listener, event loop, timer, resolver
threads, exporter of traces, the connection that is accepted to be refused; connections to brokers
of one kind, and some to spare."""
OWN_MIN: Final = (
    # Each log opens a file before it closes the one that was used least.
    _WRITTEN_LOGS * (WRITTEN_HOURS_MIN + 1) + _READ_LOGS * (READ_HOURS_MAX + 1) + _OTHERS_MAX
)
LEFT_MIN: Final = 32
"""For clients and webhooks together; with less there is no point in starting."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Budget:
    """How many descriptors each part may have."""

    settings: Settings
    """With the connections that fit."""
    schedule_hours_max: int = WRITTEN_HOURS_MIN
    """Files of hours that the schedule log has open where it is written."""


def within_limit(settings: Settings) -> Budget:
    """Raise the limit of open files as far as is of use; returns the budget within it.

    Raises InputError where nothing fits."""
    wanted = _needed(settings) + SCHEDULE_HOURS_MAX - WRITTEN_HOURS_MIN
    wanted = max(wanted, 2 * SCHEDULE_HOURS_MAX)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return divided(settings, wanted if soft == resource.RLIM_INFINITY else soft)


def divided(settings: Settings, allowed: int) -> Budget:
    """The budget within `allowed` descriptors; connections that do not fit are logged.

    Raises InputError where nothing fits."""
    settings = _connected(settings, allowed)
    spare = allowed - _needed(settings)
    hours_max = min(WRITTEN_HOURS_MIN + spare, allowed // 2, SCHEDULE_HOURS_MAX)
    return Budget(settings, max(hours_max, WRITTEN_HOURS_MIN))


def _needed(settings: Settings) -> int:
    return OWN_MIN + settings.connections_max + settings.webhook_connections_max


def _connected(settings: Settings, allowed: int) -> Settings:
    """The settings as they fit into `allowed` descriptors."""
    asked, asked_webhooks = settings.connections_max, settings.webhook_connections_max
    left = allowed - OWN_MIN
    if left >= asked + asked_webhooks:
        return settings
    if left < LEFT_MIN:
        raise InputError(
            f"the system allows this process {allowed} open files, and it needs "
            f"{OWN_MIN + LEFT_MIN} at the least, {_needed(settings)} for "
            "connections_max and webhook_connections_max as they are; raise the limit (ulimit -n, "
            "LimitNOFILE=, --ulimit nofile=)"
        )
    webhooks = min(asked_webhooks, max(left // 4, left - asked))
    connections = min(asked, left - webhooks)
    log.warning(
        "the system allows fewer open files than the settings ask for, so there will be fewer "
        "connections; raise its limit (ulimit -n, LimitNOFILE=, --ulimit nofile=)",
        allowed=allowed,
        needed=_needed(settings),
        connections_max=connections,
        webhook_connections_max=webhooks,
    )
    return settings.model_copy(
        update={"connections_max": connections, "webhook_connections_max": webhooks}
    )
