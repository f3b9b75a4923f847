"""A short run of scripts/chaos on real brokers and nodes."""

import json
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "chaos"
RUN_S = 280


@pytest.mark.kafka
@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_owner_is_struck(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    options = ["--rounds", "2", "--only", "owner: SIG", "--seed", "1", "--json", str(figures)]
    command = [str(SCRIPT), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(figures.read_text())
    assert (found["benchmark"], found["seed"]) == ("chaos", 1)
    strikes = {one["case"] for one in found["figures"] if one["case"].startswith("strike, ")}
    assert strikes == {"strike, owner: SIGKILL", "strike, owner: SIGSTOP"}
    values = {one["case"]: one.get("value") for one in found["figures"]}
    assert values["published"] and values["delivered"]
    assert values["owners"] >= 3  # of two shards


def test_help() -> None:
    done = subprocess.run([SCRIPT, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Strikes a cluster under load")
