"""What is done to a cluster, and how rounds are drawn.

All kinds are in a deck that is shuffled by the seed; a round takes the next, and when the deck is
through it is shuffled anew. So few rounds meet many kinds, and each kind about equally often.

A kind says whom it is for (the owner of a shard, the leader of its log); who that is just then is
seen when it falls. The seed decides on the rest, whatever happened in the rounds before.

Cost: none. Threads: values.
"""

import random
from enum import StrEnum
from typing import Final, NamedTuple

HOLD_S: Final = (1.0, 10.0)
"""How long a strike lasts that is taken back."""
LOAD_S: Final = (1.0, 3.0)
"""How long the load of a round lasts before it."""


class Strike(StrEnum):
    """What is done, and to whom."""

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


class RoundPlan(NamedTuple):
    """What is to happen in a round."""

    strike: Strike
    shard: int
    """Whose owner, and whose leader."""
    load_s: float
    hold_s: float
    chance: random.Random
    """Decides on what remains: which standby, which other broker, how far a clock is off."""


def plan_round(seed: int, number: int, shards: int, kinds: tuple[Strike, ...]) -> RoundPlan:
    """Draw round `number`, from 0."""
    deck = list(kinds)
    random.Random(f"{seed}, deck {number // len(kinds)}").shuffle(deck)
    chance = random.Random(f"{seed}, round {number}")
    return RoundPlan(
        deck[number % len(kinds)],
        chance.randrange(shards),
        chance.uniform(*LOAD_S),
        chance.uniform(*HOLD_S),
        chance,
    )
