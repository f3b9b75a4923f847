"""scripts/cluster, and the demo on a cluster that it has started."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.cluster.here import SCRIPTS, Here
from tests.waiting import wait_until

ROOT = SCRIPTS.parent


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    # Nothing here is about brokers that are lost, and one starts sooner than three.
    home = Here(tmp_path_factory.mktemp("here"))
    with home.running("--nodes", "2", "--shards", "2", "--durability", "os") as started:
        yield started


def owner(here: Here, shard: int) -> tuple[str, int]:
    """Its node and epoch, by the brokers."""
    done = here.try_run("status", "--json")
    document = json.loads(done.stdout[done.stdout.index("{") :])
    found = document["shards"][shard]
    return found["owner"], found["epoch"]


def documented(name: str, word: str) -> list[str]:
    """The words of the one command of a document that has that word in it."""
    blocks = re.findall(r"^```\n(.*?)^```$", (ROOT / name).read_text(), re.DOTALL | re.MULTILINE)
    (found,) = (line for block in blocks for line in block.splitlines() if word in line)
    return shlex.split(found)


def test_the_demo_while_its_owner_is_killed(here: Here) -> None:
    """As a new user runs it."""
    words = documented("docs/cluster.md", "demo --url")
    assert words == documented("README.md", "demo --url")
    assert documented("docs/cluster.md", "cluster start") == ["scripts/cluster", "start"]
    program, *words = (here.addresses[0] if "127.0.0.1" in word else word for word in words)
    assert program == ".venv/bin/delayserver"
    smaller = ("--json", "--orders", "60", "--seconds", "4", "--seed", "7")
    result = subprocess.run(
        [sys.executable, "-m", "delayserver", *words, *smaller],
        cwd=ROOT,
        env=os.environ | here.variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    (lost,) = (node for node in ("n1", "n2") if "does not run" in state_of(here, node))
    owned_by = owner(here, 0)[0]
    here.run("revive", lost)
    assert "pid" in state_of(here, lost)
    assert owned_by != lost
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout)
    assert found["published"] == 90
    assert found["cancelled"] + found["delivered"] == 90
    assert found["violations"] == []
    assert found["damage"] is None
    assert 1 < found["restart_s"] < 60


def state_of(here: Here, node: str) -> str:
    (line,) = (
        line
        for line in here.try_run("status").stdout.splitlines()
        if line.startswith(f"node {node} ")
    )
    return line


def test_a_node_that_hangs_and_comes_back(here: Here) -> None:
    wait_until(lambda: owner(here, 0)[0] is not None)
    node, epoch = owner(here, 0)
    here.run("pause", node)
    try:
        wait_until(lambda: owner(here, 0)[1] > epoch)
        assert owner(here, 0)[0] != node
    finally:
        here.run("resume", node)
    address = here.addresses[int(node[1:]) - 1]

    def is_ready() -> bool:
        try:
            with urlopen(f"{address}/readyz", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    wait_until(is_ready)


def test_move_and_drain(here: Here) -> None:
    here.run("move", "1", "n2")
    assert owner(here, 1)[0] == "n2"
    here.run("drain", "n2")
    assert [owner(here, shard)[0] for shard in (0, 1)] == ["n1", "n1"]


def test_what_is_wrong_is_said(here: Here, tmp_path: Path) -> None:
    for words, sentence in (
        (("kill", "n7"), "which node? scripts/cluster kill NODE, with one of: n1 n2"),
        (("resume",), "which node?"),
        (("start", "--size", "3"), "scripts/cluster start does not know --size"),
        (("start", "--nodes", "0"), "--nodes is a number from 1 to 99"),
        (("start", "--shards", "3"), "was made with shards 2"),
        (("begin",), "scripts/cluster does not know begin"),
    ):
        done = here.try_run(*words)
        assert done.returncode == 1
        assert sentence in done.stderr
    elsewhere = Here(tmp_path)
    elsewhere.variables = {"CLUSTER_HERE": str(tmp_path)}
    assert "there is no cluster; make one" in elsewhere.try_run("url").stderr
