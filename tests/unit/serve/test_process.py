"""What the process does besides serving."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

import pytest
import uvloop

from delayserver.serve import process
from delayserver.serve.process import _on_news, _Uvicorn
from storage.errors import FencedError

if TYPE_CHECKING:
    from delayserver.serve.owner import OwnerNode


class FakeOwner:
    """Gives its shard away if the disk is slow."""

    def successor(self, *, is_damaged: bool, is_slow: bool) -> str | None:
        return "n2" if is_damaged or is_slow else None


class FakeServing:
    def __init__(self, *, is_damaged: bool = False, is_slow: bool = False) -> None:
        self.is_damaged = is_damaged
        self.is_slow = is_slow
        self.should_exit = False
        self.heard = 0

    def on_news(self) -> None:
        self.heard += 1

    def give_away(self) -> None:
        self.should_exit = True


@pytest.mark.parametrize("what", ["is_damaged", "is_slow", None])
def test_an_owner_whose_disk_is_of_no_use_gives_its_shard_away(what: str | None) -> None:
    serving = FakeServing(**({} if what is None else {what: True}))
    for _ in range(2):
        _on_news(cast("OwnerNode", FakeOwner()), cast("_Uvicorn", serving))
    assert (serving.heard, serving.should_exit) == (2, what is not None)


@pytest.mark.parametrize("told", ["to give away", "to stop", "both", "both, the other way round"])
def test_who_is_told_to_stop_while_it_gives_its_shard_away_does_not_go_on(told: str) -> None:
    serving = object.__new__(_Uvicorn)
    serving.gives_away = serving.should_exit = serving.force_exit = False
    serving._is_told_to_stop = False
    serving._captured_signals = []
    orders: dict[str, list[Callable[[], None]]] = {
        "to give away": [serving.give_away],
        "to stop": [partial(serving.handle_exit, signal.SIGTERM, None)],
        "both": [serving.give_away, partial(serving.handle_exit, signal.SIGTERM, None)],
        "both, the other way round": [serving.on_parent_gone, serving.give_away],
    }

    async def end() -> bool:
        with serving.capture_signals():
            for order in orders[told]:
                order()
        return serving.ends_hearing()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        goes_on = runner.run(end())
        # What has ended swallows signals; where the process ends all the same it may.
        assert (signal.getsignal(signal.SIGTERM) is signal.SIG_DFL) == goes_on
    assert serving.should_exit
    assert goes_on == (told == "to give away")


class BrokenLog:
    """A log that raises, as none of ours does."""

    def critical(self, event: str, **more: object) -> None:
        raise OSError(f"cannot say {event}")


class Ended(BaseException):
    pass


@pytest.mark.parametrize(
    ("error", "status"), [(OSError("the disk"), 70), (FencedError("log", "unknown"), 75)]
)
def test_a_process_that_must_end_ends_whatever_its_log_does(
    monkeypatch: pytest.MonkeyPatch, error: Exception, status: int
) -> None:
    statuses: list[int] = []

    def end(number: int) -> None:
        statuses.append(number)
        raise Ended

    monkeypatch.setattr("os._exit", end)
    monkeypatch.setattr(process, "log", BrokenLog())
    with pytest.raises(Ended):
        process._end(error)
    assert statuses == [status]
