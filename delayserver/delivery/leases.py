"""Leases: messages that a consumer pulled and has not acknowledged yet.

A lease names one delivery until it is acknowledged, given back, or over. Its token carries a random
number of this server process, so a lease of an earlier process is never mistaken for one of this.
Leases of one pull stand together, with one timeout for all of them: it is set for the first that
may be over, and when it comes and all were extended meanwhile, it is set again.

Cost: O(1) per lease and per extension; one timeout per pull. Threads: belongs to the event loop.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from delayserver.message import Delivery
from delayserver.timeouts import Timeouts
from delayserver.timers.interface import Handle


@dataclass(slots=True)
class _Pull:
    deliveries: list[Delivery | None]
    deadlines_ms: list[int]
    """On the clock of the timeouts."""
    held: int
    handle: Handle
    wakes_ms: int


class Leases:
    """All leases of this process. `on_expired` gets the deliveries whose lease is over."""

    def __init__(
        self, epoch: str, timeouts: Timeouts, on_expired: Callable[[list[Delivery]], None]
    ) -> None:
        self._epoch = epoch
        self._timeouts = timeouts
        self.on_expired = on_expired
        self._pulls: dict[int, _Pull] = {}
        self._next_number = 1

    def grant(self, deliveries: list[Delivery], lease_ms: int) -> list[str]:
        """A token for each delivery, in order, good for `lease_ms` from the present."""
        if not deliveries:
            return []
        number = self._next_number
        self._next_number += 1
        deadline_ms = self._timeouts.now_ms + lease_ms
        handle = self._timeouts.add(partial(self._expire, number), lease_ms)
        count = len(deliveries)
        self._pulls[number] = _Pull(
            list(deliveries), [deadline_ms] * count, count, handle, deadline_ms
        )
        prefix = f"{self._epoch}-{number:x}-"
        return [prefix + str(index) for index in range(count)]

    def _parse(self, token: str) -> tuple[int, int, _Pull] | None:
        try:
            epoch, number_text, index_text = token.split("-")
            number, index = int(number_text, 16), int(index_text)
        except ValueError:
            return None
        if epoch != self._epoch:
            return None
        pull = self._pulls.get(number)
        if pull is None or not 0 <= index < len(pull.deliveries):
            return None
        return number, index, pull

    def _find(
        self, token: str, subscription_id: int | None
    ) -> tuple[int, int, _Pull, Delivery] | None:
        found = self._parse(token)
        delivery = found and found[2].deliveries[found[1]]
        if not found or not delivery:
            return None
        if subscription_id is not None and delivery.subscription_id != subscription_id:
            return None
        return *found, delivery

    def get(self, token: str) -> Delivery | None:
        """The delivery, as long as it is leased."""
        found = self._find(token, None)
        return found and found[3]

    def end(self, token: str, subscription_id: int | None = None) -> Delivery | None:
        """End a lease; the delivery, or None if it is over already, never was, or is not one of
        that subscription (None: any)."""
        found = self._find(token, subscription_id)
        if found is None:
            return None
        number, index, pull, delivery = found
        self._end(number, index, pull)
        return delivery

    def _end(self, number: int, index: int, pull: _Pull) -> None:
        pull.deliveries[index] = None
        pull.held -= 1
        if not pull.held:
            self._timeouts.cancel(pull.handle)
            del self._pulls[number]

    def extend(self, token: str, lease_ms: int, subscription_id: int | None = None) -> bool:
        """Let a lease last `lease_ms` from the present; False where `end` gives None."""
        found = self._find(token, subscription_id)
        if found is None:
            return False
        number, index, pull, _ = found
        pull.deadlines_ms[index] = deadline_ms = self._timeouts.now_ms + lease_ms
        if deadline_ms < pull.wakes_ms:
            self._timeouts.cancel(pull.handle)
            self._wake_at(number, pull, deadline_ms)
        return True

    def _wake_at(self, number: int, pull: _Pull, deadline_ms: int) -> None:
        pull.wakes_ms = deadline_ms
        wait_ms = deadline_ms - self._timeouts.now_ms
        pull.handle = self._timeouts.add(partial(self._expire, number), wait_ms)

    def _expire(self, number: int) -> None:
        """End the leases of a pull whose deadline has passed."""
        pull, now_ms = self._pulls[number], self._timeouts.now_ms
        expired: list[Delivery] = []
        next_ms: int | None = None
        for index, (delivery, deadline_ms) in enumerate(
            zip(pull.deliveries, pull.deadlines_ms, strict=True)
        ):
            if delivery is None:
                continue
            if deadline_ms <= now_ms:
                expired.append(delivery)
                self._end(number, index, pull)
            elif next_ms is None or deadline_ms < next_ms:
                next_ms = deadline_ms
        if next_ms is not None:
            self._wake_at(number, pull, next_ms)
        if expired:
            self.on_expired(expired)

    def count(self) -> int:
        """Leases that are held."""
        return sum(pull.held for pull in self._pulls.values())
