"""Natural batching by itself: room, order, callers that go away, and what a send leaves undone."""

import asyncio
from contextlib import suppress

import pytest

from delayserver.client.batching import Batcher, Item
from delayserver.client.errors import ClosedError
from tests.unit.client.fake_server import asynchronous, settled
from tests.waiting import turns


class Sink:
    """Takes batches; holds them while the gate is closed."""

    def __init__(self, **options):
        self.batches = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.error = None
        bounds = {"batch_max": 100, "batch_max_bytes": 1000, "pending_max": 100}
        bounds |= {"in_flight_max": 1, "pending_max_bytes": 10_000}
        self.batcher = Batcher(self._send, **{**bounds, **options})

    async def _send(self, items):
        self.batches.append([item.data.decode() for item in items])
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        for item in items:
            item.succeed(item.data)

    async def ask(self, text, lane=None):
        data = text.encode()
        if not self.batcher.try_reserve(len(data)):
            await self.batcher.reserve(len(data))
        item = Item(data, asyncio.get_running_loop().create_future(), lane)
        self.batcher.put(item)
        return await item.future

    def start(self, *texts, lane=None):
        return [asyncio.create_task(self.ask(text, lane)) for text in texts]


@asynchronous
async def test_room_is_given_in_the_order_of_arrival_as_much_as_there_is():
    sink = Sink(pending_max=2)
    sink.gate.clear()
    tasks = sink.start(*"abcdefg")
    await turns(20)
    assert sink.batches == [["a", "b"]]
    sink.gate.set()
    await asyncio.gather(*tasks)
    assert sink.batches == [["a", "b"], ["c", "d"], ["e", "f"], ["g"]]
    assert (sink.batcher.pending, sink.batcher.pending_bytes) == (0, 0)


@asynchronous
async def test_a_small_item_does_not_overtake_a_large_one_that_waits():
    sink = Sink(pending_max_bytes=10)
    sink.gate.clear()
    tasks = sink.start("12345678", "123456", "1")
    await turns(20)
    sink.gate.set()
    await asyncio.gather(*tasks)
    assert sink.batches == [["12345678"], ["123456", "1"]]


@pytest.mark.parametrize("turns_before", [0, 1, 2, 3])
@asynchronous
async def test_a_caller_that_goes_away_as_it_gets_room_leaves_it_to_the_next(turns_before):
    sink = Sink(pending_max=1)
    sink.gate.clear()
    first, second, third = sink.start(*"abc")
    await turns(20)
    sink.gate.set()
    await turns(turns_before)
    second.cancel()
    done = await settled(first, second, third)
    assert (done[0], done[2]) == (b"a", b"c")
    assert sink.batcher.pending == 0


@asynchronous
async def test_what_a_send_raises_is_what_its_items_get():
    sink = Sink()
    sink.error = RuntimeError("broken")
    assert await settled(*sink.start(*"ab")) == [sink.error, sink.error]
    sink.error = None
    assert await sink.ask("c") == b"c"


@asynchronous
async def test_a_cancelled_item_is_not_sent():
    sink = Sink()
    sink.gate.clear()
    first, second, third = sink.start("a"), sink.start("b"), sink.start("c")
    await turns(20)
    second[0].cancel()
    await turns(20)
    sink.gate.set()
    with suppress(asyncio.CancelledError):
        await asyncio.gather(*first, *second, *third)
    await asyncio.gather(*first, *third)
    assert "b" not in [text for batch in sink.batches[1:] for text in batch]
    assert sink.batcher.pending == 0


@asynchronous
async def test_nothing_is_taken_after_the_end():
    sink = Sink(pending_max=1)
    sink.gate.clear()
    taken, waiting = sink.start(*"ab")
    await turns(20)
    closing = asyncio.create_task(sink.batcher.close())
    await turns(20)
    with pytest.raises(ClosedError):
        await sink.ask("c")
    with pytest.raises(ClosedError):
        await waiting
    assert not closing.done()
    sink.gate.set()
    assert await taken == b"a"
    await closing


@asynchronous
async def test_lanes_do_not_wait_for_each_other_and_share_what_may_be_under_way():
    sink = Sink(in_flight_max=2)
    sink.gate.clear()
    tasks = [sink.start(*(f"{lane}{n}" for n in range(20)), lane=lane) for lane in "abc"]
    await turns(20)
    # The first had both requests, and the others one each, which is the least.
    assert [batch[0] for batch in sink.batches] == ["a0", "a16", "b0", "c0"]
    assert all(len({text[0] for text in batch}) == 1 for batch in sink.batches)
    more = [sink.start(f"{lane}!", lane=lane) for lane in "abc"]
    await turns(20)
    assert len(sink.batches) == 4
    sink.gate.set()
    await asyncio.gather(*(task for some in (*tasks, *more) for task in some))
    assert sorted(map("".join, sink.batches[4:])) == [*map("".join, (["a!"], ["b!"], ["c!"]))]
    assert (sink.batcher.pending, sink.batcher.pending_bytes) == (0, 0)


@asynchronous
async def test_room_is_that_of_all_lanes():
    sink = Sink(pending_max=2)
    sink.gate.clear()
    tasks = [*sink.start("a", lane=0), *sink.start("b", lane=1), *sink.start("c", lane=2)]
    await turns(20)
    assert sink.batches == [["a"], ["b"]]
    sink.gate.set()
    await asyncio.gather(*tasks)
    assert sink.batches[2:] == [["c"]]


@asynchronous
async def test_the_end_is_that_of_all_lanes():
    sink = Sink()
    sink.gate.clear()
    tasks = [*sink.start("a", "b", lane=0), *sink.start("c", lane=1)]
    await turns(20)
    late = sink.start("d", lane=1)
    await turns(20)
    await sink.batcher.close(0.01)
    found = await settled(*tasks, *late)
    assert [type(one) for one in found] == [ClosedError] * 4
    assert sink.batcher.pending == 0
