"""The ended rows of an hour, collected in sorted columns: removed rows, and rows that are settled,
with their subscriptions.

A row that went to several subscriptions may be settled for some of them only. A row of the dispatch
file without a subscription says that a row of one subscription was dropped, since others had the
message or were to get it. It ends that row alone.

Cost: 8 bytes for each row that was removed, 16 for each that is settled, and 0.1 µs to sort them.
Threads: belongs to one thread.
"""

import numpy as np
from numpy.typing import NDArray

from storage.scratch import Scratch

PART_ROWS = 65_536
"""Seqs that are put together before they are sorted."""
_NOTHING = np.empty(0, np.uint64)


class Ended:
    """Seqs of schedule rows of one hour. All `add_` come before the first question."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        self._removed = _Seqs(scratch)
        self._by_somebody = _Seqs(scratch)
        self._settled: dict[int, _Seqs] = {}

    def add_removed(self, seqs: NDArray[np.uint64]) -> None:
        """These were cancelled, or moved."""
        self._removed.add(seqs)

    def add_settled(self, seqs: NDArray[np.uint64], subscription_ids: NDArray[np.uint32]) -> None:
        """Each of these is settled for one subscription (both of shape n; 0: it was dropped)."""
        if not len(seqs):
            return
        self._by_somebody.add(seqs[subscription_ids != 0])
        order = np.argsort(subscription_ids, kind="stable")
        ascending = subscription_ids[order]
        cuts = np.flatnonzero(np.diff(ascending)) + 1
        numbers = ascending[np.concatenate([[0], cuts])].tolist()
        for number, here in zip(numbers, np.split(seqs[order], cuts), strict=True):
            if number not in self._settled:
                self._settled[number] = _Seqs(self._scratch)
            self._settled[number].add(here)

    @property
    def removed(self) -> NDArray[np.uint64]:
        """The seqs of the removed rows, in order."""
        return self._removed.ascending()

    @property
    def by_somebody(self) -> NDArray[np.uint64]:
        """The seqs of the rows that are settled for at least one subscription, in order."""
        return self._by_somebody.ascending()

    def by(self, subscription_id: int) -> NDArray[np.uint64]:
        """The seqs that are settled for this subscription, in order; for 0: the dropped ones."""
        settled = self._settled.get(subscription_id)
        return _NOTHING if settled is None else settled.ascending()


class _Seqs:
    """Seqs that come in small arrays, and end as one that is sorted."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        self._parts: list[NDArray[np.uint64]] = []
        self._fresh: list[NDArray[np.uint64]] = []
        self._fresh_count = 0
        self._ascending: NDArray[np.uint64] | None = None

    def add(self, seqs: NDArray[np.uint64]) -> None:
        assert self._ascending is None
        self._fresh.append(seqs.copy())  # not a column of something larger
        self._fresh_count += len(seqs)
        if self._fresh_count >= PART_ROWS:
            self._collect()

    def _collect(self) -> None:
        self._parts.append(self._scratch.join(self._fresh, np.uint64))
        self._fresh, self._fresh_count = [], 0

    def ascending(self) -> NDArray[np.uint64]:
        if self._ascending is None:
            self._collect()
            self._ascending = self._scratch.join(self._parts, np.uint64)
            self._ascending.sort()
            self._parts = []
        return self._ascending


def is_among_sorted(values: NDArray[np.uint64], ascending: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Which values (shape n) are in a sorted array (shape m): shape n. O(n log m)."""
    if not len(ascending):
        return np.zeros(len(values), bool)
    at = np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)
    found: NDArray[np.bool_] = ascending[at] == values
    return found
