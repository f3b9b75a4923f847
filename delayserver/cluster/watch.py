"""A node's view of its cluster while it runs: the nodes that are there, the progress of their
replicas, people's orders; and the consequences for one of its shards.

    the cluster's log ──▶ drained nodes, shards to be moved ───┐
     progress of replicas, each with a note ──▶ living nodes ──┴─▶ News ──▶ processes of the node

A replica reports every few seconds how far it is (`ReplicaNote`), and the brokers keep that. The
report makes its node one that is there; so a process that has no replica reports that. The nodes
that its node can reach (`sight`) stand there, too, so that all see alike which node is apart.

**A replica that is not placed any more** (`placement`) is kept until all that are to have one are
in step, and at least LEAVE_MS after it has begun to say that it leaves (`Parting`). Nodes may see
different placements for some seconds. But no node counts on a replica that says that it leaves, and
a report is heard, or is too old to count, within LEAVE_MS: so two replicas never leave because
each of them counts on the other.

Cost: two questions to the brokers a second; every few seconds one for each node and each shard.
Threads: `ClusterObserver` and `Parting` belong to the one who moves them, the rest are functions
without state.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, Literal

import msgspec
import structlog

from delayserver.cluster.placement import Placement
from delayserver.shards.map import Machines
from delayserver.times import format_time
from delayserver.wire.operations import NodeDocument, ReplicaDocument
from storage.errors import EngineError
from storage.replicated.meta import ClusterMeta, MetaLog, MoveRecord

if TYPE_CHECKING:
    from storage.replicated.engine import EngineLog
    from storage.replicated.kafka import KafkaEngine

LOOK_S: Final = 1.0
PROGRESS_S: Final = 3.0
SEEN_MS: Final = 15_000
"""A node that has said nothing for so long is away."""
IN_STEP_MS: Final = 8_000
"""A replica that has said nothing, or filed nothing, for so long may not be in step."""
IN_STEP_RECORDS: Final = 2_000
HEARD_MS: Final = 6_000
"""A note that was not there at the last look, not longer ago than this, counts from now on: two
looks at replicas."""
LEAVE_MS: Final = 25_000
"""A replica that is not placed any more says so for so long before it goes. Others may count on it
until they hear of it, and then for as long as a note counts, and the news that have it."""
assert LEAVE_MS > HEARD_MS + 2 * IN_STEP_MS

Stage = Literal["replica", "copying", "leaving", "passing"]
"""A process's hold on its shard: a replica; none yet; one that it need not have any more; none,
since it only passes calls on."""

log = structlog.get_logger()


class ReplicaNote(msgspec.Struct, frozen=True):
    """A process's report on its replica of a shard."""

    at_ms: int
    """When: by its node's clock as it is said, and by the stopwatch of the machine that looks in
    its news (`Heard`)."""
    url: str
    """Where clients reach its node."""
    read_offset: int
    """The node has read the shard's log up to here."""
    settled_offset: int
    """Its files hold the log of settled deliveries up to here, on the disk."""
    process_url: str = ""
    """Where other nodes reach the very process that has the replica; empty: it has none to copy."""
    lag_ms: int = 0
    """All that was in the shard's log so long before `at_ms` is filed."""
    unseen: list[str] = []
    """Nodes that report that they are there, and cannot be reached from this one."""
    stage: Stage = "replica"
    epoch: int = 0
    """In which it owns the shard; 0: it does not."""
    address: str = ""
    """Where it is found as the owner, as its claim says it."""
    stopped_epoch: int = 0
    """The last epoch that it has read, where it has stopped: the log has lost its end, and this
    replica goes further; people decide. 0: it has not stopped."""
    stopped_seq: int = 0
    """Then: the last seq that its node has on its disk."""

    @property
    def is_stopped(self) -> bool:
        """Whether it waits for people to decide."""
        return self.stopped_epoch > 0

    def pack(self) -> str:
        """As text."""
        return msgspec.json.encode(self).decode()


def unpack_note(text: str) -> ReplicaNote | None:
    """Reads the form that `pack` wrote; None: it is none."""
    try:
        return msgspec.json.decode(text, type=ReplicaNote)
    except msgspec.DecodeError:
        return None


class ReplicaState(msgspec.Struct, frozen=True):
    """How far the replica of a shard is."""

    node: str
    checkpoint_offset: int
    note: ReplicaNote
    lag_records: int
    """Records that it has not read, as of the last look."""

    def is_fresh(self, now_ms: int) -> bool:
        """Whether it has said so just now."""
        return now_ms - self.note.at_ms <= IN_STEP_MS

    def is_in_step(self, now_ms: int) -> bool:
        """Whether it can take over at once."""
        if self.note.stage not in ("replica", "leaving"):
            return False
        is_fresh = self.is_fresh(now_ms)
        is_filed = self.note.lag_ms <= IN_STEP_MS and not self.note.is_stopped
        return is_fresh and is_filed and self.lag_records <= IN_STEP_RECORDS


class News(msgspec.Struct, frozen=True, tag="news"):
    """The state of the cluster, as far as it is known."""

    at_ms: int = 0
    """When, by the stopwatch of the machine, which all processes of the node share; 0: never."""
    machines: Machines = Machines()
    replicas: dict[int, list[ReplicaState]] = {}
    """The replicas of each shard."""
    drained: list[str] = []
    forgotten: list[str] = []
    nodes: list[str] = []
    """All that were ever there, in the order of their numbers."""
    moves: dict[int, MoveRecord] = {}
    placement: Placement = Placement()
    owners: dict[int, tuple[int, str]] = {}
    """For each shard that a node says it owns: the latest epoch, and its owner's address."""
    unseen: dict[str, list[str]] = {}
    """For each node: the living nodes that it cannot reach."""


class Heard:
    """When a node has heard each note: by its own stopwatch, whatever any clock shows.

    A note says more than before if its text is another one; it was said since the look before.
    After a long pause between two looks it counts from the first of them, since it may be as old.
    One that was there when the node began to look may be older still: nobody counts as in step by
    it, and its node counts as there until it has had the time to say more."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], tuple[str, int]] = {}
        self._looked_ms: int | None = None

    def take(
        self, texts: Mapping[tuple[str, int], str], now_ms: int
    ) -> dict[tuple[str, int], ReplicaNote]:
        """The notes, by node and shard, as they stand in the news. `texts`: all that the brokers
        have now."""
        before_ms, self._looked_ms = self._looked_ms, now_ms
        since_ms = now_ms
        if before_ms is not None and now_ms - before_ms > HEARD_MS:
            since_ms = before_ms
        notes: dict[tuple[str, int], ReplicaNote] = {}
        for whose, text in texts.items():
            known = self._known.get(whose)
            if known is None:
                known = text, now_ms - IN_STEP_MS - 1
            elif known[0] != text:
                known = text, since_ms
            self._known[whose] = known
            if (note := unpack_note(text)) is not None:  # else it was said by somebody else
                notes[whose] = msgspec.structs.replace(note, at_ms=known[1])
        return notes


class ClusterObserver:
    """Looks, again and again."""

    def __init__(
        self,
        engine: "KafkaEngine",
        meta: MetaLog,
        shards: int,
        *,
        clock: Callable[[], int],
        stopwatch: Callable[[], int],
    ) -> None:
        """`clock` gives ms since the epoch, for people; `stopwatch` ms that only go on, the same
        for all processes of the machine."""
        self._brokers = engine
        self._meta = meta
        self._clock = clock
        self._stopwatch = stopwatch
        self._heard = Heard()
        self._logs: list[EngineLog] = [engine.log(shard) for shard in range(shards)]
        self._replicas: dict[int, list[ReplicaState]] = {}
        self._looked_ms: int | None = None

    def look(self) -> News | None:
        """The present view; None: the brokers do not answer. Raises StorageError."""
        try:
            meta = self._meta.read()
            now_ms = self._stopwatch()
            if self._looked_ms is None or now_ms - self._looked_ms >= PROGRESS_S * 1000:
                self._look_at_replicas(meta, now_ms)
                self._looked_ms = now_ms
        except EngineError as error:
            log.debug("the brokers do not answer", error=str(error))
            return None
        return news_of(meta, self._replicas, now_ms, self._clock())

    def _look_at_replicas(self, meta: ClusterMeta, now_ms: int) -> None:
        nodes = [node for node in meta.nodes if node not in meta.forgotten]
        progress = self._brokers.noted_progress(nodes)
        ends = [shard_log.end() for shard_log in self._logs]
        texts = {
            (node, shard): text
            for node, places in progress.items()
            for shard, (_, text) in places.items()
        }
        notes = self._heard.take(texts, now_ms)
        found: dict[int, list[ReplicaState]] = {}
        for node, places in progress.items():
            for shard, (offset, _) in places.items():
                if (note := notes.get((node, shard))) is None:
                    continue
                end = ends[shard] if shard < len(ends) else None
                lag_records = max(0, (end or 0) - note.read_offset)
                found.setdefault(shard, []).append(ReplicaState(node, offset, note, lag_records))
        self._replicas = found

    def close(self) -> None:
        """Let go of the connections."""
        for shard_log in self._logs:
            shard_log.close()


def news_of(
    meta: ClusterMeta, replicas: dict[int, list[ReplicaState]], now_ms: int, wall_ms: int
) -> News:
    """Returns the news that the processes of a node are told. `replicas`: the reports on each
    shard; `now_ms`, `wall_ms`: the readings of the machine's stopwatch and clock."""
    notes: dict[str, ReplicaNote] = {}
    for replica in (one for of_shard in replicas.values() for one in of_shard):
        known = notes.get(replica.node)
        if known is None or replica.note.at_ms > known.at_ms:
            notes[replica.node] = replica.note
    nodes = [
        NodeDocument(
            node,
            note.url,
            "serving" if now_ms - note.at_ms <= SEEN_MS else "away",
            format_time(wall_ms - (now_ms - note.at_ms)),
        )
        for node, note in sorted(notes.items())
    ]
    owners = {
        shard: max(((one.note.epoch, one.note.address) for one in of_shard), default=(0, ""))
        for shard, of_shard in replicas.items()
    }
    replicas = {
        shard: [one for one in of_shard if one.note.stage != "passing"]
        for shard, of_shard in replicas.items()
    }
    documents = {
        shard: [ReplicaDocument(one.node, one.lag_records) for one in of_shard]
        for shard, of_shard in replicas.items()
    }
    return News(
        now_ms,
        Machines(nodes, documents),
        replicas,
        sorted(meta.drained),
        sorted(meta.forgotten),
        list(meta.nodes),
        meta.moves,
        placement=Placement.of(meta),
        owners={shard: owner for shard, owner in owners.items() if owner[0]},
        unseen={node: note.unseen for node, note in notes.items() if note.unseen},
    )


def there(news: News) -> dict[str, str]:
    """The nodes that report that they are there, and the URL of each."""
    return {one.node: one.url for one in news.machines.nodes if one.state == "serving"}


def seen_from(news: News, own: str, unseen: list[str]) -> News:
    """The same, with the present view of node `own`; its notes report it later."""
    return msgspec.structs.replace(news, unseen={**news.unseen, own: unseen})


def apart(news: News) -> set[str]:
    """The nodes that are there and reach fewer than half of the others that are there.

    So a node is apart unless it makes a majority with those that it reaches: of all parts of a
    network that has come apart one at most is not, and of two nodes, or of four in two halves,
    none. A way counts if neither end says that it is closed: who can reach others, but cannot be
    reached, gets no calls passed on."""
    nodes = there(news).keys()

    def reaches(one: str, other: str) -> bool:
        return other not in news.unseen.get(one, ()) and one not in news.unseen.get(other, ())

    return {
        node
        for node in nodes
        if 2 * sum(reaches(node, other) for other in nodes - {node}) < len(nodes) - 1
    }


def choose(news: News, shard: int, own: str, epoch: int, *, may_balance: bool) -> str | None:
    """To whom the owner of a shard, `own` in `epoch`, is to give it; None: it keeps it.

    People come first: a move of this epoch, then that the node is to own nothing. A node that is
    apart gives it to one that is not, and one that is not placed for the shard to one that is.
    `may_balance`: else a node that goes before it, is in step and not apart gets it."""
    in_step = _in_step(news, shard)
    placed = news.placement.nodes(shard)
    order = news.placement.order(shard, {*in_step, own})
    able = in_step - {own} - set(news.drained)
    others = [node for node in order if node in able]
    parted = apart(news)
    near = [node for node in others if node not in parted]
    move = news.moves.get(shard)
    if move is not None and move.to not in placed:
        move = None  # It was asked for while the node was to have a replica.
    if move is not None and move.epoch == epoch and move.to != own:
        return move.to if move.to in in_step else None
    if own in news.drained:
        return next(iter(near or others), None)
    if own in parted and near:
        return near[0]
    if move is not None and (move.to, move.epoch) == (own, epoch - 1):
        return None  # It came here because somebody wanted it here.
    if not near or near[0] not in placed or order.index(near[0]) > order.index(own):
        return None
    return near[0] if may_balance or own not in placed else None


def waits_for_people(news: News, shard: int, own: str, epoch: int) -> bool:
    """Whether the replica of another node has more than the log, in which `epoch` was read last:
    whoever claims the shard now goes on without that."""
    return any(
        one.note.stopped_epoch >= max(epoch, 1)
        and one.node != own
        and news.at_ms - one.note.at_ms <= SEEN_MS
        for one in news.replicas.get(shard, ())
    )


def places_back(news: News, shard: int, own: str) -> int:
    """How many places behind its own a node goes when the shard is to be claimed: behind all, if
    it is apart and another one that is in step is not. It is a delay and no more, since that other
    one may be the owner that was lost."""
    parted = apart(news)
    others = _in_step(news, shard) - parted - {own}
    return len(news.nodes) if own in parted and others else 0


def _in_step(news: News, shard: int) -> set[str]:
    return {one.node for one in news.replicas.get(shard, ()) if one.is_in_step(news.at_ms)}


class Parting:
    """Decides whether a node has a replica of a shard, and when it may drop one that it has."""

    def __init__(self, shard: int, own: str) -> None:
        self._number = shard
        self._own = own
        self._since_ms: int | None = None
        """Since when the replica is to go."""

    def is_placed(self, placement: Placement) -> bool:
        """Whether the node is to have a replica."""
        # A node that is forgotten, and runs, keeps its replica where there are not enough others.
        return placement.has(self._number, self._own) or not placement.is_whole

    def judge(self, placement: Placement, news: News, present_ms: int) -> Stage:
        """The stage that its process should have now: a replica; one that is kept for a while, and
        says that it leaves; none.

        `present_ms`: the time on the stopwatch. A process that has a replica asks again and again,
        and reports the result."""
        if self.is_placed(placement):
            self._since_ms = None
            return "replica"
        if self._since_ms is None:
            self._since_ms = present_ms
        if is_old(news, present_ms) or present_ms - self._since_ms < LEAVE_MS:
            return "leaving"
        staying = {
            one.node
            for one in news.replicas.get(self._number, ())
            if one.is_in_step(news.at_ms) and one.note.stage == "replica"
        }
        return "passing" if staying.issuperset(placement.nodes(self._number)) else "leaving"


def is_old(news: News, present_ms: int) -> bool:
    """Whether the brokers have not answered for so long that nothing irrevocable is to be done."""
    return present_ms - news.at_ms > IN_STEP_MS


def kept_by_two(
    news: News, shard: int, present_ms: int, place: Callable[[ReplicaState], int]
) -> int | None:
    """The offset that two replicas have behind them which are there just now, and stay; None: there
    is one at most, or it is not known. A disk that nobody has heard of for a while may be lost."""
    if is_old(news, present_ms):
        return None
    offsets = [
        place(one)
        for one in news.replicas.get(shard, ())
        if one.is_fresh(news.at_ms) and one.note.stage == "replica"
    ]
    offsets.sort(reverse=True)
    return offsets[1] if len(offsets) > 1 else None


class Deletable:
    """Finds the part of a log that may be deleted (R6). Two replicas have had that part behind them
    for `kept_ms`, and two have it behind them now."""

    def __init__(self, kept_ms: int) -> None:
        self._kept_ms = kept_ms
        self._samples: list[tuple[int, int]] = []
        """When two had a place behind them, in order."""

    def before(self, place: int | None, present_ms: int) -> int | None:
        """The offset before which records may be deleted; None: none may. `place`: the offset that
        two replicas have behind them now (`kept_by_two`)."""
        if place is None:
            return None
        self._samples.append((present_ms, place))
        old = [one for one in self._samples if present_ms - one[0] >= self._kept_ms]
        del self._samples[: max(0, len(old) - 1)]
        return min(max(offset for _, offset in old), place) if old else None
