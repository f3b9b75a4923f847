"""SIGHUP: read the tokens and certificates again, and go on.

Other daemons take it for that, an operator's `systemctl reload` sends it, and so does a terminal
that is closed. Without a handler it ends a process. So it is blocked in all threads from the first
line of the command on, and a thread of its own takes it: at the start, while a shard stands by,
while it serves, and while it stops.

    delayserver serve ── `block` ──▶ imports, recovery, …   a SIGHUP waits
                     └──────────────▶ Hangups: sigtimedwait ──▶ on_hangup, in this thread
    a shard inherits the blocked signal from its supervisor, so it has no moment without either

Rejected: a handler of Python, which runs in the main thread and only when that comes by, and which
nothing inherits. Rejected: SIG_IGN for the shards, since an order that comes while one starts would
be lost.

Cost: one thread, which wakes every LOOK_S. Threads: see above.
"""

import signal
import threading
from collections.abc import Callable
from typing import Final

import structlog

LOOK_S: Final = 30.0
"""Files that have changed are noticed without a signal within this time."""
_SIGNALS: Final = frozenset((signal.SIGHUP,))

log = structlog.get_logger()


def block() -> None:
    """Let a SIGHUP wait, in this thread and in those that it starts, processes among them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


class Hangups(threading.Thread):
    """Takes each SIGHUP of this process, until it ends."""

    def __init__(
        self,
        on_hangup: Callable[[], None],
        on_look: Callable[[], None] = lambda: None,
        *,
        look_s: float = LOOK_S,
    ) -> None:
        """Both are called by this thread: `on_hangup` for a signal, `on_look` every `look_s`."""
        super().__init__(name="hangups", daemon=True)
        self._on_hangup = on_hangup
        self._on_look = on_look
        self._look_s = look_s
        block()
        self.start()

    def run(self) -> None:
        while True:
            taken = signal.sigtimedwait(_SIGNALS, self._look_s)
            try:
                if taken is None:
                    self._on_look()
                else:
                    self._on_hangup()
            except Exception:
                log.exception("what SIGHUP asks for was not done")
