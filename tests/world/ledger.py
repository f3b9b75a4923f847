"""The ledger: what is durable, what was promised and what was received, kept outside the server.

It learns from three sources only: groups that the message log made durable (`testing.durable`),
rows that the dispatch log made durable, and what clients and subscribers saw. Every delivery and
every answer is held against it at once (I1, I3–I5), the files after every recovery (I6, I7), the
rest at the end.

Cost: about 10 µs per record. Threads: none.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NoReturn

import msgspec

from delayserver.delivery.deadlines import STEP_MS
from delayserver.delivery.settler import DISPATCH_ROW
from delayserver.parts.heartbeats.records import Heartbeat
from delayserver.parts.imports.records import Archived, read_archived
from delayserver.records.direct import DIRECT_NAME, is_direct
from delayserver.records.message import OUTCOME_HEADER, DueDelivery, State, decode_payload
from delayserver.records.message_id import read_id
from delayserver.records.subscriptions import Subscription
from delayserver.records.tables import (
    parse_dead_letter_key,
)
from delayserver.schedule.wheel_rows import FiredRows
from storage.buckets import day_of, is_day
from storage.catalog import Table
from storage.errors import DamageError
from storage.frame import Damage
from storage.rows import FLAG_REMOVAL, HOUR_MS, Outcome
from tests.world.durable import NEVER_MS, DurableMessage, DurableRecords
from tests.world.server import SimulatedServer, seqs_of
from tests.world.violation import Violation


class Ledger(DurableRecords):
    """Everything that was promised."""

    def __init__(self) -> None:
        super().__init__()
        self.groups.waits_still = self._waits_still
        self.groups.is_named = self._is_row_named  # a method, so that a copy asks itself
        self.damage: list[DamageError] = []
        self.may_be_damaged: Callable[[], bool] = lambda: True
        """Whether something was made unreadable in this life."""
        self._outcomes: dict[tuple[int, int], int] = {}
        """Schedule row and subscription → how the delivery ended; durable."""
        self._ended: dict[tuple[int, int], int] = {}
        """The same in this life, durable or not."""
        self._settled: set[bytes] = set()
        """All rows that were ever given to the dispatch log."""
        self._recorded_at: dict[int, dict[int, int]] = {}
        """Schedule row → subscriptions that it was delivered to, and how many were before."""
        self._made_at: dict[int, int] = {}
        """Subscription → how many deliveries had been recorded when it was made."""
        self._on_their_way: set[tuple[int, int]] = set()
        self._leased_until: dict[tuple[int, int], int] = {}
        """Schedule row and subscription → when its lease will be over, on the stopwatch."""
        self._leased_as: dict[tuple[int, int], DueDelivery] = {}
        """As what it was leased last: the same consumer may hold an older lease, which is over."""
        self._left: dict[tuple[int, int], int] | None = None
        """As `_leased_until` was at a planned stop, since when no process has served."""
        self._starts_since = 0
        """How often a process has begun to start since."""
        self._left_ms = self._taken_ms = 0
        """When that was, and when a process began to take the leases over, on the stopwatch."""
        self._fired_until_ms = 0
        """The latest moment at which the wheel was advanced in this life."""
        self.received: dict[int, set[int]] = {}
        """Message → subscriptions that saw it, whatever the server knows."""
        self.delivered: dict[int, set[int]] = {}
        """Message → subscriptions whose delivery is recorded."""
        self.dropped: set[int] = set()
        self._completed: set[int] = set()
        """Messages that the answers to events have counted."""
        self.archive = False
        """Whether nothing may be deleted that was not archived."""
        self._archives: dict[int, list[tuple[Archived, set[int]]]] = {}
        """Hour → what somebody has a copy of, and has said so: that, and its rows."""
        self._confirmed: dict[int, Archived] = {}
        """Hour → the last of them that was answered."""

    # ── deliveries ─────────────────────────────────────────────────────────────────────────────

    def fired(self, batches: list[FiredRows], now_ms: int) -> None:
        last_ms = 0
        self._fired_until_ms = max(self._fired_until_ms, now_ms)
        self._latest_ms = max(self._latest_ms, now_ms)
        for batch in batches:
            for offset_ms in batch.rows["due_offset_ms"].tolist():
                due_ms = batch.hour * HOUR_MS + offset_ms
                if due_ms > now_ms:
                    raise Violation(f"due at {due_ms}, fired at {now_ms}: early (I1)")
                if due_ms < last_ms:
                    raise Violation(f"due at {due_ms}, fired after {last_ms} (I13)")
                last_ms = due_ms
        seqs = (seq for batch in batches for seq in batch.rows["seq"].tolist())
        self.groups.fired(seqs, self.durable_seq)

    def sent(self, subscription: Subscription, delivery: DueDelivery) -> None:
        self.counts["sent"] += 1
        seq, key = delivery.entry.seq, (delivery.entry.seq, subscription.id)
        entry = self._entries.get(seq)
        if entry is None:
            raise Violation(f"row {seq} was sent before it was durable (I3)")
        due_ms, message_seq, entry_subscription_id = entry
        message = self.messages[message_seq]
        if self._fired_until_ms < due_ms:
            raise Violation(f"row {seq}, due at {due_ms}, was sent too early (I1)")
        if (
            delivery.entry.due_ms != due_ms
            or delivery.origin.message_seq != message_seq
            or delivery.origin.published_due_ms != message.due_ms
            or delivery.subject != self.subjects[message.subject_id]
            or delivery.payload.body != message.payload.body
            or delivery.payload.key != message.payload.key
        ):
            raise Violation(f"row {seq} was sent as another message: {delivery} (I8)")
        direct_id = message.payload.direct_id
        self.counts["sent where they say"] += bool(direct_id)
        if is_direct(subscription.id) and subscription.id != direct_id:
            raise Violation(f"message {message_seq} does not say that it goes to {subscription.id}")
        if direct_id and subscription.id != direct_id and not delivery.payload.is_replay:
            raise Violation(f"message {message_seq} says where it goes, not {subscription.name}")
        if message.cancelled:
            raise Violation(f"message {message_seq} was cancelled, and row {seq} fired (I5)")
        if message.where[entry_subscription_id] != seq:
            raise Violation(f"message {message_seq} is elsewhere by now, and row {seq} fired (I5)")
        if (seq, 0) in self._removed or key in self._removed:
            raise Violation(f"row {seq} was removed, and fired (I4)")
        if self._expires_ms.get(seq, NEVER_MS) <= self.clock.now_ms:
            raise Violation(f"row {seq} was sent though its time to live was over")
        if key in self._outcomes or key in self._ended:
            raise Violation(f"row {seq} was sent to {subscription.name} again (I4)")
        if key in self._on_their_way:
            raise Violation(f"row {seq} is on its way to {subscription.name} twice (I4)")
        self._on_their_way.add(key)
        is_its_own = entry_subscription_id in (0, subscription.id)
        since_seq = self._made_seqs.get(subscription.id, 0)
        self.groups.sent(
            seq,
            subscription.id,
            since_seq=since_seq if is_its_own and due_ms >= subscription.created_ms else None,
        )
        times_sent = self.times_sent(message_seq, subscription.id)
        if delivery.attempt > times_sent + 1:
            raise Violation(
                f"message {message_seq} was sent to {subscription.name} {times_sent} times, "
                f"and this is attempt {delivery.attempt}"
            )
        self._sends.setdefault(message_seq, Counter())[subscription.id] += 1
        made_at = self._made_at.get(subscription.id, 0)
        for other_id, recorded_at in self._recorded_at.get(seq, {}).items():
            if recorded_at < made_at and not self.is_deleted(other_id):
                raise Violation(
                    f"row {seq} went to {other_id} before {subscription.id} was made (I4)"
                )

    def _waits_still(self, row_seq: int, subscription_id: int) -> bool:
        """Whether a row is still to be delivered to a subscription, as far as anybody outside
        knows."""
        key = row_seq, subscription_id
        message = self.messages[self._entries[row_seq][1]]
        where = message.where.get(subscription_id, message.where[0])
        return not (
            where != row_seq
            or message.cancelled
            or subscription_id in message.dead
            or key in self._ended
            or key in self._outcomes
        )

    def behind_nobody(self, server: SimulatedServer) -> dict[str, set[str]]:
        """Groups of which messages wait for their turn and none has it, by subscription."""
        if not (server.is_idle() and server.engine.dispatcher.queues.may_deliver()):
            return {}
        found: dict[str, set[str]] = {}
        for queue in server.engine.dispatcher.queues:
            single_file = queue.rows.single_file
            if single_file is None or queue.subscription.paused or server.is_held(queue):
                continue
            if queue.held_until_ms > server.stopwatch() or server.is_to_be_looked_at(queue):
                continue  # Its receiver wants nothing for a while, or time passed without a look.
            waiting = seqs_of(single_file.slices())
            others = {*queue.reserved, *seqs_of(queue.rows.slices())}.difference(waiting)
            subscription = queue.subscription
            groups = self.groups.behind_nobody(subscription.id, waiting, others)
            if groups:
                found[subscription.name] = groups
        return found

    def left(self, subscription: Subscription, seqs: list[int], waiting: list[int]) -> None:
        """Rows leave by priority; where late ones are spread or old ones dropped, more than that
        decides."""
        if subscription.spread_ms or subscription.drop_older_than_ms:
            return
        priorities = [self._priority(seq) for seq in seqs]
        self.counts["left by priority"] += len(set(priorities)) > 1
        if priorities != sorted(priorities, reverse=True):
            raise Violation(f"rows {seqs} left with the priorities {priorities}")
        behind = max(map(self._priority, waiting), default=0)
        if behind > priorities[-1]:
            raise Violation(f"a row of priority {priorities[-1]} left, and one of {behind} waits")

    def outlived(self, server: SimulatedServer) -> list[int]:
        """Subscriptions for which rows wait whose time to live is over, and could be given up."""
        if not server.is_idle():
            return []
        over_ms = self.clock.now_ms - STEP_MS
        return [
            queue.subscription.id
            for queue in server.engine.dispatcher.queues
            if not (queue.dropping or server.is_held(queue))
            and any(
                self._expires_ms.get(seq, NEVER_MS) <= over_ms and not self._is_named((seq,))
                for fired in queue.rows.slices()
                for seq in fired.rows["seq"].tolist()
            )
        ]

    def _priority(self, row_seq: int) -> int:
        options = self.messages[self._entries[row_seq][1]].payload.options
        return 0 if options is None else options.priority

    def returned(self, delivery: DueDelivery, *, seen: bool) -> None:
        """A delivery is not on its way any more; `seen`: the subscriber had it."""
        key = delivery.entry.seq, delivery.subscription_id
        self._on_their_way.discard(key)
        self._leased_until.pop(key, None)
        if seen:
            self.received.setdefault(delivery.origin.message_seq, set()).add(
                delivery.subscription_id
            )

    def expired(self, deliveries: list[DueDelivery]) -> None:
        for delivery in deliveries:
            key = delivery.entry.seq, delivery.subscription_id
            early_ms = self._leased_until.get(key, 0) - self.present()
            if early_ms > 0:
                raise Violation(f"the lease of row {key[0]} was over {early_ms} ms early (I4)")
            self.returned(delivery, seen=False)

    def leased(self, delivery: DueDelivery, lease_ms: int) -> None:
        """A consumer has a lease of that length from now on."""
        key = delivery.entry.seq, delivery.subscription_id
        self._leased_until[key] = self.present() + lease_ms
        self._leased_as[key] = delivery

    def leaving(self) -> None:
        self._left, self._left_ms = dict(self._leased_until), self.present()
        self._starts_since = 0

    def taking_over(self) -> None:
        self._taken_ms = self.present()

    def _take_over(self, server: SimulatedServer) -> None:
        """Leases that were left at a planned stop are good, and last for as long as they had left.

        They end with the stop where the start crashed behind the moment at which it had read them,
        where the clock was set back behind the due time, and where the row cannot be read."""
        left, self._left = self._left, None
        if left is None:
            return
        if not server.store.kept.is_clean:
            # A fault may have struck the record of the stop.
            if self._starts_since == 1 and not self.may_be_damaged():
                raise Violation("a planned stop is taken for a kill (I4)")
            return
        for (seq, subscription_id), until_ms in left.items():
            is_due = self._entries[seq][0] <= server.engine.dispatcher.queues.started_ms
            subscription = server.engine.registry.by_id(subscription_id)
            if not is_due or subscription is None or self._is_named((seq,)):
                continue
            if seq not in server.engine.dispatcher.queues.of(subscription).reserved:
                raise Violation(f"the lease of row {seq} did not outlast a planned stop (I4)")
            self.counts["leases over a restart"] += 1
            self._on_their_way.add((seq, subscription_id))
            left_ms = max(until_ms - self._left_ms, 1)
            self._leased_until[seq, subscription_id] = self._taken_ms + left_ms

    def is_leased(self, delivery: DueDelivery) -> bool:
        """Whether a consumer has a lease of it that is not over."""
        key = delivery.entry.seq, delivery.subscription_id
        return key in self._leased_until and self._leased_as.get(key) is delivery

    def check_leases(self) -> None:
        """The server has just looked at its clocks: what is over has ended."""
        for (seq, _), until_ms in self._leased_until.items():
            if until_ms <= self.present():
                raise Violation(f"the lease of row {seq} is over, and does not end (I3)")

    def settled(self, row: bytes) -> None:
        seq, message_seq, _, _, subscription_id, _, outcome, _ = DISPATCH_ROW.unpack(row)
        self._ended[seq, subscription_id] = outcome
        self._settled.add(row)
        self.groups.settled(message_seq, subscription_id)
        if outcome == Outcome.DROPPED:
            self.dropped.add(message_seq)
        elif subscription_id not in self.received.get(message_seq, ()):
            raise Violation(f"message {message_seq} counts as delivered, and nobody saw it (I3)")

    def recorded(self, rows: list[bytes]) -> None:
        for row in rows:
            seq, message_seq, _, _, subscription_id, _, outcome, _ = DISPATCH_ROW.unpack(row)
            self._outcomes[seq, subscription_id] = outcome
            if outcome == Outcome.DELIVERED:
                self.delivered.setdefault(message_seq, set()).add(subscription_id)
                here = self._recorded_at.setdefault(seq, {})
                here.setdefault(subscription_id, len(self._outcomes))

    def damaged(self, error: DamageError) -> None:
        if not self.may_be_damaged():
            raise Violation(f"damage is named, and there is none (I8): {error}")
        self.damage.append(error)

    def _is_row_named(self, row_seq: int) -> bool:
        return self._is_named((row_seq,))

    def _is_named(self, entry_seqs: Iterable[int]) -> bool:
        """Whether one of these rows was named as damaged in this life: who cannot be delivered
        is in no queue, and nobody knows his state."""
        return any(
            one.first_seq <= seq <= (one.last_seq or seq)
            for seq in entry_seqs
            for one in self.damage
        )

    def made(self, subscription_id: int) -> None:
        """Somebody makes a subscription; what others have had is not for it."""
        self._made_at[subscription_id] = len(self._outcomes) + 1

    def name_of(self, subscription_id: int) -> str:
        """By which its dead letters are listed."""
        if is_direct(subscription_id):
            return DIRECT_NAME
        return self.subscriptions[subscription_id].name

    def redriving(self, owners: Iterable[Subscription], next_seq: int) -> None:
        """A redrive begins: it may take what these had given up by now."""
        self._redriven_below.update(
            {one.id: next_seq - self._redriven_below[one.id] for one in owners}
        )

    # ── answers ────────────────────────────────────────────────────────────────────────────────

    def published(self, seq: int) -> None:
        """A publish was answered."""
        self.counts["published"] += 1
        if seq not in self.messages:
            raise Violation(f"the publish of {seq} was answered before it was durable (I3)")

    def defined(self, definition: Subscription) -> None:
        """A change of a subscription was answered."""
        known = self.subscriptions.get(definition.id)
        if (
            known is None
            or known.timeout_ms < definition.timeout_ms
            or known.deleted < definition.deleted
        ):
            raise Violation(f"a change of {definition.name} was answered and is not durable (I3)")

    def replayed(
        self, message_seq: int, subscription_ids: Iterable[int], before: Counter[tuple[int, int]]
    ) -> None:
        """A replay was answered; `before`: those that were durable when it was asked for."""
        self.counts["replays answered"] += 1
        for one in subscription_ids:
            if self.replays[message_seq, one] <= before[message_seq, one]:
                raise Violation(
                    f"the replay of {message_seq} to {one} was answered and is not durable (I3)"
                )

    def adopted(self, import_id: str, first_seq: int) -> None:
        """The adoption of an import was answered."""
        self.counts["imports answered"] += 1
        if self.imports.get(import_id) != first_seq:
            raise Violation(f"the import {import_id} was answered before it was durable (I3)")

    def cancelled(self, message_seq: int) -> None:
        """A cancel was answered."""
        self.counts["cancelled"] += 1
        message = self.known(message_seq)
        if not (message.cancelled or message.discarded):
            raise Violation(f"the cancel of {message_seq} was answered and is not durable (I5)")

    def moved(self, message_seq: int, due_ms: int) -> None:
        """A move was answered."""
        message = self.known(message_seq)
        entry_due_ms = self._entries[message.where[0]][0]
        self.counts["moved"] += 1
        if entry_due_ms != due_ms and not message.cancelled:
            self.counts["moved again"] += 1

    def renewed(self, body: bytes, deadline_ms: int) -> None:
        """The heartbeat with that body must not fire before this moment."""
        self._deadlines_ms[body] = max(self._deadlines_ms.get(body, 0), deadline_ms)

    def watching(self, key: str, now_ms: int) -> set[int]:
        """Messages that certainly wait, and that an event for the key has to complete."""
        return {
            message.seq
            for message in self.messages.values()
            if message.payload.watch is not None
            and key in message.payload.watch.keys
            and not message.cancelled
            and not message.fired
            and message.where.keys() == {0}
            and self._entries[message.where[0]][0] > max(now_ms, self._fired_until_ms)
            and message.seq not in self.received
            # It may have fallen due before the clock was set back.
            and not message.dead
            and message.seq not in self.dropped
        }

    def event_completed(self, cancelled: list[int], fired: list[int]) -> None:
        """An event was answered."""
        self.counts["events"] += 1
        self.counts["cancelled by an event"] += len(cancelled)
        self.counts["fired by an event"] += len(fired)
        for seq in cancelled:
            if not self.known(seq).cancelled:
                raise Violation(f"an event cancelled {seq}, which is not durable (I5)")
        for seq in fired:
            if not self.known(seq).fired:
                raise Violation(f"an event fired {seq}, which is not durable (I5)")
        for seq in (*cancelled, *fired):
            if seq in self._completed:
                raise Violation(f"message {seq} was completed by two events")
            self._completed.add(seq)

    def acked(self, delivery: DueDelivery) -> None:
        """An acknowledgement was answered."""
        self.counts["acked"] += 1
        if (delivery.entry.seq, delivery.subscription_id) not in self._outcomes:
            raise Violation(f"the ack of row {delivery.entry.seq} is not recorded (I4)")

    def located(self, message_seq: int, state: State) -> None:
        """A look-up, a cancel or a move was answered with the state of a message."""
        message = self.messages.get(message_seq)
        if message is None or self._is_named(message.where.values()):
            return
        ended = {
            outcome
            for (seq, _), outcome in (*self._ended.items(), *self._outcomes.items())
            if self._entries[seq][1] == message_seq
        }
        was_given_up = message.discarded and self._has_late_claims(message)
        if state is State.DELIVERED and not (ended or message.cancelled or was_given_up):
            raise Violation(f"message {message_seq} reads as delivered, and is not (I5)")
        if state is State.SCHEDULED and message.cancelled:
            raise Violation(f"message {message_seq} was cancelled, and reads as scheduled (I5)")
        first = message.where[0]
        if state is State.SCHEDULED and any(
            seq == first and outcome == Outcome.DELIVERED
            for (seq, _), outcome in (*self._ended.items(), *self._outcomes.items())
        ):
            raise Violation(f"message {message_seq} was delivered, and reads as scheduled (I5)")

    def _has_late_claims(self, message: DurableMessage) -> bool:
        """Whether a faithful subscription says that it existed always, and was refused when it was
        made first: the message, which nobody else took, reads as delivered to it."""
        subject = self.subjects[message.subject_id]
        return message.payload.to is None and any(
            not one.created_ms and one.matches(subject) and self._made_seqs[one.id] > message.seq
            for one in self.subscriptions.values()
        )

    # ── archives ───────────────────────────────────────────────────────────────────────────────

    def archiving(self, hour: int, archived: Archived, seqs: set[int]) -> None:
        """Somebody has a copy of these rows, and tells the server."""
        self._archives.setdefault(hour, []).append((archived, seqs))

    def archived(self, hour: int, archived: Archived) -> None:
        """The server has heard of it."""
        self._confirmed[hour] = archived
        self.counts["archived"] += 1

    def refused(self, hour: int, archived: Archived) -> None:
        """The server wants another one: this one does not count."""
        self._archives[hour] = [one for one in self._archives[hour] if one[0] is not archived]

    def purging(self, hour: int, seqs: set[int], dispatch_bytes: int) -> None:
        if not self.archive or not seqs:
            return
        for archived, copied in self._archives.get(hour, ()):
            if seqs <= copied and dispatch_bytes <= archived.dispatch_bytes:
                return
        raise Violation(f"hour {hour} is deleted with {seqs}, which nobody has archived")

    def _check_archives(self, server: SimulatedServer) -> None:
        known = read_archived(server.catalog)
        for hour, archived in self._confirmed.items():
            state = server.replay.hours.get(hour)
            if (
                state is not None
                and (state.length, state.last_entry_seq)
                == (archived.schedule_bytes, archived.last_seq)
                and (hour not in known or known[hour].extent != archived.extent)
            ):
                raise Violation(f"that {hour} was archived was answered and is forgotten (I6)")

    # ── recovery ───────────────────────────────────────────────────────────────────────────────

    def new_life(self) -> None:
        """The process is gone: what was not durable does not count any more."""
        self._starts_since += 1
        self._fired_until_ms = 0
        self._ended.clear()
        self._on_their_way.clear()
        self.groups.new_life()
        self.damage.clear()
        self._leased_until.clear()

    def recovered(self, server: SimulatedServer) -> None:
        """Hold the disk and the recovered state against what is durable."""
        last_seq = server.recovered.next_seq - 1
        if last_seq < self.durable_seq:
            raise Violation(
                f"recovered up to seq {last_seq}, but {self.durable_seq} was durable (I3)"
            )
        while self.durable_seq < last_seq:
            records = self._tentative.get(self.durable_seq + 1)
            if records is None:
                raise Violation(f"seqs up to {last_seq} are there, and nobody wrote them")
            self._apply(records.rows.tobytes(), records.payload)
        self._tentative.clear()
        self._take_over(server)
        for damage in server.recovered.damage:
            _refuse(damage, "a crash left damage behind (I8)")
        if server.recovered.subjects != {name: key for key, name in self.subjects.items()}:
            raise Violation(f"subjects are {server.recovered.subjects} (I7)")
        expected = {s.id: s for s in self.subscriptions.values() if not s.deleted}
        if {s.id: s for s in server.recovered.registry} != expected:
            raise Violation(f"subscriptions differ: {list(server.recovered.registry)} (I7)")
        letters = [parse_dead_letter_key(key) for key, _ in server.catalog.scan(Table.DEAD_LETTERS)]
        if letters != sorted(self.letters):
            raise Violation(f"dead letters are {letters}, not {sorted(self.letters)} (I7)")
        found = {
            key.decode(): msgspec.msgpack.decode(value, type=Heartbeat)
            for key, value in server.catalog.scan(Table.HEARTBEATS)
        }
        bodies = {
            key: (decode_payload(one.payload, "", 0, 0).body, one.timeout_ms)
            for key, one in found.items()
        }
        if bodies != self.heartbeats:
            raise Violation(f"heartbeats are {bodies}, not {self.heartbeats} (I7)")
        self.schedules.check_catalog(server.catalog)
        self.sources.check_catalog(server.catalog)
        present_ms = self.present()
        self._deadlines_ms = {body: present_ms + timeout_ms for body, timeout_ms in bodies.values()}
        self._check_files(server)
        self._check_archives(server)

    def _check_files(self, server: SimulatedServer) -> None:
        filed = server.replay.hours
        for hour in self._filed.keys() | {hour for hour in filed if not is_day(hour)}:
            expected = self._filed.get(hour, [])
            day = day_of(hour)
            if hour in filed and day in filed:
                raise Violation(f"hour {hour} and its day have a file each (I7)")
            found: list[tuple[int, int]] = []
            if hour in filed or day in filed:
                for frame in server.reader._schedule.scan(hour if hour in filed else day):
                    if isinstance(frame, Damage):
                        _refuse(frame, "damage in a schedule file (I7)")
                    rows = frame.rows[frame.rows["due_ms"] // HOUR_MS == hour]
                    found += zip(rows["seq"].tolist(), rows["flags"].tolist(), strict=True)
            entry_seqs = {seq for seq, flags in found if not flags & FLAG_REMOVAL}
            self._check_dispatch(server, hour, entry_seqs)
            missing = expected[: len(expected) - len(found)]
            if found != expected[len(missing) :]:
                raise Violation(f"hour {hour} holds {found}, not {expected} (I7)")
            # Rows may be missing only if the hour was settled and deleted.
            self._must_be_settled(seq for seq, flags in missing if not flags & FLAG_REMOVAL)
            self._filed[hour] = expected[len(missing) :]

    def _check_dispatch(self, server: SimulatedServer, hour: int, entry_seqs: set[int]) -> None:
        on_disk: list[bytes] = []
        for frame in server.reader._dispatch.scan(hour):
            if isinstance(frame, Damage):
                _refuse(frame, "damage in a dispatch file (I4)")
            data, size = frame.rows.tobytes(), frame.rows.dtype.itemsize
            # The last byte is the flags, which the settler sets.
            on_disk += [data[at : at + size - 1] + b"\0" for at in range(0, len(data), size)]
        for row in on_disk:
            if row not in self._settled:
                raise Violation(f"hour {hour} holds a delivery that nobody recorded: {row!r} (I4)")
        # What reached the disk without being synced counts from now on.
        self.recorded(on_disk)
        recorded = {DISPATCH_ROW.unpack(row)[0] for row in on_disk}
        for seq, _ in self._outcomes:
            if seq in entry_seqs and seq not in recorded:
                raise Violation(f"the delivery of row {seq} was recorded, and is not any more (I4)")

    def _must_be_settled(self, seqs: Iterable[int]) -> None:
        done = {seq for seq, _ in self._outcomes} | {seq for seq, _ in self._removed}
        for seq in seqs:
            if seq not in done:
                raise Violation(f"row {seq} was deleted and never settled (I3)")

    # ── the end ────────────────────────────────────────────────────────────────────────────────

    def due_times(self) -> Iterable[int]:
        """Of all rows there ever were."""
        return (due_ms for due_ms, _, _ in self._entries.values())

    def check_all_delivered(self) -> None:
        """Whether everything arrived: at each subscription that exists what fell due since it was
        made, and anything at one of them at least."""
        existing = [one for one in self.subscriptions.values() if not one.deleted]
        if self.heartbeats:
            raise Violation(f"heartbeats never fired: {self.heartbeats} (I3)")
        self.check_outcomes()
        for message in self.messages.values():
            if message.cancelled:
                continue
            subject = self.subjects[message.subject_id]
            delivered = self.delivered.get(message.seq, set())
            direct_id = message.payload.direct_id
            if direct_id:
                if direct_id not in delivered | message.dead:
                    raise Violation(f"message {message.seq} never came where it says (I3)")
                continue
            for subscription in existing:
                if (
                    subscription.matches(subject)
                    and len(subscription.spans) == 1
                    and self._falls_due_since_made(message, subscription.id)
                    and subscription.id not in delivered | message.dead
                ):
                    raise Violation(f"message {message.seq} never came to {subscription.name} (I3)")
            if not delivered and not message.dead and message.seq not in self.dropped:
                raise Violation(f"message {message.seq} was lost (I3)")

    def _falls_due_since_made(self, message: DurableMessage, subscription_id: int) -> bool:
        """Whether a message certainly fell due when the subscription existed already: its row is
        newer, or was due later than any clock showed until the subscription was durable.

        A message that is due between the decision and the disk may have been for others."""
        row_seq = message.where[0]
        made_seq, latest_ms = self._made_seqs[subscription_id], self._made_by_ms[subscription_id]
        return row_seq > made_seq or self._entries[row_seq][0] > latest_ms

    def check_outcomes(self) -> None:
        """Whether each outcome that somebody has asked for is told, and none twice as long as its
        key is known: what is redriven after that may die again, and that is told."""
        told: set[tuple[int, str, str]] = set()
        hours: set[tuple[int, str, str, int]] = set()
        for message in self.messages.values():
            if OUTCOME_HEADER in (message.payload.headers or {}):
                message_id, name, outcome = (message.payload.key or "").split(":")
                about = read_id(message_id).seq, name, outcome
                if (*about, message.due_ms // HOUR_MS) in hours:
                    raise Violation(f"the outcome {about} is told twice")
                told.add(about)
                hours.add((*about, message.due_ms // HOUR_MS))
        self.counts["outcomes told"] += len(told)
        for message in self.messages.values():
            subjects = message.payload.outcomes
            ended: list[tuple[int, str]] = []
            if subjects.delivered is not None:
                delivered = self.delivered.get(message.seq, ())
                ended += [(one, "delivered") for one in delivered]
            if subjects.dead is not None:
                ended += [(one, "dead") for one in message.dead]
            for subscription_id, outcome in ended:
                names = self.name_of(subscription_id), f"#{subscription_id}"
                if not any((message.seq, name, outcome) in told for name in names):
                    raise Violation(
                        f"message {message.seq} is {outcome} at {names[0]}, and nobody is told"
                    )


def _refuse(damage: Damage, what: str) -> NoReturn:
    """Nothing but a disk that fails may leave damage behind."""
    if damage.is_unreadable:
        raise damage.error()
    raise Violation(f"{what}: {damage}")
