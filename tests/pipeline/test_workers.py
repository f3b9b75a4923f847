"""What Spark's workers are spared."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "use",
    [
        "from delayserver.pipeline.logs.source import DelayLog; DelayLog({'path': '/'})",
        "from delayserver.pipeline.states.states import DelayState; DelayState({'path': '/'})",
    ],
)
def test_garbage_is_not_looked_for_in_what_was_imported(use: str) -> None:
    script = f"""
import gc
{use}
assert gc.get_freeze_count() > 10_000
assert len(gc.get_objects()) < 1_000
"""
    subprocess.run([sys.executable, "-c", script], check=True)
