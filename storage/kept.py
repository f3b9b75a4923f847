"""A cache of values that were read and may be wanted again, bounded by its bytes.

It keeps the values that were used last. An entry counts as its bytes, plus ENTRY_BYTES for the
memory that Python and NumPy need besides. One that is larger than the bound is kept alone.

Cost: O(1) per call, and per entry that goes. Threads: one.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Final, Generic, TypeVar

ENTRY_BYTES: Final = 512

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class BoundedCache(Generic[_Key, _Value]):
    """Values by key, of at most `max_bytes` together, `max_count` of them; at least the newest."""

    def __init__(self, max_bytes: int, max_count: int | None = None) -> None:
        self.total_bytes = 0
        self._max_bytes = max_bytes
        self._max_count = max_count
        self._entries: OrderedDict[_Key, tuple[_Value, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[_Key]:
        """The keys, the one first that goes first."""
        return iter(self._entries)

    def get(self, key: _Key) -> _Value | None:
        """The value of a key, which counts as used now; None where it is not kept."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: _Key, value: _Value, value_bytes: int) -> None:
        """Keep a value in place of the key's old one. The least recently used values go."""
        self.pop(key)
        entry_bytes = value_bytes + ENTRY_BYTES
        self._entries[key] = value, entry_bytes
        self.total_bytes += entry_bytes
        while len(self._entries) > 1 and self._is_over():
            self.total_bytes -= self._entries.popitem(last=False)[1][1]

    def pop(self, key: _Key) -> None:
        """Forget a key, if it is kept."""
        _, entry_bytes = self._entries.pop(key, (None, 0))
        self.total_bytes -= entry_bytes

    def _is_over(self) -> bool:
        if self._max_count is not None and len(self._entries) > self._max_count:
            return True
        return self.total_bytes > self._max_bytes
