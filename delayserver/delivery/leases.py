"""Leases: messages that a consumer pulled and has not acknowledged yet.

A lease names one delivery until it is acknowledged, given back, or over. Its token carries a random
number of this server process, so a lease of an earlier process is never mistaken for one of this.
Leases of one pull stand together: one entry in the heap of deadlines for all of them.

Cost: O(1) per lease; one heap operation per pull and extension. Threads: belongs to the event loop.
"""

import heapq
from dataclasses import dataclass

from delayserver.message import Delivery


@dataclass(slots=True)
class _Pull:
    deliveries: list[Delivery | None]
    deadlines_ms: list[int]
    held: int


class Leases:
    """All leases of this process."""

    def __init__(self, epoch: str) -> None:
        self._epoch = epoch
        self._pulls: dict[int, _Pull] = {}
        self._heap: list[tuple[int, int]] = []
        self._next_number = 1

    def grant(self, deliveries: list[Delivery], deadline_ms: int) -> list[str]:
        """A token for each delivery, in order."""
        if not deliveries:
            return []
        number = self._next_number
        self._next_number += 1
        self._pulls[number] = _Pull(
            list(deliveries), [deadline_ms] * len(deliveries), len(deliveries)
        )
        heapq.heappush(self._heap, (deadline_ms, number))
        prefix = f"{self._epoch}-{number:x}-"
        return [prefix + str(index) for index in range(len(deliveries))]

    def _parse(self, token: str) -> tuple[int, int, _Pull] | None:
        epoch, _, rest = token.partition("-")
        number_text, _, index_text = rest.partition("-")
        if epoch != self._epoch:
            return None
        try:
            number, index = int(number_text, 16), int(index_text)
        except ValueError:
            return None
        pull = self._pulls.get(number)
        if pull is None or not 0 <= index < len(pull.deliveries):
            return None
        return number, index, pull

    def get(self, token: str) -> Delivery | None:
        """The delivery, as long as it is leased."""
        found = self._parse(token)
        return found and found[2].deliveries[found[1]]

    def end(self, token: str) -> Delivery | None:
        """End a lease; the delivery, or None if it is over already or never was."""
        found = self._parse(token)
        if found is None:
            return None
        number, index, pull = found
        delivery = pull.deliveries[index]
        if delivery is not None:
            self._end(number, index, pull)
        return delivery

    def _end(self, number: int, index: int, pull: _Pull) -> None:
        pull.deliveries[index] = None
        pull.held -= 1
        if not pull.held:
            del self._pulls[number]

    def extend(self, token: str, deadline_ms: int) -> bool:
        """Move the deadline of a lease; False if it is over."""
        found = self._parse(token)
        if found is None or found[2].deliveries[found[1]] is None:
            return False
        number, index, pull = found
        pull.deadlines_ms[index] = deadline_ms
        heapq.heappush(self._heap, (deadline_ms, number))
        return True

    def expire(self, now_ms: int) -> list[Delivery]:
        """End all leases whose deadline has passed; returns their deliveries."""
        expired: list[Delivery] = []
        while self._heap and self._heap[0][0] <= now_ms:
            _, number = heapq.heappop(self._heap)
            pull = self._pulls.get(number)
            if pull is None:
                continue
            for index, delivery in enumerate(pull.deliveries):
                if delivery is not None and pull.deadlines_ms[index] <= now_ms:
                    expired.append(delivery)
                    self._end(number, index, pull)
        return expired

    def shift(self, delta_ms: int) -> None:
        """The clock was set: a lease is a length of time, and keeps its length."""
        for pull in self._pulls.values():
            pull.deadlines_ms = [deadline_ms + delta_ms for deadline_ms in pull.deadlines_ms]
        # All by the same amount, so it is a heap still.
        self._heap = [(deadline_ms + delta_ms, number) for deadline_ms, number in self._heap]

    def next_ms(self) -> int | None:
        """When `expire` has something to look at."""
        return self._heap[0][0] if self._heap else None

    def count(self) -> int:
        """Leases that are held."""
        return sum(pull.held for pull in self._pulls.values())
