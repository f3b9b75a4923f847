"""A node that owns its shard: from its claim until it gives the office away.

    Holder ──▶ beats (a thread) ──▶ the log: the owner is heard of
       └─────▶ around ──▶ the server, in this very process ──▶ leave: another is to have it

Cost: that of its parts. Threads: it is made in the one that follows, and belongs to the event loop
from then on; `leave` is called in a thread of its own, once nothing else runs.
"""

import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import msgspec

from delayserver.api.hot.asgi import Asgi
from delayserver.clocks import stopwatch_ms
from delayserver.cluster.membership import Address, entry_of
from delayserver.cluster.reports import HowFar
from delayserver.cluster.watch import News, choose
from delayserver.recovery.replica import Replica
from delayserver.recovery.store import Surroundings
from delayserver.serve.node import Fatal, NodeShard
from delayserver.server.server import Server
from delayserver.shards.map import Machines
from delayserver.shards.meeting import TcpMeeting
from storage.replicated.envelope import NOBODY
from storage.replicated.holder import Holder
from storage.replicated.log import FollowedLog

BEATS_LOOK_S: Final = 0.05
STEADY_MS: Final = 60_000
"""An owner gives its shard to one that goes before it, but not sooner than this after its claim."""


class Beats(threading.Thread):
    """Has an owner be heard of."""

    def __init__(self, holder: Holder, fatal: Fatal) -> None:
        super().__init__(name="delayserver-beats", daemon=True)
        self._holder = holder
        self._fatal = fatal
        self._ending = threading.Event()

    def run(self) -> None:
        try:
            while not self._ending.wait(BEATS_LOOK_S):
                self._holder.beat()
        except BaseException as error:
            self._fatal(error)

    def end(self) -> None:
        """No beat comes behind this."""
        self._ending.set()
        self.join()


class OwnerNode:
    """A node in office."""

    def __init__(
        self,
        node: NodeShard,
        address: Address,
        meeting: TcpMeeting,
        replica: Replica,
        holder: Holder,
    ) -> None:
        """From here on the office is held, whatever the event loop is busy with. `address`: where
        the others find the node; `meeting`: how it comes together with them."""
        self.node = node
        self.place, self.book, self.meeting = node.place, node.book, meeting
        self._address = address.pack()
        self._replica = replica
        self._holder = holder
        self._taken_ms = stopwatch_ms()
        self._beats = Beats(holder, node.fatal)
        self._beats.start()

    @property
    def epoch(self) -> int:
        """In which the node holds the office."""
        return self._holder.claimed.epoch

    def around(self, surroundings: Surroundings) -> Surroundings:
        """The surroundings of the server."""
        owned = self._replica.owned_by(self._holder)
        return replace(
            surroundings,
            clock=owned.clock,
            may_deliver=owned.may_deliver,
            openers=owned.openers,
        )

    def sharing(self, server: Server) -> Callable[[Asgi], Asgi]:
        """Puts in front of an application the calls by which other nodes get copies."""
        return self.node.sharing(server.want_snapshot)

    def machines(self) -> Machines:
        """The machines as this node knows them now."""
        return self.node.lines.news.machines

    def lend(self, listeners: Sequence[socket.socket]) -> list[socket.socket]:
        """The sockets that end with the server: copies, since the node goes on to listen."""
        return [listener.dup() for listener in listeners]

    def serving(
        self, server: Server, on_gone: Callable[[], None], on_news: Callable[[], None]
    ) -> None:
        """The server serves the shard from now on. `on_gone` is called when the supervisor has
        ended, `on_news` when something else is known of the cluster."""
        node, holder = self.node, self._holder
        message_log, metrics = server.message_log, server.metrics
        assert isinstance(message_log, FollowedLog)
        self._taken_ms = stopwatch_ms()
        node.on_owner(entry_of(node.place.shard, self.epoch, self._address))
        node.reports.how_far = lambda: HowFar(message_log.kept, holder.state.next_offset)
        node.reports.office, node.reports.stage = (self.epoch, self._address), "replica"
        metrics.gauge(
            "office_epoch", "Which owner of its shard this process is", lambda: self.epoch
        )
        metrics.gauge(
            "office_lease", "Whether deliveries may leave", lambda: int(holder.may_deliver())
        )
        metrics.gauge(
            "office_unread_records",
            "Records of the log that a new owner would read, beats among them",
            lambda: holder.state.next_offset - message_log.kept[0],
        )
        metrics.gauge(
            "unseen_nodes",
            "Other nodes that cannot be reached from this one",
            node.unseen_nodes,
        )
        node.lines.begin(on_gone, on_news)

    def end(self) -> None:
        """The server ends, and hears nothing more."""
        self.node.lines.end()

    def successor(self, *, is_damaged: bool = False, is_slow: bool = False) -> str | None:
        """The node that is to have the shard now instead of this one, if any. `is_damaged`: here is
        something that another replica has sound; this one is made anew behind the office.
        `is_slow`: the disk here does not keep up."""
        node, keeper = self.node, self.node.keeper
        keeper.is_damaged |= is_damaged
        news, own = node.lines.news, node.membership.node
        return choose(
            replace_drained(news, own) if keeper.is_damaged or is_slow else news,
            node.place.shard,
            own,
            self.epoch,
            may_balance=stopwatch_ms() - self._taken_ms >= STEADY_MS,
        )

    def leave(self, successor: str | None) -> None:
        """Give the office away: nothing is to be delivered or settled any more. `successor`: the
        node that is to have it; None: any that is in step."""
        node, shard = self.node, self.node.place.shard
        self._beats.end()
        news = node.lines.news
        if successor is None:
            drained = replace_drained(news, node.membership.node)
            successor = choose(drained, shard, node.membership.node, 0, may_balance=False)
        number = NOBODY if successor not in news.nodes else news.nodes.index(successor) + 1
        self._holder.leave(number)
        self._holder.log.close()
        node.reports.office = (0, "")
        node.on_owner(entry_of(shard, self.epoch, ""))


def replace_drained(news: News, node: str) -> News:
    """The same, and the node is to own nothing."""
    return msgspec.structs.replace(news, drained=[*news.drained, node])
