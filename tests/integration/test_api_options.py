"""Options of a message, over real HTTP: too late, spread, first among what is due."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from tests.integration.api_support import now_ms, time_ms, unique
from tests.waiting import wait_until


@pytest.fixture
def api(either_api):
    return either_api


@pytest.fixture
def subject():
    return unique("options")


@pytest.fixture
def path(api, subject):
    return api.subscribe(unique("consumer"), subject)


def letters(api, path):
    return api.ask("GET", f"{path}/dead-letters")["dead_letters"]


def test_what_nobody_takes_in_time_is_a_dead_letter_and_lives_anew_when_it_is_redriven(
    api, subject, path
):
    late = api.publish(subject, body=1, ttl=1)["id"]
    in_time = api.publish(subject, body=2, ttl="1h")
    wait_until(lambda: now_ms() > time_ms(in_time["deliver_at"]) + 1)
    [pulled] = wait_until(lambda: api.pull(path, wait=0))
    assert pulled["id"] == in_time["id"]
    [letter] = wait_until(lambda: letters(api, path))
    assert (letter["id"], letter["reason"], letter["attempts"]) == (late, "expired", 0)
    assert api.look_up(late)["state"] == "dead"
    # Alive for a millisecond: only the answer says so for certain.
    assert api.ask("POST", f"{path}/dead-letters/redrive")["redriven"] == 1
    [again] = wait_until(lambda: [] if api.pull(path, wait=0) else letters(api, path))
    assert (again["id"], again["reason"]) == (late, "expired")


def test_an_expiry_is_told_and_moves_along(api, subject):
    message = api.publish(subject, delay="1h", ttl="30m", priority=7)
    found = api.look_up(message["id"])
    assert time_ms(found["expires_at"]) == time_ms(message["deliver_at"]) + 1_800_000
    assert found["priority"] == 7
    moved = api.ask("PATCH", f"/v1/messages/{message['id']}", json={"delay": "2h"})
    found = api.look_up(message["id"])
    assert time_ms(found["expires_at"]) == time_ms(moved["deliver_at"]) + 1_800_000
    assert found["priority"] == 7
    plain = api.look_up(api.publish(subject, delay="1h")["id"])
    assert not plain.keys() & {"expires_at", "priority"}


def test_a_jitter_is_drawn_once_for_a_key(api, subject):
    before_ms = now_ms()
    first = api.publish(subject, key="k", delay="1h", jitter="1h")
    due_ms = time_ms(first["deliver_at"])
    assert before_ms + 3_600_000 <= due_ms <= now_ms() + 7_200_000
    for _ in range(3):
        again = api.ask(
            "POST",
            "/v1/messages",
            json={"subject": subject, "key": "k", "delay": "1h", "jitter": "1h"},
        )
        assert (again["duplicate"], again["id"]) == (True, first["id"])
        assert again["deliver_at"] == first["deliver_at"]
    assert api.look_up(first["id"])["deliver_at"] == first["deliver_at"]
    path = f"/v1/subjects/{subject}/keys/k"
    message = {"delay": "1h", "jitter": "1h", "ttl": "5m", "priority": 1}
    replaced = api.ask("PUT", path, json=message)
    assert api.look_up(replaced["id"])["priority"] == 1


def test_a_batch_with_options(api, subject):
    drafts = [{"subject": subject, "delay": "1h", "jitter": "1h", "ttl": "1h", "priority": 3}] * 50
    answer = api.ask("POST", "/v1/messages/batch", json=[*drafts, {"subject": subject}])
    found = [api.look_up(one) for one in answer["ids"]]
    assert [one.get("priority", 0) for one in found] == [3] * 50 + [0]
    assert len({one["deliver_at"] for one in found}) > 25


def test_a_key_stands_for_its_options_too(api, subject):
    api.publish(subject, key="k", delay="1h", priority=3)
    message = {"subject": subject, "key": "k", "delay": "1h"}
    api.ask("POST", "/v1/messages", 409, json={**message, "priority": 4})
    assert api.ask("POST", "/v1/messages", json={**message, "priority": 3})["duplicate"]


def test_of_what_is_due_the_higher_priorities_come_first(shared_api, subject):
    """In each shard by itself; so a server alone is asked."""
    path = shared_api.subscribe(unique("consumer"), subject)
    for priority in (0, 9, 4, 9, 0):
        shared_api.publish(subject, body=priority, priority=priority)
    waiting = f"/v1/subscriptions/{path.rpartition('/')[2]}"
    wait_until(lambda: shared_api.ask("GET", waiting)["queued"] == 5)
    pulled = shared_api.ask("POST", f"{path}/pull", json={"max": 5})["messages"]
    assert [one["body"] for one in pulled] == [9, 9, 4, 0, 0]
    leases = [one["lease"] for one in pulled]
    shared_api.ask("POST", f"{path}/nack", json={"leases": leases, "delay": 1})
    wait_until(lambda: shared_api.ask("GET", waiting)["queued"] == 5)
    again = shared_api.ask("POST", f"{path}/pull", json={"max": 5})["messages"]
    assert [one["body"] for one in again] == [9, 9, 4, 0, 0]


def test_options_hold_over_a_kill(lasting_api, subject):
    path = lasting_api.subscribe(unique("consumer"), subject)
    deaths = [lasting_api.publish(subject, body=0, ttl=1)["id"]]
    for priority in (0, 9, 5):
        lasting_api.publish(subject, body=priority, priority=priority, ttl="1h")
    # It is over when the server starts again.
    lasting_api.restart(kill=True)
    waiting = f"/v1/subscriptions/{path.rpartition('/')[2]}"
    wait_until(lambda: lasting_api.ask("GET", waiting)["queued"] == 3)
    pulled = lasting_api.ask("POST", f"{path}/pull", json={"max": 10})["messages"]
    assert [one["body"] for one in pulled] == [9, 5, 0]
    [letter] = wait_until(lambda: letters(lasting_api, path))
    assert [letter["id"]] == deaths


def test_a_webhook_that_fails_until_it_is_too_late_is_given_up_for_that(api, subject, receiver):
    url = receiver.hook(500)
    name = unique("hook")
    api.subscribe(
        name,
        subject,
        type="webhook",
        url=url,
        retry={"max_attempts": 50, "backoff": ["50ms"] * 49},
    )
    message = api.publish(subject, ttl=200)
    [letter] = wait_until(lambda: letters(api, f"/v1/subscriptions/{name}"))
    assert (letter["id"], letter["reason"]) == (message["id"], "expired")
    assert letter["attempts"] >= 1
    assert time_ms(letter["died_at"]) >= time_ms(message["deliver_at"]) + 200


def outcome_of(api, path):
    """The message with an outcome that comes next, which is acknowledged, and its body."""
    [message] = api.pull(path, max=1)
    api.ack(path, message)
    return message, message["body"]


def test_a_message_tells_that_another_was_acknowledged(api, subject, path):
    told = api.subscribe(unique("told"), f"{subject}.done")
    wanted = {"on_delivered": {"subject": f"{subject}.done"}, "on_dead": {"subject": "x"}}
    sent = api.publish(subject, key="k", **wanted)
    found = api.look_up(sent["id"])
    assert {name: found[name] for name in wanted} == wanted
    [pulled] = wait_until(lambda: api.pull(path, wait=0))
    answer = api.ask("POST", f"{path}/ack", json={"leases": [pulled["lease"]]})
    assert answer == {"acked": 1, "expired": []}
    assert api.look_up(sent["id"])["state"] == "delivered"
    message, body = outcome_of(api, told)
    subscription = path.rpartition("/")[2]
    time_ms(body.pop("time"))
    assert body == {
        "id": sent["id"],
        "subject": subject,
        "key": "k",
        "subscription": subscription,
        "outcome": "delivered",
        "attempts": 1,
        "reason": None,
    }
    assert message["headers"] == {
        "delay-outcome": "delivered",
        "delay-outcome-id": sent["id"],
        "delay-outcome-subscription": subscription,
    }
    # Whichever shard is asked.
    key = f"{sent['id']}:{subscription}:delivered"
    by_key = api.ask("GET", f"/v1/subjects/{subject}.done/keys/{key}")
    assert by_key["id"] == message["id"] and not wanted.keys() & by_key.keys()


def test_an_ack_within_a_pull_is_told_too(api, subject, path):
    told = api.subscribe(unique("told"), f"{subject}.done")
    api.publish(subject, on_delivered={"subject": f"{subject}.done"})
    [pulled] = wait_until(lambda: api.pull(path, wait=0))
    api.ask("POST", f"{path}/pull", json={"ack": [pulled["lease"]]})
    assert outcome_of(api, told)[1]["id"] == pulled["id"]


def test_messages_tell_of_each_subscription_what_came_of_it(api, subject, receiver):
    """One webhook takes it, the other never does."""
    for name, status in (("takes", 200), ("fails", 500)):
        api.subscribe(
            f"{subject}.{name}",
            subject,
            type="webhook",
            url=receiver.hook(status),
            retry={"max_attempts": 2, "backoff": ["1ms"]},
        )
    told = api.subscribe(unique("told"), f"{subject}.told.*")
    on = {one: {"subject": f"{subject}.told.{one}"} for one in ("on_delivered", "on_dead")}
    sent = api.ask("POST", "/v1/messages/batch", json=[{"subject": subject, **on}])
    found: dict[str, dict[str, Any]] = {}
    while len(found) < 2:
        message, body = outcome_of(api, told)
        assert message["subject"].endswith(f"on_{body['outcome']}")
        found[body["subscription"]] = body
    takes, fails = found[f"{subject}.takes"], found[f"{subject}.fails"]
    assert takes["id"] == fails["id"] == sent["ids"][0]
    assert (takes["outcome"], takes["attempts"], takes["reason"]) == ("delivered", 1, None)
    assert (fails["outcome"], fails["attempts"]) == ("dead", 2)
    assert "500" in fails["reason"]


def test_what_a_message_with_an_outcome_may_not_be(api, subject):
    for wanted, pointer in (
        ({"on_dead": {"subject": "no spaces"}}, "/on_dead/subject"),
        ({"on_delivered": {"subject": "x", "body": 1}}, "/on_delivered/body"),
        ({"on_delivered": "x"}, "/on_delivered"),
    ):
        message = {"subject": subject, **wanted}
        for path in ("/v1/messages", "/v1/messages/batch"):
            is_batch = path.endswith("batch")
            answer = api.ask("POST", path, 422, json=[message] if is_batch else message)
            assert [one["pointer"] for one in answer["errors"]] == ["/0" * is_batch + pointer]
        answer = api.ask("PUT", f"/v1/subjects/{subject}/keys/k", 422, json=wanted)
        assert [one["pointer"] for one in answer["errors"]] == [pointer]


def test_what_was_told_before_a_kill_is_told_once_and_what_waits_is_told_after_it(
    lasting_api, subject
):
    path = lasting_api.subscribe(unique("consumer"), subject)
    told = lasting_api.subscribe(unique("told"), f"{subject}.told")
    on = {one: {"subject": f"{subject}.told"} for one in ("on_delivered", "on_dead")}
    first = lasting_api.publish(subject, **on)["id"]
    [pulled] = wait_until(lambda: lasting_api.pull(path, wait=0))
    lasting_api.ask("POST", f"{path}/ack", json={"leases": [pulled["lease"]]})
    second = lasting_api.publish(subject, ttl=1, **on)["id"]
    lasting_api.restart(kill=True)
    bodies = [outcome_of(lasting_api, told)[1] for _ in range(2)]
    outcomes = {body["id"]: body["outcome"] for body in bodies}
    assert outcomes == {first: "delivered", second: "dead"}
    assert lasting_api.pull(told, wait=0) == []


def test_of_a_group_one_is_under_way_at_a_time_in_due_order(api, subject, path):
    ids = [api.publish(subject, group="customer:7", body=number)["id"] for number in range(3)]
    other = api.publish(subject, group="customer:8")["id"]
    found = api.look_up(ids[0])
    assert found["group"] == "customer:7"
    assert "priority" not in found
    taken = {}

    def pull():
        for one in api.pull(path, wait=0):
            taken[one["id"]] = one["lease"]
        return taken

    wait_until(lambda: len(pull()) == 2)
    assert set(taken) == {ids[0], other}
    # As what waits for a slow subscriber.
    assert api.ask("DELETE", f"/v1/messages/{ids[2]}", 409)["state"] == "delivering"
    api.ask("POST", f"{path}/nack", json={"leases": [taken.pop(ids[0])]})
    wait_until(lambda: ids[0] in pull())
    assert set(taken) == {ids[0], other}, "what was given back keeps its place"
    for before, after in [(ids[0], ids[1]), (ids[1], ids[2])]:
        api.ask("POST", f"{path}/ack", json={"leases": [taken[before]]})
        wait_until(partial(lambda one: one in pull(), after))
    assert set(taken) == {*ids, other}


# ── debounce ──────────────────────────────────────────────────────────────────────────────────────


def put(api, subject, key="k", status=(200, 201), **document):
    answer = api.put(f"/v1/subjects/{subject}/keys/{key}", json=document)
    assert answer.status_code in status, answer.text
    return answer.json()


def test_each_put_pushes_a_message_back_as_far_as_at_most(api, subject):
    quiet = {"quiet": "10m", "at_most": "10m", "keep": "first"}
    first = put(api, subject, debounce=quiet, body=1, headers={"x-n": "1"}, status=(201,))
    second = put(api, subject, debounce={**quiet, "at_most": "1h"}, body=2, status=(200,))
    assert second["id"] != first["id"]
    assert time_ms(second["deliver_at"]) > time_ms(first["deliver_at"])
    assert api.look_up(first["id"])["state"] == "cancelled"
    found = api.look_up(second["id"])
    assert (found["body"], found["headers"]) == (1, {"x-n": "1"})
    since_ms = time_ms(found["debounce"]["since"])
    assert time_ms(first["deliver_at"]) == since_ms + 600_000
    assert found["debounce"].items() >= {"quiet": "10m", "at_most": "1h", "keep": "first"}.items()
    third = put(api, subject, debounce={"quiet": "10m", "at_most": "10m"}, body=3, status=(200,))
    assert third["deliver_at"] == first["deliver_at"]
    assert api.look_up(third["id"])["body"] == 3
    api.ask("DELETE", f"/v1/messages/{third['id']}")
    anew = put(api, subject, debounce=quiet, body=4, status=(201,))
    assert time_ms(api.look_up(anew["id"])["debounce"]["since"]) > since_ms
    assert api.look_up(anew["id"])["body"] == 4
    assert "debounce" not in api.look_up(put(api, subject, delay="1h")["id"])


def test_a_debounced_message_is_delivered_once_when_its_time_has_come(api, subject, path):
    for number in range(5):
        put(api, subject, body=number, debounce={"quiet": 300, "at_most": 600, "keep": "last"})
    [pulled] = api.pull_all(path, 1)
    assert pulled["body"] == 4
    put(api, subject, body=5, debounce={"quiet": 1})
    [pulled] = api.pull_all(path, 1)
    assert pulled["body"] == 5


def test_puts_that_come_together_know_of_each_other(api, subject):
    with ThreadPoolExecutor(8) as pool:
        body = {"debounce": {"quiet": "1h", "at_most": "2h"}}
        done = list(pool.map(lambda n: put(api, subject, body=n, **body), range(40)))
    states = [api.look_up(one["id"]) for one in done]
    [waiting] = [one for one in states if one["state"] == "scheduled"]
    assert [one["state"] for one in states].count("cancelled") == 39
    assert {one["debounce"]["since"] for one in states} == {waiting["debounce"]["since"]}


@pytest.mark.parametrize(
    ("document", "pointer"),
    [
        ({"debounce": {"quiet": "5s"}, "delay": "1s"}, "/debounce"),
        ({"debounce": {"quiet": "5s"}, "deliver_at": 1_900_000_000_000}, "/debounce"),
        ({"debounce": {"quiet": "5s"}, "jitter": "1s"}, "/debounce"),
        ({"debounce": {"quiet": "5s", "at_most": "1s"}}, "/debounce/at_most"),
        ({"debounce": {"quiet": 0}}, "/debounce/quiet"),
        ({"debounce": {"quiet": "9999d"}}, "/debounce/quiet"),
        ({"debounce": {"quiet": "5s", "keep": "both"}}, "/debounce/keep"),
        ({"debounce": {"at_most": "5s"}}, "/debounce/quiet"),
        ({"debounce": {"quiet": "5s", "more": 1}}, "/debounce/more"),
        ({"debounce": 5}, "/debounce"),
        ({"debounce": {"quiet": None}}, "/debounce/quiet"),
        ({"debounce": {"quiet": "5s"}, "delay": "x"}, "/delay"),
    ],
)
def test_a_debounce_that_cannot_be_kept_is_refused(api, subject, document, pointer):
    answer = put(api, subject, status=(422,), **document)
    assert answer.get("pointer") == pointer or pointer in str(answer.get("errors"))


def test_a_debounce_goes_on_behind_a_kill(make_api, subject):
    api = make_api()
    api.start()
    body = {"debounce": {"quiet": "30m", "at_most": "1h"}}
    first = api.look_up(put(api, subject, body=1, **body)["id"])
    api.restart(kill=True)
    again = api.look_up(put(api, subject, body=2, **body)["id"])
    assert again["debounce"] == first["debounce"]
    assert time_ms(again["deliver_at"]) > time_ms(first["deliver_at"])
