"""The simple wheel: its example, and its overflow list."""

from __future__ import annotations

from delayserver.timers import SimpleWheelTimer


def test_the_example_of_the_module() -> None:
    timer = SimpleWheelTimer(start_ms=0, tick_ms=1, slot_count=4)
    fired: list[tuple[str, int]] = []

    def add(name: str, delay_ms: int) -> None:
        timer.add(lambda: fired.append((name, timer.now_ms)), delay_ms)

    add("a", 2)
    add("b", 5)
    add("c", 9)
    assert (len(list(timer._slots[2])), len(list(timer._overflow))) == (1, 2)
    timer.advance_clock(3)
    timer.advance_clock(4)
    assert (len(list(timer._slots[1])), len(list(timer._overflow))) == (1, 1)
    add("d", 1)
    assert len(list(timer._slots[1])) == 2
    timer.advance_clock(9)
    assert fired == [("a", 3), ("b", 9), ("d", 9), ("c", 9)]


def test_an_overflow_of_many_revolutions_stays_in_the_list() -> None:
    timer = SimpleWheelTimer(start_ms=0, tick_ms=1, slot_count=4)
    timer.add(lambda: None, 41)
    for now_ms in range(40):
        timer.advance_clock(now_ms)
        assert timer._overflow
    timer.advance_clock(40)
    assert not timer._overflow
    assert timer.advance_clock(41) == 1
