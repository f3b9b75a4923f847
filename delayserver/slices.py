"""Slices: work of any length, done between all else that the event loop has to do.

    begin(work) ──▶ some items now ──▶ done? ─yes─▶ answered in the same turn, as most are
                                          └──no──▶ the ring ──▶ one turn: TURN_ITEMS items at most,
                                                    ▲     │     QUANTUM_ITEMS of each work in turn
                                                    └─────┘     then the next turn of the loop

A work is a generator that yields how many items it has done since it was asked last. An item is
some 10 µs of work: a row, a message, a definition; dearer things count as several. All works
share one budget for a turn of the loop, of items and of time, so a turn is as long with a thousand
of them as with one, a long one never holds up another, and a machine that is slow, or shared, does
fewer items in a turn.

Example, with TURN_ITEMS 1,000 and QUANTUM_ITEMS 100: A has 10,000 items, and B, which begins in the
same turn, has 150. A does 1,000 at once. The next turn does 100 of A, 100 of B, 100 of A, the last
50 of B, and A's up to 1,000. So B is done after two turns, and A after eleven.

Whatever is decided at one moment must not be cut: a work yields before such a step, or behind it.

Cost: 0.5 µs for a work that is done at once; 0.2 µs for a yield. Threads: belongs to the event
loop.

Rejected: a task for each work, with `sleep(0)`. Each would do its slice in every turn, so a turn
would be as long as there are works. Threads: Python code in them takes the event loop's time, too.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

T = TypeVar("T")
Work = Generator[int, None, T]
"""Yields the number of items that it has done since it was asked last, one or more."""
TURN_ITEMS: Final = 1_000
"""Items in one turn of the event loop."""
TURN_MS: Final = 5
"""After so long a turn ends, whatever is left of its items."""
QUANTUM_ITEMS: Final = 100
"""Items of one work, if others wait."""
FREED_VALUES, FREED_ITEMS = 50, 10
"""Values that are freed together, and for how many items they count."""


def _timeless() -> int:
    return 0


class TurnBudget:
    """Items that may still be done in this turn of the event loop, while it is not over."""

    __slots__ = ("_stopwatch", "_until_ms", "left")

    def __init__(self, items: int = TURN_ITEMS, stopwatch: Callable[[], int] = _timeless) -> None:
        """`stopwatch`: ms of a clock that nobody sets; without it only items count."""
        self.left = items
        self._stopwatch = stopwatch
        self._until_ms = stopwatch() + TURN_MS

    def spend(self, items: int = 1) -> None:
        """So many items are done. The last of them may exceed the budget."""
        self.left -= items

    def __bool__(self) -> bool:
        return self.left > 0 and self._stopwatch() < self._until_ms


class _Begun(NamedTuple):
    work: Work[Any]
    done: Callable[[Any, Exception | None], None]


class Slices:
    """The works that are not done, and the turns in which they go on."""

    def __init__(
        self,
        call_soon: Callable[[Callable[[], None]], object],
        stopwatch: Callable[[], int] = _timeless,
        *,
        turn_items: int = TURN_ITEMS,
    ) -> None:
        """`call_soon`: has a function called in the next turn of the event loop; `stopwatch`: as
        `TurnBudget` takes it."""
        self._call_soon = call_soon
        self._stopwatch = stopwatch
        self.turn_items = turn_items
        self._budget = TurnBudget(turn_items, stopwatch)
        self._ring: deque[_Begun] = deque()
        self._is_asked = False

    def __len__(self) -> int:
        """How many works are not done."""
        return len(self._ring)

    def begin(self, work: Work[T], done: Callable[[T | None, Exception | None], None]) -> None:
        """Do some of a work now, unless others have used up this turn, and the rest in turns to
        come. `done` is called once, perhaps before this returns: with the result of the work, or
        with its error."""
        begun = _Begun(work, done)
        self._ask()
        if self._ring or not self._budget or not self._is_done(begun, self._budget.left):
            self._ring.append(begun)

    def soon(self, function: Callable[[], None], items: int = 1) -> None:
        """Call a function in a turn to come. It does as many items as it says here."""
        self._ask()
        self._ring.append(_Begun(_calling(function, items), told_nothing))

    async def run(self, work: Work[T]) -> T:
        """Do a work as `begin` does. Returns its result."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.begin(work, partial(answer, future))
        return await future

    def _ask(self) -> None:
        if not self._is_asked:
            self._is_asked = True
            self._budget = TurnBudget(self.turn_items, self._stopwatch)
            self._call_soon(self._turn)

    def _turn(self) -> None:
        budget = self._budget = TurnBudget(self.turn_items, self._stopwatch)
        while self._ring and budget:
            begun = self._ring.popleft()
            items = min(QUANTUM_ITEMS, budget.left) if self._ring else budget.left
            if not self._is_done(begun, items):
                self._ring.append(begun)
        self._is_asked = bool(self._ring)
        if self._ring:
            self._call_soon(self._turn)

    def _is_done(self, begun: _Begun, items: int) -> bool:
        """Do that many items of a work, or a step more; whether it is done."""
        work, done = begun
        budget, until = self._budget, self._budget.left - items
        try:
            while budget and budget.left > until:
                budget.spend(next(work))
        except StopIteration as end:
            done(end.value, None)
            return True
        except Exception as error:
            done(None, error)
            return True
        return False


def freeing(many: list[dict[Any, Any]]) -> Work[None]:
    """Empty dictionaries that nothing uses any more: to free a million values at once takes a
    second."""
    for values in many:
        while values:
            for _ in range(min(len(values), FREED_VALUES)):
                values.popitem()
            yield FREED_ITEMS


def _calling(function: Callable[[], None], items: int) -> Work[None]:
    function()
    yield items


def told_nothing(nothing: None, error: Exception | None) -> None:
    """The end of a work without a waiting caller: its error is raised."""
    if error is not None:
        raise error


def answer(future: "asyncio.Future[T]", value: T | None, error: Exception | None) -> None:
    """Give a future the result or the error of a work, unless its owner has given up."""
    if future.done():
        return  # Its owner has given up.
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)  # type: ignore[arg-type]  # the result of the work


def at_once(work: Work[T]) -> T:
    """Do a work without a pause, where no event loop waits. Returns its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            value: T = end.value
            return value
