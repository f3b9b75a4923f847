"""A replicated log engine in memory with chance: answers are lost, reads come late.

    append   there and answered; there, and nobody is told; not there, and nobody is told; slow
    read     all that is there, a part of it, or nothing yet
    end      where the log ends; or the engine cannot say so now

Cost: as `tests.world.storage.engine`. Threads: none.
"""

import random
from collections import Counter
from collections.abc import Sequence

from tests.world.server import SimulatedClock
from tests.world.storage.engine import AppendOutcome, MemoryLog


class Chance:
    """What may happen to the calls of an engine."""

    def __init__(self, rng: random.Random, clock: SimulatedClock, counts: Counter[str]) -> None:
        self.is_calm = False
        """Nothing fails, and nothing is late."""
        self._rng = rng
        self._clock = clock
        self._counts = counts

    def happens(self, chance: float) -> bool:
        """Whether something of this probability happens."""
        return not self.is_calm and self._rng.random() < chance

    def outcome(self) -> AppendOutcome:
        """What becomes of an append; it may take long."""
        if self.happens(0.02):
            self._counts["slow appends"] += 1
            self._clock.move(self._rng.choice((1, 30, 700, 3000)))
        if not self.happens(0.01):
            return AppendOutcome.ANSWERED
        self._counts["appends without an answer"] += 1
        return self._rng.choice((AppendOutcome.UNANSWERED, AppendOutcome.LOST))

    def visible(self, count: int) -> int:
        """How many of so many records come with a read."""
        if not count or not self.happens(0.2):
            return count
        self._counts["late reads"] += 1
        return self._rng.randrange(count)


class ChancyLog(MemoryLog):
    """One process's way to a log."""

    def __init__(self, name: str, chance: Chance, origin: "ChancyLog | None" = None) -> None:
        super().__init__(name, None if origin is None else origin._records)
        self._chance = chance

    def another(self) -> "ChancyLog":
        return ChancyLog(self.name, self._chance, self)

    def append(self, records: Sequence[bytes]) -> list[int | None]:
        self.outcome = self._chance.outcome()
        return super().append(records)

    def read(self, offset: int, wait_s: float) -> list[tuple[int, bytes]]:
        found = super().read(offset, 0)
        visible = self._chance.visible(len(found))
        if visible < len(found):
            self.place = found[visible][0]
        return found[:visible]

    def end(self) -> int | None:
        return None if self._chance.happens(0.03) else super().end()

    @property
    def length(self) -> int:
        """Where the log ends, whatever the engine says."""
        return self._records.end

    def lose_tail(self, end: int) -> int:
        """The engine has lost power, and what stood from `end` on; how many records that is."""
        lost = self._records.end - end
        if lost > 0:
            del self._records.kept[end - self._records.first :]
        return max(0, lost)
