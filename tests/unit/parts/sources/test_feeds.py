"""What stands between a feed's thread and the event loop."""

import asyncio
import threading

import pytest

from delayserver.parts.sources.feeds import BATCHES_MAX, FeedError, Handover
from delayserver.parts.sources.records import SourceRecord
from tests.waiting import turns


def batch(number: int) -> list[SourceRecord]:
    return [SourceRecord(0, number, None, b"1")]


def test_what_is_not_taken_is_bounded() -> None:
    async def main() -> None:
        handover = Handover(asyncio.get_running_loop())
        given = [handover.give(batch(number), 0) for number in range(BATCHES_MAX + 1)]
        assert given == [True] * BATCHES_MAX + [False]
        assert await handover.take() == batch(0)
        assert handover.give(batch(7), 0) and not handover.give(batch(8), 0)
        assert [(await handover.take())[0].offset for _ in range(BATCHES_MAX)] == [1, 7]

    asyncio.run(main())


def test_who_waits_gets_what_a_thread_gives() -> None:
    async def main() -> None:
        handover = Handover(asyncio.get_running_loop())
        waiting = asyncio.create_task(handover.take())
        await turns()
        thread = threading.Thread(target=handover.give, args=(batch(3), 1))
        thread.start()
        assert await waiting == batch(3)
        thread.join()

    asyncio.run(main())


def test_a_failure_comes_behind_what_was_given() -> None:
    async def main() -> None:
        handover = Handover(asyncio.get_running_loop())
        handover.give(batch(0), 0)
        handover.fail(FeedError("it is gone"))
        assert await handover.take() == batch(0)
        for _ in range(2):
            with pytest.raises(FeedError, match="it is gone"):
                await handover.take()

    asyncio.run(main())


def test_who_waits_hears_of_a_failure() -> None:
    async def main() -> None:
        handover = Handover(asyncio.get_running_loop())
        waiting = asyncio.create_task(handover.take())
        await turns()
        handover.fail(FeedError("it is gone"))
        with pytest.raises(FeedError, match="it is gone"):
            await waiting

    asyncio.run(main())


def test_a_thread_outlives_the_event_loop() -> None:
    loop = asyncio.new_event_loop()
    handover = Handover(loop)
    loop.close()
    assert handover.give(batch(0), 0)
    handover.fail(FeedError("nobody hears of it"))
