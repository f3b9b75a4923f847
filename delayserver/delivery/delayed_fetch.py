"""Delayed fetch: a pull that waits until enough messages are there, or its time is up.

Each waiting consumer is one delayed operation of the purgatory. It watches the queue of its
subscription, under a key of its own for each `min_messages` and each set of subjects that it may
read, since all that wait for the same are satisfied in the order of their coming. An event looks at
the oldest of each key, so its cost does not depend on how many consumers wait.

    messages fall due ──▶ pump ──▶ the oldest whose number is there ──▶ completed, takes its rows
    its time is up    ──▶ expire ──▶ completed, takes the rows that there are
    it is gone        ──▶ cancel ──▶ completed, takes nothing

Fair: among the consumers that could be satisfied, the one that came first is. A consumer that waits
for more than there is does not hold up those behind it; when its time is up it gets the rest. A
consumer that may have none of the rows that were read for it waits for the rest of its time.

Cost: about 10 µs for a pull that waits and is completed; a cancel is O(1). Threads: belongs to the
event loop.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from delayserver.delivery.deliveries import Deliveries
from delayserver.records.message import DueDelivery
from delayserver.records.subjects import matches
from delayserver.timers.purgatory import DelayedOperation, Purgatory
from delayserver.timers.timeouts import Timeouts


@dataclass(frozen=True, slots=True)
class Pulled:
    """The answer to a consumer: deliveries, each with a lease; or nothing."""

    deliveries: Deliveries | None = None
    lease_prefix: str = ""
    """The prefix of the tokens; the index of the delivery follows."""

    @property
    def tokens(self) -> list[str]:
        """The tokens of the leases, in the order of the deliveries."""
        count = 0 if self.deliveries is None else len(self.deliveries)
        return [f"{self.lease_prefix}{index}" for index in range(count)]

    def __iter__(self) -> Iterator[tuple[DueDelivery, str]]:
        deliveries = () if self.deliveries is None else self.deliveries
        return zip(deliveries, self.tokens, strict=True)


@dataclass(slots=True, eq=False)
class PullRequest:
    """A consumer that waits for messages."""

    max_messages: int
    lease_ms: int
    wait_ms: int
    answer: Callable[["Pulled"], None]
    """Called once with deliveries and their leases; none if there was nothing in time."""
    min_messages: int = 1
    subjects: tuple[str, ...] = ()
    """Patterns of the subjects that the consumer may read; empty: all."""
    max_bytes: int = 0
    """The most bytes of payloads, unless one alone has more; 0: the most for one handout."""
    is_gone: bool = False
    """The consumer does not wait any more: nothing must be taken for it, or leased to it."""
    until_ms: int = 0
    """When its time is up, by the stopwatch of the dispatcher, which sets it."""
    again: "DelayedFetch | None" = None
    """Its wait after one that ended with messages it could not be given."""

    def may_read(self, subject: str) -> bool:
        """Whether the consumer may have messages of a subject."""
        return not self.subjects or any(matches(one, subject) for one in self.subjects)

    def finish(self, pulled: "Pulled") -> None:
        """Answer it. The answer refers to the pull that it ends, so it is let go here: else each
        pull would be left to the garbage collector, which holds up the event loop for tens of
        ms."""
        answer, self.answer = self.answer, _answered
        self.again = None
        answer(pulled)


def _answered(pulled: "Pulled") -> None:
    raise AssertionError("a pull is answered once")


class DelayedFetch(DelayedOperation):
    """One pull that waits. `ready` and `complete` are those of the dispatcher."""

    __slots__ = ("_complete", "_ready", "number", "request")

    def __init__(
        self,
        request: PullRequest,
        number: int,
        ready: Callable[[], bool],
        complete: Callable[["DelayedFetch"], None],
    ) -> None:
        super().__init__(request.wait_ms)
        self.request = request
        self.number = number
        self._ready = ready
        self._complete = complete

    def try_complete(self) -> bool:
        return self._ready() and self.force_complete()

    def on_complete(self) -> None:
        self._complete(self)

    def cancel(self) -> None:
        """The consumer is gone: end the wait, and take no messages; those that were taken for it
        are available again."""
        self.request.is_gone = True
        self.force_complete()
        if self.request.again is not None:
            self.request.again.force_complete()
            self.request.again = None


_Need = tuple[int, tuple[str, ...]]
"""How many messages, and of which subjects (`PullRequest.subjects`)."""


class Fetches:
    """All consumers that wait, by subscription."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._purgatory: Purgatory[tuple[int, _Need]] = Purgatory(timeouts)
        self._needs: dict[int, Counter[_Need]] = {}
        """Subscription → how many consumers wait for how many messages of which subjects."""
        self._next_number = 0

    def add(
        self,
        subscription_id: int,
        request: PullRequest,
        ready: Callable[[], bool],
        complete: Callable[[DelayedFetch], None],
    ) -> DelayedFetch:
        """Complete a pull at once if that is possible, else let it wait.

        `ready`: whether its messages are there; `complete`: take them, and answer."""
        need = request.min_messages, request.subjects
        needs = self._needs.setdefault(subscription_id, Counter())

        def completed(fetch: DelayedFetch) -> None:
            needs[need] -= 1
            if not needs[need]:
                del needs[need]
                if not needs and self._needs.get(subscription_id) is needs:
                    del self._needs[subscription_id]
            complete(fetch)

        needs[need] += 1
        self._next_number += 1
        fetch = DelayedFetch(request, self._next_number, ready, completed)
        if request.wait_ms > 0:
            self._purgatory.try_complete_else_watch(fetch, [(subscription_id, need)])
        else:
            fetch.force_complete()
        return fetch

    def oldest(
        self, subscription_id: int, messages: int, subject: str | None = None
    ) -> DelayedFetch | None:
        """The consumer that came first, of those that wait for no more than `messages`. `subject`:
        only those that may read it."""
        first: DelayedFetch | None = None
        for need in self._needs.get(subscription_id, ()):
            head = self._head(subscription_id, need) if need[0] <= messages else None
            if head is not None and subject is not None and not head.request.may_read(subject):
                continue
            if head is not None and (first is None or head.number < first.number):
                first = head
        return first

    def _head(self, subscription_id: int, need: _Need) -> DelayedFetch | None:
        head = self._purgatory.oldest((subscription_id, need))
        assert head is None or isinstance(head, DelayedFetch)
        return head

    def waiting(self, subscription_id: int) -> Iterator[DelayedFetch]:
        """All that wait, in no order, as long as each is completed before the next is asked for."""
        while (needs := self._needs.get(subscription_id)) is not None:
            head = self._head(subscription_id, next(iter(needs)))
            assert head is not None
            yield head

    def count(self) -> int:
        """How many wait."""
        return self._purgatory.delayed()

    def watched(self) -> int:
        """Entries in the watch lists, with those of the completed that are not purged yet."""
        return self._purgatory.watched()
