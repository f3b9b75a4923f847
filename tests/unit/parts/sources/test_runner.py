"""The runner of sources, with feeds that a test fills."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from delayserver.parts.sources.feeds import Batch, FeedError, Health
from delayserver.parts.sources.records import KnownSource, OnError, SourceRecord
from delayserver.parts.sources.runner import RETRY_MAX_S, RETRY_S, SourceRunner
from delayserver.parts.sources.sourcing import WantedSource
from delayserver.records.subscriptions import KafkaTarget
from storage.errors import DiskFullError
from tests.unit.fakes import START_MS, SUBJECT
from tests.unit.parts.sources.test_sourcing import Parts
from tests.waiting import turns

WANTED = WantedSource("orders", SUBJECT, KafkaTarget("127.0.0.1:9092", "t"), "due", "g")


class FakeFeed:
    identity = "id-1"

    def __init__(self, topic: "FakeTopic", offset: int) -> None:
        self.topic, self.offset = topic, offset

    async def read(self) -> Batch:
        while self.offset >= len(self.topic.values):
            if self.topic.errors:
                raise FeedError(self.topic.errors.pop(0))
            await turns()
        end = min(self.offset + 2, len(self.topic.values))
        values, begin, self.offset = self.topic.values, self.offset, end
        return [SourceRecord(0, one, None, values[one]) for one in range(begin, end)]

    def took(self, positions: Mapping[int, int]) -> None:
        self.topic.shown = dict(positions)

    async def close(self) -> None:
        self.topic.closed += 1


class FakeTopic:
    """A topic of one partition, and the opener of its feeds."""

    def __init__(self) -> None:
        self.values: list[bytes] = []
        self.errors: list[str] = []
        self.opened: list[int] = []
        self.closed = 0
        self.shown: dict[int, int] = {}

    async def open(self, known: KnownSource, health: Health) -> FakeFeed:
        self.health = health
        health(None)
        self.opened.append(known.state.positions.get(0, 0))
        return FakeFeed(self, self.opened[-1])


class Running:
    def __init__(self, **settings: Any) -> None:
        self.parts = Parts(**settings)
        self.topic = FakeTopic()
        self.slept_s: list[float] = []
        self.fatal: list[BaseException] = []
        self.runner = SourceRunner(
            self.parts.sources, lambda: self.topic, lambda: START_MS, self.fatal.append, self.sleep
        )
        self.runner.start()

    async def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        await turns()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Whatever is in a group becomes durable meanwhile."""
        for _ in range(200):
            if holds():
                return
            await turns()
            if self.parts.sequencer.group.count:
                self.parts.commit()
        raise AssertionError("it does not come to that")

    @property
    def taken(self) -> int:
        return self.parts.state().taken


def run(test: Callable[[Running], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        running = Running(**settings)
        try:
            await test(running)
        finally:
            await running.runner.stop()
        assert running.topic.closed == len(running.topic.opened)
        assert not running.fatal

    asyncio.run(main())


def test_batches_are_taken_one_behind_the_other_and_shown_when_they_are_durable() -> None:
    async def test(running: Running) -> None:
        running.topic.values = [b"1", b"2", b"3"]
        running.parts.sources.put(WANTED, START_MS)
        await running.until(lambda: running.topic.shown == {0: 3})
        assert running.taken == 3 and running.topic.opened == [0]

    run(test)


def test_one_that_is_paused_is_not_read_and_goes_on_where_it_was() -> None:
    async def test(running: Running) -> None:
        running.topic.values = [b"1"]
        running.parts.sources.put(WANTED, START_MS)
        await running.until(lambda: running.topic.shown == {0: 1})
        running.parts.sources.pause("orders", START_MS)
        await running.until(lambda: running.topic.closed == 1)
        running.topic.values.append(b"2")
        await turns()
        assert running.taken == 1
        running.parts.sources.resume("orders", START_MS)
        await running.until(lambda: running.topic.shown == {0: 2})
        assert running.topic.opened == [0, 1] and running.taken == 2
        running.parts.sources.delete("orders")
        await running.until(lambda: running.topic.closed == 2)

    run(test)


def test_changes_that_follow_one_another_leave_one_reader() -> None:
    async def test(running: Running) -> None:
        running.topic.values = [b"1"]
        running.parts.sources.put(WANTED, START_MS)
        await running.until(lambda: running.topic.shown == {0: 1})
        running.parts.sources.pause("orders", START_MS)
        running.parts.sources.resume("orders", START_MS)
        running.parts.sources.pause("orders", START_MS)
        running.parts.sources.resume("orders", START_MS)
        running.topic.values.append(b"2")
        await running.until(lambda: running.topic.shown == {0: 2})
        assert running.topic.opened == [0, 1] and running.topic.closed == 1

    run(test)


def test_a_server_that_stops_leaves_no_reader_behind() -> None:
    async def test(running: Running) -> None:
        running.parts.sources.put(WANTED, START_MS)
        await running.until(lambda: running.topic.opened == [0])
        running.parts.sources.pause("orders", START_MS)
        await running.runner.stop()
        assert running.topic.closed == len(running.topic.opened)

    run(test)


def test_a_feed_that_fails_is_opened_again_behind_a_pause_that_grows() -> None:
    async def test(running: Running) -> None:
        running.topic.errors = ["no broker"] * 8
        running.parts.sources.put(WANTED, START_MS)
        await running.until(lambda: len(running.slept_s) == 8)
        assert running.slept_s[0] == 2 * RETRY_S and running.slept_s[-1] == RETRY_MAX_S
        assert running.runner.errors == {"orders": "no broker"}
        assert running.runner.failing() == 1
        running.topic.values = [b"1"]
        await running.until(lambda: running.topic.shown == {0: 1})
        assert running.runner.errors == {} and running.runner.failing() == 0

    run(test)


def test_one_that_has_stopped_cannot_go_on() -> None:
    async def test(running: Running) -> None:
        running.topic.values = [bytes(1025)]
        running.parts.sources.put(replace(WANTED, on_error=OnError.STOP), START_MS)
        await running.until(lambda: running.parts.state().is_stopped)
        assert running.runner.failing() == 1
        running.parts.sources.delete("orders")
        assert running.runner.failing() == 0

    run(test, body_max_bytes=1024)


def test_what_is_refused_now_is_given_again() -> None:
    async def test(running: Running) -> None:
        running.topic.values = [b"1", b"2"]
        running.parts.publishing.disk_is_low = True
        running.parts.groups.stopping = False
        with pytest.raises(Exception, match="disk_reserve_bytes"):
            running.parts.sources.put(WANTED, START_MS)
        running.parts.publishing.disk_is_low = False
        running.parts.sources.put(WANTED, START_MS)
        running.parts.publishing.disk_is_low = True
        await running.until(lambda: len(running.slept_s) >= 3)
        assert running.taken == 0
        running.parts.publishing.disk_is_low = False
        await running.until(lambda: running.topic.shown == {0: 2})
        assert running.topic.opened == [0]

    run(test)


def test_what_could_not_be_written_is_read_again() -> None:
    async def test(running: Running) -> None:
        running.parts.sources.put(WANTED, START_MS)
        running.parts.commit()
        running.topic.values = [b"1", b"2"]
        await turns(20)
        assert running.taken == 2
        running.parts.groups.flush(START_MS)
        running.parts.groups.on_commit_failed(DiskFullError("messages/0", "full", "free space"))
        assert running.taken == 0
        await running.until(lambda: running.topic.shown == {0: 2})
        assert running.taken == 2 and running.topic.opened == [0, 0]

    run(test)


def test_a_server_without_the_client_says_so() -> None:
    async def test(running: Running) -> None:
        def missing() -> FakeTopic:
            raise ModuleNotFoundError("confluent_kafka")

        runner = SourceRunner(
            running.parts.sources, missing, lambda: START_MS, running.fatal.append, running.sleep
        )
        runner.start()
        running.parts.sources.put(WANTED, START_MS)
        await running.until(lambda: "orders" in runner.errors)
        assert "pip install" in runner.errors["orders"]
        await runner.stop()

    run(test)


def test_what_a_feed_says_of_its_health_is_shown_and_logged_once() -> None:
    async def test(running: Running) -> None:
        running.topic.values = [b"1"]
        running.parts.sources.put(WANTED, START_MS)
        await running.until(lambda: running.topic.shown == {0: 1})
        assert running.parts.state().identity == "id-1"
        with capture_logs() as logs:
            for _ in range(100):
                running.topic.health("its brokers do not answer")
            assert running.runner.errors == {"orders": "its brokers do not answer"}
            assert running.runner.failing() == 1
            running.topic.health(None)
        assert not running.runner.errors and running.runner.failing() == 0
        assert [line["event"] for line in logs] == [
            "a source cannot be read",
            "a source is read again",
        ]
        running.parts.sources.pause("orders", START_MS)
        await running.until(lambda: running.topic.closed == 1)
        running.topic.health("late")
        assert not running.runner.errors

    run(test)


@pytest.mark.parametrize("error", [KeyError("leader"), AttributeError("x"), RecursionError()])
def test_an_error_that_nobody_has_foreseen_harms_one_source(error: Exception) -> None:
    async def test(running: Running) -> None:
        running.topic.values = [b"1"]
        open_feed, errors = running.topic.open, [error, error]

        async def fails(known: KnownSource, health: Health) -> FakeFeed:
            if errors:
                raise errors.pop()
            return await open_feed(known, health)

        running.topic.open = fails  # type: ignore[method-assign]
        running.parts.sources.put(WANTED, START_MS)
        await running.until(lambda: "orders" in running.runner.errors)
        assert "not foreseen" in running.runner.errors["orders"]
        await running.until(lambda: running.taken == 1)
        assert running.runner.errors == {} and running.slept_s == [2 * RETRY_S, 4 * RETRY_S]

    run(test)
