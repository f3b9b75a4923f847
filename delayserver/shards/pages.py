"""Lists of several shards as one list, a page at a time.

Each shard has its own list, in the order of its places: tuples of numbers, such as due time and
seq. The list of all is in the order of the first number, then of the shard, then of the rest:

    shard 0    (10, 1) (10, 7) (30, 2)            (10, 0, 1) (10, 0, 7) (10, 1, 4) (20, 1, 3) …
    shard 1    (10, 4) (20, 3)             ──▶

All rows stand in one order, so one place in it says where the next page begins in every shard:
a cursor needs no position for each. It names the number of shards, since it means nothing where
there are others.

A shard may end its page early. Rows that it did not show may come directly behind its page, so no
row behind that end is given, of any shard: the page of all ends there, too, and holds fewer than
were asked for, or none. The shard whose page ended first gives all of it, so every page gets
further if the shards' pages do.

Rejected: a cursor of one position for each shard. A message that is published into a shard whose
list had ended would be left out, though it is due behind the place where the reader is.

Cost: 1 µs per row. Threads: pure functions.
"""

import heapq
import re
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Final

import msgspec

from delayserver.errors import InputError
from delayserver.wire.operations import ShardPageDocument

Place = tuple[int, ...]
"""In the list of one shard."""
Spot = tuple[int, ...]
"""In the list of all: a place, and the shard as its second number."""

_CURSOR: Final = re.compile(r"[0-9]{1,20}(?:-[0-9]{1,20})+")
_by_spot = itemgetter(0)


def spot_of(shard: int, place: Place) -> Spot:
    """Where in the list of all a row of a shard is."""
    return (place[0], shard, *place[1:])


def start_of(spot: Spot, shard: int) -> Place:
    """The first place of a shard that is at the spot or behind it."""
    first, at_shard, *rest = spot
    if shard == at_shard:
        return (first, *rest)
    return (first + (shard < at_shard), *(0 for _ in rest))


def merge_pages(
    pages: Sequence[ShardPageDocument], limit: int, max_bytes: int
) -> tuple[list[msgspec.Raw], Spot | None]:
    """The page of all, from those that every shard gave from a spot on; and where to go on.

    It holds up to `limit` rows, and up to `max_bytes` of them, but one row always."""
    ends = (spot_of(n, page.following) for n, page in enumerate(pages) if page.following)
    end = min(ends, default=None)
    taken: list[msgspec.Raw] = []
    total_bytes = 0
    each = (_rows(shard, page) for shard, page in enumerate(pages))
    for spot, row in heapq.merge(*each, key=_by_spot):
        if end is not None and spot >= end:
            break
        total_bytes += len(row)
        if len(taken) == limit or (taken and total_bytes > max_bytes):
            return taken, spot
        taken.append(row)
    return taken, end


def _rows(shard: int, page: ShardPageDocument) -> Iterator[tuple[Spot, msgspec.Raw]]:
    for place, item in zip(page.places, page.items, strict=True):
        yield spot_of(shard, place), item


def write_cursor(spot: Spot, count: int) -> str:
    """A spot of the list of `count` shards as text."""
    return "-".join(map(str, (count, *spot)))


def read_cursor(text: str, count: int, numbers: int) -> Spot:
    """The spot that a cursor stands for, of a list whose places have so many numbers.

    Raises InputError if it is no cursor of this list, or one for another number of shards."""
    of_count, *spot = map(int, text.split("-")) if _CURSOR.fullmatch(text) else (0,)
    if of_count != count or len(spot) != numbers + 1 or spot[1] >= count:
        raise InputError("not a cursor of this list", "/query/cursor")
    return tuple(spot)


class PagedList(msgspec.Struct, frozen=True):
    """One of the lists."""

    name: str
    """The name of the field that holds the rows."""
    largest: Place
    """A place is not behind this one, whoever wrote the cursor."""
    cursor: Callable[[Place], str]
    """A place as a shard's own list has it in a cursor, and a server alone."""
    place: Callable[[str], Place | None]
    """The other way round; None: it is no such cursor."""

    def spot(self, cursor: str, count: int) -> Spot:
        """Where a page of the list of `count` shards begins. The cursor of a server alone is a
        place: it stands for the same place in every shard. Raises InputError."""
        if (place := self.place(cursor)) is not None:
            return spot_of(0, place)
        return read_cursor(cursor, count, len(self.largest))

    def cursor_of(self, spot: Spot, shard: int) -> str:
        """Where in a shard's own list a page has to begin."""
        return self.cursor(tuple(map(min, start_of(spot, shard), self.largest)))
