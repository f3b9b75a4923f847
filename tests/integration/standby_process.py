"""A process on standby that becomes the owner when it is told to, as a program.

    python -m tests.integration.standby_process DIRECTORY OWNER_URL

It says `standby PORT` once it listens. A line on its standard input has it end its standby and
begin a server, on the socket that it has listened with all the time; then it says `closed`."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import replace
from pathlib import Path

import uvloop

from delayserver.api.moving import Moving
from delayserver.config import Settings
from delayserver.security.tokens import TokenFile, TokenTable
from delayserver.serve import process
from delayserver.serve.certificates import Certificates
from delayserver.serve.fixed_owner import FixedOwner
from delayserver.serve.listening import BACKLOG, bind
from delayserver.serve.standby import StandbyFront
from delayserver.server.server import Server, of_this_machine
from delayserver.shards.map import ClusterMap
from delayserver.shards.place import ShardPlace
from storage.files import OsFiles


def now_ms() -> int:
    return time.time_ns() // 1_000_000


async def main(directory: Path, owner: str) -> None:
    settings = Settings(data_dir=directory, port=0)
    tokens = TokenTable(TokenFile(OsFiles(str(directory))), None, time.monotonic)
    tokens.refresh(now_ms())
    standby = StandbyFront(
        settings,
        shard=0,
        owner=lambda: owner,
        is_ready=lambda: True,
        shard_map=ClusterMap(None, settings, now_ms),
        metrics=lambda: "delayserver_lag 0\n",
        tokens=tokens,
        clock=now_ms,
    )
    listener = bind(settings)
    listener.listen(BACKLOG)
    certificates = Certificates(settings, is_node=True)
    await standby.begin([listener], certificates)
    print("standby", listener.getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    moving = Moving()
    await standby.close(moving)
    print("closed", flush=True)
    server = Server(
        settings,
        replace(of_this_machine(settings), progress=process._progress),
        fatal=process._end,
    )
    itself = FixedOwner(ShardPlace.alone(directory))
    await process._serve(settings, server, [listener], certificates, itself, moving)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(Path(sys.argv[1]), sys.argv[2]))
