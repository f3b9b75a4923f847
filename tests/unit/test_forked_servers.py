"""A server that is forked is what one is that was started by the command."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from delayserver.cli.demo.process import ServerFailed, ServerProcess, free_port
from tests.forked_servers import ForkedServerProcess, ZygoteFailed, ZygoteProcess
from tests.waiting import wait_until

Start = Callable[..., ServerProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts servers, each on a directory of its own."""
    made: list[ServerProcess] = []

    def make(kind: type[ServerProcess] = ForkedServerProcess, *options: str) -> ServerProcess:
        name = f"{len(made)}"
        port, log_path = free_port(), tmp_path / f"{name}.log"
        made.append(kind(tmp_path / name, port=port, log_path=log_path, options=options))
        made[-1].start()
        made[-1].wait_ready()
        return made[-1]

    yield make
    for server in made:
        server.kill()


def words(server: ServerProcess, name: str) -> list[str]:
    """Arguments, or variables, as /proc shows them."""
    return Path(f"/proc/{server.pid}/{name}").read_text().rstrip("\0").split("\0")


def status(server: ServerProcess) -> dict[str, str]:
    """Signals, and the like."""
    lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def descriptors(server: ServerProcess) -> list[str]:
    """The files that it has open, without those numbers and names that are its own."""
    found = []
    for path in Path(f"/proc/{server.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the server has closed it since it was listed
            found.append(os.readlink(path))
    place = str(server.data_dir.parent)
    return sorted(re.sub(rf"{place}/\d+|\d+", "", target) for target in found)


def test_it_ends_as_others_do(start: Start) -> None:
    server = start()
    assert server.is_running
    assert server.status is None
    server.kill()
    assert server.status == -signal.SIGKILL
    server.kill()  # There is none any more.
    server.start()
    server.wait_ready()
    assert server.stop() == 0
    assert server.status == 0
    log = server.log_path.read_text()
    assert log.count("listening") == 2
    assert log.count("stopped") == 1


def test_it_stops_and_goes_on(start: Start) -> None:
    server = start()
    os.kill(server.pid, signal.SIGSTOP)
    with pytest.raises(ServerFailed, match="not ready"):
        server.wait_ready(timeout_s=0.1)
    os.kill(server.pid, signal.SIGCONT)
    server.wait_ready()
    assert server.stop(signal.SIGINT) == 0


def test_its_status_is_that_of_the_command(start: Start) -> None:
    with pytest.raises(ServerFailed, match="status 2") as failed:
        start(ForkedServerProcess, "--retention-ms=soon")
    assert "error: " in str(failed.value)


def test_nothing_of_it_is_that_of_the_zygote(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OF_THIS_TEST", "1")
    monkeypatch.setenv("DELAYSERVER_BATCH_MAX_MESSAGES", "7")
    monkeypatch.chdir(tmp_path)
    forked, started = start(), start(ServerProcess)
    for server in (forked, started):
        command = words(server, "cmdline")
        assert command[:4] == [sys.executable, "-m", "delayserver", "serve"]
        assert command[-1] == str(server.data_dir)
        variables = words(server, "environ")
        assert "OF_THIS_TEST=1" in variables
        assert f"PYTEST_CURRENT_TEST={os.environ['PYTEST_CURRENT_TEST']}" in variables
        assert not any(one.startswith("DELAYSERVER_") for one in variables)
        assert Path(f"/proc/{server.pid}/cwd").readlink() == tmp_path
        assert os.getsid(server.pid) == server.pid
    # The connections that asked whether they are ready are closed by now, or soon.
    wait_until(lambda: descriptors(forked) == descriptors(started))
    of_forked, of_started = status(forked), status(started)
    for name in ("SigBlk", "SigIgn", "SigCgt", "Umask", "NoNewPrivs", "Seccomp"):
        assert of_forked[name] == of_started[name]


def test_it_is_not_forked_where_python_would_begin_otherwise(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    assert "import time:" in start().log_path.read_text()


def test_a_zygote_that_ends_says_so(tmp_path: Path) -> None:
    command, log_path = [sys.executable, "-m", "this"], tmp_path / "log"
    zygote = ZygoteProcess({**os.environ, "PYTHONPATH": "", "PYTHONHOME": "/nowhere"})
    with log_path.open("ab") as log, pytest.raises(ZygoteFailed, match="encodings"):
        zygote.start(command, {}, log)
    zygote.close()


def test_servers_end_with_their_zygote(tmp_path: Path) -> None:
    zygote = ZygoteProcess(os.environ)
    with (tmp_path / "log").open("ab") as log:
        lasting = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "0"]
        server = zygote.start(lasting, os.environ, log)
        ended = zygote.start([sys.executable, "-m", "this"], os.environ, log)
    assert ended.wait(30) == 0
    os.kill(server.pid, signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        server.wait(0.01)
    zygote.close()
    wait_until(lambda: not Path(f"/proc/{server.pid}").exists())
