"""When free memory goes back to the system."""

import resource
import sys

import pytest

from delayserver.allocator import RELEASE_COUNT, Idleness, tune_allocator


def test_memory_is_given_back_once_after_much_has_happened_and_nothing_more_does() -> None:
    idleness = Idleness()
    assert not idleness.look(RELEASE_COUNT, 0)
    assert not idleness.look(RELEASE_COUNT, 1)
    assert idleness.look(RELEASE_COUNT, 1)
    assert not idleness.look(RELEASE_COUNT, 1)


def test_little_that_happens_is_not_worth_it_but_adds_up() -> None:
    idleness = Idleness()
    counts = [0, 0]
    released = []
    for _ in range(RELEASE_COUNT // 2):
        counts[0] += 1
        counts[1] -= 1  # What is delivered does not wait any more.
        idleness.look(*counts)
        released.append(idleness.look(*counts))
    assert released.index(True) == RELEASE_COUNT // 2 - 1


@pytest.mark.skipif(sys.platform != "linux", reason="the C library of Linux")
def test_a_buffer_that_is_freed_is_used_again() -> None:
    """Its pages have no faults again."""
    release = tune_allocator()
    size = 4 * 1024 * 1024

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        bytearray(size)
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

    faults()
    used_again = faults()
    assert used_again < size // resource.getpagesize() / 4
    release()
    assert faults() > used_again
