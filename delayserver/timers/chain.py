"""An intrusive doubly linked list, of which the buckets of all wheels are made.

The links live in the handle itself, so a timer costs one object, and it can be unlinked with the
handle alone, from whichever list it is in, in O(1). A list is a ring through a sentinel, so
neither end is a special case. Every operation here is O(1) but iteration.

Rejected: a ``dict`` or ``deque`` for each bucket. A dict costs a hash table for each of the
thousands of buckets that hold one timer; a deque cannot give up an element in its middle.

Not safe for threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar, cast

from delayserver.timers.interface import Callback, Handle, spent


class ChainEntry(Handle):
    """A handle that can stand in one chain."""

    __slots__ = ("due_tick", "next", "prev")

    def __init__(self, callback: Callback, due_tick: int) -> None:
        self.callback = callback
        self.due_tick = due_tick
        self.prev: ChainEntry = NOWHERE
        self.next: ChainEntry = NOWHERE

    @property
    def linked(self) -> bool:
        """Whether the entry stands in a chain."""
        return self.next is not NOWHERE

    def unlink(self) -> None:
        """Take the entry out of the chain in which it stands."""
        prev, next = self.prev, self.next
        prev.next = next
        next.prev = prev
        # An entry that its caller keeps must not keep its old neighbours.
        self.prev = self.next = NOWHERE


# An unlinked entry points to this. With None in its place every access to a link would need a check
# for None first, in the hottest lines of the package.
NOWHERE: ChainEntry = ChainEntry.__new__(ChainEntry)

EntryT = TypeVar("EntryT", bound=ChainEntry)


class Chain(ChainEntry, Generic[EntryT]):
    """A list of entries in the order of their arrival. The object is its own sentinel."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(spent, -1)
        self.prev = self.next = self

    def append(self, entry: EntryT) -> None:
        """Put an unlinked entry at the end."""
        last = self.prev
        entry.prev = last
        entry.next = self
        last.next = entry
        self.prev = entry

    def pop_first(self) -> EntryT | None:
        """Unlink and return the first entry; None if the chain is empty."""
        first = self.next
        if first is self:
            return None
        first.unlink()
        return cast(EntryT, first)

    def take_all(self, other: Chain[EntryT]) -> None:
        """Move all entries of ``other`` to the end of this chain."""
        first = other.next
        if first is other:
            return
        last, end = other.prev, self.prev
        end.next = first
        first.prev = end
        last.next = self
        self.prev = last
        other.prev = other.next = other

    def __bool__(self) -> bool:
        return self.next is not self

    def __iter__(self) -> Iterator[EntryT]:
        """All entries in order. The one just handed out may be unlinked or moved meanwhile."""
        entry = self.next
        while entry is not self:
            following = entry.next
            yield cast(EntryT, entry)
            entry = following
