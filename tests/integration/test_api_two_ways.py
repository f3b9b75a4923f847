"""The hot path has two ways in, with the same answers: the protocol class, and plain ASGI."""

import asyncio
import contextlib
import gzip
import hashlib
import json
import re
from typing import Any

import httpx
import msgpack
import pytest

from delayserver.api.hot.consume import WHEN_GONE
from delayserver.config import Settings
from delayserver.decisions.delayed_produce import Level
from delayserver.queries.look_up import Queries
from delayserver.serve.app import make_app
from delayserver.server.server import Server
from delayserver.shards.place import ShardPlace
from tests.arrow_streams import ARROW, arrow_of
from tests.integration.api_support import ApiServer, make_token

TOKEN = "a token for both ways"
ONE, BATCH = "/v1/messages", "/v1/messages/batch"
HEADERS = (
    "content-type",
    "location",
    "etag",
    "retry-after",
    "www-authenticate",
    "content-length",
    "allow",
    "accept-encoding",
)
LIMITS: dict[str, Any] = {
    "body_max_bytes": 10_000,
    "batch_max_bytes": 200_000,
    "batch_max_messages": 100,
    "headers_max": 50,
    "head_max_bytes": 2048,
}
LATER: dict[str, Any] = {"subject": "both", "delay": "1h"}


def as_token(name):
    """The header with a token that both servers know."""
    digits = hashlib.sha256(name.encode()).hexdigest()
    return {"authorization": f"Bearer dly_{digits}"}


CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "one": (ONE, {**LATER, "body": {"a": [1, "ü"]}, "headers": {"x-a": "b"}}, {}),
    "now": (ONE, {"subject": "both"}, {}),
    "first of a key": (ONE, {**LATER, "key": "k", "body": 1}, {}),
    "duplicate": (ONE, {**LATER, "key": "k", "body": 1}, {}),
    "conflict": (ONE, {**LATER, "key": "k", "body": 2}, {}),
    "binary": (ONE, {**LATER, "body_base64": "AP8="}, {}),
    "in a trace": (ONE, {**LATER, "key": "t"}, {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}),
    "again in another span": (
        ONE,
        {**LATER, "key": "t"},
        {"traceparent": f"00-{'a' * 32}-{'c' * 16}-01"},
    ),
    "in a malformed trace": (ONE, LATER, {"traceparent": "00-1-2-3"}),
    "batch in a trace": (
        BATCH,
        [{**LATER, "key": "t"}],
        {"traceparent": f"00-{'1' * 32}-{'2' * 16}-00"},
    ),
    "no subject": (ONE, {"delay": 5}, {}),
    "bad subject": (ONE, {"subject": "a b"}, {}),
    "bad header": (ONE, {**LATER, "headers": {"host": "a"}}, {}),
    "unknown field": (ONE, {**LATER, "x": 1}, {}),
    "two times": (ONE, {**LATER, "deliver_at": 1}, {}),
    "much wrong at once": (ONE, {"subject": "a b", "delay": "soon", "key": "", "x": 1}, {}),
    "too far": (ONE, {"subject": "both", "delay": "1000d"}, {}),
    "not JSON": (ONE, b"{", {}),
    "not UTF-8": (ONE, b'{"subject":"both","body":"\xff"}', {}),
    "nested deeply": (ONE, b'{"subject":"both","body":' + b"[" * 9000, {}),
    "nothing": (ONE, b"", {}),
    "compressed": (ONE, gzip.compress(b"{}"), {"content-encoding": "gzip"}),
    "compressed without a token": (ONE, b"", {"content-encoding": "gzip", "authorization": ""}),
    "not compressed": (ONE, LATER, {"content-encoding": "identity"}),
    "offering another protocol": (ONE, LATER, {"connection": "upgrade", "upgrade": "h2c"}),
    "with a slash at the end": (f"{ONE}/", LATER, {}),
    "another content type": (ONE, LATER, {"content-type": "text/plain"}),
    "body too large": (ONE, {**LATER, "body": "x" * 10_000}, {}),
    "request too large": (ONE, b" " * 200_000, {}),
    "batch": (BATCH, [LATER, LATER], {}),
    "batch of keys": (BATCH, [{**LATER, "key": "k", "body": 1}, {**LATER, "key": "l"}], {}),
    "batch with a conflict": (BATCH, [LATER, {**LATER, "key": "k"}], {}),
    "batch with bad items": (BATCH, [LATER, {}, {**LATER, "key": ""}, 5], {}),
    "batch that is none": (BATCH, LATER, {}),
    "empty batch": (BATCH, [], {}),
    "NDJSON": (BATCH, json.dumps(LATER).encode(), {"content-type": "application/x-ndjson"}),
    "bad NDJSON": (BATCH, b"{}\n{", {"content-type": "application/x-ndjson; charset=utf-8"}),
    "msgpack": (BATCH, msgpack.packb([LATER]), {"content-type": "application/msgpack"}),
    "bad msgpack": (BATCH, b"\xc1", {"content-type": "application/x-msgpack"}),
    "Arrow, the first": (BATCH, arrow_of([LATER]), {"content-type": ARROW}),
    "Arrow": (BATCH, arrow_of([LATER]), {"content-type": f"{ARROW}; x=y"}),
    "bad Arrow": (BATCH, arrow_of([LATER, {"subject": "a b"}]), {"content-type": ARROW}),
    "no Arrow": (BATCH, b"{}", {"content-type": ARROW}),
    "too many": (BATCH, [LATER] * 101, {}),
    "batch too large": (BATCH, b" " * 200_001, {}),
    "no token": (ONE, LATER, {"authorization": ""}),
    "wrong token": (ONE, LATER, {"authorization": "Bearer guess"}),
    "other scheme": (ONE, LATER, {"authorization": f"Basic {TOKEN}"}),
    "another origin with the token": (ONE, LATER, {"origin": "http://evil.example"}),
    "within the scope": (ONE, {**LATER, "subject": "both.a"}, as_token("scoped")),
    "outside of the scope": (ONE, LATER, as_token("scoped")),
    "batch within the scope": (BATCH, [{**LATER, "subject": "both.a"}] * 2, as_token("scoped")),
    "batch partly outside": (BATCH, [{**LATER, "subject": "both.a"}, LATER], as_token("scoped")),
    "other scope": (ONE, LATER, as_token("consumer")),
    "not JSON with another scope": (ONE, b"{", as_token("consumer")),
    "batch too large with another scope": (BATCH, b" " * 200_001, as_token("consumer")),
    "invalid, outside of all scopes": (ONE, {"subject": "a b"}, as_token("scoped")),
    "the first in a while": (ONE, LATER, as_token("slow")),
    "one too many": (ONE, LATER, as_token("slow")),
    "a batch of many": (BATCH, [LATER] * 50, as_token("slow-batches")),
    "one after a batch of many": (ONE, LATER, as_token("slow-batches")),
    "expired": (ONE, LATER, as_token("expired")),
    "too many headers": (ONE, LATER, {f"x-{n}": "y" for n in range(60)}),
    "headers too long": (ONE, LATER, {"x-a": "y" * 1500, "x-b": "y" * 1500}),
    "headers too long without a token": (ONE, LATER, {"authorization": "", "x-a": "y" * 3000}),
    "address too long": (f"{ONE}?{'x' * 3000}", LATER, {}),
    "no such method": (BATCH, None, {}),
}
ID = "{id}"
"""The id of the message that was published under the key before."""
KEYS = "/v1/subjects/both/keys"
MANY = "/v1/messages/cancel"
CANCELS: dict[str, tuple[str, str, Any, dict[str, str]]] = {
    "by key": ("DELETE", f"{KEYS}/x", None, {}),
    "by key again": ("DELETE", f"{KEYS}/x", None, {}),
    "by a key with escapes": ("DELETE", f"{KEYS}/a%2Fb%20c%C3%A9", None, {}),
    "by a key with a slash": ("DELETE", f"{KEYS}/d/e", None, {}),
    "with a query": ("DELETE", f"{KEYS}/q?x=1", None, {}),
    "with a body": ("DELETE", f"{KEYS}/body", {"a": 1}, {}),
    "by a key that is not UTF-8": ("DELETE", f"{KEYS}/order-%FF", None, {}),
    "by a key with the mark of what is not": ("DELETE", f"{KEYS}/%EF%BF%BD", None, {}),
    "put by a key that is not UTF-8": ("PUT", f"{KEYS}/order-%C0%80", LATER, {}),
    "moved by a key that is not UTF-8": ("PATCH", f"{KEYS}/order-%FF", {"delay": 1}, {}),
    "found by a key that is not UTF-8": ("GET", f"{KEYS}/order-%FF?x=%FF", None, {}),
    "a heartbeat that is not UTF-8": ("PUT", "/v1/heartbeats/%FF", LATER, {}),
    "an event that is not UTF-8": ("POST", "/v1/events/%FF", None, {}),
    "no such key": ("DELETE", f"{KEYS}/none", None, {}),
    "an empty key": ("DELETE", f"{KEYS}/", None, {}),
    "a bad subject": ("DELETE", "/v1/subjects/bad%20one/keys/x", None, {}),
    "if it is any version": ("DELETE", f"{KEYS}/any", None, {"if-match": "*"}),
    "if it is another version": ("DELETE", f"{KEYS}/version", None, {"if-match": '"1.1"'}),
    "if it is no version": ("DELETE", f"{KEYS}/version", None, {"if-match": "1"}),
    "if it is nothing": ("DELETE", f"{KEYS}/version", None, {"if-match": ""}),
    "by id": ("DELETE", f"/v1/messages/{ID}", None, {}),
    "by id again": ("DELETE", f"/v1/messages/{ID}", None, {}),
    "by a bad id": ("DELETE", "/v1/messages/batch", None, {}),
    "by an id that is another path": ("DELETE", "/v1/messages/cancel", None, {}),
    "by such an id with a body": (
        "DELETE",
        "/v1/messages/cancel",
        {"ids": [ID], "keys": [{"subject": "both", "key": "m"}]},
        {},
    ),
    "by such an id with a version": ("DELETE", "/v1/messages/batch", None, {"if-match": '"1"'}),
    "such an id with a scope": ("DELETE", "/v1/messages/cancel", None, as_token("scoped")),
    "by an id with a slash": ("DELETE", "/v1/messages/a%2Fb", None, {}),
    "without a token": ("DELETE", f"{KEYS}/version", None, {"authorization": ""}),
    "outside of the scope by key": ("DELETE", f"{KEYS}/version", None, as_token("scoped")),
    "outside of the scope by id": ("DELETE", "/v1/messages/{other}", None, as_token("scoped")),
    "within the scope by id": ("DELETE", "/v1/messages/{mine}", None, as_token("scoped")),
    "a bad id with a scope": ("DELETE", "/v1/messages/x", None, as_token("scoped")),
    "many": (
        "POST",
        MANY,
        {
            "ids": [ID, "{other}", "x"],
            "keys": [{"subject": "both", "key": key} for key in ("m", "m", "x", "none")],
        },
        {},
    ),
    "many with a scope": (
        "POST",
        MANY,
        {
            "ids": ["{mine}", ID, "x"],
            "keys": [{"subject": "both", "key": "n"}, {"subject": "both.a", "key": "n"}],
        },
        as_token("scoped"),
    ),
    "nothing of many": ("POST", MANY, {}, {}),
    "many without a body": ("POST", MANY, b"", {}),
    "many that are one": ("POST", MANY, {"ids": "x"}, {}),
    "many with another field": ("POST", MANY, {"all": True}, {}),
    "many with half a key": ("POST", MANY, {"keys": [{"key": "x"}]}, {}),
    "too many to cancel": ("POST", MANY, {"ids": ["x"] * 10_001}, {}),
    "many that are not JSON": ("POST", MANY, b"{", {}),
    "many that are not UTF-8": ("POST", MANY, b'{"ids":["\xff"]}', {}),
    "cancel is only a POST": ("PUT", MANY, {}, {}),
}
WAITING = {
    "x": "both", "a/b cé": "both", "d/e": "both", "q": "both", "body": "both", "any": "both",
    "version": "both", "m": "both", "n": "both", "id": "both", "other": "both", "mine": "both.a",
}  # fmt: skip
"""Keys of messages that are published before they are cancelled, and their subjects."""
SUBSCRIPTION = "/v1/subscriptions/both"
PULL, ACK = f"{SUBSCRIPTION}/pull", f"{SUBSCRIPTION}/ack"
NACK, EXTEND = f"{SUBSCRIPTION}/nack", f"{SUBSCRIPTION}/extend"
NO_LEASES: dict[str, Any] = {"leases": ["e-1-0", ""]}
OF_CONSUMERS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "pull": (PULL, {}, {}),
    "pull with everything": (PULL, {"max": 5, "wait": "5ms", "min_messages": 5, "lease": "1m"}, {}),
    "pull without a body": (PULL, b"", {}),
    "pull with another content type": (PULL, {}, {"content-type": "text/plain"}),
    "pull with a query": (f"{PULL}?a=b", {}, {}),
    "pull too many": (PULL, {"max": 10_001}, {}),
    "pull none": (PULL, {"max": 0}, {}),
    "pull a fraction": (PULL, {"max": 1.5}, {}),
    "pull more than it wants": (PULL, {"max": 2, "min_messages": 3}, {}),
    "pull with an unknown field": (PULL, {"maximum": 1}, {}),
    "pull with a bad wait": (PULL, {"wait": "soon"}, {}),
    "pull with a long wait": (PULL, {"wait": "61s"}, {}),
    "pull without a lease": (PULL, {"lease": 0}, {}),
    "pull with a long lease": (PULL, {"lease": "8d"}, {}),
    "pull that acknowledges": (PULL, {"ack": ["e-1-0", ""]}, {}),
    "pull that acknowledges nothing": (PULL, {"ack": []}, {}),
    "pull that acknowledges too much": (PULL, {"ack": [""] * 10_001}, {}),
    "pull that acknowledges numbers": (PULL, {"ack": [1]}, {}),
    "pull with a list": (PULL, [], {}),
    "pull not JSON": (PULL, b"{", {}),
    "pull not UTF-8": (PULL, b'{"\xff": 1}', {}),
    "pull too large": (PULL, b" " * 9_000_000, {}),
    "pull from a webhook": ("/v1/subscriptions/both-hook/pull", {}, {}),
    "pull from nothing": ("/v1/subscriptions/none/pull", {}, {}),
    "pull from a bad name": ("/v1/subscriptions/a%20b/pull", {}, {}),
    "pull with the scope": (PULL, {}, as_token("consumer")),
    "pull with another scope": (PULL, {}, as_token("publisher")),
    "pull from nothing with a scope": ("/v1/subscriptions/none/pull", b"{", as_token("consumer")),
    "pull not JSON with another scope": (PULL, b"{", as_token("publisher")),
    "ack nothing": (ACK, {"leases": []}, {}),
    "ack what is over": (ACK, NO_LEASES, {}),
    "ack without leases": (ACK, {}, {}),
    "ack numbers": (ACK, {"leases": [1]}, {}),
    "pull with much wrong": (PULL, {"max": 0, "wait": [], "x": 1}, {}),
    "ack too many": (ACK, {"leases": [""] * 10_001}, {}),
    "ack without a body": (ACK, b"", {}),
    "ack with another scope": (ACK, NO_LEASES, as_token("publisher")),
    "ack of nothing": ("/v1/subscriptions/none/ack", NO_LEASES, {}),
    "nack": (NACK, {**NO_LEASES, "delay": "5s"}, {}),
    "nack at once": (NACK, NO_LEASES, {}),
    "nack with a bad delay": (NACK, {**NO_LEASES, "delay": -1}, {}),
    "nack for too long": (NACK, {**NO_LEASES, "delay": "1000d"}, {}),
    "extend": (EXTEND, {**NO_LEASES, "lease": "5s"}, {}),
    "extend by nothing": (EXTEND, {**NO_LEASES, "lease": 0}, {}),
    "extend without a lease": (EXTEND, NO_LEASES, {}),
    "no such action": (f"{SUBSCRIPTION}/pulls", {}, {}),
}
CASES |= OF_CONSUMERS
TOKENS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "scoped": (["publish:both.*", "consume:*"], {}),
    "consumer": (["consume:*", "observe"], {}),
    "publisher": (["publish:*"], {}),
    "slow": (["admin"], {"rate_per_s": 0.001}),
    "slow-batches": (["publish:*"], {"rate_per_s": 0.001, "burst": 2}),
    "expired": (["admin"], {"expires_ms": 1}),
}


def make_tokens(data_dir):
    for name, (scopes, options) in TOKENS.items():
        make_token(data_dir, name, *scopes, **options)


def described(answer: httpx.Response) -> tuple[int, dict[str, str], object]:
    """What both ways must agree on: all but ids, times, and what is measured in them."""
    text = re.sub(r"\b[0-9a-f]{36}\b", "ID", answer.text)
    text = re.sub(r"\d{4}-\d\d-\d\dT[0-9:.]+Z", "TIME", text)
    headers = {
        name: re.sub(r"[0-9a-f]{36}|^\d{3}$", "ID", answer.headers[name])
        for name in HEADERS
        if name in answer.headers
    }
    return answer.status_code, headers, json.loads(text)


def prepare(client: httpx.Client | httpx.AsyncClient) -> dict[str, httpx.Request]:
    requests = {}
    for name, (path, content, headers) in CASES.items():
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        fields = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json", **headers}
        method = "PUT" if content is None else "POST"
        requests[name] = client.build_request(method, path, content=body, headers=fields)
    return requests


def prepare_waiting(client: httpx.Client | httpx.AsyncClient) -> httpx.Request:
    messages = [{"subject": name, "key": key, "delay": "1h"} for key, name in WAITING.items()]
    headers = {"authorization": f"Bearer {TOKEN}"}
    return client.build_request("POST", BATCH, json=messages, headers=headers)


def prepare_cancels(
    client: httpx.Client | httpx.AsyncClient, published: httpx.Response
) -> dict[str, httpx.Request]:
    ids = dict(zip(WAITING, published.json()["ids"], strict=True))
    requests = {}
    for name, (method, path, content, headers) in CANCELS.items():
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        for key in ("id", "other", "mine"):
            path = path.replace(f"{{{key}}}", ids[key])  # noqa: PLW2901
            body = body.replace(b"{%b}" % key.encode(), ids[key].encode())
        fields = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json", **headers}
        sent = None if content is None else body
        requests[name] = client.build_request(method, path, content=sent, headers=fields)
    return requests


def subscriptions(client: httpx.Client | httpx.AsyncClient) -> list[httpx.Request]:
    """What the cases of consumers need: nothing is published to it."""
    fields = {"authorization": f"Bearer {TOKEN}"}
    hook = {"subject": "empty", "type": "webhook", "url": "http://127.0.0.1:9/"}
    pull = {"subject": "empty", "type": "pull"}
    return [
        client.build_request("PUT", SUBSCRIPTION, json=pull, headers=fields),
        client.build_request("PUT", f"{SUBSCRIPTION}-hook", json=hook, headers=fields),
    ]


@pytest.fixture(scope="module")
def through_protocol(tmp_path_factory):
    directory = tmp_path_factory.mktemp("protocol")
    server = ApiServer(directory, token=TOKEN, **LIMITS)
    make_tokens(server.data_dir)
    server.start()
    try:
        for request in subscriptions(server):
            assert server.send(request).status_code == 201
        answers = {name: described(server.send(one)) for name, one in prepare(server).items()}
        published = server.send(prepare_waiting(server))
        cancels = prepare_cancels(server, published)
        yield answers | {name: described(server.send(one)) for name, one in cancels.items()}
    finally:
        server.shut_down()


@contextlib.asynccontextmanager
async def server_in_process(directory):
    settings = Settings(data_dir=directory / "data", token=TOKEN, **LIMITS)
    make_tokens(settings.data_dir)
    failures: list[BaseException] = []
    server = Server(settings, fatal=failures.append)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
    assert failures == []


def application_of(server):
    """What our protocol puts into the scope of a call is there too; nobody hangs up here."""
    app = make_app(server.calls, ShardPlace.alone(server.settings.data_dir)).asgi

    async def called(scope, receive, send):
        await app({**scope, WHEN_GONE: lambda gone: None}, receive, send)

    return called


@pytest.fixture(scope="module")
def through_asgi(tmp_path_factory):
    async def ask():
        async with server_in_process(tmp_path_factory.mktemp("asgi")) as server:
            transport = httpx.ASGITransport(application_of(server), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                for request in subscriptions(client):
                    assert (await client.send(request)).status_code == 201
                answers = {
                    name: described(await client.send(one)) for name, one in prepare(client).items()
                }
                published = await client.send(prepare_waiting(client))
                for name, one in prepare_cancels(client, published).items():
                    answers[name] = described(await client.send(one))
                return answers

    return asyncio.run(ask())


@pytest.mark.parametrize("name", [*CASES, *CANCELS])
def test_both_ways_give_the_same_answer(through_protocol, through_asgi, name):
    assert through_protocol[name] == through_asgi[name]


def test_the_answers_are_those_of_the_contract(through_protocol):
    statuses = {name: status for name, (status, _, _) in through_protocol.items()}
    expected = {200, 201, 401, 403, 404, 405, 409, 412, 413, 415, 422, 429, 431}
    assert set(statuses.values()) == expected
    assert statuses["one"] == statuses["another content type"] == 201
    assert statuses["not compressed"] == statuses["offering another protocol"] == 201
    assert statuses["with a slash at the end"] == 404
    assert through_protocol["compressed"][1]["accept-encoding"] == "identity"
    assert statuses["compressed without a token"] == 401
    assert statuses["not JSON with another scope"] == 403
    assert statuses["duplicate"] == statuses["NDJSON"] == statuses["msgpack"] == 200
    assert statuses["Arrow, the first"] == statuses["Arrow"] == 200
    assert statuses["bad Arrow"] == statuses["no Arrow"] == 422
    assert statuses["another origin with the token"] == statuses["in a trace"] == 201
    assert statuses["again in another span"] == statuses["batch in a trace"] == 200
    assert statuses["within the scope"] == statuses["the first in a while"] == 201
    assert statuses["batch within the scope"] == statuses["a batch of many"] == 200
    assert statuses["one too many"] == statuses["one after a batch of many"] == 429
    assert statuses["expired"] == 401
    for name in ("by key", "by key again", "by a key with escapes", "by a key with a slash"):
        assert statuses[name] == 200
    for name in ("with a query", "with a body", "by id", "by id again", "within the scope by id"):
        assert statuses[name] == 200
    for name in ("no such key", "an empty key", "by a bad id", "a bad id with a scope"):
        assert statuses[name] == 404
    for name in CANCELS:
        if "such an id" in name:
            assert statuses[name] == 404, name
    for name in CANCELS:
        if name.endswith("that is not UTF-8"):
            assert statuses[name] == 422, name
    assert statuses["by a key with the mark of what is not"] == 404
    for name in ("a bad subject", "if it is no version", "if it is nothing", "too many to cancel"):
        assert statuses[name] == 422
    assert statuses["if it is another version"] == 412
    assert statuses["outside of the scope by key"] == statuses["outside of the scope by id"] == 403

    for name in ("outside of the scope", "batch partly outside", "other scope"):
        assert statuses[name] == 403
    for name in ("pull", "pull without a body", "pull with a query", "pull with the scope"):
        assert through_protocol[name][2] == {"messages": []}
    assert through_protocol["ack what is over"][2] == {"acked": 0, "expired": ["e-1-0", ""]}
    assert statuses["pull from a webhook"] == 409
    assert statuses["pull with another scope"] == statuses["ack with another scope"] == 403
    assert statuses["pull from nothing"] == statuses["ack of nothing"] == 404
    pointers = {
        "pull too many": "/max",
        "pull none": "/max",
        "pull a fraction": "/max",
        "pull more than it wants": "/min_messages",
        "pull with an unknown field": "/maximum",
        "pull with a bad wait": "/wait",
        "pull with a long wait": "/wait",
        "pull without a lease": "/lease",
        "pull with a long lease": "/lease",
        "ack without leases": "/leases",
        "ack numbers": "/leases/0",
        "ack too many": "/leases",
        "nack with a bad delay": "/delay",
        "nack for too long": "/delay",
        "extend by nothing": "/lease",
        "extend without a lease": "/lease",
    }
    for name, pointer in pointers.items():
        status, _, document = through_protocol[name]
        assert status == 422
        assert [error["pointer"] for error in document["errors"]] == [pointer]
    for name, wrong in (
        ("much wrong at once", ["/x", "/delay", "/subject", "/key"]),
        ("pull with much wrong", ["/max", "/wait", "/x"]),
    ):
        assert [one["pointer"] for one in through_protocol[name][2]["errors"]] == wrong
    assert through_protocol["conflict"][2]["type"].endswith(":key-conflict")
    assert through_protocol["pull from a webhook"][2]["type"].endswith(":conflict")
    too_large = through_protocol["request too large"][2]["detail"]
    assert "a body has at most 10000 bytes (body_max_bytes)" in too_large
    too_large = through_protocol["batch too large"][2]["detail"]
    assert "a batch has at most 200000 bytes (batch_max_bytes)" in too_large
    assert "no body" in through_protocol["nothing"][2]["detail"]
    for name in ("too many headers", "headers too long", "address too long"):
        assert statuses[name] == 431
    assert statuses["headers too long without a token"] == 431


def test_each_of_many_cancels_has_its_result(through_protocol):
    _, _, answer = through_protocol["many"]
    states = [result["state"] for result in answer["results"]]
    assert states == ["cancelled"] * 2 + [None] + ["cancelled"] * 3 + [None]
    _, _, answer = through_protocol["many with a scope"]
    assert [result["state"] for result in answer["results"]] == ["cancelled"] + [None] * 4
    errors = [result["error"] for result in answer["results"]]
    assert errors[0] is None
    assert "has no scope for publish:both" in errors[1]
    assert errors[2].startswith("there is no message")
    assert "has no scope for publish:both" in errors[3]
    assert errors[4].startswith("there is no message with key")


def test_an_error_of_ours_is_a_500_and_no_exception(tmp_path, monkeypatch, capsys):
    async def ask():
        async with server_in_process(tmp_path) as server:
            app = application_of(server)
            monkeypatch.setattr(server.calls, "publish_one", lambda *arguments: 1 / 0)
            monkeypatch.setattr(Queries, "stats", lambda self: 1 / 0)
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            headers = {"authorization": f"Bearer {TOKEN}"}
            async with httpx.AsyncClient(
                transport=transport, base_url="http://test", headers=headers
            ) as client:
                return await client.post(ONE, json=LATER), await client.get("/v1/stats")

    for answer in asyncio.run(ask()):
        assert answer.status_code == 500
        assert answer.headers["content-type"] == "application/problem+json"
        assert "division" not in answer.text
    assert "ZeroDivisionError" in "".join(capsys.readouterr())


def test_what_is_not_durable_in_time_is_named(tmp_path, monkeypatch):
    async def not_yet(*arguments):
        return Level.ACCEPTED

    async def ask():
        async with server_in_process(tmp_path) as server:
            app = application_of(server)
            monkeypatch.setattr(server.calls, "acknowledged", not_yet)
            headers = {"authorization": f"Bearer {TOKEN}"}
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://test", headers=headers
            ) as client:
                answers = [
                    await client.post(f"{ONE}?ack=filed", json=LATER),
                    await client.post(f"{BATCH}?timeout=5", json=[LATER, LATER]),
                ]
                ids = [message_id for answer in answers for message_id in answer.json()["ids"]]
                return answers, [await client.get(f"{ONE}/{one}") for one in ids]

    answers, found = asyncio.run(ask())
    for answer in answers:
        assert answer.status_code == 504
        problem = answer.json()
        assert problem["type"] == "urn:delayserver:problem:ack-timeout"
        assert "{" not in problem["detail"]
    assert [one.json()["state"] for one in found] == ["scheduled"] * 3
