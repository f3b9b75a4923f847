"""Imports and archives: the shard that is meant."""

from __future__ import annotations

import msgspec
import pytest

from delayserver.shards.peers import PeerCall
from tests.unit.shards.shards import (
    ToldPeers,
    body_of,
    caller,
    own_answer,
)

COUNT = 4


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/imports/a"), ("POST", "/v1/imports"), ("GET", "/v1/archives")]
)
def test_who_is_no_administrator_is_told_so_before_what_is_wrong(method: str, path: str) -> None:
    call = PeerCall(method, path, b"shard=9", caller=caller("observe"))
    answer = ToldPeers(COUNT, own_answer).route(call)
    assert answer is not None and answer.status == 403
    assert dict(answer.headers)[b"content-type"] == b"application/problem+json"


@pytest.mark.parametrize(
    ("manifest", "query", "to", "passed_on"),
    [
        ("shard-0002/imports/a.manifest", b"", 2, "imports/a.manifest"),
        ("./shard-0002//imports/a.manifest", b"", 2, "imports/a.manifest"),
        ("/data/shard-0003/imports/a.manifest", b"", 3, "/data/shard-0003/imports/a.manifest"),
        ("/shard-0003/imports/a.manifest", b"shard=3", 3, "/shard-0003/imports/a.manifest"),
        ("imports/a.manifest", b"shard=1", 1, "imports/a.manifest"),
    ],
)
def test_an_import_is_adopted_by_the_shard_that_holds_its_files(
    manifest: str, query: bytes, to: int, passed_on: str
) -> None:
    body = msgspec.json.encode({"manifest": manifest, "more": 1})
    peers = ToldPeers(COUNT, own_answer)
    assert body_of(peers.route(PeerCall("POST", "/v1/imports", query, body=body))) == {"shard": to}
    [(asked, call)] = peers.asked
    assert asked == to
    assert msgspec.json.decode(call.body) == {"manifest": passed_on, "more": 1}
