"""The script of the chaos run, as far as it needs no brokers: a run is a command of its own."""

import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "chaos"


def test_help() -> None:
    done = subprocess.run([SCRIPT, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Strikes a cluster under load")
