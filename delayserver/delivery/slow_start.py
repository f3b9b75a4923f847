"""Slow start: how fast the requests of one queue that are out may become more.

    AT_ONCE leave ── each answer: one more at once ── without answers: one more each millisecond

Requests that leave together end together where the receiver does not answer: 900 that time out in
the same turn of the event loop are 0.2 s of work, for which every other subscription waits. So a
queue lets AT_ONCE requests leave, and from then on each answer lets another one leave, as in the
slow start of TCP (RFC 5681). Without answers their number grows with time. A receiver that answers
hardly feels it: of 10,000 messages due at once, each of which it takes 100 ms to answer, 1,000 were
sent after half a second. Requests to one that hangs leave a millisecond apart, and so time out.

Rejected: a smaller share of the connections for a receiver that does not answer. One that takes 10
seconds for each message looks the same, and wants many at once.

Cost: some additions for a pump; nothing runs without a request. Threads: belongs to the event loop.
Time is an argument, from a clock that nothing sets.
"""

from typing import Final

AT_ONCE: Final = 32
"""Requests that may leave at once, at first and after a while in which few left."""
LOOK_MS: Final = 2
"""A queue that has no room is looked at again after so long: then it has room for as many."""


class SlowStart:
    """Has room for AT_ONCE requests in the beginning."""

    __slots__ = ("_room", "_seen_ms")

    def __init__(self) -> None:
        self._room = AT_ONCE
        self._seen_ms: int | None = None

    def room(self, present_ms: int) -> int:
        """How many requests may leave now."""
        passed_ms = 0 if self._seen_ms is None else max(0, present_ms - self._seen_ms)
        self._seen_ms = present_ms
        if self._room < AT_ONCE:
            self._room = min(AT_ONCE, self._room + passed_ms)
        return self._room

    def begin(self, count: int) -> None:
        """So many leave, no more than there was room for."""
        self._room -= count
        assert self._room >= 0, self._room

    def on_answered(self, count: int = 1) -> None:
        """So many requests were answered, or have not left after all."""
        self._room += count
