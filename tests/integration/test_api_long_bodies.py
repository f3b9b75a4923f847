"""Answers have a budget in bytes: what does not fit comes with the next call, in order."""

import pytest

from tests.integration.api_support import unique
from tests.waiting import wait_until

BODIES = [letter * 3_000 for letter in "abcdef"]


@pytest.fixture
def api(make_api):
    api = make_api(answer_max_bytes=8_000)
    api.start()
    return api


def bodies(messages):
    return [message["body"] for message in messages]


def due(api, subject, delay):
    for body in BODIES:
        api.publish(subject, body=body, delay=delay)


@pytest.mark.parametrize("is_filed", [False, True])
def test_a_pull_gets_what_fits_and_the_next_one_the_rest(api, is_filed):
    subject = unique("long")
    path = api.subscribe(unique("consumer"), subject)
    due(api, subject, 2_500 if is_filed else 0)
    pages = []
    wait_until(lambda: api.ask("GET", path)["queued"] == len(BODIES))
    for _ in range(3):
        pages.append(api.pull(path, max=10_000))
    assert [bodies(page) for page in pages] == [BODIES[:2], BODIES[2:4], BODIES[4:]]
    assert {message["attempt"] for page in pages for message in page} == {1}
    leases = [message["lease"] for page in pages for message in page]
    nacked = api.ask("POST", f"{path}/nack", json={"leases": leases, "delay": 0})
    assert nacked == {"nacked": 6, "expired": []}
    again = api.pull(path, max=10_000)
    assert [message["attempt"] for message in again] == [2, 2]


def test_a_message_that_is_longer_than_an_answer_comes_alone(api):
    path = api.subscribe(unique("consumer"), "longer")
    for body in ("x" * 20_000, "y"):
        api.publish("longer", body=body)
    wait_until(lambda: api.ask("GET", path)["queued"] == 2)
    assert [len(body) for body in bodies(api.pull(path))] == [20_000]
    assert bodies(api.pull(path)) == ["y"]


def test_a_list_pages_earlier(api):
    subject = unique("long")
    due(api, subject, "1h")
    path = f"/v1/subjects/{subject}/messages"
    pages: list[list[str]] = []
    cursor = None
    while not pages or cursor:
        found = api.ask(
            "GET", path, params={"limit": 1000, **({"cursor": cursor} if cursor else {})}
        )
        pages.append(bodies(found["messages"]))
        cursor = found["cursor"]
    assert pages == [BODIES[:2], BODIES[2:4], BODIES[4:]]


def test_dead_letters_page_earlier(api):
    subject = unique("long")
    path = api.subscribe(unique("consumer"), subject, retry={"max_attempts": 1})
    due(api, subject, 0)
    messages = [message for _ in range(3) for message in api.pull(path)]
    leases = [message["lease"] for message in messages]
    assert len(leases) == len(BODIES)
    api.ask("POST", f"{path}/nack", json={"leases": leases, "delay": 0})
    pages: list[list[str]] = []
    cursor = None
    while not pages or cursor:
        params = {"limit": 1000, **({"cursor": cursor} if cursor else {})}
        found = api.ask("GET", f"{path}/dead-letters", params=params)
        pages.append(bodies(found["dead_letters"]))
        cursor = found["cursor"]
    assert pages == [BODIES[:2], BODIES[2:4], BODIES[4:]]
    assert api.ask("POST", f"{path}/dead-letters/redrive") == {"redriven": 6}


@pytest.mark.parametrize("is_filed", [False, True])
def test_an_event_fires_them_a_few_at_a_time(api, is_filed):
    subject, key = unique("long"), unique("order")
    path = api.subscribe(unique("consumer"), subject)
    for body in BODIES:
        api.publish(subject, body=body, delay="9d", watch=[key], on_event="fire")
    if is_filed:
        api.ask("GET", f"/v1/subjects/{subject}/messages")
    assert api.ask("POST", f"/v1/events/{key}") == {"cancelled": 0, "fired": len(BODIES)}
    assert sorted(bodies(api.pull_all(path, len(BODIES)))) == BODIES
    assert api.ask("POST", f"/v1/events/{key}") == {"cancelled": 0, "fired": 0}
