"""Servers that end by an error, and what it was."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from delayserver.config import Settings
from delayserver.server.server import Server

LEASE_MS = 600_000


class Failing(Exception):
    """A mistake of ours."""


def fail(*arguments: object) -> None:
    raise Failing


def outcome(
    directory: Path, break_it: Callable[[Server, pytest.MonkeyPatch], object], wait_s: float = 5
) -> Any:
    """Returns the error that ends a running server after something of it was broken; None if it
    does not end within `wait_s`."""

    async def main() -> Any:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[BaseException] = loop.create_future()

        def fatal(error: BaseException) -> None:
            if not ended.done():
                ended.set_result(error)

        server = Server(Settings(data_dir=directory), fatal=fatal)
        await server.start()
        with pytest.MonkeyPatch.context() as patch:
            break_it(server, patch)
            await asyncio.wait([ended], timeout=wait_s)
        await server.stop()
        return ended.result() if ended.done() else None

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())
