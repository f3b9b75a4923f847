"""Watch keys: which messages an event for a key completes.

A message may watch up to eight keys. "Order 1001 was paid" is then one event, and it cancels the
reminder, the auto-close and the coupon's expiry together, or fires the message that waited for it
(`delayserver.decisions.events`). This is the index: key → messages, the young ones in an overlay
until a checkpoint has them in the catalog, as with everything that is decided on the event loop.

    table WATCHES   length of the key u16 │ key │ message seq u64  →  published due time, on_event

It names messages, and does not follow them: `Messages.locate` tells where one is now, and whether
it still waits. An entry disappears with the event that used it, with its message, and when an event
finds that its message is settled: then nothing can complete it any more (`let_go`). So an event
does not walk over all messages that were delivered in a day with a key such as `user:7`.

Cost: O(1) per key of a message; a look-up scans as many entries of one key as it asks for.
Threads: belongs to the event loop; the functions are pure.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from delayserver.decisions.group import Group
from delayserver.decisions.overlay import Overlay
from delayserver.records.message import Watch
from delayserver.records.tables import WATCH_SEQ, WATCH_VALUE, watch_key, watch_prefix
from storage.catalog import Catalog, Table


class Watcher(NamedTuple):
    """A message that watches a key: the fields of its id, and the action of an event."""

    seq: int
    due_ms: int
    on_event: int


_seq: Callable[[Watcher], int] = attrgetter("seq")


class _Fresh(Overlay[str, list[Watcher]]):
    """An overlay of lists, which only grow until a checkpoint covers them."""

    def add(self, pairs: Iterable[tuple[str, Watcher]]) -> Callable[[], None]:
        """Add watchers under keys; returns how to take them back."""
        values = self._newest.values
        added: list[list[Watcher]] = []
        for key, watcher in pairs:
            watchers = values.get(key)
            if watchers is None:
                watchers = values[key] = []
            watchers.append(watcher)
            added.append(watchers)
            self._newest.last_seq = watcher.seq

        def take_back() -> None:
            for watchers in reversed(added):
                watchers.pop()

        return take_back

    def of(self, key: str, from_seq: int, most: int) -> Iterator[Watcher]:
        for generation in self._generations:
            watchers = generation.values.get(key, [])
            start = bisect_left(watchers, from_seq, key=_seq)
            yield from watchers[start : start + most]


class Watches:
    """The index of watch keys."""

    def __init__(
        self, catalog: Catalog, forget: Callable[[list[bytes]], None] = lambda keys: None
    ) -> None:
        """`forget`: has keys of the table WATCHES removed with a checkpoint to come."""
        self._catalog = catalog
        self._forget = forget
        self._fresh = _Fresh()
        self._settled_before: dict[str, int] = {}
        """By key, the seq before which all its messages are settled, until the next checkpoint has
        removed them."""

    def add(self, group: Group, seq: int, due_ms: int, watch: Watch) -> None:
        """A message of the open group watches these keys."""
        self.add_many(group, [(seq, due_ms, watch)])

    def add_many(self, group: Group, messages: Iterable[tuple[int, int, Watch | None]]) -> None:
        """Messages of the open group, each with its seq and due time, watch keys; None: none."""
        group.undo.append(
            self._fresh.add(
                (key, Watcher(seq, due_ms, watch.on_event))
                for seq, due_ms, watch in messages
                if watch is not None
                for key in watch.keys
            )
        )

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

    def let_go(self, key: str, settled: list[Watcher], before_seq: int) -> None:
        """These messages watch the key and are settled for good. Before `before_seq` no other
        message watches it (0: it is unknown)."""
        if settled:
            self._forget([watch_key(key, watcher.seq) for watcher in settled])
        if before_seq:
            self._settled_before[key] = before_seq

    def settled_before(self, key: str) -> int:
        """A seq before which no message that watches the key can be completed."""
        return self._settled_before.get(key, 0)

    def prune(self, through_seq: int) -> None:
        """The catalog holds everything up to `through_seq`."""
        self._settled_before.clear()
        self._fresh.prune(through_seq)
