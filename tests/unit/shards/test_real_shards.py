"""Real servers behind the router answer as one server that has all of their messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from delayserver.records.ids import IdCodec
from delayserver.records.sharding import shard_of, shard_of_heartbeat
from delayserver.shards.peers import PeerAnswer
from delayserver.times import parse_time_ms
from delayserver.wire.messages import (
    CancelledDocument,
    HeartbeatDocument,
    MessageDocument,
    PendingListDocument,
)
from delayserver.wire.operations import StatsDocument
from delayserver.wire.subscriptions import DeadLettersDocument
from tests.unit.fakes import SECRET, START_MS
from tests.unit.shards.shards import RealShards

COUNT = 3
SUBJECT = "orders"
KEYS = [f"a/{n}%" for n in range(12)]
UNKNOWN_ID = IdCodec(1, SECRET).encode(START_MS, 1)


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[RealShards]:
    made = RealShards(tmp_path, COUNT)
    yield made
    made.close()


def decoded(answer: PeerAnswer) -> Any:
    assert answer.status < 300, answer
    return msgspec.json.decode(answer.body)


def publish(shards: RealShards, key: str, delay: str = "1h", **more: Any) -> str:
    document = {"subject": SUBJECT, "key": key, "delay": delay, "body": {"k": key}, **more}
    owner = shard_of(SUBJECT, key, COUNT)
    found = shards.ask("POST", "/v1/messages", document, entered=owner, direct=True)
    message_id: str = decoded(found)["id"]
    return message_id


def everything(shards: RealShards, path: str, name: str, query: str) -> list[Any]:
    """All pages, each asked of another process."""
    rows: list[Any] = []
    cursor, page = None, 0
    while True:
        more = "" if cursor is None else f"&cursor={cursor}"
        found = shards.get(path, query + more, entered=page % COUNT)
        rows += found[name]
        cursor, page = found["cursor"], page + 1
        if cursor is None:
            return rows


def header(answer: PeerAnswer, name: bytes) -> bytes:
    return dict(answer.headers)[name]


def test_a_message_is_the_same_through_every_process(shards: RealShards) -> None:
    for key in KEYS:
        message_id = publish(shards, key)
        paths = f"/v1/messages/{message_id}", f"/v1/subjects/{SUBJECT}/keys/{key}"
        for path in paths:
            answers = [shards.ask("GET", path, entered=n) for n in range(COUNT)]
            assert len({(one.status, one.body, header(one, b"etag")) for one in answers}) == 1
            found = msgspec.json.decode(answers[0].body, type=MessageDocument)
            assert (found.id, found.key, found.state) == (message_id, key, "scheduled")
        moved = shards.ask("PATCH", paths[1], {"delay": "2h"}, headers={"if-match": '"0"'})
        assert moved.status == 412 and header(moved, b"etag")
        etag = header(moved, b"etag").decode()
        for path in paths:
            moved = shards.ask("PATCH", path, {"delay": "2h"}, headers={"if-match": etag})
            assert decoded(moved)["id"] == message_id
            etag = header(moved, b"etag").decode()
        put = shards.ask("PUT", paths[1], {"delay": "3h", "body": 7})
        assert put.status == 200
        assert header(put, b"location").decode() == f"/v1/messages/{decoded(put)['id']}"
        assert decoded(shards.ask("DELETE", paths[1], entered=1))["state"] == "cancelled"
        assert shards.get(paths[1], entered=2)["state"] == "cancelled"


@pytest.mark.parametrize("message_id", ["none", UNKNOWN_ID, "ffff" + "0" * 32, "0001" + "0" * 32])
@pytest.mark.parametrize("method", ["GET", "DELETE", "PATCH"])
def test_what_no_shard_has_given_out_is_not_found(
    shards: RealShards, method: str, message_id: str
) -> None:
    body = {"delay": 1} if method == "PATCH" else None
    answer = shards.ask(method, f"/v1/messages/{message_id}", body)
    assert answer.status == 404
    assert msgspec.json.decode(answer.body)["detail"] == f"there is no message {message_id!r}"


@pytest.mark.parametrize("limit", [1, 2, 5, 1000])
def test_the_list_of_all_is_in_due_order(shards: RealShards, limit: int) -> None:
    delays = ["3h", "1m", "40d", "90m", "2h", "90m", "1m30s", "25h", "3h", "400d", "2m", "30m"]
    ids = {publish(shards, key, delay) for key, delay in zip(KEYS, delays, strict=True)}
    path = f"/v1/subjects/{SUBJECT}/messages"
    found = everything(shards, path, "messages", f"limit={limit}")
    assert {one["id"] for one in found} == ids and len(found) == len(ids)
    order = [(one["deliver_at"], one["id"][:4]) for one in found]
    assert order == sorted(order)
    start_ms = parse_time_ms(found[3]["deliver_at"])
    until_ms = parse_time_ms(found[8]["deliver_at"])
    some = everything(shards, path, "messages", f"limit={limit}&from={start_ms}&to={until_ms}")
    assert some == found[3:8]
    document = shards.ask("GET", path, query="limit=3").body
    pages = msgspec.json.decode(document, type=PendingListDocument)
    assert msgspec.json.encode(pages) == document


def test_a_message_that_is_published_meanwhile_is_listed_if_it_is_due_behind(
    shards: RealShards,
) -> None:
    """Also where the shard had nothing more."""
    path = f"/v1/subjects/{SUBJECT}/messages"
    owned = [[key for key in KEYS if shard_of(SUBJECT, key, COUNT) == n] for n in range(COUNT)]
    first = publish(shards, owned[0][0], "1h")
    later = [publish(shards, key, f"{n + 3}h") for n, key in enumerate(owned[1])]
    page = shards.get(path, "limit=2")
    assert [one["id"] for one in page["messages"]] == [first, later[0]]
    between = publish(shards, owned[0][1], "4h30m")
    publish(shards, owned[2][0], "2h")
    rest = shards.get(path, f"limit=100&cursor={page['cursor']}", entered=2)
    assert [one["id"] for one in rest["messages"]] == [later[1], between, *later[2:]]
    assert rest["cursor"] is None


@pytest.mark.parametrize(
    "query",
    [
        "cursor=",
        "cursor=4-0-1-1",
        f"cursor={COUNT}-1-{COUNT}-1",
        f"cursor={COUNT}-0-1",
        f"cursor={COUNT}-1-0-1-1",
        "cursor=%C3%A9",
        "limit=0",
        "limit=x",
        "from=x",
    ],
)
def test_a_list_that_is_asked_for_wrongly_is_refused(shards: RealShards, query: str) -> None:
    answer = shards.ask("GET", f"/v1/subjects/{SUBJECT}/messages", query=query)
    assert answer.status == 422
    [error] = msgspec.json.decode(answer.body)["errors"]
    assert error["pointer"] == "/query/" + query.partition("=")[0]


@pytest.mark.parametrize("due_ms", [0, 10**20 - 1])
def test_a_cursor_of_any_numbers_is_one(shards: RealShards, due_ms: int) -> None:
    message_id = publish(shards, KEYS[0])
    query = f"cursor={COUNT}-{due_ms}-1-{10**20 - 1}"
    found = shards.get(f"/v1/subjects/{SUBJECT}/messages", query)
    assert [one["id"] for one in found["messages"]] == ([] if due_ms else [message_id])


def test_many_are_cancelled_each_at_its_shard(shards: RealShards) -> None:
    ids = [publish(shards, key) for key in KEYS]
    wanted = {
        "ids": [ids[3], UNKNOWN_ID, "none", *ids[4:7], ids[3]],
        "keys": [{"subject": SUBJECT, "key": key} for key in [*KEYS[7:], KEYS[4], "unknown"]],
    }
    answer = shards.ask("POST", "/v1/messages/cancel", wanted, entered=1)
    results = msgspec.json.decode(answer.body, type=CancelledDocument).results
    found = [(one.id, one.subject, one.key, one.state) for one in results]
    assert found == [
        (ids[3], None, None, "cancelled"),
        (UNKNOWN_ID, None, None, None),
        ("none", None, None, None),
        *((message_id, None, None, "cancelled") for message_id in ids[4:7]),
        (ids[3], None, None, "cancelled"),
        *((ids[n], SUBJECT, KEYS[n], "cancelled") for n in (7, 8, 9, 10, 11, 4)),
        (None, SUBJECT, "unknown", None),
    ]
    assert [one.error is None for one in results] == [one.state is not None for one in results]
    assert decoded(answer) == {"results": [msgspec.to_builtins(one) for one in results]}
    left = shards.get(f"/v1/subjects/{SUBJECT}/messages")["messages"]
    assert {one["id"] for one in left} == set(ids[:3])


def test_a_part_whose_shard_is_away_is_refused_alone(shards: RealShards) -> None:
    by_shard = {shard_of(SUBJECT, key, COUNT): publish(shards, key) for key in KEYS}
    shards.away = {1}
    wanted = {"ids": list(by_shard.values())}
    answer = shards.ask("POST", "/v1/messages/cancel", wanted)
    found = {one["id"]: one for one in decoded(answer)["results"]}
    assert found[by_shard[1]]["error"] == "shard 1 is starting"
    assert [found[by_shard[n]]["state"] for n in range(COUNT)] == ["cancelled", None, "cancelled"]
    shards.away = {1, 2}
    both = {"ids": [by_shard[1], by_shard[2]]}
    answer = shards.ask("POST", "/v1/messages/cancel", both)
    assert (answer.status, header(answer, b"retry-after")) == (503, b"2")


@pytest.mark.parametrize(
    "path",
    [
        f"/v1/subjects/{SUBJECT}/messages",
        "/v1/stats",
        "/v1/forecast",
        "/v1/subscriptions",
        "/v1/subscriptions/workers",
        "/v1/subscriptions/workers/dead-letters",
        "/v1/archives",
    ],
)
def test_what_is_read_of_all_is_whole_or_refused(shards: RealShards, path: str) -> None:
    subscribe(shards)
    assert shards.ask("GET", path).status == 200
    shards.away = {2}
    answer = shards.ask("GET", path)
    assert (answer.status, header(answer, b"retry-after")) == (503, b"2")


def subscribe(shards: RealShards, name: str = "workers", subject: str = SUBJECT) -> None:
    document = {"subject": subject, "type": "pull", "retry": {"max_attempts": 1}}
    for shard in range(COUNT):
        path = f"/v1/subscriptions/{name}"
        decoded(shards.ask("PUT", path, document, entered=shard, direct=True))


def test_stats_and_forecast_are_sums(shards: RealShards) -> None:
    for key in KEYS:
        publish(shards, key, "30h" if key == KEYS[0] else "1h")
    for entered in range(COUNT):
        answer = shards.ask("GET", "/v1/stats", entered=entered)
        stats = msgspec.json.decode(answer.body, type=StatsDocument)
        each = [
            decoded(shards.ask("GET", "/v1/stats", entered=n, direct=True)) for n in range(COUNT)
        ]
        assert stats.accepted == len(KEYS)
        assert stats.last_seq == sum(one["last_seq"] for one in each)
        assert stats.started_at == max(one["started_at"] for one in each)
        assert (stats.subjects, stats.subscriptions) == (1, 0)
        assert set(decoded(answer)) == set(StatsDocument.__struct_fields__)
        found = shards.get("/v1/forecast", entered=entered)
        assert [one["count"] for one in found["buckets"]] == [len(KEYS) - 1, 1]
        assert shards.get("/v1/forecast", "bucket=100d")["bucket"] == "100d"
    refused = shards.ask("GET", "/v1/forecast", query="bucket=5m")
    assert refused.status == 422


def test_metrics_name_their_shard(shards: RealShards) -> None:
    subscribe(shards)
    for key in KEYS:
        publish(shards, key)
    shards.ask("GET", "/metrics", entered=2)  # from now on requests of this status are counted
    answer = shards.ask("GET", "/metrics", entered=2)
    assert header(answer, b"content-type").startswith(b"text/plain")
    families = list(text_string_to_metric_families(answer.body.decode()))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    own = shards.ask("GET", "/metrics", direct=True).body.decode()
    alone = {one.name: one for one in text_string_to_metric_families(own)}
    assert set(alone) | {"delayserver_shard_answers"} == set(names)
    for family in families:
        if family.name not in alone:
            continue
        by_itself = alone[family.name]
        assert (family.type, family.documentation) == (by_itself.type, by_itself.documentation)
        shapes = [{"name": one.name, **one.labels, "shard": "0"} for one in by_itself.samples]
        found = [{"name": one.name, **one.labels} for one in family.samples]
        assert [one for one in found if one["shard"] == "0"] == shapes
    [accepted] = [one for one in families if one.name == "delayserver_accepted"]
    assert {one.labels["shard"] for one in accepted.samples} == {"0", "1", "2"}
    assert sum(one.value for one in accepted.samples) == len(KEYS)


def test_metrics_of_the_others_are_given_while_a_shard_is_away(shards: RealShards) -> None:
    shards.away = {1}
    answer = shards.ask("GET", "/metrics")
    assert answer.status == 200
    families = text_string_to_metric_families(answer.body.decode())
    samples = {family.name: family.samples for family in families}
    answers = {one.labels["shard"]: one.value for one in samples["delayserver_shard_answers"]}
    assert answers == {"0": 1, "1": 0, "2": 1}
    commits = samples["delayserver_commits"]
    assert [one.labels["shard"] for one in commits] == ["0", "2"]


def test_an_event_completes_in_all_shards(shards: RealShards) -> None:
    for key in KEYS:
        publish(shards, key, watch=["w/1"], on_event="fire" if key == KEYS[0] else "cancel")
    answer = shards.ask("POST", "/v1/events/w/1", entered=1)
    assert answer.body == b'{"cancelled":%d,"fired":1}' % (len(KEYS) - 1)
    assert decoded(shards.ask("POST", "/v1/events/w/1")) == {"cancelled": 0, "fired": 0}
    assert shards.ask("POST", "/v1/events/" + "x" * 257).status == 422


def test_an_event_that_one_shard_did_not_have_may_be_repeated(shards: RealShards) -> None:
    of_shard = [shard_of(SUBJECT, key, COUNT) for key in KEYS]
    for key in KEYS:
        publish(shards, key, watch=["w"])
    shards.away = {1}
    answer = shards.ask("POST", "/v1/events/w")
    assert (answer.status, header(answer, b"retry-after")) == (503, b"2")
    assert header(answer, b"content-type") == b"application/problem+json"
    done = len(KEYS) - of_shard.count(1)
    assert msgspec.json.decode(answer.body)["detail"] == (
        f"shard 1 is starting; it is done in shard 0, 2 (cancelled: {done}, fired: 0), "
        "and may be asked again"
    )
    shards.away = set()
    again = decoded(shards.ask("POST", "/v1/events/w"))
    assert again == {"cancelled": of_shard.count(1), "fired": 0}


def test_a_heartbeat_is_in_one_shard(shards: RealShards) -> None:
    for key in KEYS:
        path = f"/v1/heartbeats/{key}"
        document = {"timeout": "1h", "subject": SUBJECT}
        statuses = [shards.ask("PUT", path, document, entered=n).status for n in range(COUNT)]
        assert statuses == [201, 200, 200]
        found = shards.ask("GET", path, entered=1)
        assert msgspec.json.decode(found.body, type=HeartbeatDocument).key == key
        owner = shard_of_heartbeat(key, COUNT)
        assert shards.ask("GET", path, entered=owner, direct=True).status == 200
        assert shards.ask("DELETE", path, entered=2).status == 204
        assert shards.ask("DELETE", path).status == 404


def die(shards: RealShards, keys: list[str]) -> list[str]:
    """Messages become dead letters; their ids."""
    ids = [publish(shards, key, "0") for key in keys]
    for shard in {shard_of(SUBJECT, key, COUNT) for key in keys}:
        path = "/v1/subscriptions/workers"
        count = sum(shard_of(SUBJECT, key, COUNT) == shard for key in keys)
        wanted = {"max": 100, "min_messages": count, "wait": "20s"}
        found = shards.ask("POST", f"{path}/pull", wanted, entered=shard, direct=True)
        leases = [one["lease"] for one in decoded(found)["messages"]]
        assert len(leases) == count
        body = {"leases": leases}
        decoded(shards.ask("POST", f"{path}/nack", body, entered=shard, direct=True))
    return ids


@pytest.mark.parametrize("limit", [1, 5, 100])
def test_dead_letters_of_all(shards: RealShards, limit: int) -> None:
    subscribe(shards)
    ids = die(shards, KEYS)
    path = "/v1/subscriptions/workers/dead-letters"
    found = everything(shards, path, "dead_letters", f"limit={limit}")
    assert {one["id"] for one in found} == set(ids) and len(found) == len(ids)
    body = shards.ask("GET", path, query="limit=2").body
    assert msgspec.json.encode(msgspec.json.decode(body, type=DeadLettersDocument)) == body
    assert shards.ask("DELETE", f"{path}/{ids[0]}", entered=1).status == 204
    assert shards.ask("DELETE", f"{path}/{ids[0]}", entered=2).status == 404
    assert shards.ask("DELETE", f"{path}/none").status == 404
    answer = shards.ask("POST", f"{path}/redrive", {"ids": [*ids[:4], "none"]}, entered=1)
    assert answer.body == b'{"redriven":3}'
    assert shards.ask("POST", f"{path}/redrive", {"ids": ["none"]}).body == b'{"redriven":0}'
    assert decoded(shards.ask("POST", f"{path}/redrive")) == {"redriven": len(ids) - 4}
    assert decoded(shards.ask("POST", f"{path}/redrive", {})) == {"redriven": 0}


@pytest.mark.parametrize("body", [{"ids": [1]}, {"id": []}, [], {"ids": ["x"] * 10_001}])
def test_a_redrive_that_cannot_be_read_is_refused(shards: RealShards, body: Any) -> None:
    subscribe(shards)
    path = "/v1/subscriptions/workers/dead-letters/redrive"
    assert shards.ask("POST", path, body).status == 422


def test_dead_letters_that_are_left_in_one_shard(shards: RealShards) -> None:
    subscribe(shards)
    [message_id] = die(shards, KEYS[:1])
    path = "/v1/subscriptions/workers"
    for shard in range(COUNT):
        deleted = shards.ask("DELETE", path, entered=shard, direct=True)
        assert deleted.status == 204
    for entered in range(COUNT):
        found = shards.get(f"{path}/dead-letters", entered=entered)
        assert [one["id"] for one in found["dead_letters"]] == [message_id]
        assert shards.ask("POST", f"{path}/dead-letters/redrive", entered=entered).status == 409
        missing = shards.ask("GET", "/v1/subscriptions/nobody/dead-letters", entered=entered)
        assert missing.status == 404


def test_what_waits_for_a_subscription_waits_in_all(shards: RealShards) -> None:
    subscribe(shards)
    subscribe(shards, "others", "others")
    for key in KEYS:
        publish(shards, key, "0")
    pull = {"max": 1, "wait": "20s"}
    for shard in {shard_of(SUBJECT, key, COUNT) for key in KEYS}:
        path = "/v1/subscriptions/workers/pull"
        found = decoded(shards.ask("POST", path, pull, entered=shard, direct=True))
        assert len(found["messages"]) == 1
    for entered in range(COUNT):
        path = "/v1/subscriptions/workers"
        own = shards.ask("GET", path, entered=entered, direct=True).body
        one = shards.ask("GET", path, entered=entered).body
        counts = {"queued": len(KEYS) - COUNT, "in_flight": COUNT}
        assert msgspec.json.decode(one) == msgspec.json.decode(own) | counts
        listed = shards.get("/v1/subscriptions", entered=entered)["subscriptions"]
        assert listed[0] == msgspec.json.decode(one)
        assert [found["name"] for found in listed] == ["workers", "others"]
        assert (listed[1]["queued"], listed[1]["in_flight"]) == (0, 0)
    assert shards.ask("GET", "/v1/subscriptions/nobody").status == 404


def test_an_import_is_of_the_shard_that_is_named(shards: RealShards) -> None:
    begin = {"subjects": [SUBJECT]}
    for shard in range(COUNT):
        found = shards.ask("PUT", "/v1/imports/one", begin, query=f"shard={shard}")
        assert decoded(found)["state"] == "staging"
    for query in "", "shard=3", "shard=x", "shard=":
        refused = shards.ask("PUT", "/v1/imports/one", begin, query=query)
        assert refused.status == 422
        [error] = msgspec.json.decode(refused.body)["errors"]
        assert error["pointer"] == "/query/shard" and "shard=2" in error["detail"]
    for shard in range(COUNT):
        root = shards.directory.resolve() / f"shard-000{shard}"
        for manifest in f"shard-000{shard}/imports/one.manifest", f"{root}/imports/one.manifest":
            answer = shards.ask("POST", "/v1/imports", {"manifest": manifest})
            assert answer.status == 404, answer
            assert "imports/one.manifest" in msgspec.json.decode(answer.body)["detail"]
        missing = shards.ask("GET", "/v1/imports/one", query=f"shard={shard}")
        assert missing.status == 404
    for query, manifest, status in [
        ("", "imports/one.manifest", 422),
        ("shard=1", "imports/one.manifest", 404),
        ("shard=1", "shard-0002/imports/one.manifest", 422),
        ("", "shard-0009/imports/one.manifest", 422),
        ("", "elsewhere/shard-0001/imports/one.manifest", 422),
    ]:
        answer = shards.ask("POST", "/v1/imports", {"manifest": manifest}, query=query)
        assert answer.status == status, (query, manifest, answer)
    assert shards.ask("POST", "/v1/imports", {"manifest": 1}).status == 422
    assert shards.ask("POST", "/v1/imports").status == 422


def test_archives_of_none(shards: RealShards) -> None:
    expected = b'{"archive":false,"hours":[],"cursor":null}'
    assert shards.ask("GET", "/v1/archives").body == expected
    assert shards.ask("GET", "/v1/archives", query="shard=2").body == expected
    assert shards.ask("GET", "/v1/archives", query="state=x").status == 422
    archive = {"schedule_bytes": 1, "dispatch_bytes": 1, "last_seq": 1, "count": 1}
    path = "/v1/archives/2026-11-20T15"
    assert shards.ask("PUT", path, archive).status == 422
    assert shards.ask("PUT", path, archive, query="shard=2").status == 404


ODD_LIMITS = (
    "5.0",
    "%205",
    "%2B5",
    "1_0",
    "5&limit=3",
    "0",
    "",
    "x",
    "5.5",
    "-1",
    "1e2",
    "00005.00",
)
ODD_CURSORS = ("1-2", "x", "", "-", "9", "a%20b", f"{10**14}-1", "2026-11-20T15", "1-2-3-4-5-6")


def test_odd_calls_are_answered_as_by_a_server_alone(shards: RealShards) -> None:
    publish(shards, KEYS[0])
    pulls = {"subject": SUBJECT, "type": "pull"}
    for shard in range(COUNT):
        shards.ask("PUT", "/v1/subscriptions/s", pulls, entered=shard, direct=True)
    lists = ["schedules", "sources", "subjects", "dead-letters", "subscriptions", "archives"]
    paths = [f"/v1/{name}" for name in lists]
    paths += [f"/v1/subjects/{SUBJECT}/messages", "/v1/subscriptions/s/dead-letters"]
    calls = [
        *((path, f"limit={limit}") for path in paths for limit in ODD_LIMITS),
        *((path, f"cursor={cursor}") for path in paths for cursor in ODD_CURSORS),
        *(("/v1/forecast", query) for query in ("bucket=x", "buckets=5.0", "buckets=x")),
        *((f"/v1/imports/x{more}", "") for more in ("", "/duplicates")),
        ("/v1/backups/x", ""),
    ]
    differ = {}
    for path, query in calls:
        together = shards.ask("GET", path, query=query).status
        alone = shards.ask("GET", path, query=query, direct=True).status
        if together != alone:
            differ[path, query] = together, alone
    assert differ == {}


def test_the_cursor_of_a_server_alone_is_a_place_in_each_shard(shards: RealShards) -> None:
    ids = {publish(shards, key) for key in KEYS}
    path = f"/v1/subjects/{SUBJECT}/messages"
    assert {one["id"] for one in shards.get(path, "cursor=1-2")["messages"]} == ids
    assert shards.get(path, f"cursor={10**14}-1")["messages"] == []


@pytest.mark.parametrize(
    "call",
    [
        ("GET", "/v1/nothing"),
        ("POST", "/v1/stats"),
        ("POST", f"/v1/messages/{UNKNOWN_ID}"),
        ("GET", "/v1/messages/a/b"),
        ("GET", "/v1/events/w"),
        ("GET", "/healthz"),
        ("GET", "/openapi.json"),
        ("POST", "/v1/messages"),
    ],
)
def test_all_else_is_left_to_the_own_shard(shards: RealShards, call: tuple[str, str]) -> None:
    assert shards.ask(*call) == shards.ask(*call, direct=True)
