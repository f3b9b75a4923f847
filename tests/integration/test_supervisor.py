"""Shards as processes: one port, a directory each, and each is started again when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from delayserver.records.message_id import read_id
from delayserver.records.sharding import shard_of
from storage.files import OsFiles
from storage.shards import read_shard_count, shard_directory
from tests.integration.api_support import wait_until
from tests.integration.supervised import COUNT, Supervised


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
    supervised.process.terminate()
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
