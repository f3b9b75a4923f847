"""For how long a replica has lacked records that its log has.

    where the log ended, each time it was asked ──▶ Lag ◀── up to where all is filed

The records in the log at the moment of asking are all filed once that end is reached. So the lag is
the time since the latest moment of which that is known: no record needs to be looked at, and no
clock but the own stopwatch. It grows as well while the log does not answer, and while the replica
is busy with other work, such as a slow disk. `stuck_ms` tells whether the replica itself does not
keep up: that counts only while the log answers.

Cost: a comparison a call, and a number for each second of the lag, ASKED_MAX at most. Threads:
belongs to the thread that files; `ms` may be called by any.
"""

from collections import deque
from typing import Final

SAMPLE_MS: Final = 1000
"""Ends are kept that far apart."""
ASKED_MAX: Final = 7200
"""The number of ends that are kept; beyond that the lag may show as longer than it is."""


class Lag:
    """The lag of one replica, from the moment when it is opened."""

    def __init__(self, now_ms: int) -> None:
        self._since_ms = now_ms
        self._asked: deque[tuple[int, int]] = deque(maxlen=ASKED_MAX)
        """When the log was asked, and where it ended, while that was not filed."""

    def asked(self, asked_ms: int, end: int) -> None:
        """The log was asked at `asked_ms`, and ended before the offset `end`."""
        if not self._asked or asked_ms - self._asked[-1][0] >= SAMPLE_MS:
            self._asked.append((asked_ms, end))

    def could_not_ask(self) -> None:
        """The log did not say where it ends: from now on that is why a replica is behind."""
        self._asked.clear()

    def filed(self, offset: int) -> None:
        """All that stands before `offset` is filed."""
        while self._asked and self._asked[0][1] <= offset:
            self._since_ms, _ = self._asked.popleft()

    def ms(self, now_ms: int) -> int:
        """How long ago the replica had all, in ms."""
        return now_ms - self._since_ms

    def stuck_ms(self, now_ms: int) -> int:
        """For how long the log has answered, and something that it had is not filed, in ms."""
        return now_ms - self._asked[0][0] if self._asked else 0
