"""cluster create, cluster status.

Cost: some requests to the brokers; `status` reads the last records of each shard's log besides, in
half a second a shard. Threads: those of the client.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from delayserver.cli.cluster.brokers import (
    WRONG_STATUS,
    ClusterOption,
    KafkaConfigOption,
    cluster_errors,
    name_of,
    open_engine,
    read_tail,
)
from delayserver.cli.output import make_console, print_json, progress_bar, rows
from delayserver.cli.session import CommandError, JsonOption
from storage.errors import ClusterMissingError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from storage.replicated.kafka import KafkaEngine
    from storage.replicated.meta import ClusterIdentity

SHARD_COLUMNS: Final = ("shard", "owner", "epoch", "address", "heard", "end", "placed", "lag")
NODE_COLUMNS: Final = ("node", "number", "zone", "owns", "replicas", "lag")

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
        help="An answer waits for the memory of most brokers; for that and the owner's disk; for "
        "the disks of all brokers.",
    ),
]


def create(
    cluster: ClusterOption,
    shards: ShardsOption,
    replicas: ReplicasOption = 3,
    replication: ReplicationOption = 3,
    durability: DurabilityOption = "fsync",
    kafka_config: KafkaConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make the topics of a cluster, and write down its facts.

    Topics that exist stay as they are: run it again after it was interrupted. A cluster that was
    made with another number of shards or of replicas is refused.

    Status 0: it is there. 1: it is there, and is another one, or its topics are not as they have to
    be. 2: it could not be made."""
    import os

    chosen = _durability(durability)
    with cluster_errors(as_json), open_engine(cluster, kafka_config) as engine:
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
    """Show the shards of a cluster with their owners, its nodes, and errors in its topics.

    For each shard: the node that wrote to its log last as its owner, where that node is reached (if
    it took the shard a short time ago, else see --whole), where the log ends, which nodes are to
    have it, and by how many records the checkpoint of each node's replica is behind. A replica on a
    node that is not to have it goes when those that are have come so far.

    Status 0: all is well. 1: the topics are not as they have to be. 2: it could not be read."""
    with cluster_errors(as_json), open_engine(cluster, kafka_config) as engine:
        from delayserver.cluster.placement import Placement
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
            shards = []
            for shard in range(identity.shards):
                show = partial(progress, f"shard {shard} of {identity.shards}")
                found = _shard(engine, shard, nodes, committed, show, whole)
                shards.append({**found, "placed": placement.nodes(shard)})
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


def _shard(
    engine: "KafkaEngine",
    shard: int,
    nodes: dict[str, int],
    committed: dict[str, dict[int, int]],
    show: Callable[[int, int], None],
    whole: bool,
) -> dict[str, Any]:
    """The report on a shard."""
    from storage.replicated.sighting import Sighting

    seen = Sighting()
    with contextlib.closing(engine.log(shard)) as log:
        end = read_tail(log, seen.see, whole=whole, show=show)
    lag = {
        name: end - places[shard]
        for name, places in committed.items()
        if end is not None and shard in places
    }
    return {
        "shard": shard,
        "owner": name_of(seen.owner, nodes),
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


def _limit(identity: "ClusterIdentity") -> int | None:
    """How many nodes have each shard; None: all, however many there are."""
    from storage.replicated.meta import NODES_MAX

    return identity.replicas if identity.replicas < NODES_MAX else None


def _replicas(engine: "KafkaEngine", nodes: dict[str, int]) -> dict[str, dict[int, int]]:
    """For each node: how far the checkpoint of each of its replicas is."""
    from delayserver.cluster.watch import unpack_note

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
