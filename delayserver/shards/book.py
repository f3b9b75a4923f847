"""The book of owners: who owns each shard of a cluster, as far as this process was told.

    log of a shard ──▶ its process ── a line ──▶ supervisor ── a line ──▶ other processes ──▶ book
                                                                 Links, ClusterMap ◀── on_change

The owners of a shard are counted; the number is their epoch, from 1 on. A later epoch is always
right, so lines may come twice, late, or in any order, and all books end up the same. A shard is
vacant before it has had an owner, and when one has given it up: that epoch does not come back.

Cost: below 1 µs a change, 1 µs a line. Threads: belongs to one thread; no I/O.
"""

from collections.abc import Callable

import msgspec

from delayserver.errors import InputError

Changed = Callable[[int], None]
"""Gets the number of a shard."""


class ShardOwner(msgspec.Struct, frozen=True, tag="owner"):
    """The process that owns a shard."""

    shard: int
    epoch: int
    node: str
    """The name of its machine."""
    url: str
    """Where clients reach this very process."""
    link: str
    """`host:port`, where the owners of other shards connect."""
    tunnels: bool = False
    """Whether calls may be passed on to it there, sealed."""

    def __post_init__(self) -> None:
        split_address(self.link)


class Vacancy(msgspec.Struct, frozen=True, tag="vacant"):
    """A shard that its owner of that epoch has given up, or that has had none."""

    shard: int
    epoch: int


Entry = ShardOwner | Vacancy

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Entry).decode


class OwnerBook:
    """The owner of each shard."""

    def __init__(self, count: int) -> None:
        """`count`: of shards, none of which has had an owner yet."""
        self._entries: list[Entry] = [Vacancy(shard, 0) for shard in range(count)]
        self._changed: list[Changed] = []

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The newest entry of each shard."""
        return tuple(self._entries)

    def owner(self, shard: int) -> ShardOwner | None:
        """None: it is vacant."""
        entry = self._entries[shard]
        return entry if isinstance(entry, ShardOwner) else None

    def may_own(self, shard: int, epoch: int) -> bool:
        """Whether who has that epoch owns the shard, or may do so without it being known here."""
        entry = self._entries[shard]
        return epoch > entry.epoch or (epoch == entry.epoch and isinstance(entry, ShardOwner))

    def take(self, entry: Entry) -> bool:
        """Take down who owns a shard; False: that was known, or is over."""
        if not 0 <= entry.shard < len(self._entries):
            raise InputError(f"there is no shard {entry.shard} in this cluster")
        known = self._entries[entry.shard]
        is_given_up = isinstance(known, ShardOwner) and isinstance(entry, Vacancy)
        if entry.epoch < known.epoch + (not is_given_up):
            return False
        self._entries[entry.shard] = entry
        for changed in self._changed:
            changed(entry.shard)
        return True

    def take_line(self, line: bytes) -> bool:
        """The same, of a line that `encode_line` wrote. Raises InputError."""
        try:
            entry = _decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InputError(f"a line that names no owner of a shard: {error}") from error
        return self.take(entry)

    def renewed(self) -> "OwnerBook":
        """A book that says the same, and that nobody listens to."""
        book = OwnerBook(len(self._entries))
        book._entries = list(self._entries)
        return book

    def on_change(self, changed: Changed) -> None:
        """Have `changed` called when another process owns a shard, or nobody does."""
        self._changed.append(changed)


def encode_line(entry: Entry) -> bytes:
    """One line of JSON, with its end."""
    return _encode(entry) + b"\n"


def split_address(link: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[host]:port`. Raises ValueError."""
    host, _, port = link.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ValueError(f"{link!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)
