"""A short crash run; `scripts/crash` makes long ones."""

import asyncio

import pytest

from tests.crash.harness import CrashRun, describe

pytestmark = [pytest.mark.crash, pytest.mark.slow]

SEED = 5
"""In its first four rounds the hour changes, a recovery is killed, and the files are checked."""


def test_killed_again_and_again(tmp_path):
    outcome = asyncio.run(CrashRun(tmp_path, seed=SEED, rounds=4).run())
    assert outcome.is_clean, "\n".join(describe(outcome))
    # A run in which nothing happened proves nothing.
    assert outcome.counts["kills"] > 4
    assert outcome.counts["kills during start"] >= 1
    assert outcome.counts["hour changes"] >= 1
    assert outcome.counts["checks of the files"] >= 2
    assert outcome.verdict.delivered > 100
    assert outcome.verdict.cancelled > 10
    assert outcome.counts["acknowledged"] > 50
