"""Publishing through real HTTP: one message, batches in four forms, and all that is refused."""

import base64
import json
from datetime import datetime, timedelta, timezone

import msgpack
import pyarrow as pa
import pytest

from delayserver.records.sharding import shard_of
from tests import arrow_streams
from tests.integration.api_support import now_ms, time_ms, unique

ONE = "/v1/messages"
BATCH = "/v1/messages/batch"
YEAR_MS = 365 * 86_400_000
JSON = {"content-type": "application/json"}
NDJSON = {"content-type": "application/x-ndjson"}
MSGPACK = {"content-type": "application/msgpack"}
ARROW = {"content-type": arrow_streams.ARROW}


@pytest.fixture
def api(either_api):
    return either_api


@pytest.fixture
def subject():
    return unique("publish")


def refused(answer, status):
    """The pointers of a problem document, and that it is one."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["status"] == status
    assert problem["type"] and problem["title"] and problem["detail"]
    return [error["pointer"] for error in problem.get("errors", [])]


# ---- one ---------------------------------------------------------------------------------------


def test_a_message_is_stored_and_its_location_shows_it(api, subject):
    before_ms = now_ms()
    answer = api.post(
        ONE,
        json={
            "subject": subject,
            "body": {"order": 1001},
            "delay": "30m",
            "key": "1001",
            "headers": {"x-shop": "7"},
        },
    )
    assert answer.status_code == 201
    assert answer.headers["content-type"] == "application/json"
    published = answer.json()
    assert published == {
        "id": published["id"],
        "subject": subject,
        "key": "1001",
        "deliver_at": published["deliver_at"],
        "state": "scheduled",
        "duplicate": False,
    }
    assert answer.headers["location"] == f"/v1/messages/{published['id']}"
    assert before_ms <= time_ms(published["deliver_at"]) - 30 * 60_000 <= now_ms()
    assert api.ask("GET", answer.headers["location"]) == {
        "id": published["id"],
        "subject": subject,
        "key": "1001",
        "deliver_at": published["deliver_at"],
        "state": "scheduled",
        "attempts": 0,
        "headers": {"x-shop": "7"},
        "deliveries": [],
        "body": {"order": 1001},
    }


@pytest.mark.parametrize(
    "body",
    [
        b"null",
        b'"text"',
        b"[]",
        b"3.10",
        b"1e400",
        b"123456789012345678901234567890",
        b'{"a": 1, "a": 2}',
        '{"ключ": "Ж😀"}'.encode(),
        b'"\\u0000"',
    ],
)
def test_a_body_stays_as_it_is_byte_for_byte(api, subject, body):
    request = b'{"subject":"%s","delay":"1h","body":%s}' % (subject.encode(), body)
    answer = api.post(ONE, content=request)
    assert answer.status_code == 201, answer.text
    assert b'"body":' + body in api.get(answer.headers["location"]).content


def test_a_binary_body_comes_as_base64(api, subject):
    data = base64.b64encode(bytes(range(256))).decode()
    published = api.publish(subject, body_base64=data, delay="1h")
    message = api.look_up(published["id"])
    assert message["body_base64"] == data
    assert "body" not in message


def test_nothing_but_a_subject_is_needed_and_null_means_not_given(api, subject):
    bare = api.publish(subject)
    nulls = dict.fromkeys(["delay", "deliver_at", "key", "headers", "body_base64"])
    full = api.publish(subject, **nulls)
    for published in (bare, full):
        assert published["key"] is None
        assert time_ms(published["deliver_at"]) <= now_ms()
        assert api.look_up(published["id"])["body"] is None


@pytest.mark.parametrize("deliver_at", ["2001-02-03T04:05:06Z", 0, -5])
def test_a_time_in_the_past_means_now(api, subject, deliver_at):
    before_ms = now_ms()
    published = api.publish(subject, deliver_at=deliver_at)
    assert before_ms <= time_ms(published["deliver_at"]) <= now_ms()


def test_a_time_may_have_any_offset(api, subject):
    at_ms = (now_ms() // 1000 + 7200) * 1000
    published = api.publish(subject, deliver_at=at_ms)
    assert published["deliver_at"].endswith(".000Z")
    east = timezone(timedelta(hours=5, minutes=30))
    text = datetime.fromtimestamp(at_ms / 1000, east).isoformat()
    assert text.endswith("+05:30")
    again = api.publish(subject, deliver_at=text)
    assert again["deliver_at"] == published["deliver_at"]


def test_the_longest_delay_is_accepted_and_a_longer_one_refused_not_clamped(api, subject):
    published = api.publish(subject, delay="730d")
    assert time_ms(published["deliver_at"]) > now_ms() + 2 * YEAR_MS - 60_000
    request = {"subject": subject, "delay": 2 * YEAR_MS + 1}
    assert refused(api.post(ONE, json=request), 422) == ["/delay"]
    request = {"subject": subject, "deliver_at": now_ms() + 3 * YEAR_MS}
    assert refused(api.post(ONE, json=request), 422) == ["/deliver_at"]
    request = {"subject": subject, "deliver_at": "9999-12-31T23:59:59Z"}
    assert refused(api.post(ONE, json=request), 422) == ["/deliver_at"]


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"subject": None}, "/subject"),
        ({"subject": ""}, "/subject"),
        ({"subject": ".a"}, "/subject"),
        ({"subject": "a b"}, "/subject"),
        ({"subject": "a" * 129}, "/subject"),
        ({"subject": "a\n"}, "/subject"),
        ({"subject": 7}, "/subject"),
        ({"delay": "1h", "deliver_at": 5}, "/deliver_at"),
        ({"delay": "1.5h"}, "/delay"),
        ({"delay": -1}, "/delay"),
        ({"delay": True}, "/delay"),
        ({"delay": 1.5}, "/delay"),
        ({"delay": ""}, "/delay"),
        ({"deliver_at": "2030-01-01T00:00:00"}, "/deliver_at"),
        ({"deliver_at": "tomorrow"}, "/deliver_at"),
        ({"deliver_at": 10**20}, "/deliver_at"),
        ({"key": ""}, "/key"),
        ({"key": "k" * 257}, "/key"),
        ({"key": "é" * 129}, "/key"),
        ({"key": 5}, "/key"),
        ({"headers": {"a b": "x"}}, "/headers/a b"),
        ({"headers": {"x/~": "x"}}, "/headers/x~1~0"),
        ({"headers": {"x-a": "line\nbreak"}}, "/headers/x-a"),
        ({"headers": {"Content-Length": "0"}}, "/headers/Content-Length"),
        ({"headers": {"webhook-id": "0"}}, "/headers/webhook-id"),
        ({"headers": {"x-a": "x" * 20_000}}, "/headers"),
        ({"headers": {"x-a": 1}}, "/headers/x-a"),
        ({"headers": []}, "/headers"),
        ({"body": 1, "body_base64": "AA=="}, "/body_base64"),
        ({"body_base64": "no base64"}, "/body_base64"),
        ({"body_base64": "é"}, "/body_base64"),
        ({"dealy": "1h"}, "/dealy"),
        ({"a/b": 1}, "/a~1b"),
    ],
)
def test_a_bad_field_is_named(api, subject, change, pointer):
    document = {"subject": subject, **change}
    assert refused(api.post(ONE, json=document), 422) == [pointer]
    assert refused(api.post(BATCH, json=[document]), 422) == ["/0" + pointer]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff",
        b"\xef\xbb\xbf{}",
        b'{"subject":"\xff"}',
        b'{"subject":"a","body":"\xff"}',
        b'{"subject":"a","body":NaN}',
        b'{"subject":"a"} {}',
        b'{"subject":"\\ud800"}',
        b'{"subject":"a","\\ud800":1}',
        b'{"subject":"a","body":' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
def test_what_is_not_json_is_refused(api, data):
    refused(api.post(ONE, content=data), 422)
    refused(api.post(BATCH, content=b"[%b]" % data if data else b"", headers=JSON), 422)
    if data:
        refused(api.post(BATCH, content=data, headers=NDJSON), 422)


def test_what_is_too_large_is_refused(api, subject):
    fitting = "x" * (100_000 - 2)
    assert api.post(ONE, json={"subject": subject, "body": fitting}).status_code == 201
    body = {"subject": subject, "body": fitting + "x"}
    assert refused(api.post(ONE, json=body), 413) == ["/body"]
    assert refused(api.post(ONE, json={"subject": subject, "body": "x" * 10**6}), 413) == [""]

    def chunks():
        for _ in range(100):
            yield b" " * 10_000

    assert refused(api.post(ONE, content=chunks()), 413) == [""]
    answer = api.post("/v1/messages/cancel", content=b" " * 9_000_000, headers=JSON)
    assert refused(answer, 413) == [""]
    assert refused(api.post(BATCH, json=[{"subject": subject}] * 1001), 413) == [""]


# ---- keys --------------------------------------------------------------------------------------


def test_the_same_key_and_content_is_a_duplicate_other_content_a_conflict(api, subject):
    document = {"subject": subject, "key": "1001", "body": {"a": 1}, "delay": "1h"}
    first = api.ask("POST", ONE, 201, json=document)
    again = api.post(ONE, json={**document, "delay": "2h"})
    assert again.status_code == 200
    assert again.json() == {**first, "duplicate": True}
    assert again.headers["location"] == f"/v1/messages/{first['id']}"
    conflict = api.post(ONE, json={**document, "body": {"a": 2}})
    refused(conflict, 409)
    assert conflict.json()["state"] == "scheduled"
    other = api.publish(subject + "-other", key="1001", body={"a": 2}, delay="1h")
    assert other["id"] != first["id"]


def test_a_duplicate_of_a_delivered_message_says_so(api, subject):
    path = api.subscribe(unique("consumer"), subject)
    document = {"subject": subject, "key": "1001", "body": 1}
    first = api.ask("POST", ONE, 201, json=document)
    (message,) = api.pull(path)
    api.ack(path, message)
    again = api.ask("POST", ONE, 200, json=document)
    assert (again["id"], again["state"], again["duplicate"]) == (first["id"], "delivered", True)


def test_a_publish_behind_the_cancel_of_its_repetition_does_not_fire(api, subject):
    path = api.subscribe(unique("consumer"), subject)
    document = {"subject": subject, "key": "1001", "body": 1, "delay": "500ms"}
    first = api.ask("POST", ONE, 201, json=document)
    api.ask("DELETE", f"{ONE}/{first['id']}")
    late = api.ask("POST", ONE, 200, json=document)
    assert (late["id"], late["state"], late["duplicate"]) == (first["id"], "cancelled", True)
    batch = api.ask("POST", BATCH, json=[document])
    assert (batch["duplicates"], batch["ids"]) == (1, [first["id"]])
    # On purpose, with the same content.
    again = api.ask("PUT", f"/v1/subjects/{subject}/keys/1001", 201, json={"body": 1})
    (message,) = api.pull(path)
    assert message["id"] == again["id"] != first["id"]
    assert not api.pull(path, wait="600ms")


# ---- batches -----------------------------------------------------------------------------------


def encode(form, messages):
    if form is NDJSON:
        return "".join(json.dumps(message) + "\r\n\n" for message in messages).encode()
    if form is MSGPACK:
        return msgpack.packb(messages)
    if form is ARROW:
        return arrow_streams.arrow_of(messages)
    return json.dumps(messages).encode()


@pytest.mark.parametrize("form", [JSON, NDJSON, MSGPACK, ARROW])
def test_a_batch_is_accepted_in_order(api, subject, form):
    messages = [{"subject": subject, "body": {"n": n}, "delay": "1h"} for n in range(50)]
    answer = api.ask("POST", BATCH, content=encode(form, messages), headers=form)
    assert answer["count"] == 50
    assert answer["duplicates"] == 0
    assert len(set(answer["ids"])) == 50
    assert api.look_up(answer["ids"][0])["body"] == {"n": 0}
    assert api.look_up(answer["ids"][49])["body"] == {"n": 49}


@pytest.mark.parametrize("form", [JSON, NDJSON, MSGPACK, ARROW])
def test_a_batch_with_bad_items_is_refused_whole_and_each_is_named(api, subject, form):
    messages = [
        {"subject": subject, "key": "first", "delay": "1h"},
        {"subject": "no subject"},
        {"subject": subject, "delay": "1h", "deliver_at": 1},
        {"body": 1},
        {"subject": subject, "body": "x" * 100_001},
    ]
    wrong = ["/1/subject", "/2/deliver_at", "/3/subject", "/4/body"]
    if form is not ARROW:  # where all messages have the same fields
        messages.append({"subject": subject, "unknown": 1})
        wrong.append("/5/unknown")
    answer = api.post(BATCH, content=encode(form, messages), headers=form)
    assert refused(answer, 422) == wrong
    assert api.get(f"/v1/subjects/{subject}/keys/first").status_code == 404


@pytest.mark.parametrize("form", [JSON, NDJSON, MSGPACK, ARROW])
def test_an_empty_batch_is_nothing(api, form):
    answer = api.ask("POST", BATCH, content=encode(form, []), headers=form)
    assert answer == {"count": 0, "duplicates": 0, "ids": []}


@pytest.mark.parametrize("form", [JSON, NDJSON, MSGPACK, ARROW])
def test_duplicates_in_a_batch_have_the_first_id_and_conflicts_leave_no_trace(api, subject, form):
    first = api.publish(subject, key="a", body=1, delay="1h")
    batch = [
        {"subject": subject, "key": "a", "body": 1},
        {"subject": subject, "key": "b", "body": 2, "delay": "1h"},
        {"subject": subject, "key": "b", "body": 2},
    ]
    answer = api.ask("POST", BATCH, content=encode(form, batch), headers=form)
    assert (answer["count"], answer["duplicates"]) == (3, 2)
    assert answer["ids"][0] == first["id"]
    assert answer["ids"][1] == answer["ids"][2]
    # All or none of what one shard has.
    owner = shard_of(subject, "a", 2)
    key = next(key for key in "cdefghijklmnop" if shard_of(subject, key, 2) == owner)
    new = {"subject": subject, "key": key, "body": 3}
    bad = {"subject": subject, "key": "a", "body": 4}
    answer = api.post(BATCH, content=encode(form, [new, bad]), headers=form)
    assert refused(answer, 422) == ["/1/key"]
    assert api.get(f"/v1/subjects/{subject}/keys/{key}").status_code == 404


def test_bodies_of_a_batch_of_arrow(api, subject):
    table = pa.table(
        {"subject": [subject] * 2, "body": [b"\x00\xff", None], "delay": [3_600_000] * 2}
    )
    content = arrow_streams.stream_of(table)
    ids = api.ask("POST", BATCH, content=content, headers=ARROW)["ids"]
    binary, nothing = map(api.look_up, ids)
    assert binary["body_base64"] == "AP8="
    assert nothing["body"] is None
    answer = api.post(BATCH, content=content[:-1], headers=ARROW)
    assert refused(answer, 422) == [""]


def test_a_batch_of_arrow_says_what_it_waits_for(api, subject):
    content = arrow_streams.arrow_of([{"subject": subject, "delay": 3_600_000}])
    answer = api.post(f"{BATCH}?ack=filed", content=content, headers=ARROW)
    assert (answer.status_code, answer.json()["count"]) == (200, 1)


def test_bodies_of_a_msgpack_batch(api, subject):
    bodies = [b"\x00\xff", {"a": [1, 2.5, None, "ü"]}, "text", True]
    batch = [{"subject": subject, "body": body, "delay": "1h"} for body in bodies]
    ids = api.ask("POST", BATCH, content=msgpack.packb(batch), headers=MSGPACK)["ids"]
    binary, *others = map(api.look_up, ids)
    assert binary["body_base64"] == "AP8="
    assert [message["body"] for message in others] == bodies[1:]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x91",
        b"\x91" * 5000 + b"\x01",
        msgpack.packb({"subject": "a"}),
        msgpack.packb([{"subject": b"a"}]),
        msgpack.packb([{"subject": "a", "body": msgpack.ExtType(5, b"x")}]),
        msgpack.packb([{"subject": "a", 1: 2}]),
        msgpack.packb([1]),
        msgpack.packb([]) + b"\x00",
        b"\x91\x82\xa7subject\xa1a\xa4body\xa1\xff",
        b"\x91\x82\xa7subject\xa1a\xa4body" + b"\x91" * 5000 + b"\x01",
    ],
)
def test_what_is_not_msgpack_is_refused(api, data):
    refused(api.post(BATCH, content=data, headers=MSGPACK), 422)


# ---- when to answer --------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/batch"])
def test_a_publish_may_wait_until_it_is_filed(shared_api, path):
    message = {"subject": "acked", "delay": "1h"}
    document = [message] if path.endswith("batch") else message
    good = 200 if path.endswith("batch") else 201
    for query in ("?ack=durable", "?ack=filed", "?ack=filed&timeout=30s", "?timeout=1s"):
        answer = shared_api.post(path + query, json=document)
        assert answer.status_code == good, answer.text
        if "filed" in query:
            found = answer.json()
            shared_api.look_up(found["id"] if "id" in found else found["ids"][0])


def test_a_publish_that_is_not_filed_in_time_is_durable_and_says_so(shared_api):
    message = {"subject": "acked", "delay": "1h", "body": 1}
    answer = shared_api.post("/v1/messages?ack=filed&timeout=1ms", json=message)
    if answer.status_code == 504:  # The disk took longer than that.
        assert "accepted" in answer.json()["detail"]
    else:
        assert answer.status_code in (201, 202)
        assert shared_api.look_up(answer.json()["id"])["state"] == "scheduled"


def test_a_duplicate_waits_likewise(shared_api):
    message = {"subject": "acked", "delay": "1h", "key": "twice"}
    first = shared_api.post("/v1/messages?ack=filed", json=message)
    again = shared_api.post("/v1/messages?ack=filed", json=message)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["id"] == again.json()["id"]


@pytest.mark.parametrize(
    ("query", "pointer"),
    [
        ("ack=soon", "/query/ack"),
        ("ack=", "/query/ack"),
        ("timeout=never", "/query/timeout"),
        ("timeout=2m", "/query/timeout"),
        ("acks=filed", "/query/acks"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/batch"])
def test_what_a_publish_cannot_wait_for(shared_api, path, query, pointer):
    before = shared_api.ask("GET", "/v1/stats")["accepted"]
    document = {"subject": "acked", "delay": "1h"}
    body = [document] if path.endswith("batch") else document
    answer = shared_api.ask("POST", f"{path}?{query}", 422, json=body)
    assert answer["errors"][0]["pointer"] == pointer
    assert shared_api.ask("GET", "/v1/stats")["accepted"] == before
