"""What all shards have promised together, kept outside of them.

Each shard has a ledger of its own (`tests.world.ledger`): what is durable there, due and
settled. Here stands what no shard knows alone: which consumer holds what, over whichever process it
came, and what it was answered. A lease is held from the moment at which a consumer was answered
until it says that it is done with it; then it is not sure, until that is answered, too.

Cost: some µs for a message. Threads: none.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from delayserver.delivery.leases import shard_of_lease
from delayserver.records.direct import is_direct
from delayserver.records.message_id import read_id
from delayserver.records.subscriptions import Subscription
from delayserver.shards.consuming import SharedGrants
from delayserver.shards.limits import Limits
from tests.world.shards.machine import Outside, ShardsMachine
from tests.world.violation import Violation

TOLD_AGAIN_MS = 500
"""What could not be told is told again after less than that."""

Delivered = tuple[int, str]
"""A subscription and the id of a message."""


class PulledMessage(msgspec.Struct):
    """A message, as a consumer sees it."""

    id: str
    lease: str
    body: msgspec.Raw


class Held(msgspec.Struct):
    """A lease that somebody outside knows."""

    subscription_id: int
    message_id: str
    token: str
    shard: int
    """Which has granted it."""
    life: int
    """Of that shard."""
    until_ms: int
    """It is not over before the stopwatch shows that."""
    settled: int
    """How often the shards had settled when it was handed over."""
    times_asked: int = 0
    """How often somebody has said that he is done with it, and was not answered."""

    @property
    def key(self) -> Delivered:
        """What is held."""
        return self.subscription_id, self.message_id


class Promises(Outside):
    """Everything that was promised by all of them."""

    def __init__(self) -> None:
        self.machine: ShardsMachine
        self.counts: Counter[str] = Counter()
        self.settled = 0
        """How often nothing was under way any more."""
        self.held: dict[str, Held] = {}
        """By token."""
        self._holders: dict[Delivered, str] = {}
        """The token by which somebody holds a message."""
        self._granted: dict[str, tuple[int, int]] = {}
        """By prefix: the shard that has granted the leases, and until when."""
        self._acked: set[Delivered] = set()
        self._acked_soon: dict[Delivered, int] = {}
        """What was acked without waiting for its record → the life of the shard that was told."""
        self._differing_since_ms: int | None = None
        """When definitions were first seen to differ, on the stopwatch."""
        self.ended: Callable[[int], None] = lambda shard: None
        """Told when the process of a shard is gone."""

    # ── leases ─────────────────────────────────────────────────────────────────────────────────

    def granted(self, shard: int, prefix: str, until_ms: int) -> None:
        if shard_of_lease(prefix) != shard:
            raise Violation(f"shard {shard} has granted {prefix}, which is another's")
        self._granted[prefix] = shard, until_ms

    def given_back(self, shard: int, prefix: str) -> None:
        if self._granted.get(prefix, (None,))[0] != shard:
            return
        del self._granted[prefix]
        for token in [token for token in self.held if token.startswith(prefix)]:
            if self.held[token].settled < self.settled:
                raise Violation(f"a consumer holds {token}, and its shard has taken it back")
            # What was told to the shard that has granted it was lost with the one that told it.
            self.counts["answered, and taken back"] += 1
            self.forget(token)

    def over(self, shard: int) -> None:
        self._differing_since_ms = None
        for token, held in list(self.held.items()):
            if held.shard == shard:
                self.forget(token)
        for prefix, (owner, _) in list(self._granted.items()):
            if owner == shard:
                del self._granted[prefix]
        self.ended(shard)

    def forget(self, token: str) -> None:
        """Nobody holds it any more."""
        held = self.held.pop(token, None)
        if held is not None and self._holders.get(held.key) == token:
            del self._holders[held.key]

    def received(self, subscription_id: int, messages: Sequence[PulledMessage]) -> None:
        """A consumer was answered."""
        for message in messages:
            seq, shard = read_id(message.id).seq, read_id(message.id).shard
            ledger = self.machine.shards[shard].ledger
            known, key = ledger.messages.get(seq), (subscription_id, message.id)
            if known is None or known.payload.body != bytes(message.body):
                raise Violation(f"a consumer got {message}, which nobody published (I8)")
            if shard_of_lease(message.lease) != shard:
                raise Violation(f"{message} has a lease of another shard")
            ledger.received.setdefault(seq, set()).add(subscription_id)
            self.counts["received"] += 1
            prefix = message.lease[: message.lease.rfind("-") + 1]
            granted = self._granted.get(prefix)
            if granted is None or granted[1] <= self._present_ms:
                # Over before it came; what has happened to the message since is no fault of his.
                self.counts["over before it came"] += 1
                continue
            self._hold(key, message, granted[1])

    def _hold(self, key: Delivered, message: PulledMessage, until_ms: int) -> None:
        seq, shard = read_id(message.id).seq, self.machine.shards[read_id(message.id).shard]
        if shard.ledger.messages[seq].cancelled:
            raise Violation(f"{message} was cancelled, and a consumer got it (I5)")
        if key in self._acked or self._acked_soon.get(key) == shard.lives:
            raise Violation(f"{message} was acknowledged, and comes again (I4)")
        if (holder := self._holders.get(key)) is not None:
            held = self.held[holder]
            if not held.times_asked and held.until_ms > self._present_ms:
                raise Violation(f"{message} is held by another consumer: {held} (I4)")
            self.forget(holder)
        token = message.lease
        held = Held(*key, token, shard.number, shard.lives, until_ms, self.settled)
        self.held[token], self._holders[key] = held, token

    def forget_what_is_over(self) -> None:
        """Nobody asks any more for what is not leased."""
        for token, held in list(self.held.items()):
            leases = self.machine.shards[held.shard].running.engine.leasing.leases
            if held.until_ms <= self._present_ms and leases.get(token) is None:
                self.forget(token)

    @property
    def _present_ms(self) -> int:
        return self.machine.clock.stopwatch_ms()

    def acked(self, deliveries: Sequence[Held], *, is_recorded: bool) -> None:
        """An acknowledgement was answered; `is_recorded`: what was promised by that."""
        for held in deliveries:
            self.counts["acked" if is_recorded else "acked soon"] += 1
            self.forget(held.token)
            if is_recorded:
                self._acked.add(held.key)
            else:
                self._acked_soon[held.key] = held.life

    # ── webhooks ───────────────────────────────────────────────────────────────────────────────

    def sent(self, subscription: Subscription) -> None:
        if is_direct(subscription.id):
            return  # Each shard has its own.
        out = [
            sum(request[0].subscription_id == subscription.id for request in shard.running.sending)
            for shard in self.machine.up()
        ]
        if sum(out) > subscription.max_in_flight:
            raise Violation(f"{out} of {subscription.name} are out: {subscription.max_in_flight}")
        self.counts["as many out as may be"] += sum(out) == subscription.max_in_flight

    # ── definitions ────────────────────────────────────────────────────────────────────────────

    def defined(self, definition: Subscription) -> None:
        """A change was answered: it is durable in all shards, and in force in those that live."""
        self.counts["definitions answered"] += 1
        for shard in self.machine.shards:
            if definition.id in shard.ledger.subscriptions or not definition.deleted:
                shard.ledger.defined(definition)
        for shard in self.machine.up():
            known = shard.running.engine.registry.by_id(definition.id)
            if definition.deleted:
                is_in_force = known is None
            else:
                is_in_force = (
                    known is not None
                    and known.timeout_ms >= definition.timeout_ms
                    and known.paused >= definition.paused
                )
            if not is_in_force:
                raise Violation(f"{definition} was answered, and shard {shard.number} has {known}")

    # ── when nothing is under way ──────────────────────────────────────────────────────────────

    def check_settled(self) -> None:
        """Nothing happens before the clock moves, and all shards live and are linked."""
        self.settled += 1
        self.counts["settled"] += 1
        self._check_leases()
        self._check_definitions()
        self._check_waiting()
        self._check_groups()

    def _check_groups(self) -> None:
        for shard in self.machine.shards:
            if blocked := shard.ledger.behind_nobody(shard.running):
                raise Violation(f"groups of shard {shard.number} wait for nobody: {blocked}")

    def _check_leases(self) -> None:
        """What is leased is held by somebody who was answered."""
        for shard in self.machine.shards:
            leases = shard.running.engine.leasing.leases
            for number, pull in leases._pulls.items():
                for index in np.flatnonzero(pull.is_held).tolist():
                    token = f"{leases._prefix(number)}{index}"
                    if token not in self.held:
                        raise Violation(f"shard {shard.number} has leased {token} to nobody (I3)")

    def _check_definitions(self) -> None:
        """All have the same. A pause by a receiver may have met a home that was away, or a full
        disk: then it is told again, some time later."""
        of_home, *others = (self._definitions(shard) for shard in range(self.machine.count))
        differing = {shard: one for shard, one in enumerate(others, 1) if one != of_home}
        if not differing:
            self._differing_since_ms = None
            return
        if self._differing_since_ms is None or any(one.is_failing for one in self.machine.up()):
            self._differing_since_ms = self._present_ms
        if self._present_ms - self._differing_since_ms > TOLD_AGAIN_MS:
            raise Violation(f"definitions differ: {of_home}, of others: {differing}")

    def _definitions(self, shard: int) -> dict[int, Any]:
        registry = self.machine.shards[shard].running.engine.registry
        return {one.id: msgspec.structs.replace(one, history=()) for one in registry}

    def _check_waiting(self) -> None:
        """No consumer waits for what is there, whichever shard has it."""
        shards = self.machine.shards
        for subscription in shards[0].running.engine.registry:
            if subscription.type != "pull":
                continue
            there = [one.running.calls.consumers.ready(subscription.id) or 0 for one in shards]
            for shard in shards:
                fetch = shard.running.calls.consumers.oldest_wait(subscription.id, sum(there))
                if fetch is not None:
                    raise Violation(
                        f"a consumer at shard {shard.number} waits for "
                        f"{fetch.request.min_messages} of {there} (I3)"
                    )

    def check_nothing_is_left(self) -> None:
        """Everything was pulled and acknowledged, nobody waits, and definitions are the same."""
        if self._differing_since_ms is not None:
            raise Violation("definitions differ, and stay so")
        for shard in self.machine.shards:
            server = shard.running
            grants = shard.hot.consuming._grants
            assert isinstance(grants, SharedGrants)
            askers = grants._supply._askers.values()
            wanted = grants._sources.demand._wanted.values()
            queues = list(server.engine.dispatcher.queues)
            limits = server.engine.dispatcher.queues.permits
            assert isinstance(limits, Limits)
            left = {
                "leases": server.engine.leasing.leases.count(),
                "pulls that wait": server.engine.dispatcher.pulls.fetches.count(),
                "lent": [asker.lent for asker in askers if asker.lent],
                "being lent": [asker.reading for asker in askers if asker.reading],
                "pulls": sum(one.pulls for one in wanted),
                "pulls that ask": sum(len(one.asking) for one in wanted),
                "queued": {q.subscription.name: q.count for q in queues if q.count},
                "in flight": {q.subscription.name: q.in_flight for q in queues if q.in_flight},
                "reserved": {q.subscription.name: q.reserved for q in queues if q.reserved},
                "parked": server.engine.dispatcher.parked.count(),
                "places": {
                    key: (one.places, one.asked_places, one.rows)
                    for key, one in limits._permits.items()
                    if one.places or one.asked_places or one.rows
                },
                "places of all": {
                    key: list(one.out) for key, one in limits._allotments.items() if not one.is_idle
                },
                "unsettled": server.engine.hours.unsettled(),
            }
            for name, value in left.items():
                if value:
                    raise Violation(f"at shard {shard.number} {name} are left over: {value}")
