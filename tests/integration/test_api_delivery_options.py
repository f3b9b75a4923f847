"""Rates, batches, rotated secrets and catching up, over real HTTP and with restarts in between."""

import json

import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from tests.integration.api_support import now_ms, time_ms, unique
from tests.waiting import wait_until

OLD = "whsec_" + "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="
NEW = "whsec_" + "YWJjZGVmZ2hpamtsbW5vcHFyc3R1dnd4eXowMTIzNDU2Nzg5MDE="
THIRD = "whsec_" + "WFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFg="


@pytest.fixture
def api(lasting_api):
    return lasting_api


@pytest.fixture
def subject():
    return unique("options")


def publish_many(api, subject, count, **more):
    messages = [{"subject": subject, "body": n, **more} for n in range(count)]
    return api.ask("POST", "/v1/messages/batch", json=messages)["ids"]


def letters(api, path):
    return api.ask("GET", f"{path}/dead-letters?limit=1000")["dead_letters"]


# ---- secrets -----------------------------------------------------------------------------------


def test_while_a_secret_is_changed_over_both_sign(api, receiver, subject):
    url = receiver.hook()
    path = api.subscribe(unique("hook"), subject, url=url, secret=OLD)
    definition = {"subject": subject, "type": "webhook", "url": url}

    def verified_by():
        published = api.publish(subject, body={"n": 1})
        received = receiver.next(url)
        api.recorded(published["id"])
        found = []
        for name, secret in (("old", OLD), ("new", NEW), ("third", THIRD)):
            try:
                assert Webhook(secret).verify(received.body, received.headers) == {"n": 1}
                found.append(name)
            except WebhookVerificationError:
                pass
        return found

    assert verified_by() == ["old"]
    view = api.ask("PUT", path, json={**definition, "secrets": [NEW, OLD]})
    assert view["signed"] is True and OLD not in json.dumps(view) and NEW not in json.dumps(view)
    assert verified_by() == ["old", "new"]
    api.restart(kill=True)
    assert verified_by() == ["old", "new"]
    api.ask("PUT", path, json={**definition, "secrets": [NEW]})
    assert verified_by() == ["new"]


@pytest.mark.parametrize(
    ("fields", "pointer"),
    [
        ({"secret": OLD, "secrets": [NEW]}, "/secrets"),
        ({"secrets": [NEW, "whsec_short"]}, "/secrets/1"),
        ({"secrets": []}, "/secrets"),
        ({"secrets": [OLD] * 5}, "/secrets"),
        ({"rate": {"per_second": 0}}, "/rate/per_second"),
        ({"rate": {"per_second": 5, "burst": 0}}, "/rate/burst"),
        ({"rate": {"per_second": "fast"}}, "/rate/per_second"),
        ({"batch": {"max": 0}}, "/batch/max"),
        ({"batch": {"linger": "20ms"}}, "/batch/max"),
        ({"batch": {"max": 10, "linger": "2m"}}, "/batch/linger"),
        ({"catch_up": "some"}, "/catch_up"),
        ({"catch_up": {"spread": 0}}, "/catch_up"),
        ({"catch_up": {"spread": "1m", "drop_older_than": "1m"}}, "/catch_up"),
    ],
)
def test_wrong_options_name_the_field(api, subject, fields, pointer):
    definition = {"subject": subject, "type": "webhook", "url": "http://127.0.0.1:9/", **fields}
    problem = api.ask("PUT", f"/v1/subscriptions/{unique('x')}", 422, json=definition)
    assert any(one["pointer"].startswith(pointer) for one in problem["errors"]), problem


@pytest.mark.parametrize("field", [{"rate": {"per_second": 1}}, {"batch": {"max": 10}}])
def test_who_pulls_has_neither_rate_nor_batches(api, subject, field):
    definition = {"subject": subject, "type": "pull", **field}
    problem = api.ask("PUT", f"/v1/subscriptions/{unique('x')}", 422, json=definition)
    assert problem["errors"][0]["pointer"] == f"/{next(iter(field))}"


def test_the_options_are_shown_and_outlive_the_process(api, subject):
    options = {
        "rate": {"per_second": 2.5, "burst": 7},
        "batch": {"max": 100, "linger": "20ms"},
        "catch_up": {"drop_older_than": "1h"},
    }
    path = api.subscribe(unique("hook"), subject, url="http://127.0.0.1:9/", **options)
    plain = api.subscribe(unique("hook"), unique("options"), url="http://127.0.0.1:9/")
    api.restart(kill=True)
    view = api.ask("GET", path)
    assert {name: view[name] for name in options} == options
    view = api.ask("GET", plain)
    assert (view["rate"], view["batch"], view["catch_up"]) == (None, None, "all")


# ---- rate --------------------------------------------------------------------------------------


def test_no_more_is_sent_than_the_rate_allows(api, receiver, subject):
    url = receiver.hook()
    api.subscribe(unique("hook"), subject, url=url, rate={"per_second": 50, "burst": 10})
    publish_many(api, subject, 60)
    times = [receiver.next(url).at_ms for _ in range(60)]
    # 10 at once, then 50 a second; what is received may bunch, what is sent does not.
    assert times[-1] - times[0] >= 900
    assert times[9] - times[0] < times[-1] - times[9]


# ---- batches -----------------------------------------------------------------------------------


def test_a_batch_is_an_array_signed_as_a_whole(api, receiver, subject):
    url = receiver.hook()
    api.subscribe(
        unique("hook"), subject, url=url, secret=NEW, batch={"max": 100, "linger": "500ms"}
    )
    due_ms = now_ms() + 1500
    first = api.publish(subject, deliver_at=due_ms, key="a", body={"n": 1}, headers={"x-a": "b"})
    second = api.publish(subject, deliver_at=due_ms, body_base64="AP8=")
    received = receiver.next(url)
    assert received.at_ms >= due_ms + 500
    document = Webhook(NEW).verify(received.body, received.headers)
    assert document == [
        {
            "id": first["id"],
            "subject": subject,
            "key": "a",
            "headers": {"x-a": "b"},
            "deliver_at": first["deliver_at"],
            "attempt": 1,
            "body": {"n": 1},
        },
        {
            "id": second["id"],
            "subject": subject,
            "key": None,
            "headers": {},
            "deliver_at": second["deliver_at"],
            "attempt": 1,
            "body_base64": "AP8=",
        },
    ]
    headers = received.headers
    assert headers["webhook-id"].startswith("batch-")
    assert headers["delay-count"] == "2"
    assert headers["content-type"] == "application/json"
    assert not headers.keys() & {"delay-subject", "delay-key", "delay-due", "x-a"}
    for one in (first, second):
        api.recorded(one["id"])


def test_many_messages_take_few_requests(api, receiver, subject):
    url = receiver.hook()
    api.subscribe(unique("hook"), subject, url=url, batch={"max": 100, "linger": "50ms"})
    ids = publish_many(api, subject, 1000, deliver_at=now_ms() + 1500)
    found: list[str] = []
    requests = 0
    while len(found) < 1000:
        received = receiver.next(url)
        requests += 1
        found += [one["id"] for one in json.loads(received.body)]
    assert sorted(found) == sorted(ids)
    assert 10 <= requests <= 30
    assert receiver.count(url) == 0


def test_a_batch_that_fails_is_tried_again_and_each_is_recorded_once(api, receiver, subject):
    url = receiver.hook(500, 503, 200)
    path = api.subscribe(
        unique("hook"),
        subject,
        url=url,
        batch={"max": 10, "linger": "100ms"},
        retry={"max_attempts": 5, "backoff": ["200ms"]},
    )
    ids = publish_many(api, subject, 5, deliver_at=now_ms() + 200)
    first = json.loads(receiver.next(url).body)
    assert [one["id"] for one in first] == ids
    assert {one["attempt"] for one in first} == {1}
    # They are tried apart: the second request fails, too, and no other.
    failed = json.loads(receiver.next(url).body)
    assert {one["attempt"] for one in failed} == {2} and len(failed) <= 2
    expected = {one: [3 if one in {two["id"] for two in failed} else 2] for one in ids}

    def recorded():
        return {one: [row["attempt"] for row in api.recorded(one)] for one in ids}

    wait_until(lambda: recorded() == expected)
    assert letters(api, path) == []


def test_every_message_of_a_batch_that_fails_for_good_is_a_dead_letter(api, receiver, subject):
    url = receiver.hook(500)
    path = api.subscribe(
        unique("hook"), subject, url=url, batch={"max": 10}, retry={"max_attempts": 1}
    )
    ids = publish_many(api, subject, 25)
    wait_until(lambda: len(letters(api, path)) == 25)
    assert sorted(one["id"] for one in letters(api, path)) == sorted(ids)


def test_a_batch_holds_only_so_many_bytes(api, receiver, subject):
    url = receiver.hook()
    api.subscribe(
        unique("hook"), subject, url=url, batch={"max": 100, "linger": "300ms"}, max_in_flight=1
    )
    due_ms = now_ms() + 1500
    ids = [api.publish(subject, deliver_at=due_ms, body="x" * 900_000)["id"] for _ in range(6)]
    bodies: list[list[str]] = []
    while sum(len(body) for body in bodies) < 6:
        received = receiver.next(url)
        assert len(received.body) < 4 * 2**20 + 2000
        bodies.append([one["id"] for one in json.loads(received.body)])
    assert [message_id for body in bodies for message_id in body] == ids


def test_a_receiver_that_is_gone_gets_the_batch_when_it_is_back(api, receiver, subject):
    url = receiver.hook(410, 200)
    path = api.subscribe(unique("hook"), subject, url=url, batch={"max": 10, "linger": "100ms"})
    ids = publish_many(api, subject, 5, deliver_at=now_ms() + 100)
    receiver.next(url)
    wait_until(lambda: api.ask("GET", path)["paused"])
    assert api.ask("GET", path)["queued"] == 5
    api.ask("POST", f"{path}/resume")
    assert [one["id"] for one in json.loads(receiver.next(url).body)] == ids


# ---- catching up -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["pause", "stop", "kill"])
def test_what_is_too_old_after_downtime_is_a_dead_letter(api, receiver, subject, how):
    url = receiver.hook()
    path = api.subscribe(unique("hook"), subject, url=url, catch_up={"drop_older_than": "1s"})
    if how == "pause":
        api.ask("POST", f"{path}/pause")
        old = publish_many(api, subject, 1000)
        published_ms = now_ms()
        wait_until(lambda: now_ms() > published_ms + 1000)
        # Due when the others are out of the way.
        young = publish_many(api, subject, 3, deliver_at=now_ms() + 2000)
        api.ask("POST", f"{path}/resume")
    else:
        due_ms = now_ms() + 1000
        old = publish_many(api, subject, 1000, deliver_at=due_ms)
        young = publish_many(api, subject, 3, deliver_at=now_ms() + 8000)
        api.process.kill() if how == "kill" else api.process.stop()
        wait_until(lambda: now_ms() > due_ms + 1000)
        api.start()
    wait_until(lambda: len(letters(api, path)) == 1000)
    dead = letters(api, path)
    assert sorted(one["id"] for one in dead) == sorted(old)
    assert {one["reason"] for one in dead} == {"older than 1s when it could have been delivered"}
    assert {one["attempts"] for one in dead} == {0}
    got = [receiver.next(url).headers["webhook-id"] for _ in range(3)]
    assert sorted(got) == sorted(young)
    assert receiver.count(url) == 0
    assert api.look_up(old[0])["state"] == "dead"
    redriven = api.ask("POST", f"{path}/dead-letters/redrive", json={"ids": old[:2]})
    assert redriven == {"redriven": 2}
    assert {receiver.next(url).headers["webhook-id"] for _ in range(2)} == set(old[:2])


@pytest.mark.parametrize("how", ["pause", "kill"])
def test_what_fell_due_meanwhile_is_spread_and_new_messages_are_on_time(
    api, receiver, subject, how
):
    url = receiver.hook()
    path = api.subscribe(
        unique("hook"), subject, url=url, catch_up={"spread": "3s"}, max_in_flight=1
    )
    if how == "pause":
        api.ask("POST", f"{path}/pause")
        publish_many(api, subject, 30)
        api.ask("POST", f"{path}/resume")
    else:
        due_ms = now_ms() + 500
        publish_many(api, subject, 30, deliver_at=due_ms)
        api.process.kill()
        wait_until(lambda: now_ms() > due_ms)
        api.start()
    first = receiver.next(url)
    new = api.publish(subject, body="new", delay="500ms")
    received = [first, *(receiver.next(url) for _ in range(30))]
    late = [one for one in received if one.headers["webhook-id"] != new["id"]]
    assert [json.loads(one.body) for one in late] == sorted(json.loads(one.body) for one in late)
    assert late[-1].at_ms - late[0].at_ms >= 2000
    half = sum(one.at_ms - late[0].at_ms <= 1500 for one in late)
    assert 3 <= half <= 27  # 15 on a quiet machine
    # Not behind the others, of which half a second later nearly all are still to come.
    assert [one.headers["webhook-id"] for one in received].index(new["id"]) < 20
    [fresh] = [one for one in received if one.headers["webhook-id"] == new["id"]]
    assert fresh.at_ms >= time_ms(new["deliver_at"])


def test_a_consumer_that_pulls_catches_up_as_well(api, subject):
    path = api.subscribe(unique("pull"), subject, catch_up={"drop_older_than": "700ms"})
    publish_many(api, subject, 10)
    wait_until(lambda: len(letters(api, path)) == 10)  # nobody pulled in time
    spread = api.subscribe(unique("pull"), unique("options"), catch_up={"spread": "3s"})
    name = api.ask("GET", spread)["subject"]
    api.ask("POST", f"{spread}/pause")
    publish_many(api, name, 10)
    api.ask("POST", f"{spread}/resume")
    began = now_ms()
    assert len(api.pull(spread)) < 10
    api.pull_held(spread, 9)
    assert now_ms() - began > 1500


# ---- own headers, method, what fails for long ---------------------------------------------------


def test_own_headers_and_the_method_go_along_and_values_are_never_shown(api, receiver, subject):
    url = receiver.hook()
    own = {"Authorization": "Bearer hush-hush", "x-shop": "main"}
    path = api.subscribe(unique("hook"), subject, url=url, headers=own, method="PUT")
    api.restart(kill=True)
    api.publish(subject, body=1, headers={"X-Shop": "mine", "x-more": "1"})
    received = receiver.next(url)
    assert received.method == "PUT"
    named = ("authorization", "x-shop", "x-more")
    assert [received.headers[name] for name in named] == ["Bearer hush-hush", "main", "1"]
    view = api.ask("GET", path)
    assert view["headers"] == {"authorization": "***", "x-shop": "***"}
    assert view["method"] == "PUT"
    shown = api.get("/v1/subscriptions").text + api.get("/metrics").text + api.log
    assert "hush-hush" not in shown
    # What an answer has shown is no definition.
    again = {"subject": subject, "type": "webhook", "url": url, "headers": view["headers"]}
    problem = api.ask("PUT", path, 422, json=again)
    assert problem["errors"][0]["pointer"] == "/headers/authorization"


def test_a_batch_carries_own_headers_too(api, receiver, subject):
    url = receiver.hook()
    own = {"authorization": "Bearer hush-hush"}
    api.subscribe(unique("hook"), subject, url=url, headers=own, batch={"max": 10})
    publish_many(api, subject, 2)
    assert receiver.next(url).headers["authorization"] == "Bearer hush-hush"


@pytest.mark.parametrize(
    ("fields", "pointer"),
    [
        ({"headers": {"webhook-id": "secret-value"}}, "/headers/webhook-id"),
        ({"headers": {"a": "secret-value\n"}}, "/headers/a"),
        ({"headers": {f"a{n}": "secret-value" for n in range(33)}}, "/headers"),
        ({"headers": {"a": ["secret-value"]}}, "/headers/a"),
        ({"method": "GET"}, "/method"),
        ({"disable_after": "1ms"}, "/disable_after"),
    ],
)
def test_wrong_headers_are_named_and_their_values_are_not_told(api, subject, fields, pointer):
    definition = {"subject": subject, "type": "webhook", "url": "http://127.0.0.1:9/", **fields}
    problem = api.ask("PUT", f"/v1/subscriptions/{unique('x')}", 422, json=definition)
    assert problem["errors"][0]["pointer"] == pointer
    assert "secret-value" not in json.dumps(problem)


@pytest.mark.parametrize("field", [{"headers": {"a": "b"}}, {"method": "PUT"}])
def test_who_pulls_has_no_headers(api, subject, field):
    definition = {"subject": subject, "type": "pull", **field}
    problem = api.ask("PUT", f"/v1/subscriptions/{unique('x')}", 422, json=definition)
    assert problem["errors"][0]["pointer"] == f"/{next(iter(field))}"


def test_nothing_but_failures_pauses_until_a_put_or_a_resume(api, receiver, subject):
    url = receiver.hook(500)
    retry = {"max_attempts": 100, "backoff": ["100ms"] * 100}
    options = {"retry": retry, "disable_after": "1s"}
    name = unique("hook")
    path = api.subscribe(name, subject, url=url, **options)
    api.publish(subject, body=1)

    def is_paused():
        view = api.ask("GET", path)
        return view["paused"] and view["pause_reason"] == "failures"

    wait_until(is_paused)
    api.restart(kill=True)
    assert is_paused()
    metric = f'delayserver_subscription_paused{{reason="failures",subscription="{name}"}} 1.0'
    metric_too = f'delayserver_subscription_paused{{subscription="{name}",reason="failures"}} 1.0'
    text = api.get("/metrics").text
    assert metric in text or metric_too in text
    definition = {"subject": subject, "type": "webhook", "url": url, **options}
    assert api.ask("PUT", path, json=definition)["paused"] is False
    wait_until(is_paused)
    assert api.ask("POST", f"{path}/resume")["pause_reason"] is None
    wait_until(is_paused)
    # A pause that somebody asked for is not ended by a definition.
    assert api.ask("POST", f"{path}/pause")["pause_reason"] == "asked"
    assert api.ask("PUT", path, json=definition)["paused"] is True
