"""Subscriptions of all shards: who defines them, and what waits for them."""

from __future__ import annotations

import msgspec
import pytest

from delayserver.shards.peers import PeerAnswer, PeerCall
from tests.unit.shards.shards import (
    AWAY,
    FORBIDDEN,
    MISSING,
    ToldPeers,
    body_of,
    document_answer,
    refusing,
)

COUNT = 4


def test_a_subscription_that_others_do_not_know_yet_waits_in_none_of_them() -> None:
    document = {"name": "s", "queued": 3, "in_flight": 1}
    errors = {0: MISSING, 3: FORBIDDEN}
    peers = ToldPeers(COUNT, refusing(errors, document), 1)
    answer = peers.route(PeerCall("GET", "/v1/subscriptions/s"))
    assert body_of(answer) == {"name": "s", "queued": 6, "in_flight": 2}
    unknown = ToldPeers(COUNT, refusing(errors, document), 0)
    answer = unknown.route(PeerCall("GET", "/v1/subscriptions/s"))
    assert answer is not None and answer.status == 404

    def lists(shard: int, call: PeerCall) -> PeerAnswer:
        return document_answer({"subscriptions": [document] if shard != 2 else [], "cursor": "7"})

    answer = ToldPeers(COUNT, lists).route(PeerCall("GET", "/v1/subscriptions"))
    added = {"name": "s", "queued": 9, "in_flight": 3}
    assert body_of(answer) == {"subscriptions": [added], "cursor": "7"}


@pytest.mark.parametrize("own", range(COUNT))
def test_the_home_defines_and_all_count_what_waits(own: int) -> None:
    """Whose counts are missing does not matter: the definition is in force."""

    def answer(shard: int, call: PeerCall) -> PeerAnswer:
        if call.method == "GET":
            assert call.path == "/v1/subscriptions/a b"
            return AWAY if shard == 2 else document_answer({"queued": 2, "in_flight": 1})
        assert shard == 0
        return document_answer({"name": "a b", "queued": 3, "in_flight": 4}, 201)

    peers = ToldPeers(COUNT, answer, own)
    for method, path in (
        ("PUT", "/v1/subscriptions/a b"),
        ("POST", "/v1/subscriptions/a b/pause"),
        ("POST", "/v1/subscriptions/a b/resume"),
    ):
        found = peers.route(PeerCall(method, path))
        assert found is not None and found.status == 201
        queued, in_flight = 3 + 2 * (COUNT - 2), 4 + (COUNT - 2)
        document = {"name": "a b", "queued": queued, "in_flight": in_flight}
        assert msgspec.json.decode(found.body) == document
    refused = ToldPeers(COUNT, lambda shard, call: AWAY, own)
    assert refused.route(PeerCall("DELETE", "/v1/subscriptions/s")) is AWAY
    assert [shard for shard, _ in refused.asked] == [0]
