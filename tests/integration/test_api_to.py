"""Messages that say themselves where they go (`to`), over real HTTP."""

from functools import partial

import msgspec
import pytest
from standardwebhooks import Webhook

from tests.integration.api_support import time_ms, unique
from tests.waiting import wait_until

SECRET = "whsec_" + "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="
LETTERS = "/v1/subscriptions/_to/dead-letters"


@pytest.fixture
def api(either_api):
    return either_api


@pytest.fixture
def subject():
    return unique("to")


def state(api, message):
    return api.look_up(message["id"])["state"]


def letters(api, message):
    found = api.ask("GET", f"{LETTERS}?limit=1000")["dead_letters"]
    return [one for one in found if one["id"] == message["id"]]


def test_a_message_with_a_target_goes_there_and_to_nobody_else(api, receiver, subject):
    everything = receiver.hook()
    name = api.subscribe(unique("hook"), subject, url=everything)
    url = receiver.hook()
    message = api.publish(
        subject, body={"n": 1}, key="k", delay="100ms", to={"url": url, "secret": SECRET}
    )
    received = receiver.next(url)
    assert received.at_ms >= time_ms(message["deliver_at"])
    assert Webhook(SECRET).verify(received.body, received.headers) == {"n": 1}
    assert received.headers["delay-subject"] == subject
    assert received.headers["webhook-id"] == message["id"]
    found = wait_until(lambda: state(api, message) == "delivered" and api.look_up(message["id"]))
    assert found["to"] == {
        "url": url,
        "timeout": "15s",
        "secret": "***",
        "retry": {"max_attempts": 10, "backoff": ["5s", "30s", "2m", "10m", "1h"]},
    }
    [delivery] = found["deliveries"]
    assert (delivery["subscription"], delivery["attempt"]) == ("_to", 1)
    [attempt] = api.ask("GET", f"/v1/messages/{message['id']}/attempts")["attempts"]
    assert (attempt["subscription"], attempt["status"]) == ("_to", 200)
    # What comes later for the subscription shows that it did not get this one.
    plain = api.publish(subject)
    assert receiver.next(everything).headers["webhook-id"] == plain["id"]
    names = [one["name"] for one in api.ask("GET", "/v1/subscriptions")["subscriptions"]]
    assert name.rsplit("/", 1)[1] in names
    assert "_to" not in names


def test_a_batch_has_some_that_say_it_and_some_that_do_not(api, receiver, subject):
    everything, url = receiver.hook(), receiver.hook()
    api.subscribe(unique("hook"), subject, url=everything)
    drafts = [{"subject": subject, "body": n, "key": f"{n}"} for n in range(8)]
    for draft in drafts[::2]:
        draft["to"] = {"url": url}
    packed = msgspec.msgpack.encode(drafts)
    headers = {"content-type": "application/msgpack"}
    api.ask("POST", "/v1/messages/batch", content=packed, headers=headers)
    assert sorted(int(receiver.next(url).body) for _ in range(4)) == [0, 2, 4, 6]
    assert sorted(int(receiver.next(everything).body) for _ in range(4)) == [1, 3, 5, 7]


def test_what_fails_is_tried_as_it_says_and_its_dead_letter_is_redriven(api, receiver, subject):
    url = receiver.hook(500, 500, 200)
    retry = {"max_attempts": 2, "backoff": ["50ms"]}
    message = api.publish(subject, to={"url": url, "retry": retry, "timeout": "5s"})
    assert [receiver.next(url).headers["delay-attempt"] for _ in range(2)] == ["1", "2"]
    [letter] = wait_until(lambda: letters(api, message))
    assert (letter["subject"], letter["reason"]) == (subject, "HTTP 500 (attempt 2 of 2)")
    assert state(api, message) == "dead"
    redriven = api.ask("POST", f"{LETTERS}/redrive", json={"ids": [message["id"]]})
    assert redriven == {"redriven": 1}
    assert receiver.next(url).headers["webhook-id"] == message["id"]
    wait_until(lambda: state(api, message) == "delivered")
    assert not letters(api, message)


def test_a_receiver_that_is_gone_makes_a_dead_letter_that_may_be_deleted(api, receiver, subject):
    url = receiver.hook(410)
    message = api.publish(subject, to={"url": url})
    [letter] = wait_until(lambda: letters(api, message))
    assert "gone" in letter["reason"]
    api.ask("DELETE", f"{LETTERS}/{message['id']}", 204)
    assert not letters(api, message)


def test_it_is_moved_cancelled_replaced_and_listed_as_any(api, receiver, subject):
    url, to = receiver.hook(), {"url": receiver.hook()}
    moved = api.publish(subject, delay="1h", to={"url": url})
    cancelled = api.publish(subject, delay="1h", to=to)
    listed = api.ask("GET", f"/v1/subjects/{subject}/messages")["messages"]
    assert {one["id"] for one in listed} == {moved["id"], cancelled["id"]}
    assert state(api, cancelled) == "scheduled"
    api.ask("DELETE", f"/v1/messages/{cancelled['id']}")
    many = [api.publish(subject, delay="1h", to=to)["id"] for _ in range(20)]
    results = api.ask("POST", "/v1/messages/cancel", json={"ids": many})["results"]
    assert {one["state"] for one in results} == {"cancelled"}
    path = f"/v1/subjects/{subject}/keys/k"
    first = api.ask("PUT", path, 201, json={"delay": "1h", "to": to})
    second = api.ask("PUT", path, 200, json={"to": {"url": url}})
    assert receiver.next(url).headers["webhook-id"] == second["id"]
    assert state(api, first) == "cancelled"
    api.ask("PATCH", f"/v1/messages/{moved['id']}", json={"delay": 0})
    assert receiver.next(url).headers["webhook-id"] == moved["id"]
    wait_until(lambda: state(api, moved) == "delivered")
    for query in ("", "?subscription=_to"):
        replayed = api.ask("POST", f"/v1/messages/{moved['id']}/replay{query}")
        assert replayed["subscriptions"] == ["_to"]
        again = receiver.next(url)
        assert (again.headers["webhook-id"], again.headers["delay-replay"]) == (moved["id"], "1")
        wait_until(lambda: state(api, moved) == "delivered")


def test_no_replay_takes_it_to_a_subscription_and_none_takes_another_to_it(api, receiver, subject):
    name = api.subscribe(unique("pull"), subject).rpartition("/")[2]
    url = receiver.hook()
    direct = api.publish(subject, to={"url": url})
    plain = api.publish(subject)
    receiver.next(url)
    assert api.pull_all(f"/v1/subscriptions/{name}", 1)[0]["id"] == plain["id"]
    for message, other in ((direct, name), (plain, "_to")):
        wait_until(partial(lambda one: state(api, one) == "delivered", message))
        path = f"/v1/messages/{message['id']}/replay?subscription={other}"
        assert f"{other} never has it" in api.ask("POST", path, 409)["detail"]


def test_one_that_is_being_retried_can_be_cancelled(api, receiver, subject):
    url = receiver.hook(500)
    message = api.publish(subject, to={"url": url, "retry": {"backoff": ["1h"]}})
    receiver.next(url)
    api.subscribe(unique("all"), subject)
    found = wait_until(lambda: state(api, message) == "scheduled" and api.look_up(message["id"]))
    assert found["attempts"] == 1
    api.ask("DELETE", f"/v1/messages/{message['id']}")
    assert state(api, message) == "cancelled"


def test_the_same_key_with_another_target_is_a_conflict(api, subject):
    message = {"subject": subject, "key": "k", "delay": "1h", "to": {"url": "http://127.0.0.1:9/a"}}
    api.ask("POST", "/v1/messages", 201, json=message)
    assert api.ask("POST", "/v1/messages", json=message)["duplicate"]
    other = {**message, "to": {"url": "http://127.0.0.1:9/b"}}
    api.ask("POST", "/v1/messages", 409, json=other)


@pytest.mark.parametrize(
    ("to", "pointer"),
    [
        ({"url": "http://example.com/"}, "/to/url"),
        ({"url": "http://169.254.169.254/"}, "/to/url"),
        ({"url": "ftp://127.0.0.1/"}, "/to/url"),
        ({"url": "http://127.0.0.1/", "secret": "x"}, "/to/secret"),
        ({"url": "http://127.0.0.1/", "timeout": "2h"}, "/to/timeout"),
        ({"url": "http://127.0.0.1/", "retry": {"max_attempts": 0}}, "/to/retry/max_attempts"),
        ({"url": "http://127.0.0.1/", "retry": {"backoff": ["2d"]}}, "/to/retry/backoff/0"),
        ({"url": "http://127.0.0.1/", "type": "kafka"}, "/to/type"),
        ({}, "/to/url"),
    ],
)
def test_what_is_refused(shared_api, to, pointer):
    message = {"subject": "to.bad", "to": to}
    problem = shared_api.ask("POST", "/v1/messages", 422, json=message)
    assert [one["pointer"] for one in problem["errors"]] == [pointer]
    under_key = shared_api.ask("PUT", "/v1/subjects/to.bad/keys/k", 422, json={"to": to})
    assert under_key["errors"] == problem["errors"]
    batch = shared_api.ask("POST", "/v1/messages/batch", 422, json=[message])
    assert batch["errors"][0]["pointer"] == f"/0{problem['errors'][0]['pointer']}"


def test_no_subscription_may_be_made_or_changed_by_that_name(shared_api):
    pull = {"subject": "a", "type": "pull"}
    for method, body in (("GET", None), ("DELETE", None), ("PUT", pull)):
        shared_api.ask(method, "/v1/subscriptions/_to", 422, json=body)


def test_nothing_of_it_is_lost_or_repeated_over_a_kill(lasting_api, receiver, subject):
    api = lasting_api
    url, fails = receiver.hook(), receiver.hook(500)
    delivered = api.publish(subject, to={"url": url})
    receiver.next(url)
    waits, moved, cancelled = (
        api.publish(subject, delay="1h", to={"url": url})["id"] for _ in range(3)
    )
    retried = {"url": fails, "retry": {"max_attempts": 2, "backoff": ["1h"]}}
    failed = api.publish(subject, to=retried)["id"]
    api.ask("PATCH", f"/v1/messages/{moved}", json={"delay": "90s"})
    api.ask("DELETE", f"/v1/messages/{cancelled}")
    wait_until(lambda: api.look_up(failed)["attempts"] == 1)
    api.recorded(delivered["id"])
    api.restart(kill=True)
    # What comes from now on is for others: a row that was moved has not fallen due.
    everything = receiver.hook()
    api.subscribe(unique("hook"), subject, url=everything)
    assert api.look_up(cancelled)["state"] == "cancelled"
    assert api.look_up(failed)["attempts"] == 1
    for message in (waits, moved):
        assert api.look_up(message)["state"] == "scheduled"
        api.ask("PATCH", f"/v1/messages/{message}", json={"delay": 0})
        assert receiver.next(url).headers["webhook-id"] == message
        api.recorded(message)
    plain = api.publish(subject)
    assert receiver.next(everything).headers["webhook-id"] == plain["id"]
    api.restart()
    last = api.publish(subject, to={"url": url})
    assert receiver.next(url).headers["webhook-id"] == last["id"]
    assert (receiver.count(url), receiver.count(fails)) == (0, 1)
