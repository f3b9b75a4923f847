"""Clients of the simulated server: they publish, cancel, move, look up, and tell the ledger.

Each call is one that the API makes, with arguments by the seed, and tells the ledger what was
answered once the answer would be sent: after the group is durable. A refusal tells nothing.

Cost: about 20 µs per call. Threads: none.
"""

import contextlib
import random
from collections import Counter
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np

from delayserver.decisions.group import Group
from delayserver.decisions.new_messages import NewMessage
from delayserver.decisions.publishing import Accepted
from delayserver.delivery.reader import FoundRow
from delayserver.errors import ConflictError, DelayServerError, NotFoundError, OverloadedError
from delayserver.parts.heartbeats.heartbeats import Heartbeats
from delayserver.parts.imports.imports import Import, Imports
from delayserver.records.direct import Destination
from delayserver.records.message import (
    MessageOptions,
    OutcomeSubjects,
    Payload,
    State,
    Watch,
    decode_payload,
)
from delayserver.records.message_id import MessageId
from delayserver.records.tables import ChangeState
from storage.errors import DamageError, ShortageError, StagingError, UnreadableError
from storage.rows import HOUR_MS
from storage.staging import OnConflict, manifest_path
from tests.world.actor import Actor
from tests.world.durable import StagedRow
from tests.world.ledger import Ledger
from tests.world.publishes import publish_all
from tests.world.server import SimulatedClock, stage
from tests.world.violation import Violation

SUBJECTS = ("orders.paid", "orders.late", "misc")
KEYS = ("k1", "k2", "k3")
WATCH_KEYS = ("w1", "w2")
HEARTBEATS = ("h1", "h2")
TTLS_MS = (3000, 0, 1, 300, HOUR_MS)
PRIORITIES = (0, 9, 5, 1)
GROUPS = ("g1", "g2")


class Clients(Actor):
    """Everybody who publishes, and what they know."""

    says_where = False
    """Whether some of what they publish says itself where it goes."""
    has_groups = False
    """Whether most of what they publish has a group."""

    def __init__(
        self, rng: random.Random, clock: SimulatedClock, ledger: Ledger, counts: Counter[str]
    ) -> None:
        super().__init__(rng, clock, ledger, counts)
        self._body_count = 0
        self.is_far_sighted = False
        """Whether much of what they publish is due in days."""
        self._staged_in: dict[str, int] = {}
        """In which life an import was staged."""

    def _due_ms(self) -> int:
        rng, now_ms = self._rng, self._clock.now_ms
        to_hour = HOUR_MS - now_ms % HOUR_MS
        delay_ms = rng.choice(
            (
                0,
                rng.randrange(20),
                rng.randrange(400),
                rng.randrange(3000),
                to_hour + rng.randrange(-2, 3),
                to_hour + rng.randrange(600),
                HOUR_MS + rng.randrange(600),
                2 * HOUR_MS + rng.randrange(-100, 100),
            )
        )
        if self.is_far_sighted and rng.random() < 0.5:
            delay_ms += rng.randrange(1, 80) * HOUR_MS
        return now_ms + max(0, delay_ms)

    def _new_message(self, subject: str, key: str | None) -> NewMessage:
        self._body_count += 1
        variant = self._rng.randrange(2) if key else self._body_count
        body = f'"{variant}{"x" * self._rng.choice((0, 5, 200))}"'.encode()
        if key:
            body = f'"{variant}"'.encode()
        watch = None
        if variant % 3 == 1:
            # The same content watches the same keys.
            watch = Watch(WATCH_KEYS[: 1 + variant % 2], variant // 3 % 2)
        options = _options(variant) if variant % 2 else None
        if self.says_where and variant % 5 == 2:
            to = Destination(f"http://host-{variant % 3}/", subject, max_attempts=3)
            options = msgspec.structs.replace(options or MessageOptions(), to=to)
        if self.has_groups and variant % 4 < 3:
            group = GROUPS[variant // 4 % len(GROUPS)]
            options = msgspec.structs.replace(options or MessageOptions(), group=group)
        payload = Payload(body, key=key, watch=watch, options=options)
        return NewMessage(subject, self._due_ms(), payload)

    def publish(self) -> None:
        """Publish one message or several, some with keys."""
        rng = self._rng
        keyed = rng.random() < 0.3
        count = rng.choice((1, 1, 1, 2, 5))
        messages = [
            self._new_message(rng.choice(SUBJECTS), rng.choice(KEYS) if keyed else None)
            for _ in range(count)
        ]
        holders = [self._cancelled_holder(message) for message in messages]
        try:
            published = publish_all(self._server.engine.publishing, messages, self._clock.now_ms)
        except DelayServerError:
            return
        for message, one, holder in zip(messages, published, holders, strict=True):
            self._await_publish(message, one, holder)

    def _cancelled_holder(self, message: NewMessage) -> int | None:
        """The cancelled message that has its key, and whose window is not over."""
        key = message.payload.key
        if key is None or self._ledger.may_be_damaged():
            return None
        window_ms = self._server.settings.dedupe_window_ms
        return self._ledger.cancelled_holder(message.subject, key, window_ms, self._clock.latest_ms)

    def _await_publish(
        self, message: NewMessage, one: Accepted, cancelled_holder: int | None = None
    ) -> None:
        """`cancelled_holder`: the message from which it must not have taken its key."""
        seq = self._server.engine.ids.decode(one.message_id).seq

        def answered() -> None:
            self._ledger.published(seq)
            known = self._ledger.messages[seq]
            # A client may have replaced the cancelled one, which was not durable by then.
            had_key_before = self._ledger.had_key_before.get(seq, 0)
            if had_key_before == cancelled_holder and not one.duplicate:
                raise Violation(
                    f"a publish of {message.payload.key!r} behind its cancel is new (I5)"
                )
            if known.payload.body != message.payload.body:
                raise Violation(f"the publish of {seq} was answered for other content (I3)")
            if one.duplicate:
                self._counts["duplicates"] += 1
            if one.duplicate and known.cancelled:
                self._counts["duplicates of cancelled ones"] += 1

        _once_durable(one.group, answered)

    def replace(self) -> None:
        """Publish a message in place of the one that has its key."""
        rng, messages = self._rng, self._server.engine.messages
        publishing = self._server.engine.publishing
        subject, key = rng.choice(SUBJECTS), rng.choice(KEYS)
        message = self._new_message(subject, key)
        try:
            before = messages.by_key(subject, key).seq
        except NotFoundError:
            before = 0
        except OverloadedError:
            return
        try:
            published, replaced = publishing.replace(message, self._clock.now_ms)
        except DelayServerError:
            return
        self._await_publish(message, published)
        if replaced:
            self._counts["replaced"] += 1
            _once_durable(published.group, partial(self._ledger.cancelled, before))

    def complete_event(self) -> None:
        """An event that messages wait for: it cancels or fires them, each once (I5)."""
        server, events, now_ms = self._server, self._server.engine.events, self._clock.now_ms
        key = self._rng.choice(WATCH_KEYS)
        expected = self._ledger.watching(key, max(now_ms, server.latest_ms))
        watchers, _ = events.watchers(key, server.engine.sequencer.next_seq)
        bodies = {}
        unreadable = set()
        for watcher in watchers:
            entry = events.entry(watcher)
            try:
                found = server.unfiled(entry) or server.reader.find(entry)
            except ShortageError:
                return  # told to whoever asked
            except DamageError:
                unreadable.add(watcher.seq)  # It goes on waiting.
                continue
            if found is not None:
                bodies[watcher.seq] = found.payload, found.subject_id
        already = {
            seq
            for seq in expected
            if (change := server.engine.sequencer.changes(seq).get(0)) is not None
            and change.state in (ChangeState.CANCELLED, ChangeState.FIRED)
        }
        try:
            done = events.complete(key, watchers, bodies, now_ms)
        except DelayServerError:
            return
        missing = expected - already - unreadable - {*done.cancelled, *done.fired}
        if missing:
            raise Violation(f"an event for {key} left {missing} waiting (I5)")

        _once_durable(done.group, lambda: self._ledger.event_completed(done.cancelled, done.fired))

    def heartbeat(self) -> None:
        """Make, renew or delete a heartbeat."""
        rng, server = self._rng, self._server
        heartbeats, key = server.engine.part(Heartbeats), rng.choice(HEARTBEATS)
        dice = rng.random()
        try:
            if dice < 0.15:
                self._ledger.deleting.add(key)
                heartbeats.delete(key)
                return
            if dice < 0.75:
                known, *_ = heartbeats.get(key)
                subject = server.engine.sequencer.subject_names[known.subject_id]
                payload, timeout_ms = decode_payload(known.payload, "", 0, 0), known.timeout_ms
            else:
                self._body_count += 1
                payload = Payload(f'"{key} {self._body_count}"'.encode())
                subject, timeout_ms = rng.choice(SUBJECTS), rng.choice((1, 40, 700))
            is_new, _, group = heartbeats.put(key, timeout_ms, subject, payload, self._clock.now_ms)
        except DelayServerError:
            return
        self._counts["heartbeats"] += is_new
        self._counts["renewals"] += dice < 0.75
        deadline_ms = self._ledger.present() + timeout_ms
        _once_durable(group, lambda: self._ledger.renewed(payload.body, deadline_ms))

    def _some_message(self) -> tuple[int, int] | None:
        """A message that a client may know; mostly a young one."""
        known = self._ledger.messages
        if not known:
            return None
        seqs = list(known)
        seq = self._rng.choice(seqs[-12:] if self._rng.random() < 0.8 else seqs)
        return seq, known[seq].due_ms

    def cancel(self) -> None:
        """Cancel one message."""
        chosen = self._some_message()
        if chosen is None:
            return
        seq, due_ms = chosen
        try:
            group = self._server.engine.messages.cancel(seq, due_ms)
        except DelayServerError as error:
            self._refused(seq, error)
            return
        _once_durable(group, partial(self._ledger.cancelled, seq))

    def _refused(self, seq: int, error: Exception) -> None:
        """A conflict tells in which state the message is."""
        if isinstance(error, ConflictError) and error.state:
            self._ledger.located(seq, State(error.state))

    def cancel_many(self) -> None:
        """Cancel several messages in one call."""
        chosen = [self._some_message() for _ in range(self._rng.randrange(1, 8))]
        found = [MessageId(0, due_ms, seq) for seq, due_ms in filter(None, chosen)]
        engine = self._server.engine
        try:
            refusals = engine.cancels.cancel(
                np.array([one.seq for one in found], np.uint64),
                np.array([one.due_ms for one in found], np.int64),
                np.zeros(len(found), np.uint32),
            )
        except DelayServerError:
            return
        group = engine.groups.not_durable()
        for index, one in enumerate(found):
            refusal = refusals.get(index)
            if refusal is None:
                _once_durable(group, partial(self._ledger.cancelled, one.seq))
            else:
                self._refused(one.seq, refusal)

    def look_up(self) -> None:
        """Look a message up, and hold its state against what is durable."""
        chosen = self._some_message()
        if chosen is None:
            return
        located = self._server.engine.messages.locate(*chosen)
        # Of a message that is being retried the others may have been delivered.
        is_retry = bool(located.subscription_id)
        engine = self._server.engine
        is_known = engine.whereabouts.is_known(located.entry, engine.messages.advanced_ms)
        if is_known and not is_retry:
            self._ledger.located(chosen[0], located.state)

    def move(self) -> None:
        """Move a message to another due time."""
        chosen = self._some_message()
        if chosen is None:
            return
        seq, due_ms = chosen
        server, new_due_ms = self._server, self._due_ms()

        def found(value: FoundRow | None, error: Exception | None) -> None:
            if isinstance(error, ShortageError):
                return  # told to whoever asked
            if isinstance(error, DamageError):
                self._counts["moves of what cannot be read"] += 1
                return
            if error is not None:
                raise error
            if value is None:
                return
            try:
                group = server.engine.messages.move(
                    seq,
                    due_ms,
                    max(new_due_ms, self._clock.now_ms),
                    value.payload,
                    value.subject_id,
                )
            except DelayServerError as refusal:
                self._refused(seq, refusal)
                return
            _once_durable(group, partial(self._ledger.moved, seq, new_due_ms))

        # A message that is being imported cannot be read yet.
        with contextlib.suppress(OverloadedError):
            server.find(server.engine.messages.locate(seq, due_ms), found)

    def adopt(self) -> None:
        """Stage an import, or have one adopted that was staged before."""
        rng = self._rng
        known = list(self._ledger.staged)
        import_id = rng.choice(known[-3:]) if known and rng.random() < 0.5 else self._stage()
        if import_id is None:
            return
        try:
            self._server.engine.part(Imports).adopt(
                manifest_path(import_id), partial(self._import_answered, import_id)
            )
        except DelayServerError:
            return

    def _stage(self) -> str | None:
        """What a bulk load does: it writes files, and syncs none of them."""
        rng, subjects = self._rng, self._ledger.subjects
        if not subjects:
            return None
        import_id = f"import-{len(self._ledger.staged)}"
        self._staged_in[import_id] = self._counts["lives"]
        numbers = sorted(subjects)
        keyed = rng.random() < 0.5
        rows = []
        for _ in range(rng.choice((1, 3, 8))):
            message = self._new_message(
                subjects[rng.choice(numbers)], rng.choice(KEYS) if keyed else None
            )
            subject_id = self._server.engine.sequencer.subjects[message.subject]
            payload = msgspec.structs.replace(message.payload, watch=None, options=None)
            rows.append(StagedRow(message.due_ms, subject_id, payload))
        rows.sort(key=lambda row: row.due_ms)
        self._ledger.staged[import_id] = rows
        cut = rng.randrange(len(rows))
        parts = [rows[:cut], rows[cut:]] if cut else [rows]
        on_conflict = rng.choice(tuple(OnConflict))
        stage(
            self._disk,
            import_id,
            parts,
            self._server.engine.messages.key_hash,
            on_conflict=on_conflict,
        )
        self._counts["staged"] += 1
        return import_id

    def _import_answered(
        self, import_id: str, found: Import | None, error: Exception | None
    ) -> None:
        if found is not None:
            self._ledger.adopted(import_id, found.first_seq)
        elif isinstance(error, ConflictError):
            self._counts["imports with conflicts"] += 1
        elif isinstance(error, StagingError | NotFoundError):
            self._counts["imports damaged by a crash"] += 1
            was_sound = self._staged_in[import_id] == self._counts["lives"]
            was_sound &= not isinstance(error.__cause__, UnreadableError)
            if was_sound or import_id in self._ledger.imports:
                raise Violation(f"the import {import_id} was refused: {error}")


def _options(variant: int) -> MessageOptions | None:
    """Those of a message, by its content: the same content has the same ones."""
    number = variant // 2
    outcomes = OutcomeSubjects(SUBJECTS[0], SUBJECTS[0]) if number % 5 == 1 else None
    ttl_ms, priority = TTLS_MS[number % len(TTLS_MS)], PRIORITIES[number % 4]
    options = MessageOptions(ttl_ms, priority=priority, outcomes=outcomes)
    return None if options == MessageOptions() else options


def _once_durable(group: Group | None, answered: Callable[[], None]) -> None:
    """Answer when the group is durable, and never if it fails; at once where there is none."""
    if group is None:
        answered()
    else:
        group.when_durable(lambda error: None if error else answered())
