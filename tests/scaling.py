"""How the processor time of a function grows with the text that it is given.

    assert growth(read, lambda n: b'"' + b'\\\\"' * n, 4_000) < GROWTH_MAX

A client chooses the text, so no text may cost more than in proportion to its length. Times on a
shared machine are noise, so two processor times of the same thread are compared: of a text, and of
one that is TIMES as long. In proportion the ratio is TIMES; where each place begins again it is
TIMES squared.
"""

import time
from collections.abc import Callable
from typing import Final, TypeVar

Text = TypeVar("Text", bytes, str)
TIMES: Final = 8
GROWTH_MAX: Final = 4 * TIMES
_TRIES: Final = 3
_LEAST_S: Final = 0.0005
"""Less is as much as the clock and the caches of the processor make out."""


def growth(work: Callable[[Text], object], text: Callable[[int], Text], n: int) -> float:
    """How many times as long `work` takes for `text(TIMES * n)` as for `text(n)`."""
    return _time_s(work, text(TIMES * n)) / max(_LEAST_S, _time_s(work, text(n)))


def _time_s(work: Callable[[Text], object], text: Text) -> float:
    times_s = []
    for _ in range(_TRIES):
        begun_s = time.thread_time()
        work(text)
        times_s.append(time.thread_time() - begun_s)
    return min(times_s)
