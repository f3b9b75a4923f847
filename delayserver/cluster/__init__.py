"""The nodes of a cluster, which own shards or have replicas of them. In reading order:

placement   which nodes have a replica of which shard, and in which order they are to own it
membership  the facts of a cluster that the processes of a node know, and tell each other
watch       what a node sees of its cluster while it runs
sight       which of the other nodes a node can reach, without the brokers between them
news        what the supervisor of a node does besides
joining     a node joins its cluster, and gets its number
proofs      what a node shows when it asks another one over HTTP
sharing     gives other nodes copies of this replica
copying     asks another node for a copy
reports     what a process says of its replica to all others, and what is deleted by what they say
keeping     the replica of a shard in its directory: opened, made anew, set aside, dropped
follow      the thread that follows a shard's log until it holds the office
forwarding  calls that a process on standby passes on to the owner of its shard
"""
