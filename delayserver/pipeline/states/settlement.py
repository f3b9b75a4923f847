"""What became of every message of an hour, from its schedule rows and its dispatch rows.

A schedule row (entry), what removed it (tombstones) and what was delivered of it (dispatch rows)
stand in files of the same hour. So an hour can be judged by itself: no row has to meet another one
of another file, and nothing is shuffled.

    entry ─┬─ tombstone for all              cancelled, moved
           ├─ tombstone for a subscription   retried, dead
           ├─ dispatch row                   delivered, dropped
           └─ none of these, for somebody who is to have it:   pending; in a retired hour, missing

Who is to have an entry is the rule of `delayserver.records.subscriptions`: every subscription that
matches and existed when it fell due; if there was none, anybody. What deleted subscriptions got
counts, and nothing more is expected of them.

Cost: about 0.3 µs per row; 80 bytes per row of the hour, and one slice of the result at a time.
Threads: pure functions.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag

import numpy as np

from delayserver.records.subscriptions import Subscription
from storage.frame import Rows
from storage.rows import FLAG_REMOVAL, PUBLISHES, Outcome, RecordKind, select

SLICE_ENTRIES = 256 * 1024


class EntryState(IntEnum):
    """What became of an entry at one subscription; of an entry as a whole, the greatest."""

    DROPPED = 1
    """Its subscription was deleted, and others had the message."""
    DELIVERED = 2
    CANCELLED = 3
    MOVED = 4
    """It goes on as the entry `successor_seq`."""
    RETRIED = 5
    """It goes on as the entry `successor_seq`."""
    DEAD = 6
    PENDING = 7
    MISSING = 8
    """Its hour is retired, which says that all is settled, and this is not."""


class BrokenGuarantee(IntFlag):
    """What must not be."""

    REPEATED = 1
    """Settled a second time at the same subscription (I4)."""
    AFTER_REMOVAL = 2
    """Delivered, though it was cancelled or moved (I5)."""
    EARLY = 4
    """Delivered before it was due (I1)."""
    UNKNOWN = 8
    """Settled, but there is no such entry."""
    MISSING = 16
    """Neither delivered nor anything else (I3)."""


SETTLED_DTYPE = np.dtype(
    [
        ("seq", "<u8"),
        ("message_seq", "<u8"),
        ("due_ms", "<i8"),
        ("settled_ms", "<i8"),
        ("successor_seq", "<u8"),
        ("subject_id", "<u4"),
        ("subscription_id", "<u4"),
        ("attempt", "<u2"),
        ("kind", "u1"),
        ("state", "u1"),
        ("entry_state", "u1"),
        ("problems", "u1"),
        ("is_first", "?"),
        ("has_history", "?"),
    ]
)
"""One entry at one subscription (0: none in particular).

settled_ms     when the delivery ended; 0 where no time is recorded
attempt        the attempt that was delivered; 0: it was not
kind           the kind of record that made the entry; 0 where there is no entry
entry_state    the greatest state of the entry's rows
is_first       of each entry exactly one row
has_history    there are, or may be, other entries of the same message
"""

ENTRY_DTYPE = np.dtype(
    [
        ("seq", "<u8"),
        ("due_ms", "<i8"),
        ("message_seq", "<u8"),
        ("subject_id", "<u4"),
        ("subscription_id", "<u4"),
        ("kind", "u1"),
    ]
)
"""What is needed of an entry."""

ENDING_DTYPE = np.dtype(
    [
        ("seq", "<u8"),
        ("subscription_id", "<u4"),
        ("state", "u1"),
        ("attempt", "<u2"),
        ("settled_ms", "<i8"),
        ("successor_seq", "<u8"),
        ("message_seq", "<u8"),
        ("due_ms", "<i8"),
        ("position", "<i8"),
    ]
)
"""A tombstone or a dispatch row. `position`: of its entry in the hour; negative, there is none."""

_STATES_BY_KIND = {
    RecordKind.CANCEL: EntryState.CANCELLED,
    RecordKind.MOVE: EntryState.MOVED,
    RecordKind.FIRE: EntryState.MOVED,
    RecordKind.RETRY: EntryState.RETRIED,
    RecordKind.DEAD: EntryState.DEAD,
}
_STATE_OF_KIND = np.zeros(256, np.uint8)
_STATE_OF_KIND[list(_STATES_BY_KIND)] = list(_STATES_BY_KIND.values())
_STATE_OF_OUTCOME = np.zeros(256, np.uint8)
_STATE_OF_OUTCOME[[Outcome.DELIVERED, Outcome.DROPPED]] = [EntryState.DELIVERED, EntryState.DROPPED]


@dataclass(frozen=True, slots=True)
class HourRows:
    """All rows of an hour, as far as they are known."""

    schedule: Rows
    """Of the schedule log (SCHEDULE_DTYPE), in the order of seq."""
    dispatch: Rows
    """Of the dispatch log (DISPATCH_DTYPE)."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """By what an hour is judged."""

    through_seq: int
    """Records behind it are not known as a whole, and left out."""
    retired_through_seq: int
    """All entries up to this one are said to be settled; 0: the hour is not retired."""
    now_ms: int
    subscribers: Callable[[int], Sequence[Subscription]]
    """The subscriptions that match a subject, by its number."""
    is_alive: Callable[[int], bool]
    """Whether a subscription exists, by its number."""


def settle(rows: HourRows, judgement: Judgement) -> Iterator[Rows]:
    """What became of the entries of an hour, in slices (SETTLED_DTYPE)."""
    is_known = rows.schedule["seq"] <= judgement.through_seq
    is_entry = (rows.schedule["flags"] & FLAG_REMOVAL) == 0
    entries = _entries(select(rows.schedule, is_known & is_entry))
    endings = _endings(
        entries,
        select(rows.schedule, is_known & ~is_entry),
        select(rows.dispatch, rows.dispatch["seq"] <= judgement.through_seq),
    )
    strangers = int(np.searchsorted(endings["position"], 0))
    if strangers:
        yield _strangers(endings[:strangers])
    cuts = np.arange(0, len(entries), SLICE_ENTRIES)
    firsts = np.searchsorted(endings["position"], cuts)
    lasts = np.searchsorted(endings["position"], cuts + SLICE_ENTRIES)
    for start, first, last in zip(cuts.tolist(), firsts, lasts, strict=True):
        some = endings[first:last].copy()
        some["position"] -= start
        yield _settle(entries[start : start + SLICE_ENTRIES], some, judgement)


def _entries(schedule: Rows) -> Rows:
    entries = np.empty(len(schedule), ENTRY_DTYPE)
    for name in ENTRY_DTYPE.names or ():
        entries[name] = schedule[name]
    return entries


def _endings(entries: Rows, tombstones: Rows, dispatch: Rows) -> Rows:
    """All of them, by entry and subscription; those without an entry first."""
    endings = np.zeros(len(tombstones) + len(dispatch), ENDING_DTYPE)
    of_tombstones, of_dispatch = endings[: len(tombstones)], endings[len(tombstones) :]
    of_tombstones["seq"] = tombstones["message_seq"]
    of_tombstones["state"] = _STATE_OF_KIND[tombstones["kind"]]
    of_tombstones["due_ms"] = tombstones["due_ms"]
    of_tombstones["subscription_id"] = tombstones["subscription_id"]
    goes_on = np.isin(of_tombstones["state"], (EntryState.MOVED, EntryState.RETRIED))
    of_tombstones["successor_seq"] = np.where(goes_on, tombstones["seq"], 0)
    of_dispatch["state"] = _STATE_OF_OUTCOME[dispatch["outcome"]]
    for name in ("seq", "subscription_id", "attempt", "settled_ms", "message_seq", "due_ms"):
        of_dispatch[name] = dispatch[name]

    positions = np.searchsorted(entries["seq"], endings["seq"])
    found = positions < len(entries)
    found[found] = entries["seq"][positions[found]] == endings["seq"][found]
    endings["position"] = np.where(found, positions, -1)
    # A row for one subscription that was cancelled ended there.
    is_for_all = found & (endings["subscription_id"] == 0)
    is_for_all[len(tombstones) :] = False
    endings["subscription_id"][is_for_all] = entries["subscription_id"][positions[is_for_all]]
    # Stable: of two endings the one that was recorded first stays first.
    order = np.argsort(endings["subscription_id"], kind="stable")
    order = order[np.argsort(endings["position"][order], kind="stable")]
    return select(endings, order)


def _strangers(endings: Rows) -> Rows:
    """Endings of what there is no entry of."""
    settled = np.zeros(len(endings), SETTLED_DTYPE)
    _copy_endings(endings, settled)
    settled["message_seq"], settled["due_ms"] = endings["message_seq"], endings["due_ms"]
    settled["problems"] = BrokenGuarantee.UNKNOWN
    return settled


def _copy_endings(endings: Rows, settled: Rows) -> None:
    for name in (
        "seq",
        "subscription_id",
        "state",
        "attempt",
        "settled_ms",
        "successor_seq",
    ):
        settled[name] = endings[name]


def _settle(entries: Rows, endings: Rows, judgement: Judgement) -> Rows:
    absent, absent_subscriptions = _absent(entries, endings, judgement)
    positions = np.concatenate([endings["position"], absent])
    settled = np.zeros(len(positions), SETTLED_DTYPE)
    ended, open_ = settled[: len(endings)], settled[len(endings) :]
    _copy_endings(endings, ended)
    open_["seq"] = entries["seq"][absent]
    open_["subscription_id"] = absent_subscriptions
    is_missing = open_["seq"] <= judgement.retired_through_seq
    open_["state"] = np.where(is_missing, EntryState.MISSING, EntryState.PENDING)
    open_["problems"] = np.where(is_missing, BrokenGuarantee.MISSING, 0)
    for name in ("message_seq", "due_ms", "subject_id", "kind"):
        settled[name] = entries[name][positions]
    _add_problems(ended, endings, entries, judgement)

    order = np.argsort(positions, kind="stable")
    settled, positions = select(settled, order), positions[order]
    starts = np.flatnonzero(np.concatenate([[True], positions[1:] != positions[:-1]]))
    if len(settled):
        settled["is_first"][starts] = True
        counts = np.diff(np.append(starts, len(settled)))
        state = np.maximum.reduceat(settled["state"], starts)
        goes_on = np.isin(settled["state"], (EntryState.MOVED, EntryState.RETRIED, EntryState.DEAD))
        is_publish = np.isin(settled["kind"], PUBLISHES)
        history = np.logical_or.reduceat(goes_on | ~is_publish, starts)
        settled["entry_state"] = np.repeat(state, counts)
        settled["has_history"] = np.repeat(history, counts)
    return settled


def _absent(entries: Rows, endings: Rows, judgement: Judgement) -> tuple[np.ndarray, np.ndarray]:
    """Positions of entries, and the subscriptions at which they have not ended."""
    has_ending, is_removed = np.zeros((2, len(entries)), bool)
    has_ending[endings["position"]] = True
    is_whole = np.isin(endings["state"], (EntryState.CANCELLED, EntryState.MOVED))
    is_removed[endings["position"][is_whole]] = True
    is_due = entries["due_ms"] <= judgement.now_ms
    is_due |= entries["seq"] <= judgement.retired_through_seq
    is_due |= has_ending
    wanted = np.flatnonzero(is_due & ~is_removed)
    positions, subscriptions = _expected(entries, wanted, judgement)
    # Nobody in particular is to have the others: any ending will do, but as long as their hour is
    # open a row for a subject waits until somebody had it (see the loader).
    is_expected, is_had = np.zeros((2, len(entries)), bool)
    is_expected[positions] = True
    is_had[endings["position"][endings["state"] != EntryState.DROPPED]] = True
    is_had |= has_ending & (entries["subscription_id"] != 0)
    is_had |= has_ending & (entries["seq"] <= judgement.retired_through_seq)
    anybody = np.flatnonzero(~is_expected & ~is_removed & ~is_had)

    shift = np.uint64(32)
    had = (endings["position"].astype(np.uint64) << shift) | endings["subscription_id"]
    keys = (positions.astype(np.uint64) << shift) | subscriptions
    # They are sorted by both.
    at = np.searchsorted(had, keys)
    still = np.ones(len(keys), bool)
    inside = at < len(had)
    still[inside] = had[at[inside]] != keys[inside]
    return (
        np.concatenate([positions[still], anybody]),
        np.concatenate([subscriptions[still], entries["subscription_id"][anybody]]),
    )


def _expected(
    entries: Rows, wanted: np.ndarray, judgement: Judgement
) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of an entry's position and a subscription that exists and is to have it."""
    positions: list[np.ndarray] = [np.empty(0, np.int64)]
    subscriptions: list[np.ndarray] = [np.empty(0, np.uint32)]

    def expect(where: np.ndarray, subscription_id: int) -> None:
        positions.append(where)
        subscriptions.append(np.full(len(where), subscription_id, np.uint32))

    for_one = entries["subscription_id"][wanted] != 0
    for number, where in _groups(entries["subscription_id"], wanted[for_one]):
        if judgement.is_alive(number):
            expect(where, number)
    for number, where in _groups(entries["subject_id"], wanted[~for_one]):
        due_ms = entries["due_ms"][where]
        for subscription in judgement.subscribers(number):
            expected = subscription.existed_for(entries["seq"][where], due_ms)
            expected &= due_ms >= subscription.subject_since_ms
            expect(where[expected], subscription.id)
    return np.concatenate(positions), np.concatenate(subscriptions)


def _groups(column: np.ndarray, where: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Each value of a column at some positions, and the positions where it stands."""
    if not len(where):
        return
    numbers = column[where]
    if (numbers == numbers[0]).all():
        yield int(numbers[0]), where
        return
    order = np.argsort(numbers, kind="stable")
    cuts = np.flatnonzero(np.diff(numbers[order])) + 1
    for here in np.split(order, cuts):
        yield int(numbers[here[0]]), where[here]


def _add_problems(ended: Rows, endings: Rows, entries: Rows, judgement: Judgement) -> None:
    positions = endings["position"]
    same = np.zeros(len(endings), bool)
    same[1:] = (positions[1:] == positions[:-1]) & (
        endings["subscription_id"][1:] == endings["subscription_id"][:-1]
    )
    # Several deleted subscriptions drop the same row under the same number.
    same &= endings["state"] != EntryState.DROPPED
    is_removed = np.zeros(len(entries), bool)
    is_whole = np.isin(endings["state"], (EntryState.CANCELLED, EntryState.MOVED))
    is_removed[positions[is_whole]] = True
    is_delivered = endings["state"] == EntryState.DELIVERED
    ended["problems"] |= np.where(same, BrokenGuarantee.REPEATED, 0).astype(np.uint8)
    after = is_delivered & is_removed[positions]
    ended["problems"] |= np.where(after, BrokenGuarantee.AFTER_REMOVAL, 0).astype(np.uint8)
    early = is_delivered & (endings["settled_ms"] < entries["due_ms"][positions])
    ended["problems"] |= np.where(early, BrokenGuarantee.EARLY, 0).astype(np.uint8)
