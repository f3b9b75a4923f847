"""The simulated world of a shard with replicas: each life of the server may be on another node.

    engine      a replicated log engine in memory, with chance
    node        a machine: disk, catalog, clocks, and a standby, an owner or a zombie on it
    ledger      what was promised, over all nodes; what a zombie may not do any more
    promises    I15 to I17: what all readers and all replicas have to agree on
    world       the lives, and whose turn it is

Clients, subscribers, operators and the ledger are those of the world around one server.
"""

from tests.world.replicas.world import ReplicaWorld, run_replica_world

__all__ = ["ReplicaWorld", "run_replica_world"]
