"""How leases go over a planned restart: from the engine into the record, and back.

    engine that stops ── leave ──▶ KeptLeases ──▶ take_over ──▶ engine that starts

Rows that consumers hold do not wait at the start: the loader leaves them out and hands them over
beside the others (`LoadedHour.leased`). Here they are read and leased again, under their old tokens
and for as long as each had left. A row that cannot be read loses its lease, and is treated as any
other that cannot be read.

Cost: at a stop, columns; at a start a read of each message, some microseconds for each.
Threads: the event loop.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayserver.delivery.deliveries import NO_STARTS, Deliveries
from delayserver.delivery.handout import Handout
from delayserver.delivery.reader import Reader
from delayserver.records.kept_leases import ATTEMPT_DTYPE, KeptLeases
from delayserver.records.subscriptions import Subscription
from delayserver.recovery.store import Store
from delayserver.schedule.loader import LoadedHour
from delayserver.schedule.wheel_rows import WHEEL_DTYPE, FiredRows
from delayserver.server.engine import Engine
from storage.frame import Rows
from storage.rows import HOUR_MS, concatenate, is_among, select

TOGETHER_MAX: Final = 10_000
"""Leases that are read at once, unless one pull has more."""


class CarriedLeases:
    """Those that the process before has left, and those that this one leaves."""

    def __init__(
        self, store: Store, loaded: Sequence[LoadedHour], now_ms: int, *, is_first: bool
    ) -> None:
        """`loaded`: the hours that a recovery has loaded; `is_first`: there was no message yet."""
        self._store = store
        self._leased: LeasedRows | None = LeasedRows.of(loaded, store.kept, now_ms)
        self._is_first = is_first
        self._starts_ms = NO_STARTS
        """When a process began after a kill."""

    def take_over(self, engine: Engine, readers: Sequence[Reader], now_ms: int) -> None:
        """Hold the leases that the process before has left; `readers`: of which the first one is
        free. The last step before anything runs: as long as nobody is answered, a stop leaves them
        to the next process, and limits that are shared are known by now.

        Raises StorageError."""
        store, leased, self._leased = self._store, self._leased, None
        assert leased is not None
        begun = store.kept.begun(now_ms, is_first=self._is_first)
        self._starts_ms = begun.starts_ms
        for reader in readers:
            reader.starts_ms = begun.starts_ms
        take_over(store.kept, leased, engine, readers[0])
        # Behind this the leases are those of this process alone.
        store.leases.begin(begun)

    def leave(self, engine: Engine) -> Callable[[], None]:
        """Returns a function that keeps the leases that are held now for the next process. It is
        called in any thread once all that was settled is durable."""
        return partial(self._store.leases.keep, left_behind(engine, self._starts_ms))


def left_behind(engine: Engine, starts_ms: NDArray[np.int64]) -> KeptLeases:
    """The leases that the next process honours. `starts_ms`: when a process began after a kill."""
    pulls, leases = engine.leasing.leases.kept()
    parts = [np.zeros(0, ATTEMPT_DTYPE)]
    for queue in engine.dispatcher.queues:
        part = np.zeros(len(queue.attempts), ATTEMPT_DTYPE)
        part["subscription_id"] = queue.subscription.id
        part["seq"] = np.fromiter(queue.attempts, np.uint64, len(part))
        part["attempt"] = np.fromiter(queue.attempts.values(), np.uint16, len(part))
        parts.append(part)
    return KeptLeases(True, starts_ms, pulls, leases, np.concatenate(parts))


class LeasedRows(NamedTuple):
    """The rows that consumers hold, of all hours that a recovery has loaded. It shares no memory
    with them."""

    rows: Rows
    leased_by: NDArray[np.uint32]
    """The subscription of each."""
    hours: NDArray[np.intp]
    attempts: Rows
    """ATTEMPT_DTYPE, of rows that have come back and are due."""

    @classmethod
    def of(cls, loaded: Sequence[LoadedHour], kept: KeptLeases, now_ms: int) -> "LeasedRows":
        """Those of these hours."""
        attempts = kept.attempts
        if len(attempts):
            due = _due_seqs(loaded, np.unique(attempts["seq"]), now_ms)
            attempts = select(attempts, is_among(attempts["seq"], due))
        return cls(
            concatenate([hour.leased for hour in loaded], WHEEL_DTYPE),
            np.concatenate([np.zeros(0, np.uint32), *(hour.leased_by for hour in loaded)]),
            np.repeat([hour.hour for hour in loaded], [len(hour.leased) for hour in loaded]),
            attempts,
        )


def _due_seqs(
    loaded: Sequence[LoadedHour], seqs: NDArray[np.uint64], now_ms: int
) -> NDArray[np.uint64]:
    """Which of these rows are due and wait, or are held by consumers."""
    due = [np.zeros(0, np.uint64)]
    for hour in loaded:
        rows = hour.rows(hour.find(seqs))
        due_ms = hour.hour * HOUR_MS + rows["due_offset_ms"].astype(np.int64)
        due += [rows["seq"][due_ms <= now_ms], hour.leased["seq"]]
    return np.unique(np.concatenate(due))


def take_over(kept: KeptLeases, leased: LeasedRows, engine: Engine, reader: Reader) -> None:
    """Hold the leases that the last process has left."""
    rows, leased_by, hours, attempts = leased
    of_lease = kept.leased()["subscription_id"]
    for subscription in list(engine.registry):
        _take_attempts(attempts, subscription, engine)
        mine = leased_by == subscription.id
        if not mine.any():
            continue
        found = select(rows, mine)
        order = np.argsort(found["seq"], kind="stable")
        found, found_hours = select(found, order), hours[mine][order]
        leases = select(kept.leases, of_lease == subscription.id)
        pulls = select(kept.pulls, kept.pulls["subscription_id"] == subscription.id)
        for some_pulls, some in _together(pulls, leases):
            places = np.minimum(np.searchsorted(found["seq"], some["seq"]), len(found) - 1)
            is_there = found["seq"][places] == some["seq"]
            handout = Handout(
                subscription.id, _slices(select(found, places), found_hours[places], is_there)
            )
            if handout.slices:
                deliveries = reader.deliveries(handout, {})
                for fired in handout.slices:
                    seqs = fired.rows["seq"]
                    lost = seqs[~is_among(seqs, deliveries.settled["seq"])]
                    engine.dispatcher.lose_leased(fired.hour, lost.tolist())
                _hold(deliveries, some_pulls, some, engine)


def _take_attempts(attempts: Rows, subscription: Subscription, engine: Engine) -> None:
    mine = attempts[attempts["subscription_id"] == subscription.id]
    if len(mine):
        queue = engine.dispatcher.queues.of(subscription)
        pairs = zip(mine["seq"].tolist(), mine["attempt"].tolist(), strict=True)
        queue.attempts.update(pairs)


def _together(pulls: Rows, leases: Rows) -> Iterator[tuple[Rows, Rows]]:
    """Pulls that are restored together, and their leases."""
    ends = np.cumsum(pulls["count"].astype(np.intp))
    first = start = 0
    while first < len(pulls):
        until = int(np.searchsorted(ends, start + TOGETHER_MAX, "right"))
        until = max(until, first + 1)
        end = int(ends[until - 1])
        yield pulls[first:until], leases[start:end]
        first, start = until, end


def _slices(rows: Rows, hours: NDArray[np.intp], is_there: NDArray[np.bool_]) -> list[FiredRows]:
    """The rows that are there, as slices of one hour each, in their order."""
    rows, hours = select(rows, is_there), hours[is_there]
    if not len(rows):
        return []
    cuts = [0, *(np.flatnonzero(np.diff(hours)) + 1).tolist(), len(rows)]
    return [FiredRows(int(hours[start]), rows[start:end]) for start, end in pairwise(cuts)]


def _hold(deliveries: Deliveries, pulls: Rows, leases: Rows, engine: Engine) -> None:
    """Lease the messages that could be read."""
    if not len(deliveries):
        return
    is_held = is_among(leases["seq"], deliveries.settled["seq"])
    of_pull = np.repeat(np.arange(len(pulls)), pulls["count"])[is_held]
    counts = np.bincount(of_pull, minlength=len(pulls))
    held = select(leases, is_held)
    some = pulls[counts > 0].copy()
    some["count"] = counts[counts > 0]
    deliveries.settled["attempt"] = held["attempt"]
    if (some["leased_ms"] == some["leased_ms"][0]).all():
        deliveries.leased_ms = int(some["leased_ms"][0])
    engine.dispatcher.hold_leased(deliveries)
    engine.leasing.leases.restore(deliveries, some, held)
