"""A transport to whichever node of a cluster can be reached: the configured address, and all that
the map names.

    request ──▶ Nodes ──▶ the answer
                  ▲   └─▶ is it time? ──▶ GET /v1/cluster, beside the next calls
                  └─────── the nodes of now ◀──┘

Consumers and subscriptions ask it: any node takes any of their calls, so nothing is to be known of
the owners of shards. That there are other nodes has to be known before the first one is lost, so
the map is asked for with the first call, and again while calls are made. A producer has more to
gain, and waits at the server for the next map (`owners`).

Cost: a request each LOOK_S while calls are made, of a server that has no other nodes each ALONE_S.
Threads: belongs to one event loop at a time; in another one, and in the child of a fork, it begins
anew.
"""

import asyncio
from collections.abc import Mapping
from typing import Final

from delayserver.client.cluster_map import (
    CLUSTER_PATH,
    MAP_S,
    OwnerHosts,
    ShardOwners,
    is_allowed,
)
from delayserver.client.errors import NotADelayServerError, UnansweredError
from delayserver.client.nodes import Connect, Nodes
from delayserver.client.transport import NO_HEADERS, TIMEOUT_S, HttpAnswer, Transport, decoded

LOOK_S: Final = 15.0
ALONE_S: Final = 300.0
AGAIN_S: Final = 1.0
"""After there was no answer."""


class Following:
    """A `Transport` that goes on to other nodes."""

    def __init__(
        self, home: Transport, url: str, connect: Connect, hosts: OwnerHosts = "same"
    ) -> None:
        """`home`: the configured address, `url`; it is closed with this. `connect` makes a
        transport to another one. `hosts`: whose addresses are used of those that the map names."""
        self._home = home
        self._url = url
        self._nodes = Nodes(home, url, connect)
        self._hosts = hosts
        self._look: asyncio.Task[None] | None = None
        self._looks_s = 0.0
        """When it is time again, by the clock of the loop."""
        self._loop: asyncio.AbstractEventLoop | None = None

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
        self._begin_look()
        return await self._nodes.request(method, path, body, headers=headers, timeout_s=timeout_s)

    async def close(self) -> None:
        """Close all connections; requests under way are unanswered."""
        look, self._look = self._look, None
        if look is not None and look.get_loop() is asyncio.get_running_loop():
            look.cancel()
            await asyncio.gather(look, return_exceptions=True)
        await self._nodes.close()
        await self._home.close()

    # ── the map ────────────────────────────────────────────────────────────────────────────────

    def _begin_look(self) -> None:
        if self._hosts == "none":
            return
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            # Requests of another loop end there.
            self._loop, self._look, self._looks_s = loop, None, 0.0
        if loop.time() >= self._looks_s and (self._look is None or self._look.done()):
            self._look = loop.create_task(self._look_for_nodes())

    async def _look_for_nodes(self) -> None:
        loop = asyncio.get_running_loop()
        self._looks_s = loop.time() + AGAIN_S
        try:
            answer = await self._nodes.request("GET", CLUSTER_PATH, timeout_s=MAP_S)
            known = decoded(answer.body, ShardOwners) if answer.is_success else None
        except UnansweredError:
            return
        except NotADelayServerError:
            known = None
        if known is not None and len(known.nodes) > 1:
            urls = [one.url for one in known.nodes]
            await self._nodes.take([one for one in urls if self._may_ask(one)])
            self._looks_s = loop.time() + LOOK_S
        elif known is not None or answer.status < 500:
            # A server by itself, or one that has no map for us.
            self._looks_s = loop.time() + ALONE_S

    def _may_ask(self, url: str) -> bool:
        return is_allowed(self._url, url, self._hosts)
