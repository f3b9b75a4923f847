"""A real server behind a process on standby: clients cannot tell which of them they have."""

from __future__ import annotations

import http.client
import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.api_support import ApiServer, unique
from tests.waiting import DEADLINE_S, wait_until

MIB = 1024 * 1024
ROOT = Path(__file__).parents[2]


class StandbyProcess(httpx.Client):
    """A process on standby, and an HTTP client for it."""

    def __init__(self, directory: Path, owner: str) -> None:
        directory.mkdir()
        command = [sys.executable, "-m", "tests.integration.standby_process", str(directory), owner]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        word, port = self.hears().split()
        assert word == "standby"
        self.port = int(port)
        super().__init__(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S)

    def hears(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def take_over(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    @property
    def most_memory_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert found
        return int(found[1]) * 1024

    def ask(self, method: str, path: str, status: int = 200, **arguments: Any) -> Any:
        answer = self.request(method, path, **arguments)
        assert answer.status_code == status, answer.text
        return answer.json() if answer.content else None

    def shut_down(self) -> None:
        self.close()
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def standby(api: ApiServer, tmp_path: Path) -> Iterator[StandbyProcess]:
    process = StandbyProcess(tmp_path / "standby", str(api.base_url).rstrip("/"))
    yield process
    process.shut_down()


def test_what_a_client_asks_is_answered_by_the_owner(
    standby: StandbyProcess, api: ApiServer
) -> None:
    subject = unique("orders")
    assert standby.get("/healthz").json() == {"status": "ok"}
    assert standby.get("/readyz").status_code == 200
    assert standby.ask("GET", "/v1/cluster")["shards"][0]["state"] == "serving"
    path = f"/v1/subscriptions/{subject}"
    standby.ask("PUT", path, 201, json={"subject": subject, "type": "pull"})
    # Numbers of 64 bits, and what JSON does not keep by itself, come out as they went in.
    body = b'{"big": 18446744073709551615, "exact": 1.10, "text": "\xc3\xa9"}'
    message = b'{"subject": "%b", "key": "a/\xc3\xa9", "delay": "1h", "body": %b}'
    answer = standby.post("/v1/messages", content=message % (subject.encode(), body))
    assert answer.status_code == 201
    location = answer.headers["location"]
    by_standby, by_owner = standby.get(location), api.get(location)
    assert by_standby.content == by_owner.content
    assert body in by_standby.content
    assert by_standby.headers["etag"] == by_owner.headers["etag"]
    key = f"/v1/subjects/{subject}/keys/a%2F%C3%A9"
    assert standby.ask("GET", key)["key"] == "a/é"
    assert standby.ask("DELETE", key)["state"] == "cancelled"
    lines = b"".join(b'{"subject": "%b", "body": %d}\n' % (subject.encode(), n) for n in range(100))
    batch = standby.ask(
        "POST",
        "/v1/messages/batch",
        content=iter([lines[:1000], lines[1000:]]),  # in chunks
        headers={"content-type": "application/x-ndjson"},
    )
    assert batch["count"] == 100
    pulled: list[Any] = []
    while len(pulled) < 100:
        pulled += standby.ask("POST", f"{path}/pull", json={"wait": "20s"})["messages"]
    assert sorted(one["body"] for one in pulled) == list(range(100))
    leases = [one["lease"] for one in pulled]
    assert standby.ask("POST", f"{path}/ack", json={"leases": leases})["acked"] == 100
    standby.ask("GET", "/v1/nothing", 404)
    assert standby.head("/v1/stats").status_code == 200
    assert standby.get("/openapi.json").content == api.get("/openapi.json").content
    refused = standby.get("/v1/stats", headers={"host": "somebody.else"})
    assert refused.status_code == 403  # by the owner, which sees the name that the client used


def test_nothing_is_leased_to_a_client_that_has_gone(
    standby: StandbyProcess, api: ApiServer
) -> None:
    subject = unique("gone")
    path = api.subscribe(subject, subject, lease="1h")
    body = b'{"wait": "60s"}'
    with socket.create_connection(("127.0.0.1", standby.port)) as client:
        head = f"POST {path}/pull HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}"
        client.sendall(f"{head}\r\n\r\n".encode() + body)
        wait_until(lambda: api.metric("waiting_pulls") == 1)
    wait_until(lambda: api.metric("waiting_pulls") == 0)
    api.publish(subject, body=1)
    assert [one["body"] for one in api.pull(path)] == [1]


def test_an_upload_is_as_large_here_as_what_is_on_its_way(standby: StandbyProcess) -> None:
    standby.ask("GET", "/v1/stats")
    before = standby.most_memory_bytes
    part = b" " * MIB
    answer = standby.post("/v1/messages/batch", content=part * 60 + b"[1]")
    assert answer.status_code == 422, answer.text
    assert standby.most_memory_bytes - before < 16 * MIB


class WaitingPull(threading.Thread):
    """A pull by way of the standby that the owner has, and its answer in the end."""

    def __init__(self, standby: StandbyProcess, api: ApiServer) -> None:
        super().__init__()
        self._subscription = api.subscribe(unique("pulled"), unique("subject"))
        self._url = standby.base_url
        self.answer: httpx.Response
        self.start()
        wait_until(lambda: api.metric("waiting_pulls") == 1)

    def run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=DEADLINE_S) as client:
            self.answer = client.post(f"{self._subscription}/pull", json={"wait": "60s"})

    def is_unknown(self) -> bool:
        """Whether it was told that nobody knows what became of it."""
        self.join(DEADLINE_S)
        answer = self.answer
        return answer.status_code == 503 and answer.json()["outcome"] == "unknown"


def test_an_owner_that_dies_and_is_not_there_any_more(
    standby: StandbyProcess, api: ApiServer
) -> None:
    pull = WaitingPull(standby, api)
    api.process.kill()
    assert pull.is_unknown()
    refused = standby.post("/v1/messages", json={"subject": "a", "body": 1})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert "outcome" not in refused.json()
    assert standby.get("/healthz").status_code == 200


def test_the_process_becomes_the_owner_on_the_same_socket(
    standby: StandbyProcess, api: ApiServer
) -> None:
    subject = unique("moved")
    message = {"subject": subject, "body": 1, "delay": "1h"}
    kept = http.client.HTTPConnection("127.0.0.1", standby.port, timeout=DEADLINE_S)
    kept.request("GET", "/healthz")
    assert kept.getresponse().read()
    pull = WaitingPull(standby, api)
    standby.take_over()
    assert pull.is_unknown()
    # A connected client sees nothing of it.
    kept.auto_open = 0
    kept.request("POST", "/v1/messages", json.dumps(message))
    assert kept.getresponse().status == 201
    kept.close()
    # Who connects from now on waits until somebody accepts again; nobody is refused.
    with httpx.Client(base_url=standby.base_url, timeout=DEADLINE_S) as late:
        assert late.post("/v1/messages", json=message).status_code == 201
    assert standby.hears() == "closed\n"
    assert api.ask("GET", f"/v1/subjects/{subject}/messages")["messages"] == []
