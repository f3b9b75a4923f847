"""Subscribing: a subscription is added, changed or removed, and its messages follow from that.

    put ──▶ decided ──▶ record in the open group ──▶ durable ──▶ Registry and Dispatcher know it

A record holds a whole definition, so a change starts from the newest definition that was decided
(`decided`). The registry is behind it by the time of a sync. A change that is made from a
definition found there would undo the change that is being synced, or bring back a deleted
subscription.

A new subscription gets the messages that fall due from now on, and so does one with another
subject. Messages that have fallen due are for others, also if the clock was set back since. The
record says so in marks (`Horizon`), and keeps the subjects of before (`SubjectSpan`), so that a
restart sends the same messages to the same subscriptions as the process before it
(`records.receivers`). Subjects of which no message is kept any more are left out when the
definition is recorded the next time.

The server pauses a subscription by itself if its receiver is gone, or has failed for long
(`Failing`). Such a pause ends as any pause does; a pause for failures also ends with any new
definition.

Cost: one record for each call, O(1) for each tick. Threads: belongs to the event loop.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import msgspec

from delayserver.decisions.failing import Consequence, Failing
from delayserver.decisions.group import Group
from delayserver.decisions.groups import Groups
from delayserver.decisions.sequencer import Sequencer
from delayserver.delivery.dispatcher import Dispatcher
from delayserver.errors import ConflictError, NotFoundError, OverloadedError, StoppingError
from delayserver.records.horizon import Horizon, Mark
from delayserver.records.receivers import needed_spans
from delayserver.records.subscriptions import (
    GONE,
    Registry,
    StandIn,
    SubjectSpan,
    Subscription,
    encode_subscription,
)
from storage.frame import seal
from storage.rows import RecordKind


class Subscribing:
    """Records subscriptions, and brings them into force."""

    def __init__(
        self,
        registry: Registry,
        sequencer: Sequencer,
        groups: Groups,
        dispatcher: Dispatcher,
        *,
        kept_since_ms: Callable[[], int] = lambda: 0,
        on_defined: Callable[[Subscription], None] = lambda subscription: None,
    ) -> None:
        """`kept_since_ms`: no row that is filed and kept is due earlier. `on_defined` is told of
        each subscription that was added, changed or deleted, when that is in force."""
        self._kept_since_ms = kept_since_ms
        self._registry = registry
        self._sequencer = sequencer
        self._groups = groups
        self._dispatcher = dispatcher
        self._horizon = Horizon()
        self.decided = registry.snapshot()
        """Subscriptions as they are once everything that was decided is durable."""
        self.failing = Failing()
        self.on_failing: Callable[[int, int], object] = self.note_failing
        """Has it recorded since when a subscription fails, by its id; 0: it does not."""
        self.on_paused: Callable[[int], None] = lambda subscription_id: None
        """Told of a subscription that the server pauses by itself, when that is decided."""
        self._on_defined = on_defined

    def start(self, fired: Iterable[Mark]) -> None:
        """Take over the rows that have fired in the process before though they are not due yet."""
        now_ms = self._dispatcher.queues.now_ms
        # If the clock was set back since a definition was recorded, or a deletion, the rows that
        # had fallen due then still have: a new subscription must get the rows that a deleted one
        # has left.
        spans = self._registry.spans()
        ahead = (mark for span in spans for mark in span.marks if mark.before_ms > now_ms)
        self._horizon = Horizon([*fired, *ahead])
        self._horizon.advance(self._sequencer.next_seq - 1, now_ms)
        for registry in (self._registry, self.decided):
            registry.forget(self._may_have_left)

    def advance(self, now_ms: int) -> None:
        """Everything that was accepted and is due by `now_ms` has fallen due."""
        self._horizon.advance(self._sequencer.next_seq - 1, now_ms + 1)

    def on_rolled_back(self) -> None:
        """Records were undone, and their seqs are given again: to messages that have not fallen
        due."""
        self._horizon.roll_back(self._sequencer.next_seq - 1)

    def put_subscription(self, subscription: Subscription, *, is_told: bool = False) -> Group:
        """Add, change or (with `deleted`) remove a subscription; it counts once the group that is
        returned is durable. `is_told`: another shard has decided that, and since when it fails.

        Raises OverloadedError, StoppingError."""
        self._groups.admit(0)
        known = self.decided.by_id(subscription.id)
        if known is None:
            # Messages that have fallen due are for others.
            self._horizon.advance(self._sequencer.next_seq - 1, subscription.created_ms)
            failing_ms = subscription.failing_since_ms if is_told else 0
        else:
            failing_ms = (subscription if is_told else known).failing_since_ms
            is_resumed = known.paused and not subscription.paused
            if known.url != subscription.url or is_resumed:
                failing_ms = 0
                self.failing.forget(known.id)
            elif known.failing_since_ms and not failing_ms:
                self.failing.forget(known.id)
        if isinstance(subscription, StandIn):
            # It keeps the stored definition, except the parts that belong to this shard.
            subject = "" if subscription.deleted else subscription.subject
            if known is not None and known.spans[-1].subject == subject:
                return self._record(subscription.of_shard_of(known))
            return self._record(subscription.with_changes(**self._history(known, subscription)))
        return self._record(
            msgspec.structs.replace(
                subscription,
                **self._history(known, subscription),
                pause_reason=subscription.pause_reason if subscription.paused else "",
                failing_since_ms=failing_ms,
            )
        )

    def _history(self, known: Subscription | None, wanted: Subscription) -> dict[str, Any]:
        """The fields that say which subjects it had since when."""
        subject = "" if wanted.deleted else wanted.subject
        spans = () if known is None else known.spans
        if not spans or spans[-1].subject != subject:
            spans = (*spans, SubjectSpan(subject, self._sequencer.next_seq, self._horizon.marks))
        elif known is not None and not known.history:
            # As a version before has made it, which may be read again by one.
            legacy = {"horizon": known.horizon, "subject_since_ms": known.subject_since_ms}
            return {"history": (), **legacy}
        since_ms = 0 if known is None else known.subject_since_ms
        return {"history": self.needed(spans), "horizon": (), "subject_since_ms": since_ms}

    def needed(self, spans: tuple[SubjectSpan, ...]) -> tuple[SubjectSpan, ...]:
        """The part of a history that messages which are kept need."""
        if len(spans) == 1:
            return spans
        return needed_spans(spans, self._kept_since_ms(), self._groups.checkpoint_seq)

    def _record(self, subscription: Subscription) -> Group:
        known = self.decided.by_id(subscription.id)
        before, after = () if known is None else known.spans, subscription.spans
        release = None
        if before[-1:] != after[-1:]:
            release = self._dispatcher.defer({one.subject for one in (*before[-1:], *after[-1:])})
        self._sequencer.append(
            RecordKind.SUBSCRIPTION,
            subscription_id=subscription.id,
            payload=seal(encode_subscription(subscription)),
        )
        group = self._sequencer.group
        self.decided.put(subscription)
        undone = known or subscription.with_changes(deleted=True)
        group.undo.append(partial(self.decided.put, undone))
        group.effects.append(partial(self._on_durable, subscription))
        if release is not None:
            group.undo.append(release)
            group.effects.append(release)
        self._groups.wake()
        return group

    def change(self, name: str, **changes: bool | str) -> tuple[Subscription, Group]:
        """Change a part of a subscription, and see `put_subscription`. Raises NotFoundError,
        ConflictError."""
        found = _found(self.decided, name)
        if isinstance(found, StandIn) and not (found.can_be_changed or "deleted" in changes):
            raise ConflictError(
                f"the subscription {name!r} is not understood here ({found.problem}), and stands "
                "still: put it again, or delete it"
            )
        changed = found.with_changes(**changes)
        return changed, self.put_subscription(changed)

    def pause(self, subscription_id: int, reason: str = GONE) -> Group | None:
        """The receiver of a subscription is gone, or fails (`reason`): send it nothing more, at
        once, and record it.

        None: there is nothing to record. Raises OverloadedError, StoppingError."""
        in_force = self._registry.by_id(subscription_id)
        if in_force is not None:
            # Not only when it is durable: a receiver that is gone gets nothing in between.
            queue = self._dispatcher.queues.of(in_force)
            queue.subscription = queue.subscription.with_changes(paused=True)
        decided = self.decided.by_id(subscription_id)
        if decided is None or decided.paused:
            return None
        paused = decided.with_changes(paused=True, pause_reason=reason)
        group = self.put_subscription(paused)
        self.on_paused(subscription_id)
        return group

    def fails_for_long(self, subscription: Subscription, now_ms: int) -> bool:
        """An attempt has failed: is the subscription to be paused for that?"""
        consequence = self.failing.failed(subscription, now_ms)
        if consequence is Consequence.RECORD:
            self.on_failing(subscription.id, self.failing.since_ms(subscription.id))
        return consequence is Consequence.PAUSE

    def on_arrived(self, subscription: Subscription, now_ms: int) -> None:
        """An attempt has arrived."""
        if self.failing.arrived(subscription, now_ms) is Consequence.RECORD:
            self.on_failing(subscription.id, 0)

    def note_failing(self, subscription_id: int, since_ms: int) -> Group | None:
        """Record since when a subscription fails; of two such times the earlier counts. 0: it does
        not.

        None: it is not recorded, since it is known, or not now: the next attempt comes to the
        same."""
        decided = self.decided.by_id(subscription_id)
        if decided is None:
            return None
        known_ms = decided.failing_since_ms
        if known_ms == since_ms or 0 < known_ms < since_ms:
            return None
        try:
            self._groups.admit(0)
        except (OverloadedError, StoppingError):
            return None
        if not since_ms:
            self.failing.forget(subscription_id)
        return self._record(decided.with_changes(failing_since_ms=since_ms))

    def differing(self, wanted: Iterable[Subscription], *, are_all: bool) -> Iterator[Subscription]:
        """The subscriptions to put so that definitions are as another shard has them, deleted ones
        first. `are_all`: a subscription that is not among `wanted` is deleted.

        Each shard has its own marks of fallen due messages (`Horizon`); they are no difference."""
        wanted = list(wanted)
        if are_all:
            ids = {one.id for one in wanted}
            gone = [one for one in self.decided if one.id not in ids]
            yield from (one.with_changes(deleted=True) for one in gone)
        for one in wanted:
            known = self.decided.by_id(one.id)
            if known is None:
                if not one.deleted:
                    yield one
            elif known != one.of_shard_of(known):
                yield one

    def _on_durable(self, subscription: Subscription) -> None:
        self._registry.put(subscription)
        self._dispatcher.on_subscription(subscription, self._dispatcher.queues.now_ms)
        self._on_defined(subscription)
        if subscription.deleted:
            self.failing.remove(subscription.id)
            for registry in (self._registry, self.decided):
                registry.forget(self._may_have_left)
        elif self.failing.objects(subscription):
            self.on_failing(subscription.id, 0)

    def _may_have_left(self, departed: Subscription) -> bool:
        """Whether messages are kept that fell due before it was deleted."""
        return bool(self.needed(departed.spans)[0].subject)

    def subscription(self, name: str) -> Subscription:
        """A subscription by name, as it is in force. Raises NotFoundError."""
        return _found(self._registry, name)


def _found(registry: Registry, name: str) -> Subscription:
    found = registry.by_name(name)
    if found is None:
        raise NotFoundError(f"there is no subscription {name!r}")
    return found
