"""The OpenAPI document: FastAPI's own findings, and the additions that it cannot know.

This module adds the schema of each body, made from its struct; the problem documents, some of which
may come with every call; the token that a caller shows; examples of the hot calls, which FastAPI
never sees; and the webhooks, which are requests of the server.

Generators make clients from it (scripts/generators tries three), so each call has an id and
each body a component with names of our own, and an optional field of a request has no `default`:
some take that for a field that is always there.

Cost: made once, at the first request. Threads: pure.
"""

import json
from collections.abc import Iterator
from inspect import cleandoc
from operator import attrgetter
from typing import Any, Final

import msgspec
from fastapi.routing import APIRoute

from delayserver.api.problems import MEDIA_TYPE, ProblemDocument
from delayserver.api.scopes import PUBLIC, PUBLIC_PATHS, rule_of
from delayserver.delivery.batch import BatchedMessage
from delayserver.parts.part import Parts
from delayserver.security.tokens import SCOPE_HELP
from delayserver.wire.fields import describe_field
from delayserver.wire.messages import PublishModel

_REF: Final = "#/components/schemas/{name}"
_structs: set[type[msgspec.Struct]] = {ProblemDocument}
"""The structs that the routes name; the structs inside these are described with them."""
_EXAMPLES: Final[dict[str, list[dict[str, Any]]]] = {
    "PublishModel": [
        {"subject": "order.unpaid", "body": {"order": 1001}, "delay": "30m", "key": "1001"}
    ],
    "MoveModel": [{"delay": "10m"}],
    "SubscriptionModel": [
        {"subject": "order.unpaid", "type": "webhook", "url": "http://127.0.0.1:9000/unpaid"},
        {"subject": "order.*", "type": "pull", "lease": "30s"},
        {
            "subject": "sms",
            "type": "webhook",
            "url": "http://127.0.0.1:9000/sms",
            "rate": {"per_second": 100, "burst": 200},
            "batch": {"max": 100, "linger": "20ms"},
            "catch_up": {"spread": "10m"},
        },
        {
            "subject": "order.*",
            "type": "kafka",
            "bootstrap": "127.0.0.1:9092",
            "topic": "orders.due",
        },
        {
            "subject": "order.*",
            "type": "redis",
            "url": "redis://127.0.0.1:6379",
            "stream": "orders.due",
            "max_length": 100_000,
        },
        {
            "subject": "order.*",
            "type": "nats",
            "url": "nats://127.0.0.1:4222",
            "nats_subject": "due.{subject}",
        },
        {"subject": "order.*", "type": "amqp", "url": "amqp://127.0.0.1:5672", "exchange": "due"},
    ],
    "BackupModel": [{"name": "before-the-upgrade"}],
}
_MESSAGE = {
    "subject": "order.unpaid",
    "body": {"order": 1001},
    "delay": "30m",
    "key": "1001",
    "headers": {"x-shop": "7"},
}
_REFUND = {"subject": "envelope.refund", "body": {"envelope": 7}, "delay": "1d"}
_PUBLISHED = {
    "id": "000001994f0c1a2b00000000002a5f3c9d10",
    "subject": "order.unpaid",
    "key": "1001",
    "deliver_at": "2026-11-20T16:30:00.000Z",
    "state": "scheduled",
    "duplicate": False,
}
_BATCH = {"count": 2, "duplicates": 0, "ids": [_PUBLISHED["id"], "…"]}
_NDJSON = "".join(
    json.dumps(message, separators=(",", ":")) + "\n" for message in (_MESSAGE, _REFUND)
)

_DESCRIPTIONS = {
    "400": "The request is not as HTTP wants it",
    "401": "A token is needed",
    "403": "Not allowed",
    "404": "There is no such thing",
    "408": "The request did not come in time",
    "409": "The state does not allow it",
    "412": "It is not the version that `If-Match` names, or `If-None-Match: *` and it exists",
    "413": "The request is too large",
    "415": "The body is compressed, or of a type that this server does not read",
    "421": "With the header `delay-forward: no`: another shard has it; `delay-owner` says where",
    "422": "The request is invalid; `errors` points to the fields",
    "429": "More requests or messages per second than the token allows",
    "431": "The headers are too many or too long",
    "500": "What is stored is damaged, or the server failed",
    "503": "Too much at once, or the server is stopping: try again after `Retry-After`",
    "504": "Accepted, and not durable within `timeout`: it may still become so",
    "507": "The disk is nearly full",
}
_OF_ONE_SHARD: Final = frozenset(
    (method, path)
    for path, methods in (
        ("/v1/messages", "post"),
        ("/v1/messages/batch", "post"),
        ("/v1/messages/cancel", "post"),
        ("/v1/messages/{message_id}", "get delete patch"),
        ("/v1/subjects/{subject}/keys/{key}", "get delete patch put"),
        ("/v1/subscriptions/{name}/dead-letters/redrive", "post"),
        ("/v1/subscriptions/{name}/dead-letters/{message_id}", "delete"),
    )
    for method in methods.split()
)
"""Calls that may be for one shard alone."""
_RETRY_AFTER = {"Retry-After": {"description": "seconds", "schema": {"type": "integer"}}}
_OWNER = {"delay-owner": {"description": "a URL", "schema": {"type": "string"}}}
_LOCATION = {"Location": {"description": "its path", "schema": {"type": "string"}}}
_VERSION = {"ETag": {"description": "for `If-None-Match`", "schema": {"type": "string"}}}
_ETAG = {"ETag": {"description": "the version, for `If-Match`", "schema": {"type": "string"}}}


def answer(document: type[msgspec.Struct], description: str = "") -> dict[str, Any]:
    """A response with a document that FastAPI does not write."""
    response: dict[str, Any] = {"content": {"application/json": {"schema": _schema(document)}}}
    if description:
        response["description"] = description
    return response


def json_body(form: type[msgspec.Struct], *, required: bool = True) -> dict[str, Any]:
    """The request body of a call."""
    content = {"application/json": {"schema": _schema(form)}}
    return {"requestBody": {"required": required, "content": content}}


def _schema(form: type[msgspec.Struct]) -> dict[str, Any]:
    _structs.add(form)
    return {"$ref": _REF.format(name=form.__name__)}


def batch_body() -> dict[str, Any]:
    """The request body of a batch, in its four forms."""
    items = {
        "type": "array",
        "items": _schema(PublishModel),
        "maxItems": 10_000,
    }
    content = {
        "application/json": {"schema": items, "example": [_MESSAGE, _REFUND]},
        "application/x-ndjson": {
            "schema": {"type": "string", "description": "one message per line"},
            "example": _NDJSON,
        },
        "application/msgpack": {
            "schema": {
                "type": "string",
                "format": "binary",
                "description": "an array of the same maps; a `body` of type bin is binary. What "
                "JSON does not have is refused (NaN, binary inside a body, extensions), and so is "
                "a message longer than `body_max_bytes` and 64 KiB",
            }
        },
        "application/vnd.apache.arrow.stream": {
            "schema": {
                "type": "string",
                "format": "binary",
                "description": "a stream of Arrow IPC, not compressed, a row for each message: "
                "`subject` (text, or a dictionary of it), `body` (text: JSON; binary: a binary "
                "body), `delay` (whole milliseconds or a duration) or `deliver_at` (a timestamp "
                "with a time zone, or whole milliseconds), `key` (text), `headers` (a map of "
                "text). All but `subject` may be missing or null. 415 where the server's extra "
                "`arrow` is not installed",
            }
        },
    }
    return {"requestBody": {"required": True, "content": content}}


def operation_id(route: APIRoute) -> str:
    """The name of a call, for people and for generators: that of its function."""
    first, *others = route.name.split("_")
    return first + "".join(map(str.capitalize, others))


def complete(document: dict[str, Any], parts: Parts) -> None:
    """Add to FastAPI's document the parts that it does not know."""
    document["servers"] = [{"url": "/", "description": "the server that this comes from"}]
    of_one_shard = _OF_ONE_SHARD | _of_one_shard(parts)
    problem = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDocument"}}}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            responses = operation["responses"]
            common = [] if path in PUBLIC_PATHS else ["400", "401", "403", "429", "431"]
            if (method, path) in of_one_shard:
                common.append("421")
            if "requestBody" in operation:
                common += ["408", "413", "415", "422"]
            responses.update(dict.fromkeys(common, None))
            for status in responses:
                if int(status) >= 400:
                    responses[status] = {"description": _DESCRIPTIONS[status], "content": problem}
            if "421" in responses:
                responses["421"]["headers"] = _OWNER
            for status in responses.keys() & {"429", "503"}:
                responses[status]["headers"] = _RETRY_AFTER
            # On loopback no token is needed unless one was made.
            rule = rule_of(parts, method.upper(), path)
            operation["security"] = [] if rule is PUBLIC else [{"token": [*rule.actions]}, {}]
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    _, components = msgspec.json.schema_components(
        sorted(_structs, key=attrgetter("__name__")), schema_hook=describe_field, ref_template=_REF
    )
    # Python ends a pattern with \\Z, and JSON Schema with $.
    schemas.update(json.loads(json.dumps(components).replace('\\\\Z"', '$"')))
    for name in components:
        schemas[name]["description"] = cleandoc(schemas[name]["description"])
    more = (item for part in parts for item in part.examples.items())
    for name, examples in (*_EXAMPLES.items(), *more):
        schemas[name]["examples"] = examples
    for name in _named_by(
        [
            operation.get("requestBody")
            for operations in document["paths"].values()
            for operation in operations.values()
        ],
        schemas,
    ):
        _leave_out_defaults(schemas[name])
    document["components"]["securitySchemes"] = {
        "token": {
            "type": "http",
            "scheme": "bearer",
            "description": f"made with `delayserver token create`; its scopes: {SCOPE_HELP}",
        }
    }
    _add_examples(document["paths"], parts)
    document["webhooks"] = _webhooks()


def _of_one_shard(parts: Parts) -> frozenset[tuple[str, str]]:
    """The calls of parts that may be for one shard alone: those with a name or a key, and those
    that have shard routes."""
    found = set[tuple[str, str]]()
    for part in parts:
        for calls in part.keyed:
            if not calls.sums:
                found |= {(method, calls.path) for method in calls.methods.lower().split()}
        if part.collection:
            path = f"/v1/{part.collection}/{{name}}"
            found |= {(method, path) for method in ("put", "get", "delete")}
            found |= {("post", f"{path}/{verb}") for verb in part.verbs}
        if part.shard_routes is not None:
            found |= {(method.lower(), path) for method, path in part.rules}
    return frozenset(found)


def _add_examples(paths: dict[str, Any], parts: Parts) -> None:
    publish = paths["/v1/messages"]["post"]
    publish["requestBody"]["content"]["application/json"]["example"] = _MESSAGE
    for status, duplicate in (("201", False), ("200", True)):
        _json_of(publish, status)["example"] = {**_PUBLISHED, "duplicate": duplicate}
    batch = paths["/v1/messages/batch"]["post"]
    _json_of(batch, "200")["example"] = _BATCH
    for operation in (publish, paths["/v1/subjects/{subject}/keys/{key}"]["put"]):
        for status in ("200", "201"):
            operation["responses"][status]["headers"] = _LOCATION | _ETAG
    begin = paths["/v1/backups"]["post"]
    begin["responses"]["202"]["headers"] = _LOCATION
    paths["/v1/cluster"]["get"]["responses"]["200"]["headers"] = _VERSION
    for part in filter(attrgetter("collection"), parts):
        path = f"/v1/{part.collection}/{{name}}"
        for status in ("200", "201"):
            paths[path]["put"]["responses"][status]["headers"] = _ETAG
        paths[path]["get"]["responses"]["200"]["headers"] = _ETAG
        for verb in part.verbs:
            responses = paths[f"{path}/{verb}"]["post"]["responses"]
            if "201" in responses:
                responses["201"]["headers"] = _LOCATION | _ETAG
            else:
                responses["200"]["headers"] = _ETAG
    for path in ("/v1/messages/{message_id}", "/v1/subjects/{subject}/keys/{key}"):
        for method in ("get", "patch"):
            paths[path][method]["responses"]["200"]["headers"] = _ETAG


def _json_of(operation: dict[str, Any], status: str) -> dict[str, Any]:
    content: dict[str, Any] = operation["responses"][status]["content"]["application/json"]
    return content


def _named_by(part: Any, schemas: dict[str, Any]) -> set[str]:
    """The names of the schemas that a part of the document refers to, and those refer to."""
    found: set[str] = set()
    waiting = list(_references(part))
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += _references(schemas[name])
    return found


def _references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        if isinstance(part.get("$ref"), str):
            yield part["$ref"].removeprefix(_REF.format(name=""))
        part = list(part.values())
    if isinstance(part, list):
        for one in part:
            yield from _references(one)


def _leave_out_defaults(schema: dict[str, Any]) -> None:
    """Describe in words the value of a request's field that is left out."""
    for field in schema.get("properties", {}).values():
        default = field.pop("default", None)
        if default is not None and not isinstance(default, dict):
            text = json.dumps(default)
            field["description"] = "; ".join(
                filter(None, [field.get("description"), f"default: {text}"])
            )


_WEBHOOK_HEADERS: Final = {
    "webhook-id": "the id of the message, the same in every attempt: drop repeats by it",
    "webhook-timestamp": "when the attempt was made, in seconds since the epoch",
    "webhook-signature": "v1,… for each secret: base64 of HMAC-SHA256 of id.timestamp.body",
    "delay-subject": "the subject",
    "delay-key": "the key, if there is one; all but visible ASCII percent-encoded",
    "delay-due": "when the message was due: RFC 3339",
    "delay-attempt": "which attempt it is, from 1",
    "delay-replay": "1, if somebody had the message delivered again",
    "delay-schedule": "of a run of a schedule: the name of the schedule",
    "delay-planned": "of a run of a schedule: the planned time, RFC 3339",
    "delay-outcome": "of a message that tells an outcome: delivered or dead",
    "delay-outcome-id": "of a message that tells an outcome: the id of the message it is about",
    "delay-outcome-subscription": "of a message that tells an outcome: of which subscription",
}


def _webhooks() -> dict[str, Any]:
    """The requests that the server sends to the URL of a subscription."""
    one = {
        "application/json": {"schema": {}, "example": _MESSAGE["body"]},
        "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
    }
    # Not a component: oapi-codegen leaves out those that only a webhook refers to.
    _, message = msgspec.json.schema_components((BatchedMessage,), ref_template=_REF)
    many = {
        "application/json": {"schema": {"type": "array", "items": message["BatchedMessage"]}},
    }
    of_batch = {
        **{name: _WEBHOOK_HEADERS[name] for name in list(_WEBHOOK_HEADERS)[:3]},
        "delay-count": "how many messages it holds",
    }
    return {
        "message": _webhook(
            "receiveMessage",
            "A message is due: its body, as it was published. The message's own headers follow.",
            _WEBHOOK_HEADERS,
            one,
        ),
        "batch": _webhook(
            "receiveBatch",
            "Several messages are due, for a subscription with `batch`.",
            of_batch,
            many,
        ),
    }


def _webhook(
    name: str, description: str, headers: dict[str, str], content: dict[str, Any]
) -> dict[str, Any]:
    parameters = [
        {
            "name": header,
            "in": "header",
            "required": header not in ("webhook-signature", "delay-key", "delay-replay"),
            "description": about,
            "schema": {"type": "string"},
        }
        for header, about in headers.items()
    ]
    responses = {
        "2XX": {"description": "It is delivered"},
        "410": {"description": "Nobody wants them any more: the subscription is paused"},
        "429": {"description": "Try again after `Retry-After`"},
        "503": {"description": "Try again after `Retry-After`"},
        "default": {"description": "Try again, as `retry` of the subscription says"},
    }
    return {
        "post": {
            "operationId": name,
            "description": description,
            "parameters": parameters,
            "requestBody": {"required": True, "content": content},
            "responses": responses,
            "security": [],
        }
    }
