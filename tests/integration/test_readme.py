"""The README as a new user follows it: its commands and programs, in order, as they are written.

Only the two ports are others, since those may be in use here."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from delayserver.cli.demo.process import free_port
from tests.integration.api_support import ApiServer, wait_until

README = (Path(__file__).parents[2] / "README.md").read_text()
SERVER_PORT, RECEIVER_PORT = "127.0.0.1:8080", "9000"


def section(title: str) -> str:
    """What stands below a heading."""
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def blocks(text: str, language: str = "") -> list[str]:
    """The blocks of code in a language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [code for name, code in found if name == language]


def commands(text: str) -> list[str]:
    """What follows a dollar sign, with the lines that go on."""
    pattern = re.compile(r"^\$ (.*(?:\n    .*)*)", re.MULTILINE)
    return [command for block in blocks(text) for command in pattern.findall(block)]


def program(text: str, word: str) -> str:
    """The Python block that has a word in it."""
    (found,) = (one for one in blocks(text, "python") if word in one)
    return found


@pytest.fixture
def here(api: ApiServer) -> Callable[[str], str]:
    """A text with the ports of this test."""
    receiver = str(free_port())
    server = api.process.url.removeprefix("http://")
    return lambda text: text.replace(SERVER_PORT, server).replace(RECEIVER_PORT, receiver)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_tour(api, here, tmp_path):
    tour = section("A tour with curl")
    receiver_file = tmp_path / "receiver.py"
    receiver_file.write_text(here(program(tour, "verify_webhook")))
    log = (tmp_path / "receiver.log").open("w+")
    receiver = subprocess.Popen([sys.executable, str(receiver_file)], stdout=log, stderr=log)
    lease = ""
    answers = []
    try:
        for command in commands(tour):
            words = shlex.split(here(command).replace("\\\n", " ").replace("bebe260c-1-0", lease))
            assert words[0] == "curl"
            done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
            answer = json.loads(done.stdout)
            assert "title" not in answer, (command, answer)
            for message in answer.get("messages", ()):
                lease = message["lease"]
            answers.append(answer)
        first, _, pulled, acked, _, refund, _, cancelled = answers
        assert pulled["messages"][0]["id"] == first["id"]
        assert acked == {"acked": 1, "expired": []}
        assert cancelled["state"] == "cancelled"
        text = f'received {refund["id"]} {{"envelope": 88, "cents": 500}}'
        wait_until(lambda: text in Path(log.name).read_text())
        assert wait_until(lambda: api.look_up(refund["id"])["state"] == "delivered")
    finally:
        receiver.kill()
        receiver.wait()
        log.close()


def test_the_client_library(api, here, tmp_path):
    (tmp_path / "shop.py").write_text(here(program(section("Client library"), "AsyncProducer")))
    done = subprocess.run(
        [sys.executable, str(tmp_path / "shop.py")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "not paid yet: 2002\n"
