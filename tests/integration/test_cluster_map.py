"""GET /v1/cluster and 421 over real HTTP: of one server, and of shards that come and go."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from delayserver.records.message_id import read_id
from delayserver.records.sharding import shard_of, shard_of_heartbeat
from tests.integration.api_support import ApiServer, make_token
from tests.integration.supervised import COUNT, Supervised
from tests.waiting import wait_until

PATH = "/v1/cluster"
NO_FORWARD = {"delay-forward": "no"}
FOR_LONG_S = 20


@pytest.fixture(scope="module")
def supervised(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervised]:
    one = Supervised(tmp_path_factory.mktemp("shards"))
    one.start()
    yield one
    one.end()


def whole(supervised: Supervised) -> dict[str, Any]:
    """The map, once all shards are on it."""

    def look() -> dict[str, Any]:
        found: dict[str, Any] = supervised.client.get(PATH).json()
        return found if all(one["url"] for one in found["shards"]) else {}

    return wait_until(look)


def key_of(shard: int) -> str:
    """A key of the subject `a` that belongs there."""
    return next(str(n) for n in range(1000) if shard_of("a", str(n), COUNT) == shard)


# ── a server alone ─────────────────────────────────────────────────────────────────────────────


def test_a_server_alone_is_one_shard_whose_version_stays(shared_api: ApiServer) -> None:
    answer = shared_api.get(PATH)
    document = answer.json()
    assert document["shards"] == [
        {
            "shard": 0,
            "owner": "local",
            "epoch": 0,
            "url": shared_api.process.url,
            "replicas": [],
            "state": "serving",
        }
    ]
    assert [(one["node"], one["url"]) for one in document["nodes"]] == [
        ("local", shared_api.process.url)
    ]
    tag = answer.headers["etag"]
    assert tag == f'W/"{document["version"]}"'
    for known in (tag, tag.removeprefix("W/"), f'"1", {tag}', "*"):
        again = shared_api.get(PATH, headers={"if-none-match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert shared_api.get(PATH, headers={"if-none-match": '"1"'}).status_code == 200
    # One that wants no forwarding is served as ever: nothing belongs elsewhere.
    message = {"subject": "map", "key": "1", "delay": "1h"}
    published = shared_api.post("/v1/messages", json=message, headers=NO_FORWARD)
    assert published.status_code == 201


def test_a_long_poll_lasts_as_long_as_it_was_asked_to(shared_api: ApiServer) -> None:
    version = shared_api.get(PATH).json()["version"]
    begun_s = time.monotonic()
    assert shared_api.get(f"{PATH}?after={version}&wait=300ms").json()["version"] == version
    assert time.monotonic() - begun_s >= 0.3
    # At once: it is another one already.
    assert shared_api.get(f"{PATH}?after={version + 1}&wait=60s").status_code == 200
    assert time.monotonic() - begun_s < FOR_LONG_S
    for wrong, pointer in (("wait=61s", "wait"), ("wait=x", "wait"), ("after=-1", "after")):
        refused = shared_api.get(f"{PATH}?{wrong}")
        assert refused.status_code == 422
        assert refused.json()["errors"][0]["pointer"] == f"/query/{pointer}"
    assert shared_api.get(PATH, headers={"if-none-match": "1"}).status_code == 422


def test_a_server_that_stops_answers_who_waits(api: ApiServer) -> None:
    version = api.get(PATH).json()["version"]
    answers: list[httpx.Response] = []
    poll = threading.Thread(
        target=lambda: answers.append(
            httpx.get(f"{api.process.url}{PATH}?after={version}&wait=60s", timeout=60)
        )
    )
    poll.start()
    _until_connected(api.process.url)
    begun_s = time.monotonic()
    assert api.process.stop() == 0
    poll.join()
    assert answers[0].json()["version"] == version
    assert time.monotonic() - begun_s < FOR_LONG_S


def _until_connected(url: str) -> None:
    """Until somebody else has a connection to the server, which has had its request by then."""
    port = f":{int(url.rpartition(':')[2]):04X}"

    def look() -> bool:
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return sum(line[1].endswith(port) and line[3] == "01" for line in lines) > 1

    wait_until(look)
    httpx.get(f"{url}/healthz")


def test_any_token_will_do(make_api: Callable[..., ApiServer]) -> None:
    api = make_api()
    tokens = [
        make_token(api.data_dir, name, scope)
        for name, scope in (("a", "publish:x"), ("b", "consume:x"), ("c", "observe"))
    ]
    api.start()
    for token in tokens:
        headers = {"authorization": f"Bearer {token}"}
        assert api.get(PATH, headers=headers).status_code == 200
    assert api.get(PATH).status_code == 401
    assert api.get(PATH, headers={"authorization": "Bearer x"}).status_code == 401


# ── several shards ─────────────────────────────────────────────────────────────────────────────


def test_each_shard_gives_the_same_version_and_its_own_address(supervised: Supervised) -> None:
    document = whole(supervised)
    assert [one["shard"] for one in document["shards"]] == list(range(COUNT))
    urls = [one["url"] for one in document["shards"]]
    assert len({*urls, str(supervised.client.base_url)}) == COUNT + 1
    for url in urls:
        assert httpx.get(url + PATH).json()["version"] == document["version"]
    # … on the host that the client has named.
    named = supervised.client.get(PATH, headers={"host": f"localhost:{supervised.port}"}).json()
    ports = [url.rpartition(":")[2] for url in urls]
    assert [one["url"] for one in named["shards"]] == [f"http://localhost:{one}" for one in ports]
    assert named["nodes"][0]["url"] == f"http://localhost:{supervised.port}"


def test_a_call_for_another_shard_is_answered_with_its_address(supervised: Supervised) -> None:
    document = whole(supervised)
    urls = [one["url"] for one in document["shards"]]
    ids = [supervised.published(key_of(shard))["id"] for shard in range(COUNT)]
    assert [read_id(one).shard for one in ids] == list(range(COUNT))
    for shard, message_id in enumerate(ids):
        key = key_of(shard)
        beat = next(str(n) for n in range(1000) if shard_of_heartbeat(str(n), COUNT) == shard)
        message = {"subject": "a", "key": key, "delay": "1h"}
        heartbeat = {"timeout": "1h", "subject": "a"}
        calls: list[tuple[str, str, Any]] = [
            ("POST", "/v1/messages", message),
            ("POST", "/v1/messages?ack=filed", message),
            ("POST", "/v1/messages/batch", [message, {"subject": "a"}, message]),
            ("GET", f"/v1/messages/{message_id}", None),
            ("GET", f"/v1/subjects/a/keys/{key}", None),
            ("PATCH", f"/v1/messages/{message_id}", {"delay": "2h"}),
            ("PATCH", f"/v1/subjects/a/keys/{key}", {"delay": "2h"}),
            ("PUT", f"/v1/subjects/a/keys/{key}", {"delay": "1h"}),
            ("PUT", f"/v1/heartbeats/{beat}", heartbeat),
            ("GET", f"/v1/heartbeats/{beat}", None),
            ("DELETE", f"/v1/heartbeats/{beat}", None),
            ("DELETE", f"/v1/messages/{message_id}", None),
            ("DELETE", f"/v1/subjects/a/keys/{key}", None),
            ("POST", "/v1/messages/cancel", {"ids": [message_id]}),
        ]
        for method, path, body in calls:
            for asked, url in enumerate(urls):
                if asked == shard:
                    continue
                answer = httpx.request(method, url + path, json=body, headers=NO_FORWARD)
                assert answer.status_code == 421, (method, path, answer.text)
                assert answer.headers["delay-owner"] == urls[shard]
                problem = answer.json()
                assert problem["type"] == "urn:delayserver:problem:misdirected"
                assert urls[shard] in problem["detail"]
            answer = httpx.request(method, urls[shard] + path, json=body, headers=NO_FORWARD)
            assert answer.is_success, (method, path, answer.text)
        # Who does not say so is forwarded.
        message["key"] = key_of(shard) + "x"
        assert all(httpx.post(f"{url}/v1/messages", json=message).is_success for url in urls)


def test_what_is_for_several_shards_is_served_as_ever(supervised: Supervised) -> None:
    url = whole(supervised)["shards"][0]["url"]
    batch = [{"subject": "a", "key": f"{key_of(shard)}b", "delay": "1h"} for shard in range(COUNT)]
    batch += [{"subject": "a", "key": str(n), "delay": "1h"} for n in range(1000, 1050)]
    done = httpx.post(f"{url}/v1/messages/batch", json=batch, headers=NO_FORWARD).json()
    assert set(done["duplicates_by_shard"]) == set(map(str, range(COUNT)))
    atomic = httpx.post(f"{url}/v1/messages/batch?atomic=true", json=batch, headers=NO_FORWARD)
    assert atomic.status_code == 422
    for path in ("/v1/stats", "/v1/subjects/a/messages", "/v1/subscriptions"):
        assert httpx.get(url + path, headers=NO_FORWARD).status_code == 200
    assert httpx.post(f"{url}/v1/events/k", headers=NO_FORWARD).status_code == 200
    cancel = {"ids": done["ids"]}
    answer = httpx.post(f"{url}/v1/messages/cancel", json=cancel, headers=NO_FORWARD)
    assert answer.status_code == 200


def test_a_long_poll_sees_a_shard_that_is_killed_go_away_and_come_back(
    supervised: Supervised,
) -> None:
    document = whole(supervised)
    urls = {one["shard"]: one["url"] for one in document["shards"]}
    pid = supervised.shards[0]
    # Each is asked, and those that were not killed tell the same story, each to a list of its own:
    # the connection of the one that was killed may break after another has answered already.
    told: dict[str, list[dict[str, Any]]] = {url: [] for url in urls.values()}

    def poll(url: str) -> None:
        version = document["version"]
        found = told[url]
        try:
            while not found or any(one["state"] == "away" for one in found[-1]["shards"]):
                query = {"after": version, "wait": "60s"}
                answer = httpx.get(url + PATH, params=query, timeout=90).json()
                version = answer["version"]
                found.append(answer)
        except httpx.TransportError:
            del told[url]  # it was that of the shard that is killed

    polls = [threading.Thread(target=poll, args=(url,)) for url in urls.values()]
    for one in polls:
        one.start()
    os.kill(pid, signal.SIGKILL)
    for one in polls:
        one.join()
    assert len(told) == COUNT - 1
    for url, found in told.items():
        states = [[(one["state"], one["url"]) for one in answer["shards"]] for answer in found]
        (shard,) = [number for number, (state, _) in enumerate(states[0]) if state == "away"]
        assert states[0][shard] == ("away", None)
        state, address = states[-1][shard]
        assert state == "serving" and address not in (None, urls[shard], url)
        assert httpx.get(address + PATH).status_code == 200
