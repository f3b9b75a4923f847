"""Which shards the router asks, and what it makes of what they say."""

from __future__ import annotations

import pytest

from delayserver.records.sharding import shard_of, shard_of_heartbeat
from delayserver.shards.peers import PeerCall
from tests.unit.shards.shards import (
    AWAY,
    ToldPeers,
    caller,
    own_answer,
)

COUNT = 4
IDS = [f"{shard:04x}" + "0" * 32 for shard in range(COUNT + 1)]
TRACE = ((b"traceparent", b"00-1-2-01"),)


def by_id(method: str, number: int) -> tuple[PeerCall, int]:
    return PeerCall(method, f"/v1/messages/{IDS[number]}"), number


def by_key(method: str, key: str) -> tuple[PeerCall, int]:
    path = f"/v1/subjects/orders/keys/{key}"
    return PeerCall(method, path), shard_of("orders", key, COUNT)


def heartbeat(method: str, key: str) -> tuple[PeerCall, int]:
    return PeerCall(method, f"/v1/heartbeats/{key}"), shard_of_heartbeat(key, COUNT)


@pytest.mark.parametrize(
    "wanted",
    [
        *(by_id(method, n) for method in ("GET", "DELETE", "PATCH") for n in range(COUNT)),
        *(
            by_key(method, key)
            for method in ("GET", "DELETE", "PATCH", "PUT")
            for key in ("k", "a/b", "/", "a\nb", "%2F", "é", "x/keys/y", "")
        ),
        *(heartbeat(method, key) for method in ("GET", "PUT", "DELETE") for key in ("h", "a/b/")),
        (PeerCall("DELETE", f"/v1/subscriptions/s/dead-letters/{IDS[3]}"), 3),
        (PeerCall("PUT", "/v1/imports/a", b"shard=2"), 2),
        (PeerCall("GET", "/v1/imports/a", b"shard=1&shard=3"), 3),
        (PeerCall("GET", "/v1/imports/a/duplicates", b"limit=1&shard=1"), 1),
        (PeerCall("PUT", "/v1/archives/2026-11-20T15", b"shard=1"), 1),
        (PeerCall("GET", "/v1/archives", b"shard=1"), 1),
    ],
)
def test_a_call_for_one_shard_goes_there_as_it_is(wanted: tuple[PeerCall, int]) -> None:
    call, owner = wanted
    call = call._replace(headers=TRACE, body=b"{}", caller=caller("admin"))
    for own in range(COUNT):
        peers = ToldPeers(COUNT, lambda shard, call: AWAY, own)
        answer = peers.route(call)
        if own == owner:
            assert (answer, peers.asked) == (None, [])
        else:
            assert answer is AWAY and peers.asked == [(owner, call)]


@pytest.mark.parametrize(
    "call",
    [
        PeerCall("GET", f"/v1/messages/{IDS[COUNT]}"),
        PeerCall("GET", "/v1/messages/none"),
        PeerCall("DELETE", "/v1/subscriptions/s/dead-letters/none"),
        PeerCall("POST", "/v1/messages/cancel", body=b"{"),
        PeerCall("POST", "/v1/messages/cancel", body=b'{"ids":[1]}'),
        PeerCall("POST", "/v1/messages/cancel", body=b'{"keys":[{"subject":"\xff"}]}'),
        PeerCall("POST", "/v1/messages/cancel", body=b"{}"),
        PeerCall("POST", "/v1/messages"),
        PeerCall("POST", "/v1/messages/batch"),
        PeerCall("POST", "/v1/subscriptions/s/pull"),
        PeerCall("GET", "/healthz"),
        PeerCall("GET", "/docs"),
        PeerCall("GET", "/v1/stats/"),
        PeerCall("POST", "/v1/imports", body=b"{}"),
    ],
)
def test_what_is_for_no_other_is_left_to_the_own_shard(call: PeerCall) -> None:
    peers = ToldPeers(COUNT, own_answer, 1)
    assert peers.route(call) is None
    assert peers.asked == []


def test_a_server_alone_has_nobody_to_ask() -> None:
    peers = ToldPeers(1, own_answer)
    for path in "/v1/stats", "/v1/archives", f"/v1/messages/{IDS[0]}", "/v1/imports/a":
        assert peers.route(PeerCall("GET", path)) is None
    assert peers.asked == []
