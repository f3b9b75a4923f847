"""A trace goes from who publishes to who receives, whatever lies between them."""

import pytest

from tests.integration.api_support import unique

PARENT = f"00-{'a' * 32}-{'b' * 16}-01"
OTHER = f"00-{'a' * 32}-{'c' * 16}-01"
CONTEXT = {"traceparent": PARENT, "tracestate": "shop=1,other=2"}


@pytest.fixture
def subject():
    return unique("trace")


def test_a_webhook_carries_it_and_a_pull_shows_it(shared_api, receiver, subject):
    api = shared_api
    hook = receiver.hook(500, 200)
    api.subscribe(unique("hook"), subject, url=hook, retry={"backoff": ["1ms"]})
    path = api.subscribe(unique("pull"), subject)
    document = {"subject": subject, "headers": {"x-shop": "7"}}
    answer = api.post("/v1/messages", json=document, headers=CONTEXT)
    for _ in range(2):  # the retry as well
        received = receiver.next(hook)
        assert received.headers.items() >= {**CONTEXT, "x-shop": "7"}.items()
    (pulled,) = api.pull(path)
    assert pulled["headers"] == {**CONTEXT, "x-shop": "7"}
    assert api.look_up(answer.json()["id"])["headers"] == pulled["headers"]


def test_a_message_with_a_trace_of_its_own_keeps_it(shared_api, subject):
    api = shared_api
    path = api.subscribe(unique("pull"), subject)
    document = {"subject": subject, "headers": {"traceparent": OTHER}}
    api.post("/v1/messages", json=document, headers=CONTEXT).raise_for_status()
    api.post("/v1/messages", json={"subject": subject}, headers={"traceparent": "x"})
    batch = [{"subject": subject}] * 2
    api.post("/v1/messages/batch", json=batch, headers=CONTEXT).raise_for_status()
    api.put(f"/v1/subjects/{subject}/keys/k", headers=CONTEXT).raise_for_status()
    got = [message["headers"] for message in api.pull_all(path, 5)]
    assert got == [{"traceparent": OTHER}, {}, CONTEXT, CONTEXT, CONTEXT]


def test_a_retry_of_the_publisher_is_no_conflict_also_after_a_restart(make_api, subject):
    api = make_api()
    api.start()
    document = {"subject": subject, "key": "k", "body": 1, "delay": "1h"}
    first = api.post("/v1/messages", json=document, headers=CONTEXT)
    assert first.status_code == 201
    for step in (
        lambda: None,
        lambda: api.restart(kill=True),
        lambda: api.ask("GET", "/v1/forecast"),
        api.restart,
    ):
        step()
        for headers in (CONTEXT, {"traceparent": OTHER}, {}):
            again = api.post("/v1/messages", json=document, headers=headers)
            assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])
        other = api.post("/v1/messages", json={**document, "body": 2}, headers=CONTEXT)
        assert other.status_code == 409
    assert api.look_up(first.json()["id"])["headers"] == CONTEXT
