"""Receivers: who gets a message is a function of the message and of the histories."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from delayserver.records.horizon import Mark
from delayserver.records.receivers import had, had_for, heir_of, needed_spans, receivers, shares
from delayserver.records.subscriptions import Registry, SubjectSpan, Subscription
from tests.unit.fakes import subscription


def one(number: int, *history: tuple[str, int]) -> Subscription:
    """A subscription with a subject since a moment, and another since another, …; seqs are as the
    moments, and a message is accepted just before it falls due."""
    spans = tuple(SubjectSpan(subject, at, (Mark(at - 1, at),)) for subject, at in history)
    deleted = not spans[-1].subject
    subject = next(span.subject for span in reversed(spans) if span.subject)
    return subscription(number, subject=subject, deleted=deleted, history=spans)


def gets(known: Sequence[Subscription], subject: str, at: int, *settled: int) -> list[int]:
    """The receivers of a message that fell due at a moment, by both forms of the rule."""
    candidates = Registry(known).candidates(subject)
    scalar = [one.id for one in receivers(candidates, subject, at, at, settled)]

    def has_settled(number: int) -> np.ndarray:
        return np.array([number in settled])

    columns = np.array([at], np.uint64), np.array([at])
    found = shares(candidates, subject, *columns, has_settled if settled else None)
    assert [one.id for one, _ in found] == scalar
    return scalar


def test_the_picture_of_the_module() -> None:
    p, q = one(1, ("a", 1), ("b", 20), ("", 40)), one(2, ("b", 5))
    before = one(1, ("a", 1), ("b", 20))
    assert gets([before, q], "a", 10) == [1] and gets([p, q], "a", 10) == []
    assert gets([before, q], "b", 10) == [2]
    assert gets([before, q], "b", 30) == [1, 2]
    assert gets([before, q], "a", 30) == [] == gets([before, q], "a", 25)


def test_a_changed_subject_takes_nothing_away_and_brings_nothing_of_before() -> None:
    changed = one(1, ("a", 1), ("a.*", 10), ("b", 20), ("a", 30))
    other = one(2, ("a", 1))
    assert [gets([changed, other], "a", at) for at in (5, 15, 25, 35)] == [[1, 2], [2], [2], [1, 2]]
    assert [gets([changed], "a.x", at) for at in (5, 15)] == [[1], [1]]
    # It fell due for none but the third one.
    assert gets([changed, one(3, ("a.x", 1))], "a.x", 5) == [3]


def test_who_came_first_keeps_what_waited_for_somebody_also_with_another_subject() -> None:
    first, second = one(2, ("b", 1), ("a", 10), ("b", 20)), one(1, ("b", 1), ("a", 30))
    assert gets([first, second], "a", 5) == [2]
    assert gets([second], "a", 5) == [1]


def test_what_a_deleted_one_leaves_is_for_the_oldest_that_matches_then() -> None:
    gone = one(1, ("a", 1), ("", 20))
    was, matches, came = one(2, ("a", 10), ("b", 15)), one(3, ("*", 12)), one(4, ("a", 11))
    assert gets([gone, was, matches, came], "a", 5) == [3]
    assert gets([gone, was], "a", 5) == []
    assert gets([gone, was, one(5, ("a", 30)), one(6, ("a", 25))], "a", 5) == [6]
    # A subscription that was there on its own goes on.
    assert gets([gone, one(7, ("a", 2))], "a", 5) == [7]
    # An heir that goes, too.
    assert gets([gone, one(3, ("a", 12), ("", 30)), one(9, ("a", 40))], "a", 5) == [9]


def test_what_is_settled_is_for_those_that_have_it_still() -> None:
    pair = [one(1, ("a", 1)), one(2, ("a", 1), ("b", 10))]
    assert gets(pair, "a", 5, 1) == [2] and gets(pair, "a", 15, 1) == []
    gone = [one(1, ("a", 1), ("", 20)), one(2, ("a", 1), ("", 30))]
    heir = one(3, ("a", 10))
    assert gets([*gone, heir], "a", 5, 1) == [3]
    assert gets([*gone, heir], "a", 5, 2) == []  # The last one had it, and left nothing.
    assert gets([heir], "a", 5, 7) == []  # One that is forgotten had it.


def test_a_retry_of_a_deleted_one_goes_where_its_message_would() -> None:
    gone, heir = one(1, ("a", 1), ("", 20)), one(3, ("a", 12))
    later = one(4, ("a", 25))

    def goes(left_by: Subscription | None, at: int, *known: Subscription) -> int | None:
        found = heir_of(left_by, Registry(known).candidates("a"), "a", at, at)
        return None if found is None else found.id

    assert goes(gone, 5, gone, heir, later) == 3 == goes(gone, 22, gone, heir, later)
    assert goes(gone, 5, gone, later) == 4 == goes(gone, 22, gone, later)
    assert goes(gone, 5, gone) is None
    assert goes(None, 30, heir, later) == 3


def test_a_clock_that_was_set_back_brings_nothing_again() -> None:
    marks = (Mark(7, 90), Mark(9, 50))
    made = subscription(1, subject="a", history=(SubjectSpan("a", 10, marks),))
    rows = [(7, 89), (7, 90), (8, 49), (8, 50), (8, 89), (9, 49), (10, 0)]
    existed = [False, True, False, True, True, False, True]
    assert [had(made, "a", *row) for row in rows] == existed
    seqs, due_ms = (np.array(column) for column in zip(*rows, strict=True))
    assert had_for(made, "a", seqs.astype(np.uint64), due_ms).tolist() == existed
    assert made.unchanged_since_ms == 90


def test_a_definition_without_history_goes_by_what_it_has() -> None:
    made = subscription(subject="a", created_ms=50)
    assert [had(made, "a", 1 << 63, due_ms) for due_ms in (49, 50)] == [False, True]
    assert made.unchanged_since_ms == 50
    marked = subscription(subject="a", created_ms=50, horizon=(Mark(7, 90),))
    assert [had(marked, "a", seq, 60) for seq in (7, 8)] == [False, True]


@pytest.mark.parametrize(
    ("kept_since_ms", "filed_seq", "left"), [(9, 99, 3), (10, 99, 2), (20, 99, 1), (20, 18, 2)]
)
def test_what_no_message_needs_is_left_out(kept_since_ms: int, filed_seq: int, left: int) -> None:
    spans = one(1, ("a", 1), ("b", 10), ("c", 20)).spans
    assert needed_spans(spans, kept_since_ms, filed_seq) == spans[-left:]
