"""Shards as processes: one port, a directory each, and each is started again when it ends."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from delayserver.records.message_id import read_id
from delayserver.records.sharding import shard_of
from storage.files import OsFiles
from storage.shards import read_shard_count, shard_directory
from tests.integration.supervised import COUNT, Supervised
from tests.waiting import wait_until


def blocks_hangups(pid: int) -> bool:
    """Whether SIGHUP waits in the main thread of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    blocked = int(status.split("SigBlk:")[1].split()[0], 16)
    return bool(blocked & 1 << (signal.SIGHUP - 1))


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Supervised]:
    one = Supervised(tmp_path)
    yield one
    one.end()


def test_keys_go_where_they_belong_whoever_is_asked(supervised: Supervised) -> None:
    supervised.start()
    ids: dict[str, str] = {}
    for number in range(30):
        # A connection each: another process may accept it.
        supervised.client.headers["connection"] = "close"
        key = str(number)
        ids[key] = supervised.published(key)["id"]
        assert read_id(ids[key]).shard == shard_of("a", key, COUNT)
    assert {read_id(one).shard for one in ids.values()} == set(range(COUNT))
    batch = [{"subject": "a", "key": key, "delay": "1h"} for key in (*ids, "new")]
    done = supervised.client.post("/v1/messages/batch", json=batch).json()
    assert done["duplicates"] == len(ids)
    assert done["ids"][:-1] == list(ids.values())
    del supervised.client.headers["connection"]
    for key in list(ids)[:6]:
        path = f"/v1/subjects/a/keys/{key}"
        answer = supervised.client.delete(path)
        assert answer.json() == {"id": ids[key], "state": "cancelled"}
    assert supervised.process is not None
    # They were born with SIGHUP blocked, so there was no moment at which it would have ended one.
    assert all(blocks_hangups(pid) for pid in (supervised.process.pid, *supervised.shards))
    supervised.process.send_signal(signal.SIGHUP)
    wait_until(lambda: supervised.log_path.read_text().count("nothing to read again") == COUNT)
    supervised.process.terminate()
    supervised.process.send_signal(signal.SIGHUP)
    assert supervised.process.wait(60) == 0
    assert read_shard_count(OsFiles(str(supervised.data_dir), readonly=True)) == COUNT


def test_a_shard_that_is_killed_comes_again_with_all_that_it_had(supervised: Supervised) -> None:
    supervised.start()
    ids = {str(number): supervised.published(str(number))["id"] for number in range(12)}
    for pid in supervised.shards:
        os.kill(pid, signal.SIGKILL)
        for key, message_id in ids.items():
            again = supervised.published(key)
            assert (again["id"], again["duplicate"]) == (message_id, True)
    assert len(supervised.shards) == COUNT


def test_a_shard_that_cannot_be_started_for_now_is_tried_again(supervised: Supervised) -> None:
    supervised.start()
    assert supervised.process is not None
    pid, kind = supervised.process.pid, resource.RLIMIT_NOFILE
    before = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (3, before[1]))  # It has more already.
    os.kill(supervised.shards[0], signal.SIGKILL)
    wait_until(lambda: supervised.log_path.read_text().count("a process was not made") > 1)
    assert len(supervised.shards) == COUNT - 1
    resource.prlimit(pid, kind, before)
    wait_until(lambda: len(supervised.shards) == COUNT)
    for number in range(12):
        supervised.published(str(number))


def test_a_subscription_is_in_force_everywhere_and_stays_so(supervised: Supervised) -> None:
    supervised.start()
    client = supervised.client
    client.headers["connection"] = "close"  # another process each time

    def put(name: str) -> int:
        document = {"subject": "a", "type": "pull"}
        return client.put(f"/v1/subscriptions/{name}", json=document).status_code

    def listed() -> list[dict[str, str]] | None:
        # None: who answers has not heard yet that the one that was killed is there again.
        found: list[dict[str, str]] | None = (
            client.get("/v1/subscriptions").json().get("subscriptions")
        )
        return found

    def names() -> list[str]:
        return [one["name"] for one in wait_until(listed) or ()]

    assert put("s") == 201
    assert all(names() == ["s"] for _ in range(12))
    for number, pid in enumerate(supervised.shards):
        os.kill(pid, signal.SIGKILL)
        # Not before it is there again; and then it has what it had, and what is new.
        wait_until(partial(_is_put, put, f"t{number}"))
        expected = ["s", *(f"t{n}" for n in range(number + 1))]
        assert all(names() == expected for _ in range(12))
    for name in ("s", *(f"t{n}" for n in range(COUNT - 1))):
        assert client.delete(f"/v1/subscriptions/{name}").status_code == 204
    assert all(names() == [f"t{COUNT - 1}"] for _ in range(12))
    assert client.post(f"/v1/subscriptions/t{COUNT - 1}/pause").json()["paused"]
    assert all(client.get(f"/v1/subscriptions/t{COUNT - 1}").json()["paused"] for _ in range(12))


def _is_put(put: Callable[[str], int], name: str) -> bool:
    try:
        status = put(name)
    except httpx.TransportError:  # of the shard that has ended
        return False
    assert status in (200, 201, 503)
    return status < 300


def test_a_consumer_on_one_connection_gets_what_is_due_in_all(supervised: Supervised) -> None:
    supervised.start()
    document = {"subject": "a", "type": "pull"}
    assert supervised.client.put("/v1/subscriptions/s", json=document).status_code == 201

    def publish(delay: str) -> set[str]:
        batch = [{"subject": "a", "key": f"{delay} {n}", "delay": delay} for n in range(30)]
        answer = supervised.client.post("/v1/messages/batch", json=batch)
        ids: list[str] = answer.json()["ids"]
        assert {read_id(one).shard for one in ids} == set(range(COUNT))
        return set(ids)

    def pull(expected: set[str]) -> None:
        found: dict[str, str] = {}
        leases: list[str] = []
        while found.keys() < expected:
            wanted = {"max": 7, "wait": "20s", "ack": leases}
            answer = supervised.client.post("/v1/subscriptions/s/pull", json=wanted).json()
            assert (answer["acked"], answer["expired"]) == (len(leases), [])
            leases = [one["lease"] for one in answer["messages"]]
            assert {one["attempt"] for one in answer["messages"]} == {1}
            assert not found.keys() & {one["id"] for one in answer["messages"]}
            found |= {one["id"]: one["lease"] for one in answer["messages"]}
        assert found.keys() == expected
        last = supervised.client.post("/v1/subscriptions/s/ack", json={"leases": leases})
        assert last.json() == {"acked": len(leases), "expired": []}
        again = supervised.client.post(
            "/v1/subscriptions/s/ack", json={"leases": [*found.values()]}
        )
        assert again.json() == {"acked": 0, "expired": [*found.values()]}

    pull(publish("0"))
    # Consumers at all shards wait, and go before anything is due: nothing is leased to them.
    body = b'{"wait":"60s"}'
    head = f"POST /v1/subscriptions/s/pull HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n"
    waiting = [socket.create_connection(("127.0.0.1", supervised.port)) for _ in range(12)]
    for connection in waiting:
        connection.sendall(head.encode() + b"\r\n" + body)
    expected = publish("1s")
    for connection in waiting:
        connection.close()
    pull(expected)


def test_shards_end_with_their_supervisor(supervised: Supervised) -> None:
    supervised.start()
    pids = supervised.shards
    assert supervised.process is not None
    supervised.process.kill()
    supervised.process.wait()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    # Nothing of it holds the port or the directories.
    supervised.log_path.write_text("")
    supervised.start()


def test_shards_that_start_end_in_order_with_their_supervisor(supervised: Supervised) -> None:
    process = supervised.launch()
    directories = [supervised.data_dir / shard_directory(shard) for shard in range(COUNT)]
    wait_until(lambda: all(one.exists() for one in directories))
    pids = supervised.shards
    process.kill()
    process.wait()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    log = supervised.log_path.read_text()
    assert "Traceback" not in log
    assert log.count("so it stops") == COUNT


def test_another_number_of_shards_is_refused(supervised: Supervised) -> None:
    supervised.start()
    assert supervised.process is not None
    supervised.process.terminate()
    assert supervised.process.wait(60) == 0
    assert supervised.launch(COUNT + 1).wait(60) == 1
    assert f"was made with {COUNT} shards" in supervised.log_path.read_text()
    for directory, why in (
        ("", "was made with 3 shards"),
        (shard_directory(1), "is one shard of"),
    ):
        alone = subprocess.run(
            supervised.serving(1, directory), check=False, capture_output=True, timeout=60
        )
        assert alone.returncode == 1
        assert why in alone.stderr.decode()
