"""Which of the other nodes a node can reach, without the brokers between them.

    nodes that are there by their notes ──▶ a connection to each, once a second ──▶ Sight
    Sight ──▶ nodes without an answer for LOST_ROUNDS rounds ──▶ News, and the node's own notes

The question is whether a connection can be made to the address that clients and other nodes use.
Such a connection costs the other side an accept, needs no token and no certificate, and is answered
by the system of a machine whose process hangs: its notes tell whether the process is there.

Rejected: to say how many are seen. A node that can reach the others, and cannot be reached, would
not learn that it is apart. And those that are seen, by name: a long note
in a large cluster.

Rounds are counted, and not seconds: whoever was stopped for a while has asked nobody meanwhile, so
it has lost nobody. A round takes a second.

Cost: one connection a second to each other node. Threads: belongs to the event loop.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final
from urllib.parse import urlsplit

ASK_S: Final = 1.0
"""A node that has not answered by then has not answered in this round."""
LOST_ROUNDS: Final = 10
"""A node that has not answered for so many rounds is not seen. By then a node that has ended is in
step no more (IN_STEP_MS, and a second by which clocks may differ): else the one that outlives all
others would give its shards to one of them."""

Reach = Callable[[str], Awaitable[None]]
"""Makes a connection to a URL, and ends it. Raises OSError, ValueError."""


class Sight:
    """Whom this node sees."""

    def __init__(self) -> None:
        self._missed: dict[str, int] = {}
        """Rounds in a row in which a node was asked and did not answer."""

    @property
    def unseen(self) -> list[str]:
        """Nodes that were asked in the last round, and have not answered for LOST_ROUNDS rounds."""
        return sorted(node for node, missed in self._missed.items() if missed >= LOST_ROUNDS)

    def take(self, asked: Collection[str], answered: Collection[str]) -> None:
        """A round is over. A node that is not asked any more is forgotten."""
        self._missed = {
            node: 0 if node in answered else self._missed.get(node, 0) + 1 for node in asked
        }


async def answering(urls: Mapping[str, str], reach: Reach) -> set[str]:
    """The nodes, of these with their URLs, that can be reached within ASK_S."""

    async def answers(url: str) -> bool:
        try:
            async with asyncio.timeout(ASK_S):
                await reach(url)
        except (OSError, ValueError):  # a time-out is an OSError, too
            return False
        return True

    found = await asyncio.gather(*(answers(url) for url in urls.values()))
    return {node for node, is_there in zip(urls, found, strict=True) if is_there}


async def connect(url: str) -> None:
    """Make a connection to `http://HOST:PORT`, and end it. Raises OSError, ValueError."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if parts.hostname is None:
        raise ValueError(f"{url!r} names no host")
    _, writer = await asyncio.open_connection(parts.hostname, port)
    writer.close()
