"""Receivers: which subscriptions get a message. The only place that decides it.

A message is for every subscription whose subject matched when the message fell due. A later change
of the subject takes nothing away that waits, and brings nothing of the time before. A message that
matched no subscription waits, and belongs to the first one that gets a matching subject after that.
A subscription that is deleted leaves its messages to the oldest one that matches at that moment, or
else to the first one that does later.

    p: `a` ────────────▶ `b` ─────────────────▶ deleted
    q:        `b` ─────────────────────────────────────▶
               └ 1        └ 2      └ 3              └ 4   ▶ time
    a message of `a` that fell due at 1     p, as long as p exists; from 4 on it waits
    a message of `b` that fell due at 1     q
    a message of `b` that fell due at 3     p and q
    a message of `a` that fell due at 2     waits for a subscription to `a`

The rule is a function of the row (its subject, due time and seq) and of the histories of the
subscriptions (`Subscription.spans`), which are in the definitions log. Nothing else counts: no
clock, and nothing that only memory knows. So routing, recovery, look-ups, cancels and the audit
give the same answer, before and after a restart.

The rule stands here twice: for one row, and for columns of rows of one subject. Tests compare the
two. Both are given candidates (`Registry.candidates`): all subscriptions that have or had a
matching subject. An index may find them; whether they get the row is decided here.

Cost: one comparison for each candidate where all of them are older than the rows, as nearly always;
else about 10 ns for each row and candidate. Threads: pure functions.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayserver.records.horizon import Mark, fallen_due, has_fallen_due
from delayserver.records.subjects import matches
from delayserver.records.subscriptions import SubjectSpan, Subscription

Mask = NDArray[np.bool_]


# ── one row ──────────────────────────────────────────────────────────────────────────────────────


def had(one: Subscription, subject: str, seq: int, due_ms: int) -> bool:
    """Whether a subscription matched a row's subject when the row fell due."""
    pattern = ""
    for span in one.spans:
        if has_fallen_due(span.marks, seq, due_ms):
            break
        pattern = span.subject
    return matches(pattern, subject)


def receivers(
    candidates: Sequence[Subscription],
    subject: str,
    seq: int,
    due_ms: int,
    settled_by: Collection[int] = (),
) -> list[Subscription]:
    """The subscriptions that a row is for, the oldest first; none: it waits for one to come.

    `settled_by`: ids of those that have settled it. The answer is without them then, and none means
    that the row is done."""
    there = [one for one in candidates if had(one, subject, seq, due_ms)]
    if existing := [one for one in there if not one.deleted]:
        return [one for one in existing if one.id not in settled_by]
    holders = {one.id for one in there}
    if settled_by and not holders:
        return []
    heir = _pass_on(candidates, subject, seq, due_ms, holders, settled_by)
    return [] if heir is None or heir.id in settled_by else [heir]


def heir_of(
    left_by: Subscription | None,
    candidates: Sequence[Subscription],
    subject: str,
    seq: int,
    due_ms: int,
) -> Subscription | None:
    """The subscription that gets a row which was for a deleted one alone (a retry); None: the row
    waits for one to come.

    `left_by`: the deleted one; None if its history is forgotten, as all rows that are kept fell due
    since it was deleted."""
    if left_by is not None:
        departure = left_by.spans[-1]
        if not departure.subject and has_fallen_due(departure.marks, seq, due_ms):
            others = [one for one in candidates if one.id != left_by.id]
            return _pass_on([left_by, *others], subject, seq, due_ms, {left_by.id})
    # It fell due when no subscription wanted it: the oldest one that was there then has it.
    there = [one for one in candidates if had(one, subject, seq, due_ms)]
    if there and not there[0].deleted:
        return there[0]
    return _pass_on(candidates, subject, seq, due_ms, {one.id for one in there[:1]})


def _pass_on(
    candidates: Sequence[Subscription],
    subject: str,
    seq: int,
    due_ms: int,
    holders: set[int],
    settled_by: Collection[int] = (),
) -> Subscription | None:
    """Follow a row from holder to holder, through all that happened after it fell due. `holders`:
    ids of deleted subscriptions that it was for. A row is done if the last one that left it had
    settled it."""
    for event in _events(candidates, subject):
        if event.departed is not None:
            if event.departed not in holders:
                continue
            holders.remove(event.departed)
            if not holders and event.departed in settled_by:
                return None
            if not holders and event.heir is not None:
                holders.add(event.heir.id)
        elif not holders and has_fallen_due(event.marks, seq, due_ms):
            assert event.heir is not None
            holders.add(event.heir.id)
    return next((one for one in candidates if one.id in holders and not one.deleted), None)


# ── columns ──────────────────────────────────────────────────────────────────────────────────────


def had_for(
    one: Subscription, subject: str, seqs: NDArray[np.uint64], due_ms: NDArray[np.int64]
) -> Mask:
    """As `had`, of many rows (shape n)."""
    spans = one.spans
    matching = matches(spans[-1].subject, subject)
    found = np.full(len(seqs), matching)
    for index in range(len(spans) - 1, -1, -1):
        before = index > 0 and matches(spans[index - 1].subject, subject)
        found[fallen_due(spans[index].marks, seqs, due_ms)] = before
    return found


def shares(
    candidates: Sequence[Subscription],
    subject: str,
    seqs: NDArray[np.uint64],
    due_ms: NDArray[np.int64],
    settled_by: Callable[[int], Mask] | None = None,
) -> list[tuple[Subscription, Mask]]:
    """As `receivers`, for many rows of one subject (shape n): each subscription with its share of
    them, the oldest first. A row that is in no share waits for a subscription to come.

    `settled_by`: which rows a subscription has settled, by its id (shape n). Each row is settled by
    at least one of them then, and one that is in no share is done."""
    held = {one.id: had_for(one, subject, seqs, due_ms) for one in candidates}
    nobodys = np.ones(len(seqs), bool)
    for one in candidates:
        if not one.deleted:
            nobodys &= ~held[one.id]
    if nobodys.any():
        _pass_on_many(candidates, subject, seqs, due_ms, held, nobodys, settled_by)
    found = []
    for one in candidates:
        if one.deleted:
            continue
        mine = held[one.id]
        if settled_by is not None:
            mine = mine & ~settled_by(one.id)
        if mine.any():
            found.append((one, mine))
    return found


def _pass_on_many(
    candidates: Sequence[Subscription],
    subject: str,
    seqs: NDArray[np.uint64],
    due_ms: NDArray[np.int64],
    held: dict[int, Mask],
    rows: Mask,
    settled_by: Callable[[int], Mask] | None,
) -> None:
    """As `_pass_on`, of the `rows` that no existing subscription has; `held` follows."""
    left = {one.id: held[one.id] & rows for one in candidates if one.deleted}
    is_left = np.zeros(len(rows), bool)
    for mask in left.values():
        is_left |= mask
    free = rows & ~is_left if settled_by is None else np.zeros(len(rows), bool)
    if not free.any() and not is_left.any():
        return
    for event in _events(candidates, subject):
        if event.departed is not None:
            taken = left[event.departed]
            left[event.departed] = np.zeros(len(rows), bool)
            for mask in left.values():
                taken = taken & ~mask
            if settled_by is not None:
                taken = taken & ~settled_by(event.departed)
            free |= taken
        else:
            taken = free & fallen_due(event.marks, seqs, due_ms)
        if event.heir is None or not taken.any():
            continue
        free &= ~taken
        of = left if event.heir.id in left else held
        of[event.heir.id] = of[event.heir.id] | taken
        if not free.any() and not any(mask.any() for mask in left.values()):
            return


# ── what happened ────────────────────────────────────────────────────────────────────────────────


class _Event(NamedTuple):
    """A subscription came, or left, as far as that matters to one subject."""

    marks: tuple[Mark, ...]
    """Rows that had fallen due by then."""
    departed: int | None
    """The subscription that was deleted; None: one came to match."""
    heir: Subscription | None
    """The one that came; or the oldest one that matched when another was deleted."""


def _events(candidates: Sequence[Subscription], subject: str) -> Iterator[_Event]:
    """All that happened, in the order of the records."""
    begun = sorted(
        ((span.since_seq, one.id, one, span) for one in candidates for span in one.spans),
        key=lambda found: found[:2],
    )
    matching: dict[int, Subscription] = {}
    for _, number, one, span in begun:
        if not span.subject and one.deleted:
            matching.pop(number, None)
            heir = matching[min(matching)] if matching else None
            yield _Event(span.marks, number, heir)
        elif matches(span.subject, subject):
            matching[number] = one
            yield _Event(span.marks, None, one)
        else:
            matching.pop(number, None)


# ── what is kept of a history ────────────────────────────────────────────────────────────────────


def needed_spans(
    spans: tuple[SubjectSpan, ...], kept_since_ms: int, filed_seq: int
) -> tuple[SubjectSpan, ...]:
    """A history without the spans that no message needs any more.

    `kept_since_ms`: no row that is filed and kept is due earlier; `filed_seq`: all rows up to this
    one are filed. A span is over for all rows that are kept if those that fell due before the next
    one began are gone."""
    for index in range(len(spans) - 1, 0, -1):
        if all(
            mark.before_ms <= kept_since_ms and mark.seq <= filed_seq for mark in spans[index].marks
        ):
            return spans[index:]
    return spans
