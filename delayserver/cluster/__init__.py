"""The nodes of a cluster, which own shards or have replicas of them. In reading order:

placement   which nodes have a replica of which shard, and in which order they are to own it
membership  the facts of a cluster that the processes of a node know, and tell each other
watch       a node's view of its cluster while it runs
sight       which of the other nodes a node can reach, without the brokers between them
news        the reports of a node's supervisor to its processes
joining     a node joins its cluster, and gets its number
proofs      a node proves to another one over HTTP that it belongs to the cluster
sharing     gives other nodes copies of this replica
copying     asks another node for a copy
reports     reports of a process about its replica to all others, and the deletions that follow
keeping     the replica of a shard in its directory: opened, made anew, set aside, dropped
follow      the thread that follows a shard's log until it holds the office
hop         a request on its next hop: its body, and the headers that go along
forwarding  calls that a process on standby passes on to the owner of its shard
"""
