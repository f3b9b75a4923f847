"""Subscriptions: made, changed, paused, deleted; who gets what."""

import pytest

from tests.integration.api_support import now_ms, time_ms, unique
from tests.waiting import wait_until

WEBHOOK = {"type": "webhook", "url": "http://127.0.0.1:9/nobody"}


@pytest.fixture
def api(either_api):
    return either_api


@pytest.fixture
def subject():
    return unique("subscriptions")


@pytest.fixture
def name():
    return unique("subscription")


def ids(messages):
    return [message["id"] for message in messages]


def definitions(api, subject):
    """The subscriptions to a subject, and to those below it, without what waits for them just now.
    (Those of other tests go on: what fails to be delivered to them is told there, too.)"""
    found = api.ask("GET", "/v1/subscriptions")["subscriptions"]
    of_it = [one for one in found if one["subject"] in (subject, f"{subject}.*")]
    return [{**one, "queued": 0, "in_flight": 0} for one in of_it]


def is_due(api, published):
    wait_until(lambda: now_ms() > time_ms(published["deliver_at"]) + 50)


def test_a_subscription_is_made_changed_listed_and_deleted(api, subject, name):
    path = f"/v1/subscriptions/{name}"
    definition = {"subject": subject, "type": "pull", "lease": "1h30m"}
    made = api.ask("PUT", path, 201, json=definition)
    assert (made["name"], made["subject"], made["type"]) == (name, subject, "pull")
    assert (made["lease"], made["paused"], made["queued"]) == ("1h30m", False, 0)
    changed = api.ask("PUT", path, 200, json={**definition, "lease": 5000})
    assert changed == {**made, "lease": "5s"}
    assert api.ask("GET", path) == changed
    assert changed in api.ask("GET", "/v1/subscriptions")["subscriptions"]
    assert api.delete(path).status_code == 204
    for method in ("GET", "DELETE"):
        api.ask(method, path, 404)
    for action in ("pause", "resume", "pull", "dead-letters/redrive"):
        api.ask("POST", f"{path}/{action}", 404)
    for action in ("ack", "nack", "extend"):
        document = {"leases": [], **({"lease": 5} if action == "extend" else {})}
        api.ask("POST", f"{path}/{action}", 404, json=document)
    api.ask("GET", f"{path}/dead-letters", 404)
    assert api.ask("PUT", path, 201, json=definition)["created_at"] > made["created_at"]


def test_a_webhook_is_shown_without_its_secret(api, subject, name):
    secret = "whsec_" + "c2VjcmV0" * 4
    retry = {"max_attempts": 3, "backoff": ["1s", "2m"]}
    definition = {"subject": subject, **WEBHOOK, "secret": secret, "retry": retry, "timeout": 900}
    answer = api.put(f"/v1/subscriptions/{name}", json=definition)
    assert answer.status_code == 201
    assert "c2VjcmV0" not in answer.text
    made = answer.json()
    assert made["url"] == WEBHOOK["url"]
    assert (made["signed"], made["retry"], made["timeout"]) == (True, retry, "900ms")
    definition = {"subject": subject, "type": "pull"}
    api.ask("PUT", f"/v1/subscriptions/{name}", 409, json=definition)


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"subject": "a*"}, "/subject"),
        ({"subject": ".*"}, "/subject"),
        ({"subject": "a.*.b"}, "/subject"),
        ({"subject": None}, "/subject"),
        ({"type": "push"}, "/type"),
        ({"url": None}, "/url"),
        ({"url": "ftp://127.0.0.1/"}, "/url"),
        ({"url": "http://user@127.0.0.1/"}, "/url"),
        ({"url": "http://192.168.0.1/"}, "/url"),
        ({"url": "http://example.com/"}, "/url"),
        ({"secret": "guess"}, "/secret"),
        ({"timeout": 0}, "/timeout"),
        ({"timeout": "2h"}, "/timeout"),
        ({"timeout": "1.5s"}, "/timeout"),
        ({"max_in_flight": 0}, "/max_in_flight"),
        ({"max_in_flight": True}, "/max_in_flight"),
        ({"retry": {"max_attempts": 0}}, "/retry/max_attempts"),
        ({"retry": {"backoff": ["1s", "2d"]}}, "/retry/backoff/1"),
        ({"retry": {"backoff": ["1s", "x"]}}, "/retry/backoff/1"),
        ({"retry": {"tries": 1}}, "/retry/tries"),
        ({"type": "pull"}, "/url"),
        ({"type": "pull", "url": None, "lease": 0}, "/lease"),
        ({"type": "pull", "url": None, "lease": "8d"}, "/lease"),
        ({"extra": 1}, "/extra"),
    ],
)
def test_a_bad_definition_is_refused(api, subject, name, change, pointer):
    definition = {"subject": subject, **WEBHOOK, **change}
    problem = api.ask("PUT", f"/v1/subscriptions/{name}", 422, json=definition)
    assert [error["pointer"] for error in problem["errors"]] == [pointer]
    api.ask("GET", f"/v1/subscriptions/{name}", 404)


@pytest.mark.parametrize("name", ["a b", "-a", "a" * 129, "%00"])
def test_a_bad_name_is_refused(api, name):
    definition = {"subject": "a", "type": "pull"}
    problem = api.ask("PUT", f"/v1/subscriptions/{name}", 422, json=definition)
    assert [error["pointer"] for error in problem["errors"]] == ["/path/name"]


def test_patterns(api, name):
    prefix = unique("patterns")
    exact, below, other = f"{prefix}.a", f"{prefix}.a.b", f"{prefix}x.a"
    everything = api.subscribe(name, "*")
    try:
        paths = {
            exact: api.subscribe(unique("exact"), exact),
            f"{prefix}.*": api.subscribe(unique("prefix"), f"{prefix}.*"),
        }
        published = [api.publish(subject)["id"] for subject in (exact, below, other, prefix)]
        assert ids(api.pull_all(paths[exact], 1)) == published[:1]
        assert set(ids(api.pull_all(paths[f"{prefix}.*"], 2))) == set(published[:2])
        got: list[str] = []
        while not set(published) <= set(got):
            got += ids(api.pull_all(everything, 1))
        for path in paths.values():
            assert api.pull(path, wait=0) == []
    finally:
        # What the star still holds of other tests goes back to them.
        api.delete(everything)


def test_each_subscription_settles_on_its_own(api, subject):
    first, second = api.subscribe(unique("one"), subject), api.subscribe(unique("two"), subject)
    published = api.publish(subject)
    (message,) = api.pull(first)
    api.ack(first, message)
    assert api.look_up(published["id"])["state"] == "delivering"
    (message,) = api.pull(second)
    assert message["id"] == published["id"]
    api.ack(second, message)
    found = api.look_up(published["id"])
    assert found["state"] == "delivered"
    assert {one["subscription"] for one in found["deliveries"]} == {
        first.rpartition("/")[2],
        second.rpartition("/")[2],
    }


def test_what_nobody_wants_waits_for_the_first_who_does(api, subject):
    published = [api.publish(subject, body=n) for n in range(3)]
    is_due(api, published[-1])
    assert api.look_up(published[0]["id"])["state"] == "scheduled"
    first = api.subscribe(unique("one"), subject)
    second = api.subscribe(unique("two"), subject)
    assert set(ids(api.pull_all(first, 3))) == {one["id"] for one in published}
    assert api.pull(second, wait=0) == []


def test_a_pause_holds_messages_back_and_resume_lets_them_go(api, subject, name):
    path = api.subscribe(name, subject)
    assert api.ask("POST", f"{path}/pause")["paused"] is True
    assert api.ask("POST", f"{path}/pause")["paused"] is True
    published = api.publish(subject)
    wait_until(lambda: api.ask("GET", path)["queued"] == 1)
    assert api.pull(path, wait=0) == []
    assert api.ask("POST", f"{path}/resume")["paused"] is False
    assert ids(api.pull_all(path, 1)) == [published["id"]]


def test_a_change_keeps_a_pause(api, subject, name):
    path = api.subscribe(name, subject)
    api.ask("POST", f"{path}/pause")
    changed = api.ask("PUT", path, json={"subject": subject, "type": "pull", "lease": "1m"})
    assert changed["paused"] is True


def test_a_deleted_subscription_leaves_its_messages_to_the_next(api, subject):
    first = api.subscribe(unique("one"), subject)
    published = api.publish(subject)
    wait_until(lambda: api.ask("GET", first)["queued"] == 1)
    api.delete(first)
    second = api.subscribe(unique("two"), subject)
    assert ids(api.pull_all(second, 1)) == [published["id"]]


def test_a_subscription_of_later_gets_only_what_falls_due_from_then_on(api, subject):
    first = api.subscribe(unique("one"), subject)
    early = api.publish(subject)
    wait_until(lambda: api.ask("GET", first)["queued"] == 1)
    later = api.publish(subject, delay="2s")
    second = api.subscribe(unique("two"), subject)
    assert ids(api.pull_all(second, 1)) == [later["id"]]
    assert ids(api.pull_all(first, 2)) == [early["id"], later["id"]]


@pytest.mark.parametrize("kill", [False, True], ids=["SIGTERM", "SIGKILL"])
def test_everything_outlives_the_process(lasting_api, subject, kill):
    api = lasting_api
    kept = api.subscribe(unique("kept"), subject)
    paused = api.subscribe(unique("paused"), f"{subject}.*")
    api.ask("POST", f"{paused}/pause")
    api.delete(api.subscribe(unique("deleted"), f"{subject}.*"))
    waiting = api.publish(f"nobody-{subject}.a")
    fanned = api.publish(f"{subject}.b", delay="1h")
    soon = api.publish(subject, key="k", delay="2s")
    cancelled = api.publish(subject, key="c", delay="2s")
    api.ask("DELETE", f"/v1/messages/{cancelled['id']}")
    moved = api.publish(subject, delay="1h")
    api.ask("PATCH", f"/v1/messages/{moved['id']}", json={"delay": "1900ms"})
    pushed = f"/v1/subjects/{subject}/keys/pushed"
    replaced = api.ask("PUT", pushed, 201, json={"delay": "1h"})
    replacing = api.ask("PUT", pushed, 200, json={"delay": "2h", "body": 2})
    before = definitions(api, subject)
    assert [one["subject"] for one in before] == [subject, f"{subject}.*"]
    is_due(api, waiting)

    api.restart(kill=kill)
    assert definitions(api, subject) == before
    assert api.look_up(fanned["id"])["state"] == "scheduled"
    assert api.look_up(cancelled["id"])["state"] == "cancelled"
    assert api.look_up(replaced["id"])["state"] == "cancelled"
    assert api.ask("GET", pushed)["id"] == replacing["id"]
    assert api.ask("POST", "/v1/messages", 200, json={"subject": subject, "key": "k"})["duplicate"]
    assert set(ids(api.pull_all(kept, 2))) == {soon["id"], moved["id"]}
    late = api.subscribe(unique("late"), f"nobody-{subject}.*")
    assert ids(api.pull_all(late, 1)) == [waiting["id"]]
    assert api.pull(late, wait=0) == []

    api.restart(kill=kill)
    for path in (kept, late):
        assert api.pull(path, wait="300ms") == []
    states = [api.look_up(one["id"])["state"] for one in (soon, moved, waiting, cancelled)]
    assert states == ["delivered"] * 3 + ["cancelled"]


def test_one_subscription_too_many_is_refused(make_api):
    api = make_api(subscriptions_max=1)
    api.start()
    first = {"subject": "a", "type": "pull"}
    api.ask("PUT", "/v1/subscriptions/first", 201, json=first)
    refused = api.ask("PUT", "/v1/subscriptions/second", 409, json=first)
    assert "there are 1 subscriptions, the limit" in refused["detail"]
    api.ask("PUT", "/v1/subscriptions/first", 200, json=first)  # it may be changed
