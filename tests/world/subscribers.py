"""Subscribers of the simulated server: receivers of webhooks, and consumers that pull.

They answer, refuse, time out, hang up and fall over as the seed says, and tell the ledger what they
have seen; in the last life they are patient, and take everything.

Cost: about 20 µs per call. Threads: none.
"""

import random
from collections import Counter
from dataclasses import dataclass
from functools import partial

from delayserver.delivery.delayed_fetch import DelayedFetch, Pulled, PullRequest
from delayserver.delivery.webhook import WebhookResponse
from delayserver.records.message import DueDelivery
from tests.world.actor import Actor
from tests.world.ledger import Ledger
from tests.world.server import SimulatedClock, SimulatedServer
from tests.world.storage.files import SimulatedFiles
from tests.world.violation import Violation

OK = WebhookResponse(200)
LOST = WebhookResponse(None, None, "timed out")


@dataclass(slots=True)
class Waiting:
    """A pull that was not answered at once."""

    fetch: DelayedFetch
    until_ms: int
    """On the stopwatch."""


@dataclass(slots=True)
class Lease:
    """What a consumer holds."""

    token: str
    delivery: DueDelivery


class Subscribers(Actor):
    """Everybody who receives, and what they hold."""

    def __init__(
        self, rng: random.Random, clock: SimulatedClock, ledger: Ledger, counts: Counter[str]
    ) -> None:
        super().__init__(rng, clock, ledger, counts)
        self.leases: list[Lease] = []
        self.waiting: dict[int, Waiting] = {}
        """Pulls that are not answered, by number."""
        self._pull_count = 0
        self.is_patient = False
        """Whether they take all that comes."""
        self.is_refusing = False
        """Whether they take nothing."""

    def begin(self, server: SimulatedServer, disk: SimulatedFiles) -> None:
        """A life has begun: nobody waits for the last one."""
        super().begin(server, disk)
        self.waiting = {}

    def go_on(self) -> None:
        """Consumers hold what they held before a planned stop, under the same tokens; after a kill
        all that is over."""
        self.leases = [lease for lease in self.leases if self._ledger.is_leased(lease.delivery)]
        for lease in self.leases:
            found = self._server.engine.leasing.leases.get(lease.token)
            if found is None or found.entry != lease.delivery.entry:
                raise Violation(f"{lease.token} is good, and is a lease of {found} (I4)")

    def connect(self) -> None:
        """A webhook finds a connection."""
        if connecting := self._server.connecting:
            self._server.connect(self._rng.randrange(len(connecting)))

    def answer_webhook(self, *, is_gone: bool = False) -> None:
        """Answer a webhook that was sent; or its answer is lost, or it never came.

        `is_gone`: the receiver wants no more of them."""
        server = self._server
        if not server.sending:
            return
        deliveries = self._rng.choice(server.sending)
        dice = 0.0 if self.is_patient else self._rng.random()
        if self.is_refusing:
            dice = 0.8
        if is_gone:
            dice = 1.0
        if dice < 0.5:
            response, seen = OK, True
        elif dice < 0.62:
            response, seen = LOST, True
        elif dice < 0.74:
            response, seen = LOST, False
        elif dice < 0.92:
            response, seen = WebhookResponse(500), False
        elif dice < 0.98:
            response, seen = WebhookResponse(503, 2000), False
        else:
            response, seen = WebhookResponse(410), False
        for delivery in deliveries:
            self._ledger.returned(delivery, seen=seen)
        server.answer(deliveries, response)

    def pull(self) -> None:
        """Pull, and wait if nothing is there."""
        rng, server = self._rng, self._server
        pulls = [s for s in server.engine.registry if s.type == "pull"]
        if not pulls:
            return
        subscription = rng.choice(pulls)
        self._pull_count += 1
        number, is_answered = self._pull_count, False

        def answer(got: Pulled) -> None:
            nonlocal is_answered
            is_answered = True
            self.waiting.pop(number, None)
            for delivery, token in got:
                self.leases.append(Lease(token, delivery))
                self._ledger.leased(delivery, lease_ms)

        wait_ms = 10 if self.is_patient else rng.choice((0, 50, 5000))
        lease_ms = 10_000 if self.is_patient else rng.choice((5, 500, 10_000))
        most = rng.choice((1, 3, 10))
        least = 1 if self.is_patient else rng.choice((1, 1, most))
        # What it has done goes along, and its record is not waited for.
        held = [one for one in self.leases if one.delivery.subscription_id == subscription.id]
        done = [] if self.is_refusing else held[: rng.choice((0, 0, 1, 3))]
        for lease in done:
            self._give_up(lease, seen=True)
        server.calls.consumers.ack_soon(subscription.id, [lease.token for lease in done])
        self._counts["acked by a pull"] += len(done)
        request = PullRequest(most, lease_ms, wait_ms, answer, least)
        fetch = server.calls.consumers.pull(subscription, request)
        if not is_answered:
            self.waiting[number] = Waiting(fetch, self._clock.stopwatch_ms() + wait_ms)

    def hang_up(self) -> None:
        """A consumer that waits is gone; its messages may be being read."""
        self.waiting.pop(self._rng.choice(list(self.waiting))).fetch.cancel()
        self._counts["hung up"] += 1

    def check_waiting(self) -> None:
        """The server has just looked at its clocks: nobody waits for longer than was asked for,
        but for bodies that are being read."""
        present_ms = self._clock.stopwatch_ms()
        for waiting in self.waiting.values():
            if waiting.until_ms <= present_ms and not waiting.fetch.is_completed:
                raise Violation("the time of a pull is up, and it was not answered")

    def consume(self) -> None:
        """Acknowledge, give back, extend or forget a lease."""
        rng, server, leasing = self._rng, self._server, self._server.engine.leasing
        if not self.leases:
            return
        lease = self.leases[rng.randrange(len(self.leases))]
        dice = 0.0 if self.is_patient else rng.random()
        if self.is_refusing:
            dice = 0.7
        if dice < 0.6:
            self._give_up(lease, seen=True)
            server.ack([lease.token], partial(self._acked, lease))
        elif dice < 0.75:
            self._give_up(lease, seen=False)
            leasing.nack([lease.token], rng.choice((0, 0, 20, 1000)), self._clock.now_ms)
        elif dice < 0.9:
            lease_ms = rng.choice((1, 1000))
            if not leasing.extend([lease.token], lease_ms):
                self._ledger.leased(lease.delivery, lease_ms)
        else:
            self.leases.remove(lease)  # It fell over.

    def _give_up(self, lease: Lease, *, seen: bool) -> None:
        """It is about to be acknowledged, or to be given back."""
        self.leases.remove(lease)
        if self._server.engine.leasing.leases.get(lease.token) is not None:
            self._ledger.returned(lease.delivery, seen=seen)

    def _acked(self, lease: Lease, expired: list[str]) -> None:
        if not expired:
            self._ledger.acked(lease.delivery)

    def pull_all(self) -> None:
        """Take what is there for every subscription."""

        def answer(got: Pulled) -> None:
            self.leases += [Lease(token, delivery) for delivery, token in got]

        server = self._server
        for subscription in server.engine.registry:
            if subscription.type == "pull":
                server.calls.consumers.pull(subscription, PullRequest(1000, 60_000, 0, answer))
                server.rest()

    def return_all(self) -> None:
        """Give back every lease, without having looked."""
        for lease in self.leases:
            self._ledger.returned(lease.delivery, seen=False)
            self._server.engine.leasing.nack([lease.token], 0, self._clock.now_ms)
        self.leases.clear()
