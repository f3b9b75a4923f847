"""The demo, run as a user runs it: a real server, really killed."""

import json
import os
import subprocess
import sys

import pytest

TIMEOUT_S = 60


@pytest.mark.crash
@pytest.mark.parametrize("shards", [1, 2])
def test_nothing_is_lost(shards):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DELAYSERVER_")}
    # Settings of another server on the machine do not reach the demo's.
    environment["DELAYSERVER_PORT"] = "no number"
    result = subprocess.run(
        [
            *(sys.executable, "-m", "delayserver", "demo", "--json"),
            *("--orders", "60", "--seconds", "4", "--seed", "7", "--shards", str(shards)),
        ],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout)
    assert found["published"] == 90
    assert found["cancelled"] + found["delivered"] == 90
    assert found["cancelled"] > 0
    for name in ("lost", "early", "fired_cancelled", "repeated_recorded", "other_id", "garbled"):
        assert found[name] == 0
    assert found["violations"] == []
    assert found["damage"] == []
    assert 0 < found["restart_s"] < TIMEOUT_S
