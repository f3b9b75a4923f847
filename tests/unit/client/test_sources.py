"""Sources of the client library, against a fake server."""

import pytest

from delayserver.client import AsyncClient, ChangedError, Source
from delayserver.client.values import SkippedRecord
from tests.unit.client.fake_server import Clock, FakeTransport, answer, asynchronous, problem

WHEN = "2026-11-21T00:00:00.000Z"
VIEW = {
    **{"name": "orders", "subject": "order", "type": "kafka", "bootstrap": "b:1", "topic": "t"},
    **{"due_header": "due", "group": "g", "on_error": "stop", "paused": True},
    **{"pause_reason": "error", "positions": {"0": 7}, "published": 6, "skipped": 1},
    **{"changed_at": WHEN, "error": None, "username": "u", "password": "***"},
    "last_skipped": {"partition": 0, "offset": 7, "reason": "no time", "at": WHEN},
}


def make(*replies):
    transport = FakeTransport(*replies)
    return AsyncClient(transport=transport, time=Clock(auto=True).time).sources, transport


@asynchronous
async def test_what_is_given_is_sent_with_the_names_of_the_api():
    sources, transport = make(*[answer(200, VIEW)] * 2)
    made = await sources.put("orders", "order", "b:1", "t")
    assert isinstance(made, Source) and made.positions == {"0": 7}
    assert isinstance(made.last_skipped, SkippedRecord) and made.last_skipped.offset == 7
    await sources.put(
        *("a b", "order", "b:1", "t"),
        due_header="due",
        group="g",
        on_error="stop",
        username="u",
        password="p",
        mechanism="SCRAM-SHA-512",
        tls=True,
    )
    given = {"type": "kafka", "subject": "order", "bootstrap": "b:1", "topic": "t"}
    assert transport.requests == [
        ("PUT", "/v1/sources/orders", given),
        (
            "PUT",
            "/v1/sources/a%20b",
            {
                **given,
                **{"due_header": "due", "group": "g", "on_error": "stop", "username": "u"},
                **{"password": "p", "mechanism": "SCRAM-SHA-512", "tls": True},
            },
        ),
    ]


@asynchronous
async def test_a_list_is_read_page_by_page():
    pages = [
        {"sources": [VIEW | {"name": name}], "cursor": cursor}
        for name, cursor in (("a", "a"), ("b", None))
    ]
    sources, transport = make(*(answer(200, page) for page in pages))
    assert [one.name async for one in sources.list(page=1)] == ["a", "b"]
    assert [path for _, path, _ in transport.requests] == [
        "/v1/sources?limit=1",
        "/v1/sources?limit=1&cursor=a",
    ]


@asynchronous
async def test_paused_resumed_and_deleted():
    sources, transport = make(answer(200, VIEW), answer(200, VIEW), answer(204), answer(204))
    await sources.pause("orders")
    await sources.resume("orders", if_match="7")
    await sources.delete("orders")
    await sources.delete("orders", if_match="7")
    assert [(method, path) for method, path, _ in transport.requests] == [
        ("POST", "/v1/sources/orders/pause"),
        ("POST", "/v1/sources/orders/resume"),
        ("DELETE", "/v1/sources/orders"),
        ("DELETE", "/v1/sources/orders"),
    ]


@asynchronous
async def test_a_version_that_is_no_more():
    sources, _ = make(problem(412))
    with pytest.raises(ChangedError):
        await sources.pause("orders", if_match="6")
