"""Processes that somebody else has started, as the kernel lists them."""

import contextlib
from pathlib import Path


def children(pid: int) -> list[int]:
    """The processes that the threads of another one have started."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """All processes below another one."""
    below = children(pid)
    return below + [one for child in below for one in descendants(child)]


def runs(pid: int, *words: str) -> bool:
    """Whether a process is one of such a command."""
    with contextlib.suppress(OSError):
        return all(word in Path(f"/proc/{pid}/cmdline").read_text() for word in words)
    return False
