"""deploy/systemd/delayserver.service: systemd takes it, the command that it starts exists, and it
is shut up as well as docs/deploy.md says."""

import re
import subprocess
from pathlib import Path
from typing import Any

import typer

from delayserver.cli import make_app
from delayserver.config import Settings
from tests.sinks.programs import need

ROOT = Path(__file__).parents[3]
FILE = ROOT / "deploy/systemd/delayserver.service"
TEXT = FILE.read_text()
PROGRAM = "/opt/delayserver/bin/delayserver"
DRAIN_MS = Settings.model_fields["drain_ms"].default


def options(name: str) -> list[str]:
    """All values of an option."""
    return re.findall(rf"^{name}=(.*)$", TEXT, re.MULTILINE)


def analyze(*arguments: str) -> str:
    """What `systemd-analyze` says."""
    program = need("systemd-analyze", "ensure_systemd")
    done = subprocess.run(
        [program, "--no-pager", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout


def test_systemd_takes_it(tmp_path: Path) -> None:
    unit = tmp_path / FILE.name
    unit.write_text(TEXT.replace(PROGRAM, "/bin/true"))
    assert analyze("verify", str(unit)) == ""
    unit.write_text(unit.read_text().replace("ProtectHome=", "ProtectHouse="))
    assert "ProtectHouse" in analyze("verify", str(unit))


def test_it_is_shut_up() -> None:
    """Versions of systemd differ in what they look at."""
    said = analyze("security", "--offline=true", str(FILE))
    (exposure,) = re.findall(r"exposure level for \S+: ([\d.]+)", said)
    assert float(exposure) < 2
    assert "an exposure below 2 of 10" in (ROOT / "docs/deploy.md").read_text()


def test_what_it_starts_is_a_command() -> None:
    (line,) = options("ExecStart")
    program, command, option, file = line.split()
    assert (program, command, option, file) == (
        PROGRAM,
        "serve",
        "--config",
        "/etc/delayserver/server.toml",
    )
    whole: Any = typer.main.get_command(make_app(["serve", "operations"]))
    assert option in {name for one in whole.commands[command].params for name in one.opts}


def test_its_data_are_in_the_directory_that_systemd_makes() -> None:
    (directory,) = options("StateDirectory")
    assert options("Environment") == [f"DELAYSERVER_DATA_DIR=/var/lib/{directory}"]


def test_a_stop_is_waited_for_and_what_needs_a_person_is_not_started_again() -> None:
    (timeout_s,) = map(int, options("TimeoutStopSec"))
    assert timeout_s * 1000 >= 2 * DRAIN_MS
    assert options("RestartPreventExitStatus") == ["1 2"]
    operations = (ROOT / "docs/operations.md").read_text()
    statuses = re.findall(r"^\| (\d+) \| ", operations, re.MULTILINE)
    assert {"0", "1", "2", "70", "75"} <= set(statuses)
