"""Messages that went through several schedule rows: their outcomes, and whether they go on.

A message that was moved or is tried again goes on as another row, maybe in another hour. An hour
alone cannot tell whether that row exists. So all rows of such messages come here, and are put
together: by message, and from the row that says it goes on to the row where it does. The hour of
the second row may be past its retention; the catalog knows where it was.

Cost: a sort of these rows; a look into the catalog for each that goes on nowhere. Memory: theirs.
Threads: functions without state.
"""

from collections import Counter
from collections.abc import Collection

import numpy as np

from delayserver.pipeline.states.entry_states import BrokenGuarantee, EntryState
from delayserver.pipeline.states.snapshot import Directory
from delayserver.records.tables import change_key, read_hours, unpack_change
from storage.buckets import day_of
from storage.catalog import Catalog, Table
from storage.frame import Rows
from storage.rows import HOUR_MS, MOVES, RecordKind, select

_RANKS = (
    ("missing", EntryState.MISSING),
    ("pending", EntryState.PENDING),
    ("dead", EntryState.DEAD),
    ("cancelled", EntryState.CANCELLED),
    ("delivered", EntryState.DELIVERED),
    ("dropped", EntryState.DROPPED),
)
"""The outcomes of a message's rows in order of rank: the first that occurs counts."""


def outcomes_of(history: Rows) -> Counter[str]:
    """How many messages of a shard had which outcome."""
    found: Counter[str] = Counter()
    if not len(history):
        return found
    order = np.lexsort([history["seq"], history["message_seq"]])
    rows = select(history, order)
    seqs = rows["message_seq"]
    starts = np.flatnonzero(np.concatenate([[True], seqs[1:] != seqs[:-1]]))
    # A message that only a replay continued is counted in the hour that settled it.
    open_ = rows["kind"][starts] != RecordKind.REPLAY
    for name, state in _RANKS:
        counts = np.add.reduceat((rows["state"] == state).astype(np.int64), starts)
        if state is EntryState.DEAD:
            # A redrive takes one dead letter of the message away again.
            redriven = rows["is_first"] & (rows["kind"] == RecordKind.REDRIVE)
            counts -= np.add.reduceat(redriven.astype(np.int64), starts)
        here = open_ & (counts > 0)
        found[name] += int(here.sum())
        open_ &= ~here
    found["deleted"] += int(open_.sum())
    return found


def follow(history: Rows, directory: Directory) -> tuple[Rows, Rows]:
    """Rows of a shard that name a successor which does not exist, and rows whose successor belongs
    to another message or subject."""
    entries = select(history, history["is_first"])
    entries = select(entries, np.argsort(entries["seq"], kind="stable"))
    going_on = select(history, history["successor_seq"] != 0)
    at = np.searchsorted(entries["seq"], going_on["successor_seq"])
    is_there = at < len(entries)
    is_there[is_there] = entries["seq"][at[is_there]] == going_on["successor_seq"][is_there]
    found, successors = select(going_on, is_there), select(entries, at[is_there])
    is_moved = found["state"] == EntryState.MOVED
    is_odd = found["message_seq"] != successors["message_seq"]
    is_odd |= found["subject_id"] != successors["subject_id"]
    is_odd |= is_moved & ~np.isin(successors["kind"], MOVES)
    is_odd |= ~is_moved & (successors["kind"] != RecordKind.RETRY)
    # A problem that the row already has is not reported twice.
    is_odd &= (found["problems"] & np.uint16(BrokenGuarantee.MISMATCHED)) == 0
    dangling = select(going_on, ~is_there)
    return _lost(dangling, directory), select(found, is_odd)


def _lost(dangling: Rows, directory: Directory) -> Rows:
    if not len(dangling):
        return dangling
    with directory.catalog() as catalog:
        hours = read_hours(catalog)
        is_lost = [_is_lost(catalog, hours, *row) for row in _places(dangling)]
    return select(dangling, np.array(is_lost, bool))


def _places(rows: Rows) -> list[tuple[int, int, int]]:
    names = ("message_seq", "subscription_id", "successor_seq")
    return list(zip(*(rows[name].tolist() for name in names), strict=True))


def _is_lost(
    catalog: Catalog,
    hours: Collection[int],
    message_seq: int,
    subscription_id: int,
    successor_seq: int,
) -> bool:
    places = []
    for number in {0, subscription_id}:
        value = catalog.get(Table.CHANGES, change_key(message_seq, number))
        if value is not None:
            change = unpack_change(value)
            if change.entry_seq == successor_seq:
                hour = change.due_ms // HOUR_MS
                return hour in hours or day_of(hour) in hours
            places.append(change.entry_seq)
    # A place behind the successor shows that the message went on since. If all places are before
    # it, the successor never existed.
    return bool(places) and max(places) < successor_seq
