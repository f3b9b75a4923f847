"""`delayserver repair` on the command line, with real servers before and after it."""

import json
import os
import signal
import time
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from delayserver.cli import make_app
from delayserver.cli.demo.process import ServerProcess, free_port

MESSAGES = 30
WAIT_S = 30.0


def delayserver(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(make_app(), list(arguments))
    return result.exit_code, result.output


@pytest.fixture
def server(tmp_path: Path):
    data_dir = tmp_path / "data"
    with ServerProcess(data_dir, port=free_port(), log_path=tmp_path / "log") as server:
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
    until_s = time.monotonic() + WAIT_S
    while server.is_running:
        assert time.monotonic() < until_s
        time.sleep(0.05)
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


def test_a_memory_fault_is_looked_into(server: ServerProcess) -> None:
    """What the system says when LMDB follows a number out of its map."""
    publish(server)
    os.kill(server.pid, signal.SIGSEGV)
    until_s = time.monotonic() + WAIT_S
    while server.is_running:
        assert time.monotonic() < until_s
        time.sleep(0.05)
    fault = server.data_dir / "catalog" / "fault"
    assert "Segmentation fault" in fault.read_text()
    server.start()
    server.wait_ready()
    assert "memory fault" in server.log_path.read_text()
    assert fault.read_text() == ""
    assert pending(server) == set(range(MESSAGES))


def test_what_is_no_data_directory(tmp_path: Path) -> None:
    status, text = delayserver("repair", "--data-dir", str(tmp_path))
    assert status == 2 and "not a data directory" in text.replace("\n", " ")
    assert list(tmp_path.iterdir()) == []
