"""The log engine in memory keeps the contract, and fails as planned."""

from collections.abc import Iterator

import pytest

from tests.engine_contract import EngineContract, Opener
from tests.world.storage.engine import AppendOutcome, MemoryLog


class TestContract(EngineContract):
    @pytest.fixture
    def open_log(self) -> Iterator[Opener]:
        yield MemoryLog().another


@pytest.mark.parametrize(
    ("outcome", "is_there"), [(AppendOutcome.UNANSWERED, True), (AppendOutcome.LOST, False)]
)
def test_an_append_that_is_not_answered(outcome: AppendOutcome, is_there: bool) -> None:
    log = MemoryLog()
    log.append([b"a"])
    log.outcome = outcome
    assert log.append([b"b", b"c"]) == [None, None]
    assert log.another().end() == (3 if is_there else 1)
    with pytest.raises(AssertionError):
        log.append([b"d"])
    assert log.another().append([b"d"]) == [3 if is_there else 1]


def test_an_engine_that_cannot_be_reached() -> None:
    log = MemoryLog()
    log.append([b"a"])
    log.is_reachable = False
    assert log.end() is None
    assert log.read(0, 0) == []
    log.is_reachable = True
    assert (log.end(), log.read(0, 0)) == (1, [(0, b"a")])
