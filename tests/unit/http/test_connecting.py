"""How a connection is opened: to any of several addresses, and until a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop

from delayserver.http.connecting import call_when_over, connect_to_any, until
from tests.waiting import turns

HOUR_S = 3600.0


class Hosts:
    """Addresses that are refused, mute, or connected when a test says so."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.closed: list[str] = []
        self.answers: dict[str, asyncio.Future[str]] = {}

    async def connect(self, address: str) -> str:
        self.asked.append(address)
        self.answers[address] = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self.answers[address])

    def accept(self, address: str) -> None:
        self.answers[address].set_result(address)

    def refuse(self, address: str) -> None:
        self.answers[address].set_exception(ConnectionRefusedError(address))

    def race(self, *addresses: str, head_start_s: float = HOUR_S) -> asyncio.Task[tuple[str, str]]:
        racing = connect_to_any(
            addresses, self.connect, self.closed.append, head_start_s=head_start_s
        )
        return asyncio.get_running_loop().create_task(racing)


def run(main: Callable[[], Awaitable[Any]]) -> Any:
    async def within() -> Any:
        async with asyncio.timeout(10):
            return await main()

    return asyncio.run(within())


def test_the_first_address_is_asked_alone_and_taken() -> None:
    async def main() -> None:
        hosts = Hosts()
        race = hosts.race("a", "b")
        await turns(5)
        assert hosts.asked == ["a"]
        hosts.accept("a")
        assert await race == ("a", "a")
        assert hosts.asked == ["a"]

    run(main)


def test_the_next_one_is_asked_at_once_when_one_is_refused() -> None:
    async def main() -> None:
        hosts = Hosts()
        race = hosts.race("a", "b", "c")
        await turns(5)
        hosts.refuse("a")
        await turns(5)
        assert hosts.asked == ["a", "b"]
        hosts.accept("b")
        assert await race == ("b", "b")

    run(main)


def test_a_mute_address_has_a_head_start_and_no_more() -> None:
    async def main() -> None:
        hosts = Hosts()
        race = hosts.race("mute", "b", "c", head_start_s=0.001)
        while hosts.asked != ["mute", "b", "c"]:
            await turns(1)
        hosts.accept("c")
        assert await race == ("c", "c")

    run(main)


def test_a_connection_that_comes_too_late_is_closed() -> None:
    async def main() -> None:
        hosts = Hosts()
        race = hosts.race("a", "b", head_start_s=0.001)
        while hosts.asked != ["a", "b"]:
            await turns(1)
        hosts.accept("a")
        hosts.accept("b")
        taken, _ = await race
        await turns(5)
        assert sorted([taken, *hosts.closed]) == ["a", "b"]

    run(main)


def test_a_connection_that_comes_in_the_turn_of_the_deadline_is_closed() -> None:
    async def main() -> None:
        hosts = Hosts()
        race = hosts.race("a", "b", head_start_s=0.001)
        while hosts.asked != ["a", "b"]:
            await turns(1)
        attempts = asyncio.all_tasks() - {race, asyncio.current_task()}
        hosts.accept("a")
        hosts.accept("b")
        while not any(attempt.done() for attempt in attempts):
            await turns(1)
        race.cancel()
        with pytest.raises(asyncio.CancelledError):
            await race
        await turns(5)
        assert sorted(hosts.closed) == ["a", "b"]

    run(main)


def test_the_first_failure_is_told_if_all_fail() -> None:
    async def main() -> None:
        hosts = Hosts()
        race = hosts.race("a", "b")
        await turns(5)
        hosts.refuse("a")
        await turns(5)
        hosts.refuse("b")
        with pytest.raises(ConnectionRefusedError, match="a"):
            await race

    run(main)


def test_a_deadline_that_is_over_ends_it() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with until(asyncio.get_running_loop().time() + 0.001):
                await asyncio.Event().wait()

    run(main)


def test_a_deadline_that_is_not_over_ends_nothing() -> None:
    async def main() -> None:
        async with until(asyncio.get_running_loop().time() + HOUR_S):
            await turns(3)

    run(main)


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_sockets_are_read_before_a_deadline_is_over(kind: str) -> None:
    """The loop is held up until long after the deadline; the answer came in time."""

    async def main() -> list[str]:
        seen: list[str] = []
        loop = asyncio.get_running_loop()

        class Answer(asyncio.Protocol):
            def data_received(self, data: bytes) -> None:
                seen.append("answer")

        def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.append(writer)

        writers: list[asyncio.StreamWriter] = []
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        transport, _ = await loop.create_connection(Answer, "127.0.0.1", port)
        while not writers:
            await turns(1)
        over = loop.create_future()

        def on_over() -> None:
            seen.append("over")
            over.set_result(None)

        call_when_over(loop, loop.time() + 0.01, on_over)
        writers[0].write(b"x")
        time.sleep(0.05)  # noqa: ASYNC251  # as a long turn holds up the loop
        await over
        transport.close()
        writers[0].close()
        server.close()
        return seen

    factory = uvloop.new_event_loop if kind == "uvloop" else None
    with asyncio.Runner(loop_factory=factory) as runner:
        assert runner.run(main()) == ["answer", "over"]
