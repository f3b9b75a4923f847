"""Failing: since when a webhook has had nothing but failures.

A client that asks for the state of a subscription sees since when it fails. A subscription may also
say after how long of that the server shall pause it (`disable_after`). The time since when it fails
is in memory. For those subscriptions it also goes into the definition once it has lasted a tenth of
that time. So a restart does not begin the count anew, and a receiver that fails by turns costs no
record. Days are counted by the clock, since they go on while no process runs.

Where there are other shards, that definition is one for all of them, and an arrival in any shard
takes the note back. Each shard sees its own attempts alone, perhaps two in three days. So it pauses
nothing before the others have heard since when it fails, and could object.

Cost: a dictionary access for each answer of a receiver. Threads: belongs to the event loop.
"""

from collections.abc import Iterator
from enum import Enum, auto
from typing import Final

from delayserver.records.subscriptions import Subscription

FAILING_MAX: Final = 20
"""Subscriptions that a summary names, those that fail for longest."""
_RECORD_PART = 10
"""The begin is recorded once failing has lasted this part of `disable_after`."""


class Consequence(Enum):
    """The next step after an attempt."""

    NOTHING = auto()
    RECORD = auto()
    """The definition is to say since when it fails (`Failing.since_ms`)."""
    PAUSE = auto()


class Failing:
    """All subscriptions that fail, by id."""

    def __init__(self) -> None:
        self._since_ms: dict[int, int] = {}
        self._arrived_ms: dict[int, int] = {}
        """For subscriptions that ask for it: when an attempt arrived here last."""
        self.is_alone = True
        """There is no other shard with attempts of the same subscriptions."""

    def failed(self, subscription: Subscription, now_ms: int) -> Consequence:
        """An attempt has failed."""
        limit_ms = subscription.disable_after_ms
        if not limit_ms:
            self._since_ms.setdefault(subscription.id, now_ms)
            return Consequence.NOTHING
        recorded_ms = 0 if self.objects(subscription) else subscription.failing_since_ms
        since_ms = recorded_ms or self._since_ms.get(subscription.id, now_ms)
        self._since_ms[subscription.id] = since_ms
        lasted_ms = now_ms - since_ms
        if lasted_ms >= limit_ms and (recorded_ms or self.is_alone):
            return Consequence.PAUSE
        if not recorded_ms and lasted_ms * _RECORD_PART >= limit_ms:
            return Consequence.RECORD
        return Consequence.NOTHING

    def arrived(self, subscription: Subscription, now_ms: int) -> Consequence:
        """An attempt has not failed."""
        self.forget(subscription.id)
        if subscription.disable_after_ms:
            self._arrived_ms[subscription.id] = now_ms
        return Consequence.RECORD if subscription.failing_since_ms else Consequence.NOTHING

    def objects(self, subscription: Subscription) -> bool:
        """Whether an attempt has arrived here since it fails, as its definition says."""
        since_ms = subscription.failing_since_ms
        return 0 < since_ms <= self._arrived_ms.get(subscription.id, 0)

    def since_ms(self, subscription_id: int) -> int:
        """Since when it fails; 0: it does not."""
        return self._since_ms.get(subscription_id, 0)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """All that fail: the id, and since when."""
        return iter(self._since_ms.items())

    def forget(self, subscription_id: int) -> None:
        """It begins anew."""
        self._since_ms.pop(subscription_id, None)

    def remove(self, subscription_id: int) -> None:
        """It is deleted."""
        self.forget(subscription_id)
        self._arrived_ms.pop(subscription_id, None)
