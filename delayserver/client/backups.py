"""Backups: consistent copies of a server's data, which it makes while it goes on.

Cost: one request per call; `wait` asks twice a second. Threads: belongs to the event loop.
"""

import builtins
from typing import Any, Final

import msgspec

from delayserver.client.definitions import ClientDefinitions
from delayserver.client.errors import UnansweredError
from delayserver.client.transport import HttpAnswer, decoded, path_of
from delayserver.client.values import Backup

POLL_S: Final = 0.5


class _List(msgspec.Struct):
    backups: list[Backup]


class AsyncClientBackups(ClientDefinitions[Backup]):
    """The backups of a server; they need a token with the scope `admin`.

        made = await client.backups.wait((await client.backups.begin("before-the-upgrade")).name)

    `delayserver restore` makes a data directory of one. `get` tells how far a backup is."""

    _kind = "backups"

    async def begin(
        self, name: str | None = None, *, verify: bool = True, timeout_s: float | None = None
    ) -> Backup:
        """Begin a backup. It has every message that was answered before.

        - `name`: the time by default.
        - `verify`: read every byte of it again, and compare it with all others.

        UnansweredError after a lost answer: a second request would begin another backup. Raises
        ConflictError while one is being made, where the name is taken, or where the server makes
        no backups; InvalidError."""
        document: dict[str, Any] = {"verify": verify} | ({} if name is None else {"name": name})
        path = path_of(self._kind)
        return self._read(
            await self._client._call("POST", path, document, repeatable=False, timeout_s=timeout_s)
        )

    async def wait(self, name: str, *, timeout_s: float | None = None) -> Backup:
        """The backup once it is complete or has failed (`Backup.state`). Raises NotFoundError;
        UnansweredError when `timeout_s` is over: the server goes on to make it."""
        time = self._client._time
        began_s = time.now_s()
        while (found := await self.get(name)).state == "running":
            if timeout_s is not None and time.now_s() - began_s >= timeout_s:
                raise UnansweredError(f"the backup {name} is not complete after {timeout_s} s")
            await time.sleep(POLL_S)
        return found

    async def list(self, *, timeout_s: float | None = None) -> builtins.list[Backup]:
        """All backups, the oldest first, with one that is being made or has failed."""
        answer = await self._client._call("GET", path_of(self._kind), timeout_s=timeout_s)
        return decoded(answer.body, _List).backups

    async def delete(self, name: str, *, timeout_s: float | None = None) -> None:
        """Delete a backup. The server gives up one that it is making. Raises NotFoundError."""
        await self._client._delete(path_of(self._kind, name), timeout_s)

    def _read(self, answer: HttpAnswer) -> Backup:
        return decoded(answer.body, Backup)
