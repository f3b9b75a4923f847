"""Operators of the simulated server: subscriptions come and go, dead letters are decided on, and
settled hours are archived.

Cost: about 20 µs per call. Threads: none.
"""

import random
from collections import Counter
from typing import Any

import msgspec

from delayserver.errors import DelayServerError
from delayserver.records.message import decode_payload
from delayserver.records.subscriptions import Subscription
from delayserver.records.tables import Archived, DeadLetter, parse_dead_letter_key
from delayserver.schedule.archives import retired_hours
from delayserver.server.threads import ConfirmRequest
from delayserver.testing.actor import Actor
from delayserver.testing.clients import SUBJECTS
from delayserver.testing.durable import Violation
from delayserver.testing.ledger import Ledger
from delayserver.testing.server import SimulatedClock
from storage.catalog import Table
from storage.directory import open_identity
from storage.frame import Frame
from storage.hour_log import HourLog
from storage.rows import HOUR_MS, LogKind
from storage.testing.files import SimulatedFiles

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


def filed_rows(disk: SimulatedFiles, hour: int, schedule_bytes: int) -> set[int]:
    """The seqs in the schedule file of an hour, as another process reads them."""
    stamp = open_identity(disk, random_bytes=None).stamp
    log = HourLog(disk, LogKind.SCHEDULE, stamp=stamp)
    seqs: set[int] = set()
    for frame in log.scan(hour, end=schedule_bytes):
        if not isinstance(frame, Frame):
            raise Violation(f"damage in an hour that is settled: {frame}")
        seqs.update(frame.rows["seq"].tolist())
    log.close()
    return seqs


class Operators(Actor):
    """Everybody who runs the server, and what they have copied."""

    def __init__(
        self,
        rng: random.Random,
        clock: SimulatedClock,
        ledger: Ledger,
        counts: Counter[str],
        seed: int,
    ) -> None:
        super().__init__(rng, clock, ledger, counts)
        # Each of its own, so that what happens in a world does not depend on it.
        self._options = random.Random(f"options {seed}")
        self._luck = random.Random(f"archiving {seed}")
        self._copies: list[tuple[int, Archived, set[int]]] = []
        """Hours that somebody has archived, and has not told of."""
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
            if rng.random() < 0.25:
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
        """Pause or resume a subscription; make or delete one that comes and goes."""
        rng, registry = self._rng, self._server.engine.registry
        if not self._server.engine.groups.is_idle:
            return  # The server changes one at a time, and waits for it.
        if rng.random() < 0.3:
            chosen = registry.by_id(rng.choice((1, 2)))
            if chosen is not None:
                self.put(msgspec.structs.replace(chosen, paused=not chosen.paused))
            return
        name = rng.choice(PASSING)
        known = registry.by_name(name)
        if known is None:
            made = Subscription(
                id=registry.next_id(),
                name=name,
                subject=rng.choice((*SUBJECTS, "orders.*", "*")),
                type=rng.choice(("webhook", "pull")),
                created_ms=self._clock.now_ms,
                max_in_flight=rng.choice((1, 3)),
                max_attempts=rng.choice((1, 1, 2, 4)),
                backoff_ms=(rng.choice((1, 50, 2000)),),
            )
            self.put(self.with_options(made))
        elif rng.random() < 0.6:
            self.put(msgspec.structs.replace(known, deleted=True))
        else:
            self.put(msgspec.structs.replace(known, paused=not known.paused))

    def has_dead_letters(self) -> bool:
        """Whether the server lists one."""
        return any(True for _ in self._server.catalog.scan(Table.DEAD_LETTERS))

    def decide_on_dead_letter(self) -> None:
        """Redrive or throw away a dead letter, as the server lists them."""
        server = self._server
        pairs = list(server.catalog.scan(Table.DEAD_LETTERS))
        if not pairs:
            return
        key, value = self._rng.choice(pairs)
        subscription_id, entry_seq = parse_dead_letter_key(key)
        letter = msgspec.msgpack.decode(value, type=DeadLetter)
        payload = decode_payload(letter.payload, "catalog", 0, entry_seq)
        assert payload.origin is not None
        engine = server.engine
        try:
            if self._rng.random() < 0.7:
                engine.outcomes.redrive(
                    subscription_id, entry_seq, payload, subscription_id, self._clock.now_ms
                )
            else:
                engine.outcomes.discard(subscription_id, entry_seq, payload.origin.message_seq)
        except DelayServerError:
            return

    # ── archives ───────────────────────────────────────────────────────────────────────────────

    def maybe_archive(self) -> None:
        """Now and then copy a settled hour, and tell the server much later: it may have changed."""
        if self._luck.random() >= 0.1:
            return
        if self._luck.random() < 0.8:
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
            for one in retired_hours(server.catalog, self._disk)
            if not one.archived and one.hour not in copied
        ]
        if not retired:
            return
        one = self._luck.choice(retired)
        archived = Archived(*one.extent, one.count, "", "", self._clock.now_ms)
        seqs = filed_rows(self._disk, one.hour, archived.schedule_bytes)
        self._copies.append((one.hour, archived, seqs))

    def _tell_of(self, hour: int, archived: Archived, seqs: set[int]) -> None:
        def answered(error: Exception | None) -> None:
            if error is None:
                self._ledger.archived(hour, archived)
            else:
                self._counts["archives refused"] += 1
                self._ledger.refused(hour, archived)

        self._ledger.archiving(hour, archived, seqs)
        self._server.replayer.put(ConfirmRequest(hour, archived, answered))
