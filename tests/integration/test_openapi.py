"""The OpenAPI document: it is valid, it is whole, and the server does what it says.

Schemathesis makes calls from the document, good ones and bad ones; no answer may be a 5xx, have a
status that is not documented for the call, or a body of another form."""

import json
import re

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from delayserver.api.scopes import PUBLIC_PATHS, RULES
from delayserver.parts.installed import PARTS

EXAMPLES = 8
"""Of each call, good ones and as many bad ones."""
CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
)


@pytest.fixture(scope="session")
def document(shared_api):
    return shared_api.ask("GET", "/openapi.json")


def operations(document):
    return {
        (method.upper(), path): operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


def test_every_call_says_what_may_go_wrong(document):
    for (method, path), operation in operations(document).items():
        statuses = set(operation["responses"])
        assert operation["description"], (method, path)
        if path in PUBLIC_PATHS:
            continue
        assert {"401", "403", "429", "431"} <= statuses, (method, path)
        if "requestBody" in operation:
            assert {"413", "422"} <= statuses, (method, path)
        # These name nothing that has to be there.
        lists = path in ("/v1/subjects/{subject}/messages", "/v1/events/{key}")
        if "{" in path and not lists and (method, path) != ("PUT", "/v1/subscriptions/{name}"):
            wanted = "422" if method == "PUT" else "404"
            assert wanted in statuses, (method, path)
        for status, response in operation["responses"].items():
            if int(status) >= 400:
                assert list(response["content"]) == ["application/problem+json"]
                assert response["description"]
        for status in statuses & {"429", "503"}:
            assert "Retry-After" in operation["responses"][status]["headers"]


def test_every_call_has_a_rule_and_says_what_it_asks_for(document):
    calls = operations(document)
    rules = {**RULES, **{call: rule for part in PARTS for call, rule in part.rules.items()}}
    assert calls.keys() == rules.keys()
    for call, operation in calls.items():
        named = [scope for one in operation["security"] for scope in one.get("token", ())]
        assert named == list(rules[call].actions)


def test_the_hot_calls_are_described_with_examples_that_work(shared_api, document):
    calls = operations(document)
    for path in ("/v1/messages", "/v1/messages/batch"):
        content = calls["POST", path]["requestBody"]["content"]
        for media_type in ("application/json", "application/x-ndjson"):
            if media_type in content:
                example = content[media_type]["example"]
                data = {"content": example} if isinstance(example, str) else {"json": example}
                headers = {"content-type": media_type}
                assert shared_api.post(path, **data, headers=headers).status_code in (200, 201)
    one = calls["POST", "/v1/messages"]["responses"]
    assert {"200", "201", "409", "413", "422", "503", "507"} <= set(one)
    assert "Location" in one["201"]["headers"]
    example = one["201"]["content"]["application/json"]["example"]
    answer = shared_api.post("/v1/messages", json={"subject": "openapi.example"}).json()
    assert example.keys() == answer.keys()
    assert set(calls["POST", "/v1/messages/batch"]["requestBody"]["content"]) == {
        "application/json",
        "application/x-ndjson",
        "application/msgpack",
        "application/vnd.apache.arrow.stream",
    }


def test_what_the_document_refers_to_is_in_it_and_is_used(document):
    names = set(re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(document)))
    assert names == document["components"]["schemas"].keys()
    assert "#/$defs" not in json.dumps(document)  # it would be looked for at the root


def references(part):
    if isinstance(part, dict):
        if "$ref" in part:
            yield part["$ref"]
        part = list(part.values())
    if isinstance(part, list):
        for one in part:
            yield from references(one)


def test_every_reference_leads_to_something_from_the_root(document):
    found = set(references(document))
    assert found
    for reference in found:
        root, *steps = reference.split("/")
        assert root == "#"
        here = document
        for step in steps:
            here = here[step]


def test_calls_and_bodies_have_names_of_our_own(document):
    ids = [operation["operationId"] for operation in operations(document).values()]
    assert len(set(ids)) == len(ids)
    assert {"publishMessage", "publishBatch", "getStats", "putHeartbeat"} <= set(ids)
    assert all(re.fullmatch("[a-z]+([A-Z][a-z]+)+", one) for one in ids)
    for (method, path), operation in operations(document).items():
        bodies = [operation.get("requestBody"), *operation["responses"].values()]
        for body in filter(None, bodies):
            for media_type, content in body.get("content", {}).items():
                schema = content["schema"]
                if media_type in ("application/json", "application/problem+json"):
                    assert "$ref" in schema or "$ref" in schema["items"], (method, path)


def test_generators_are_told_what_may_be_left_out_and_what_is_a_time(document):
    schemas = document["components"]["schemas"]
    for name in ("SubscriptionModel", "RetryModel", "PullBody", "NackBody", "PublishModel"):
        assert not any("default" in field for field in schemas[name]["properties"].values()), name
    assert schemas["SubscriptionModel"]["required"] == ["subject", "type"]
    for name, field in (("PublishedDocument", "deliver_at"), ("StatsDocument", "started_at")):
        assert schemas[name]["properties"][field]["format"] == "date-time"
    assert document["info"]["license"]["identifier"] == "Apache-2.0"
    assert document["servers"]
    assert {"message", "batch"} == document["webhooks"].keys()


def test_the_default_of_a_duration_is_taken_in_a_query(shared_api, document):
    for method, path in (("POST", "/v1/messages"), ("GET", "/v1/forecast")):
        parameters = operations(document)[method, path]["parameters"]
        query = {one["name"]: one["schema"]["default"] for one in parameters}
        answer = shared_api.request(method, path, params=query, json={"subject": "openapi"})
        assert answer.status_code in (200, 201), answer.text
    assert shared_api.get("/v1/forecast?bucket=3600000").json()["bucket"] == "1h"


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_calls_made_from_the_document(shared_api, mode):
    schema = schemathesis.openapi.from_url(f"{shared_api.process.url}/openapi.json")
    failures = []
    for result in schema.get_all_operations():
        assert isinstance(result, Ok), result
        operation = result.ok()
        try:
            exercise(shared_api, operation, mode)
        except Unsatisfiable:
            pass  # a call that takes nothing has no wrong form
        except Exception as error:
            failures.append(f"{operation.label}: {error}")
    assert failures == [], "\n\n".join(failures)
    assert "Exception" not in shared_api.log


def exercise(api, operation, mode):
    """Make some calls of one kind, and check the answers. Good ones are about what exists."""
    subscription = {"subject": "fuzz.*", "type": "pull"}

    @seed(1)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def calls(case):
        if isinstance(case.body, dict) and "wait" in case.body:
            case.body["wait"] = 0  # nothing falls due that a long poll could wait for
        if mode is GenerationMode.POSITIVE:
            if "name" in case.path_parameters:
                api.put("/v1/subscriptions/fuzz", json=subscription)
                api.publish("fuzz.a")
                case.path_parameters["name"] = "fuzz"
            if "message_id" in case.path_parameters:
                case.path_parameters["message_id"] = api.publish("fuzz.b", delay="1h")["id"]
        case.call_and_validate(timeout=30, checks=CHECKS)

    calls()


# ── points in time ─────────────────────────────────────────────────────────────────────────────

LATER = 1_795_192_200
"""Seconds, which as milliseconds are January 1970."""
DOORS: dict[tuple[str, str, str], dict[str, str] | None] = {
    ("POST", "/v1/messages", "deliver_at"): {"subject": "openapi.time"},
    ("POST", "/v1/messages/batch", "deliver_at"): {"subject": "openapi.time"},
    ("PATCH", "/v1/messages/{message_id}", "deliver_at"): {},
    ("PATCH", "/v1/subjects/{subject}/keys/{key}", "deliver_at"): {},
    ("PUT", "/v1/subjects/{subject}/keys/{key}", "deliver_at"): {},
    **{
        (method, f"/v1/schedules/{path}", field): {"subject": "openapi.time", "every": "1h"}
        for method, path in (("PUT", "{name}"), ("POST", "preview"))
        for field in ("start_at", "end_at")
    },
    ("GET", "/v1/subjects/{subject}/messages", "from"): None,
    ("GET", "/v1/subjects/{subject}/messages", "to"): None,
}
"""Where a caller names a point in time, with the rest of a request."""


def points_in_time(document, operation):
    """Names of the fields and parameters of a call that are points in time."""
    waiting = [
        one["schema"] for one in operation.get("requestBody", {}).get("content", {}).values()
    ]
    seen = set()
    while waiting:
        schema = waiting.pop()
        if (reference := schema.get("$ref")) is not None:
            if reference not in seen:
                seen.add(reference)
                waiting.append(document["components"]["schemas"][reference.rpartition("/")[2]])
            continue
        for name, field in schema.get("properties", {}).items():
            if {"integer", "date-time"} <= {
                one.get("format", one.get("type")) for one in field.get("anyOf", [field])
            }:
                yield name
            else:
                waiting.append(field)
        waiting += [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
        waiting += [schema["items"]] if isinstance(schema.get("items"), dict) else []
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "query" and re.search("RFC 3339|this time", str(parameter)):
            yield parameter["name"]


def test_seconds_are_refused_wherever_a_point_in_time_is_named(shared_api, document):
    found = {
        (*call, name)
        for call, operation in operations(document).items()
        for name in points_in_time(document, operation)
    }
    assert found == DOORS.keys()
    stored = shared_api.publish("openapi.time", key="k", delay="1d")
    for (method, path, name), request in DOORS.items():
        url = path.format(message_id=stored["id"], subject="openapi.time", key="k", name="seconds")
        if request is None:
            answer = shared_api.request(method, f"{url}?{name}={LATER}")
        elif path.endswith("batch"):
            # In the middle, where its neighbours are as early and as late as may be.
            batch = [{**request, name: time} for time in (0, LATER, LATER * 1000)]
            answer = shared_api.request(method, url, json=batch)
        else:
            answer = shared_api.request(method, url, json={**request, name: LATER})
        assert answer.status_code == 422, (method, path, name, answer.text)
        (error,) = answer.json()["errors"]
        assert error["pointer"].endswith(f"/{name}"), (method, path, error)
        assert "milliseconds, not seconds" in error["detail"], (method, path, error)
