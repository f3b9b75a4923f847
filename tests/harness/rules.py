"""The rules of the ledger: what must not be in it, however the servers were struck.

A rule reads the whole ledger and yields a sentence for each broken promise. `EVERYWHERE` holds in
every run; the runs name the others. Each rule has a canary in tests/unit/harness/test_rules.py: a
ledger that breaks it alone.

    lost, early, fired_cancelled, repeated_recorded, other_id, garbled, refused_came
                         `delayserver.cli.demo.ledger` says what they are
    never_published      a delivery that belongs to no message
    leased_to_another    a node took office before the lease of the last owner was over
    not_in_office        a node delivered without being in office
    two_processes        a process of a shard leased messages after another one had begun to

Cost: a pass over the ledger each. Threads: functions.
"""

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

from delayserver.cli.demo.ledger import RULES
from storage.replicated.lease import LEASE_MS, MARGIN_MS
from tests.harness.ledger import Ledger

CLOCK_MS = 30
"""By how much two readings of one clock may be off: a record gets its time a moment before it is
sent."""
TRANSIT_MS = 700
"""A delivery may be received so long after its sender could last make one, on a busy machine."""
NO_END_MS = 1 << 62

Rule = Callable[[Ledger], Iterator[str]]


def _of_orders(name: str) -> Rule:
    """The rule of the demo's ledger with that name."""
    is_broken = RULES[name]

    def rule(ledger: Ledger) -> Iterator[str]:
        return (json.dumps(one.to_json()) for one in ledger.orders if is_broken(ledger, one))

    return rule


def never_published(ledger: Ledger) -> Iterator[str]:
    """Nothing is delivered that nobody has published."""
    return iter(ledger.strangers)


def leased_to_another(ledger: Ledger) -> Iterator[str]:
    """No node takes office before the lease of the last owner is over (I14)."""
    for shard, tenures in ledger.tenures.items():
        for last, following in itertools.pairwise(tenures):
            gap_ms = following.claim_ms - last.last_ms
            if not last.is_released and gap_ms < LEASE_MS - MARGIN_MS - CLOCK_MS:
                yield (
                    f"shard {shard}: {following.node} claimed epoch {following.epoch} "
                    f"{gap_ms} ms after {last.node} was in office"
                )


def not_in_office(ledger: Ledger) -> Iterator[str]:
    """Only the node in office delivers (I14)."""
    terms: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
    for shard, tenures in ledger.tenures.items():
        for index, tenure in enumerate(tenures):
            # As long as no other node has claimed, the owner may be heard again.
            is_last = index + 1 == len(tenures) and not tenure.is_released
            end_ms = NO_END_MS if is_last else tenure.last_ms + LEASE_MS - MARGIN_MS
            terms[shard, tenure.node].append((tenure.claim_ms, end_ms))
    for delivery in ledger.deliveries:
        if not ledger.is_thaw(delivery.shard, delivery.at_ms) and not any(
            from_ms - CLOCK_MS <= delivery.at_ms <= to_ms + TRANSIT_MS
            for from_ms, to_ms in terms[delivery.shard, delivery.node]
        ):
            yield (
                f"shard {delivery.shard}: {delivery.node} delivered {delivery.message_id} at "
                f"{delivery.at_ms} without being in office"
            )


def two_processes(ledger: Ledger) -> Iterator[str]:
    """A process of a shard leases nothing any more after another one has begun to (I14)."""
    last: dict[int, str] = {}
    gone: dict[tuple[int, str], int] = {}
    for pull in ledger.pulls:
        before = last.get(pull.shard)
        if before != pull.process:
            if before is not None:
                gone[pull.shard, before] = pull.at_ms
            since_ms = gone.get((pull.shard, pull.process))
            if since_ms is not None:
                is_late = pull.at_ms - since_ms > TRANSIT_MS
                if is_late and not ledger.is_thaw(pull.shard, pull.at_ms):
                    yield (
                        f"shard {pull.shard}: process {pull.process} leased at {pull.at_ms}, and "
                        f"{before} had done so since {since_ms}"
                    )
                continue
        last[pull.shard] = pull.process


EVERYWHERE: Mapping[str, Rule] = {
    **{name: _of_orders(name) for name in RULES},
    "never_published": never_published,
}
OFFICES: Mapping[str, Rule] = {
    rule.__name__: rule for rule in (leased_to_another, not_in_office, two_processes)
}
"""These hold in a cluster, where one node at a time owns a shard."""
