"""The real server in a process of its own, whose clock and files obey a Unix socket.

    child.py SOCKET CLOCK_MS [--drop-one] serve …      the command line of `delayserver` behind that

A line of JSON on the socket is an order, and is answered with a line when it is in force:

    {"clock_ms": 90000}                                  the wall clock shows that much more
    {"fault": "full", "where": "messages", "s": 0.5}     for so long; `where`: below a directory

    full         writes fail with ENOSPC                 refused with 507, or tried again
    exhausted    files cannot be opened: EMFILE          refused with 503, or tried again
    unreadable   reads fail with EIO                     named; delivered after the next start
    slow         syncs take `wait_s` longer

Those are the faults that a server has to survive. A sync that fails is not among them: it ends the
server, by design (I9). The stopwatch stays as it is: nobody can set that one. `--drop-one` plants a
bug, that one webhook in fifty counts as delivered and is never sent.

Cost: two comparisons for each call of a file. Threads: the socket has one of its own, that replaces
what the others read in one assignment.
"""

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from delayserver.clocks import wall_clock_ms
from delayserver.config import Settings
from delayserver.delivery.sender import HttpWebhookSender
from delayserver.delivery.webhook import WebhookRequest, WebhookResponse
from delayserver.recovery import store
from delayserver.serve import process
from delayserver.server import backups, server
from delayserver.server.metrics import TimedFiles
from storage.errors import DiskFullError, ExhaustedError, UnreadableError
from storage.files import FILE_MODE, Buffer, OsFile, OsFiles

DROP_EVERY = 50


class Surroundings:
    """What is wrong with the machine just now."""

    def __init__(self) -> None:
        self.clock_ms = 0
        self._fault: dict[str, Any] = {}
        self._until_s = 0.0

    def now_ms(self) -> int:
        """The wall clock of the server."""
        return wall_clock_ms() + self.clock_ms

    def has(self, fault: str, path: str) -> bool:
        """Whether a call for a file meets this fault."""
        return (
            time.monotonic() < self._until_s
            and self._fault["fault"] == fault
            and path.startswith(self._fault["where"])
        )

    def sync(self, path: str) -> None:
        """Called before each sync."""
        if self.has("slow", path):
            time.sleep(self._fault["wait_s"])

    def obey(self, order: dict[str, Any]) -> None:
        """Set the clock, or begin a fault in place of the one before."""
        if "clock_ms" in order:
            self.clock_ms = order["clock_ms"]
        else:
            self._until_s = 0.0
            self._fault = order
            self._until_s = time.monotonic() + order["s"]

    def listen(self, path: str) -> None:
        """Obey one client after the other, for ever."""
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            while True:
                client, _ = listener.accept()
                # Who has given up is told nothing.
                with suppress(ConnectionError), client, client.makefile("rw") as lines:
                    for line in lines:
                        self.obey(json.loads(line))
                        lines.write("done\n")
                        lines.flush()


AROUND = Surroundings()


class FaultyFiles(TimedFiles):
    """The files of the server, which fail as they are told."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        timed = self._file

        class FaultyFile(timed):  # type: ignore[valid-type, misc]
            def pread(self, length: int, offset: int) -> bytes:
                if AROUND.has("unreadable", self.path):
                    raise UnreadableError(self.path, offset, "EIO, injected")
                data: bytes = super().pread(length, offset)
                return data

            def pread_now(self, length: int, offset: int) -> bytes | None:
                if AROUND.has("unreadable", self.path):
                    return None
                data: bytes | None = super().pread_now(length, offset)
                return data

            def pwrite(self, buffers: Sequence[Buffer], offset: int) -> None:
                _refuse("pwrite", self.path)
                super().pwrite(buffers, offset)

            def pwrite_durable(self, buffers: Sequence[Buffer], offset: int) -> None:
                _refuse("pwritev", self.path)
                AROUND.sync(self.path)
                super().pwrite_durable(buffers, offset)

            def fdatasync(self) -> None:
                AROUND.sync(self.path)
                super().fdatasync()

        self._file = FaultyFile

    def open(self, path: str, *, create: bool = False, mode: int = FILE_MODE) -> OsFile:
        if AROUND.has("exhausted", path):
            raise ExhaustedError("open", path, "EMFILE, injected")
        return super().open(path, create=create, mode=mode)


def _files_of_backups(root: str, **named: Any) -> OsFiles:
    """Those of the directory of backups fail, too; those of tokens are only read."""
    return OsFiles(root, **named) if named else FaultyFiles(root)


def _refuse(call: str, path: str) -> None:
    if AROUND.has("full", path):
        raise DiskFullError(call, path, "ENOSPC, injected")


class SoakServer(server.Server):
    """The server, on the clock that is set."""

    def __init__(self, settings: Settings, surroundings: store.Surroundings, **named: Any) -> None:
        super().__init__(settings, replace(surroundings, clock=AROUND.now_ms), **named)


def plant_a_bug() -> None:
    """Webhooks that nobody sends."""
    send = HttpWebhookSender.send
    count = 0

    async def drop(
        self: HttpWebhookSender, request: WebhookRequest, may_begin: Callable[[], bool]
    ) -> WebhookResponse:
        nonlocal count
        count += 1
        if count % DROP_EVERY:
            return await send(self, request, may_begin)
        return WebhookResponse(204 if may_begin() else None)

    HttpWebhookSender.send = drop  # type: ignore[method-assign]


def main() -> None:
    """Serve."""
    from delayserver.__main__ import main as command

    where, clock_ms, *rest = sys.argv[1:]
    AROUND.obey({"clock_ms": int(clock_ms)})
    if rest[0] == "--drop-one":
        plant_a_bug()
        del rest[0]
    threading.Thread(target=AROUND.listen, args=(where,), daemon=True).start()
    vars(process)["Server"] = SoakServer
    vars(server)["TimedFiles"] = FaultyFiles
    vars(backups)["OsFiles"] = _files_of_backups
    sys.argv[1:] = rest
    command()


if __name__ == "__main__":
    main()
