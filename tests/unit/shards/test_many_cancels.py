"""Messages of several shards are cancelled in one call."""

from __future__ import annotations

import msgspec
import pytest

from delayserver.errors import (
    AccessError,
)
from delayserver.records.sharding import shard_of
from delayserver.shards.peers import PeerAnswer, PeerCall
from tests.unit.shards.shards import (
    AWAY,
    ToldPeers,
    body_of,
    caller,
    document_answer,
    own_answer,
    problem_answer_of,
)

COUNT = 4
IDS = [f"{shard:04x}" + "0" * 32 for shard in range(COUNT + 1)]
KEYS = [{"subject": "orders", "key": f"k{n}"} for n in range(9)]
TRACE = ((b"traceparent", b"00-1-2-01"),)


def cancelled(shard: int, call: PeerCall) -> PeerAnswer:
    request = msgspec.json.decode(call.body)
    results = [{"id": one, "from": shard} for one in request["ids"]]
    results += [{"key": one["key"], "from": shard} for one in request["keys"]]
    return document_answer({"results": results})


def test_results_come_in_the_order_that_was_asked_for() -> None:
    ids = [IDS[2], IDS[0], IDS[2], "none", IDS[COUNT], IDS[3]]
    headers = (*TRACE, (b"content-length", b"999"), (b"content-type", b"application/json"))
    body = msgspec.json.encode({"ids": ids, "keys": KEYS})
    who = caller("publish:orders")
    peers = ToldPeers(COUNT, cancelled, 1)
    answer = peers.route(PeerCall("POST", "/v1/messages/cancel", b"", headers, body, who))
    found = body_of(answer)["results"]
    owners = [2, 0, 2, 1, 1, 3, *(shard_of("orders", one["key"], COUNT) for one in KEYS)]
    names = [*ids, *(one["key"] for one in KEYS)]
    assert [one.get("id", one.get("key")) for one in found] == names
    assert [one["from"] for one in found] == owners
    assert sorted(shard for shard, _ in peers.asked) == sorted(set(owners))
    for _, call in peers.asked:
        assert call.caller is who
        assert call.headers == (headers[0], headers[2])


def test_those_of_one_shard_go_there_as_they_are() -> None:
    body = b'{ "ids": ["%b", "%b"] }' % (IDS[2].encode(), IDS[2].encode())
    call = PeerCall("POST", "/v1/messages/cancel", body=body)
    peers = ToldPeers(COUNT, own_answer)
    assert peers.route(call) == own_answer(2, call)
    assert peers.asked == [(2, call)]
    assert ToldPeers(COUNT, own_answer, 2).route(call) is None


@pytest.mark.parametrize(
    ("refused", "status"), [((2, 3), 503), ((2,), 200), ((3,), 200), ((), 200)]
)
def test_a_part_that_is_refused_is_so_for_its_messages(
    refused: tuple[int, ...], status: int
) -> None:
    body = msgspec.json.encode({"ids": [IDS[2], IDS[3]], "keys": []})
    peers = ToldPeers(COUNT, lambda n, call: AWAY if n in refused else cancelled(n, call))
    answer = peers.route(PeerCall("POST", "/v1/messages/cancel", body=body))
    assert answer is not None and answer.status == status
    if status == 503:
        assert answer == AWAY
    else:
        for shard, one in zip((2, 3), body_of(answer)["results"], strict=True):
            assert one.get("error") == ("shard 1 is starting" if shard in refused else None)
            assert one["id"] == IDS[shard]


def test_parts_that_are_refused_for_other_reasons_say_so_each() -> None:
    forbidden = problem_answer_of(AccessError("no", authenticated=True))
    keys = [{"subject": "orders", "key": "k"}]
    body = msgspec.json.encode({"ids": [IDS[n] for n in range(COUNT)], "keys": keys})
    peers = ToldPeers(COUNT, lambda n, call: forbidden if n == 1 else AWAY)
    found = body_of(peers.route(PeerCall("POST", "/v1/messages/cancel", body=body)))["results"]
    assert [one["error"] for one in found[:3]] == [
        "shard 1 is starting",
        "no",
        "shard 1 is starting",
    ]
    assert (found[4]["subject"], found[4]["key"], found[4]["id"]) == ("orders", "k", None)
