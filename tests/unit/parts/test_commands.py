"""The commands of parts: each stands in the help, and is found without the import of another."""

from typer.main import get_command

from delayserver.cli import make_app, modules_of
from delayserver.parts.commands import COMMANDS


def test_each_command_of_a_part_comes_from_its_module_alone() -> None:
    for module, names in COMMANDS.items():
        for name in names:
            assert modules_of([name, "list"]) == (module,)
        found = get_command(make_app([module]))
        assert set(found.commands) == set(names)  # type: ignore[attr-defined]
