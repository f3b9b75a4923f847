"""Complaints: a trouble that lasts is said once, then ever more rarely, with a count.

    wrong, wrong, wrong, … ──▶ said at 0 s, after 1 min, 3 min, 7 min, … then once an hour
    right                  ──▶ said once, with how often and how long it was wrong

A broker that is away for a night is some lines of the log and not hundreds of megabytes. The
client libraries log by themselves: `QuietLogger` does the same for each facility of librdkafka, and
`QuietFilter` for the loggers of the others.

Cost: 1 µs for a line that is not said. Threads: `Complaints` belongs to one thread; the others take
a lock, for libraries log from threads of their own.
"""

import logging
import re
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, Final

FIRST_PAUSE_S: Final = 60.0
PAUSE_MAX_S: Final = 3600.0
FORGOTTEN_S: Final = 600.0
"""A thing that has not happened for so long is said at once when it happens again."""
_BROKER: Final = re.compile(r"\[thrd:([^]]*)\]")
REMEMBERED_MAX: Final = 1000
"""Things that are wrong at once; of more the oldest is forgotten, and said anew."""


@dataclass(slots=True)
class Complaint:
    """One thing that is wrong."""

    since_s: float
    pause_s: float = FIRST_PAUSE_S
    say_at_s: float = 0.0
    unsaid: int = 0
    """How often it happened since it was said last."""
    total: int = 0
    words: str = ""
    last_s: float = 0.0


class Complaints:
    """The things that are wrong now, by key."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._open: dict[Hashable, Complaint] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._open

    def wrong(self, key: Hashable, words: str = "") -> Complaint | None:
        """It is wrong, once more. Returns the complaint if it must be said now: it was not said
        before, or its pause is over."""
        now_s = self._monotonic()
        found = self._open.get(key)
        if found is not None and now_s - found.last_s > FORGOTTEN_S:
            found = None
            del self._open[key]
        if found is None:
            if len(self._open) >= REMEMBERED_MAX:
                del self._open[next(iter(self._open))]
            found = self._open[key] = Complaint(now_s, say_at_s=now_s)
        found.total += 1
        found.unsaid += 1
        found.words = words
        found.last_s = now_s
        if now_s < found.say_at_s:
            return None
        said = replace(found)
        found.unsaid = 0
        found.say_at_s = now_s + found.pause_s
        found.pause_s = min(2 * found.pause_s, PAUSE_MAX_S)
        return said

    def right(self, key: Hashable) -> Complaint | None:
        """It is not wrong any more. Returns the complaint that is over, if there was one."""
        return self._open.pop(key, None)

    def forget(self, key: Hashable) -> None:
        """Whether it is wrong does not matter any more."""
        self._open.pop(key, None)


class QuietLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger for librdkafka: each kind of line once, then ever more rarely.

    The client writes `FACILITY [client] [thrd:BROKER]: text`, and says that again at each attempt.
    The same text about another broker is another line."""

    def __init__(
        self, logger: logging.Logger, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(logger, {})
        self._complaints = Complaints(monotonic)
        self._lock = threading.Lock()

    def log(self, level: int, msg: object, *args: object, **more: Any) -> None:
        """See `logging.Logger.log`."""
        text = str(msg) % args if args else str(msg)
        facility, broker = text.split(" ", 1)[0], _BROKER.search(text)
        with self._lock:
            said = self._complaints.wrong((level, facility, broker and broker[1]))
        if said is not None:
            self.logger.log(level, "%s%s", text, _and_more(said))


class QuietFilter(logging.Filter):
    """The same for a logger of a library: by the line that logs, whatever it says."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._complaints = Complaints(monotonic)
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is said."""
        with self._lock:
            said = self._complaints.wrong((record.name, record.levelno, record.lineno))
        if said is not None and said.unsaid > 1:
            record.msg, record.args = f"{record.getMessage()}{_and_more(said)}", ()
        return said is not None


def quiet(*names: str) -> None:
    """Have loggers of libraries say the same ever more rarely."""
    for name in names:
        logger = logging.getLogger(name)
        if not any(isinstance(one, QuietFilter) for one in logger.filters):
            logger.addFilter(QuietFilter())


def _and_more(said: Complaint) -> str:
    return f" ({said.unsaid} such lines since it was said last)" if said.unsaid > 1 else ""
