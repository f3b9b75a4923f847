"""The lines that a process of the server sends to its supervisor, and at last its exit status.

The lines are written by a thread of their own: a supervisor that stands still holds no shard, and
one that has ended hears nothing, which is seen elsewhere (`on_parent_gone`).

Cost: 3 µs a line. Threads: any.
"""

import atexit
import sys
from functools import cache
from typing import Final

from delayserver.log_writer import LogWriter

EXIT_REFUSED = 1
EXIT_FATAL = 70
EXIT_FENCED = 75
"""Start it again: it was in office, and may not be any more (EX_TEMPFAIL)."""
RECOVERED = "recovered"
READY = "ready"
"""Lines of a shard to its supervisor: it serves; and it has met the others."""


LAST_WORDS_S: Final = 1.0
"""The end of a process waits so long for its last lines."""


@cache
def _supervisor() -> LogWriter:
    writer = LogWriter(sys.stdout.fileno(), say_lost=lambda count: "")
    atexit.register(writer.drain, LAST_WORDS_S)
    return writer


def tell_line(line: bytes) -> None:
    """Give the supervisor a line."""
    _supervisor().write(line.decode())


def tell_supervisor(word: str) -> None:
    """How far this shard has come: a line on standard output."""
    tell_line(f"{word}\n".encode())
