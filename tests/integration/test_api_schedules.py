"""Schedules over real HTTP: alone and of two shards, and across SIGKILL."""

import pytest

from tests.integration.api_support import now_ms, time_ms, unique
from tests.waiting import wait_until


@pytest.fixture
def api(either_api):
    return either_api


@pytest.fixture
def subject():
    return unique("schedule")


@pytest.fixture
def name():
    return unique("daily")


def put(api, name, subject, status=201, **fields):
    fields = fields or {"every": "1h"}
    return api.ask("PUT", f"/v1/schedules/{name}", status, json={"subject": subject, **fields})


def test_a_schedule_publishes_messages_with_its_name_and_their_planned_time(api, name, subject):
    path = api.subscribe(unique("consumer"), subject)
    start_ms = now_ms() + 300
    made = put(
        api,
        name,
        subject,
        body={"n": 1.50},
        headers={"x-shop": "7"},
        every="1s",
        start_at=start_ms,
        max_runs=2,
    )
    assert [time_ms(one) for one in made["next_at"]] == [start_ms, start_ms + 1000]
    assert made["last_at"] is None and made["last_id"] is None and made["runs"] == 0
    first, second = api.pull_all(path, 2)
    for number, message in enumerate((first, second)):
        planned = made["next_at"][number]
        assert message["body"] == {"n": 1.50}
        assert message["key"] == f"{name}@{planned}"
        assert message["headers"] == {
            "delay-schedule": name,
            "delay-planned": planned,
            "x-shop": "7",
        }
        assert 0 <= time_ms(message["deliver_at"]) - time_ms(planned) < 2000
    found = api.ask("GET", f"/v1/schedules/{name}")
    assert found["next_at"] == [] and found["runs"] == 2 and found["skipped"] == 0
    assert found["last_at"] == made["next_at"][1] and found["last_id"] == second["id"]
    by_key = api.ask("GET", f"/v1/subjects/{subject}/keys/{first['key']}")
    assert by_key["id"] == first["id"]


def test_a_run_goes_to_a_webhook_too(api, name, subject, receiver):
    url = receiver.hook()
    api.subscribe(unique("hook"), subject, url=url)
    put(api, name, subject, body=1, cron="@yearly")
    run = api.ask("POST", f"/v1/schedules/{name}/trigger", 201)
    headers = receiver.next(url).headers
    assert headers["webhook-id"] == run["id"]
    assert headers["delay-schedule"] == name
    assert f"{name}@{headers['delay-planned']}" == run["key"]


def test_what_was_put_is_shown_as_it_was_put(api, name, subject):
    wanted = {
        "body": {"a": [1]},
        "headers": {"x-a": "b"},
        "cron": "0 9 * * MON-FRI",
        "timezone": "Europe/Berlin",
        "jitter": "30s",
        "catch_up": "all",
        "overlap": "skip",
        "start_at": "2026-11-20T00:00:00.000Z",
        "end_at": "2097-01-01T00:00:00.000Z",
        "max_runs": 100,
    }
    made = put(api, name, subject, **wanted)
    assert {key: made[key] for key in wanted} == wanted
    assert made["name"] == name and made["every"] is None and made["paused"] is False
    assert len(made["next_at"]) == 5
    assert api.ask("GET", f"/v1/schedules/{name}") == made
    assert put(api, name, subject, 200, **wanted) == made
    planned = api.ask("POST", "/v1/schedules/preview", json={"subject": subject, **wanted})
    assert planned == {"next_at": made["next_at"]}
    binary = put(api, unique("daily"), subject, every="2h", body_base64="AP8=")
    assert binary["body_base64"] == "AP8=" and "body" not in binary
    assert (binary["every"], binary["timezone"], binary["catch_up"]) == ("2h", "UTC", "last")


def test_a_preview_stores_nothing(api, subject):
    wanted = {"subject": subject, "cron": "0 0 29 2 *", "timezone": "Asia/Tokyo"}
    planned = api.ask("POST", "/v1/schedules/preview?count=2", json=wanted)["next_at"]
    assert [one[4:] for one in planned] == ["-02-28T15:00:00.000Z"] * 2
    api.ask("GET", "/v1/schedules/preview", 404)


def test_pause_resume_trigger_and_delete(api, name, subject):
    path = api.subscribe(unique("consumer"), subject)
    put(api, name, subject, body=1, every="1h")
    assert api.ask("POST", f"/v1/schedules/{name}/pause")["paused"] is True
    answer = api.request("POST", f"/v1/schedules/{name}/trigger")
    assert answer.status_code == 201
    triggered = answer.json()
    assert answer.headers["location"] == f"/v1/messages/{triggered['id']}"
    assert triggered["subject"] == subject and triggered["state"] == "scheduled"
    (message,) = api.pull_all(path, 1)
    assert message["id"] == triggered["id"] and message["key"] == triggered["key"]
    found = api.ask("POST", f"/v1/schedules/{name}/resume")
    assert found["paused"] is False and found["runs"] == 1 and found["last_id"] == message["id"]
    api.ask("DELETE", f"/v1/schedules/{name}", 204)
    for method, verb in (("GET", ""), ("DELETE", ""), ("POST", "/pause"), ("POST", "/trigger")):
        answer = api.ask(method, f"/v1/schedules/{name}{verb}", 404)
        assert f"no schedule '{name}'" in answer["detail"]


def test_a_change_to_another_version_than_was_seen_is_refused(api, name, subject):
    path = f"/v1/schedules/{name}"
    wanted = {"subject": subject, "every": "1h"}
    api.ask("PUT", path, 412, json=wanted, headers={"if-match": "*"})
    made = api.request("PUT", path, json=wanted, headers={"if-none-match": "*"})
    tag = made.headers["etag"]
    assert made.status_code == 201
    api.ask("PUT", path, 412, json=wanted, headers={"if-none-match": "*"})
    assert api.request("GET", path).headers["etag"] == tag
    paused = api.request("POST", f"{path}/pause", headers={"if-match": tag})
    assert paused.status_code == 200 and paused.headers["etag"] != tag
    for method, url in (
        ("PUT", path),
        ("DELETE", path),
        ("POST", f"{path}/pause"),
        ("POST", f"{path}/resume"),
    ):
        api.ask(method, url, 412, json=wanted, headers={"if-match": tag})
    api.ask("DELETE", path, 204, headers={"if-match": paused.headers["etag"]})


@pytest.mark.parametrize(
    ("fields", "pointer"),
    [
        ({}, "/cron"),
        ({"cron": "@daily", "every": "1h"}, "/cron"),
        ({"cron": "61 * * * *"}, "/cron"),
        ({"cron": " "}, "/cron"),
        ({"every": "999ms"}, "/every"),
        ({"every": "99999d"}, "/every"),
        ({"cron": "@daily", "timezone": "Mars/Base"}, "/timezone"),
        ({"every": "1h", "jitter": "often"}, "/jitter"),
        ({"every": "1h", "catch_up": "some"}, "/catch_up"),
        ({"every": "1h", "overlap": "some"}, "/overlap"),
        ({"every": "1h", "start_at": "2126-01-01T00:00:00Z"}, "/start_at"),
        ({"every": "1h", "end_at": "2020-01-01T00:00:00Z"}, "/end_at"),
        ({"every": "1h", "max_runs": 0}, "/max_runs"),
        ({"every": "1h", "headers": {"delay-planned": "x"}}, "/headers/delay-planned"),
        ({"every": "1h", "key": "mine"}, "/key"),
        ({"every": "1h", "body": 1, "body_base64": "AA=="}, "/body_base64"),
    ],
)
def test_what_is_wrong_is_named(api, name, subject, fields, pointer):
    wanted = {"subject": subject, **fields}
    for method, path in (
        ("PUT", f"/v1/schedules/{name}"),
        ("POST", "/v1/schedules/preview"),
    ):
        answer = api.ask(method, path, 422, json=wanted)
        assert [one["pointer"] for one in answer["errors"]] == [pointer]
    api.ask("GET", f"/v1/schedules/{name}", 404)


def test_all_that_is_wrong_is_named_at_once_and_bodies_have_their_limit(api, name):
    path = f"/v1/schedules/{name}"
    answer = api.ask("PUT", path, 422, json={"subject": "?", "every": "1", "max_runs": -1})
    assert {one["pointer"] for one in answer["errors"]} == {"/subject", "/every", "/max_runs"}
    assert api.ask("PUT", path, 422, content=b"{")["status"] == 422
    long = {"subject": "a", "every": "1h", "body": "x" * 100_001}
    assert "body_max_bytes" in api.ask("PUT", path, 413, json=long)["detail"]
    api.ask("PUT", "/v1/schedules/no%20name", 422, json={"subject": "a", "every": "1h"})


def test_schedules_are_listed_in_the_order_of_their_names(api, subject):
    prefix = unique("list")
    names = [f"{prefix}.{number:02}" for number in range(25)]
    for name in reversed(names):
        put(api, name, subject, every="1h", body=name)
    api.ask("DELETE", f"/v1/schedules/{names[3]}", 204)
    del names[3]
    for limit in (7, 100):
        found, cursor = [], prefix
        while cursor is not None:
            query = f"limit={limit}&cursor={cursor}"
            page = api.ask("GET", f"/v1/schedules?{query}")
            assert len(page["schedules"]) <= limit
            found += [one["name"] for one in page["schedules"]]
            cursor = page["cursor"]
        assert [one for one in found if one.startswith(prefix)] == names
        assert found == sorted(found)
    api.ask("GET", "/v1/schedules?limit=101", 422)
    api.ask("GET", "/v1/schedules?cursor=%20", 422)


def test_a_run_is_left_out_while_the_one_before_is_under_way(api, name, subject):
    path = api.subscribe(unique("consumer"), subject)
    put(api, name, subject, every="1s", overlap="skip")
    (message,) = api.pull(path)
    skipped = wait_until(lambda: api.ask("GET", f"/v1/schedules/{name}")["skipped"])
    assert skipped >= 1
    api.ack(path, message)
    (following,) = api.pull(path)
    assert following["id"] != message["id"]
    api.ask("DELETE", f"/v1/schedules/{name}", 204)


def test_a_killed_server_skips_no_run_and_makes_none_twice(lasting_api, name, subject):
    api = lasting_api
    path = api.subscribe(unique("consumer"), subject)
    start_ms = now_ms() + 500
    put(api, name, subject, every="1s", start_at=start_ms, catch_up="all", max_runs=4)
    put(api, f"{name}.paused", subject, every="1s", start_at=start_ms)
    api.ask("POST", f"/v1/schedules/{name}.paused/pause")
    found = api.pull_all(path, 1)
    wait_until(lambda: api.ask("GET", f"/v1/schedules/{name}")["runs"] == 1)
    api.restart(kill=True)
    while len(found) < 4:
        found += api.pull_all(path, 1)
    assert [time_ms(one["headers"]["delay-planned"]) for one in found] == [
        start_ms + 1000 * number for number in range(4)
    ]
    state = api.ask("GET", f"/v1/schedules/{name}")
    assert (state["runs"], state["skipped"], state["next_at"]) == (4, 0, [])
    assert api.ask("GET", f"/v1/schedules/{name}.paused")["paused"]
    assert api.metric("schedules") == 2
    assert api.metric("schedule_runs_total") >= 1
