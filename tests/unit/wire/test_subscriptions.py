"""Each type of subscription has a struct; clients see one form, and may write null for the rest."""

import json
from typing import get_args

import msgspec
import pytest

from delayserver.errors import InputError
from delayserver.wire import subscriptions as wire
from delayserver.wire.subscriptions import KINDS, SubscriptionModel, read_subscription

LEAST = {
    "webhook": {"url": "http://127.0.0.1:9000"},
    "pull": {},
    "kafka": {"bootstrap": "127.0.0.1:9092", "topic": "t"},
    "redis": {"url": "redis://127.0.0.1", "stream": "s"},
    "nats": {"url": "nats://127.0.0.1"},
    "amqp": {"url": "amqp://127.0.0.1", "exchange": ""},
}
"""The fields that a request of each type needs."""
FIELDS = {one.encode_name for one in msgspec.structs.fields(SubscriptionModel)}


def document(kind, **more):
    return {"subject": "a.*", "type": kind, **LEAST[kind], **more}


def read(wanted):
    return read_subscription(json.dumps(wanted).encode())


def pointers(wanted):
    with pytest.raises(InputError) as caught:
        read(wanted)
    return [one.pointer for one in getattr(caught.value, "errors", [caught.value])]


def own_fields(kind):
    return {one.encode_name for one in msgspec.structs.fields(KINDS[kind])} | {"type"}


def test_every_type_has_a_struct():
    assert KINDS.keys() == LEAST.keys() == {*get_args(wire.SubscriptionType)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_is_of_its_type_and_may_have_null_for_the_fields_of_others(kind):
    found = read(document(kind))
    assert (type(found), found.kind) == (KINDS[kind], kind)
    others = dict.fromkeys(FIELDS - own_fields(kind))
    assert others
    assert read(document(kind, **others)) == found


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_of_a_request_is_named(kind):
    other = min(FIELDS - own_fields(kind))
    wrong = document(kind, retry={"max_attempts": 101, "backoff": ["2d"]}, **{other: 1}, more=None)
    for name in LEAST[kind]:
        del wrong[name]
    assert {*pointers(wrong)} == {
        *(f"/{name}" for name in LEAST[kind]),
        *("/retry/max_attempts", "/retry/backoff/0", f"/{other}", "/more"),
    }


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({}, ["/subject", "/type"]),
        ({"type": "mqtt", "subject": "a", "lease": "8d"}, ["/type", "/lease"]),
        ({"type": ["pull"], "subject": "a", "url": 1}, ["/type", "/url"]),
        (document("pull", catch_up="none"), ["/catch_up"]),
        (document("pull", catch_up={}), ["/catch_up"]),
        (document("pull", catch_up={"spread": "8d"}), ["/catch_up/spread"]),
        (document("pull", catch_up={"spread": 1, "drop_older_than": 1}), ["/catch_up"]),
        (document("webhook", rate={"per_second": "5"}), ["/rate/per_second"]),
        (document("webhook", secrets=["a"] * 5), ["/secrets"]),
        (document("kafka", key="{key}{id}"), ["/key"]),
    ],
)
def test_a_request_that_is_wrong(wanted, expected):
    assert pointers(wanted) == expected


def test_what_clients_see_says_which_types_have_a_field():
    (_,), components = msgspec.json.schema_components(
        [SubscriptionModel], schema_hook=wire_schema, ref_template="{name}"
    )
    form = components["SubscriptionModel"]
    assert form["required"] == ["subject", "type"]
    shown = form["properties"]
    assert shown["stream"]["description"] == "redis: the key of a stream"
    assert shown["rate"]["description"].startswith("not pull: ")
    for kind in ("webhook", "redis", "nats", "amqp"):
        assert f"{kind}: " in shown["url"]["description"]
    for name in FIELDS - own_fields("pull"):
        assert {"type": "null"} in shown[name]["anyOf"], name


def wire_schema(kind):
    return {"type": kind.__name__}
