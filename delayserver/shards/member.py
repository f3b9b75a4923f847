"""One shard, among others or alone: all that its process does besides being a server.

    Front ──▶ handlers ──▶ Links ──▶ other shards ──▶ Local of each ──▶ its hot path
    consumers ──▶ hot path ──▶ Links ──▶ other shards ──▶ Local of each

The only shard of one has the same parts, but nothing is routed, shared or counted together there:
each call goes to the hot path at once.

Cost: see the parts. Threads: belongs to the event loop.
"""

import asyncio
from collections.abc import Callable

from delayserver.api.exit import Exit
from delayserver.api.hot.asgi import Asgi, HotPath
from delayserver.api.hot.publish import Hot
from delayserver.api.intake import Intake
from delayserver.server.calls import Calls
from delayserver.shards.batches import Batches
from delayserver.shards.book import OwnerBook
from delayserver.shards.consuming import SharedGrants
from delayserver.shards.definitions import Definitions
from delayserver.shards.front import Front, OneByOne
from delayserver.shards.limits import Limits
from delayserver.shards.link import WAIT_S, Links
from delayserver.shards.local import Handler, Local
from delayserver.shards.meeting import Meeting, UnixMeeting
from delayserver.shards.place import ShardPlace
from delayserver.shards.router import Router
from delayserver.shards.token_rates import TokenRates


class Member:
    """The parts, from `begin` to `close`."""

    def __init__(
        self,
        place: ShardPlace,
        calls: Calls,
        intake: Intake,
        rest: Asgi,
        meeting: Meeting | None = None,
        book: OwnerBook | None = None,
    ) -> None:
        """`rest`: serves the calls that the hot path does not. `meeting`, `book`: those of a
        cluster; None: all shards are on this machine, for ever."""
        exit_ = Exit(calls.may_answer, calls.shard)
        meeting = meeting or UnixMeeting(place.sockets)
        is_https = calls.settings.tls_cert is not None
        self.links = links = Links(place, meeting, book, exit_=exit_, is_https=is_https)
        self.definitions = definitions = Definitions(calls, links, 0.0 if book is None else WAIT_S)
        grants = SharedGrants(calls, links)
        self.hot = hot = Hot(calls, intake, exit_, links, grants, definitions.check_whole)
        self.path = path = HotPath(calls, hot, rest)
        """Serves calls that belong to this shard."""
        batches = Batches(calls, hot, links)
        router = Router(links, calls.settings, calls.parts)
        internal: list[Handler] = [batches.answer_part, definitions.answer, *grants.handlers]
        self._local = Local(hot, path, internal)
        self.front: Asgi = path
        """Serves all calls."""
        if links.count > 1:
            loop = asyncio.get_running_loop()
            calls.share_limits(Limits(links, calls, loop))
            TokenRates(links, calls.tokens, loop)
            self.front = Front(hot, path, [OneByOne(links).answer, batches.answer, router.answer])

    async def begin(self, port: int, epoch: int = 0) -> None:
        """Be there for the others. `port`: where this shard alone is reached, 0: where the server
        is; `epoch`: of this process, as its owner."""
        self.definitions.begin()
        await self.links.begin(self._local, port, epoch)

    def when_ready(self, tell: Callable[[], None]) -> None:
        """Call `tell` once all shards have met, and know all definitions."""
        self.definitions.when_whole(tell)

    async def close(self) -> None:
        """Leave the others."""
        await self.links.close()
        # Behind the links: a change that another shard has asked for is told to all of them.
        self.definitions.close()
