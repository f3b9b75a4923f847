"""What a process of the server tells whoever has started it: lines, and at last its exit status.

Cost: a system call a line. Threads: any.
"""

import contextlib
import os
import sys

EXIT_REFUSED = 1
EXIT_FATAL = 70
EXIT_FENCED = 75
"""Start it again: it was in office, and may not be any more (EX_TEMPFAIL)."""
RECOVERED = "recovered"
READY = "ready"
"""What a shard tells its supervisor: it serves; and it has met the others."""


def tell_line(line: bytes) -> None:
    """Give the supervisor a line."""
    with contextlib.suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), line)


def tell_supervisor(word: str) -> None:
    """How far this shard has come: a line on standard output.

    A supervisor that has ended hears nothing; that it has is seen elsewhere (`on_parent_gone`)."""
    tell_line(f"{word}\n".encode())
