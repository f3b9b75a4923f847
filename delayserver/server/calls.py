"""The calls: all that the API and the queries may ask of a server, and the one place where they do.

    api, queries ──▶ Calls ──▶ publishing, messages, cancels, … as they are (bound once)
                           ──▶ consumers, subscriptions, redrives: each has an object of its own
                           ──▶ waits, as awaitables

A decision that is taken at once is a method of a part, bound here under a name that says it; so a
publish costs no more than by the part itself. A result that comes from a thread, or once a group is
durable, is a coroutine or a future.

Cost: nothing for a bound method; a future for a wait. Threads: belongs to the event loop.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from delayserver.decisions.delayed_produce import Level
from delayserver.decisions.group import Group
from delayserver.decisions.messages import Versions
from delayserver.delivery.permits import Permits
from delayserver.delivery.reader import FoundRow
from delayserver.errors import NotFoundError
from delayserver.records.message import ScheduleEntry
from delayserver.security.tokens import TokenTable
from delayserver.server.consumer_calls import ConsumerCalls
from delayserver.server.engine import Engine
from delayserver.server.event_calls import EventCalls
from delayserver.server.futures import answering, durable
from delayserver.server.gauges import Gauges
from delayserver.server.loop_turns import LoopTurns
from delayserver.server.redrive_calls import RedriveCalls
from delayserver.server.shard import Shard
from delayserver.server.subscription_calls import SubscriptionCalls
from delayserver.server.waits import Waits

if TYPE_CHECKING:
    from delayserver.server.backups import BackupMaker
    from delayserver.server.telemetry import Telemetry


class Calls:
    """The calls that one server takes. Reads see everything that was answered before."""

    def __init__(
        self,
        shard: Shard,
        gauges: Gauges,
        tokens: TokenTable,
        telemetry: "Telemetry | None" = None,
        *,
        turns: LoopTurns | None = None,
        backups: "BackupMaker | None" = None,
    ) -> None:
        """`backups`: the maker of them; None: no call asks for any."""
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
        self.files, self.catalog = shard.files, shard.catalog
        """The catalog is as old as the last checkpoint; `checkpoint` makes one."""
        self._backups = backups
        self.parts = engine.parts
        self.part = engine.part
        """The decisions of a part, by their class."""
        self._bind_decisions(engine)

        waits = Waits(shard)
        self.read, self.on_filer = waits.read, waits.on_filer
        self.settled = waits.settled
        self.checkpoint = waits.checkpoint
        self.all_durable = waits.all_durable
        self.consumers = ConsumerCalls(shard)
        self.waiting = self.consumers.waiting
        self.subscriptions = subscriptions = SubscriptionCalls(shard, waits)
        self.put_subscription = subscriptions.put
        self.change_subscription = subscriptions.change
        self.check_exactly_once = subscriptions.check_exactly_once
        self.subjects_of = subscriptions.subjects_of
        self.check_subjects_of = subscriptions.check_subjects_of
        self.redrives = redrives = RedriveCalls(shard, waits)
        self.dead_letter_owners = redrives.owners
        self.redrive = redrives.redrive
        self.discard = redrives.discard
        self.receiver = redrives.receiver
        self.replay = redrives.replay
        self.event = EventCalls(shard, waits).event

    def _bind_decisions(self, engine: Engine) -> None:
        # The known state, and the group that an answer has to wait for.
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

        # Subscriptions: decided at once, too.
        self.registry = engine.registry
        self.definition = engine.registry.by_id
        self.subscription = engine.subscribing.subscription

    @property
    def backups(self) -> "BackupMaker":
        """The backups of this server."""
        assert self._backups is not None
        return self._backups

    def soon_durable(self, group: Group | None) -> "asyncio.Future[None]":
        """As `durable`, where something may be due earlier than anything was before."""
        self._shard.tick_soon()
        return durable(group)

    def encode_ids(self, dues_ms: np.ndarray, seqs: np.ndarray) -> Sequence[str]:
        """The ids of messages, from columns of int64 and uint64."""
        ids = self._engine.ids
        return ids.texts(ids.encode_many(dues_ms, seqs))

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

        Raises the error that kept its group from being durable."""
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
        await durable(group)
        return version

    async def find(self, entry: ScheduleEntry) -> FoundRow:
        """Payload and subject of a schedule row. Raises NotFoundError, DamageError."""
        found = self._shard.unfiled(entry) or await self.read(lambda reader: reader.find(entry))
        if found is None:
            raise NotFoundError("the message was settled, and its hour is past its retention")
        return found

    async def find_any(self, rows: Sequence[ScheduleEntry]) -> FoundRow:
        """As `find`, of the first of the rows of a message that is still kept: a retry may wait for
        longer than the hour of the message's own row is kept. Raises NotFoundError, DamageError."""
        for entry in rows[:-1]:
            with contextlib.suppress(NotFoundError):
                return await self.find(entry)
        return await self.find(rows[-1])

    def after(self, delay_ms: int, callback: Callable[[], None]) -> Callable[[], None]:
        """Have `callback` called after so long. Returns a function that cancels it."""
        timeouts = self._engine.timeouts
        handle = timeouts.add(callback, delay_ms)
        self._shard.tick_for_timeouts()

        def cancel() -> None:
            timeouts.cancel(handle)

        return cancel

    def is_known(self, entry: ScheduleEntry) -> bool:
        """Whether a row is still kept in its hour."""
        return self._engine.whereabouts.is_known(entry, self.clock())

    async def look(self) -> None:
        """Bring the numbers of the queues and of the parts up to date."""
        engine = self._engine
        self.gauges.waiting = await self.slices.run(engine.dispatcher.waiting())
        for part, decider in zip(engine.parts, engine.deciders, strict=True):
            if part.look is not None:
                await part.look(decider, self)
