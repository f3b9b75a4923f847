"""How deep the tests of a tier look: at all that they know, or at a sample of it.

A tier is a folder of tests, e.g. `simulation`. `DELAYSERVER_WHOLE` names the tiers that are run as
a whole: their names with commas between them, `all`, or a name that no tier has (`none`). Without
the variable every tier is whole, so `pytest tests/simulation` leaves nothing out.

    for offset in every(7, offsets(path)):    # a sample: the first, the eighth, the fifteenth …

A sample is the same in every run, so a test that failed fails again. What a test counts is counted
of the sample: compare with `len(seeds)`, not with a number that only the whole can reach.
"""

import os
from collections.abc import Iterable
from typing import TypeVar

VARIABLE = "DELAYSERVER_WHOLE"
SIMULATION = "simulation"

Item = TypeVar("Item")


def is_whole(folder: str) -> bool:
    """Whether this tier is run as a whole."""
    named = os.environ.get(VARIABLE)
    return named is None or not {folder, "all"}.isdisjoint(map(str.strip, named.split(",")))


def every(n: int, items: Iterable[Item], tier: str = SIMULATION) -> list[Item]:
    """All items if the tier is run as a whole, else every n-th of them and always the first."""
    return list(items)[:: 1 if is_whole(tier) else n]
