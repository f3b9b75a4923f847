"""The queue of one subscription."""

from __future__ import annotations

from delayserver.delivery.handout import Handout
from delayserver.schedule.wheel_rows import FiredRows
from tests.unit.fakes import HOUR, START_MS, subscription, wheel_rows


def test_a_handout_counts_its_rows() -> None:
    batch = FiredRows(HOUR, wheel_rows(HOUR, (1, START_MS), (2, START_MS)))
    assert Handout(subscription().id, [batch, batch]).count == 4
