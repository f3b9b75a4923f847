"""A command whose options are fields of structs."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from delayserver.cli.command_options import CommandOptions, with_options


@dataclass(frozen=True, kw_only=True)
class Waiting(CommandOptions):
    wait: Annotated[int, typer.Option("--wait")]
    patient: Annotated[bool, typer.Option("--patient")] = False


@dataclass(frozen=True, kw_only=True)
class Naming(CommandOptions):
    names: Annotated[list[str] | None, typer.Option("--name", help="A name of it.")] = None


@with_options
def command(place: str, waiting: Waiting, *, naming: Naming, limit: int = 3) -> None:
    """Show them."""
    typer.echo(f"{place} {waiting} {naming} {limit}")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("here --wait 7", "here Waiting(wait=7, patient=False) Naming(names=None) 3\n"),
        (
            "here --name a --wait 0 --name b --patient --limit 4",
            "here Waiting(wait=0, patient=True) Naming(names=['a', 'b']) 4\n",
        ),
    ],
)
def test_fields_are_options(line: str, said: str) -> None:
    app = typer.Typer()
    app.command()(command)
    assert CliRunner().invoke(app, line.split()).output == said


def test_help_and_what_has_to_be_given() -> None:
    app = typer.Typer()
    app.command()(command)
    helped = CliRunner().invoke(app, ["--help"]).output
    assert "Show them." in helped
    assert "A name of it." in helped
    refused = CliRunner().invoke(app, ["here"])
    assert refused.exit_code == 2
    assert "Missing option '--wait'" in refused.output
