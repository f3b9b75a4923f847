"""The command line that the commands of parts are tested with is that of all commands."""

from tests.unit.cli.conftest import cli

__all__ = ["cli"]
