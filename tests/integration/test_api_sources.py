"""Sources over real HTTP: alone and of two shards. What Kafka has to do with it: tests/sinks."""

import pytest

from tests.integration.api_support import unique

# Nobody is there: what is asked of a source does not wait for its brokers.
BROKERS = "127.0.0.1:9"


@pytest.fixture
def api(either_api):
    return either_api


@pytest.fixture
def name():
    return unique("orders")


def put(api, name, status=201, **fields):
    definition = {"type": "kafka", "bootstrap": BROKERS, "topic": "t", "subject": "order", **fields}
    return api.ask("PUT", f"/v1/sources/{name}", status, json=definition)


def test_a_source_is_made_changed_paused_and_ended(api, name):
    made = put(api, name, username="u", password="secret", on_error="stop")
    assert made["password"] == "***" and made["due_header"] == "delay-until"
    assert (made["paused"], made["positions"], made["published"]) == (False, {}, 0)
    assert put(api, name, 200, group="g")["group"] == "g"
    paused = api.ask("POST", f"/v1/sources/{name}/pause")
    assert (paused["paused"], paused["pause_reason"]) == (True, "asked")
    assert not api.ask("POST", f"/v1/sources/{name}/resume")["paused"]
    assert api.ask("GET", f"/v1/sources/{name}")["subject"] == "order"
    assert api.delete(f"/v1/sources/{name}").status_code == 204
    api.ask("GET", f"/v1/sources/{name}", 404)


def test_a_version_is_a_condition(api, name):
    put(api, name)
    path = f"/v1/sources/{name}"
    version = api.get(path).headers["etag"]
    definition = {"type": "kafka", "bootstrap": BROKERS, "topic": "t", "subject": "order"}
    api.ask("PUT", path, 412, json=definition, headers={"if-none-match": "*"})
    api.ask("POST", f"{path}/pause", headers={"if-match": version})
    for method, one in (("POST", f"{path}/resume"), ("DELETE", path)):
        api.ask(method, one, 412, headers={"if-match": version})
    assert api.delete(path, headers={"if-match": api.get(path).headers["etag"]}).status_code == 204


def test_they_are_listed_by_name_in_pages(api):
    names = sorted(unique("listed") for _ in range(3))
    for name in names:
        put(api, name)
    found, cursor = [], ""
    while cursor is not None:
        query = {"limit": 1, **({"cursor": cursor} if cursor else {})}
        page = api.ask("GET", "/v1/sources", params=query)
        found += [one["name"] for one in page["sources"]]
        cursor = page["cursor"]
    assert [one for one in found if one in names] == names and found == sorted(found)
    for name in names:
        api.delete(f"/v1/sources/{name}")


@pytest.mark.parametrize(
    ("fields", "pointer"),
    [
        ({"bootstrap": "example.com:9092"}, "/bootstrap"),
        ({"bootstrap": "no broker"}, "/bootstrap"),
        ({"topic": ".."}, "/topic"),
        ({"username": "u"}, "/password"),
        ({"username": "u", "password": "***"}, "/password"),
        ({"password": "p"}, "/password"),
        ({"on_error": "ignore"}, "/on_error"),
        ({"subject": "*"}, "/subject"),
        ({"unknown": 1}, "/unknown"),
    ],
)
def test_what_is_wrong_with_one_is_named(api, name, fields, pointer):
    refused = put(api, name, 422, **fields)
    assert [one["pointer"] for one in refused["errors"]] == [pointer]
    api.ask("GET", f"/v1/sources/{name}", 404)
