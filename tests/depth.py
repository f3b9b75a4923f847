"""How deep the tests of a tier look: at all that they know, or at a sample of it.

A tier is a folder of tests, e.g. `simulation`. `WHOLE_TIERS` names the tiers that are run as
a whole: their names with commas between them, `all`, or a name that no tier has (`none`). Without
the variable every tier is whole, so `pytest tests/simulation` leaves nothing out.

    for offset in every(7, offsets(path)):    # a sample: the first, the eighth, the fifteenth …

A sample is the same in every run, so a test that failed fails again. A test that counts what has
happened asks `least` how much there has to be of it. A sample of worlds may lack what is rare, and
which worlds have it changes with the code, so `missing_max` lets a sample lack some of it.
"""

import os
from collections.abc import Iterable, Sized
from typing import TypeVar

VARIABLE = "WHOLE_TIERS"
SIMULATION = "simulation"

Item = TypeVar("Item")


def is_whole(folder: str) -> bool:
    """Whether this tier is run as a whole."""
    named = os.environ.get(VARIABLE)
    return named is None or not {folder, "all"}.isdisjoint(map(str.strip, named.split(",")))


def every(n: int, items: Iterable[Item], tier: str = SIMULATION) -> list[Item]:
    """All items if the tier is run as a whole, else every n-th of them and always the first."""
    return list(items)[:: 1 if is_whole(tier) else n]


def least(count: int, tier: str = SIMULATION) -> int:
    """How often something has to happen: `count` times in the whole, once in a sample."""
    return count if is_whole(tier) else 1


def missing_max(kinds: Sized, tier: str = SIMULATION) -> int:
    """How many of these kinds of things need not happen at all: a quarter of them in a sample."""
    return 0 if is_whole(tier) else len(kinds) // 4
