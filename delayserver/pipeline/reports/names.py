"""One number for each name, over all shards: the key by which reports add up.

Each shard numbers subjects and subscriptions by itself, so 3 is one name here and another there. A
subscription that was deleted and made again has two numbers under one name, and keeps two: the
first of a shard goes with the first of the others. If there is one shard, its own numbers are used.

Messages that go where they say themselves (`to`) have many numbers and one name, and count under
the first.

Cost: the small tables of each catalog. Threads: values.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from delayserver.pipeline.states.snapshot import Directory, read_subscriptions
from delayserver.records.direct import DIRECT_FIRST_ID, DIRECT_NAME
from delayserver.records.subscriptions import Subscription
from delayserver.records.tables import read_subjects


@dataclass(frozen=True, slots=True)
class ShardNames:
    """The names of a shard, by its own numbers."""

    subjects: dict[int, str]
    subscriptions: dict[int, str]

    def subscription(self, number: int) -> str | None:
        """The name of a subscription, by any of its numbers."""
        return self.subscriptions.get(min(number, DIRECT_FIRST_ID))


def read_shard_names(directory: Directory) -> ShardNames:
    """The names in its catalog; a subscription that was deleted is marked as such."""
    with directory.catalog() as catalog:
        return shard_names_of(read_subjects(catalog), read_subscriptions(catalog))


def shard_names_of(
    subjects: Mapping[int, str], subscriptions: Mapping[int, Subscription]
) -> ShardNames:
    """The same, from tables that were read already."""
    names = {
        number: one.name + (" (deleted)" if one.deleted else "")
        for number, one in sorted(subscriptions.items())
    }
    return ShardNames(dict(subjects), {**names, DIRECT_FIRST_ID: DIRECT_NAME})


class SharedNumbers:
    """Names that several shards have numbers for."""

    def __init__(self, of_shards: Mapping[int, Mapping[int, str]]) -> None:
        """`of_shards`: by shard, names by their numbers."""
        self.names: dict[int, str] = {}
        self._numbers: dict[tuple[int, int], int] | None = None
        if len(of_shards) == 1:
            (names,) = of_shards.values()
            self.names = dict(names)
            return
        self._numbers = {}
        known: dict[tuple[str, int], int] = {}
        for shard, names in of_shards.items():
            seen: Counter[str] = Counter()
            for number, name in sorted(names.items()):
                shared = known.setdefault((name, seen[name]), len(known) + 1)
                seen[name] += 1
                self.names[shared] = name
                self._numbers[shard, number] = shared

    @property
    def pairs(self) -> list[tuple[int, int, int]] | None:
        """Each shard, a number of that shard, and the shared one. None: all are its own."""
        if self._numbers is None:
            return None
        return [(shard, number, shared) for (shard, number), shared in self._numbers.items()]

    def of_shard(self, shard: int, numbers: np.ndarray) -> np.ndarray:
        """The shared numbers in place of those of a shard; 0: without a name."""
        if self._numbers is None:
            return numbers
        distinct, places = np.unique(numbers, return_inverse=True)
        shared = [self._numbers.get((shard, number), 0) for number in distinct.tolist()]
        return np.array(shared, np.int64)[places]
