"""Messages that have every option at once, over real HTTP: each holds beside the others."""

import json

import pytest

from tests.integration.api_support import time_ms, unique
from tests.waiting import wait_until


@pytest.fixture
def subject():
    return unique("all")


@pytest.fixture
def api(either_api):
    return either_api


def everything(subject, url, **more):
    """A message with all that there is to say, which goes to a URL."""
    return {
        "subject": subject,
        "key": "k",
        "body": {"n": 1},
        "headers": {"x-shop": "7"},
        "watch": [f"{subject}:w"],
        "on_event": "fire",
        "ttl": "1h",
        "jitter": "20ms",
        "priority": 9,
        "group": "customer:7",
        "to": {"url": url, "retry": {"max_attempts": 3, "backoff": ["20ms", "1h"]}},
        "on_delivered": {"subject": f"{subject}.told"},
        "on_dead": {"subject": f"{subject}.told"},
    } | more


def told(api, path):
    """What the next message with an outcome says: of which message, where, and what."""
    [message] = api.pull(path, max=1)
    api.ack(path, message)
    body = message["body"]
    return body["id"], body["subscription"], body["outcome"], body["reason"]


def is_delivered(api, message_id):
    return wait_until(lambda: api.look_up(message_id)["state"] == "delivered")


def test_it_goes_where_it_says_is_told_of_and_comes_again(api, receiver, subject):
    url = receiver.hook(500, 200)
    everybody = api.subscribe(unique("everybody"), subject)
    outcomes = api.subscribe(unique("told"), f"{subject}.told")
    message = everything(subject, url, delay="50ms")
    sent = api.ask("POST", "/v1/messages", 201, json=message)
    assert api.ask("POST", "/v1/messages", json=message)["id"] == sent["id"]
    received = [receiver.next(url) for _ in range(2)]
    assert [one.headers["delay-attempt"] for one in received] == ["1", "2"]
    assert {one.headers["x-shop"] for one in received} == {"7"}
    assert received[0].at_ms >= time_ms(sent["deliver_at"])
    assert told(api, outcomes) == (sent["id"], "_to", "delivered", None)
    attempts = api.ask("GET", f"/v1/messages/{sent['id']}/attempts")["attempts"]
    assert [(one["subscription"], one["status"]) for one in attempts] == [
        ("_to", 500),
        ("_to", 200),
    ]
    is_delivered(api, sent["id"])
    api.ask("POST", f"/v1/messages/{sent['id']}/replay")
    assert receiver.next(url).headers["delay-replay"] == "1"
    is_delivered(api, sent["id"])
    # Neither told twice, nor to anybody else.
    plain = api.publish(subject, on_delivered={"subject": f"{subject}.told"})["id"]
    assert [one["id"] for one in api.pull_all(everybody, 1)] == [plain]
    assert told(api, outcomes)[0] == plain


def test_it_is_too_late_while_it_is_tried_again_and_is_redriven_by_its_own_rules(
    api, receiver, subject
):
    url = receiver.hook(500, 500, 200)
    outcomes = api.subscribe(unique("told"), f"{subject}.told")
    # Without a key each is where its group is. What is behind in the group waits for what is tried
    # again, too.
    first = everything(subject, url, key=None, ttl="500ms")
    second = everything(subject, url, key=None, delay="100ms")
    sent, after = (api.ask("POST", "/v1/messages", 201, json=one)["id"] for one in (first, second))
    assert [receiver.next(url).headers["webhook-id"] for _ in range(3)] == [sent, sent, after]
    assert told(api, outcomes) == (sent, "_to", "dead", "expired")
    assert told(api, outcomes) == (after, "_to", "delivered", None)
    conflict = api.ask("POST", f"/v1/messages/{sent}/replay", 409)
    assert conflict["state"] == "dead"
    redrive = "/v1/subscriptions/_to/dead-letters/redrive"
    assert api.ask("POST", redrive, json={"ids": [sent]}) == {"redriven": 1}
    assert receiver.next(url).headers["delay-attempt"] == "1"
    assert told(api, outcomes) == (sent, "_to", "delivered", None)


@pytest.mark.parametrize("form", ["json", "ndjson"])
def test_a_batch_of_them_is_looked_up_cancelled_and_fired(api, receiver, subject, form):
    url = receiver.hook()
    drafts = [everything(subject, url, key=f"{n}", delay="1h", priority=n) for n in range(4)]
    if form == "json":
        answer = api.ask("POST", "/v1/messages/batch", json=drafts)
    else:
        lines = "\n".join(json.dumps(one) for one in drafts)
        headers = {"content-type": "application/x-ndjson"}
        answer = api.ask("POST", "/v1/messages/batch", content=lines, headers=headers)
    ids = answer["ids"]
    found = [api.look_up(one) for one in ids]
    assert [one.get("priority", 0) for one in found] == [0, 1, 2, 3]
    assert {(one["group"], one["to"]["url"], one["on_event"]) for one in found} == {
        ("customer:7", url, "fire")
    }
    by_key = f"/v1/subjects/{subject}/keys"
    api.ask("DELETE", f"{by_key}/0")
    moved = api.ask("PATCH", f"{by_key}/1", json={"delay": "2h"})
    wanted = {name: drafts[2][name] for name in drafts[2] if name not in ("subject", "key")}
    replaced = api.ask("PUT", f"{by_key}/2", json={**wanted, "body": 2})
    after = api.look_up(ids[1])
    assert (after["deliver_at"], after["group"]) == (moved["deliver_at"], "customer:7")
    assert time_ms(after["expires_at"]) == time_ms(moved["deliver_at"]) + 3_600_000
    states = [api.look_up(one)["state"] for one in ids]
    assert states == ["cancelled", "scheduled", "cancelled", "scheduled"]
    event = api.ask("POST", f"/v1/events/{subject}:w")
    assert event == {"cancelled": 0, "fired": 3}
    fired = {receiver.next(url).headers["webhook-id"] for _ in range(3)}
    assert fired == {ids[1], replaced["id"], ids[3]}


def test_all_of_it_outlives_a_kill(lasting_api, receiver, subject):
    api, url, gone = lasting_api, receiver.hook(), receiver.hook(410)
    outcomes = api.subscribe(unique("told"), f"{subject}.told")
    waits = everything(subject, url, delay="1h")
    sent = api.ask("POST", "/v1/messages", 201, json=waits)["id"]
    retried = everything(subject, receiver.hook(500, 200), key="retried", group="other")
    retried["to"]["retry"] = {"max_attempts": 3, "backoff": ["2s"]}
    retried = api.ask("POST", "/v1/messages", 201, json=retried)["id"]
    wait_until(lambda: api.look_up(retried)["attempts"] == 1)
    before = api.look_up(sent)
    api.restart(kill=True)
    assert api.look_up(sent) == before
    assert api.ask("POST", "/v1/messages", json=waits)["id"] == sent
    api.ask("POST", "/v1/messages", 409, json={**waits, "group": "customer:8"})
    api.ask("PATCH", f"/v1/messages/{sent}", json={"delay": 0})
    assert receiver.next(url).headers["webhook-id"] == sent
    reports = {told(api, outcomes) for _ in range(2)}
    assert reports == {(one, "_to", "delivered", None) for one in (sent, retried)}
    dead = api.ask("POST", "/v1/messages", 201, json=everything(subject, gone, key="gone"))["id"]
    message_id, _, outcome, reason = told(api, outcomes)
    assert (message_id, outcome) == (dead, "dead") and "gone" in reason
