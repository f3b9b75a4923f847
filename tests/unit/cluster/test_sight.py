"""Whom a node sees: who answers is seen, and who has not answered for some rounds is not."""

from __future__ import annotations

import asyncio

import pytest

from delayserver.cluster.sight import LOST_ROUNDS, Sight, answering, connect
from delayserver.cluster.watch import IN_STEP_MS, LOOK_S
from storage.replicated.lease import CLOCKS_MS

BOTH = ("n2", "n3")


def test_who_does_not_answer_for_some_rounds_is_not_seen() -> None:
    sight = Sight()
    for _ in range(LOST_ROUNDS - 1):
        sight.take(BOTH, {"n2"})
        assert sight.unseen == []
    sight.take(BOTH, {"n2"})
    assert sight.unseen == ["n3"]
    sight.take(BOTH, {"n2"})
    assert sight.unseen == ["n3"]
    sight.take(BOTH, {"n3"})
    assert sight.unseen == []


def test_one_answer_between_is_enough() -> None:
    sight = Sight()
    for number in range(3 * LOST_ROUNDS):
        sight.take(BOTH, set(BOTH) if number % LOST_ROUNDS == 0 else set())
        assert sight.unseen == []


def test_who_is_not_there_any_more_is_forgotten() -> None:
    sight = Sight()
    for _ in range(LOST_ROUNDS):
        sight.take(BOTH, ())
    assert sight.unseen == ["n2", "n3"]
    sight.take(["n2"], ())
    assert sight.unseen == ["n2"]
    sight.take(BOTH, ())
    assert sight.unseen == ["n2"], "it has all its rounds once more"


def test_who_has_ended_is_in_step_no_more_when_it_is_lost() -> None:
    """Else a shard would be given to it."""
    assert (LOST_ROUNDS - 1) * LOOK_S * 1000 >= IN_STEP_MS + CLOCKS_MS


def test_all_are_asked_at_once_and_nobody_is_waited_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("delayserver.cluster.sight.ASK_S", 0.01)
    asked: list[str] = []

    async def reach(url: str) -> None:
        asked.append(url)
        match url:
            case "refused":
                raise ConnectionRefusedError
            case "silent":
                await asyncio.Event().wait()
            case "no URL":
                raise ValueError

    urls = {"n1": "silent", "n2": "there", "n3": "refused", "n4": "no URL", "n5": "there"}
    assert asyncio.run(answering(urls, reach)) == {"n2", "n5"}
    assert sorted(asked) == sorted(urls.values())
    assert asyncio.run(answering({}, reach)) == set()


def test_a_connection_is_made_and_ended() -> None:
    async def run() -> None:
        ended: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def come(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            ended.set_result(await reader.read())
            writer.close()

        server = await asyncio.start_server(come, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        await connect(f"http://127.0.0.1:{port}")
        assert await ended == b""
        server.close()
        await server.wait_closed()
        with pytest.raises(OSError, match="Connect call failed"):
            await connect(f"http://127.0.0.1:{port}")

    asyncio.run(run())


def test_a_url_has_a_host() -> None:
    with pytest.raises(ValueError, match="names no host"):
        asyncio.run(connect("n2:8080"))
