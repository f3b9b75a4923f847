"""The reports of a node's supervisor: it looks at the cluster, and tells its processes.

    the cluster's log, its replicas (`watch`), who can be reached (`sight`) ──▶ News ──▶ a line

Cost: that of a look, once a second. Threads: belongs to the event loop; the looks are in a thread.
"""

import asyncio
from collections.abc import Callable

import structlog

from delayserver.cluster.membership import news_line
from delayserver.cluster.sight import Sight, answering, connect
from delayserver.cluster.watch import LOOK_S, ClusterObserver, seen_from, there

log = structlog.get_logger()


async def tell_news(tell: Callable[[bytes], None], watch: ClusterObserver, node: str) -> None:
    """Tell all processes of the node the state of the cluster, and the nodes that it can reach, for
    ever."""
    sight = Sight()
    others: dict[str, str] = {}
    while True:
        pause = asyncio.create_task(asyncio.sleep(LOOK_S))
        news, answered = await asyncio.gather(
            asyncio.to_thread(watch.look), answering(others, connect)
        )
        before = sight.unseen
        sight.take(others, answered)
        if sight.unseen != before:
            say = log.warning if sight.unseen else log.info
            say("other nodes that cannot be reached", nodes=sight.unseen)
        if news is not None:
            news = seen_from(news, node, sight.unseen)
            tell(news_line(news))
            others = {other: url for other, url in there(news).items() if other != node}
        await pause
