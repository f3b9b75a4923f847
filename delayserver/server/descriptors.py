"""The budget of descriptors: who may have how many files and sockets open, settled at the start.

    limit of the process      RLIMIT_NOFILE, raised as far as the system allows
    ├── OWN_MAX               logs, catalog, name look-ups, the event loop, …
    ├── connections_max       clients, each from the moment when its connection is accepted
    └── webhook_connections_max

Nobody waits for a descriptor then, and no client can take one that a log needs. Where the limit is
too small for what the settings ask for, webhooks get less first (they wait for their turn), down to
a quarter of what is left, then clients; a server that would serve nearly nobody does not start.

Cost: two system calls, once. Threads: any.
"""

import resource
from typing import Final

import structlog

from delayserver.config import Settings
from delayserver.errors import InputError

WRITTEN_HOURS_MAX: Final = 128
"""Files of hours that a log which is written to has open: the ones it comes back to."""
READ_HOURS_MAX: Final = 32
"""… a log that is only read. Several read the same files, each for a thread of its own."""
_WRITTEN_LOGS: Final = 2
_READ_LOGS: Final = 7
_OTHERS_MAX: Final = 128
"""Segments, definitions, catalog, tokens, staged files; listener, event loop, timer, resolver
threads, exporter of traces, the connection that is accepted to be refused; and some to spare."""
OWN_MAX: Final = (
    # Each log opens a file before it closes the one that was used least.
    _WRITTEN_LOGS * (WRITTEN_HOURS_MAX + 1) + _READ_LOGS * (READ_HOURS_MAX + 1) + _OTHERS_MAX
)
LEFT_MIN: Final = 32
"""For clients and webhooks together; with less there is no point in starting."""

log = structlog.get_logger()


def within_limit(settings: Settings) -> Settings:
    """Raise the limit of open files as far as needed; the settings as they fit into it.

    Raises InputError where nothing fits."""
    wanted = OWN_MAX + settings.connections_max + settings.webhook_connections_max
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return settings if soft == resource.RLIM_INFINITY else divided(settings, soft)


def divided(settings: Settings, allowed: int) -> Settings:
    """The settings as they fit into `allowed` descriptors; what is reduced is logged.

    Raises InputError where nothing fits."""
    asked, asked_webhooks = settings.connections_max, settings.webhook_connections_max
    left = allowed - OWN_MAX
    if left >= asked + asked_webhooks:
        return settings
    if left < LEFT_MIN:
        raise InputError(
            f"the system allows this process {allowed} open files, and it needs "
            f"{OWN_MAX + LEFT_MIN} at the least, {OWN_MAX + asked + asked_webhooks} for "
            "connections_max and webhook_connections_max as they are; raise the limit (ulimit -n, "
            "LimitNOFILE=, --ulimit nofile=)"
        )
    webhooks = min(asked_webhooks, max(left // 4, left - asked))
    connections = min(asked, left - webhooks)
    log.warning(
        "the system allows fewer open files than the settings ask for, so there will be fewer "
        "connections; raise its limit (ulimit -n, LimitNOFILE=, --ulimit nofile=)",
        allowed=allowed,
        needed=OWN_MAX + asked + asked_webhooks,
        connections_max=connections,
        webhook_connections_max=webhooks,
    )
    return settings.model_copy(
        update={"connections_max": connections, "webhook_connections_max": webhooks}
    )
