"""Dockerfile, as far as it can be judged without Docker: hadolint has nothing to say, what it
copies is let through, what it installs are extras, and its health check is a command. That this
finds a server by HTTP and by HTTPS is tested in tests/integration/test_api_tls.py."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import typer

from delayserver.cli import make_app
from delayserver.cli.serve import misspelt
from delayserver.config import Settings

ROOT = Path(__file__).parents[3]
FILE = ROOT / "Dockerfile"
HADOLINT = str(Path(sys.executable).with_name("hadolint"))
WORDS = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", FILE.read_text(), flags=re.MULTILINE))
"""A line for each instruction."""


def instructions(name: str) -> list[str]:
    """All of a kind, without that word."""
    return re.findall(rf"^{name} (.+)$", WORDS, re.MULTILINE)


def lint(text: str) -> str:
    done = subprocess.run(
        [HADOLINT, "--no-color", "-"],
        input=text,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout


def test_hadolint_has_nothing_to_say() -> None:
    assert lint(FILE.read_text()) == ""
    assert "DL3002" in lint(FILE.read_text() + "USER root\n")


def test_dependencies_are_a_layer_before_the_sources() -> None:
    """A change of the server's own files installs no package again."""
    build = WORDS.partition("FROM python:3.11-slim\n")[0]
    lines = [line for line in build.splitlines() if line.startswith(("COPY", "RUN"))]
    dependencies = next(n for n, line in enumerate(lines) if "--constraint" in line)
    sources = next(n for n, line in enumerate(lines) if line.startswith("COPY delayserver"))
    assert dependencies < sources
    assert "--no-deps" in lines[-1]


def test_what_is_copied_is_there_and_is_let_through() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for line in instructions("COPY"):
        if line.startswith("--from"):
            continue
        *names, target = line.split()
        for name in names:
            path = f"{name}/constraints.txt" if name == "scripts" else name
            assert (ROOT / path).exists() and f"!{path}" in ignored, line
        assert target


def test_what_is_installed_are_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r'"\.\[(.+)\]"', WORDS)
    assert {*extras.split(",")} <= {*project["optional-dependencies"]}
    listed = ", ".join(f"`{one}`" for one in extras.split(",")[:-1])
    text = (ROOT / "docs/deploy.md").read_text()
    assert f"{listed} and `{extras.split(',')[-1]}`" in text


def test_what_it_sets_are_settings() -> None:
    variables = dict(
        word.split("=", 1) for line in instructions("ENV") for word in line.split() if "=" in word
    )
    own = {name: value for name, value in variables.items() if name.startswith("DELAYSERVER_")}
    assert misspelt(own) == []
    settings: dict[str, Any] = {
        name.removeprefix("DELAYSERVER_").lower(): value for name, value in own.items()
    }
    assert Settings(**settings).port == int(instructions("EXPOSE")[0])
    assert instructions("VOLUME") == [own["DELAYSERVER_DATA_DIR"]]


def test_it_does_not_run_as_root() -> None:
    (user,) = instructions("USER")
    number, _, group = user.partition(":")
    assert int(number) > 0 and int(group) > 0
    (made,) = [line for line in instructions("RUN") if "useradd" in line]
    assert f"--uid {number} " in made and f"--gid {group} " in made


def test_the_health_check_is_a_command_and_what_it_starts_is_one() -> None:
    whole: Any = typer.main.get_command(make_app(["serve", "operations"]))
    (check,) = instructions("HEALTHCHECK")
    program, command, option = json.loads(check.partition(" CMD ")[2])
    assert program == "delayserver"
    assert option in {name for one in whole.commands[command].params for name in one.opts}
    (entry,) = instructions("ENTRYPOINT")
    assert json.loads(entry) == ["delayserver", "serve"]
