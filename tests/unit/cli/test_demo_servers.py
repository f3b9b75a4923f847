"""A cluster that runs, as the demo strikes it; the nodes are transports that a test decides."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from delayserver.cli import make_app
from delayserver.cli.demo import servers
from delayserver.cli.demo.ledger import DemoLedger
from delayserver.cli.demo.process import ServerFailed
from delayserver.cli.demo.servers import OwnServer, RunningServer
from delayserver.client.transport import HttpAnswer, Transport
from tests.unit.client.fake_server import UNREACHABLE, FakeTransport, answer, problem

HOME = "http://here:8081"
TRUE = f"{sys.executable} -c 0"


class Nodes:
    """Two of them; n1 owns shard 0 until it is struck, n2 then."""

    def __init__(self, *, nodes: int = 2) -> None:
        self.count = nodes
        self.is_struck = False
        self.epoch = 4
        self.looks = 0

    def __call__(self, url: str) -> Transport:
        return FakeTransport(default=lambda method, path, document: self.reply(url, path))

    def reply(self, url: str, path: str) -> HttpAnswer | Exception:
        if path == "/healthz":
            return UNREACHABLE if self.is_struck else answer(200)
        if path == "/v1/stats":
            return problem(503) if self.is_struck and self.epoch == 4 else answer(200)
        if self.is_struck:
            self.looks += 1
            self.epoch = 5 if self.looks > 3 else 4
        owner = "n1" if self.epoch == 4 else "n2"
        shard = {"shard": 0, "state": "serving", "owner": owner, "epoch": self.epoch}
        found = [{"node": f"n{n}", "url": f"http://here:808{n}"} for n in range(1, 1 + self.count)]
        shards = [{**shard, "url": "http://here:9000"}]
        return answer(200, {"version": self.epoch, "shards": shards, "nodes": found})


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    found = Nodes()
    monkeypatch.setattr(servers, "HttpTransport", found)
    return found


async def struck(server: RunningServer, said: list[str]) -> tuple[float, DemoLedger]:
    ledger = DemoLedger()
    await server.start()
    took_s = await server.strike(ledger, said.append)
    assert await server.end() is None
    return took_s, ledger


def test_somebody_strikes(nodes: Nodes) -> None:
    said: list[str] = []

    async def main() -> tuple[float, DemoLedger]:
        asyncio.get_running_loop().call_later(0.2, setattr, nodes, "is_struck", True)
        return await struck(RunningServer(HOME, None), said)

    took_s, ledger = asyncio.run(main())
    assert said == [
        "now kill node n1 (http://here:9000), the owner of shard 0",
        "the owner of a shard was struck; clients keep asking",
    ]
    assert took_s > 0
    (outage,) = ledger.outages
    assert outage.down_ms <= ledger.kills_ms[0] <= ledger.kills_ms[1] <= outage.up_ms


def test_a_command_strikes(nodes: Nodes, tmp_path: Any) -> None:
    path = tmp_path / "words"
    program = f"import sys; open({str(path)!r}, 'w').write(' '.join(sys.argv[1:]))"
    command = f'{sys.executable} -c "{program}" {{node}} at {{url}}'

    async def main() -> None:
        asyncio.get_running_loop().call_later(0.3, setattr, nodes, "is_struck", True)
        await struck(RunningServer(HOME, command), [])

    asyncio.run(main())
    assert path.read_text() == "n1 at http://here:9000"


def test_an_owner_that_leaves_in_order_was_not_killed(nodes: Nodes) -> None:
    async def main() -> DemoLedger:
        asyncio.get_running_loop().call_later(0.2, setattr, nodes, "epoch", 5)
        return (await struck(RunningServer(HOME, TRUE), []))[1]

    assert asyncio.run(main()).kills_ms == []


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (f"{sys.executable} -c 'print(\"no such node\"); exit(3)'", "ended with 3: no such node"),
        ("/no/such/command {node}", "/no/such/command n1 cannot be run"),
    ],
)
def test_a_command_that_fails(nodes: Nodes, command: str, sentence: str) -> None:
    with pytest.raises(ServerFailed, match=sentence):
        asyncio.run(struck(RunningServer(HOME, command), []))


def test_nobody_could_take_over(nodes: Nodes) -> None:
    nodes.count = 1
    with pytest.raises(ServerFailed, match="has no other node"):
        asyncio.run(RunningServer(HOME, None).start())


def test_nobody_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(url: str) -> Transport:
        return FakeTransport(default=lambda *_: UNREACHABLE)

    monkeypatch.setattr(servers, "HttpTransport", nobody)
    with pytest.raises(ServerFailed, match="no delay server with a map"):
        asyncio.run(RunningServer(HOME, None).start())


def test_names_are_its_own() -> None:
    """Others use the server, too, and the demo may be run twice."""
    assert RunningServer(HOME, None).suffix != RunningServer(HOME, None).suffix


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--strike", "true"), "goes together with --url"),
        (("--url", HOME, "--shards", "2"), "a cluster has as many as it has"),
    ],
)
def test_options_that_do_not_go_together(words: tuple[str, ...], sentence: str) -> None:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(make_app(("demo",)), ["demo", *words])
    assert done.exit_code == 2
    assert sentence in done.output


def test_what_cannot_be_done_is_said_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "HttpTransport", Nodes(nodes=1))
    done = CliRunner().invoke(make_app(("demo",)), ["demo", "--url", HOME, "--json"])
    assert done.exit_code == 1
    assert "has no other node" in json.loads(done.stderr)["title"]


RESTART_MS = 60_000


class Clocked(DemoLedger):
    """Its clock goes forward as it is told."""

    forward_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.forward_ms


class OwnProcess:
    """Takes a minute to be ready again; the clock of a ledger shows it."""

    def __init__(self, ledger: Clocked) -> None:
        self.ledger = ledger
        self.done: list[str] = []

    def kill(self) -> None:
        self.done.append("killed")

    def start(self) -> None:
        self.done.append("started")

    def wait_ready(self) -> None:
        self.done.append("ready")
        self.ledger.forward_ms += RESTART_MS


def test_the_outage_of_the_own_server_lasts_until_it_serves_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the table would take messages for late that fell due before that."""
    ledger, server = Clocked(), OwnServer(tmp_path, 1)
    process = OwnProcess(ledger)
    monkeypatch.setattr(server, "_process", process)
    said: list[str] = []
    asyncio.run(server.strike(ledger, said.append))
    assert process.done == ["killed", "started", "ready"]
    (outage,) = ledger.outages
    (kill_ms,) = ledger.kills_ms
    assert outage.down_ms <= kill_ms <= outage.up_ms - RESTART_MS
