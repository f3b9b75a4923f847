"""Watch keys: which messages an event for a key completes.

A message may watch up to eight keys. "Order 1001 was paid" is then one event, and it cancels the
reminder, the auto-close and the coupon's expiry together, or fires what waited for it
(`delayserver.decisions.events`). This is the index: key → messages, the young ones in an overlay
until a checkpoint has them in the catalog, as with everything that is decided on the event loop.

    table WATCHES   length of the key u16 │ key │ message seq u64  →  published due time, on_event

It names messages, and does not follow them: where one is now, and whether it still waits, is asked
of `Messages.locate`. An entry disappears with the event that used it, and with its message.

Cost: O(1) per key of a message; a look-up scans as many entries of one key as it asks for.
Threads: belongs to the event loop; the functions are pure.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from delayserver.decisions.group import Group
from delayserver.decisions.overlay import Overlay
from delayserver.records.message import Watch
from delayserver.records.tables import WATCH_SEQ, WATCH_VALUE, watch_key, watch_prefix
from storage.catalog import Catalog, Table

WATCHES_MAX = 8
"""Keys that one message may watch."""


class Watcher(NamedTuple):
    """A message that watches a key: what its id says, and what is to be done."""

    seq: int
    due_ms: int
    on_event: int


_seq: Callable[[Watcher], int] = attrgetter("seq")


class _Fresh(Overlay[str, list[Watcher]]):
    """An overlay of lists, which only grow until a checkpoint covers them."""

    def add(self, group: Group, key: str, watcher: Watcher) -> None:
        watchers = self._newest.values.setdefault(key, [])
        watchers.append(watcher)
        self._newest.last_seq = watcher.seq
        group.undo.append(lambda: self._take_back(watchers, watcher))

    @staticmethod
    def _take_back(watchers: list[Watcher], watcher: Watcher) -> None:
        # Undone in reverse order.
        assert watchers[-1] is watcher
        watchers.pop()

    def of(self, key: str, from_seq: int, most: int) -> Iterator[Watcher]:
        for generation in self._generations:
            watchers = generation.values.get(key, [])
            start = bisect_left(watchers, from_seq, key=_seq)
            yield from watchers[start : start + most]


class Watches:
    """The index of watch keys."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._fresh = _Fresh()

    def add(self, group: Group, seq: int, due_ms: int, watch: Watch) -> None:
        """A message of the open group watches these keys."""
        watcher = Watcher(seq, due_ms, watch.on_event)
        for key in watch.keys:
            self._fresh.add(group, key, watcher)

    def of(self, key: str, from_seq: int, most: int) -> list[Watcher]:
        """Messages that were published with that watch key and that no event for it has completed,
        settled ones among them; in the order of their publishing, the first ones from a seq on."""
        prefix = watch_prefix(key)
        pairs = self._catalog.scan(Table.WATCHES, watch_key(key, from_seq), prefix=prefix)
        found = {
            WATCH_SEQ.unpack_from(name, len(prefix))[0]: WATCH_VALUE.unpack(value)
            for name, value in islice(pairs, most)
        }
        watchers = {seq: Watcher(seq, due_ms, on) for seq, (due_ms, on) in found.items()}
        watchers |= {watcher.seq: watcher for watcher in self._fresh.of(key, from_seq, most)}
        return [watchers[seq] for seq in sorted(watchers)[:most]]

    def prune(self, through_seq: int) -> None:
        """The catalog holds everything up to `through_seq`."""
        self._fresh.prune(through_seq)
