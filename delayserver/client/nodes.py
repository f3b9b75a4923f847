"""Where anything can be asked: at the configured address, and at every node of a cluster.

    request ──▶ the node that answered last ── it cannot be reached ──▶ the next one, at once
                                            ── no answer, or 503 ──▶ told so; the next call goes on

The nodes are those that the last map named. A request that was certainly not sent goes to the next
node within the same call; about all others the caller decides. A node that answers well is asked
on, also when the configured address is back.

Cost: none beyond that of the request. Threads: belongs to one event loop.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping
from http import HTTPStatus

from delayserver.client.errors import UnansweredError, UnreachableError
from delayserver.client.retries import ATTEMPT_S_MIN
from delayserver.client.transport import NO_HEADERS, TIMEOUT_S, HttpAnswer, Transport

Connect = Callable[[str], Transport]


class Nodes:
    """All that is known; asked as one `Transport`."""

    def __init__(self, home: Transport, url: str, connect: Connect) -> None:
        """`home`: the configured address, `url`. `connect` makes a transport to another one."""
        self._home_url = url.rstrip("/")
        self._nodes = {self._home_url: home}
        """In the order in which they are asked."""
        self._connect = connect

    @property
    def has_others(self) -> bool:
        """Whether there are more than the configured address."""
        return len(self._nodes) > 1

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        headers: Mapping[str, str] = NO_HEADERS,
        timeout_s: float = TIMEOUT_S,
    ) -> HttpAnswer:
        """See Transport. UnreachableError: no node is reached."""
        now_s = asyncio.get_running_loop().time
        deadline_s = now_s() + timeout_s
        unreachable: UnreachableError | None = None
        for url, node in tuple(self._nodes.items()):
            try:
                answer = await node.request(
                    method, path, body, headers=headers, timeout_s=timeout_s
                )
            except UnreachableError as error:
                self._pass_over(url)
                unreachable = error
                timeout_s = max(deadline_s - now_s(), ATTEMPT_S_MIN)
            except UnansweredError:
                self._pass_over(url)
                raise
            else:
                if answer.status == HTTPStatus.SERVICE_UNAVAILABLE:
                    self._pass_over(url)
                return answer
        assert unreachable is not None
        raise unreachable

    def _pass_over(self, url: str) -> None:
        if next(iter(self._nodes)) == url:  # else another call was quicker
            self._nodes[url] = self._nodes.pop(url)

    async def take(self, urls: Collection[str]) -> None:
        """Know these nodes, and no others but the configured address."""
        for url in urls:
            if url.rstrip("/") not in self._nodes:
                self._nodes[url.rstrip("/")] = self._connect(url)
        wanted = {self._home_url, *(url.rstrip("/") for url in urls)}
        for url in self._nodes.keys() - wanted:
            await self._nodes.pop(url).close()

    async def close(self) -> None:
        """Disconnect from all but the configured address."""
        await self.take(())
