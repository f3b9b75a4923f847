"""All shards are asked, and what they say together."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from delayserver.errors import (
    ConflictError,
    DelayServerError,
    ShardAwayError,
)
from delayserver.shards.peers import PeerAnswer, PeerCall
from tests.unit.shards.shards import (
    AWAY,
    FORBIDDEN,
    MISSING,
    ToldPeers,
    body_of,
    document_answer,
    problem_answer_of,
    refusing,
)

COUNT = 4
IDS = [f"{shard:04x}" + "0" * 32 for shard in range(COUNT + 1)]
EMPTY_PAGE: dict[str, Any] = {"items": [], "places": [], "following": None, "limit": 5}


@pytest.mark.parametrize(
    ("body", "shards"),
    [
        (b"", [0, 1, 2, 3]),
        (b"null", [0, 1, 2, 3]),
        (b'{"ids":null}', [0, 1, 2, 3]),
        ('{"ids":null}'.encode("utf-16"), [0, 1, 2, 3]),
        (msgspec.json.encode({"ids": [IDS[3], IDS[1], "none"]}), [0, 1, 3]),
        (msgspec.json.encode({"ids": [IDS[3]]}), [3]),
    ],
)
def test_a_redrive_asks_the_shards_that_it_is_for(body: bytes, shards: list[int]) -> None:
    peers = ToldPeers(COUNT, lambda shard, call: document_answer({"redriven": 1}))
    call = PeerCall("POST", "/v1/subscriptions/s/dead-letters/redrive", body=body)
    assert body_of(peers.route(call)) == {"redriven": len(shards)}
    assert sorted(peers.asked) == [(shard, call) for shard in shards]


@pytest.mark.parametrize(
    ("errors", "status"),
    [
        ({}, 200),
        ({0: MISSING, 1: FORBIDDEN, 2: MISSING}, 200),
        (dict.fromkeys(range(COUNT), MISSING), 404),
        ({**dict.fromkeys(range(COUNT), MISSING), 2: FORBIDDEN}, 403),
        ({0: MISSING, 1: ConflictError("busy")}, 409),
    ],
)
def test_a_shard_that_knows_nothing_of_the_name_is_passed_over(
    errors: dict[int, DelayServerError], status: int
) -> None:
    for method, path, document in [
        ("GET", "/v1/subscriptions/s/dead-letters", EMPTY_PAGE),
        ("POST", "/v1/subscriptions/s/dead-letters/redrive", {"redriven": 2}),
    ]:
        answer = ToldPeers(COUNT, refusing(errors, document)).route(PeerCall(method, path))
        assert answer is not None and answer.status == status
        if status == 200 and method == "POST":
            assert body_of(answer) == {"redriven": 2 * (COUNT - len(errors))}


def test_a_problem_says_who_has_done_it_and_keeps_all_else_that_it_says() -> None:
    problem = {"type": "urn:x", "title": "t", "status": 503, "detail": "away", "outcome": "unknown"}
    headers = ((b"content-type", b"application/problem+json"), (b"retry-after", b"2"))
    away = PeerAnswer(503, headers, msgspec.json.encode(problem))
    done = document_answer({"cancelled": 2, "fired": 1})
    peers = ToldPeers(COUNT, lambda shard, call: away if shard in (1, 2) else done)
    answer = peers.route(PeerCall("POST", "/v1/events/k"))
    detail = "away; it is done in shard 0, 3 (cancelled: 4, fired: 2), and may be asked again"
    assert body_of(answer) == {**problem, "detail": detail}
    assert answer is not None and (b"retry-after", b"2") in answer.headers
    nobody = ToldPeers(COUNT, lambda shard, call: away).route(PeerCall("POST", "/v1/events/k"))
    assert nobody == away


@pytest.mark.parametrize(
    "call",
    [
        PeerCall("POST", "/v1/messages/cancel", body=msgspec.json.encode({"ids": IDS[:COUNT]})),
        PeerCall("POST", "/v1/events/k"),
        PeerCall("POST", "/v1/subscriptions/s/dead-letters/redrive"),
    ],
)
@pytest.mark.parametrize("unknown", range(COUNT))
def test_what_may_have_been_done_in_one_is_not_answered_as_not_done(
    call: PeerCall, unknown: int
) -> None:
    """Whichever shard it is, and though the others have surely not done it."""
    lost = problem_answer_of(ShardAwayError(unknown, is_unknown=True))
    answer = ToldPeers(COUNT, lambda n, call: lost if n == unknown else AWAY).route(call)
    assert answer is not None and answer.status == 503
    assert body_of(answer)["outcome"] == "unknown"
    assert dict(answer.headers)[b"retry-after"]
