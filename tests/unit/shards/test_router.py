"""Which shards the router asks, and what it makes of what they say."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from delayserver.api.documents import PLACES_HEADER, backup_document
from delayserver.backup.shelf import BackupState, BackupView
from delayserver.errors import (
    AccessError,
    ConflictError,
    DelayServerError,
    NotFoundError,
    ShardAwayError,
)
from delayserver.records.sharding import shard_of, shard_of_heartbeat
from delayserver.security.tokens import Caller, Token
from delayserver.shards.peers import PeerAnswer, PeerCall
from tests.unit.shards.shards import AWAY, ToldPeers, document_answer, problem_answer_of

COUNT = 4
IDS = [f"{shard:04x}" + "0" * 32 for shard in range(COUNT + 1)]
TRACE = ((b"traceparent", b"00-1-2-01"),)


def own_answer(shard: int, call: PeerCall) -> PeerAnswer:
    return document_answer({"shard": shard}, 200)


def body_of(answer: PeerAnswer | None) -> Any:
    assert answer is not None
    return msgspec.json.decode(answer.body)


def caller(*scopes: str) -> Caller:
    return Caller(Token("t", "00" * 32, scopes, 0), lambda: 0.0)


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


def cancelled(shard: int, call: PeerCall) -> PeerAnswer:
    request = msgspec.json.decode(call.body)
    results = [{"id": one, "from": shard} for one in request["ids"]]
    results += [{"key": one["key"], "from": shard} for one in request["keys"]]
    return document_answer({"results": results})


KEYS = [{"subject": "orders", "key": f"k{n}"} for n in range(9)]


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


def hour(number: int) -> dict[str, Any]:
    return {"hour": f"2026-11-20T0{number}", "count": number}


HOURS = [[1, 2, 3], [], [2, 3, 4], [1, 4]]


def archives(shard: int, call: PeerCall) -> PeerAnswer:
    assert (PLACES_HEADER.encode(), b"1") in call.headers
    query = dict(part.split("=") for part in call.query.decode().split("&"))
    limit = int(query["limit"])
    first = int(query.get("cursor", "x0")[-1]) + FIRST_HOUR * ("cursor" in query)
    rows = [FIRST_HOUR + n for n in HOURS[shard] if FIRST_HOUR + n >= first]
    return document_answer(
        {
            "items": [hour(one - FIRST_HOUR) for one in rows[:limit]],
            "places": [(one,) for one in rows[:limit]],
            "following": (rows[limit],) if len(rows) > limit else None,
            "limit": limit,
        }
    )


FIRST_HOUR = 498_768
"""2026-11-25T00."""


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
def test_hours_of_all_shards_by_hour(limit: int) -> None:
    peers = ToldPeers(COUNT, archives, 2)
    found: list[tuple[int, int]] = []
    cursor: str | None = ""
    while cursor is not None:
        query = f"limit={limit}" + (f"&cursor={cursor}" if cursor else "")
        page = body_of(peers.route(PeerCall("GET", "/v1/archives", query.encode()), archive=True))
        assert page["archive"] is True and len(page["hours"]) <= limit
        found += [(one["count"], one["shard"]) for one in page["hours"]]
        cursor = page["cursor"]
    assert found == sorted((n, shard) for shard, hours in enumerate(HOURS) for n in hours)


def refusing(errors: dict[int, DelayServerError], document: Any) -> Any:
    return lambda shard, call: (
        problem_answer_of(errors[shard]) if shard in errors else document_answer(document)
    )


FORBIDDEN = AccessError("not this one", authenticated=True)
MISSING = NotFoundError("nobody")
EMPTY_PAGE: dict[str, Any] = {"items": [], "places": [], "following": None, "limit": 5}


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


def test_counts_by_name_are_added_up_as_far_as_all_pages_reach() -> None:
    """Of behind `c`, where the page of one shard ends, others may have shown more than it has."""
    pages = {
        0: ([("a", 1), ("c", 1)], "c"),
        1: ([("b", 2), ("d", 2)], None),
        2: ([], None),
        3: ([("a", 4)], None),
    }

    def lists(shard: int, call: PeerCall) -> PeerAnswer:
        rows, cursor = pages[shard]
        subjects = [{"name": name, "accepted": count} for name, count in rows]
        return document_answer({"subjects": subjects, "cursor": cursor})

    def page(query: bytes) -> tuple[list[tuple[str, int]], str | None]:
        answer = body_of(ToldPeers(COUNT, lists).route(PeerCall("GET", "/v1/subjects", query)))
        rows = [(one["name"], one["accepted"]) for one in answer["subjects"]]
        return rows, answer["cursor"]

    assert page(b"") == ([("a", 5), ("b", 2), ("c", 1)], "c")
    assert page(b"limit=2") == ([("a", 5), ("b", 2)], "b")


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


def part_of_backup(shard: int, state: BackupState = "running") -> dict[str, Any]:
    view = BackupView("b", shard, state, "waiting", 1, None, None, None, 10, 5, 1, False)
    return msgspec.to_builtins(backup_document(view))


def test_each_shard_is_told_to_make_its_part_under_the_name_that_the_own_one_gives() -> None:
    peers = ToldPeers(COUNT, lambda shard, call: document_answer(part_of_backup(shard), 202), 1)
    found = peers.route(PeerCall("POST", "/v1/backups", body=b'{"verify": false}'))
    assert found is not None and found.status == 202
    assert [one["shard"] for one in body_of(found)["shards"]] == [*range(COUNT)]
    assert [shard for shard, _ in peers.asked] == [1, 0, 2, 3]
    for _, call in peers.asked[1:]:
        assert msgspec.json.decode(call.body) == {"name": "b", "verify": False}
        assert (b"content-type", b"application/json") in call.headers


def test_a_backup_that_a_shard_refuses_is_given_up_where_it_was_begun() -> None:
    def answer(shard: int, call: PeerCall) -> PeerAnswer:
        if call.method == "DELETE":
            return PeerAnswer(204, (), b"")
        if shard == 2:
            return problem_answer_of(ConflictError("there is a backup b"))
        return document_answer(part_of_backup(shard), 202)

    peers = ToldPeers(COUNT, answer, 0)
    found = peers.route(PeerCall("POST", "/v1/backups"))
    assert found is not None and found.status == 409
    deleted = [shard for shard, call in peers.asked if call.method == "DELETE"]
    assert deleted == [0, 1, 3]


def test_a_backup_without_the_part_of_a_shard_has_failed() -> None:
    def answer(shard: int, call: PeerCall) -> PeerAnswer:
        return document_answer(part_of_backup(shard, "complete")) if shard else MISSING_ANSWER

    found = body_of(ToldPeers(COUNT, answer, 3).route(PeerCall("GET", "/v1/backups/b")))
    assert found["state"] == "failed" and "shard 0" in found["error"]
    nobody = ToldPeers(COUNT, lambda shard, call: MISSING_ANSWER, 3)
    for method in ("GET", "DELETE"):
        missing = nobody.route(PeerCall(method, "/v1/backups/b"))
        assert missing is not None and missing.status == 404


MISSING_ANSWER = problem_answer_of(NotFoundError("there is no backup 'b'"))
