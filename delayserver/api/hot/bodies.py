"""Bodies that have come whole and are not answered: their bytes are bounded, and few are decoded.

    body ──▶ held_bytes over the bound? ─yes─▶ 503
                                        └─no─▶ the lane of its length ──▶ room? ──yes─▶ slices
                                                                              └──no──▶ waits

A batch of 7 MB takes 25 MB once it is decoded. All works of the slices take turns, so each that
has begun holds its decoded messages until all of them are nearly done. So few begin at the same
time, and the bodies of the others wait as they came. Short bodies have a lane of their own: no long
one holds them up.

Example, with LONG_AT_ONCE_BYTES of 16 MiB: of ten batches of 7 MB two are decoded, and eight wait.
A batch of 64 MiB is decoded when no other long one is.

Cost: 1 µs for a body. Threads: belongs to the event loop.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from delayserver.api.json_pieces import BYTES_PER_ITEM, PIECE_BYTES
from delayserver.errors import OverloadedError
from delayserver.slices import Slices, Work, answer

T = TypeVar("T")
SHORT_AT_ONCE_BYTES: Final = 8 * 1024 * 1024
"""Bodies of PIECE_BYTES or fewer that are decoded at the same time."""
LONG_AT_ONCE_BYTES: Final = 16 * 1024 * 1024
"""Longer ones; or one that is longer than this."""


class _Call(NamedTuple):
    length: int
    work: Work[Any]
    done: Callable[[Any, Exception | None], None]
    counted: int
    """Bytes that count no more when it is done."""


class _Lane:
    """The calls with bodies of one kind."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.begun = self.begun_bytes = 0
        """The calls whose works have begun, and the bytes of their bodies."""
        self.waiting: deque[_Call] = deque()
        self.is_called = False
        """Whether the first that waits begins soon."""

    def has_room(self, length: int) -> bool:
        return not self.begun or self.begun_bytes + length <= self._max_bytes


class Bodies:
    """The bodies of one server."""

    def __init__(self, slices: Slices, max_bytes: int) -> None:
        """`max_bytes`: of all bodies together."""
        self._slices = slices
        self._max_bytes = max_bytes
        self._short, self._long = _Lane(SHORT_AT_ONCE_BYTES), _Lane(LONG_AT_ONCE_BYTES)
        self.held_bytes = 0
        """The bytes of bodies whose calls are not answered."""

    def begin(
        self, length: int, work: Work[T], done: Callable[[T | None, Exception | None], None]
    ) -> None:
        """Do the work of a call whose body has so many bytes, as `Slices.begin` does, once there is
        room. The body counts until `done` is called. Raises OverloadedError."""
        self._take(length)
        self._begin(_Call(length, work, done, length))

    async def run(self, length: int, work: Work[T]) -> T:
        """The same for a body that is counted by `holding`. Returns the result of the work."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._begin(_Call(length, work, partial(answer, future), 0))
        return await future

    @contextmanager
    def holding(self, length: int) -> Iterator[None]:
        """Count a body until its call is answered. Raises OverloadedError."""
        self._take(length)
        try:
            yield
        finally:
            self.held_bytes -= length

    def _take(self, length: int) -> None:
        if self.held_bytes + length > self._max_bytes:
            raise OverloadedError(
                f"requests that wait for their answers have {self._max_bytes} bytes together "
                "(receiving_max_bytes)"
            )
        self.held_bytes += length

    # ── lanes ──────────────────────────────────────────────────────────────────────────────────

    def _begin(self, call: _Call) -> None:
        lane = self._short if call.length <= PIECE_BYTES else self._long
        if lane.waiting or not lane.has_room(call.length):
            lane.waiting.append(call)
        else:
            self._start(lane, call)

    def _start(self, lane: _Lane, call: _Call) -> None:
        lane.begun += 1
        lane.begun_bytes += call.length
        self._slices.begin(call.work, partial(self._end, lane, call))

    def _end(self, lane: _Lane, call: _Call, value: object, error: Exception | None) -> None:
        lane.begun -= 1
        lane.begun_bytes -= call.length
        self.held_bytes -= call.counted
        if lane.waiting:
            self._call_next(lane)
        call.done(value, error)

    def _call_next(self, lane: _Lane) -> None:
        """Have the first that waits begin in a turn to come: this one has done enough."""
        if lane.waiting and not lane.is_called and lane.has_room(lane.waiting[0].length):
            lane.is_called = True
            items = min(lane.waiting[0].length, PIECE_BYTES) // BYTES_PER_ITEM
            self._slices.soon(partial(self._start_next, lane), max(1, items))

    def _start_next(self, lane: _Lane) -> None:
        lane.is_called = False
        self._start(lane, lane.waiting.popleft())
        self._call_next(lane)
