"""Backups: consistent copies of what a server has, which it makes while it goes on.

Cost: one request per call; `wait` asks twice a second. Threads: belongs to the event loop.
"""

import builtins
from typing import Any, Final

import msgspec

from delayserver.client.definitions import DefinitionsClient
from delayserver.client.errors import UnansweredError
from delayserver.client.transport import HttpAnswer, decoded, path_of
from delayserver.client.values import Backup

POLL_S: Final = 0.5


class _List(msgspec.Struct):
    backups: list[Backup]


class AsyncBackups(DefinitionsClient[Backup]):
    """The backups of a server, for asyncio; with a token that has the scope `admin`.

        async with AsyncBackups("http://127.0.0.1:8080") as backups:
            made = await backups.wait((await backups.begin("before-the-upgrade")).name)

    `delayserver restore` makes a data directory of one."""

    _kind = "backups"

    async def begin(
        self, name: str | None = None, *, verify: bool = True, timeout_s: float | None = None
    ) -> Backup:
        """Begin a backup, in which is what was answered before.

        - `name`: without one it is the time.
        - `verify`: read every byte of it again, and compare it with all others.

        A lost answer is an UnansweredError: asked again, it would begin another. Raises
        ConflictError while one is being made, where there is one of that name, or where the server
        makes none; InvalidError."""
        document: dict[str, Any] = {"verify": verify} | ({} if name is None else {"name": name})
        path = path_of(self._kind)
        return self._read(
            await self._call("POST", path, document, repeatable=False, timeout_s=timeout_s)
        )

    async def get(self, name: str, *, timeout_s: float | None = None) -> Backup:
        """A backup, or how far it is. Raises NotFoundError."""
        return await self._get(name, timeout_s)

    async def wait(self, name: str, *, timeout_s: float | None = None) -> Backup:
        """The backup once it is complete or has failed (`Backup.state`). Raises NotFoundError;
        UnansweredError when `timeout_s` is over, and it is made all the same."""
        began_s = self._time.now_s()
        while (found := await self._get(name, None)).state == "running":
            if timeout_s is not None and self._time.now_s() - began_s >= timeout_s:
                raise UnansweredError(f"the backup {name} is not complete after {timeout_s} s")
            await self._time.sleep(POLL_S)
        return found

    async def list(self, *, timeout_s: float | None = None) -> builtins.list[Backup]:
        """All that there are, the oldest first, and the one that is being made or has failed."""
        answer = await self._call("GET", path_of(self._kind), timeout_s=timeout_s)
        return decoded(answer.body, _List).backups

    async def delete(self, name: str, *, timeout_s: float | None = None) -> None:
        """Delete a backup; one that is being made is given up. Raises NotFoundError."""
        await self._end(name, timeout_s)

    def _read(self, answer: HttpAnswer) -> Backup:
        return decoded(answer.body, Backup)
