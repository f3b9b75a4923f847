"""A node on standby: it follows the log, and answers, until it holds the office or is told to stop.

    stand_by ──▶ open the replica ──▶ Candidacy: follow (a thread) and front ──▶ OwnerNode
                                             └── told to stop ──▶ None

The office may come though the process was told to stop, since the thread that follows claims by
itself. Then it is given away again, before there is a server that would have to hear of it.

Cost: that of its parts. Threads: the event loop; `_tell_owner`, `_on_claimed` and `_on_end` are
called in the one that follows.
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

import structlog

from delayserver.api.moving import Moving
from delayserver.clocks import wall_clock_ms
from delayserver.cluster.follow import Follow
from delayserver.cluster.forwarding import Tunnel
from delayserver.cluster.membership import Address, entry_of
from delayserver.cluster.sharing import SnapshotCallback, TakeSnapshot
from delayserver.recovery.replica import Replica, ReplicaPlace
from delayserver.recovery.standby import LAG_MAX_MS, Standby
from delayserver.security.tokens import TokenTable
from delayserver.serve.node import NodeShard
from delayserver.serve.owner import OwnerNode
from delayserver.serve.standby import StandbyFront
from delayserver.server.server import of_this_machine
from delayserver.server.token_keeper import open_tokens
from delayserver.shards.exposition import standby_metrics
from delayserver.shards.map import ClusterMap
from delayserver.shards.meeting import BACKLOG as LINK_BACKLOG
from delayserver.shards.meeting import TcpMeeting
from storage.errors import NoPeerError
from storage.files import OsFiles
from storage.replicated.holder import Holder

CAUGHT_UP_RECORDS: Final = 10_000
"""A standby that is not further behind can take over soon."""
TOKENS_S: Final = 1.0

log = structlog.get_logger()


class Awaited:
    """A standby waits for the office, or to be told to stop; the other one may come as
    well, as long as it is not a server."""

    def __init__(self) -> None:
        self.owner: OwnerNode | None = None
        self.is_stopping = False
        self._event = asyncio.Event()

    def came(self, owner: OwnerNode) -> None:
        """The office is held."""
        self.owner = owner
        self._event.set()

    def stop(self) -> None:
        """It is told to stop."""
        self.is_stopping = True
        self._event.set()

    async def wait(self) -> None:
        """Until one of the two is so."""
        await self._event.wait()


class Stand(NamedTuple):
    """How a node can become the owner."""

    address: Address
    """Where the others would find it."""
    meeting: TcpMeeting
    replica: Replica


async def stand_by(
    node: NodeShard, on_open: Callable[[], None], moving: Moving
) -> OwnerNode | None:
    """Follow, and answer at the listeners of `node`, which listen already, until it holds the
    office; None: it was told to stop. `on_open` is called once it can follow. `moving`: where the
    connections of clients are before it, and behind it if the office is held.

    Raises StorageError, AccessError."""
    node.renew_book()
    directory = node.place.data_dir
    files = OsFiles(str(directory))
    tokens = open_tokens(node.settings, files, directory, wall_clock_ms())
    stand = _prepare(node)
    opened = await asyncio.to_thread(node.keeper.open_sound)
    on_open()
    return await Candidacy(node, stand, opened, tokens).run(moving)


def _prepare(node: NodeShard) -> Stand:
    settings, shard, engine = node.settings, node.place.shard, node.brokers
    membership, identity = node.membership, node.membership.identity
    link = _bind(settings.host, settings.link_port and settings.link_port + shard)
    meeting = TcpMeeting(link, node.book, bytes.fromhex(identity.link_secret), identity.cluster)
    # From a claim on others come: they wait until this process serves.
    link.listen(LINK_BACKLOG)
    own_link = f"{node.host}:{link.getsockname()[1]}"
    address = Address(membership.node, node.own_url, own_link, tunnels=True)
    place = ReplicaPlace(
        membership.number,
        node.keeper.placement.rank(shard, membership.node),
        membership.of_shard(shard),
        identity.durability == "fsync",
        address.pack(),
        partial(engine.log, shard),
        partial(engine.settled, shard),
        partial(engine.transactions, shard),
        node.keeper.adoptions,
    )
    replica = Replica(place, of_this_machine(settings, shard), settings)
    node.keeper.begin(replica, node.own_url, node.owner_url)
    return Stand(address, meeting, replica)


class Candidacy:
    """One time on standby, on the event loop that runs."""

    def __init__(
        self, node: NodeShard, stand: Stand, opened: Standby | None, tokens: TokenTable
    ) -> None:
        """`opened`: the replica; None: there is none to go on with."""
        self._node = node
        self._stand = stand
        self._tokens = tokens
        self._shard = node.place.shard
        self._loop = asyncio.get_running_loop()
        self._office = Awaited()
        self._ended = asyncio.Event()
        self._has_begun_with = opened is not None
        self._follow = Follow(
            opened, node.keeper, self._tell_owner, self._on_claimed, self._on_end, node.fatal
        )
        self._map = ClusterMap(
            None, node.settings, wall_clock_ms, lambda: node.lines.news.machines, node.book
        )
        # A call that is passed on has a second descriptor, and the budget has one for each client.
        clients_max = max(1, node.settings.connections_max // 2)
        self._front = StandbyFront(
            node.settings.model_copy(update={"connections_max": clients_max}),
            shard=self._shard,
            owner=node.owner_url,
            has_replica=lambda: self._follow.onlooker is None,
            is_ready=self._is_ready,
            shard_map=self._map,
            metrics=self._metrics,
            tokens=tokens,
            clock=wall_clock_ms,
            before=node.sharing(self._want),
            tunnel=self._tunnel,
        )

    async def run(self, moving: Moving) -> OwnerNode | None:
        """Until it holds the office; None: it was told to stop. See `stand_by`."""
        node, office, front = self._node, self._office, self._front
        self._on_news()
        node.lines.begin(office.stop, self._on_news)
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, office.stop)
        refreshing = self._loop.create_task(_refresh(self._tokens))
        self._follow.start()
        await front.begin(node.listeners, node.certificates, moving.take())
        node.book.on_change(lambda shard: front.owner_changed())
        if self._has_begun_with or node.keeper.is_placed:
            log.info("on standby", shard=self._shard, node=node.membership.node)
        try:
            await office.wait()
            if office.is_stopping:
                self._follow.end()
            await front.close(None if office.is_stopping else moving)
            await self._ended.wait()
            if not office.is_stopping:
                return office.owner
            if office.owner is not None:
                # It claimed meanwhile, and there was no server yet that would have heard it.
                await asyncio.to_thread(office.owner.leave, None)
            return None
        finally:
            refreshing.cancel()
            node.lines.end()
            for number in (signal.SIGINT, signal.SIGTERM):
                self._loop.remove_signal_handler(number)

    # ── from the thread that follows ───────────────────────────────────────────────────────────

    def _tell_owner(self, epoch: int, address: str) -> None:
        entry = entry_of(self._shard, epoch, address)
        self._loop.call_soon_threadsafe(self._node.on_owner, entry)

    def _on_claimed(self, holder: Holder) -> None:
        owner = OwnerNode(self._node, *self._stand, holder)
        self._loop.call_soon_threadsafe(self._office.came, owner)

    def _on_end(self) -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed already.
            self._loop.call_soon_threadsafe(self._ended.set)

    # ── questions of the front, and its news ───────────────────────────────────────────────────

    def _on_news(self) -> None:
        node = self._node
        if (standby := self._follow.standby) is not None:
            node.keeper.instruct(standby)
        if (owner := node.lines.news.owners.get(self._shard)) is not None:
            node.on_owner(entry_of(self._shard, *owner))
        self._map.changed()

    def _is_ready(self) -> bool:
        if (onlooker := self._follow.onlooker) is not None:
            return onlooker.is_there
        standby = self._follow.standby
        if standby is None or standby.lag_ms > LAG_MAX_MS:
            return False
        return (standby.lag_records or 0) <= CAUGHT_UP_RECORDS

    def _want(self, take: TakeSnapshot, told: SnapshotCallback) -> None:
        standby = self._follow.standby
        if standby is None:
            told(None, NoPeerError(self._shard, []))
        else:
            standby.want_snapshot(take, told)

    def _tunnel(self) -> Tunnel | None:
        owner = self._node.book.owner(self._shard)
        if owner is None or not owner.tunnels:
            return None
        return partial(self._stand.meeting.tunnel, self._shard)

    def _metrics(self) -> str:
        standby = self._follow.standby
        return standby_metrics(
            self._shard,
            lag_records=None if standby is None else standby.lag_records,
            lag_s=None if standby is None else standby.lag_ms / 1000,
            unseen_nodes=self._node.unseen_nodes(),
            clock_differs=standby is not None and standby.clock_differs,
            has_replica=self._follow.onlooker is None,
            besides=[(name, text, value()) for name, text, value in self._node.figures],
        )


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(
            f"cannot listen for other nodes on {host}:{port}: {error.strerror}; choose another "
            "--link-port"
        ) from error
    listener.set_inheritable(False)
    return listener


async def _refresh(tokens: TokenTable) -> None:
    while True:
        await asyncio.sleep(TOKENS_S)
        with contextlib.suppress(OSError):
            tokens.refresh(wall_clock_ms())
