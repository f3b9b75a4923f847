"""A binary heap whose elements know where they stand, so that any of them can be removed.

Source: J. W. J. Williams, "Algorithm 232: Heapsort", CACM 1964, with the position written back into
the element at every move, as ScheduledThreadPoolExecutor's work queue does.

Cost
    push, pop and remove O(log n). Without the stored index a remove must search the array, O(n), or
    leave the element behind as garbage, as ``heapq`` users and asyncio do.

Not safe for threads.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

NOT_IN_HEAP = -1


class Indexed(Protocol):
    """The members of an element: a key that orders it, and room for its index."""

    key: tuple[int, int]
    index: int


IndexedT = TypeVar("IndexedT", bound=Indexed)


class IndexedHeap(Generic[IndexedT]):
    """A heap with the smallest key first. Keys must differ."""

    __slots__ = ("_items",)

    def __init__(self) -> None:
        self._items: list[IndexedT] = []

    def __len__(self) -> int:
        return len(self._items)

    @property
    def first(self) -> IndexedT | None:
        return self._items[0] if self._items else None

    def push(self, item: IndexedT) -> None:
        self._items.append(item)
        self._sift_up(len(self._items) - 1, item)

    def remove(self, item: IndexedT) -> None:
        """Take out an element that is in the heap, the first one or any other."""
        index = item.index
        assert self._items[index] is item, "the element belongs to another heap"
        item.index = NOT_IN_HEAP
        last = self._items.pop()
        if last is item:
            return
        # The last element fills the hole. It may be smaller than the parent there, if the hole is
        # in another branch than the one it came from; else it may only have to go down.
        if index and last.key < self._items[(index - 1) // 2].key:
            self._sift_up(index, last)
        else:
            self._sift_down(index, last)

    def _sift_up(self, index: int, item: IndexedT) -> None:
        items, key = self._items, item.key
        while index:
            parent_index = (index - 1) // 2
            parent = items[parent_index]
            if parent.key < key:
                break
            items[index] = parent
            parent.index = index
            index = parent_index
        items[index] = item
        item.index = index

    def _sift_down(self, index: int, item: IndexedT) -> None:
        items, key, count = self._items, item.key, len(self._items)
        while (child_index := 2 * index + 1) < count:
            child = items[child_index]
            if child_index + 1 < count and items[child_index + 1].key < child.key:
                child_index += 1
                child = items[child_index]
            if key < child.key:
                break
            items[index] = child
            child.index = index
            index = child_index
        items[index] = item
        item.index = index
