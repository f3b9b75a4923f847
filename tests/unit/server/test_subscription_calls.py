"""Subscriptions are defined and changed; what several shards decide is taken over."""

from __future__ import annotations

import msgspec
import pytest

from delayserver.errors import ConflictError
from delayserver.records.horizon import Mark
from delayserver.records.subscriptions import SPANS_MAX, SubjectSpan
from tests.unit.fakes import subscription
from tests.unit.server.machine import Machine


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_a_subject_is_not_changed_more_often_than_a_history_is_long(machine: Machine) -> None:
    spans = tuple(
        SubjectSpan(f"s{number}", number, (Mark(1 << 40, number),)) for number in range(SPANS_MAX)
    )
    many = subscription(1, subject=spans[-1].subject, history=spans)
    with pytest.raises(ConflictError, match="99 times"):
        machine.calls.subscriptions.check_subjects_of(many)
    machine.calls.subscriptions.check_subjects_of(msgspec.structs.replace(many, history=spans[1:]))
