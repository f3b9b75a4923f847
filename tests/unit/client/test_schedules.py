"""Schedules of the client library, against a fake server."""

from datetime import UTC, datetime, timedelta

import pytest

from delayserver.client import AsyncClient, ChangedError, UnansweredError
from tests.unit.client.fake_server import (
    LOST,
    Clock,
    FakeTransport,
    answer,
    asynchronous,
    problem,
)

NEXT = "2026-11-21T00:00:00.000Z"
VIEW = {
    **{"name": "daily", "subject": "report", "timezone": "UTC", "catch_up": "last"},
    **{"overlap": "allow", "next_at": [NEXT], "runs": 3, "skipped": 1, "paused": False},
    **{"cron": "@daily", "every": None, "last_at": None, "last_id": None, "body": {"n": 1.50}},
    **{"jitter": None, "start_at": None, "end_at": None, "max_runs": None},
}


def make(*replies):
    transport = FakeTransport(*replies)
    return AsyncClient(transport=transport, time=Clock(auto=True).time).schedules, transport


@asynchronous
async def test_what_is_given_is_sent_with_the_names_of_the_api():
    schedules, transport = make(*[answer(200, VIEW)] * 2, answer(200, {"next_at": [NEXT]}))
    made = await schedules.put("daily", "report", {"n": 1.5}, cron="@daily")
    assert (made.runs, made.skipped, made.body) == (3, 1, {"n": 1.5})
    assert made.next_at == (datetime(2026, 11, 21, tzinfo=UTC),)
    moment = datetime(2026, 11, 20, tzinfo=UTC)
    await schedules.put(
        *("a b", "report", b"\x00"),
        every=timedelta(seconds=30),
        headers={"x": "y"},
        jitter="5s",
        catch_up="all",
        overlap="skip",
        start_at=moment,
        end_at=1795219200000,
        max_runs=9,
    )
    planned = await schedules.preview(cron="@daily", timezone="Asia/Tokyo", count=1)
    assert planned == made.next_at
    assert transport.requests == [
        (
            "PUT",
            "/v1/schedules/daily",
            {"body": {"n": 1.5}, "subject": "report", "cron": "@daily"},
        ),
        (
            "PUT",
            "/v1/schedules/a%20b",
            {
                **{"body_base64": "AA==", "headers": {"x": "y"}, "subject": "report"},
                **{"every": 30_000, "jitter": "5s", "catch_up": "all", "overlap": "skip"},
                **{"start_at": "2026-11-20T00:00:00.000Z", "end_at": 1795219200000},
                "max_runs": 9,
            },
        ),
        (
            "POST",
            "/v1/schedules/preview?count=1",
            {"subject": "preview", "cron": "@daily", "timezone": "Asia/Tokyo"},
        ),
    ]


@asynchronous
async def test_a_list_is_read_page_by_page():
    pages = [
        {"schedules": [VIEW | {"name": name}], "cursor": cursor}
        for name, cursor in (("a", "a"), ("b", None))
    ]
    schedules, transport = make(*(answer(200, page) for page in pages))
    assert [one.name async for one in schedules.list(page=1)] == ["a", "b"]
    assert [path for _, path, _ in transport.requests] == [
        "/v1/schedules?limit=1",
        "/v1/schedules?limit=1&cursor=a",
    ]


@asynchronous
async def test_a_trigger_whose_answer_is_lost_is_not_asked_again():
    schedules, transport = make(LOST)
    with pytest.raises(UnansweredError):
        await schedules.trigger("daily")
    assert len(transport.requests) == 1


@asynchronous
async def test_a_change_to_another_version_than_was_seen_is_refused():
    schedules, transport = make(*[problem(412)] * 4)
    for call in (
        lambda: schedules.put("daily", "report", cron="@daily", if_match="7"),
        lambda: schedules.pause("daily", if_match="7"),
        lambda: schedules.resume("daily", if_match="7"),
        lambda: schedules.delete("daily", if_match="7"),
    ):
        with pytest.raises(ChangedError):
            await call()
    assert [path for _, path, _ in transport.requests] == [
        "/v1/schedules/daily",
        "/v1/schedules/daily/pause",
        "/v1/schedules/daily/resume",
        "/v1/schedules/daily",
    ]
