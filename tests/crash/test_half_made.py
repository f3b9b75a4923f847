"""Some restores that are ended by SIGKILL; `python -m tests.crash.half_made` does more."""

from collections import Counter
from pathlib import Path

import pytest

from tests.crash.half_made import killed, make_backups

pytestmark = [pytest.mark.crash, pytest.mark.unchecked("processes of their own make directories")]
RUNS = 25


def test_a_restore_that_is_killed_is_refused_or_whole(tmp_path: Path) -> None:
    found = Counter(killed(make_backups(tmp_path), tmp_path, range(RUNS)))
    assert found["refused"] > RUNS // 2, found
