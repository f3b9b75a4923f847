"""The servers of the demo: one of its own, or one that runs already, as a cluster does.

    OwnServer        a process, or one for each shard; killed with SIGKILL, and started again
    RunningServer    the servers at an address; a person strikes an owner, and another takes over

Both are told to strike once, and return when all is served again.

Cost: while a running one is struck, a few requests a second. Threads: belong to the event loop;
blocking calls run in a thread.
"""

import asyncio
import secrets
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Protocol

from delayserver.cli.demo.ledger import DemoLedger, Outage
from delayserver.cli.demo.process import ServerFailed, ServerProcess, damage_in, free_port
from delayserver.cli.demo.sharded import ShardedServer
from delayserver.client.cluster_map import CLUSTER_PATH, MapShard, ShardOwners
from delayserver.client.errors import ClientError, UnansweredError
from delayserver.client.following import Following
from delayserver.client.transport import HttpTransport, Transport, decoded

POLL_S = 0.05
ALIVE_S = 0.5
"""An owner that has not answered for so long is struck."""
LOOK_S = 2.0
STRIKE_S = 300.0
"""A person who is asked to strike may take so long, …"""
TAKE_OVER_S = 60.0
"""… and another owner so long to serve."""
STRUCK_SHARD = 0


class DemoServer(Protocol):
    """Serves the shop."""

    down: str
    """The state between a strike and its end, in words."""
    back: str
    """The name of the time that a strike costs, in the table."""
    suffix: str
    """Ends the names that the shop uses here, because other clients may use the server, too."""

    def running(self) -> AbstractContextManager[None]:
        """Wraps a run. Afterwards nothing of the server is left that was not there before."""

    async def start(self) -> float:
        """Start serving; returns the seconds that took. Raises ServerFailed."""

    def connect(self) -> Transport:
        """A connection to it that lasts through a strike."""

    async def strike(self, ledger: DemoLedger, say: Callable[[str], None]) -> float:
        """Kill it, and return when it serves again, with the seconds that took. `say` gets the text
        that asks a person to do it. Raises ServerFailed."""

    async def end(self) -> list[str] | None:
        """Stop the server that was started; returns the damage that the check of its files finds.
        None: the files are not ours to check. Raises ServerFailed."""


class OwnServer:
    """A server that the demo starts, with its files below a directory."""

    down = "the server was killed with SIGKILL; clients keep asking"
    back = "restart after SIGKILL"
    suffix = ""

    def __init__(self, directory: Path, shards: int) -> None:
        self._data_dir = directory / "data"
        port, log_path = free_port(), directory / "server.log"
        self._process = (
            ServerProcess(self._data_dir, port=port, log_path=log_path)
            if shards == 1
            else ShardedServer(self._data_dir, count=shards, port=port, log_path=log_path)
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        """See DemoServer."""
        with self._process:
            yield

    async def start(self) -> float:
        """See DemoServer."""
        began_s = time.monotonic()
        self._process.start()
        await asyncio.to_thread(self._process.wait_ready)
        return time.monotonic() - began_s

    def connect(self) -> Transport:
        """See DemoServer."""
        return HttpTransport(self._process.url)

    async def strike(self, ledger: DemoLedger, say: Callable[[str], None]) -> float:
        """See DemoServer."""
        down_ms = ledger.now_ms()
        self._process.kill()
        ledger.kills_ms.append(ledger.now_ms())
        took_s = await self.start()
        ledger.outages.append(Outage(down_ms, ledger.now_ms()))
        return took_s

    async def end(self) -> list[str] | None:
        """See DemoServer."""
        await asyncio.to_thread(self._process.stop)
        return await asyncio.to_thread(damage_in, self._data_dir)


class RunningServer:
    """A server that runs already, on several nodes. It asks for no token."""

    down = "the owner of a shard was struck; clients keep asking"
    back = "until another owner served"

    def __init__(self, url: str, command: str | None) -> None:
        """`command` strikes, with {node} and {url} of the owner in it; None: a person strikes."""
        self.suffix = f".{secrets.token_hex(3)}"
        self._url = url.rstrip("/")
        self._command = command

    @contextmanager
    def running(self) -> Iterator[None]:
        """See DemoServer."""
        yield

    def connect(self) -> Transport:
        """See DemoServer."""
        return Following(HttpTransport(self._url), self._url, HttpTransport, "any")

    async def start(self) -> float:
        """See DemoServer."""
        began_s = time.monotonic()
        self._looking = self.connect()
        known = await self._map()
        if known is None:
            raise ServerFailed(f"no delay server with a map of its shards answers at {self._url}")
        if len(known.nodes) < 2:
            raise ServerFailed(f"{self._url} has no other node, so none could take over")
        if not await self._serves():
            raise ServerFailed(f"not all shards are served at {self._url}")
        return time.monotonic() - began_s

    async def strike(self, ledger: DemoLedger, say: Callable[[str], None]) -> float:
        """See DemoServer. It is struck when its owner answers nothing more, or owns it no more."""
        known = await self._map()
        if known is None or (struck := known.shards[STRUCK_SHARD]).url is None:
            raise ServerFailed(f"shard {STRUCK_SHARD} has no owner before the strike")
        node = struck.owner or "?"
        epochs = {one.shard: one.epoch for one in known.shards if one.owner == struck.owner}
        owner = HttpTransport(struck.url)
        say(
            f"now kill node {node} ({struck.url}), the owner of shard {STRUCK_SHARD}"
            if self._command is None
            else f"node {node}, the owner of shard {STRUCK_SHARD}, is struck"
        )
        running = (
            None if self._command is None else asyncio.create_task(self._run(node, struck.url))
        )
        try:
            down_ms = await self._until_struck(ledger, owner, struck, running)
            began_s = time.monotonic()
            say(self.down)
            await self._until_taken_over(epochs)
            took_s = time.monotonic() - began_s
            ledger.outages.append(Outage(down_ms, ledger.now_ms()))
            if running is not None:
                await running
        finally:
            if running is not None:
                running.cancel()
            await owner.close()
        return took_s

    async def end(self) -> list[str] | None:
        """See DemoServer."""
        await self._looking.close()
        return None

    async def _run(self, node: str, url: str) -> None:
        assert self._command is not None
        words = [
            word.replace("{node}", node).replace("{url}", url)
            for word in shlex.split(self._command)
        ]
        try:
            process = await asyncio.create_subprocess_exec(
                *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
            )
        except OSError as error:
            raise ServerFailed(f"{shlex.join(words)} cannot be run: {error}") from error
        said, _ = await process.communicate()
        if process.returncode:
            text = said.decode(errors="replace").strip()
            raise ServerFailed(f"{shlex.join(words)} ended with {process.returncode}: {text}")

    async def _until_struck(
        self,
        ledger: DemoLedger,
        owner: Transport,
        struck: MapShard,
        running: "asyncio.Task[None] | None",
    ) -> int:
        """Wait until the owner is struck; returns when it answered last."""
        give_up_s = time.monotonic() + STRIKE_S
        while time.monotonic() < give_up_s:
            if running is not None and running.done():
                running.result()
            last_ms = ledger.now_ms()
            try:
                await owner.request("GET", "/healthz", timeout_s=ALIVE_S)
            except UnansweredError:
                ledger.kills_ms += [last_ms, ledger.now_ms()]
                return last_ms
            known = await self._map()
            if known is not None and known.shards[STRUCK_SHARD].epoch > struck.epoch:
                return last_ms
            await asyncio.sleep(POLL_S)
        raise ServerFailed(f"the owner of shard {STRUCK_SHARD} was not struck in {STRIKE_S:g} s")

    async def _until_taken_over(self, epochs: dict[int, int]) -> None:
        """Wait until all its shards have a later owner, and are served."""
        give_up_s = time.monotonic() + TAKE_OVER_S
        while time.monotonic() < give_up_s:
            known = await self._map()
            if (
                known is not None
                and all(known.shards[shard].epoch > epoch for shard, epoch in epochs.items())
                and await self._serves()
            ):
                return
            await asyncio.sleep(POLL_S)
        raise ServerFailed(f"no other node served the shards in {TAKE_OVER_S:g} s")

    async def _map(self) -> ShardOwners | None:
        try:
            answer = await self._looking.request("GET", CLUSTER_PATH, timeout_s=LOOK_S)
            return decoded(answer.body, ShardOwners) if answer.is_success else None
        except ClientError:
            return None

    async def _serves(self) -> bool:
        """Whether each shard gives its part of an answer."""
        try:
            answer = await self._looking.request("GET", "/v1/stats", timeout_s=LOOK_S)
        except UnansweredError:
            return False
        return answer.status == HTTPStatus.OK
