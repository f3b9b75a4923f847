"""A process of a node for one shard: all that outlives its times on standby and in office.

    ┌─▶ candidacy: it follows the log, and passes calls on to the owner ── told to stop ──▶ the end
    │       ▼ the office is held
    │   owner: its server, in this very process
    └───────┘ another is to have the shard

An owner that gives the office away in order is on standby again, in the same process: its socket
never stops listening. An owner that may have lost the office ends at once, with a status that says
"start me again" (75), and a new process follows the log of the next owner.

`keeping` decides which replica is in the directory, and brings it there. If the node should have no
replica, the process passes calls on all the time. A thread reports how far the replica
is (`reports`).

Cost: that of its parts. Threads: the event loop, and that of `reports`.
"""

import socket
from collections.abc import Callable, Sequence

import delayserver.api.cluster.reports  # noqa: F401  # scripts set constants by this name
from delayserver.api.hot.asgi import Asgi
from delayserver.clocks import stopwatch_ms, wall_clock_ms
from delayserver.cluster.copying import HttpPeer
from delayserver.cluster.joining import open_engine
from delayserver.cluster.keeping import ReplicaKeeper
from delayserver.cluster.membership import Lines, Membership
from delayserver.cluster.proofs import Proofs
from delayserver.cluster.reports import Reports
from delayserver.cluster.sharing import Sharing, SnapshotCallback, TakeSnapshot
from delayserver.config import Settings
from delayserver.serve.certificates import Certificates
from delayserver.server.server import open_catalog_in
from delayserver.shards.book import Entry, OwnerBook, encode_line
from delayserver.shards.exposition import Figure
from delayserver.shards.place import ShardPlace
from storage.files import OsFiles

Fatal = Callable[[BaseException], None]


class NodeShard:
    """The process, as a member of its cluster."""

    def __init__(
        self,
        settings: Settings,
        place: ShardPlace,
        membership: Membership,
        rest: bytes,
        certificates: Certificates,
        *,
        listeners: Sequence[socket.socket],
        figures: Sequence[Figure],
        tell: Callable[[bytes], None],
        fatal: Fatal,
    ) -> None:
        """`rest`: the bytes that the supervisor has sent behind the membership; `listeners`: where
        clients connect, the last one to this very process; `tell`: gives the supervisor a line;
        `figures`: the counters of the process.

        Raises StorageError, DelayServerError, OSError."""
        assert settings.advertise is not None
        self.settings = settings
        self.place = place
        self.membership = membership
        self.certificates = certificates
        self.listeners = listeners
        self.figures = figures
        self.fatal = fatal
        self._tell = tell
        self.brokers = open_engine(settings)
        self.book = OwnerBook(place.count)
        """Renewed each time that the node goes on standby."""
        self.lines = Lines(0, rest, self.book)
        identity = membership.identity
        self._proofs = Proofs(bytes.fromhex(identity.link_secret), identity.cluster)
        self.own_url, self.host = self._own_urls(settings.advertise)
        """Where clients reach this very process, and the host of its links."""
        self.reports = Reports(
            self.brokers,
            place.shard,
            membership.node,
            settings.advertise,
            self.lines,
            clock=wall_clock_ms,
            stopwatch=stopwatch_ms,
        )
        self.reports.start()
        self.keeper = ReplicaKeeper(
            settings,
            place.shard,
            membership,
            self.brokers,
            self.lines,
            self.reports,
            self._make_peer,
            open_catalog=lambda: open_catalog_in(OsFiles(str(settings.data_dir)), settings),
            stopwatch=stopwatch_ms,
        )

    def _make_peer(self, url: str) -> HttpPeer:
        return HttpPeer(
            url, self.place.shard, self._proofs, self.certificates.for_owners, wall_clock_ms
        )

    def sharing(
        self, want: Callable[[TakeSnapshot, SnapshotCallback], None]
    ) -> Callable[[Asgi], Asgi]:
        """Put the calls that copy the replica to other nodes in front of an application. `want` has
        the thread that files take a snapshot."""
        shard, proofs = self.place.shard, self._proofs
        return lambda app: Sharing(app, shard, proofs, self.keeper.snapshots, want, wall_clock_ms)

    def _own_urls(self, advertise: str) -> tuple[str, str]:
        scheme, _, authority = advertise.partition("://")
        host, colon, port = authority.rpartition(":")
        if not colon or not port.isdigit():
            host = authority
        if self.place.count == 1:
            return advertise, host
        return f"{scheme}://{host}:{self.listeners[-1].getsockname()[1]}", host

    def renew_book(self) -> None:
        """Begin a book that nobody listens to: who listened to the last one has ended."""
        self.book = self.lines.book = self.book.renewed()

    def owner_url(self) -> str | None:
        """Where clients reach the owner of the shard; None: nobody is known to be."""
        owner = self.book.owner(self.place.shard)
        # An office that this node has held before it was started again is nobody's now.
        return None if owner is None or owner.url == self.own_url else owner.url

    def on_owner(self, entry: Entry) -> None:
        """Something is known of who owns a shard: say so, if it is new."""
        if self.book.take(entry):
            self._tell(encode_line(entry))

    def unseen_nodes(self) -> int:
        """Other nodes that cannot be reached from this one."""
        return len(self.lines.news.unseen.get(self.membership.node, ()))
