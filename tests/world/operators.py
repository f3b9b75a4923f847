"""Operators of the simulated server: subscriptions come and go, dead letters are decided on, what
arrived is replayed, and settled hours are archived.

Cost: about 20 µs per call. Threads: none.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import msgspec

from delayserver.errors import DelayServerError, NotFoundError, OverloadedError
from delayserver.parts.attempts.attempts import AttemptQueries
from delayserver.parts.imports.archives import confirming, kept_hours
from delayserver.parts.imports.records import Archived
from delayserver.records.direct import DIRECT_NAME, is_direct
from delayserver.records.message import State
from delayserver.records.subscriptions import Registry, Subscription
from delayserver.server.filer import FilerCall
from storage.catalog import Table
from storage.directory import open_identity
from storage.errors import DamageError, ShortageError
from storage.frame import Frame
from storage.hour_log import HourLog
from storage.rows import HOUR_MS, LogKind
from tests.world.actor import Actor
from tests.world.clients import SUBJECTS
from tests.world.ledger import Ledger
from tests.world.server import SimulatedClock
from tests.world.storage.files import SimulatedFiles
from tests.world.violation import Violation

FAITHFUL = (
    Subscription(
        id=1,
        name="hook",
        subject="orders.paid",
        type="webhook",
        created_ms=0,
        max_in_flight=3,
        max_attempts=3,
        backoff_ms=(5, 900),
    ),
    Subscription(id=2, name="queue", subject="orders.*", type="pull", created_ms=0, max_attempts=4),
)
"""Subscriptions that are there from the first to the last moment, with options by the seed."""
PASSING = ("p1", "p2", "p3")
"""Names of subscriptions that come and go."""


def filed_rows(disk: SimulatedFiles, hour: int, schedule_bytes: int) -> set[int] | None:
    """The seqs in the schedule file of an hour, as another process reads them; None if the device
    does not give all of it back."""
    stamp = open_identity(disk, random_bytes=None).stamp
    log = HourLog(disk, LogKind.SCHEDULE, stamp=stamp)
    seqs: set[int] = set()
    is_whole = True
    for frame in log.scan(hour, end=schedule_bytes):
        if isinstance(frame, Frame):
            seqs.update(frame.rows["seq"].tolist())
        elif frame.is_unreadable:
            is_whole = False
        else:
            raise Violation(f"damage in an hour that is settled: {frame}")
    log.close()
    return seqs if is_whole else None


class Operators(Actor):
    """Everybody who runs the server, and what they have copied."""

    def __init__(
        self,
        rng: random.Random,
        clock: SimulatedClock,
        ledger: Ledger,
        counts: Counter[str],
        seed: int,
        *,
        rates_share: float,
    ) -> None:
        """`rates_share`: how many of the webhooks have a rate."""
        super().__init__(rng, clock, ledger, counts)
        self._rates_share = rates_share
        # Each of its own, so that what happens in a world does not depend on it.
        self._options = random.Random(f"options {seed}")
        self._luck = random.Random(f"archiving {seed}")
        self._replay_luck = random.Random(f"replays {seed}")
        self.replays = self._replay_luck.random() < 0.25
        """Whether anything is delivered again because somebody asks."""
        self._copies: list[tuple[int, Archived, set[int]]] = []
        """Hours that somebody has archived, and has not told of."""
        self.copies_share = 0.8
        """How often somebody archives another hour before he tells of one."""
        self.faithful = tuple(self.with_options(subscription) for subscription in FAITHFUL)

    # ── subscriptions ──────────────────────────────────────────────────────────────────────────

    def with_options(self, subscription: Subscription) -> Subscription:
        """The subscription with random limits on when its rows may leave."""
        rng, options = self._options, dict[str, Any]()
        match rng.randrange(4):
            case 0:
                options["spread_ms"] = rng.choice((1, 300, 20_000))
            case 1:
                options["drop_older_than_ms"] = rng.choice((1, 400, HOUR_MS))
        if subscription.type == "webhook":
            if rng.random() < self._rates_share:
                options.update(rate_per_s=rng.choice((5.0, 1000.0)), rate_burst=rng.choice((1, 20)))
            if rng.random() < 0.3:
                options.update(batch_max=rng.choice((1, 2, 5)), linger_ms=rng.choice((0, 3, 200)))
        return msgspec.structs.replace(subscription, **options)

    def put(self, subscription: Subscription) -> None:
        """Make, change or delete a subscription."""
        if self._server.engine.registry.by_id(subscription.id) is None:
            self._ledger.made(subscription.id)
        try:
            self._server.engine.subscribing.put_subscription(subscription)
        except DelayServerError:
            return
        self._counts["subscription changes"] += 1

    def change_subscription(self) -> None:
        """Make, change, pause, resume or delete a subscription, whatever is under way."""
        rng, calls = self._rng, self._server.calls
        name = rng.choice(("hook", "queue")) if rng.random() < 0.4 else rng.choice(PASSING)
        known, dice = calls.registry.by_name(name), rng.random()
        if known is None and name not in PASSING:
            return
        if known is None or dice < 0.3:
            change = partial(calls.subscriptions.put, name, partial(self._define, name))
        elif dice < 0.6 and name in PASSING:
            change = partial(calls.subscriptions.change, name, deleted=True)
        else:
            change = partial(calls.subscriptions.change, name, paused=not known.paused)
        self._ask(self._change(change))

    def _define(self, name: str, existing: Subscription | None, decided: Registry) -> Subscription:
        if existing is not None:
            return msgspec.structs.replace(existing, timeout_ms=existing.timeout_ms + 1)
        if any(decided.by_id(one.id) is None for one in self.faithful):
            # They were refused when the server started, and their numbers are free.
            raise OverloadedError("first those that are there all the time")
        rng = self._rng
        made = Subscription(
            id=decided.next_id(),
            name=name,
            subject=rng.choice((*SUBJECTS, "orders.*", "*")),
            type=rng.choice(("webhook", "pull")),
            created_ms=self._clock.now_ms,
            max_in_flight=rng.choice((1, 3)),
            max_attempts=rng.choice((1, 1, 2, 4)),
            backoff_ms=(rng.choice((1, 50, 2000)),),
        )
        self._ledger.made(made.id)
        return self.with_options(made)

    async def _change(self, change: Callable[[], Awaitable[Subscription]]) -> None:
        self._ledger.defined(await change())
        self._counts["subscription changes"] += 1

    def _ask(self, call: Coroutine[Any, Any, None]) -> None:
        """Begin a call of the API, which may be refused."""

        def answered(task: "asyncio.Task[None]") -> None:
            error = task.exception()
            if isinstance(error, DamageError) and self._ledger.may_be_damaged():
                self._counts["asked for what cannot be read"] += 1
            elif error is not None and not isinstance(error, DelayServerError | ShortageError):
                raise error

        self._server.event_loop.start(call, answered)

    # ── dead letters ───────────────────────────────────────────────────────────────────────────

    def has_dead_letters(self) -> bool:
        """Whether the server has one."""
        return any(True for _ in self._server.catalog.scan(Table.DEAD_LETTERS))

    def decide_on_dead_letter(self) -> None:
        """Redrive dead letters of a name, one or all, or throw one away."""
        rng, ledger, registry = self._rng, self._ledger, self._server.calls.registry
        letters = [
            (ledger.name_of(subscription_id), message_seq)
            for (subscription_id, _), message_seq in ledger.letters.items()
        ]
        # Most are of subscriptions that are gone: one that can be redriven, if there is one.
        having_heirs = [one for one in letters if one[0] == DIRECT_NAME or registry.by_name(one[0])]
        if not letters:
            return
        name, message_seq = rng.choice(having_heirs or letters)
        message = ledger.messages[message_seq]
        message_id = self._server.calls.encode_id(message.due_ms, message_seq)
        dice = rng.random()
        if dice < 0.7:
            self._ask(self._redrive(name, {message_id} if dice < 0.2 else None))
        else:
            self._ask(self._discard(name, message_id))

    def make_all(self) -> None:
        """Make all subscriptions that come and go: those that were deleted have heirs then."""
        for name in PASSING:
            make = partial(self._server.calls.subscriptions.put, name, partial(self._define, name))
            self._ask(self._change(make))

    def redrive_all(self) -> None:
        """Redrive all dead letters of every name that a subscription has."""
        for subscription in self._server.engine.registry:
            self._ask(self._redrive(subscription.name, None))
        if any(is_direct(subscription_id) for subscription_id, _ in self._ledger.letters):
            self._ask(self._redrive(DIRECT_NAME, None))

    async def _redrive(self, name: str, ids: set[str] | None) -> None:
        calls = self._server.calls
        owners = await calls.redrives.owners(name)
        heir = calls.registry.by_name(name)
        if heir is None and name != DIRECT_NAME:
            return
        self._counts["redrives"] += 1
        self._ledger.redriving(owners, self._server.engine.sequencer.next_seq)
        self._counts["redriven"] += await calls.redrives.redrive(owners, heir, ids)

    async def _discard(self, name: str, message_id: str) -> None:
        calls = self._server.calls
        await calls.redrives.discard(await calls.redrives.owners(name), message_id)

    def list_dead_letters(self) -> None:
        """Every dead letter is found by the name of its subscription, deleted or not (I3)."""
        for subscription_id, entry_seq in self._ledger.letters:
            self._ask(self._list(subscription_id, entry_seq))

    async def _list(self, subscription_id: int, entry_seq: int) -> None:
        name = self._ledger.name_of(subscription_id)
        try:
            owners = await self._server.calls.redrives.owners(name)
        except NotFoundError:
            owners = []
        if subscription_id not in {owner.id for owner in owners}:
            raise Violation(f"no list shows that {subscription_id} gave up {entry_seq} (I3)")
        self._counts["dead letters listed"] += 1

    # ── replays ────────────────────────────────────────────────────────────────────────────────

    def maybe_replay(self) -> None:
        """In some worlds: have messages delivered again that arrived. To read them takes some turns
        of several threads, and the life may end in any of these."""
        if self.replays:
            self.replay_some(3)
            for _ in range(self._replay_luck.randrange(40)):
                self._server.take_turns()

    def replay_some(self, count_max: int) -> None:
        """Have some of the messages that are settled, or seem so, delivered again."""
        luck, ledger, engine = self._replay_luck, self._ledger, self._server.engine
        settled = []
        for seq in ledger.delivered:
            located = engine.messages.locate(seq, ledger.messages[seq].due_ms)
            is_known = engine.whereabouts.is_known(located.entry, self._clock.now_ms)
            if located.state is not State.DELIVERING and is_known:
                settled.append(seq)
        names = [None, *(one.name for one in engine.registry)]
        for message_seq in luck.sample(settled, min(count_max, len(settled))):
            name = luck.choice(names) if luck.random() < 0.3 else None
            self._ask(self._replay(message_seq, name))

    async def _replay(self, message_seq: int, name: str | None) -> None:
        calls, before = self._server.calls, self._ledger.replays.copy()
        due_ms = self._ledger.messages[message_seq].due_ms
        found, ids = await AttemptQueries(calls).replayable(message_seq, due_ms)
        if name is not None:
            wanted = calls.subscription(name)
            if not wanted.matches(calls.subject_names[found.subject_id]):
                return
            ids = [wanted.id]
        self._counts["replays"] += 1
        receivers = await calls.redrives.replay(found, ids)
        self._ledger.replayed(message_seq, [one.id for one in receivers], before)

    # ── archives ───────────────────────────────────────────────────────────────────────────────

    def maybe_archive(self) -> None:
        """Now and then copy a settled hour, and tell the server much later: it may have changed."""
        if self._luck.random() >= 0.1:
            return
        if self._luck.random() < self.copies_share:
            self._copy_hour()
        elif self._copies:
            self._tell_of(*self._copies.pop(self._luck.randrange(len(self._copies))))

    def archive_all(self) -> None:
        """Copy one more settled hour, and tell the server of all that were copied."""
        self._copy_hour()
        while self._copies:
            self._tell_of(*self._copies.pop())

    def _copy_hour(self) -> None:
        server = self._server
        copied = {hour for hour, _, _ in self._copies}
        retired = [
            one
            for one in kept_hours(server.catalog, self._disk)
            if not one.archived and one.hour not in copied
        ]
        if not retired:
            return
        one = self._luck.choice(retired)
        archived = Archived(*one.extent, one.count, "", "", self._clock.now_ms)
        seqs = filed_rows(self._disk, one.hour, archived.schedule_bytes)
        if seqs is not None:  # else it was settled, and is open again, with a bad sector
            self._copies.append((one.hour, archived, seqs))

    def _tell_of(self, hour: int, archived: Archived, seqs: set[int]) -> None:
        def answered(error: Exception | None) -> None:
            if error is None:
                self._ledger.archived(hour, archived)
            else:
                self._counts["archives refused"] += 1
                self._ledger.refused(hour, archived)

        self._ledger.archiving(hour, archived, seqs)
        self._server.replayer.put(FilerCall(confirming(hour, archived), answered))
