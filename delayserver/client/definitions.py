"""What clients of definitions share, be it subscriptions, schedules or sources: how one is asked
for by name, changed and ended, and that any node of a cluster answers.

Cost: one request per call. Threads: belongs to the event loop.
"""

import ssl
from abc import abstractmethod
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from delayserver.client.calling import RETRY, URL_DEFAULT, RetryingClient
from delayserver.client.cluster_map import OwnerHosts
from delayserver.client.following import followed
from delayserver.client.nodes import Connect
from delayserver.client.retries import RetryPolicy, Time
from delayserver.client.transport import (
    TIMEOUT_S,
    HttpAnswer,
    HttpTransport,
    Transport,
    path_of,
)
from delayserver.client.writing import given

V = TypeVar("V")


class DefinitionsClient(RetryingClient, Generic[V]):
    """A client of the definitions of one kind."""

    _kind: ClassVar[str]
    """Their name in paths."""

    def __init__(
        self,
        url: str = URL_DEFAULT,
        *,
        token: str | None = None,
        retry: RetryPolicy = RETRY,
        timeout_s: float = TIMEOUT_S,
        owner_hosts: OwnerHosts = "same",
        tls: ssl.SSLContext | None = None,
        transport: Transport | None = None,
        connect: Connect | None = None,
        time: Time | None = None,
    ) -> None:
        """- `retry`: how long to ask again while the server is away; a minute by default.
        - `timeout_s`: how long one request may take. Each call takes a `timeout_s`, too, for all of
          its requests: UnansweredError when that is over.
        - `owner_hosts`: of a cluster any node is asked, when the one at `url` cannot be reached.
          Those are asked that are on the same host as `url`; on any, with "any": then the token
          goes wherever the server says. With "none" only `url` is.
        - `token`; `tls`: instead of the system's certificates; `transport`, `connect`, `time`: for
          tests."""
        make = partial(HttpTransport, token=token, tls=tls)
        asked = followed(transport, connect, make, url, owner_hosts)
        super().__init__(url, retry=retry, timeout_s=timeout_s, transport=asked, time=time)

    @abstractmethod
    def _read(self, answer: HttpAnswer) -> V:
        """The one that is in an answer."""

    async def _put(
        self,
        name: str,
        document: dict[str, Any],
        timeout_s: float | None,
        if_match: str | None = None,
    ) -> V:
        """Make one, or change it; what is None in the document is not given."""
        path = path_of(self._kind, name)
        return self._read(
            await self._call("PUT", path, given(document), if_match=if_match, timeout_s=timeout_s)
        )

    async def _get(self, name: str, timeout_s: float | None) -> V:
        return self._read(await self._call("GET", path_of(self._kind, name), timeout_s=timeout_s))

    async def _post(
        self, name: str, what: str, timeout_s: float | None, if_match: str | None = None
    ) -> V:
        """Pause or resume one."""
        path = path_of(self._kind, name, what)
        return self._read(await self._call("POST", path, if_match=if_match, timeout_s=timeout_s))

    async def _end(self, name: str, timeout_s: float | None, if_match: str | None = None) -> None:
        path = path_of(self._kind, name)
        if if_match is None:
            await self._delete(path, timeout_s)
        else:
            await self._call("DELETE", path, if_match=if_match, timeout_s=timeout_s)
