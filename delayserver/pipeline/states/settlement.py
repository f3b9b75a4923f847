"""The state of every message of an hour, from its schedule rows and its dispatch rows.

A schedule row (entry), the rows that removed it (tombstones) and its deliveries (dispatch rows)
stand in files of the same hour. So an hour can be judged by itself: no row has to meet another one
of another file, and nothing is shuffled.

    entry ─┬─ tombstone for all              cancelled, moved
           ├─ tombstone for a subscription   retried, dead
           ├─ dispatch row                   delivered, dropped
           └─ none of these, for somebody who is to have it:   pending; in a retired hour, missing

An entry is for those that `delayserver.records.receivers` names: every subscription whose subject
matched when it fell due; if there was none, anybody. Deliveries to deleted subscriptions count, and
nothing more is expected of them.

A row that claims to have ended an entry is doubted: whether the entry is the one that it names,
whether its receiver could have the entry, whether the time is possible. Definitions may have been
different at that time (a subject that was changed by a version that kept no history, a
subscription that was deleted): then no receiver is accused.

Cost: about 0.3 µs per row; 80 bytes per row of the hour, and one slice of the result at a time.
Threads: pure functions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from delayserver.pipeline.states.entry_states import SETTLED_DTYPE, BrokenGuarantee, EntryState
from delayserver.records.direct import is_direct
from delayserver.records.receivers import had_for
from delayserver.records.subjects import matches
from delayserver.records.subscriptions import Registry, Subscription
from storage.frame import Rows
from storage.rows import FLAG_REMOVAL, PUBLISHES, Outcome, RecordKind, keep, select

SLICE_ENTRIES = 256 * 1024
NEVER_MS = 1 << 62


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
"""The columns of an entry that are needed."""

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
        ("problems", "<u2"),
    ]
)
"""A tombstone or a dispatch row. `position`: of its entry in the hour; negative, there is none.
`problems`: the points in which it and its entry disagree."""

_STATES_BY_KIND = {
    RecordKind.CANCEL: EntryState.CANCELLED,
    RecordKind.MOVE: EntryState.MOVED,
    RecordKind.FIRE: EntryState.MOVED,
    RecordKind.RETRY: EntryState.RETRIED,
    RecordKind.DEAD: EntryState.DEAD,
}
_STATE_OF_KIND = np.zeros(256, np.uint8)
_STATE_OF_KIND[list(_STATES_BY_KIND)] = list(_STATES_BY_KIND.values())


def _table(*values: int) -> np.ndarray:
    """Which numbers of a byte are among these: quicker than to look for each of many."""
    table = np.zeros(256, bool)
    table[list(values)] = True
    return table


_IS_PUBLISH = _table(*PUBLISHES)
_IS_WHOLE = _table(EntryState.CANCELLED, EntryState.MOVED)
"""States that end an entry for everybody."""
_GOES_ON = _table(EntryState.MOVED, EntryState.RETRIED)
_HAS_HISTORY = _table(EntryState.MOVED, EntryState.RETRIED, EntryState.DEAD)
_STATE_OF_OUTCOME = np.zeros(256, np.uint8)
_STATE_OF_OUTCOME[[Outcome.DELIVERED, Outcome.DROPPED]] = [EntryState.DELIVERED, EntryState.DROPPED]


@dataclass(frozen=True, slots=True)
class HourRows:
    """All rows of an hour, as far as they are known."""

    schedule: Rows
    """Rows of the schedule log (SCHEDULE_DTYPE), in the order of seq."""
    dispatch: Rows
    """Rows of the dispatch log (DISPATCH_DTYPE)."""


class KnownSubscriptions:
    """The subjects and subscriptions of a shard, as they are and were."""

    def __init__(
        self, subjects: Mapping[int, str], subscriptions: Mapping[int, Subscription]
    ) -> None:
        """`subscriptions`: all that ever were, by their numbers; deleted ones, too."""
        self._subjects = subjects
        self.known = subscriptions
        self._registry = Registry(subscriptions.values())

    def subscribers(self, subject_id: int) -> Sequence[Subscription]:
        """The subscriptions that exist and match a subject, or did, oldest first."""
        subject = self.subject(subject_id)
        return [one for one in self._registry.candidates(subject) if not one.deleted]

    def subject(self, subject_id: int) -> str:
        """The name of a subject; empty: it is not known."""
        return self._subjects.get(subject_id, "")

    def is_alive(self, subscription_id: int) -> bool:
        """Whether a subscription exists."""
        return self._registry.by_id(subscription_id) is not None

    def is_known(self, subscription_id: int) -> bool:
        """Whether a subscription exists, or ever did."""
        return is_direct(subscription_id) or subscription_id in self.known

    def matches(self, subscription_id: int, subject_id: int) -> bool:
        """Whether a subscription matches a subject, or did."""
        subject = self.subject(subject_id)
        return any(matches(span.subject, subject) for span in self.known[subscription_id].spans)


@dataclass(frozen=True, slots=True)
class Judgement:
    """The facts by which an hour is judged."""

    through_seq: int
    """Records behind it are not known as a whole, and left out."""
    retired_through_seq: int
    """All entries up to this one are said to be settled; 0: the hour is not retired."""
    now_ms: int
    definitions: KnownSubscriptions
    settled_until_ms: int = NEVER_MS
    """Nothing can have been settled later."""


def settle(rows: HourRows, judgement: Judgement) -> Iterator[Rows]:
    """The states of the entries of an hour, in slices (SETTLED_DTYPE)."""
    is_known = rows.schedule["seq"] <= judgement.through_seq
    is_entry = (rows.schedule["flags"] & FLAG_REMOVAL) == 0
    entries = _entries(rows.schedule, is_known & is_entry)
    endings = _endings(
        entries,
        keep(rows.schedule, is_known & ~is_entry),
        keep(rows.dispatch, rows.dispatch["seq"] <= judgement.through_seq),
        judgement,
    )
    is_ending = endings["state"] != 0
    if not is_ending.all():
        # They end nothing: the entries that they name are judged as if they were not there.
        yield _strangers(select(endings, ~is_ending))
        endings = select(endings, is_ending)
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


def _entries(schedule: Rows, mask: np.ndarray) -> Rows:
    where = slice(None) if mask.all() else np.flatnonzero(mask)
    entries = np.empty(np.count_nonzero(mask), ENTRY_DTYPE)
    for name in ENTRY_DTYPE.names or ():
        entries[name] = schedule[name][where]
    return entries


def _endings(entries: Rows, tombstones: Rows, dispatch: Rows, judgement: Judgement) -> Rows:
    """All of them, by entry and subscription; those without an entry first."""
    endings = np.zeros(len(tombstones) + len(dispatch), ENDING_DTYPE)
    of_tombstones, of_dispatch = endings[: len(tombstones)], endings[len(tombstones) :]
    of_tombstones["seq"] = tombstones["message_seq"]
    of_tombstones["state"] = _STATE_OF_KIND[tombstones["kind"]]
    of_tombstones["due_ms"] = tombstones["due_ms"]
    of_tombstones["subscription_id"] = tombstones["subscription_id"]
    goes_on = _GOES_ON[of_tombstones["state"]]
    of_tombstones["successor_seq"] = np.where(goes_on, tombstones["seq"], 0)
    of_dispatch["state"] = _STATE_OF_OUTCOME[dispatch["outcome"]]
    for name in ("seq", "subscription_id", "attempt", "settled_ms", "message_seq", "due_ms"):
        of_dispatch[name] = dispatch[name]

    positions = np.searchsorted(entries["seq"], endings["seq"])
    found = positions < len(entries)
    found[found] = entries["seq"][positions[found]] == endings["seq"][found]
    endings["position"] = np.where(found, positions, -1)
    _doubt(endings, entries, tombstones, found, judgement)
    # A row for one subscription that was cancelled ended there.
    is_for_all = found & (endings["subscription_id"] == 0)
    is_for_all[len(tombstones) :] = False
    endings["subscription_id"][is_for_all] = entries["subscription_id"][positions[is_for_all]]
    return _by_entry(endings)


def _doubt(
    endings: Rows, entries: Rows, tombstones: Rows, found: np.ndarray, judgement: Judgement
) -> None:
    """The points in which endings, those of the tombstones first, disagree with their entries."""
    problems = endings["problems"]
    problems[endings["state"] == 0] = BrokenGuarantee.UNKNOWN_OUTCOME
    here = np.flatnonzero(found[: len(tombstones)])
    if len(here):
        ours, theirs = tombstones[here], entries[endings["position"][here]]
        differs = ours["due_ms"] != theirs["due_ms"]
        differs |= ours["seq"] <= theirs["seq"]
        # A tombstone need not say of which subject it is.
        differs |= (ours["subject_id"] != 0) & (ours["subject_id"] != theirs["subject_id"])
        problems[here[differs]] |= np.uint16(BrokenGuarantee.MISMATCHED)
    of_dispatch, is_there = endings[len(tombstones) :], found[len(tombstones) :]
    # An ending without an entry is held against the last one, and not counted.
    positions = of_dispatch["position"]
    if len(entries):
        differs = of_dispatch["due_ms"] != entries["due_ms"][positions]
        differs |= of_dispatch["message_seq"] != entries["message_seq"][positions]
        differs &= is_there
        if differs.any():
            of_dispatch["problems"][differs] |= np.uint16(BrokenGuarantee.MISMATCHED)
    settled_ms = endings["settled_ms"][len(tombstones) :]
    is_odd = (settled_ms <= 0) | (settled_ms > judgement.settled_until_ms)
    if is_odd.any():
        problems[len(tombstones) :][is_odd] |= np.uint16(BrokenGuarantee.IN_THE_FUTURE)


def _by_entry(endings: Rows) -> Rows:
    """Endings by position and subscription; of two for the same the one that was recorded first
    stays first."""
    keys = (endings["position"].astype(np.uint64) << np.uint64(32)) | endings["subscription_id"]
    keys = keys.view(np.int64)  # Endings without an entry stay in front.
    if (keys[1:] >= keys[:-1]).all():
        return endings
    return select(endings, np.argsort(keys, kind="stable"))


def _strangers(endings: Rows) -> Rows:
    """Endings without an entry, or rows that end nothing."""
    settled = np.zeros(len(endings), SETTLED_DTYPE)
    _copy_endings(endings, settled)
    settled["message_seq"], settled["due_ms"] = endings["message_seq"], endings["due_ms"]
    settled["problems"] |= endings["problems"]
    settled["problems"][endings["position"] < 0] |= np.uint16(BrokenGuarantee.UNKNOWN)
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
    absent, absent_subscriptions, is_rightful = _absent(entries, endings, judgement)
    positions = (
        np.concatenate([endings["position"], absent]) if len(absent) else endings["position"]
    )
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
    ended["problems"] |= endings["problems"]
    _add_problems(ended, endings, entries)
    # A server names nobody when it drops, so that who is named had the entry taken away.
    doubted = np.flatnonzero(~is_rightful | (endings["state"] == EntryState.DROPPED))
    ended["problems"][doubted] |= _doubt_receivers(endings[doubted], entries, judgement.definitions)
    nobody = _had_by_nobody(endings, entries, absent, judgement)
    ended["problems"][nobody] |= np.uint16(BrokenGuarantee.WRONGLY_DROPPED)
    is_odd = _is_odd(entries)
    if is_odd.any():
        settled["problems"][is_odd[positions]] |= np.uint16(BrokenGuarantee.MISMATCHED)

    if len(absent):  # else they are in order
        order = np.argsort(positions, kind="stable")
        settled, positions = select(settled, order), positions[order]
    starts = np.flatnonzero(np.concatenate([[True], positions[1:] != positions[:-1]]))
    if len(settled):
        counts = np.diff(np.append(starts, len(settled)))
        state = np.maximum.reduceat(settled["state"], starts)
        has_history = _HAS_HISTORY[settled["state"]] | ~_IS_PUBLISH[settled["kind"]]
        history = np.logical_or.reduceat(has_history, starts)
        settled["entry_state"] = np.repeat(state, counts)
        # The first one that is in that state: one subscription may wait for a message that another
        # had.
        has_state = np.flatnonzero(settled["state"] == settled["entry_state"])
        firsts = has_state[np.searchsorted(has_state, starts)]
        settled["is_first"][firsts] = True
        settled["has_history"] = np.repeat(history, counts)
    return settled


def _is_odd(entries: Rows) -> np.ndarray:
    """Entries that contradict themselves: a publish makes its own message, all others an older
    one's."""
    is_publish = _IS_PUBLISH[entries["kind"]]
    is_odd: np.ndarray = np.where(
        is_publish,
        entries["message_seq"] != entries["seq"],
        entries["message_seq"] >= entries["seq"],
    )
    return is_odd


def _absent(
    entries: Rows, endings: Rows, judgement: Judgement
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions of entries, and the subscriptions at which they have not ended; and which endings
    are at a subscription that exists and was to have the entry."""
    has_ending, is_removed = np.zeros((2, len(entries)), bool)
    has_ending[endings["position"]] = True
    is_whole = _IS_WHOLE[endings["state"]]
    is_removed[endings["position"][is_whole]] = True
    is_due = entries["due_ms"] <= judgement.now_ms
    is_due |= entries["seq"] <= judgement.retired_through_seq
    is_due |= has_ending
    wanted = np.flatnonzero(is_due & ~is_removed)
    positions, subscriptions = _expected(entries, wanted, judgement)
    # The others have no particular receiver: any ending will do, but as long as their hour is
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
    is_rightful = np.zeros(len(endings), bool)
    is_rightful[at[~still]] = True
    return (
        np.concatenate([positions[still], anybody]),
        np.concatenate([subscriptions[still], entries["subscription_id"][anybody]]),
        is_rightful,
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
        if judgement.definitions.is_alive(number):
            expect(where, number)
    for number, where in _groups(entries["subject_id"], wanted[~for_one]):
        seqs, due_ms = entries["seq"][where], entries["due_ms"][where]
        subject = judgement.definitions.subject(number)
        for subscription in judgement.definitions.subscribers(number):
            expected = had_for(subscription, subject, seqs, due_ms)
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


def _add_problems(ended: Rows, endings: Rows, entries: Rows) -> None:
    positions = endings["position"]
    same = np.zeros(len(endings), bool)
    same[1:] = (positions[1:] == positions[:-1]) & (
        endings["subscription_id"][1:] == endings["subscription_id"][:-1]
    )
    # Several deleted subscriptions drop the same row under the same number.
    same &= endings["state"] != EntryState.DROPPED
    is_removed = np.zeros(len(entries), bool)
    is_whole = _IS_WHOLE[endings["state"]]
    is_removed[positions[is_whole]] = True
    is_delivered = endings["state"] == EntryState.DELIVERED
    ended["problems"][same] |= np.uint16(BrokenGuarantee.REPEATED)
    after = is_delivered & is_removed[positions]
    ended["problems"][after] |= np.uint16(BrokenGuarantee.AFTER_REMOVAL)
    early = is_delivered & (endings["settled_ms"] < entries["due_ms"][positions])
    ended["problems"][early] |= np.uint16(BrokenGuarantee.EARLY)


# ── who had it ─────────────────────────────────────────────────────────────────────────────────

_RECEIVED = (EntryState.DELIVERED, EntryState.RETRIED, EntryState.DEAD)


def _doubt_receivers(doubted: Rows, entries: Rows, definitions: KnownSubscriptions) -> np.ndarray:
    """The problems of endings (u2): could that subscription have it, could it be dropped?"""
    problems = np.zeros(len(doubted), np.uint16)
    if not len(doubted):
        return problems
    of_entry = entries[doubted["position"]]
    cases = np.zeros(len(doubted), _CASE_DTYPE)
    cases["state"], cases["receiver"] = doubted["state"], doubted["subscription_id"]
    cases["subject_id"], cases["whose"] = of_entry["subject_id"], of_entry["subscription_id"]
    for where in _same(cases):
        case = _Case(*cases[where[0]].tolist())
        for number in {case.whose, case.receiver} - {0}:
            if not definitions.is_known(number):
                problems[where] |= np.uint16(BrokenGuarantee.UNKNOWN_SUBSCRIPTION)
        if case.state == EntryState.DROPPED:
            if _is_wrongly_dropped(case, definitions):
                problems[where] |= np.uint16(BrokenGuarantee.WRONGLY_DROPPED)
        elif case.state in _RECEIVED and definitions.is_known(case.receiver):
            wrong = _is_misdirected(case, of_entry[where], definitions)
            problems[where[wrong]] |= np.uint16(BrokenGuarantee.MISDIRECTED)
    return problems


_CASE_DTYPE = np.dtype(
    [("state", "<u4"), ("receiver", "<u4"), ("subject_id", "<u4"), ("whose", "<u4")]
)


class _Case(NamedTuple):
    """The common facts of some endings."""

    state: int
    receiver: int
    """The subscription that had the entry."""
    subject_id: int
    whose: int
    """The subscription that the entry is for; 0: all that match."""


def _same(cases: np.ndarray) -> Iterator[np.ndarray]:
    """The places of each case that occurs."""
    whole = cases.view("V16")
    if (whole == whole[0]).all():
        yield np.arange(len(cases))
        return
    order = np.lexsort([cases[name] for name in _CASE_DTYPE.names or ()])
    in_order = whole[order]
    yield from np.split(order, np.flatnonzero(in_order[1:] != in_order[:-1]) + 1)


def _is_misdirected(case: _Case, entries: Rows, definitions: KnownSubscriptions) -> np.ndarray:
    """Whether entries went to a subscription that they were not for."""
    everywhere = np.ones(len(entries), bool)
    if case.receiver == case.whose:
        return ~everywhere
    if is_direct(case.receiver) or is_direct(case.whose):
        return everywhere  # A message that names its URL goes to no other receiver.
    if case.whose and definitions.is_alive(case.whose):
        return everywhere
    receiver = definitions.known[case.receiver]
    if not definitions.matches(case.receiver, case.subject_id):
        # Before a version that kept no history has changed its subject, that may have matched.
        return ~everywhere if receiver.subject_since_ms else everywhere
    # It came later: only an entry that nobody else was there for is handed down to it.
    subject = definitions.subject(case.subject_id)
    late = ~had_for(receiver, subject, entries["seq"], entries["due_ms"])
    if receiver.subject_since_ms:
        late &= entries["due_ms"] >= receiver.subject_since_ms
    if case.whose or not late.any():
        return ~everywhere
    others = np.zeros(len(entries), bool)
    for other in definitions.subscribers(case.subject_id):
        if other.id != case.receiver and not other.subject_since_ms:
            others |= had_for(other, subject, entries["seq"], entries["due_ms"])
    return late & others


def _is_wrongly_dropped(case: _Case, definitions: KnownSubscriptions) -> bool:
    """Whether entries were dropped that no deleted subscription can have left behind."""
    if case.receiver:
        return True  # The server names nobody then.
    if case.whose:
        return definitions.is_alive(case.whose)
    return not any(
        one.deleted and (one.subject_since_ms or definitions.matches(one.id, case.subject_id))
        for one in definitions.known.values()
    )


def _had_by_nobody(
    endings: Rows, entries: Rows, absent: np.ndarray, judgement: Judgement
) -> np.ndarray:
    """Endings that dropped an entry for which there is no other ending, though its hour is
    retired."""
    dropped = np.flatnonzero(endings["state"] == EntryState.DROPPED)
    if not len(dropped):
        return dropped
    is_had = np.zeros(len(entries), bool)
    is_had[endings["position"][endings["state"] != EntryState.DROPPED]] = True
    is_had[absent] = True  # These are already reported as missing, or they wait.
    # An entry for one subscription alone ends with it.
    is_had |= entries["subscription_id"] != 0
    is_had |= entries["seq"] > judgement.retired_through_seq
    positions = endings["position"][dropped]
    is_wrong: np.ndarray = ~is_had[positions]
    for number in np.unique(entries["subject_id"][positions[is_wrong]]).tolist():
        # To a version that kept no history, one with another subject seemed to have had it.
        if any(one.subject_since_ms for one in judgement.definitions.subscribers(number)):
            is_wrong &= entries["subject_id"][positions] != number
    wrong: np.ndarray = dropped[is_wrong]
    return wrong
