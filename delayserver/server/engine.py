"""The engine: everything the event loop decides, as one synchronous state machine.

    decisions ──▶ Groups ──▶ committer ──▶ on_committed ──▶ replay ──▶ on_filed
        ▲                                     │ express         │ live rows
        │      advance(now) ──▶ Hours, Wheel ◀┴─────────────────┘
     Outcomes ◀── result of a send ── Dispatcher ◀── fired rows

Decisions are made in `delayserver.decisions`, one idea a module; the engine is their
frame: it makes them, lets time pass for all of them, and follows a group from the
committer to the checkpoint. Callers talk to the parts (`engine.publishing`, `engine.outcomes`).

It touches no file and starts no thread: work that is done elsewhere goes out through
`EnginePorts` and comes back by an `on_…` method. The server wires the ports to threads, the
simulation to a scheduler with a seed. There are two kinds of time. A moment (`now_ms`, due times)
is of the clock, which may be set: it comes in with every call. A length (a lease, a wait, a rate)
is counted on the stopwatch, by `Timeouts`: no caller says how late it is there.

Cost: see the parts. Threads: belongs to the event loop; no locks.
"""

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, Protocol, TypeVar

import numpy as np

from delayserver.config import Settings
from delayserver.decisions.cancels import Cancels
from delayserver.decisions.delayed_produce import Level, Produces
from delayserver.decisions.events import Events
from delayserver.decisions.group import Group
from delayserver.decisions.groups import GroupPorts, Groups
from delayserver.decisions.leasing import Leasing
from delayserver.decisions.messages import Messages
from delayserver.decisions.outcome_messages import OutcomeMessages
from delayserver.decisions.outcomes import Outcomes
from delayserver.decisions.publishing import Publishing
from delayserver.decisions.redriving import Redriving
from delayserver.decisions.retries import Retries
from delayserver.decisions.sequencer import Sequencer
from delayserver.decisions.subscribing import Subscribing
from delayserver.decisions.watches import Watches
from delayserver.decisions.whereabouts import Whereabouts
from delayserver.delivery.dispatcher import ROUTE_ITEMS, Dispatcher
from delayserver.delivery.ports import DispatcherPorts
from delayserver.parts.part import CorePorts, Parts, TimedDecider
from delayserver.records.horizon import Mark
from delayserver.records.ids import IdCodec, KeyHasher
from delayserver.records.message import DueDelivery
from delayserver.records.subscriptions import Registry, Subscription
from delayserver.records.tables import first_kept_ms
from delayserver.schedule.hours import Hours
from delayserver.schedule.loader import LoadedHour
from delayserver.schedule.replay import Filed, Snapshot
from delayserver.schedule.wheel import Wheel
from delayserver.schedule.wheel_rows import WHEEL_DTYPE
from delayserver.server.clock_watch import ClockWatch
from delayserver.slices import Slices, TurnBudget, freeing, told_nothing
from delayserver.timers.timeouts import Timeouts
from storage.catalog import Catalog
from storage.frame import Rows
from storage.rows import HOUR_MS, is_among, select

STAND_STILL_MS: Final = 20
"""After the event loop has stood still for so long, it first reads the bytes that have come."""
LOOK_TURNS: Final = 6
"""Turns of the event loop in which that is done: for a new connection it takes three."""


D = TypeVar("D")


class EnginePorts(DispatcherPorts, GroupPorts, Protocol):
    """Work of the engine that is done elsewhere. No call waits."""

    def load(self, through_hour: int) -> None:
        """Make all hours up to this one live; answer with `on_loading`, then `on_loaded` each."""

    def retire(self, hours: list[int], through_seq: int) -> None:
        """These hours are settled, up to that seq."""

    def given_up(self, delivery: DueDelivery, reason: str) -> None:
        """No attempt is left: somebody may want to know."""

    def call_soon(self, function: Callable[[], None]) -> None:
        """Call a function in another turn of the event loop."""

    def space_bytes(self) -> int:
        """The free bytes on the device of the data directory."""

    def clock_was_set(self, by_ms: int) -> None:
        """The clock was set, by so many ms."""

    def defined(self, subscription: Subscription) -> None:
        """A subscription was added, changed or deleted, and that is in force."""

    def not_understood(self, kind: str, name: str, reason: str) -> None:
        """A definition is not understood: the word for its kind, its name, and why. Told once."""

    def forget_watches(self, keys: list[bytes]) -> None:
        """Remove these keys of the table WATCHES with a checkpoint to come."""


class Engine:
    """The parts that decide, the way of a group, and the passing of time."""

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog,
        sequencer: Sequencer,
        registry: Registry,
        ids: IdCodec,
        key_hasher: KeyHasher,
        ports: EnginePorts,
        *,
        first_hour: int,
        now_ms: int,
        stopwatch: Callable[[], int],
        epoch: str,
        random: Callable[[], float],
        parts: Parts,
        may_deliver: Callable[[], bool] = lambda: True,
        broker_room: Callable[[int], int] | None = None,
    ) -> None:
        """`may_deliver` and `broker_room`: as `Dispatcher` needs them."""
        self.settings = self._settings = settings
        self.catalog = catalog
        self.not_understood: Callable[[str, str, str], None] = ports.not_understood
        self._ports = ports
        self.ports: CorePorts = ports
        self._prune_seq = 0
        self.clock_watch = ClockWatch(now_ms, stopwatch())
        self._loads_asked: deque[range] = deque()
        self._looks_left = 0
        """Turns of the event loop in which sockets are still to be read."""
        self.ids = ids
        self.sequencer = sequencer
        self.registry = registry
        self.hours = hours = Hours()
        self.wheel = wheel = Wheel(first_hour * HOUR_MS)
        self.timeouts = timeouts = Timeouts(stopwatch)
        self.random = random
        self.slices = slices = Slices(ports.call_soon, stopwatch)
        self.watches = watches = Watches(catalog, ports.forget_watches)
        self.groups = groups = Groups(settings, sequencer, ports, may_deliver)
        self.whereabouts = Whereabouts(settings, catalog, groups, wheel, hours)
        self.dispatcher = Dispatcher(
            registry,
            sequencer.subject_names,
            hours,
            ports,
            timeouts,
            slices,
            lambda: self.outcomes,
            started_ms=now_ms,
            answer_max_bytes=settings.answer_max_bytes,
            webhooks_max=settings.webhook_connections_max,
            broker_room=broker_room,
            may_deliver=may_deliver,
            changes=sequencer.changes,
            has_not_fired=self.whereabouts.has_not_fired,
        )
        self.messages = messages = Messages(
            settings,
            sequencer,
            groups,
            wheel,
            hours,
            self.whereabouts,
            self.dispatcher,
            registry,
            ids,
            key_hasher,
            now_ms=now_ms,
        )
        self.publishing = Publishing(
            settings, sequencer, groups, messages, watches, ids, key_hasher
        )
        self.cancels = Cancels(sequencer, groups, wheel, hours, messages, ids, key_hasher)
        self.events = Events(settings, sequencer, groups, messages, watches)
        self.produces = Produces(groups, timeouts)
        self.subscribing = Subscribing(
            registry,
            sequencer,
            groups,
            self.dispatcher,
            kept_since_ms=partial(first_kept_ms, catalog),
            on_defined=ports.defined,
        )
        self.retries = retries = Retries(
            sequencer,
            groups,
            hours,
            messages,
            self.dispatcher,
            OutcomeMessages(registry, self.publishing),
            timeouts,
            slices,
            given_up=ports.given_up,
            group_retry_max_ms=settings.lead_ms,
        )
        self.outcomes = Outcomes(
            registry, self.dispatcher, self.subscribing, retries, timeouts, random
        )
        self.leasing = Leasing(registry, groups, self.dispatcher, retries, timeouts, epoch)
        self.redriving = Redriving(registry, sequencer, groups, messages, self.dispatcher)
        self.parts = parts
        self.deciders = [part.decide(self) for part in parts]
        """Those of `parts`, in the same order."""
        self._timed = [decider for decider in self.deciders if isinstance(decider, TimedDecider)]
        self._holds = [
            partial(part.holds, decider)
            for part, decider in zip(parts, self.deciders, strict=True)
            if part.holds is not None
        ]

    def part(self, kind: type[D]) -> D:
        """The decisions of a part, by their class."""
        return next(one for one in self.deciders if isinstance(one, kind))

    def start(
        self,
        through_hour: int,
        loaded: Iterable[LoadedHour],
        retired_through_hour: int = -1,
        fired: Iterable[Mark] = (),
    ) -> None:
        """Take over what recovery loaded: every unsettled hour up to `through_hour`.

        `fired`: marks of rows that have fired though they are not due yet."""
        self.subscribing.start(fired)
        self.hours.live_through_hour = through_hour
        self.hours.retired_through_hour = retired_through_hour
        for hour in loaded:
            self.on_loaded(hour)

    # ── time ───────────────────────────────────────────────────────────────────────────────────

    def advance(self, now_ms: int, stood_ms: int = 0) -> int:
        """Do the work that is due at `now_ms`; returns how long to wait for the next call at most,
        in ms.

        `stood_ms`: how long the event loop has stood still, or had no look at its sockets, before
        this call. A clock that was set back makes nothing fire again and nothing fire early."""
        began_ms = self.timeouts.stopwatch()
        # The horizon remembers the rows that had fallen due before a clock was set back: a
        # subscription that is made then does not get the messages that others had at noon.
        if by_ms := self.clock_watch.look(now_ms, began_ms):
            self._ports.clock_was_set(by_ms)
            self.look_again()
        self.subscribing.advance(now_ms)
        self.messages.advanced_ms = self.dispatcher.queues.now_ms = now_ms
        self.sequencer.refresh()
        self._load_ahead(now_ms)
        self._fire(now_ms)
        more = self._must_look(stood_ms)
        if not more:
            self.timeouts.advance()
        for decider in self._timed:
            more |= decider.run_due(now_ms)
        wake_in_ms = self.dispatcher.pump.wake(now_ms, TurnBudget())
        if settled := self.hours.pop_settled(
            now_ms, self.sequencer.next_seq, self.groups.filed_seq
        ):
            self._ports.retire(settled, self.groups.filed_seq)
        if more or wake_in_ms == 0 or self.wheel.is_behind(now_ms, self.hours.loaded_until_ms):
            return 0
        wait_ms = self.wheel.next_ms() - now_ms
        for decider in self._timed:
            wait_ms = min(wait_ms, decider.wait_ms(now_ms))
        if (over_ms := self.timeouts.next_ms()) is not None:
            wait_ms = min(wait_ms, over_ms - began_ms)
        if wake_in_ms is not None:
            wait_ms = min(wait_ms, wake_in_ms)
        # Rows of hours that are being loaded make the wheel wait, not spin.
        return max(wait_ms, 1)

    def look_again(self) -> None:
        """The clock was set, or the files of time zones have changed."""
        for decider in self._timed:
            decider.look_again()

    @property
    def is_reading(self) -> bool:
        """No length of time ends in this turn; see `_must_look`."""
        return self._looks_left > 0

    def _must_look(self, stood_ms: int) -> bool:
        """Whether no length of time ends in this turn, since the event loop has stood still: a
        renewal, an acknowledgement or an extension that came in time is still to be read. It has
        LOOK_TURNS for that: a connection may have to be accepted first."""
        if self._looks_left:
            self._looks_left -= 1
        elif stood_ms >= STAND_STILL_MS:
            self._looks_left = LOOK_TURNS
            for decider in self._timed:
                decider.on_stand_still(stood_ms)
        return self.is_reading

    def _fire(self, now_ms: int) -> None:
        """Fire the due rows, as many as fit into a turn of the event loop."""
        budget = TurnBudget()
        due = self.wheel.advance(
            now_ms,
            loaded_until_ms=self.hours.loaded_until_ms,
            rows_max=self._settings.fire_rows_max,
            routes_max=budget.left // ROUTE_ITEMS,
        )
        for fired in self.dispatcher.fire(due, now_ms, budget):
            # Its subjects have many subscriptions. It is due still, and first in the next turn.
            self.wheel.insert(fired.hour, fired.rows)

    def _load_ahead(self, now_ms: int) -> None:
        wanted = (now_ms + self._settings.lead_ms) // HOUR_MS
        if wanted > self.hours.live_through_hour:
            asked = range(self.hours.live_through_hour + 1, wanted + 1)
            # Until the replay thread has answered, nothing is known of any of these hours.
            self._loads_asked.append(asked)
            self.hours.loading.update(asked)
            self.hours.live_through_hour = wanted
            self._ports.load(wanted)

    def on_loading(self, before: int, snapshots: Iterable[Snapshot]) -> None:
        """The replay thread has made the hours after `before` live; these are being read."""
        asked = self._loads_asked.popleft()
        assert asked.start == before + 1, (asked, before)
        self.hours.loading.difference_update(asked)
        self.hours.loading.update(snapshot.hour for snapshot in snapshots)

    def on_loaded(self, loaded: LoadedHour) -> None:
        """An hour has come from the disk."""
        removed = self.sequencer.removed
        found = loaded.find(np.fromiter(removed, np.uint64, len(removed)))
        gone = found[self._removed_among(loaded.hour, loaded.rows(found))]
        loaded.remove(gone)
        # A row that could not be read stays unsettled: its hour is kept, for the repair (I8).
        self.hours.add(loaded.hour, loaded.count - len(gone) + (not loaded.is_whole))
        self.wheel.load(loaded.hour, loaded.runs)
        if len(loaded.of_groups):
            self.dispatcher.expect(loaded.hour, loaded.of_groups)
        self.hours.loading.discard(loaded.hour)
        self.prune()

    def _removed_among(self, hour: int, rows: Rows) -> np.ndarray:
        """Which of the rows that come are not to wait, since their removal was decided already.

        As long as the removal is not durable it may be rolled back, and they with it."""
        removed = self.sequencer.removed
        # After many cancels there are far more of them than rows that come by the express way.
        is_few = len(rows) < len(removed)
        seqs = removed.get_many(rows["seq"].tolist()) if is_few else removed
        gone = is_among(rows["seq"], np.fromiter(seqs, np.uint64, len(seqs)))
        for index in np.flatnonzero(gone).tolist():
            row = rows[index : index + 1].copy()
            record = removed.get(int(row["seq"][0]))
            assert record is not None
            group = self.groups.group_of(record)
            if group is not None:
                group.undo.append(partial(self.insert, hour, row))
        return gone

    # ── the way of a group ─────────────────────────────────────────────────────────────────────

    def on_committed(self, now_ms: int) -> bool:
        """The group that was being written is durable: now it happens, now it is answered.

        True: something of it may be due soon."""
        group = self.groups.on_committed()
        # The next decision has to see this, so the answers come behind it: a client that is told
        # that its message was moved, and cancels it at once, must find it where it was moved to.
        if group.express:
            self._insert_express(group)
        for effect in group.effects:
            effect()
        is_quick = self._ports.is_quick()
        if not is_quick:
            self.groups.flush(now_ms)  # the committer works while the waiters are told
        group.tell_waiters(None)
        if is_quick:
            self.groups.resume()
        self.produces.on_level_moved(Level.DURABLE)
        return bool(group.express)

    def on_commit_failed(self, error: Exception) -> None:
        """The group that was being written could not be, and is rolled back, with all decisions on
        top of it. No client was told of either, so it is as if they had never been asked for."""
        self.groups.on_commit_failed(error)
        self.subscribing.on_rolled_back()
        self.produces.on_rolled_back()

    def _insert_express(self, group: Group) -> None:
        by_hour: dict[int, list[tuple[int, int, int, int]]] = {}
        for seq, due_ms, route in group.express:
            row = (seq, 0, due_ms % HOUR_MS, route)
            by_hour.setdefault(due_ms // HOUR_MS, []).append(row)
        lengths = group.payload_lengths()
        for hour, of_hour in by_hour.items():
            rows = np.array(of_hour, WHEEL_DTYPE)
            rows["locator"] = lengths[(rows["seq"] - np.uint64(group.first_seq)).astype(np.intp)]
            self._insert_unless_removed(hour, rows)

    def _insert_unless_removed(self, hour: int, rows: Rows) -> None:
        if len(self.sequencer.removed):
            rows = select(rows, ~self._removed_among(hour, rows))
        self.insert(hour, rows)

    def insert(self, hour: int, rows: Rows) -> None:
        """Rows of a live hour begin to wait. Without rows: the hour may have to retire again."""
        if len(rows):
            self.wheel.insert(hour, rows)
        self.hours.add(hour, len(rows))

    def on_filed(self, filed: Filed) -> None:
        """Records are in their hours' files; those of live hours begin to wait."""
        for hour, rows in filed.live:
            self._insert_unless_removed(hour, rows)
        self.groups.on_filed(filed.last_seq)
        self.produces.on_level_moved(Level.FILED)

    def on_checkpoint(self, seq: int) -> None:
        """The catalog knows everything up to `seq`."""
        self.groups.on_checkpoint(seq)
        self._prune_seq = seq
        self.prune()

    def prune(self) -> None:
        """Forget what the catalog knows, unless it is still asked for."""
        # An hour that is being read does not show the removals since its snapshot, nor does a
        # look-up of a part show the changes since.
        if not self.hours.loading and not any(holds() for holds in self._holds):
            if gone := self.sequencer.prune(self._prune_seq):
                self.slices.begin(freeing(gone), told_nothing)
            self.watches.prune(self._prune_seq)
            for decider in self.deciders:
                decider.prune(self._prune_seq)
