"""The lines of the log about dead letters: one for each, and one for all that are too many.

    dead, dead, … ──▶ LINES_MAX lines ──▶ counted ──▶ a second after the first: "more dead letters"

A million messages that expire in a minute would be a million lines, which no reader wants and which
cost more than recording the dead letters does. `GET …/dead-letters` has each of them.

Cost: some 60 µs for a line, 1 µs for a dead letter that is only counted. Threads: belongs to the
event loop.
"""

from collections import Counter
from typing import Final

import structlog

from delayserver.records.message import DueDelivery
from delayserver.records.subscriptions import Registry
from delayserver.server.sink_runner import about
from delayserver.timers.timeouts import Timeouts

LINES_MAX: Final = 100
"""Lines in SPAN_MS."""
SPAN_MS: Final = 1000

log = structlog.get_logger()


class DeadLetterLog:
    """Says which deliveries were given up, and why."""

    def __init__(self, registry: Registry, timeouts: Timeouts) -> None:
        self._registry = registry
        self._timeouts = timeouts
        self._lines = 0
        self._unsaid: Counter[tuple[int, str]] = Counter()
        """How many were only counted, by subscription and reason."""

    def given_up(self, delivery: DueDelivery, reason: str) -> None:
        """A delivery has no attempt left."""
        if not self._lines:
            self._timeouts.add(self._end_span, SPAN_MS)
        if self._lines < LINES_MAX:
            self._lines += 1
            log.warning("dead letter", reason=reason, **about(delivery, self._registry))
        else:
            self._unsaid[delivery.subscription_id, reason] += 1

    def _end_span(self) -> None:
        # A reason may hold words of the receiver, and so be another one for each.
        said = self._unsaid.most_common(LINES_MAX)
        for (subscription_id, reason), count in said:
            found = self._registry.by_id(subscription_id)
            name = None if found is None else found.name
            log.warning("more dead letters", count=count, subscription=name, reason=reason)
        if others := self._unsaid.total() - sum(count for _, count in said):
            log.warning("more dead letters", count=others, subscription=None, reason="various")
        self._unsaid.clear()
        self._lines = 0
