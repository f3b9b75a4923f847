"""ETag, If-Match, If-None-Match: a change happens to the version that was seen, or not at all."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.integration.api_support import unique
from tests.waiting import wait_until


@pytest.fixture
def api(lasting_api):
    return lasting_api


@pytest.fixture
def subject():
    return unique("conditions")


def publish(api, subject, **message):
    """The path of a new message, and its ETag."""
    answer = api.post("/v1/messages", json={"subject": subject, "delay": "1h", **message})
    assert answer.status_code == 201
    return answer.headers["location"], answer.headers["etag"]


def etag(api, path):
    answer = api.get(path)
    assert answer.status_code == 200
    return answer.headers["etag"]


def change(api, method, path, tag, **more):
    return api.request(method, path, headers={"if-match": tag}, **more)


def test_every_answer_that_shows_a_message_carries_its_version(api, subject):
    path, tag = publish(api, subject, key="k", body=1)
    assert etag(api, path) == tag
    assert etag(api, f"/v1/subjects/{subject}/keys/k") == tag
    message = {"subject": subject, "delay": "1h", "key": "k", "body": 1}
    assert api.post("/v1/messages", json=message).headers["etag"] == tag
    moved = api.patch(path, json={"delay": "2h"})
    assert moved.headers["etag"] == etag(api, path) != tag
    replaced = api.put(f"/v1/subjects/{subject}/keys/k", json={"delay": "1h"})
    assert replaced.headers["etag"] == etag(api, replaced.headers["location"])


@pytest.mark.parametrize("by_key", [False, True])
def test_moves_and_cancels_only_the_version_that_was_seen(api, subject, by_key):
    path, first = publish(api, subject, key="k/1")
    if by_key:
        path = f"/v1/subjects/{subject}/keys/k%2F1"
    second = change(api, "PATCH", path, first, json={"delay": "2h"}).headers["etag"]
    for method, document in (("PATCH", {"delay": "3h"}), ("DELETE", None)):
        refused = change(api, method, path, first, json=document)
        assert refused.status_code == 412
        assert refused.headers["content-type"] == "application/problem+json"
        assert refused.headers["etag"] == second
        assert refused.json()["status"] == 412
    assert etag(api, path) == second
    api.restart(kill=True)
    assert etag(api, path) == second
    assert change(api, "DELETE", path, f'"9", {second}').status_code == 200
    assert etag(api, path) != second
    # Once more, since the first answer may have been lost.
    assert change(api, "DELETE", path, second).status_code == 200
    assert change(api, "PATCH", path, "*", json={"delay": "1h"}).status_code == 409


def test_a_state_that_forbids_it_comes_first(api, subject):
    path, tag = publish(api, subject, delay=0)
    api.pull_all(api.subscribe(unique("conditions"), subject), 1)
    for one in (tag, '"9"', "*"):
        assert change(api, "DELETE", path, one).status_code == 409
        assert change(api, "PATCH", path, one, json={"delay": 0}).status_code == 409
    assert change(api, "DELETE", "/v1/messages/0", "*").status_code == 404


def test_put_replaces_only_the_version_that_was_seen(api, subject):
    path = f"/v1/subjects/{subject}/keys/k"
    assert change(api, "PUT", path, "*", json={"delay": "1h"}).status_code == 412
    first = api.put(path, json={"delay": "1h"}).headers["etag"]
    second = change(api, "PUT", path, first, json={"delay": "2h"})
    assert second.status_code == 200
    refused = change(api, "PUT", path, first, json={"delay": "3h"})
    assert (refused.status_code, refused.headers["etag"]) == (412, second.headers["etag"])
    assert change(api, "PUT", path, "*", json={"delay": "3h"}).status_code == 200
    api.delete(path)
    refused = change(api, "PUT", path, "*", json={"delay": "3h"})
    assert (refused.status_code, refused.json()["state"]) == (409, "cancelled")


def test_put_only_where_nothing_waits(api, subject):
    path = f"/v1/subjects/{subject}/keys/k"
    only_new = {"headers": {"if-none-match": "*"}}
    made = api.put(path, json={"delay": "1h"}, **only_new)
    assert made.status_code == 201
    refused = api.put(path, json={"delay": "2h"}, **only_new)
    assert (refused.status_code, refused.headers["etag"]) == (412, made.headers["etag"])
    api.delete(path)
    assert api.put(path, json={"delay": 0}, **only_new).status_code == 201
    pulls = api.subscribe(unique("conditions"), subject)
    held = api.pull(pulls)
    assert api.put(path, json={"delay": 0}, **only_new).status_code == 412  # it is on its way
    api.ack(pulls, *held)
    wait_until(lambda: api.put(path, json={"delay": "1h"}, **only_new).status_code == 201)


def test_of_many_who_saw_the_same_version_one_wins(api, subject):
    path, tag = publish(api, subject)
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(
                lambda n: change(api, "PATCH", path, tag, json={"delay": f"{n}h"}), range(2, 18)
            )
        )
    assert sorted(answer.status_code for answer in answers) == [200] + [412] * 15


def test_a_retry_is_another_version(api, receiver, subject):
    url = receiver.hook(500)
    api.subscribe(unique("hook"), subject, url=url, retry={"max_attempts": 2, "backoff": ["1h"]})
    path, tag = publish(api, subject, delay=0)
    receiver.next(url)
    wait_until(lambda: etag(api, path) != tag)
    # It has been decided, and is on its way until that is durable.
    wait_until(lambda: api.get(path).json()["state"] == "scheduled")
    assert change(api, "DELETE", path, tag).status_code == 412
    assert change(api, "DELETE", path, etag(api, path)).status_code == 200


@pytest.mark.parametrize(
    ("header", "value"), [("if-match", "17"), ("if-match", ""), ("if-none-match", '"17"')]
)
def test_wrong_conditions_change_nothing(api, subject, header, value):
    path = f"/v1/subjects/{subject}/keys/k"
    before = api.put(path, json={"delay": "1h"}).headers["etag"]
    problem = api.ask("PUT", path, 422, json={"delay": "2h"}, headers={header: value})
    assert problem["errors"][0]["pointer"] == f"/header/{header}"
    assert etag(api, path) == before
