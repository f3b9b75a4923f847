"""The common part of the three wheels: ticks, the life of a handle, and the chain of due timers.

A design says where an entry waits (``_place``), how the wheel turns (``_turn``) and which chains
it has (``_chains``, for shutdown). All else is here, once.

A waiting entry stands in exactly one chain: in one of the design's own; in ``_ready`` if it was due
when it was added; or in ``_expired`` once its tick has come. Cancelling is therefore the same
everywhere: unlink it from wherever it is.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

from delayserver.timers.chain import Chain, EntryT
from delayserver.timers.interface import (
    Callback,
    ErrorHandler,
    Timer,
    TimerShutdownError,
    spent,
)


class WheelTimer(Timer[EntryT]):
    """A timer whose entries wait in chains by tick. Ticks are counted from ``start_ms``."""

    __slots__ = (
        "_closed",
        "_entry_type",
        "_expired",
        "_ready",
        "_round_up_ms",
        "_slot_count",
        "_start_ms",
        "_tick",
        "_tick_ms",
        "_waiting",
    )

    def __init__(
        self,
        start_ms: int,
        tick_ms: int,
        slot_count: int,
        on_error: ErrorHandler | None,
        entry_type: type[EntryT],
    ) -> None:
        if tick_ms < 1 or slot_count < 1:
            raise ValueError(f"a wheel needs a tick and a slot, not {tick_ms=}, {slot_count=}")
        super().__init__(start_ms, on_error)
        self._start_ms = start_ms
        self._tick_ms = tick_ms
        self._slot_count = slot_count
        self._entry_type = entry_type
        # The last tick that was turned to, and the addend that makes a division by tick_ms round
        # up.
        self._tick = 0
        self._round_up_ms = tick_ms - 1
        self._waiting = 0
        self._closed = False
        self._ready: Chain[EntryT] = Chain()
        self._expired: Chain[EntryT] = Chain()

    def add(self, callback: Callback, delay_ms: int) -> EntryT:
        if self._closed:
            raise TimerShutdownError
        wait_ms = delay_ms if delay_ms > 0 else 0  # max() would be a tenth of the whole call
        due_tick = (self._round_up_ms + wait_ms) // self._tick_ms
        entry = self._entry_type(callback, due_tick)
        self._waiting += 1
        if due_tick > self._tick:
            self._place(entry)
        else:
            self._ready.append(entry)
        return entry

    def cancel(self, handle: EntryT) -> bool:
        if not handle.linked:
            return False
        handle.unlink()
        handle.callback = spent
        self._waiting -= 1
        return True

    def size(self) -> int:
        return self._waiting

    def shutdown(self) -> None:
        self._closed = True
        self._waiting = 0
        for chain in (self._ready, self._expired, *self._chains()):
            while (entry := chain.pop_first()) is not None:
                entry.callback = spent

    def next_advance_ms(self) -> int | None:
        if self._ready or self._expired:
            return self._now_ms
        if not self._waiting:
            return None
        return self._start_ms + self._next_tick() * self._tick_ms

    def expire(self, now_ms: int) -> None:
        # The timers that were ready before are due no later than any that the turn will bring.
        self._expired.take_all(self._ready)
        if now_ms <= self._now_ms:
            return
        self._now_ms = now_ms
        passed_ms = now_ms - self._start_ms
        self._round_up_ms = passed_ms + self._tick_ms - 1
        tick = passed_ms // self._tick_ms
        if tick > self._tick:
            self._turn(tick)

    def take(self) -> EntryT | None:
        entry = self._expired.pop_first()
        if entry is not None:
            self._waiting -= 1
        return entry

    @abstractmethod
    def _place(self, entry: EntryT) -> None:
        """Put an entry whose tick is still to come into a chain."""

    @abstractmethod
    def _turn(self, tick: int) -> None:
        """Set ``_tick`` to a later tick; move all entries due by then to ``_expired``, in order."""

    @abstractmethod
    def _chains(self) -> Iterable[Chain[EntryT]]:
        """Every chain of the design in which an entry may wait."""

    def _next_tick(self) -> int:
        """The tick at which the wheel must turn next, when something waits in it."""
        return self._tick + 1
