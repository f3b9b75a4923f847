"""Webhooks, from the publish to the receiver: what comes, when, signed, and what answers do."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from standardwebhooks import Webhook

from tests.integration.api_support import now_ms, time_ms, unique
from tests.waiting import wait_until

SECRET = "whsec_" + "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="
QUICK = {"max_attempts": 3, "backoff": ["100ms"]}


@pytest.fixture
def api(either_api):
    return either_api


@pytest.fixture
def subject():
    return unique("webhooks")


@pytest.fixture
def subscribe(api, subject):
    """Makes a subscription of the subject for a hook."""
    return lambda url, **more: api.subscribe(unique("hook"), subject, url=url, **more)


def letters(api, path):
    return api.ask("GET", f"{path}/dead-letters")["dead_letters"]


def state(api, published):
    return api.look_up(published["id"])["state"]


def test_what_a_receiver_gets(api, receiver, subscribe, subject):
    url = receiver.hook()
    subscribe(url, secret=SECRET)
    body = b'{"order": 1001,  "sum": 1e400}'
    published = api.ask(
        "POST",
        "/v1/messages",
        201,
        content=b'{"subject":"%s","body":%s,"key":"k/\xc3\xa9","delay":"200ms",'
        b'"headers":{"X-Shop":"7"}}' % (subject.encode(), body),
    )
    received = receiver.next(url)
    assert received.at_ms >= time_ms(published["deliver_at"])
    assert received.body == body
    headers = received.headers
    assert headers["webhook-id"] == published["id"]
    assert headers["delay-subject"] == subject
    assert headers["delay-key"] == "k/%C3%A9"
    assert headers["delay-due"] == published["deliver_at"]
    assert headers["delay-attempt"] == "1"
    assert headers["content-type"] == "application/json"
    assert headers["x-shop"] == "7"
    wait_until(lambda: state(api, published) == "delivered")


def test_the_signature_is_that_of_standard_webhooks(api, receiver, subscribe, subject):
    url = receiver.hook()
    subscribe(url, secret=SECRET)
    api.publish(subject, body={"order": 1001, "text": "ü"})
    received = receiver.next(url)
    verified = Webhook(SECRET).verify(received.body, received.headers)
    assert verified == {"order": 1001, "text": "ü"}


def test_without_a_secret_nothing_is_signed(api, receiver, subscribe, subject):
    url = receiver.hook()
    subscribe(url)
    api.publish(subject, body_base64="AP8=")
    received = receiver.next(url)
    assert "webhook-signature" not in received.headers
    assert received.headers["content-type"] == "application/octet-stream"
    assert received.body == b"\x00\xff"


def test_a_failed_webhook_is_tried_again_with_the_same_id(api, receiver, subscribe, subject):
    url = receiver.hook(500, (302, {"location": "http://127.0.0.1:9/"}), 204)
    subscribe(url, secret=SECRET, retry=QUICK)
    published = api.publish(subject, body=1)
    attempts = [receiver.next(url) for _ in range(3)]
    assert {one.headers["webhook-id"] for one in attempts} == {published["id"]}
    assert [one.headers["delay-attempt"] for one in attempts] == ["1", "2", "3"]
    assert {one.headers["delay-due"] for one in attempts} == {published["deliver_at"]}
    assert attempts[1].at_ms - attempts[0].at_ms >= 80  # 100 ms and 20 % of jitter
    assert attempts[2].at_ms - attempts[1].at_ms >= 160
    for one in attempts:
        Webhook(SECRET).verify(one.body, one.headers)
    assert [one["attempt"] for one in api.recorded(published["id"])] == [3]
    assert api.look_up(published["id"])["attempts"] == 3


def test_retry_after_is_honoured(api, receiver, subscribe, subject):
    url = receiver.hook((503, {"retry-after": "1"}), 200)
    subscribe(url, retry=QUICK)
    api.publish(subject)
    first, second = receiver.next(url), receiver.next(url)
    assert second.at_ms - first.at_ms >= 1000


def test_a_receiver_that_is_too_slow_has_failed(api, receiver, subscribe, subject):
    url = receiver.hook(gate=True)
    subscribe(url, timeout="200ms", retry={**QUICK, "max_attempts": 100})
    published = api.publish(subject)
    receiver.next(url)
    assert receiver.next(url).headers["delay-attempt"] == "2"
    receiver.open(url)
    wait_until(lambda: state(api, published) == "delivered")


def test_while_it_is_under_way_it_cannot_be_cancelled(api, receiver, subscribe, subject):
    url = receiver.hook(gate=True)
    subscribe(url)
    published = api.publish(subject)
    receiver.next(url)
    problem = api.ask("DELETE", f"/v1/messages/{published['id']}", 409)
    assert problem["state"] == "delivering"
    receiver.open(url)
    wait_until(lambda: state(api, published) == "delivered")


def test_a_retry_can_be_cancelled(api, receiver, subscribe, subject):
    url = receiver.hook(500)
    subscribe(url, retry={"max_attempts": 3, "backoff": ["1h"]})
    published = api.publish(subject)
    receiver.next(url)
    wait_until(lambda: state(api, published) == "scheduled")
    assert api.look_up(published["id"])["attempts"] == 1
    assert api.ask("DELETE", f"/v1/messages/{published['id']}")["state"] == "cancelled"
    assert state(api, published) == "cancelled"


def test_who_is_gone_is_paused_and_gets_it_after_resume(api, receiver, subscribe, subject):
    url = receiver.hook(410, 200)
    path = subscribe(url)
    published = api.publish(subject)
    receiver.next(url)
    wait_until(lambda: api.ask("GET", path)["paused"])
    assert receiver.count(url) == 0
    api.ask("POST", f"{path}/resume")
    again = receiver.next(url)
    assert again.headers["webhook-id"] == published["id"]
    assert again.headers["delay-attempt"] == "1"


def test_who_is_gone_and_has_a_new_url_is_paused_no_more(api, receiver, subscribe, subject):
    url, moved = receiver.hook(410), receiver.hook()
    path = subscribe(url)
    published = api.publish(subject)
    wait_until(lambda: api.ask("GET", path)["pause_reason"] == "gone")
    definition = {"subject": subject, "type": "webhook", "url": url}
    assert api.ask("PUT", path, json=definition)["pause_reason"] == "gone"
    assert api.ask("PUT", path, json=definition | {"url": moved})["paused"] is False
    assert receiver.next(moved).headers["webhook-id"] == published["id"]


def test_a_receiver_that_asks_for_time_uses_up_no_attempt(api, receiver, subscribe, subject):
    url = receiver.hook((429, {"retry-after": "2"}), 200)
    path = subscribe(url, retry={"max_attempts": 1})
    published = api.publish(subject)
    first, again = receiver.next(url), receiver.next(url)
    assert again.at_ms - first.at_ms >= 2000
    assert again.headers["webhook-id"] == published["id"]
    assert again.headers["delay-attempt"] == "1"
    wait_until(lambda: state(api, published) == "delivered")
    assert letters(api, path) == []


def test_no_more_are_under_way_than_the_subscription_allows(api, receiver, subscribe, subject):
    url = receiver.hook(gate=True)
    path = subscribe(url, max_in_flight=2)
    batch = [{"subject": subject, "body": n} for n in range(5)]
    api.ask("POST", "/v1/messages/batch", json=batch)
    wait_until(lambda: receiver.count(url) == 2)
    found = api.ask("GET", path)
    assert (found["in_flight"], found["queued"]) == (2, 3)
    receiver.open(url)
    assert sorted(json.loads(receiver.next(url).body) for _ in range(5)) == [0, 1, 2, 3, 4]


def test_a_slow_subscription_delays_no_other(api, receiver, subscribe, subject):
    slow, quick = receiver.hook(gate=True), receiver.hook()
    subscribe(slow, max_in_flight=1)
    subscribe(quick)
    api.ask("POST", "/v1/messages/batch", json=[{"subject": subject}] * 20)
    for _ in range(20):
        receiver.next(quick)
    wait_until(lambda: receiver.count(slow) == 1)  # whichever process may have it under way
    receiver.open(slow)


def test_dead_letters_are_listed_redriven_and_deleted(api, receiver, subscribe, subject):
    url = receiver.hook(*[500] * 6, 200)
    path = subscribe(url, retry={"max_attempts": 2, "backoff": ["1ms"]})
    published = [api.publish(subject, body=n, key=str(n), headers={"x-a": "b"}) for n in range(3)]
    wait_until(lambda: len(letters(api, path)) == 3)
    found = letters(api, path)
    # In the order in which their last attempts were scheduled, which overtake each other.
    order = [one["id"] for one in found]
    assert sorted(order) == sorted(one["id"] for one in published)
    published.sort(key=lambda one: order.index(one["id"]))
    first = found[0]
    assert (first["subject"], first["key"]) == (subject, published[0]["key"])
    assert first["key"] == str(first["body"])
    assert (first["headers"], first["attempts"]) == ({"x-a": "b"}, 2)
    assert "500" in first["reason"]
    assert {state(api, one) for one in published} == {"dead"}

    page = api.ask("GET", f"{path}/dead-letters?limit=2")
    assert page["dead_letters"] == found[:2]
    rest = api.ask("GET", f"{path}/dead-letters", params={"cursor": page["cursor"]})
    assert rest == {"dead_letters": found[2:], "cursor": None}

    ids = [published[1]["id"], "0" * 36]
    assert api.ask("POST", f"{path}/dead-letters/redrive", json={"ids": ids})["redriven"] == 1
    for _ in range(6):
        receiver.next(url)
    again = receiver.next(url)
    assert again.headers["webhook-id"] == published[1]["id"]
    wait_until(lambda: state(api, published[1]) == "delivered")
    api.ask("DELETE", f"{path}/dead-letters/{published[0]['id']}", 204)
    api.ask("DELETE", f"{path}/dead-letters/{published[0]['id']}", 404)
    assert letters(api, path) == found[2:]
    assert api.ask("POST", f"{path}/dead-letters/redrive")["redriven"] == 1
    assert receiver.next(url).headers["webhook-id"] == published[2]["id"]
    assert letters(api, path) == []


def test_dead_letters_of_a_deleted_subscription_are_those_of_its_name(
    lasting_api, receiver, subject
):
    api, name = lasting_api, unique("till")
    path = api.subscribe(name, subject, url=receiver.hook(400), retry={"max_attempts": 1})
    kept, dropped = api.publish(subject, body="kept"), api.publish(subject, body="dropped")
    wait_until(lambda: len(letters(api, path)) == 2)
    api.ask("DELETE", path, 204)
    api.ask("GET", path, 404)
    api.restart(kill=True)
    assert {one["id"] for one in letters(api, path)} == {kept["id"], dropped["id"]}
    problem = api.ask("POST", f"{path}/dead-letters/redrive", 409)
    assert "make it again" in problem["detail"]
    api.ask("DELETE", f"{path}/dead-letters/{dropped['id']}", 204)

    api.subscribe(name, subject)
    assert [one["body"] for one in letters(api, path)] == ["kept"]
    assert api.ask("POST", f"{path}/dead-letters/redrive")["redriven"] == 1
    assert letters(api, path) == []
    api.restart(kill=True)
    (message,) = api.pull(path)
    # Two kills since it fell due first: it may have been handed out before each.
    assert (message["id"], message["body"], message["attempt"]) == (kept["id"], "kept", 3)
    api.ack(path, message)
    assert state(api, kept) == "delivered"
    api.ask("DELETE", path, 204)
    api.ask("GET", f"{path}/dead-letters", 404)


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=1001", "limit=x", "cursor=x", "cursor=-1", "cursor=" + "9" * 21]
)
def test_a_bad_page_is_refused(api, subscribe, query):
    path = subscribe("http://127.0.0.1:9/")
    problem = api.ask("GET", f"{path}/dead-letters?{query}", 422)
    assert [error["pointer"] for error in problem["errors"]] == [f"/query/{query.split('=')[0]}"]
    assert letters(api, path) == []


def test_a_page_behind_all_is_empty(shared_api):
    name = unique("hook")
    shared_api.subscribe(name, name, url="http://127.0.0.1:9/")
    query = "limit=1&cursor=" + "9" * 20
    answer = shared_api.ask("GET", f"/v1/subscriptions/{name}/dead-letters?{query}")
    assert answer == {"dead_letters": [], "cursor": None}


def test_a_message_goes_to_a_webhook_and_a_consumer(api, receiver, subscribe, subject):
    url = receiver.hook(500, 200)
    subscribe(url, retry=QUICK)
    pulling = api.subscribe(unique("consumer"), subject)
    published = api.publish(subject)
    (message,) = api.pull(pulling)
    api.ack(pulling, message)
    assert message["id"] == published["id"] == receiver.next(url).headers["webhook-id"]
    assert receiver.next(url).headers["delay-attempt"] == "2"
    assert len(api.recorded(published["id"], 2)) == 2


@pytest.mark.parametrize("kill", [False, True], ids=["SIGTERM", "SIGKILL"])
def test_retries_dead_letters_and_pauses_outlive_the_process(lasting_api, receiver, subject, kill):
    api = lasting_api
    retried, buried, gone = receiver.hook(500, 200), receiver.hook(400), receiver.hook(410)
    retrying = api.subscribe(
        unique("retrying"), f"{subject}.retry", url=retried, retry={"backoff": ["3s"]}
    )
    burying = api.subscribe(
        unique("burying"), f"{subject}.bury", url=buried, retry={"max_attempts": 1}
    )
    pausing = api.subscribe(unique("pausing"), f"{subject}.pause", url=gone)
    retry = api.publish(f"{subject}.retry", body=1)
    dead = api.publish(f"{subject}.bury")
    paused = api.publish(f"{subject}.pause")
    first = receiver.next(retried)
    wait_until(lambda: letters(api, burying))
    wait_until(lambda: api.ask("GET", pausing)["paused"])
    wait_until(lambda: state(api, retry) == "scheduled")
    found = letters(api, burying)

    api.restart(kill=kill)
    second = receiver.next(retried)
    assert second.headers["webhook-id"] == first.headers["webhook-id"] == retry["id"]
    # A kill counts one more, since the message had fallen due.
    assert second.headers["delay-attempt"] == ("3" if kill else "2")
    assert second.at_ms >= first.at_ms + 2400
    api.recorded(retry["id"])
    assert letters(api, burying) == found
    assert state(api, dead) == "dead"
    assert api.ask("GET", pausing)["paused"] is True
    assert api.ask("GET", retrying)["paused"] is False

    api.restart(kill=kill)
    api.ask("POST", f"{burying}/dead-letters/redrive")
    api.ask("POST", f"{pausing}/resume")
    assert [receiver.next(buried).headers["webhook-id"] for _ in range(2)] == [dead["id"]] * 2
    assert [receiver.next(gone).headers["webhook-id"] for _ in range(2)] == [paused["id"]] * 2
    assert receiver.count(retried) == 0
    assert state(api, retry) == "delivered"


def test_messages_that_fell_due_while_the_server_was_down_come_in_due_order(
    lasting_api, receiver, subject
):
    api = lasting_api
    url = receiver.hook()
    api.subscribe(unique("hook"), subject, url=url, max_in_flight=1)
    at_ms = now_ms() + 300
    batch = [{"subject": subject, "body": n, "deliver_at": at_ms + 20 * n} for n in (2, 0, 1)]
    ids = api.ask("POST", "/v1/messages/batch", json=batch)["ids"]
    api.process.kill()
    wait_until(lambda: now_ms() > at_ms + 100)
    api.start()
    assert [json.loads(receiver.next(url).body) for _ in range(3)] == [0, 1, 2]
    wait_until(lambda: {api.look_up(one)["state"] for one in ids} == {"delivered"})
    api.restart()
    assert receiver.count(url) == 0


def test_a_stop_waits_for_what_is_under_way(lasting_api, receiver, subject):
    api = lasting_api
    url = receiver.hook(gate=True)
    api.subscribe(unique("hook"), subject, url=url, max_in_flight=1)
    first, second = api.publish(subject), api.publish(subject, delay=1)
    assert receiver.next(url).headers["webhook-id"] == first["id"]
    with ThreadPoolExecutor(1) as pool:
        stopped = pool.submit(api.process.stop)
        wait_until(lambda: refuses(api))
        assert not stopped.done()
        receiver.open(url)
        assert stopped.result() == 0
    assert receiver.count(url) == 0
    api.start()
    assert receiver.next(url).headers["webhook-id"] == second["id"]
    assert state(api, first) == "delivered"
    wait_until(lambda: state(api, second) == "delivered")


def refuses(api):
    """Whether the server does not take messages any more."""
    try:
        return httpx.get(f"{api.process.url}/readyz").status_code == 503
    except httpx.TransportError:
        return True


@pytest.mark.parametrize("others", [False, True])
def test_what_was_thrown_away_is_not_dead_any_more(lasting_api, receiver, subject, others):
    api, url = lasting_api, receiver.hook(500)
    path = api.subscribe(unique("hook"), subject, url=url, retry={"max_attempts": 1})
    pulls = api.subscribe(unique("pull"), subject) if others else None
    published = api.publish(subject)
    if pulls:
        api.pull_all(pulls, 1)
    [letter] = wait_until(lambda: letters(api, path))
    assert state(api, published) == "dead"
    api.ask("DELETE", f"{path}/dead-letters/{letter['id']}", 204)
    name, expected = path.rpartition("/")[2], "delivered" if others else "cancelled"
    for kill in (None, False, True):
        if kill is not None:
            api.restart(kill=kill)
        found = api.look_up(published["id"])
        assert found["state"] == expected
        assert {"subscription": name, "state": "cancelled", "attempt": 1} in [
            {key: one[key] for key in ("subscription", "state", "attempt")}
            for one in found["deliveries"]
        ]
        cancelled = api.delete(f"/v1/messages/{published['id']}")
        assert cancelled.status_code == (409 if others else 200)


# ---- how attempts went -------------------------------------------------------------------------


def attempts(api, published):
    return api.ask("GET", f"/v1/messages/{published['id']}/attempts")


def test_each_attempt_can_be_looked_up(api, receiver, subscribe, subject):
    long = "no! " * 1000
    url = receiver.hook((500, {}, long), (404, {}, "grüße"), (200, {}, "thanks"))
    path = subscribe(url, retry=QUICK)
    name = path.rpartition("/")[2]
    published = api.publish(subject, delay="1h")
    assert attempts(api, published) == {"attempts": [], "dropped": 0}
    api.ask("PATCH", f"/v1/messages/{published['id']}", json={"delay": 0})
    api.recorded(published["id"])
    # The note of the last one is written behind its delivery.
    wait_until(lambda: len(attempts(api, published)["attempts"]) == 3)
    found = attempts(api, published)
    assert found["dropped"] == 0
    assert [
        (one["subscription"], one["attempt"], one["outcome"], one["status"], one["error"])
        for one in found["attempts"]
    ] == [
        (name, 1, "failed", 500, "HTTP 500"),
        (name, 2, "failed", 404, "HTTP 404"),
        (name, 3, "delivered", 200, None),
    ]
    assert [one["answer"] for one in found["attempts"]] == [long[:1024], "grüße", "thanks"]
    times = [time_ms(one["at"]) for one in found["attempts"]]
    assert times == sorted(times) and times[0] >= now_ms() - 60_000
    assert all(one["duration"] for one in found["attempts"])


def test_attempts_of_a_dead_letter_and_of_one_that_is_redriven(api, receiver, subscribe, subject):
    url = receiver.hook(500, 503, 204)
    path = subscribe(url, retry={"max_attempts": 2, "backoff": ["100ms"]})
    published = api.publish(subject)
    wait_until(lambda: state(api, published) == "dead")
    found = attempts(api, published)["attempts"]
    assert [(one["attempt"], one["status"]) for one in found] == [(1, 500), (2, 503)]
    api.ask("POST", f"{path}/dead-letters/redrive")
    api.recorded(published["id"])
    found = attempts(api, published)["attempts"]
    assert [(one["attempt"], one["status"]) for one in found] == [(1, 500), (2, 503), (1, 204)]


def test_attempts_of_a_message_that_nobody_knows(api):
    api.ask("GET", "/v1/messages/nonsense/attempts", 404)


def test_attempts_of_what_is_pulled(api, subject):
    path = api.subscribe(unique("pull"), subject)
    published = api.publish(subject)
    [message] = api.pull(path)
    nack = {"leases": [message["lease"]], "delay": "100ms"}
    api.ask("POST", f"{path}/nack", json=nack)
    [message] = api.pull(path)
    assert message["attempt"] == 2
    api.ack(path, message)
    found = attempts(api, published)["attempts"]
    assert [(one["attempt"], one["outcome"], one["error"]) for one in found] == [
        (1, "failed", "given back (nack)"),
        (2, "delivered", None),
    ]
    assert all(one["duration"] and one["status"] is None for one in found)


# ---- once more ---------------------------------------------------------------------------------


def replay(api, published, status=200, query=""):
    return api.ask("POST", f"/v1/messages/{published['id']}/replay{query}", status)


def test_what_arrived_is_delivered_again_to_all_that_had_it(api, receiver, subscribe, subject):
    urls = [receiver.hook(), receiver.hook(500, 200)]
    names = [subscribe(url, retry=QUICK).rpartition("/")[2] for url in urls]
    published = api.publish(subject, body={"n": 1}, key="k", headers={"x-a": "1"})
    firsts = [receiver.next(url) for url in urls]
    receiver.next(urls[1])
    api.recorded(published["id"], 2)
    answer = replay(api, published)
    assert (answer["id"], answer["state"]) == (published["id"], "delivering")
    assert sorted(answer["subscriptions"]) == sorted(names)
    for url, first in zip(urls, firsts, strict=True):
        again = receiver.next(url)
        assert again.body == first.body
        for name in ("webhook-id", "delay-key", "delay-due", "x-a"):
            assert again.headers[name] == first.headers[name]
        assert (again.headers["delay-replay"], again.headers["delay-attempt"]) == ("1", "1")
        assert "delay-replay" not in first.headers

    def arrived():
        found = attempts(api, published)["attempts"]
        return sum(one["outcome"] == "delivered" for one in found)

    wait_until(lambda: arrived() == 4)
    # Once more, to one of them alone.
    assert replay(api, published, query=f"?subscription={names[0]}")["subscriptions"] == names[:1]
    assert receiver.next(urls[0]).headers["delay-replay"] == "1"
    wait_until(lambda: arrived() == 5)
    assert state(api, published) == "delivered" and receiver.count(urls[1]) == 0
    found = [(one["subscription"], one["outcome"]) for one in attempts(api, published)["attempts"]]
    assert sorted(found) == sorted(
        [(names[0], "delivered")] * 3 + [(names[1], "delivered")] * 2 + [(names[1], "failed")]
    )


def test_what_is_not_settled_cannot_be_replayed(api, receiver, subscribe, subject):
    url = receiver.hook(500)
    path = subscribe(url, retry={"max_attempts": 1})
    published = api.publish(subject, delay="1h")
    problem = replay(api, published, 409)
    assert "scheduled" in problem["detail"]
    api.ask("DELETE", f"/v1/messages/{published['id']}")
    assert "cancelled" in replay(api, published, 409)["detail"]
    published = api.publish(subject)
    wait_until(lambda: letters(api, path))
    assert "redriven" in replay(api, published, 409)["detail"]
    api.ask("POST", "/v1/messages/nonsense/replay", 404)


def test_a_replay_names_a_subscription_that_may_have_it(api, receiver, subscribe, subject):
    subscribe(receiver.hook())
    other = api.subscribe(unique("other"), unique("other"))
    published = api.publish(subject)
    api.recorded(published["id"])
    replay(api, published, 404, "?subscription=nobody")
    name = other.rpartition("/")[2]
    assert subject in replay(api, published, 409, f"?subscription={name}")["detail"]
    late = api.subscribe(unique("late"), subject)
    name = late.rpartition("/")[2]
    assert replay(api, published, query=f"?subscription={name}")["subscriptions"] == [name]
    [message] = api.pull(late)
    assert message["id"] == published["id"] and message["headers"]["delay-replay"] == "1"
    assert state(api, published) == "delivering"
    api.ask("DELETE", f"/v1/messages/{published['id']}", 409)
    api.ack(late, message)
    wait_until(lambda: state(api, published) == "delivered")


def test_a_replay_is_retried_like_any_delivery(api, receiver, subscribe, subject):
    url = receiver.hook(200, 500, 200)
    subscribe(url, retry=QUICK)
    published = api.publish(subject)
    receiver.next(url)
    api.recorded(published["id"])
    replay(api, published)
    tries = [receiver.next(url).headers for _ in range(2)]
    assert [(one["delay-attempt"], one["delay-replay"]) for one in tries] == [
        ("1", "1"),
        ("2", "1"),
    ]
    # It was delivered before the replay, and is so again.
    wait_until(lambda: len(attempts(api, published)["attempts"]) == 3)
    assert state(api, published) == "delivered"
    found = attempts(api, published)["attempts"]
    assert [(one["attempt"], one["status"]) for one in found] == [(1, 200), (1, 500), (2, 200)]


def test_a_replay_of_a_subscription_that_goes_meanwhile_is_for_nobody(
    api, receiver, subscribe, subject
):
    url = receiver.hook()
    path = subscribe(url)
    published = api.publish(subject)
    receiver.next(url)
    api.recorded(published["id"])
    api.ask("POST", f"{path}/pause")
    replay(api, published)
    heir = api.subscribe(unique("heir"), subject)
    api.ask("DELETE", path, 204)
    wait_until(lambda: state(api, published) == "delivered")
    assert api.ask("POST", f"{heir}/pull", json={"wait": 0})["messages"] == []
    assert "deleted" in replay(api, published, 409)["detail"]
