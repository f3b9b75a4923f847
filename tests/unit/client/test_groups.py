"""The small groups of calls, against a fake server."""

from typing import Any

import pytest

from delayserver.client import AsyncClient, UnansweredError, UnreachableError
from delayserver.wire.bulk import ImportViewModel
from delayserver.wire.operations import OwnTokenDocument, TokenDocument
from tests.unit.client.fake_server import (
    LOST,
    UNREACHABLE,
    Clock,
    FakeTransport,
    answer,
    asynchronous,
    problem,
)

WHEN = "2026-11-21T00:00:00.000Z"
TOKEN: dict[str, Any] = {"name": "shop", "scopes": ["admin"], "expires_at": None, "rate": None}
IMPORT: dict[str, Any] = {
    **{"id": "i", "state": "filing", "count": 5, "done": 3},
    **{"accepted": 4, "duplicates": 1, "conflicts": 0, "first_seq": 9},
}


def make(*replies):
    transport = FakeTransport(*replies)
    return AsyncClient(transport=transport, time=Clock(auto=True).time), transport


@asynchronous
async def test_answers_are_the_structs_of_wire():
    client, transport = make(answer(200, TOKEN), answer(200, IMPORT))
    assert await client.tokens.own() == OwnTokenDocument("shop", ["admin"], None, None)
    assert await client.imports.get("i", shard=2) == ImportViewModel(**IMPORT)
    assert [path for _, path, _ in transport.requests] == [
        "/v1/tokens/self",
        "/v1/imports/i?shard=2",
    ]


@asynchronous
async def test_a_list_asks_for_page_after_page():
    first: dict[str, Any] = {**TOKEN, "name": "a", "created_at": WHEN}
    second = first | {"name": "b"}
    client, transport = make(
        answer(200, {"tokens": [first], "cursor": "a"}),
        answer(200, {"tokens": [second], "cursor": None}),
    )
    found = [token async for token in client.tokens.list(page=1)]
    assert found == [TokenDocument(**first), TokenDocument(**second)]
    assert transport.requests[1][1] == "/v1/tokens?limit=1&cursor=a"


@asynchronous
async def test_duplicates_of_a_shard_are_read_there():
    page = {"duplicates": [{"row": 7, "id": "x"}], "cursor": None}
    client, transport = make(answer(200, page))
    assert [one.row async for one in client.imports.duplicates("i", shard=1)] == [7]
    assert transport.requests[0][1] == "/v1/imports/i/duplicates?limit=1000&shard=1"


@asynchronous
async def test_health_is_asked_once_and_never_waited_for():
    client, transport = make(problem(503), answer(200, {"status": "ok"}), UNREACHABLE)
    assert not await client.cluster.is_ready()
    assert await client.cluster.is_alive(timeout_s=2)
    with pytest.raises(UnreachableError):
        await client.cluster.is_alive()
    assert len(transport.requests) == 3 and transport.timeouts_s[1] == 2


@asynchronous
async def test_a_forecast_takes_a_duration_in_each_form():
    forecast = {"bucket": "2h", "buckets": [{"from": WHEN, "count": 3}]}
    client, transport = make(answer(200, forecast))
    found = await client.cluster.forecast(7_200_000)
    assert [one.count for one in found.buckets] == [3]
    assert transport.requests[0][1].startswith("/v1/forecast?bucket=")


@asynchronous
async def test_a_redrive_is_not_asked_for_twice():
    client, transport = make(answer(200, {"redriven": 2}), LOST)
    assert await client.dead_letters.redrive("shop", ["a", "b"]) == 2
    with pytest.raises(UnansweredError):
        await client.dead_letters.redrive("shop")
    path = "/v1/subscriptions/shop/dead-letters/redrive"
    assert transport.requests == [("POST", path, {"ids": ["a", "b"]}), ("POST", path, {})]


@asynchronous
async def test_a_dead_letter_that_was_discarded_with_a_lost_answer_is_gone():
    client, transport = make(problem(502), problem(404))
    await client.dead_letters.discard("shop", "id")
    assert {request[:2] for request in transport.requests} == {
        ("DELETE", "/v1/subscriptions/shop/dead-letters/id")
    }
