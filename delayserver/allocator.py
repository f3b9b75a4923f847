"""How the C library keeps memory that was freed, and when it goes back to the system.

A batch, a second's worth that is filed, an hour that is loaded: each needs buffers of up to some
megabytes for a moment. Given back one by one, every page of them costs a fault when it is taken
again: a quarter of what a batch costs. So they are kept, and what is free goes back once nothing
has happened for a while; not under load, since that is a pause of some ms.

Cost: at most TRIM_BYTES of free memory while there is work, and what is between pieces in use.
Threads: belongs to the event loop, which `release` does not run on.
"""

import ctypes
from collections.abc import Callable

MMAP_BYTES = 32 * 1024 * 1024
"""Buffers that are larger are mapped, and given back at once. (Else glibc takes the largest that
was ever freed, and never less than before.)"""
TRIM_BYTES = 64 * 1024 * 1024
RELEASE_COUNT = 10_000
"""Fewer messages leave no free memory worth giving back."""

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def tune_allocator() -> Callable[[], None]:
    """Have the C library keep what is freed; returns what gives it back to the system.

    A C library without these calls is left as it is."""
    library = ctypes.CDLL(None)
    try:
        library.mallopt(_M_MMAP_THRESHOLD, MMAP_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, TRIM_BYTES)
        trim = library.malloc_trim
    except AttributeError:
        return lambda: None

    def release_memory() -> None:
        trim(0)

    return release_memory


class Idleness:
    """Says when enough has happened, and nothing since the last look."""

    def __init__(self) -> None:
        self._at_last_look: tuple[int, ...] = ()
        self._at_release: tuple[int, ...] = ()

    def look(self, *counts: int) -> bool:
        """`counts`: of messages, as many at each look; what they count does not matter, only that
        they change when something happens. True: free memory had better be given back."""
        was_idle, self._at_last_look = counts == self._at_last_look, counts
        before = self._at_release or (0,) * len(counts)
        changes = (abs(now - then) for now, then in zip(counts, before, strict=True))
        if not was_idle or sum(changes) < RELEASE_COUNT:
            return False
        self._at_release = counts
        return True
