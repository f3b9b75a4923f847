"""The processes of a server of several shards, as the demo and the crash runs kill them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from delayserver.cli.demo.process import ServerFailed, damage_in, free_port
from delayserver.cli.demo.sharded import ShardedServer
from delayserver.records.message_id import read_id
from storage.shards import shard_directory
from tests.every_option import EveryOption
from tests.integration.api_support import Receiver

COUNT = 2


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ShardedServer]:
    with ShardedServer(
        tmp_path / "data", count=COUNT, port=free_port(), log_path=tmp_path / "log"
    ) as server:
        server.start()
        server.wait_ready()
        yield server


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # One that has ended may wait for whoever adopted it.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_no_option_of_a_message_is_lost_with_a_shard(
    server: ShardedServer, receiver: Receiver
) -> None:
    with httpx.Client(base_url=server.url, timeout=30) as client:

        def ask(method: str, path: str, document: Any = None) -> Any:
            return client.request(method, path, json=document).raise_for_status().json()

        life = EveryOption(ask, receiver)
        for shard in range(COUNT):
            life.until_members(8 + 16 * shard)
            server.kill_shards([server.shards()[shard]])
        server.wait_started()
        server.wait_ready()
        life.check(ask, kills=COUNT)


def test_leases_of_all_shards_are_good_behind_a_planned_restart(server: ShardedServer) -> None:
    with httpx.Client(base_url=server.url, timeout=30) as client:

        def ask(method: str, path: str, document: Any) -> Any:
            return client.request(method, path, json=document).raise_for_status().json()

        queue = "/v1/subscriptions/consumer"
        ask("PUT", queue, {"type": "pull", "subject": "order", "lease": "5m"})
        ids: set[str] = set()
        while len({read_id(one).shard for one in ids}) < COUNT:
            # The kernel chooses a shard for each connection.
            answer = httpx.post(f"{server.url}/v1/messages", json={"subject": "order"})
            ids.add(answer.raise_for_status().json()["id"])
        held: dict[str, str] = {}
        while held.keys() != ids:
            pulled = ask("POST", f"{queue}/pull", {"wait": "20s", "max": 100})["messages"]
            held |= {message["id"]: message["lease"] for message in pulled}
        assert server.stop() == 0
        server.start()
        server.wait_ready()
        assert ask("POST", f"{queue}/ack", {"leases": [*held.values()]})["expired"] == []


def test_only_children_are_killed(server: ShardedServer) -> None:
    before = server.shards()
    assert sorted(before) == list(range(COUNT))
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        victims = [before[1], stranger.pid, os.getpid(), server.pid]
        assert server.kill_shards(victims) == [before[1]]
        assert stranger.poll() is None
    finally:
        stranger.communicate()
    assert not is_alive(before[1])
    server.wait_started()
    server.wait_ready()
    after = server.shards()
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_shards_without_a_supervisor_are_waited_for(server: ShardedServer) -> None:
    pids = server.children()
    server.kill_supervisor()
    assert not server.is_meant_to_run
    assert server.children() == []
    server.wait_left()
    assert not any(map(is_alive, pids))
    server.start()
    server.wait_ready()
    assert server.stop() == 0
    assert damage_in(server.data_dir) == []


def test_one_that_does_not_end_by_itself_is_told_of_and_killed(server: ShardedServer) -> None:
    pid = server.children()[0]
    os.kill(pid, signal.SIGSTOP)
    server.kill_supervisor()
    with pytest.raises(ServerFailed, match=f"{pid} ran for 0.5 s without a supervisor"):
        server.wait_left(0.5)
    assert not is_alive(pid)


def test_all_are_killed_at_once(server: ShardedServer) -> None:
    pids = server.children()
    server.kill()
    assert not any(map(is_alive, pids))
    # Nobody has started one more meanwhile.
    assert "is started again" not in server.log_path.read_text()


@pytest.mark.damaged("a file of a shard is cut to see that it is looked at")
def test_the_files_of_each_shard_are_checked(server: ShardedServer) -> None:
    assert server.stop() == 0
    assert damage_in(server.data_dir) == []
    catalog = server.data_dir / shard_directory(1) / "catalog" / "data.mdb"
    catalog.write_bytes(b"x" * catalog.stat().st_size)
    (damage, *_) = damage_in(server.data_dir)
    assert damage.startswith("shard 1")
