"""`delayserver repair` on the command line, with real servers before and after it."""

import json
import os
import signal
import stat
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from delayserver.cli import make_app
from delayserver.cli.demo.process import ServerProcess, free_port
from storage.files import OsFiles
from tests.forked_servers import ForkedServerProcess
from tests.waiting import wait_until

MESSAGES = 30
WAIT_S = 30.0


def delayserver(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(make_app(), list(arguments))
    return result.exit_code, result.output


@pytest.fixture
def server(tmp_path: Path):
    data_dir = tmp_path / "data"
    log_path = tmp_path / "log"
    with ForkedServerProcess(data_dir, port=free_port(), log_path=log_path) as server:
        server.options = ["--checkpoint-ms=50"]
        server.start()
        server.wait_ready()
        yield server


def publish(server: ServerProcess) -> None:
    batch = [
        {"subject": "order.unpaid", "key": f"{n}", "body": {"n": n}, "delay": "1h"}
        for n in range(MESSAGES)
    ]
    answer = httpx.post(f"{server.url}/v1/messages/batch", json=batch)
    assert answer.status_code == 200, answer.text
    # It is made from the schedule, of which it has a checkpoint made first.
    assert httpx.get(f"{server.url}/v1/forecast").status_code == 200


def pending(server: ServerProcess) -> set[int]:
    found: set[int] = set()
    for number in range(MESSAGES):
        path = f"{server.url}/v1/subjects/order.unpaid/keys/{number}"
        answer = httpx.get(path)
        if answer.status_code == 200:
            assert answer.json()["body"] == {"n": number}
            found.add(number)
    return found


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def test_a_damaged_catalog_is_built_again(server: ServerProcess) -> None:
    publish(server)
    where = ("--data-dir", str(server.data_dir))
    status, text = delayserver("repair", *where)
    assert status == 2 and "in use" in text
    server.kill()
    flip(server.data_dir / "catalog" / "data.mdb", 20)
    flip(server.data_dir / "catalog" / "data.mdb", 4096 + 20)
    server.start()
    wait_until(lambda: not server.is_running)
    assert "delayserver repair" in server.log_path.read_text()

    status, text = delayserver("check", *where)
    assert status == 1 and "catalog/data.mdb" in text
    status, text = delayserver("repair", *where, "--dry-run")
    assert status == 1 and "Nothing was changed" in text
    status, text = delayserver("repair", *where)
    assert status == 0 and "Sound now" in text and "repair/" in text.replace("\n", "")
    status, text = delayserver("check", *where)
    assert status == 0, text
    status, text = delayserver("repair", *where, "--json")
    assert status == 0 and json.loads(text)["remedies"] == []
    server.start()
    server.wait_ready()
    assert pending(server) == set(range(MESSAGES))


@pytest.mark.parametrize(
    ("fault_signal", "name"), [(signal.SIGSEGV, "Segmentation fault"), (signal.SIGBUS, "Bus error")]
)
def test_a_memory_fault_is_looked_into(
    server: ServerProcess, fault_signal: signal.Signals, name: str
) -> None:
    """What the system says when LMDB follows a number out of its map, or into a bad sector."""
    publish(server)
    os.kill(server.pid, fault_signal)
    wait_until(lambda: not server.is_running)
    fault = server.data_dir / "catalog" / "fault"
    assert name in fault.read_text()
    server.start()
    server.wait_ready()
    assert "memory fault" in server.log_path.read_text()
    assert fault.read_text() == ""
    assert pending(server) == set(range(MESSAGES))


def modes(root: Path) -> dict[str, int]:
    """Who may do what with each file and directory."""
    paths = [root, *root.rglob("*")]
    return {str(path.relative_to(root)): stat.S_IMODE(path.lstat().st_mode) for path in paths}


def test_nobody_else_may_read_any_of_it(tmp_path: Path) -> None:
    """Secrets of webhooks, bodies and headers stand in the catalog as well as in the logs."""
    before = os.umask(0o022)
    try:
        data_dir = tmp_path / "made" / "data"
        where = ("--data-dir", str(data_dir))
        assert delayserver("token", "create", "root", "--scope", "admin", *where)[0] == 0
        assert delayserver("token", "revoke", "root", *where)[0] == 0
        (data_dir / "TOKENS").unlink()
        OsFiles(str(data_dir)).make_directory("imports")
        with ServerProcess(data_dir, port=free_port(), log_path=tmp_path / "log") as server:
            server.options = ["--checkpoint-ms=50"]
            server.start()
            server.wait_ready()
            publish(server)
            url, pull = f"{server.url}/v1/subscriptions/s", {"subject": "now", "type": "pull"}
            assert httpx.put(url, json=pull).is_success
            message = {"subject": "now", "body": 1, "delay": "1ms"}
            assert httpx.post(f"{server.url}/v1/messages", json=message).is_success
            pulled = httpx.post(f"{url}/pull", json={"max": 1, "wait": "10s"}).json()["messages"]
            leases = {"leases": [one["lease"] for one in pulled]}
            assert httpx.post(f"{url}/ack", json=leases).is_success
            server.kill()
            flip(data_dir / "catalog" / "data.mdb", 20)
            assert delayserver("repair", *where)[0] == 0
            server.start()
            server.wait_ready()
        assert delayserver("token", "create", "root", "--scope", "admin", *where)[0] == 0
    finally:
        os.umask(before)
    found = modes(data_dir)
    assert {path.split("/")[0] for path in found} >= {
        *("FORMAT", "LOCK", "TOKENS", "TOKENS.lock", "messages", "schedule", "dispatch"),
        *("definitions", "catalog", "imports", "repair"),
    }
    assert {"catalog/data.mdb", "catalog/lock.mdb", "catalog/fault"} <= found.keys()
    assert found.pop("TOKENS") == 0o600
    kinds = {path: 0o750 if (data_dir / path).is_dir() else 0o640 for path in found}
    assert found == kinds


def test_what_is_no_data_directory(tmp_path: Path) -> None:
    status, text = delayserver("repair", "--data-dir", str(tmp_path))
    assert status == 2 and "not a data directory" in text.replace("\n", " ")
    assert list(tmp_path.iterdir()) == []
