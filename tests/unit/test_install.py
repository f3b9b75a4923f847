"""An install without extras: the client library, and the two packages that it needs."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import httptools
import msgspec
import pytest

import delayserver
from delayserver.__main__ import NEEDED

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]

OF_THE_CLIENT = ("celery",)
"""Extras that need no server in the same place."""


def names(requirements):
    """Of packages."""
    return {requirement.partition(">")[0].partition("[")[0] for requirement in requirements}


@pytest.fixture
def run(tmp_path):
    """Runs a program that finds nothing but the standard library and what is installed then."""
    for package in (delayserver, httptools, msgspec):
        assert package.__file__ is not None
        home = Path(package.__file__).parent
        (tmp_path / home.name).symlink_to(home)

    def run(program, *arguments):
        code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {program}"
        command = [sys.executable, "-I", "-S", "-c", code, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    return run


def test_the_packages_of_the_client_are_those_of_a_plain_install():
    assert names(PROJECT["dependencies"]) == {"httptools", "msgspec"}
    assert set(NEEDED) <= names(PROJECT["optional-dependencies"]["server"])
    for extra, requirements in PROJECT["optional-dependencies"].items():
        if extra not in ("server", *OF_THE_CLIENT):
            assert any(re.match(r"delayserver\[.*\bserver\]", one) for one in requirements)


def test_the_client_library_runs_on_them_alone(run):
    done = run(
        "import delayserver.client as c; p = c.Client('http://127.0.0.1:1', retry=c.NO_RETRIES)\n"
        "try: p.messages.publish('s', {'a': [1]}, delay='1s')\n"
        "except c.UnreachableError: print('ran')\n"
        "p.consumer().subscribe('s')(print); p.close()"
    )
    assert (done.stdout, done.stderr) == ("ran\n", "")


def test_the_command_says_what_to_install(run):
    done = run("from delayserver.__main__ import main; main()", "serve")
    assert done.returncode == 1
    assert "pip install 'delayserver[server]'" in done.stderr
    assert "Traceback" not in done.stderr
