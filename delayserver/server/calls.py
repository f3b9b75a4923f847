"""The calls: all that the API and the queries may ask of a server, and the one place where they do.

    api, queries ──▶ Calls ──▶ publishing, messages, cancels, … as they are (bound once)
                           ──▶ what has to be waited for, as an awaitable

What is decided at once is a method of a part, bound here under a name that says it; so a publish
costs no more than by the part itself. What comes back from a thread, or once a group is durable, is
a coroutine or a future here.

Cost: nothing more than the part's own for what is bound; a future for what is waited for. Threads:
belongs to the event loop.
"""

import asyncio
import contextlib
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from delayserver.decisions.delayed_produce import Level
from delayserver.decisions.group import Group
from delayserver.decisions.imports import Import
from delayserver.decisions.messages import Versions
from delayserver.decisions.redriving import Replayable
from delayserver.decisions.watches import Watcher
from delayserver.delivery.delayed_fetch import DelayedFetch, PullRequest
from delayserver.delivery.own_threads import in_own_thread
from delayserver.delivery.permits import Permits
from delayserver.delivery.reader import Found, Reader
from delayserver.errors import ConflictError, InputError, NotFoundError, StoppingError
from delayserver.records.direct import DIRECT_NAME
from delayserver.records.message import Payload, ScheduleEntry
from delayserver.records.receivers import had
from delayserver.records.subscriptions import DIRECT, SPANS_MAX, Registry, Subscription
from delayserver.records.tables import (
    Archived,
    ChangeState,
    OnEvent,
    dead_letter_key,
    lost_subject,
    read_dead_letter_owners,
    read_dead_letters,
    read_letter,
)
from delayserver.schedule.archives import RetiredHour, retired_hours
from delayserver.security.tokens import TokenTable
from delayserver.server.futures import answering, durable, ending
from delayserver.server.gauges import Gauges
from delayserver.server.loop_turns import LoopTurns
from delayserver.server.shard import Shard
from delayserver.server.threads import CallRequest, CheckpointRequest, ConfirmRequest
from storage.catalog import Table
from storage.errors import DamageError

if TYPE_CHECKING:
    from delayserver.server.backups import BackupMaker
    from delayserver.server.telemetry import Telemetry

T = TypeVar("T")
REDRIVE_MAX = 64
"""Dead letters that are redriven in one turn of the event loop: a few ms."""
REDRIVE_BYTES_MAX = 4 * 1024 * 1024
"""Of their payloads together, unless one alone has more."""


class Spreading(Protocol):
    """Other shards, which have each definition before a change of it is answered."""

    async def check(self) -> None:
        """Raises ShardAwayError where some of them are away."""
        ...

    async def spread(self, subscription: Subscription) -> None:
        """Done when they have it, durable. Raises ShardAwayError."""
        ...


class Calls:
    """What one server can be asked. Reads see everything that was answered before."""

    def __init__(
        self,
        shard: Shard,
        gauges: Gauges,
        tokens: TokenTable,
        telemetry: "Telemetry | None" = None,
        *,
        turns: LoopTurns | None = None,
    ) -> None:
        self._shard = shard
        engine = self._engine = shard.engine
        self.settings = shard.settings
        self.clock = shard.clock
        self.stopwatch = shard.stopwatch
        self.random = shard.random
        self.tick_soon = shard.tick_soon
        self.call_soon = shard.call_soon
        self.slices = engine.slices
        self.turns = turns or LoopTurns(shard.call_soon, lambda took_s: None, lambda: 0.0)
        """Told of each turn of the event loop in which a request is looked at."""
        self.on_fatal = shard.on_fatal
        self.may_answer = shard.may_answer
        """Asked by the exit of the process (`delayserver.api.exit`), and by nothing else here."""
        self.shard = shard.store.identity.shard
        """The number of the shard, as its identity says it."""
        self.gauges = gauges
        self.tokens = tokens
        self.telemetry = telemetry
        self.directory = shard.store.identity.fingerprint
        """Which data directory it is."""
        self.catalog = shard.catalog
        """What it holds is as old as the last checkpoint; `checkpoint` makes one."""
        self._subscription_lock = asyncio.Lock()
        """Held by whoever changes a subscription: so nobody is told what is not durable yet."""
        self.spreading: Spreading | None = None
        """Where there are others that a changed subscription has to reach."""
        self.redrive_max = REDRIVE_MAX
        self.backups: BackupMaker
        """Set by who makes them, before anybody asks."""

        # What is known, and the group that whoever answers has to wait for.
        sequencer, groups, ids = engine.sequencer, engine.groups, engine.ids
        self.subjects = sequencer.subjects
        self.subject_names = sequencer.subject_names
        self.changes = sequencer.changes
        self.admit = groups.admit
        self.decide_when_free = groups.decide_when_free
        self.decide_this_turn = groups.decide_this_turn
        self.not_durable = groups.not_durable
        self.durable = durable

        # Messages: decided at once, to be answered when the group is durable.
        publishing, messages, cancels = engine.publishing, engine.messages, engine.cancels
        self.publish_one = publishing.publish_one
        self.publish_new = publishing.publish_new
        self.publishing_batch = publishing.publishing_batch
        self.replace = publishing.replace
        self.encode_id = ids.encode
        self.message_id = messages.message_id
        self.by_key = messages.by_key
        self.locate = messages.locate
        self.message_state = messages.look_up
        self.version = messages.version
        self.cancel = messages.cancel
        self.find_by_ids = cancels.by_ids
        self.find_by_keys = cancels.by_keys
        self.cancel_many = cancels.cancelling

        # What other shards are told of, and what their consumers are given.
        self.ready = engine.dispatcher.pulls.ready
        self.give_back = engine.leasing.give_back
        self.oldest_wait = engine.dispatcher.pulls.fetches.oldest

        # Subscriptions, heartbeats, schedules, sources, imports: decided at once, too.
        self.registry = engine.registry
        self.definition = engine.registry.by_id
        self.subscription = engine.subscribing.subscription
        self.put_heartbeat = engine.heartbeats.put
        self.heartbeat = engine.heartbeats.get
        self.delete_heartbeat = engine.heartbeats.delete
        self.schedules = engine.schedules
        self.sources = engine.sources
        self.source_errors: Mapping[str, str] = {}
        """By name, why a source cannot be read now."""
        self.begin_import = engine.imports.begin
        self.find_import = engine.imports.find
        self.import_state = engine.imports.state

    def soon_durable(self, group: Group | None) -> "asyncio.Future[None]":
        """As `durable`, where something may be due earlier than anything was before."""
        self._shard.tick_soon()
        return durable(group)

    def encode_ids(self, dues_ms: np.ndarray, seqs: np.ndarray) -> Sequence[str]:
        """The ids of messages, from columns of int64 and uint64."""
        ids = self._engine.ids
        return ids.texts(ids.encode_many(dues_ms, seqs))

    def waiting(self, subscription: Subscription) -> tuple[int, int]:
        """How many messages are due and wait for a subscriber, and how many it holds."""
        queue = self._engine.dispatcher.queues.of(subscription)
        return queue.count, queue.in_flight

    async def check_exactly_once(self, bootstrap: str) -> None:
        """Whether these brokers are those that have the logs of this cluster. Raises InputError."""
        transactions = self._shard.transactions
        if transactions is None:
            raise InputError(
                "exactly_once is for a node of a cluster (serve --cluster), and only into the "
                "brokers that have the cluster's own logs; elsewhere it is at_least_once",
                "/delivery",
            )
        if (
            problem := await in_own_thread("delayserver-brokers", transactions.differs, bootstrap)
        ) is not None:
            raise InputError(problem, "/delivery")

    def share_limits(self, permits: Permits) -> None:
        """Have the limits of webhooks counted for several shards together; before anything
        fires."""
        assert not any(self._engine.dispatcher.queues)
        self._engine.dispatcher.queues.permits = permits

    def pump(self, subscription_id: int) -> None:
        """Let rows leave the queue of a subscription as far as they may now."""
        subscription = self.registry.by_id(subscription_id)
        if subscription is not None:
            dispatcher = self._engine.dispatcher
            dispatcher.pump.run(dispatcher.queues.of(subscription), self.clock())

    def unsettled_by_hour(self) -> dict[int, int]:
        """Deliveries that are not settled, of each hour that is in memory."""
        return self._engine.hours.unsettled_by_hour()

    def live_through_hour(self) -> int:
        """The last hour that is in memory."""
        return self._engine.hours.live_through_hour

    async def acknowledged(
        self, group: Group | None, seq: int, level: Level, timeout_ms: int
    ) -> Level:
        """How far a publish has come when it has reached `level`, or else after `timeout_ms`.

        Raises what kept its group from being durable."""
        future: asyncio.Future[Level] = asyncio.get_running_loop().create_future()

        self._engine.produces.wait(group, seq, level, timeout_ms, answering(future))
        self._shard.tick_soon()
        return await future

    async def subject_of(self, seq: int, due_ms: int) -> str:
        """The subject of a message. Raises NotFoundError, DamageError."""
        found = await self.find_any(self._engine.messages.locate(seq, due_ms).rows)
        return self._engine.sequencer.subject_names[found.subject_id]

    async def move(self, seq: int, due_ms: int, new_due_ms: int, expected: Versions = None) -> str:
        """Give a message a new due time; durable on return. Returns its new version."""
        messages = self._engine.messages
        found = await self.find(messages.locate(seq, due_ms).entry)
        group = messages.move(seq, due_ms, new_due_ms, found.payload, found.subject_id, expected)
        version = messages.version(seq)
        await self.durable(group)
        return version

    async def find(self, entry: ScheduleEntry) -> Found:
        """Payload and subject of a schedule row. Raises NotFoundError, DamageError."""
        found = self._shard.unfiled(entry) or await self.read(lambda reader: reader.find(entry))
        if found is None:
            raise NotFoundError("the message was settled, and its hour is past its retention")
        return found

    async def find_any(self, rows: Sequence[ScheduleEntry]) -> Found:
        """As `find`, of the first of the rows of a message that is still kept: a retry may wait for
        longer than the hour of the message's own row is kept. Raises NotFoundError, DamageError."""
        for entry in rows[:-1]:
            with contextlib.suppress(NotFoundError):
                return await self.find(entry)
        return await self.find(rows[-1])

    def read(self, function: Callable[[Reader], T]) -> "asyncio.Future[T]":
        """Run something in the reader thread."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._shard.reading.put(CallRequest(function, answering(future)))
        return future

    def pull(self, subscription: Subscription, request: PullRequest) -> DelayedFetch:
        """Have `request` answered with messages and their leases, at once or later; returns what
        to cancel if the consumer is gone before. Raises StoppingError."""
        self.check_handing_out()
        fetch = self._engine.leasing.pull(subscription, request)
        if not fetch.is_completed:
            self._shard.tick_for_timeouts()
        return fetch

    def wait(
        self,
        subscription: Subscription,
        request: PullRequest,
        ready: Callable[[], bool],
        complete: Callable[[DelayedFetch], None],
    ) -> DelayedFetch:
        """Let a consumer wait for what may come of other shards, too. `complete` is called when
        `ready` says so, the time is up, or the wait is in vain: see `ready` of the calls.

        Whoever changes what `ready` says completes the `oldest_wait` for so many."""
        dispatcher = self._engine.dispatcher
        queue = dispatcher.queues.of(subscription)  # whose end ends the wait
        fetch = dispatcher.pulls.fetches.add(queue.subscription.id, request, ready, complete)
        if not fetch.is_completed:
            self._shard.tick_for_timeouts()
        return fetch

    def when_ready(self, told: Callable[[int], None]) -> None:
        """Have `told` called with the id of a pull subscription of which other rows may leave than
        before, perhaps."""
        self._engine.dispatcher.pulls.on_ready = told

    def after(self, delay_ms: int, callback: Callable[[], None]) -> Callable[[], None]:
        """Have `callback` called after so long. Returns what to call if it is not to be."""
        timeouts = self._engine.timeouts
        handle = timeouts.add(callback, delay_ms)
        self._shard.tick_for_timeouts()

        def cancel() -> None:
            timeouts.cancel(handle)

        return cancel

    def ack(
        self,
        subscription_id: int,
        tokens: list[str],
        done: Callable[[list[str], Exception | None], None],
    ) -> None:
        """Acknowledge leases; `done` gets those that were over, once the others are recorded, or
        with what kept a message with the outcome from being so."""

        def settled(expired: list[str], error: Exception | None) -> None:
            if error is None and len(expired) < len(tokens):
                self._shard.when_settled(partial(done, expired, None))
            else:
                done(expired, error)

        self._engine.leasing.ack(tokens, self.clock(), subscription_id, settled)

    def ack_soon(self, subscription_id: int, tokens: list[str]) -> list[str]:
        """Acknowledge leases for somebody who does not wait for the record, which is made within
        `settle_sync_ms`. Returns those that were over. Raises StoppingError: nothing was done."""
        self.check_running()
        return self._engine.leasing.ack(tokens, self.clock(), subscription_id)

    def check_running(self) -> None:
        """Raises StoppingError."""
        if self._engine.groups.stopping:
            raise StoppingError("the server is stopping")

    def check_handing_out(self) -> None:
        """Raises StoppingError, also where everything but a pull is still answered."""
        self.check_running()
        if self._engine.dispatcher.queues.draining:
            raise StoppingError("the server is stopping, and hands out nothing more")

    def nack(
        self,
        subscription_id: int,
        tokens: list[str],
        delay_ms: int,
        done: Callable[[list[str], Exception | None], None],
    ) -> None:
        """Give leased messages back; `done` gets the tokens that were over, once the others are
        recorded, or what kept them from being so. Raises OverloadedError."""
        self._engine.leasing.nack(tokens, delay_ms, self.clock(), subscription_id, done)
        self._shard.tick_soon()

    def extend(self, subscription_id: int, tokens: list[str], lease_ms: int) -> list[str]:
        """Give leases a new deadline. Returns those that were over."""
        expired = self._engine.leasing.extend(tokens, lease_ms, subscription_id)
        self._shard.tick_soon()  # A lease may have been made shorter.
        return expired

    async def event(self, key: str) -> tuple[int, int]:
        """Complete what watches a key; durable on return. How many were cancelled and fired."""
        events, before_seq = self._engine.events, self._engine.sequencer.next_seq
        cancelled = fired = 0
        from_seq: int | None = 0
        while from_seq is not None:
            watchers, from_seq = events.watchers(key, before_seq, from_seq)
            while watchers:
                bodies, count = await self._bodies_to_fire(watchers)
                done = events.complete(key, watchers[:count], bodies, self.clock())
                self._shard.tick_soon()
                await self.durable(done.group)
                cancelled += len(done.cancelled)
                fired += len(done.fired)
                watchers = done.left + watchers[count:]
            # Also where nothing waited: others have their turn.
            await asyncio.sleep(0)
        # What another event has decided must be durable, too.
        await self.all_durable()
        return cancelled, fired

    async def _bodies_to_fire(
        self, watchers: list[Watcher]
    ) -> tuple[dict[int, tuple[Payload, int]], int]:
        """Payload and subject id by seq, and of how many of the watchers: they may be long."""
        bytes_max = self.settings.answer_max_bytes
        bodies: dict[int, tuple[Payload, int]] = {}
        on_disk: list[tuple[int, ScheduleEntry]] = []
        for watcher in watchers:
            if watcher.on_event == OnEvent.FIRE:
                entry = self._engine.events.entry(watcher)
                if (found := self._shard.unfiled(entry)) is not None:
                    bodies[watcher.seq] = found.payload, found.subject_id
                else:
                    on_disk.append((watcher.seq, entry))

        def read(reader: Reader) -> int:
            total_bytes = 0
            for count, (seq, entry) in enumerate(on_disk):
                if total_bytes > bytes_max:
                    return count
                try:
                    found = reader.find(entry)
                except DamageError as error:
                    self._shard.on_damage(error)
                    continue
                if found is not None:
                    bodies[seq] = found.payload, found.subject_id
                    total_bytes += len(found.payload.body)
            return len(on_disk)

        count = await self.read(read) if on_disk else 0
        if count < len(on_disk):
            return bodies, bisect_left(watchers, on_disk[count][0], key=attrgetter("seq"))
        return bodies, len(watchers)

    async def put_subscription(
        self, name: str, define: Callable[[Subscription | None, Registry], Subscription]
    ) -> Subscription:
        """Add or change a subscription; durable and in force on return.

        `define`: makes its definition of the one that has the name and of all that were decided.
        Raises what it raises, OverloadedError, StoppingError, ShardAwayError."""
        if self.spreading is not None:
            await self.spreading.check()
        async with self._subscription_lock:
            decided = self._engine.subscribing.decided
            subscription = define(decided.by_name(name), decided)
            await self.durable(self._engine.subscribing.put_subscription(subscription))
        if self.spreading is not None:
            await self.spreading.spread(subscription)
        return subscription

    async def change_subscription(self, name: str, **changes: bool | str) -> Subscription:
        """Change a part of a subscription; durable and in force on return.

        Raises NotFoundError, OverloadedError, StoppingError, ShardAwayError."""
        if self.spreading is not None:
            await self.spreading.check()
        async with self._subscription_lock:
            changed, group = self._engine.subscribing.change(name, **changes)
            await self.durable(group)
        if self.spreading is not None:
            await self.spreading.spread(changed)
        return changed

    async def take_subscriptions(
        self, subscriptions: Iterable[Subscription], *, are_all: bool
    ) -> None:
        """Take over definitions that another shard has decided; durable and in force on return.

        `are_all`: what is not among them is deleted. Raises OverloadedError, StoppingError: some
        of them may be in force."""
        async with self._subscription_lock:
            for changed in self._engine.subscribing.differing(subscriptions, are_all=are_all):
                self._engine.subscribing.put_subscription(changed, is_told=True)
            await self.all_durable()

    def when_paused(self, paused: Callable[[int], None]) -> None:
        """Have `paused` called with the id of a subscription that is recorded as paused, since its
        receiver said that it is gone, or has failed for long."""
        self._engine.subscribing.on_paused = paused

    def when_failing(self, failing: Callable[[int, int], None]) -> None:
        """There are other shards: have `failing` called with the id of a subscription and since
        when it fails (0: it does not), instead of recording that in this shard."""
        self._engine.subscribing.failing.is_alone = False
        self._engine.subscribing.on_failing = failing

    async def note_failing(self, subscription_id: int, since_ms: int) -> Subscription | None:
        """Record since when a subscription fails (0: it does not); as it is then, durable. None:
        nothing is recorded.

        Raises what keeps it from being durable."""
        group = self._engine.subscribing.note_failing(subscription_id, since_ms)
        if group is None:
            return None
        await self.durable(group)
        return self._engine.registry.by_id(subscription_id)

    async def all_durable(self) -> None:
        """Done when everything that was decided so far is durable; raises what kept it from it."""
        await self.durable(self._engine.groups.not_durable())

    async def dead_letter_owners(self, name: str) -> list[Subscription]:
        """Whose dead letters that name stands for, oldest first: those of subscriptions that were
        deleted, and of the one that exists. The catalog shows what they have.

        Raises NotFoundError."""
        if name == DIRECT_NAME:
            await self.checkpoint()
            return list(DIRECT)
        existing = self.registry.by_name(name)
        await self.checkpoint()
        owners = await asyncio.to_thread(read_dead_letter_owners, self.catalog, name)
        if existing is not None:
            owners = [*(one for one in owners if one.id != existing.id), existing]
        if not owners:
            raise NotFoundError(f"there is no subscription {name!r}")
        return owners

    def subjects_of(self, subscription: Subscription) -> list[str]:
        """The subjects that a subscription has and had, as far as messages of that time are
        kept."""
        return [span.subject for span in self._engine.subscribing.needed(subscription.spans)]

    def check_subjects_of(self, subscription: Subscription) -> None:
        """Raises ConflictError if a subscription can have no other subject now."""
        if len(self.subjects_of(subscription)) >= SPANS_MAX:
            raise ConflictError(
                f"the subject of {subscription.name!r} was changed {SPANS_MAX - 1} times while "
                "messages of the first one are still kept; try again when their retention is over, "
                "or make another subscription"
            )

    async def redrive(
        self,
        owners: Sequence[Subscription],
        heir: Subscription | None,
        ids: Collection[str] | None,
        may_read: Callable[[str], bool] = lambda subject: True,
    ) -> int:
        """Have dead letters of `owners` delivered again, to `heir` (None: each to its owner): those
        with these message ids, or all. `may_read`: asked for the subject of each. Durable on
        return. Returns how many.

        What dies again meanwhile has a row of its own, and is not taken once more: else the call
        would not end while the receiver refuses. Raises ConflictError, OverloadedError,
        StoppingError; what was redriven by then stays so."""
        end_seq, count = self._engine.sequencer.next_seq, 0
        for owner in owners:
            taker, from_seq = heir or owner, 0
            while letters := await asyncio.to_thread(
                self._some_letters, owner, from_seq, end_seq, ids, may_read
            ):
                if self.registry.by_id(taker.id) is None:
                    raise ConflictError(f"the subscription {taker.name!r} was deleted meanwhile")
                now_ms = self.clock()
                for entry_seq, payload in letters:
                    # Another call may have taken it since it was read, and a checkpoint forgotten.
                    key = dead_letter_key(owner.id, entry_seq)
                    if self.catalog.get(Table.DEAD_LETTERS, key) is None:
                        continue
                    with contextlib.suppress(NotFoundError):
                        self._engine.redriving.redrive(
                            owner.id, entry_seq, payload, taker.id, now_ms
                        )
                        count += 1
                await self.all_durable()
                from_seq = letters[-1][0] + 1
        return count

    def receiver(self, name: str, found: Replayable) -> Subscription:
        """The subscription of that name, which gets such messages, or had this one; `_to` is that
        of a message which says itself where it goes, and no other. Raises NotFoundError,
        ConflictError."""
        direct = self.registry.by_id(found.payload.direct_id)
        if name == DIRECT_NAME and direct is not None:
            return direct
        if name == DIRECT_NAME:
            raise ConflictError(
                f"the message does not say where it goes (`to`): {name} never has it"
            )
        wanted = self.subscription(name)
        if direct is not None:
            raise ConflictError(f"the message says where it goes (`to`): {name} never has it")
        subject = self.subject_names[found.subject_id]
        row = found.entry
        if not (wanted.matches(subject) or had(wanted, subject, row.seq, row.due_ms)):
            raise ConflictError(
                f"{name} gets {wanted.subject}, and the message is of the subject {subject}"
            )
        return wanted

    async def replay(
        self, found: Replayable, subscription_ids: Sequence[int]
    ) -> list[Subscription]:
        """Have a message delivered again; durable on return. Returns the subscriptions that get it.
        Raises as `Redriving.replay`, OverloadedError, StoppingError."""
        receivers, group = self._engine.redriving.replay(found, subscription_ids, self.clock())
        subscriptions = [self.registry.by_id(one) for one in receivers]
        await self.durable(group)
        return [one for one in subscriptions if one is not None]

    def is_known(self, entry: ScheduleEntry) -> bool:
        """Whether a row is still kept in its hour."""
        return self._engine.whereabouts.is_known(entry, self.clock())

    def _some_letters(
        self,
        owner: Subscription,
        from_seq: int,
        end_seq: int,
        ids: Collection[str] | None,
        may_read: Callable[[str], bool] = lambda subject: True,
    ) -> list[tuple[int, Payload]]:
        """The next dead letters with these message ids, as many as are decided in one turn of the
        event loop: the seqs of their rows, from `from_seq` to before `end_seq`, and payloads."""
        letters: list[tuple[int, Payload]] = []
        total_bytes = 0
        for entry_seq, letter in read_dead_letters(self.catalog, owner.id, from_seq):
            if entry_seq >= end_seq or len(letters) == self.redrive_max:
                break
            payload = read_letter(letter, entry_seq)
            origin = None if payload is None else payload.origin
            if payload is None or origin is None:
                continue  # The list of them names it.
            if not may_read(self._subject_name(origin.subject_id)):
                continue
            if ids is None or self.encode_id(origin.published_due_ms, origin.message_seq) in ids:
                total_bytes += len(letter.payload)
                if letters and total_bytes > REDRIVE_BYTES_MAX:
                    break
                letters.append((entry_seq, payload))
        return letters

    async def discard(
        self,
        owners: Sequence[Subscription],
        message_id: str,
        may_read: Callable[[str], bool] = lambda subject: True,
    ) -> None:
        """Delete a dead letter of one of `owners`; durable on return. `may_read`: asked for its
        subject. Raises NotFoundError."""
        message_seq = self.message_id(message_id).seq
        for owner in owners:
            change = self.changes(message_seq).get(owner.id)
            if change is None:
                # Its hour is past the retention: only the letter itself tells whose it is.
                letter = await asyncio.to_thread(self._find_letter, owner, message_seq)
            elif change.state == ChangeState.DEAD:
                letter = change.entry_seq, change.subject_id
            else:
                letter = None
            if letter is not None:
                entry_seq, subject_id = letter
                if not may_read(self._subject_name(subject_id)):
                    break
                discard = self._engine.redriving.discard
                await self.durable(discard(owner.id, entry_seq, message_seq, subject_id))
                return
        raise NotFoundError(f"{owners[-1].name} has no dead letter {message_id!r}")

    def _subject_name(self, subject_id: int) -> str:
        return self.subject_names.get(subject_id, lost_subject(subject_id))

    def _find_letter(self, owner: Subscription, message_seq: int) -> tuple[int, int] | None:
        """The row and the subject of a dead letter."""
        for entry_seq, letter in read_dead_letters(self.catalog, owner.id):
            payload = read_letter(letter, entry_seq)
            origin = None if payload is None else payload.origin
            if origin is not None and origin.message_seq == message_seq:
                return entry_seq, origin.subject_id
        return None

    async def settled(self) -> None:
        """Done when every delivery that ended so far is recorded."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._shard.when_settled(ending(future))
        await future

    def check_imports(self) -> None:
        """Raises ConflictError where there are replicas, which would not have the staged files."""
        if self.settings.cluster is not None:
            raise ConflictError(
                "a cluster takes no bulk loads yet, since only one of its nodes has their files: "
                "publish in batches, or as a stream"
            )

    async def adopt(self, path: str) -> Import:
        """Adopt a staged import; on return it is durable. See Imports.adopt for the errors.

        Besides: NotFoundError, StagingError, ConflictError, TooLargeError."""
        self.check_imports()
        future: asyncio.Future[Import] = asyncio.get_running_loop().create_future()
        self._engine.imports.adopt(path, answering(future))
        return await future

    async def retired_hours(self) -> list[RetiredHour]:
        """Retired hours that are kept, in order, as of the last checkpoint."""
        # There may be years of them.
        return await asyncio.to_thread(lambda: list(retired_hours(self.catalog, self._shard.files)))

    async def confirm_archive(self, hour: int, archived: Archived) -> None:
        """An hour was archived; durable on return.

        Raises NotFoundError, ConflictError, OverloadedError, StoppingError."""
        self._engine.groups.admit(0)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._shard.replayer.put(ConfirmRequest(hour, archived, ending(future)))
        await future

    async def checkpoint(self) -> None:
        """File everything that was accepted so far, so that the catalog shows it."""
        await self.all_durable()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._shard.replayer.put(CheckpointRequest(ending(future)))
        await future
