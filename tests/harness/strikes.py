"""Strikes as values, and how the seed of a run chooses them.

A strike is a member of an enumeration whose value names it for people, such as "owner: SIGKILL"; a
topology knows how to do it (`Topology.strike`). All kinds are in a deck that the seed shuffles; a
round takes the next, and when the deck is through it is shuffled anew. So few rounds meet many
kinds, and each kind as often as it stands in the deck. The seed decides on a round by its number,
whatever happened in the rounds before.

Cost: none. Threads: values.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

Span_s = tuple[float, float]
"""The least and the most, in seconds."""


@dataclass(frozen=True)
class RoundPlan:
    """The events of one round."""

    strikes: tuple[StrEnum, ...]
    """The first falls under load, the others while the server comes back."""
    load_s: float
    """The time for which the load goes on before."""
    hold_s: float
    """The time for which a strike lasts that is taken back."""
    chance: random.Random
    """Decides on the rest: which process, how far a clock is off."""


@dataclass(frozen=True)
class Schedule:
    """The rule by which rounds are planned."""

    deck: Sequence[StrEnum]
    """The kinds of strikes; one that stands there more often falls more often."""
    load_s: Span_s
    hold_s: Span_s = (0.0, 0.0)
    again_share: float = 0.0
    """The share of the strikes that are followed by another one before all is well."""

    def round(self, seed: int, number: int) -> RoundPlan:
        """Plan round `number`, from 0."""
        deck = list(self.deck)
        random.Random(f"{seed}, deck {number // len(deck)}").shuffle(deck)
        chance = random.Random(f"{seed}, round {number}")
        strikes = [deck[number % len(deck)]]
        while chance.random() < self.again_share:
            strikes.append(chance.choice(self.deck))
        load_s, hold_s = chance.uniform(*self.load_s), chance.uniform(*self.hold_s)
        return RoundPlan(tuple(strikes), load_s, hold_s, chance)


def deck_of(shares: Iterable[tuple[StrEnum, int]]) -> tuple[StrEnum, ...]:
    """A deck in which each kind stands so many times."""
    return tuple(kind for kind, count in shares for _ in range(count))
