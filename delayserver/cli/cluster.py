"""cluster create, status, move, drain, forget, adopt: a cluster whose logs stand on brokers.

What nodes are to do is said in a log of the cluster, which all of them read every second; `move`,
`drain` and `adopt` wait until it is done, and see that in the logs of the shards.

They talk to the brokers, and to no server: a cluster is made before there is one, and can be looked
at when none runs. confluent-kafka, an extra, is imported when a command needs it.

Exit status: 0 done, 1 the cluster was made otherwise, or its topics are not as they have to be, 2
it could not be done.

Cost: some requests to the brokers; `status` reads the last records of each shard's log besides, in
half a second a shard. Threads: those of the client.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from delayserver.cli.output import help_text, make_console, print_json, progress_bar, rows
from delayserver.cli.session import CannotRun, CommandError, JsonOption, error_exit
from storage.errors import ClusterDiffersError, ClusterMissingError, OffsetRangeError, StorageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from storage.check import Progress
    from storage.replicated.engine import EngineLog
    from storage.replicated.envelope import LogRecord
    from storage.replicated.kafka import KafkaEngine
    from storage.replicated.meta import ClusterIdentity, MetaLog

WRONG_STATUS: Final = 1
LOOK_S: Final = 0.5
REST_S: Final = 2.0
"""Whoever owns a shard writes more often."""
REACH_COLUMNS: Final = ("node", "has all up to seq", "state", "heard")
SHARD_COLUMNS: Final = ("shard", "owner", "epoch", "address", "heard", "end", "placed", "lag")
NODE_COLUMNS: Final = ("node", "number", "zone", "owns", "replicas", "lag")
HELP = """A cluster of servers whose logs stand on Kafka brokers.

A cluster is made once, with a number of shards that does not change. It needs the extra `kafka` of
this package."""

ClusterOption = Annotated[
    str,
    typer.Option(
        "--cluster",
        metavar="URL",
        envvar="DELAYSERVER_CLUSTER",
        help="Brokers and name: kafka://HOST:PORT[,HOST:PORT...]/NAME.".replace("[", r"\["),
        show_default=False,
    ),
]
KafkaConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--kafka-config",
        metavar="FILE",
        envvar="DELAYSERVER_KAFKA_CONFIG",
        help="What the brokers want of their clients (SASL, TLS): key=value lines of librdkafka.",
        show_default=False,
    ),
]
ShardsOption = Annotated[
    int,
    typer.Option(
        metavar="NUMBER",
        min=1,
        max=256,
        help="How many shards. It never changes: one or two for each core that will ever be there.",
        show_default=False,
    ),
]
ReplicasOption = Annotated[
    int,
    typer.Option(
        metavar="NUMBER",
        min=2,
        max=1000,
        help="How many nodes have a replica of each shard, in different zones as far as there are "
        "zones. It never changes.",
    ),
]
ReplicationOption = Annotated[
    int, typer.Option(metavar="NUMBER", min=1, help="How many brokers have each record.")
]
DurabilityOption = Annotated[
    str,
    typer.Option(
        metavar="os|fsync|fsync-all",
        help="What an answer waits for: the memory of most brokers; that, and the owner's disk; "
        "the disks of all brokers.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    group = typer.Typer(help=help_text(HELP), no_args_is_help=True)
    app.add_typer(group, name="cluster")
    group.callback()(_root)
    url = "kafka://b1:9092,b2:9092,b3:9092/delays"
    examples = (
        f"cluster create --cluster {url} --shards 16",
        f"cluster create --cluster {url} --shards 16 --kafka-config client.properties",
    )
    group.command("create", help=help_text(create.__doc__, *examples))(create)
    examples = (f"cluster status --cluster {url}", f"cluster status --cluster {url} --json")
    group.command("status", help=help_text(status.__doc__, *examples))(status)

    for command, example in (
        (move, f"cluster move 3 n2 --cluster {url}"),
        (drain, f"cluster drain n1 --cluster {url}"),
        (forget, f"cluster forget n1 --cluster {url}"),
        (adopt, f"cluster adopt 3 --from n1 --cluster {url}"),
    ):
        group.command(command.__name__, help=help_text(command.__doc__, example))(command)


def _root() -> None:
    pass


def create(
    cluster: ClusterOption,
    shards: ShardsOption,
    replicas: ReplicasOption = 3,
    replication: ReplicationOption = 3,
    durability: DurabilityOption = "fsync",
    kafka_config: KafkaConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make the topics of a cluster, and write down what it is.

    What is there already stays as it is: run it again after it was interrupted. A cluster that was
    made with another number of shards or of replicas is refused.

    Status 0: it is there. 1: it is there, and is another one, or its topics are not as they have to
    be. 2: it could not be made."""
    import os

    chosen = _durability(durability)
    with _cluster_errors(as_json), _engine(cluster, kafka_config) as engine:
        from storage.replicated.meta import MetaLog, make_identity

        identity = make_identity(engine.url.name, shards, chosen, os.urandom, replicas)
        with contextlib.closing(engine.meta()) as log:
            if engine.has_topics():
                # Before topics are made for it.
                MetaLog(log).refuse_another(identity)
            made = engine.create(shards, replication, flushes=identity.flushes)
            problems = engine.check(shards, flushes=identity.flushes, replication=replication)
            if problems:
                listed = "\n  ".join(problems)
                raise CommandError(
                    f"The topics of {engine.url.name} are not as they have to be:\n  {listed}\n"
                    "Correct them with the tools of the brokers, then run this again."
                )
            found, is_new = MetaLog(log).create(identity)
    answer = {
        "cluster": found.cluster,
        "shards": found.shards,
        "replicas": _limit(found),
        "durability": found.durability,
        "is_new": is_new,
        "topics_made": made,
    }
    if as_json:
        print_json(answer)
        return
    topics = f"Topics made: {', '.join(made)}." if made else "Its topics were there."
    state = "was made" if is_new else "was there already"
    typer.echo(
        f"The cluster {found.cluster} {state}: {found.shards} shards on "
        f"{answer['replicas'] or 'all'} nodes each, durability {found.durability}. {topics}"
    )


def status(
    cluster: ClusterOption,
    whole: Annotated[
        bool,
        typer.Option(
            "--whole",
            help="Read the logs as far back as they go, to find where owners can be reached that "
            "took their shards long ago.",
        ),
    ] = False,
    kafka_config: KafkaConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the shards of a cluster with their owners, its nodes, and what is wrong with its topics.

    Of each shard: who wrote to its log last as its owner, where that node is reached (if it took
    the shard a short time ago, else see --whole), where the log ends, which nodes are to have it,
    and by how many records the checkpoint of each node's replica is behind. A replica on a node
    that is not to have it goes when those that are have come so far.

    Status 0: all is well. 1: the topics are not as they have to be. 2: it could not be read."""
    with _cluster_errors(as_json), _engine(cluster, kafka_config) as engine:
        from delayserver.api.cluster.placement import Placement
        from storage.replicated.meta import MetaLog

        if not engine.has_topics():
            raise ClusterMissingError(engine.meta().name)
        with contextlib.closing(engine.meta()) as log:
            meta = MetaLog(log)
            identity, nodes = meta.read_cluster()
            placement, zones = Placement.of(meta.read()), meta.read().zones
        with progress_bar("", quiet=as_json) as progress:
            progress("asking the brokers", 0, 0)
            problems = engine.check(identity.shards, flushes=identity.flushes)
            committed = _replicas(engine, nodes)
            shards = [
                {
                    **_shard(
                        engine, shard, nodes, committed, _Bar(progress, shard, identity), whole
                    ),
                    "placed": placement.nodes(shard),
                }
                for shard in range(identity.shards)
            ]
    answer: dict[str, Any] = {
        "cluster": identity.cluster,
        "durability": identity.durability,
        "replicas": _limit(identity),
        "shards": shards,
        "nodes": [
            {**_node(name, number, shards), "zone": zones[name] or None}
            for name, number in nodes.items()
        ],
        "problems": problems,
    }
    if as_json:
        print_json(answer)
    else:
        make_console().print(*_rendered(answer), sep="\n")
    if problems:
        raise typer.Exit(WRONG_STATUS)


NodeArgument = Annotated[str, typer.Argument(metavar="NODE", show_default=False)]
WaitOption = Annotated[
    float,
    typer.Option("--wait", metavar="SECONDS", min=0, help="How long to wait until it is done."),
]


def move(
    shard: Annotated[int, typer.Argument(metavar="SHARD", min=0, show_default=False)],
    node: NodeArgument,
    cluster: ClusterOption,
    wait: WaitOption = 30.0,
    kafka_config: KafkaConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have the owner of a shard give it to another node.

    It does so as soon as the replica of that node is in step: calls that come meanwhile wait for
    about a second. Whoever takes it over while this waits is asked too, and nobody later.

    A node that has no replica of the shard cannot own it: `cluster status` shows which are to.

    Status 0: the node owns it. 1: not within the time, but it may come. 2: it could not be asked.
    """
    from delayserver.api.cluster.placement import Placement
    from storage.replicated.meta import MoveRecord

    with (
        _cluster_errors(as_json),
        _engine(cluster, kafka_config) as engine,
        contextlib.closing(engine.meta()) as log,
    ):
        meta = _meta(log)
        identity, nodes = meta.read_cluster()
        if not shard < identity.shards:
            raise CommandError(f"There are {identity.shards} shards, from 0.")
        _must_be_node(node, nodes)
        placed = Placement.of(meta.read()).nodes(shard)
        if node not in placed:
            raise CommandError(
                f"{node} is to have no replica of shard {shard}, so it cannot own it: "
                f"{', '.join(placed)} can."
            )
        if _owner_of(engine, shard, nodes)[0] is None:
            raise CommandError(f"Nobody owns shard {shard} now: who is in step claims it.")
        asked_epoch: int | None = None

        def owns_it() -> bool:
            # Another may have taken it over in between: what the one before was asked is over.
            nonlocal asked_epoch
            owner, epoch = _owner_of(engine, shard, nodes)
            if owner not in (node, None) and epoch != asked_epoch:
                _meta(log).say(MoveRecord(shard, node, epoch))
                asked_epoch = epoch
            return owner == node

        done = _wait_until(wait, as_json, f"shard {shard}", owns_it)
    _tell(as_json, done, f"shard {shard} is owned by {node}", {"shard": shard, "node": node})


def drain(
    node: NodeArgument,
    cluster: ClusterOption,
    wait: WaitOption = 60.0,
    kafka_config: KafkaConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have a node give all its shards to others, and claim none until it is started again.

    Then it may be stopped, to be upgraded for instance, and no call fails. Started again it is as
    it was.

    Status 0: it owns none. 1: not within the time, but it may come. 2: it could not be asked."""
    from storage.replicated.meta import DrainRecord

    with _cluster_errors(as_json), _engine(cluster, kafka_config) as engine:
        with contextlib.closing(engine.meta()) as log:
            identity, nodes = _meta(log).read_cluster()
            _must_be_node(node, nodes)
            _meta(log).say(DrainRecord(node))

        def owns_none() -> bool:
            owners = (_owner_of(engine, one, nodes)[0] for one in range(identity.shards))
            return all(owner != node for owner in owners)

        done = _wait_until(wait, as_json, f"the shards of {node}", owns_none)
    _tell(as_json, done, f"{node} owns no shard", {"node": node})


def forget(
    node: NodeArgument,
    cluster: ClusterOption,
    kafka_config: KafkaConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say that a node does not come back: its disk is lost, or it is needed no more.

    Nobody counts on its replicas any more; other nodes get them, if not all have one already. A
    node of that name that is started nevertheless is one again.

    Status 0: it is said. 2: it could not be said."""
    from storage.replicated.meta import ForgetRecord

    with (
        _cluster_errors(as_json),
        _engine(cluster, kafka_config) as engine,
        contextlib.closing(engine.meta()) as log,
    ):
        _, nodes = _meta(log).read_cluster()
        _must_be_node(node, nodes)
        _meta(log).say(ForgetRecord(node))
    _tell(as_json, True, f"{node} is forgotten", {"node": node})


def adopt(
    shard: Annotated[int, typer.Argument(metavar="SHARD", min=0, show_default=False)],
    node: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="NODE",
            help="Whose replica the log goes on behind.",
            show_default=False,
        ),
    ],
    cluster: ClusterOption,
    yes: Annotated[
        bool,
        typer.Option("--yes", help="Do not ask, and go on where another replica has more, too."),
    ] = False,
    wait: WaitOption = 60.0,
    kafka_config: KafkaConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let the log of a shard that has lost its end go on behind what one node has.

    When all brokers have lost power, a log may end before what the replicas have filed. They stop
    then, and say so. Start all nodes that can be started, then name the one whose replica reaches
    furthest: the shard goes on with all that it has. A replica that has something else is set aside
    on its disk, and copied anew.

    It is refused where the node has lost nothing or is not there, and, without --yes, where another
    replica reaches further. Without --yes it shows what every node has, and asks.

    Status 0: the node owns the shard. 1: not within the time, but it may come. 2: it could not be
    asked, or was refused."""
    from storage.replicated.meta import AdoptRecord

    with (
        _cluster_errors(as_json),
        _engine(cluster, kafka_config) as engine,
        contextlib.closing(engine.meta()) as log,
    ):
        identity, nodes = _meta(log).read_cluster()
        if not shard < identity.shards:
            raise CannotRun(f"There are {identity.shards} shards, from 0.")
        _must_be_node(node, nodes)
        known = _meta(log).read()
        end, epoch = _resting_end(engine, shard)
        reaches = _reaches(engine, shard, nodes.keys() - known.forgotten)
        decided = known.adoptions.get(shard, [])
        epochs = [*(one.stopped_epoch for one in reaches), *(one.epoch for one in decided)]
        check_adoption(reaches, node, end, may_lose=yes)
        if not yes:
            if as_json:
                raise CannotRun("Nobody can be asked with --json: say --yes.")
            make_console().print(rows([one.as_row() for one in reaches], REACH_COLUMNS, empty=""))
            typer.confirm(
                f"Shard {shard} goes on behind what {node} has, at offset {end} of its log?",
                abort=True,
            )
        record = AdoptRecord(shard, node, end, max([epoch, *epochs]) + 1)
        _meta(log).say(record)

        def owns_it() -> bool:
            owner, found = _owner_of(engine, shard, nodes)
            return owner is not None and found > record.epoch

        done = _wait_until(wait, as_json, f"shard {shard}", owns_it)
    answer = {"shard": shard, "node": node, "end": record.end, "epoch": record.epoch}
    _tell(as_json, done, f"shard {shard} goes on behind what {node} has", answer)


@dataclass(frozen=True)
class Reach:
    """What the replica of a node says of itself."""

    node: str
    at_ms: int
    is_there: bool
    read_offset: int
    """What it had read of the log, if it did not stop."""
    stopped_epoch: int
    stopped_seq: int

    def as_row(self) -> dict[str, Any]:
        """For a table."""
        from delayserver.times import format_time

        return {
            "node": self.node,
            "has all up to seq": self.stopped_seq if self.stopped_epoch else None,
            "state": ("waits" if self.stopped_epoch else "follows") if self.is_there else "away",
            "heard": format_time(self.at_ms),
        }


def _reaches(engine: "KafkaEngine", shard: int, nodes: Iterable[str]) -> list[Reach]:
    import time

    import msgspec

    from delayserver.api.cluster.watch import SEEN_MS, ReplicaNote

    now_ms = time.time_ns() // 1_000_000
    found = []
    for node, places in engine.noted_progress(sorted(nodes)).items():
        _, text = places.get(shard, (0, ""))
        with contextlib.suppress(msgspec.DecodeError):
            note = msgspec.json.decode(text, type=ReplicaNote)
            is_there = abs(now_ms - note.at_ms) <= SEEN_MS
            stopped = (note.stopped_epoch, note.stopped_seq)
            found.append(Reach(node, note.at_ms, is_there, note.read_offset, *stopped))
    return found


def check_adoption(reaches: list[Reach], node: str, end: int, *, may_lose: bool) -> None:
    """Whether the log of a shard, which ends at the offset `end`, can go on behind the replica of a
    node; `may_lose`: also where another may have more. Raises CannotRun."""
    own = next((one for one in reaches if one.node == node), None)
    if own is None or not own.is_there:
        raise CannotRun(f"{node} is not there: start it, and wait until it says what it has.")
    if not own.stopped_epoch:
        raise CannotRun(f"The log has lost nothing that {node} has: it follows.")
    if may_lose:
        return
    further = [one for one in reaches if one.stopped_epoch and one.stopped_seq > own.stopped_seq]
    if further:
        listed = ", ".join(f"{one.node} up to seq {one.stopped_seq:,}" for one in further)
        raise CannotRun(
            f"{node} has all up to seq {own.stopped_seq:,}, and another replica more: {listed}. "
            "Name that one, or say --yes if it cannot be had."
        )
    unheard = [
        one.node
        for one in reaches
        if not one.is_there and not one.stopped_epoch and one.read_offset > end
    ]
    if unheard:
        raise CannotRun(
            f"{', '.join(unheard)} had read more than the log has now, and may have it still: "
            "start it first, or say --yes if it cannot be had."
        )


class _Epochs:
    """The last epoch that somebody has claimed, whether it counts or not."""

    def __init__(self) -> None:
        self.last = 0

    def see(self, record: "LogRecord") -> None:
        """Take in the next record."""
        self.last = max(self.last, record.epoch)


def _resting_end(engine: "KafkaEngine", shard: int) -> tuple[int, int]:
    """Where the log of a shard ends, and the last epoch in it. Raises CannotRun."""
    import time

    from storage.replicated.onlooker import TAIL_RECORDS

    seen = _Epochs()
    with contextlib.closing(engine.log(shard)) as log:
        end = log.end()
        if end is None:
            raise CannotRun("The brokers do not say where the log ends.")
        _see(log, seen, max(0, end - TAIL_RECORDS), end, _NO_BAR)
        time.sleep(REST_S)
        if log.end() != end:
            raise CannotRun(
                f"Somebody writes to the log of shard {shard}: it goes on already, or its owner "
                "has to be stopped first (see `cluster status`)."
            )
    return end, seen.last


def _meta(log: "EngineLog") -> "MetaLog":
    from storage.replicated.meta import MetaLog

    return MetaLog(log)


def _must_be_node(node: str, nodes: dict[str, int]) -> None:
    if node not in nodes:
        raise CommandError(f"There is no node {node}; there are {', '.join(nodes) or 'none'}.")


def _owner_of(engine: "KafkaEngine", shard: int, nodes: dict[str, int]) -> tuple[str | None, int]:
    """Who owns a shard, and in which epoch, by the last records of its log."""
    from storage.replicated.onlooker import TAIL_RECORDS
    from storage.replicated.sighting import Sighting

    seen = Sighting()
    with contextlib.closing(engine.log(shard)) as log:
        end = log.end()
        if end is not None:
            _see(log, seen, max(0, end - TAIL_RECORDS), end, _NO_BAR)
    names = {number: name for name, number in nodes.items()}
    return names.get(seen.owner), seen.epoch


def _wait_until(wait_s: float, as_json: bool, what: str, is_done: "Callable[[], bool]") -> bool:
    import time

    began_s = time.monotonic()
    with progress_bar("", quiet=as_json) as progress:
        while not is_done():
            waited_s = time.monotonic() - began_s
            if waited_s >= wait_s:
                return False
            progress(f"waiting for {what}", round(waited_s), round(wait_s))
            time.sleep(LOOK_S)
    return True


def _tell(as_json: bool, done: bool, what: str, answer: dict[str, Any]) -> None:
    if as_json:
        print_json({**answer, "done": done})
    elif done:
        typer.echo(f"Done: {what}.")
    else:
        typer.echo(f"Not yet: {what}. It was asked, and may come: see `cluster status`.", err=True)
    if not done:
        raise typer.Exit(WRONG_STATUS)


class _NoBar:
    def show(self, done: int, total: int) -> None:
        """Nobody looks."""


_NO_BAR: Final = _NoBar()


class _Bar:
    """How far the reading of a shard's log is."""

    def __init__(self, progress: "Progress", shard: int, identity: "ClusterIdentity") -> None:
        self._progress = progress
        self._doing = f"shard {shard} of {identity.shards}"

    def show(self, done: int, total: int) -> None:
        self._progress(self._doing, done, total)


def _shard(
    engine: "KafkaEngine",
    shard: int,
    nodes: dict[str, int],
    committed: dict[str, dict[int, int]],
    bar: _Bar,
    whole: bool,
) -> dict[str, Any]:
    """What is to be said of a shard."""
    from storage.replicated.onlooker import TAIL_RECORDS
    from storage.replicated.sighting import Sighting

    seen = Sighting()
    with contextlib.closing(engine.log(shard)) as log:
        end = log.end()
        if end is not None:
            _see(log, seen, 0 if whole else max(0, end - TAIL_RECORDS), end, bar)
    names = {number: name for name, number in nodes.items()}
    lag = {
        name: end - places[shard]
        for name, places in committed.items()
        if end is not None and shard in places
    }
    return {
        "shard": shard,
        "owner": names.get(seen.owner),
        "epoch": seen.epoch,
        "address": _url_in(seen.address),
        "clock_ms": seen.clock_ms or None,
        "end": end,
        "lag": lag,
    }


def _url_in(address: str | None) -> str | None:
    """Where clients reach an owner, as its claim says it."""
    import json

    try:
        return str(json.loads(address or "")["url"])
    except (ValueError, KeyError, TypeError):
        return address


def _see(log: "EngineLog", seen: Any, begin: int, end: int, bar: "_Bar | _NoBar") -> None:
    from storage.replicated.envelope import decode
    from storage.replicated.reading import read_to_end

    try:
        for offset, data in read_to_end(log, begin, end):
            seen.see(decode(data, log.name, offset))
            if not offset % 100:
                bar.show(offset - begin, end - begin)
    except OffsetRangeError as error:
        # What was not needed any more was deleted.
        if not begin < error.first <= end:
            raise
        _see(log, seen, error.first, end, bar)


def _limit(identity: "ClusterIdentity") -> int | None:
    """How many nodes have each shard; None: all, however many there are."""
    from storage.replicated.meta import NODES_MAX

    return identity.replicas if identity.replicas < NODES_MAX else None


def _replicas(engine: "KafkaEngine", nodes: dict[str, int]) -> dict[str, dict[int, int]]:
    """Of each node, how far the checkpoint of each of its replicas is."""
    from delayserver.api.cluster.watch import unpack_note

    def is_replica(text: str) -> bool:
        note = unpack_note(text)
        return note is None or note.stage != "passing"

    return {
        node: {shard: offset for shard, (offset, text) in places.items() if is_replica(text)}
        for node, places in engine.noted_progress(nodes).items()
    }


def _node(name: str, number: int, shards: list[dict[str, Any]]) -> dict[str, Any]:
    lags = [shard["lag"][name] for shard in shards if name in shard["lag"]]
    return {
        "node": name,
        "number": number,
        "owns": sum(shard["owner"] == name for shard in shards),
        "replicas": len(lags),
        "lag": max(lags, default=None),
    }


def _rendered(answer: dict[str, Any]) -> "Iterator[RenderableType]":
    from rich.markup import escape

    from delayserver.times import format_time

    yield (
        f"[bold]{escape(answer['cluster'])}[/bold]: {len(answer['shards'])} shards on "
        f"{answer['replicas'] or 'all'} nodes each, durability {answer['durability']}"
    )
    shards = [
        {
            **shard,
            "heard": None if shard["clock_ms"] is None else format_time(shard["clock_ms"]),
            "placed": ", ".join(shard["placed"]) or None,
            "lag": ", ".join(f"{name} {lag:,}" for name, lag in shard["lag"].items()) or None,
        }
        for shard in answer["shards"]
    ]
    yield rows(shards, SHARD_COLUMNS, empty="")
    yield rows(answer["nodes"], NODE_COLUMNS, empty="No node has registered yet.")
    for problem in answer["problems"]:
        yield f"[bold red]Wrong:[/bold red] {escape(problem)}"


def _durability(text: str) -> Literal["os", "fsync", "fsync-all"]:
    match text:
        case "os" | "fsync" | "fsync-all":
            return text
        case _:
            hint = "--durability"
            raise typer.BadParameter(f"{text!r} is not os, fsync or fsync-all", param_hint=hint)


@contextlib.contextmanager
def _engine(cluster: str, kafka_config: Path | None) -> "Iterator[KafkaEngine]":
    from storage.replicated.kafka_settings import ClientSettings, ClusterUrl, read_properties

    url = ClusterUrl.parse(cluster)
    properties = {} if kafka_config is None else read_properties(kafka_config)
    try:
        from storage.replicated.kafka import KafkaEngine
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "confluent_kafka":
            raise
        text = "A cluster needs the package confluent-kafka: pip install 'delayserver[kafka]'"
        raise CannotRun(text) from error
    yield KafkaEngine(ClientSettings(url, properties))


@contextlib.contextmanager
def _cluster_errors(as_json: bool) -> Iterator[None]:
    """What goes wrong is said in a sentence."""
    with error_exit(as_json=as_json, also=(StorageError,), kind=CannotRun):
        try:
            yield
        except ClusterDiffersError as error:
            raise CommandError(str(error)) from error
