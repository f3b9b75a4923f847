"""Sources of the client library, against a fake server."""

import pytest

from delayserver.client import AsyncSources, ChangedError
from tests.unit.client.fake_server import (
    LOST,
    Clock,
    FakeTransport,
    answer,
    asynchronous,
    problem,
)

VIEW = {
    **{"name": "orders", "subject": "order", "type": "kafka", "bootstrap": "b:1", "topic": "t"},
    **{"due_header": "delay-until", "group": "g", "on_error": "skip", "paused": False},
    **{"positions": {"0": 7}, "published": 6, "skipped": 1},
    "changed_at": "2026-11-20T16:30:00.000Z",
}


def make(*replies):
    transport = FakeTransport(*replies)
    return AsyncSources(transport=transport, time=Clock(auto=True).time), transport


@asynchronous
async def test_what_is_given_is_sent_with_the_names_of_the_api():
    sources, transport = make(*[answer(200, VIEW, etag='"9"')] * 2)
    made = await sources.put("orders", "order", "b:1", "t")
    assert (made.positions, made.published, made.version) == ({"0": 7}, 6, "9")
    await sources.put("a b", "order", "b:1", "t", due_header="due", on_error="stop", tls=True)
    plain = {"type": "kafka", "subject": "order", "bootstrap": "b:1", "topic": "t"}
    assert transport.requests == [
        ("PUT", "/v1/sources/orders", plain),
        (
            "PUT",
            "/v1/sources/a%20b",
            {**plain, "due_header": "due", "on_error": "stop", "tls": True},
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
async def test_one_that_is_asked_to_end_twice_has_ended_unless_a_version_was_named():
    sources, transport = make(LOST, problem(404), problem(412))
    await sources.delete("orders")
    with pytest.raises(ChangedError):
        await sources.delete("orders", if_match="7")
    assert len(transport.requests) == 3
