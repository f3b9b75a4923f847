"""Heartbeats: a message that is published unless a client keeps saying that all is well.

    PUT ──▶ new, or another definition ──▶ a record, durable before it is answered
        └─▶ the same definition ──▶ renewed: a deadline in memory, and nothing else
    time is up ──▶ one group: the message is published, the heartbeat is ended

A dead man's switch. Its definition is durable, the time of its last renewal is not: a renewal has
to be cheap, since there is nothing but renewals while all is well. So a heartbeat may fire up to a
restart and one timeout late, and never early: while the server was down no client could renew it,
so every heartbeat begins its whole timeout anew when the server starts. A heartbeat whose timeout
was over while the process stood still for longer than that also begins anew. After a shorter
stand-still the server reads the requests that have come before it lets one fire. It fires exactly
once, crash or not, since its message and its end are one group.

A renewal moves a deadline by writing a number. The timeout that was set before comes too early
then, finds the number, and is set again: one timeout per heartbeat and period, whatever the rate of
renewals. Definitions stay in the catalog; memory holds a digest of each, by which it knows a
renewal.

One that is not understood here (`records.understanding`) has no deadline: it stands still until it
is put again or deleted, or a process understands it.

Cost: 6 µs per renewal, request decoded; 400 bytes of memory per heartbeat; a start reads them all.
Threads: belongs to the event loop.
"""

import hashlib
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from delayserver.decisions.group import Group
from delayserver.decisions.overlay import Overlay
from delayserver.errors import NotFoundError, OverloadedError, StoppingError
from delayserver.parts.heartbeats.records import HEARTBEATS, Heartbeat, heartbeat_key
from delayserver.parts.part import Core
from delayserver.records.message import Payload, encode_payload
from delayserver.slices import TurnBudget
from delayserver.timers.due_table import NEVER_MS
from delayserver.timers.interface import Handle
from storage.catalog import Table
from storage.frame import seal
from storage.rows import RecordKind

if TYPE_CHECKING:
    from delayserver.server.metrics import Metrics

RETRY_MS = 1000
"""A record that could not be written (the disk is full) is tried again after this."""
FIRE_ITEMS = 5
"""A heartbeat that fires counts for so many items: its message and its end are recorded."""

_encode = msgspec.msgpack.Encoder().encode
_STANDS_STILL = b""
"""In the place of a digest: nothing renews it, since it is not understood."""
_ENDED = b""
"""In the overlay: there is none."""


@dataclass(slots=True, eq=False)
class _Beat:
    digest: bytes
    timeout_ms: int
    seq: int
    """The record of its definition."""
    expires_ms: int
    """On the stopwatch."""
    handle: Handle | None = None


class Heartbeats:
    """All heartbeats."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._heartbeats_max = core.settings.heartbeats_max
        self._catalog = core.catalog
        self._sequencer = core.sequencer
        self._groups = core.groups
        self._publishing = core.publishing
        self._timeouts = core.timeouts
        self._beats: dict[str, _Beat] = {}
        self._fresh: Overlay[str, bytes] = Overlay()
        """Definitions since the last checkpoint."""
        self._due: deque[tuple[str, _Beat]] = deque()
        self._is_started = False
        self._stood_until_ms = self._stood_ms = 0
        """Until when the event loop stood still the last time, on the stopwatch, and how long."""
        self.not_understood: dict[str, str] = {}
        """By key, why."""
        self._on_not_understood = core.not_understood
        self.renewed_total = 0
        self.fired_total = 0

    def __len__(self) -> int:
        return len(self._beats)

    def add_metrics(self, metrics: "Metrics") -> None:
        """Add the counters and gauges of heartbeats."""
        metrics.counter("heartbeats_renewed", "Renewals of heartbeats", lambda: self.renewed_total)
        metrics.counter(
            "heartbeats_fired", "Heartbeats that were not renewed", lambda: self.fired_total
        )
        metrics.gauge("heartbeats", "Heartbeats that wait", self.__len__)

    def start(self) -> None:
        """Let time run for the heartbeats of earlier processes: a whole timeout from now."""
        if self._is_started:
            return
        self._is_started = True
        for name, value in self._catalog.scan(Table.HEARTBEATS):
            key = name.decode()
            heartbeat, problem = self._read(key, value)
            digest = _digest(heartbeat.timeout_ms, heartbeat.subject_id, heartbeat.payload)
            if problem:
                digest = _STANDS_STILL
                self.not_understood[key] = problem
                self._on_not_understood("heartbeat", key, problem)
            self._set(key, self._beat(digest, heartbeat.timeout_ms, seq=0))

    def _read(self, key: str, value: bytes) -> tuple[Heartbeat, str]:
        """The heartbeat that is stored under a key, and why it is not understood; empty: it is."""
        heartbeat, problem = HEARTBEATS.read(value, key=key)
        if not problem and (heartbeat.key != key or heartbeat.timeout_ms <= 0):
            problem = "it is a heartbeat of another key, or one that has ended"
        if not problem and heartbeat.subject_id not in self._sequencer.subject_names:
            problem = "the name of its subject is lost"
        return heartbeat, problem

    def prune(self, through_seq: int) -> None:
        """The catalog holds everything up to `through_seq`."""
        self._fresh.prune(through_seq)

    # ── requests of clients ────────────────────────────────────────────────────────────────────

    def put(
        self, key: str, timeout_ms: int, subject: str, payload: Payload, now_ms: int
    ) -> tuple[bool, int, Group | None]:
        """Make a heartbeat, or renew it. Whether it is new, when it expires by the clock of the
        machine, and the group after which that may be told.

        Raises OverloadedError, DiskReserveError, StoppingError."""
        sealed = encode_payload(payload)
        before = self._beats.get(key)
        subject_id = self._sequencer.subjects.get(subject, 0)
        digest = _digest(timeout_ms, subject_id, sealed)
        if before is not None and before.digest == digest:
            before.expires_ms = self._timeouts.stopwatch() + timeout_ms
            self.renewed_total += 1
            return False, now_ms + timeout_ms, self._groups.group_of(before.seq)
        if before is None and len(self._beats) >= self._heartbeats_max:
            raise OverloadedError(
                f"there are {len(self._beats)} heartbeats, the limit (heartbeats_max)", 60_000
            )
        subject_id = self._publishing.admit(subject, len(sealed))
        value = _encode(Heartbeat(key, timeout_ms, subject_id, sealed))
        seq = self._sequencer.append(
            RecordKind.HEARTBEAT, subject_id=subject_id, payload=seal(value)
        )
        digest = _digest(timeout_ms, subject_id, sealed)
        self._change(seq, key, value, self._beat(digest, timeout_ms, seq))
        self._groups.wake()
        return before is None, now_ms + timeout_ms, self._sequencer.group

    def get(self, key: str) -> tuple[Heartbeat, str, int]:
        """A heartbeat, why it is not understood (empty: it is), and how long it has left, in ms.
        Raises NotFoundError."""
        beat = self._beats.get(key)
        if beat is None:
            raise NotFoundError(f"there is no heartbeat {key!r}")
        left_ms = max(0, beat.expires_ms - self._timeouts.stopwatch())
        return *self._definition(key), left_ms

    def delete(self, key: str) -> Group:
        """End a heartbeat: once the group is durable it never fires. Raises NotFoundError,
        OverloadedError, StoppingError."""
        self._groups.admit(0)
        if key not in self._beats:
            raise NotFoundError(f"there is no heartbeat {key!r}")
        self._end(key, message_seq=0)
        self._groups.wake()
        return self._sequencer.group

    # ── time ───────────────────────────────────────────────────────────────────────────────────

    def run_due(self, now_ms: int) -> bool:
        """As `fire_due`, with the budget of a turn, unless requests must be read first."""
        if not self._is_started:
            self.start()
        if not self._due or self._core.is_reading:
            return False
        return self.fire_due(now_ms, TurnBudget())

    def wait_ms(self, now_ms: int) -> int:
        """The timeouts wait for them."""
        return NEVER_MS

    def look_again(self) -> None:
        """A timeout is a length, which no clock changes: nothing to do."""

    def on_stand_still(self, stood_ms: int) -> None:
        """The event loop has stood still for so long until now. Meanwhile a client could not renew
        a heartbeat with a shorter timeout, so such a heartbeat begins its timeout anew, as at a
        start."""
        self._stood_until_ms = self._timeouts.stopwatch()
        self._stood_ms = stood_ms

    def _began_anew(self, beat: _Beat) -> bool:
        """Whether a heartbeat whose time is up begins it anew."""
        since_ms = self._stood_until_ms - self._stood_ms
        if not since_ms < beat.expires_ms <= self._stood_until_ms:
            return False
        if beat.timeout_ms > self._stood_ms:
            return False
        beat.expires_ms = self._stood_until_ms + beat.timeout_ms
        return True

    def fire_due(self, now_ms: int, budget: TurnBudget) -> bool:
        """Publish the messages of those whose time is up, as far as the budget reaches; True: there
        are more."""
        while self._due and budget:
            budget.spend()
            key, beat = self._due.popleft()
            if self._beats.get(key) is not beat:
                continue
            if beat.expires_ms > self._timeouts.stopwatch():
                self._arm(key, beat)
                continue
            budget.spend(FIRE_ITEMS)
            try:
                self._fire(key, now_ms)
            except OverloadedError:
                self._arm(key, beat, self._timeouts.stopwatch() + RETRY_MS)
            except StoppingError:
                self._due.clear()  # The next process gives them a new timeout.
        return bool(self._due)

    def _fire(self, key: str, now_ms: int) -> None:
        heartbeat, problem = self._definition(key)
        assert not problem, (key, problem)
        self._groups.admit(len(heartbeat.payload))
        seq = self._publishing.publish_sealed(heartbeat.subject_id, heartbeat.payload, now_ms)
        self._end(key, message_seq=seq)
        self.fired_total += 1

    def _definition(self, key: str) -> tuple[Heartbeat, str]:
        value = self._fresh.get(key)
        if value is None:
            value = self._catalog.get(Table.HEARTBEATS, heartbeat_key(key))
        assert value, key
        return self._read(key, value)

    # ── records and timeouts ───────────────────────────────────────────────────────────────────

    def _end(self, key: str, *, message_seq: int) -> None:
        """`message_seq`: the message that it publishes; 0: none, since a client deleted it."""
        ended = _encode(Heartbeat(key))
        seq = self._sequencer.append(
            RecordKind.HEARTBEAT, message_seq=message_seq, payload=seal(ended)
        )
        self._change(seq, key, _ENDED, None)

    def _change(self, seq: int, key: str, value: bytes, beat: _Beat | None) -> None:
        """Record `seq` of the open group changed a heartbeat."""
        undo = self._sequencer.group.undo
        undo.append(partial(self._restore, key, self._beats.get(key)))
        undo.append(self._fresh.put(seq, key, value))
        self.not_understood.pop(key, None)
        self._set(key, beat)

    def _restore(self, key: str, beat: _Beat | None) -> None:
        present_ms = self._timeouts.stopwatch()
        # It is over already if its message could not be written, and was rolled back.
        is_over = beat is not None and beat.expires_ms <= present_ms
        if beat is not None and beat.digest == _STANDS_STILL:
            self.not_understood[key] = self._definition(key)[1]
        self._set(key, beat, present_ms + RETRY_MS if is_over else None)

    def _set(self, key: str, beat: _Beat | None, at_ms: int | None = None) -> None:
        before = self._beats.pop(key, None)
        if before is not None and before.handle is not None:
            self._timeouts.cancel(before.handle)
        if beat is not None:
            self._beats[key] = beat
            if beat.digest != _STANDS_STILL:
                self._arm(key, beat, at_ms)

    def _beat(self, digest: bytes, timeout_ms: int, seq: int) -> _Beat:
        return _Beat(digest, timeout_ms, seq, self._timeouts.stopwatch() + timeout_ms)

    def _arm(self, key: str, beat: _Beat, at_ms: int | None = None) -> None:
        at_ms = beat.expires_ms if at_ms is None else at_ms
        beat.handle = self._timeouts.add_at(partial(self._wake, key, beat), at_ms)

    def _wake(self, key: str, beat: _Beat) -> None:
        beat.handle = None
        if beat.expires_ms > self._timeouts.stopwatch() or self._began_anew(beat):
            self._arm(key, beat)
        else:
            self._due.append((key, beat))


def _digest(timeout_ms: int, subject_id: int, sealed: bytes) -> bytes:
    numbers = timeout_ms.to_bytes(8, "big") + subject_id.to_bytes(4, "big")
    return hashlib.blake2b(numbers + sealed, digest_size=16).digest()
