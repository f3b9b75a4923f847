"""The API and the queries ask `Calls`, and reach for nothing behind it."""

import ast
from pathlib import Path

import pytest

import delayserver

PACKAGE = Path(delayserver.__file__).parent
MODULES = sorted([*PACKAGE.glob("api/**/*.py"), *PACKAGE.glob("queries/**/*.py")])


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_nothing_reaches_for_the_engine(path: Path) -> None:
    tree = ast.parse(path.read_text())
    names = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    assert not {"engine", "_engine", "_shard"}.intersection(names)
