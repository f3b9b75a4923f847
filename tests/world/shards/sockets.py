"""The Unix sockets of a simulated machine: what is written arrives when somebody outside says so.

    write ──▶ under way ── arrive ──▶ data_received at the other end, in order, in any pieces
    the process at one end is killed ──▶ what it wrote arrives still, then the end of it; who
                                         writes to it before that loses what is under way

The real links run over them (`delayserver.shards.link`). Between processes of one machine
nothing else goes wrong.

Cost: a few µs for what is written at once. Threads: none.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import cast

from tests.world.loop import MakeProtocol, SimulatedLoop

_Arrival = Callable[[], None]


class SimulatedEnd:
    """One end of a connection: as much of a transport as a link needs."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self.loop = loop
        self.other: SimulatedEnd | None = None
        """None: whoever was there is gone."""
        self.protocol: asyncio.Protocol | None = None
        """None: nobody is here any more."""
        self.coming: deque[bytes | None] = deque()
        """What is under way to this end; None: nothing more comes."""
        self._is_closing = False

    def make(self, make_protocol: MakeProtocol) -> asyncio.Protocol:
        """Have somebody at this end."""
        self.protocol = protocol = make_protocol()
        protocol.connection_made(cast(asyncio.Transport, self))
        return protocol

    # ── what a protocol calls ──────────────────────────────────────────────────────────────────

    def write(self, data: bytes) -> None:
        """Send."""
        if self.other is None:
            self._lose()  # EPIPE
        else:
            self.other.coming.append(data)

    def is_closing(self) -> bool:
        """Whether nothing more is sent."""
        return self._is_closing

    def get_write_buffer_size(self) -> int:
        """What the other end has not taken; here it takes all at once."""
        return 0

    def abort(self) -> None:
        """End the connection."""
        self.hang_up()
        self._lose()

    # ── what else happens to it ────────────────────────────────────────────────────────────────

    def hang_up(self) -> None:
        """Nobody is at this end any more; the other learns of it behind all that was written."""
        if self.other is not None:
            self.other.other = None
            self.other.coming.append(None)
            self.other = None

    def kill(self) -> None:
        """The process at this end is gone, and nobody is told of it here."""
        self.hang_up()
        self.protocol = None
        self.coming.clear()

    def _lose(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self.coming.clear()
            self.loop.call_soon(self._end)

    def _end(self) -> None:
        protocol, self.protocol = self.protocol, None
        if protocol is not None:
            protocol.connection_lost(None)

    def arrive(self, rng: random.Random) -> None:
        """The next of what is under way comes in: what was written at once, two of them, or a
        part. Called on the loop of this end."""
        data = self.coming.popleft()
        if data is None:
            self._lose()
            return
        dice = rng.random()
        if dice < 0.2 and self.coming and self.coming[0] is not None:
            data += self.coming.popleft() or b""
        elif dice < 0.3 and len(data) > 1:
            cut = rng.randrange(1, len(data))
            self.coming.appendleft(data[cut:])
            data = data[:cut]
        assert self.protocol is not None
        self.protocol.data_received(data)


class _Listening:
    def __init__(self, loop: SimulatedLoop, make_protocol: MakeProtocol) -> None:
        self.loop = loop
        self.make_protocol = make_protocol
        self.coming: deque[SimulatedEnd] = deque()
        """Connections that were made, and not accepted."""

    def close(self) -> None:
        """As `SimulatedSockets.kill`, for a listener."""
        raise AssertionError("a simulated shard listens for all of its life")


class SimulatedSockets:
    """All of them. The kernel connects; who listens accepts later."""

    def __init__(self) -> None:
        self._listening: dict[str, _Listening] = {}
        self._ends: list[SimulatedEnd] = []

    def listen(self, loop: SimulatedLoop, make_protocol: MakeProtocol, path: str) -> _Listening:
        """Let others connect."""
        assert path not in self._listening, path
        listening = self._listening[path] = _Listening(loop, make_protocol)
        return listening

    def connect(
        self, loop: SimulatedLoop, make_protocol: MakeProtocol, path: str
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        """Connect. Raises OSError."""
        listening = self._listening.get(path)
        if listening is None:
            raise ConnectionRefusedError(path)
        here, there = SimulatedEnd(loop), SimulatedEnd(listening.loop)
        here.other, there.other = there, here
        self._ends += (here, there)
        listening.coming.append(there)
        return cast(asyncio.Transport, here), here.make(make_protocol)

    def arrivals(self) -> list[tuple[SimulatedLoop, Callable[[random.Random], None]]]:
        """What may happen next, and on whose loop: somebody is let in, or something comes in."""
        self._ends = [one for one in self._ends if one.coming or one.other or one.protocol]
        found: list[tuple[SimulatedLoop, Callable[[random.Random], None]]] = [
            (one.loop, partial(self._accept, one)) for one in self._listening.values() if one.coming
        ]
        found += [
            (one.loop, one.arrive) for one in self._ends if one.coming and one.protocol is not None
        ]
        return found

    def _accept(self, listening: _Listening, rng: random.Random) -> None:
        listening.coming.popleft().make(listening.make_protocol)

    def kill(self, loop: SimulatedLoop) -> None:
        """The process of a loop is gone."""
        for path, listening in list(self._listening.items()):
            if listening.loop is loop:
                del self._listening[path]
        for end in self._ends:
            if end.loop is loop:
                end.kill()
