"""What can be done with a message, by id and by key: look up, cancel, move, replace."""

import json
import urllib.parse

import pytest

from tests.integration.api_support import now_ms, time_ms, unique
from tests.waiting import wait_until

NOBODY = "http://127.0.0.1:9/"

NOWHERE = "0" * 36
JSON = {"content-type": "application/json"}


@pytest.fixture
def api(either_api):
    return either_api


@pytest.fixture
def subject():
    return unique("messages")


@pytest.fixture(params=["id", "key"])
def address(request):
    """The path of a message that was published with a key."""

    def path(published):
        if request.param == "id":
            return f"/v1/messages/{published['id']}"
        return key_path(published["subject"], published["key"])

    return path


def key_path(subject, key):
    return f"/v1/subjects/{subject}/keys/{urllib.parse.quote(key, safe='')}"


def test_a_message_is_found(api, subject, address):
    published = api.publish(subject, key="k/1 ?é\n", body=[1], delay="2h")
    message = api.ask("GET", address(published))
    assert message["id"] == published["id"]
    assert message["key"] == "k/1 ?é\n"
    assert message["body"] == [1]
    assert message["state"] == "scheduled"


def test_a_cancel_is_definite_and_may_be_repeated(api, subject, address):
    published = api.publish(subject, key="k", delay="2s")
    path = api.subscribe(unique("consumer"), subject)
    cancelled = {"id": published["id"], "state": "cancelled"}
    assert api.ask("DELETE", address(published)) == cancelled
    assert api.ask("DELETE", address(published)) == cancelled
    assert api.ask("GET", address(published))["state"] == "cancelled"
    assert api.ask("PATCH", address(published), 409, json={"delay": 0})["state"] == "cancelled"
    later = api.publish(subject, deliver_at=time_ms(published["deliver_at"]) + 100)
    assert [message["id"] for message in api.pull(path)] == [later["id"]]


def test_a_cancelled_message_that_waited_for_a_subscription_never_comes(api, subject):
    cancelled, kept = api.publish(subject), api.publish(subject)
    wait_until(lambda: now_ms() > time_ms(kept["deliver_at"]) + 50)
    assert api.look_up(kept["id"])["state"] == "scheduled"
    api.ask("DELETE", f"/v1/messages/{cancelled['id']}")
    path = api.subscribe(unique("consumer"), subject)
    assert [message["id"] for message in api.pull(path)] == [kept["id"]]


def test_what_is_being_delivered_or_was_cannot_be_cancelled_or_moved(api, subject, address):
    path = api.subscribe(unique("consumer"), subject)
    published = api.publish(subject, key="k")
    (message,) = api.pull(path)
    for state in ("delivering", "delivered"):
        assert api.ask("GET", address(published))["state"] == state
        for method, document in (("DELETE", None), ("PATCH", {"delay": "1h"})):
            problem = api.ask(method, address(published), 409, json=document)
            assert problem["state"] == state
            assert problem["type"] == "urn:delayserver:problem:conflict"
        api.ack(path, message)
    found = api.ask("GET", address(published))
    assert found["attempts"] == 1
    (delivery,) = found["deliveries"]
    assert delivery["state"] == "delivered"
    assert path.endswith(delivery["subscription"])


def test_every_call_tells_the_same_state_of_a_message(api, subject):
    retry = {"max_attempts": 3, "backoff": ["1h"]}
    arrives, fails = unique("arrives"), unique("fails")
    path = api.subscribe(arrives, subject)
    api.subscribe(fails, subject, url=NOBODY, retry=retry)
    message_id = api.publish(subject)["id"]
    api.ack(path, *api.pull(path))

    def states():
        return [
            (one["subscription"], one["state"]) for one in api.look_up(message_id)["deliveries"]
        ]

    wait_until(lambda: sorted(states()) == sorted([(arrives, "delivered"), (fails, "scheduled")]))
    assert api.look_up(message_id)["state"] == "delivering"
    (listed,) = api.ask("GET", f"/v1/subjects/{subject}/messages")["messages"]
    assert (listed["id"], listed["state"]) == (message_id, "delivering")
    assert api.ask("DELETE", f"/v1/messages/{message_id}", 409)["state"] == "delivering"


def test_a_retry_for_the_only_receiver_is_cancelled_and_reads_so(api, subject):
    retry = {"max_attempts": 3, "backoff": ["1h"]}
    fails = unique("fails")
    api.subscribe(fails, f"{subject}.*", url=NOBODY, retry=retry)
    api.subscribe(unique("other"), f"{subject}.other")
    message_id = api.publish(f"{subject}.x")["id"]
    wait_until(lambda: api.look_up(message_id)["attempts"] == 1)
    (listed,) = api.ask("GET", f"/v1/subjects/{subject}.x/messages")["messages"]
    assert listed["state"] == "scheduled" == api.look_up(message_id)["state"]
    api.subscribe(unique("late"), f"{subject}.*")  # It came after the message.
    api.ask("DELETE", f"/v1/messages/{message_id}")
    found = api.look_up(message_id)
    deliveries = [(one["subscription"], one["state"]) for one in found["deliveries"]]
    assert (found["state"], deliveries) == ("cancelled", [(fails, "cancelled")])


def test_a_message_moves_and_keeps_its_id(api, subject, address):
    path = api.subscribe(unique("consumer"), subject)
    published = api.publish(subject, key="k", delay="1h")
    moved = api.ask("PATCH", address(published), json={"delay": "3h"})
    assert (moved["id"], moved["state"]) == (published["id"], "scheduled")
    assert time_ms(moved["deliver_at"]) > time_ms(published["deliver_at"]) + 3_600_000
    assert api.ask("GET", address(published))["deliver_at"] == moved["deliver_at"]
    at_ms = now_ms() + 200
    moved = api.ask("PATCH", address(published), json={"deliver_at": at_ms})
    assert time_ms(moved["deliver_at"]) == at_ms
    (message,) = api.pull(path)
    assert now_ms() >= at_ms
    assert message["id"] == published["id"]
    assert message["deliver_at"] == moved["deliver_at"]


@pytest.mark.parametrize(
    ("document", "pointer"),
    [
        ({}, "/delay"),
        ({"delay": "1h", "deliver_at": 1}, "/deliver_at"),
        ({"delay": "800d"}, "/delay"),
        ({"delay": True}, "/delay"),
        ({"delay": 1.5}, "/delay"),
        ({"deliver_at": []}, "/deliver_at"),
        ({"soon": 1}, "/soon"),
        ({"\ud800": 1}, ""),
        ([], ""),
    ],
)
def test_a_bad_move_is_refused(api, subject, address, document, pointer):
    published = api.publish(subject, key="k", delay="1h")
    content = json.dumps(document)
    problem = api.ask("PATCH", address(published), 422, content=content, headers=JSON)
    assert [error["pointer"] for error in problem["errors"]] == [pointer]
    assert api.look_up(published["id"])["deliver_at"] == published["deliver_at"]


@pytest.mark.parametrize(
    "content",
    [b"{", b"\xff", b"[" * 100_000, b"1" * 5000, b'{"delay": 1e400}', b'{"delay": NaN}', b""],
)
def test_what_is_not_json_is_refused(api, subject, content):
    published = api.publish(subject, delay="1h")
    path = f"/v1/messages/{published['id']}"
    problem = api.ask("PATCH", path, 422, content=content, headers=JSON)
    assert problem["type"] == "urn:delayserver:problem:invalid"
    problem = api.ask("PATCH", path, 422, content=b'{"delay": 1}', headers={"content-type": "a/b"})
    assert "application/json" in problem["detail"]


@pytest.mark.parametrize("method", ["GET", "DELETE", "PATCH"])
@pytest.mark.parametrize(
    "path",
    [
        f"/v1/messages/{NOWHERE}",
        "/v1/messages/x",
        "/v1/messages/%C3%A9",
        "/v1/messages/" + "٣" * 36,
        "/v1/messages/" + "0" * 35 + "%20",
        "/v1/subjects/nothing/keys/x",
        "/v1/subjects/nothing/keys/" + "x" * 300,
    ],
)
def test_what_is_not_there_is_not_found(api, method, path):
    document = {"delay": "1h"} if method == "PATCH" else None
    problem = api.ask(method, path, 404, json=document)
    assert problem["type"] == "urn:delayserver:problem:not-found"


@pytest.mark.parametrize("method", ["GET", "DELETE", "PATCH"])
def test_a_path_that_is_not_utf8_is_refused(api, method):
    """Keys that differ in such bytes alone would be one key."""
    document = {"delay": "1h"} if method == "PATCH" else None
    for path in ("/v1/messages/%C3%A9%FF", "/v1/subjects/nothing/keys/%FE"):
        problem = api.ask(method, path, 422, json=document)
        assert [error["pointer"] for error in problem["errors"]] == ["/path"]


def test_an_id_with_a_digit_changed_is_not_found(api, subject):
    message_id = api.publish(subject, delay="1h")["id"]
    for position in (0, 10, 20, 35):
        digit = "0" if message_id[position] != "0" else "1"
        wrong = message_id[:position] + digit + message_id[position + 1 :]
        api.ask("DELETE", f"/v1/messages/{wrong}", 404)


# ---- PUT by key --------------------------------------------------------------------------------


def test_put_publishes_then_replaces(api, subject):
    path = key_path(subject, "user/7")
    answer = api.put(path, json={"body": 1, "delay": "1h", "headers": {"x-a": "b"}})
    assert answer.status_code == 201
    first = answer.json()
    assert answer.headers["location"] == f"/v1/messages/{first['id']}"
    assert (first["subject"], first["key"]) == (subject, "user/7")
    second = api.ask("PUT", path, 200, json={"body": 2, "delay": "2h"})
    assert second["id"] != first["id"]
    assert api.look_up(first["id"])["state"] == "cancelled"
    assert api.ask("GET", path)["body"] == 2


def test_a_timer_that_is_pushed_back_fires_once_with_the_last_content(api, subject):
    path = api.subscribe(unique("consumer"), subject)
    for n in range(5):
        document = {"body": n, "delay": "2s"}
        last = api.ask("PUT", key_path(subject, "k"), 200 if n else 201, json=document)
    (message,) = api.pull(path)
    assert (message["id"], message["body"]) == (last["id"], 4)
    assert now_ms() >= time_ms(last["deliver_at"])
    api.ack(path, message)
    assert api.ask("PUT", key_path(subject, "k"), 201, json={"delay": "1h"})["id"] != last["id"]


def test_put_needs_no_body(api, subject):
    assert api.put(key_path(subject, "k")).status_code == 201


@pytest.mark.parametrize(
    ("key", "document", "pointer"),
    [
        ("k", {"subject": "x"}, "/subject"),
        ("k", {"delay": "1h", "deliver_at": 1}, "/deliver_at"),
        ("k" * 257, {}, "/key"),
        ("é" * 129, {}, "/key"),
        ("", {}, "/key"),
    ],
)
def test_a_bad_put_is_refused(api, subject, key, document, pointer):
    problem = api.ask("PUT", key_path(subject, key), 422, json=document)
    assert [error["pointer"] for error in problem["errors"]] == [pointer]


def test_put_with_too_large_a_body_is_refused(api, subject):
    api.ask("PUT", key_path(subject, "k"), 413, json={"body": "x" * 100_001})
    api.ask("PUT", key_path(subject, "k"), 413, content=(b" " * 99_999 for _ in range(100)))


# ---- many --------------------------------------------------------------------------------------


def test_many_are_cancelled_with_one_result_each(api, subject):
    path = api.subscribe(unique("consumer"), subject)
    api.publish(subject)
    (held,) = api.pull(path)
    first, second = (api.publish(subject, key=key, delay="1h") for key in "ab")
    answer = api.ask(
        "POST",
        "/v1/messages/cancel",
        json={
            "ids": [first["id"], first["id"], held["id"], NOWHERE],
            "keys": [{"subject": subject, "key": "b"}, {"subject": subject, "key": "c"}],
        },
    )
    results = answer["results"]
    assert [result["state"] for result in results] == [
        "cancelled",
        "cancelled",
        "delivering",
        None,
        "cancelled",
        None,
    ]
    assert [bool(result["error"]) for result in results] == [False, False, True, True, False, True]
    assert results[4]["id"] == second["id"]
    assert api.ask("POST", "/v1/messages/cancel", json={}) == {"results": []}
    for document in ({"ids": "x"}, {"keys": [{"subject": "a"}]}, {"all": True}):
        api.ask("POST", "/v1/messages/cancel", 422, json=document)
    for key in ("\ud800", ""):
        content = json.dumps({"keys": [{"subject": subject, "key": key}]})
        answer = api.post("/v1/messages/cancel", content=content, headers=JSON)
        assert answer.status_code == (422 if key else 200)
