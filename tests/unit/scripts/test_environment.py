"""scripts/environment.sh installs the missing needs, only these, and all of them at once.

Debian, pip, uv and Maven are programs of the test, which write down how they were called."""

import os
import shutil
import signal
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]
SHIPPED = (
    "pyproject.toml",
    "scripts/constraints.txt",
    "scripts/environment.sh",
    "scripts/kafka.pom.xml",
    "scripts/s3.txt",
    "scripts/spark-kafka.pom.xml",
)
TABLE = "a prog-a pkg-a the program A\nb prog-b pkg-b the program B\nmaven mvn maven Maven"
TIMEOUT_S = 60.0

APT = """
    echo "apt-get $*" >>"$CALLS"
    case "$*" in
      *install*)
        echo "apt says a lot"
        if [ -e "$BIN/apt-fails" ]; then exit 100; fi
        for name in prog-a prog-b; do
          printf '#!/bin/sh\\n' >"$BIN/$name" && chmod +x "$BIN/$name"
          echo "pmstatus:pkg-${name#prog-}:50.0:Installed pkg-${name#prog-} (amd64)" >&3
        done ;;
    esac
"""
MAVEN = """
    echo "mvn $*" >>"$CALLS"
    for word; do
      case $word in -DoutputDirectory=*) touch "${word#*=}/a.jar" ;; esac
    done
"""
JAVA = "echo 'openjdk version \"17.0.1\"' >&2"
PYTHON = """
    echo "python $*" >>"$CALLS"
    case "$*" in
      "-m venv --clear "*)
        mkdir -p "$4/bin" && cp "$0" "$4/bin/python" && cp "$BIN/uv" "$4/bin/uv" ;;
      *sys.executable*) command -v "$0" ;;
      *"pip config list") echo ":env:.find-links='/a /b'" ;;
      *"--progress-bar off --find-links"*)
        if [ -e "$BIN/pip-fails" ]; then echo "pip says why"; exit 1; fi ;;
    esac
"""
UV = """
    echo "uv $* UV_FIND_LINKS=${UV_FIND_LINKS:-}" >>"$CALLS"
    if [ -e "$BIN/uv-fails" ]; then echo "uv says why"; exit 1; fi
"""


class Machine:
    """A tree with the scripts, and programs that a script finds there."""

    def __init__(self, directory: Path) -> None:
        self.tree = directory / "tree"
        self.bin = directory / "bin"
        self.calls_file = directory / "calls"
        self.policy = directory / "policy-rc.d"
        self.cache = directory / "cache"
        self.bin.mkdir()
        for name in SHIPPED:
            (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.tree / name)
        self.add("id", "echo 0")
        self.add("apt-get", APT)
        self.add("java", JAVA)
        self.add("mvn", MAVEN)
        self.add("python3.11", PYTHON)
        self.add("uv", UV)

    def add(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text("#!/bin/sh\n" + textwrap.dedent(text))
        path.chmod(0o755)

    def fail(self, name: str) -> None:
        (self.bin / f"{name}-fails").touch()

    def command(self, script: str) -> tuple[list[str], dict[str, str]]:
        head = f"source scripts/environment.sh; policy={self.policy}; debian_programs='{TABLE}'; "
        environment = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "XDG_CACHE_HOME": str(self.cache),
            "BIN": str(self.bin),
            "CALLS": str(self.calls_file),
        }
        return ["bash", "-euo", "pipefail", "-c", head + script], environment

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        words, environment = self.command(script)
        return subprocess.run(
            words,
            cwd=self.tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    def calls(self, program: str) -> list[str]:
        """How a program was called."""
        lines = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        return [line for line in lines if line.startswith(f"{program} ")]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_all_is_installed_at_once_and_then_it_is_silent(machine: Machine) -> None:
    script = "ensure_all a b python:dev kafka s3; echo $kafka_jars/*.jar $s3_server"
    first = machine.run(script)
    assert first.returncode == 0, first.stderr
    update, install = machine.calls("apt-get")
    assert update.endswith(" update")
    assert install.split()[-3:-2] == ["install"] and install.split()[-2:] in (
        ["pkg-a", "pkg-b"],
        ["pkg-b", "pkg-a"],
    )
    assert not machine.policy.exists()
    (fetched,) = machine.calls("mvn")
    assert "kafka.pom.xml" in fetched
    s3, project = sorted(machine.calls("uv"), key=lambda line: "--editable" in line)
    assert "--requirement" in s3 and "--editable .[server,dev]" in project
    assert all(
        f"UV_FIND_LINKS=/a,/b,{machine.cache}/delayserver/wheels" in line for line in (s3, project)
    )
    lines = first.stderr.splitlines()
    assert lines[0] == "To install:"
    planned = [line.split()[0] for line in lines[1:6]]
    assert planned == ["a", "b", "python", "kafka", "s3"]
    ended = [line.split() for line in lines if line.startswith("[")]
    assert [words[0] for words in ended] == [f"[{n}/5]" for n in range(1, 6)]
    assert {words[1].rstrip(":") for words in ended} == set(planned)
    again = machine.run(script)
    assert (again.stdout, again.stderr, again.returncode) == (first.stdout, "", 0)
    assert first.stdout.split()[0].endswith("/a.jar")
    assert len(machine.calls("apt-get")) == 2


def test_only_the_missing_are_installed(machine: Machine) -> None:
    machine.add("prog-a", "")
    done = machine.run("ensure_all a b")
    assert done.returncode == 0, done.stderr
    assert machine.calls("apt-get")[1].split()[-2:] == ["install", "pkg-b"]
    assert "pkg-a" not in done.stderr


def test_an_apt_that_fails_is_shown_and_jars_are_not_begun(machine: Machine) -> None:
    machine.fail("apt")
    (machine.bin / "mvn").rename(machine.bin / "gone")
    done = machine.run(
        "debian_programs=${debian_programs/ mvn / no-maven }; ensure_all a kafka python"
    )
    assert done.returncode == 1
    assert "apt says a lot" in done.stderr
    assert "On Debian and Ubuntu: apt-get install " in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: not everything is installed")
    assert "python: installed" in done.stderr
    assert machine.calls("mvn") == []


def test_without_root_it_says_what_to_install(machine: Machine) -> None:
    machine.add("id", "echo 1000")
    done = machine.run("ensure_all a b python")
    assert done.returncode == 1
    assert done.stderr == (
        "error: missing: the program A; the program B; "
        "on Debian and Ubuntu: apt-get install pkg-a pkg-b\n"
    )
    assert machine.calls("apt-get") == machine.calls("uv") == []


def test_pip_does_it_where_uv_fails(machine: Machine) -> None:
    machine.fail("uv")
    done = machine.run("ensure_environment dev")
    assert done.returncode == 0, done.stderr
    assert "pip installs them" in done.stderr
    assert any("--editable .[server,dev]" in call for call in machine.calls("python"))
    machine.fail("pip")
    failed = machine.run("ensure_environment spark")
    assert failed.returncode == 1
    assert "uv says why" in failed.stderr and "pip says why" in failed.stderr
    assert not (machine.tree / ".venv/.installed-spark").exists()


def test_a_need_that_does_not_exist_is_named(machine: Machine) -> None:
    assert "has no need 'c'" in machine.run("ensure_all c").stderr


def interrupt(script: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does it."""
    os.killpg(script.pid, signal.SIGINT)


@pytest.mark.parametrize("end", [interrupt, subprocess.Popen.terminate, subprocess.Popen.kill])
def test_its_end_is_that_of_all_programs(
    machine: Machine, end: Callable[[subprocess.Popen[bytes]], None]
) -> None:
    machine.add("apt-get", 'echo $$ >"$BIN/pid"; sleep 300 & wait')
    words, environment = machine.command("ensure_all a")
    with subprocess.Popen(
        # Where tests run in the background of a shell, they ignore Ctrl-C, and so would the script.
        ["env", "--default-signal=INT", *words],
        cwd=machine.tree,
        env=environment,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as script:
        pid_file = machine.bin / "pid"
        pid = wait_until(lambda: pid_file.exists() and pid_file.read_text().strip(), TIMEOUT_S)
        apt = Path(f"/proc/{pid}")
        end(script)
        assert script.wait(TIMEOUT_S) != 0
    # A script that was killed has not waited for them.
    wait_until(lambda: not apt.exists() and not machine.policy.exists(), TIMEOUT_S)
