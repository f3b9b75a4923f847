"""The strikes at a cluster.

A strike says whom it is for (the owner of a shard, the leader of its log). The cluster finds out
which process that is when the strike falls.

Cost: none. Threads: values.
"""

from enum import StrEnum
from typing import Final

from tests.harness.strikes import Schedule

HOLD_S: Final = (1.0, 10.0)
"""How long a strike lasts that is taken back."""
LOAD_S: Final = (1.0, 3.0)
"""How long the load of a round lasts before it."""


class Strike(StrEnum):
    """The victim, and the deed."""

    OWNER_KILL = "owner: SIGKILL"
    OWNER_STOP = "owner: SIGSTOP"
    OWNER_NODE_KILL = "owner's node: SIGKILL"
    OWNER_NODE_STOP = "owner's node: SIGSTOP"
    STANDBY_KILL = "standby: SIGKILL"
    STANDBY_STOP = "standby: SIGSTOP"
    NODE_TERM = "owner's node: SIGTERM"
    NODE_WIPED = "owner's node: SIGKILL, data deleted"
    ALL_NODES_KILL = "all nodes: SIGKILL"

    LEADER_KILL = "leader: SIGKILL"
    LEADER_STOP = "leader: SIGSTOP"
    FOLLOWER_KILL = "other broker: SIGKILL"
    FOLLOWER_STOP = "other broker: SIGSTOP"
    ALL_BROKERS_KILL = "all brokers: SIGKILL"
    OWNER_AND_LEADER_KILL = "owner and leader: SIGKILL"

    CLOCK_NEAR = "owner's clock within 1 s"
    CLOCK_FAR = "standby's clock beyond 1 s, and owner killed"

    CUT_OWNER_BROKERS = "cut: owner, brokers"
    CUT_OWNER_TO_BROKERS = "cut: owner to brokers, one way"
    CUT_BROKERS_TO_OWNER = "cut: brokers to owner, one way"
    CUT_OWNER_LEADER = "cut: owner, leader"
    CUT_OWNER_NODES = "cut: owner, other nodes"
    CUT_OWNER_CLIENTS = "cut: owner, clients"
    CUT_OWNER_ALL = "cut: owner, everybody"
    CUT_LEADER_BROKERS = "cut: leader, other brokers"
    CUT_HALVES = "cut: owner and leader, all others"
    DISK_FULL = "full disk"


CUTS: Final = frozenset(strike for strike in Strike if strike.value.startswith("cut"))
NEEDS_STAGE: Final = CUTS | {Strike.DISK_FULL}
"""Kinds that need namespaces of the run's own."""


def schedule(only: str = "", *, can_cut: bool = True) -> Schedule:
    """All kinds that the machine permits, with these words in their names. Raises ValueError."""
    kinds = [kind for kind in Strike if only in kind and (can_cut or kind not in NEEDS_STAGE)]
    if not kinds:
        raise ValueError(f"no strike has {only!r} in its name, or needs namespaces")
    return Schedule(kinds, LOAD_S, HOLD_S)
