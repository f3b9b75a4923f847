"""Timers for users: heartbeats and watch keys, over real HTTP, and across SIGKILL."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.integration.api_support import now_ms, time_ms, unique
from tests.waiting import wait_until


@pytest.fixture
def api(either_api):
    return either_api


@pytest.fixture
def subject():
    return unique("timer")


@pytest.fixture
def path(api, subject):
    return api.subscribe(unique("consumer"), subject)


def put(api, key, subject, status=201, *, timeout="1h", **more):
    document = {"timeout": timeout, "subject": subject, **more}
    return api.ask("PUT", f"/v1/heartbeats/{key}", status, json=document)


# ── watch keys ─────────────────────────────────────────────────────────────────────────────────


def test_one_event_cancels_all_that_watch_its_key_whether_their_hour_is_loaded_or_not(api, subject):
    order, user = unique("order"), unique("user")
    ids = [
        api.publish(subject, delay=delay, watch=[order, user])["id"] for delay in ("1m", "5h", "9d")
    ]
    other = api.publish(subject, delay="5h", watch=[user])["id"]
    assert api.ask("POST", f"/v1/events/{order}") == {"cancelled": 3, "fired": 0}
    assert [api.look_up(message_id)["state"] for message_id in ids] == ["cancelled"] * 3
    assert api.look_up(other)["state"] == "scheduled"
    assert api.ask("POST", f"/v1/events/{order}") == {"cancelled": 0, "fired": 0}
    assert api.ask("POST", f"/v1/events/{user}") == {"cancelled": 1, "fired": 0}


def test_an_event_fires_what_waits_for_it_and_only_once(api, subject, path):
    first, second = unique("order"), unique("order")
    message = api.publish(
        subject, body={"n": 1.50}, delay="30d", watch=[first, second], on_event="fire", key="k"
    )
    before_ms = now_ms()
    assert api.ask("POST", f"/v1/events/{first}") == {"cancelled": 0, "fired": 1}
    assert api.ask("POST", f"/v1/events/{second}") == {"cancelled": 0, "fired": 0}
    (pulled,) = api.pull(path)
    assert (pulled["id"], pulled["body"], pulled["key"]) == (message["id"], {"n": 1.50}, "k")
    assert time_ms(pulled["deliver_at"]) >= before_ms
    api.ack(path, pulled)


def test_an_event_cancels_some_and_fires_others(api, subject, path):
    key = unique("order")
    api.publish(subject, body="reminder", delay="1h", watch=[key])
    api.publish(subject, body="thanks", delay="1h", watch=[key], on_event="fire")
    assert api.ask("POST", f"/v1/events/{key}") == {"cancelled": 1, "fired": 1}
    (pulled,) = api.pull(path)
    assert pulled["body"] == "thanks"


def test_an_event_that_very_many_watch_completes_all_of_them(api, subject):
    key, others = unique("order"), unique("order")
    for on_event in ("cancel", "fire"):
        batch = [
            {"subject": subject, "body": n, "delay": "2d", "watch": [key, others]}
            | {"on_event": on_event}
            for n in range(700)
        ]
        api.ask("POST", "/v1/messages/batch", json=batch)
    assert api.ask("POST", f"/v1/events/{key}") == {"cancelled": 700, "fired": 700}
    assert api.ask("POST", f"/v1/events/{others}") == {"cancelled": 0, "fired": 0}


def test_a_look_up_shows_what_a_message_watches(api, subject):
    message = api.publish(subject, delay="1h", watch=["a", "b/c"], on_event="fire")
    found = api.look_up(message["id"])
    assert (found["watch"], found["on_event"]) == (["a", "b/c"], "fire")
    assert "watch" not in api.look_up(api.publish(subject, delay="1h")["id"])


def test_watch_keys_are_part_of_the_content_of_a_key(api, subject):
    key = unique("order")
    first = {"subject": subject, "key": "k", "delay": "1h", "watch": [key]}
    message = api.publish(**first)
    again = api.ask("POST", "/v1/messages", json=first)
    assert (again["id"], again["duplicate"]) == (message["id"], True)
    api.ask("POST", "/v1/messages", 409, json={**first, "watch": [key, "other"]})
    api.ask("POST", "/v1/messages", 409, json={**first, "on_event": "fire"})


def test_a_message_that_was_moved_or_replaced_watches_on(api, subject):
    key = unique("order")
    moved = api.publish(subject, delay="1h", watch=[key])
    api.ask("PATCH", f"/v1/messages/{moved['id']}", json={"delay": "3d"})
    document = {"delay": "2h", "watch": [key], "body": 1}
    under_key = f"/v1/subjects/{subject}/keys/k"
    api.ask("PUT", under_key, 201, json=document)
    api.ask("PUT", under_key, 200, json={**document, "body": 2})
    assert api.ask("POST", f"/v1/events/{key}") == {"cancelled": 2, "fired": 0}
    assert api.ask("GET", under_key)["state"] == "cancelled"


@pytest.mark.parametrize("content_type", ["application/json", "application/x-ndjson"])
def test_a_batch_of_messages_that_watch(api, subject, content_type):
    key = unique("order")
    batch = [
        {"subject": subject, "body": n, "delay": "2d", "watch": [key], "on_event": on}
        for n, on in enumerate(["cancel", "fire"] * 10)
    ]
    lines = "\n".join(map(json.dumps, batch)) if "nd" in content_type else json.dumps(batch)
    headers = {"content-type": content_type}
    api.ask("POST", "/v1/messages/batch", content=lines, headers=headers)
    assert api.ask("POST", f"/v1/events/{key}") == {"cancelled": 10, "fired": 10}


def test_an_event_for_a_key_that_nobody_watches(api):
    key = unique("nobody")
    assert api.ask("POST", f"/v1/events/{key}") == {"cancelled": 0, "fired": 0}


@pytest.mark.parametrize(
    ("bad", "pointer"),
    [
        ({"watch": [""]}, "/watch/0"),
        ({"watch": ["ok", "x" * 257]}, "/watch/1"),
        ({"watch": [f"k{n}" for n in range(9)]}, "/watch"),
        ({"watch": ["twice", "twice"]}, "/watch"),
        ({"watch": "text"}, "/watch"),
        ({"watch": ["a"], "on_event": "explode"}, "/on_event"),
        ({"on_event": "fire"}, "/watch"),
    ],
)
def test_watch_keys_that_are_refused(api, subject, bad, pointer):
    answer = api.ask("POST", "/v1/messages", 422, json={"subject": subject, **bad})
    assert answer["errors"][0]["pointer"] == pointer
    answer = api.ask("POST", "/v1/messages/batch", 422, json=[{"subject": subject, **bad}])
    assert answer["errors"][0]["pointer"] == "/0" + pointer


def test_an_event_that_was_answered_holds_after_sigkill(lasting_api, subject):
    api, key = lasting_api, unique("order")
    path = api.subscribe(unique("consumer"), subject)
    batch = [
        {"subject": subject, "body": n, "delay": f"{n}h", "watch": [key, "all"], "on_event": on}
        for n in range(1, 30)
        for on in ("cancel", "fire")
    ]
    ids = api.ask("POST", "/v1/messages/batch", json=batch)["ids"]
    api.restart(kill=True)
    assert api.ask("POST", f"/v1/events/{key}") == {"cancelled": 29, "fired": 29}
    api.restart(kill=True)
    assert {api.look_up(message_id)["state"] for message_id in ids[::2]} == {"cancelled"}
    assert api.ask("POST", f"/v1/events/{key}") == {"cancelled": 0, "fired": 0}
    assert api.ask("POST", "/v1/events/all") == {"cancelled": 0, "fired": 0}
    assert sorted(m["body"] for m in api.pull_all(path, 29)) == list(range(1, 30))


def test_events_at_the_same_time_count_each_message_once(api, subject):
    key = unique("order")
    batch = [{"subject": subject, "body": n, "delay": "2d", "watch": [key]} for n in range(300)]
    api.ask("POST", "/v1/messages/batch", json=batch)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: api.ask("POST", f"/v1/events/{key}"), range(8)))
    assert sum(answer["cancelled"] for answer in answers) == 300


# ── heartbeats ─────────────────────────────────────────────────────────────────────────────────


def test_a_heartbeat_publishes_its_message_unless_it_is_renewed(api, subject, path):
    key = unique("worker")
    beat = {"timeout": "2s", "body": {"worker": 7}, "headers": {"x-a": "b"}}
    made = renewed = put(api, key, subject, **beat)
    assert (made["key"], made["timeout"], made["subject"]) == (key, "2s", subject)
    while now_ms() <= time_ms(made["expires_at"]):
        time.sleep(0.1)
        renewed = put(api, key, subject, 200, **beat)
    assert api.pull(path, wait=0) == []
    (pulled,) = api.pull(path)
    assert now_ms() >= time_ms(renewed["expires_at"])
    assert (pulled["body"], pulled["headers"]) == ({"worker": 7}, {"x-a": "b"})
    api.ask("GET", f"/v1/heartbeats/{key}", 404)
    api.ack(path, pulled)
    assert api.pull(path, wait="300ms") == []


def test_a_look_up_of_a_heartbeat(api, subject):
    key = unique("worker/with slash ü")
    put(api, key, subject, timeout=90_000, body={"n": 1})
    found = api.ask("GET", f"/v1/heartbeats/{key}")
    assert (found["key"], found["timeout"], found["body"]) == (key, "1m30s", {"n": 1})
    assert now_ms() < time_ms(found["expires_at"]) <= now_ms() + 90_000


def test_a_heartbeat_that_was_deleted_never_fires(api, subject, path):
    key = unique("worker")
    put(api, key, subject, timeout="2s", body="deleted")
    api.ask("DELETE", f"/v1/heartbeats/{key}", 204)
    api.ask("DELETE", f"/v1/heartbeats/{key}", 404)
    put(api, unique("worker"), subject, timeout="2s", body="kept")
    (pulled,) = api.pull(path)
    assert pulled["body"] == "kept"
    api.ack(path, pulled)
    assert api.pull(path, wait="300ms") == []


def test_another_definition_takes_the_place_of_the_first(api, subject, path):
    key = unique("worker")
    put(api, key, subject, timeout="2s", body=1)
    put(api, key, subject, 200, timeout="2500ms", body=2)
    (pulled,) = api.pull(path)
    assert pulled["body"] == 2
    assert api.pull(path, wait="300ms") == []


@pytest.mark.parametrize(
    ("bad", "pointer"),
    [
        ({"timeout": "soon"}, "/timeout"),
        ({"timeout": 0}, "/timeout"),
        ({"timeout": "9000d"}, "/timeout"),
        ({"subject": "no spaces"}, "/subject"),
        ({"delay": "1s"}, "/delay"),
        ({"body_base64": "?"}, "/body_base64"),
    ],
)
def test_heartbeats_that_are_refused(api, subject, bad, pointer):
    document = {"timeout": "1h", "subject": subject, **bad}
    answer = api.ask("PUT", "/v1/heartbeats/refused", 422, json=document)
    assert answer["errors"][0]["pointer"] == pointer
    api.ask("GET", "/v1/heartbeats/refused", 404)


def test_heartbeats_after_sigkill_begin_their_timeout_anew_and_fire_once(lasting_api, subject):
    api = lasting_api
    path = api.subscribe(unique("consumer"), subject)
    keys = [unique("worker") for _ in range(20)]
    made = [put(api, key, subject, timeout="3s", body=key) for key in keys]
    gone = keys.pop()
    api.ask("DELETE", f"/v1/heartbeats/{gone}", 204)
    api.process.kill()
    # No client can renew them meanwhile.
    wait_until(lambda: now_ms() > time_ms(made[-1]["expires_at"]))
    api.start()
    alive = keys[0]
    assert api.ask("GET", f"/v1/heartbeats/{alive}")["body"] == alive
    bodies: list[str] = []
    while len(bodies) < len(keys) - 1:
        put(api, alive, subject, 200, timeout="3s", body=alive)
        some = api.pull(path, wait="200ms")
        api.ack(path, *some)
        bodies += [message["body"] for message in some]
    assert sorted(bodies) == sorted(keys[1:])
    api.restart(kill=True)
    put(api, alive, subject, 200, timeout="3s", body=alive)
    (last,) = api.pull_all(path, 1)
    assert last["body"] == alive
    api.restart(kill=True)
    assert api.pull(path, wait="3500ms") == []


def test_both_ways_in_give_the_same_answers_for_heartbeats(api, subject):
    """A query takes a request past the fast way."""
    key = unique("worker")
    document = {"timeout": "1h", "subject": subject, "body": 1}
    for content in (json.dumps(document), "{", json.dumps({**document, "x": 1})):
        for name in (key, "", "x" * 300):
            answers = []
            for query in ("", "?way=asgi"):
                answer = api.put(f"/v1/heartbeats/{name}{query}", content=content)
                body = answer.json()
                body.pop("expires_at", None)
                answers.append((answer.status_code, answer.headers["content-type"], body))
            first, second = answers
            if first[0] == 201:
                first = (200, *first[1:])
            assert first == second


def test_metrics_of_what_waits(api, subject):
    put(api, unique("worker"), subject, timeout="1h")
    assert api.metric("heartbeats") >= 1
    assert api.metric("timeouts") >= 1
    for name in ("waiting_pulls", "watched_pulls", "heartbeats_fired_total", "events_total"):
        assert api.metric(name) >= 0


def test_many_heartbeats_over_one_connection_and_a_head_that_comes_in_pieces(api, subject):
    body = json.dumps({"timeout": "1h", "subject": subject}).encode()
    keys = [unique("worker") for _ in range(30)]
    host = httpx.URL(api.base_url)
    requests = b"".join(
        b"PUT /v1/heartbeats/%b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"
        % (key.encode(), len(body), body)
        for key in keys
    ).replace(b"host: x", b"host: 127.0.0.1")
    with socket.create_connection((host.host, host.port), timeout=20) as connection:
        for start in range(0, len(requests), 100):
            connection.sendall(requests[start : start + 100])
        received = b""
        while received.count(b"HTTP/1.1 201") < len(keys):
            part = connection.recv(65536)
            assert part, received[-300:]
            received += part
    wait_until(lambda: api.ask("GET", f"/v1/heartbeats/{keys[-1]}"))
