"""GET /v1/subjects/{subject}/messages: what waits, in due order, loaded or not."""

import json

import pytest

from tests.integration.api_support import now_ms, time_ms, unique
from tests.waiting import wait_until

HOUR_MS = 3_600_000


@pytest.fixture
def api(either_api):
    return either_api


@pytest.fixture
def subject():
    return unique("listing")


def page(api, subject, **query):
    return api.ask("GET", f"/v1/subjects/{subject}/messages", params=query)


def everything(api, subject, **query):
    """All pages."""
    messages, cursor = [], None
    while True:
        found = page(api, subject, **query, **({"cursor": cursor} if cursor else {}))
        messages += found["messages"]
        assert len(found["messages"]) <= query.get("limit", 100)
        cursor = found["cursor"]
        if cursor is None:
            return messages


def ids(messages):
    return [one["id"] for one in messages]


def test_a_subject_that_nobody_knows_has_nothing(api, subject):
    assert page(api, subject) == {"messages": [], "cursor": None}


@pytest.mark.parametrize("limit", [1, 3, 1000])
def test_pages_in_due_order_over_loaded_and_later_hours(api, subject, limit):
    delays = ["3h", "1m", "400d", "2m", "90m", "1m30s", "25h", "90m"]
    published = [api.publish(subject, delay=delay, body=n) for n, delay in enumerate(delays)]
    api.publish(unique("listing.other"), delay="1m")
    expected = sorted(published, key=lambda one: (time_ms(one["deliver_at"]), one["id"][16:]))
    found = everything(api, subject, limit=limit)
    assert ids(found) == ids(expected)
    assert {one["state"] for one in found} == {"scheduled"}


def test_a_message_in_the_list_is_what_was_published(api, subject):
    api.publish(subject, delay="1h", key="k", headers={"x-shop": "7"}, body={"order": 1e3})
    api.publish(subject, delay="2h", body_base64="AP8=")
    text = api.get(f"/v1/subjects/{subject}/messages").text
    assert '"body":{"order": 1000.0}' in text or '"body":{"order":1000.0}' in text
    first, second = json.loads(text)["messages"]
    assert first["key"] == "k" and first["headers"] == {"x-shop": "7"}
    assert first["attempts"] == 0 and first["subject"] == subject
    assert second["body_base64"] == "AP8=" and "body" not in second


def test_from_and_to_in_both_forms(api, subject):
    start_ms = now_ms() + HOUR_MS
    published = [api.publish(subject, deliver_at=start_ms + n * 1000) for n in range(5)]
    wanted = ids(published[1:3])
    assert (
        ids(everything(api, subject, **{"from": start_ms + 1000, "to": start_ms + 3000})) == wanted
    )
    texts = {"from": published[1]["deliver_at"], "to": published[3]["deliver_at"]}
    assert ids(everything(api, subject, **texts, limit=1)) == wanted
    assert everything(api, subject, **{"from": start_ms + 3000, "to": start_ms}) == []


@pytest.mark.parametrize(
    ("query", "pointer"),
    [
        ({"from": "yesterday"}, "/query/from"),
        ({"to": "2026-11-20T10:00:00"}, "/query/to"),
        ({"limit": 0}, "/query/limit"),
        ({"limit": 1001}, "/query/limit"),
        ({"cursor": "x"}, "/query/cursor"),
    ],
)
def test_wrong_queries_name_the_field(api, subject, query, pointer):
    problem = api.ask("GET", f"/v1/subjects/{subject}/messages", 422, params=query)
    assert problem["errors"][0]["pointer"] == pointer


def test_what_was_cancelled_moved_or_delivered(lasting_api):
    api, subject = lasting_api, unique("listing")
    cancelled, moved, stays = (api.publish(subject, delay=f"{n}h", body=n) for n in (1, 2, 3))
    api.ask("DELETE", f"/v1/messages/{cancelled['id']}")
    api.ask("PATCH", f"/v1/messages/{moved['id']}", json={"delay": "5h"})
    path = api.subscribe(unique("list"), subject)
    api.publish(subject, body="now")
    api.pull_all(path, 1)
    for kill in (None, False, True):
        if kill is not None:
            api.restart(kill=kill)
        found = everything(api, subject)
        assert ids(found) == ids([stays, moved])
        assert found[1]["body"] == 2


def test_what_no_subscription_matches_waits_and_is_listed(lasting_api):
    api, subject = lasting_api, unique("listing")
    waiting = api.publish(subject, body=1)
    wait_until(lambda: api.look_up(waiting["id"])["state"] == "scheduled")
    assert ids(everything(api, subject)) == [waiting["id"]]
    assert everything(api, subject)[0]["state"] == "scheduled"
    api.restart(kill=True)
    assert ids(everything(api, subject)) == [waiting["id"]]
    path = api.subscribe(unique("list"), subject)
    [pulled] = api.pull(path)
    assert everything(api, subject)[0]["state"] == "delivering"
    api.ack(path, pulled)
    assert everything(api, subject) == []


def test_what_one_of_two_subscriptions_is_still_to_get(lasting_api):
    api, subject = lasting_api, unique("listing")
    first, second = (api.subscribe(unique("list"), subject) for _ in range(2))
    message = api.publish(subject, body=1)
    api.pull_all(first, 1)
    for kill in (None, True):
        if kill is not None:
            api.restart(kill=kill)
        [found] = everything(api, subject)
        assert (found["id"], found["state"]) == (message["id"], "delivering")
    api.pull_all(second, 1)
    assert everything(api, subject) == []


def test_a_retry_stands_at_the_time_of_its_next_attempt(api, receiver, subject):
    url = receiver.hook(500)
    api.subscribe(unique("list"), subject, url=url, retry={"max_attempts": 2, "backoff": ["1h"]})
    message = api.publish(subject, body=1)
    receiver.next(url)
    wait_until(lambda: api.look_up(message["id"])["attempts"] == 1)
    [found] = everything(api, subject)
    assert (found["id"], found["state"], found["attempts"]) == (message["id"], "scheduled", 1)
    assert time_ms(found["deliver_at"]) > now_ms() + HOUR_MS // 2


def test_ten_thousand_in_one_hour(api, subject):
    due_ms = now_ms() + 30 * 24 * HOUR_MS
    for start in range(0, 10_000, 1000):
        batch = [
            {"subject": subject, "deliver_at": due_ms + n * 7919 % 1000, "body": n}
            for n in range(start, start + 1000)
        ]
        api.ask("POST", "/v1/messages/batch", json=batch)
    found = everything(api, subject, limit=1000)
    assert sorted(one["body"] for one in found) == list(range(10_000))
    times = [one["deliver_at"] for one in found]
    assert times == sorted(times)
