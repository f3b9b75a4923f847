"""The horizon: the rows that have fallen due so far, also if the clock was set back since.

A row falls due when its time has come, or when it is accepted if that is later. So a mark tells
which rows have: all rows up to a seq that are due before a moment. While the clock goes on one mark
is enough, the newest seq and now. If it is set back, that of before stays until the clock has
passed it:

    12:00, seq 100                  (100, 12:00)
    set back to 10:00, seq 107      (100, 12:00) (107, 10:00)
    12:01, seq 230                  (230, 12:01)

A message that was accepted at noon for 11:00 fell due then, and does not once more. One that is
accepted after the clock was set back has not fallen due. A subscription keeps the marks of the
moment when it was made. They and the row decide whether it gets a message, with the same result
after a restart.

Cost: one comparison when the clock goes on. Threads: belongs to the event loop.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

MARKS_MAX = 8
"""A clock that was set back more often leaves coarser marks: they count a little more as due."""


class Mark(NamedTuple):
    """Rows up to `seq` that are due before `before_ms` have fallen due."""

    seq: int
    before_ms: int


class Horizon:
    """The marks of now, the newest last: each later one has a higher seq and an earlier time."""

    def __init__(self, marks: Iterable[Mark] = ()) -> None:
        self._marks: list[Mark] = []
        for mark in sorted(marks):
            self.advance(*mark)

    @property
    def marks(self) -> tuple[Mark, ...]:
        """The marks of all rows that have fallen due."""
        return tuple(self._marks)

    @property
    def before_ms(self) -> int:
        """Nothing that is due at this moment or later has fallen due; 0: nothing at all has."""
        return self._marks[0].before_ms if self._marks else 0

    def advance(self, seq: int, before_ms: int) -> None:
        """All rows up to `seq`, no lower than in any call before, that are due before that moment
        have fallen due."""
        marks = self._marks
        while marks and marks[-1].before_ms <= before_ms:
            marks.pop()
        marks.append(Mark(seq, before_ms))
        if len(marks) > MARKS_MAX:
            marks[:2] = [Mark(marks[1].seq, marks[0].before_ms)]

    def roll_back(self, seq: int) -> None:
        """Records after `seq` were undone: their seqs are given again."""
        self._marks = [Mark(min(mark.seq, seq), mark.before_ms) for mark in self._marks]


def marks_of(seqs: np.ndarray, due_ms: np.ndarray) -> list[Mark]:
    """The marks that some rows make which have fallen due."""
    order = np.lexsort((due_ms, seqs))
    seqs, due_ms = seqs[order], due_ms[order]
    # Those that no newer row is due after.
    latest_ms = np.maximum.accumulate(due_ms[::-1])[::-1]
    keep = np.ones(len(due_ms), bool)
    keep[:-1] = due_ms[:-1] > latest_ms[1:]
    pairs = zip(seqs[keep].tolist(), due_ms[keep].tolist(), strict=True)
    return [Mark(seq, last_ms + 1) for seq, last_ms in pairs]


def has_fallen_due(marks: Sequence[Mark], seq: int, due_ms: int) -> bool:
    """Whether a row had fallen due."""
    return any(seq <= mark.seq and due_ms < mark.before_ms for mark in marks)


def fallen_due(marks: Sequence[Mark], seqs: np.ndarray, due_ms: np.ndarray) -> np.ndarray:
    """As `has_fallen_due`, of many rows."""
    fallen = np.zeros(len(seqs), bool)
    for mark in marks:
        fallen |= (seqs <= mark.seq) & (due_ms < mark.before_ms)
    return fallen
