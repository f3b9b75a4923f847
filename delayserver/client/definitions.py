"""Calls that subscriptions, schedules, sources and backups share: to look one up by its name,
change it, pause it or delete it. Any node of a cluster answers.

Cost: one request per call. Threads: belongs to the event loop.
"""

from abc import abstractmethod
from typing import Any, ClassVar, Generic, TypeVar

from delayserver.client.calling import RetryingClient
from delayserver.client.transport import HttpAnswer, path_of

V = TypeVar("V")


class ClientDefinitions(Generic[V]):
    """The definitions of one kind. A value `V` describes one as it is."""

    _kind: ClassVar[str]
    """Their name in paths."""

    def __init__(self, client: RetryingClient) -> None:
        self._client = client

    @abstractmethod
    def _read(self, answer: HttpAnswer) -> V:
        """The definition in an answer."""

    async def _put(
        self,
        name: str,
        document: dict[str, Any],
        *,
        if_match: str | None,
        timeout_s: float | None,
    ) -> V:
        """Make a definition, or replace it."""
        path = path_of(self._kind, name)
        return self._read(
            await self._client._call("PUT", path, document, if_match=if_match, timeout_s=timeout_s)
        )

    async def get(self, name: str, *, timeout_s: float | None = None) -> V:
        """Look one up by its name. Raises NotFoundError."""
        path = path_of(self._kind, name)
        return self._read(await self._client._call("GET", path, timeout_s=timeout_s))

    async def _post(
        self, name: str, action: str, if_match: str | None, timeout_s: float | None
    ) -> V:
        path = path_of(self._kind, name, action)
        return self._read(
            await self._client._call("POST", path, if_match=if_match, timeout_s=timeout_s)
        )


class VersionedDefinitions(ClientDefinitions[V]):
    """ClientDefinitions that have versions, and can be paused.

    With `if_match` a call is refused unless that is still the version (ChangedError)."""

    async def pause(
        self, name: str, *, if_match: str | None = None, timeout_s: float | None = None
    ) -> V:
        """Stop one until it is resumed. Raises NotFoundError, ChangedError."""
        return await self._post(name, "pause", if_match, timeout_s)

    async def resume(
        self, name: str, *, if_match: str | None = None, timeout_s: float | None = None
    ) -> V:
        """Let one go on. Raises NotFoundError, ChangedError."""
        return await self._post(name, "resume", if_match, timeout_s)

    async def delete(
        self, name: str, *, if_match: str | None = None, timeout_s: float | None = None
    ) -> None:
        """Delete one: when this returns, it does nothing more. Messages that it has published stay.
        Raises NotFoundError, ChangedError."""
        path = path_of(self._kind, name)
        if if_match is None:
            await self._client._delete(path, timeout_s)
        else:
            await self._client._call("DELETE", path, if_match=if_match, timeout_s=timeout_s)
