"""The OpenAPI document: what FastAPI finds out by itself, and what it cannot know.

That is: what msgspec decodes and writes has a schema made from its struct; errors are problem
documents, with a media type of their own, and some of them may come with every call; who calls,
shows a token; and the hot calls, which FastAPI never sees, have examples.

Cost: made once, at the first request. Threads: pure.
"""

import json
from typing import Any, Final

import msgspec

from delayserver.api import documents
from delayserver.api.hot.cancel import CancelBody
from delayserver.api.hot.consume import ExtendBody, LeasesBody, NackBody, PullBody
from delayserver.api.problems import MEDIA_TYPE, ProblemDocument
from delayserver.api.rest import models
from delayserver.api.scopes import ADMIN, PUBLIC_PATHS, RULES
from delayserver.security.tokens import SCOPE_HELP

_REF: Final = "#/components/schemas/{name}"
_STRUCTS: Final[tuple[type[msgspec.Struct], ...]] = (
    ProblemDocument,
    documents.HealthDocument,
    documents.PublishedDocument,
    documents.BatchDocument,
    documents.MessageDocument,
    documents.PendingListDocument,
    documents.StateDocument,
    documents.CancelledDocument,
    documents.HeartbeatDocument,
    documents.PulledListDocument,
    documents.AckedDocument,
    documents.NackedDocument,
    documents.ExtendedDocument,
    documents.DeadLettersDocument,
    CancelBody,
    PullBody,
    LeasesBody,
    NackBody,
    ExtendBody,
)
"""What goes in and out past FastAPI; what these hold is described with them."""
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
    "415": "The body is compressed",
    "422": "The request is invalid; `errors` points to the fields",
    "429": "More requests or messages per second than the token allows",
    "431": "The headers are too many or too long",
    "500": "What is stored is damaged, or the server failed",
    "503": "Too much at once, or the server is stopping: try again after `Retry-After`",
    "504": "Accepted, and not durable within `timeout`: it may still become so",
    "507": "The disk is nearly full",
}
_RETRY_AFTER = {"Retry-After": {"description": "seconds", "schema": {"type": "integer"}}}
_LOCATION = {"Location": {"description": "path of the message", "schema": {"type": "string"}}}
_ETAG = {"ETag": {"description": "the version, for `If-Match`", "schema": {"type": "string"}}}


def answer(document: type[msgspec.Struct], description: str = "") -> dict[str, Any]:
    """A response with a document that FastAPI does not write."""
    response: dict[str, Any] = {"content": {"application/json": {"schema": _schema(document)}}}
    if description:
        response["description"] = description
    return response


def json_body(
    form: type[models.Strict] | type[msgspec.Struct], *, required: bool = True
) -> dict[str, Any]:
    """The request body of a call that FastAPI does not decode."""
    content = {"application/json": {"schema": _schema(form)}}
    return {"requestBody": {"required": required, "content": content}}


def _schema(form: type[models.Strict] | type[msgspec.Struct]) -> dict[str, Any]:
    if issubclass(form, models.Strict):
        return form.model_json_schema()
    assert form in _STRUCTS, form
    return {"$ref": _REF.format(name=form.__name__)}


def batch_body() -> dict[str, Any]:
    """The request body of a batch, in its three forms."""
    items = {
        "type": "array",
        "items": models.PublishModel.model_json_schema(),
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
                "description": "an array of the same maps; a `body` of type bin is binary",
            }
        },
    }
    return {"requestBody": {"required": True, "content": content}}


def complete(document: dict[str, Any]) -> None:
    """Add to FastAPI's document what it does not know."""
    problem = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDocument"}}}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            responses = operation["responses"]
            common = [] if path in PUBLIC_PATHS else ["400", "401", "403", "429", "431"]
            if "requestBody" in operation:
                common += ["408", "413", "415", "422"]
            responses.update(dict.fromkeys(common, None))
            for status in responses:
                if int(status) >= 400:
                    responses[status] = {"description": _DESCRIPTIONS[status], "content": problem}
            for status in responses.keys() & {"429", "503"}:
                responses[status]["headers"] = _RETRY_AFTER
            # On loopback no token is needed unless one was made.
            actions = RULES.get((method.upper(), path), ADMIN).actions
            operation["security"] = [{"token": [*actions]}, {}] if actions else []
    schemas = document["components"]["schemas"]
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    _, components = msgspec.json.schema_components(_STRUCTS, ref_template=_REF)
    schemas.update(components)
    document["components"]["securitySchemes"] = {
        "token": {
            "type": "http",
            "scheme": "bearer",
            "description": f"made with `delayserver token create`; its scopes: {SCOPE_HELP}",
        }
    }
    _add_examples(document["paths"])


def _add_examples(paths: dict[str, Any]) -> None:
    publish = paths["/v1/messages"]["post"]
    publish["requestBody"]["content"]["application/json"]["example"] = _MESSAGE
    for status, duplicate in (("201", False), ("200", True)):
        _json_of(publish, status)["example"] = {**_PUBLISHED, "duplicate": duplicate}
    batch = paths["/v1/messages/batch"]["post"]
    _json_of(batch, "200")["example"] = _BATCH
    for operation in (publish, paths["/v1/subjects/{subject}/keys/{key}"]["put"]):
        for status in ("200", "201"):
            operation["responses"][status]["headers"] = _LOCATION | _ETAG
    for path in ("/v1/messages/{message_id}", "/v1/subjects/{subject}/keys/{key}"):
        for method in ("get", "patch"):
            paths[path][method]["responses"]["200"]["headers"] = _ETAG


def _json_of(operation: dict[str, Any], status: str) -> dict[str, Any]:
    content: dict[str, Any] = operation["responses"][status]["content"]["application/json"]
    return content
