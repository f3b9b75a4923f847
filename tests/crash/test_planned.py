"""Real restarts under consumers; 200 of them are for `python -m tests.crash.planned`."""

import asyncio
from pathlib import Path

from tests.crash.planned import consumers_over

RESTARTS = 3


def test_no_message_is_in_two_handlers_over_planned_restarts(tmp_path: Path) -> None:
    counts = asyncio.run(consumers_over(tmp_path, RESTARTS, seed=1))
    assert set(counts.values()) == {1}
