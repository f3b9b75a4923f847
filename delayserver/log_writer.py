"""The end of a log: lines that a thread of its own writes, so that logging neither waits nor fails.

    log.error(…), a warning, a traceback ──▶ `write`: a queue of QUEUE_MAX_BYTES
                                                │
                                                ▼ the writer's thread
                                             a descriptor, which may be a full disk, a pipe whose
                                             reader stands still or has ended, a closed terminal

A line that does not fit into the queue is dropped, and so is one that the system does not take.
They are counted. As soon as a line can be written again, one says how many are missing:

    reader stops     64 KiB stand in the pipe, 4 MiB in the queue, 12,345 lines are dropped
    reader goes on   it gets the lines that waited, and "lines of the log were lost" count=12345

A batch is no longer than a pipe takes at once (PIPE_BUF), so the lines of several processes on one
pipe do not mix; only a single longer line may be torn.

`write` may be called by a signal handler, or by a finalizer that runs inside of `write`: a thread
can take the lock again, and nothing else blocks. Rejected: QueueHandler of the standard library,
whose limit counts lines, not bytes, and which blocks or raises there. Rejected: a descriptor that
does not block, because its flag belongs to all processes that share it, the shell among them.

Cost: 3 µs a line. Threads: `write` belongs to all. One daemon thread, which waits until there are
lines. A process that was forked without exec has none.
"""

import os
import select
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from queue import Empty, SimpleQueue
from typing import Final

QUEUE_MAX_BYTES: Final = 4 * 1024 * 1024
LINE_MAX_BYTES: Final = 64 * 1024
"""A longer line is cut."""
RETRY_S: Final = 5.0
"""Lines were lost and none follows: when the writer tries to say so."""
_CUT: Final = " … (cut)\n".encode()

SystemWrite = Callable[[int, bytes], int]


def _plainly(count: int) -> str:
    return f"{count} lines of the log were lost\n"


class LogWriter:
    """Writes lines to a descriptor; it may stand in the place of `sys.stderr`."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(
        self,
        descriptor: int,
        *,
        write: SystemWrite = os.write,
        say_lost: Callable[[int], str] = _plainly,
        retry_s: float = RETRY_S,
    ) -> None:
        """`write`: the system call. `say_lost`: the line that tells how many are missing."""
        self._descriptor = descriptor
        self._system_write = write
        self._say_lost = say_lost
        self._retry_s = retry_s
        self._queue: SimpleQueue[bytes | threading.Event] = SimpleQueue()
        self._lock = threading.RLock()
        self._queued_bytes = 0
        self._begun = threading.local()
        """Text of a line that does not end yet, by thread."""
        self.lost = 0
        """Lines that were not written, since the start."""
        self._untold = 0
        """Those of them that no line has told of."""
        # These belong to the thread.
        self._held: bytes | None = None
        """The first line of the next batch, which did not fit into the last one."""
        self._is_torn = False
        """The log ends in the middle of a line."""
        threading.Thread(target=self._run, name="log", daemon=True).start()

    # ── for all threads ────────────────────────────────────────────────────────────────────────

    def write(self, text: str) -> int:
        """Queue whole lines, and keep the rest until its line ends. Neither waits nor fails.

        Raises TypeError for bytes, as any file of text does."""
        if not isinstance(text, str):
            raise TypeError(f"a log takes text, not {type(text).__name__}")
        try:
            lines, newline, rest = (getattr(self._begun, "text", "") + text).rpartition("\n")
            if len(rest) > LINE_MAX_BYTES:
                lines, newline, rest = lines + newline + rest, "\n", ""
            self._begun.text = rest
            if newline:
                self._put((lines + newline).encode(self.encoding, self.errors))
        except Exception:  # There is no memory.
            self._lose(1)
        return len(text)

    def writelines(self, texts: Iterable[str]) -> None:
        """As `write` of each."""
        for text in texts:
            self.write(text)

    def flush(self) -> None:
        """Nothing: a caller does not wait for the writer."""

    def drain(self, timeout_s: float) -> bool:
        """Wait until all that was logged before is written, or lost; False: it took too long."""
        if getattr(self._begun, "text", ""):
            self.write("\n")
        done = threading.Event()
        self._queue.put(done)
        return done.wait(timeout_s)

    def isatty(self) -> bool:
        """Whether people read along."""
        return os.isatty(self._descriptor)

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def _put(self, data: bytes) -> None:
        if len(data) > LINE_MAX_BYTES:
            data = data[: LINE_MAX_BYTES - len(_CUT)] + _CUT
        with self._lock:
            if self._queued_bytes + len(data) > QUEUE_MAX_BYTES:
                self._lose(1)
            else:
                self._queued_bytes += len(data)
                self._queue.put(data)

    def _lose(self, count: int) -> None:
        with self._lock:
            self.lost += count
            self._untold += count

    # ── the thread ─────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while True:
            lines: list[bytes] = []
            done = self._take(lines)
            written = 0
            try:
                written = self._write_batch(lines)
            except Exception as error:  # There is no memory: the next lines may be written again.
                del error
            self._lose(len(lines) - written)
            if done is not None:
                done.set()

    def _take(self, lines: list[bytes]) -> threading.Event | None:
        """Wait for a line, and add it to `lines` with those that are there and fit into a batch.
        Returns the event to set when they are written. If lines were lost, it returns without
        any after `retry_s`."""
        done, size_bytes = None, 0
        try:
            timeout_s = self._retry_s if self._untold else None
            item = self._held or self._queue.get(timeout=timeout_s)
            self._held = None
            while not isinstance(item, threading.Event):
                if lines and size_bytes + len(item) > select.PIPE_BUF:
                    self._held = item
                    break
                lines.append(item)
                size_bytes += len(item)
                item = self._queue.get_nowait()
            else:
                done = item
        except Empty:
            pass
        with self._lock:
            # The sum forgets a line that a finalizer logged while another one was counted.
            is_empty = self._queue.empty()
            self._queued_bytes = (
                len(self._held or b"") if is_empty else self._queued_bytes - size_bytes
            )
        return done

    def _write_batch(self, lines: Sequence[bytes]) -> int:
        """Write lines, behind one that tells how many were lost; returns how many are written."""
        if self._is_torn and not self._write_lines([b"\n"]):
            return 0
        if untold := self._untold:
            said = self._say_lost(untold).encode(self.encoding, self.errors)
            if not self._write_lines([said]):
                return 0
            with self._lock:
                self._untold -= untold
        return self._write_lines(lines)

    def _write_lines(self, lines: Sequence[bytes]) -> int:
        """Returns how many of these lines are written whole."""
        data = b"".join(lines)
        written = 0
        while written < len(data):
            try:
                written += self._system_write(self._descriptor, data[written:])
            except BlockingIOError:
                # Another process has made the descriptor one that does not block.
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                poll.poll()
            except OSError:
                break
        if written:
            self._is_torn = data[written - 1] != ord("\n")
        return bisect_right(list(accumulate(map(len, lines))), written)
