"""Turns of the event loop: each is counted once, with all that is done in it."""

from collections.abc import Callable

from delayserver.server.loop_turns import LATE_S, LoopTurns


class Loop:
    """An event loop that is turned by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.soon: list[Callable[[], None]] = []
        self.seen: list[float] = []
        self.turns = LoopTurns(self.soon.append, self.seen.append, lambda: self.now_s)

    def turn(self, *lengths_s: float) -> None:
        """A turn in which calls of these lengths are made."""
        soon = self.soon.copy()
        self.soon.clear()
        for function in soon:
            function()
        for length_s in lengths_s:
            self.turns.begin()
            self.now_s += length_s


def test_a_turn_is_as_long_as_all_that_is_done_in_it() -> None:
    loop = Loop()
    loop.turn(0.25, 0.5)
    loop.turn(1.0)
    loop.turn()
    assert loop.seen == [0.75, 1.0]
    assert not loop.turns.is_begun
    loop.now_s += 9  # nothing is done
    loop.turn()
    assert loop.seen == [0.75, 1.0]


def test_a_timer_that_comes_late_tells_of_a_stand_still_unless_a_turn_explains_it() -> None:
    loop = Loop()
    assert loop.turns.came_late(LATE_S / 2) == LATE_S / 2
    assert loop.seen == []
    loop.turn(0.5)
    loop.turn()
    assert loop.turns.came_late(0.25) == 0.5
    assert loop.seen == [0.5]
    assert loop.turns.came_late(3.0) == 3.0
    assert loop.seen == [0.5, 3.0]
    assert loop.turns.came_late(0.0) == 0.0
