"""cluster move, cluster drain, cluster forget: orders to the nodes.

It is said in a log of the cluster, which all of them read every second; `move` and `drain` wait
until it is done, and see that in the logs of the shards.

Cost: some requests to the brokers, and while it waits the last records of the logs, twice a second.
Threads: those of the client.
"""

import contextlib
from typing import Annotated

import typer

from delayserver.cli.cluster.brokers import (
    ClusterOption,
    KafkaConfigOption,
    NodeArgument,
    WaitOption,
    cluster_errors,
    must_be_node,
    open_engine,
    owner_of,
    tell,
    wait_until,
)
from delayserver.cli.session import CommandError, JsonOption


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
    about a second. An owner that takes the shard over while this waits is asked too, none later.

    A node that has no replica of the shard cannot own it: `cluster status` shows which are to.

    Status 0: the node owns it. 1: not within the time, but it may come. 2: it could not be asked.
    """
    from delayserver.cluster.placement import Placement
    from storage.replicated.meta import MetaLog, MoveRecord

    with (
        cluster_errors(as_json),
        open_engine(cluster, kafka_config) as engine,
        contextlib.closing(engine.meta()) as log,
    ):
        meta = MetaLog(log)
        identity, nodes = meta.read_cluster()
        if not shard < identity.shards:
            raise CommandError(f"There are {identity.shards} shards, from 0.")
        must_be_node(node, nodes)
        placed = Placement.of(meta.read()).nodes(shard)
        if node not in placed:
            raise CommandError(
                f"{node} is to have no replica of shard {shard}, so it cannot own it: "
                f"{', '.join(placed)} can."
            )
        if owner_of(engine, shard, nodes)[0] is None:
            raise CommandError(
                f"Shard {shard} has no owner now: wait until a replica in step claims it."
            )
        asked_epoch: int | None = None

        def owns_it() -> bool:
            # Another may have taken it over in between: the request to the one before is void.
            nonlocal asked_epoch
            owner, epoch = owner_of(engine, shard, nodes)
            if owner not in (node, None) and epoch != asked_epoch:
                MetaLog(log).say(MoveRecord(shard, node, epoch))
                asked_epoch = epoch
            return owner == node

        done = wait_until(wait, as_json, f"shard {shard}", owns_it)
    tell(as_json, done, f"shard {shard} is owned by {node}", {"shard": shard, "node": node})


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
    from storage.replicated.meta import DrainRecord, MetaLog

    with cluster_errors(as_json), open_engine(cluster, kafka_config) as engine:
        with contextlib.closing(engine.meta()) as log:
            identity, nodes = MetaLog(log).read_cluster()
            must_be_node(node, nodes)
            MetaLog(log).say(DrainRecord(node))

        def owns_none() -> bool:
            owners = (owner_of(engine, one, nodes)[0] for one in range(identity.shards))
            return all(owner != node for owner in owners)

        done = wait_until(wait, as_json, f"the shards of {node}", owns_none)
    tell(as_json, done, f"{node} owns no shard", {"node": node})


def forget(
    node: NodeArgument,
    cluster: ClusterOption,
    kafka_config: KafkaConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say that a node does not come back: its disk is lost, or it is needed no more.

    No node counts on its replicas any more; other nodes get them, if not all have one already. If a
    node of that name is started nevertheless, it is a node again.

    Status 0: it is said. 2: it could not be said."""
    from storage.replicated.meta import ForgetRecord, MetaLog

    with (
        cluster_errors(as_json),
        open_engine(cluster, kafka_config) as engine,
        contextlib.closing(engine.meta()) as log,
    ):
        _, nodes = MetaLog(log).read_cluster()
        must_be_node(node, nodes)
        MetaLog(log).say(ForgetRecord(node))
    tell(as_json, True, f"{node} is forgotten", {"node": node})
