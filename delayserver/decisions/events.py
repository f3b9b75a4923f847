"""Events: one call completes everything that watches a key, durably and exactly once.

    key ──▶ Watches ──▶ messages that still wait ──▶ cancelled, or moved to now ──▶ one group

Whether a message's hour is loaded or lies in the far future makes no difference: the event is a
decision like a cancel or a move by id, and logged as such. A message that is on its way, delivered
or cancelled is left alone. One that an event has fired watches nothing any more, so that a second
event does not count it again, also not one for another of its keys.

Up to `EVENT_MESSAGES_MAX` messages (or half of `group_max_bytes` of bodies) are one group: after a
crash all of them are completed or none. An event with more of them is a sequence of such groups,
each in a turn of the event loop of its own; if the server ends in between, the first ones are
completed, and the same event completes the rest. Messages that are published after the event came
in are not its business.

Cost: about 15 µs per message that is cancelled; the body of one that is fired is read and logged
again. Threads: belongs to the event loop.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from delayserver.config import Settings
from delayserver.decisions.group import Group
from delayserver.decisions.groups import Groups
from delayserver.decisions.messages import Messages
from delayserver.decisions.sequencer import Sequencer
from delayserver.decisions.watches import Watcher, Watches
from delayserver.errors import ConflictError, NotFoundError
from delayserver.records.message import Payload, ScheduleEntry, State
from delayserver.records.tables import ChangeState, OnEvent
from storage.frame import seal

EVENT_MESSAGES_MAX = 500
"""They keep the event loop busy for some 15 ms."""


@dataclass(slots=True)
class Completed:
    """The result of an event. It may be told once `group` is durable (None: it is)."""

    cancelled: list[int]
    """Seqs of the messages."""
    fired: list[int]
    left: list[Watcher]
    """Those that did not fit into the group; they still watch."""
    group: Group | None


class Events:
    """Completes the messages that watch a key."""

    def __init__(
        self,
        settings: Settings,
        sequencer: Sequencer,
        groups: Groups,
        messages: Messages,
        watches: Watches,
    ) -> None:
        self._bytes_max = settings.group_max_bytes // 2
        self._sequencer = sequencer
        self._groups = groups
        self._messages = messages
        self._watches = watches
        self.events_total = 0

    def watchers(
        self, key: str, before_seq: int, from_seq: int = 0
    ) -> tuple[list[Watcher], int | None]:
        """Messages older than `before_seq` that an event for the key would complete, the first
        ones from a seq on; and where to go on (None: these were the last)."""
        from_seq = max(from_seq, self._watches.settled_before(key))
        watchers = self._watches.of(key, from_seq, EVENT_MESSAGES_MAX)
        older = [watcher for watcher in watchers if watcher.seq < before_seq]
        next_seq = older[-1].seq + 1 if len(older) == EVENT_MESSAGES_MAX else None
        states = [self._state(watcher) for watcher in older]
        settled = [
            watcher
            for watcher, state in zip(older, states, strict=True)
            if self._is_settled(watcher, state)
        ]
        if settled:
            are_first = from_seq <= self._watches.settled_before(key)
            are_all = are_first and len(settled) == len(older)
            self._watches.let_go(key, settled, older[-1].seq + 1 if are_all else 0)
        pairs = zip(older, states, strict=True)
        return [watcher for watcher, state in pairs if state is State.SCHEDULED], next_seq

    def _state(self, watcher: Watcher) -> State:
        """Where a message is; CANCELLED also if an event has fired it, since it watches nothing any
        more."""
        change = self._sequencer.changes(watcher.seq).get(0)
        if change is not None and change.state in (ChangeState.CANCELLED, ChangeState.FIRED):
            return State.CANCELLED
        return self._messages.locate(watcher.seq, watcher.due_ms).state

    def _is_settled(self, watcher: Watcher, state: State) -> bool:
        """Whether no event can complete a message any more, whatever happens: it was delivered to
        all, or cancelled, which may be rolled back for a while. A dead letter may be redriven."""
        if state is State.CANCELLED:
            return not self._sequencer.has_fresh_change(watcher.seq)
        return state is State.DELIVERED

    def entry(self, watcher: Watcher) -> ScheduleEntry:
        """The schedule row where the body of a message is found."""
        return self._messages.locate(watcher.seq, watcher.due_ms).entry

    def complete(
        self,
        key: str,
        watchers: list[Watcher],
        bodies: Mapping[int, tuple[Payload, int]],
        now_ms: int,
    ) -> Completed:
        """Cancel or fire messages, as many as fit into one group.

        `bodies`: payload and subject id of those that are to be fired, by seq; one without is left
        alone. Raises OverloadedError, StoppingError: then nothing was done."""
        count = total_bytes = 0
        for count, watcher in enumerate(watchers):
            body = bodies.get(watcher.seq)
            body_bytes = len(body[0].body) if body is not None else 0
            if count and total_bytes + body_bytes > self._bytes_max:
                break
            total_bytes += body_bytes
        else:
            count = len(watchers)
        self._groups.admit(total_bytes)
        self.events_total += 1
        event = seal(key.encode())
        done = Completed([], [], watchers[count:], None)
        for watcher in watchers[:count]:
            # Meanwhile it may have fallen due, or another client cancelled it.
            if self._state(watcher) is not State.SCHEDULED:
                continue
            try:
                if watcher.on_event == OnEvent.CANCEL:
                    self._messages.cancel(watcher.seq, watcher.due_ms, event=event)
                    done.cancelled.append(watcher.seq)
                elif (body := bodies.get(watcher.seq)) is not None:
                    self._messages.fire(watcher.seq, watcher.due_ms, now_ms, *body)
                    done.fired.append(watcher.seq)
            except (ConflictError, NotFoundError):
                continue
        done.group = self._groups.not_durable()
        return done
