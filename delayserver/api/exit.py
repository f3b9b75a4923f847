"""The exit: every answer about a shard leaves the process through here, and asks the lease.

    hot path ──▶ `wire`       ──▶ client, or the shard that has asked
    ASGI     ──▶ `holds_back` ──▶ client (`delayserver.api.leaving`)
    links    ──▶ `holds_back` ──▶ the shard that has asked

An owner that is cut off from the log of its shard may have been replaced. Its answers are old then,
reads included, and it cannot know. So nothing leaves unless it holds its lease: before the lease
ends, no other node can have claimed (R2 in `storage.replicated.lease`). An answer that is held back
is "unknown" (503), since the call may have had its effect.

An owner whose log answers late holds its lease again when a group is durable
(`storage.replicated.holder`). An answer through ASGI or over a link waits up to PATIENCE_S for the
lease. A broker that falls costs a wait then, and no refusal.

Answers about the process need no lease: its health, its figures, the API's description, and the
owners of the shards, each with an epoch to judge it by. A server alone always holds its lease.

Rejected: asking in each call before it decides, as lookups once did. A new call forgets it, and
time passes between the decision and the answer.

Cost: a look at a stopwatch for an answer. Threads: belongs to the event loop.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from delayserver.api.hot.answers import Answer, problem_answer, wire_of
from delayserver.api.hot.paths import CLUSTER_PATH
from delayserver.errors import FormerOwnerError

PATIENCE_S: Final = 1.0
"""Two beats: an owner that is well holds its lease again by then."""
LOOK_S: Final = 0.02
_SAYS_NOTHING_FROM: Final = 500
"""Answers with such a status say nothing of the shard."""
_STATUS: Final = slice(9, 12)
"""Where the status stands in an answer as it goes over the wire, behind `HTTP/1.1 `."""


class Exit:
    """Asks whether this process still owns its shard, whenever an answer is about to leave."""

    def __init__(self, is_open: Callable[[], bool], shard: int) -> None:
        """`is_open`: whether nobody else can own the shard now."""
        self.is_open = is_open
        self._number = shard

    def refusal(self) -> Answer:
        """Returns the refusal that leaves instead of an answer."""
        return problem_answer(FormerOwnerError(self._number))

    def wire(self, wire: bytes) -> bytes:
        """An answer of the hot path, as it may leave now."""
        if self.is_open() or int(wire[_STATUS]) >= _SAYS_NOTHING_FROM:
            return wire
        return wire_of(self.refusal())

    async def opens(self) -> bool:
        """Whether answers may leave, now or soon."""
        if self.is_open():
            return True
        loop = asyncio.get_running_loop()
        until_s = loop.time() + PATIENCE_S
        while loop.time() < until_s:
            await asyncio.sleep(LOOK_S)
            if self.is_open():
                return True
        return False

    async def holds_back(self, path: str, status: int) -> bool:
        """Whether the answer to a call may not leave."""
        speaks = speaks_of_shard(path) and status < _SAYS_NOTHING_FROM
        return speaks and not await self.opens()


def speaks_of_shard(path: str) -> bool:
    """Whether the answer to a call at that path depends on who owns the shard."""
    return path.startswith(("/v1/", "/internal/")) and path != CLUSTER_PATH
