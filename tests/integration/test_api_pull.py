"""Pulling: long polls, leases, ack, nack and extend, and consumers and servers that go away."""

import itertools
import json
import socket
import threading
import time

import pytest

from tests.integration.api_support import now_ms, time_ms, unique
from tests.waiting import wait_until


@pytest.fixture
def api(either_api):
    return either_api


@pytest.fixture
def subject():
    return unique("pull")


@pytest.fixture
def path(api, subject):
    return api.subscribe(unique("consumer"), subject)


def ids(messages):
    return [message["id"] for message in messages]


def ask_leases(api, path, action, *messages, **more):
    leases = [message["lease"] for message in messages]
    return api.ask("POST", f"{path}/{action}", json={"leases": leases, **more})


def test_what_a_consumer_gets(api, path, subject):
    headers = {"x-shop": "7"}
    published = api.publish(subject, body={"a": 1}, key="k", headers=headers, delay=50)
    (message,) = api.pull(path)
    assert now_ms() >= time_ms(published["deliver_at"])
    assert message.pop("lease")
    assert message == {
        "id": published["id"],
        "subject": subject,
        "key": "k",
        "headers": headers,
        "body": {"a": 1},
        "deliver_at": published["deliver_at"],
        "attempt": 1,
    }
    binary = api.publish(subject, body_base64="AP8=")
    (message,) = api.pull(path)
    assert (message["id"], message["body_base64"]) == (binary["id"], "AP8=")
    assert "body" not in message


def test_messages_come_in_due_order_as_many_as_asked_for(api, path, subject):
    at_ms = now_ms() + 300
    order = [3, 0, 4, 1, 2]
    batch = [{"subject": subject, "body": n, "deliver_at": at_ms + n} for n in order]
    api.ask("POST", "/v1/messages/batch", json=batch)
    wait_until(lambda: api.ask("GET", path)["queued"] == 5)
    first, second = api.pull(path, max=2), api.pull(path)
    assert [message["body"] for message in first + second] == [0, 1, 2, 3, 4]
    assert len(first) == 2
    assert api.pull(path, wait=0) == []
    assert api.ask("GET", path)["in_flight"] == 5
    assert api.ack(path, *first, *second) == {"acked": 5, "expired": []}
    assert api.ask("GET", path)["in_flight"] == 0


def test_a_pull_waits_for_as_many_messages_as_it_wants(api, path, subject):
    at_ms = now_ms() + 200
    for after_ms in (0, 150, 300):
        api.publish(subject, deliver_at=at_ms + after_ms)
    messages = api.pull(path, min_messages=3)
    assert len(messages) == 3
    assert now_ms() >= at_ms + 300


def test_when_its_wait_is_over_a_pull_gets_what_there_is(api, path, subject):
    api.publish(subject, body=1)
    wait_until(lambda: api.ask("GET", path)["queued"] == 1)
    begun_at = time.monotonic()
    (message,) = api.pull(path, min_messages=2, wait="300ms")
    assert message["body"] == 1
    assert time.monotonic() - begun_at >= 0.3
    assert api.pull(path, min_messages=2, wait=0) == []


def test_a_pull_cannot_wait_for_more_than_it_takes(api, path):
    answer = api.ask("POST", f"{path}/pull", 422, json={"max": 2, "min_messages": 3})
    assert answer["errors"][0]["pointer"] == "/min_messages"


def test_a_lease_is_good_for_its_own_subscription_only(api, path, subject):
    other = api.subscribe(unique("consumer"), unique("pull"))
    api.publish(subject)
    (message,) = api.pull(path)
    for action, more in (("ack", {}), ("nack", {}), ("extend", {"lease": "1m"})):
        assert ask_leases(api, other, action, message, **more)["expired"] == [message["lease"]]
    assert api.ack(path, message) == {"acked": 1, "expired": []}


def test_a_pull_needs_no_document(api, path):
    assert api.ask("POST", f"{path}/pull") == {"messages": []}


def test_a_long_poll_ends_when_something_falls_due_or_at_its_time(api, path, subject):
    began = time.monotonic()
    assert api.pull(path, wait="300ms") == []
    assert time.monotonic() - began >= 0.3
    published = api.publish(subject, delay="300ms")
    (message,) = api.pull(path)
    assert message["id"] == published["id"]
    assert now_ms() >= time_ms(published["deliver_at"])


def test_consumers_share_the_work(api, path, subject):
    pulled = []

    def consume():
        pulled.append(api.pull(path, max=1))

    consumers = [threading.Thread(target=consume) for _ in range(4)]
    for consumer in consumers:
        consumer.start()
    batch = [{"subject": subject, "delay": 100}] * 4
    published = api.ask("POST", "/v1/messages/batch", json=batch)["ids"]
    for consumer in consumers:
        consumer.join()
    assert sorted(ids(itertools.chain(*pulled))) == sorted(published)


def test_an_ack_is_for_once(api, path, subject):
    api.publish(subject)
    (message,) = api.pull(path)
    assert api.ack(path, message) == {"acked": 1, "expired": []}
    assert api.ack(path, message) == {"acked": 0, "expired": [message["lease"]]}
    wrong = ["", "x", "x-1-0", message["lease"] + "0", message["lease"].replace("-0", "--1"), "é"]
    assert api.ask("POST", f"{path}/ack", json={"leases": wrong}) == {"acked": 0, "expired": wrong}


def test_a_pull_acknowledges_what_was_done(api, path, subject):
    first, second = (api.publish(subject, body=n, delay=n) for n in range(2))
    leases = {id: message["lease"] for id, message in api.pull_held(path, 2).items()}
    done, over = leases[first["id"]], leases[second["id"]]
    api.ask("POST", f"{path}/nack", json={"leases": [over]})
    answer = api.ask("POST", f"{path}/pull", json={"ack": [done, over], "wait": "10s"})
    assert (answer["acked"], answer["expired"]) == (1, [over])
    assert ids(answer["messages"]) == [second["id"]]
    assert api.recorded(first["id"])
    nothing = api.ask("POST", f"{path}/pull", json={"ack": [done]})
    assert nothing == {"messages": [], "acked": 0, "expired": [done]}


def test_a_pull_that_is_refused_acknowledges_nothing(api, path, subject):
    api.publish(subject)
    (message,) = api.pull(path)
    api.ask("POST", f"{path}/pull", 422, json={"ack": [message["lease"]], "wait": "61s"})
    assert api.ack(path, message) == {"acked": 1, "expired": []}


def test_a_consumer_that_acknowledges_and_is_gone_has_acknowledged(api, path, subject):
    published = api.publish(subject)
    (message,) = api.pull(path)
    body = json.dumps({"wait": "60s", "ack": [message["lease"]]}).encode()
    head = f"POST {path}/pull HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", api.process.port)) as consumer:
        consumer.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        assert api.recorded(published["id"])


def test_what_is_refused_comes_again_at_once_or_later(api, path, subject):
    published = api.publish(subject)
    (message,) = api.pull(path)
    assert ask_leases(api, path, "nack", message) == {"nacked": 1, "expired": []}
    assert ask_leases(api, path, "nack", message) == {"nacked": 0, "expired": [message["lease"]]}
    (message,) = api.pull(path)
    assert (message["id"], message["attempt"]) == (published["id"], 2)
    before_ms = now_ms()
    ask_leases(api, path, "nack", message, delay="1500ms")
    assert api.look_up(published["id"])["state"] == "scheduled"
    (message,) = api.pull(path)
    assert now_ms() >= before_ms + 1500
    assert (message["id"], message["attempt"]) == (published["id"], 3)
    assert message["deliver_at"] == published["deliver_at"]
    api.ack(path, message)
    assert api.look_up(published["id"])["attempts"] == 3


def test_a_lease_that_is_over_makes_the_message_available_again(api, path, subject):
    published = api.publish(subject)
    (message,) = api.pull(path, lease="150ms")
    (again,) = api.pull(path)
    assert (again["id"], again["attempt"]) == (published["id"], 2)
    assert api.ack(path, message)["expired"] == [message["lease"]]
    assert api.ack(path, again)["acked"] == 1


def test_a_lease_can_be_extended_again_and_again(api, path, subject):
    api.publish(subject)
    (message,) = api.pull(path, lease="2s")
    for _ in range(2):
        answer = ask_leases(api, path, "extend", message, lease="1m")
        assert answer == {"extended": 1, "expired": []}
    assert api.pull(path, wait="2200ms") == []
    assert api.ack(path, message)["acked"] == 1
    answer = ask_leases(api, path, "extend", message, lease="1m")
    assert answer == {"extended": 0, "expired": [message["lease"]]}


def test_after_the_last_attempt_a_message_is_a_dead_letter(api, subject):
    path = api.subscribe(unique("consumer"), subject, retry={"max_attempts": 2})
    published = api.publish(subject, body=[1], key="k")
    for _ in range(2):
        (message,) = api.pull(path)
        ask_leases(api, path, "nack", message)
    (letter,) = api.ask("GET", f"{path}/dead-letters")["dead_letters"]
    assert (letter["id"], letter["attempts"], letter["body"]) == (published["id"], 2, [1])
    assert letter["reason"]
    assert api.look_up(published["id"])["state"] == "dead"


@pytest.mark.parametrize(
    ("action", "document", "pointer"),
    [
        ("pull", {"max": 0}, "/max"),
        ("pull", {"max": 10_001}, "/max"),
        ("pull", {"max": True}, "/max"),
        ("pull", {"wait": "61s"}, "/wait"),
        ("pull", {"wait": "soon"}, "/wait"),
        ("pull", {"lease": 0}, "/lease"),
        ("pull", {"count": 1}, "/count"),
        ("pull", {"ack": [1]}, "/ack/0"),
        ("ack", {}, "/leases"),
        ("ack", {"leases": [1]}, "/leases/0"),
        ("nack", {"leases": [], "delay": "1000d"}, "/delay"),
        ("nack", {"leases": [], "delay": -1}, "/delay"),
        ("extend", {"leases": []}, "/lease"),
        ("extend", {"leases": [], "lease": "8d"}, "/lease"),
    ],
)
def test_a_bad_document_is_refused(api, path, action, document, pointer):
    problem = api.ask("POST", f"{path}/{action}", 422, json=document)
    assert [error["pointer"] for error in problem["errors"]] == [pointer]


def test_a_webhook_is_not_pulled(api, subject):
    path = api.subscribe(unique("hook"), subject, url="http://127.0.0.1:9/")
    api.ask("POST", f"{path}/pull", 409)


def test_nothing_is_leased_to_a_consumer_that_is_gone(api, path, subject):
    head = f"POST {path}/pull HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    body = b'{"wait": "60s", "lease": "1h"}'
    before = api.metric("waiting_pulls")
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", api.process.port)) as consumer:
            consumer.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            wait_until(lambda: api.metric("waiting_pulls") > before)
    published = api.publish(subject, delay="100ms")
    (message,) = api.pull(path)
    assert (message["id"], message["attempt"]) == (published["id"], 1)
    assert "Exception" not in api.log


def test_deleting_a_subscription_ends_its_long_polls(api, subject):
    path = api.subscribe(unique("consumer"), subject)
    answers = []
    before = api.metric("waiting_pulls")
    consumer = threading.Thread(target=lambda: answers.append(api.pull(path, wait="25s")))
    consumer.start()
    wait_until(lambda: api.metric("waiting_pulls") > before)
    began = time.monotonic()
    api.delete(path)
    consumer.join()
    assert answers == [[]]
    assert time.monotonic() - began < 20


def hold_one(api, subject):
    """A message of which somebody has the lease, beside one that is done and one that is retried;
    the path of the subscription, and the ids."""
    path = api.subscribe(unique("consumer"), subject)
    done, held, later = (api.publish(subject, body=n, delay=n) for n in range(3))
    messages = api.pull_held(path, 3)
    api.ack(path, messages[done["id"]])
    ask_leases(api, path, "nack", messages[later["id"]], delay="1h")
    return path, messages[held["id"]], done["id"], later["id"]


def check_ended(api, path, done, later):
    assert api.pull(path, wait="200ms") == []
    assert api.look_up(done)["state"] == "delivered"
    assert api.look_up(later)["state"] == "scheduled"
    assert api.look_up(later)["attempts"] == 1


def test_after_a_kill_leases_are_over_and_what_was_acknowledged_stays_so(lasting_api, subject):
    api = lasting_api
    path, message, done, later = hold_one(api, subject)
    api.restart(kill=True)
    for action, more in (("ack", {}), ("nack", {}), ("extend", {"lease": "1m"})):
        answer = ask_leases(api, path, action, message, **more)
        assert answer["expired"] == [message["lease"]]
    (again,) = api.pull(path)
    assert (again["id"], again["attempt"]) == (message["id"], 2)
    api.ack(path, again)
    check_ended(api, path, done, later)


def test_leases_are_taken_while_it_stops_and_are_good_behind_a_planned_restart(
    lasting_api, subject
):
    api = lasting_api
    path, message, done, later = hold_one(api, subject)
    stopping = threading.Thread(target=api.restart)
    stopping.start()
    wait_until(lambda: api.post(f"{path}/pull", json={}).status_code == 503)
    answer = ask_leases(api, path, "extend", message, lease="1m")
    assert answer["expired"] == []
    stopping.join()
    assert api.pull(path, wait="200ms") == []
    assert ask_leases(api, path, "extend", message, lease="1m")["expired"] == []
    assert ask_leases(api, path, "ack", message)["expired"] == []
    check_ended(api, path, done, later)


def test_a_stop_ends_long_polls_with_an_answer(lasting_api, subject):
    api = lasting_api
    path = api.subscribe(unique("consumer"), subject)
    answers = []
    before = api.metric("waiting_pulls")
    consumer = threading.Thread(
        target=lambda: answers.append(api.post(f"{path}/pull", json={"wait": "60s"}))
    )
    consumer.start()
    wait_until(lambda: api.metric("waiting_pulls") > before)
    assert api.process.stop() == 0
    consumer.join()
    (answer,) = answers
    assert answer.status_code in (200, 503)
    assert "stopped" in api.log
