"""Receivers of a message: the rule against a model that follows the message as it happens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from delayserver.records.horizon import Mark
from delayserver.records.receivers import had, had_for, needed_spans, receivers, shares
from delayserver.records.subjects import matches
from delayserver.records.subscriptions import Registry, SubjectSpan, Subscription
from tests.unit.fakes import subscription

SUBJECTS = ("a", "a.x", "b")
PATTERNS = (*SUBJECTS, "a.*", "*", "")


class Event(NamedTuple):
    """At a moment a subscription gets a subject; an empty one: it is deleted."""

    number: int
    pattern: str


EVENTS = st.lists(st.builds(Event, st.integers(1, 4), st.sampled_from(PATTERNS)), max_size=12)


def histories(events: Sequence[Event]) -> list[Subscription]:
    """All subscriptions after events at the moments 10, 20, …; a number is used once."""
    spans: dict[int, list[SubjectSpan]] = {}
    for index, (number, pattern) in enumerate(events):
        known = spans.get(number, [])
        at = 10 * index + 10
        is_over = bool(known) and not known[-1].subject
        is_change = bool(pattern) if not known else known[-1].subject != pattern
        if is_change and not is_over:
            spans[number] = [*known, SubjectSpan(pattern, at, (Mark(at, at),))]
    return [
        subscription(
            number,
            subject=[span.subject for span in of if span.subject][-1],
            deleted=not of[-1].subject,
            history=tuple(of),
        )
        for number, of in spans.items()
    ]


def holders(events: Sequence[Event], subject: str, at: int) -> set[int]:
    """The model: who has a message that falls due at a moment, followed from event to event."""
    patterns: dict[int, str] = {}
    gone: set[int] = set()
    has: set[int] | None = None
    for index, (number, pattern) in enumerate(events):
        if has is None and at < 10 * index + 10:
            has = {one for one, now in patterns.items() if matches(now, subject)}
        if number in gone or not (pattern or number in patterns):
            continue
        if not pattern:
            gone.add(number)
            del patterns[number]
            if has and number in has:
                has.remove(number)
                if not has:
                    has |= {min((n for n, p in patterns.items() if matches(p, subject)), default=0)}
                    has.discard(0)
            continue
        is_new = patterns.get(number) != pattern
        patterns[number] = pattern
        if has is not None and not has and is_new and matches(pattern, subject):
            has = {number}
    if has is None:
        has = {one for one, now in patterns.items() if matches(now, subject)}
    return has


@given(EVENTS, st.sampled_from(SUBJECTS), st.integers(0, 13))
def test_the_rule_says_what_would_have_happened(
    events: list[Event], subject: str, moment: int
) -> None:
    at = 10 * moment + 5
    candidates = Registry(histories(events)).candidates(subject)
    assert {one.id for one in receivers(candidates, subject, at, at)} == holders(
        events, subject, at
    )


@given(
    EVENTS,
    st.sampled_from(SUBJECTS),
    st.lists(st.tuples(st.integers(1, 140), st.integers(0, 140)), min_size=1, max_size=8),
    st.lists(st.sets(st.integers(1, 5)), min_size=8, max_size=8),
)
def test_one_row_and_columns_come_to_the_same(
    events: list[Event], subject: str, rows: list[tuple[int, int]], settled: list[set[int]]
) -> None:
    """Also for rows that were accepted late: seq and due time are any."""
    candidates = Registry(histories(events)).candidates(subject)
    seqs = np.array([seq for seq, _ in rows], np.uint64)
    due_ms = np.array([due for _, due in rows], np.int64)
    for one in candidates:
        expected = [had(one, subject, *row) for row in rows]
        assert had_for(one, subject, seqs, due_ms).tolist() == expected
    for is_settled in (False, True):
        settled_by = [one or {5} for one in settled[: len(rows)]] if is_settled else [set()] * 8

        def has_settled(number: int, by: Sequence[set[int]] = settled_by) -> np.ndarray:
            return np.array([number in by[index] for index in range(len(rows))])

        found = shares(candidates, subject, seqs, due_ms, has_settled if is_settled else None)
        for index, row in enumerate(rows):
            scalar = receivers(candidates, subject, *row, settled_by[index])
            assert [one.id for one, mask in found if mask[index]] == [one.id for one in scalar]


@given(EVENTS, st.sampled_from(SUBJECTS), st.integers(0, 13), st.integers(0, 140))
def test_a_history_without_what_is_not_needed_says_the_same(
    events: list[Event], subject: str, moment: int, kept_since_ms: int
) -> None:
    at = 10 * moment + 5
    if at < kept_since_ms:
        return  # Such a message is not kept.
    known = histories(events)
    needed = [(one, needed_spans(one.spans, kept_since_ms, 1000)) for one in known]
    short = [
        subscription(one.id, subject=one.subject, deleted=one.deleted, history=spans)
        for one, spans in needed
    ]
    found = [
        [one.id for one in receivers(Registry(some).candidates(subject), subject, at, at)]
        for some in (known, short)
    ]
    assert found[0] == found[1]


@given(EVENTS, st.sampled_from(SUBJECTS))
def test_the_registry_brings_all_candidates_however_it_was_filled(
    events: list[Event], subject: str
) -> None:
    known = histories(events)
    expected = [
        one.id
        for one in sorted(known, key=lambda one: one.id)
        if any(matches(span.subject, subject) for span in one.spans)
    ]
    step_by_step = Registry()
    for end in range(1, len(events) + 1):
        for one in histories(events[:end]):
            step_by_step.put(one)
    for registry in (Registry(known), step_by_step, step_by_step.snapshot()):
        assert sorted(one.id for one in registry.candidates(subject)) == expected
