"""One replica of a shard: its logs on the engine, and its setup at each of its stages.

    standby    FollowedLog, filed by `delayserver.recovery.standby`
    owner      ReplicatedLog, filed by a server

Cost: none. Threads: one, the caller's; the objects that are made here say themselves to which
thread they belong.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from delayserver.config import Settings
from delayserver.delivery.replicated_settler import ReplicatedSettler
from delayserver.records.tables import (
    read_office,
    read_owner_address,
    read_seized,
    read_settled_place,
)
from delayserver.recovery.leases_file import LeasesFile, LeasesPlace
from delayserver.recovery.office_leases import OfficeLeases
from delayserver.recovery.standby import Standby
from delayserver.recovery.store import Store, Surroundings
from storage.catalog import Catalog
from storage.directory import Identity
from storage.files import Files
from storage.hour_log import HourLog
from storage.message_log import Durability, MessageLog
from storage.replicated.adoption import Adoptions, nothing_decided
from storage.replicated.engine import EngineLog
from storage.replicated.holder import Holder
from storage.replicated.lease import Follower
from storage.replicated.log import FollowedLog, ReplicatedLog
from storage.replicated.office import OfficeState
from storage.replicated.own import OwnLog
from storage.replicated.settled import SettledLog
from storage.replicated.transactions import SettledTransactions


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """Which replica this is, and where its logs are."""

    node: int
    """The number of the node in the cluster, from 1."""
    rank: int
    """How many replicas of the shard go before this one."""
    identity: Identity
    """The identity of the shard, the same for all replicas."""
    has_own_log: bool
    """Whether the owner's own disk has a group before it is answered."""
    address: str
    """Where the others find this node as the owner."""
    open_log: Callable[[], EngineLog]
    """The shard's log, opened anew."""
    open_settled: Callable[[], EngineLog]
    """The log of the shard's settled deliveries, likewise."""
    open_transactions: Callable[[int], SettledTransactions] | None = None
    """Makes the transactions of the shard, which has that stamp; None: the engine has none."""
    adoptions: Adoptions = nothing_decided
    """The decisions of people where the shard's log has lost its end."""


class Replica:
    """Opens the directory of a replica, as a standby or for the owner."""

    def __init__(self, place: ReplicaPlace, surroundings: Surroundings, settings: Settings) -> None:
        self._place = place
        self._surroundings = surroundings
        self._settings = settings
        self._transactions: SettledTransactions | None = None
        if place.open_transactions is not None:
            self._transactions = place.open_transactions(place.identity.stamp)

    def stand_by(self, files: Files, open_catalog: Callable[[], Catalog]) -> Standby:
        """A standby that files into the directory, which is open. Raises StorageError."""
        place, around = self._place, self._surroundings

        def followed_log(
            files: Files, catalog: Catalog, identity: Identity, settings: Settings
        ) -> FollowedLog:
            return FollowedLog(read_office(catalog))

        store = Store(
            self._settings,
            files,
            open_catalog,
            self._with(followed_log, lambda place: None),
        )
        try:
            settler = store.settler
            assert isinstance(settler, ReplicatedSettler)
            follower = Follower(
                place.node, place.rank, around.stopwatch(), waits_for_owner=place.has_own_log
            )
            standby = Standby(
                store,
                settler,
                place.open_log(),
                place.open_log(),
                self._fence,
                self._settings,
                node=place.node,
                follower=follower,
                address=place.address,
                adoptions=place.adoptions,
                clock=around.clock,
                stopwatch=around.stopwatch,
            )
        except BaseException:
            store.close()
            raise
        return standby

    def reach(self, files: Files, place: OfficeState) -> int:
        """The last seq that this node has on its disk, whose checkpoint stands at `place`: in its
        files, or in its own log. The directory is not open. Raises StorageError."""
        own = self._own_log(files, self._place.identity.stamp)
        return place.next_seq - 1 if own is None else own.reach(place)

    def _own_log(self, files: Files, stamp: int) -> OwnLog | None:
        def make_own() -> MessageLog:
            return MessageLog(
                files,
                stamp=stamp,
                segment_bytes=self._settings.segment_bytes,
                durability=Durability.FSYNC,
            )

        return OwnLog(files, make_own) if self._place.has_own_log else None

    def owned_by(self, holder: Holder) -> Surroundings:
        """The surroundings of a server whose node holds the office."""
        place = self._place

        def replicated_log(
            files: Files, catalog: Catalog, identity: Identity, settings: Settings
        ) -> ReplicatedLog:
            return ReplicatedLog(
                holder,
                place.open_log(),
                stamp=identity.stamp,
                place=read_office(catalog),
                own=self._own_log(files, identity.stamp),
            )

        def told(offset: int) -> None:
            holder.settled_offset = offset

        around = self._with(replicated_log, told, holder)
        return replace(
            around,
            clock=holder.clock,
            may_deliver=holder.may_deliver,
            openers=replace(around.openers, transactions=self._transactions),
        )

    def _fence(self) -> None:
        if self._transactions is not None:
            self._transactions.open()

    def _with(
        self,
        make_log: Callable[[Files, Catalog, Identity, Settings], FollowedLog],
        told: Callable[[int], None],
        holder: Holder | None = None,
    ) -> Surroundings:
        """`holder`: of the owner; None: for a standby."""
        made: list[FollowedLog] = []

        def message_log(
            files: Files, catalog: Catalog, identity: Identity, settings: Settings
        ) -> FollowedLog:
            log = make_log(files, catalog, identity, settings)
            log.settled_place = read_settled_place(catalog)
            log.seized_ms = read_seized(catalog)
            log.kept = (log.place.next_offset, log.settled_place)
            log.owner_address = (
                read_owner_address(catalog) if holder is None else self._place.address
            )
            made.append(log)
            return log

        def place_told(offset: int) -> None:
            made[0].settled_place = offset
            told(offset)

        def settler(dispatch: HourLog, catalog: Catalog, identity: Identity) -> ReplicatedSettler:
            made = ReplicatedSettler(
                dispatch,
                lambda: SettledLog(self._place.open_settled(), identity.stamp),
                read_settled_place(catalog),
                self._surroundings.stopwatch,
                place_told,
                (lambda: None) if holder is None else holder.confirm,
            )
            if holder is not None:
                made.prepare_append()
            return made

        def leases(files: Files, identity: Identity) -> LeasesPlace:
            if holder is None:
                return LeasesFile(files, identity)  # A standby holds none, and asks for none.
            return OfficeLeases(holder, made[0].seized_ms, identity)

        openers = replace(
            self._surroundings.openers,
            identity=self._place.identity,
            message_log=message_log,
            settler=settler,
            leases=leases,
        )
        return replace(self._surroundings, openers=openers)
